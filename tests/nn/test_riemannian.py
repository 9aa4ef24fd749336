"""Adam on orthonormal matrices: it stays on them, finds known optima, and layers know when they can rely on it."""

import copy
import math

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.nn.test_optim import trained
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.linalg.stiefel import tangent
from trysquare.nn.riemannian import is_known
from trysquare.verify.spectrum import singular_values


def off(matrix):
    """Largest entry of ``X Xᵀ - I``, in float64."""
    rows = matrix.detach().double()
    rows = rows if rows.shape[-2] <= rows.shape[-1] else rows.mT
    return float((rows @ rows.mT - torch.eye(rows.shape[-2], dtype=torch.float64)).abs().max())


def orthonormal(*shape, dtype=torch.float64):
    return nn.Parameter(random_orthonormal(*shape).to(dtype))


def test_stays_orthonormal_over_10000_steps():
    torch.manual_seed(0)
    matrices = [orthonormal(*shape, dtype=torch.float32) for shape in ((24, 24), (3, 8, 8), (6, 30), (2, 20, 9))]
    optimizer = ts.optim.RiemannianAdam(matrices, lr=3e-2)
    generator, worst, start = torch.Generator().manual_seed(1), 0.0, [m.detach().clone() for m in matrices]
    for step in range(10_000):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()
        if step % 97 == 0 or step > 9_990:
            worst = max(worst, *map(off, matrices))
    assert worst < 1e-6
    assert all((m - s).abs().max() > 0.1 for m, s in zip(matrices, start, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (2, 3, 4, 4), (1, 1), (1, 6)])
def test_any_gradient_leaves_it_orthonormal(shape, dtype):
    matrix = orthonormal(*shape, dtype=dtype)
    optimizer = ts.optim.RiemannianAdam([matrix], lr=0.5)
    for size in (1.0, 0.0, 1e-30, 1e15, 1.0):
        matrix.grad = size * torch.randn(shape, dtype=dtype)
        optimizer.step()
        assert off(matrix) < (2e-6 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("shape", [(8, 8), (4, 10), (10, 4)])
def test_procrustes(shape):
    """The orthonormal ``X`` nearest to ``B`` is its polar factor; the one for which ``X A`` is, that of ``B Aᵀ``."""
    torch.manual_seed(0)
    a, b = torch.randn(shape[1], 30, dtype=torch.float64), torch.randn(shape[0], 30, dtype=torch.float64)
    square = shape[0] == shape[1]
    target = b @ a.T if square else torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(target, full_matrices=False)
    best = left @ right
    # Gradient descent cannot leave its half of the orthogonal group.
    matrix = nn.Parameter(-best if not square else torch.linalg.qr(best + 0.5 * torch.randn_like(best)).Q)
    if square and torch.linalg.det(matrix.detach()) * torch.linalg.det(best) < 0:
        matrix.data[0] *= -1
    optimizer = ts.optim.RiemannianAdam([matrix], lr=0.05)
    for step in range(800):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 800))
        optimizer.zero_grad()
        ((matrix @ a - b) if square else (matrix - target)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), best, atol=1e-4, rtol=0)


def test_a_first_step_goes_down_the_projected_gradient():
    """With decays of 0 the direction is the sign of the projected gradient."""
    matrix, gradient = orthonormal(6, 6), torch.randn(6, 6, dtype=torch.float64)
    before = matrix.detach().clone()
    optimizer = ts.optim.RiemannianAdam([matrix], lr=1e-3, betas=(0.0, 0.0))
    matrix.grad = gradient.clone()
    optimizer.step()
    skew = before.T @ gradient - gradient.T @ before
    torch.testing.assert_close(
        matrix.detach(), before @ torch.linalg.matrix_exp(-1e-3 * skew.sign()), atol=1e-9, rtol=0
    )


def test_other_groups_get_adamw():
    torch.manual_seed(0)
    ours = nn.Sequential(ts.OrthoConv2d(4, 4, 3, method="manifold"), nn.Flatten(), nn.Linear(64, 3))
    theirs = copy.deepcopy(ours)
    groups = ts.parameter_groups(ours, lr=0.01, weight_decay=0.1)
    assert {g["name"]: (len(g["params"]), g["orthonormal"]) for g in groups} == {
        "orthonormal": (3, True), "free": (1, False), "decayed": (1, False), "other": (2, False),
    }  # fmt: skip
    optimizer = ts.optim.RiemannianAdam(groups)
    plain = torch.optim.AdamW(ts.parameter_groups(theirs, lr=0.01, weight_decay=0.1))
    for each, model in ((optimizer, ours), (plain, theirs)):
        trained(each, list(model.parameters()), 5)
    for name in ("2.weight", "2.bias", "0.bias", "0.parametrizations.weight.original3"):
        torch.testing.assert_close(ours.get_parameter(name), theirs.get_parameter(name))


