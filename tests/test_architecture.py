"""A module imports only from the rows above it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "trysquare"
# What all three doors share; what people build with; what they trust; what they run.
ROWS = [
    "torch_internals", "progress", "naming", "files",
    "nn.geometry", "nn.linalg", "nn.losses", "nn.riemannian", "nn.optim", "nn.parametrizations", "nn.sharing",
    "nn.building", "nn.layers", "nn.export", "nn.init", "nn.tracing", "nn.counterparts", "nn.rewriting",
    "nn.conversion", "nn.transfer",
    "verify.operators", "verify.spectrum", "verify.lipschitz", "verify.auditing",
    "verify.certification", "verify.conformal", "verify.attacks",
    "lab.pickles", "lab.checkpoint", "lab.plotting", "lab.models", "lab.data", "lab.training", "lab.report", "lab.cli",
    "__main__", "__init__",
]  # fmt: skip
DOORS = ("nn", "verify", "lab")


def row(module: str) -> int:
    parts = module.split(".")
    return ROWS.index(".".join(parts[: 2 if parts[0] in DOORS else 1]))


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trysquare"):
            inner = node.module.removeprefix("trysquare").removeprefix(".")
            inside = {f"{inner}.{alias.name}".strip(".") for alias in node.names}
            names |= inside if inner in ("", *DOORS) else {inner}
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("trysquare.") for alias in node.names), path
    return names


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_look_up(path):
    inner = path.relative_to(ROOT).with_suffix("").parts
    if inner[0] in DOORS and inner[1:] == ("__init__",):
        assert not imports(path)
        return
    for name in imports(path):
        assert row(name) <= row(".".join(inner)), f"{path} imports {name}"
    if inner[:2] == ("nn", "linalg"):
        assert "nn.Module" not in path.read_text()


def private_parts_of_torch(path: Path) -> set[str]:
    """Names below a module of torch, imported or reached by attributes, one part of which is private."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        if isinstance(node, ast.Attribute) and re.fullmatch(r"(torch|forward_ad)(\.\w+)+", ast.unparse(node)):
            found.add(ast.unparse(node))
    return {name for name in found if any(part.startswith("_") and part[:2] != "__" for part in name.split("."))}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_private_parts_of_torch_are_in_one_file(path):
    inner = str(path.relative_to(ROOT))
    if inner == "torch_internals.py":
        assert len(private_parts_of_torch(path)) > 10
    else:
        assert not private_parts_of_torch(path)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_private_names_of_another(path):
    assert not {name for name in imported_names(path) if name.startswith("_")}


def imported_names(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes if (node.module or "").startswith("trysquare") for alias in node.names}


def test_no_class_name_has_two_meanings():
    defined = [
        node.name for path in ROOT.rglob("*.py") for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]  # fmt: skip
    assert len(defined) == len(set(defined))
