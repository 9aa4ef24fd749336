"""Losses against closed forms, finite differences and their invariances."""

import math
import warnings

import pytest
import torch
from torch import nn

import trysquare as ts
from benchmarks import peers
from trysquare.nn.losses import (
    LOSSES,
    BinaryCrossEntropy,
    BinaryHKR,
    CategoricalHinge,
    CertificateRegularizer,
    CosineLoss,
    CosineVRALoss,
    EMMALoss,
    LogitAnnealing,
    LogSumExpHKR,
    MulticlassHKR,
    OffsetCrossEntropy,
    SoftHKR,
    TradesLoss,
    check_last_layer,
    make_loss,
    margin_for_radius,
)

SQRT2 = math.sqrt(2)
BINARY = ["hkr-binary", "binary-cross-entropy"]
MULTICLASS = [name for name in LOSSES if name not in BINARY]
# A shift of all logits changes nothing for what sees differences only.
OF_DIFFERENCES = [
    "offset-cross-entropy", "categorical-hinge", "emma", "trades", "logit-annealing", "certificate-regularizer",
]  # fmt: skip


def batch(samples=6, classes=5, dtype=torch.float64, scale=1.0):
    return scale * torch.randn(samples, classes, dtype=dtype), torch.arange(samples) % classes


def softmax_of(row, label):
    exponentials = [math.exp(value) for value in row]
    return exponentials[label] / sum(exponentials)


@pytest.mark.parametrize("name", [name for name in MULTICLASS if name != "emma"])
def test_gradients_are_those_of_finite_differences(name):
    logits, labels = batch()
    # The soft version weighs with a mean that has no gradient: below the margin it is constant.
    scale = 0.1 if name == "hkr-soft" else 1.0
    for reduction in ("mean", "sum", "none"):
        loss = make_loss(name, reduction=reduction)
        assert torch.autograd.gradcheck(lambda z, loss=loss: loss(z, labels), (scale * logits).requires_grad_())


def test_gradient_of_emma_is_that_of_cross_entropy_at_the_moved_logits():
    logits, labels = batch()
    head = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    logits.requires_grad_()
    EMMALoss(radius=10.0, floor=1.0)(logits, labels, head).backward()
    moved = logits.detach() + 10 * torch.cdist(head, head).detach()[labels]
    expected = (moved.softmax(1) - torch.eye(5, dtype=torch.float64)[labels]) / len(labels)
    assert torch.allclose(logits.grad, expected)
    assert head.grad.isfinite().all()
    assert head.grad.abs().max() > 0


def test_gradient_reaches_the_head():
    logits, labels = batch()
    head = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    loss = CertificateRegularizer(gamma=0.7)
    assert torch.autograd.gradcheck(lambda z, w: loss(z, labels, w), (3 * logits, head))


