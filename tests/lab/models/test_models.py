"""Every model, small: certified, trainable, saved and exported."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from trysquare.lab.models import MODELS, Classifier, build

# name: (input shape, options that make it small)
SMALL = {
    "cifar10-accurate": ((3, 8, 8), {"width": 12, "depth": 2}),
    "cifar10-robust": ((3, 8, 8), {"width": 4, "depth": 1, "dense_width": 16, "dense_layers": 2}),
    "imagenet-accurate": ((3, 16, 16), {"widths": (4, 16, 24), "depth": 1}),
    "imagenet-robust": ((3, 16, 16), {"widths": (4, 16, 24), "depth": 1}),
    "bcop-small": ((3, 8, 8), {"width": 8, "dense_width": 16}),
    "liresnet-aoc": ((3, 16, 16), {"width": 8, "depth": 2, "dense_width": 16, "dense_layers": 1}),
    "liresnet": ((3, 16, 16), {"width": 8, "depth": 2, "dense_width": 16, "dense_layers": 1}),
    "bronet": ((3, 16, 16), {"width": 8, "depth": 2, "dense_width": 16, "dense_layers": 1}),
    "lipnext": ((3, 8, 8), {"width": 24, "depth": 3, "patch": 2}),
    "aol-mlp": ((3, 8, 8), {"width": 200, "depth": 3}),
    "resnet34": ((3, 16, 16), {"width": 8, "depths": (2, 2)}),
    "tiny-digits": ((1, 8, 8), {}),
    "tiny-mnist": ((1, 12, 12), {"widths": (4, 16), "dense_width": 32}),
    "tiny-cifar": ((3, 8, 8), {"widths": (8, 16), "dense_width": 32}),
}
FACTOR = 1.15**2  # of the two blocks of the small liresnet-aoc


def small(name, classes=10, **options):
    shape, reduced = SMALL[name]
    return build(name, shape, classes, **{**reduced, **options}), shape


def trained(model, shape, steps=3):
    """A few steps on noise: away from the first weights, where much is zero."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = torch.randn(8, *shape), torch.arange(8) % model.head.out_features
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x) * 4, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_every_model_is_tested():
    assert set(SMALL) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_trains_and_stays_certified(name):
    model, shape = small(name)
    assert isinstance(model, Classifier)
    losses = trained(model, shape, 8)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    expected = FACTOR if name == "liresnet-aoc" else 1.0
    assert ts.lipschitz_bound(model.features, shape) <= expected + 1e-4
    if isinstance(model.head, ts.OrthoLinear):
        assert ts.lipschitz_bound(model, shape) <= 1 + 1e-4
    x, y = torch.randn(2, 16, *shape)
    changed = (model.features(x) - model.features(y)).norm(dim=1)
    assert (changed <= expected * (x - y).flatten(1).norm(dim=1) * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_export_and_mixed_precision(name):
    model, shape = small(name, mean=0.4, std=0.5)
    trained(model, shape, 2)
    x = torch.rand(4, *shape)
    twin, _ = small(name, mean=0.0, std=1.0)
    twin.load_state_dict(model.state_dict())
    model.eval(), twin.eval()
    assert torch.equal(twin(x), model(x))
    plain = ts.to_torch(model)
    torch.testing.assert_close(plain(x), model(x), atol=1e-5, rtol=1e-5)
    assert not any(isinstance(module, ts.OrthoConv2d | ts.OrthoLinear) for module in plain.modules())
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(logits.float(), model(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_audit(name):
    model, shape = small(name, std=0.5)
    report = ts.audit(model.eval(), shape)
    assert report.layers[0].type == "InputScaling"
    expected = FACTOR if name == "liresnet-aoc" else 1.0
    assert report.layers[-2].bound_so_far == pytest.approx(2 * expected, rel=1e-3)
    amplifying = {row.type for row in report.layers[1:] if row.verdict == "amplifies"}
    assert amplifying <= {"mul", "UnitNormLinear"}
    assert ("mul" in amplifying) == (name == "liresnet-aoc")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 9, 14), (4, 1, 1)])
