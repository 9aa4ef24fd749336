"""Whole graphs in training, behind a layer that needs gradients: the same outputs and gradients as eagerly."""

import copy

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.nn.linalg.sorting import max_min

LAYERS = [
    ts.MaxMin(), ts.GroupSort(2), ts.FullSort(), ts.Abs(), ts.Householder(4), ts.Householder(4, 2), ts.NActivation(4),
    ts.ScaledAvgPool2d(2), ts.L2NormPool2d(2), ts.LipschitzMaxPool2d(3, 2, 1), ts.GlobalL2NormPool(),
    ts.GlobalMaxPool(), ts.GlobalScaledAvgPool(), ts.InvertibleDownsampling2d(2), ts.DepthwiseResidualBlock2d(4),
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_compiles_whole_in_training(layer):
    torch._dynamo.reset()
    model = nn.Sequential(ts.OrthoConv2d(4, 4, 3), copy.deepcopy(layer)).train()
    twin, x = copy.deepcopy(model), torch.randn(2, 4, 6, 6)
    y, expected = torch.compile(model, fullgraph=True, backend="aot_eager")(x), twin(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        # The loss does not depend on an orthogonal weight: these are rounding errors of 288 squares.
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-4)


def test_a_compiled_sort_permutes_gradients_at_ties_too():
    x = torch.tensor([[1.0, 1.0], [2.0, 3.0], [-3e38, 3e38]], requires_grad=True)
    y = torch.compile(lambda x: max_min(x, -1), fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, torch.tensor([[1.0, 1.0], [3.0, 2.0], [3e38, -3e38]]))
    y.backward(torch.tensor([[5.0, 7.0]] * 3))
    assert torch.equal(x.grad, torch.tensor([[5.0, 7.0], [7.0, 5.0], [7.0, 5.0]]))


def _second_derivatives(call, layer, x):
    free = [p for p in layer.parameters() if p.requires_grad]
    first = torch.autograd.grad(call(x).sin().sum(), free, create_graph=True)
    return torch.autograd.grad(sum((g * g.detach().cos()).sum() for g in first), free, allow_unused=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch, where a graph ends
@pytest.mark.parametrize("backend", ["eager", lambda graph, _: graph.forward], ids=["eager", "of a user"])
@pytest.mark.parametrize(
    "make", [lambda: ts.OrthoConv1d(3, 4, 3), lambda: ts.OrthoLinear(3, 5, orthogonalizer="bjorck")]
)
def test_backends_that_differentiate_twice_are_right(make, backend):
    torch.compiler.reset()
    layer, shape = make().double(), (2, 3, 6) if isinstance(make(), nn.Conv1d) else (2, 3)
    x = torch.randn(shape, dtype=torch.float64)
    found = _second_derivatives(torch.compile(layer, backend=backend), layer, x)
    for mine, expected in zip(found, _second_derivatives(layer, layer, x), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)
