import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import distance_from_orthogonal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_float32_kernel_is_rounded_once(dtype):
    for layer in (ts.OrthoConv2d(4, 8, 3), ts.OrthoConvTranspose2d(4, 2, 3, stride=2), ts.OrthoLinear(8, 8)):
        kernel = layer.weight.detach().clone()
        layer.to(dtype)
        assert layer.weight.dtype == layer.bias.dtype == dtype
        assert torch.equal(layer.weight, kernel.to(dtype))
        x = torch.randn(1, *((4, 6, 6) if kernel.ndim == 4 else (8,)), dtype=dtype)
        y = layer(x)
        assert y.dtype == dtype
        y.float().sum().backward()
        assert all(t.grad.dtype == t.dtype == torch.float32 for t in layer.free_tensors)
        layer.to(dtype).float()
        assert torch.equal(layer.weight, kernel)


def test_half_precision_arguments():
    layer = ts.OrthoConv2d(4, 4, 3, dtype=torch.bfloat16, device="cpu")
    assert layer.weight.dtype == torch.bfloat16
    assert layer(torch.randn(1, 4, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert distance_from_orthogonal(layer.float(), (4, 4, 4)) < 1e-5


def test_double_is_exact_from_then_on():
    layer = ts.OrthoConv2d(4, 4, 3).double()
    assert distance_from_orthogonal(layer, (4, 4, 4)) < 1e-11
    assert all(t.dtype == torch.float64 for t in layer.free_tensors)


@pytest.mark.parametrize("training", [True, False])
def test_autocast_does_not_touch_the_kernel(training):
    layer = ts.OrthoConv2d(8, 8, 3).train(training)
    weight, direction = layer.weight.detach().clone(), torch.randn(8, 8, 3, 3)
    expected = torch.autograd.grad(layer.weight, layer.free_tensors, direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.weight.dtype == torch.float32
        assert torch.equal(layer.weight, weight)
        got = torch.autograd.grad(layer.weight, layer.free_tensors, direction)
        assert layer(torch.randn(2, 8, 6, 6)).dtype == torch.bfloat16
    assert all(map(torch.equal, got, expected))


def test_outputs_under_autocast_have_its_dtype():
    x = torch.randn(1, 8, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in (ts.OrthoConv2d(8, 8, 3), ts.OrthoConvTranspose2d(8, 4, 3, stride=2)):
            assert layer(x).dtype == torch.bfloat16


def test_model_with_everything_casts_as_a_whole():
    model = nn.Sequential(ts.OrthoConv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), ts.OrthoLinear(72, 4)).bfloat16()
    assert model(torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
