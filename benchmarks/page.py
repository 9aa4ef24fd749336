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
    "overhead": "What does a whole network cost?",
    "scaling": "How does the cost grow?",
    "forecast": "What would it cost on graphics cards?",
    "methods": "Which method should I choose?",
    "recipe": "What does the time buy in training?",
    "orthogonalizers": "Which orthogonalizer should I choose?",
    "spectrum": "Which bound on the norm of a convolution can I trust?",
    "compose": "How should two kernels be composed?",
    "loading": "How fast is the data loader?",
    "counts": "What do the tests guard?",
}
INTRODUCTION = """\
# Benchmarks

`python -m benchmarks page` renders this page from the JSON files in `benchmarks/results/`, which hold every sample; do
not edit it by hand. Times depend on the machine, so compare them only within a table. Contestants run in turns,
except in the comparison of methods and orthogonalizers by training, of loaders and of compositions. A ratio of turns is
the median of the ratios within each, so that it need not be the quotient of the two medians. Each result is one run on
one shared machine: differences of a few percent are noise.

The peer is [orthogonium](https://pypi.org/project/orthogonium/) 0.0.4, by the authors of *An Adaptive Orthogonal
Convolution Scheme for Efficient and Flexible CNN Architectures* ("the paper"). Each section in which it
takes part says where it is better. [Methods](methods.md) explains AOC, BCOP, SOC, Cayley and the others."""


def question(name: str) -> ModuleType:
    """Return the module of a question."""
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
        if name not in found:
            body = f"Not measured yet: `python -m benchmarks {name}`."
        else:
            try:
                body = _section(name, found[name])
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise ValueError(f"the result of {name} is damaged or old ({problem}); measure it again") from error
        sections.append(f"## {title}\n\n{body}")
    return "\n\n".join(sections) + "\n"


def _section(name: str, result: dict[str, Any]) -> str:
    module = question(name)
    parts = [(module.__doc__ or "").strip().replace("``", "`")]
    if hasattr(module, "draw"):
        parts.append(f"![{QUESTIONS[name]}](figures/{name}.svg)")
    parts += [part if isinstance(part, str) else part.markdown() for part in module.describe(result["data"])]
    # Written by hand for the committed results; tests/benchmarks/test_page.py checks each claim against them.
    if hasattr(module, "PEER") and not result["quick"]:
        parts.append(f"**Where the peer is better.** {module.PEER.replace('``', '`')}")
    parts.append(_origin(result))
    return "\n\n".join(parts)


def _origin(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch"))
    lost = "".join(f" Missing: {name}." for name in result["missing"])
    again = "".join(
        f" Measured again on {entry['date']}: {', '.join(entry['parts'])}." for entry in result.get("again", [])
    )
    quick = " A quick run: few samples of small cases." if result["quick"] else ""
    return (
        f"*`{result['line']}`, {result['date']}, {machine['cpu']}, {machine['cores']} cores, {result['threads']} "
        f"threads, {versions}.{again}{lost}{quick}*"
    )
