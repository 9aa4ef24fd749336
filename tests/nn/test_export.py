import copy
import warnings

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.nn.export import with_fixed_weights

LAYERS = [
    (ts.OrthoConv1d(4, 8, 4), (4, 9)),
    (ts.OrthoConv2d(4, 8, 3, stride=2), (4, 6, 6)),
    (ts.OrthoConv2d(4, 8, (2, 3), stride=(1, 2)), (4, 6, 6)),
    (ts.OrthoConv2d(4, 8, (2, 3), stride=(1, 2), padding_mode="zeros"), (4, 6, 6)),
    (ts.OrthoConv2d(4, 8, 4, padding_mode="zeros"), (4, 6, 6)),
    (ts.OrthoConv3d(2, 4, 2), (2, 4, 4, 4)),
    (ts.OrthoConvTranspose1d(4, 8, 4), (4, 9)),
    (ts.OrthoConvTranspose2d(8, 4, 3, stride=2), (8, 4, 4)),
    (ts.OrthoConvTranspose2d(8, 4, (4, 5), stride=(2, 1), padding_mode="zeros"), (8, 4, 4)),
    (ts.OrthoConvTranspose2d(2, 6, (2, 2), stride=(1, 3), dilation=(3, 1), groups=2, padding_mode="zeros"), (2, 3, 3)),
    (ts.OrthoConvTranspose3d(4, 2, 2), (4, 4, 4, 4)),
    (ts.OrthoLinear(6, 3), (6,)),
]


def plain_only(model):
    return all(type(m).__module__.startswith("torch.nn") for m in model.modules())


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: repr(v)[:60])
def test_same_function_in_plain_layers(layer, shape):
    layer = copy.deepcopy(layer)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    plain = ts.to_torch(layer)
    assert plain_only(plain)
    x = torch.randn(2, *shape)
    torch.testing.assert_close(plain(x), layer(x), atol=1e-5, rtol=0)
    assert all(torch.equal(state[name], t) for name, t in layer.state_dict().items())
    assert type(layer).__name__.startswith("ParametrizedOrtho")


def test_inverses_and_frozen_layers():
    squeeze = ts.OrthoConv2d(4, 16, 2, stride=2)
    model = nn.Sequential(squeeze, squeeze.inverse()).requires_grad_(False)
    plain = ts.to_torch(model)
    assert plain_only(plain)
    assert not any(p.requires_grad for p in plain.parameters())
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(plain(x), x, atol=1e-5, rtol=0)


class Network(nn.Module):
    """Plain Python, a layer used twice, a transposed layer."""

    def __init__(self):
        super().__init__()
        self.down = ts.OrthoConv2d(4, 8, 4, stride=2)
        self.mix = ts.OrthoConv2d(8, 8, 3)
        self.up = ts.OrthoConvTranspose2d(8, 4, 4, stride=2)
        self.head = ts.OrthoLinear(256, 10)

    def forward(self, x):
        y = self.mix(self.mix(self.down(x)).relu())
        return self.head(self.up(y).flatten(1))


def test_networks_torch_export_and_onnx(tmp_path):
    import onnxruntime

    model = Network().eval()
    plain = ts.to_torch(model)
    x = torch.randn(2, 4, 8, 8)
    expected = model(x).detach()
    torch.testing.assert_close(plain(x), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.export.export(plain, (x,)).module()(x), expected, atol=1e-5, rtol=0)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about torch
        torch.onnx.export(plain, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), expected, atol=1e-5, rtol=0)


def fixed_models():
    shared = ts.OrthoLinear(8, 8)
    return [
        (nn.Sequential(ts.OrthoConv2d(4, 8, 3, stride=2), ts.MaxMin(), ts.OrthoConvTranspose2d(8, 4, 3)), (4, 6, 6)),
        (nn.Sequential(ts.SLLBlock2d(4, 8, 3), ts.CPLBlock2d(4, 8, 3), ts.SLLAOCBlock2d(4, 4, 3)), (4, 6, 6)),
        (nn.Sequential(ts.SandwichAOCConv2d(4, 4, 3), ts.DepthwiseResidualBlock2d(4)), (4, 6, 6)),
        (nn.Sequential(ts.FourierOrthoConv2d(4, 4, 3), nn.Flatten(), ts.UnitNormLinear(144, 3)), (4, 6, 6)),
        (nn.Sequential(shared, nn.ReLU(), shared, ts.SandwichLinear(8, 8)), (8,)),
        (nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), (8,)),
    ]


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fixed_weights_are_the_same_function_bit_for_bit(case, dtype):
    model, shape = fixed_models()[case]
    model = model.to(dtype).eval()
    x = torch.randn(2, *shape, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
    names = list(model.state_dict())
    fixed = with_fixed_weights(model)
    assert torch.equal(fixed(x), expected)
    assert not any(parameter.requires_grad for parameter in fixed.parameters())
    wide = fixed.double()(x.double())
    assert (wide - expected).abs().max() < (0.3 if dtype == torch.bfloat16 else 1e-5)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    model.train()(x).square().sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
