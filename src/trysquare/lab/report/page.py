"""The page: its parts in order, its style, and the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

from trysquare.files import inside, write_whole
from trysquare.lab.data import Images
from trysquare.lab.report import sections, summary
from trysquare.lab.report.gallery import gallery
from trysquare.lab.report.markup import Markup, join, tag
from trysquare.lab.report.reading import Run, read_run

# Nothing is loaded and no script runs, whatever the page holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_CONTENTS = {
    "meaning": "Meaning",
    "curve": "Accuracy",
    "training": "Training",
    "layers": "Layers",
    "classes": "Classes",
    "images": "Images",
    "provenance": "Recipe",
}


def write_report(
    run: str | os.PathLike[str],
    images: Images | None = None,
    *,
    why_no_images: str = "The report was written without the test images.",
) -> Path:
    """Write ``report.html`` into a run directory: one file that needs no other, and no network.

    Args:
        run: holds ``recipe.yaml``, ``versions.json``, ``metrics.jsonl``, ``model.safetensors`` and
            ``certificate.json``; with ``attack.json`` and ``audit.json`` the report says more.
        images: test data that the certificate is of, in its order; the certificate may be of the first of them.
        why_no_images: what the page says if there are none.

    Returns:
        The file. An old one is replaced in one step.

    Raises:
        OSError: if it cannot be written.
        ValueError: if a file of the run is missing or damaged; it names the file and what was expected.
    """
    content = page(read_run(Path(run)), images, why_no_images)
    target = inside(Path(run), "report.html")
    write_whole(target, content)
    return target


def page(run: Run, images: Images | None, why_no_images: str) -> Markup:
    """The whole page."""
    title = f"{run.path.resolve().name}: robustness report"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _style()),
    )
    names = _class_names(images)
    parts = [
        summary.meaning(run),
        sections.curve(run),
        sections.training(run),
        sections.layers(run),
        sections.classes(run, names),
        gallery(run, images, why_no_images, names),
        sections.provenance(run),
    ]
    body = tag("body", tag("a", "Skip to the report", href="#meaning", class_="skip"), _header(run), tag("main", parts))
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), Markup("\n"))


def _class_names(images: Images | None) -> Callable[[int], str]:
    known = () if images is None else images.classes

    def name(label: int) -> str:
        return known[label] if 0 <= label < len(known) else f"class {label}"

    return name


def _header(run: Run) -> Markup:
    links = [tag("a", name, href=f"#{key}") for key, name in _CONTENTS.items()]
    model, data = run.setting("model", "name"), run.setting("data", "name")
    about = " on ".join(str(name) for name in (model, data) if name)
    return tag(
        "header",
        tag("p", "Robustness report", class_="eyebrow"),
        tag("h1", run.path.resolve().name),
        tag("p", about, class_="about") if about else None,
        summary.warnings(run),
        summary.headline(run),
        summary.key_numbers(run),
        summary.facts(run),
        tag("nav", links, aria_label="Parts of the report"),
    )


@cache
def _style() -> Markup:
    return Markup(resources.files("trysquare.lab.report").joinpath("style.css").read_text(encoding="utf-8"))
