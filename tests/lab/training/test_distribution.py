import signal
import socket
import time
from pathlib import Path

import pytest
import torch

import trysquare as ts
from tests.lab.training.small import arguments, recipe, start, state, trained, weights
from trysquare.lab.training.distribution import World, first_to_fail
from trysquare.lab.training.loop import Training


def free_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]


def start_two(*command, **options):
    """Two processes, started by torchrun."""
    torchrun = "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()
    return start(*torchrun, *command, **options)


def run_two(*command):
    process = start_two(*command)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors


def test_torchrun_with_one_process(tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    several = trained(tmp_path / "several", **{"train.accumulate": 2, "train.epochs": 1})
    monkeypatch.delenv("WORLD_SIZE")
    assert not torch.distributed.is_initialized()
    single = trained(tmp_path / "single", **{"train.accumulate": 2, "train.epochs": 1})
    for name, value in weights(single.path).items():
        torch.testing.assert_close(value, weights(several.path)[name])


def test_processes_must_share_a_batch_equally():
    with pytest.raises(ValueError, match=r"train.batch_size=128 must be a multiple of the number of processes, 3"):
        Training(recipe(), World(torch.device("cpu"), 0, 3))


LEAVE = """
import pathlib, sys, time
from trysquare.lab.training.distribution import joined
folder = pathlib.Path(sys.argv[1])
with joined("cpu") as world:
    if world.is_main:
        time.sleep(1)
        (folder / "written").touch()
assert (folder / "written").exists(), f"process {world.rank} left before the first had written its last file"
"""


def test_processes_leave_together(tmp_path):
    (tmp_path / "leave.py").write_text(LEAVE)
    run_two(tmp_path / "leave.py", tmp_path)


FAIL = """
import os, sys
from trysquare.lab.training.loop import Training
step = Training.step
def failing(self, *arguments):
    if self.progress.step == 3 and os.environ["RANK"] == sys.argv[1]:
        raise ValueError(f"process {self.world.rank} has failed")
    return step(self, *arguments)
Training.step = failing
from trysquare.lab.cli import main
raise SystemExit(main(sys.argv[2:]))
"""


def told(errors):
    return [line for line in errors.splitlines() if line.startswith("trysquare: ")]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_process_that_failed_says_so(tmp_path, rank):
    (tmp_path / "fail.py").write_text(FAIL)
    process = start_two(tmp_path / "fail.py", rank, "train", "digits", "--out", tmp_path / "run", *arguments())
    _, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    assert told(errors) == [f"trysquare: process {rank} has failed"]


@pytest.mark.parametrize("override", ["--train.epochs=0", "--data.name=mnist"])
def test_what_all_processes_refuse_is_said_once(tmp_path, override):
    process = start_two("-m", "trysquare", "train", "digits", "--out", tmp_path / "run", override)
    _, errors = process.communicate(timeout=100)
    assert len(told(errors)) == 1, errors


def test_a_stop_is_said_once(tmp_path):
    options = arguments(**{"train.epochs": 500})
    process = start_two("-m", "trysquare", "train", "digits", "--out", tmp_path / "run", *options)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    (line,) = told(errors)
    assert "a checkpoint is written. Continue with: trysquare train --resume" in line


def test_without_torchrun_there_is_nobody_to_ask(monkeypatch):
    first_to_fail.cache_clear()
    assert first_to_fail()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        first_to_fail.cache_clear()
        assert first_to_fail() is (rank == 0)
    first_to_fail.cache_clear()


DUMP = """
import sys, torch
import trysquare as ts
from trysquare.lab.training.loop import Training
step = Training.step
def noted(self, *arguments):
    done = step(self, *arguments)
    self.last = {n: p.detach().clone() for n, p in self.model.named_parameters()}
    if self.progress.step == self.steps:
        torch.save(self.last, f"{sys.argv[1]}/rank{self.world.rank}.pt")
    return done
Training.step = noted
from trysquare.lab.cli import main
raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_do_what_one_does(tmp_path, parts):
    (tmp_path / "dump.py").write_text(DUMP)
    options = {"train.epochs": 2, "train.accumulate": parts, "optimizer.lr": 0.003}
    run_two(tmp_path / "dump.py", tmp_path, "train", "digits", "--out", tmp_path / "two", *arguments(**options))
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    one = trained(tmp_path / "one", **options)
    single, double = (ts.load_model(tmp_path / name) for name in ("one", "two"))
    # Built weights: Adam turns rounding errors into steps where the weight does not depend on a free tensor at all.
    for layer, twin in zip(single.modules(), double.modules(), strict=True):
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            assert (layer.weight - twin.weight).abs().max() < 1e-4
            assert (layer.bias - twin.bias).abs().max() < 1e-4
    assert one.metrics()[-1]["certified"] == ts.training.load_run(tmp_path / "two").metrics()[-1]["certified"]
    assert state(tmp_path / "two")["progress"]["step"] == 22


def test_the_example_for_a_cluster_writes_a_whole_checkpoint(tmp_path):
    example = Path(__file__).parents[3] / "examples" / "cluster.py"
    run_two(example, "--steps", 3, "--owner-only", "--checkpoint", tmp_path / "cluster.pt")
    saved = torch.load(tmp_path / "cluster.pt", weights_only=True)
    parameters = [name for name in saved["model"] if "original" in name or name.endswith("bias")]
    assert saved["optimizer"]["state"].keys() == set(range(len(parameters)))
    assert all(state["step"] == 3 for state in saved["optimizer"]["state"].values())
