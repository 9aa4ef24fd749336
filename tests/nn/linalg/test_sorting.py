import pytest
import torch

from trysquare.nn.linalg.sorting import max_min

# From inside torch's forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.mark.parametrize(("shape", "dim"), [((3, 2), 1), ((3, 2), -1), ((2, 5), 0), ((4, 2, 3), 1), ((4, 2, 3, 3), -3)])
def test_values_and_derivatives(shape, dim):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.equal(max_min(x, dim), x.sort(dim, descending=True).values)
    assert torch.autograd.gradcheck(max_min, (x, dim), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(max_min, (x, dim))


def test_functional_transforms_agree():
    x = torch.randn(5, 2)
    backward, forward = (transform(max_min)(x, 1) for transform in (torch.func.jacrev, torch.func.jacfwd))
    torch.testing.assert_close(backward, forward)
    torch.testing.assert_close(torch.func.vmap(max_min, (0, None))(x.view(1, 5, 2), 1)[0], max_min(x, 1))


def test_permutation_at_ties_and_extremes():
    x = torch.ones(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(max_min(x, 1), x, torch.tensor([[3.0, 5.0]]))
    assert grad.tolist() == [[3.0, 5.0]]
    wild = torch.tensor([[1e30, -1e-30], [-1e-30, 1e30], [1.0, torch.inf]], requires_grad=True)
    assert max_min(wild, 1).tolist() == wild.sort(1, descending=True).values.tolist()
    (grad,) = torch.autograd.grad(max_min(wild, 1), wild, torch.tensor([[1e20, 1e-20]] * 3))
    assert grad.tolist() == torch.tensor([[1e20, 1e-20], [1e-20, 1e20], [1e-20, 1e20]]).tolist()


def test_compiles_and_exports():
    x = torch.randn(5, 2, 3)
    compiled = torch.compile(max_min, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, 1), max_min(x, 1))
