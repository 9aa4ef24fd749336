"""The layers are torch's layers in every respect that people rely on."""

import copy
import inspect
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import trysquare as ts
from tests.oracle import distance_from_orthogonal


def assert_cached(layer):
    with torch.no_grad():
        assert layer.weight is layer.weight


def fresh(layer):
    """The weight, computed from scratch."""
    return layer.parametrization.build(*(t.detach() for t in layer.free_tensors))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ts.OrthoConv1d(2, 4, 3), nn.Conv1d), (ts.OrthoConv2d(2, 4, 3), nn.Conv2d),
        (ts.OrthoConv3d(2, 4, 3), nn.Conv3d), (ts.OrthoConvTranspose1d(4, 2, 3), nn.ConvTranspose1d),
        (ts.OrthoConvTranspose2d(4, 2, 3), nn.ConvTranspose2d),
        (ts.OrthoConvTranspose3d(4, 2, 3), nn.ConvTranspose3d), (ts.OrthoLinear(4, 2), nn.Linear),
    ],
)  # fmt: skip
def test_is_a_torch_layer(ours, theirs):
    assert isinstance(ours, theirs)
    assert parametrize.is_parametrized(ours, "weight")
    assert ours.weight.is_contiguous()


def test_arguments_are_positional_as_in_torch():
    ours = ts.OrthoConv2d(4, 8, 3, 2, 1, 1, 2, False, "zeros", "cpu", torch.float64)
    theirs = nn.Conv2d(4, 8, 3, 2, 1, 1, 2, False, "zeros", "cpu", torch.float64)
    for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "bias"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.weight.shape == theirs.weight.shape
    up = ts.OrthoConvTranspose2d(8, 4, 3, 2, 1, 1, 2, False, 1, "zeros")
    torch_up = nn.ConvTranspose2d(8, 4, 3, 2, 1, 1, 2, False, 1, "zeros")
    torch_up.weight.data.copy_(up.weight)
    x = torch.randn(1, 8, 5, 5)
    torch.testing.assert_close(up(x), torch_up(x))
    torch.testing.assert_close(up(x, output_size=[9, 9]), torch_up(x, output_size=[9, 9]))
    with pytest.raises(ValueError, match="output_size"):
        up(x, output_size=[12, 12])
    with pytest.raises(ValueError, match="output_size"):
        ts.OrthoConvTranspose2d(8, 4, 3, 2)(x, output_size=[9, 9])


def test_unbatched_inputs_and_devices():
    x = torch.randn(4, 6, 6)
    assert ts.OrthoConv2d(4, 8, 3, stride=2)(x).shape == (8, 3, 3)
    assert ts.OrthoConvTranspose2d(4, 2, 3, stride=2)(x).shape == (2, 12, 12)
    meta = ts.OrthoConv2d(4, 8, 3, device="meta")
    assert meta.weight.device.type == "meta"
    assert meta(torch.empty(2, 4, 6, 6, device="meta")).shape == (2, 8, 6, 6)
    filled = meta.to_empty(device="cpu")
    filled.reset_parameters()
    assert distance_from_orthogonal(filled, (4, 4, 4)) < 1e-5


