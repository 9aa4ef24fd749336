"""The nearest weight that a layer can have, and weights that it cannot have."""

import time

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import distance_from_orthogonal


def polar(matrix):
    """Polar factor by Newton's iteration for the sign of ``[[0, A], [Aᵀ, 0]]``: no singular vectors."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    lengths, basis = torch.linalg.eigh(x @ x.mT)
    x = basis @ torch.diag(lengths.rsqrt()) @ basis.mT @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT


@pytest.mark.parametrize("orthogonalizer", ["cholesky", "qr", "newton_schulz", "bjorck"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_a_matrix_gets_its_polar_factor(shape, orthogonalizer):
    torch.manual_seed(0)
    wanted = torch.randn(shape, dtype=torch.float64)
    layer = ts.OrthoLinear(shape[1], shape[0], dtype=torch.float64, orthogonalizer=orthogonalizer)
    distance = layer.project_(wanted)
    torch.testing.assert_close(layer.weight, polar(wanted), atol=1e-9, rtol=0)
    assert distance == pytest.approx(float((polar(wanted) - wanted).norm() / wanted.norm()), rel=1e-9)


@pytest.mark.parametrize("orthogonalizer", ["cayley", "exponential"])
@pytest.mark.parametrize("size", [6, 16])
@pytest.mark.parametrize("seed", range(4))
def test_where_only_rotations_are_reached_it_is_near_to_the_nearest(orthogonalizer, size, seed):
    """Half of the matrices have a polar factor that is a reflection."""
    torch.manual_seed(seed)
    wanted = torch.randn(size, size, dtype=torch.float64)
    layer = ts.OrthoLinear(size, size, dtype=torch.float64, orthogonalizer=orthogonalizer)
    distance = layer.project_(wanted)
    lengths, basis = torch.linalg.eigh(wanted @ wanted.mT)
    signs = torch.ones(size, dtype=torch.float64)
    signs[0] = torch.linalg.det(wanted).sign()  # of the smallest singular value
    rotation = basis @ torch.diag(signs * lengths.rsqrt()) @ basis.mT @ wanted
    assert distance == pytest.approx(float((layer.weight.detach() - wanted).norm() / wanted.norm()), rel=1e-9)
    assert distance == pytest.approx(float((rotation - wanted).norm() / wanted.norm()), rel=1e-3)


def test_strided_windows_and_1x1_kernels_are_matrices():
    torch.manual_seed(0)
    for numbers in ((8, 5, 1, 1), (3, 12, 2, 2), (4, 6, 2, 2), (5, 8, 1, 1)):
        layer = ts.OrthoConv2d(*numbers, dtype=torch.float64)
        wanted = torch.randn_like(layer.weight)
        layer.project_(wanted)
        torch.testing.assert_close(layer.weight.flatten(1), polar(wanted.flatten(1)), atol=1e-8, rtol=0)


def test_transposed_and_grouped_layers():
    torch.manual_seed(0)
    layer = ts.OrthoConvTranspose2d(12, 3, 2, stride=2, dtype=torch.float64)
    wanted = torch.randn_like(layer.weight)
    layer.project_(wanted)
    torch.testing.assert_close(layer.weight.flatten(1), polar(wanted.flatten(1)), atol=1e-8, rtol=0)
    layer = ts.OrthoConv2d(8, 4, 1, groups=2, dtype=torch.float64)
    wanted = torch.randn_like(layer.weight)
    layer.project_(wanted)
    expected = torch.cat([polar(part.flatten(1)) for part in wanted.chunk(2)])
    torch.testing.assert_close(layer.weight.flatten(1), expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("method", ts.METHODS)
@pytest.mark.parametrize("numbers", [(4, 4, 3, 1), (4, 8, 3, 2), (3, 16, 3, 2), (6, 4, 3, 1)])
def test_a_kernel_comes_nearer_than_many_random_ones_and_stays_in_its_set(method, numbers):
    torch.manual_seed(0)
    layer = ts.OrthoConv2d(*numbers, method=method, dtype=torch.float64)
    wanted = torch.randn_like(layer.weight)
    wanted *= layer.weight.detach().norm() / wanted.norm()
    random = []
    for _ in range(50):
        layer.reset_parameters()
        random.append(float((layer.weight.detach() - wanted).norm() / wanted.norm()))
    distance = layer.project_(wanted, starts=1 if method == "aoc" else 3)
    assert distance == pytest.approx(float((layer.weight - wanted).detach().norm() / wanted.norm()), rel=1e-9)
    # SOC's kernels are large, 15x15, and their set is small: ten starts of 400 steps come no nearer than 0.982 times.
    assert distance < (0.985 if method == "soc" else 0.95) * min(random)
    if ts.METHODS[method].orthogonal and method != "soc":
        assert distance_from_orthogonal(layer, (numbers[0], 6, 6)) < 1e-9
    assert ts.singular_values(layer, (numbers[0], 6, 6)).max() < 1 + 1e-5


@pytest.mark.parametrize("numbers", [(6, 6, 3, 1), (4, 8, 3, 2), (8, 4, 5, 1), (3, 16, 3, 2)])
def test_what_the_layer_can_have_is_found_from_a_disturbed_copy(numbers):
    torch.manual_seed(0)
    layer = ts.OrthoConv2d(*numbers, dtype=torch.float64)
    reachable = layer.weight.detach().clone()
    noise = torch.randn_like(reachable)
    noise *= 0.05 * reachable.norm() / noise.norm()
    layer.reset_parameters()
    assert layer.project_(3 * (reachable + noise), steps=400) > 0.6  # two thirds of its length are too much
    assert (layer.weight - reachable).norm() <= 2 * noise.norm()


def test_projecting_the_own_weight_leaves_it_and_reports_no_distance():
    torch.manual_seed(0)
    for layer in (ts.OrthoConv2d(6, 6, 3), ts.OrthoLinear(5, 8), ts.UnitNormLinear(5, 8), ts.OrthoConv2d(3, 16, 7, 2)):
        before = layer.weight.detach().clone()
        assert layer.project_(layer.weight) < 1e-4
        torch.testing.assert_close(layer.weight, before, atol=1e-4, rtol=0)


def test_parameters_short_dtypes_and_the_cache():
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    layer = ts.OrthoLinear(6, 4).eval()
    with torch.no_grad():
        stale = layer.weight
    layer.project_(plain.weight)
    with torch.no_grad():
        assert not torch.equal(layer.weight, stale)
    torch.testing.assert_close(layer.weight.detach(), polar(plain.weight.detach()), atol=1e-5, rtol=0)
    short = ts.OrthoLinear(6, 4, dtype=torch.bfloat16)
    short.project_(plain.weight.bfloat16())
    assert short.weight.dtype == torch.bfloat16
    torch.testing.assert_close(short.weight.detach().float(), polar(plain.weight.detach()), atol=0.02, rtol=0)


def test_what_has_no_nearest_weight_is_refused():
    layer = ts.OrthoLinear(6, 4)
    before = layer.weight.detach().clone()
    for wrong, message in (
        (torch.zeros(4, 6), "equally near"),
        (torch.randn(6, 4), r"\(4, 6\)"),
        (torch.full((4, 6), torch.inf), "not finite"),
        (torch.ones(4, 6, dtype=torch.long), "floating point"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.project_(wrong)
    with pytest.raises(ValueError, match="starts=0"):
        layer.project_(torch.randn(4, 6), starts=0)
    assert torch.equal(layer.weight, before)


LARGE = {
    "linear": (ts.OrthoLinear, (512, 256)),
    "square": (ts.OrthoLinear, (512, 512)),
    "exponential": (lambda: ts.OrthoLinear(512, 512, orthogonalizer="exponential"), ()),
    "unit rows": (ts.UnitNormLinear, (512, 512)),
    "kernel": (ts.OrthoConv2d, (512, 512, 3)),
    "rko": (lambda: ts.OrthoConv2d(512, 512, 3, method="rko"), ()),
    "aol": (lambda: ts.OrthoConv2d(512, 512, 3, method="aol"), ()),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_cannot_be_reached_is_refused_at_once(case):
    make, numbers = LARGE[case]
    layer = make(*numbers)
    wanted = torch.randn(layer.weight.shape)
    began = time.process_time()  # of this process: others may be busy
    with pytest.raises(ValueError, match=r"(singular values|norms) (reach )?from .* layer.project_\(weight\)"):
        layer.weight = wanted
    threads = torch.get_num_threads()
    assert time.process_time() - began < threads


def test_the_numbers_in_the_refusal_are_the_singular_values():
    layer = ts.OrthoLinear(3, 2)
    with pytest.raises(ValueError, match=r"reach from 0.5 to 3, and must be 1"):
        layer.weight = torch.tensor([[0.0, 3.0, 0.0], [0.5, 0.0, 0.0]])
    kernel = ts.OrthoConv2d(1, 1, 1)
    with pytest.raises(ValueError, match=r"reach from 7 to 7"):
        kernel.weight = torch.full((1, 1, 1, 1), 7.0)


def test_an_orthogonal_kernel_out_of_reach_is_refused_at_once():
    """A lone tap in the corner of a 2x2 kernel: orthogonal, and no product of half-rank projectors (``test_bcop``)."""
    layer = ts.OrthoConv2d(64, 64, 2)
    lone = torch.zeros(64, 64, 2, 2)
    lone[:, :, 0, 0] = torch.eye(64)
    began = time.process_time()
    with pytest.raises(ValueError, match=r"no free tensors were found.*layer.project_\(weight\)"):
        layer.weight = lone
    assert time.process_time() - began < 2 * torch.get_num_threads()


@pytest.mark.parametrize("make", [lambda: ts.OrthoLinear(6, 4), lambda: ts.OrthoConv2d(4, 4, 3)])
def test_a_parameter_can_be_assigned(make):
    torch.manual_seed(0)
    layer, other = make(), make()
    wanted = nn.Parameter(other.weight.detach().clone())
    before = [name for name, _ in layer.named_parameters()]
    layer.weight = wanted
    torch.testing.assert_close(layer.weight, wanted, atol=1e-5, rtol=0)
    assert [name for name, _ in layer.named_parameters()] == before
    layer.bias = nn.Parameter(torch.ones(4))  # another parameter is registered as ever
    assert torch.equal(layer.bias, torch.ones(4))


def test_more_steps_and_starts_are_never_further():
    torch.manual_seed(0)
    layer = ts.OrthoConv2d(8, 8, 3, dtype=torch.float64)
    wanted = torch.randn_like(layer.weight)
    distances = []
    for steps in (1, 5, 40, 200):
        torch.manual_seed(1)
        layer.reset_parameters()
        distances.append(layer.project_(wanted, steps=steps))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] - 0.003
    torch.manual_seed(1)
    layer.reset_parameters()
    assert layer.project_(wanted, steps=200, starts=4) <= distances[-1]


def test_blocks_with_one_kernel_are_projected_and_others_refuse():
    torch.manual_seed(0)
    block, other = ts.SLLBlock2d(4, dtype=torch.float64), ts.SLLBlock2d(4, dtype=torch.float64)
    wanted = other.weight.detach().clone()
    assert block.project_(wanted, steps=400) < 1e-3
    torch.testing.assert_close(block.weight, wanted, atol=1e-2, rtol=0)
    assert ts.lipschitz_bound(block, (4, 5, 5)) <= 1 + 1e-6
    with pytest.raises(ValueError, match="kernels of this block"):
        ts.SLLAOCBlock2d(4, 8).project_(torch.randn(ts.SLLAOCBlock2d(4, 8).weight.shape))


UNREADABLE = {
    "nested": lambda w: torch.nested.nested_tensor(list(w)),
    "sparse": lambda w: w.to_sparse(),
    "meta": lambda w: w.to("meta"),
    "quantized": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.quint8),
    "float8": lambda w: w.to(torch.float8_e4m3fn),
    "complex": lambda w: w.to(torch.complex64),
    "whole numbers": lambda w: w.long(),
    "huge": lambda w: 1e300 * w.double(),
    "a list": lambda w: w.tolist(),
}
KINDS = {
    "linear": lambda: ts.OrthoLinear(4, 4),
    "aoc": lambda: ts.OrthoConv2d(4, 4, 3),
    "soc": lambda: ts.OrthoConv2d(4, 4, 3, method="soc"),
    "aol": lambda: ts.OrthoConv2d(4, 4, 3, method="aol"),
    "SLL": lambda: ts.SLLLinear(4),
    "unit norm": lambda: ts.UnitNormLinear(4, 4),
    "transposed": lambda: ts.OrthoConvTranspose2d(4, 4, 3),
}


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*uantiz:UserWarning")
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", KINDS)
def test_weights_without_numbers_to_read_are_refused(name, kind):
    layer = KINDS[name]()
    before = layer.weight.detach().clone()
    wrong = UNREADABLE[kind](torch.randn(before.shape))
    with pytest.raises((TypeError, ValueError), match="weight"):
        layer.project_(wrong)
    with pytest.raises((TypeError, ValueError)):
        layer.weight = wrong
    torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_weights_of_extreme_sizes(name):
    layer = KINDS[name]()
    for scale in (1e-40, 1e-18, 1e-12, 1e12, 1e18, 1e38):
        wanted = torch.linspace(-1, 1.5, layer.weight.numel()).view(layer.weight.shape).mul(scale)
        if 1e-15 < scale < 1e15:
            assert 0 <= layer.project_(wanted) < max(10, 100 / scale)
            assert layer.weight.isfinite().all()
        else:
            with pytest.raises(ValueError, match="entr"):
                layer.project_(wanted)


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_set_in_inference_mode_too(name):
    layer, other = KINDS[name]().eval(), KINDS[name]()
    x = torch.randn(2, *{2: (4,), 4: (4, 5, 5)}[layer.weight.ndim])
    wanted = other.weight.detach() if name != "soc" else layer.weight.detach().clone()
    with torch.no_grad():
        layer(x)  # which keeps the weight
    with torch.inference_mode():
        layer.weight = wanted
    torch.testing.assert_close(layer.weight.detach(), wanted, rtol=0, atol=1e-4)
    with torch.inference_mode():
        assert layer.project_(other.weight.clone()) < 1
    y = layer(x)
    torch.testing.assert_close(y, layer.train()(x), rtol=0, atol=1e-6)
    y.sum().backward()


def test_a_layer_without_numbers_says_so():
    with pytest.raises(ValueError, match="meta device"):
        ts.OrthoLinear(4, 4, device="meta").project_(torch.eye(4))
