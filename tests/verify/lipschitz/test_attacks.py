"""Attacks on bounds and certificates that once succeeded: each as it was, with what it is now."""

import contextlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import trysquare as ts
from tests.verify.lipschitz.networks import Fn
from tests.verify.lipschitz.test_fooling import sound
from trysquare import torch_internals
from trysquare.nn.layers import activations
from trysquare.nn.linalg.kernels import adjoint, compose
from trysquare.verify.lipschitz import ExactEvaluation, NoRuleError, analyse

DOUBLE = torch.float64


def _copied(x, times=5):
    """Whether ``reshape`` copies depends on strides that torch keeps."""
    y = F.relu(x.transpose(1, 2))
    y.transpose(1, 2).reshape(len(x), -1).mul_(times)
    return y


def _channels_last(x):
    y = F.max_pool2d(x.to(memory_format=torch.channels_last), 2)
    y.permute(0, 2, 3, 1).reshape(len(x), -1).mul_(5)
    return y


def _flattened(x):
    y = x.transpose(1, 2) + 1
    y.mT.flatten(1)[:, :2] *= 4
    return y.sum(2)


def _contiguous(x):
    y = x.transpose(1, 2) * 1.0
    y.transpose(1, 2).contiguous().mul_(5)
    return y


def _zero_padded_transposes(x):
    kernel = torch.tensor([[[10.0, 0.0, -10.0]]], dtype=DOUBLE)

    def around(z, k):
        return F.conv_transpose1d(F.pad(z, (1, 1)), k, padding=2)

    return (x - 2 * around(around(x, kernel).relu(), kernel.flip(-1))).flatten(1)


def _other_dilation(x):
    kernel = torch.tensor([[[-0.5, 0.0, 0.5]]], dtype=DOUBLE)
    hidden = F.conv1d(x, kernel, padding=2, dilation=2).relu()
    return F.conv1d(x, torch.ones(1, 1, 1, dtype=DOUBLE)) + F.conv1d(hidden, -2 * kernel.flip(-1), padding=2)[..., :8]


_A, _T = (
    torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(46)) for shape in ((4, 4, 1), (4, 1, 1))
)
_S = -2 * compose(_A, adjoint(_T, 4), 1)


def _other_groups(x):
    return F.conv1d(x, _A) + F.conv1d(F.conv1d(x, _T, groups=4).relu(), _S, groups=4)


def _past_the_end(x):
    kernel = torch.tensor([[[0.5, 0.5]]], dtype=DOUBLE)
    hidden = F.relu(F.conv1d(x, kernel))
    return x - F.pad(2 * F.conv1d(F.pad(hidden, (1, 0)), kernel.flip(-1)), (0, 1))


def _by_numpy(x):
    memory = torch.zeros(x.shape, dtype=x.dtype)
    alias = torch.from_numpy(memory.numpy())
    memory.copy_(x)
    return x + 1000 * F.relu(torch.nan_to_num(alias) - 100)


def _by_dlpack(x):
    memory = torch.zeros(x.shape, dtype=x.dtype)
    alias = torch.from_dlpack(memory)
    memory.copy_(x)
    return x + 1000 * F.relu(torch.nan_to_num(alias) - 100)


def _by_bits(x):
    memory = torch.zeros(x.shape, dtype=x.dtype)
    alias = memory.view(torch.int64)
    memory.copy_(x)
    return x + 1e-12 * F.relu(alias.double() - 4636737291354636288.0)


def _less_one(x):
    return torch.cat([x * x, -torch.ones(len(x), 1).to(x)], 1).sum(1, keepdim=True).sqrt()


def _padded_signs(x):
    return (F.pad(x, (0, 1), value=1.0) * F.pad(x, (0, 1), value=-1.0)).sum(1, keepdim=True).sqrt()


def _scaled_product(x):
    return torch.addmv(torch.zeros(len(x), dtype=x.dtype), x, torch.ones(3).to(x), alpha=5)[:, None]