@pytest.mark.parametrize("make", [lambda: ts.OrthoConv2d(4, 8, 3, stride=2), lambda: ts.OrthoLinear(6, 6)])
class TestCache:
    def test_built_once_in_eval_without_grad(self, make, monkeypatch):
        layer = make().eval()
        calls = []
        build = layer.parametrization.build
        monkeypatch.setattr(layer.parametrization, "build", lambda *a: calls.append(1) or build(*a))
        x = torch.randn(1, *((4, 6, 6) if layer.weight.ndim == 4 else (6,)))
        calls.clear()
        with torch.no_grad():
            for _ in range(5):
                layer(x)
        assert len(calls) == 1
        with torch.inference_mode():
            layer(x)
        assert len(calls) == 1
        layer(x).sum().backward()
        assert len(calls) == 2
        assert layer.free_tensors[0].grad is not None
        layer.requires_grad_(False)
        layer(x)
        layer(x)
        assert len(calls) == 2

    @pytest.mark.parametrize(
        "edit",
        [
            "step", "fused", "load", "double", "copy", "train", "data", "swap", "set", "assign", "reset",
        ],
    )  # fmt: skip
    def test_never_stale(self, make, edit):
        layer, other = make().eval(), make()
        with torch.no_grad():
            before = layer.weight.clone()
            assert_cached(layer)
        first = layer.free_tensors[0]
        fresh_values = torch.randn_like(first)
        if edit in ("step", "fused"):
            optimizer = torch.optim.SGD(layer.parameters(), 1.0, fused=edit == "fused")
            layer.weight.square().mul(torch.randn_like(layer.weight)).sum().backward()
            optimizer.step()
        elif edit == "load":
            layer.load_state_dict(other.state_dict())
        elif edit == "double":
            layer.double()
            assert layer.weight.dtype == torch.float64
        elif edit == "copy":
            with torch.no_grad():
                first.copy_(fresh_values)
        elif edit == "train":
            layer.train()
            first.data.copy_(fresh_values)
            layer.eval()
        elif edit == "data":
            first.data = fresh_values
        elif edit == "swap":
            layer.parametrizations.weight.original0 = nn.Parameter(fresh_values)
        elif edit == "set":
            with torch.no_grad():
                first.set_(fresh_values)
        elif edit == "assign":
            layer.weight = other.weight.detach()
        elif edit == "reset":
            layer.reset_parameters()
        with torch.no_grad():
            after = layer.weight
            torch.testing.assert_close(after, fresh(layer).to(after.dtype))
            x = torch.randn(1, *((4, 6, 6) if after.ndim == 4 else (6,)), dtype=after.dtype)
            if edit != "double":
                assert not torch.allclose(after, before)
                torch.testing.assert_close(layer(x), ts.to_torch(layer)(x))

    def test_memory_reuse_is_not_mistaken_for_sameness(self, make):
        layer = make().eval()
        first = layer.free_tensors[0]
        with torch.no_grad():
            for _ in range(20):
                first.data = torch.randn_like(first)
                torch.testing.assert_close(layer.weight, fresh(layer))

    def test_writing_into_the_cached_weight_does_not_stay(self, make):
        layer = make().eval()
        with torch.no_grad():
            layer.weight.zero_()
            with pytest.raises(RuntimeError, match="no effect"):
                layer.weight  # noqa: B018
            torch.testing.assert_close(layer.weight, fresh(layer))

    def test_inference_mode_then_gradients_of_the_input(self, make):
        layer = make().eval().requires_grad_(False)
        x = torch.randn(1, *((4, 6, 6) if layer.weight.ndim == 4 else (6,)))
        with torch.inference_mode():
            layer(x)
        layer(x.requires_grad_()).sum().backward()
        assert x.grad.isfinite().all()

    def test_other_parametrizations_are_respected(self, make):
        class Double(nn.Module):
            def forward(self, weight):
                return 2 * weight

        layer = make().eval()
        layer.bias.data.zero_()
        x = torch.randn(1, *((4, 6, 6) if layer.weight.ndim == 4 else (6,)))
        with torch.no_grad():
            once = layer(x)
            parametrize.register_parametrization(layer, "weight", Double())
            torch.testing.assert_close(layer(x), 2 * once)
            parametrize.remove_parametrizations(layer, "weight")
            layer.weight.mul_(3)
            torch.testing.assert_close(layer(x), 6 * once)
        assert "orthogonalizer=cholesky" in repr(layer)

    def test_training_mode_does_not_cache(self, make):
        layer = make()
        with torch.no_grad():
            assert layer.weight is not layer.weight


