import json
import time

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.resnet import resnet18, resnet34
from trysquare.plotting import plot_spectra


def mixed():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.MaxPool2d(3, 2, 1),
        ts.OrthoConv2d(4, 8, 3, padding_mode="zeros"),
        ts.OrthoConv2d(8, 8, 3),
        nn.Flatten(),
        ts.OrthoLinear(200, 10),
    )


def test_rows_say_what_each_layer_does_and_why():
    report = ts.audit(mixed(), (3, 8, 8))
    assert [row.verdict for row in report.layers] == [
        "amplifies", "amplifies", "amplifies", "1-Lipschitz", "orthogonal", "1-Lipschitz", "orthogonal",
    ]  # fmt: skip
    over, reflect, pool, zeros, circular, *_ = report.layers
    assert "circular padding 2 repeats outputs: use 1" in over.remark
    assert "reflect padding 1 repeats pixels" in reflect.remark
    assert "overlap" in pool.remark
    assert zeros.smallest < 0.99 < zeros.largest <= zeros.bound * (1 + 1e-9)
    assert abs(circular.smallest - 1) < 1e-5
    assert circular.type == "OrthoConv2d"
    assert report.lower_bound <= report.bound == report.layers[-1].bound_so_far
    for row in (over, reflect):
        assert row.smallest <= row.largest <= row.bound * (1 + 1e-9)


def test_text_json_rich_and_plot(tmp_path):
    from rich.console import Console

    report = ts.audit(mixed(), (3, 8, 8), spectra=True)
    assert "certified Lipschitz bound" in str(report)
    assert str(report).splitlines()[0].startswith("layer")
    content = json.loads(report.to_json())
    assert content["bound"] == report.bound
    assert len(content["layers"]) == 7
    assert len(content["layers"][4]["spectrum"]) == 200
    console = Console(width=250, record=True, quiet=True)
    console.print(report)
    plot_spectra(report, tmp_path / "spectra.png")
    assert (tmp_path / "spectra.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no linear layer"):
        plot_spectra(ts.audit(nn.Sequential(nn.ReLU()), (3,)), tmp_path / "none.png")


def test_large_layers_say_what_was_not_computed():
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular"),
        ts.OrthoConv2d(32, 32, 3),
    )
    plain, circular, ours = ts.audit(model, (16, 128, 128)).layers
    assert plain.smallest is None
    assert "Lanczos" in plain.remark
    assert plain.largest <= plain.bound
    assert circular.verdict == "amplifies"
    assert ours.verdict == "orthogonal"
    assert "certified lower bound" in ours.remark


def test_resnet18_shows_where_it_amplifies():
    report = ts.audit(resnet18(width=8, classes=10).eval(), (3, 32, 32))
    rows = {row.name: row for row in report.layers}
    assert rows["conv1"].verdict == "amplifies"
    assert rows["layer1.0.add"].verdict == "amplifies"
    assert "branches" in rows["layer1.0.add"].remark
    assert rows["layer1.0.relu"].verdict == "1-Lipschitz"
    assert report.bound > 1
    assert report.ratio == report.bound / report.lower_bound


def test_remarks_of_normalisation_scaling_and_uneven_strides():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.norm.weight.data[1] = 7
            self.conv = nn.Conv2d(3, 3, 3, 2, 1, padding_mode="circular")

        def forward(self, x):
            y = self.conv(self.norm(x / 0.25))
            return torch.cat([y, y], 1)

    scale, norm, conv, cat = ts.audit(Net().eval(), (3, 5, 5)).layers
    assert "scaling by up to 4" in scale.remark
    assert "channel 1" in norm.remark
    assert "not a multiple of stride 2" in conv.remark
    assert "twice" in cat.remark


@pytest.mark.slow
def test_resnet34_takes_less_than_a_minute_of_two_cores():
    start = time.process_time()
    ts.audit(resnet34().eval(), (3, 224, 224))
    assert time.process_time() - start < 120


@pytest.mark.parametrize(("layer", "shape"), [
    (ts.OrthoConv2d(4, 8, 3, method="soc"), (4, 6, 6)),
    (ts.OrthoConv2d(4, 8, 9), (4, 3, 3)),
])  # fmt: skip
def test_kernels_that_wrap_around_more_than_once(layer, shape):
    """Plain circular padding cannot, so the lower bound must not be taken of plain layers."""
    report = ts.audit(layer, shape)
    assert abs(report.lower_bound - 1) < 1e-5
