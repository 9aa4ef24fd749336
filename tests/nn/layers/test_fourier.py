"""Convolutions built in the Fourier domain, against the dense oracle."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import dense, distance_from_orthogonal
from trysquare.nn.linalg.fourier import RESPONSES, free_response

PLAIN = {1: ts.FourierOrthoConv1d, 2: ts.FourierOrthoConv2d, 3: ts.FourierOrthoConv3d}
TRANSPOSED = {
    1: ts.FourierOrthoConvTranspose1d,
    2: ts.FourierOrthoConvTranspose2d,
    3: ts.FourierOrthoConvTranspose3d,
}
FEATURES = {
    "square": (False, (4, 4), 3, {}, (4, 6)),
    "odd sizes": (False, (3, 3), 3, {}, (3, 9)),
    "fewer channels": (False, (5, 2), 3, {}, (4, 4)),
    "more channels": (False, (2, 5), 3, {}, (6, 4)),
    "stride": (False, (2, 8), 3, {"stride": 2}, (6, 6)),
    "stride, few": (False, (2, 3), 3, {"stride": (2, 1)}, (6, 6)),
    "stride, many": (False, (1, 6), 3, {"stride": 2}, (6, 4)),
    "groups": (False, (4, 6), 3, {"groups": 2}, (3, 3)),
    "one tap": (False, (4, 3), 1, {"stride": (2, 1)}, (4, 5)),
    "one tap on an axis": (False, (3, 4), (3, 1), {}, (4, 5)),
    "kernel larger than the image": (False, (3, 3), 5, {}, (2, 3)),
    "transposed": (True, (8, 2), 3, {"stride": 2}, (3, 3)),
    "transposed groups": (True, (4, 6), 3, {"groups": 2}, (3, 2)),
    "1-D": (False, (3, 4), 5, {"stride": 2}, (10,)),
    "1-D transposed": (True, (3, 4), 5, {"stride": 2}, (5,)),
    "3-D": (False, (2, 3), 3, {"stride": (1, 2, 1)}, (3, 2, 4)),
    "3-D transposed": (True, (2, 2), 3, {}, (3, 2, 4)),
}


@pytest.fixture(params=RESPONSES)
def method(request):
    return request.param


def make(method, feature, dtype=torch.float64):
    transposed, channels, kernel, options, sizes = FEATURES[feature]
    layer = (TRANSPOSED if transposed else PLAIN)[len(sizes)](*channels, kernel, method=method, dtype=dtype, **options)
    return layer, (channels[0], *sizes)


@pytest.mark.parametrize("feature", FEATURES)
def test_orthogonal_at_the_start_and_after_training(method, feature):
    layer, shape = make(method, feature)
    assert distance_from_orthogonal(layer, shape) < 1e-11
    x = torch.randn(2, *shape, dtype=torch.float64)
    y = torch.randn_like(layer(x))
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    before = layer.weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
    assert (layer.weight.detach() - before).abs().max() > 0.01
    assert distance_from_orthogonal(layer, shape) < 1e-11


@pytest.mark.parametrize("feature", [name for name in FEATURES if "transposed" in name])
def test_transposed_layers_have_plain_ones_for_one_size(method, feature):
    layer, shape = make(method, feature)
    plain = layer.at_size(*shape[1:])
    x = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(plain(x), layer(x))
    assert all(type(m).__module__.startswith("torch.nn") for m in plain.modules())
    assert all(p.requires_grad and p.is_leaf for p in plain.parameters())
    frozen = layer.requires_grad_(False).at_size(*shape[1:])
    assert not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize(
    "feature", ["square", "fewer channels", "stride, many", "groups", "one tap on an axis", "1-D", "3-D"]
)
def test_adjoint_and_explicit_kernel(method, feature):
    layer, shape = make(method, feature)
    matrix = dense(layer, shape)
    output = tuple(layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
    torch.testing.assert_close(dense(layer.adjoint(), output), matrix.T)
    plain = layer.at_size(*shape[1:])
    x = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(plain(x), layer(x))
    assert all(type(m).__module__.startswith("torch.nn") for m in plain.modules())
    assert tuple(plain[1].kernel_size) == shape[1:]
    taps = plain[1].weight.detach().abs().amax((0, 1)) > 1e-12
    counted = tuple(int(taps.any(tuple(b for b in range(taps.ndim) if b != a)).sum()) for a in range(taps.ndim))
    assert layer.equivalent_kernel_size(*shape[1:]) == counted
    wide = tuple(1 if k == 1 else size for k, size in zip(layer.kernel_size, shape[1:], strict=True))
    assert (method == "eco") or counted == wide


def test_it_is_a_convolution(method):
    """Shifting the input by a multiple of the stride shifts the output."""
    layer, shape = make(method, "stride")
    x = torch.randn(1, *shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x.roll((2, 4), (-2, -1))), layer(x).roll((1, 2), (-2, -1)))


@pytest.mark.parametrize("feature", ["odd sizes", "fewer channels"])
def test_gradients(method, feature):
    layer, shape = make(method, feature)
    x = torch.randn(1, *shape, dtype=torch.float64, requires_grad=True)

    def function(weight, x):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(function, (layer.weight.detach().clone().requires_grad_(), x))


def test_any_size_at_run_time_and_one_cached_response(method, monkeypatch):
    layer, _ = make(method, "square", torch.float32)
    layer.eval()
    built = []
    original = layer._built
    monkeypatch.setattr(layer, "_built", lambda sizes: built.append(sizes) or original(sizes))
    with torch.no_grad():
        for sizes in ((4, 4), (4, 4), (6, 9), (6, 9), (4, 4)):
            assert layer(torch.randn(1, 4, *sizes)).shape == (1, 4, *sizes)
        assert built == [(4, 4), (6, 9), (4, 4)]
        x = torch.randn(1, 4, 4, 4)
        before = layer(x)
        layer.weight.mul_(0.5).add_(0.1)
        assert not torch.allclose(layer(x), before)
        layer.weight.data = torch.randn_like(layer.weight)
        after = layer(x)
    torch.testing.assert_close(layer.train()(x).detach(), after)
    layer.eval()
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_habits(method):
    layer, shape = make(method, "stride, few", torch.float32)
    assert distance_from_orthogonal(layer, shape) < 1e-5
    x = torch.randn(1, *shape)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x), expected)
    other, _ = make(method, "stride, few", torch.float32)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    torch.testing.assert_close(layer(x[0]), expected[0])
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    text = repr(layer)
    assert f"method={method}" in text
    assert "equivalent kernel " + ("of few taps" if method == "eco" else "as large as the image") in text


def test_compiles_and_pickles(method):
    layer, shape = make(method, "stride, few", torch.float32)
    x = torch.randn(1, *shape)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_lot_leaves_orthogonal_kernels_as_they_are():
    """The polar factor of an orthogonal kernel is that kernel: the layer is then torch's convolution."""
    reference = ts.OrthoConv2d(4, 4, 3, dtype=torch.float64)
    layer = ts.FourierOrthoConv2d(4, 4, 3, method="lot", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(reference.weight[None])
        layer.bias.copy_(reference.bias)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), reference(x))


