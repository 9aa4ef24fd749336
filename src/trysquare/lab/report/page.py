"""The page: its header, its sections in order, the pictures in it, and the file."""

from __future__ import annotations

import base64
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from trysquare.files import inside, write_whole
from trysquare.lab.data import DATASETS, Images, load
from trysquare.lab.report.charts import certified_series, class_chart, curve_chart, line_chart, series, spectra_chart
from trysquare.lab.report.markup import (
    Markup,
    absent,
    bound,
    count,
    duration,
    join,
    legend,
    number,
    percent,
    radius,
    scientific,
    section,
    table,
    tag,
)
from trysquare.lab.report.reading import COMMANDS, Level, Results, read_results, recipe_sections
from trysquare.verify.attacks import CertificateError
from trysquare.verify.auditing import AuditReport
from trysquare.verify.certification import Certificate, radius_text

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
    content = page(read_results(Path(run)), images, why_no_images)
    target = inside(Path(run), "report.html")
    write_whole(target, content)
    return target


def page(run: Results, images: Images | None, why_no_images: str) -> Markup:
    """Return the whole page."""
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
        meaning(run),
        curve(run),
        training(run),
        layers(run),
        classes(run, names),
        gallery(run, images, why_no_images, names),
        provenance(run),
    ]
    body = tag("body", tag("a", "Skip to the report", href="#meaning", class_="skip"), _header(run), tag("main", parts))
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), Markup("\n"))


def _class_names(images: Images | None) -> Callable[[int], str]:
    known = () if images is None else images.classes

    def name(label: int) -> str:
        return known[label] if 0 <= label < len(known) else f"class {label}"

    return name


def _header(run: Results) -> Markup:
    links = [tag("a", name, href=f"#{key}") for key, name in _CONTENTS.items()]
    model, data = run.setting("model", "name"), run.setting("data", "name")
    about = " on ".join(str(name) for name in (model, data) if name)
    return tag(
        "header",
        tag("p", "Robustness report", class_="eyebrow"),
        tag("h1", run.path.resolve().name),
        tag("p", about, class_="about") if about else None,
        warnings(run),
        headline(run),
        key_numbers(run),
        facts(run),
        tag("nav", links, aria_label="Parts of the report"),
    )


@cache
def _style() -> Markup:
    return Markup(resources.files("trysquare.lab.report").joinpath("style.css").read_text(encoding="utf-8"))


def warnings(run: Results) -> list[Markup]:
    """Return the reasons to doubt the certificate, which stand at the top of the page."""
    found: list[tuple[object, ...]] = [
        (
            tag("strong", f"The {name} is of other weights"),
            " than those of the model now, which changed afterwards. Run ",
            tag("code", run.command(COMMANDS[name])),
            " again.",
        )
        for name in run.outdated
    ]
    if (disproof := _disproof(run)) is not None:
        found.append((tag("strong", "Do not trust this certificate."), f" An attack disproves it: {disproof}."))
    if not _same_certificate(run):
        again = tag("code", run.command("attack"))
        other = tag("strong", "The attack is not of this certificate.")
        found.append((other, " Its certified accuracies are others. Run ", again, " again."))
    return [tag("p", parts, class_="alert", role="alert") for parts in found]


def _disproof(run: Results) -> CertificateError | None:
    """Return the error by which the attack disproves the certificate, if it does."""
    try:
        if run.attack is not None:
            run.attack.check()
    except CertificateError as error:
        return error
    return None


def _same_certificate(run: Results) -> bool:
    """Return whether the attack is of this certificate; on fewer samples that is not known, so granted."""
    attack = run.attack
    if attack is None or attack.samples != len(run.certificate.radii):
        return True
    certified = {level.epsilon: level.certified for level in run.levels}
    return all(abs(certified[e] - share) < 1e-9 for e, share in zip(attack.epsilons, attack.certified, strict=True))


def headline(run: Results) -> Markup:
    """Return the result in a sentence."""
    certificate = run.certificate
    least = min((level for level in run.levels if level.asked), key=lambda level: level.epsilon)
    proved = "it is proved" if _disproof(run) is None else "the certificate wrongly claims"
    return tag(
        "p",
        "Of ",
        tag("b", count(len(certificate.radii))),
        " test images the network classifies ",
        tag("b", percent(certificate.clean_accuracy)),
        " correctly. For ",
        tag("b", percent(least.certified), class_="accent"),
        f" {proved} that no change of length up to {least.name} changes the answer.",
        class_="headline",
    )


