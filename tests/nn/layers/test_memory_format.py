"""Outputs lie in memory as those of torch's own layers would: contiguous, or with the channels last if the input is."""

import itertools

import pytest
import torch

import trysquare as ts

LAYERS = {
    1: (ts.OrthoConv1d, ts.OrthoConvTranspose1d),
    2: (ts.OrthoConv2d, ts.OrthoConvTranspose2d),
    3: (ts.OrthoConv3d, ts.OrthoConvTranspose3d),
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.mark.parametrize("method", ts.METHODS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_strides_of_outputs(method, dims):
    tried = 0
    for cls, kernel, stride, mode in itertools.product(LAYERS[dims], (1, 3), (1, 2), ("circular", "zeros")):
        try:
            layer = cls(4, 4, kernel, stride=stride, padding_mode=mode, method=method)
        except ValueError:
            continue
        for training, grad, formats in itertools.product((True, False), (True, False), ("plain", "last")):
            if formats == "last" and dims == 1:
                continue
            memory = torch.contiguous_format if formats == "plain" else LAST[dims]
            x = torch.randn(2, 4, *(4,) * dims).contiguous(memory_format=memory)
            with torch.set_grad_enabled(grad):
                y = layer.train(training)(x)
            assert y.stride() == torch.empty(y.shape).contiguous(memory_format=memory).stride()
            tried += 1
        assert layer.weight.stride() == torch.empty(layer.weight.shape).stride()
    assert tried


def test_a_gradient_through_channels_last_is_the_same():
    layer, x = ts.OrthoConv2d(4, 8, 3, stride=2).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        inputs = x.clone(memory_format=memory).requires_grad_()
        layer(inputs).pow(3).sum().backward()
        found.append(inputs.grad)
    torch.testing.assert_close(*found)
