"""Public functions and constructors with arguments of every wrong kind: answered by ``ValueError`` or ``TypeError``."""

import inspect
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import trysquare as ts


class _Tuples(nn.Module):
    def forward(self, x):
        return x, x


def _tensor(draw_shape, dtype):
    return torch.zeros(draw_shape).to(dtype)


TENSORS = st.builds(
    _tensor,
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
MODULES = st.sampled_from(
    [lambda: nn.Linear(3, 2), lambda: nn.Identity(), lambda: ts.OrthoConv2d(2, 4, 3), lambda: ts.OrthoLinear(3, 2),
     lambda: _Tuples(), lambda: nn.Sequential(), lambda: nn.LayerNorm(3), lambda: nn.Linear(3, 2).to("meta")]
).map(lambda make: make())  # fmt: skip
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.floats(width=32), st.text(max_size=3), TENSORS, MODULES,
    st.lists(st.integers(-1, 4), max_size=4), st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2), st.just(object()),
    st.lists(TENSORS, max_size=2), st.tuples(TENSORS, TENSORS), st.just(float("inf")), st.just(b"bytes"),
)  # fmt: skip
# Those that do nothing with their arguments but keep them, or that are no functions of ours.
LEFT_OUT = {"Certificate", "AuditReport", "LayerAudit", "AttackReport", "NoRuleError"}


def public():
    found = {}
    for name in ts.__all__:
        thing = getattr(ts, name)
        if callable(thing) and name not in LEFT_OUT:
            found[name] = thing
    return found


def required(function):
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in parameters if p.kind in kinds]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", public())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_junk_is_answered(name, data):
    function = public()[name]
    wanted = required(function)
    least = sum(p.default is inspect.Parameter.empty for p in wanted)
    count = data.draw(st.integers(least, min(len(wanted), least + 2)))
    # What is wrong with a device or a dtype is torch's to say.
    arguments = [None if p.name in ("device", "dtype") else data.draw(JUNK) for p in wanted[:count]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = "nothing is wrong"
        try:
            function(*arguments)
        except (ValueError, TypeError) as error:
            said = str(error)
    assert said
