"""Bounds are never below a dense singular value decomposition in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from trysquare.nn.linalg import bounds
from trysquare.nn.linalg.bounds import (
    any_size_bound,
    circular_gram_bound,
    circular_range,
    gram_bound,
    kernel_gram_bound,
    normalized,
    rescaled_up,
    singular_value_range,
)
from trysquare.nn.linalg.spectrum import circular_singular_values, polyphase


def random_orthogonal(n):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q


def adversarial(n, m, k):
    """Kernels whose norms are easy to miss."""
    normal = torch.randn(n, m, k, k, dtype=torch.float64)
    peak = torch.zeros_like(normal)
    wave = torch.cos(torch.arange(k) * 2.1)[:, None] * torch.cos(torch.arange(k) * 0.7)
    peak[0, 0] = wave
    near = torch.zeros_like(normal)
    side = min(n, m)
    near[:side, :side, 0, 0] = random_orthogonal(side)
    line = torch.einsum("n,m,k,l->nmkl", *(torch.randn(s, dtype=torch.float64) for s in (n, m, k, k)))
    checkered = torch.ones_like(normal) * torch.tensor([1.0, -1.0]).repeat(k)[:k]
    return {
        "normal": normal, "constant": torch.ones_like(normal), "one frequency": peak, "checkered": checkered,
        "orthogonal": near, "nearly orthogonal": near + 1e-9 * normal, "rank one": line,
        "tiny": normal * 1e-200, "huge": normal * 1e200, "denormal": normal * 1e-320, "zero": torch.zeros_like(normal),
        "mixed": normal * 10.0 ** (torch.rand_like(normal) * 40 - 20), "float32": normal.float().double(),
    }  # fmt: skip


def dense_norm(kernel, size, stride):
    """Norm of the circular convolution from its response to every basis vector."""
    _, m, k, _ = kernel.shape
    basis = torch.eye(m * size * size, dtype=torch.float64).view(-1, m, size, size)
    padded = F.pad(basis, (0, k - 1, 0, k - 1), mode="circular")
    return float(torch.linalg.matrix_norm(F.conv2d(padded, kernel, stride=stride).flatten(1), 2))


def all_bounds(kernel, sizes, stride):
    scaled, exponent = normalized(kernel)
    ones = (1,) * len(stride)
    coarse = tuple(size // s for size, s in zip(sizes, stride, strict=True))
    convolution = polyphase(scaled, stride, ones, 1)
    found = {
        "factorised": circular_range(convolution, coarse)[1],
        "any size": any_size_bound(convolution, 1e6),
        "gram": circular_gram_bound(convolution, coarse, 5),
        "kernel gram": kernel_gram_bound(convolution, 2),
    }
    return {name: rescaled_up(bound, exponent) for name, bound in found.items()}


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 2)])
def test_never_below_the_norm_on_thousands_of_kernels(stride):
    for round_ in range(56):
        n, m, k = 1 + round_ % 4, 1 + round_ % 3, 1 + round_ % 3
        for name, kernel in adversarial(n, m, k).items():
            scaled, exponent = normalized(kernel)  # the oracle itself must not overflow
            top = dense_norm(scaled, 4, stride)
            for how, bound in all_bounds(kernel, (4, 4), stride).items():
                assert bound >= math.ldexp(top, exponent) * (1 - 1e-14), (name, how)
            if name == "zero":
                assert bound == 0


def test_tight_where_the_layer_is_orthogonal():
    for n in (2, 5, 16):
        kernel = random_orthogonal(n)[..., None, None]
        bounds = all_bounds(kernel, (4, 4), (1, 1))
        assert bounds["factorised"] - 1 < 1e-6
        assert bounds["any size"] - 1 < 1e-6


def test_ranges_hold_all_singular_values():
    for shape in ((40, 3, 5), (40, 5, 3), (3, 90, 70), (2, 1, 1)):
        matrices = torch.randn(*shape, dtype=torch.complex128)
        values = torch.linalg.svdvals(matrices)
        low, high, found = singular_value_range(matrices.split(7))
        assert float(values.max()) * (1 - 1e-6) < found <= float(values.max()) * (1 + 1e-12)
        assert low <= float(values.min()) <= float(values.max()) <= high
        assert low > float(values.min()) * (1 - 1e-4) - 1e-3
        assert high < float(values.max()) * (1 + 1e-6)


def test_gram_iteration_on_thousands_of_matrices():
    for scale in (1e-300, 1e-20, 1.0, 1e20, 1e300):
        matrices = torch.randn(400, 4, 6, dtype=torch.float64)
        matrices[:100] = matrices[:100, :, :1] * matrices[:100, :1]
        top = torch.linalg.svdvals(matrices)[:, 0]
        bounds = gram_bound(matrices * scale, 10)
        assert bool((bounds >= top * scale).all())
        assert bool((bounds <= top * scale * 1.002).all())
    assert float(gram_bound(torch.zeros(2, 2))) == 0
    turned = torch.polar(torch.ones(3, 3), torch.rand(3, 3)).to(torch.complex128)
    assert float(gram_bound(turned, 12)) == pytest.approx(float(torch.linalg.matrix_norm(turned, 2)), rel=1e-3)
    with pytest.raises(ValueError, match="at least 1"):
        gram_bound(torch.zeros(2, 2), 0)
    assert float(gram_bound(torch.full((1, 1), 5e-324, dtype=torch.float64))) >= 5e-324


def test_bound_for_every_size_holds_for_every_size():
    for stride in ((1,), (2,), (3,)):
        kernel = torch.randn(3, 2, 5, dtype=torch.float64)
        bound = any_size_bound(polyphase(kernel, stride, (1,), 1, any_size=True), 1e9)
        tops = [
            float(circular_singular_values(kernel, (size * stride[0],), stride, (1,), 1)[0])
            for size in (*range(1, 30), 200, 1024)
        ]
        assert max(tops) <= bound < max(tops) * 1.002


def test_gram_iteration_of_kernels_gets_tighter():
    kernel = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    convolution = polyphase(kernel, (1, 1), (1, 1), 1)
    top = float(circular_singular_values(kernel, (64, 64), (1, 1), (1, 1), 1)[0])
    bounds = [kernel_gram_bound(convolution, steps) for steps in range(6)]
    assert bounds == sorted(bounds, reverse=True)
    assert top <= bounds[-1] < 1.25 * top


def test_scaling_rounds_up():
    assert rescaled_up(1.0, 5000) == math.inf
    assert rescaled_up(0.75, -1074) >= 0.75 * 2**-1074
    assert rescaled_up(0.0, 3) == 0


def test_wide_orthogonal_matrices_have_tight_bounds_whichever_is_looked_at_first():
    exact = torch.stack([random_orthogonal(128) for _ in range(12)])
    for _ in range(4):
        rounded = exact[torch.randperm(12)] + 5e-8 * torch.randn_like(exact)
        low, high, _ = singular_value_range([rounded])
        values = torch.linalg.svdvals(rounded)
        assert low <= float(values.min())
        assert float(values.max()) <= high <= 1 + 1e-5


def test_a_first_guess_that_is_too_low_costs_no_more_than_the_stated_margin(monkeypatch):
    matrix = torch.randn(1, 160, 160, dtype=torch.float64)
    top = float(torch.linalg.matrix_norm(matrix[0], 2))
    monkeypatch.setattr(bounds, "_top_eigenvalue", lambda gram: top**2 * (1 - 2e-4))
    assert top <= singular_value_range([matrix], lowest=False).high < top * (1 + 3e-4)
