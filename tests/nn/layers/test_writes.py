"""Writes into a built weight, which have no effect, are noticed."""

import copy
import gc

import pytest
import torch
from torch import nn

import trysquare as ts

LAYERS = {
    "conv": (lambda: ts.OrthoConv2d(4, 4, 3), (2, 4, 6, 6)),
    "transposed": (lambda: ts.OrthoConvTranspose2d(4, 4, 3), (2, 4, 6, 6)),
    "linear": (lambda: ts.OrthoLinear(4, 3), (2, 4)),
    "head": (lambda: ts.UnitNormLinear(4, 3), (2, 4)),
    "aol": (lambda: ts.OrthoConv2d(4, 4, 3, method="aol"), (2, 4, 6, 6)),
    "series": (lambda: ts.OrthoConv2d(4, 4, 3, method="soc"), (2, 4, 6, 6)),
    "block": (lambda: ts.SLLBlock2d(4), (2, 4, 6, 6)),
}
WRITES = {
    "nn.init": lambda w: nn.init.xavier_uniform_(w) if w.ndim > 1 else nn.init.normal_(w),
    "orthogonal": lambda w: nn.init.orthogonal_(w) if w.ndim > 1 else nn.init.zeros_(w),
    "copy_ of data": lambda w: w.data.copy_(torch.ones_like(w)),
    "assignment to data": lambda w: setattr(w, "data", torch.ones_like(w)),
    "sign of data": lambda w: w.data.neg_(),
    "NumPy": lambda w: w.detach().numpy().fill(0.5),
    "view": lambda w: w.view(-1)[:1].zero_(),
    "part": lambda w: w.detach()[:1].mul_(2),
}


MODES = {"training": (True, True), "eval": (False, True), "eval without gradients": (False, False)}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", MODES)
def test_writes_are_noticed_at_the_next_use(name, write, mode):
    (training, grad), (make, shape) = MODES[mode], LAYERS[name]
    layer, x = make().train(training), torch.randn(shape)
    with torch.set_grad_enabled(grad):
        expected = layer(x)
    with torch.no_grad():
        WRITES[write](layer.weight)
    gc.collect()
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match=r"no effect.*reset_parameters"):
            layer(x)
        assert torch.equal(layer(x), expected)  # told once


@pytest.mark.parametrize("name", LAYERS)
def test_writes_in_inference_mode_are_noticed(name):
    make, shape = LAYERS[name]
    for training in (True, False):
        layer = make().train(training)
        with torch.inference_mode():
            layer.weight.zero_()
        with pytest.raises(RuntimeError, match="no effect"):
            layer(torch.randn(shape))


@pytest.mark.parametrize("name", LAYERS)
def test_a_write_with_gradients_is_noticed_by_a_pass_without(name):
    make, shape = LAYERS[name]
    layer = make().eval()
    with torch.no_grad():
        layer(torch.randn(shape))
    layer.weight.detach().mul_(2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no effect"):
        layer(torch.randn(shape))


def test_copies_of_a_layer_tell_it_too():
    layer = ts.OrthoConv2d(4, 4, 3)
    layer.weight.data.zero_()
    for each in (copy.deepcopy(layer), layer):
        with pytest.raises(RuntimeError, match="no effect"):
            each(torch.randn(1, 4, 6, 6))
        each(torch.randn(1, 4, 6, 6))


def test_writes_after_many_other_weights_were_read_and_built():
    layer = ts.OrthoConv2d(4, 4, 3)
    weight = layer.weight
    for _ in range(9):
        assert layer(torch.randn(1, 4, 6, 6)).isfinite().all()
        assert layer.weight.isfinite().all()
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match="no effect"):
        layer(torch.randn(1, 4, 6, 6))


def test_a_weight_that_is_not_finite_is_no_write():
    layer = ts.OrthoConv2d(4, 4, 3, method="aol")
    with torch.no_grad():
        layer.free_tensors[0].fill_(float("nan"))
    assert layer.weight.isnan().all()
    assert layer(torch.randn(1, 4, 6, 6)).isnan().all()


@pytest.mark.parametrize("name", LAYERS)
def test_ordinary_use_is_not_a_write(name):
    make, shape = LAYERS[name]
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        layer(torch.randn(shape)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert layer.weight.isfinite().all()
    layer.eval()(torch.randn(shape))
    copy.deepcopy(layer)(torch.randn(shape))
    with torch.inference_mode():
        layer(torch.randn(shape))
    layer.reset_parameters()
    layer(torch.randn(shape))


def test_nothing_is_kept_alive():
    layer = ts.OrthoConv2d(4, 4, 3)
    weights = [layer.weight for _ in range(9)]
    guard = layer.parametrization.writes
    assert all(not counter.untyped_storage().nbytes() for counter, _ in [*guard._used, *guard._read])
    assert torch.equal(layer(torch.zeros(1, 4, 6, 6)), layer(torch.zeros(1, 4, 6, 6)))
    assert layer.parametrization.writes._last is None
    del weights


def test_a_weight_that_somebody_holds_on_to_is_watched():
    layer = ts.OrthoConv2d(4, 4, 3)
    weight = layer.weight
    layer(torch.randn(1, 4, 6, 6))
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match="no effect"):
        layer(torch.randn(1, 4, 6, 6))


@pytest.mark.parametrize("name", LAYERS)
def test_the_remedies_work_and_inference_mode_leaves_nothing_behind(name):
    make, shape = LAYERS[name]
    layer = make()
    with torch.no_grad():
        layer.weight.zero_()
    layer.reset_parameters()
    layer(torch.randn(shape))
    layer = make()
    with torch.inference_mode():
        layer(torch.randn(shape))
        layer.weight.sum()
    layer(torch.randn(shape)).sum().backward()


def test_inference_mode_first_of_all():
    from trysquare.nn.parametrizations import writes

    writes._empty.cache_clear()
    layer = ts.OrthoConv2d(4, 4, 3)
    with torch.inference_mode():
        layer(torch.randn(1, 4, 4, 4))
    layer(torch.randn(1, 4, 4, 4)).sum().backward()
