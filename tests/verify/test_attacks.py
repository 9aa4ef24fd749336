"""Attacks against the best there is on linear models, their ball and box, and certificates that are wrong."""

import builtins
import dataclasses
import json
import math
from functools import partial

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.verify.attacks import (
    AttackReport,
    CertificateError,
    Violation,
    _Region,
    attack_report,
    autoattack_l2,
    pgd_l2,
)


def linear_model(features=16, classes=5, dtype=torch.float32):
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes, dtype=dtype))


def small_network(classes=5):
    return nn.Sequential(
        ts.OrthoConv2d(1, 4, 3, stride=2), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(64, 16), ts.MaxMin(),
        ts.UnitNormLinear(16, classes),
    )  # fmt: skip


def distances(moved, images):
    return (moved.double() - images.double()).flatten(1).norm(dim=1)


def margins(model, images, labels):
    with torch.no_grad():
        logits = model(images).double()
    true = logits.gather(1, labels[:, None])
    return (true - logits.scatter(1, labels[:, None], -math.inf)).amin(1)


def blobs(samples=60, classes=5):
    """Images of classes that are easy to tell apart."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.rand(classes, 1, 8, 8, generator=generator)
    labels = torch.arange(samples) % classes
    noise = torch.randn(samples, 1, 8, 8, generator=generator)
    return (centres[labels] + 0.15 * noise).clamp(0, 1), labels


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model, (images, labels) = small_network(), blobs()
    loss = ts.losses.OffsetCrossEntropy(margin=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    return model.eval()


def test_without_a_box_it_reaches_the_best_of_a_linear_model():
    model = linear_model(dtype=torch.float64)
    images = torch.rand(32, 16, dtype=torch.float64)
    labels = model(images).argmax(1)
    weight = model[1].weight.detach()
    before, radius = margins(model, images, labels), 0.5
    with torch.no_grad():
        logits = model(images)
    gaps = logits.gather(1, labels[:, None]) - logits - radius * torch.cdist(weight, weight)[labels]
    best = gaps.scatter(1, labels[:, None], math.inf).amin(1)
    moved = pgd_l2(model, images, labels, radius, 10, box=None)
    gain = (before - margins(model, moved, labels)) / (before - best)
    assert gain.min() > 0.99
    assert gain.max() <= 1 + 1e-9


def best_in_box(weight, image, radius):
    """Largest fall of ``weight @ x`` in ball and box: ``x = clip(image - s weight)``, ``s`` as large as fits."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        moved = (image - middle * weight).clamp(0, 1)
        low, high = (middle, high) if (moved - image).norm() <= radius else (low, middle)
    return float(weight @ (image - (image - low * weight).clamp(0, 1)))


def test_in_a_box_it_reaches_the_best_of_a_linear_model():
    model = linear_model(classes=2, dtype=torch.float64)
    images = torch.rand(16, 16, dtype=torch.float64).round(decimals=1)
    labels = model(images).argmax(1)
    weight = model[1].weight.detach()
    moved = pgd_l2(model, images, labels, 1.0, steps=100)
    gains = margins(model, images, labels) - margins(model, moved, labels)
    for image, label, gain in zip(images, labels.tolist(), gains.tolist(), strict=True):
        assert 0.99 <= gain / best_in_box(weight[label] - weight[1 - label], image, 1.0) <= 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [0.0, 1e-12, 1e-6, 1e-3, 0.3, 3.0, 1e9, math.inf])
def test_ball_and_box_are_respected_to_the_last_bit(dtype, radius):
    model = linear_model(dtype=dtype)
    images = torch.cat([torch.rand(4, 1, 4, 4), torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4)]).to(dtype)
    labels = torch.arange(6) % 5
    moved = pgd_l2(model, images, labels, radius, steps=6, restarts=3)
    assert moved.dtype == dtype
    assert moved.shape == images.shape
    assert (distances(moved, images) <= radius).all()
    assert moved.min() >= 0
    assert moved.max() <= 1
    if radius == 0:
        assert torch.equal(moved, images)


def test_a_radius_for_each_image():
    model, images = linear_model(), torch.rand(5, 1, 4, 4)
    radii = torch.tensor([0.0, 0.01, 0.1, 0.5, math.inf])
    moved = pgd_l2(model, images, model(images).argmax(1), radii)
    assert (distances(moved, images) <= radii).all()
    assert torch.allclose(distances(moved, images)[:4], radii[:4].double(), atol=1e-5)


