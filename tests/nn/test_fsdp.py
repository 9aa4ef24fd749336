"""Models that fully_shard has spread over two processes train as one process does."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import trysquare as ts
from trysquare.nn.parametrizations import base


def network(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        ts.OrthoConv2d(3, width, 3),
        ts.MaxMin(),
        ts.OrthoConv2d(width, width, 3, method="soc"),
        ts.MaxMin(),
        ts.OrthoConv2d(width, width, 3, method="aol"),
        ts.SLLBlock2d(width, width, 3),
        nn.Flatten(),
        ts.OrthoLinear(width * 36, 10),
    )


def sharded(model, policy=None):
    for module in [*(child for child in model if list(child.parameters())), model]:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy or MixedPrecisionPolicy())
    return model


def images(count=8):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def trained(model, optimizer, x, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        with ts.built(model):
            model(x).float().square().sin().mean().backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def whole_state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def distance(model, plain):
    pairs = zip(whole_state(model).values(), plain.state_dict().values(), strict=True)
    return float(torch.stack([(one - other).abs().max() for one, other in pairs]).max())


def check_float32(rank, folder):
    """Training with reconditioning of matrices that degenerate, and what a sharded model can be asked."""
    single, model = network(), sharded(network())
    with torch.no_grad():
        single[0].free_tensors[0][..., 0, :] *= 100
        set_model_state_dict(model, single.state_dict(), options=StateDictOptions(full_state_dict=True))
    trained(single, sgd(single), images())
    trained(model, sgd(model), images().chunk(2)[rank])
    assert distance(model, single) < 1e-4
    lengths = single[0].free_tensors[0].norm(dim=-1)
    assert lengths.max() < 2 * lengths.min()  # it was reconditioned
    for one, other in zip(model, single, strict=True):
        if hasattr(one, "weight"):
            torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-4)

    # In eval mode weights are kept, until the model is loaded.
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(model(images()), single(images()), rtol=1e-4, atol=1e-4)
        set_model_state_dict(model, network().state_dict(), options=StateDictOptions(full_state_dict=True))
        torch.testing.assert_close(model(images()), network()(images()), rtol=1e-4, atol=1e-4)
        set_model_state_dict(model, single.state_dict(), options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model(images()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        plain = network()
        plain.load_state_dict(whole_state(model))
        torch.testing.assert_close(model(images()), plain(images()), rtol=1e-4, atol=1e-4)

    calls = [
        ts.to_torch,
        lambda m: ts.lipschitz_bound(m, (3, 6, 6)),
        lambda m: ts.audit(m, (3, 6, 6)),
        lambda m: ts.certify(m, [(images(), torch.zeros(8, dtype=torch.long))]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"spread over processes by fully_shard: load them into a plain one"):
            call(model)
    with pytest.raises(ValueError, match="use it without"), ts.built(model, dist.group.WORLD):
        pass
    ts.save_checkpoint(f"{folder}/{rank}.safetensors", model, "tests.nn.test_fsdp:network", {"width": 8})
    loaded = ts.load_model(f"{folder}/{rank}.safetensors", network)
    assert distance(model, loaded) == 0


def check_bfloat16(rank, folder):
    """The loss goes where that of one process in bfloat16 goes, up to the rounding of that."""
    single, model = network(), sharded(network(), MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    trained(single, sgd(single), images())
    trained(model, sgd(model), images().chunk(2)[rank])
    started = network()
    moved = distance(model, started)
    assert distance(model, single) < 0.1 * moved
    assert model[0].weight.dtype == torch.float32
    seen = []
    hook = model[0].register_forward_pre_hook(lambda layer, given: seen.append((layer.weight.dtype, given[0].dtype)))
    model(images())
    hook.remove()
    assert seen == [(torch.bfloat16, torch.bfloat16)]


def check_checkpoint(rank, folder):
    """A round trip by torch.distributed.checkpoint, and on."""
    model, twin = sharded(network()), sharded(network())
    optimizer, other = sgd(model), sgd(twin)
    trained(model, optimizer, images().chunk(2)[rank])
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    dist.barrier()
    trained(twin, other, images().chunk(2)[rank], steps=1)
    state = dict(zip(("model", "optimizer"), get_state_dict(twin, other), strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_state_dict(twin, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for m, o in ((model, optimizer), (twin, other)):
        trained(m, o, images().chunk(2)[rank], steps=1)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), two.full_tensor(), rtol=0, atol=0)


def check_tensor_parallel(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    for plan in (ColwiseParallel(), RowwiseParallel(), SequenceParallel()):
        with pytest.raises(NotImplementedError, match="OrthoLinear cannot be split by a plan of tensor parallelism"):
            parallelize_module(nn.Sequential(ts.OrthoLinear(4, 4)), mesh, {"0": plan})
    with pytest.raises(NotImplementedError, match="OrthoConv2d cannot be split by a plan of tensor parallelism"):
        parallelize_module(nn.Sequential(ts.OrthoConv2d(4, 4, 3)), mesh, {"0": SequenceParallel()})
    dict(inspect.getmembers(ts.OrthoLinear(4, 4)))  # whoever asks for all attributes is not refused


CHECKS = [check_float32, check_bfloat16, check_checkpoint, check_tensor_parallel]


def _rank(rank, folder):
    torch.set_num_threads(1)
    base.RECONDITION_EVERY = 2
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what its checkpoints do
        for check in CHECKS:
            check(rank, folder)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(_rank, (tmp_path,), nprocs=2)
