"""Train on several processes that share the construction of the weights; each has its own images.

torchrun --nproc-per-node 2 examples/cluster.py

On two nodes of eight cards, the same command on each (without torchrun it is one process):

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/cluster.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trysquare as ts
from first_network import synthetic


def network() -> nn.Sequential:
    """Return a small orthogonal classifier of images of 16 x 16 in four classes."""
    layers: list[nn.Module] = [ts.OrthoConv2d(1, 16, 3, stride=2), ts.MaxMin()]
    for _ in range(4):
        layers += [ts.OrthoConv2d(16, 16, 3), ts.MaxMin()]
    return nn.Sequential(*layers, nn.Flatten(), ts.OrthoLinear(1024, 4))


def join() -> tuple[torch.device, int]:
    """Join the other processes of torchrun, if there are any; return the device and the rank of this one."""
    if "WORLD_SIZE" not in os.environ:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, dist.get_rank()


def main() -> None:
    """Train from the checkpoint if there is one, and write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="images of each process")
    parser.add_argument("--accumulate", type=int, default=2, help="passes of a step")
    parser.add_argument("--owner-only", action="store_true", help="gradients stay with who builds a layer")
    parser.add_argument("--checkpoint", type=Path, default=Path("cluster.pt"))
    arguments = parser.parse_args()
    parts = arguments.accumulate

    device, rank = join()
    group = dist.group.WORLD if dist.is_initialized() else None
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0
    if arguments.checkpoint.is_file():  # of any number of processes
        state = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]

    for step in range(done, arguments.steps):
        torch.manual_seed(1000 * step + rank)  # other images in each process
        images, labels = (tensor.to(device) for tensor in synthetic(arguments.batch))
        optimizer.zero_grad()
        with ts.built(model, group, owner_only=arguments.owner_only):
            for part, classes in zip(
                images.chunk(arguments.accumulate), labels.chunk(arguments.accumulate), strict=True
            ):
                loss = nn.functional.cross_entropy(4 * model(part), classes)
                (loss / parts).backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f} on rank 0", flush=True)

    ts.synchronize(model, optimizer)  # on all ranks; only owner_only has left something to do
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": arguments.steps}
        torch.save(state, arguments.checkpoint)
        model.eval()
        with torch.no_grad():
            images, labels = (tensor.to(device) for tensor in synthetic(1000))
            print(f"accuracy on fresh images: {(model(images).argmax(1) == labels).float().mean():.1%}")
            print(f"Lipschitz bound: {ts.lipschitz_bound(model, (1, 16, 16)):.6f}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
