"""Bounds of networks: never below the Jacobians, exact where that is known, and an error instead of a guess."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.resnet import resnet18
from tests.verify.lipschitz.networks import bound, jacobian_norm
from trysquare.verify.lipschitz import NoRuleError

SLOPES = {
    nn.ReLU: 1.0, nn.ReLU6: 1.0, nn.Hardtanh: 1.0, nn.Tanh: 1.0, nn.Sigmoid: 0.25, nn.LogSigmoid: 1.0, nn.Softsign: 1.0,
    nn.Tanhshrink: 1.0, nn.Softshrink: 1.0, nn.SELU: 1.7580993409, nn.GELU: 1.1291, nn.SiLU: 1.0999, nn.Mish: 1.0885,
    nn.Hardswish: 1.5, nn.Hardsigmoid: 0.16666668,
}  # fmt: skip
MODULES = [
    (nn.Linear(6, 4), (5, 6)),
    (nn.Conv2d(3, 4, 3, 2, 1), (3, 6, 6)),
    (nn.ConvTranspose2d(3, 2, 3, 2, 1, 1), (3, 4, 4)),
    (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (3, 6, 6)),
    (nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"), (3, 8)),
    (nn.BatchNorm2d(3), (3, 4, 4)),
    (nn.MaxPool2d(3, 2, 1), (2, 7, 7)),
    (nn.MaxPool1d(4, 1), (2, 9)),
    (nn.AvgPool2d(3, 2, 1), (2, 7, 7)),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 6, 7)),
    (nn.AvgPool2d(2, 1, divisor_override=1), (1, 5, 5)),
    (nn.AdaptiveAvgPool2d((2, 3)), (2, 7, 5)),
    (nn.AdaptiveAvgPool2d(1), (2, 5, 5)),
    (nn.AdaptiveMaxPool1d(4), (2, 6)),
    (nn.Flatten(), (2, 3)),
    (nn.Unflatten(1, (2, 2)), (4, 3)),
    (nn.Dropout(0.5), (5,)),
    (nn.PixelShuffle(2), (4, 3, 3)),
    (nn.PixelUnshuffle(2), (1, 4, 4)),
    (nn.ChannelShuffle(2), (4, 3, 3)),
    (nn.ReflectionPad2d(2), (2, 4, 4)),
    (nn.ReplicationPad2d((0, 2, 1, 0)), (2, 4, 4)),
    (nn.CircularPad1d(3), (2, 4)),
    (nn.ZeroPad2d(1), (2, 4, 4)),
    (nn.Upsample(scale_factor=2), (2, 3, 3)),
    (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), (1, 4, 3)),
    (nn.Unfold(3, padding=1), (2, 4, 4)),
    (nn.PReLU(init=1.5), (3, 2)),
    (nn.LeakyReLU(0.2), (4,)),
    (nn.ELU(2.0), (4,)),
    (nn.Softmax(1), (4,)),
    (nn.LogSoftmax(1), (4,)),
    (ts.OrthoConv2d(4, 8, 3, stride=2), (4, 6, 6)),
    (ts.OrthoConvTranspose2d(8, 4, 3, stride=2), (8, 3, 3)),
    (ts.OrthoLinear(6, 3), (6,)),
    (ts.OrthoConv2d(4, 16, 4, stride=2).inverse(), (16, 4, 4)),
]


@pytest.mark.parametrize(("module", "shape"), MODULES, ids=lambda v: repr(v)[:50])
def test_rules_are_above_every_jacobian_seen(module, shape):
    module = module.eval()
    found = ts.lipschitz_bound(module, shape)
    seen = max(jacobian_norm(module, 3 * torch.randn(shape)) for _ in range(5))
    assert seen <= found * (1 + 1e-6)
    linear = not isinstance(
        module, nn.MaxPool2d | nn.MaxPool1d | nn.AdaptiveMaxPool1d | nn.Softmax | nn.LogSoftmax | nn.ELU
    )
    if linear:
        assert found <= seen * (1 + 1e-5)


def test_slopes_of_activations_are_the_largest_derivatives():
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64, requires_grad=True)
    for cls, slope in SLOPES.items():
        assert slope * (1 - 1e-9) <= ts.lipschitz_bound(cls(), (3,)) < slope * (1 + 1e-4)
        (derivative,) = torch.autograd.grad(cls()(x).sum(), x)
        assert slope * 0.999 < float(derivative.abs().max()) <= slope, cls
    (derivative,) = torch.autograd.grad(nn.GELU(approximate="tanh")(x).sum(), x)
    assert float(derivative.abs().max()) <= SLOPES[nn.GELU]


def test_branches_scalings_and_rearrangements():
    close = pytest.approx
    assert bound(lambda m, x: x + F.relu(x)) == close(2)
    assert bound(lambda m, x: x - 0.5 * x) == close(1.5)
    assert bound(lambda m, x: torch.cat([x, 2 * x], 1)) == close(math.sqrt(5))
    assert bound(lambda m, x: torch.stack([x, x], dim=2)) == close(math.sqrt(2))
    assert bound(
        lambda m, x: (x - m.mean) / m.std, mean=torch.ones(3, 1, 1), std=torch.tensor([0.2, 0.25, 0.5])[:, None, None]
    ) == close(5)
    assert bound(lambda m, x: m.a * x + (1 - m.a) * x.abs(), a=torch.tensor(0.3)) == close(1)
    assert bound(lambda m, x: torch.sigmoid(m.a) * x, a=torch.tensor(0.0)) == close(0.5)
    assert bound(lambda m, x: x.mean((2, 3))) == close(1 / 6)
    assert bound(lambda m, x: x.sum(-1)) == close(math.sqrt(6))
    assert bound(lambda m, x: x.mean((2, 3), keepdim=True) + m.zero, zero=torch.zeros(3, 6, 6)) == close(1)
    assert bound(lambda m, x: x.permute(0, 2, 3, 1).flatten(1)) == close(1)
    assert bound(lambda m, x: x.view(x.size(0), -1) @ m.w, w=3 * torch.eye(108)) == close(3)
    assert bound(lambda m, x: F.conv2d(x, m.w, padding=1), w=torch.full((1, 3, 1, 1), 2.0)) == close(math.sqrt(12))
    assert bound(lambda m, x: F.linear(x, m.w), w=torch.eye(6)) == close(1)
    assert bound(lambda m, x: F.max_pool2d(F.leaky_relu(x, 2.0), 2)) == close(2)
    assert bound(lambda m, x: F.pad(x, (1, 1, 1, 1), mode="replicate")) == close(2)
    assert bound(lambda m, x: F.dropout(x, 0.5, False).clamp(-1, 1).transpose(1, 2)) == close(1)
    assert bound(lambda m, x: torch.maximum(x, -x)) == close(1)
    assert bound(lambda m, x: x.expand(-1, 4, -1, -1), (1, 2, 2)) == close(2)
    assert bound(lambda m, x: torch.chunk(x, 2, dim=2)[0] + x[:, :, :3]) == close(2)
    assert bound(lambda m, x: m.w + 0 * x, w=torch.ones(3, 6, 6)) == 0


def test_what_is_not_lipschitz_or_not_followed_raises():
    refused = {
        "multiplied with each other": lambda m, x: x * x,
        "divisor depends": lambda m, x: x / x.abs(),
        "exp": lambda m, x: torch.exp(x),
        "multiplied": lambda m, x: F.softmax(x @ x.transpose(-1, -2), -1) @ x,
        "samples of a batch": lambda m, x: x - x.mean(0),
        "batch": lambda m, x: x.reshape(-1),
        "it returns": lambda m, x: torch.cat([x, x]),
        "decides by a value": lambda m, x: x if x.sum() > 0 else -x,
        "random": lambda m, x: x + torch.randn(3, 6, 6),
        "random numbers": lambda m, x: F.dropout(x, 0.5, True),
        "jumps": lambda m, x: x.max(1)[1],
    }
    for message, function in refused.items():
        with pytest.raises(NoRuleError, match=message):
            bound(function)


def test_batch_on_another_axis_is_named():
    with pytest.raises(NoRuleError, match="first axis of inputs and outputs must be the batch"):
        bound(lambda m, x: x.transpose(0, 1), (3,))


class Unknown(nn.Module):
    def forward(self, x):
        return torch.exp(x)


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(6), nn.GroupNorm(1, 3), nn.RMSNorm(6), nn.Threshold(0.1, 0), nn.GLU(), Unknown()],
    ids=repr,
)
def test_errors_name_the_module_and_the_way_out(module):
    model = nn.Sequential(nn.Identity(), nn.Sequential(module))
    with pytest.raises(NoRuleError, match=type(module).__name__) as caught:
        ts.lipschitz_bound(model, (3, 6))
    assert "1.0" in str(caught.value)
    assert f"trysquare.lipschitz.rule({type(module).__name__})" in str(caught.value)


def test_attention_raises():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, x):
            return self.attend(x, x, x)[0]

    with pytest.raises(NoRuleError, match="MultiheadAttention at 'attend'"):
        ts.lipschitz_bound(Attention(), (3, 4))


def test_registered_rules_are_used_also_for_subclasses_but_not_if_they_override_forward():
    class Scale(nn.Module):
        def forward(self, x, y):
            return torch.exp(x.clamp(max=0)) + y

    class Same(Scale):
        pass

    class Other(Scale):
        def forward(self, x, y):
            return torch.exp(10 * x) + y

    @ts.lipschitz.rule(Scale)
    def scale(layer, first, second):
        assert first == second == (4,)
        return 2.0, 3.0

    class Net(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x, 2 * x)

    assert ts.lipschitz_bound(Net(Same()), (4,)) == pytest.approx(8)
    with pytest.raises(NoRuleError, match="exp"):
        ts.lipschitz_bound(Net(Other()), (4,))

    class Negative(Unknown):
        pass

    ts.lipschitz.rule(Negative)(lambda layer, shape: -1.0)
    with pytest.raises(ValueError, match="not a Lipschitz constant"):
        ts.lipschitz_bound(nn.Sequential(Negative()), (4,))


def test_standardised_convolutions_are_followed_into():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, 5 * self.weight, self.bias, self.stride, self.padding)

    layer = Standardised(2, 2, 3, padding=1)
    plain = nn.Conv2d(2, 2, 3, padding=1)
    plain.weight.data.copy_(5 * layer.weight)
    assert ts.lipschitz_bound(layer, (2, 5, 5)) == pytest.approx(ts.spectral_norm_bound(plain, (2, 5, 5)))


def test_operations_in_place_change_every_name_of_the_memory():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 1
            z = y.view(x.shape)
            y.mul_(3)
            return z

    assert ts.lipschitz_bound(InPlace(), (4,)) == pytest.approx(3)


def test_embedding_is_the_norm_of_its_table():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    top = float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))
    assert ts.lipschitz_bound(model, (3,)) == pytest.approx(top * ts.spectral_norm_bound(model[2]), rel=1e-5)


def test_modes_hooks_shapes_and_weights():
    with pytest.raises(NoRuleError, match=r"model\.eval"):
        ts.lipschitz_bound(nn.Sequential(nn.BatchNorm1d(3)), (3,))
    with pytest.raises(NoRuleError, match=r"model\.eval"):
        ts.lipschitz_bound(nn.Sequential(nn.Dropout()), (3,))
    with pytest.raises(NoRuleError, match="running statistics"):
        ts.lipschitz_bound(nn.InstanceNorm1d(3).eval(), (3, 5))
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, args, output: 100 * output)
    plain = float(torch.linalg.matrix_norm(hooked[0].weight.detach(), 2))
    assert ts.lipschitz_bound(hooked, (3,)) == pytest.approx(100 * plain, rel=1e-5)
    with pytest.raises(ValueError, match=r"Linear at '0' does not accept an input of shape \(4,\)"):
        ts.lipschitz_bound(nn.Sequential(nn.Linear(3, 3)), (4,))
    with pytest.raises(ValueError, match="positive integers"):
        ts.lipschitz_bound(nn.Linear(3, 3), ())
    broken = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    broken[1].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"Linear at '1'.*not finite"):
        ts.lipschitz_bound(broken, (3,))


def test_bound_is_above_the_lower_bound_on_networks():
    for _ in range(3):
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 4, 5)
        ).eval()
        upper = ts.lipschitz_bound(model, (3, 8, 8))
        lower = ts.lipschitz_lower_bound(model, torch.randn(4, 3, 8, 8))
        assert 0 < lower <= upper
    tight = nn.Sequential(ts.OrthoConv2d(3, 12, 2, stride=2), nn.Flatten(), ts.OrthoLinear(192, 192))
    assert ts.lipschitz_lower_bound(tight, torch.randn(1, 3, 8, 8)) == pytest.approx(
        ts.lipschitz_bound(tight, (3, 8, 8)), rel=1e-5
    )


def test_lower_bound_is_the_jacobian_norm_and_climbs():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = 4 * torch.randn(1, 3, dtype=torch.float64)
    still = ts.lipschitz_lower_bound(model, x, power_steps=100, ascent_steps=0)
    assert still == pytest.approx(jacobian_norm(model, x[0]), rel=1e-6)
    assert ts.lipschitz_lower_bound(model, x, ascent_steps=30) > still
    assert ts.lipschitz_lower_bound(model, x, ascent_steps=30, seconds=0.0) >= still * 0.5
    with pytest.raises(ValueError, match="at least one sample"):
        ts.lipschitz_lower_bound(model, torch.zeros(0, 3))
    with pytest.raises(ValueError, match="not finite"):
        ts.lipschitz_lower_bound(model, torch.full((1, 3), math.nan))


def test_a_resnet_is_followed():
    model = resnet18(width=4, classes=5).eval()
    assert ts.lipschitz_lower_bound(model, torch.randn(1, 3, 32, 32), ascent_steps=1) < ts.lipschitz_bound(
        model, (3, 32, 32)
    )