def test_binary_gradients():
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    assert torch.autograd.gradcheck(lambda z: BinaryHKR(alpha=0.3)(z, labels), logits)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_have_finite_losses_and_gradients(name, dtype):
    labels = torch.tensor([0, 1, 0, 1])
    rows = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0], [0.0, 0.0, 0.0], [1e-7, 1e-7, -1e-7]])
    logits = (rows[:, 0] if name in BINARY else rows).to(dtype).requires_grad_()
    loss = make_loss(name)(logits, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", MULTICLASS)
def test_half_precision_is_computed_in_float32(name):
    logits, labels = batch(dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = make_loss(name)(logits, labels)
    assert torch.equal(inside, make_loss(name)(logits.float(), labels))


@pytest.mark.parametrize("name", MULTICLASS)
def test_order_of_samples_and_names_of_classes_do_not_matter(name):
    logits, labels = batch()
    loss, samples, classes = make_loss(name), torch.randperm(6), torch.randperm(5)
    expected = loss(logits, labels)
    assert torch.allclose(loss(logits[samples], labels[samples]), expected)
    assert torch.allclose(loss(logits[:, classes], classes.argsort()[labels]), expected)


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_a_shift_of_all_logits_does_not_matter(name):
    logits, labels = batch()
    assert torch.allclose(make_loss(name)(logits + 3.7, labels), make_loss(name)(logits, labels))


@pytest.mark.parametrize("name", MULTICLASS)
def test_reductions(name):
    logits, labels = batch()
    values = make_loss(name, reduction="none")(logits, labels)
    assert values.shape == (6,)
    assert torch.allclose(values.mean(), make_loss(name)(logits, labels))
    assert torch.allclose(values.sum(), make_loss(name, reduction="sum")(logits, labels))


def test_offset_cross_entropy_closed_form():
    row, margin, temperature = [1.2, -0.3, 0.4], 0.7, 0.25
    value = OffsetCrossEntropy(margin, temperature)(torch.tensor([row], dtype=torch.float64), torch.tensor([2]))
    moved = [1.2 / temperature, -0.3 / temperature, (0.4 - margin) / temperature]
    assert float(value) == pytest.approx(-temperature * math.log(softmax_of(moved, 2)))


def test_offset_cross_entropy_without_margin_is_cross_entropy():
    logits, labels = batch()
    expected = nn.functional.cross_entropy(logits, labels)
    assert torch.allclose(OffsetCrossEntropy(margin=0.0, temperature=1.0)(logits, labels), expected)


def test_offset_cross_entropy_is_near_a_hinge():
    logits, labels = batch(scale=3.0)
    margin, temperature = 1.5 * SQRT2, 0.125
    true = logits.gather(1, labels[:, None])
    lead = (true - logits.scatter(1, labels[:, None], -math.inf).amax(1, keepdim=True)).squeeze(1)
    values, hinge = OffsetCrossEntropy(reduction="none")(logits, labels), (margin - lead).clamp_min(0)
    assert (values >= hinge - 1e-12).all()
    assert (values <= hinge + temperature * math.log(5) + 1e-12).all()


def test_cosine_closed_form_and_scale():
    logits = torch.tensor([[3.0, 4.0], [-1.0, 0.0]], dtype=torch.float64)
    values = CosineLoss(reduction="none")(logits, torch.tensor([0, 0]))
    assert values.tolist() == pytest.approx([1 - 0.6, 2.0])
    for scale in (1e-3, 1e30, 1e300):
        assert torch.allclose(CosineLoss(reduction="none")(scale * logits, torch.tensor([0, 0])), values)


def test_cosine_of_zero_logits_has_a_gradient():
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = CosineLoss()(logits, torch.tensor([1]))
    loss.backward()
    assert float(loss.detach()) == 1
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] < 0


def test_binary_hkr_closed_form():
    values, labels = torch.tensor([[2.0], [0.1], [-0.2]], dtype=torch.float64), torch.tensor([1, 1, 0])
    hinge = (0 + 0.4 + 0.3) / 3
    distance = (2.0 + 0.1) / 2 - (-0.2)
    for alpha in (0.0, 0.3, 1.0):
        expected = alpha * hinge - (1 - alpha) * distance
        assert float(BinaryHKR(alpha)(values, labels)) == pytest.approx(expected)
    one_class = BinaryHKR(0.0)(values, torch.tensor([1, 1, 1]))
    assert float(one_class) == pytest.approx(-1.9 / 3)


def test_binary_losses_of_several_questions_are_the_means_over_them():
    logits, labels = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7, 3))
    for loss in (BinaryHKR(0.3), BinaryCrossEntropy(0.7, 0.2)):
        each = [loss(logits[:, k], labels[:, k]) for k in range(3)]
        torch.testing.assert_close(loss(logits, labels), torch.stack(each).mean())
        torch.testing.assert_close(loss(logits[:, :1], labels[:, 0]), each[0])
        with pytest.raises(ValueError, match="a label each"):
            loss(logits, labels[:, :2])


