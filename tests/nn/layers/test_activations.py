import math

import pytest
import torch
from benchmarks.measure import saved_bytes
from torch import nn

import trysquare as ts
from tests.jacobians import assert_isometric, assert_one_lipschitz, exact, randomise
from trysquare.nn.layers.activations import with_slopes_in_unit_interval

ACTIVATIONS = [
    (ts.MaxMin(), (6,)),
    (ts.MaxMin(), (4, 3)),
    (ts.MaxMin(), (4, 2, 3)),
    (ts.MaxMin(dim=-1), (3, 4)),
    (ts.MaxMin(halves=True), (6, 2)),
    (ts.MaxMin(dim=-2, halves=True), (2, 4, 3)),
    (ts.GroupSort(2), (6,)),
    (ts.GroupSort(3), (6, 2)),
    (ts.GroupSort(5, dim=-2), (10, 2)),
    (ts.GroupSort(1), (5,)),
    (ts.FullSort(), (7,)),
    (ts.FullSort(), (5, 2, 2)),
    (ts.Abs(), (5, 2)),
    (ts.Householder(6), (6,)),
    (ts.Householder(4, order=2), (4, 2, 2)),
    (ts.Householder(4, order=2, dim=-1), (2, 4)),
    (ts.NActivation(5), (5, 2)),
    (ts.NActivation(4, dim=-1), (3, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), ACTIVATIONS, ids=lambda v: repr(v)[:40])
@pytest.mark.parametrize("moved", [False, True])
def test_isometric_everywhere(layer, shape, moved):
    layer = exact(layer)
    assert_isometric(randomise(layer) if moved else layer, shape)
    assert_one_lipschitz(layer, shape)


@pytest.mark.parametrize(("layer", "shape"), ACTIVATIONS, ids=lambda v: repr(v)[:40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_of_the_input_and_gradient(layer, shape, dtype):
    x = torch.randn(2, *shape, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_sorts_really_sort():
    x = torch.randn(3, 12, 4)
    assert torch.equal(ts.MaxMin()(x), ts.GroupSort(2)(x))
    assert torch.equal(ts.GroupSort(12)(x), ts.FullSort()(x))
    assert torch.equal(ts.FullSort()(x), x.sort(1, descending=True).values)
    groups = ts.GroupSort(4)(x).view(3, 3, 4, 4)
    assert (groups.diff(dim=2) <= 0).all()
    assert torch.equal(groups.sum((1, 2)), x.view(3, 3, 4, 4).sort(2, descending=True).values.sum((1, 2)))
    assert torch.equal(ts.Abs()(x), x.abs())
    first, second = x.chunk(2, 1)
    assert torch.equal(ts.MaxMin(halves=True)(x), torch.cat([first.maximum(second), first.minimum(second)], 1))
    assert torch.equal(ts.MaxMin(1, halves=True)(x.mT.contiguous().mT), ts.MaxMin(-2, halves=True)(x))


def test_householder_is_maxmin_or_the_absolute_value_at_its_angles():
    layer, x = ts.Householder(6).double(), torch.randn(2, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), ts.MaxMin()(x))
    with torch.no_grad():
        layer.theta.fill_(math.pi / 2)  # the published start
    torch.testing.assert_close(layer(x)[:, ::2], ts.MaxMin()(x)[:, 1::2])
    with torch.no_grad():
        layer.theta.fill_(-math.pi)  # the line is the second axis, what is kept lies to its right
    y = layer(x)
    torch.testing.assert_close(y[:, ::2], x[:, ::2].abs())
    torch.testing.assert_close(y[:, 1::2], x[:, 1::2])


def test_householder_keeps_the_half_plane_that_was_published():
    """Kept is where ``x sin(theta / 2) <= y cos(theta / 2)``: the left of the line; a turn of 2 pi keeps the other."""
    layer = randomise(ts.Householder(2).double())
    z = torch.randn(100, 2, dtype=torch.float64)
    for _ in range(2):
        theta = layer.theta.detach().squeeze()
        reflection = torch.tensor([[theta.cos(), theta.sin()], [theta.sin(), -theta.cos()]])
        keep = z[:, :1] * (theta / 2).sin() - z[:, 1:] * (theta / 2).cos() <= 0
        torch.testing.assert_close(layer(z), torch.where(keep, z, z @ reflection.T))
        with torch.no_grad():
            layer.theta.add_(2 * math.pi)


def circle(count):
    angles = torch.linspace(0, 2 * math.pi, count, dtype=torch.float64)
    return angles, torch.stack((angles.cos(), angles.sin()), 1)


def sectors(angle, theta):
    """Where four sectors send a direction: an independent construction, by walking forwards and backwards."""
    start, *widths = theta[0] / 2, theta[1] / 2, theta[2] / 2, math.pi - theta[1] / 2, math.pi - theta[2] / 2
    left, image = (angle - start) % (2 * math.pi), start
    for width, way in zip(widths, (1, -1, 1, -1), strict=True):
        image += way * min(left, width)
        left = max(left - width, 0)
    return image


ANGLES = [(0.3, math.pi / 2, math.pi), (1.0, 1.0, 2.5), (-2.0, 0.4, 6.0), (5.0, 2 * math.pi, 1.0), (0.0, 0.0, 0.0)]


@pytest.mark.parametrize("theta", ANGLES)
def test_householder_order_two_has_any_four_sectors(theta):
    layer = exact(ts.Householder(2, order=2))
    layer.theta.copy_(torch.tensor(theta)[:, None])
    angles, z = circle(4001)
    images = torch.tensor([sectors(float(angle), theta) for angle in angles], dtype=torch.float64)
    expected = torch.stack((images.cos(), images.sin()), 1)
    torch.testing.assert_close(layer(z), expected, atol=1e-6, rtol=0)
    # Continuous: neighbours 2 pi / 4000 apart stay so.
    assert float((layer(z).diff(dim=0).norm(dim=1) / z.diff(dim=0).norm(dim=1)).max()) <= 1 + 1e-6
    if theta[1] == 2 * math.pi:
        half = exact(ts.Householder(2))
        half.theta.fill_(theta[0])
        torch.testing.assert_close(layer(z), half(z), atol=1e-6, rtol=0)


@pytest.mark.parametrize("theta", [*ANGLES, (0.3, -2.0, 9.0), (100.0, 50.0, -70.0)])
def test_householder_order_two_is_isometric_at_every_angle(theta):
    layer = exact(ts.Householder(2, order=2))
    layer.theta.copy_(torch.tensor(theta)[:, None])
    _, z = circle(101)
    for point in z:
        jacobian = torch.autograd.functional.jacobian(lambda p: layer(p[None])[0], point)
        torch.testing.assert_close(jacobian @ jacobian.T, torch.eye(2, dtype=torch.float64))
    steps = layer(circle(20001)[1]).diff(dim=0).norm(dim=1)
    assert float(steps.max()) <= 2 * math.pi / 20000 * (1 + 1e-6)


def test_householder_order_two_has_kept_reflected_and_rotated_sectors():
    layer = exact(ts.Householder(2, order=2))
    _, z = circle(400)
    pieces = {
        tuple((torch.autograd.functional.jacobian(lambda p: layer(p[None])[0], p)).flatten().round(decimals=6).tolist())
        for p in z
    }
    determinants = sorted(round(a * d - b * c) for a, b, c, d in pieces)
    assert determinants == [-1, -1, 1, 1]
    out = layer(z)
    spread = torch.atan2(out[:, 1], out[:, 0])
    assert float(spread.max() - spread.min()) < math.pi / 2 + 0.05  # folded twice: a quarter of the plane
    torch.testing.assert_close(out.norm(dim=1), z.norm(dim=1))


def test_n_activation_has_the_shape_of_an_n():
    layer = ts.NActivation(1, -1.0, 2.0)
    x = torch.tensor([-3.0, -1.0, 0.5, 2.0, 5.0])[:, None]
    assert layer(x).flatten().tolist() == [-1.0, 1.0, -0.5, -2.0, 1.0]
    with torch.no_grad():
        layer.kinks.copy_(layer.kinks.flip(0))
    assert layer(x).flatten().tolist() == [-1.0, 1.0, -0.5, -2.0, 1.0]


@pytest.mark.parametrize("layer", [ts.Householder(4, 2), ts.NActivation(4)])
def test_gradcheck_and_state(layer):
    layer = randomise(layer.double())
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    ((name, free),) = layer.named_parameters()
    assert torch.autograd.gradcheck(lambda x, p: torch.func.functional_call(layer, {name: p}, x), (x, free))
    other = type(layer)(4, 2) if isinstance(layer, ts.Householder) else type(layer)(4)
    other.double().load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    other.reset_parameters()
    assert not torch.equal(other(x), layer(x))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ts.MaxMin()(torch.zeros(1, 5)), "5 channels .* groups of 2; use a multiple of 2, such as 6"),
        (lambda: ts.GroupSort(4)(torch.zeros(1, 6)), "such as 8"),
        (lambda: ts.GroupSort(0), "group_size=0"),
        (lambda: ts.Householder(5), "channels=5 .*use 6"),
        (lambda: ts.Householder(4, order=0), "order=0"),
        (lambda: ts.Householder(4, order=3), "order=3 must be 1 or 2"),
        (lambda: ts.GroupSort(True), "group_size=True must be an integer"),
        (lambda: ts.Householder(4)(torch.zeros(1, 6)), "6 channels on axis 1, not 4"),
        (lambda: ts.NActivation(4, 1.0, 0.0), "low=1.0 must not be above high=0.0"),
        (lambda: ts.NActivation(4)(torch.zeros(1, 6)), "6 channels"),
        (lambda: with_slopes_in_unit_interval(ts.MaxMin()), "MaxMin.* slopes between 0 and 1"),
        (lambda: with_slopes_in_unit_interval(nn.LeakyReLU(-0.1)), "slopes"),
        (lambda: with_slopes_in_unit_interval(nn.GELU()), "slopes"),
        (lambda: with_slopes_in_unit_interval(nn.Softplus(threshold=0)), "threshold of at least 20"),
        (lambda: with_slopes_in_unit_interval(nn.Softplus(100.0, 19.0)), "threshold of at least 20"),
        (lambda: with_slopes_in_unit_interval(nn.Softplus(-1.0)), "beta > 0"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(),
        nn.LeakyReLU(0.2),
        nn.ELU(),
        nn.CELU(3.0),
        nn.Softplus(),
        nn.Softplus(0.1),
        nn.Softplus(beta=30.0, threshold=50.0),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Tanhshrink(),
        nn.LogSigmoid(),
        nn.ReLU6(),
        nn.Hardsigmoid(),
        nn.Softsign(),
        nn.Softshrink(),
    ],
)
def test_allowed_activations_have_slopes_in_the_unit_interval(activation):
    assert with_slopes_in_unit_interval(activation) is activation
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    slopes = activation(x).diff() / x.diff()
    assert slopes.min() >= -1e-12
    assert slopes.max() <= 1 + 1e-9


def test_networks_export():
    model = nn.Sequential(
        ts.OrthoLinear(8, 8), ts.MaxMin(), ts.Abs(), ts.GroupSort(4), ts.Householder(8), ts.NActivation(8)
    )
    plain = ts.to_torch(model)
    x = torch.randn(2, 8)
    torch.testing.assert_close(torch.export.export(plain, (x,)).module()(x), model(x))


def test_max_min_keeps_a_byte_a_pair():
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    assert saved_bytes(lambda: ts.MaxMin()(x)) == 2 * 4 * 4 * 4


@pytest.mark.parametrize("delta", [1e-3, 0.5, 4.0])
def test_soft_huber(delta):
    layer, x = ts.SoftHuber(delta), torch.linspace(-5, 5, 101, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, delta * ((1 + (x / delta) ** 2).sqrt() - 1))
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.abs().max() < 1
    assert abs(float(slope[50])) < 1e-12
    far = torch.tensor([1e30, -1e30])
    torch.testing.assert_close(layer(far), far.abs())
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="delta="):
            ts.SoftHuber(wrong)
