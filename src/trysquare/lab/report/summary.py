"""What a reader wants to know first: the numbers, what they mean, and whether to trust them."""

from __future__ import annotations

import math

from trysquare.lab.report.elements import section
from trysquare.lab.report.formats import bound, count, duration, epsilon, percent, radius, scientific
from trysquare.lab.report.markup import Markup, tag
from trysquare.lab.report.reading import COMMANDS, Run
from trysquare.verify.attacks import CertificateError
from trysquare.verify.certification import Certificate


def warnings(run: Run) -> list[Markup]:
    """What speaks against the certificate, at the top of the page."""
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


def _disproof(run: Run) -> CertificateError | None:
    """What the attack has shown to be wrong."""
    try:
        if run.attack is not None:
            run.attack.check()
    except CertificateError as error:
        return error
    return None


def _same_certificate(run: Run) -> bool:
    """Whether the attack was made for the certificate; not known, so granted, if it was on fewer samples."""
    attack, certificate = run.attack, run.certificate
    if attack is None or attack.samples != len(certificate.radii):
        return True
    pairs = zip(attack.epsilons, attack.certified, strict=True)
    return all(abs(certificate.certified_accuracy(e) - share) < 1e-9 for e, share in pairs)


def headline(run: Run) -> Markup:
    """The result in a sentence."""
    certificate = run.certificate
    first = min(certificate.epsilons)
    proved = "it is proved" if _disproof(run) is None else "the certificate wrongly claims"
    return tag(
        "p",
        "Of ",
        tag("b", count(len(certificate.radii))),
        " test images the network classifies ",
        tag("b", percent(certificate.clean_accuracy)),
        " correctly. For ",
        tag("b", percent(certificate.certified_accuracy(first)), class_="accent"),
        f" {proved} that no change of length up to {epsilon(first)} turns the answer.",
        class_="headline",
    )


def key_numbers(run: Run) -> Markup:
    """Clean, certified and attacked accuracy as tiles."""
    certificate = run.certificate
    attacked = {} if run.attack is None else dict(zip(run.attack.epsilons, run.attack.attacked, strict=True))
    tiles = [_tile("clean", certificate.clean_accuracy, "no attack", None)]
    for e in certificate.epsilons:
        under = attacked.get(e)
        note = "not attacked" if under is None else f"attacked {percent(under)}"
        tiles.append(_tile(f"certified at {epsilon(e)}", certificate.certified_accuracy(e), note, under))
    return tag("ul", tiles, class_="tiles")


def _tile(name: str, share: float, note: str, mark: float | None) -> Markup:
    bar = tag("span", class_="fill", style=f"width:{100 * share:.2f}%")
    tick = None if mark is None else tag("span", class_="mark", style=f"left:{100 * mark:.2f}%")
    class_ = "tile clean" if name == "clean" else "tile"
    meter = tag("span", bar, tick, class_="meter", aria_hidden="true")
    parts = [tag("span", text, class_=kind) for text, kind in ((name, "name"), (percent(share), "value"))]
    return tag("li", parts, meter, tag("span", note, class_="under"), class_=class_)


def facts(run: Run) -> Markup:
    """The other numbers."""
    certificate = run.certificate
    kind = "of the features" if certificate.pairwise else "of all logits"
    samples = certificate.measured_samples
    measured = f"measured on {count(samples)} images" if samples else "not measured"
    entries = [
        ("Lipschitz bound", bound(certificate.lipschitz), kind),
        ("Evaluation error", scientific(certificate.evaluation_error), measured),
        ("Median radius", radius(float(certificate.radii.median())), "of all images, wrong ones at 0"),
        ("Parameters", count(run.parameters), " × ".join(map(str, certificate.input_shape)) + " inputs"),
        *_training(run),
    ]
    pairs = [tag("div", tag("dt", name), tag("dd", value, tag("small", note))) for name, value, note in entries]
    return tag("dl", pairs, class_="facts")


def _training(run: Run) -> list[tuple[str, str, str]]:
    """How long it took, if that was recorded."""
    if not run.metrics or "seconds" not in run.metrics[-1].values:
        return []
    last = run.metrics[-1]
    return [("Training", duration(last.values["seconds"]), f"{count(int(last.step))} steps, evaluation included")]


def meaning(run: Run) -> Markup:
    """What the certificate proves and assumes, in plain language."""
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
        f"This holds for every attack, known or not. It follows from the weights in use: {source}. Assumed are float64 "
        "arithmetic by IEEE 754. Rounding errors of the evaluation in float64 are bounded, and taken off."
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
        f"kind is known to about ±{100 * spread:.1f} percentage points. Wrong labels. Weights that model.pt did not "
        "hold when the certificate was made."
    )
