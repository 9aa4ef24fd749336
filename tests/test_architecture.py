"""A module imports only from the rows above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "trysquare"
ROWS = [
    "progress", "naming", "files", "pickles", "geometry", "linalg", "optim", "parametrizations", "layers", "export",
    "operators", "spectrum", "lipschitz", "auditing", "checkpoint", "plotting", "losses", "certification", "attacks",
    "models", "data", "training", "report", "cli", "__main__", "__init__",
]  # fmt: skip


def row(module: str) -> int:
    return ROWS.index(module.split(".")[0])


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trysquare"):
            inner = node.module.removeprefix("trysquare").removeprefix(".")
            names |= {inner} if inner else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("trysquare.") for alias in node.names), path
    return names


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_look_up(path):
    inner = path.relative_to(ROOT).with_suffix("").parts
    for name in imports(path):
        assert row(name) <= row(inner[0]), f"{path} imports {name}"
    if inner[0] == "linalg":
        assert "nn.Module" not in path.read_text()
