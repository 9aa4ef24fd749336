"""Every method of the registry does everything that a convolution layer does."""

import copy
import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trysquare as ts
from tests.nn.test_geometry import nothing_to_learn, numbers, possible
from tests.oracle import CONV, CONV_TRANSPOSE, dense, spectrum

# name: (transposed, channels, kernel_size, options, sizes of the input)
FEATURES = {
    "square": (False, (4, 4), 3, {}, (4, 5)),
    "odd channels": (False, (3, 3), 3, {}, (4, 4)),
    "fewer channels": (False, (5, 3), 3, {}, (4, 4)),
    "more channels": (False, (3, 5), 3, {}, (4, 4)),
    "not square": (False, (4, 4), (3, 1), {}, (4, 4)),
    "stride": (False, (2, 8), 3, {"stride": 2}, (4, 4)),
    "stride, few": (False, (3, 4), 3, {"stride": 2}, (4, 6)),
    "stride, many": (False, (2, 11), 3, {"stride": 2}, (4, 4)),
    "patches": (False, (2, 9), 3, {"stride": 3}, (6, 3)),
    "shortcut": (False, (4, 4), 1, {"stride": 2}, (4, 4)),
    "groups": (False, (4, 4), 3, {"groups": 2}, (4, 4)),
    "multiplier": (False, (2, 4), 3, {"groups": 2}, (4, 4)),
    "groups, stride": (False, (4, 6), 3, {"groups": 2, "stride": 2}, (4, 4)),
    "dilation": (False, (4, 4), 3, {"dilation": 2}, (5, 5)),
    "dilation, stride": (False, (2, 8), 3, {"dilation": 3, "stride": 2}, (6, 6)),
    "shared factor": (False, (4, 4), 3, {"dilation": 2, "stride": 4}, (8, 4)),
    "transposed": (True, (4, 3), 3, {}, (4, 4)),
    "transposed stride": (True, (8, 2), 3, {"stride": 2}, (2, 2)),
    "transposed groups": (True, (4, 6), 3, {"groups": 2, "dilation": 2, "stride": (2, 1)}, (2, 3)),
    "1-D": (False, (4, 6), 5, {}, (8,)),
    "1-D stride": (False, (4, 6), 3, {"stride": 2}, (8,)),
    "1-D transposed": (True, (6, 4), 3, {"stride": 2}, (4,)),
    "3-D": (False, (2, 2), (1, 3, 3), {}, (2, 3, 3)),
    "3-D stride": (False, (2, 3), (3, 1, 1), {"stride": (2, 1, 1)}, (4, 2, 2)),
    "3-D transposed": (True, (4, 2), (1, 1, 3), {"stride": (1, 1, 2)}, (2, 2, 2)),
}


def make(method, feature, dtype=torch.float64, **more):
    transposed, channels, kernel, options, sizes = FEATURES[feature]
    layer = (CONV_TRANSPOSE if transposed else CONV)[len(sizes)](
        *channels, kernel, method=method, dtype=dtype, **options, **more
    )
    return layer, (channels[0], *sizes)


def check_spectrum(layer, shape, tolerance=1e-11):
    """Orthogonal if the layer says so, 1-Lipschitz otherwise."""
    values = spectrum(layer, shape)
    if layer.parametrization.is_orthogonal:
        assert (values - 1).abs().max() < tolerance + layer.truncation_error
    assert values.max() < 1 + tolerance + layer.truncation_error


def train(layer, shape, steps):
    x = torch.randn(2, *shape, dtype=layer.weight.dtype)
    y = torch.randn_like(layer(x))
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    before = layer.weight.detach().clone()
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
    assert all(t.grad.isfinite().all() for t in layer.free_tensors)
    return float((layer.weight.detach() - before).abs().max())


@pytest.fixture(params=ts.METHODS)
def method(request):
    return request.param