class Flat(nn.Module):
    """Logits without slope, or with one that is not a number."""

    def __init__(self, nan=False):
        super().__init__()
        self.nan = nan

    def forward(self, x):
        flat = 0 * x.flatten(1)[:, :3]
        return (0 * x.flatten(1)[:, :3]).sqrt() if self.nan else flat


@pytest.mark.parametrize("nan", [False, True])
def test_models_without_gradients_do_not_break_it(nan):
    images = torch.rand(4, 6)
    moved = pgd_l2(Flat(nan), images, torch.tensor([0, 1, 2, 0]), 0.5, steps=3)
    assert (distances(moved, images) <= 0.5).all()
    assert moved.isfinite().all()


def test_model_and_gradients_are_left_alone():
    model = small_network().train()
    images = torch.rand(4, 1, 8, 8, requires_grad=True)
    pgd_l2(model, images, torch.tensor([0, 1, 2, 3]), 0.5, steps=2)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert images.grad is None
    assert ts.singular_values(model[0], (1, 8, 8)).max() < 1.001


def test_random_starts_come_from_the_generator():
    model, images, labels = small_network().eval(), torch.rand(4, 1, 8, 8), torch.arange(4)

    def run(seed):
        return pgd_l2(model, images, labels, 0.5, 3, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(run(0), run(0))


def test_more_runs_are_never_worse(trained):
    images, labels = blobs()
    generator = torch.Generator().manual_seed(0)
    one = pgd_l2(trained, images, labels, 1.0, 10, 1)
    three = pgd_l2(trained, images, labels, 1.0, 10, 4, generator=generator)
    assert (margins(trained, three, labels) <= margins(trained, one, labels)).all()
    assert (margins(trained, one, labels) < margins(trained, images, labels)).all()


def test_projection_is_the_nearest_point():
    centre = torch.rand(1, 3, dtype=torch.float64)
    region = _Region(centre, 0.4, (0.0, 1.0))
    grid = torch.cartesian_prod(*(3 * (torch.linspace(0, 1, 41, dtype=torch.float64),)))
    feasible = grid[(grid - centre).norm(dim=1) <= 0.4]
    for _ in range(20):
        point = 2 * torch.randn(1, 3, dtype=torch.float64)
        nearest = centre + region.projected(point - centre)
        assert float((nearest - centre).norm()) <= 0.4
        assert (nearest - point).norm() <= (feasible - point).norm(dim=1).min() + 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.full((2, 4), 1.5)}, "from 1.5 to 1.5 must be inside"),
        ({"images": torch.full((2, 4), math.nan)}, "finite"),
        ({"images": torch.zeros(2, 4, dtype=torch.uint8)}, "torch.uint8"),
        ({"radius": -1.0}, "radius=-1"),
        ({"radius": math.nan}, "radius=nan"),
        ({"radius": torch.ones(3)}, "one for each of 2"),
        ({"radius": math.inf, "box": None}, "above 1e"),
        ({"box": (1.0, 0.0)}, "box="),
        ({"steps": 0}, "steps=0"),
        ({"restarts": 0}, "restarts=0"),
        ({"labels": torch.tensor([0, 9])}, "from 0 to 9"),
    ],
)
def test_pgd_refuses_nonsense(change, message):
    arguments = {"images": torch.full((2, 4), 0.5), "labels": torch.tensor([0, 1]), "radius": 0.5, **change}
    with pytest.raises(ValueError, match=message):
        pgd_l2(nn.Linear(4, 3), **arguments)


