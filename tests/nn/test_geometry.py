from math import gcd, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import CONV, CONV_TRANSPOSE, dense, spectrum
from trysquare.nn.geometry import ConvGeometry, per_axis


@st.composite
def numbers(draw):
    dims = draw(st.integers(1, 3))
    most = 4 if dims < 3 else 3

    def axes(largest):
        return tuple(draw(st.integers(1, largest)) for _ in range(dims))

    kernel, stride, dilation = axes(most), axes(3 if dims < 3 else 2), axes(3 if dims < 3 else 2)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    sizes = tuple(s * draw(st.integers(1, 3 if dims < 3 else 2)) for s in stride)
    return draw(st.integers(1, 4)), draw(st.integers(1, 9)), kernel, stride, dilation, groups, sizes


def possible(m, n, kernel, stride, dilation):
    """The theorem, stated independently of the code under test."""
    reach = prod(min(k, s // gcd(s, d)) for k, s, d in zip(kernel, stride, dilation, strict=True))
    wide = n <= m * reach
    coprime = all(gcd(s, d) == 1 and k >= s for k, s, d in zip(kernel, stride, dilation, strict=True))
    return wide or (coprime and n >= m * prod(stride))


def nothing_to_learn(m, n, kernel, stride, dilation):
    reach = prod(min(k, s // gcd(s, d)) for k, s, d in zip(kernel, stride, dilation, strict=True))
    return m == n == reach == 1 and max(kernel) > 1


@settings(max_examples=250, deadline=None, derandomize=True)
@given(numbers(), st.booleans())
def test_every_possible_geometry_is_orthogonal_and_every_other_is_refused(case, transposed):
    m, n, kernel, stride, dilation, groups, sizes = case
    channels = (n * groups, m * groups) if transposed else (m * groups, n * groups)
    layer_class = (CONV_TRANSPOSE if transposed else CONV)[len(kernel)]

    def make(mode):
        return layer_class(
            *channels, kernel, stride=stride, dilation=dilation, groups=groups,
            padding_mode=mode, dtype=torch.float64,
        )  # fmt: skip

    if not possible(m, n, kernel, stride, dilation) or nothing_to_learn(m, n, kernel, stride, dilation):
        with pytest.raises(ValueError, match=r"no orthogonal kernel exists|nothing to learn"):
            make("circular")
        return
    coarse = tuple(size // s for size, s in zip(sizes, stride, strict=True))
    shape = (channels[0], *(coarse if transposed else sizes))
    layer = make("circular")
    matrix = dense(layer, shape)
    assert torch.linalg.svdvals(matrix).sub(1).abs().max() < 1e-11
    torch.testing.assert_close(dense(layer.adjoint(), (channels[1], *(sizes if transposed else coarse))), matrix.T)
    assert spectrum(make("zeros"), shape).max() < 1 + 1e-11


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "dilation", "names"),
    [
        ((4, 8), 1, 2, 1, ["4 independent in_channels", "8 out_channels", "raise kernel_size"]),
        ((4, 32), 3, 4, 2, ["coprime", "raise kernel_size"]),
        ((4, 17), 2, 3, 1, ["16 independent", "at most 16"]),
    ],
)
def test_refusals_name_the_numbers_and_a_way_out(channels, kernel, stride, dilation, names):
    with pytest.raises(ValueError, match="no orthogonal kernel exists") as error:
        CONV[2](*channels, kernel, stride=stride, dilation=dilation)
    assert all(name in str(error.value) for name in names)


def test_one_channel_groups():
    with pytest.raises(ValueError, match="nothing to learn"):
        CONV[2](8, 8, 3, groups=8)
    with pytest.raises(ValueError, match="nothing to learn"):
        CONV_TRANSPOSE[1](8, 8, 5, groups=8)
    assert spectrum(CONV[2](4, 8, 3, groups=4).double(), (4, 4, 4)).sub(1).abs().max() < 1e-11
    # A stride leaves a matrix to learn even with one channel.
    assert spectrum(CONV[2](2, 8, 3, stride=2, groups=2).double(), (2, 4, 4)).sub(1).abs().max() < 1e-11


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("layers", [CONV, CONV_TRANSPOSE])
def test_modes_that_repeat_pixels_are_refused(mode, layers):
    with pytest.raises(ValueError, match="repeats pixels"):
        layers[2](4, 4, 3, padding_mode=mode)


def test_circular_padding_that_repeats_or_drops_outputs_is_refused():
    with pytest.raises(ValueError, match="repeats outputs"):
        CONV[2](4, 4, 3, padding=2)
    with pytest.raises(ValueError, match="repeats outputs"):
        CONV[1](4, 4, 4, padding=2)
    with pytest.raises(ValueError, match="drops outputs"):
        CONV[2](4, 8, 3, padding=0)
    # Fewer outputs leave the remaining rows orthonormal.
    assert spectrum(CONV[2](4, 4, 3, padding=0, dtype=torch.float64), (4, 5, 5)).sub(1).abs().max() < 1e-11


@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_sizes_that_the_stride_does_not_divide(mode):
    layer = CONV[2](4, 8, 3, stride=2, padding_mode=mode, dtype=torch.float64)
    if mode == "zeros":
        assert spectrum(layer, (4, 5, 7)).max() < 1 + 1e-11
        return
    with pytest.raises(ValueError, match=r"\(5, 6\) is not divisible by stride=\(2, 2\)"):
        layer(torch.zeros(1, 4, 5, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "arguments",
    [
        {"in_channels": 0}, {"out_channels": -1}, {"groups": 0}, {"groups": 3}, {"kernel_size": 0},
        {"kernel_size": (3, 3, 3)}, {"stride": (1,)}, {"dilation": 0}, {"padding": "full"},
        {"padding": (1, 1, 1)}, {"padding_mode": "mirror"}, {"method": "magic"},
        {"orthogonalizer": "magic"}, {"kernel_size": 2.5},
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=name.split("_")[0]) as error:
        CONV[2](**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **arguments})
    assert str(value) in str(error.value) or repr(value) in str(error.value)


def test_parsimonious_has_fewer_parameters_and_is_orthogonal():
    full, small = (ConvGeometry(8, 8, (3, 3), (2, 2), (1, 1), parsimonious=p) for p in (False, True))
    assert small.matrix_shape == (1, 8, 8)
    assert full.matrix_shape == (1, 8, 32)
    layer = CONV[2](8, 8, 3, stride=2, parsimonious=True, dtype=torch.float64)
    assert spectrum(layer, (8, 6, 6)).sub(1).abs().max() < 1e-11


def test_per_axis():
    assert per_axis("stride", [1, 2], 2) == (1, 2)
    with pytest.raises(ValueError, match="2 integers"):
        per_axis("stride", (1, 2, 3), 2)