def test_binary_cross_entropy_is_that_of_torch_and_of_two_logits():
    logits, labels = torch.randn(7, dtype=torch.float64), torch.randint(2, (7,))
    expected = nn.functional.binary_cross_entropy_with_logits(4 * logits, labels.double()) / 4
    torch.testing.assert_close(BinaryCrossEntropy(temperature=0.25)(logits, labels), expected)
    both = torch.stack((-logits / 2, logits / 2), 1)
    torch.testing.assert_close(BinaryCrossEntropy(1.4, 0.3)(logits, labels), OffsetCrossEntropy(0.7, 0.3)(both, labels))


def test_categorical_hinge_is_the_limit_of_the_offset_cross_entropy():
    logits, labels = batch()
    values = CategoricalHinge(0.8, reduction="none")(logits, labels)
    limit = OffsetCrossEntropy(0.8, 1e-4, reduction="none")(logits, labels)
    torch.testing.assert_close(values, limit, atol=1e-3, rtol=0)


def test_trades_closed_form():
    """Against the two distributions written out, with a head of unequal rows."""
    logits, labels = batch()
    head = torch.randn(5, 4, dtype=torch.float64)
    answers = logits.argmax(1)
    value = TradesLoss(0.3, weight=0.7, lipschitz=2.0, reduction="none")(logits, labels, head)
    for row, label, answer, found in zip(logits, labels, answers, value, strict=True):
        reached = [float(row[j] + 0.3 * 2.0 * (head[answer] - head[j]).norm()) for j in range(5) if j != answer]
        p = row.softmax(0)
        worst = torch.cat([row, torch.tensor([max(reached)], dtype=torch.float64)]).softmax(0)
        divergence = (p * (p / worst[:5]).log()).sum()
        torch.testing.assert_close(found, -p[label].log() + 0.7 * divergence)
    plain = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(TradesLoss(weight=0.0)(logits, labels), plain)


def test_cosine_vra_closed_form():
    row, labels = torch.tensor([[1.0, 0.8, -5.0]], dtype=torch.float64), torch.tensor([0])
    missed = [0.3 - 0.2 / (2 * SQRT2), 0.0]
    weights = [math.exp(value) / sum(map(math.exp, missed)) for value in missed]
    cosine = 1 - 1 / math.sqrt(1 + 0.64 + 25)
    value = CosineVRALoss(0.4, 0.3, lipschitz=2.0)(row, labels)
    assert float(value) == pytest.approx(0.6 * cosine + 0.4 * weights[0] * missed[0])


def test_cosine_vra_is_that_of_orthogonium():
    if not peers.installed():
        pytest.skip("the extra of peers is not installed")
    logits, labels = batch(scale=0.1)
    theirs = peers.load("losses", "Cosine_VRA_Loss")(gamma=0.3, L=1.0, eps=0.2, last_layer_type="global")
    found = CosineVRALoss(0.3, 0.2)(logits, labels)
    torch.testing.assert_close(found, theirs(logits, labels) + 0.7, check_dtype=False)


def test_emma_of_another_loss():
    logits, labels = batch()
    moved = logits + SQRT2 * 10.0 * (~nn.functional.one_hot(labels, 5).bool())
    loss = EMMALoss(radius=10.0, floor=1.0, base="logit-annealing")
    torch.testing.assert_close(loss(logits, labels), LogitAnnealing()(moved, labels))
    with pytest.raises(ValueError, match="base="):
        EMMALoss(base=EMMALoss())


def warned(model, loss):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_last_layer(model, loss)
    return str(found[0].message) if found else ""