@pytest.mark.parametrize("feature", FEATURES)
class TestFeature:
    def test_spectrum_at_the_start_and_after_training(self, method, feature):
        layer, shape = make(method, feature)
        check_spectrum(layer, shape)
        assert train(layer, shape, steps=5) > 1e-3
        check_spectrum(layer, shape)

    def test_adjoint_and_plain_torch_agree(self, method, feature):
        layer, shape = make(method, feature)
        matrix = dense(layer, shape)
        output = layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:]
        torch.testing.assert_close(dense(layer.adjoint(), tuple(output)), matrix.T)
        sizes = tuple(size * (-(-20 // size)) for size in shape[1:])  # plain padding wraps at most once
        x = torch.randn(2, shape[0], *sizes, dtype=torch.float64)
        if all(2 * size > pad for size, pad in zip(sizes, layer.geometry.extent, strict=True)):
            torch.testing.assert_close(ts.to_torch(layer)(x), layer(x))

    def test_zero_padding_never_amplifies(self, method, feature):
        layer, shape = make(method, feature, padding_mode="zeros")
        assert spectrum(layer, shape).max() < 1 + 1e-11 + layer.truncation_error


HOSTILE = [
    torch.zeros_like,
    torch.ones_like,
    *(lambda t, scale=scale: scale * t for scale in (1e6, 1e35, 1e-6, 1e-38, 1e-40)),
    lambda t: 1e3 * torch.randn_like(t),
]
GRADCHECK = ["odd channels", "fewer channels", "stride, many", "groups, stride", "dilation, stride", "1-D"]


@pytest.mark.parametrize("feature", GRADCHECK)
def test_gradients(method, feature):
    # A term or two of the series have the gradient of the series, and far fewer taps.
    layer, _ = make(method, feature, **({"terms": 2} if method == "soc" else {}))
    free = [(t.detach() + 0.1 * torch.randn_like(t)).requires_grad_() for t in layer.free_tensors]
    projection = torch.randn_like(layer.weight)
    assert torch.autograd.gradcheck(lambda *t: (layer.parametrization.build(*t) * projection).sum(), free)


@pytest.mark.parametrize("feature", ["square", "stride, many"])
class TestHabits:
    def test_float32_and_autocast(self, method, feature):
        layer, shape = make(method, feature, dtype=torch.float32)
        check_spectrum(layer, shape, 1e-5)
        exact = layer.weight.detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer.weight, exact)
            layer(torch.randn(1, *shape)).float().square().sum().backward()
        assert all(t.grad.isfinite().all() for t in layer.free_tensors)

    def test_hostile_free_tensors(self, method, feature):
        count = len(make(method, feature)[0].free_tensors)
        for write, chosen in itertools.product(HOSTILE, [range(count), *([n] for n in range(count))]):
            layer, shape = make(method, feature, dtype=torch.float32)
            with torch.no_grad():
                for index in chosen:
                    layer.free_tensors[index].copy_(write(layer.free_tensors[index]))
            check_spectrum(layer, shape, 1e-5)
            layer(torch.randn(1, *shape)).square().sum().backward()
            assert all(t.grad.isfinite().all() for t in layer.free_tensors)

    def test_large_steps_on_large_inputs(self, method, feature):
        layer, shape = make(method, feature, dtype=torch.float32, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        for _ in range(5):
            optimizer.zero_grad()
            layer(1e3 * torch.randn(2, *shape)).square().sum().backward()
            optimizer.step()
        check_spectrum(layer, shape, 1e-5)

    def test_eval_is_cached_and_never_stale(self, method, feature):
        layer, _ = make(method, feature)
        layer.eval()
        with torch.no_grad():
            before = layer.weight
            assert layer.weight is before
            layer.free_tensors[0].normal_()
            torch.testing.assert_close(layer.weight, layer.parametrization.build(*layer.free_tensors))
            assert not torch.allclose(layer.weight, before)

    def test_state_dict_and_deepcopy(self, method, feature):
        layer, other = make(method, feature)[0], make(method, feature)[0]
        buffer = io.BytesIO()
        torch.save(layer.state_dict(), buffer)
        buffer.seek(0)
        other.load_state_dict(torch.load(buffer))
        assert torch.equal(layer.weight, other.weight)
        assert torch.equal(copy.deepcopy(layer).weight, layer.weight)

    def test_well_conditioned_tensors_give_the_same_weight(self, method, feature):
        layer, _ = make(method, feature)
        free = [t.detach() * torch.logspace(0, 3, t.shape[-2], dtype=t.dtype)[:, None] for t in layer.free_tensors]
        build = layer.parametrization.build
        torch.testing.assert_close(build(*layer.parametrization.reconditioned(*free)), build(*free))

    def test_half_precision(self, method, feature):
        layer, shape = make(method, feature, dtype=torch.float32)
        layer.bfloat16()
        assert layer.weight.dtype == torch.bfloat16
        assert layer(torch.randn(1, *shape, dtype=torch.bfloat16)).isfinite().all()


def test_compiles(method):
    layer, shape = make(method, "stride, few", dtype=torch.float32, **({"terms": 2} if method == "soc" else {}))
    x = torch.randn(1, *shape)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)


def test_repr_names_the_method_and_its_options(method):
    assert f"method={method}" in repr(make(method, "square")[0])
    assert "\n" not in repr(make(method, "square")[0])


def test_unknown_options_are_refused(method):
    with pytest.raises(
        TypeError, match=f"unexpected keyword argument 'speed': the layer has none .* method='{method}' has"
    ):
        make(method, "square", speed=2)


def test_impossible_geometries_are_refused_unless_the_method_is_only_lipschitz(method):
    def shrink():
        return ts.OrthoConv2d(2, 6, 1, stride=2, method=method, dtype=torch.float64)

    def depthwise():
        return ts.OrthoConv2d(3, 3, 3, groups=3, method=method, dtype=torch.float64)

    if not ts.METHODS[method].orthogonal:
        check_spectrum(shrink(), (2, 4, 4))
        check_spectrum(depthwise(), (3, 4, 4))
        with pytest.raises(ValueError, match="1-Lipschitz, not orthogonal"):
            make(method, "square")[0].inverse()
        return
    with pytest.raises(ValueError, match="no orthogonal kernel exists"):
        shrink()
    if not ts.METHODS[method].exact:
        check_spectrum(depthwise(), (3, 4, 4))
        assert train(depthwise(), (3, 4, 4), steps=5) > 1e-3
        return
    with pytest.raises(ValueError, match="nothing to learn"):
        depthwise()


CLOSED_FORM = [("aoc", "square"), ("bcop", "square"), ("sc-fac", "square"), ("rko", "square"), ("rko", "patches")]
SEARCHED = [("bro", "square"), ("aol", "fewer channels")]


@pytest.mark.parametrize(("name", "feature"), CLOSED_FORM + SEARCHED)
def test_assigning_its_own_output_gives_it_back(name, feature):
    layer, _ = make(name, feature)
    wanted = layer.weight.detach().clone()
    layer.reset_parameters()
    layer.weight = wanted
    torch.testing.assert_close(layer.weight, wanted, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["aoc", "bcop", "sc-fac", "bro"])
def test_parsimonious_strides(name):
    layer = ts.OrthoConv2d(4, 3, 3, stride=2, parsimonious=True, method=name, dtype=torch.float64)
    check_spectrum(layer, (4, 6, 6))
    full = ts.OrthoConv2d(4, 3, 3, stride=2, method=name)
    assert layer.free_tensors[0].numel() < full.free_tensors[0].numel()


@pytest.mark.parametrize("name", ts.METHODS)
@pytest.mark.parametrize("option", [{"orthogonalizer": "qr"}, {"parsimonious": True}])
def test_arguments_without_a_meaning_are_refused(name, option):
    method = ts.METHODS[name]
    meaningful = method.uses_orthogonalizer if "orthogonalizer" in option else method.orthogonal and name != "soc"
    if meaningful:
        check_spectrum(make(name, "stride, few", **option)[0], (3, 4, 6))
        return
    with pytest.raises(ValueError, match=r"no meaning|no parsimonious"):
        make(name, "stride, few", **option)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(numbers(), st.booleans(), st.sampled_from([name for name in ts.METHODS if name != "aoc"]))
def test_every_geometry(case, transposed, name):
    """Orthogonal or 1-Lipschitz wherever the method can be, refused elsewhere."""
    m, n, kernel, stride, dilation, groups, sizes = case
    if name == "soc":
        kernel = tuple(k | 1 for k in kernel)
    channels = (n * groups, m * groups) if transposed else (m * groups, n * groups)
    layer_class = (CONV_TRANSPOSE if transposed else CONV)[len(kernel)]
    options = {"stride": stride, "dilation": dilation, "groups": groups, "method": name, "dtype": torch.float64}
    if name == "soc":
        options["terms"] = 3
    fine = possible(m, n, kernel, stride, dilation) and not nothing_to_learn(m, n, kernel, stride, dilation)
    if name == "bro":
        fine = fine and not m == n == max(kernel) == 1  # one reflector of one channel
    try:
        layer = layer_class(*channels, kernel, **options)
    except ValueError as error:
        assert ts.METHODS[name].orthogonal
        assert not fine
        assert "no orthogonal kernel exists" in str(error) or "nothing to learn" in str(error)  # noqa: PT017
        return
    # The weight of SOC is larger than its kernel_size, so more may be possible.
    assert fine or name == "soc" or not ts.METHODS[name].orthogonal
    coarse = tuple(size // s for size, s in zip(sizes, stride, strict=True))
    shape = (channels[0], *(coarse if transposed else sizes))
    with torch.no_grad():
        for tensor in layer.free_tensors:
            tensor.normal_()
    check_spectrum(layer, shape)


@pytest.mark.parametrize("feature", ["more channels", "stride, few", "3-D", "transposed"])
def test_axis_order(feature):
    sizes = FEATURES[feature][-1]
    order = tuple(range(len(sizes)))[::-1]
    layer, shape = make("aoc", feature, axis_order=order)
    check_spectrum(layer, shape)
    check_spectrum(layer.adjoint(), tuple(layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:]))
    plain, _ = make("aoc", feature)
    same, _ = make("aoc", feature, axis_order=range(len(sizes)))
    for other in (plain, same):
        other.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, same.weight)
    assert (plain.weight - layer.weight).abs().max() > 1e-3  # projectors do not commute
    twin, _ = make("aoc", feature, axis_order=order)
    twin.weight = layer.weight
    torch.testing.assert_close(twin.weight, layer.weight)


@pytest.mark.parametrize("order", [(0,), (0, 0), (1, 2), "10", 1, (0.0, 1.0), (True, False)])
def test_orders_that_are_none(order):
    with pytest.raises(ValueError, match=r"axis_order=.*must be the axes \(0, 1\)"):
        ts.OrthoConv2d(4, 4, 3, axis_order=order)
