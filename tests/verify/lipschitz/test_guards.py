"""What is followed is the function that the model computes: a fixed one, of each sample on its own."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import trysquare as ts
from tests.verify.lipschitz.networks import Fn, bound
from trysquare.verify.lipschitz import NoRuleError


def identity():
    return Fn(lambda m, x: x * 1.0)


class Called(nn.Module):
    def __call__(self, x):
        return 10 * super().__call__(x)

    def forward(self, x):
        return x * 1.0


class CalledLinear(nn.Linear):
    def __call__(self, x):
        return 10 * super().__call__(x)


def test_hooks_and_overrides_of_the_root_count():
    hooked, before, replaced = identity(), identity(), identity()
    hooked.register_forward_hook(lambda module, args, output: 10 * output)
    before.register_forward_pre_hook(lambda module, args: (10 * args[0],))
    replaced.forward = lambda x: 10 * x
    for model in (hooked, before, replaced, Called()):
        assert ts.lipschitz_bound(model, (4,)) == pytest.approx(10)
        assert ts.lipschitz_bound(nn.Sequential(model), (4,)) == pytest.approx(10)
    linear = CalledLinear(3, 3)
    assert ts.lipschitz_bound(linear, (3,)) == pytest.approx(
        10 * float(torch.linalg.matrix_norm(linear.weight.detach(), 2)), rel=1e-5
    )


def test_hooks_are_a_part_of_what_runs():
    for register, change in (
        ("register_forward_hook", lambda module, args, output: 3 * output),
        ("register_forward_pre_hook", lambda module, args: (3 * args[0],)),
    ):
        for layer in (nn.Linear(3, 3), ts.OrthoLinear(3, 3), ts.SLLLinear(3), ts.Abs()):
            plain = ts.lipschitz_bound(layer, (3,))
            handle = getattr(layer, register)(change)
            assert ts.lipschitz_bound(nn.Sequential(layer), (3,)) >= 3 * plain * (1 - 1e-9)
            handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 2 * output)
    try:
        assert ts.lipschitz_bound(ts.Abs(), (3,)) == pytest.approx(2)
    finally:
        handle.remove()


def test_code_that_looks_at_types_gets_what_it_runs():
    assert bound(lambda m, x: 10 * x if isinstance(x, Tensor) else x, (4,)) == pytest.approx(10)
    with pytest.raises(NoRuleError, match="other values"):
        bound(lambda m, x: 10 * x if type(x) is Tensor else x, (4,))
    with pytest.raises(NoRuleError, match="other values"):
        bound(lambda m, x: 10 * x if torch.is_grad_enabled() else x, (4,))


def chunked(m, x):
    p = x * 1.0
    parts = p.chunk(2, 1)
    p.mul_(10)
    return parts[0]


def unbound(m, x):
    p = x * 1.0
    parts = p.unbind(1)
    p.mul_(10)
    return torch.stack(parts, 1)


def partly(m, x):
    p = x * 1.0
    v = p[:, :2]
    v.mul_(0).add_(x[:, 2:])
    return p


def expanded(m, x):
    p = x * 1.0
    wide = p.unsqueeze(1).expand(-1, 3, -1)
    p.mul_(2)
    return wide


def behind_data(m, x):
    p = x * 1.0
    p.data.mul_(10)
    return p


def shared_constant(m, x):
    c = torch.zeros(x.shape, dtype=x.dtype)
    c.add_(x)
    return c + x


@pytest.mark.parametrize("function", [chunked, unbound, partly, expanded, shared_constant])
def test_writes_reach_every_name_of_the_memory(function):
    # Linear functions; autograd refuses to look at them.
    with torch.no_grad():
        matrix = function(None, torch.eye(4, dtype=torch.float64)).flatten(1)
    assert bound(function, (4,)) >= float(torch.linalg.matrix_norm(matrix, 2)) * (1 - 1e-12)


def test_writes_behind_data_count():
    assert bound(behind_data, (4,)) == pytest.approx(10)


def test_a_forward_pass_that_writes_into_its_buffers_is_refused_and_they_stay():
    def accumulates(m, x):
        m.b.mul_(0.0)
        m.b.add_(x)
        return x + m.b

    model = Fn(accumulates, b=torch.ones(5, 4))
    with pytest.raises(NoRuleError, match="writes into"):
        ts.lipschitz_bound(model, (4,))
    assert torch.equal(model.b, torch.ones(5, 4))

    def counts(m, x):
        m.count += 1
        return x * m.count

    model = Fn(counts, count=torch.zeros(()))
    with pytest.raises(NoRuleError, match="writes into its tensor 'count'"):
        ts.lipschitz_bound(model, (4,))
    assert model.count == 0


def test_attributes_that_the_forward_pass_sets_are_put_back():
    def remembers(m, x):
        m.last = x
        m.calls = m.calls + 1
        m.log.append(m.calls)
        return 2 * x

    model = Fn(remembers)
    model.calls, model.log = 0, []
    assert ts.lipschitz_bound(model, (4,)) == pytest.approx(2)
    assert model.calls == 0
    assert model.log == []
    assert not hasattr(model, "last")


def test_the_model_is_not_changed():
    model = nn.Sequential(
        spectral_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.RReLU()
    )
    before = copy.deepcopy(model.state_dict())
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(NoRuleError, match=r"model\.eval"):
        ts.lipschitz_bound(model, (4,))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.eval()
    assert ts.lipschitz_bound(model, (4,)) > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert python == random.getstate()
    assert (numpy == np.random.get_state()[1]).all()


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4), nn.Dropout(0.5), nn.RReLU(), spectral_norm(nn.Linear(4, 4)), ts.BatchCentering(4),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_training_mode_is_refused_where_it_matters(layer):
    with pytest.raises(NoRuleError, match=r"training mode.*model\.eval"):
        ts.lipschitz_bound(nn.Sequential(nn.Identity(), layer), (4,))
    assert ts.lipschitz_bound(nn.Sequential(nn.Identity(), layer).eval(), (4,)) > 0


def test_layouts_of_torchs_pooling_are_no_writes():
    def critic():
        torch.manual_seed(0)
        return nn.Sequential(
            spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True),
            parametrizations.spectral_norm(nn.Conv2d(8, 1, 4, 2, 1)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ).eval()  # fmt: skip

    plain = ts.lipschitz_bound(critic(), (3, 16, 16))
    assert ts.lipschitz_bound(critic().to(memory_format=torch.channels_last), (3, 16, 16)) == pytest.approx(plain)


def test_the_size_of_the_batch_is_no_constant():
    for function in (lambda m, x: x / x.shape[0], lambda m, x: x / x.numel()):
        with pytest.raises(NoRuleError, match="batch"):
            bound(function, (4,))
    hidden = lambda m, x: x / x.size(0) * 1e-12 + m.large  # noqa: E731
    with pytest.raises(NoRuleError, match="batch"):
        bound(hidden, (4,), large=torch.ones(4))


def test_samples_must_stay_apart_whatever_the_sizes():
    refused = [
        (lambda m, x: x.mT, (5,)),
        (lambda m, x: x.mT, (3,)),
        (lambda m, x: x[..., 0, :], (5,)),
        (lambda m, x: x.flip(0), (5,)),
        (lambda m, x: x.roll(1), (5,)),
        (lambda m, x: x.roll(1, 0), (5,)),
        (lambda m, x: x.unsqueeze(1) + x, (4,)),
        (lambda m, x: x - x.mean(0), (4,)),
        (lambda m, x: x.repeat_interleave(2), (4,)),
        (lambda m, x: F.softmax(x, 0), (4,)),
    ]
    for function, shape in refused:
        with pytest.raises(NoRuleError, match="batch"):
            bound(function, shape)
    for layer, shape in (
        (nn.Softmax(0), (4,)),
        (nn.Softmax(-2), (4,)),
        (nn.Softmax2d(), (4, 4)),
        (nn.Softmin(0), (5,)),
    ):
        with pytest.raises(NoRuleError, match="batch"):
            ts.lipschitz_bound(layer, shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + torch.empty(x.shape).uniform_(),
        lambda m, x: x + torch.empty(4).uniform_(),
        lambda m, x: x + torch.normal(torch.zeros(x.shape), 1.0),
        lambda m, x: x * random.random(),
        lambda m, x: x * float(np.random.rand()),
        lambda m, x: x * m.dice.uniform(1, 10),
        lambda m, x: x + torch.rand(x.shape, generator=m.generator),
        lambda m, x: F.rrelu(x, 0.1, 0.3, True),
        lambda m, x: F.dropout(x, 0.5, True),
    ],
)
def test_chance_is_refused(function):
    model = Fn(function)
    model.dice, model.generator = random.Random(0), torch.Generator()
    with pytest.raises(NoRuleError, match=r"random|training|other values|fixed|does not do the same"):
        ts.lipschitz_bound(model, (4,))


def test_autocast_inside_the_forward_pass_is_refused():
    def casts(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, m.w)

    with pytest.raises(NoRuleError, match="autocast"):
        bound(casts, (4,), w=torch.eye(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x.to(torch.bfloat16).to(x.dtype), m.w),
        lambda m, x: F.linear(x, m.w).half(),
        lambda m, x: F.linear(x.bfloat16().float(), m.w),
        lambda m, x: F.linear(x, m.w).type(torch.float16),
        lambda m, x: F.linear(x, m.w).type_as(m.w.bfloat16()),
        lambda m, x: x.sum(1, dtype=torch.bfloat16, keepdim=True).float(),
    ],
)
def test_rounding_in_the_midst_of_a_network_is_refused(function):
    with pytest.raises(NoRuleError, match=r"rounds to (bfloat16|float16) in a network of float32"):
        bound(function, (4,), w=torch.eye(4))


def test_a_network_of_low_precision_may_compute_parts_in_a_higher_one():
    model = Fn(lambda m, x: F.linear(x.float(), m.w.float()).to(x.dtype), w=torch.eye(4)).bfloat16()
    assert ts.lipschitz_bound(model, (4,)) == pytest.approx(1)


def test_another_function_where_gradients_are_wanted_is_refused():
    class Hiding(nn.Module):
        def forward(self, x):
            return x * 5 if torch.is_grad_enabled() else x * 1

    with pytest.raises(NoRuleError, match="other values"):
        ts.lipschitz_bound(Hiding(), (4,))


def test_complex_numbers_are_refused():
    with pytest.raises(NoRuleError, match="complex"):
        bound(lambda m, x: (x * m.w).real, (4,), w=torch.ones(4, dtype=torch.complex64))
    with pytest.raises(NoRuleError, match="complex"):
        bound(lambda m, x: (x * 1j).abs(), (4,))
    with pytest.raises(ValueError, match="complex"):
        ts.lipschitz_bound(nn.Linear(3, 3, dtype=torch.complex64), (3,))


def test_pruned_and_normed_layers_are_read_after_their_hooks():
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 8)
    prune.random_unstructured(layer, "weight", 2)
    expected = float(torch.linalg.matrix_norm((layer.weight_orig * layer.weight_mask).detach().double(), 2))
    assert ts.lipschitz_bound(layer, (4,)) == pytest.approx(expected, rel=1e-6)
    with pytest.warns(FutureWarning):
        normed = weight_norm(nn.Linear(4, 4))
    normed.weight_g.data.mul_(3)
    expected = 3 * float(torch.linalg.matrix_norm(normed.weight.detach().double(), 2))
    assert ts.lipschitz_bound(normed, (4,)) == pytest.approx(expected, rel=1e-6)


class Unknown(nn.Module):
    def forward(self, x):
        return torch.exp(x)


def test_errors_name_the_class_of_the_model():
    with pytest.raises(NoRuleError, match=r"exp.*Unknown.*test_guards.py.*trysquare\.lipschitz\.rule\(Unknown\)"):
        ts.lipschitz_bound(Unknown(), (4,))
    with pytest.raises(NoRuleError, match=r"trilinear|multipl"):
        ts.lipschitz_bound(nn.Bilinear(3, 3, 3), [(3,), (3,)])


def test_models_that_cannot_be_read_say_why():
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(3, 3))
    cases = [
        (scripted, "TorchScript"),
        (nn.Linear(3, 3, device="meta"), "meta"),
        (nn.LazyLinear(3), "LazyLinear.*run"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=message):
            ts.lipschitz_bound(model, (3,))
    with pytest.raises(TypeError, match="put a function in a module"):
        ts.lipschitz_bound(torch.relu, (3,))
    for shape in (3, None, (3, 0), (), "3", (2.0,), (True,)):
        with pytest.raises(ValueError, match="input_shape"):
            ts.lipschitz_bound(nn.Linear(3, 3), shape)


def test_depth_neither_underflows_nor_overflows():
    def deep(layers, weight):
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(layers)))
        for layer in model:
            layer.weight.data.fill_(weight)
        return ts.lipschitz_bound(model, (1,))

    assert deep(170, 0.1) == pytest.approx(1e-170, rel=1e-5)
    assert deep(160, 10.0) == pytest.approx(1e160, rel=1e-5)
    assert deep(400, 0.1) > 0
    assert deep(400, 10.0) == float("inf")


def test_options_of_a_call_are_a_part_of_what_runs():
    class Sized(nn.Module):
        def __init__(self, by_keyword):
            super().__init__()
            self.up, self.by_keyword = nn.ConvTranspose1d(1, 1, 3, stride=2, padding=1, bias=False), by_keyword

        def forward(self, x):
            return self.up(x, output_size=[2]) if self.by_keyword else self.up(x, [2])

    for by_keyword in (True, False):
        model = Sized(by_keyword).eval()
        seen = float(model.up.weight.detach().double().flatten()[1:].norm())  # an output of two positions
        assert seen <= ts.lipschitz_bound(model, (1, 1)) <= seen * 1.001


def test_negative_divisors_scale_as_positive_ones():
    class Pool(nn.Module):
        def forward(self, x):
            return F.avg_pool2d(x, 2, divisor_override=-1)

    for model in (Pool(), nn.AvgPool2d(2, divisor_override=-1)):
        assert 2 <= ts.lipschitz_bound(model, (1, 4, 4)) < 2.001


@pytest.mark.parametrize("mode", ["circular", "replicate"])
def test_padding_that_was_changed_later_is_not_the_one_in_use(mode):
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode, bias=False)
    nn.init.ones_(layer.weight)
    layer.padding = (0, 0)
    assert ts.lipschitz_bound(layer, (1, 3, 3)) > 8.99
    assert ts.spectral_norm_bound(layer, (1, 3, 3)) > 8.99


def test_calls_that_are_overridden_below_call():
    class Loud(nn.Linear):
        def _call_impl(self, *args, **kwargs):
            return 10 * super()._call_impl(*args, **kwargs)

    loud, own = Loud(4, 4), nn.Linear(4, 4)
    own._call_impl = lambda x: 10 * x
    assert ts.lipschitz_bound(nn.Sequential(loud).eval(), (4,)) >= 10 * torch.linalg.matrix_norm(loud.weight, 2)
    assert ts.lipschitz_bound(nn.Sequential(own).eval(), (4,)) == pytest.approx(10)
    for layer in (loud, own):
        with pytest.raises(TypeError, match="overrides"):
            ts.spectral_norm_bound(layer, (4,))


def test_arithmetic_of_tuples_is_followed():
    class Repeated(nn.Module):
        def forward(self, x):
            return torch.cat(x.chunk(2, 1) * 3, 1)

    assert ts.lipschitz_bound(Repeated(), (4,)) == pytest.approx(3**0.5)
