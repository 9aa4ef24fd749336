"""The exponential of square matrices, with derivatives that cost twice what the exponential costs.

torch's own is differentiated by the exponential of a matrix of twice the size, eight times the work. Here products are
differentiated one by one: with ``M = A / 2ˢ`` small enough for the Taylor polynomial of degree 12 to be exact to
rounding, ``exp(A)`` is ``s`` squarings of

    ``exp(M) = Σ_{j < 4} Mʲ / j! + M⁴ (Σ_{j < 4} Mʲ / (4 + j)! + M⁴ Σ_{j <= 4} Mʲ / (8 + j)!)``

which takes five products. What each product needs is kept for backward: five matrices, and one more for each
squaring.
"""

from __future__ import annotations

from math import factorial

import torch
from torch import Tensor

from trysquare.nn.linalg.precision import host_can_look

# Size r up to which the rest of the derivative's series, Σ_{k >= 12} rᵏ / k!, is below the rounding of the dtype.
_REACH = {torch.float32: 1.3, torch.float64: 0.25}
# Row ``i`` has those of ``Mʲ``, ``j <= 4``, in the ``i``-th sum.
_COEFFICIENTS = torch.tensor(
    [[1 / factorial(4 * i + j) if i == 2 or j < 4 else 0.0 for j in range(5)] for i in range(3)],
    dtype=torch.float64,
    device="cpu",
)


def matrix_exponential(matrix: Tensor) -> Tensor:
    """``exp`` of ``(..., n, n)``, real or complex; torch's own where the host cannot choose the number of squarings."""
    if not host_can_look(matrix):
        return torch.linalg.matrix_exp(matrix)
    second = torch.matmul(matrix, matrix)
    third, fourth = torch.matmul(second, matrix), torch.matmul(second, second)
    squarings = _squarings(third.detach(), fourth.detach())
    scale = 0.5**squarings
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    step = scale**4 * fourth
    powers = torch.stack([eye, scale * matrix, scale**2 * second, scale**3 * third, step])
    low, middle, high = torch.tensordot(_COEFFICIENTS.to(matrix), powers, 1)
    result = low + torch.matmul(step, middle + torch.matmul(step, high))
    for number in range(int(squarings.amax()) if squarings.numel() else 0):
        result = torch.where(squarings > number, torch.matmul(result, result), result)
    return result


def _squarings(third: Tensor, fourth: Tensor) -> Tensor:
    """Return how often to halve each matrix with these powers: ``(..., 1, 1)``.

    ``α = max(‖A³‖^(1/3), ‖A⁴‖^(1/4))`` can be far below ``‖A‖``, and ``‖Aᵏ‖ <= αᵏ`` for ``k >= 6``, since such a ``k``
    is a sum of threes and fours.
    """
    roots = ((3, third), (4, fourth))
    sizes = torch.stack([torch.linalg.matrix_norm(power, keepdim=True) ** (1 / k) for k, power in roots]).amax(0)
    finite = torch.where(sizes.isfinite(), sizes, 0.0)  # what is not finite stays so, with any number of squarings
    return torch.frexp(finite / _REACH[sizes.dtype]).exponent.clamp_min(0).to(sizes.dtype)
