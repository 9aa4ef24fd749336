"""Prediction sets against brute force: ranks, linear models whose worst case is known, coverage of many draws."""

import math

import pytest
import torch
from torch import nn

import trysquare as ts

CLASSES = 5


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)).double()


def labelled(model, samples, seed=1):
    """Draw inputs, and labels that a softmax of the logits draws: a model that knows its data."""
    made = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(samples, 1, 3, 4, generator=made, dtype=torch.float64)
    with torch.no_grad():
        chances = torch.softmax(3 * model(x), 1)
    return x, torch.multinomial(chances, 1, generator=made).squeeze(1)


def plain_scores(model, x, score, temperature):
    with torch.no_grad():
        logits = model(x)
    return logits if score == "logit" else torch.softmax(logits / temperature, 1)


@pytest.mark.parametrize(("score", "temperature"), [("logit", 1.0), ("softmax", 1.0), ("softmax", 0.2)])
@pytest.mark.parametrize(("samples", "alpha"), [(9, 0.1), (99, 0.1), (60, 0.37), (40, 0.9)])
def test_sets_are_those_of_the_quantile(score, temperature, samples, alpha):
    model = linear()
    x, y = labelled(model, samples)
    predictor = ts.conformal.calibrate(model, (x, y), alpha, score=score, temperature=temperature, batch_size=7)
    right = plain_scores(model, x, score, temperature).gather(1, y[:, None]).squeeze(1)
    # The level ⌈(n + 1)(1 - α)⌉ / n of what does not conform, as it is usually written.
    threshold = -(-right).sort().values[math.ceil((samples + 1) * (1 - alpha) - 1e-9) - 1]
    fresh, _ = labelled(model, 50, seed=2)
    wanted = plain_scores(model, fresh, score, temperature) >= threshold
    assert torch.equal(predictor.sets(fresh), wanted)


@pytest.mark.parametrize("score", ["logit", "softmax"])
def test_coverage_of_fresh_samples_is_as_promised(score):
    model, alpha, runs, samples = linear(), 0.2, 40, 100
    missed = []
    for seed in range(runs):
        predictor = ts.conformal.calibrate(model, labelled(model, samples, 100 + seed), alpha, score=score)
        x, y = labelled(model, 200, 500 + seed)
        missed.append(1 - ts.conformal.coverage(predictor.sets(x), y))
    # Exactly ⌊α (n + 1)⌋ / (n + 1) in the mean; each run has a standard deviation of about 0.05.
    assert abs(sum(missed) / runs - math.floor(alpha * (samples + 1)) / (samples + 1)) < 4 * 0.05 / math.sqrt(runs)


@pytest.mark.parametrize("score", ["logit", "softmax"])
def test_whatever_moves_an_image_its_class_stays_in_the_set(score):
    model, radius = linear(), 0.4
    predictor = ts.conformal.calibrate(model, labelled(model, 99), 0.1, score=score)
    x, _ = labelled(model, 30, seed=3)
    before = predictor.sets(x)
    weight = model[1].weight.detach()
    steps = [-row / row.norm() for row in weight]  # the worst for each logit, and others
    steps += [(b - a) / (b - a).norm() for a in weight for b in weight if not torch.equal(a, b)]
    steps += [step / step.norm() for step in torch.randn(10, 12, dtype=torch.float64)]
    for step in steps:
        moved = x + radius * step.view(1, 1, 3, 4)
        assert bool((predictor.sets(moved, radius * (1 + 1e-12)) | ~before).all())


def test_robust_sets_of_a_linear_model_hold_what_can_be_reached_and_no_more():
    model, radius = linear(), 0.4
    predictor = ts.conformal.calibrate(model, labelled(model, 99), 0.1)
    x, _ = labelled(model, 200, seed=3)
    weight = model[1].weight.detach()
    reached = torch.stack(
        [
            predictor.sets(x + radius * (row / row.norm()).view(1, 1, 3, 4))[:, number]
            for number, row in enumerate(weight)
        ],
        dim=1,
    )
    robust = predictor.sets(x, radius)
    assert torch.equal(robust, reached)
    assert ts.conformal.mean_size(robust) > ts.conformal.mean_size(predictor.sets(x))


def test_softmax_sets_shrink_by_at_most_what_pairs_can_move():
    """Of two classes the softmax is a function of one difference, so its robust sets are exact too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    made = torch.Generator().manual_seed(5)
    x, y = torch.randn(400, 1, 3, 4, generator=made, dtype=torch.float64), torch.arange(400) % 2
    predictor = ts.conformal.calibrate(model, (x[:199], y[:199]), 0.3, score="softmax", temperature=0.5)
    apart = (model[1].weight[0] - model[1].weight[1]).detach()
    towards = 0.1 * (apart / apart.norm()).view(1, 1, 3, 4)
    found = predictor.sets(x[199:], 0.1)
    assert torch.equal(found[:, 0], predictor.sets(x[199:] + towards)[:, 0])
    assert torch.equal(found[:, 1], predictor.sets(x[199:] - towards)[:, 1])


def test_a_network_without_a_linear_head_has_sets_too():
    torch.manual_seed(0)
    model = nn.Sequential(ts.OrthoConv2d(1, 4, 3, stride=2), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(16, 3), ts.Abs())
    x = torch.randn(50, 1, 4, 4)
    for score in ("logit", "softmax"):
        predictor = ts.conformal.calibrate(model, (x, torch.arange(50) % 3), 0.2, score=score)
        small, large = (predictor.sets(x, radius) for radius in (0.0, 0.5))
        assert bool((large | ~small).all())
        assert bool(predictor.sets(x, 100.0).all())


def test_a_model_that_was_trained_on_is_refused():
    model = linear()
    predictor = ts.conformal.calibrate(model, labelled(model, 20), 0.2)
    with torch.no_grad():
        model[1].weight.mul_(1.5)
    with pytest.raises(ts.lipschitz.NoRuleError, match="was changed"):
        predictor.sets(torch.randn(2, 1, 3, 4))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"alpha": 0.0}, ValueError, "above 0 and below 1"),
        ({"alpha": 1.0}, ValueError, "above 0 and below 1"),
        ({"alpha": "a"}, TypeError, "must be a number"),
        ({"alpha": 0.04}, ValueError, "20 samples are too few for alpha=0.04.*at least 24 samples"),
        ({"score": "sigmoid"}, ValueError, "score"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"batch_size": 0}, ValueError, "batch_size"),
    ],
)
def test_bad_arguments_are_refused(options, error, words):
    model = linear()
    with pytest.raises(error, match=words):
        ts.conformal.calibrate(model, labelled(model, 20), **options)


def test_bad_images_sets_and_radii_are_refused():
    model = linear()
    predictor = ts.conformal.calibrate(model, labelled(model, 20), 0.2)
    x = torch.randn(2, 1, 3, 4)
    for radius in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="radius"):
            predictor.sets(x, radius)
    with pytest.raises(ValueError, match="images of shape"):
        predictor.sets(torch.randn(2, 1, 4, 4))
    with pytest.raises(ValueError, match="there are no images"):
        predictor.sets(x[:0])
    with pytest.raises(ValueError, match="too few"):
        ts.conformal.calibrate(model, (x[:0], torch.zeros(0, dtype=torch.long)), 0.2)
    for wrong in (torch.ones(3), torch.ones(0, 2, dtype=torch.bool), [[True]]):
        with pytest.raises(TypeError, match="booleans"):
            ts.conformal.mean_size(wrong)
