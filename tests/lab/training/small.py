"""A recipe that trains in a second, and a script that trains it in another process."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import trysquare as ts
from trysquare.lab.checkpoint import read_checkpoint, unpacked

SMALL = {
    "model.widths": [4],
    "model.dense_width": 16,
    "model.dense_layers": 1,
    "train.epochs": 2,
    "train.batch_size": 128,
    "evaluate.every": 1,
    "data.workers": 0,
}


def recipe(**overrides):
    return ts.training.read_recipe("digits", {**SMALL, **overrides})


def arguments(**overrides):
    values = {**SMALL, **overrides}
    return [f"--{key}={value}" for key, value in values.items()]


def trained(path, **overrides):
    return ts.training.train(recipe(**overrides), path, quiet=True)


def weights(path):
    return read_checkpoint(Path(path) / "model.safetensors")["state_dict"]


def state(path):
    return unpacked(Path(path) / "checkpoint.pt")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def start(*command, env=None, **options):
    """A process of ``python -m`` with these arguments, on one thread."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**(env or os.environ), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        **options,
    )
