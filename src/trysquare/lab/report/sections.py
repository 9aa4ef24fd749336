"""The parts of the page, each from what the run holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from trysquare.lab.report.charts import certified_series, class_chart, curve_chart, line_chart, series, spectra_chart
from trysquare.lab.report.elements import absent, legend, section, table
from trysquare.lab.report.formats import bound, count, epsilon, number, percent
from trysquare.lab.report.markup import Markup, tag
from trysquare.lab.report.reading import Run
from trysquare.verify.auditing import AuditReport

# Of more classes than this, only the ends are shown.
CLASSES = 24
_CHIPS = {"orthogonal": "chip good", "1-Lipschitz": "chip", "amplifies": "chip bad"}


def curve(run: Run) -> Markup:
    """Certified accuracy over the radius, and the numbers of the chart."""
    certificate, attack = run.certificate, run.attack
    entries = [("certified", "certified: proved")]
    entries += [] if attack is None else [("attacked", "attacked: what the attack left")]
    rows = [_curve_row(run, e) for e in sorted({*certificate.epsilons, *(attack.epsilons if attack else ())})]
    return section(
        "curve",
        "Accuracy by radius",
        tag(
            "p",
            "Below the curve it is proved that answers stay right, whatever the attack",
            "." if attack is None else "; above a diamond an attack has turned them. The truth lies between.",
        ),
        tag("figure", legend(entries), curve_chart(certificate, attack)),
        _attack_note(run),
        table("Accuracy by radius", ["radius", "certified", "attacked", "open"], rows, "numbers"),
    )


def _attack_note(run: Run) -> Markup:
    if run.attack is None:
        return absent("The certificate has not been attacked yet.", run.command("attack"))
    broken = len(run.attack.violations)
    samples = count(run.attack.samples)
    result = f"{count(broken)} fell inside" if broken else "none fell inside"
    text = f"Attacked on {samples} images, each also at the edge of its own certified radius: {result}."
    if run.attack.samples != len(run.certificate.radii):
        text += f" The certificate is of {count(len(run.certificate.radii))}, so the two are of different sets."
    return tag("p", text)


def _curve_row(run: Run, e: float) -> list[str]:
    share = run.certificate.certified_accuracy(e)
    under = None if run.attack is None else dict(zip(run.attack.epsilons, run.attack.attacked, strict=True)).get(e)
    comparable = run.attack is not None and run.attack.samples == len(run.certificate.radii)
    between = percent(max(under - share, 0.0)) if comparable and under is not None else "–"
    return [epsilon(e), percent(share), "–" if under is None else percent(under), between]


def training(run: Run) -> Markup:
    """Loss, accuracy and certified accuracy over the steps."""
    kinds = (("train", "train"), ("test", "evaluation"))
    panels = []
    for name, limits in (("loss", None), ("accuracy", (0.0, 1.0))):
        lines = [(label, kind, series(run.metrics, kind, name)) for label, kind in kinds]
        panels.append(_panel(name, lines, limits))
    certified = certified_series(run.metrics, "evaluation") or certified_series(run.metrics, "train")
    shades = [(epsilon(r), f"shade{i % 4}", line) for i, (r, line) in enumerate(certified.items())]
    panels.append(_panel("certified accuracy", shades, (0.0, 1.0)))
    drawn = [panel for panel in panels if panel is not None]
    if not drawn:
        return section("training", "Training", tag("p", "metrics.jsonl holds no numbers to draw.", class_="absent"))
    return section("training", "Training", tag("div", drawn, class_="panels"), _speed(run))


def _panel(
    name: str, lines: Sequence[tuple[str, str, list[tuple[float, float]]]], limits: tuple[float, float] | None
) -> Markup | None:
    known = [line for line in lines if line[2]]
    return tag("figure", line_chart(f"training-{name.replace(' ', '-')}", name, known, limits)) if known else None


def _speed(run: Run) -> Markup | None:
    rates = sorted(speed for _, speed in series(run.metrics, "train", "images_per_second"))
    if not rates:
        return None
    return tag("p", f"Median speed: {count(round(rates[len(rates) // 2]))} images per second.", class_="quiet")


def layers(run: Run) -> Markup:
    """Spectra of all layers and the table of the audit."""
    if run.audit is None:
        missing = absent("The spectra and the audit of the layers are not there.", run.command("audit"))
        return section("layers", "Layers", missing)
    shape = " × ".join(map(str, run.audit.input_shape))
    summary = (
        f"For inputs of {shape} the whole network has the certified Lipschitz bound {bound(run.audit.bound)}; the "
        f"largest slope found is {number(run.audit.lower_bound)}."
    )
    return section("layers", "Layers", tag("p", summary), _spectra(run), _audit_table(run.audit))


def _spectra(run: Run) -> Markup:
    assert run.audit is not None
    linear = [layer for layer in run.audit.layers if layer.largest is not None and math.isfinite(layer.largest)]
    if not linear:
        return tag("p", "The network has no linear layer, so there is no spectrum.", class_="absent")
    entries = [("value", "singular values"), ("unit", "1: lengths are kept")]
    if all(layer.spectrum for layer in linear):
        return tag("figure", legend(entries), spectra_chart(linear))
    note = "Dashed strokes are the smallest and largest singular value alone: the whole spectrum was not computed. "
    again = tag("code", run.command("audit"))
    return tag("figure", legend(entries), spectra_chart(linear), tag("figcaption", note, again, " does that."))


def _audit_table(audit: AuditReport) -> Markup:
    header = ["layer", "type", "geometry", "σ min", "σ max", "bound", "so far", "verdict"]
    rows = [
        [
            _breakable(layer.name), layer.type, layer.geometry, number(layer.smallest), number(layer.largest),
            bound(layer.bound), "" if layer.bound_so_far is None else bound(layer.bound_so_far),
            tag("span", layer.verdict, class_=_CHIPS.get(layer.verdict, "chip")),
        ]
        for layer in audit.layers
    ]  # fmt: skip
    if any(layer.remark for layer in audit.layers):
        header.append("remark")
        rows = [[*row, layer.remark] for row, layer in zip(rows, audit.layers, strict=True)]
    return table("Layer by layer", header, rows, "audit")


def _breakable(name: str) -> list[object]:
    """A path of a module, which may be broken after its dots."""
    first, *others = name.split(".")
    return [first, *((".", tag("wbr"), part) for part in others)]


def classes(run: Run, names: Callable[[int], str]) -> Markup:
    """Radii by class."""
    present = run.certificate.labels.unique().tolist()
    medians = {c: float(run.certificate.radii[run.certificate.labels == c].median()) for c in present}
    shown, note = present, ""
    if len(present) > CLASSES:
        ordered = sorted(present, key=lambda c: medians[c])
        shown = [*ordered[: CLASSES // 2], *ordered[-CLASSES // 2 :]]
        note = f" Of {len(present)} classes, those with the {CLASSES // 2} smallest and largest medians."
    text = (
        "Boxes hold the middle half of the images of a class, thin lines 90 %, strokes are medians. A wrong answer has "
        f"radius 0. At the right, the share of right answers.{note}"
    )
    chart = tag("figure", class_chart(run.certificate, {c: names(c) for c in shown}))
    return section("classes", "Certified radius by class", tag("p", text), chart)


def provenance(run: Run) -> Markup:
    """The recipe and the versions."""
    versions = [[name, _plain(value)] for name, value in run.versions.items()]
    recipe = tag("div", tag("h3", "Resolved recipe"), tag("pre", tag("code", run.recipe), tabindex="0"))
    used = tag("div", tag("h3", "Versions"), table("Versions used", ["what", "version"], versions, "versions"))
    return section("provenance", "How it was made", tag("div", recipe, used, class_="pair"))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
