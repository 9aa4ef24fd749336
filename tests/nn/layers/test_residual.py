import copy

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import assert_isometric, assert_one_lipschitz, exact, randomise, train

SHAPE = (4, 3, 3)


def branch(channels=4):
    return nn.Sequential(ts.OrthoConv2d(channels, channels, 3), ts.MaxMin(), ts.OrthoConv2d(channels, channels, 1))


BLOCKS = [
    lambda: ts.LearnableResidual(branch()),
    lambda: ts.LearnableResidual(branch(), scale=-0.3, learnable_skip=True),
    lambda: ts.ConvexResidual(branch()),
    lambda: ts.ConvexResidual(branch(), weight=0.9),
    lambda: ts.ConcatResidual(branch(2)),
    lambda: ts.L2Residual(branch()),
    lambda: ts.DepthwiseResidualBlock2d(4),
    lambda: ts.DepthwiseResidualBlock2d(4, (1, 3), multiplier=3, padding_mode="zeros", orthogonalizer="qr"),
]


@pytest.mark.parametrize("make", BLOCKS)
@pytest.mark.parametrize("state", ["fresh", "moved", "trained"])
def test_never_amplifies(make, state):
    block = make()
    if state == "moved":
        randomise(block)
    if state == "trained":
        train(block, SHAPE)
    assert_one_lipschitz(block, SHAPE)


def test_concatenation_keeps_isometries():
    assert_isometric(ts.ConcatResidual(branch(2)), SHAPE)


def test_formulas():
    f, x = nn.Linear(3, 3), torch.randn(2, 3)
    block = ts.LearnableResidual(f, scale=-2.0)
    torch.testing.assert_close(block(x), (x + f(-2 * x)) / 3)
    torch.testing.assert_close(ts.ConvexResidual(f, weight=0.25)(x), 0.75 * x + 0.25 * f(x))
    torch.testing.assert_close(ts.L2Residual(f)(x), ((x.square() + f(x).square()) / 2).sqrt())
    turned = ts.L2Residual(f, angle=0.3)(x)
    torch.testing.assert_close(turned, ((0.95533649 * x).square() + (0.29552021 * f(x)).square()).sqrt())
    y = torch.randn(2, 6)
    torch.testing.assert_close(ts.ConcatResidual(f)(y), torch.cat((y[:, :3], f(y[:, 3:])), 1))


def test_tight_when_skip_and_branch_agree():
    block = exact(ts.LearnableResidual(nn.Identity()))
    assert assert_one_lipschitz(block, (4,)) == pytest.approx(1)


def test_shortcut_changes_the_shape():
    block = ts.LearnableResidual(ts.OrthoConv2d(4, 8, 3, stride=2), ts.OrthoConv2d(4, 8, 2, stride=2))
    assert block(torch.randn(1, 4, 4, 4)).shape == (1, 8, 2, 2)
    assert_one_lipschitz(block, (4, 4, 4))


def test_factors_that_vanish():
    block = ts.LearnableResidual(nn.Linear(3, 3), scale=0.0, learnable_skip=True)
    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(block(x), x + block.branch.bias)
    with torch.no_grad():
        block.skip_scale.zero_()
    y = block(x)
    assert torch.equal(y, torch.zeros(2, 3))
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert block.scale.grad.isfinite()


def test_l2_gradient_is_safe_at_zero():
    block = ts.L2Residual(nn.Identity())
    x = torch.zeros(2, 3, requires_grad=True)
    block(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 3))
    assert block.angle.grad.isfinite()


