"""Outputs lie in memory as those of torch's own layers would: contiguous, or with the channels last if the input is."""

import itertools

import pytest
import torch
from torch import nn

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


SHAPES = [
    (2, 1, 6, 6),
    (2, 3, 1, 6),
    (2, 3, 6, 1),
    (2, 1, 1, 6),
    (2, 1, 6, 1),
    (2, 3, 1, 1),
    (1, 1, 1, 1),
    (2, 3, 6, 6),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["last", "permuted", "contiguous", "every second"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_one_channel_and_one_pixel_lie_as_torchs_own_layers_leave_them(shape, layout, kernel):
    n, c, h, w = shape
    x = {
        "last": lambda: torch.randn(shape).to(memory_format=torch.channels_last),
        "permuted": lambda: torch.randn(n, h, w, c).permute(0, 3, 1, 2),
        "contiguous": lambda: torch.randn(shape),
        "every second": lambda: torch.randn(2 * n, h, w, c).permute(0, 3, 1, 2)[::2],
    }[layout]()
    for out in (1, 4):
        if kernel == 3 and min(c, out) == 1 and c >= out:
            continue  # nothing to learn
        own = nn.Conv2d(c, out, kernel, padding=kernel // 2)(x).stride()
        for mode in ("circular", "zeros"):
            layer = ts.OrthoConv2d(c, out, kernel, padding_mode=mode)
            assert layer(x).stride() == own, mode
            back = layer.adjoint()(torch.empty_strided((n, out, h, w), own).normal_())
            if layout != "every second":
                assert back.stride() == nn.ConvTranspose2d(out, c, 1)(torch.empty_strided((n, out, h, w), own)).stride()
    x.requires_grad_()
    y = ts.OrthoConv2d(c, 4, kernel)(x)
    assert torch.autograd.grad(y.sum(), x)[0].shape == shape


def test_a_gradient_through_channels_last_is_the_same():
    layer, x = ts.OrthoConv2d(4, 8, 3, stride=2).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        inputs = x.clone(memory_format=memory).requires_grad_()
        layer(inputs).pow(3).sum().backward()
        found.append(inputs.grad)
    torch.testing.assert_close(*found)
