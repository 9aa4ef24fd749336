import copy
import json
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.resnet import resnet18, resnet34
from trysquare.lab.plotting import plot_spectra
from trysquare.verify import spectrum
from trysquare.verify.auditing import rows


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
    assert report.lower_bound <= report.bound == pytest.approx(report.layers[-1].bound_so_far)
    for row in (over, reflect):
        assert row.smallest <= row.largest <= row.bound * (1 + 1e-9)


def test_infinite_bounds_come_back_from_json():
    report = ts.AuditReport([], float("inf"), 1.0, (3,))
    assert ts.AuditReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"layers": 3}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not an audit"):
        ts.AuditReport.from_json(text)


def test_text_json_rich_and_plot(tmp_path):
    from rich.console import Console

    report = ts.audit(mixed(), (3, 8, 8), spectra=True)
    assert "certified Lipschitz bound" in str(report)
    assert str(report).splitlines()[0].startswith("layer")
    content = json.loads(report.to_json())
    assert content["bound"] == report.bound
    assert len(content["layers"]) == 7
    assert len(content["layers"][4]["spectrum"]) == 200
    assert ts.AuditReport.from_json(report.to_json()) == report
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
    assert rows["layer1.0.add"].verdict == "not certified"
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
            self.conv.weight.data *= 9

        def forward(self, x):
            y = self.conv(self.norm(x / 0.25))
            return torch.cat([y, y], 1)

    scale, norm, conv, cat = ts.audit(Net().eval(), (3, 5, 5)).layers
    assert "scaling by up to 4" in scale.remark
    assert "channel 1" in norm.remark
    assert "not a multiple of stride 2" in conv.remark
    assert "same input" in cat.remark


def dense_extremes(function, shape):
    """Smallest and largest singular value of a linear function of one input, from every basis vector."""
    size = math.prod(shape)
    with torch.no_grad():
        zero = function(torch.zeros(1, *shape, dtype=torch.float64))
        matrix = (function(torch.eye(size, dtype=torch.float64).view(size, *shape)) - zero).flatten(1)
    values = torch.linalg.svdvals(matrix)
    return float(values[-1]), float(values[0])


def test_a_bound_above_one_alone_is_no_amplification(monkeypatch):
    monkeypatch.setattr(spectrum, "_CERTIFIED_SIDE", 0)
    monkeypatch.setattr(spectrum, "_SMALL_MAP_SIDE", 0)
    monkeypatch.setattr(rows, "_SPECTRUM_COST", 0)
    layer = nn.Conv2d(8, 8, 3, padding=1, bias=False).double()
    top = dense_extremes(layer, (8, 3, 3))[1]
    layer.weight.data /= top * 1.01
    (row,) = ts.audit(nn.Sequential(layer), (8, 3, 3)).layers
    assert row.bound > 1 > row.largest
    assert row.verdict == "not certified"
    assert "no singular value above 1 was found" in row.remark
    layer.weight.data *= 1.05
    (row,) = ts.audit(nn.Sequential(layer), (8, 3, 3)).layers
    assert row.verdict == "amplifies"
    assert "between" in row.remark


def test_small_maps_of_a_resnet_are_seen_as_they_are():
    block = resnet18(width=64).eval().layer4[1].conv1  # 512 channels on 2x2 positions for images of 64x64
    (row,) = ts.audit(nn.Sequential(block), (512, 2, 2)).layers
    assert row.verdict == "1-Lipschitz"
    assert row.largest <= row.bound < 0.8


def test_the_largest_singular_value_is_never_above_the_truth(monkeypatch):
    monkeypatch.setattr(rows, "_SPECTRUM_COST", 0)  # as if too large for the whole spectrum
    for mode in ("circular", "zeros"):
        layer = nn.Conv1d(96, 96, 5, padding=2, padding_mode=mode, bias=False).double()
        (row,) = ts.audit(nn.Sequential(layer), (96, 16)).layers
        top = dense_extremes(layer, (96, 16))[1]
        assert top * (1 - 1e-3) < row.largest <= top * (1 + 1e-12) <= row.bound * (1 + 1e-12)


