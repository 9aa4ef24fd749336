"""Models of plain torch become 1-Lipschitz: constants, training, refusals, and the table of what was changed."""

import copy
import operator

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.nn import plain_models
from tests.resnet import resnet18
from trysquare.nn.conversion import Conversion

MODELS = {
    "resnet18": (lambda: resnet18(width=8, classes=10), (3, 32, 32)),
    "resnet50": (lambda: plain_models.ResNet50(8, 10), (3, 32, 32)),
    "vgg": (lambda: plain_models.VGG((16, "M", 32, "M", 32, 32, "M"), 10, 64), (3, 32, 32)),
    "convnext": (lambda: plain_models.ConvNeXt((16, 32), (1, 2), 10), (3, 32, 32)),
    "unet": (lambda: plain_models.UNet(3, 2, 8), (3, 14, 12)),
    "unet, bilinear": (lambda: plain_models.UNet(3, 2, 8, bilinear=True), (3, 8, 8)),
    "mixer": (lambda: plain_models.Mixer(16, 4, 16, 2), (3, 16, 16)),
    "densenet": (plain_models.DenseNet, (3, 16, 16)),
    "shufflenet": (plain_models.ShuffleNet, (3, 16, 16)),
    "functional": (plain_models.Functional, (3, 32, 32)),
    "parts": (plain_models.MaxFeatureMap, (3, 8, 8)),
    "einops": (plain_models.EinopsMixer, (3, 16, 16)),
    "1d": (plain_models.sequence_1d, (3, 37)),
    "3d": (plain_models.volume_3d, (2, 8, 8, 8)),
}
NORM_ONE = ["resnet18", "resnet50", "vgg", "unet", "unet, bilinear", "mixer", "densenet", "shufflenet", "parts"]
OTHERWISE = {"activation": "keep", "residual": "learnable", "expanding_shortcut": "aol"}


@pytest.mark.parametrize("options", [{}, OTHERWISE], ids=["defaults", "otherwise"])
@pytest.mark.parametrize("name", MODELS)
def test_the_constant_is_at_most_1(name, options):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    plain = make()
    model = ts.from_torch(plain, shape, **options)
    assert model.training
    bound = ts.lipschitz_bound(model.eval(), shape)
    assert bound <= 1.01
    if name in NORM_ONE and not options:
        assert bound > 0.99  # the layers have norm 1, and nothing was divided twice
    x = torch.randn(3, *shape)
    with torch.no_grad():
        assert model(x).shape == plain.eval()(x).shape


