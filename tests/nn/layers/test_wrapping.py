"""One function for circular padding and convolution: the same numbers and derivatives as torch's two steps."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from benchmarks.measure import saved_bytes
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts
from trysquare.nn.layers.convolution import circular_convolution
from trysquare.nn.linalg.kernels import CONV

# What torch loads for derivatives in forward mode warns about torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

# Shapes of map and kernel, torch's flat padding, stride, dilation, groups.
CASES = {
    "1-D": ((2, 3, 6), (4, 3, 3), [1, 1], (1,), (1,), 1),
    "2-D": ((2, 3, 4, 5), (4, 3, 3, 2), [0, 1, 1, 1], (1, 1), (1, 1), 1),
    "3-D": ((1, 2, 3, 2, 4), (2, 2, 1, 2, 3), [1, 1, 1, 0, 0, 0], (1, 1, 1), (1, 1, 1), 1),
    "stride": ((1, 2, 4, 6), (4, 2, 3, 3), [1, 0, 1, 0], (2, 2), (1, 1), 1),
    "dilation, groups": ((1, 4, 6, 5), (4, 2, 3, 3), [2, 2, 3, 1], (1, 1), (2, 2), 2),
    "a whole period": ((1, 2, 2, 3), (2, 2, 5, 7), [3, 3, 2, 2], (1, 1), (1, 1), 1),
}


@pytest.fixture(params=CASES)
def case(request):
    shape, kernel_shape, *numbers = CASES[request.param]
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, kernel_shape))
    bias = torch.randn(kernel_shape[0], dtype=torch.float64, requires_grad=True)
    return (x, weight, bias), numbers


def in_two_steps(x, weight, bias, pads, stride, dilation, groups):
    return CONV[len(stride)](F.pad(x, pads, mode="circular"), weight, bias, stride, 0, dilation, groups)


def test_it_is_padding_and_convolution(case):
    tensors, numbers = case
    expected = in_two_steps(*tensors, *numbers)
    found = circular_convolution(*tensors, *numbers)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(y, tensors, direction) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_derivatives_of_first_and_second_order_in_both_modes(case):
    tensors, numbers = case

    def call(*given):
        return circular_convolution(*given, *numbers)

    assert gradcheck(call, tensors, check_forward_ad=True)
    assert gradgradcheck(call, tensors)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2, 0), (1, 2)])
def test_only_what_is_wanted_is_computed(case, wanted):
    tensors, numbers = case
    tensors = [tensor.detach().requires_grad_(place in wanted) for place, tensor in enumerate(tensors)]
    circular_convolution(*tensors, *numbers).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [place in wanted for place in range(3)]


@pytest.mark.parametrize("bias", [True, False])
def test_one_gradient_costs_no_more_than_torchs(bias):
    layer = ts.OrthoConv2d(8, 8, 3, bias=bias).eval()
    plain = ts.to_torch(layer)
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    flops = []
    for module in (layer, plain):
        y = module(x)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(y.sum(), x)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


def test_on_no_device():
    layer = ts.OrthoConv2d(4, 6, 3, device="meta")
    assert layer(torch.empty(2, 4, 6, 6, device="meta")).shape == (2, 6, 6, 6)


def test_without_bias(case):
    (x, weight, _), numbers = case
    assert gradcheck(lambda *given: circular_convolution(*given, None, *numbers), (x, weight), check_forward_ad=True)


def test_the_extended_map_is_not_kept():
    layer = ts.OrthoConv2d(4, 4, 3).requires_grad_(False)
    x = torch.randn(8, 4, 10, 10, requires_grad=True)
    kernel = 4 * layer.weight.numel()
    assert saved_bytes(lambda: layer(x)) == 4 * 8 * 4 * 10 * 10 + kernel
    plain = ts.to_torch(layer)
    assert saved_bytes(lambda: plain(x)) == 4 * 8 * 4 * 12 * 12 + kernel


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_autocast_does_what_it_does_to_torchs_own(kind):
    torch.manual_seed(0)
    layer = ts.OrthoConv2d(4, 8, 3, stride=2) if kind == "layer" else ts.SLLAOCBlock2d(4, 8, stride=2)
    plain = ts.to_torch(layer)
    found = []
    for module in (layer, plain):
        x = torch.linspace(-1, 1, 2 * 4 * 36).view(2, 4, 6, 6).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.float().square().sum().backward()
        found.append((y, x.grad))
    (y, gradient), (expected, expected_gradient) = found
    assert y.dtype == expected.dtype == torch.bfloat16
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0.05, atol=0.05)


def test_one_image_without_a_batch():
    layer = ts.OrthoConv2d(4, 4, 3)
    x = torch.randn(4, 5, 5, requires_grad=True)
    torch.testing.assert_close(layer(x), layer(x[None])[0])
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


def test_a_penalty_on_gradients_can_be_trained():
    critic = torch.nn.Sequential(ts.OrthoConv2d(2, 4, 3, dtype=torch.float64), torch.nn.Softplus())
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    (gradient.norm() - 1).square().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in critic.parameters())


def test_tracing_sees_plain_operations():
    layer = ts.OrthoConv2d(2, 4, 3)
    x = torch.randn(1, 2, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, x, check_trace=False)
    assert "PythonOp" not in str(traced.inlined_graph)


def test_many_gradients_at_once(case):
    tensors, numbers = case
    y = circular_convolution(*tensors, *numbers)
    directions = torch.randn(3, *y.shape, dtype=y.dtype)
    together = torch.autograd.grad(y, tensors, directions, is_grads_batched=True, retain_graph=True)
    for place, direction in enumerate(directions):
        for batch, one in zip(together, torch.autograd.grad(y, tensors, direction, retain_graph=True), strict=True):
            torch.testing.assert_close(batch[place], one)
