"""Every test starts from the same seed, on one thread (the suite runs in parallel)."""

import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # or what earlier tests compiled counts towards the limit of recompilations