def key_numbers(run: Results) -> Markup:
    """Return clean, certified and attacked accuracy as tiles."""
    tiles = [_tile("clean", run.certificate.clean_accuracy, "no attack", None)]
    for level in run.levels:
        if level.asked:
            note = "not attacked" if level.attacked is None else f"attacked {percent(level.attacked)}"
            tiles.append(_tile(f"certified at {level.name}", level.certified, note, level.attacked))
    return tag("ul", tiles, class_="tiles")


def _tile(name: str, share: float, note: str, mark: float | None) -> Markup:
    bar = tag("span", class_="fill", style=f"width:{100 * share:.2f}%")
    tick = None if mark is None else tag("span", class_="mark", style=f"left:{100 * mark:.2f}%")
    class_ = "tile clean" if name == "clean" else "tile"
    meter = tag("span", bar, tick, class_="meter", aria_hidden="true")
    parts = [tag("span", text, class_=kind) for text, kind in ((name, "name"), (percent(share), "value"))]
    return tag("li", parts, meter, tag("span", note, class_="under"), class_=class_)


def facts(run: Results) -> Markup:
    """Return the other numbers."""
    certificate = run.certificate
    kind = "of the features" if certificate.pairwise else "of all logits"
    samples = certificate.measured_samples
    measured = f"measured on {count(samples)} images" if samples else "not measured"
    entries = [
        ("Lipschitz bound", bound(certificate.lipschitz), kind),
        ("Evaluation error", scientific(certificate.evaluation_error), measured),
        ("Median radius", radius(float(certificate.radii.median())), "of all images, wrong ones at 0"),
        ("Parameters", count(run.parameters), " × ".join(map(str, certificate.input_shape)) + " inputs"),
        *_duration(run),
    ]
    pairs = [tag("div", tag("dt", name), tag("dd", value, tag("small", note))) for name, value, note in entries]
    return tag("dl", pairs, class_="facts")


def _duration(run: Results) -> list[tuple[str, str, str]]:
    """Return how long training took, if that was recorded."""
    if not run.metrics or "seconds" not in run.metrics[-1].values:
        return []
    last = run.metrics[-1]
    return [("Training", duration(last.values["seconds"]), f"{count(int(last.step))} steps, evaluation included")]


def meaning(run: Results) -> Markup:
    """Say in plain language what the certificate proves and assumes."""
    certificate = run.certificate
    samples = len(certificate.radii)
    cards = [
        ("Proved", _proved(certificate)),
        ("Measured, not proved", _measured(certificate)),
        ("Not covered", _not_covered(certificate.clean_accuracy, samples)),
    ]
    blocks = [tag("div", tag("h3", name), tag("p", text)) for name, text in cards]
    return section("meaning", "What the certificate says", tag("div", blocks, class_="cards"))


def _proved(certificate: Certificate) -> str:
    factor = bound(certificate.lipschitz)
    source = f"logits move by at most {factor} times as much as the image"
    if certificate.pairwise:
        source = (
            f"what the last layer reads moves by at most {factor} times as much as the image, and the last layer is "
            "used pair by pair of classes"
        )
    return (
        "Each image has a radius. Add anything to its pixels (from 0 to 1, before any scaling): as long as the change "
        "is shorter than the radius, in Euclidean length, the function that the weights define gives the same class. "
        f"This holds for every attack, known or not. It follows from the weights in use: {source}. It assumes float64 "
        "arithmetic by IEEE 754. Rounding errors of the evaluation in float64 are bounded, and subtracted."
    )


def _measured(certificate: Certificate) -> str:
    error, samples = scientific(certificate.evaluation_error), certificate.measured_samples
    if not samples:
        return "The network as it runs has rounding errors of its own. They were not measured."
    return (
        "The network as it runs has rounding errors of its own. Compared with float64, they changed differences of two "
        f"logits by at most {error} on {count(samples)} images and noisy copies of them, and the class of "
        f"{count(certificate.disagreements)} of these images. Worse rounding elsewhere is not excluded."
    )


def _not_covered(clean: float, samples: int) -> str:
    spread = 1.96 * math.sqrt(max(clean * (1 - clean), 0.25 / samples) / samples)
    return (
        "Longer changes, and those that are not small in this sense: rotation, blur, other light. Other images, which "
        "have no radius until they are evaluated; from a test set of this size, the accuracy on new images of the same "
        f"kind is known to about ±{100 * spread:.1f} percentage points. Wrong labels. Weights that the "
        "model's file did not hold when the certificate was made."
    )