def test_a_right_certificate_stands(trained):
    data = blobs()
    certificate = ts.certify(trained, data, epsilons=[0.1, 1.0])
    assert certificate.clean_accuracy > 0.95
    assert certificate.certified_accuracy(0.1) > 0.8
    report = attack_report(trained, data, certificate, batch_size=32)
    report.check()
    assert report.violations == ()
    assert report.samples == 60
    assert report.epsilons == (0.1, 1.0)
    for certified, attacked in zip(report.certified, report.attacked, strict=True):
        assert certified <= attacked <= report.clean == certificate.clean_accuracy
    assert report.attacked[1] < report.attacked[0]
    assert "certified <= attacked <= clean holds; no violation on 60 samples" in str(report)
    assert json.loads(report.to_json())["samples"] == 60


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_certificate_of_half_the_constant_is_caught(dtype):
    model = linear_model(64).to(dtype)
    images, labels = blobs()
    labels = model(images.to(dtype)).argmax(1)
    right = ts.certify(model, (images, labels))
    attack_report(model, (images, labels), right, [0.5], box=None).check()
    wrong = dataclasses.replace(right, radii=2 * right.radii)
    report = attack_report(model, (images, labels), wrong, [1e-4], box=None)
    assert len(report.violations) > 50
    first = report.violations[0]
    assert first.distance < first.radius
    assert first.prediction != first.label == int(labels[first.index])
    with pytest.raises(CertificateError, match=r"fell inside of their radius; the first at index"):
        report.check()
    assert "WRONG" in str(report)


def test_a_violation_is_found_at_other_radii_too():
    # Certified for ever, and the attack at a radius that is larger than any box finds it.
    model = linear_model(4, 2)
    images = torch.full((3, 4), 0.5)
    labels = model(images).argmax(1)
    certificate = ts.certify(model, (images, labels))
    boundless = dataclasses.replace(certificate, radii=torch.full((3,), math.inf, dtype=torch.float64))
    report = attack_report(model, (images, labels), boundless, [0.0, 100.0], box=None)
    assert len(report.violations) == 3
    assert report.attacked == (1.0, 0.0)
    assert AttackReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"epsilons": 3}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not an attack report"):
        AttackReport.from_json(text)


def test_accuracies_in_the_wrong_order_are_caught():
    report = AttackReport((0.5,), (0.9,), (0.8,), 0.95, 10, ())
    with pytest.raises(CertificateError, match=r"certified 0\.9000 <= attacked 0\.8000"):
        report.check()
    violation = Violation(3, 0.5, 0.4, 1, 2)
    with pytest.raises(CertificateError, match=r"label 1 became 2 at distance 0\.4, certified up to 0\.5"):
        dataclasses.replace(report, violations=(violation,)).check()


def test_the_data_must_be_that_of_the_certificate():
    model = linear_model()
    images, labels = torch.rand(6, 1, 4, 4), torch.arange(6) % 5
    certificate = ts.certify(model, (images, labels))
    with pytest.raises(ValueError, match="samples 0 to 5 do not have the labels"):
        attack_report(model, (images, labels.flip(0)), certificate)
    with pytest.raises(ValueError, match="of 6 samples, the data has 5"):
        attack_report(model, (images[:5], labels[:5]), certificate)


@pytest.mark.parametrize("classes", [2, 5])
def test_autoattack(trained, classes):
    pytest.importorskip("pyautoattack")
    if classes == 5:
        model, (images, labels), attacks = trained, blobs(20), ["apgd-ce", "apgd-t"]
    else:
        model, images, attacks = linear_model(64, 2).eval(), torch.rand(4, 1, 8, 8), None
        labels = model(images).argmax(1)
    chance = torch.get_rng_state()
    moved = autoattack_l2(model, images, labels, 1.0, attacks=attacks)
    assert torch.equal(torch.get_rng_state(), chance)
    assert (distances(moved, images) <= 1.0).all()
    assert moved.min() >= 0
    assert moved.max() <= 1
    right = (margins(model, moved, labels) > 0).double().mean()
    assert right < (margins(model, images, labels) > 0).double().mean()


def test_autoattack_finds_no_violation(trained):
    pytest.importorskip("pyautoattack")
    data = blobs(20)
    certificate = ts.certify(trained, data, epsilons=[0.3])
    attack_report(trained, data, certificate, attack=partial(autoattack_l2, attacks=["apgd-ce"])).check()


def test_autoattack_refuses_nonsense():
    images, labels = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="box="):
        autoattack_l2(linear_model(), images, labels, 0.5, box=None)
    with pytest.raises(ValueError, match="radius=0"):
        autoattack_l2(linear_model(), images, labels, 0)


def test_autoattack_says_how_to_install_it(monkeypatch):
    genuine = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "pyautoattack":
            raise ImportError(name)
        return genuine(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'trysquare\[attack\]'"):
        autoattack_l2(linear_model(), torch.rand(2, 1, 4, 4), torch.tensor([0, 1]), 0.5)
