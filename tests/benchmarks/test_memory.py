import os
import subprocess
import sys

import pytest
from benchmarks.results import ROOT

from benchmarks import memory


def test_a_slow_network_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    assert memory._repeat(lambda: calls.append(1)) == len(calls) == memory.PASSES
    clock = iter([0.0, 0.0, memory.SECONDS + 1])
    monkeypatch.setattr(memory.time, "perf_counter", lambda: next(clock))
    assert memory._repeat(lambda: None) == 1


@pytest.mark.parametrize("alive", [True, False])
def test_a_process_ends_with_the_one_that_started_it(alive: bool) -> None:
    parent = os.getpid() if alive else -1
    line = (
        f"import sys, time; from benchmarks.memory import end_with_parent; end_with_parent({parent}); time.sleep(1.5)"
    )
    done = subprocess.run([sys.executable, "-c", f"{line}; sys.exit(7)"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == (7 if alive else 1)