@pytest.mark.parametrize("name", MODELS)
def test_no_jacobian_amplifies(name):
    """In float64, with running means and scales that are not those of the start."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = ts.from_torch(make().double(), shape)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor) * tensor.std(unbiased=False).clamp_min(0.1))
        for _ in range(2):
            model(2 + 3 * torch.randn(8, *shape, dtype=torch.float64))
    model.eval()
    x = torch.randn(1, *shape, dtype=torch.float64, requires_grad=True)
    y = model(x).flatten()
    if len(y) <= 10:
        rows = [torch.autograd.grad(entry, x, retain_graph=True)[0].flatten() for entry in y]
        norm = float(torch.linalg.matrix_norm(torch.stack(rows), 2))
        assert 1e-7 < norm <= 1 + 1e-9
    for _ in range(5):
        direction = F.normalize(torch.randn_like(y), dim=0)
        (back,) = torch.autograd.grad(y, x, direction, retain_graph=True)
        assert back.norm() <= 1 + 1e-9


@pytest.mark.parametrize("name", ["resnet18", "vgg", "convnext", "mixer", "densenet", "functional"])
def test_it_trains(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = ts.from_torch(make(), shape)
    x, labels = torch.randn(32, *shape), torch.arange(32) % 10
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(10 * model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.02
    assert all(tensor.grad is not None for tensor in model.parameters())
    assert ts.lipschitz_bound(model.eval(), shape) <= 1.01


def test_a_unet_trains():
    torch.manual_seed(0)
    model = ts.from_torch(plain_models.UNet(3, 2, 8), (3, 8, 8))
    x = torch.randn(8, 3, 8, 8)
    labels = (x.mean(1) > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(10 * model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_the_model_is_not_changed():
    plain = resnet18(width=8, classes=10)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    kinds = [type(module) for module in plain.modules()]
    ts.from_torch(plain, (3, 32, 32), init="pretrained")
    assert kinds == [type(module) for module in plain.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in plain.state_dict().items())
    assert plain.training


def test_names_stay_and_sums_are_in_their_block():
    model = ts.from_torch(resnet18(width=8, classes=10), (3, 32, 32))
    names = dict(model.named_modules())
    assert isinstance(names["layer2.0.downsample.0"], ts.OrthoConv2d)
    assert names["layer2.0.downsample.0"].kernel_size == (2, 2)
    assert isinstance(names["layer3.1.bn2"], ts.BatchCentering)
    assert type(names["layer3.1.add"]).__name__ == "ConvexSum"
    aol = ts.from_torch(resnet18(width=8, classes=10), (3, 32, 32), expanding_shortcut="aol")
    shortcut = aol.get_submodule("layer2.0.downsample.0")
    assert shortcut.kernel_size == (1, 1)
    assert shortcut.method == "aol"


@pytest.mark.parametrize("size", [15, 16])
def test_an_expanding_shortcut_keeps_its_output_size(size):
    plain = nn.Conv2d(4, 8, 1, stride=2)
    model = ts.from_torch(nn.Sequential(plain), (4, size, size))
    assert model(torch.randn(1, 4, size, size)).shape == plain(torch.randn(1, 4, size, size)).shape
    values = torch.autograd.functional.jacobian(lambda x: model(x).flatten(), torch.randn(1, 4, size, size)).flatten(1)
    assert torch.linalg.svdvals(values).max() < 1 + 1e-5


# -- pretrained weights


def test_what_is_orthogonal_already_comes_through_unchanged():
    """Layers of ours, made plain and converted back with their weights: the same function."""
    torch.manual_seed(0)
    given = nn.Sequential(
        ts.OrthoConv2d(3, 8, 3, padding=1, padding_mode="zeros"), nn.ReLU(), ts.OrthoConv2d(8, 16, 2, stride=2),
        nn.Tanh(), ts.OrthoConvTranspose2d(16, 8, 2, stride=2, padding=0, padding_mode="zeros"), nn.Flatten(),
        ts.OrthoLinear(8 * 64, 10),
    )  # fmt: skip
    model = ts.from_torch(ts.to_torch(given), (3, 8, 8), activation="keep", init="pretrained")
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(model.eval()(x), given.eval()(x), atol=1e-4, rtol=0)
    distances = [row.distance for row in model.conversion.rows if row.distance is not None]
    assert len(distances) == 4
    assert max(distances) < 1e-4
    random = ts.from_torch(ts.to_torch(given), (3, 8, 8), activation="keep")
    assert (random.eval()(x) - given(x)).abs().max() > 0.1


def test_pretrained_weights_are_projected_with_the_factors_of_the_normalisation_behind():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 5))
    with torch.no_grad():
        plain[1].weight.copy_(torch.tensor([3.0, -1.0, 0.5, 2.0]))
        plain[1].running_var.copy_(torch.tensor([4.0, 0.25, 1.0, 9.0]))
    model = ts.from_torch(plain, (6, 3, 3), init="pretrained")
    factors = torch.tensor([1.5, -2.0, 0.5, 2 / 3])
    for name, wanted in (
        ("0", factors[:, None] * plain[0].weight.detach().flatten(1)),
        ("3", plain[3].weight.detach()),
    ):
        left, _, right = torch.linalg.svd(wanted, full_matrices=False)
        layer = model.get_submodule(name)
        torch.testing.assert_close(layer.weight.detach().flatten(1), left @ right, atol=1e-4, rtol=0)
        assert torch.equal(layer.bias, plain[int(name)].bias)
    assert "from the old weights" in str(model.conversion)


# -- single modules and calls


def as_model(function, *parameters):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.ParameterList(parameters)
            self.conv = nn.Conv2d(4, 4, 1)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return function(self, self.conv(x))

    return Written()


REFUSED = {
    "a product": (lambda m, x: x * torch.sigmoid(x), "product of two values"),
    "attention": (lambda m, x: x @ x.transpose(2, 3), "attention"),
    "a division": (lambda m, x: 1.0 / x, "division"),
    "a norm": (lambda m, x: F.normalize(x, dim=1), "normalize"),
    "copies": (lambda m, x: x.mean(1, keepdim=True).expand(-1, 4, -1, -1), "copies"),
    "broadcasting": (lambda m, x: x + x.mean((2, 3), keepdim=True), "broadcasting"),
    "repeated index": (lambda m, x: x[:, [0, 0, 1]], "index"),
    "power": (lambda m, x: x**2, "pow"),
    "the batch": (lambda m, x: x - x.mean(0, keepdim=True), "batch"),
    "written over": (lambda m, x: (m.relu(x), x)[1], "in place"),
    "clamp": (lambda m, x: torch.clamp(x, min=x.detach().flip(1)), "depend on the input"),
    "clamp that copies": (lambda m, x: torch.clamp(x[:, :1], min=torch.zeros(1, 4, 1, 1)), "copies"),
    "maximum that copies": (lambda m, x: torch.maximum(x[:, :1], torch.zeros(1, 4, 1, 1)), "copies"),
    "a mask": (lambda m, x: x * (x > 0), "jumps"),
    "a cast": (lambda m, x: x + x.long().float(), "jumps"),
    "another cast": (lambda m, x: x + x.to(torch.int32).to(x.dtype), "jumps"),
    "indices": (lambda m, x: x[:, :1] + x.max(1, keepdim=True)[1].float(), "jumps"),
    "an attribute": (lambda m, x: x - x.data, "attribute 'data'"),
    "an argument": (lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True), "antialias"),
    "the weight": (lambda m, x: F.conv2d(x, x[:1].mean((2, 3), keepdim=True)), "depends on the input"),
    "a product of einops": (lambda m, x: einops.reduce(x, "b c h w -> b c", "prod"), "'prod' is not Lipschitz"),
    "copies of einops": (lambda m, x: einops.repeat(x, "b c h w -> b (c 2) h w"), "repeat"),
    "rounding": (lambda m, x: torch.round(x), "round"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_lipschitz_is_named_with_its_line(name):
    function, message = REFUSED[name]
    model = as_model(function)
    with pytest.raises(ValueError, match=message) as raised:
        ts.from_torch(model, (4, 6, 6))
    assert f"test_conversion.py:{function.__code__.co_firstlineno}:" in str(raised.value)
    table = ts.from_torch(model, (4, 6, 6), dry_run=True)
    assert isinstance(table, Conversion)
    assert table.refused
    assert "CANNOT BE CONVERTED" in str(table)


def test_parts_from_the_end_are_the_same_parts():
    """A concatenation of both is that of one value with itself."""

    def forward(m, x):
        parts = x.chunk(2, 1)
        return torch.cat([parts[1], parts[-1].neg()], 1)

    model = ts.from_torch(as_model(forward), (4, 6, 6))
    x = torch.randn(2, 1, 4, 6, 6)
    assert ts.lipschitz_bound(model, (4, 6, 6)) == pytest.approx(1, abs=1e-5)
    assert (model(x[0]) - model(x[1])).norm() <= 1.00001 * (x[0] - x[1]).norm()


def test_refusals_of_one_line_are_told_once_and_lines_that_are_not_known_not_at_all():
    model = nn.Sequential(*[as_model(lambda m, x: x.exp()) for _ in range(3)], nn.GLU(1))
    with pytest.raises(ValueError, match="4 of 7 calls") as raised:
        ts.from_torch(model, (4, 6, 6))
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("  exp at 0.exp, ... 2.exp_2: no 1-Lipschitz counterpart is known (test_conversion.py:")
    assert lines[2] == "  GLU at 3: no 1-Lipschitz counterpart is known"


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (nn.LSTM(4, 5), (7, 4), "use ts.OrthoRNN"),
        (nn.MultiheadAttention(4, 2), (7, 4), "attention"),
        (nn.TransformerEncoderLayer(4, 2), (7, 4), "attention"),
    ],
)
def test_what_never_is_lipschitz_says_so(module, shape, message):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(*[x] * (3 if message == "attention" and type(module).__name__[0] == "M" else 1))[0]

    with pytest.raises(ValueError, match=message):
        ts.from_torch(Written(), shape)


def test_a_factor_in_a_difference_is_told():
    table = ts.from_torch(as_model(lambda m, x: torch.sub(torch.ones(4, 6, 6), x, alpha=3)), (4, 6, 6), dry_run=True)
    assert table.rows[-1].why == "part of the constant: alpha"


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), ts.OrthoConvTranspose2d),
        (nn.Conv2d(4, 4, 3, 2, 1, padding_mode="circular"), ts.OrthoConv2d),
        (nn.Linear(6, 3), ts.OrthoLinear),
    ],
    ids=str,
)
def test_a_single_module(module, kind):
    model, x = ts.from_torch(module, (4, 6, 6)), torch.randn(3, 4, 6, 6)
    (found,) = [layer for layer in model.modules() if isinstance(layer, kind)]
    assert getattr(found, "padding_mode", "") == getattr(module, "padding_mode", "")
    assert model(x).shape == module(x).shape


def test_arguments_besides_the_input_are_not_dropped():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)

        def forward(self, x):
            return self.up(x, output_size=(13, 13))

    with pytest.raises(ValueError, match="called with other arguments"):
        ts.from_torch(Up(), (4, 6, 6))


def test_reparametrized_layers_are_replaced_as_what_they_are():
    norm = nn.utils.parametrizations.spectral_norm
    plain = nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)))
    model = ts.from_torch(plain, (3, 6, 6), init="pretrained")
    assert [type(layer).__mro__[1] for layer in model.children()] == [ts.OrthoConv2d] * 2
    left, _, right = torch.linalg.svd(plain[1].weight.detach().flatten(1), full_matrices=False)
    torch.testing.assert_close(model.get_submodule("1").weight.detach().flatten(1), left @ right, atol=1e-4, rtol=0)


def test_modules_without_a_counterpart_are_refused_or_kept():
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.LocalResponseNorm(2), nn.Linear(6, 4))
    with pytest.raises(ValueError, match="LocalResponseNorm at 1: no 1-Lipschitz counterpart"):
        ts.from_torch(model, (8, 6))
    kept = ts.from_torch(model, (8, 6), keep=(nn.LocalResponseNorm,))
    assert isinstance(kept.get_submodule("1"), nn.LocalResponseNorm)
    half = nn.Sequential(nn.Linear(8, 8), ts.InputScaling(0.0, 0.5))
    assert ts.lipschitz_bound(ts.from_torch(half, (8,)), (8,)) == pytest.approx(2, rel=1e-5)


TRACED = {
    "decides by values": (lambda m, x: x if x.sum() > 0 else -x, "control flow"),
    "takes no such input": (lambda m, x: x.view(-1, 5), "invalid for input"),
    "no such method": (lambda m, x: x.no_such_method(), "no_such_method"),
    "writes into a part": (
        lambda m, x: (operator.setitem(x, (slice(None), 0), 0.0), x)[1],
        "does not support item assignment",
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_cannot_be_traced_is_named_with_its_line(name):
    function, message = TRACED[name]
    with pytest.raises(ValueError, match=f"cannot be traced: .*{message}") as raised:
        ts.from_torch(as_model(function), (4, 6, 6))
    assert f"test_conversion.py:{function.__code__.co_firstlineno}:" in str(raised.value)


def test_a_batch_that_is_written_into_the_code_is_refused():
    with pytest.raises(ValueError, match="batch of 3"):
        ts.from_torch(as_model(lambda m, x: x.reshape(2, 4 * 36)), (4, 6, 6))


def test_code_may_ask_for_sizes():
    def forward(m, x):
        b, c, h, w = x.shape
        assert x.ndim == 4
        assert x.dim() == 4
        assert x.shape == x.relu().shape
        assert x.shape[1:] == (4, 6, 6)
        assert x.size()[2] == x.size(3) == h
        if h % 2 == 0 and x.numel() is not None:
            x = x.view(b, c * h, w)
        first, *_ = x.chunk(2, 1)
        assert x.max(1).values.shape[1] == x.mT.shape[1]
        return first.reshape(b, -1) + x.new_zeros(x.shape[0], 1)

    model = ts.from_torch(as_model(forward), (4, 6, 6))
    assert model(torch.randn(5, 4, 6, 6)).shape == (5, 72)


def dense(model, shape):
    """The Jacobian at a random input, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    return torch.autograd.functional.jacobian(lambda x: model(x).flatten(), x).flatten(1)


