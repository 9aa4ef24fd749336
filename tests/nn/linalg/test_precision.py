"""Products of kernel construction are in IEEE float32 or better, whatever the user has switched on."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import trysquare as ts
from tests.nn.test_derivatives import CASES
from trysquare.nn.linalg.precision import _FULL_PRODUCTS, is_reduced

SWITCHES = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn", "all")]
PRODUCTS = {
    "mm", "bmm", "addmm", "baddbmm", "linalg_solve_triangular", "triangular_solve", "linalg_cholesky_ex",
    "linalg_inv_ex", "linalg_matrix_exp", "_linalg_eigh", "linalg_qr", "mv", "dot", "_linalg_solve_ex",
}  # fmt: skip


def state():
    switches = {key: torch._C._get_fp32_precision_getter(*key) for key in [*SWITCHES, ("generic", "all")]}
    try:
        return switches, torch.get_float32_matmul_precision()
    except RuntimeError:
        return switches, None


@pytest.fixture(autouse=True)
def as_before():
    (before, older) = state()
    yield
    torch.set_float32_matmul_precision(older)
    for key, value in before.items():
        torch._C._set_fp32_precision_setter(*key, value)


def _allow(value):
    torch.backends.cuda.matmul.allow_tf32 = value


def _generic():
    torch.backends.fp32_precision = "tf32"
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")


def _own():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


USERS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: (torch.set_float32_matmul_precision("high"), _allow(True)),
    "fp32_precision": _own,
    "all backends": _generic,
}


@contextmanager
def _switched_now():
    for key in SWITCHES:
        torch._C._set_fp32_precision_setter(*key, "bf16" if key[0] == "mkldnn" else "tf32")
    yield


LATER = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "switches": _switched_now}


class Looking(TorchDispatchMode):
    """Notes the products in float32 that run while a switch allows fewer digits."""

    def __init__(self):
        super().__init__()
        self.products, self.wrong = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        single = any(isinstance(a, torch.Tensor) and a.dtype in (torch.float32, torch.complex64) for a in args)
        kind = "conv" if "convolution" in name else "matmul"
        if (name in PRODUCTS or kind == "conv") and single:
            self.products += 1
            if is_reduced("cpu", kind) or (kind == "matmul" and is_reduced("cuda")):
                self.wrong.append(name)
        short = any(isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) for a in args)
        if (name in PRODUCTS or kind == "conv") and short:
            self.wrong.append(name)
        return func(*args, **(kwargs or {}))


def build(layer, shape):
    """What a layer builds its weight or response from its free tensors with, forward and backward."""
    if hasattr(layer, "response") and not isinstance(layer.response, nn.Module):
        made = [layer.response(tuple(shape[1:]))]
    elif hasattr(layer, "response"):
        made = list(layer.response(tuple(shape[1:])))
    else:
        made = [
            module.weight
            for module in layer.modules()
            if hasattr(module, "parametrizations") and hasattr(module, "weight")
        ]
    return [part for part in made if isinstance(part, torch.Tensor) and part.requires_grad]


NOTHING_BUILT = ("Householder", "NActivation", "BatchCentering", "LayerCentering", "Positions")
BUILT = [name for name in CASES if name not in NOTHING_BUILT]


def built_and_differentiated(name, times, later=nullcontext):
    """The free tensors' gradients, and those of a function of these, with the products on the way.

    Backward passes run within ``later()``.
    """
    make, shape = CASES[name]
    torch.manual_seed(0)
    layer = make()
    free = [p for p in layer.parameters() if p.requires_grad]
    with Looking() as looking:
        made = build(layer, shape)
        loss = sum((part.abs() ** 3).sum() for part in made)
        with later():
            for _ in range(times):
                found = torch.autograd.grad(loss, free, create_graph=times > 1, allow_unused=True)
                loss = sum((g**2).sum() for g in found if g is not None)
    assert made
    assert looking.products or "UnitNorm" in name
    return looking.wrong


@pytest.mark.parametrize("name", BUILT)
def test_every_product_of_construction_has_full_precision(name):
    USERS["high"]()
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    before = state()
    assert built_and_differentiated(name, 1) == []
    assert built_and_differentiated(name, 2) == []
    assert state() == before


@pytest.mark.parametrize("name", BUILT)
def test_autocast_around_backward_does_not_reach_construction(name):
    with torch.autocast("cpu", torch.bfloat16):
        assert built_and_differentiated(name, 1) == []
        assert built_and_differentiated(name, 2) == []


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("later", ["autocast", "switches"])
def test_what_is_switched_on_between_forward_and_backward_does_not_reach_construction(name, later):
    assert built_and_differentiated(name, 1, LATER[later]) == []
    for key in SWITCHES:
        torch._C._set_fp32_precision_setter(*key, "none")
    assert built_and_differentiated(name, 2, LATER[later]) == []


@pytest.mark.parametrize("name", ["method bcop", "method aol", "linear cayley"])
def test_gradients_are_the_same_if_autocast_is_on_only_for_backward(name):
    make, _ = CASES[name]
    layer = make()
    free = [p for n, p in layer.named_parameters() if "original" in n]

    def derivatives():
        first = torch.autograd.grad(loss, free, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first), free, retain_graph=True)]

    loss = layer.weight.pow(3).sum()
    expected = derivatives()
    with torch.autocast("cpu", torch.bfloat16):
        found = [*derivatives(), *torch.autograd.grad(loss, free, retain_graph=True)]
    for one, two in zip(found, [*expected, *expected], strict=False):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        free[0].mul_(2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(loss, free)


@pytest.mark.parametrize("name", ["method aoc", "method bcop", "linear newton_schulz"])
def test_transforms_compute_in_float64_where_switches_cannot_be_thrown(name):
    make, shape = CASES[name]
    torch.manual_seed(0)
    layer = make()
    key, free = next(iter(layer.named_parameters()))
    USERS["medium"]()

    def function(value):
        return torch.func.functional_call(layer, {key: value}, (torch.ones(2, *shape),)).sin().sum()

    with Looking() as looking:
        torch.func.grad(function)(free.detach())
    # The product with the input is the user's own, and its gradients.
    assert len([wrong for wrong in looking.wrong if "convolution" not in wrong]) <= 3 * name.startswith("linear")


def test_compiled_gradients_under_autocast():
    torch.manual_seed(0)
    layer = ts.OrthoConv2d(8, 8, 3)
    free = [p for n, p in layer.named_parameters() if "original" in n]

    def loss():
        return layer.weight.exp().sum()

    expected = torch.autograd.grad(loss(), free)
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(), free)
    torch.compiler.reset()
    for one, two in zip(found, expected, strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-4


@pytest.mark.parametrize("user", USERS)
def test_steps_along_the_orthogonal_group_have_full_precision(user):
    matrix = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
    USERS[user]()
    before = state()
    with Looking() as looking, torch.autocast("cpu", torch.bfloat16):
        optimizer = ts.ProjUNN([matrix], lr=0.1, rank=2)
        for _ in range(101):
            matrix.grad = torch.randn(6, 6)
            optimizer.step()
    assert looking.products > 500
    assert looking.wrong == [] or not is_reduced("cpu")  # "allow_tf32" is a switch of other devices only
    matrix = matrix.detach()
    assert float((matrix.double() @ matrix.double().T - torch.eye(6)).abs().max()) < 1e-5
    assert state() == before


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9)])
def test_steps_of_orthonormal_parameters(user, shape):
    torch.manual_seed(0)
    matrix = nn.Parameter(nn.init.orthogonal_(torch.empty(*shape)))
    USERS[user]()
    before = state()
    optimizer = ts.optim.RiemannianAdam([matrix], lr=0.05)
    ts.optim.Lookahead(optimizer, 5)
    with Looking() as looking:
        for _ in range(40):
            matrix.grad = torch.randn(shape)
            optimizer.step()
    assert looking.products > 160
    assert looking.wrong == [] or not is_reduced("cpu")
    matrix = matrix.detach().double()
    assert float((matrix @ matrix.T - torch.eye(shape[0])).abs().max()) < 1e-6
    assert state() == before


@pytest.mark.parametrize("user", USERS)
def test_switches_are_the_users_own_again(user):
    layer = ts.OrthoConv2d(8, 8, 3)
    torch.manual_seed(0)
    plain = layer.weight.detach()
    gradient = torch.autograd.grad(layer.weight.pow(3).sum(), list(layer.parameters()), allow_unused=True)
    USERS[user]()
    before = state()
    assert is_reduced("cpu") or user == "allow_tf32"
    assert is_reduced("cuda")
    with Looking() as looking:
        weight = layer.weight
        again = torch.autograd.grad(weight.pow(3).sum(), list(layer.parameters()), allow_unused=True, create_graph=True)
    assert state() == before
    assert looking.products
    torch.testing.assert_close(weight.detach(), plain, rtol=0, atol=0)
    for one, two in zip(gradient, again, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two.detach(), rtol=0, atol=1e-6)
    with pytest.raises(ZeroDivisionError), _FULL_PRODUCTS:
        raise ZeroDivisionError
    assert state() == before
    assert ts.lipschitz_bound(layer, (8, 6, 6)) < 1 + 1e-5
    assert state() == before


def test_second_derivatives_under_switches():
    layer, x = ts.OrthoLinear(4, 3), torch.randn(2, 4)
    (free,) = (p for n, p in layer.named_parameters() if "original" in n)

    def second():
        (first,) = torch.autograd.grad(layer(x).sin().sum(), free, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), free)[0]

    expected = second()
    USERS["high"]()
    torch.testing.assert_close(second(), expected, rtol=1e-4, atol=1e-5)


def test_threads_share_the_switches():
    USERS["high"]()
    before, seen, errors = state(), [], []
    layers = [ts.OrthoConv2d(8, 8, 3) for _ in range(4)]

    def work(layer):
        try:
            for _ in range(20):
                with Looking() as looking:
                    layer.weight.sum().backward()
                seen.extend(looking.wrong)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen == []
    assert state() == before


def test_what_somebody_switches_in_the_meantime_stays():
    USERS["high"]()
    with _FULL_PRODUCTS:
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"
    with _FULL_PRODUCTS:
        torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32")
    assert torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"  # the user's own again


@pytest.mark.parametrize("wider", [("generic", "all"), ("mkldnn", "all")])
def test_products_follow_the_users_wider_switch_as_before(wider):
    layer = ts.OrthoLinear(4, 4)
    torch._C._set_fp32_precision_setter(*wider, "tf32")
    layer.weight.sum().backward()
    for value in ("ieee", "bf16", "none"):
        torch._C._set_fp32_precision_setter(*wider, value)
        assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == value
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "tf32")
    torch._C._set_fp32_precision_setter(*wider, "tf32")
    layer.weight.sum().backward()
    torch._C._set_fp32_precision_setter(*wider, "ieee")
    assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "tf32"


def test_compiled_graphs_compute_in_float64_instead():
    graphs = []

    def capture(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layer = ts.OrthoLinear(6, 4, bias=False)
    x = torch.randn(2, 6)
    expected = layer(x).detach()
    USERS["high"]()
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=capture, bw_compiler=capture)
    y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    y.sum().backward()
    torch.compiler.reset()
    torch.testing.assert_close(y.detach(), expected, rtol=1e-3, atol=1e-3)
    called = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    names = ("mm", "bmm", "baddbmm", "matmul")
    products = [n.meta["val"].dtype for n in called if n.target.__name__.split(".")[0] in names]
    # The product with the input is the user's own, and its gradient.
    assert products.count(torch.float32) <= 2
    assert products.count(torch.float64) >= 5


FUNCTIONS = {
    **dict.fromkeys(ts.linalg.ORTHOGONALIZERS, ((4, 6),)),
    "orthonormal_rows": ((4, 6),),
    "unit_rows": ((4, 6),),
    "contract_rows": ((4, 6), (4,)),
    "sandwich_pair": ((4, 6), (4, 5), (4, 1)),
    "compose": ((6, 5, 3, 3), (5, 4, 3, 3)),
    "adjoint": ((4, 6, 3),),
    "norm_bound": ((4, 6, 3),),
    "spectral_norm": ((4, 6, 3),),
    "recondition": ((4, 6), (4, 6)),
    "grow": ((1, 4, 4), (2, 1, 2, 4)),
    "orthogonalizer": ((4, 6),),  # by `apply` of what it finds
}


def called(name, inputs):
    if name == "grow":
        return ts.linalg.grow(inputs[0], ts.linalg.orthonormal_rows(inputs[1]), (0, 1))
    if name == "spectral_norm":
        return ts.linalg.spectral_norm(inputs[0], 7)
    function = ts.linalg.orthogonalizer("cayley").apply if name == "orthogonalizer" else getattr(ts.linalg, name)
    return function(*inputs)


@pytest.mark.parametrize("now", [*LATER, "after forward: autocast", "after forward: switches"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_and_their_derivatives_have_full_precision(name, now):
    inputs = [torch.rand(shape).add(0.1).requires_grad_() for shape in FUNCTIONS[name]]
    exact = [value.detach().double().requires_grad_() for value in inputs]

    def derivatives(values, before=nullcontext, later=nullcontext):
        found = []
        with before():
            result = called(name, values)
        with later():
            loss = sum(part.pow(3).sum() for part in (result if isinstance(result, tuple) else (result,)))
            for _ in range(2):
                found += torch.autograd.grad(loss, values, create_graph=True, materialize_grads=True)
                loss = sum(each.pow(2).sum() for each in found)
        return [each.detach() for each in ([result, *found] if isinstance(result, torch.Tensor) else found)]

    switch = LATER[now.removeprefix("after forward: ")]
    with Looking() as looking:
        found = derivatives(inputs, *((nullcontext, switch) if now.startswith("after") else (switch, switch)))
    assert looking.wrong == []
    for one, two in zip(found, derivatives(exact), strict=True):
        assert torch.allclose(one.double(), two, rtol=0, atol=1e-3 * float(two.abs().max()) + 1e-5)


def test_every_public_function_of_tensors_has_a_case():
    functions = {name for name in ts.linalg.__all__ if callable(getattr(ts.linalg, name))}
    assert functions - FUNCTIONS.keys() == {"identity"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_bounded_under_autocast(name, dtype):
    make, shape = CASES[name]
    layer = make().eval()
    plain = ts.lipschitz_bound(layer, shape)
    before = state()
    with torch.autocast("cpu", dtype):
        assert ts.lipschitz_bound(layer, shape) == pytest.approx(plain, rel=8 * torch.finfo(dtype).eps)
    assert state() == before
