import itertools

import pytest
import torch
import torch.nn.functional as F

import trysquare as ts
from tests.jacobians import exact, jacobian, randomise


def test_equation_of_the_paper():
    layer = randomise(ts.SLLLinear(5, 4)).double()
    free, free_q = (t.detach() for t in layer.free_tensors)
    w, q = free.T, (5 * torch.tanh(free_q / 5)).exp()
    t = ((w.T @ w).abs() * q[None, :] / q[:, None]).sum(1)
    x = torch.randn(10, 5, dtype=torch.float64)
    # ReLU is homogeneous: T^-1 after it is T^-1/2 on both sides, with the bias scaled.
    expected = x - 2 * (F.relu(x @ w + layer.bias * t.sqrt()) / t) @ w.T
    torch.testing.assert_close(layer(x), expected)


def test_all_slopes():
    layer = randomise(ts.SLLLinear(4, 6)).double()
    m = layer.weight.detach()
    for slopes in itertools.product((0.0, 1.0), repeat=6):
        step = torch.eye(4, dtype=torch.float64) - 2 * m.T @ torch.diag(torch.tensor(slopes, dtype=torch.float64)) @ m
        assert torch.linalg.matrix_norm(step, 2) <= 1 + 1e-12


def test_q_acts_in_the_layer_and_learns():
    layer = ts.SLLBlock2d(3, 4)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.free_tensors[1][0] = 2.0
    assert (layer.weight[0] / before[0]).abs().min() > 1
    assert (layer.weight[1:] / before[1:]).abs().max() < 1
    layer(torch.randn(1, 3, 4, 4)).square().sum().backward()
    assert layer.free_tensors[1].grad.abs().max() > 1e-4


def test_more_than_a_linear_map_and_close_to_tight():
    layer = exact(ts.SLLBlock2d(3, 4))
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    values = torch.linalg.svdvals(jacobian(layer, x))
    assert values[0] > 0.999
    assert values[-1] < 0.9


class Circular:
    """Circular convolution, one axis at a time, written out; its transpose by autograd."""

    def __init__(self, kernel, left, stride=1, dilation=1, groups=1):
        self.kernel, self.left, self.dilation = kernel, dilation * left, dilation
        self.options = {"stride": stride, "dilation": dilation, "groups": groups}

    def __call__(self, x, bias=None):
        for axis, k in enumerate(self.kernel.shape[2:], start=2):
            size = x.shape[axis]
            x = x.index_select(axis, torch.arange(-self.left, size + self.dilation * (k - 1) - self.left) % size)
        return F.conv2d(x, self.kernel, bias, **self.options)

    def transpose(self, y, size):
        x = y.new_zeros(y.shape[0], self.kernel.shape[1] * self.options["groups"], size, size, requires_grad=True)
        return torch.autograd.grad(self(x), x, y)[0]


def three_layers(block):
    """``pre``, ``post`` and ``K`` of a fused block."""
    free, kernels = [t.detach() for t in block.free_tensors], []
    for part in block.parametrization.parts:
        count = len(part.free_shapes)
        kernels.append(part.build(*free[:count]))
        free = free[count:]
    (outer, middle), stride = (kernels[0].shape[-1], kernels[2].shape[-1]), block.stride[0]
    lefts, strides = ((outer - 1) // 2, outer // 2, middle // 2), (1, stride, 1)
    rest = block.dilation[0], block.groups
    return [Circular(k, left, s, *rest) for k, left, s in zip(kernels, lefts, strides, strict=True)]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 3, 1), (2, 3, 2)])
def test_fused_block_is_the_composition_of_three_layers(k, stride, dilation, groups):
    block = randomise(ts.SLLAOCBlock2d(4, 4, k, stride, dilation, groups, hidden_channels=6)).double()
    pre, post, inner = three_layers(block)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    u = pre(x)
    expected = post(u - 2 * inner.transpose(F.relu(inner(u, block.bias)), 6))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 3, 1), (2, 3, 2)])
def test_transposed_block_is_the_composition_of_three_layers(k, stride, dilation, groups):
    block = randomise(ts.SLLAOCBlockTranspose2d(4, 4, k, stride, dilation, groups, hidden_channels=6)).double()
    pre, post, inner = three_layers(block)
    x, size = torch.randn(2, 4, 6, 6, dtype=torch.float64), 6 * stride
    u = post.transpose(x, size)
    expected = pre.transpose(u - 2 * inner.transpose(F.relu(inner(u, block.bias)), size), size)
    torch.testing.assert_close(block(x), expected)


def test_a_transposed_block_is_exported_to_transposed_convolutions():
    plain = ts.to_torch(ts.SLLAOCBlockTranspose2d(16, 8, stride=2, groups=2, padding_mode="zeros"))
    shortcut, first, second = plain.first, plain.second[0], plain.second[2]
    for layer in (shortcut, first):
        assert type(layer) is torch.nn.ConvTranspose2d
        assert (layer.stride, layer.groups) == ((2, 2), 2)
    assert type(second) is torch.nn.Conv2d
    assert (second.stride, second.groups) == ((1, 1), 2)


def test_sizes_of_the_fused_kernels_are_those_of_the_figure():
    block = ts.SLLAOCBlock2d(8, 16, stride=2)
    shortcut, first, second = block.kernels
    assert shortcut.shape == (16, 8, 3, 3)
    assert first.shape == (16, 8, 3, 3)
    assert second.shape == (16, 16, 3, 3)
    plain = ts.to_torch(block)
    assert plain.first.padding == plain.second[0].padding == plain.second[2].padding == (1, 1)
    assert plain.first.stride == plain.second[2].stride == (2, 2)