def test_lot_is_the_inverse_root_and_says_when_there_is_none():
    layer = ts.FourierOrthoConv2d(2, 3, 3, method="lot", dtype=torch.float64, bias=False)
    free = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    with torch.no_grad():
        free.weight.copy_(layer.weight[0])
    matrix = dense(free, (2, 5, 5))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(dense_without_bias(layer, (2, 5, 5)), left @ right)
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(ArithmeticError, match=r"method='lot' cannot .* full rank at .*reset_parameters"):
        layer(torch.zeros(1, 2, 4, 4, dtype=torch.float64))


def dense_without_bias(layer, shape):
    basis = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, *shape)
    return layer(basis).detach().flatten(1).T


def test_cayley_is_the_transform_of_the_dense_skew_matrix():
    layer = ts.FourierOrthoConv2d(3, 3, 3, method="cayley", dtype=torch.float64, bias=False)
    free = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    with torch.no_grad():
        free.weight.copy_(layer.weight[0])
    matrix = dense(free, (3, 4, 5))
    skew = matrix.T - matrix  # the transform is that of the adjoint block
    eye = torch.eye(len(matrix), dtype=torch.float64)
    expected = torch.linalg.solve(eye + skew, eye - skew).T
    torch.testing.assert_close(dense_without_bias(layer, (3, 4, 5)), expected)


def test_eco_has_few_taps_far_apart():
    layer = ts.FourierOrthoConv2d(2, 2, 3, method="eco", dtype=torch.float64, bias=False)
    kernel = layer.at_size(6, 9)[1].weight.detach()
    assert set(map(tuple, kernel.abs().amax((0, 1)).gt(1e-12).nonzero().tolist())) == {
        (i, j) for i in (0, 2, 4) for j in (0, 3, 6)
    }
    # Where three does not divide the size, the next divisor does; every tap of the free kernel is used.
    kernel = layer.at_size(8, 5)[1].weight.detach()
    assert kernel.abs().amax((0, 1)).gt(1e-12).any(1).nonzero().flatten().tolist() == [0, 2, 4, 6]
    assert layer.equivalent_kernel_size(8, 5) == (4, 5)
    (layer(torch.randn(1, 2, 8, 5, dtype=torch.float64)) * torch.randn(2, 8, 5)).sum().backward()
    assert (layer.weight.grad.abs().amax((0, 1, 2)) > 0).all()
    with pytest.raises(ValueError, match="has no meaning for method='eco'"):
        ts.FourierOrthoConv2d(2, 2, 3, dilation=2, method="eco")


