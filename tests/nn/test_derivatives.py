"""Derivatives of every layer, method and orthogonalizer with respect to its free tensors, of first and second order.

The oracle is differences of gradients, and of the function, by plain evaluation. Whatever cannot be differentiated
twice must raise.
"""

import inspect

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import trysquare as ts

CONV, UP = (lambda **k: ts.OrthoConv2d(2, 4, 3, **k)), (lambda **k: ts.OrthoConvTranspose2d(4, 2, 3, **k))
MAP, DEEP, LINE = (2, 4, 4), (4, 4, 4), (4, 4)
CASES = {
    **{f"method {name}": (lambda n=name: CONV(method=n), MAP) for name in ts.METHODS},
    **{f"method {name}, transposed": (lambda n=name: UP(method=n), DEEP) for name in ts.METHODS},
    **{f"orthogonalizer {n}": (lambda n=n: CONV(orthogonalizer=n), MAP) for n in ts.linalg.ORTHOGONALIZERS},
    **{f"linear {n}": (lambda n=n: ts.OrthoLinear(5, 3, orthogonalizer=n), (5,)) for n in ts.linalg.ORTHOGONALIZERS},
    **{
        f"Fourier {name}": (lambda n=name: ts.FourierOrthoConv1d(2, 2, 3, method=n), (2, 4))
        for name in ("cayley", "lot", "eco")
    },
    "OrthoConv1d": (lambda: ts.OrthoConv1d(2, 4, 3, stride=2), (2, 4)),
    "OrthoConv3d": (lambda: ts.OrthoConv3d(2, 2, 2, groups=1), (2, 2, 2, 2)),
    "OrthoConv2d": (lambda: ts.OrthoConv2d(4, 3, 3, stride=2, padding_mode="zeros"), DEEP),
    "OrthoConvTranspose1d": (lambda: ts.OrthoConvTranspose1d(4, 2, 3, stride=2), LINE),
    "OrthoConvTranspose2d": (lambda: ts.OrthoConvTranspose2d(4, 4, 3, dilation=2, groups=2), DEEP),
    "OrthoConvTranspose3d": (lambda: ts.OrthoConvTranspose3d(2, 2, 2), (2, 2, 2, 2)),
    "FourierOrthoConv1d": (lambda: ts.FourierOrthoConv1d(2, 2, 3, stride=2), (2, 4)),
    "FourierOrthoConvTranspose1d": (lambda: ts.FourierOrthoConvTranspose1d(2, 2, 3), (2, 4)),
    "OrthoLinear": (lambda: ts.OrthoLinear(3, 5), (3,)),
    "OrthoLinearTranspose": (lambda: ts.OrthoLinear(3, 5).adjoint(), (5,)),
    "UnitNormLinear": (lambda: ts.UnitNormLinear(4, 3), (4,)),
    "SLLBlock1d": (lambda: ts.SLLBlock1d(3), (3, 4)),
    "SLLLinear": (lambda: ts.SLLLinear(4), (4,)),
    "CPLBlock1d": (lambda: ts.CPLBlock1d(3), (3, 4)),
    "CPLLinear": (lambda: ts.CPLLinear(4), (4,)),
    "SLLAOCBlock1d": (lambda: ts.SLLAOCBlock1d(4, 4), LINE),
    "SLLAOCBlockTranspose1d": (lambda: ts.SLLAOCBlockTranspose1d(4, 2, stride=2), LINE),
    "SandwichLinear": (lambda: ts.SandwichLinear(4, 3), (4,)),
    "Positions": (lambda: ts.Positions((4,)), (4,)),
    "AdjointResidual": (lambda: ts.AdjointResidual(ts.OrthoLinear(4, 3), nn.Tanh()), (4,)),
    "SpectralLinear": (lambda: ts.SpectralLinear(4, 3), (4,)),
    "SandwichAOCConv1d": (lambda: ts.SandwichAOCConv1d(2, 2), (2, 4)),
    "SandwichAOCConvTranspose1d": (lambda: ts.SandwichAOCConvTranspose1d(2, 2), (2, 4)),
    "SandwichConv1d": (lambda: ts.SandwichConv1d(2, 2, 3), (2, 4)),
    "SandwichConvTranspose1d": (lambda: ts.SandwichConvTranspose1d(2, 2, 3), (2, 4)),
    "Householder": (lambda: ts.Householder(4), (4,)),
    "NActivation": (lambda: ts.NActivation(4), (4,)),
    "LearnableResidual": (lambda: ts.LearnableResidual(ts.OrthoLinear(4, 4), learnable_skip=True), (4,)),
    "ConvexResidual": (lambda: ts.ConvexResidual(ts.OrthoLinear(4, 4)), (4,)),
    "L2Residual": (lambda: ts.L2Residual(ts.OrthoLinear(4, 4)), (4,)),
    "DepthwiseResidualBlock1d": (lambda: ts.DepthwiseResidualBlock1d(4), LINE),
    "BatchCentering": (lambda: ts.BatchCentering(4).eval(), (4,)),
    "LayerCentering": (lambda: ts.LayerCentering(4), (4,)),
    "OrthoRNNCell": (lambda: ts.OrthoRNNCell(3, 4), (3,)),
    "LastState": (lambda: ts.LastState(ts.OrthoRNN(3, 4, batch_first=True)), (2, 3)),
}


