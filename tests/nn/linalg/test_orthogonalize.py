import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trysquare.nn.linalg import ORTHOGONALIZERS, cholesky, orthogonalizer, orthonormal_rows, qr
from trysquare.nn.linalg import orthonormal as orthonormal_module
from trysquare.nn.linalg.orthogonalize import exponential_of_all, exponential_of_few

SHAPES = [(8, 8), (6, 17), (17, 6), (3, 1), (1, 1), (2, 5, 9)]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 5e-14}
TOTAL = ("cholesky", "qr")  # exact for every matrix, and real
COMPLEX = [name for name in ORTHOGONALIZERS if name not in TOTAL]


def conditioned(n, m, exponent):
    rank = min(n, m)
    left = torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(m, rank, dtype=torch.float64)).Q
    return (left * torch.logspace(0, -exponent, rank, dtype=torch.float64)) @ right.mT


def hostile(n, m):
    normal = torch.randn(n, m, dtype=torch.float64)
    return {
        "normal": normal,
        "huge": 1e6 * normal,
        "small": 1e-6 * normal,
        "tiny": 1e-30 * normal,
        "condition": conditioned(n, m, 6),
        "column": normal.index_fill(1, torch.tensor([0]), 0.0),
        "row": normal.index_fill(0, torch.tensor([n - 1]), 0.0),
        "zero": torch.zeros(n, m, dtype=torch.float64),
        "ones": torch.ones(n, m, dtype=torch.float64),
        "nearly ones": torch.ones(n, m, dtype=torch.float64) + 1e-7 * normal,
        "sparse": normal * (torch.rand(n, m, dtype=torch.float64) < 0.1),
        "zeros and ones": (torch.rand(n, m) < 0.25).double(),
        "largest": 1e35 * normal,
        "smallest": 1e-40 * normal,
        "mixed scales": normal * torch.logspace(-12, 12, n, dtype=torch.float64)[:, None],
    }


def missed(basis):
    return (torch.linalg.svdvals(basis.to(torch.complex128)) - 1).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ORTHOGONALIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_orthonormal_in_every_shape(name, shape, dtype):
    basis = orthogonalizer(name).apply(torch.randn(*shape, dtype=dtype))
    assert basis.shape == shape
    assert basis.dtype == dtype
    assert missed(basis) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12), (64, 64)])
@pytest.mark.parametrize("name", ORTHOGONALIZERS)
def test_hostile_matrices_give_an_orthonormal_matrix_or_an_error(name, shape, dtype):
    for case, matrix in hostile(*shape).items():
        matrix = matrix.to(dtype).requires_grad_()
        try:
            basis = orthogonalizer(name).apply(matrix)
        except ArithmeticError:
            if name in TOTAL:
                raise
            continue
        assert missed(basis) < 4 * TOLERANCE[dtype], case
        basis.backward(torch.randn_like(basis))
        assert matrix.grad.isfinite().all(), case


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12)])
@pytest.mark.parametrize("name", COMPLEX)
def test_hostile_complex_matrices_give_what_real_ones_give(name, shape, dtype):
    """Each row turned by an angle: an orthonormal matrix where the real matrix gives one, an error elsewhere."""
    real, angles = torch.empty(0, dtype=dtype).real.dtype, torch.rand(shape[0], 1, dtype=torch.float64)
    for case, matrix in hostile(*shape).items():
        turned = (matrix * torch.polar(torch.ones_like(angles), angles)).to(dtype).requires_grad_()
        try:
            orthogonalizer(name).apply(matrix.to(real))
        except ArithmeticError:
            continue
        basis = orthogonalizer(name).apply(turned)
        assert missed(basis) < 4 * TOLERANCE[real], case
        basis.backward(torch.randn_like(basis))
        assert turned.grad.isfinite().all(), case


@pytest.mark.parametrize("name", TOTAL)
def test_complex_matrices_are_refused_where_only_real_ones_are_right(name):
    with pytest.raises(ValueError, match=r"takes real matrices, got torch\.complex64"):
        orthogonalizer(name).apply(torch.randn(2, 3, dtype=torch.complex64))


@pytest.mark.parametrize("shape", [(4, 4), (4, 7), (7, 4)])
def test_cayley_has_an_inverse_for_complex_matrices_too(shape):
    cayley = orthogonalizer("cayley")
    basis = cayley.apply(0.3 * torch.randn(*shape, dtype=torch.complex128))
    torch.testing.assert_close(cayley.apply(cayley.inverse(basis)), basis)


@pytest.mark.parametrize("name", ["newton_schulz", "bjorck"])
def test_iterations_reach_their_stated_condition_number(name):
    for dtype, exponent in ((torch.float32, 6), (torch.float64, 10)):
        matrix = conditioned(10, 14, exponent).to(dtype)
        assert missed(orthogonalizer(name).apply(matrix)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2), (2, 3, 4)])
def test_gradients(name, shape):
    matrix = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(orthogonalizer(name).apply, (matrix,))


def as_real(matrix):
    """Each entry ``a + bi`` as ``[[a, -b], [b, a]]``, which changes no sum, product, adjoint or inverse."""
    one, turn = torch.eye(2, dtype=matrix.real.dtype), torch.tensor([[0, -1], [1, 0]], dtype=matrix.real.dtype)
    return torch.kron(matrix.real.contiguous(), one) + torch.kron(matrix.imag.contiguous(), turn)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("shape", SHAPES)
