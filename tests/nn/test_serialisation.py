"""Every layer survives copies, pickles, files and tracers as the same function, and as plain torch."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel

import trysquare as ts
from tests.nn import plain_models
from tests.nn.test_export import LAYERS
from tests.resnet import resnet18
from tests.verify.lipschitz.test_ours import CASES
from trysquare.nn.layers import calls

safetensors = pytest.importorskip("safetensors.torch", reason="the extra of training is not installed")

EVERY = {name: (make, shape) for name, (make, shape, _) in CASES.items() if not name.startswith("amplifying")}
for _i, (_layer, _shape) in enumerate(LAYERS):
    EVERY[f"{_i}, {_layer}"[:40]] = (partial(copy.deepcopy, _layer), _shape)
EVERY |= {
    "OrthoLinearTranspose": (lambda: ts.OrthoLinear(4, 6).adjoint(), (6,)),
    "soc": (lambda: ts.OrthoConv2d(4, 4, 3, method="soc", terms=3), (4, 8, 8)),
    "bro": (lambda: ts.OrthoConv2d(4, 4, 3, method="bro"), (4, 4, 4)),
    "aol": (lambda: ts.OrthoConv2d(4, 4, 3, method="aol"), (4, 4, 4)),
    "rko": (lambda: ts.OrthoConv2d(4, 4, 3, method="rko"), (4, 4, 4)),
    "LastState, tanh": (lambda: ts.LastState(ts.OrthoRNN(4, 6, 2, batch_first=True)), (5, 4)),
    "Householder, order 1": (lambda: ts.Householder(4, dim=-1), (3, 4)),
    "GlobalMaxPool, flat": (lambda: ts.GlobalMaxPool(keepdim=False), (4, 3)),
    "LayerCentering, channels": (lambda: ts.LayerCentering(4, per_channel=True), (4, 3, 3)),
    "LastAxesCentering": (lambda: calls.LastAxesCentering((4, 3)), (2, 4, 3)),
    "GroupCentering": (lambda: calls.GroupCentering(2, 4), (4, 3, 2)),
    "BoundedScale": (lambda: calls.BoundedScale(torch.tensor([0.5, 2.0])), (3, 2)),
    "ScaledMean": (lambda: calls.ScaledMean((2,), keepdim=True), (3, 2)),
    "Divided": (lambda: calls.Divided(nn.SiLU(), 1.1), (3, 2)),
}  # fmt: skip


@pytest.fixture(params=EVERY)
def case(request):
    torch.manual_seed(0)
    make, shape = EVERY[request.param]
    layer = make().eval()
    with torch.no_grad():  # centerings that are not at their start
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if name.endswith(("bias", "running_mean")):
                tensor.normal_()
    return layer, torch.randn(2, *shape)


def assert_same_function(other, layer, x):
    with torch.no_grad():
        torch.testing.assert_close(other(x), layer(x), atol=2e-6, rtol=1e-5)


def assert_trains_alone(twin, layer, x):
    """Its free tensors are those that its weights are built from, and not those of the other one."""
    parameters = [p for p in twin.parameters() if p.is_floating_point()]
    if not parameters or type(layer).__name__ == "InvertibleSequential":
        return
    before, shared = layer(x).detach(), {p.data_ptr() for p in layer.parameters()}
    assert not shared & {p.data_ptr() for p in parameters}
    optimizer = torch.optim.SGD(parameters, 0.1)
    twin.train()(x).sin().sum().backward()
    optimizer.step()
    assert (twin.eval()(x) - before).abs().max() > 1e-6
    assert torch.equal(layer(x), before)


def test_pickles(case):
    layer, x = case
    with torch.no_grad():
        layer(x)  # with a weight in the cache, which stays behind
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False), copy.deepcopy(layer)):
        assert type(twin).__name__ == type(layer).__name__
        assert repr(twin) == repr(layer)
        assert list(twin.state_dict()) == list(layer.state_dict())
        assert_same_function(twin, layer, x)
        assert_trains_alone(twin, layer, x)


def test_states(case):
    layer, x = case
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    content = safetensors.save(layer.state_dict())  # which refuses tensors that share memory
    for state in (safetensors.load(content), torch.load(buffer, weights_only=True)):
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.5).add_(0.1)
        twin.load_state_dict(state)
        assert_same_function(twin, layer, x)


def test_averages(case):
    layer, x = case
    if not list(layer.parameters()):
        return
    average = AveragedModel(layer, use_buffers=True)
    average.update_parameters(layer)
    average.update_parameters(layer)
    assert_same_function(average, layer, x)


def test_torch_func(case):
    layer, x = case
    parameters = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(layer, parameters, (x,)), layer(x))
    gradients = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sin().sum())(parameters)
    assert gradients.keys() == parameters.keys()
    each = torch.func.vmap(lambda sample: layer(sample.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(each, layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's tracer warns of every look at a shape
def test_traces(case):
    layer, x = case
    assert_same_function(torch.jit.trace(layer, x), layer, x)
    assert_same_function(torch.export.export(layer, (x,)).module(), layer, x)


def plain_of(layer, x):
    at_size = getattr(layer, "at_size", None)
    return at_size(*x.shape[2:]) if at_size else ts.to_torch(layer)


def is_of_torch(module):
    return all(cls.__module__.split(".")[0] in ("torch", "builtins", "typing") for cls in type(module).__mro__)


@pytest.mark.filterwarnings("ignore")
def test_plain_torch(case, tmp_path):
    layer, x = case
    if isinstance(layer, ts.AdjointResidual) and "Fourier" in repr(layer):
        pytest.skip("Fourier layers inside of others are for one size, layer.at_size")
    plain = plain_of(layer, x)
    if isinstance(layer, ts.LastState) and not isinstance(plain.rnn, nn.RNN):
        pytest.skip("torch has no recurrent layer with this nonlinearity")
    assert all(is_of_torch(module) for module in plain.modules())
    assert b"trysquare" not in pickle.dumps(plain)
    root = nn.Sequential(plain)  # torch's own layers are traced as a part of something
    for same in (
        plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain)), fx.symbolic_trace(root),
        torch.jit.trace(plain, x), torch.jit.script(plain), torch.export.export(root, (x,)).module(),
    ):  # fmt: skip
        assert_same_function(same, layer, x)
    assert_trains_alone(plain, layer, x)


ACTIVATIONS = [
    ts.MaxMin(), ts.MaxMin(halves=True), ts.MaxMin(-2), ts.GroupSort(2), ts.FullSort(), ts.Abs(), ts.Householder(4),
    ts.Householder(4, order=2), ts.NActivation(4),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_trace_by_themselves(activation):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), activation).eval(), torch.randn(2, 3, 6, 6)
    assert_same_function(fx.symbolic_trace(model), model, x)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: resnet18(width=8, classes=10), (3, 32, 32)),
        (lambda: plain_models.ConvNeXt((16, 32), (1, 2), 10), (3, 32, 32)),
        (plain_models.DenseNet, (3, 16, 16)),
        (plain_models.Functional, (3, 32, 32)),
        (lambda: plain_models.UNet(3, 2, 4), (3, 14, 12)),
        (plain_models.MaxFeatureMap, (3, 8, 8)),
    ],
    ids=["resnet18", "convnext", "densenet", "functional", "unet", "parts"],
)
@pytest.mark.filterwarnings("ignore")
def test_converted_models(make, shape):
    torch.manual_seed(0)
    model, x = ts.from_torch(make(), shape), torch.randn(4, *shape)
    with torch.no_grad():
        model(x)  # running means
    model.eval()
    twin = pickle.loads(pickle.dumps(model))
    assert str(twin.conversion) == str(model.conversion)
    for other in (twin, copy.deepcopy(model), copy.deepcopy(twin)):
        assert_same_function(other, model, x)
        assert ts.lipschitz_bound(other, shape) < 1.01
        assert_trains_alone(other, model, x)
    plain = ts.to_torch(model)
    assert all(is_of_torch(module) for module in plain.modules())
    torch.testing.assert_close(plain(x), model(x), atol=1e-5, rtol=1e-4)
    assert b"trysquare.nn.l" not in pickle.dumps(plain)
    assert_same_function(torch.jit.trace(plain, x), model, x)
    assert_same_function(fx.symbolic_trace(plain), model, x)
    assert_same_function(torch.jit.script(plain), model, x)


def in_worker(model, x, results):
    results.put(model(x).detach().numpy())


def test_spawned_workers():
    model, x = (
        nn.Sequential(ts.OrthoConv2d(3, 8, 3), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(128, 4)),
        torch.randn(2, 3, 4, 4),
    )
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=in_worker, args=(model, x, results))
    worker.start()
    found = torch.from_numpy(results.get(timeout=120))
    worker.join()
    torch.testing.assert_close(found, model(x))


def test_copies_within_a_block_and_of_adjoints():
    down = ts.OrthoConv2d(4, 16, 2, stride=2)
    model, x = nn.Sequential(down, ts.MaxMin(), down.adjoint()), torch.randn(2, 4, 6, 6)
    with ts.built(model):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model(x).sum().backward()
    for twin in twins:
        assert_same_function(twin, model, x)
        assert twin[0].free_tensors[0] is twin[2].free_tensors[0]
        with torch.no_grad():
            twin[0].free_tensors[0].normal_()
        torch.testing.assert_close(twin[2].weight, twin[0].weight)
        with ts.built(twin):
            twin(x).sum().backward()
        assert twin[0].free_tensors[0].grad is not None


def test_a_write_into_a_weight_is_not_lost_by_a_pickle():
    layer = ts.OrthoLinear(4, 4)
    with torch.no_grad():
        layer.weight.zero_()
    twin = pickle.loads(pickle.dumps(layer))
    with pytest.raises(RuntimeError, match="written to in place"):
        twin(torch.zeros(1, 4))


class Louder(ts.OrthoLinear):
    def forward(self, input):  # noqa: A002
        return 2 * super().forward(input)


class Quieter(ts.ConvexResidual):
    def forward(self, input):  # noqa: A002
        return super().forward(input) / 2


def test_classes_that_override_what_a_layer_computes():
    model, x = nn.Sequential(Louder(4, 4), Quieter(ts.OrthoLinear(4, 4))), torch.randn(2, 4)
    assert_same_function(pickle.loads(pickle.dumps(model)), model, x)
    plain = ts.to_torch(model)
    assert_same_function(plain, model, x)
    assert type(plain[1].branch) is nn.Linear
