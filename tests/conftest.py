"""Every test starts from the same seed, on one thread (the suite runs in parallel).

The same goes for drawn examples, so that only a change of the code can make a test fail; other ones are drawn with
``--hypothesis-profile=default``.
"""

import sys

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # or what earlier tests compiled counts towards the limit of recompilations