def test_complex_matrices_become_what_real_ones_of_twice_the_size_do(name, shape, dtype):
    matrix = torch.randn(*shape, dtype=dtype)
    basis = orthogonalizer(name).apply(matrix)
    assert basis.dtype == dtype
    assert basis.shape == shape
    assert not basis.is_conj()
    assert missed(as_real(basis)) < TOLERANCE[matrix.real.dtype]
    expected = orthogonalizer(name).apply(as_real(matrix))
    torch.testing.assert_close(as_real(basis), expected, rtol=0, atol=100 * TOLERANCE[matrix.real.dtype])


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2), (2, 3, 4)])
def test_gradients_of_complex_matrices(name, shape):
    matrix = torch.randn(*shape, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(orthogonalizer(name).apply, (matrix,))


def test_gradients_without_branches_and_at_poor_condition(monkeypatch):
    for matrix in (torch.randn(3, 5, dtype=torch.float64), conditioned(4, 6, 3)):
        matrix.requires_grad_()
        assert torch.autograd.gradcheck(orthonormal_rows, (matrix,), atol=1e-4, rtol=1e-3)
        monkeypatch.setattr(orthonormal_module, "host_can_look", lambda _: False)
        assert torch.autograd.gradcheck(orthonormal_rows, (matrix,), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_path_without_branches_is_exact_too(monkeypatch, dtype):
    monkeypatch.setattr(orthonormal_module, "host_can_look", lambda _: False)
    for shape in ((12, 12), (12, 30), (64, 64)):
        for case, matrix in hostile(*shape).items():
            assert missed(cholesky(matrix.to(dtype))) < 4 * TOLERANCE[dtype], case


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_matrices_of_low_rank(monkeypatch, dtype, look):
    if not look:
        monkeypatch.setattr(orthonormal_module, "host_can_look", lambda _: False)
    matrices = (torch.rand(500, 4, 4) < 0.25).to(dtype)
    assert missed(cholesky(matrices)) < 4 * TOLERANCE[dtype]
    pruned = torch.randn(200, 16, 16, dtype=dtype)
    assert missed(cholesky(pruned * (pruned.abs() > 1.6))) < 4 * TOLERANCE[dtype]


def test_cholesky_is_qr_and_keeps_orthonormal_rows():
    matrix = torch.randn(2, 5, 9, dtype=torch.float64)
    torch.testing.assert_close(cholesky(matrix), qr(matrix))
    torch.testing.assert_close(cholesky(cholesky(matrix)), cholesky(matrix))


@pytest.mark.parametrize("name", [name for name, o in ORTHOGONALIZERS.items() if o.inverse])
@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)])
def test_inverse_gives_back(name, shape):
    entry = orthogonalizer(name)
    basis = entry.apply(torch.randn(*shape, dtype=torch.float64))
    torch.testing.assert_close(entry.apply(entry.inverse(basis)), basis)


@pytest.mark.parametrize("name", ["newton_schulz", "bjorck"])
def test_polar_methods_give_the_nearest_orthonormal_matrix(name):
    matrix = torch.randn(5, 8, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(orthogonalizer(name).apply(matrix), left @ right)


def test_what_was_not_reached_raises_on_every_path(monkeypatch):
    from trysquare.nn.linalg import orthogonalize as module

    monkeypatch.setattr(module, "host_can_look", lambda _: False)
    with pytest.raises(RuntimeError, match="did not reach"):
        orthogonalizer("bjorck").apply(torch.zeros(3, 3))


def test_bad_input():
    with pytest.raises(ValueError, match="two axes"):
        cholesky(torch.randn(3))
    with pytest.raises(ValueError, match="unknown orthogonalizer 'magic': known: cholesky"):
        orthogonalizer("magic")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ORTHOGONALIZERS)
def test_coarse_dtypes_are_refused_with_a_way_out(name, dtype):
    with pytest.raises(ValueError, match=f"{name} takes float32.*got {dtype}: orthonormalise matrix.float"):
        orthogonalizer(name).apply(torch.eye(3, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 7), (2, 1, 5), (2, 4, 30)])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 0.3, 5.0])
def test_exponential_of_few_rows_is_that_of_all(shape, scale):
    torch.manual_seed(0)
    matrix = (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
    ways = (exponential_of_few, exponential_of_all)
    few, all_rows = (way(matrix) for way in ways)
    torch.testing.assert_close(few, all_rows, rtol=0, atol=1e-12)
    direction = torch.randn_like(few)
    (ours,), (theirs,) = (torch.autograd.grad(way(matrix), matrix, direction) for way in ways)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * max(1, scale))


class WithoutEmptyProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::matmul"):
            assert all(tensor.numel() for tensor in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_square_cayley_transforms_make_no_empty_products(dtype):
    # Inductor cannot differentiate complex ones (torch 2.13), and all of them cost calls.
    matrix = torch.randn(2, 4, 4, dtype=dtype, requires_grad=True)
    with WithoutEmptyProducts():
        rows = orthogonalizer("cayley").apply(matrix)
        rows.abs().pow(3).sum().backward()
    torch.testing.assert_close(rows @ rows.mH, torch.eye(4, dtype=dtype).expand(2, 4, 4))