def test_the_last_layer_is_checked():
    orthogonal, unit = (nn.Sequential(nn.Flatten(), kind(8, 4)) for kind in (ts.OrthoLinear, ts.UnitNormLinear))
    with torch.no_grad():
        unit[1].weight = torch.eye(8)[:4]
        opposite = nn.Sequential(ts.UnitNormLinear(8, 4))
        opposite[0].weight = torch.eye(8)[[0, 0, 1, 2]] * torch.tensor([[1.0], [-1.0], [1.0], [1.0]])
    large = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    nn.init.constant_(large[0].weight, 2.0)
    for name in LOSSES:
        assert not warned(orthogonal, make_loss(name))
        assert not warned(unit, make_loss(name))
    text = warned(opposite, OffsetCrossEntropy(margin=1.0))
    assert "rows at a distance 2, not at most 1.414" in text
    assert "certifies a radius of 0.5" in text
    radius = ts.certified_radius(torch.tensor([[1.0, 0.0, -9.0, -9.0]]), torch.tensor([0]), 1.0, opposite[0].weight)
    assert float(radius) == pytest.approx(0.5, rel=1e-5)
    assert "head=layer.weight" in warned(opposite, EMMALoss())
    assert not warned(opposite, EMMALoss(lipschitz=1.5))
    assert not warned(opposite, CosineLoss())
    assert not warned(opposite, BinaryHKR())
    assert "norm 5.657" in warned(large, BinaryCrossEntropy(margin=1.0))
    assert "radius of 0.0884" in warned(large, BinaryCrossEntropy(margin=1.0))
    with pytest.raises(ValueError, match="no linear layer"):
        check_last_layer(nn.ReLU(), EMMALoss())
    with pytest.raises(TypeError, match="CrossEntropyLoss"):
        check_last_layer(large, nn.CrossEntropyLoss())


def test_binary_hkr_refuses_several_logits():
    with pytest.raises(ValueError, match=r"\(3, 2\) must be"):
        BinaryHKR()(torch.randn(3, 2), torch.tensor([0, 1, 0]))


def test_multiclass_hkr_is_the_mean_of_one_against_the_rest():
    logits, labels = batch()
    binary = [BinaryHKR(0.0)(logits[:, c], (labels == c).long()) for c in range(5)]
    assert torch.allclose(MulticlassHKR(0.0)(logits, labels), torch.stack(binary).mean())
    row = torch.tensor([[0.2, 0.4, -1.0]], dtype=torch.float64)
    hinge = MulticlassHKR(1.0, 1.0)(row, torch.tensor([0]))
    assert float(hinge) == pytest.approx((2 * 0.3 + 0.9 + 0.0) / 3)


def test_soft_hkr_closed_form_and_limits():
    row, labels = torch.tensor([[0.2, 0.4, -1.0]], dtype=torch.float64), torch.tensor([0])
    weight = math.exp(0.4) / (math.exp(0.4) + math.exp(-1.0))
    distance = 0.2 - (weight * 0.4 + (1 - weight) * -1.0)
    hinge = 0.3 + weight * 0.9
    assert float(SoftHKR(0.6)(row, labels)) == pytest.approx(0.6 * hinge - 0.4 * distance)
    assert float(SoftHKR(0.0, temperature=0.0)(row, labels)) == pytest.approx(-(0.2 + 0.3))
    assert float(SoftHKR(0.0, temperature=1e3)(row, labels)) == pytest.approx(0.2)


def test_soft_hkr_softens_large_logits():
    row, labels = torch.tensor([[20.0, 40.0, -60.0]], dtype=torch.float64), torch.tensor([0])
    weight = 1 / (1 + math.exp(-100 / 40))
    assert float(SoftHKR(0.0)(row, labels)) == pytest.approx(-(20 - (weight * 40 - (1 - weight) * 60)))


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_log_sum_exp_is_just_above_the_largest_other(classes):
    logits, labels = batch(8, classes)
    labels = labels % classes
    true = logits.gather(1, labels[:, None]).squeeze(1)
    largest = logits.scatter(1, labels[:, None], -math.inf).amax(1)
    smooth = LogSumExpHKR(0.0, min_margin=0.8, penalty=0.5, reduction="none")(logits, labels) + true
    assert (smooth >= largest - 1e-12).all()
    assert (smooth <= largest + 0.5 * 0.4 + 1e-12).all()
    if classes == 2:
        assert torch.allclose(smooth, largest)


