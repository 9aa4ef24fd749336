"""Render ``docs/benchmarks.md`` and its figures from the results in ``benchmarks/results/``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import results

PAGE = results.ROOT / "docs" / "benchmarks.md"
# In the order of the page.
QUESTIONS = {
    "kernels": "What does it cost to build a kernel?",
    "memory": "What memory does it take to build all kernels together?",
    "overhead": "What does a whole network cost?",
    "scaling": "How does the cost grow?",
    "forecast": "What would it cost on graphics cards?",
    "methods": "Which method should I choose?",
    "recipe": "What does the time buy in training?",
    "orthogonalizers": "Which orthogonalizer should I choose?",
}
INTRODUCTION = """\
# Benchmarks

This page is rendered by `python -m benchmarks page` from the JSON files in `benchmarks/results/`, which hold every
sample; please do not edit it by hand. Times depend on the machine, so compare them only within a table. What is
compared is measured in turns, except for training by method, and a ratio is the median of the ratios within each turn.
Each result is one run on one shared machine: differences of a few percent are noise. What does not depend on the
machine, the operations and bytes of building a kernel, is guarded by a test: `python -m benchmarks counts` shows it.

The peer is [orthogonium](https://pypi.org/project/orthogonium/) 0.0.4, by the authors of *An Adaptive Orthogonal
Convolution Scheme for Efficient and Flexible CNN Architectures* ("the paper"). [Methods](methods.md) explains AOC,
BCOP, SOC, Cayley and the others; [speed](speed.md) is a summary."""


def question(name: str) -> ModuleType:
    return import_module(f"benchmarks.{name}")


def write(folder: Path, page: Path) -> None:
    """Draw the figures and write the page.

    Raises:
        ValueError: if there are no results, or one is damaged.
        ImportError: without matplotlib.
    """
    found = results.read(folder)
    text = render(found)
    for name in drawn(found):
        question(name).draw(found[name]["data"]).save(page.parent / "figures" / f"{name}.svg")
    page.write_text(text)


def drawn(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the results that have a figure."""
    return [name for name in found if hasattr(question(name), "draw")]


def render(found: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page.

    Raises:
        ValueError: if a result is not what its command writes today.
    """
    sections = [INTRODUCTION]
    for name, title in QUESTIONS.items():
        try:
            body = _section(name, found[name]) if name in found else f"Not measured yet: `python -m benchmarks {name}`."
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the result of {name} is damaged or old ({problem}); measure it again") from error
        sections.append(f"## {title}\n\n{body}")
    return "\n\n".join(sections) + "\n"


def _section(name: str, result: dict[str, Any]) -> str:
    module = question(name)
    parts = [(module.__doc__ or "").strip()]
    if hasattr(module, "draw"):
        parts.append(f"![{QUESTIONS[name]}](figures/{name}.svg)")
    parts += [part if isinstance(part, str) else part.markdown() for part in module.describe(result["data"])]
    # Written by hand for the committed results; tests/benchmarks/test_page.py checks each claim against them.
    if hasattr(module, "PEER") and not result["quick"]:
        parts.append(f"**Where the peer is better.** {module.PEER}")
    machine, versions = result["machine"], result["versions"]
    notes = "".join(f" Missing: {name}." for name in result["missing"])
    notes += "".join(f" Measured again on {e['date']}: {', '.join(e['parts'])}." for e in result.get("again", []))
    notes += " A quick run: few samples of small cases." if result["quick"] else ""
    parts.append(
        f"*`{result['line']}`, {result['date']}, {machine['cpu']}, {machine['cores']} cores, {result['threads']} "
        f"threads, python {versions['python']}, torch {versions['torch']}.{notes}*"
    )
    return "\n\n".join(parts).replace("``", "`")
