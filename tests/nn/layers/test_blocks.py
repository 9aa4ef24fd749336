"""What all residual and sandwich blocks share: 1-Lipschitz, cached, exported, reloaded, in any dimension and dtype."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import assert_one_lipschitz, exact, jacobian, randomise, train

BLOCKS = {
    "sll linear": (lambda **o: ts.SLLLinear(6, 9, **o), (6,)),
    "sll 1d": (lambda **o: ts.SLLBlock1d(3, 5, 4, **o), (3, 6)),
    "sll 2d": (lambda **o: ts.SLLBlock2d(3, 4, **o), (3, 4, 3)),
    "sll 2d zeros": (lambda **o: ts.SLLBlock2d(3, 4, (2, 3), padding_mode="zeros", **o), (3, 3, 4)),
    "sll 2d groups": (lambda **o: ts.SLLBlock2d(4, 6, (2, 3), groups=2, **o), (4, 4, 3)),
    "sll 2d depthwise": (lambda **o: ts.SLLBlock2d(3, 6, groups=3, **o), (3, 4, 4)),
    "sll 2d dilation": (lambda **o: ts.SLLBlock2d(3, 4, dilation=(2, 3), **o), (3, 4, 5)),
    "sll 1d dilation zeros": (lambda **o: ts.SLLBlock1d(4, 4, 4, 3, 2, padding_mode="zeros", **o), (4, 8)),
    "sll 3d": (lambda **o: ts.SLLBlock3d(2, 2, 2, **o), (2, 3, 2, 3)),
    "cpl linear": (lambda **o: ts.CPLLinear(6, 9, **o), (6,)),
    "cpl 1d": (lambda **o: ts.CPLBlock1d(3, 5, 4, steps=3, **o), (3, 6)),
    "cpl 2d": (lambda **o: ts.CPLBlock2d(3, 4, **o), (3, 4, 3)),
    "cpl 2d zeros": (lambda **o: ts.CPLBlock2d(3, 2, 2, padding_mode="zeros", steps=0, **o), (3, 3, 4)),
    "cpl 2d groups": (lambda **o: ts.CPLBlock2d(4, 6, (2, 3), groups=2, **o), (4, 4, 3)),
    "cpl 2d dilation": (lambda **o: ts.CPLBlock2d(3, 4, dilation=(2, 3), **o), (3, 4, 5)),
    "cpl 1d dilation zeros": (lambda **o: ts.CPLBlock1d(4, 4, 4, 3, 2, padding_mode="zeros", **o), (4, 8)),
    "cpl 3d": (lambda **o: ts.CPLBlock3d(2, 2, 2, **o), (2, 3, 2, 3)),
    "sllaoc 1d": (lambda **o: ts.SLLAOCBlock1d(3, 5, stride=2, **o), (3, 6)),
    "sllaoc 2d": (lambda **o: ts.SLLAOCBlock2d(2, 6, stride=2, **o), (2, 4, 6)),
    "sllaoc 2d plain": (lambda **o: ts.SLLAOCBlock2d(3, 2, 4, hidden_channels=5, mid_channels=4, **o), (3, 4, 4)),
    "sllaoc 2d zeros": (lambda **o: ts.SLLAOCBlock2d(2, 6, (3, 5), (1, 2), padding_mode="zeros", **o), (2, 3, 5)),
    "sllaoc 3d": (lambda **o: ts.SLLAOCBlock3d(2, 3, 3, (1, 2, 1), **o), (2, 3, 2, 3)),
    "sllaoc 2d groups": (lambda **o: ts.SLLAOCBlock2d(4, 6, 3, 2, groups=2, **o), (4, 4, 4)),
    "sllaoc 2d dilation": (lambda **o: ts.SLLAOCBlock2d(2, 6, 3, 2, 3, **o), (2, 6, 4)),
    "sllaoc 1d all zeros": (
        lambda **o: ts.SLLAOCBlock1d(4, 6, 5, 2, 3, 2, padding_mode="zeros", hidden_channels=4, **o),
        (4, 9),
    ),
    "sllaoc up 1d": (lambda **o: ts.SLLAOCBlockTranspose1d(5, 3, 4, 2, **o), (5, 3)),
    "sllaoc up 2d": (lambda **o: ts.SLLAOCBlockTranspose2d(6, 2, 3, (2, 3), **o), (6, 3, 2)),
    "sllaoc up 2d same": (lambda **o: ts.SLLAOCBlockTranspose2d(2, 3, mid_channels=4, **o), (2, 3, 4)),
    "sllaoc up 2d zeros": (
        lambda **o: ts.SLLAOCBlockTranspose2d(6, 2, (3, 4), 2, padding_mode="zeros", **o),
        (6, 2, 3),
    ),
    "sllaoc up 1d all": (lambda **o: ts.SLLAOCBlockTranspose1d(6, 4, 3, 2, 3, 2, hidden_channels=4, **o), (6, 4)),
    "sllaoc up 1d all zeros": (
        lambda **o: ts.SLLAOCBlockTranspose1d(6, 4, 4, 3, 2, 2, padding_mode="zeros", **o),
        (6, 4),
    ),
    "sllaoc up 3d": (lambda **o: ts.SLLAOCBlockTranspose3d(3, 2, 3, (1, 2, 1), **o), (3, 2, 1, 3)),
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
    "sandwich aoc 2d groups": (lambda **o: ts.SandwichAOCConv2d(4, 6, 3, 2, groups=2, **o), (4, 4, 4)),
    "sandwich aoc 2d dilation": (lambda **o: ts.SandwichAOCConv2d(2, 6, 3, 2, 3, **o), (2, 8, 8)),
    "sandwich aoc 1d all zeros": (
        lambda **o: ts.SandwichAOCConv1d(4, 6, 4, 2, 3, 2, padding_mode="zeros", hidden_channels=4, **o),
        (4, 9),
    ),
    "sandwich aoc up 1d": (lambda **o: ts.SandwichAOCConvTranspose1d(5, 3, 4, 2, **o), (5, 3)),
    "sandwich aoc up 2d": (lambda **o: ts.SandwichAOCConvTranspose2d(6, 2, 3, (2, 3), **o), (6, 3, 2)),
    "sandwich aoc up 2d zeros": (
        lambda **o: ts.SandwichAOCConvTranspose2d(6, 2, (3, 4), 2, padding_mode="zeros", hidden_channels=4, **o),
        (6, 2, 3),
    ),
    "sandwich aoc up 1d all": (lambda **o: ts.SandwichAOCConvTranspose1d(6, 4, 3, 2, 3, 2, **o), (6, 4)),
    "sandwich aoc up 1d all zeros": (
        lambda **o: ts.SandwichAOCConvTranspose1d(6, 4, 4, 3, 2, 2, padding_mode="zeros", **o),
        (6, 4),
    ),
    "sandwich aoc up 3d": (lambda **o: ts.SandwichAOCConvTranspose3d(3, 2, 2, (1, 2, 1), **o), (3, 2, 1, 3)),
    "sandwich 1d": (lambda **o: ts.SandwichConv1d(3, 4, 3, 2, **o), (3, 6)),
    "sandwich 2d": (lambda **o: ts.SandwichConv2d(2, 4, 3, **o), (2, 4, 3)),
    "sandwich 2d stride": (lambda **o: ts.SandwichConv2d(2, 4, (2, 3), (1, 2), **o), (2, 3, 4)),
    "sandwich 3d": (lambda **o: ts.SandwichConv3d(2, 2, 2, (1, 2, 1), **o), (2, 3, 2, 3)),
    "sandwich 2d groups": (lambda **o: ts.SandwichConv2d(4, 6, 3, (1, 2), groups=2, **o), (4, 3, 4)),
    "sandwich 1d dilation": (lambda **o: ts.SandwichConv1d(2, 4, 3, 2, 2, **o), (2, 10)),
    "sandwich 1d up": (lambda **o: ts.SandwichConvTranspose1d(4, 3, 3, 2, **o), (4, 3)),
    "sandwich 2d up": (lambda **o: ts.SandwichConvTranspose2d(4, 2, 3, (2, 3), **o), (4, 3, 2)),
    "sandwich 2d up all": (lambda **o: ts.SandwichConvTranspose2d(6, 4, 3, (1, 2), 2, 2, **o), (6, 3, 4)),
    "sandwich 3d up": (lambda **o: ts.SandwichConvTranspose3d(2, 2, 2, (1, 2, 1), **o), (2, 3, 1, 3)),
}
EXPORTED = {
    name: case for name, case in BLOCKS.items() if not name.startswith(("sandwich 1", "sandwich 2", "sandwich 3"))
}

each = pytest.mark.parametrize(("make", "shape"), BLOCKS.values(), ids=BLOCKS)
each_exported = pytest.mark.parametrize(("make", "shape"), EXPORTED.values(), ids=EXPORTED)


@each
@pytest.mark.parametrize("state", ["fresh", "moved", "far", "hostile", "trained"])
def test_never_amplifies(make, shape, state):
    block = make()
    if state == "moved":
        randomise(block)
    if state == "far":
        randomise(block, 5.0)
    if state == "hostile":
        randomise(block, 1e3)
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
    """By a loss that sees rotations of the output too, as the sum of squares would not."""
    block = randomise(make(), 0.3)
    out = block(torch.randn(4, *shape))
    out.square().mul(torch.rand_like(out)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 1e-4 for p in block.parameters())


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
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert not any(parameter.requires_grad for parameter in ts.to_torch(make().requires_grad_(False)).parameters())
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
        (lambda: ts.SLLBlock2d(4, padding_mode="reflect"), "padding_mode='reflect' repeats pixels"),
        (lambda: ts.CPLBlock2d(4, padding_mode="replicate"), "repeats pixels"),
        (lambda: ts.SLLAOCBlock2d(4, 4, padding_mode="reflect"), "repeats pixels"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, padding_mode="reflect"), "reflect"),
        (lambda: ts.SLLBlock2d(0), "channels=0"),
        (lambda: ts.SLLLinear(4, 0), "hidden_features=0"),
        (lambda: ts.SandwichLinear(4, 0), "out_features=0"),
        (lambda: ts.SandwichConv2d(0, 4, 3), "in_channels=0"),
        (lambda: ts.SLLBlock2d(4, activation=ts.MaxMin()), "slopes between 0 and 1"),
        (lambda: ts.SLLAOCBlock2d(4, 32, 1, stride=2), "no orthogonal kernel exists"),
        (lambda: ts.SandwichAOCConv2d(4, 32, 1, stride=2), "no orthogonal kernel exists"),
        (lambda: ts.SLLAOCBlock2d(4, 4, stride=2)(torch.zeros(1, 4, 5, 4)), r"\(5, 4\) is not divisible"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, 2)(torch.zeros(1, 4, 5, 4)), r"\(5, 4\) is not divisible"),
        (lambda: ts.SandwichConv2d(4, 4, 3, 2)(torch.zeros(1, 4, 5, 4)), r"\(5, 4\) must be multiples of stride"),
        (lambda: ts.SandwichConv2d(4, 4, 3)(torch.zeros(1, 3, 4, 4)), r"\(1, 3, 4, 4\) must be \(batch, 4"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, method="none"), "unknown method 'none'"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, method="aol"), "method='aol' cannot be .* aoc, bcop, sc-fac, bro"),
        (lambda: ts.SLLAOCBlock2d(4, 4, method="soc"), "method='soc' cannot be a part .* aoc, bcop, sc-fac, bro"),
        (lambda: ts.CPLBlock2d(4, steps=-1), "steps=-1"),
        (lambda: ts.SLLBlock2d(6, groups=4), "channels=6 must .* groups=4; use channels=4 or channels=8, or groups=2"),
        (lambda: ts.CPLBlock2d(4, 6, groups=4), "hidden_channels=6 must be divisible by groups=4"),
        (lambda: ts.CPLBlock2d(4, groups=0), "groups=0 must be at least 1"),
        (lambda: ts.SLLBlock2d(4, dilation=(1, 0)), "dilation"),
        (lambda: ts.SLLAOCBlock2d(4, 6, groups=4), "out_channels=6 must be divisible by groups=4"),
        (lambda: ts.SLLAOCBlock2d(4, 8, groups=4, mid_channels=6), "mid_channels=6 must be divisible by groups=4"),
        (lambda: ts.SLLAOCBlock2d(4, 8, groups=4), "pre of this block.* maps 4 in_channels to 4 .*: nothing to learn"),
        (lambda: ts.SLLAOCBlock2d(4, 16, stride=2, dilation=2), "post of this block.*coprime to the stride"),
        (lambda: ts.SLLAOCBlockTranspose2d(32, 4, 1, stride=2), "post of this block.* maps 4 in_channels to 32 .*: no"),
        (lambda: ts.SandwichAOCConv2d(4, 6, 3, groups=4), "out_channels=6 must be divisible by groups=4"),
        (lambda: ts.SandwichAOCConvTranspose2d(32, 4, 1, stride=2), "the strided kernel of this block.*no orthogonal"),
        (lambda: ts.SandwichConv2d(4, 6, 3, groups=4), "out_channels=6 must be divisible by groups=4"),
        (lambda: ts.SandwichConvTranspose2d(4, 4, 3)(torch.zeros(1, 3, 4, 4)), r"\(1, 3, 4, 4\) must be \(batch, 4"),
        (lambda: ts.SandwichAOCConv2d(4, 4, 3, padding_mode="circus"), "padding_mode='circus'"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_any_size_with_zeros():
    block = ts.SLLAOCBlock2d(2, 4, stride=2, padding_mode="zeros")
    assert block(torch.randn(1, 2, 5, 7)).shape == (1, 4, 3, 4)
    assert_one_lipschitz(block, (2, 3, 5))


@pytest.mark.parametrize("name", [name for name in BLOCKS if " up" in name])
def test_larger_maps_have_the_size_of_the_input_times_the_stride(name):
    make, (_, *sizes) = BLOCKS[name]
    block = make()
    y = block(torch.zeros(2, block.in_channels, *sizes))
    assert y.shape == (2, block.out_channels, *(n * s for n, s in zip(sizes, block.stride, strict=True)))


# transposed class, class: with the same free tensors and slopes their Jacobians are transposes of each other
PAIRS = [
    (ts.SLLAOCBlockTranspose2d, ts.SLLAOCBlock2d),
    (ts.SandwichAOCConvTranspose2d, ts.SandwichAOCConv2d),
    (ts.SandwichConvTranspose2d, ts.SandwichConv2d),
]
NUMBERS = [
    ((6, 4), 3, {"stride": 2}),
    ((4, 6), (4, 3), {"stride": (1, 2)}),
    ((6, 4), (2, 3), {"stride": (2, 3), "groups": 2}),
    ((4, 4), 3, {"stride": (1, 2), "dilation": (2, 3), "groups": 2}),
]


@pytest.mark.parametrize(("up", "down"), PAIRS)
@pytest.mark.parametrize(("channels", "kernel", "options"), NUMBERS)
@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_transposed_blocks_have_transposed_jacobians(up, down, channels, kernel, options, mode):
    if "padding_mode" in inspect.signature(up).parameters:
        options = {**options, "padding_mode": mode}
    options = {**options, "activation": nn.Identity(), "dtype": torch.float64}
    larger, smaller = up(*channels, kernel, **options), down(*channels[::-1], kernel, **options)
    randomise(larger)
    smaller.load_state_dict(larger.state_dict())
    coarse = (3, 2)
    fine = tuple(n * s for n, s in zip(coarse, larger.stride, strict=True))
    expected = jacobian(exact(smaller), torch.randn(channels[1], *fine))
    torch.testing.assert_close(jacobian(exact(larger), torch.randn(channels[0], *coarse)), expected.T)


GROUPED = {
    "sll": lambda **o: ts.SLLBlock2d(6, 9, **o),
    "cpl": lambda **o: ts.CPLBlock2d(6, 9, **o),
    "sllaoc": lambda **o: ts.SLLAOCBlock2d(6, 9, **o),
    "sllaoc up": lambda **o: ts.SLLAOCBlockTranspose2d(6, 9, 3, **o),
    "sandwich aoc": lambda **o: ts.SandwichAOCConv2d(6, 9, 3, **o),
    "sandwich aoc up": lambda **o: ts.SandwichAOCConvTranspose2d(6, 9, 3, **o),
    "sandwich": lambda **o: ts.SandwichConv2d(6, 9, 3, **o),
    "sandwich up": lambda **o: ts.SandwichConvTranspose2d(6, 9, 3, **o),
}


@pytest.mark.parametrize("make", GROUPED.values(), ids=GROUPED)
def test_groups_are_independent(make):
    block = exact(randomise(make(groups=3, activation=nn.Sigmoid())))
    matrix = jacobian(block, torch.randn(6, 3, 4))
    blocks = matrix.view(3, len(matrix) // 3, 3, 24).abs().amax((1, 3))
    assert (blocks.diagonal() > 0.01).all()
    assert (blocks - blocks.diagonal().diag()).max() < 1e-12


@pytest.mark.parametrize("make", GROUPED.values(), ids=GROUPED)
def test_dilated_blocks_act_on_each_coarse_lattice(make):
    dilated, plain = randomise(make(dilation=(2, 3), dtype=torch.float64)), make(dtype=torch.float64)
    plain.load_state_dict(dilated.state_dict())
    x = torch.randn(2, 6, 8, 9, dtype=torch.float64)
    y = dilated(x)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(y[..., i::2, j::3], plain(x[..., i::2, j::3]))


@pytest.mark.parametrize(
    "name", ["sll 2d groups", "cpl 2d dilation", "sllaoc up 1d all", "sandwich aoc up 1d all zeros"]
)
def test_compiles(name):
    make, shape = BLOCKS[name]
    block = make()
    x = torch.randn(1, *shape)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), block(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [
        ("SLLBlock2d", "stride", "SLLAOCBlock2d changes both"),
        ("CPLBlock1d", "out_channels", "SLLAOCBlock2d changes both"),
        ("SLLBlock2d", "steps", "there is no such argument"),
        ("SLLLinear", "steps", "there is no such argument"),
        ("SLLAOCBlock2d", "mid_chanels", "there is no such argument"),
        ("SandwichAOCConv3d", "mid_channels", "there is no such argument"),
        ("SandwichAOCConvTranspose1d", "padding", "there is no such argument"),
    ],
)
def test_unknown_arguments_are_named(name, option, reason):
    numbers = (4, 4) if "AOC" in name else (4,)
    with pytest.raises(TypeError, match=f"^{name} got an unexpected keyword argument '{option}': .*{reason}"):
        getattr(ts, name)(*numbers, **{option: 2})


def test_depthwise_blocks_name_the_width_that_lets_them_learn():
    with pytest.raises(ValueError, match="one side of which is mid_channels"):
        ts.SLLAOCBlock2d(4, 4, groups=4)
    assert ts.SLLAOCBlock2d(4, 4, groups=4, mid_channels=8)(torch.zeros(1, 4, 5, 5)).shape == (1, 4, 5, 5)
    with pytest.raises(ValueError, match="one side of which is hidden_channels"):
        ts.SandwichAOCConv2d(4, 4, groups=4)
    assert ts.SandwichAOCConv2d(4, 4, groups=4, hidden_channels=8)(torch.zeros(1, 4, 5, 5)).shape == (1, 4, 5, 5)
