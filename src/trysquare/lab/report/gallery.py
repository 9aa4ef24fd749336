"""The images that the network is surest of, and those that it is not."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trysquare.lab.data import Images
from trysquare.lab.report.elements import section
from trysquare.lab.report.formats import radius
from trysquare.lab.report.markup import Markup, join, tag
from trysquare.lab.report.pictures import data_uri, reason_not_to_show
from trysquare.lab.report.reading import Run
from trysquare.verify.certification import Certificate

# In each row of images.
PICTURES = 10
# Below this many pixels an image is enlarged pixel by pixel.
_SMALL_IMAGE = 64


def gallery(run: Run, images: Images | None, why_none: str, names: Callable[[int], str]) -> Markup:
    """The images with the largest and the smallest radius, and some with wrong answers."""
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


def _picture_row(run: Run, images: Images, names: Callable[[int], str], title: str, found: Tensor, none: str) -> Markup:
    heading = tag("h3", title)
    if not len(found):
        return join(heading, tag("p", none, class_="quiet"))
    rows = found[:PICTURES]
    pixels = images.stack(rows)
    small = max(pixels.shape[-2:]) < _SMALL_IMAGE
    figures = [
        _picture(run.certificate, row, data_uri(image, images.white), small, names)
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
