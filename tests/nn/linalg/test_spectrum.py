import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import dense


def test_singular_values_are_those_of_the_dense_matrix_also_when_not_orthogonal():
    for layer, shape in (
        (ts.OrthoConv2d(3, 8, (3, 2), stride=(2, 1), dilation=(1, 2)), (3, 6, 5)),
        (ts.OrthoConvTranspose2d(8, 4, 3, stride=2, groups=2), (8, 3, 2)),
        (ts.OrthoConv3d(2, 4, 2), (2, 3, 3, 2)),
        (ts.OrthoConv1d(4, 4, 5), (4, 3)),
        (ts.OrthoConv2d(4, 4, 3, padding_mode="zeros"), (4, 5, 4)),
        (ts.OrthoLinear(12, 7), (12,)),
        (nn.Linear(6, 4), (6,)),
    ):
        layer = layer.double()
        expected = torch.linalg.svdvals(dense(layer, shape))
        values = ts.singular_values(layer, shape)
        assert values.dtype == torch.float64
        torch.testing.assert_close(values, expected, atol=1e-10, rtol=0)


def test_frequency_blocks_of_any_kernel():
    from trysquare.nn.linalg.spectrum import circular_singular_values

    layer = ts.OrthoConv2d(4, 4, 3, stride=2, groups=2, dtype=torch.float64)
    kernel = torch.randn_like(layer.weight)
    plain = nn.Conv2d(4, 4, 3, 2, 1, groups=2, padding_mode="circular", bias=False).double()
    plain.weight.data.copy_(kernel)
    values = circular_singular_values(kernel, (6, 4), (2, 2), (1, 1), 2)
    torch.testing.assert_close(values, torch.linalg.svdvals(dense(plain, (4, 6, 4))))


def test_wrong_shapes_are_named():
    layer = ts.OrthoConv2d(3, 8, 3)
    with pytest.raises(ValueError, match="input_shape"):
        ts.singular_values(layer, (4, 8, 8))
    with pytest.raises(ValueError, match="not divisible"):
        ts.singular_values(ts.OrthoConv2d(4, 8, 3, stride=2), (4, 5, 5))
