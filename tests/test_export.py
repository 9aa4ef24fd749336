import copy
import warnings

import pytest
import torch
from torch import nn

import trysquare as ts

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