LINEAR = [
    (nn.Upsample(scale_factor=2), (2, 3, 5)), (nn.Upsample(size=(7, 4)), (2, 3, 5)),
    (nn.Upsample(scale_factor=1.7, mode="bilinear"), (1, 6, 5)),
    (nn.Upsample(scale_factor=(2, 3), mode="bilinear", align_corners=True), (1, 4, 3)),
    (nn.Upsample(scale_factor=2, mode="linear"), (2, 9)), (nn.Upsample(size=3, mode="trilinear"), (1, 4, 5, 6)),
    (nn.AdaptiveAvgPool2d(3), (2, 7, 8)), (nn.AdaptiveAvgPool2d((7, 5)), (1, 2, 1)),
    (nn.AdaptiveAvgPool2d(2), (1, 6, 4)),
    (nn.AdaptiveAvgPool1d(4), (2, 4)), (nn.AvgPool2d(2), (2, 6, 6)), (nn.AdaptiveAvgPool3d(1), (2, 3, 4, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape"), LINEAR, ids=lambda value: str(value))
def test_resampling_and_averages_have_norm_1(module, shape):
    model = ts.from_torch(nn.Sequential(module), shape).double()
    assert float(torch.linalg.matrix_norm(dense(model, shape), 2)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("size", [5, 6, 9])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool1d(3, 2, 1), nn.MaxPool1d(3, 1), nn.MaxPool1d(3, 2, ceil_mode=True), nn.AdaptiveMaxPool1d(4)]
)
def test_max_pooling_does_not_amplify_a_single_peak(pool, size):
    """The worst input: every window that can reads the same entry."""
    model = ts.from_torch(nn.Sequential(pool), (1, size))
    peaks = torch.eye(size).unsqueeze(1)
    assert (model(10 * peaks) - model(9 * peaks)).flatten(1).norm(dim=1).max() <= 1 + 1e-5


SLOPES = [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.SELU(), nn.ELU(2.0), nn.LeakyReLU(-1.5)]


@pytest.mark.parametrize("activation", SLOPES, ids=repr)
def test_activations_that_amplify_are_divided_by_their_largest_slope(activation):
    model = ts.from_torch(nn.Sequential(activation), (1,), activation="keep")
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(model(x).sum(), x)
    assert 0.999 < slopes.abs().max() <= 1


def test_odd_channels_and_other_axes():
    model = ts.from_torch(nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 1), nn.ReLU()), (3, 8, 8))
    assert [type(model.get_submodule(name)) for name in "13"] == [ts.Abs, ts.MaxMin]
    assert "5 channels make no pairs" in str(model.conversion)
    tokens = ts.from_torch(nn.Sequential(nn.Linear(6, 8), nn.GELU()), (5, 6))
    assert tokens.get_submodule("1").dim == 2


