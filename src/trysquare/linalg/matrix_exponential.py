"""The exponential of square matrices, with derivatives that cost twice what the exponential costs.

torch's own is differentiated by the exponential of a matrix of twice the size, eight times the work. Here products are
differentiated one by one: with ``M = A / 2ˢ`` small enough for the Taylor polynomial of degree 12 to be exact to
rounding, ``exp(A)`` is ``s`` squarings of

    ``exp(M) = Σ_{j < 4} Mʲ / j! + M⁴ (Σ_{j < 4} Mʲ / (4 + j)! + M⁴ Σ_{j <= 4} Mʲ / (8 + j)!)``

which takes five products. A batch is squared as often as its largest matrix has to be. What each product needs is kept
for backward: five matrices, and one more for each squaring.
"""

from __future__ import annotations

from math import factorial, frexp

import torch
from torch import Tensor

from trysquare.linalg.precision import host_can_look

# Size r up to which the rest of the derivative's series, Σ_{k >= 12} rᵏ / k!, is below the rounding of the dtype.
_REACH = {torch.float32: 1.3, torch.float64: 0.25}


def matrix_exponential(matrix: Tensor) -> Tensor:
    """``exp`` of ``(..., n, n)``, real or complex; torch's own where the host cannot choose the number of squarings."""
    if not host_can_look(matrix):
        return torch.linalg.matrix_exp(matrix)
    second = torch.matmul(matrix, matrix)
    third, fourth = torch.matmul(second, matrix), torch.matmul(second, second)
    squarings = _squarings(third.detach(), fourth.detach())
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    powers = torch.stack([eye, matrix, second, third, fourth])
    low, middle, high = torch.tensordot(_coefficients(0.5**squarings).to(matrix), powers, 1)
    step = 0.5 ** (4 * squarings) * fourth
    result = low + torch.matmul(step, middle + torch.matmul(step, high))
    for _ in range(squarings):
        result = torch.matmul(result, result)
    return result


def _squarings(third: Tensor, fourth: Tensor) -> int:
    """How often to halve the matrix with these powers.

    ``α = max(‖A³‖^(1/3), ‖A⁴‖^(1/4))`` can be far below ``‖A‖``, and ``‖Aᵏ‖ <= αᵏ`` for ``k >= 6``, since such a ``k``
    is a sum of threes and fours.
    """
    sizes = torch.stack([torch.linalg.matrix_norm(power) ** (1 / k) for k, power in ((3, third), (4, fourth))])
    finite = torch.where(sizes.isfinite(), sizes, 0.0)  # what is not stays so, with any number of squarings
    largest = float(finite.amax()) if third.numel() else 0.0
    return max(0, frexp(largest / _REACH[sizes.dtype])[1])


def _coefficients(scale: float) -> Tensor:
    """Row ``i`` has those of ``Aʲ``, ``j <= 4``, in the ``i``-th sum for ``M = scale A``."""
    rows = [[scale**j / factorial(4 * i + j) for j in range(5)] for i in range(3)]
    rows[0][4] = rows[1][4] = 0.0
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
