"""Examples of frameworks, which are no dependency, run where these are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("package", "script"), [("lightning", "lightning_digits"), ("transformers", "huggingface_digits")]
)
def test_examples_of_frameworks(package, script):
    pytest.importorskip(package, reason=f"{package} is not installed (extra of frameworks)")
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / f"{script}.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    assert float(words[1]) > 0.9
    assert float(words[-1]) > 0.85