# Of more classes than this, only the ends are shown.
CLASSES = 24
_CHIPS = {"orthogonal": "chip good", "1-Lipschitz": "chip", "amplifies": "chip bad"}


def curve(run: Results) -> Markup:
    """Show certified accuracy over the radius, and the numbers of the chart."""
    entries = [("certified", "certified: proved")]
    entries += [] if run.attack is None else [("attacked", "attacked: what the attack left")]
    comparable = run.attack is not None and run.attack.samples == len(run.certificate.radii)
    rows = [_curve_row(level, comparable) for level in sorted(run.levels, key=lambda level: level.epsilon)]
    return section(
        "curve",
        "Accuracy by radius",
        tag(
            "p",
            "Below the curve it is proved that answers stay right, whatever the attack",
            "." if run.attack is None else "; above a diamond an attack has changed them. The truth lies between.",
        ),
        tag("figure", legend(entries), curve_chart(run.certificate, run.levels)),
        _attack_note(run),
        table("Accuracy by radius", ["radius", "certified", "attacked", "open"], rows, "numbers"),
    )


def _attack_note(run: Results) -> Markup:
    if run.attack is None:
        return absent("The certificate has not been attacked yet.", run.command("attack"))
    broken = len(run.attack.violations)
    samples = count(run.attack.samples)
    result = f"{count(broken)} fell inside" if broken else "none fell inside"
    text = f"Attacked on {samples} images, each also at the edge of its own certified radius: {result}."
    if run.attack.samples != len(run.certificate.radii):
        text += f" The certificate is of {count(len(run.certificate.radii))}, so the two are of different sets."
    return tag("p", text)


def _curve_row(level: Level, comparable: bool) -> list[str]:
    certified = percent(level.certified)
    if level.attacked is None:
        return [level.name, certified, "–", "–"]
    between = percent(max(level.attacked - level.certified, 0.0)) if comparable else "–"
    return [level.name, certified, percent(level.attacked), between]


def training(run: Results) -> Markup:
    """Show loss, accuracy and certified accuracy over the steps."""
    kinds = (("train", "train"), ("validation" if run.setting("data", "validation") else "test", "evaluation"))
    panels = []
    for name, limits in (("loss", None), ("accuracy", (0.0, 1.0))):
        lines = [(label, kind, series(run.metrics, kind, name)) for label, kind in kinds]
        panels.append(_panel(name, lines, limits))
    certified = certified_series(run.metrics, "evaluation") or certified_series(run.metrics, "train")
    shades = [(radius_text(r), f"shade{i % 4}", line) for i, (r, line) in enumerate(certified.items())]
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


def _speed(run: Results) -> Markup | None:
    rates = sorted(speed for _, speed in series(run.metrics, "train", "images_per_second"))
    if not rates:
        return None
    return tag("p", f"Median speed: {count(round(rates[len(rates) // 2]))} images per second.", class_="quiet")


def layers(run: Results) -> Markup:
    """Show the spectra of all layers, and the table of the audit."""
    if run.audit is None:
        missing = absent("The spectra and the audit of the layers are not there.", run.command("audit"))
        return section("layers", "Layers", missing)
    shape = " × ".join(map(str, run.audit.input_shape))
    summary = (
        f"For inputs of {shape} the whole network has the certified Lipschitz bound {bound(run.audit.bound)}; the "
        f"largest slope found is {number(run.audit.lower_bound)}."
    )
    return section("layers", "Layers", tag("p", summary), _spectra(run), _audit_table(run.audit))


def _spectra(run: Results) -> Markup:
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


_BREAK = tag("wbr")


def _breakable(name: str) -> list[object]:
    """Return the path of a module, in which lines may break after dots."""
    first, *others = name.split(".")
    return [first, *((".", _BREAK, part) for part in others)]


def classes(run: Results, names: Callable[[int], str]) -> Markup:
    """Show the radii by class."""
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


def provenance(run: Results) -> Markup:
    """Show the recipe and the versions."""
    versions = [[name, _plain(value)] for name, value in run.versions.items()]
    recipe = tag("div", tag("h3", "Resolved recipe"), tag("pre", tag("code", run.recipe), tabindex="0"))
    used = tag("div", tag("h3", "Versions"), table("Versions used", ["what", "version"], versions, "versions"))
    return section("provenance", "How it was made", tag("div", recipe, used, class_="pair"))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# In each row of images.
PICTURES = 10
# Below this many pixels an image is enlarged pixel by pixel.
_SMALL_IMAGE = 64


