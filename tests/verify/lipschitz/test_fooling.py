"""Ways in which certificates were fooled once, each as a class: the bound is above every stretch, or there is none."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import trysquare as ts
from tests.verify.lipschitz.networks import Fn, bound
from trysquare.verify.lipschitz import NoRuleError


@torch.no_grad()
def stretch(model, shape, points=3):
    """Largest norm of the matrix of differences across random points."""
    size = torch.Size(shape).numel()
    best = 0.0
    for _ in range(points):
        x, move = torch.randn(size, dtype=torch.float64), 1e-6 * torch.eye(size, dtype=torch.float64)
        images = [model((x + side * move).unflatten(1, shape)).flatten(1) for side in (1, -1)]
        best = max(best, float(torch.linalg.matrix_norm((images[0] - images[1]) / 2e-6, 2)))
    return best


def sound(model, shape, slack=1e-6):
    """The bound, which is above what differences find; ``None`` if it is refused."""
    try:
        found = ts.lipschitz_bound(model.double().eval(), shape)
    except (ValueError, TypeError):
        return None
    assert stretch(model, shape) <= found * (1 + slack)
    return found


MODES = ["constant", "circular", "reflect", "replicate"]


@pytest.mark.parametrize("mode", MODES)
def test_padding_of_every_mode_and_sign(mode):
    certified = 0
    for left, right in itertools.product(range(-2, 4), repeat=2):
        for shape, pads in (((2, 5), (left, right)), ((2, 4, 4), (left, right, right, left))):
            model = Fn(lambda m, x, p=pads: m.part(F.pad(x, p, mode=mode)))
            model.part = nn.Identity()
            try:
                size = F.pad(torch.zeros(1, *shape), pads, mode=mode).shape[1:]
            except RuntimeError:
                continue
            if 0 in size:
                continue
            padded = sound(model, shape)
            dims = len(shape) - 1
            model.part = (nn.Conv1d if dims == 1 else nn.Conv2d)(2, 2, 2 if min(size[1:]) > 1 else 1)
            if padded is None:  # torch leaves some of what it makes for these unwritten
                assert mode == "circular"
                assert min(pads) < -1
                continue
            assert padded == pytest.approx(stretch(Fn(lambda m, x, p=pads: F.pad(x, p, mode=mode)), shape, 1), rel=1e-6)
            assert sound(model, shape) is not None
            certified += 1
    assert certified >= 20


BROADCASTS = {
    "clamp": lambda x, c: torch.clamp(x, -c, c), "clamp_min": lambda x, c: torch.clamp_min(x, c),
    "clamp_max": lambda x, c: torch.clamp_max(x, c), "add": lambda x, c: x + c, "sub": lambda x, c: c - x,
    "rsub": lambda x, c: torch.rsub(x, c), "mul": lambda x, c: x * c, "div": lambda x, c: x / (c.abs() + 1),
    "maximum": lambda x, c: torch.maximum(x, c), "minimum": lambda x, c: torch.minimum(c, x),
    "lerp": lambda x, c: torch.lerp(x, c, 0.25), "where": lambda x, c: torch.where(c > 0, x, c),
    "expand": lambda x, c: x.expand(-1, 10), "expand_as": lambda x, c: x.expand_as(c.expand(len(x), 10)),
    "broadcast_to": lambda x, c: torch.broadcast_to(x, (len(x), 10)), "outer": lambda x, c: x @ c[None],
    "stack": lambda x, c: torch.stack([x] * 10, 1), "prelu": lambda x, c: F.prelu(x.expand(-1, 10), c),
    "where relu": lambda x, c: torch.where(x > c, x, c), "fmax": lambda x, c: torch.fmax(x, c),
    "broadcast_tensors": lambda x, c: torch.broadcast_tensors(x, c)[0] * 2,
    "masked_fill": lambda x, c: x.expand(-1, 10).masked_fill(c > 0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", BROADCASTS)
def test_calls_that_broadcast_count_the_copies(name):
    constant = torch.linspace(-0.5, 0.6, 10, dtype=torch.float64)
    model = Fn(lambda m, x: BROADCASTS[name](m.layer(x), m.c), c=constant)
    model.layer = nn.Linear(3, 1)
    assert sound(model, (3,)) is not None


def _aliasing():
    def after_the_head(m, x):
        features = m.body(x)
        y = m.head(features)
        features.mul_(0)
        return y

    def through_a_view(m, x):
        features = m.body(x)
        features.view(-1).mul_(10)
        return m.head(features)

    def view_made_before(m, x):
        features = m.body(x)
        seen = features[:, :1]
        features.mul_(10)
        return seen

    def view_made_before_part(m, x):
        features = m.body(x)
        seen = features.transpose(0, 1)
        features[:, 1:].mul_(10)
        return seen.transpose(0, 1)

    def chunk(m, x):
        a, b = m.body(x).chunk(2, 1)
        return torch.cat([a.clone().add_(b), b * 2], 1)

    def expanded(m, x):
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        out[:] = m.body(x)[:, :1]
        out[:, 2:].add_(m.body(x)[:, 1:3])
        return out

    def written_twice(m, x):
        out = m.body(x).new_empty(len(x), 4)
        out.copy_(m.body(x))
        kept = out.clone()
        out.zero_()
        return kept + out

    def detached(m, x):
        features = m.body(x)
        features.detach().mul_(5)
        return features

    def data(m, x):
        features = m.body(x)
        features.data.mul_(5)
        return features

    def input_itself(m, x):
        x.mul_(7)
        return m.body(x)

    def swapped(m, x):
        y = m.body(x)
        y[:, [0, 1]] = y[:, [1, 0]] * 3
        return y

    def accumulated(m, x):
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        for _ in range(4):
            out += m.body(x)
        return out

    return {name: function for name, function in locals().items() if callable(function)}


@pytest.mark.parametrize("name", _aliasing())
def test_writes_through_every_name_of_the_memory(name):
    model = Fn(_aliasing()[name])
    model.body, model.head = nn.Linear(4, 4), nn.Linear(4, 3)
    assert sound(model, (4,)) is not None


def test_a_certificate_survives_writes_after_the_head():
    model = Fn(_aliasing()["after_the_head"])
    model.body, model.head = nn.Linear(4, 4), nn.Linear(4, 3)
    images = torch.randn(20, 4)
    labels = model(images).argmax(1)
    radii = ts.certify(model, (images, labels)).radii
    assert radii.isfinite().all()
    assert (radii > 0).any()


GLOBAL = [torch.zeros(4)]


def _hidden():
    held, table, kept = [torch.zeros(4)], {"a": torch.zeros(4)}, torch.zeros(2, 4)

    class Holder:
        tensor = torch.zeros(4)

    def in_a_list(m, x):
        held[0].copy_(x[0])
        return x * 0 + held[0]

    def in_a_dictionary(m, x):
        table["a"][:] = 50 * x[0]
        return x * 0 + table["a"]

    def in_a_global(m, x):
        GLOBAL[0].add_(x.sum(0))
        return GLOBAL[0].expand_as(x)

    def in_a_class(m, x):
        Holder.tensor.copy_(x[0])
        return Holder.tensor.expand_as(x)

    def with_out(m, x):
        torch.add(x[:2], 1, out=kept)
        return x

    def in_the_module(m, x):
        m.kept.copy_(x[0])
        return x * m.kept

    def as_a_number(m, x):
        m.number = float(x.sum())
        return x * m.number

    def by_numpy(m, x):
        return x * 0 + torch.from_numpy(x.detach().numpy() * 50)

    def by_a_list(m, x):
        return x * 0 + torch.tensor(x.tolist()) * 50

    def by_numpy_of_a_copy(m, x):
        out = torch.zeros(x.shape)
        out.copy_(x)
        return x * 0 + torch.from_numpy(out.numpy()) * 50

    def by_items(m, x):
        return torch.stack([torch.stack([torch.tensor(v.item()) for v in row]) for row in x])

    def by_memory(m, x):
        return x * (1 + x.data_ptr() % 2)

    def by_deepcopy(m, x):
        import copy

        return 50 * copy.deepcopy(x)

    return {name: function for name, function in locals().items() if callable(function) and name != "Holder"}


@pytest.mark.parametrize("name", _hidden())
def test_values_that_hide_where_a_tensor_can_hide(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Fn(_hidden()[name], kept=torch.zeros(4))
        found = sound(model, (4,), 1e-3)
    assert found is None or name == "by_deepcopy"


def test_wrappers_that_look_like_compiled_models():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = nn.Linear(4, 4)

        def forward(self, x):
            return 10 * self._orig_mod(x)

    model = Wrapper()
    plain = ts.lipschitz_bound(model._orig_mod, (4,))
    assert ts.lipschitz_bound(model, (4,)) == pytest.approx(10 * plain)
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    plain = ts.lipschitz_bound(compiled, (4,))
    compiled.register_forward_hook(lambda module, args, output: 10 * output)
    assert ts.lipschitz_bound(compiled, (4,)) == pytest.approx(10 * plain)
    images = torch.randn(5, 4)
    labels = compiled(images).argmax(1)
    certificate = ts.certify(compiled, (images, labels))
    # Ten times the margins of a layer that is ten times as steep.
    torch.testing.assert_close(
        certificate.radii, ts.certify(compiled._orig_mod, (images, labels)).radii, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("taps", [1, 3, 5, 7])
def test_replaced_weights_are_read_with_their_own_shape(mode, taps):
    layer = nn.Conv1d(1, 2, 5, padding=2, padding_mode=mode, bias=False).double()
    layer.weight = nn.Parameter(torch.randn(2, 1, taps, dtype=torch.float64))
    assert sound(layer, (1, 9)) is not None
    assert ts.spectral_norm_bound(layer, (1, 9)) >= stretch(layer, (1, 9)) * (1 - 1e-6)
    assert ts.audit(layer, (1, 9)).bound >= stretch(layer, (1, 9)) * (1 - 1e-6)


def _changed_layers():
    def subclass(layer):
        class Louder(type(layer)):
            def _convolve_around(self, x):
                return 10 * super()._convolve_around(x)

            def _apply_series(self, x):
                return 10 * super()._apply_series(x)

        layer.__class__ = Louder
        return layer

    def own_forward(layer):
        plain = layer.forward
        layer.forward = lambda x: 10 * plain(x)
        return layer

    def own_method(layer):
        for name in ("_convolve_around", "_apply_series", "_branch"):
            if plain := getattr(layer, name, None):
                setattr(layer, name, lambda *a, plain=plain: 10 * plain(*a))
        return layer

    def another_parametrization(layer):
        class Times(nn.Module):
            def forward(self, weight):
                return 10 * weight

        parametrize.register_parametrization(layer, "weight", Times())
        return layer

    def other_numbers(layer):
        layer.stride, layer.padding = (1, 1), (1, 1)
        return layer

    def pre_hook(layer):
        layer.register_forward_pre_hook(lambda module, args: (10 * args[0],))
        return layer

    return {name: change for name, change in locals().items() if callable(change)}


@pytest.mark.parametrize("change", _changed_layers())
@pytest.mark.parametrize(
    "make",
    [
        lambda: ts.OrthoConv2d(4, 4, 3),
        lambda: ts.OrthoConv2d(4, 4, 3, method="soc"),
        lambda: ts.OrthoConvTranspose2d(4, 4, 3),
        lambda: ts.SLLBlock2d(4),
        lambda: ts.SandwichAOCConv2d(4, 4),
    ],
)
def test_layers_of_ours_that_were_changed(change, make):
    torch.manual_seed(0)
    sound(_changed_layers()[change](make().double()), (4, 4, 4), 1e-3)


def test_classes_that_were_changed(monkeypatch):
    plain = ts.OrthoConvTranspose2d.forward
    assert ts.lipschitz_bound(ts.OrthoConvTranspose2d(4, 4, 3), (4, 4, 4)) < 1.001
    monkeypatch.setattr(ts.OrthoConvTranspose2d, "forward", lambda self, x: 10 * plain(self, x), raising=False)
    assert ts.lipschitz_bound(ts.OrthoConvTranspose2d(4, 4, 3), (4, 4, 4)) >= 10 * (1 - 1e-5)
    monkeypatch.setattr(nn.Module, "_call_impl", _tenfold(nn.Module._call_impl))
    assert ts.lipschitz_bound(ts.SLLLinear(4), (4,)) >= 10 * (1 - 1e-5)


def _tenfold(plain):
    return lambda self, *args, **kwargs: 10 * plain(self, *args, **kwargs)


def test_tensor_subclasses_compute_what_they_compute():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            return 10 * result.as_subclass(torch.Tensor) if func is F.linear else result

    layer = nn.Linear(4, 4)
    plain = ts.lipschitz_bound(layer, (4,))
    weight = layer.weight.detach().as_subclass(Loud)
    with pytest.raises(NoRuleError, match="another class"):
        bound(lambda m, x: F.linear(x, weight), (4,))

    class Quiet(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
            return func(*plain, **(kwargs or {})) * (10 if func is F.linear else 1)

    weight = layer.weight.detach().as_subclass(Quiet)
    assert bound(lambda m, x: F.linear(x, weight), (4,)) >= 10 * plain * (1 - 1e-6)

    class Own(torch.Tensor):
        @staticmethod
        def __new__(cls, data):
            made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
            made.inner = data
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return 10 * func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    own = Own(layer.weight.detach().T.contiguous())
    with pytest.raises(NoRuleError, match="Own"):
        bound(lambda m, x: x @ own, (4,))


def test_operators_of_others_are_not_torchs_of_the_same_name():
    """A function of somebody's library may be called ``relu``, and do anything."""
    with torch.library._scoped_library("tests_fooling", "FRAGMENT") as library:
        for name in ("relu", "clone", "add_"):
            library.define(f"{name}(Tensor{'(a!)' if name.endswith('_') else ''} x) -> Tensor")
            library.impl(name, lambda x: 10 * x, "CompositeExplicitAutograd")
            called = getattr(torch.ops.tests_fooling, name)
            with pytest.raises(NoRuleError):
                bound(lambda m, x, called=called: called(x), (4,))


