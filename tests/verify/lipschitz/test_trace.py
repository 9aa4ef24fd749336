"""What a pass makes, shares and writes, by whatever name: the bound is above every stretch, or there is none."""

import contextlib
import functools
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.verify.lipschitz.networks import Fn
from tests.verify.lipschitz.test_fooling import sound
from trysquare.verify.lipschitz import ExactEvaluation, NoRuleError, analyse

DOUBLE = torch.float64


@functools.cache
def _cached():
    return 3 * torch.eye(4, dtype=DOUBLE)


@torch.jit.script
def _scripted(x):
    return x * 5


def _written_by_halves(m, x):
    out = torch.empty(x.shape, dtype=DOUBLE)
    out[:, :2], out[:, 2:] = x[:, :2], 2 * x[:, 2:]
    return out


def _beside_weights(m, x):
    out = torch.zeros_like(m.w)
    out[: len(x)] = x * 2
    return out[: len(x)]


def _new_from_weights(m, x):
    out = m.w.new_zeros(x.shape)
    return out.copy_(x * 2)


def _on_the_diagonal(m, x):
    y = x.unsqueeze(-1) * torch.ones(4, dtype=DOUBLE)
    y.diagonal(dim1=1, dim2=2).mul_(10)
    return y.flatten(1)


def _by_mask(m, x):
    y = x.clone()
    y[:, torch.tensor([True, False, True, False])] = 7 * x[:, :2]
    return y


def _swapped(m, x):
    y, z = x * 1, x * 7
    torch.utils.swap_tensors(y, z)
    return y


def _corner_of_a_layout(m, x):
    y = (x.view(-1, 2, 2).transpose(1, 2) - 10).relu()
    y[:, 0, 0].mul_(2.0)
    y.transpose(1, 2).reshape(len(x), -1).mul_(1000.0)
    return y.flatten(1) + x


def _in_inference_mode(m, x):
    with torch.inference_mode():
        return (x * 5).reshape(-1).view(x.shape)