def test_state_dict_round_trip_and_names():
    layer, other = ts.OrthoConv2d(4, 8, 3), ts.OrthoConv2d(4, 8, 3)
    state = layer.state_dict()
    assert set(state) == {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(layer.weight, other.weight)


def test_deepcopy_is_independent():
    layer = ts.OrthoConv2d(4, 4, 3).eval()
    with torch.no_grad():
        before = layer.weight.clone()
        twin = copy.deepcopy(layer)
        assert torch.equal(twin.weight, before)
        twin.free_tensors[0].normal_()
        assert torch.equal(layer.weight, before)
        assert not torch.allclose(twin.weight, before)
        torch.testing.assert_close(twin.weight, fresh(twin))
        x = torch.randn(1, 4, 4, 4)
        torch.testing.assert_close(twin(x), ts.to_torch(twin)(x))


def test_parametrize_cached():
    layer = ts.OrthoConv2d(4, 4, 3)
    with parametrize.cached():
        assert layer.weight is layer.weight


def test_functional_call_uses_the_given_tensors():
    layer = ts.OrthoConv2d(4, 4, 3).eval()
    x = torch.randn(1, 4, 5, 5)
    with torch.no_grad():
        layer(x)
    given = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    other = ts.OrthoConv2d(4, 4, 3)
    other.load_state_dict(given)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            torch.testing.assert_close(torch.func.functional_call(layer, given, (x,)), other(x))

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    gradients = torch.func.grad(loss)(given)
    other(x).square().sum().backward()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "layer", [ts.OrthoConv2d(4, 8, 3, stride=2), ts.OrthoConvTranspose2d(4, 2, 3), ts.OrthoLinear(8, 8)]
)
def test_compiles_in_training_without_graph_breaks(layer):
    layer = copy.deepcopy(layer)
    x = torch.randn(2, *((4, 6, 6) if layer.weight.ndim == 4 else (8,)))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)
    compiled(x).square().sum().backward()
    got = [t.grad.clone() for t in layer.free_tensors]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for gradient, tensor in zip(got, layer.free_tensors, strict=True):
        torch.testing.assert_close(gradient, tensor.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        ts.OrthoConv2d(6, 6, 3), ts.OrthoConv2d(5, 5, 2), ts.OrthoConv2d(3, 8, 3), ts.OrthoConv2d(8, 3, 3),
        ts.OrthoConv2d(4, 16, 3, stride=2), ts.OrthoConv2d(4, 6, 3, stride=2), ts.OrthoConv2d(2, 12, 3, stride=2),
        ts.OrthoConv2d(8, 8, 3, groups=2), ts.OrthoConv1d(6, 6, 5), ts.OrthoConv3d(4, 4, 2),
        ts.OrthoConv2d(8, 4, 1, stride=2), ts.OrthoConvTranspose2d(16, 4, 3, stride=2),
        ts.OrthoConv2d(1, 4, 3, stride=2), ts.OrthoLinear(5, 8), ts.OrthoLinear(8, 8),
        # More outputs than the stride's patches have numbers: the kernel is a part of a larger one.
        ts.OrthoConv2d(3, 32, 3, stride=2), ts.OrthoConv2d(3, 64, 2, stride=2), ts.OrthoConv2d(3, 64, 3, stride=2),
        ts.OrthoConv1d(4, 20, 3, stride=2, groups=2), ts.OrthoConvTranspose2d(20, 3, 3, stride=2),
        *(ts.OrthoConv2d(4, 4, 2, orthogonalizer=name) for name in ts.linalg.ORTHOGONALIZERS),
        *(ts.OrthoLinear(8, 5, orthogonalizer=name) for name in ts.linalg.ORTHOGONALIZERS),
    ],
    ids=repr,
)  # fmt: skip
def test_assigning_its_own_output_gives_it_back(layer):
    layer = copy.deepcopy(layer)
    wanted = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.allclose(layer.weight, wanted, atol=1e-3)
    layer.weight = wanted
    torch.testing.assert_close(layer.weight, wanted, atol=1e-5, rtol=0)


def test_assigning_what_it_has_and_another_dtype():
    layer = ts.OrthoConv2d(16, 128, 3, stride=2)
    before = [tensor.detach().clone() for tensor in layer.free_tensors]
    layer.weight = layer.weight.detach().clone()
    assert all(map(torch.equal, before, layer.free_tensors))
    double = ts.OrthoConv2d(4, 4, 3, dtype=torch.float64)
    wanted = ts.OrthoConv2d(4, 4, 3).weight.detach()
    double.weight = wanted
    torch.testing.assert_close(double.weight.float(), wanted, atol=1e-5, rtol=0)


def test_torch_init_functions():
    layer = ts.OrthoConv2d(6, 6, 3)
    identity = nn.init.dirac_(torch.empty(6, 6, 3, 3))
    layer.weight = identity
    torch.testing.assert_close(layer.weight, identity, atol=1e-5, rtol=0)
    x = torch.randn(1, 6, 5, 5)
    torch.testing.assert_close(layer(x) - layer.bias.view(-1, 1, 1), x, atol=1e-5, rtol=0)
    for tensor in layer.free_tensors:
        nn.init.normal_(tensor)
    assert distance_from_orthogonal(layer, (6, 4, 4)) < 1e-5
    linear = ts.OrthoLinear(6, 4)
    linear.weight = nn.init.orthogonal_(torch.empty(4, 6))
    assert distance_from_orthogonal(linear, (6,)) < 1e-5