def test_log_sum_exp_hinge():
    row, labels = torch.tensor([[0.2, 0.4, -30.0]], dtype=torch.float64), torch.tensor([0])
    assert float(LogSumExpHKR(1.0)(row, labels)) == pytest.approx(0.3 + 0.9)


def test_emma_closed_form():
    # The second class is level at 0.2 of the radius, the third is out of reach, the fourth wins already.
    row, labels = torch.tensor([[1.0, 0.8, -5.0, 3.0]], dtype=torch.float64), torch.tensor([0])
    reach = 2.0 * SQRT2 * 0.5
    moved = [1.0, 1.0, -5.0 + reach, 3.0 + 0.01 * reach]
    value = EMMALoss(radius=0.5, lipschitz=2.0)(row, labels)
    assert float(value) == pytest.approx(-math.log(softmax_of(moved, 0)))


def test_emma_with_the_rows_of_an_orthogonal_head_is_emma_without():
    logits, labels = batch()
    loss = EMMALoss(radius=0.5)
    assert torch.allclose(loss(logits, labels, torch.eye(5, dtype=torch.float64)), loss(logits, labels))
    assert torch.allclose(EMMALoss(radius=0.0)(logits, labels), nn.functional.cross_entropy(logits, labels))


def test_emma_with_equal_rows():
    logits, labels = batch()
    logits.requires_grad_()
    head = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
    EMMALoss()(logits, labels, head).backward()
    assert logits.grad.isfinite().all()
    assert head.grad.isfinite().all()


def test_logit_annealing_closed_form():
    row, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    p = softmax_of([(1.0 - 0.5) / 0.75, 0.0], 0)
    value = LogitAnnealing(0.75, 0.5, 3.0)(row, labels)
    assert float(value) == pytest.approx(-0.75 * (1 - p) ** 3 * math.log(p))
    plain = OffsetCrossEntropy(0.5, 0.75)(row, labels)
    assert float(LogitAnnealing(0.75, 0.5, 0.0)(row, labels)) == pytest.approx(float(plain))


def test_roots_of_no_doubt_have_a_gradient():
    logits = torch.tensor([[500.0, 0.0]], requires_grad=True)
    LogitAnnealing(beta=0.5)(logits, torch.tensor([0])).backward()
    assert logits.grad.isfinite().all()


def test_certificate_regularizer_takes_off_the_radius():
    logits, labels = batch()
    for head in (None, torch.randn(5, 7, dtype=torch.float64)):
        radii = ts.certified_radius(logits, labels, 2.0, head)
        base = OffsetCrossEntropy(reduction="none")
        loss = CertificateRegularizer(0.3, base, lipschitz=2.0, reduction="none")
        assert torch.allclose(loss(logits, labels, head), base(logits, labels) - 0.3 * radii)
    assert float(CertificateRegularizer(base="cosine")(torch.ones(1, 2), torch.tensor([0]))) == pytest.approx(
        1 - 1 / SQRT2
    )


def test_certificate_regularizer_with_equal_rows_is_the_base():
    logits, labels = batch()
    base = nn.functional.cross_entropy(logits, labels)
    assert torch.allclose(CertificateRegularizer()(logits, labels, torch.ones(5, 2, dtype=torch.float64)), base)


@pytest.mark.parametrize("base", [nn.CrossEntropyLoss(), BinaryHKR(), BinaryCrossEntropy(), EMMALoss()])
def test_certificate_regularizer_refuses_other_bases(base):
    with pytest.raises(ValueError, match="base="):
        CertificateRegularizer(base=base)