def test_any_size_and_more_classes_than_features(name, shape):
    model = build(name, shape, 33, **SMALL[name][1]).eval()
    assert model(torch.randn(2, *shape)).shape == (2, 33)
    expected = FACTOR if name == "liresnet-aoc" else 1.0
    assert ts.lipschitz_bound(model.features, shape) <= expected + 1e-4
    if isinstance(model.head, ts.OrthoLinear):
        assert ts.lipschitz_bound(model.head, (model.head.in_features,)) <= 1 + 1e-4


def test_residual_networks_start_at_the_identity():
    model, _ = small("liresnet")
    x = torch.randn(2, 8, 8, 8)
    for layer in (model.features[2], model.features[4]):
        torch.testing.assert_close(layer(x), x + layer.bias.view(-1, 1, 1), atol=1e-5, rtol=1e-5)
    layers = [layer for layer in small("aol-mlp")[0].features if isinstance(layer, ts.OrthoConv2d)]
    x = torch.randn(2, 200, 1, 1)
    for layer in layers:
        torch.testing.assert_close(layer(x), x + layer.bias.view(-1, 1, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "millions"), [("liresnet", 83), ("bronet", 64), ("lipnext", 101), ("aol-mlp", 151)])
def test_published_sizes(name, millions):
    with torch.device("meta"):
        model = build(name, (3, 32, 32), 10)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    if name == "lipnext":
        matrices = sum(p.numel() for p in model.features.parameters() if p.shape[-2:] == (1024, 1024))
        assert matrices == 64 * 2**20  # 64 M, as published, which leaves the positions out


def test_lipnext_sees_far():
    """With shifts alone, what a pixel is changes others."""
    features = small("lipnext", pooling="l2")[0].eval().features[:-1]
    x = torch.randn(1, 3, 8, 8)
    y = x.clone()
    y[..., 4, 4] += 1
    changed = (features(x) - features(y)).abs().sum(1)[0] > 1e-5
    assert changed.sum() > 5
    with pytest.raises(ValueError, match="at least 12, the numbers of a patch"):
        build("lipnext", (3, 8, 8), width=8, patch=2)
    with pytest.raises(ValueError, match="at least 192, the numbers of an image"):
        build("aol-mlp", (3, 8, 8), width=100)


def test_heads():
    for name, head in (("orthogonal", ts.OrthoLinear), ("unit-norm", ts.UnitNormLinear), ("plain", nn.Linear)):
        model, _ = small("tiny-digits", head=name)
        assert isinstance(model.head, head)
    assert isinstance(small("liresnet-aoc")[0].head, ts.UnitNormLinear)


def test_scaling_comes_first_and_counts():
    model, shape = small("tiny-cifar", mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.5))
    assert isinstance(model.features[0], ts.InputScaling)
    assert ts.lipschitz_bound(model.eval(), shape) == pytest.approx(5, rel=1e-4)
    assert not any(isinstance(layer, ts.InputScaling) for layer in small("tiny-cifar")[0].modules())


def test_zeros_around_images_of_other_sizes():
    model = build("tiny-cifar", (3, 30, 29), widths=(4, 8), dense_width=8)
    assert isinstance(model.features[0], nn.ZeroPad2d)
    x = torch.randn(2, 3, 30, 29)
    padded = model.features[0](x)
    assert padded.shape == (2, 3, 32, 32)
    torch.testing.assert_close(padded.norm(), x.norm())
    assert not isinstance(build("tiny-cifar", (3, 32, 32), widths=(4, 8)).features[0], nn.ZeroPad2d)


@pytest.mark.parametrize("centering", ["batch", "layer"])
@pytest.mark.parametrize("name", ["bcop-small", "cifar10-robust", "liresnet-aoc", "resnet34", "tiny-mnist"])
def test_centering(name, centering):
    model, shape = small(name, centering=centering, head="orthogonal")
    kind = ts.BatchCentering if centering == "batch" else ts.LayerCentering
    assert any(isinstance(layer, kind) for layer in model.modules())
    trained(model, shape, 2)
    expected = FACTOR if name == "liresnet-aoc" else 1.0
    assert ts.lipschitz_bound(model.eval(), shape) <= expected + 1e-4