def test_assignment_refuses_what_it_cannot_reach():
    layer = ts.OrthoConv2d(4, 4, 3)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match="not orthogonal"):
        layer.weight = torch.randn(4, 4, 3, 3)
    with pytest.raises(ValueError, match=r"\(4, 4, 3\)"):
        layer.weight = torch.randn(4, 4, 3)
    with pytest.raises(ValueError, match="not finite"):
        layer.weight = torch.full((4, 4, 3, 3), torch.nan)
    assert torch.equal(layer.weight, before)


def test_repr_shows_method_and_geometry():
    text = repr(ts.OrthoConv2d(4, 8, 3, stride=2, groups=2))
    assert text.startswith("OrthoConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2)")
    assert "\n" not in text
    for part in ("groups=2", "method=aoc", "padding_mode=circular", "orthogonalizer=cholesky"):
        assert part in text
    assert "padding_mode=circular" in repr(ts.OrthoConvTranspose1d(4, 4, 3))
    assert (
        repr(ts.OrthoLinear(3, 2)) == "OrthoLinear(in_features=3, out_features=2, bias=True, orthogonalizer=cholesky)"
    )
    assert "parsimonious" in repr(ts.OrthoConv2d(4, 4, 3, stride=2, parsimonious=True))


def test_integers_of_numpy_and_lists():
    layer = ts.OrthoConv2d(np.int64(4), np.int64(8), [np.int64(3), 2], stride=np.int32(1))
    assert layer.weight.shape == (8, 4, 3, 2)
    assert "np" not in repr(layer)
    with pytest.raises(ValueError, match="floating point"):
        ts.OrthoConv2d(4, 8, 3, dtype=torch.complex64)


