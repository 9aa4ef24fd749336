"""Parameter counts of the full models against the paper's."""

import pytest
import torch

import trysquare as ts
from trysquare.lab.models import build, count_parameters

IMAGENET = {"input_shape": (3, 224, 224), "classes": 1000}
PAPER = {
    "cifar10-accurate": ({}, 2.3e6),
    "cifar10-robust": ({}, 41.3e6),
    "imagenet-accurate": (IMAGENET, 53.1e6),
    "imagenet-robust": (IMAGENET, 53.1e6),
    "bcop-small": ({"strided": "emulated"}, 2.6e6),
    "liresnet-aoc": ({}, 46.3e6),
}


@pytest.mark.parametrize("name", PAPER)
def test_counts_are_those_of_the_paper(name):
    options, published = PAPER[name]
    with torch.device("meta"):
        model = build(name, **options)
    assert count_parameters(model, as_paper=True) == pytest.approx(published, rel=0.05)
    assert count_parameters(model) == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize(
    ("arguments", "published"),
    # What version 0.0.4 of the paper's library trains for these layers, without its vectors for power iterations.
    [
        ((3, 256, 3, 2), 4 * 64 * 32 + 256 * 256),
        ((128, 256, 4, 2), 6 * 128 * 64 + 256 * 512),
        ((3, 128, 3), 6 * 128 * 64),
        ((128, 64, 2), 4 * 128 * 64),
        ((512, 256, 1), 512 * 256),
        ((64, 64, 4, 4), 64 * 1024),
        ((3, 64, 5, 2), 8 * 16 * 8 + 64 * 64),
    ],
)
def test_kernels_are_counted_as_the_papers_library_does(arguments, published):
    assert count_parameters(ts.OrthoConv2d(*arguments, bias=False), as_paper=True) == published


def test_depthwise_kernels_and_everything_else():
    layer = ts.OrthoConv2d(256, 512, 3, groups=256)
    assert count_parameters(layer, as_paper=True) == 256 * 6 * 2 + 512
    assert count_parameters(ts.OrthoLinear(8, 4), as_paper=True) == count_parameters(ts.OrthoLinear(8, 4)) == 36