@pytest.mark.parametrize("conv", [*ts.METHODS, "plain"])
def test_resnet_of_any_convolution(conv):
    model, shape = small("resnet34", conv=conv)
    trained(model, shape, 1)
    bound = ts.lipschitz_bound(model.eval(), shape)
    assert bound <= 1 + 1e-4 or conv == "plain"
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 1 + 2 * 2 + 1 + 2  # stem, two blocks, transition, block
    assert all(layer.padding_mode == "circular" for layer in convolutions)
    assert all(isinstance(layer, ts.OrthoConv2d) == (conv != "plain") for layer in convolutions)


def test_plain_convolutions_have_the_geometry_of_ours():
    ours, shape = small("bcop-small")
    plain, _ = small("bcop-small", conv="plain")
    x = torch.randn(2, *shape)
    for mine, theirs in zip(ours.features, plain.features, strict=True):
        if isinstance(mine, ts.OrthoConv2d):
            theirs.load_state_dict(mine.as_torch().state_dict())
        elif isinstance(mine, ts.OrthoLinear):
            theirs.load_state_dict(mine.state_dict())
    torch.testing.assert_close(plain.features(x), ours.features(x))


@pytest.mark.parametrize("strided", ["native", "parsimonious", "emulated"])
def test_ways_to_stride(strided):
    model, shape = small("bcop-small", strided=strided)
    assert ts.lipschitz_bound(model.eval(), shape) <= 1 + 1e-4
    downsampling = [layer for layer in model.modules() if isinstance(layer, ts.InvertibleDownsampling2d)]
    assert len(downsampling) == (2 if strided == "emulated" else 0)
    assert strided != "parsimonious" or model.features[2].geometry.parsimonious


@pytest.mark.parametrize(("name", "stride"), [("tiny-cifar", 2), ("bcop-small", 1), ("cifar10-robust", 1)])
def test_zeros_in_place_of_the_first_layer(name, stride):
    options = {"widths": (16, 32)} if name == "tiny-cifar" else {}
    (model, shape), (usual, _) = (small(name, **options, zeros=zeros) for zeros in (True, False))
    convolutions = [[m for m in each.modules() if isinstance(m, ts.OrthoConv2d)] for each in (model, usual)]
    assert len(convolutions[0]) == len(convolutions[1]) - 1
    x = torch.randn(2, *shape)
    wide = model.features[: 2 if stride > 1 else 1](x)
    assert wide.shape[1:] == (convolutions[0][0].in_channels, shape[1] // stride, shape[2] // stride)
    torch.testing.assert_close(wide.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))
    trained(model, shape)
    assert 0.9 < ts.lipschitz_bound(model.eval(), shape) <= 1 + 1e-4
    with pytest.raises(ValueError, match="zeros=True needs a first width of at least 12"):
        build("tiny-cifar", (3, 8, 8), widths=(8,), zeros=True)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("patch", [0, 7])
def test_liresnet_with_and_without_residuals_and_patches(residual, patch):
    shape = (3, 28, 28)
    model = build(
        "liresnet", shape, 10, width=12, depth=2, dense_width=16, dense_layers=1, residual=residual, patch=patch
    )
    trained(model, shape)
    assert ts.lipschitz_bound(model.eval().features, shape) <= 1 + 1e-4
    assert model(torch.randn(2, *shape)).shape == (2, 10)


def test_models_on_the_manifold_are_there_altogether():
    """With conv="manifold" the optimizer keeps convolutions and linear layers, but for the head."""
    for name in ("tiny-cifar", "bcop-small", "lipnext", "liresnet-aoc"):
        model, shape = small(name, conv="manifold")
        groups = {group["name"]: group["params"] for group in ts.parameter_groups(model)}
        assert len(groups["orthonormal"]) >= 2
        optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(model, lr=0.01))
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, *shape)), torch.arange(4)).backward()
            optimizer.step()
        expected = FACTOR if name == "liresnet-aoc" else 1.0
        assert ts.lipschitz_bound(model.eval().features, shape) <= expected + 1e-4