@pytest.mark.parametrize("make", BLOCKS)
def test_dtypes_state_and_export(make):
    block, other = randomise(make()), make()
    x = torch.randn(2, *SHAPE)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), block(x))
    torch.testing.assert_close(ts.to_torch(block)(x), block(x), atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block(x).isfinite().all()
    short = copy.deepcopy(block).bfloat16()
    assert short(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("cls", [ts.LearnableResidual, ts.ConvexResidual, ts.L2Residual])
def test_gradcheck(cls):
    block = randomise(cls(nn.Linear(3, 3)).double())
    names, values = zip(*block.named_parameters(), strict=True)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def call(x, *free):
        return torch.func.functional_call(block, dict(zip(names, free, strict=True)), x)

    assert torch.autograd.gradcheck(call, (x, *values))


@pytest.mark.parametrize(
    ("cls", "shape"), [(ts.DepthwiseResidualBlock1d, (4, 5)), (ts.DepthwiseResidualBlock3d, (2, 3, 2, 2))]
)
def test_depthwise_block_in_other_dimensions(cls, shape):
    block = cls(shape[0])
    assert block(torch.randn(shape)).shape == shape
    assert_one_lipschitz(block, shape)


def test_depthwise_block_has_the_size_that_the_paper_counts():
    block = ts.DepthwiseResidualBlock2d(8, 3, bias=False)
    depthwise, _, pointwise = block.branch
    assert (depthwise.out_channels, depthwise.groups, depthwise.kernel_size) == (16, 8, (3, 3))
    assert (pointwise.in_channels, pointwise.out_channels, pointwise.kernel_size) == (16, 8, (1, 1))
    assert block.scale.numel() == 1
    assert "skip_scale" not in dict(block.named_parameters())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ts.ConvexResidual(nn.Identity(), weight=1.0), "weight=1.0"),
        (lambda: ts.ConcatResidual(nn.Identity())(torch.zeros(1, 3)), "3 channels"),
        (lambda: ts.LearnableResidual(nn.Linear(4, 3))(torch.zeros(1, 4)), r"\(1, 3\), the skip to \(1, 4\)"),
        (lambda: ts.DepthwiseResidualBlock2d(3, multiplier=3), "channels=3 x multiplier=3 is odd"),
        (lambda: ts.DepthwiseResidualBlock2d(4, multiplier=1), "nothing to learn"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scale", "skip"), [(1e5, 1.0), (1e30, 1.0), (1e-40, 1e-40), (1e-30, 1e-40), (0.0, 0.0)])
def test_extreme_factors_stay_finite_and_never_amplify(dtype, scale, skip):
    block = ts.LearnableResidual(nn.Tanh(), scale=scale, learnable_skip=True)
    with torch.no_grad():
        block.skip_scale.fill_(skip)
    block = block.to(dtype)
    x = torch.randn(50, 8, dtype=dtype, requires_grad=True)
    y = block(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() <= 1 + 4 * torch.finfo(dtype).eps
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_the_depthwise_block_is_what_the_paper_draws():
    """Depthwise convolution, sorted pairs, pointwise convolution, and the skip; written out."""
    block, x = ts.DepthwiseResidualBlock2d(4, scale=0.7), torch.randn(2, 4, 5, 5)
    depthwise, _, pointwise = block.branch
    hidden = depthwise(0.7 * x)
    pairs = torch.stack((hidden[:, ::2].maximum(hidden[:, 1::2]), hidden[:, ::2].minimum(hidden[:, 1::2])), 2)
    torch.testing.assert_close(block(x), (x + pointwise(pairs.flatten(1, 2))) / 1.7)


def test_adjoint_residual_is_the_step_of_a_potential():
    layer = ts.OrthoConv2d(4, 6, 3, stride=2).double()
    block, x = ts.AdjointResidual(layer, nn.Softplus()).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: block(z.view(1, 4, 6, 6)).flatten(), x[0].flatten())
    torch.testing.assert_close(jacobian, jacobian.T)
    values = torch.linalg.eigvalsh(jacobian)
    assert -1 <= float(values.min()) < 1 - 1e-3
    assert float(values.max()) <= 1 + 1e-12
    assert len(list(block.parameters())) == len(list(layer.parameters()))
    block(x).sum().backward()
    assert all(tensor.grad is not None for tensor in layer.free_tensors)


def test_adjoint_residuals_that_are_none():
    with pytest.raises(TypeError, match=r"adjoint\(\)"):
        ts.AdjointResidual(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="activation"):
        ts.AdjointResidual(ts.OrthoLinear(4, 4), ts.MaxMin())


def test_the_state_of_an_adjoint_residual_names_each_tensor_once_and_loads_with_both_names():
    def make():
        return nn.Sequential(
            ts.AdjointResidual(ts.OrthoConv2d(4, 6, 3)), nn.Sequential(ts.AdjointResidual(ts.OrthoLinear(5, 3)))
        )

    torch.manual_seed(0)
    model, other, third = make(), make(), make()
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    assert not any("adjoint" in name for name in state)
    other.load_state_dict(state)
    twice = {name.replace("layer", "adjoint"): tensor for name, tensor in state.items() if "parametrizations" in name}
    third.load_state_dict({**state, **twice})
    x = torch.randn(2, 4, 5, 5)
    for twin in (other, third):
        torch.testing.assert_close(twin(x), model(x))
        assert twin[0].layer.free_tensors[0] is twin[0].adjoint.free_tensors[0]
    del state["0.layer.bias"]
    with pytest.raises(RuntimeError, match=r"0\.layer\.bias"):
        make().load_state_dict(state)
    assigned = make()
    assigned.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(assigned(x), model(x))