def test_ensembles_with_vmap():
    models = [nn.Sequential(ts.OrthoConv2d(4, 8, 3)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 4, 6, 6)

    def run(parameters, buffers):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    outputs = torch.vmap(run)(parameters, buffers)
    for model, output in zip(models, outputs, strict=True):
        torch.testing.assert_close(output, model(x), atol=1e-5, rtol=0)
    gradients = torch.func.grad(lambda p: torch.vmap(run)(p, buffers).square().sum())(parameters)
    models[1](x).square().sum().backward()
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(gradients[name][1], parameter.grad, atol=1e-4, rtol=1e-3)


def test_compiles_with_dynamic_shapes():
    layer = ts.OrthoConv2d(4, 8, 3, stride=2)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    for size in (6, 8):
        x = torch.randn(2, 4, size, size)
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ts.linalg.ORTHOGONALIZERS)
def test_ensembles_with_every_orthogonalizer(name):
    matrices = torch.randn(3, 4, 6)
    apply = ts.linalg.orthogonalizer(name).apply
    torch.testing.assert_close(torch.vmap(apply)(matrices), apply(matrices), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_assigning_in_half_precision(dtype):
    layer = ts.OrthoConv2d(4, 4, 3, dtype=dtype)
    wanted = layer.weight.detach().clone()
    layer.reset_parameters()
    layer.weight = wanted
    torch.testing.assert_close(layer.weight, wanted, atol=2 * torch.finfo(dtype).eps, rtol=0)


def test_memory_formats_leave_free_tensors_alone():
    for layer, memory_format in (
        (ts.OrthoConv2d(8, 8, 3, groups=2), torch.channels_last),
        (ts.OrthoConv3d(8, 8, 2), torch.channels_last_3d),
    ):
        layer.to(memory_format=memory_format)
        assert all(tensor.is_contiguous() for tensor in layer.state_dict().values())


def test_errors_of_transposed_layers_use_their_own_names():
    with pytest.raises(ValueError, match=r"lower in_channels to at most 4, or raise kernel_size"):
        ts.OrthoConvTranspose2d(8, 4, 1, stride=2)
    with pytest.raises(ValueError, match="in_channels=0"):
        ts.OrthoConvTranspose2d(0, 4, 3)
    with pytest.raises(ValueError, match="out_channels=4 must be divisible"):
        ts.OrthoConvTranspose2d(6, 4, 3, groups=3)


def test_bad_inputs_are_named_before_any_work():
    layer, up = ts.OrthoConv2d(4, 4, 3), ts.OrthoConvTranspose2d(4, 4, 3)
    for shape in ((4, 4), (1, 1, 4, 4, 4), (1, 4, 0, 4)):
        for module in (layer, up):
            with pytest.raises(ValueError, match=r"and 2 sizes"):
                module(torch.zeros(shape))
    with pytest.raises(ValueError, match="must have 2 sizes"):
        up(torch.zeros(1, 4, 4, 4), output_size=[4])
    with pytest.raises(ValueError, match="padding"):
        ts.OrthoConv2d(4, 4, 3, padding=np.array([1, 1]))
    with pytest.raises(ValueError, match="orthogonalizer"):
        ts.OrthoConv2d(4, 4, 3, orthogonalizer=["qr"])
    with pytest.raises(ValueError, match="drops outputs"):
        ts.OrthoConv1d(4, 4, 3, padding=0).adjoint()
    with pytest.raises(ValueError, match="reaches the stride"):
        ts.OrthoConvTranspose1d(4, 4, 3, padding=0, output_padding=1, dilation=2, padding_mode="zeros").adjoint()
    with pytest.raises(ValueError, match=r"nothing to learn.*parsimonious"):
        ts.OrthoConv1d(1, 1, 3, stride=2, parsimonious=True)


def test_torch_s_own_forward_and_output_padding_up_to_the_dilation():
    layer = ts.OrthoConv2d(4, 8, 3)
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(nn.Conv2d.forward(layer, x), layer(x))
    up = ts.OrthoConvTranspose1d(4, 4, 3, padding=0, output_padding=1, dilation=2, padding_mode="zeros")
    plain = nn.ConvTranspose1d(4, 4, 3, output_padding=1, dilation=2)
    plain.load_state_dict({"weight": up.weight.detach(), "bias": up.bias.detach()})
    y = torch.randn(1, 4, 5)
    torch.testing.assert_close(up(y), plain(y))
    assert "-1" not in repr(ts.OrthoConvTranspose2d(4, 4, 2))


def test_bias_can_be_left_out():
    assert ts.OrthoConv2d(4, 4, 3, bias=False).bias is None
    assert ts.OrthoConvTranspose2d(4, 4, 3, bias=False)(torch.randn(1, 4, 4, 4)).shape == (1, 4, 4, 4)
    with pytest.raises(ValueError, match="in_features=0"):
        ts.OrthoLinear(0, 4)
    with pytest.raises(ValueError, match="has no effect"):
        ts.OrthoConvTranspose2d(4, 4, 3, output_padding=1)
    with pytest.raises(ValueError, match="smaller than stride"):
        ts.OrthoConvTranspose2d(4, 4, 3, padding=1, output_padding=1)


def test_gradient_penalty_works():
    critic = nn.Sequential(ts.OrthoConv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), ts.OrthoLinear(64, 1))
    x = torch.randn(3, 2, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    (gradient.flatten(1).norm(dim=1) - 1).square().mean().backward()
    assert critic[0].free_tensors[0].grad.isfinite().all()


LAYERS = [
    layer for layer in vars(ts).values()
    if isinstance(layer, type) and issubclass(layer, nn.Module) and "dtype" in inspect.signature(layer).parameters
]  # fmt: skip
ARGUMENTS = {
    "branch": nn.Identity(), "in_channels": 4, "out_channels": 4, "channels": 4, "kernel_size": 3, "in_features": 4,
    "out_features": 4, "features": 4, "num_features": 4, "input_size": 4, "hidden_size": 4, "shape": (4,), "mean": 0.0,
    "std": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_every_layer_refuses_a_dtype_without_real_numbers(layer, dtype):
    wanted = [p for p in inspect.signature(layer).parameters.values() if p.default is p.empty and p.kind < 2]
    given = [ARGUMENTS[p.name] for p in wanted]
    assert isinstance(layer(*given, dtype=torch.float64), layer)
    with pytest.raises(ValueError, match="must be a real floating point type"):
        layer(*given, dtype=dtype)