def test_steps_do_not_depend_on_what_else_is_stepped():
    """Parameters of one shape take their steps in one batch."""
    torch.manual_seed(0)
    together, alone = [[orthonormal(4, 6, dtype=torch.float32) for _ in range(3)] for _ in range(2)]
    for one, other in zip(together, alone, strict=True):
        other.data.copy_(one)
    optimizers = [ts.optim.RiemannianAdam(together), *(ts.optim.RiemannianAdam([each]) for each in alone)]
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        for number, (one, other) in enumerate(zip(together, alone, strict=True)):
            gradient = torch.randn(4, 6, generator=generator)
            one.grad = other.grad = None if number == 1 and step % 3 == 0 else gradient
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)])
def test_lookahead_goes_half_way_on_the_manifold(shape):
    matrix = orthonormal(*shape)
    optimizer = ts.optim.RiemannianAdam([matrix], lr=0.1)
    ts.optim.Lookahead(optimizer, 4, 0.5)
    start = matrix.detach().clone()
    trained(optimizer, [matrix], 3)
    plain = nn.Parameter(matrix.detach().clone())
    alone = ts.optim.RiemannianAdam([plain], lr=0.1)
    alone.state[plain] = copy.deepcopy({k: v for k, v in optimizer.state[matrix].items() if k != "slow"})
    trained(optimizer, [matrix], 1, seed=5)
    trained(alone, [plain], 1, seed=5)
    left, _, right = torch.linalg.svd((start + plain.detach()) / 2, full_matrices=False)
    torch.testing.assert_close(matrix.detach(), left @ right)
    assert off(matrix) < 1e-12
    assert is_known(matrix)


def test_the_average_is_orthonormal_and_leaves_no_trace():
    torch.manual_seed(0)
    matrix = orthonormal(6, 6)
    optimizer = ts.optim.RiemannianAdam([matrix], lr=0.05)
    average = ts.optim.MovingAverage(optimizer, 0.9)
    trained(optimizer, [matrix], 10)
    before = matrix.detach().clone()
    with average.applied():
        assert off(matrix) < 1e-12
        assert (matrix - before).abs().max() > 1e-3
    assert torch.equal(matrix, before)
    assert is_known(matrix)