@pytest.mark.parametrize("method", ["cayley", "lot"])
def test_dilation_of_the_free_kernel(method):
    layer = ts.FourierOrthoConv2d(3, 3, 3, dilation=2, method=method, dtype=torch.float64)
    assert distance_from_orthogonal(layer, (3, 6, 5)) < 1e-11


ONE_TAP = {
    "cayley": partial(ts.FourierOrthoConv2d, method="cayley"),
    "lot": partial(ts.FourierOrthoConv2d, method="lot"),
    "sandwich": ts.SandwichConv2d,
}


@pytest.mark.parametrize("name", ONE_TAP)
@pytest.mark.parametrize("kernel_size", [(1, 1), (1, 3), (3, 1)])
def test_a_single_tap_has_one_block_along_its_axis(name, kernel_size):
    few, many = (ONE_TAP[name](3, 4, size, bias=False, dtype=torch.float64) for size in (kernel_size, 3))
    taps = (..., *(slice(1, 2) if k == 1 else slice(None) for k in kernel_size))
    ours, theirs = next(few.parameters()), next(many.parameters())
    with torch.no_grad():
        theirs.zero_()[taps] = ours
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(few(x), many(x))
    for layer in (few, many):
        layer(x).pow(3).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad[taps])
    response = few.response((5, 6))
    blocks = response[0] if name == "sandwich" else response
    assert [stride == 0 for stride in blocks.stride()[:2]] == [k == 1 for k in kernel_size]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"method": "magic"}, "unknown method 'magic'"), ({"in_channels": 0}, "in_channels=0"),
        ({"groups": 3}, "groups=3"), ({"stride": 0}, "stride=0"), ({"groups": 0}, "groups=0 must be at least 1"),
        ({"method": "caley"}, "did you mean 'cayley'"), ({"method": "aoc"}, "'aoc' .* a method of OrthoConv1d"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        ts.FourierOrthoConv2d(**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **arguments})


def test_export_needs_a_size():
    model = nn.Sequential(ts.FourierOrthoConv2d(4, 4, 3), nn.ReLU())
    with pytest.raises(ValueError, match="at_size"):
        ts.to_torch(model)
    model[0] = model[0].at_size(6, 6)
    assert ts.to_torch(model)(torch.randn(1, 4, 6, 6)).shape == (1, 4, 6, 6)


def test_inputs_that_do_not_fit():
    layer = ts.FourierOrthoConv2d(4, 4, 3, stride=2)
    with pytest.raises(ValueError, match="multiples of stride"):
        layer(torch.zeros(1, 4, 5, 4))
    with pytest.raises(ValueError, match="must be"):
        layer(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match="must be"):
        ts.FourierOrthoConvTranspose2d(4, 4, 3)(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match="no size may be 0"):
        ts.FourierOrthoConvTranspose2d(4, 4, 3)(torch.zeros(1, 4, 0, 4))
    with pytest.raises(ValueError, match=r"sizes \(5, 5\) must be multiples of stride=\(2, 2\)"):
        layer.at_size(5, 5)


@pytest.mark.parametrize("name", ["FourierOrthoConv2d", "FourierOrthoConvTranspose2d", "SandwichConv2d"])
def test_padding_is_refused_with_the_reason(name):
    for option in ({"padding": 1}, {"padding_mode": "zeros"}):
        with pytest.raises(TypeError, match=f"{name} got an unexpected .*{next(iter(option))}.* always circular"):
            getattr(ts, name)(4, 4, 3, **option)
    with pytest.raises(TypeError, match="'speed': there is no such argument"):
        getattr(ts, name)(4, 4, 3, speed=3)


@pytest.mark.parametrize("sizes", [(5, 7), (1, 1), (2, 1), (4, 35), (6, 13), (10, 9)])
@pytest.mark.parametrize("kernel_size", [3, (2, 5)])
def test_eco_is_orthogonal_at_any_size(sizes, kernel_size):
    layer = ts.FourierOrthoConv2d(2, 3, kernel_size, method="eco", dtype=torch.float64)
    assert distance_from_orthogonal(layer, (2, *sizes)) < 1e-11


@pytest.mark.parametrize("name", ["FourierOrthoConv2d", "FourierOrthoConvTranspose2d", "SandwichConv2d"])
def test_a_batch_may_be_empty(name):
    layer = getattr(ts, name)(4, 8, 3, stride=2)
    x = torch.zeros(0, 4, 6, 6, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, *layer(torch.zeros(1, 4, 6, 6)).shape[1:])
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters() if p.grad is not None)