def problem(name):
    """A function of all free tensors of a layer in one vector, and a point and a direction."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    layer = make().double()
    shapes = {key: value.shape for key, value in layer.named_parameters()}
    point = torch.cat([value.detach().reshape(-1) for value in layer.parameters()])
    point = point + 0.1 * torch.randn_like(point)
    x = torch.randn(2, *shape, dtype=torch.float64)

    def function(vector):
        parts = vector.split([s.numel() for s in shapes.values()])
        free = {key: part.view(s) for (key, s), part in zip(shapes.items(), parts, strict=True)}
        y = functional_call(layer, free, (x,))
        return (y.sin() * torch.linspace(0.3, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()

    return function, point, torch.randn_like(point)


def gradient(function, point):
    point = point.clone().requires_grad_()
    return torch.autograd.grad(function(point), point)[0]


def twice(function, point, direction):
    point = point.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(point), point, create_graph=True)
    return torch.autograd.grad(first @ direction, point)[0]


def forward_over_reverse(function, point, direction):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(point.clone().requires_grad_(), direction)
        (first,) = torch.autograd.grad(function(dual), dual)
        return forward_ad.unpack_dual(first).tangent


def reverse_over_forward(function, point, direction):
    point = point.clone().requires_grad_()
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(function(forward_ad.make_dual(point, direction))).tangent
        found = torch.autograd.grad(slope, point)[0]
        return forward_ad.unpack_dual(found).primal


SECOND = {
    "grad of grad": twice,
    "functional.hvp": lambda f, p, d: torch.autograd.functional.hvp(f, p, d)[1],
    "functional.hessian": lambda f, p, d: torch.autograd.functional.hessian(f, p) @ d,
    "functional.hessian, vectorized": lambda f, p, d: torch.autograd.functional.hessian(f, p, vectorize=True) @ d,
    "func.hessian": lambda f, p, d: torch.func.hessian(f)(p) @ d,
    "func.jvp of grad": lambda f, p, d: torch.func.jvp(torch.func.grad(f), (p,), (d,))[1],
    "func.grad of grad": lambda f, p, d: torch.func.grad(lambda q: torch.func.grad(f)(q) @ d)(p),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": reverse_over_forward,
    "func.linearize": lambda f, p, d: torch.func.linearize(torch.func.grad(f), p)[1](d),
    "func.grad of jvp": lambda f, p, d: torch.func.grad(lambda q: torch.func.jvp(f, (q,), (d,))[1])(p),
}


# Torch's gradients of real Fourier transforms write into views, which `torch.func.linearize` loses.
REAL_FOURIER = ("Fourier", "SandwichConv")


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name):
    function, point, direction = problem(name)
    step = 1e-5
    slopes = [gradient(function, point + side * step * direction) for side in (1, -1)]
    expected = (slopes[0] - slopes[1]) / (2 * step)
    size = float(expected.abs().max())
    for way, compute in SECOND.items():
        if way == "func.linearize" and name.startswith(REAL_FOURIER):
            with pytest.raises(NotImplementedError, match=r"torch\.func\.jvp"):
                compute(function, point, direction)
            continue
        found = compute(function, point, direction)
        assert torch.allclose(found, expected, rtol=0, atol=1e-6 * max(size, 1e-2)), way


@pytest.mark.parametrize("name", CASES)
def test_first_derivatives_in_forward_mode(name):
    function, point, direction = problem(name)
    expected = float(gradient(function, point) @ direction)
    assert float(torch.func.jvp(function, (point,), (direction,))[1]) == pytest.approx(expected, abs=1e-9)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(point, direction))
        assert float(forward_ad.unpack_dual(dual).tangent) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_within_forward_mode_is_right_or_refused(name):
    function, point, direction = problem(name)
    along = lambda f: lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]  # noqa: E731
    line = lambda t: function(point + t * direction)  # noqa: E731
    here = torch.zeros((), dtype=point.dtype)
    expected = float(torch.func.grad(torch.func.grad(line))(here))
    try:
        found = float(along(along(line))(here))
    except NotImplementedError as error:
        assert "torch.func.hessian" in str(error)  # noqa: PT017
        return
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_third_derivatives_are_right_or_refused(name):
    function, point, direction = problem(name)
    second = lambda q: torch.autograd.functional.hvp(function, q, direction)[1] @ direction  # noqa: E731
    step = 1e-5
    expected = float(second(point + step * direction) - second(point - step * direction)) / (2 * step)
    slope = lambda q: torch.func.grad(function)(q) @ direction  # noqa: E731
    twice_back = lambda q: torch.func.grad(slope)(q) @ direction  # noqa: E731
    mixed = lambda q: torch.func.jvp(slope, (q,), (direction,))[1]  # noqa: E731
    for way, compute in {
        "reverse thrice": lambda: torch.func.grad(twice_back)(point) @ direction,
        "reverse over forward over reverse": lambda: torch.func.grad(mixed)(point) @ direction,
        "forward over reverse over reverse": lambda: torch.func.jvp(twice_back, (point,), (direction,))[1],
    }.items():
        try:
            found = float(compute())
        except RuntimeError as error:  # torch writes into what its third derivative of a norm needs (torch 2.13)
            assert "MaskedFill" in str(error)  # noqa: PT017
            continue
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5 * max(abs(expected), 1)), way


ZEROS = {
    "a stride above the kernel": lambda: ts.OrthoConv2d(4, 32, 1, stride=2, method="aol"),
    "a channel of zeros": lambda: _first_of_kernel_zero(ts.OrthoConv2d(4, 4, 3, method="aol")),
    "a kernel of zeros": lambda: _first_of_kernel_zero(ts.CPLBlock2d(4), slice(None)),
    "SLL": lambda: _first_of_kernel_zero(ts.SLLBlock2d(4), slice(None)),
}


def _first_of_kernel_zero(layer, which=0):
    with torch.no_grad():
        free = layer.free_tensors[0]
        (free[0] if free.ndim == 5 else free)[which] = 0
    return layer


@pytest.mark.parametrize("name", ZEROS)
def test_second_derivatives_are_finite_where_first_ones_are(name):
    layer = ZEROS[name]().double()
    free = [p for n, p in layer.named_parameters() if "original" in n]
    first = torch.autograd.grad(layer(torch.randn(2, 4, 6, 6).double()).sin().sum(), free, create_graph=True)
    assert all(g.isfinite().all() for g in first)
    second = torch.autograd.grad(sum((g * torch.randn_like(g)).sum() for g in first), free, allow_unused=True)
    assert all(g.isfinite().all() for g in second if g is not None)


def test_every_layer_with_free_tensors_has_a_case():
    for name in ts.__all__:
        thing = getattr(ts, name)
        if not (inspect.isclass(thing) and issubclass(thing, nn.Module)) or name in CASES:
            continue
        if name in ("OrthoRNN", "InvertibleSequential"):  # in `LastState`; and refuses, see test_invertible.py
            continue
        bases = [base.__name__ for base in thing.__mro__]
        # Other dimensions and the plain names of a family are the same code.
        family = [base.rstrip("123d") for base in bases]
        known = {case.rstrip("123d") for case in CASES}
        assert name.rstrip("123d") in known or set(family) & known or not _has_free_tensors(thing), name


def _has_free_tensors(cls):
    for args in ((), (4,), (4, 4), (4, 4, 3), (nn.Identity(),), (2,)):
        try:
            return any(True for _ in cls(*args).parameters())
        except (TypeError, ValueError):
            continue
    return True