@pytest.mark.parametrize(("radius", "lipschitz", "scale"), [(0.5, 1.0, 1.0), (36 / 255, 3.0, 1.0), (0.5, 2.0, 0.25)])
def test_the_margin_for_a_radius_certifies_it(radius, lipschitz, scale):
    margin = margin_for_radius(radius, lipschitz, scale)
    logits = torch.tensor([[margin, 0.0, -1.0]], dtype=torch.float64)
    # The constant from the pixels is that of the network over what they are divided by.
    certified = ts.certified_radius(logits, torch.tensor([0]), lipschitz / scale)
    assert float(certified) == pytest.approx(radius, rel=1e-12)


def test_the_margin_of_a_network_behind_a_scaling_certifies_the_radius():
    weight = torch.linalg.qr(torch.randn(8, 3, dtype=torch.float64))[0].T
    network = nn.Linear(8, 3, bias=False, dtype=torch.float64)
    network.weight.data = 2 * weight

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x / 0.25)

    bound = ts.lipschitz_bound(Scaled(), (8,))
    margin = margin_for_radius(0.3, lipschitz=2.0, scale=0.25)
    radius = ts.certified_radius(torch.tensor([[margin, 0.0, 0.0]], dtype=torch.float64), torch.tensor([0]), bound)
    assert float(radius) == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize("arguments", [(-1,), (math.nan,), (1, math.inf), (1, 1, 0), ("1",), (True,)])
def test_margin_for_radius_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="must be a finite number"):
        margin_for_radius(*arguments)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.randn(3), torch.tensor([0, 1, 0]), r"\(3,\)"),
        (torch.randn(3, 1), torch.tensor([0, 0, 0]), "at least 2 classes"),
        (torch.ones(3, 2, dtype=torch.int64), torch.tensor([0, 1, 0]), "torch.int64 must be floating point"),
        (torch.randn(3, 2), torch.tensor([0, 1]), "one for each of the 3 rows"),
        (torch.randn(3, 2), torch.tensor([0.0, 1.0, 0.0]), "must be integers"),
        (torch.randn(3, 2), torch.tensor([True, False, True]), "must be integers"),
    ],
)
def test_shapes_and_types_are_checked(logits, labels, message):
    for loss in (OffsetCrossEntropy(), EMMALoss()):
        with pytest.raises(ValueError, match=message):
            loss(logits, labels)


def test_head_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"head of shape \(4, 2\)"):
        EMMALoss()(*batch(), torch.ones(4, 2))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("cosin", {}, "did you mean 'cosine'"),
        ("nothing like it", {}, "unknown loss 'nothing like it': known: offset"),
        ("emma", {"raduis": 1.0}, "unknown parameter of loss emma 'raduis': did you mean 'radius'"),
        ("hkr", {"alpha": 2.0}, "alpha=2.0 must be a finite number, at least 0 and at most 1.0"),
        ("hkr", {"min_margin": 0.0}, "min_margin=0.0 must be a finite number, positive"),
        ("cosine", {"reduction": "avg"}, "reduction='avg'"),
    ],
)
def test_names_and_parameters_are_checked(name, params, message):
    with pytest.raises(ValueError, match=message):
        make_loss(name, **params)


@pytest.mark.parametrize("name", MULTICLASS)
def test_a_linear_classifier_learns_with_it(name):
    centres = 4 * torch.eye(3)
    labels = torch.arange(60) % 3
    images = centres[labels] + 0.3 * torch.randn(60, 3)
    model, loss = nn.Linear(3, 3), make_loss(name)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    assert (model(images).argmax(1) == labels).float().mean() == 1


def test_label_smoothing_mixes_the_target_with_all_classes():
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 5
    found = OffsetCrossEntropy(0.7, 0.3, smoothing=0.2, reduction="none")(logits, labels)
    offset = logits.clone()
    offset[torch.arange(6), labels] -= 0.7
    log = (offset / 0.3).log_softmax(1)
    expected = -0.3 * (0.8 * log[torch.arange(6), labels] + 0.2 * log.mean(1))
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="smoothing=2"):
        OffsetCrossEntropy(smoothing=2)