def test_every_place_in_the_batch_counts():
    def first_is_small(m, x):
        return torch.cat([0.1 * x[:1], x[1:]]) if len(x) == 2 else x

    with pytest.raises(NoRuleError, match="place"):
        bound(first_is_small, (4,))
    # Jumps of softplus do not hide it, nor do the rounding errors that float32 would have.
    with pytest.raises(NoRuleError, match="place"):
        bound(lambda m, x: F.softplus(torch.cat([-0.5 * x[:1], x[1:]])), (4,))


def test_rounding_of_the_smallest_and_largest_numbers():
    """Squares and products of these vanish or overflow, and their rounding errors must not."""
    matrix = torch.randn(3, 4, dtype=torch.float64)
    for small, large in ((1e-170, 1e170), (1e-200, 1e200), (1e160, 1e-160), (1e-300, 1e300)):
        model, one = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double(), torch.eye(4, dtype=torch.float64)
        model[0].weight.data, model[0].bias.data = small * one, 1e13 * small * one.sum(1)
        model[1].weight.data, model[1].bias.data = large * matrix, -1e13 * matrix.sum(1)
        images = torch.randn(20, 4, dtype=torch.float64)
        certificate = ts.certify(model, (images, (images @ matrix.T).argmax(1)))
        assert certificate.rounding > 1e-3
        assert (certificate.radii < images.norm()).all()