def test_layers_inside_of_residual_blocks_have_rows():
    block = ts.LearnableResidual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), ts.MaxMin()), ts.OrthoConv2d(4, 4, 1))
    model = nn.Sequential(ts.ConvexResidual(block), ts.ConcatResidual(ts.OrthoConv2d(2, 2, 3)))
    with torch.no_grad():
        block.branch[0].weight.mul_(100)
    report = ts.audit(model, (4, 6, 6))
    assert [(row.name, row.depth) for row in report.layers] == [
        ("0", 0), ("0.branch", 1), ("0.branch.shortcut", 2), ("0.branch.branch.0", 2), ("0.branch.branch.1", 2),
        ("1", 0), ("1.branch", 1),
    ]  # fmt: skip
    outer, inner, shortcut, conv, sort, concat, half = report.layers
    assert [row.verdict for row in (outer, inner, conv)] == ["amplifies"] * 3
    assert "see their rows" in outer.remark
    assert conv.bound_so_far is None
    assert conv.largest == pytest.approx(dense_extremes(copy.deepcopy(block.branch[0]).double(), (4, 6, 6))[1])
    assert "isometric" in sort.remark
    assert (shortcut.verdict, half.verdict) == ("orthogonal", "orthogonal")
    assert concat.bound_so_far == pytest.approx(report.bound, rel=1e-5)
    lines = str(report).splitlines()
    assert lines[5].startswith("    0.branch.branch.0 ")


def test_isometric_layers_say_so():
    model = nn.Sequential(
        ts.MaxMin(), ts.GroupSort(4), ts.FullSort(), ts.Abs(), ts.Householder(4), ts.NActivation(4), nn.Identity(),
        ts.ChannelShuffle(2), ts.InvertibleDownsampling2d(2), ts.InvertibleUpsampling2d(2), nn.Flatten(),
    )  # fmt: skip
    for row in ts.audit(model, (4, 4, 4)).layers:
        assert row.verdict == "1-Lipschitz"
        assert "isometric" in row.remark, row


def test_remarks_fit_the_kind_of_function():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("triple", 3 * torch.eye(4))

        def forward(self, x):
            x = x.unsqueeze(-1).expand(-1, -1, 7)
            x = F.gelu(x.sum(2))
            return torch.matmul(x, self.triple)

    expand, total, gelu, matmul = ts.audit(Net(), (4,)).layers
    assert "repeats numbers" in expand.remark
    assert "2.646" in expand.remark
    assert "adds up" in total.remark
    assert "1-Lipschitz one" in gelu.remark
    assert "norm 3" in matmul.remark
    assert {row.verdict for row in (expand, total, gelu, matmul)} == {"amplifies"}


def test_paddings_are_blamed_for_what_they_do():
    layer = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect", bias=False)
    with torch.no_grad():
        layer.weight.mul_(12 / ts.spectral_norm_bound(layer, (3, 8, 8)))
    (row,) = ts.audit(nn.Sequential(layer), (3, 8, 8)).layers
    assert "reflect padding 1 repeats pixels" in row.remark
    assert "with zeros the norm is still" in row.remark
    with torch.no_grad():
        layer.weight.div_(100)
    (row,) = ts.audit(nn.Sequential(layer), (3, 8, 8)).layers
    assert (row.verdict, row.remark) == ("1-Lipschitz", "")


def test_pools_amplify_only_if_windows_really_overlap():
    (row,) = ts.audit(nn.Sequential(nn.MaxPool2d(3, 2)), (2, 4, 4)).layers  # one window on each axis
    assert row.verdict != "amplifies"
    (row,) = ts.audit(nn.Sequential(nn.MaxPool2d(3, 2)), (2, 9, 9)).layers
    assert row.verdict == "amplifies"
    assert 1 < row.largest <= row.bound


def test_embeddings_have_no_lower_bound():
    report = ts.audit(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2)), (3,))
    assert report.lower_bound is report.ratio is None
    assert "no lower bound: tokens" in str(report)
    assert json.loads(report.to_json())["lower_bound"] is None
    assert report.layers[0].type == "Embedding"
    assert "one-hot" in report.layers[0].remark


@pytest.mark.parametrize("pack", [lambda a, b: (a, b), lambda a, b: {"a": a, "b": [b]}])
def test_models_that_return_several_tensors(pack):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)

        def forward(self, x):
            return pack(self.one(x), self.two(x))

    model = Two()
    report = ts.audit(model, (4,))
    both = torch.cat((model.one.weight, model.two.weight)).detach().double()
    norm = float(torch.linalg.matrix_norm(both, 2))
    assert report.lower_bound == pytest.approx(norm, rel=1e-2)
    assert report.lower_bound <= norm * (1 + 1e-9) <= report.bound * (1 + 1e-9)


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
