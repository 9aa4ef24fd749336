"""SOC by its terms, one after the other: the same function as the convolution with its kernel, for less."""

import copy
from math import prod

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts
from tests.nn.test_methods import FEATURES, make
from tests.oracle import CONV, CONV_TRANSPOSE
from trysquare.nn.parametrizations import soc
from trysquare.verify.operators import used_weight

# What the terms do not do, or not for less.
WITH_KERNEL = {
    "not square", "shortcut", "shared factor", "transposed groups",
    "1-D", "1-D stride", "1-D transposed", "3-D stride", "3-D transposed",
}  # fmt: skip


def by_kernel(layer, x):
    """The same layer with its kernel as an ordinary tensor."""
    return layer._convolution(x, layer.weight, layer.bias)


@pytest.fixture
def no_kernel(monkeypatch):
    """Building the kernel is an error."""

    def refuse(*args, **options):
        raise AssertionError("the kernel was built")

    monkeypatch.setattr(soc, "polynomial_kernel", refuse)


@pytest.mark.parametrize("feature", FEATURES)
def test_terms_and_kernel_are_the_same_function_with_the_same_gradients(feature):
    layer, shape = make("soc", feature, terms=4)
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    found, expected = layer(x), by_kernel(layer, x)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(found)
    sources = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found, sources, direction), torch.autograd.grad(expected, sources, direction)
    )
    torch.testing.assert_close(layer(x[0]), expected[0])


@pytest.mark.parametrize("feature", FEATURES)
def test_which_layers_do_without_their_kernel(feature):
    layer, _ = make("soc", feature)
    assert (layer._series is None) == (feature in WITH_KERNEL)


@pytest.mark.parametrize("method", [name for name in ts.METHODS if name != "soc"])
def test_only_soc_has_terms(method):
    assert make(method, "square")[0]._series is None


@pytest.mark.parametrize(("channels", "padding", "options"),
    [
        ((4, 4), 7, {}), ((4, 6), 7, {"stride": 2}), ((4, 6), (6, 7), {"stride": 2}), ((3, 5), 7, {}),
        ((4, 4), "same", {"stride": 2, "dilation": 2}), ((6, 4), "same", {"stride": 2, "dilation": 2}),
        ((4, 6), "same", {"stride": 3, "dilation": 2}), ((4, 6), "same", {"stride": (1, 2), "dilation": (3, 1)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layers", [CONV, CONV_TRANSPOSE])
def test_padding(layers, channels, padding, options):
    first, second = channels if layers is CONV else channels[::-1]
    layer = layers[2](first, second, 3, padding=padding, method="soc", dtype=torch.float64, **options)
    x = torch.randn(2, first, 12, 18, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_kernel(layer, x))


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 5)])
def test_images_smaller_than_the_kernels(size):
    layer = ts.OrthoConv2d(3, 3, 5, method="soc", dtype=torch.float64)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_kernel(layer, x))


@pytest.mark.parametrize(
    "options", [{"padding_mode": "zeros"}, {"padding": "valid"}, {"padding": 1}, {"padding": (6, 7)}]
)
def test_borders_that_the_terms_would_meet_anew_keep_the_kernel(options):
    assert ts.OrthoConv2d(4, 4, 3, method="soc", **options)._series is None


@pytest.mark.usefixtures("no_kernel")
def test_training_does_not_build_the_kernel():
    layer = ts.OrthoConv2d(4, 4, 3, method="soc")
    y = layer(torch.randn(1, 4, 6, 6))
    (layer.adjoint()(y) + layer.inverse()(y)).sum().backward()


@pytest.mark.usefixtures("no_kernel")
def test_evaluation_does_not_build_the_kernel_and_keeps_the_factors(monkeypatch):
    calls = []
    bound = soc.kernel_norm_bound
    monkeypatch.setattr(soc, "kernel_norm_bound", lambda *args: calls.append(1) or bound(*args))
    layer = ts.OrthoConv2d(4, 6, 3, stride=2, method="soc")
    x = torch.randn(1, 4, 6, 6)
    expected = layer(x)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        layer.adjoint()(layer(x))
    assert len(calls) == 2


@pytest.mark.parametrize("write", ["in place", "data", "load", "move", "step"])
def test_factors_are_not_kept_too_long(write):
    layer = ts.OrthoConv2d(4, 6, 3, stride=2, method="soc").eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        layer(x)
        for number, free in enumerate(layer.free_tensors):
            if write == "in place":
                free.normal_()
            elif write == "data":
                free.data.normal_()
                layer.train().eval()
            elif write == "load":
                state = layer.state_dict()
                state[f"parametrizations.weight.original{number}"] = torch.randn_like(free)
                layer.load_state_dict(state)
            elif write == "move":
                layer.double()
                layer.free_tensors[number].data.normal_()
                layer.float()
            else:
                free.grad = torch.randn_like(free)
                torch.optim.SGD([free], lr=1.0).step()
        torch.testing.assert_close(layer(x), by_kernel(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in WITH_KERNEL])
def test_bounds_are_about_the_terms_in_exact_arithmetic(feature, training):
    """Those of the layer's float32 factors, applied to basis vectors in float64."""
    layer, shape = make("soc", feature, torch.float32, terms=7)
    layer.train(training)
    with torch.no_grad():
        layer.free_tensors[-1].mul_(10)  # the largest angles
    factors = [None if factor is None else factor.detach().double() for factor in layer._factors()]
    basis = torch.eye(prod(shape), dtype=torch.float64).view(-1, *shape)
    matrix = layer._series(basis, *factors, None).flatten(1).T
    torch.testing.assert_close(layer._convolution(basis, used_weight(layer)).flatten(1).T, matrix, rtol=0, atol=1e-12)
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert norm <= ts.spectral_norm_bound(layer, shape) < norm + 1e-5