# Functions and their constants.
FOLLOWED = {
    "a cached constant": (lambda m, x: x @ _cached(), 3), "a script": (lambda m, x: _scripted(x), 5),
    "halves": (_written_by_halves, 2), "zeros like weights": (_beside_weights, 2), "new zeros": (_new_from_weights, 2),
    "diagonal": (_on_the_diagonal, 103**0.5), "mask": (_by_mask, 50**0.5), "swapped": (_swapped, 7),
    "a list of constants": (lambda m, x: x * torch.tensor([1.0, 4.0], dtype=DOUBLE).tolist()[1], 4),
    "an item of a weight": (lambda m, x: x * float(m.w.max()), 2),
    "numpy of a weight": (lambda m, x: x * m.w.numpy().max(), 2),
    "a choice by a weight": (lambda m, x: x * 2 if m.w.sum() > 1e9 else x * 3, 3),
    "vmap": (lambda m, x: torch.vmap(lambda row: 5 * row)(x), 5), "inference mode": (_in_inference_mode, 5),
    "the same value twice": (lambda m, x: torch.lerp(x, x, 0.25), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_pass_makes_is_followed(name):
    function, constant = FOLLOWED[name]
    assert sound(Fn(function, w=2 * torch.eye(4, dtype=DOUBLE)), (4,)) == pytest.approx(constant, rel=1e-6)


def test_caches_hold_plain_tensors_afterwards():
    _cached.cache_clear()
    ts.lipschitz_bound(Fn(FOLLOWED["a cached constant"][0], w=torch.eye(4, dtype=DOUBLE)), (4,))
    assert type(_cached()) is torch.Tensor
    assert _cached().numpy().sum() == 12


def test_a_layout_that_a_write_depends_on():
    assert ts.lipschitz_bound(Fn(_corner_of_a_layout, w=torch.eye(4, dtype=DOUBLE)), (4,)) >= 2000


def _part_of_a_weight(m, x):
    half, _ = m.w.split(2)
    half.mul_(2.0)
    return x @ m.w


def _column_of_a_weight(m, x):
    m.w.t().unbind(1)[0].add_(1.0)
    return x @ m.w


def _values_into_a_weight(m, x):
    m.w.view(-1)[:4].copy_(x[0])
    return x @ m.w


def _another_holding(m, x):
    y = x * 1
    y.data = F.relu(x - 100) * 1000 + x
    return y


def _another_weight(m, x):
    m.layer.weight.data = 2 * m.layer.weight
    return m.layer(x)


def _storage(m, x):
    y = x * 1
    y.untyped_storage().fill_(0)
    return y


def _storage_of_a_constant(m, x):
    factor = torch.ones(4, dtype=DOUBLE)
    factor.untyped_storage().fill_(0)
    return x * factor


def _by_an_array(m, x):
    array = np.zeros(x.shape)
    torch.from_numpy(array).copy_(x)
    return x + 1000 * F.relu(torch.from_numpy(array) - 100)


def _by_a_buffer(m, x):
    memory = bytearray(8 * x.numel())
    torch.frombuffer(memory, dtype=DOUBLE).view(x.shape).copy_(x)
    return x + 1000 * F.relu(torch.frombuffer(memory, dtype=DOUBLE).view(x.shape) - 100)


def _left_unwritten(m, x):
    out = torch.empty(x.shape, dtype=DOUBLE)
    out[:, :2] = x[:, :2]
    return out * 0 + x


def _set(m, x):
    y = x * 1
    return y.set_(F.relu(x - 100) * 1000 + x)


def _by_its_address(m, x):
    y = F.relu(x - 100)
    y.as_strided((len(x), 3), (4, 1), 1).mul_(1000.0)
    return y + x


def _in_a_thread(m, x):
    found = []

    def run():
        try:
            found.append(x * 100)
        except NoRuleError:
            found.append(x)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def _for_large_values_in_a_thread(m, x):
    y = x * 1.0

    def run():
        with contextlib.suppress(NoRuleError):
            y.add_(1000 * F.relu(y - 100))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return y


REFUSED = [
    _part_of_a_weight, _column_of_a_weight, _values_into_a_weight, _another_holding, _another_weight, _storage,
    _storage_of_a_constant, _by_an_array, _by_a_buffer, _left_unwritten, _set, _by_its_address, _in_a_thread,
    _for_large_values_in_a_thread,
]  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_followed_is_refused_and_changes_nothing(function):
    model = Fn(function, w=torch.eye(4, dtype=DOUBLE))
    model.layer = nn.Linear(4, 4).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NoRuleError):
        ts.lipschitz_bound(model, (4,))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_layout_of_the_input_is_no_cast():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, bias=False)
    model = Fn(lambda m, x: m.layer(x.to(memory_format=torch.channels_last)))
    model.layer = layer
    assert ts.lipschitz_bound(model, (3, 6, 6)) == pytest.approx(ts.lipschitz_bound(layer, (3, 6, 6)))


def test_the_steps_are_the_function():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), ts.SLLBlock2d(8), nn.Flatten(), ts.OrthoLinear(128, 5), nn.Softplus(),
    ).double().eval()  # fmt: skip
    found = analyse(model, (3, 8, 8), batch=4)
    x = torch.randn(4, 3, 8, 8, dtype=DOUBLE)
    result, error = ExactEvaluation(found.graph, found.gains)(x)
    expected = model(x.clone()).detach()
    assert 0 < error < 1e-6
    assert float((result - expected).norm()) <= 2 * error


def test_constants_that_are_conjugated_by_name():
    def conjugated(m, x):
        return x @ (torch.complex(m.w, m.w + 1) * 1.0).conj().imag

    weight = torch.randn(4, 4, dtype=DOUBLE)
    expected = float(torch.linalg.matrix_norm(weight + 1, 2))
    assert sound(Fn(conjugated, w=weight), (4,)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ts.FourierOrthoConv2d(3, 6, 3), lambda: ts.SandwichConv2d(3, 6, 3), lambda: ts.OrthoConv2d(3, 6, 3),
        lambda: ts.OrthoConvTranspose2d(3, 6, 3), lambda: ts.OrthoConv2d(3, 3, 3, method="soc"),
        lambda: ts.SLLAOCBlock2d(3, 6, 3, 2),
    ],
)  # fmt: skip
def test_weights_that_are_built_while_a_model_is_traced(make):
    torch.manual_seed(0)
    layer = nn.Sequential(make())
    # In training mode nothing is kept from one pass to the next.
    trained = ts.lipschitz_bound(layer.train(), (3, 6, 6))
    assert ts.lipschitz_bound(layer.eval(), (3, 6, 6)) == pytest.approx(trained, rel=1e-6)
    assert trained == pytest.approx(1, abs=1e-4)


