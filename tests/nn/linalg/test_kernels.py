import pytest
import torch
import torch.nn.functional as F

from trysquare.nn.linalg import adjoint, compose, identity

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def kernel(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_composition_applies_before_then_after(dims, groups, stride):
    after = kernel(6, 4 // groups, *(2, 3, 1)[:dims])
    before = kernel(4, 8 // groups, *(3, 2, 2)[:dims])
    x = kernel(2, 8, *(9, 8, 7)[:dims])
    convolve = CONVOLVE[dims]
    twice = convolve(convolve(x, before, groups=groups), after, stride=stride, groups=groups)
    once = convolve(x, compose(after, before, groups), stride=stride, groups=groups)
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("k", [(), (2,), (2, 3), (1, 2, 2), (2, 1, 2, 2), (1, 2, 1, 2, 2)])
def test_associative_bilinear_not_commutative_in_any_dimension(k):
    a, b, c = (kernel(3, 3, *k) for _ in range(3))
    torch.testing.assert_close(compose(a, compose(b, c)), compose(compose(a, b), c))
    torch.testing.assert_close(compose(2 * a - b, c), 2 * compose(a, c) - compose(b, c))
    torch.testing.assert_close(compose(a, 2 * b - c), 2 * compose(a, b) - compose(a, c))
    assert not torch.allclose(compose(a, b), compose(b, a))
    one = identity(3, len(k), like=a)
    torch.testing.assert_close(compose(a, one), a)
    torch.testing.assert_close(compose(one, a), a)


def test_entries_are_the_paper_s_sum():
    after, before = kernel(2, 3, 2, 2), kernel(3, 4, 3, 1)
    expected = torch.zeros(2, 4, 4, 2, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            expected[:, :, i : i + 3, j : j + 1] += torch.einsum("nc,cmxy->nmxy", after[:, :, i, j], before)
    torch.testing.assert_close(compose(after, before), expected)


def test_batches_are_composed_independently():
    after, before = kernel(2, 5, 6, 2, 3, 3), kernel(2, 5, 4, 3, 2, 2)
    composed = compose(after, before, groups=2, dims=2)
    for i in range(2):
        for j in range(5):
            torch.testing.assert_close(composed[i, j], compose(after[i, j], before[i, j], 2))


def test_gradients():
    after, before = kernel(2, 2, 2, 2).requires_grad_(), kernel(4, 3, 1, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: compose(a, b, 2), (after, before))


def test_adjoint_is_the_transposed_convolution():
    k, x = kernel(6, 2, 3, 2), kernel(1, 6, 5, 5)
    transposed = F.conv_transpose2d(x, k, groups=2)
    direct = F.conv2d(F.pad(x, [1, 1, 2, 2]), adjoint(k, 2), groups=2)
    torch.testing.assert_close(direct, transposed)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"makes 4 channels, `after` reads 3"):
        compose(kernel(2, 3, 2), kernel(4, 2, 2))
    with pytest.raises(ValueError, match="same number of axes"):
        compose(kernel(2, 3, 2), kernel(3, 2))
    with pytest.raises(ValueError, match="batch axes differ"):
        compose(kernel(2, 2, 3, 2), kernel(1, 3, 2, 2), dims=1)
    with pytest.raises(ValueError, match="groups=3"):
        adjoint(kernel(4, 2, 3), groups=3)


def test_autocast_does_not_touch_it():
    a, b = kernel(4, 4, 3).float(), kernel(4, 4, 3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compose(a, b).dtype == torch.float32