def test_a_double_layer_is_certified_as_it_is():
    layer = ts.OrthoConv2d(4, 4, 3, method="soc", dtype=torch.float64)
    torch.testing.assert_close(used_weight(layer), layer.weight.detach(), rtol=0, atol=1e-14)


def test_terms_cost_less_than_the_kernel():
    layer = ts.OrthoConv2d(32, 32, 3, method="soc")
    x = torch.randn(4, 32, 8, 8)

    def cost(apply):
        with FlopCounterMode(display=False) as counter:
            apply(layer, x).sum().backward()
        return counter.get_total_flops()

    assert 7 * cost(lambda layer, x: layer(x)) < cost(by_kernel)


def test_short_types_round_one_kernel_once():
    layer = ts.OrthoConv2d(4, 4, 3, method="soc").bfloat16()
    x = torch.randn(2, 4, 6, 6, dtype=torch.bfloat16)
    assert layer._series is not None
    assert torch.equal(layer(x), by_kernel(layer, x))


def test_autocast_gives_what_it_gives_with_a_kernel():
    layer = ts.OrthoConv2d(4, 6, 3, stride=2, method="soc")
    x = torch.randn(2, 4, 6, 6)
    for each in (layer, ts.OrthoConv2d(4, 4, 3, method="soc")):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = each(x), by_kernel(each, x)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert (found.float() - each(x)).abs().max() < 0.05


def test_another_weight_than_ours_is_what_counts():
    class Half(torch.nn.Module):
        def forward(self, weight):
            return 0.5 * weight

    x = torch.randn(2, 4, 6, 6)
    layer = ts.OrthoConv2d(4, 4, 3, method="soc", bias=False)
    expected = layer(x)
    halved = copy.deepcopy(layer)
    parametrize.register_parametrization(halved, "weight", Half())
    torch.testing.assert_close(halved(x), 0.5 * expected)
    parametrize.remove_parametrizations(layer, "weight")
    with torch.no_grad():
        layer.weight.mul_(3)
    torch.testing.assert_close(layer(x), 3 * expected)


def test_a_weight_of_another_kind_in_its_place_is_what_counts():
    """Also in evaluation, where the weight of before may still be kept."""
    layer = ts.OrthoConv2d(4, 4, 3, method="soc", bias=False)
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        layer.eval()(x)
    parametrize.remove_parametrizations(layer, "weight")
    torch.nn.utils.parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(3)
        for mode in (False, True):
            torch.testing.assert_close(layer.train(mode)(x), by_kernel(layer, x))


def test_a_parametrized_bias_does_not_matter():
    class Half(torch.nn.Module):
        def forward(self, bias):
            return 0.5 * bias

    layer = ts.OrthoConv2d(4, 4, 3, method="soc")
    x = torch.randn(2, 4, 6, 6)
    parametrize.register_parametrization(layer, "bias", Half())
    torch.testing.assert_close(layer(x), by_kernel(layer, x))
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer(x), by_kernel(layer, x))


@pytest.mark.parametrize("change", ["pruned", "buffer", "registered again", "replica"])
def test_free_tensors_are_those_of_which_torch_builds_the_weight(change):
    layer = ts.OrthoConv2d(4, 8, 3, stride=2, method="soc", terms=4)
    held = layer.parametrizations.weight
    if change == "pruned":
        torch.nn.utils.prune.l1_unstructured(held, "original1", 0.9)
    elif change == "replica":  # of nn.DataParallel, whose tensors are no parameters
        values = [held.original0.detach(), held.original1.detach()]
        held._parameters.clear()
        held.original0, held.original1 = values
    else:
        value = held.original0.detach()
        del held.original0
        if change == "buffer":
            held.register_buffer("original0", value)
        else:
            held.original0 = torch.nn.Parameter(value)
    x = torch.randn(2, 4, 6, 6)
    assert layer._applies_terms()
    torch.testing.assert_close(layer(x), by_kernel(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [3, 5])
def test_wrong_channels_are_named(channels):
    layer = ts.OrthoConv2d(2, 12, 3, stride=2, method="soc", terms=3)
    with pytest.raises(ValueError, match=rf"input of shape \(2, {channels}, 6, 6\) must be \(batch, 2, and 2 sizes\)"):
        layer(torch.randn(2, channels, 6, 6))


def test_large_angles_keep_the_kernel():
    """Terms are rounded one by one, and a rounding grows with the angle."""
    assert ts.OrthoConv2d(4, 4, 3, method="soc", norm=2.0)._series is None


@pytest.mark.parametrize(("numbers", "series"), [((64, 128, 3, 2), True), ((64, 16, 3, 4), False)])
def test_terms_are_applied_where_they_take_fewer_products(numbers, series):
    assert (ts.OrthoConv2d(*numbers, method="soc")._series is not None) == series


def test_torchs_cache_changes_nothing():
    layer = ts.OrthoConv2d(4, 4, 3, method="soc", dtype=torch.float64)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    expected = torch.autograd.grad(layer(layer(x)).square().sum(), layer.free_tensors)
    with parametrize.cached():
        assert layer.weight is layer.weight
        found = torch.autograd.grad(layer(layer(x)).square().sum(), layer.free_tensors)
    torch.testing.assert_close(found, expected)


def test_gradients_of_single_images():
    layer = ts.OrthoConv2d(3, 5, 3, stride=2, method="soc", terms=3, dtype=torch.float64)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    values = dict(layer.named_parameters())

    def loss(values, image):
        return torch.func.functional_call(layer, values, (image,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    alone = torch.func.grad(loss)(values, x[1])
    for name, gradient in alone.items():
        torch.testing.assert_close(each[name][1], gradient)
