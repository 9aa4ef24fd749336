import copy
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import trysquare as ts
from tests.jacobians import assert_isometric, assert_one_lipschitz


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 2), (3, 2, 2, 2)])
def test_batch_centering_takes_off_the_mean_of_the_batch(shape):
    layer, x = ts.BatchCentering(3), torch.randn(5, *shape) + 4
    axes = (0, *range(2, x.ndim))
    y = layer(x)
    torch.testing.assert_close(y.mean(axes), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean(axes))
    assert_isometric(layer, shape)  # in eval
    layer.eval()
    torch.testing.assert_close(layer(x), x - layer.running_mean.view(-1, *(1,) * (x.ndim - 2)))


def test_batch_centering_in_training_is_a_projector_of_the_batch():
    layer = ts.BatchCentering(2).double()
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x), torch.randn(3, 2, 2, dtype=torch.float64))
    matrix = jacobian.reshape(12, 12)
    values = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(values, torch.tensor([1.0] * 10 + [0.0] * 2, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix @ matrix, matrix)


def test_running_mean_reloads_and_bias_is_added():
    layer = ts.BatchCentering(3)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(3):
        layer(torch.randn(8, 3, 4) + 1)
    assert set(layer.state_dict()) == {"bias", "running_mean", "num_batches_tracked"}
    fresh = ts.BatchCentering(3)
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 4)
    assert torch.equal(fresh.eval()(x), layer.eval()(x))
    assert int(fresh.num_batches_tracked) == 3
    torch.testing.assert_close(layer.train()(x).mean((0, 2)), layer.bias.detach())
    fresh.reset_parameters()
    assert torch.equal(fresh.eval()(x), x)


def test_mean_of_all_batches():
    layer, batches = ts.BatchCentering(3, momentum=None, bias=False), torch.randn(4, 6, 3)
    for batch in batches:
        layer(batch)
    torch.testing.assert_close(layer.running_mean, batches.mean((0, 1)))


def test_dtypes():
    for layer in (ts.BatchCentering(3), ts.LayerCentering(3)):
        x = torch.randn(4, 3, 5, dtype=torch.bfloat16)
        assert layer(x).dtype == torch.bfloat16
        assert copy.deepcopy(layer).bfloat16()(x).dtype == torch.bfloat16
        assert copy.deepcopy(layer).double()(x.double()).dtype == torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x.float())


@pytest.mark.parametrize(
    ("options", "shape", "axes"), [({}, (3, 4), (1, 2)), ({}, (6,), (1,)), ({"per_channel": True}, (2, 2, 3), (2, 3))]
)
def test_layer_centering(options, shape, axes):
    layer = ts.LayerCentering(shape[0], **options)
    x = torch.randn(2, *shape) + 3
    torch.testing.assert_close(layer(x), x - x.mean(axes, keepdim=True))
    assert assert_one_lipschitz(layer, shape) == pytest.approx(1)
    with torch.no_grad():
        layer.bias.fill_(2.0)
    torch.testing.assert_close(layer(x).mean(axes), torch.full_like(x.mean(axes), 2.0))
    layer.reset_parameters()
    assert layer.bias.abs().max() == 0


@pytest.mark.parametrize("layer", [ts.BatchCentering(3), ts.LayerCentering(3), ts.LayerCentering(3, bias=False)])
def test_gradcheck(layer):
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer.double(), x)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ts.BatchCentering(0), "num_features=0"),
        (lambda: ts.LayerCentering(0), "num_features=0"),
        (lambda: ts.BatchCentering(3)(torch.zeros(2, 4)), r"\(2, 4\) must be \(batch, 3"),
        (lambda: ts.LayerCentering(3)(torch.zeros(2, 4)), r"\(2, 4\) must be \(batch, 3"),
        (lambda: ts.LayerCentering(3, per_channel=True)(torch.zeros(2, 3)), "one value a channel"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def _rank(rank, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = torch.randn(6, 3, 4)
    # Batches of different sizes.
    x = (whole[:2] if rank == 0 else whole[2:]).clone().requires_grad_()
    layer = ts.BatchCentering(3)
    weights = torch.arange(72.0).view(6, 3, 4)
    y = layer(x)
    (y.square() * (weights[:2] if rank == 0 else weights[2:])).sum().backward()
    torch.save((y.detach(), x.grad, layer.state_dict()), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_agree_and_compute_what_one_process_would(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=2)
    (y0, g0, s0), (y1, g1, s1) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(s0[name], s1[name]) for name in s0)
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, requires_grad=True)
    single = ts.BatchCentering(3)
    y = single(x)
    (y.square() * torch.arange(72.0).view(6, 3, 4)).sum().backward()
    torch.testing.assert_close(torch.cat((y0, y1)), y.detach())
    torch.testing.assert_close(torch.cat((g0, g1)), x.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(s0["running_mean"], single.running_mean)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 2)])
def test_one_deviation_for_all_channels(shape):
    scales = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64).view(3, *(1,) * (len(shape) - 1))
    layer, x = ts.BatchLipNorm(3, momentum=0.2, dtype=torch.float64), torch.randn(40, *shape).double() * scales + 1
    axes = (0, *range(2, x.ndim))
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, unbiased=False)
    torch.testing.assert_close(layer(x), (x - mean) / (variance.max() + layer.eps).sqrt())
    torch.testing.assert_close(layer.running_square, 0.8 + 0.2 * variance)
    layer.eval()
    factor = (layer.running_square.max() + layer.eps).rsqrt()
    torch.testing.assert_close(layer(x), (x - 0.2 * mean) * factor)
    assert ts.lipschitz_bound(layer, shape) == pytest.approx(float(factor), rel=1e-6)
    twin = ts.BatchLipNorm(3, dtype=torch.float64).eval()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    twin.reset_parameters()
    torch.testing.assert_close(twin(x), x, atol=1e-4, rtol=1e-4)


def test_gradients_of_one_deviation():
    layer = ts.BatchLipNorm(2, momentum=None).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    with pytest.raises(ValueError, match=r"must be \(batch, 2"):
        layer(torch.zeros(3, 4))
    for eps in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="eps="):
            ts.BatchLipNorm(2, eps=eps)
