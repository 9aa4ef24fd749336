import subprocess
import sys

import pytest
import torch

from trysquare.nn.linalg import inverse as module
from trysquare.nn.linalg.inverse import inverse
from trysquare.nn.linalg.unitary import corrected, polish

AFTER_THREADS_WERE_SET = """
import torch
torch.set_num_threads(2)
import trysquare as ts

torch.manual_seed(0)
layer = ts.FourierOrthoConv2d(160, 160, 3)
x = torch.randn(2, 160, 6, 6)
torch.testing.assert_close(layer(x).sub(layer.bias.view(-1, 1, 1)).norm(), x.norm())
blocks = torch.linalg.svdvals(ts.linalg.ORTHOGONALIZERS["cayley"].apply(torch.randn(3, 160, 160, dtype=torch.float64)))
torch.testing.assert_close(blocks, torch.ones_like(blocks))
cayley = ts.linalg.ORTHOGONALIZERS["cayley"].apply
matrix = torch.randn(3, 160, 200, dtype=torch.float64) / 10
torch.testing.assert_close(torch.vmap(cayley)(matrix), cayley(matrix))
torch.testing.assert_close(torch.compile(cayley, backend="aot_eager")(matrix), cayley(matrix))
"""


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (2, 3), (2, 0)])
@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_inverse_of_every_matrix(shape, rows, dtype):
    eye = torch.eye(rows, dtype=dtype)
    matrix = 2 * eye + torch.randn(*shape, rows, rows, dtype=dtype) / rows**0.5
    torch.testing.assert_close(inverse(matrix) @ matrix, eye.expand_as(matrix))


@pytest.mark.parametrize("rows", [129, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_inverse_by_blocks(rows, dtype):
    free = torch.randn(2, rows, rows, dtype=dtype)
    matrix = torch.eye(rows, dtype=dtype) + free - free.mH
    torch.testing.assert_close(module._by_blocks(matrix), torch.stack([torch.linalg.inv(one) for one in matrix]))


def test_large_matrices_after_the_number_of_threads_was_set():
    # Torch's own batched inverse fails then; the setting cannot be undone in a process.
    done = subprocess.run([sys.executable, "-c", AFTER_THREADS_WERE_SET], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_derivatives_of_matrices_one_by_one(monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 2)
    matrix = (3 * torch.eye(3) + torch.randn(2, 3, 3)).double().requires_grad_()
    assert torch.autograd.gradcheck(inverse, matrix)
    assert torch.autograd.gradgradcheck(inverse, matrix)


def test_polishing_does_not_change_derivatives():
    free = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(4, 4, dtype=torch.float64)

    def gradient(step):
        rotation = torch.linalg.matrix_exp(free - free.mT)
        return torch.autograd.grad(step(rotation), free, direction)[0]

    torch.testing.assert_close(gradient(corrected), gradient(polish), rtol=1e-12, atol=1e-12)