IMAGE_SIZED = {
    "fourier": lambda: ts.FourierOrthoConv2d(4, 4, 3),
    "transposed": lambda: ts.FourierOrthoConvTranspose2d(4, 4, 3),
    "sandwich": lambda: ts.SandwichConv2d(4, 4, 3),
    "sandwich, transposed": lambda: ts.SandwichConvTranspose2d(4, 4, 3),
}


@pytest.mark.parametrize("make_layer", IMAGE_SIZED.values(), ids=IMAGE_SIZED)
class TestCache:
    def test_fused_optimizers_are_seen(self, make_layer):
        """They write without counting."""
        layer, x = make_layer().eval(), torch.randn(2, 4, 4, 4)
        optimizer = torch.optim.Adam(layer.parameters(), 0.1, fused=True)
        with torch.no_grad():
            before = layer(x)
        layer(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            after = layer(x)
            assert not torch.allclose(after, before)
            torch.testing.assert_close(layer.train()(x), after)

    def test_inference_mode_leaves_nothing_behind(self, make_layer):
        layer, x = make_layer().eval().requires_grad_(False), torch.randn(2, 4, 4, 4)
        with torch.inference_mode():
            expected = layer(x)
            torch.testing.assert_close(layer(x), expected)
        x.requires_grad_()
        y = layer(x)
        torch.testing.assert_close(y, expected.clone())
        y.sum().backward()
        assert x.grad.isfinite().all()

    def test_each_size_and_parameter_is_seen(self, make_layer):
        layer = make_layer().eval()
        with torch.no_grad():
            for sizes in ((4, 4), (6, 4), (4, 4)):
                x = torch.randn(1, 4, *sizes)
                torch.testing.assert_close(layer(x), copy.deepcopy(layer).train()(x))
            for parameter in layer.parameters():
                x, before = torch.randn(1, 4, 4, 4), None
                before = layer(x)
                parameter.add_(torch.randn_like(parameter))
                assert not torch.allclose(layer(x), before)

    def test_copies_and_pickles_start_empty(self, make_layer):
        layer, x = make_layer().eval(), torch.randn(1, 4, 4, 4)
        with torch.no_grad():
            expected = layer(x)
            for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert all(module.cache.weight is None for module in other.modules() if hasattr(module, "cache"))
                torch.testing.assert_close(other(x), expected)


SANDWICHES = {
    "plain": (lambda **o: ts.SandwichConv2d(4, 6, 3, **o), (4, 4, 6)),
    "stride": (lambda **o: ts.SandwichConv2d(2, 8, 3, 2, **o), (2, 6, 4)),
    "groups": (lambda **o: ts.SandwichConv2d(4, 6, 3, (2, 1), groups=2, **o), (4, 4, 3)),
    "transposed": (lambda **o: ts.SandwichConvTranspose2d(8, 2, 3, 2, **o), (8, 3, 2)),
    "transposed groups": (lambda **o: ts.SandwichConvTranspose2d(4, 6, 3, groups=2, **o), (4, 3, 4)),
    "1-D": (lambda **o: ts.SandwichConv1d(3, 4, 5, 2, **o), (3, 8)),
    "3-D": (lambda **o: ts.SandwichConvTranspose3d(4, 2, 3, (1, 2, 1), **o), (4, 2, 3, 2)),
}


@pytest.mark.parametrize(("make_layer", "shape"), SANDWICHES.values(), ids=SANDWICHES)
def test_sandwiches_have_plain_layers_for_one_size(make_layer, shape):
    layer = make_layer(activation=nn.Tanh(), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"layer.at_size\(\*sizes\) first"):
        ts.to_torch(nn.Sequential(layer))
    plain = layer.at_size(*shape[1:])
    x = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(plain(x), layer(x))
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert all(p.requires_grad and p.is_leaf for p in plain.parameters())
    assert not any(p.requires_grad for p in layer.eval().requires_grad_(False).at_size(*shape[1:]).parameters())
    assert all(type(m).__module__.startswith("torch.nn") for m in plain.modules())
    if not layer.transposed and max(layer.stride) > 1:
        with pytest.raises(ValueError, match="must be multiples of stride"):
            layer.at_size(*(size + 1 for size in shape[1:]))


@pytest.mark.parametrize("channels", [(2, 6), (6, 2)])
@pytest.mark.parametrize("method", ["cayley", "lot", "eco"])
def test_responses_are_plain_tensors(method, channels):
    response = ts.FourierOrthoConv2d(*channels, 3, method=method).response((4, 4))
    assert not response.is_conj()
    torch.view_as_real(response)


@pytest.mark.parametrize(("sizes", "kernel_size"), [((6,), (3,)), ((4, 5), (3, 1)), ((4, 2, 3), (1, 3, 3))])
def test_blocks_lie_together_or_products_would_be_made_one_by_one(sizes, kernel_size):
    kernel = torch.randn(2, 3, 4, *kernel_size)
    assert free_response(kernel, sizes, (1,) * len(sizes)).is_contiguous()
