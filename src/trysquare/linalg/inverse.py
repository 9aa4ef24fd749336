"""Inverses of batches of matrices, also where torch's batched factorisation cannot be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

# On the CPU, torch factorises the matrices of a batch in several threads at once. From 151 rows on that gives wrong
# factors, mostly without an error, if `torch.set_num_threads` was called before (pytorch issue 142815).
_MOST_ROWS = 128


def inverse(matrix: Tensor) -> Tensor:
    """Inverse of each matrix of a batch ``(..., n, n)``; what it is for singular ones is not defined.

    Large ones on the CPU come one by one, but in a compiled graph, which would have a copy of the code for each.
    """
    batch = matrix.shape[:-2].numel()
    together = batch < 2 or matrix.shape[-1] <= _MOST_ROWS or matrix.device.type != "cpu"
    if together or torch.compiler.is_compiling():
        return torch.linalg.inv_ex(matrix).inverse
    singles = matrix.reshape(batch, *matrix.shape[-2:]).unbind()
    return torch.stack([torch.linalg.inv_ex(single).inverse for single in singles]).view(matrix.shape)