def test_no_dense_layers():
    for name in ("tiny-digits", "bcop-small"):
        model, shape = small(name, dense_layers=0)
        assert model(torch.randn(1, *shape)).shape == (1, 10)


def test_checkpoint_rebuilds_the_model(tmp_path):
    arguments = {"name": "tiny-digits", "input_shape": [1, 8, 8], "classes": 7, "std": 0.5, "widths": [4]}
    model = build(**arguments).eval()
    ts.save_checkpoint(tmp_path / "model.pt", model, "trysquare.models:build", arguments)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(ts.load_model(tmp_path / "model.pt")(x), model(x))


def test_deep_copies_are_independent():
    model, shape = small("tiny-digits")
    x, twin = torch.rand(2, *shape), copy.deepcopy(model)
    before = twin(x)
    trained(model, shape, 2)
    assert torch.equal(twin(x), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cifar10-robst"}, "unknown model 'cifar10-robst': did you mean 'cifar10-robust'"),
        ({"name": "qqq"}, "unknown model 'qqq': known: cifar10-accurate, "),
        ({"name": "tiny-digits", "dense_widht": 3}, "unknown option 'dense_widht': did you mean 'dense_width'"),
        ({"name": "tiny-digits", "head": "linear"}, "head='linear' must be one of 'orthogonal'"),
        ({"name": "tiny-digits", "centering": "group"}, "centering='group' must be one of None, 'batch', 'layer'"),
        ({"name": "tiny-digits", "conv": "conv"}, "conv='conv' must be one of 'aoc'"),
        ({"name": "tiny-digits", "widths": (7,)}, "7 channels cannot be sorted in pairs"),
        ({"name": "bcop-small", "conv": "plain", "strided": "parsimonious"}, "no meaning for conv='plain'"),
        ({"name": "bcop-small", "strided": "no"}, "strided='no' must be one of 'native'"),
        ({"name": "cifar10-accurate", "pooling": "max"}, "pooling='max' must be one of 'average', 'l2'"),
        ({"name": "imagenet-robust", "widths": (8,)}, "at least one stage"),
        ({"name": "tiny-digits", "input_shape": (8, 8)}, "must be channels, height and width"),
        ({"name": "tiny-digits", "input_shape": (1, 8, 0)}, "must be channels, height and width"),
        ({"name": "tiny-digits", "classes": 0}, "classes=0 must be at least 1"),
        ({"name": ["a"]}, r"name=\['a'\] must be the name of a model: one of cifar10-accurate, "),
        ({"name": None}, "name=None must be the name of a model"),
        ({"name": "liresnet-aoc", "factor": math.nan}, "factor=nan must be a finite number"),
        ({"name": "liresnet-aoc", "factor": -math.inf}, "factor=-inf must be a finite number"),
        ({"name": "liresnet-aoc", "factor": -(10**400)}, "factor=.* must be a finite number"),
        ({"name": "tiny-digits", "std": math.inf}, "std=inf must be "),
        ({"name": "tiny-digits", "mean": math.nan}, "mean=nan must be a finite number"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_builders_tell_their_options():
    for builder in MODELS.values():
        assert {"mean", "std", "head"} <= set(builder.options)
        assert builder.summary
        assert builder.body.__doc__
        assert all(f"{name}:" in builder.body.__doc__ for name in set(builder.options) - {"mean", "std", "head"})


def test_factor_is_shown_and_can_be_left_out():
    assert "factor=1.15" in repr(small("liresnet-aoc")[0])
    model, shape = small("liresnet-aoc", factor=1.0, head="orthogonal")
    assert ts.lipschitz_bound(model.eval(), shape) <= 1 + 1e-4