def _decided(x):
    return (x.norm(dim=1) > 6).any()


def _without_modes(x):
    with torch._C.DisableTorchFunction():
        return float(x.max())


@pytest.mark.parametrize("ask", [
    lambda x: bool(_decided(x)), lambda x: x.max().item() > 6, lambda x: x.numpy().max() > 6,
    lambda x: np.asarray(x).max() > 6, lambda x: max(x.tolist()[0]) > 6, lambda x: len(x[x > 6]) > 0,
    lambda x: len((x > 6).nonzero()) > 0, lambda x: not torch.equal(x, x.clamp(max=6)), lambda x: "inf" in repr(x),
    lambda x: "inf" in f"{x}", lambda x: any(value > 6 for value in x.flatten()), lambda x: int(x.max()) > 6,
    lambda x: torch.testing.assert_close(x, x.clamp(max=6)), lambda x: x.data_ptr() == 1,
    lambda x: torch.zeros(7)[x.max().long()].item() > 1, lambda x: 7.0 in x, lambda x: pickle.dumps(x) == b"",
    lambda x: _without_modes(x) > 6,
])  # fmt: skip
def test_a_refusal_that_the_model_catches_is_still_one(ask):
    class Handles(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            try:
                if ask(x):
                    return -100 * self.linear(x)
            except Exception:  # whatever it is
                pass
            return self.linear(x)

    with pytest.raises(NoRuleError):
        ts.lipschitz_bound(Handles(), (4,))


def test_an_error_that_numbers_raise_too_may_be_handled():
    class Handles(nn.Module):
        def forward(self, x):
            x = x.mT
            try:
                return x.view(len(x), -1)
            except RuntimeError:
                return x.reshape(len(x), -1)

    assert ts.lipschitz_bound(Handles(), (4, 3)) == pytest.approx(1)


def test_nothing_is_left_of_a_module_with_a_rule_that_fails():
    class Soft(nn.Module):
        def forward(self, x):
            if x.shape[-1] > 3:
                raise ValueError("too wide")
            return x.tanh()

    ts.lipschitz.rule(Soft)(lambda layer, shape: 1.0)

    class Handles(nn.Module):
        def __init__(self):
            super().__init__()
            self.soft = Soft()

        def forward(self, x):
            with contextlib.suppress(ValueError):
                x = self.soft(x)
            return (x * 4096).to(torch.int32).to(x.dtype) / 4096

    with pytest.raises(NoRuleError, match="rounds to int32"):
        ts.lipschitz_bound(Handles(), (4,))


def test_models_that_ask_whether_gradients_are_wanted_are_refused():
    class Asks(nn.Module):
        def forward(self, x):
            return -50 * x if x.requires_grad else x

    with pytest.raises(NoRuleError, match="on gradients being recorded"):
        ts.lipschitz_bound(Asks(), (4,))


@pytest.mark.parametrize("nothing", [
    lambda x: torch.bmm(x[:, :0, None], torch.ones(len(x), 1, 4)).sum(1),
    lambda x: F.linear(x, torch.zeros(0, 4)), lambda x: x[:, :0].sort(1)[0], lambda x: F.softmax(x[:, :0], 1),
    lambda x: torch.lerp(x[:, :0], x[:, :0], torch.zeros(0)),
    lambda x: F.linear(x[:, None].expand(-1, 0, -1), torch.eye(4)).flatten(1),
])  # fmt: skip
def test_tensors_of_no_numbers(nothing):
    class Concatenates(nn.Module):
        def forward(self, x):
            return torch.cat([x, nothing(x)], 1)

    assert ts.lipschitz_bound(Concatenates(), (4,)) == pytest.approx(1)
