"""Construction shared by processes: what one process computes, the same bits on all ranks, and less work on each.

The tests of one number of processes run in one group of them, because starting one takes seconds.
"""

import contextlib
import copy
import io
import os
import signal
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts


class Network(nn.Module):
    """Layers that are alike, one that is shared, one frozen, one unused; some that are not built at once."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(ts.OrthoConv2d(4, 4, 3) for _ in range(5))
        self.down = ts.OrthoConv2d(4, 8, 3, stride=2)
        self.up = self.down.adjoint()
        self.soc = ts.OrthoConv2d(4, 4, 3, method="soc")
        self.fourier = ts.FourierOrthoConv2d(4, 4, 3)
        self.frozen = ts.OrthoConv2d(4, 4, 3).requires_grad_(False)
        self.unused = ts.OrthoConv2d(4, 4, 3)
        self.plain = nn.Conv2d(4, 4, 1)
        self.head = ts.OrthoLinear(64, 10)

    def forward(self, x):
        for conv in self.convs:
            x = conv(x).abs()
        x = self.up(self.down(x).abs()).abs()
        x = self.frozen(self.fourier(self.soc(x)).abs())
        return self.head(self.plain(self.convs[0](x)).flatten(1))


def batch(step=0):
    return torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(step))


def loss(model, x):
    return model(x).square().sin().mean()


def made(seed=0):
    torch.manual_seed(seed)
    return Network()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def close(found, expected, atol=1e-4):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def same_bits(tensors):
    whole = torch.cat([t.detach().double().flatten() for t in tensors])
    first = whole.clone()
    dist.broadcast(first, 0)
    assert torch.equal(whole, first)


def trained(model, steps, context, parts, optimizer, clip=None):
    """Steps of training on this rank's part of each batch, in parts of it."""
    for step in steps:
        optimizer.zero_grad()
        with context(model):
            for part in parts(batch(step)):
                (loss(model, part) / len(parts(batch(step)))).backward()
        if clip is not None:
            clip(model)
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def weights(model):
    return {name: m.weight.detach() for name, m in model.named_modules() if hasattr(m, "parametrization")}


# -- checks that run on every rank


def check_gradients(rank, size):
    """Of two passes, on a model that other ranks have drawn differently; on top of what is there."""
    expected = made()
    loss(expected, batch()).backward()
    model = made(seed=rank)
    seen = []
    model.head.free_tensors[0].register_hook(lambda grad: seen.append(grad.clone()))
    for times in (1, 2):
        with ts.built(model, dist.group.WORLD):
            same_bits(weights(model).values())
            for part in batch().chunk(size)[rank].chunk(2):
                (loss(model, part) / 2).backward()
        close(gradients(model), {n: g if g is None else times * g for n, g in gradients(expected).items()}, 1e-5)
        same_bits(p.grad for p in model.parameters() if p.grad is not None)
    close(weights(model), weights(expected))
    assert model.unused.free_tensors[0].grad is None
    torch.testing.assert_close(seen, [expected.head.free_tensors[0].grad] * 2, rtol=1e-4, atol=1e-5)
    # One rank alone uses a layer.
    model.zero_grad()
    with ts.built(model, dist.group.WORLD):
        if rank == size - 1:
            model.unused(batch()).abs().mean().backward()
    loss(expected, batch())
    expected.unused(batch()).abs().mean().backward()
    wanted = expected.unused.free_tensors[0].grad / size
    torch.testing.assert_close(model.unused.free_tensors[0].grad, wanted, rtol=1e-4, atol=1e-6)
    assert model.head.free_tensors[0].grad is None


def check_training(rank, size):
    """With clipping: as one process, with gradients everywhere and at their owners."""

    def clip(model):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1

    def clip_together(model):
        norm = ts.gradient_norm(model, dist.group.WORLD)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)

    single = made()
    trained(single, range(6), ts.built, lambda x: [x], sgd(single), clip)

    def share(x):
        return x.chunk(size)[rank].chunk(2)

    everywhere = made()
    trained(everywhere, range(6), lambda m: ts.built(m, dist.group.WORLD), share, sgd(everywhere), clip)
    close(weights(everywhere), weights(single))
    same_bits(everywhere.parameters())
    apart = made()
    trained(apart, range(6), lambda m: ts.built(m, dist.group.WORLD, owner_only=True), share, sgd(apart), clip_together)
    ts.synchronize(apart)
    close(weights(apart), weights(single))