# What it is, the shape of its input, and whether it may be refused.
ATTACKS = {
    "copy or view": (_copied, (3, 4), True), "channels last": (_channels_last, (2, 4, 4), True),
    "flatten": (_flattened, (3, 4), True), "contiguous": (_contiguous, (3, 4), True),
    "zeros around a transposed convolution": (_zero_padded_transposes, (1, 2), False),
    "another dilation": (_other_dilation, (1, 8), False), "other groups": (_other_groups, (4, 1), False),
    "past the end of a map": (_past_the_end, (1, 6), False), "numpy": (_by_numpy, (3,), True),
    "dlpack": (_by_dlpack, (3,), True), "bits": (_by_bits, (3,), True), "root less one": (_less_one, (1,), True),
    "root of padded signs": (_padded_signs, (1,), True), "addmv": (_scaled_product, (3,), False),
    "nothing at all": (lambda x: x[:, :, :0].relu().flatten(1).sum(1, keepdim=True) + x[:, 0].tanh(), (5, 3), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_bounds_withstand(name):
    function, shape, may_refuse = ATTACKS[name]
    found = sound(Fn(lambda m, x: function(x) + 0 * m.p, p=torch.zeros(1, dtype=DOUBLE)), shape)
    assert found is not None or may_refuse


class Same(nn.Module):
    def forward(self, x):
        return x


class Keeps(nn.Module):
    def forward(self, x):
        self.kept = 7 * x
        return x * 1.0


ts.lipschitz.rule(Same, Keeps)(lambda layer, shape: 1.0)


def test_rules_do_not_cut_what_a_module_shares_with_others():
    def through(m, x):
        x = x * 1.0
        m.part(x).mul_(5)
        return x

    model = Fn(through)
    model.part = Same()
    assert sound(model, (3,)) == pytest.approx(5)
    model = Fn(lambda m, x: m.part(x) + m.part.kept)
    model.part = Keeps()
    with pytest.raises(NoRuleError, match="inside of a module"):
        ts.lipschitz_bound(model, (3,))


def test_autocast_around_one_layer_is_followed():
    def short(m, x):
        with torch.autocast("cpu", torch.float16):
            return m.layer(x).float()

    model = Fn(short)
    model.layer = ts.OrthoConvTranspose1d(8, 8, 3)
    with pytest.raises(NoRuleError):
        ts.lipschitz_bound(model.eval(), (8, 6))


class Louder(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 5 * result if func is torch.clamp else result


def test_functions_that_blocks_call_may_not_be_replaced(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(activations, "_fold_in_half", lambda a, b, t: (5 * a, 5 * b))
        assert sound(ts.Householder(4), (4,)) is None
    with monkeypatch.context() as patch:
        plain = F.linear
        patch.setattr(F, "linear", lambda *args: 5 * plain(*args))
        found = sound(ts.SandwichLinear(4, 4), (4,))
        assert found is None or found > 5
    code = ts.NActivation.forward.__code__
    try:
        ts.NActivation.forward.__code__ = (lambda self, input: 5 * input).__code__  # noqa: A006
        assert sound(ts.NActivation(4), (4,)) in (None, pytest.approx(5))
    finally:
        ts.NActivation.forward.__code__ = code

    def inside(m, x):
        with Louder():
            return m.layer(x)

    model = Fn(inside)
    model.layer = ts.NActivation(4)
    sound(model, (4,))


def test_the_smallest_weights_do_not_vanish():
    layer = nn.Linear(1, 2, bias=False, dtype=DOUBLE)
    layer.weight.data = torch.tensor([[0.0], [1.0]], dtype=DOUBLE)
    model = Fn(lambda m, x: torch.cat([m.layer(x)[:, :1] * 1e100, m.layer(x)[:, 1:] * 1e-70], 1))
    model.layer = layer
    assert ts.lipschitz_bound(model, (1,)) >= 1e-70


def _certified(function, image, label):
    model = Fn(lambda m, x: function(x) + 0 * m.p, p=torch.zeros(1, dtype=DOUBLE))
    images = torch.tensor([image], dtype=DOUBLE)
    return ts.certify(model, (images, torch.tensor([label])), measured_samples=0).radii


def test_rounding_of_a_mean_that_is_taken_off_counts():
    image = torch.full((1, 3), 0.1, dtype=DOUBLE)
    weight = torch.zeros(2, 3, dtype=DOUBLE)
    weight[0] = 1e18 * torch.sign((image - image.mean(1, keepdim=True))[0])
    bias = torch.tensor([0.0, 0.5], dtype=DOUBLE)
    radii = _certified(lambda x: F.linear(x - x.mean(1, keepdim=True), weight, bias), [0.1] * 3, 0)
    assert (radii == 0).all()


def test_squares_that_vanish_count():
    def with_a_constant(root):
        return lambda x: torch.cat([root(x), torch.ones(len(x), 1, dtype=DOUBLE) * 1e-13], 1)

    norm = with_a_constant(lambda x: (x * 1e-162).norm(dim=1, keepdim=True) * 1e150)
    assert (_certified(norm, [0.3, 0.4], 1) == 0).all()

    def spelled_out(x):
        y = x * 1e-162
        return (1e18 * (y * y).sum(1, keepdim=True)).sqrt() * 1e141

    assert (_certified(with_a_constant(spelled_out), [0.3, 0.4], 1) == 0).all()


def test_squares_that_overflow_count():
    def function(x):
        norm = (x * 1e155).norm(dim=1, keepdim=True).clamp_max(9e154) * 1e-155
        return torch.cat([norm, x[:, :1] * 0 + 0.7], 1)

    assert (_certified(function, [0.3, 0.4], 1) == 0).all()  # in exact arithmetic the norm is 0.5, and in float64 0.9
    assert (_certified(function, [0.3, 0.4], 0) == 0).all()


def test_numbers_that_are_added_in_many_places_round_in_each():
    many, number, image = 1 << 20, 1e10 + 0.3, torch.full((1, 1), 0.1, dtype=DOUBLE)

    def function(m, x):
        places = torch.arange(len(x))[:, None], torch.arange(many)[None]
        return x.expand(-1, many).index_put(places, torch.tensor(number, dtype=DOUBLE), accumulate=True)

    found = analyse(Fn(function, p=torch.zeros(1, dtype=DOUBLE)), (1,), compare=False)
    result, bound = ExactEvaluation(found.graph, found.gains)([image.expand(2, 1)])
    error = float(Fraction(number) + Fraction(0.1) - Fraction(float(result[0, 0])))
    assert abs(error) * math.sqrt(2 * many) <= bound


def test_rows_further_apart_than_any_number():
    rows = torch.tensor([[1.0] * 3, [-1.0] * 3], dtype=DOUBLE) * 1e308
    radius = ts.certified_radius(torch.tensor([[1.0, 0.0]], dtype=DOUBLE), torch.tensor([0]), head=rows)
    assert 0 <= float(radius) < 1e-300


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_wherever_they_are(bad):
    for layer, shape in ((nn.Linear(3, 2), (3,)), (nn.Conv1d(2, 2, 2), (2, 4)), (nn.BatchNorm1d(3), (3,))):
        for name in ("weight", "bias", "running_mean"):
            if not hasattr(layer, name):
                continue
            kept = getattr(layer, name).data.clone()
            getattr(layer, name).data.reshape(-1)[0] = bad
            with pytest.raises(ValueError, match=r"not finite|NaN|infinite"):
                ts.lipschitz_bound(layer.eval(), shape)
            getattr(layer, name).data = kept


def _parts(split):
    def function(x):
        y = x * 1
        for part in split(y.view(-1), x.shape[1]):
            part.add_(1000 * F.relu(part - 50))
        return y

    return function


@pytest.mark.parametrize(
    "split",
    [
        torch.unsafe_split, lambda y, size: torch.unsafe_chunk(y, len(y) // size),
        lambda y, size: torch.ops.aten.unsafe_split_with_sizes(y, [size] * (len(y) // size)), torch.split,
    ],
)  # fmt: skip
def test_parts_that_share_memory_are_written_to_whatever_torch_calls_them(split):
    # Torch's functionalization takes the unsafe ones for copies.
    model = of(_parts(split))
    image = torch.full((1, 4), 60.0, dtype=DOUBLE)
    assert float((model(image + 1) - model(image)).norm()) / 2 <= ts.lipschitz_bound(model, (4,))


def test_operators_that_share_memory_in_secret_are_refused():
    with torch.library._scoped_library("trysquare_tests", "DEF") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x.view(x.shape), "CompositeExplicitAutograd")

        class Known(nn.Module):
            def forward(self, x):
                y = x * 1
                torch.ops.trysquare_tests.same(y).add_(1000 * F.relu(y - 50))
                return y

        ts.lipschitz.rule(Known)(lambda layer, shape: 1001.0)
        for model in (Known(), of(Known().forward)):
            with pytest.raises(NoRuleError, match=r"does not say so|no Lipschitz rule"):
                ts.lipschitz_bound(model, (4,))


def of(function):
    """A network that is a function, in float64."""
    return Fn(lambda m, x: function(x), p=torch.zeros(1, dtype=DOUBLE))


# -- where memory really is


def _windows(x):
    z = F.relu(x - 100)
    z.unfold(1, 2, 1).mul_(1000.0)
    return x + z


def _windows_added(x):
    z = x.clone()
    w = z.unfold(1, 3, 1)
    w += w.clone()
    return z


def _applied(x):
    memory = torch.zeros(x.shape, dtype=x.dtype)
    memory.copy_(x)
    return memory.apply_(lambda v: v if not v > 100 else 1000 * v)


def _mapped(x):
    memory = torch.zeros(x.shape, dtype=x.dtype)
    memory.copy_(x)
    return memory.map_(memory.clone(), lambda v, w: v if not v > 100 else 1000 * w)


def _exchanged(x, offset=0):
    memory = torch.zeros(len(x), x.shape[1] + offset, dtype=x.dtype)
    alias = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(memory[:, offset:]))
    memory[:, offset:].copy_(x)
    return x + 1000 * F.relu(torch.where(alias == alias, alias, 0.0) - 100)


MEMORY = [_windows, _windows_added, _applied, _mapped, _exchanged, lambda x: _exchanged(x, 1)]


@pytest.mark.parametrize("attack", [*MEMORY, lambda x: x.clone().apply_(abs)])
def test_memory_that_is_reached_in_other_ways_is_refused(attack):
    with pytest.raises(NoRuleError):
        ts.lipschitz_bound(of(attack), (5,))


class _Permuted(nn.Module):
    """A write that reaches the features or a copy of them, by how a convolution lays out its result."""

    def __init__(self, kind, inside=False):
        super().__init__()
        self.conv, self.inside, self.kind = nn.Conv2d(4, 4, 3, padding=1, bias=False), inside, kind
        self.conv.weight.data.abs_()

    def forward(self, x):
        y = F.relu(self.conv(x.contiguous(memory_format=torch.channels_last) if self.inside else x) - 10)
        z = y.permute(0, 2, 3, 1)
        {"flatten": lambda: z.flatten(1), "reshape": lambda: z.reshape(len(x), -1), "contiguous": z.contiguous}[
            self.kind
        ]().mul_(1000.0)
        return y.flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["flatten", "reshape", "contiguous"])
@pytest.mark.parametrize("where", ["weights", "inside", "nowhere"])
def test_layouts_of_convolutions_are_those_of_the_program(where, kind, dtype):
    model = _Permuted(kind, inside=where == "inside").to(dtype).eval()
    model = model.to(memory_format=torch.channels_last) if where == "weights" else model
    x = torch.full((1, 4, 8, 8), 50.0, dtype=dtype)
    with torch.no_grad():
        stretch = float((model(1.1 * x) - model(x)).double().norm() / (0.1 * x).double().norm())
    try:
        bound = ts.lipschitz_bound(model, (4, 8, 8))
    except NoRuleError:
        return
    assert bound > 0.9 * stretch


def test_ordinary_networks_with_channels_last_and_writes_in_place_are_certified():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip
    plain = ts.lipschitz_bound(model, (3, 16, 16))
    assert ts.lipschitz_bound(model.to(memory_format=torch.channels_last), (3, 16, 16)) == pytest.approx(plain)


# -- batches that are another function than the one that was bounded


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1.0 if self.calls < 12 else 100.0)


class _Large(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 3, bias=False), change

    def forward(self, x):
        return self.change(self.linear(x), len(x) > 3)


CHANGES = {
    "factor": lambda y, large: y * (1000.0 if large else 1.0),
    "copies": lambda y, large: torch.stack([y] * (100 if large else 1)).sum(0),
    "constant": lambda y, large: y + torch.tensor([100.0 if large else 0.0, 0.0, 0.0]),
    "rows": lambda y, large: y * torch.where(torch.arange(len(y)) < 3, 1.0, 1000.0)[:, None],
    "another call": lambda y, large: y.relu() if large else y,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_batch_that_is_computed_in_another_way_is_refused(name):
    images, labels = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
    model = _Large(CHANGES[name])
    ts.certify(model, (images[:2], labels[:2]))
    with pytest.raises(NoRuleError):
        ts.certify(model, (images, labels))


def test_a_model_that_changes_with_the_number_of_calls_is_refused():
    with pytest.raises(NoRuleError):
        ts.certify(_Counting(), (torch.randn(64, 3), torch.zeros(64, dtype=torch.long)), batch_size=2)


class _Shifting(nn.Module):
    """Something that it holds changes at the tenth batch, in a way that no version counter sees."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.calls = nn.Linear(3, 3, bias=False), kind, 0
        self.register_buffer("mask", torch.tensor([True, True, False]))
        self.register_buffer("index", torch.tensor([0, 1, 2]))
        self.numbers = np.ones(3, np.float32)
        self.factors = itertools.chain([1.0] * 40, itertools.repeat(100.0))

    def forward(self, x):
        self.calls += 1
        late, y = self.calls > 40, self.linear(x)
        if self.kind == "data" and late:
            self.linear.weight.data = 100 * torch.eye(3)
        if self.kind == "numpy" and late:
            self.linear.weight.detach().numpy()[:] = 100.0
        if self.kind == "mask":
            return torch.where(~self.mask if late else self.mask, y, 100 * y)
        if self.kind == "index":
            return y[:, self.index * 0 if late else self.index]
        if self.kind == "array":
            self.numbers[0] = 100.0 if late else 1.0
            return y * torch.from_numpy(self.numbers.copy())
        if self.kind == "iterator":
            return y * next(self.factors)
        return y


@pytest.mark.parametrize("kind", ["data", "numpy", "mask", "index", "array", "iterator"])
def test_what_changes_between_batches_is_refused(kind):
    ts.certify(_Shifting("nothing"), (torch.randn(200, 3), torch.zeros(200, dtype=torch.long)), batch_size=2)
    with pytest.raises((NoRuleError, ValueError)):
        ts.certify(_Shifting(kind), (torch.randn(200, 3), torch.zeros(200, dtype=torch.long)), batch_size=2)


class _Trained:
    """Batches of random images, between which something happens to the model."""

    def __init__(self, change):
        self.change = change

    def __iter__(self):
        images, labels = torch.empty(8, 6), torch.empty(8, dtype=torch.long)
        for number in range(4):
            torch.manual_seed(number)
            images.normal_(), labels.random_(3)  # the same tensors each time
            yield images, labels
            self.change()


@torch.no_grad()
def _step(model):
    for weight in model.parameters():
        weight += 1e-5 * torch.randn_like(weight)


def _by_data(model):
    model[0].weight.data = model[0].weight.data * 1.00001


@torch.no_grad()
def _statistics(model):
    model.train()
    model[1].momentum = 1e-5
    model(torch.randn(8, 6))
    model.eval()


@pytest.mark.parametrize("change", [_step, _by_data, _statistics])
def test_a_model_that_drifts_between_batches_is_refused(change):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    with pytest.raises(NoRuleError, match="was changed while the data was read"):
        ts.certify(model, _Trained(lambda: change(model)))


def test_tensors_that_a_loader_uses_again_are_no_other_labels():
    model = nn.Linear(6, 3)
    batches = [(images.clone(), labels.clone()) for images, labels in _Trained(int)]
    expected, found = ts.certify(model, batches), ts.certify(model, _Trained(int))
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.radii, expected.radii)


def test_a_model_that_prints_its_values_is_refused():
    with pytest.raises(NoRuleError, match=r"print|repr|value"):
        ts.lipschitz_bound(of(lambda x: x * (100.0 if "9" in repr(x) else 1.0)), (3,))


# -- orders of norms


@pytest.mark.parametrize("order", [1, 3, 16, 1000, 0.5, -math.inf])
def test_norms_whose_powers_vanish_are_refused(order):
    with pytest.raises(NoRuleError, match="order"):
        ts.lipschitz_bound(of(lambda x: torch.linalg.vector_norm(x, ord=order, dim=1, keepdim=True)), (3,))


@pytest.mark.parametrize("order", [2, math.inf])
def test_norms_that_have_a_rule(order):
    assert sound(of(lambda x: torch.linalg.vector_norm(x, ord=order, dim=1, keepdim=True)), (3,)) == pytest.approx(1)


# -- what answered with an exception of somebody else's


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.abs() + 1) ** torch.tensor([0.5, 0.5, 0.5], dtype=DOUBLE),
        lambda x: torch.sparse.mm(torch.eye(3, dtype=DOUBLE).to_sparse(), x.T).T,
        lambda x: None,
        lambda x: 3,
        lambda x: [],
    ],
)
def test_what_has_no_bound_says_why(function):
    with pytest.raises(ValueError, match=r"rule|sparse|no numbers|Lipschitz"):
        ts.lipschitz_bound(of(function), (3,))


def test_empty_maps_are_refused_as_by_torch():
    def beside(x):
        return torch.cat([x, F.conv_transpose1d(x[:, :, :0].relu(), torch.ones(2, 2, 3, dtype=DOUBLE))], 2)

    with pytest.raises(ValueError, match="zero batch or zero channel"):
        ts.lipschitz_bound(of(beside), (2, 3))


# -- heads behind a temperature


@pytest.mark.parametrize("change", [lambda z: 20 * z, lambda z: z / 0.05, lambda z: 3 - z * 4, lambda z: -z])
def test_factors_behind_a_head_keep_it(change):
    torch.manual_seed(0)
    body, head = nn.Sequential(ts.OrthoLinear(8, 8), nn.ReLU()).double(), nn.Linear(8, 10).double()
    model = nn.Sequential(body, head, of(change))
    images = torch.randn(16, 8, dtype=DOUBLE)
    labels = model(images).argmax(1)
    found = ts.certify(model, (images, labels))
    assert found.pairwise
    logits = model(images).detach()
    factor = float((change(torch.ones(1, 1)) - change(torch.zeros(1, 1))).abs())
    top = logits.gather(1, labels[:, None])
    distance = factor * torch.cdist(head.weight, head.weight)[labels] + torch.eye(10, dtype=DOUBLE)[labels] * 1e9
    gap = (top - logits + torch.eye(10, dtype=DOUBLE)[labels] * 1e18) / distance
    torch.testing.assert_close(found.radii, gap.amin(1).detach(), rtol=1e-5, atol=1e-9)


def _by_format(x):
    y = F.interpolate(x.contiguous(memory_format=torch.channels_last), scale_factor=2)
    big = torch.relu(y - 50)
    big.to(memory_format=torch.contiguous_format).zero_()
    return y + 1000 * big


def _by_buffer(x):
    y = F.interpolate(x.contiguous(memory_format=torch.channels_last), scale_factor=2)
    big = torch.empty_like(y)
    big.copy_(torch.relu(y - 50))
    big.contiguous().zero_()
    return y + 1000 * big


@pytest.mark.parametrize("attack", [_by_format, _by_buffer])
def test_layouts_of_interpolation(attack):
    x = torch.full((1, 2, 4, 4), 100.0, dtype=DOUBLE)
    slope = float((attack(x + 1) - attack(x)).norm() / torch.ones_like(x).norm())
    with contextlib.suppress(NoRuleError):
        assert ts.lipschitz_bound(of(attack), (2, 4, 4)) >= slope


def test_randomized_slopes_in_place():
    assert ts.lipschitz_bound(nn.Sequential(nn.Linear(3, 3), nn.RReLU(inplace=True)).eval(), (3,)) > 0


# What the user has switched on for all tensors, and is not about ours.
SWITCHES = {
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


@contextlib.contextmanager
def _by_default(setter, value, usual):
    setter(value)
    try:
        yield
    finally:
        setter(usual)


SWITCHES["default device"] = lambda: _by_default(torch.set_default_device, "meta", None)
SWITCHES["default dtype"] = lambda: _by_default(torch.set_default_dtype, torch.float64, torch.float32)


def _what_is_known(model, images):
    certificate = ts.certify(model, (images, torch.zeros(len(images), dtype=torch.long, device="cpu")))
    return (
        ts.lipschitz_bound(model, (3, 8, 8)), ts.audit(model, (3, 8, 8)).bound, *certificate.radii.tolist(),
        ts.lipschitz_lower_bound(model, images) > 0, ts.spectral_norm_bound(model[0], (3, 8, 8)),
        *ts.singular_values(model[0], (3, 8, 8)).tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("make", [lambda: ts.OrthoConv2d(3, 8, 3, stride=2), lambda: nn.Conv2d(3, 8, 3, 2, 1)])
def test_defaults_for_the_users_tensors_are_not_about_ours(switch, make):
    model = nn.Sequential(make(), ts.MaxMin(), nn.Flatten(), ts.SLLLinear(128), nn.Linear(128, 3)).eval()
    images = torch.rand(4, 3, 8, 8)
    plain = _what_is_known(model, images)
    with SWITCHES[switch]():
        assert _what_is_known(model, images) == pytest.approx(plain, rel=1e-4)


def test_the_users_device_is_that_of_the_model():
    model = Fn(lambda m, x: x + torch.ones(3), w=torch.ones(3))
    assert ts.lipschitz_bound(model, (3,)) == pytest.approx(1)
    with torch.device("meta"), pytest.raises(ValueError, match=r"without numbers|meta"):
        ts.lipschitz_bound(model, (3,))


def test_tensors_without_numbers_say_so():
    model = nn.Linear(3, 3)
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="FakeTensorMode"):
        ts.lipschitz_bound(model, (3,))


BLOCKS = {
    "cpl": lambda: ts.CPLLinear(12), "sll": lambda: ts.SLLLinear(12),
    "transposed": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), ts.OrthoConvTranspose1d(3, 2, 3)),
    "terms": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), ts.OrthoConv1d(3, 6, 3, method="soc")),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_rounding_by_autocast_is_no_other_function(name):
    torch.manual_seed(0)
    for _ in range(5):
        model = BLOCKS[name]().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.5 * torch.randn_like(weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert 0.9 < ts.lipschitz_bound(model, (12,)) < 1.02


class _Tenfold(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 10 * result.as_subclass(torch.Tensor) if func is F.linear else result


class _Named(torch.Tensor):
    pass


READERS = {
    "bound": lambda layer: ts.lipschitz_bound(nn.Sequential(layer), (4,)),
    "norm": lambda layer: ts.spectral_norm_bound(layer, (4,)), "any size": ts.spectral_norm_bound,
    "values": lambda layer: ts.singular_values(layer, (4,)).max(),
    "extremes": lambda layer: ts.extreme_singular_values(layer, (4,)).largest,
    "head": lambda layer: ts.certified_radius(torch.randn(2, 4), torch.zeros(2, dtype=torch.long), head=layer).sum(),
    "weight": lambda layer: ts.certified_radius(
        torch.randn(2, 4), torch.zeros(2, dtype=torch.long), head=layer.weight
    ).sum(),
}  # fmt: skip


@pytest.mark.parametrize("read", READERS)
def test_weights_that_say_what_is_computed_are_not_read_as_numbers(read):
    layer = nn.Linear(4, 4)
    del layer.weight
    layer.weight = nn.Parameter(torch.randn(4, 4).as_subclass(_Tenfold))
    with pytest.raises(ValueError, match=r"as_subclass\(torch.Tensor\)"):
        READERS[read](layer)
    del layer.weight
    layer.weight = nn.Parameter(torch.randn(4, 4).as_subclass(_Named))
    if read == "bound":
        with pytest.raises(ValueError, match=r"as_subclass\(torch.Tensor\)"):
            READERS[read](layer)
    else:
        assert float(READERS[read](layer)) >= 0


class _Looking(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.words, self.linear, self.change = nn.Embedding(10, 4), nn.Linear(4, 4), change

    def forward(self, x):
        return self.words(self.change(self, x)).flatten(1)


def test_tokens_that_are_computed_say_why():
    rows = torch.linalg.matrix_norm(_Looking(None).words.weight, 2)
    for moved in (lambda m, x: x.flip(1), lambda m, x: x[:, 1:], lambda m, x: torch.cat([x, x[:, :1]], 1)):
        assert 0.1 * rows < ts.lipschitz_bound(_Looking(moved), (4,))
    for computed in (lambda m, x: x + 1, lambda m, x: x % 3, lambda m, x: x.clamp(0, 3)):
        with pytest.raises(NoRuleError, match="integers that depend on the input"):
            ts.lipschitz_bound(_Looking(computed), (4,))
    for real in (lambda m, x: m.linear(x), lambda m, x: m.linear(x.float())):
        with pytest.raises(NoRuleError, match="not values that were computed"):
            ts.lipschitz_bound(_Looking(real), (4,))


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.groups, self.linear = nn.Embedding(9, 4), nn.Embedding(5, 3), nn.Linear(17, 5)

    def forward(self, numbers, words, group):
        parts = [numbers, self.words(words).flatten(1), self.groups(group.squeeze(1))]
        return {"out": self.linear(torch.cat(parts, 1)), "numbers": numbers}


def test_tokens_beside_numbers():
    model = _Table().eval()
    shapes = {"numbers": (6,), "words": (2,), "group": (1,)}
    weight, words, groups = (part.weight.detach() for part in (model.linear, model.words, model.groups))
    parts = [weight[:, :6], weight[:, 6:10] @ words.T, weight[:, 10:14] @ words.T, weight[:, 14:] @ groups.T]
    jacobian = torch.cat([torch.cat(parts, 1), torch.eye(6, 6 + 9 + 9 + 5)])
    norm = float(torch.linalg.matrix_norm(jacobian, 2))
    found = ts.lipschitz_bound(model, shapes)
    assert norm <= found <= 3 * norm
    assert ts.lipschitz_bound(model, list(shapes.values())) == found
    assert ts.audit(model, shapes).lower_bound is None
    model.forward = lambda numbers, words, group: (model.words(words), group.long())
    with pytest.raises(NoRuleError, match="do not go to an embedding"):
        ts.lipschitz_bound(model, list(shapes.values()))
    with pytest.raises(ValueError, match="shape"):
        ts.lipschitz_bound(nn.Sequential(nn.Embedding(9, 4), nn.Linear(5, 2)), (3,))


def test_an_overflow_is_named():
    model = nn.Sequential(nn.Linear(4, 4), Fn(lambda m, x: x * 1e4 * 1e4)).half()
    with pytest.raises(NoRuleError, match="overflow in float16"):
        ts.lipschitz_bound(model, (4,))