def test_a_module_that_is_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.second.weight

        def forward(self, x):
            x = self.relu(self.first(self.relu(self.first(x))))
            return self.tied(self.second(x.view(x.shape[0], 2, 4).relu().flatten(1)))

    model = ts.from_torch(Twice(), (8,))
    shared = [row.why for row in model.conversion.rows if row.where == "first"]
    assert shared == ["orthonormal rows or columns", "shared with the one before"]
    assert sum(isinstance(module, ts.OrthoLinear) for module in model.modules()) == 3
    assert "shares its weight with second no longer" in str(model.conversion)
    assert ts.lipschitz_bound(model, (8,)) <= 1.01


def test_a_weight_that_is_computed_and_one_that_is_0_start_at_random():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias, self.stride, self.padding)

    plain = nn.Sequential(Standardised(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    nn.init.zeros_(plain[1].weight)
    model = ts.from_torch(plain, (3, 6, 6), init="pretrained")
    assert str(model.conversion).count("random: there is no old weight") == 2
    assert ts.lipschitz_bound(model, (3, 6, 6)) == pytest.approx(1, abs=1e-5)


def test_several_inputs_and_outputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(3, 4)

        def forward(self, x, y, scale=None):
            x, y = self.one(x), self.two(y)
            return {"sum": x + y if scale is None else x, "both": torch.cat([x, y], 1)}

    model = ts.from_torch(Pair(), [(6,), (3,)])
    found = model(torch.randn(5, 6), torch.randn(5, 3))
    assert {name: tuple(value.shape) for name, value in found.items()} == {"sum": (5, 4), "both": (5, 8)}


def test_dropout_in_a_call_drops_in_training_only():
    model = ts.from_torch(as_model(lambda m, x: F.dropout(x, 0.5, m.training)), (4, 6, 6))
    x = torch.randn(2, 4, 6, 6)
    assert (model.train()(x) == 0).float().mean() > 0.3
    assert (model.eval()(x) == 0).float().mean() < 0.01


def test_copies_plain_twins_and_certificates():
    torch.manual_seed(0)
    model = ts.from_torch(plain_models.Mixer(16, 4, 16, 1), (3, 16, 16)).eval()
    x = torch.randn(2, 3, 16, 16)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert str(twin.conversion) == str(model.conversion)
    torch.testing.assert_close(twin(x), model(x))
    plain = ts.to_torch(model)
    torch.testing.assert_close(plain(x), model(x), atol=1e-5, rtol=1e-5)
    assert not any(isinstance(module, ts.OrthoLinear) for module in plain.modules())
    certificate = ts.certify(model, [(x, torch.tensor([0, 1]))])
    assert 0.99 < certificate.lipschitz <= 1.01


def test_the_table():
    table = ts.from_torch(resnet18(width=8, classes=10), (3, 32, 32), dry_run=True)
    lines = str(table).splitlines()
    assert lines[0].split() == ["was", "is", "now", "where", "why"]
    assert any(line.startswith("8x   add") and "ConvexSum" in line for line in lines)
    assert any(line.startswith("3x   Conv2d") and "a kernel of 2x2 has one" in line for line in lines)
    assert sum(int(line.split("x")[0]) for line in lines[1:]) == len(table.rows) == 17 + 3 + 20 + 17 + 8 + 3
    assert not table.refused
    assert table.rows[0].line.startswith("resnet.py:")


def test_wrong_arguments():
    model = nn.Sequential(nn.Linear(4, 4))
    for wrong in ({"activation": "relu"}, {"residual": "sum"}, {"init": "zeros"}, {"expanding_shortcut": "3x3"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"unknown {name} '{value}'"):
            ts.from_torch(model, (4,), **wrong)
    with pytest.raises(ValueError, match="positive integers"):
        ts.from_torch(model, (4, -1))
    with pytest.raises(TypeError, match="must be a torch"):
        ts.from_torch(lambda x: x, (4,))