def test_goes_on_from_a_checkpoint_bit_for_bit():
    def made():
        torch.manual_seed(0)
        layer = ts.OrthoConv2d(4, 8, 3, stride=2, method="manifold")
        optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
        ts.optim.Lookahead(optimizer, 3)
        return layer, optimizer

    def steps(layer, optimizer, count, seed):
        x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))
        for _ in range(count):
            optimizer.zero_grad()
            layer(x).sin().sum().backward()
            optimizer.step()

    whole, optimizer = made()
    steps(whole, optimizer, 5, 1)
    weights, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    steps(whole, optimizer, 9, 2)
    resumed, later = made()
    resumed.load_state_dict(weights)
    later.load_state_dict(state)
    steps(resumed, later, 9, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("parameter", "match"),
    [
        (torch.randn(4, 4), "not orthonormal"),
        (torch.zeros(3), r"torch.float32 of shape \(3,\)"),
        (torch.eye(3, dtype=torch.bfloat16), "bfloat16"),
        (torch.eye(3, dtype=torch.complex64), "complex64"),
        (torch.full((2, 2), math.nan), "not orthonormal"),
    ],
)
def test_refuses_what_is_not_orthonormal(parameter, match):
    with pytest.raises(ValueError, match=match):
        ts.optim.RiemannianAdam([nn.Parameter(parameter)])


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -1.0}])
def test_refuses_options_without_a_meaning(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ts.optim.RiemannianAdam([orthonormal(3, 3)], **options)


# -- what layers do with parameters that are known to be orthonormal, and with others


LAYERS = {
    "linear": lambda: ts.OrthoLinear(8, 8, method="manifold"),
    "wide": lambda: ts.OrthoLinear(8, 5, method="manifold"),
    "tall": lambda: ts.OrthoLinear(5, 8, method="manifold"),
    "1x1": lambda: ts.OrthoConv2d(8, 8, 1, method="manifold"),
    "3x3": lambda: ts.OrthoConv2d(8, 8, 3, method="manifold"),
    "stride": lambda: ts.OrthoConv2d(4, 7, 3, stride=2, groups=1, method="manifold"),
    "odd": lambda: ts.OrthoConv1d(5, 7, 4, method="manifold"),
}


def shape_of(layer):
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    return (layer.in_channels, *(6,) * layer.dims)


def weight_is_orthogonal(layer):
    return float((singular_values(layer, shape_of(layer)) - 1).abs().max()) < 2e-5


def factorisations(step):
    """Calls that orthonormalise, in forward and backward."""
    found = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(word in str(func) for word in ("cholesky", "triangular", "linalg_qr", "svd", "eig", "inv")):
                found.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        step()
    return found


def one_step(layer, optimizer=None, shared=True):
    x = torch.randn(3, *shape_of(layer))
    if optimizer is not None:
        optimizer.zero_grad()
    if shared:
        with ts.built(layer):
            layer(x).sin().sum().backward()
    else:
        layer(x).sin().sum().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_training_factorises_nothing(name, shared):
    layer = LAYERS[name]()
    assert factorisations(lambda: one_step(layer, None, shared))
    optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    for _ in range(70):  # across the 64 steps after which free tensors are looked at
        assert not factorisations(lambda: one_step(layer, optimizer, shared))
    assert weight_is_orthogonal(layer)


def assert_same_along_the_manifold(layer, grads, others):
    for number, (tensor, one, two) in enumerate(zip(layer.free_tensors, grads, others, strict=True)):
        if number < layer.parametrization.orthonormal_count:
            tall = tensor.shape[-2] > tensor.shape[-1]
            rows, one, two = (each.detach().mT if tall else each.detach() for each in (tensor, one, two))
            one, two = tangent(rows, one), tangent(rows, two)
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", LAYERS)
def test_both_ways_have_one_weight_and_the_same_gradient_along_the_manifold(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    part = layer.parametrization
    ts.optim.RiemannianAdam(ts.parameter_groups(layer))
    gradient = torch.randn_like(layer.weight)
    found = []
    for known in (True, False):
        free = [tensor if known else tensor.detach().clone().requires_grad_() for tensor in layer.free_tensors]
        built = part.build(*free)
        assert bool(factorisations(lambda free=free: part.build(*free))) != known
        found.append((built.detach(), torch.autograd.grad(built, free, gradient)))
    (weight, grads), (other, others) = found
    torch.testing.assert_close(weight, other)
    assert_same_along_the_manifold(layer, grads, others)


@pytest.mark.parametrize("kind", ["adamw", "fused", "sgd"])
@pytest.mark.parametrize("name", LAYERS)
def test_other_optimizers_never_leave_the_manifold(name, kind):
    layer = LAYERS[name]()
    keeper = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    one_step(layer, keeper)
    options = {"fused": True} if kind == "fused" else {}
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = make(layer.parameters(), lr=0.3, **options)
    for _ in range(3):
        one_step(layer, optimizer)
    assert max(map(off, layer.free_tensors[:1])) > 1e-2  # the free tensor is off, the weight is not
    assert weight_is_orthogonal(layer)
    with torch.enable_grad():
        assert weight_is_orthogonal(layer)


@pytest.mark.parametrize("write", [
    lambda t: t.mul_(2), lambda t: t.normal_(), lambda t: t.copy_(torch.zeros_like(t)), lambda t: t[..., 0, 0].add_(1),
])  # fmt: skip
@pytest.mark.parametrize("name", LAYERS)
def test_writes_are_seen(name, write):
    layer = LAYERS[name]()
    optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    one_step(layer, optimizer)
    with torch.no_grad():
        write(layer.free_tensors[0])
    assert off(layer.free_tensors[0]) > 0.1
    weight = layer.weight
    assert weight.requires_grad
    assert weight_is_orthogonal(layer)


def test_writes_by_data_cannot_reach_what_is_evaluated():
    layer = LAYERS["3x3"]()
    optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    one_step(layer, optimizer)
    layer.free_tensors[0].data.mul_(2)
    layer.eval()
    with torch.no_grad():
        x = torch.randn(2, 8, 6, 6)
        y = layer(x) - layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(y.norm(), x.norm())


def test_moved_copied_and_pickled_layers():
    layer = LAYERS["3x3"]()
    optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    one_step(layer, optimizer)
    twin = copy.deepcopy(layer)
    assert not any(map(is_known, twin.parameters()))
    torch.testing.assert_close(twin.weight, layer.weight)
    layer.double()
    assert weight_is_orthogonal(layer)
    assert is_known(twin.free_tensors[0]) is False


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_are_those_of_the_orthonormalised_weight(name):
    layer = LAYERS[name]().double()
    ts.optim.RiemannianAdam(ts.parameter_groups(layer))
    free, direction = layer.free_tensors, torch.randn_like(layer.weight)
    others = [tensor.detach().clone().requires_grad_() for tensor in free]

    def penalty(tensors):
        weight = layer.parametrization.build(*tensors)
        grads = torch.autograd.grad((weight * direction).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), tensors)

    assert_same_along_the_manifold(layer, penalty(free), penalty(others))


def test_autocast_and_switches():
    layer = LAYERS["3x3"]()
    optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.randn(2, 8, 6, 6)).float().square().sin().sum().backward()
            optimizer.step()
    assert max(map(off, layer.free_tensors[:3])) < 1e-6
    assert weight_is_orthogonal(layer)
