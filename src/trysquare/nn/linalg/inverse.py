"""Inverses of batches of matrices, also where torch's batched factorisation cannot be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from trysquare.nn.linalg.precision import host_can_look

# On the CPU, torch factorises the matrices of a batch in several threads at once. From 151 rows on that gives wrong
# factors, often without an error, if `torch.set_num_threads` was called before (pytorch issue 142815). This stays clear
# of that.
_MOST_ROWS = 128


def inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of each matrix of a batch ``(..., n, n)``; for singular ones it is not defined.

    Large ones on the CPU are inverted one by one. In a compiled graph, which would repeat its code for each, and under
    transforms, which hide batches, it is done by blocks. These are not exchanged: that is for matrices of positive
    definite Hermitian part, and less precise for large entries.
    """
    if matrix.shape[-1] <= _MOST_ROWS or matrix.device.type != "cpu":
        return torch.linalg.inv_ex(matrix).inverse
    return _one_by_one(matrix) if host_can_look(matrix) else _by_blocks(matrix)


def _one_by_one(matrix: Tensor) -> Tensor:
    singles = matrix.reshape(-1, *matrix.shape[-2:]).unbind() if matrix.numel() else ()
    inverses = [torch.linalg.inv_ex(single).inverse for single in singles]
    return torch.stack(inverses).view(matrix.shape) if inverses else matrix.clone()


def _by_blocks(matrix: Tensor) -> Tensor:
    """``[[A, B], [C, D]]`` by the inverses of ``A`` and of ``D - C A⁻¹ B``."""
    rows = matrix.shape[-1]
    if rows <= _MOST_ROWS:
        return torch.linalg.inv_ex(matrix).inverse
    sizes = [rows // 2, rows - rows // 2]
    (a, b), (c, d) = (half.split(sizes, dim=-1) for half in matrix.split(sizes, dim=-2))
    first = _by_blocks(a)
    left, right = torch.matmul(c, first), torch.matmul(first, b)
    last = _by_blocks(d - torch.matmul(left, b))
    across = torch.matmul(last, left)
    upper = torch.cat([first + torch.matmul(right, across), -torch.matmul(right, last)], dim=-1)
    return torch.cat([upper, torch.cat([-across, last], dim=-1)], dim=-2)