def gallery(run: Results, images: Images | None, why_none: str, names: Callable[[int], str]) -> Markup:
    """Show the images with the largest and the smallest radius, and some with wrong answers."""
    title = "Surest and least sure"
    reason = why_none if images is None else reason_not_to_show(images, run.certificate)
    if images is None or reason:
        return section("images", title, tag("p", reason, class_="absent"))
    certificate = run.certificate
    right = certificate.predictions == certificate.labels
    order = certificate.radii.argsort(stable=True)
    sure, wrong = order[right[order]], (~right).nonzero().flatten()
    rows = [
        ("Largest radius", sure.flip(0), "No answer is right."),
        ("Smallest radius, answer right", sure, "No answer is right."),
        ("Wrong answer: radius 0", wrong, "No answer is wrong."),
    ]
    return section("images", title, [_picture_row(run, images, names, *row) for row in rows])


def _picture_row(
    run: Results, images: Images, names: Callable[[int], str], title: str, found: Tensor, none: str
) -> Markup:
    heading = tag("h3", title)
    if not len(found):
        return join(heading, tag("p", none, class_="quiet"))
    rows = found[:PICTURES]
    pixels, white = images.stack(rows), images.white
    small = max(pixels.shape[-2:]) < _SMALL_IMAGE
    figures = [
        _picture(run.certificate, row, data_uri(image, white), small, names)
        for row, image in zip(rows.tolist(), pixels, strict=True)
    ]
    return join(heading, tag("div", figures, class_="gallery"))


def _picture(certificate: Certificate, row: int, uri: str, small: bool, names: Callable[[int], str]) -> Markup:
    label, answer = (names(int(values[row])) for values in (certificate.labels, certificate.predictions))
    wrong = bool(certificate.labels[row] != certificate.predictions[row])
    told = f"{label} → {answer}" if wrong else label
    value = "wrong" if wrong else radius(float(certificate.radii[row]))
    alt = f"Test image {row}, a {label}" + (f", taken for a {answer}" if wrong else f", certified radius {value}")
    picture = tag("img", src=uri, alt=alt, loading="lazy", class_="pixelated" if small else None)
    caption = tag("figcaption", tag("b", value), tag("span", told), tag("small", f"image {row}"))
    return tag("figure", picture, caption)


_COLOURS = {1: 0, 3: 2}  # channels to the colour type of PNG


def png(image: Tensor) -> bytes:
    r"""Return an image as a PNG file.

    Args:
        image: uint8 ``(c, h, w)`` with 1 or 3 channels.

    >>> png(torch.zeros(1, 2, 2, dtype=torch.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    channels, height, width = image.shape
    pixels = image.permute(1, 2, 0).reshape(height, width * channels)
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels], 1)  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    data = zlib.compress(rows.numpy().tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def data_uri(image: Tensor, white: int) -> str:
    """Return a picture as a data URI; ``white`` is the brightest level, which becomes 255."""
    levels = (image.double() * (255 / white)).round().clamp(0, 255).to(torch.uint8)
    return "data:image/png;base64," + base64.b64encode(png(levels)).decode()


def reason_not_to_show(images: Images, certificate: Certificate) -> str | None:
    """Return why the images are not those of the certificate, or cannot be shown; ``None`` if they can.

    The certificate may be of the first of the images.
    """
    samples, labels = len(certificate.labels), images.labels[: len(certificate.labels)]
    if len(images) < samples:
        return f"The certificate is of {samples} images, the data has {len(images)}."
    if not torch.equal(labels, certificate.labels):
        different = int((labels != certificate.labels).nonzero()[0])
        return f"The images are not those of the certificate: the labels differ from image {different} on."
    if certificate.input_shape[:1] not in {(channels,) for channels in _COLOURS} or len(certificate.input_shape) != 3:
        return f"Inputs of shape {tuple(certificate.input_shape)} are not images of 1 or 3 channels."
    return None


def recipe_images(run: Path, root: str | None = None) -> tuple[Images | None, str]:
    """Return the test images of the data set that the recipe of a run names; or none, and why.

    Args:
        run: directory of the run.
        root: where the data is now, if not where the recipe says.

    Raises:
        ValueError: if the run has no recipe, or a damaged one.
    """
    _, sections = recipe_sections(run)
    data = sections.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None, "The recipe does not name a data set."
    known = DATASETS.get(data["name"])
    size = data.get("size") if known is not None and known.resizable else None
    try:
        return load(data["name"], root or data.get("root"), "test", size=size), ""
    except (OSError, TypeError, ValueError) as error:
        return None, f"The data set of the recipe could not be read: {error}"