def check_owner_only(rank, size):
    """The same training, saved half way and continued by all processes and by one."""
    single = made()
    trained(single, range(6), ts.built, lambda x: [x], sgd(single))

    def share(x):
        return x.chunk(size)[rank].chunk(2)

    def context(model):
        return ts.built(model, dist.group.WORLD, owner_only=True)

    model = made()
    optimizer = sgd(model)
    trained(model, range(3), context, share, optimizer)
    with pytest.raises(RuntimeError, match=r"call ts.synchronize\(model\) on all ranks"):
        model(batch())
    for use in (model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"call ts.synchronize\(model\) on all ranks"):
            use()
    with pytest.raises(RuntimeError, match=r"call ts.synchronize\(model\)"), ts.built(model):
        pass
    with pytest.raises(RuntimeError, match=r"call ts.synchronize\(model\)"), ts.built(model, dist.group.WORLD):
        pass
    convs = [tensor for conv in [*model.convs, model.down] for tensor in conv.free_tensors]
    held = torch.tensor([tensor in optimizer.state for tensor in convs]).int()
    assert all(tensor.grad is None for tensor in convs if tensor not in optimizer.state)
    dist.all_reduce(held)
    assert (held == 1).all()  # state at one rank each
    ts.synchronize(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    same_bits(model.parameters())
    trained(model, range(3, 6), context, share, optimizer)
    ts.synchronize(model, optimizer)
    close(weights(model), weights(single))
    alone = made(seed=5)
    again = sgd(alone)
    alone.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    trained(alone, range(3, 6), ts.built, lambda x: [x], again)
    close(weights(alone), weights(single))
    # From the checkpoint of one process, by all.
    buffer = io.BytesIO()
    torch.save({"model": alone.state_dict(), "optimizer": again.state_dict()}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    trained(model, range(6, 7), lambda m: ts.built(m, dist.group.WORLD), share, optimizer)
    trained(alone, range(6, 7), ts.built, lambda x: [x], again)
    close(weights(model), weights(alone))


def check_ddp(rank, size):
    """With ``no_sync`` for all passes but the last; and the module that is inside of the wrapper."""
    expected = made()
    expected.unused.requires_grad_(False)
    loss(expected, batch()).backward()
    for inner, group in ((False, dist.group.WORLD), (True, dist.group.WORLD), (False, None)):
        model = made()
        model.unused.requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            model.zero_grad()
            first, second = batch().chunk(size)[rank].chunk(2)
            with ts.built(model if inner else wrapped, group):
                with wrapped.no_sync():
                    (loss(wrapped, first) / 2).backward()
                (loss(wrapped, second) / 2).backward()
            close(gradients(model), gradients(expected), 1e-5)
            same_bits(p.grad for p in model.parameters() if p.grad is not None)
    for option in ("find_unused_parameters", "static_graph"):
        within = nn.Sequential(DistributedDataParallel(model, **{option: True}))
        for group in (None, dist.group.WORLD):
            with pytest.raises(ValueError, match=r"use ts.built\(model, group\) instead"), ts.built(within, group):
                pass


def check_work(rank, size):
    """FLOPs of construction: 1/n of those of one process, and a layer."""
    torch.manual_seed(0)
    channels = [8, 8, 8, 16, 16, 32, 32, 32, 48, 64, 64, 96, 160]
    model = nn.ModuleList(ts.OrthoConv2d(c, c, 3, bias=False) for c in channels)

    def step(*group):
        with FlopCounterMode(display=False) as counter, ts.built(model, *group):
            for layer in model:
                layer.weight.sum().backward()
        return counter.get_total_flops()

    with ts.built(model, dist.group.WORLD):
        pass
    whole = step()
    mine = torch.tensor(float(step(dist.group.WORLD)))
    most, total = mine.clone(), mine.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    assert abs(total - whole) < 0.01 * whole
    with FlopCounterMode(display=False) as counter:
        model[-1].weight.sum().backward()
    assert most <= 1.05 * max(whole / size, counter.get_total_flops())


def _counted(sent, name, move, tensor, *rest, **options):
    sent[name] += tensor.nbytes
    return move(tensor, *rest, **options)


def check_bytes(rank, size):
    """Weights travel to all ranks and their gradients to the owners, once; free tensors' gradients if all want them."""
    model = nn.Sequential(*(ts.OrthoLinear(8, 8, bias=False) for _ in range(5)), ts.OrthoConv2d(4, 4, 3, bias=False))
    kernels = 4 * (5 * 64 + 4 * 4 * 9)
    free = 4 * sum(p.numel() for p in model.parameters())
    with ts.built(model, dist.group.WORLD):  # the first block agrees on the start
        pass
    for owner_only in (True, False):
        sent = {"broadcast": 0, "reduce": 0, "all_reduce": 0}
        with pytest.MonkeyPatch.context() as patch:
            for name in sent:
                patch.setattr(dist, name, partial(_counted, sent, name, getattr(dist, name)))
            with ts.built(model, dist.group.WORLD, owner_only=owner_only):
                for layer in model:
                    layer.weight.sum().backward()
        ts.synchronize(model)
        flags = 4 * (1 + 6 + (0 if owner_only else 7))  # weights and parameters that have a gradient on some rank
        assert sent == {"broadcast": kernels + (0 if owner_only else free), "reduce": kernels, "all_reduce": flags}
        model.zero_grad()


def check_refusals(rank, size):
    model = nn.Sequential(ts.OrthoLinear(4, 4 + rank))
    with pytest.raises(ValueError, match=r"same model: rank 1 has .*rank 0"), ts.built(model, dist.group.WORLD):
        pass
    with pytest.raises(TypeError, match=r"group must be a process group, .* not int"), ts.built(model, 1):
        pass
    model = nn.Sequential(ts.OrthoLinear(4, 4))
    with (
        pytest.raises(RuntimeError, match="enter it with gradients enabled"),
        torch.no_grad(),
        ts.built(model, dist.group.WORLD),
        torch.enable_grad(),
    ):
        model(torch.ones(1, 4)).sum().backward()
    # A failing pass leaves nothing behind, on all ranks.
    with contextlib.suppress(KeyError), ts.built(model, dist.group.WORLD):
        model(torch.ones(1, 4)).sum().backward()
        raise KeyError
    with torch.no_grad(), ts.built(model, dist.group.WORLD):
        model(torch.ones(1, 4))
    assert all(p.grad is None for p in model[0].free_tensors)
    with ts.built(nn.Identity(), dist.group.WORLD):
        pass
    with pytest.raises(RuntimeError, match="leave it first"), ts.built(model), ts.built(model, dist.group.WORLD):
        pass
    # A part of the processes.
    pair = dist.new_group([0, 1])
    model.zero_grad()
    if rank < 2:
        with ts.built(model, pair):
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
        torch.testing.assert_close(model[0].bias.grad, torch.ones(4))


def check_tied(rank, size):
    """Layers that share a free tensor, but not the parametrization, in bfloat16 without a bias."""
    grads = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(0)
        model = nn.Sequential(*(ts.OrthoLinear(64, 64, bias=False) for _ in range(4))).bfloat16()
        for layer in (model[1], model[3]):
            layer.parametrizations["weight"].original0 = model[0].free_tensors[0]
        with ts.built(model, group):
            for layer in model:
                (layer.weight.float() * torch.arange(64.0)).sin().sum().backward()
        grads.append(gradients(model))
    close(grads[1], grads[0], 1e-2)


def check_compiled(rank, size):
    """Compiled parts build their weights by themselves; their gradients are averaged all the same."""
    expected = made()
    loss(expected, batch()).backward()
    model = made()
    model.convs[1].compile(backend="eager")
    with ts.built(model, dist.group.WORLD):
        loss(model, batch().chunk(size)[rank]).backward()
    close(gradients(model), gradients(expected), 1e-5)
    same_bits(p.grad for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    with (
        pytest.raises(RuntimeError, match="compiled parts of the model"),
        ts.built(model, dist.group.WORLD, owner_only=True),
    ):
        loss(model, batch().chunk(size)[rank]).backward()


def check_passes(rank, size):
    """What else than a loss is differentiated: a gradient penalty, a model that is frozen for a pass."""

    def step(model, x):
        x = x.clone().requires_grad_()
        score = model(x).square().mean()
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        (score + grad.square().sum()).backward()
        model.requires_grad_(False)
        model(x).square().mean().backward()
        model.requires_grad_(True)
        model.frozen.requires_grad_(False)

    expected = made()
    parts = batch().chunk(size)
    for part in parts:
        step(expected, part)
    model = made()
    with ts.built(model, dist.group.WORLD):
        step(model, parts[rank])
    close(gradients(model), {n: g if g is None else g / size for n, g in gradients(expected).items()}, 1e-5)
    with pytest.raises(RuntimeError, match="create_graph=True"), ts.built(model):
        loss(model, batch()).backward(create_graph=True)

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()

    expected, model = made(), made()
    model.unused.requires_grad_(False)
    for part in parts:
        penalty(expected, part)
    wrapped = DistributedDataParallel(model)
    with ts.built(wrapped):
        penalty(wrapped, parts[rank])
    close(gradients(model), {n: g if g is None else g / size for n, g in gradients(expected).items()}, 1e-5)


CHECKS = [
    check_gradients,
    check_training,
    check_owner_only,
    check_ddp,
    check_work,
    check_bytes,
    check_compiled,
    check_passes,
    check_tied,
    check_refusals,
]


def _rank(rank, size, folder, checks):
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    for check in checks:
        check(rank, size)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_on_several_ranks(size, tmp_path):
    mp.spawn(_rank, (size, tmp_path, CHECKS), nprocs=size)


def _killed(rank, size):
    model = made()
    with ts.built(model, dist.group.WORLD):
        loss(model, batch()).backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_does_not_hang_the_other(tmp_path):
    context = mp.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, 2, tmp_path, [_killed])) for rank in (0, 1)]
    for process in processes:
        process.start()
    processes[1].join(300)  # to start takes long on a busy machine
    processes[0].join(60)  # the timeout of the group is 20 s
    assert processes[1].exitcode == -signal.SIGKILL
    assert processes[0].exitcode == 1
