"""Public functions and constructors with arguments of every wrong kind: answered by ``ValueError`` or ``TypeError``."""

import inspect
import warnings

import numpy as np
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


class _Fails(nn.Module):
    def forward(self, x):
        raise KeyError("a model may raise anything")


def nested_tensor():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype, once in each process
        return torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])


NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
X, Y = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
SCALARS = {
    "None": None, "True": True, "0": 0, "-1": -1, "1.5": 1.5, "nan": float("nan"), "inf": float("inf"), "1e30": 10**30,
    "1e400": 10**400, "str": "x", "long": "x" * 5000, "bytes": b"b", "1j": 1j, "object": object(), "int": int,
    "function": lambda *_: None, "dtype": torch.float32, "device": torch.device("cpu"), "float64": np.float64(1.5),
}  # fmt: skip
CONTAINERS = {
    "[]": [], "()": (), "[None]": [None], "(1, 2)": (1, 2), "(0,)": (0,), "(-1, 2)": (-1, 2), "('a', 'b')": ("a", "b"),
    "{}": {}, "{1: 2}": {1: 2}, "set": {1}, "deep": [[[[1]]]], "array": np.zeros((2, 2)), "pairs": [(X, Y)],
    "objects": np.array([object()]), "no pairs": (torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long)),
}  # fmt: skip
TENSORS_OF_ALL_KINDS = {
    "empty": torch.zeros(0), "scalar": torch.tensor(1.0), "matrix": torch.rand(2, 3), "integers": torch.tensor([1, 2]),
    "booleans": torch.tensor([True, False]), "complex": torch.rand(2, 2, dtype=torch.complex64),
    "no samples": torch.zeros(0, 1, 4, 4), "bfloat16": X.bfloat16(), "meta scalar": torch.zeros((), device="meta"),
    "meta integer": torch.zeros((), device="meta", dtype=torch.int64), "meta": torch.zeros(3, 1, 4, 4, device="meta"),
    "sparse": torch.rand(2, 3).to_sparse(), "uint16": torch.zeros(2, dtype=torch.uint16),
    "float8": torch.zeros(2, 2).to(torch.float8_e4m3fn), "parameter": nn.Parameter(torch.rand(3, 3)),
    "nested": nested_tensor,
}  # fmt: skip
MODELS = {
    "linear": nn.Linear(3, 2), "on meta": nn.Linear(3, 2, device="meta"), "nothing": nn.Sequential(),
    "tuples": _Tuples(), "raises": _Fails(), "ours": ts.OrthoLinear(3, 3),
}  # fmt: skip
WRONG = {**SCALARS, **CONTAINERS, **TENSORS_OF_ALL_KINDS, **MODELS}
# Arguments with which a callable works, by its name; otherwise the first of the others with which it does.
RIGHT = {
    "certify": (NETWORK, (X, Y)), "certified_radius": (torch.rand(3, 4), Y), "audit": (NETWORK, (1, 4, 4)),
    "lipschitz_bound": (NETWORK, (1, 4, 4)), "analyse": (NETWORK, (1, 4, 4)), "lipschitz_lower_bound": (NETWORK, X),
    "singular_values": (nn.Conv2d(1, 2, 3), (1, 4, 4)), "extreme_singular_values": (nn.Conv2d(1, 2, 3), (1, 4, 4)),
    "spectral_norm_bound": (nn.Conv2d(1, 2, 3), (1, 4, 4)), "compose": (torch.rand(4, 4, 3), torch.rand(4, 4, 3)),
}  # fmt: skip
OTHERS = [
    (), (4,), (4, 4), (4, 4, 3), (nn.Identity(),), (2,), (ts.OrthoLinear(4, 4),), (torch.rand(4, 4),), (0.5, 0.5),
    (torch.rand(2, 4, 4), torch.rand(2, 4, 4)), (torch.rand(3, 4), Y), (NETWORK,), (NETWORK, X), (NETWORK, X, Y, 0.1),
]  # fmt: skip
PLACES = {"": ts, "linalg.": ts.linalg, "losses.": ts.losses, "lipschitz.": ts.lipschitz, "attacks.": ts.attacks}


RANDOM = {"autoattack_l2"}  # fails now and then, by chance


def right_arguments():
    found = {}
    for place, module in PLACES.items():
        own = [
            n
            for n, thing in vars(module).items()
            if getattr(thing, "__module__", "") == module.__name__ and n[0] != "_"
        ]
        for name in sorted({*getattr(module, "__all__", own)} - RANDOM):
            thing = getattr(module, name)
            if not callable(thing) or name in LEFT_OUT or (inspect.isclass(thing) and issubclass(thing, Exception)):
                continue
            for arguments in [RIGHT[name]] if name in RIGHT else OTHERS:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        thing(*arguments)
                except Exception:
                    continue
                found[place + name] = thing, arguments
                break
    return found


WORKING = right_arguments()


def test_most_of_what_is_public_is_tried():
    assert {"certify", "OrthoConv2d", "linalg.compose", "losses.OffsetCrossEntropy", "FourierOrthoConv1d"} <= {*WORKING}
    assert len(WORKING) > 100


@pytest.mark.parametrize("name", WORKING)
def test_each_argument_in_turn_of_every_wrong_kind(name):
    function, right = WORKING[name]
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not named or parameter.name in ("device", "dtype"):
            continue
        for kind, wrong in WRONG.items():
            wrong = wrong() if kind == "nested" else wrong
            args, others = list(right), {}
            if position < len(args):
                args[position] = wrong
            else:
                others = {parameter.name: wrong}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    function(*args, **others)
                except (ValueError, TypeError) as error:
                    assert 0 < len(str(error)) < 2500, (parameter.name, kind)  # noqa: PT017
                except ArithmeticError as error:  # of iterations, for matrices that are not finite
                    assert "orthonormal only to" in str(error), (parameter.name, kind)  # noqa: PT017
                except Exception as error:
                    raise AssertionError(f"{parameter.name}={kind}: {type(error).__name__}") from error