def test_a_disproved_bound_is_an_error_of_the_audit():
    class Wrong(nn.Module):
        def forward(self, x):
            return 10 * x

    ts.lipschitz.rule(Wrong)(lambda layer, shape: 1.0)
    with pytest.raises(RuntimeError, match=r"bound 1 is wrong: a slope of 10"):
        ts.audit(Wrong(), (4,))


def test_code_that_knows_that_it_is_traced():
    for looks in (torch.compiler.is_compiling, torch.jit.is_tracing, torch.is_grad_enabled):
        found = sound(Fn(lambda m, x, looks=looks: x if looks() else 10 * x), (4,))
        assert found is None or found == pytest.approx(10)
    with pytest.raises(NoRuleError):
        bound(lambda m, x: x if type(x).__name__ == "Traced" else 10 * x, (4,))


def test_the_model_is_as_before_after_a_trace():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), []

        def forward(self, x):
            self.last = x
            self.seen.append(x)
            return self.linear(x)

    model = Caches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call = nn.Module.__call__
    ts.lipschitz_bound(model, (4,))
    assert model.seen == []
    assert not hasattr(model, "last")
    assert nn.Module.__call__ is call
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_several_inputs_and_outputs_count_together():
    class Two(nn.Module):
        def forward(self, x, y):
            return {"sum": x.sum(1, keepdim=True) + 3 * y, "pair": (y, x[:, :1])}

    model = Two()
    found = ts.lipschitz_bound(model, [(4,), (2,)])
    matrix = torch.zeros(5, 6, dtype=torch.float64)
    matrix[:2, :4], matrix[0, 4], matrix[1, 5], matrix[2, 4], matrix[3, 5], matrix[4, 0] = 1, 3, 3, 1, 1, 1
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert exact <= found <= 1.6 * exact
    assert ts.lipschitz_bound(model, {"x": (4,), "y": (2,)}) == pytest.approx(found)
    report = ts.audit(model, [(4,), (2,)])
    assert report.lower_bound == pytest.approx(exact, rel=1e-3)
    assert ts.AuditReport.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="positive integers"):
        ts.lipschitz_bound(model, [(4,), (0,)])


