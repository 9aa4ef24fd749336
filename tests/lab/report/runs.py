"""A run directory as training leaves it, made by a few real steps on the digits."""

import json
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import trysquare as ts
from trysquare.verify.attacks import attack_report, pgd_l2

EPSILONS = (36 / 255, 72 / 255, 108 / 255, 1.0)
RECIPE = """\
data:
  name: digits
  root: null
model:
  name: tiny
  channels: 16
loss:
  name: cross_entropy
  temperature: 0.1
optimizer:
  name: adam
  lr: 0.01
train:
  epochs: 6
  batch: 128
  seed: 0
evaluate:
  epsilons: [0.141176, 0.282353, 0.423529, 1.0]
"""


def build(channels=16):
    return nn.Sequential(
        ts.OrthoConv2d(1, channels, 3, stride=2, padding=1, padding_mode="circular"),
        ts.MaxMin(),
        ts.OrthoConv2d(channels, 2 * channels, 3, stride=2, padding=1, padding_mode="circular"),
        ts.MaxMin(),
        nn.Flatten(),
        ts.OrthoLinear(8 * channels, 10),
    )


def digits(split):
    images = ts.data.load("digits", split=split)
    return images.images.float() / images.white, images.labels


def line(kind, epoch, step, logits, labels, loss):
    radii = ts.certified_radius(logits, labels)
    return {
        "kind": kind,
        "epoch": epoch,
        "step": step,
        "loss": float(loss.detach()),
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
        "certified": {f"{e:.6g}": float((radii > e).double().mean()) for e in EPSILONS},
        "images_per_second": 9000.0 + step,
        "seconds": 0.05 * step,
        "lr": 0.01,
    }


def train(model, epochs):
    """Metrics of some epochs of plain training."""
    images, labels = digits("train")
    test_images, test_labels = digits("test")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    lines, step = [], 0
    for epoch in range(epochs):
        for rows in torch.randperm(len(labels)).split(128):
            logits = model(images[rows])
            loss = F.cross_entropy(logits / 0.1, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            lines.append(line("train", epoch, step, logits.detach(), labels[rows], loss))
        with torch.no_grad():
            logits = model(test_images)
        loss = F.cross_entropy(logits / 0.1, test_labels)
        lines.append(line("evaluation", epoch, step, logits, test_labels, loss))
    return lines


def make_run(path: Path, epochs=2, samples=80):
    """All files of a run, its certificate of the first test images."""
    path.mkdir(parents=True)
    torch.manual_seed(0)
    model = build()
    lines = train(model, epochs)
    model.eval()
    images, labels = digits("test")
    data = images[:samples], labels[:samples]
    certificate = ts.certify(model, data, epsilons=EPSILONS)
    attack = partial(pgd_l2, steps=10, restarts=1)
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "versions.json").write_text(json.dumps({"trysquare": ts.__version__, "torch": torch.__version__}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ts.save_checkpoint(path / "model.safetensors", model, "tests.lab.report.runs:build", {})
    (path / "certificate.json").write_text(certificate.to_json())
    (path / "attack.json").write_text(attack_report(model, data, certificate, attack=attack).to_json())
    (path / "audit.json").write_text(ts.audit(model, (1, 8, 8), spectra=True).to_json())
    return path
