"""AOL's and RKO's own claims: bounds that hold, and that cannot be improved."""

import pytest
import torch

import trysquare as ts
from tests.oracle import dense, spectrum

CASES = [
    ((4, 4), {}), ((4, 3), {"dilation": 2}), ((3, 5), {}), ((2, 12), {"stride": 2}), ((2, 12), {"stride": (2, 1)}),
    ((2, 9), {"stride": 2, "dilation": 3}), ((2, 9), {"stride": 4, "dilation": 2}), ((4, 8), {"groups": 2}),
]  # fmt: skip


def layer_of(channels, options, **more):
    return ts.OrthoConv2d(*channels, 3, dtype=torch.float64, bias=False, **options, **more)


@pytest.mark.parametrize(("channels", "options"), CASES)
@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_aol_is_lipschitz_with_any_kernel_and_weights(channels, options, mode):
    for steps in (1, 3):
        layer = layer_of(channels, options, method="aol", steps=steps, padding_mode=mode)
        for tensor in layer.free_tensors:
            torch.nn.init.normal_(tensor)
        assert spectrum(layer, (channels[0], 12, 12)).max() < 1 + 1e-11


@pytest.mark.parametrize(("channels", "options"), CASES)
def test_aol_column_sum_bound_on_the_dense_matrix(channels, options):
    """The factors are those of the lemma, taken from the dense matrix: ``(Σ_j |AᵀA|_ij)^(-1/2)``."""
    layer = layer_of(channels, options, method="aol", q=False)
    torch.nn.init.normal_(layer.free_tensors[0])
    plain = ts.to_torch(layer)
    with torch.no_grad():
        (plain if isinstance(plain, torch.nn.Conv2d) else plain[1]).weight.copy_(layer.free_tensors[0].flatten(0, 1))
    size = 11 if layer.stride == (1, 1) else 16
    basis = torch.eye(channels[0] * size**2, dtype=torch.float64).view(-1, channels[0], size, size)
    with torch.no_grad():
        matrix = plain(basis).flatten(1).T
    if not layer.parametrization.scales_outputs:
        sums = (matrix.T @ matrix).abs().sum(1)
        scaled = matrix * torch.where(sums > 0, sums, 1.0).rsqrt()
    else:
        scaled = (matrix @ matrix.T).abs().sum(1).rsqrt()[:, None] * matrix
    torch.testing.assert_close(dense(layer, (channels[0], size, size)), scaled)


def test_aol_is_the_identity_on_orthogonal_kernels():
    layer = ts.OrthoConv2d(4, 4, 3, method="aol", dtype=torch.float64)
    kernel = ts.OrthoConv2d(4, 4, 3, dtype=torch.float64).weight.detach()
    free = [kernel[None], torch.zeros(1, 4, dtype=torch.float64)]
    torch.testing.assert_close(layer.parametrization.build(*free), kernel)


def test_more_steps_come_closer_to_one():
    def weakest(steps):
        torch.manual_seed(0)
        layer = ts.OrthoConv2d(4, 4, 3, method="aol", steps=steps, dtype=torch.float64)
        torch.nn.init.normal_(layer.free_tensors[0])
        return float(spectrum(layer, (4, 6, 6)).square().mean())

    assert weakest(1) < weakest(2) < weakest(4)


@pytest.mark.parametrize("channels", [(4, 4), (2, 12)])
def test_q_really_acts(channels):
    layer = ts.OrthoConv2d(*channels, 3, method="aol", dtype=torch.float64)
    kernel, weights = layer.free_tensors
    torch.nn.init.normal_(kernel)
    before = spectrum(layer, (channels[0], 6, 6))
    layer.weight.square().sum().backward()
    assert weights.grad.abs().max() > 1e-3
    with torch.no_grad():
        weights[0, 0] = 1.0
    assert (spectrum(layer, (channels[0], 6, 6)) - before).abs().max() > 1e-2
    # The gain of a learned q: more of the energy gets through.
    optimizer = torch.optim.Adam([weights], 0.1)
    start = float(layer.weight.detach().square().sum())
    for _ in range(50):
        optimizer.zero_grad()
        (-layer.weight.square().sum()).backward()
        optimizer.step()
    assert layer.weight.detach().square().sum() > 1.01 * start
    assert spectrum(layer, (channels[0], 6, 6)).max() < 1 + 1e-11


def test_aol_refuses_steps_without_a_meaning():
    with pytest.raises(ValueError, match="steps=0"):
        ts.OrthoConv2d(4, 4, 3, method="aol", steps=0)


@pytest.mark.parametrize(("channels", "options"), CASES)
def test_rko_is_lipschitz_in_the_worst_case(channels, options):
    """One row of equal entries at each tap is amplified by exactly the overlap, so no larger scale is safe."""
    layer = layer_of(channels, options, method="rko")
    assert spectrum(layer, (channels[0], 12, 12)).max() < 1 + 1e-11
    matrix = layer.free_tensors[0]
    with torch.no_grad():
        matrix[:, 0] = 0.0
        matrix[:, 0].unflatten(-1, (9, -1))[..., 0] = 1.0
    largest = float(spectrum(layer, (channels[0], 12, 12)).max())
    assert largest < 1 + 1e-11
    if matrix.shape[1] <= matrix.shape[2] and set(layer.stride) == {1}:
        assert largest > 1 - 1e-11


@pytest.mark.parametrize(
    ("layer", "orthogonal"),
    [
        (ts.OrthoConv2d(3, 12, 2, stride=2, method="rko"), True),
        (ts.OrthoConv2d(3, 5, 2, stride=2, method="rko"), True),
        (ts.OrthoConv2d(3, 20, 2, stride=2, method="rko"), True),
        (ts.OrthoConv2d(3, 5, 2, stride=3, method="rko"), True),
        (ts.OrthoConv2d(3, 3, 2, stride=4, dilation=2, method="rko"), True),
        (ts.OrthoConv2d(3, 13, 2, stride=3, method="rko"), False), (ts.OrthoConv2d(3, 3, 2, method="rko"), False),
        (ts.OrthoConv2d(3, 3, 2, stride=2, dilation=2, method="rko"), False),
    ],
)  # fmt: skip
def test_rko_is_orthogonal_where_windows_do_not_overlap(layer, orthogonal):
    assert layer.parametrization.is_orthogonal == orthogonal
    values = spectrum(layer.double(), (3, 12, 12))
    assert bool((values - 1).abs().max() < 1e-11) == orthogonal


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
def test_linear_layers_that_are_only_normed(shape):
    layer = ts.SpectralLinear(*shape).double()
    with torch.no_grad():
        for scale in (1.0, 1e-20, 1e20):
            layer.free_tensors[0].copy_(torch.randn_like(layer.free_tensors[0]) * scale)
            assert 0.85 < float(torch.linalg.matrix_norm(layer.weight, 2)) <= 1 + 1e-12
    wanted = layer.weight.detach().clone()
    layer.reset_parameters()
    values = torch.linalg.svdvals(layer.weight.detach())
    assert values.max() - values.min() < 1e-9
    layer.weight = wanted
    torch.testing.assert_close(layer.weight, wanted)
    with pytest.raises(ValueError, match="amplifies"):
        layer.weight = 2 * wanted
