"""What all residual and sandwich blocks share: 1-Lipschitz, cached, exported, reloaded, in any dimension and dtype."""

import copy

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import assert_one_lipschitz, randomise, train

BLOCKS = {
    "sll linear": (lambda **o: ts.SLLLinear(6, 9, **o), (6,)),
    "sll 1d": (lambda **o: ts.SLLBlock1d(3, 5, 4, **o), (3, 6)),
    "sll 2d": (lambda **o: ts.SLLBlock2d(3, 4, **o), (3, 4, 3)),
    "sll 2d zeros": (lambda **o: ts.SLLBlock2d(3, 4, (2, 3), padding_mode="zeros", **o), (3, 3, 4)),
    "sll 3d": (lambda **o: ts.SLLBlock3d(2, 2, 2, **o), (2, 3, 2, 3)),
    "cpl linear": (lambda **o: ts.CPLLinear(6, 9, **o), (6,)),
    "cpl 1d": (lambda **o: ts.CPLBlock1d(3, 5, 4, steps=3, **o), (3, 6)),
    "cpl 2d": (lambda **o: ts.CPLBlock2d(3, 4, **o), (3, 4, 3)),
    "cpl 2d zeros": (lambda **o: ts.CPLBlock2d(3, 2, 2, padding_mode="zeros", steps=0, **o), (3, 3, 4)),
    "cpl 3d": (lambda **o: ts.CPLBlock3d(2, 2, 2, **o), (2, 3, 2, 3)),
    "sllaoc 1d": (lambda **o: ts.SLLAOCBlock1d(3, 5, stride=2, **o), (3, 6)),
    "sllaoc 2d": (lambda **o: ts.SLLAOCBlock2d(2, 6, stride=2, **o), (2, 4, 6)),
    "sllaoc 2d plain": (lambda **o: ts.SLLAOCBlock2d(3, 2, 4, hidden_channels=5, mid_channels=4, **o), (3, 4, 4)),
    "sllaoc 2d zeros": (lambda **o: ts.SLLAOCBlock2d(2, 6, (3, 5), (1, 2), padding_mode="zeros", **o), (2, 3, 5)),
    "sllaoc 3d": (lambda **o: ts.SLLAOCBlock3d(2, 3, 3, (1, 2, 1), **o), (2, 3, 2, 3)),
    "sandwich linear": (lambda **o: ts.SandwichLinear(6, 4, **o), (6,)),
    "sandwich linear cayley": (
        lambda **o: ts.SandwichLinear(3, 5, hidden_features=10, orthogonalizer="cayley", **o),
        (3,),
    ),
    "sandwich aoc 1d": (lambda **o: ts.SandwichAOCConv1d(3, 4, 3, 2, **o), (3, 6)),
    "sandwich aoc 2d": (lambda **o: ts.SandwichAOCConv2d(2, 6, 3, 2, **o), (2, 4, 6)),
    "sandwich aoc 2d zeros": (
        lambda **o: ts.SandwichAOCConv2d(3, 2, (2, 3), hidden_channels=4, padding_mode="zeros", **o),
        (3, 4, 3),
    ),
    "sandwich aoc 3d": (lambda **o: ts.SandwichAOCConv3d(2, 2, 2, (1, 2, 1), **o), (2, 3, 2, 3)),
    "sandwich 1d": (lambda **o: ts.SandwichConv1d(3, 4, 3, 2, **o), (3, 6)),
    "sandwich 2d": (lambda **o: ts.SandwichConv2d(2, 4, 3, **o), (2, 4, 3)),
    "sandwich 2d stride": (lambda **o: ts.SandwichConv2d(2, 4, (2, 3), (1, 2), **o), (2, 3, 4)),
    "sandwich 3d": (lambda **o: ts.SandwichConv3d(2, 2, 2, (1, 2, 1), **o), (2, 3, 2, 3)),
}
EXPORTED = {
    name: case for name, case in BLOCKS.items() if not name.startswith(("sandwich 1", "sandwich 2", "sandwich 3"))
}

each = pytest.mark.parametrize(("make", "shape"), BLOCKS.values(), ids=BLOCKS)
each_exported = pytest.mark.parametrize(("make", "shape"), EXPORTED.values(), ids=EXPORTED)


@each
@pytest.mark.parametrize("state", ["fresh", "moved", "far", "trained"])
def test_never_amplifies(make, shape, state):
    block = make()
    if state == "moved":
        randomise(block)
    if state == "far":
        randomise(block, 5.0)
    if state == "trained":
        train(block, shape)
    assert_one_lipschitz(block, shape)


@each
def test_wild_parameters_stay_finite(make, shape):
    block = randomise(make(), 1e4)
    y = block(torch.randn(2, *shape))
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())


@each
@pytest.mark.parametrize("activation", [nn.Identity(), nn.Tanh()])
def test_never_amplifies_with_other_activations(make, shape, activation):
    assert_one_lipschitz(randomise(make(activation=activation)), shape)


@each
def test_gradcheck(make, shape):
    block = randomise(make(dtype=torch.float64), 0.3)
    names, values = zip(*block.named_parameters(), strict=True)
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)

    def call(x, *free):
        return torch.func.functional_call(block, dict(zip(names, free, strict=True)), x)

    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


@each
def test_every_parameter_learns(make, shape):
    block = randomise(make(), 0.3)
    block(torch.randn(4, *shape)).square().mul(torch.rand(1)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in block.parameters())


@each
def test_state_copies_and_resets(make, shape):
    block, other = randomise(make()), make()
    x = torch.randn(2, *shape)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), block(x))
    twin = copy.deepcopy(block)
    assert torch.equal(twin(x), block(x))
    twin.reset_parameters()
    assert not torch.equal(twin(x), block(x))
    assert make(bias=False).bias is None
    assert "activation" in repr(block)


