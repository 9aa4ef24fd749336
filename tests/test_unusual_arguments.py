"""Arguments of the right type that cannot be worked with: answered by ``ValueError`` or ``TypeError``, at once."""

import itertools
import json

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.nn.linalg.operator import Axis
from trysquare.verify.attacks import attack_report, autoattack_l2, pgd_l2

X, Y = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
LOGITS = torch.rand(3, 4)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


KINDS = {
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
}
FUNCTIONS = {
    "certify": lambda model, x, y: ts.certify(model, (x, y)),
    "certify in batches": lambda model, x, y: ts.certify(model, [(x, y)]),
    "pgd": lambda model, x, y: pgd_l2(model, x, y, 0.1, steps=1),
    "autoattack": lambda model, x, y: autoattack_l2(model, x, y, 0.1),
    "report": lambda model, x, y: attack_report(model, (x, y), ts.certify(network(), (X, Y))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["images", "labels"])
def test_tensors_without_numbers_to_read(function, kind, place):
    change = KINDS[kind]
    x, y = (change(X), Y) if place == "images" else (X, change(Y))
    with pytest.raises((TypeError, ValueError), match=place):
        FUNCTIONS[function](network(), x, y)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("model", ["meta", "a part on meta", "scripted", "a scripted part", "traced", "function"])
@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_followed(function, model):
    made = {
        "meta": lambda: network().to("meta"),
        "a part on meta": lambda: nn.Sequential(network(), nn.Linear(4, 4, device="meta")),
        "scripted": lambda: torch.jit.script(network()),
        "a scripted part": lambda: nn.Sequential(torch.jit.script(network()), nn.ReLU()),
        "traced": lambda: torch.jit.trace(network(), X),
        "function": lambda: lambda x: x.flatten(1),
    }[model]()
    with pytest.raises((TypeError, ValueError), match="model"):
        FUNCTIONS[function](made, X, Y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_without_numbers_to_read(kind):
    change = KINDS[kind]
    for arguments in ((change(LOGITS), Y), (LOGITS, change(Y)), (LOGITS, Y, 1.0, change(torch.eye(4)))):
        with pytest.raises((TypeError, ValueError)):
            ts.certified_radius(*arguments)
    with pytest.raises((TypeError, ValueError)):
        ts.certified_radius(LOGITS, Y, error=change(torch.zeros(3)))


NUMBERS = ["0.5", 10**400, -1.0, float("nan"), None, True, 1j, torch.zeros(2), torch.zeros((), device="meta"), [0.5]]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: str(value)[:8])
def test_what_is_no_number_from_0_on(value):
    calls = [
        lambda: ts.certified_radius(LOGITS, Y, value), lambda: ts.certified_radius(LOGITS, Y, error=value),
        lambda: ts.margin_for_radius(value), lambda: ts.margin_for_radius(1.0, value),
        lambda: ts.margin_for_radius(1.0, 1.0, value), lambda: ts.certify(network(), (X, Y), epsilons=[value]),
        lambda: pgd_l2(network(), X, Y, value), lambda: autoattack_l2(network(), X, Y, value),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert len(str(caught.value)) < 300


def test_numbers_in_tensors_and_infinity_are_numbers():
    whole = ts.certified_radius(LOGITS, Y, 2.0)
    assert torch.equal(whole, ts.certified_radius(LOGITS, Y, torch.tensor(2.0)))
    assert torch.equal(whole, ts.certified_radius(LOGITS, Y, 2))
    assert float(ts.certified_radius(LOGITS, Y, float("inf")).max()) == 0
    exact = torch.full((3,), 0.1, dtype=torch.float64)
    assert torch.equal(ts.certified_radius(LOGITS, Y, error=0.1), ts.certified_radius(LOGITS, Y, error=exact))


def test_a_margin_beyond_all_floats():
    with pytest.raises(ValueError, match="smaller radius"):
        ts.margin_for_radius(1e308, 1e308)


@pytest.mark.parametrize("box", [(0,), (0, 1, 2), "ab", 3, (0, 10**400), (0, None), (1, 0), (0, float("nan"))])
def test_boxes(box):
    with pytest.raises((TypeError, ValueError), match="box="):
        pgd_l2(network(), X, Y, 0.1, box=box)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("sizes", [(10**9, 10**9), (2, 2**30), (2**15, 2**15)])
def test_sizes_beyond_reason(mode, sizes):
    layer = nn.Conv2d(1, 2, 3, padding=1, padding_mode=mode)
    for function in (ts.singular_values, ts.extreme_singular_values):
        with pytest.raises(ValueError, match=r"trysquare\."):
            function(layer, (1, *sizes))
    # What holds for every size holds for this one.
    assert ts.spectral_norm_bound(layer, (1, *sizes)) <= ts.spectral_norm_bound(layer) * (1 + 1e-9)


def test_many_copies_of_a_linear_layer():
    with pytest.raises(ValueError, match="400000000 singular values"):
        ts.singular_values(nn.Linear(4, 4), (10**8, 4))
    for shape in ((10**5000, 4), (2**62, 4), "ab", 4, None):
        with pytest.raises((TypeError, ValueError), match="input_shape="):
            ts.singular_values(nn.Linear(4, 4), shape)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_repetitions_of_a_long_axis_are_those_at_its_ends(mode):
    sizes, strides, pads = range(40, 90, 7), (1, 2, 3, 5), [(0, 0), (1, 1), (2, 3), (4, 0), (0, 6), (7, 7)]
    for size, stride, pad, extent in itertools.product(sizes, strides, pads, (1, 3, 6)):
        windows = (size + sum(pad) - extent) // stride + 1
        axis = Axis(size, windows, extent, stride, pad, mode)
        read = (windows - 1) * stride + extent
        plain = 1 if axis.on_circle else int(torch.bincount(axis.sources[:read]).max())
        assert axis.repeats == plain, axis


@pytest.mark.parametrize("wild", ["1e400", "9" * 400, "9" * 5000, "[" * 100_000 + "]" * 100_000, "NaN", "[[1]]", '"x"'])
def test_wild_numbers_in_what_comes_back_from_json(wild):
    certificate = ts.certify(network(), (X, Y))
    for result in (certificate, attack_report(network(), (X, Y), certificate), ts.audit(network(), (1, 4, 4))):
        text = result.to_json()
        for value in json.loads(text):
            start = text.index(f'"{value}":') + len(value) + 3
            end = json.JSONDecoder().raw_decode(text, start + 1)[1]
            try:
                type(result).from_json(text[:start] + wild + text[end:])
            except ValueError as error:
                assert "JSON" in str(error)  # noqa: PT017


NO_TENSORS = [None, 3, "a", [1.0], nn.Identity()]


@pytest.mark.parametrize("wrong", NO_TENSORS, ids=lambda value: type(value).__name__)
def test_inputs_that_are_no_tensors(wrong):
    rnn, cell = ts.OrthoRNN(4, 4, batch_first=True), ts.OrthoRNNCell(4, 4)
    chain = ts.InvertibleSequential(ts.OrthoLinear(4, 4))
    for layer in (rnn, cell, ts.LastState(rnn), ts.Positions((4,)), chain, chain.inverse, chain.with_log_abs_det):
        if wrong is None and layer == chain.inverse:
            continue  # the inverse chain
        with pytest.raises(TypeError, match="must be a tensor"):
            layer(wrong)
    if wrong is not None:
        for layer, x in ((rnn, torch.rand(2, 3, 4)), (rnn, torch.rand(3, 4)), (cell, torch.rand(3, 4))):
            with pytest.raises(TypeError, match="hx must be a tensor"):
                layer(x, wrong)


@pytest.mark.parametrize("wrong", [None, "a", [1.0], torch.ones(3), torch.zeros((), device="meta"), {}], ids=str)
def test_numbers_of_optimizers_and_of_searches(wrong):
    recipe = ts.training.read_recipe("digits")
    calls = [
        lambda: ts.ProjUNN([nn.Parameter(torch.eye(4))], lr=wrong), lambda: ts.training.find_lr(wrong),
        lambda: ts.training.find_lr(recipe, steps=wrong), lambda: ts.training.find_lr(recipe, start=wrong),
        lambda: ts.training.find_lr(recipe, factor=wrong), lambda: ts.training.start_sweep(wrong, {}, 1.0),
        lambda: ts.training.start_sweep(recipe, wrong, 1.0), lambda: ts.training.start_sweep(recipe, {}, wrong),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((TypeError, ValueError)):
            call()


def test_a_chain_without_numbers_has_a_shape():
    chain = ts.InvertibleSequential(ts.OrthoLinear(4, 4), ts.OrthoLinear(4, 4)).to("meta")
    assert chain(torch.zeros(2, 4, device="meta")).shape == (2, 4)