def _repeated_maps(x, layer):
    """Two maps of each sample in the batch of a convolution, which repeat other positions with other signs."""
    first = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:2], -x[:, 1:2]], -1)
    second = torch.cat([x[:, :1], x[:, 1:2], x[:, 1:2]], -1)
    return layer(torch.stack([first, second], 1).view(2 * len(x), 1, -1)).view(len(x), -1)


def _half_by_fill(x):
    out = torch.zeros(len(x), 1, dtype=torch.half)
    for i in range(len(x)):
        out[i].fill_(x[i, 0])
    return out.to(x.dtype)


def _data_replaced(x):
    y = torch.zeros_like(x)
    y.data = x
    return y


def _in_inference_mode(x, layer):
    with torch.inference_mode():
        return layer(x)


# What it is, and whether it has a bound.
SPECIAL = {
    "condition of other entries": (lambda x: torch.where((x > 0).flip(1), x, 0.0), (3,), False),
    "condition of repeated entries": (lambda x: torch.where((x > 0)[:, [0, 0, 2]], x, -x), (3,), False),
    "condition of other pairs": (lambda x: torch.where((x[:, :2] > x[:, 2:]).flip(1), x[:, :2], x[:, 2:]), (4,), False),
    "scatter that multiplies": (lambda x: x.clone().scatter_(1, torch.zeros(len(x), 1).long(), 7.0, reduce="multiply"), (3,), False),
    "scatter that adds": (lambda x: torch.scatter(x, 1, torch.zeros(x.shape).long(), x, reduce="add"), (3,), False),
    "smallest and largest of one": (lambda x: torch.cat(torch.aminmax(x, dim=1, keepdim=True), 1), (1,), True),
    "smallest and largest of two": (lambda x: torch.cat(torch.aminmax(x, dim=1, keepdim=True), 1), (2,), True),
    "difference of the same, nearly": (lambda x: torch.sub(x, x, alpha=0.99999999) * 1e8, (2,), True),
    "sum of the same with a sign": (lambda x: torch.sub(x, x, alpha=-0.5), (2,), True),
    "interpolation by a number": (lambda x: torch.lerp(x, x.flip(1), 1.7), (3,), True),
    "softplus that jumps": (lambda x: F.softplus(x, beta=1e-9), (2,), False),
    "nearest neighbours": (lambda x: F.interpolate(x, size=61, mode="nearest-exact"), (1, 2), True),
    "rounding by fill": (_half_by_fill, (1,), False),
    "data replaced": (_data_replaced, (2,), False),
    "constant integers beside values": (lambda x: torch.cat([x, torch.full((len(x), 2), 10**6)], 1), (3,), True),
    "memory that was not written": (lambda x: F.pad(x, (-2, 3, 3, -2), mode="circular"), (2, 4, 4), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_special_cases_of_rules(name):
    function, shape, certified = SPECIAL[name]
    found = sound(Fn(lambda m, x: function(x) * m.one, one=torch.ones(1, dtype=torch.float64)), shape)
    assert (found is not None) == certified


def test_maps_that_share_a_call_but_not_their_pattern():
    model = Fn(lambda m, x: _repeated_maps(x, m.layer))
    model.layer = nn.Conv1d(1, 1, 3, bias=False)
    model.layer.weight.data = torch.tensor([[[10.0, 1.0, 1.0]]])
    assert sound(model, (2,)) is not None


def test_inference_mode_inside_of_a_model():
    model = Fn(lambda m, x: _in_inference_mode(x, m.layer))
    model.layer = nn.Linear(4, 4)
    assert ts.lipschitz_bound(model, (4,)) == pytest.approx(ts.lipschitz_bound(model.layer, (4,)))


def test_a_radius_of_a_difference_that_cancels_is_not_infinite():
    model = nn.Sequential(Fn(lambda m, x: torch.sub(x, x, alpha=0.99999999) * 1e8), nn.Linear(3, 3))
    images = torch.randn(8, 3)
    labels = model(images).argmax(1)
    assert ts.certify(model, (images, labels)).radii.isfinite().all()