@each
def test_kept_in_eval_and_never_stale(make, shape):
    block, other = make().eval(), randomise(make()).eval()
    x = torch.randn(2, *shape)
    with torch.no_grad():
        before = block(x)
        assert torch.equal(block(x), before)
        block.load_state_dict(other.state_dict())
        torch.testing.assert_close(block(x), other(x))
        assert not torch.allclose(block(x), before)
        next(block.parameters()).mul_(-0.5).add_(0.1)
        expected = copy.deepcopy(block).train()(x)
        torch.testing.assert_close(block(x), expected)
        first = block(x[:1])
    torch.testing.assert_close(first, expected[:1])
    block(x).sum().backward()
    assert next(block.parameters()).grad is not None


@pytest.mark.parametrize("name", [name for name in EXPORTED if "linear" in name or "2d" in name])
def test_kernels_are_built_once_in_eval(name, monkeypatch):
    make, shape = EXPORTED[name]
    block, calls = make().eval(), []
    build = block.parametrization.build
    monkeypatch.setattr(block.parametrization, "build", lambda *free: calls.append(1) or build(*free))
    with torch.no_grad():
        for _ in range(3):
            block(torch.randn(2, *shape))
    assert len(calls) == 1


@each
def test_short_dtypes_and_autocast(make, shape):
    block = make()
    x = torch.randn(2, *shape)
    expected = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(block(x).float(), expected, atol=0.1, rtol=0.1)
    free = [p for name, p in block.named_parameters() if name != "bias"]
    short = copy.deepcopy(block).bfloat16()
    assert short(x.bfloat16()).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for name, p in short.named_parameters() if name != "bias")
    assert short.bias.dtype == torch.bfloat16
    back = short.float()
    assert all(
        torch.equal(p, q) for p, q in zip(free, [p for n, p in back.named_parameters() if n != "bias"], strict=True)
    )
    direct = make(dtype=torch.bfloat16)
    assert direct(x.bfloat16()).dtype == torch.bfloat16


@each_exported
def test_reconditioning_keeps_the_kernels(make, shape):
    block = randomise(make()).double()
    free = [tensor.detach() for tensor in block.free_tensors]
    build = block.parametrization.build
    torch.testing.assert_close(build(*block.parametrization.reconditioned(*free)), build(*free))


@each_exported
def test_autocast_does_not_touch_the_kernels(make, shape):
    block = make()
    weight = block.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block.weight, weight)


@each_exported
def test_plain_export(make, shape):
    block = randomise(make())
    x = torch.randn(2, *shape)
    plain = ts.to_torch(nn.Sequential(block))
    kinds = {type(m).__module__.split(".")[0] + "." + type(m).__name__ for m in plain.modules()}
    assert all(kind.startswith("torch.") or kind == "trysquare.Sum" for kind in kinds), kinds
    torch.testing.assert_close(plain(x), block(x), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert block(x).abs().sum() > 0


@pytest.mark.parametrize("name", [name for name in EXPORTED if "linear" not in name])
def test_small_and_unbatched_maps(name):
    make, shape = EXPORTED[name]
    block = make()
    x = torch.randn(shape)
    torch.testing.assert_close(block(x), block(x[None])[0])
    stride = getattr(block, "stride", (1,) * (len(shape) - 1))
    small = (shape[0], *stride)
    assert_one_lipschitz(block, small)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ts.SLLBlock2d(4, padding_mode="reflect"), "padding_mode='reflect' must be one of 'circular', 'zeros'"),
        (lambda: ts.CPLBlock2d(4, padding_mode="replicate"), "repeat pixels"),
        (lambda: ts.SLLAOCBlock2d(4, 4, padding_mode="reflect"), "repeat pixels"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, padding_mode="reflect"), "reflect"),
        (lambda: ts.SLLBlock2d(0), "channels=0"),
        (lambda: ts.SLLLinear(4, 0), "hidden channels=0"),
        (lambda: ts.SandwichLinear(4, 0), "out_features=0"),
        (lambda: ts.SandwichConv2d(0, 4, 3), "in_channels=0"),
        (lambda: ts.SLLBlock2d(4, activation=ts.MaxMin()), "slopes between 0 and 1"),
        (lambda: ts.SLLAOCBlock2d(4, 32, 1, stride=2), "no orthogonal kernel exists"),
        (lambda: ts.SandwichAOCConv2d(4, 32, 1, stride=2), "no orthogonal kernel exists"),
        (lambda: ts.SLLAOCBlock2d(4, 4, stride=2)(torch.zeros(1, 4, 5, 4)), r"\(5, 4\) is not divisible"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, 2)(torch.zeros(1, 4, 5, 4)), r"\(5, 4\) is not divisible"),
        (lambda: ts.SandwichConv2d(4, 4, 3, 2)(torch.zeros(1, 4, 5, 4)), r"\(5, 4\) are not divisible"),
        (lambda: ts.SandwichConv2d(4, 4, 3)(torch.zeros(1, 3, 4, 4)), r"\(1, 3, 4, 4\) must be \(batch, 4"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, method="none"), "method='none'"),
        (lambda: ts.CPLBlock2d(4, steps=-1), "steps=-1"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_any_size_with_zeros():
    block = ts.SLLAOCBlock2d(2, 4, stride=2, padding_mode="zeros")
    assert block(torch.randn(1, 2, 5, 7)).shape == (1, 4, 3, 4)
    assert_one_lipschitz(block, (2, 3, 5))
