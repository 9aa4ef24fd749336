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


def circular(x, kernel, bias, left, stride=1):
    """Circular convolution, one axis at a time, written out."""
    for axis, k in enumerate(kernel.shape[2:], start=2):
        size = x.shape[axis]
        x = x.index_select(axis, torch.arange(-left, size + k - 1 - left) % size)
    return F.conv2d(x, kernel, bias, stride)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_fused_block_is_the_composition_of_three_layers(k, stride):
    block = randomise(ts.SLLAOCBlock2d(4, 4, k, stride, hidden_channels=5)).double()
    pre, post, inner = block.parametrization.parts
    free = [t.detach() for t in block.free_tensors]
    kernels = []
    for part in (pre, post, inner):
        count = len(part.free_shapes)
        kernels.append(part.build(*free[:count]))
        free = free[count:]
    k_pre, k_post, k_in = kernels
    outer, middle = k_pre.shape[-1], k_in.shape[-1]
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    u = circular(x, k_pre, None, (outer - 1) // 2)
    hidden = F.relu(circular(u, k_in, block.bias, middle // 2))
    back = circular(hidden, k_in.transpose(0, 1).flip(2, 3), None, middle - 1 - middle // 2)
    expected = circular(u - 2 * back, k_post, None, outer // 2, stride)
    torch.testing.assert_close(block(x), expected)


def test_sizes_of_the_fused_kernels_are_those_of_the_figure():
    block = ts.SLLAOCBlock2d(8, 16, stride=2)
    shortcut, first, second = block.kernels
    assert shortcut.shape == (16, 8, 3, 3)
    assert first.shape == (16, 8, 3, 3)
    assert second.shape == (16, 16, 3, 3)
    plain = ts.to_torch(block)
    assert plain.first.padding == plain.second[0].padding == plain.second[2].padding == (1, 1)
    assert plain.first.stride == plain.second[2].stride == (2, 2)
