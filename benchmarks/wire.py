"""``python -m benchmarks.wire``: what processes that share construction do each, and send to each other.

The bytes are those that the kernel counts on the loopback interface (Linux), of all processes together, while nothing
else should use it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts
from trysquare.nn.building import batches
from trysquare.nn.parametrizations.base import Parametrization
from trysquare.nn.sharing import shares

NETWORKS = {"16 convolutions of 64 channels, 3x3": 3, "16 linear layers of 192": 0}
WAYS = ("DDP, plain layers", "DDP", "group, owner_only", "group")


def network(name: str, *, plain: bool) -> nn.Sequential:
    """Return layers without bias, ours or torch's."""
    conv, linear = (nn.Conv2d, nn.Linear) if plain else (ts.OrthoConv2d, ts.OrthoLinear)
    if NETWORKS[name]:
        options = {"padding": "same", "bias": False}
        return nn.Sequential(*(conv(64, 64, NETWORKS[name], **options) for _ in range(16)))
    return nn.Sequential(*(linear(192, 192, bias=False) for _ in range(16)))


def _sent() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (own,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(own.split()[9])


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name in NETWORKS:
        for way in WAYS:
            model: nn.Module = network(name, plain=way.endswith("plain layers"))
            inputs = torch.randn(1, 64, 4, 4) if NETWORKS[name] else torch.randn(1, 192)
            model = DistributedDataParallel(model) if way.startswith("DDP") else model
            group = dist.group.WORLD if way.startswith("group") else None
            found = []
            for _ in range(5):
                dist.barrier()
                time.sleep(0.3)
                before = _sent()
                model.zero_grad()
                with ts.built(model, group, owner_only=way.endswith("only")):
                    model(inputs).sum().backward()
                dist.barrier()
                time.sleep(0.3)
                found.append(_sent() - before)
            if rank == 0:  # the first steps also agree on the start
                print(f"| {name} | {way} | {size} | {min(found[2:]) / size / 1e6:.2f} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def balance() -> None:
    """Print the FLOPs of construction of the busiest rank, as a multiple of 1/n of all, for the paper's ResNet-34."""
    with torch.device("meta"):
        model = ts.models.build("resnet34", (3, 224, 224), 1000)
    parts = [part for part in model.modules() if isinstance(part, Parametrization)]
    flops = {}
    for part in parts:
        with FlopCounterMode(display=False) as counter:
            part.built(list(part.slots.values())).sum().backward()
        flops[part] = counter.get_total_flops()
    kinds = [(part, number) for number, group in enumerate(batches(parts)) for part in group]
    for size in (2, 4, 8, 16, 64):
        loads = [0] * size
        for part, owner in shares(kinds, size).items():
            loads[owner] += flops[part]
        dearest = max(flops.values()) / sum(flops.values())
        print(f"| {size} | {max(loads) / sum(loads):.3f} | {max(1 / size, dearest):.3f} |")


if __name__ == "__main__":
    print("| processes | share of the busiest | least possible |\n|---|---|---|")
    balance()
    print("\n| network | way | processes | MB a rank and step |\n|---|---|---|---|")
    for count in (2, 4):
        mp.spawn(_rank, (count, tempfile.mkdtemp()), nprocs=count)
