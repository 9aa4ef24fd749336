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
    "copy_": lambda w: w.data.copy_(torch.ones_like(w)),
    "part": lambda w: w.detach()[:1].mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_writes_are_noticed_at_the_next_use(name, write, training):
    make, shape = LAYERS[name]
    layer = make().train(training)
    with torch.no_grad():
        WRITES[write](layer.weight)
    if write == "copy_":  # ``.data`` has a counter of its own, as torch wants it
        layer(torch.randn(shape))
        return
    gc.collect()
    with pytest.raises(RuntimeError, match=r"no effect.*reset_parameters"):
        layer(torch.randn(shape))
    layer(torch.randn(shape))  # told once


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
    assert all(not counter.untyped_storage().nbytes() for counter, _ in layer.parametrization._writes._watched)
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
    from trysquare.nn.parametrizations import base

    base._empty.cache_clear()
    layer = ts.OrthoConv2d(4, 4, 3)
    with torch.inference_mode():
        layer(torch.randn(1, 4, 4, 4))
    layer(torch.randn(1, 4, 4, 4)).sum().backward()
