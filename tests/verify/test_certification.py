"""Certificates against exact distances to decision boundaries, and against those who try to break them."""

import copy
import itertools
import json
import math
import operator
import sys
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trysquare as ts
from trysquare.verify.certification import evaluating, pairwise_distances, radius_text
from trysquare.verify.lipschitz import NoRuleError, analyse

SQRT2 = math.sqrt(2)


def exact_radii(weight, logits, labels):
    """Distance to the nearest decision boundary of a linear classifier; 0 where it is wrong."""
    weight, logits = weight.detach().double(), logits.double()
    radii = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        others = [j for j in range(len(weight)) if j != label]
        distances = [float((row[label] - row[j]) / (weight[label] - weight[j]).norm()) for j in others]
        radii.append(max(0.0, min(distances)))
    return torch.tensor(radii, dtype=torch.float64)


def predicted(model, images):
    with evaluating(model), torch.no_grad():
        return model(images).argmax(1)


def network(head=None, classes=5):
    return nn.Sequential(
        ts.OrthoConv2d(1, 4, 3, stride=2),
        ts.MaxMin(),
        ts.OrthoConv2d(4, 8, 3),
        ts.MaxMin(),
        nn.Flatten(),
        head or ts.UnitNormLinear(8 * 16, classes),
    )


class Scaled(nn.Module):
    """Pixels less a mean, over deviations of the channels."""

    def __init__(self, model, deviations):
        super().__init__()
        self.model = model
        self.register_buffer("deviations", torch.tensor(deviations).view(-1, 1, 1))

    def forward(self, x):
        return self.model((x - 0.5) / self.deviations)


class FeaturesAndHead(nn.Module):
    def __init__(self, features, head, after=None):
        super().__init__()
        self.features, self.head, self.after = features, head, after

    def forward(self, x):
        logits = self.head(self.features(x))
        return logits if self.after is None else self.after(logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_radius_without_a_head_is_the_margin_over_root_two(dtype):
    logits = torch.tensor([[3.0, 1.0, -1.0], [0.0, 2.0, 1.5], [1.0, 1.0, 0.0]], dtype=dtype)
    radii = ts.certified_radius(logits, torch.tensor([0, 0, 0]), lipschitz=0.5)
    assert radii.dtype == torch.float64
    assert radii.tolist() == pytest.approx([2 / SQRT2 / 0.5, 0, 0], rel=1e-12)
    assert float(radii[0]) <= 2 / SQRT2 / 0.5


def test_radius_with_a_head_is_exact_for_linear_classifiers():
    weight = torch.randn(7, 12)
    logits = torch.randn(50, 12) @ weight.T
    labels = logits.argmax(1)
    labels[::5] = 0
    exact = exact_radii(weight, logits, labels)
    for head in (weight, nn.Linear(12, 7)):
        if isinstance(head, nn.Module):
            head.weight.data = weight
        radii = ts.certified_radius(logits, labels, head=head)
        assert torch.allclose(radii, exact, rtol=1e-12, atol=0)
        assert (radii <= exact).all()


def test_pairwise_is_never_worse():
    weight = torch.randn(7, 12, dtype=torch.float64)
    logits = torch.randn(50, 12, dtype=torch.float64) @ weight.T
    labels = logits.argmax(1)
    norm = float(torch.linalg.matrix_norm(weight, 2))
    pairwise, simple = ts.certified_radius(logits, labels, head=weight), ts.certified_radius(logits, labels, norm)
    assert (pairwise >= simple * (1 - 1e-12)).all()
    assert float(pairwise.mean()) > 1.1 * float(simple.mean())


def test_an_orthogonal_head_is_root_two():
    weight = torch.linalg.qr(torch.randn(12, 7, dtype=torch.float64))[0].T
    logits = torch.randn(50, 7, dtype=torch.float64)
    labels = logits.argmax(1)
    assert torch.allclose(ts.certified_radius(logits, labels, head=weight), ts.certified_radius(logits, labels))


def test_it_is_what_the_unit_norm_head_says():
    head = ts.UnitNormLinear(12, 7)
    logits = head(torch.randn(50, 12))
    radii = ts.certified_radius(logits, logits.argmax(1), head=head)
    assert torch.allclose(radii, head.certified_radii(logits))


def test_equal_rows_are_told_apart_by_nothing():
    head = torch.ones(3, 4)
    logits = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    radii = ts.certified_radius(logits, torch.tensor([0, 0, 0]), head=head)
    assert radii.tolist() == [math.inf, 0, 0]
    assert ts.certified_radius(logits, torch.tensor([0, 0, 0]), math.inf, head).tolist() == [math.inf, 0, 0]
    assert ts.certified_radius(logits[:1], torch.tensor([0]), lipschitz=0.0).tolist() == [math.inf]
    assert ts.certified_radius(logits[:1], torch.tensor([0]), lipschitz=math.inf).tolist() == [0]
    head[2, 0] = 2
    assert ts.certified_radius(logits[:1], torch.tensor([0]), head=head).tolist() == pytest.approx([0.5])


def test_the_error_is_taken_off():
    logits = torch.tensor([[3.0, 1.0], [3.0, 2.5]])
    labels = torch.tensor([0, 0])
    assert ts.certified_radius(logits, labels, error=1.0).tolist() == pytest.approx([1 / SQRT2, 0])
    each = torch.tensor([0.0, 0.25])
    assert ts.certified_radius(logits, labels, error=each).tolist() == pytest.approx([2 / SQRT2, 0.25 / SQRT2])


def test_distances_are_rounded_up_at_every_scale():
    rows = torch.randn(5, 1000, dtype=torch.float64)
    plain = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    for scale in (1e-300, 1e-200, 1.0, 1e200, 1e300):
        distances = pairwise_distances(scale * rows) / scale
        assert torch.allclose(distances, plain, rtol=1e-10, atol=0)
        assert (distances.diagonal() == 0).all()
    assert (pairwise_distances(rows) >= plain * (1 - 1e-15)).all()
    near = torch.tensor([[1.0], [1.0 + 2**-52]], dtype=torch.float64)
    assert 2**-52 <= float(pairwise_distances(near)[0, 1]) < 1.001 * 2**-52


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        (torch.tensor([[1.0, math.nan], [0.0, 1.0]]), [0, 0], {}, "1 samples are not finite, .* index 0"),
        (torch.tensor([[1.0, 0.0], [0.0, math.inf]]), [0, 0], {}, "index 1"),
        (torch.zeros(2, 3), [0, 3], {}, "from 0 to 3 must be from 0 to 2"),
        (torch.zeros(2, 3), [-1, 0], {}, "from -1 to 0"),
        (torch.zeros(2, 3), [0], {}, "one for each of the 2"),
        (torch.zeros(2, 1), [0, 0], {}, "at least 2 classes"),
        (torch.zeros(2, 3), [0, 0], {"lipschitz": -1.0}, "lipschitz=-1"),
        (torch.zeros(2, 3), [0, 0], {"lipschitz": math.nan}, "lipschitz=nan"),
        (torch.zeros(2, 3), [0, 0], {"error": math.nan}, "error=nan"),
        (torch.zeros(2, 3), [0, 0], {"head": torch.ones(2, 4)}, r"\(2, 4\) must be"),
        (torch.zeros(2, 3), [0, 0], {"head": torch.full((3, 4), math.nan)}, "not finite"),
    ],
)
def test_radius_refuses_nonsense(logits, labels, options, message):
    with pytest.raises(ValueError, match=message):
        ts.certified_radius(logits, torch.tensor(labels), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certificate_of_a_linear_model_is_exact(dtype):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5, dtype=dtype))
    images, labels = torch.rand(64, 1, 4, 4, dtype=dtype), torch.randint(5, (64,))
    labels[:40] = model(images).argmax(1)[:40]
    certificate = ts.certify(model, (images, labels), epsilons=[0.01, 0.1])
    with torch.no_grad():
        exact_logits = images.flatten(1).double() @ model[1].weight.double().T + model[1].bias.double()
    exact = exact_radii(model[1].weight, exact_logits, labels)
    assert certificate.pairwise
    assert certificate.lipschitz == pytest.approx(1, rel=1e-9)
    assert (certificate.radii <= exact).all()
    assert torch.allclose(certificate.radii, exact, rtol=0, atol=5e-6 if dtype == torch.float32 else 1e-9)
    right = (certificate.predictions == labels).double().mean()
    assert certificate.clean_accuracy == float(right)
    assert certificate.certified_accuracy(0.1) == float((certificate.radii > 0.1).double().mean())


def test_radii_of_a_linear_classifier_are_exact_to_float64():
    model = nn.Linear(16, 5)
    images = torch.rand(64, 16)
    labels = model(images).argmax(1)
    certificate = ts.certify(model, (images, labels), measured_samples=0)
    exact = exact_radii(model.weight, copy.deepcopy(model).double()(images.double()).detach(), labels)
    assert (certificate.radii <= exact).all()
    assert torch.allclose(certificate.radii, exact, rtol=0, atol=1e-11)
    assert certificate.measured_samples == 0


def test_the_scaling_of_the_data_is_part_of_the_constant():
    linear = nn.Linear(2 * 9, 4, dtype=torch.float64)
    plain = nn.Sequential(nn.Flatten(), linear)
    scaled = Scaled(plain, [0.25, 0.2]).double()
    images = torch.rand(32, 2, 3, 3, dtype=torch.float64)
    labels = scaled(images).argmax(1)
    certificate = ts.certify(scaled, (images, labels))
    assert certificate.lipschitz == pytest.approx(5, rel=1e-7)  # float32 of 0.2
    weight = (linear.weight.view(4, 2, 9) / scaled.deviations.view(2, 1)).flatten(1)
    exact = exact_radii(weight, scaled(images).detach(), labels)
    assert (certificate.radii <= exact).all()
    assert (certificate.radii >= exact * 0.79).all()


@pytest.mark.parametrize(
    "head", [nn.Linear(8, 3), ts.OrthoLinear(8, 3), ts.UnitNormLinear(8, 3)], ids=lambda head: type(head).__name__
)
def test_heads_are_found_wherever_they_are(head):
    features = nn.Sequential(nn.Flatten(), ts.OrthoLinear(16, 8), nn.ReLU())
    for model in (
        nn.Sequential(*features, head),
        nn.Sequential(features, nn.Sequential(head)),
        FeaturesAndHead(features, head),
        Scaled(FeaturesAndHead(features, head), [1.0]),
    ):
        found = analyse(model, (1, 4, 4))
        assert torch.equal(found.head_weight, head.weight)
        assert found.features_bound == pytest.approx(1, rel=1e-5)
        assert found.bound == pytest.approx(ts.lipschitz_bound(model, (1, 4, 4)))


def doubled_in_place(logits):
    logits.mul_(2.0)
    return logits


def doubled_in_secret(logits):
    logits.view(-1, 3).mul_(2.0)
    return logits


@pytest.mark.parametrize("after", [lambda z: 2 * z, doubled_in_place, doubled_in_secret])
def test_factors_behind_the_last_layer_count(after):
    model = FeaturesAndHead(nn.Flatten(), nn.Linear(16, 3), after)
    found = analyse(model, (16,))
    torch.testing.assert_close(found.head_weight, 2 * model.head.weight.double(), rtol=1e-9, atol=0)
    assert found.features_bound == pytest.approx(1)


@pytest.mark.parametrize(
    "after", [nn.ReLU(), lambda z: z.flip(1), lambda z: z * torch.tensor([1.0, 2.0, 3.0]), lambda z: z + z.relu()]
)
def test_what_follows_the_last_layer_is_not_ignored(after):
    model = FeaturesAndHead(nn.Flatten(), nn.Linear(16, 3), after)
    found = analyse(model, (16,))
    assert found.head_weight is None
    assert found.features_bound == found.bound
    images = torch.rand(4, 16)
    assert not ts.certify(model, (images, predicted(model, images))).pairwise


def test_a_head_that_is_not_the_output_is_not_used():
    class Distracted(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.aside = nn.Linear(4, 3), nn.Linear(4, 3)
            self.aside.weight.data *= 1e-3

        def forward(self, x):
            logits = self.head(x)
            self.aside(x)
            return logits

    model = Distracted()
    assert torch.equal(analyse(model, (4,)).head_weight, model.head.weight)


def test_a_linear_layer_of_ones_own_is_not_a_head():
    class Bent(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    found = analyse(nn.Sequential(Bent(4, 3)), (4,))
    assert found.head_weight is None


def test_the_model_is_evaluated_in_eval_mode_and_put_back():
    model = nn.Sequential(nn.Flatten(), ts.BatchCentering(16), nn.Dropout(0.5), nn.Linear(16, 3))
    model[0].eval()
    images, labels = torch.rand(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = ts.certify(model, (images, labels))
    assert [module.training for module in model] == [False, True, True, True]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    one_by_one = ts.certify(model, (images, labels), batch_size=1)
    assert torch.allclose(first.radii, one_by_one.radii, atol=1e-5)
    with pytest.raises(ValueError, match="finite"), evaluating(model):
        raise ValueError("finite")
    assert model.training


class Pairs(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def test_kinds_of_data_give_the_same_certificate():
    model = network()
    images, labels = torch.rand(10, 1, 8, 8), torch.arange(10) % 5
    expected = ts.certify(model, (images, labels)).radii
    assert expected.shape == (10,)
    pairs = Pairs(images, labels)
    for data in (
        [images, labels],
        TensorDataset(images, labels),
        pairs,
        DataLoader(pairs, 4),
        iter(DataLoader(pairs, 3)),
        [(images[:5], labels[:5]), (images[5:], labels[5:])],
    ):
        radii = ts.certify(model, data, batch_size=4, input_shape=(1, 8, 8)).radii
        assert torch.allclose(radii, expected, atol=1e-5)


def test_the_rounding_of_the_program_is_measured_and_reported_beside():
    model = network()
    images = torch.rand(40, 1, 8, 8)
    labels = predicted(model, images)
    certificate = ts.certify(model, (images, labels))
    assert 1e-9 < certificate.evaluation_error < 1e-5
    assert certificate.measured_samples == 40
    assert 0 < certificate.rounding < 1e-9
    assert certificate.disagreements == 0
    with torch.no_grad():
        plain = ts.certified_radius(model.eval()(images), labels, certificate.lipschitz, model[-1])
    assert (certificate.program_radii < certificate.radii).all()
    assert torch.allclose(certificate.radii, plain, atol=1e-4)
    assert torch.allclose(certificate.program_radii, plain, atol=1e-4)
    some = ts.certify(model, (images, labels), measured_samples=7, batch_size=5)
    assert some.measured_samples == 7
    assert torch.allclose(some.radii, certificate.radii, rtol=1e-7)


def true_function(model, images):
    """Logits by exact rational arithmetic."""
    values = [[Fraction(float(v)) for v in row] for row in images.flatten(1)]
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight = [[Fraction(float(v)) for v in row] for row in layer.weight.detach()]
            bias = [Fraction(float(v)) for v in layer.bias.detach()]
            values = [[sum(map(operator.mul, row, x), b) for row, b in zip(weight, bias, strict=True)] for x in values]
        else:
            values = [[max(v, Fraction(0)) for v in x] for x in values]
    return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_radii_are_of_the_exact_function_whatever_the_weights(dtype):
    # Large numbers that cancel: what is computed has little to do with the function.
    broken = 0
    for seed, large in itertools.product(range(12), (1e3, 1e8, 1e13)):
        torch.manual_seed(seed)
        if large > 1e4 and dtype == torch.float16:
            continue
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(4)), model[1].weight.copy_(torch.eye(4))
            model[0].bias.add_(large), model[1].bias.sub_(large)
        images = torch.randn(5, 4, dtype=dtype)
        labels = copy.deepcopy(model).double()(images.double()).argmax(1)
        for batch in (5, 1):
            certificate = ts.certify(model, (images, labels), batch_size=batch)
            exact = true_function(model, images)
            for radius, row, label in zip(certificate.radii.tolist(), exact, labels.tolist(), strict=True):
                margin = min(row[label] - other for j, other in enumerate(row) if j != label)
                assert radius == 0 or margin > 0, (seed, large)
                broken += radius == 0
    assert broken > 0 or dtype == torch.float16


def test_the_reference_has_the_weights_of_the_model():
    # Built anew in float64 the kernels would differ by their float32 rounding, which is not an error of evaluation.
    model = network().half()
    images = torch.rand(16, 1, 8, 8)
    labels = predicted(model, images.half())
    certificate = ts.certify(model, (images, labels))
    assert 1e-5 < certificate.evaluation_error < 2e-2
    assert certificate.radii.max() > 0
    single = ts.certify(network(), (images, labels))
    assert single.evaluation_error < certificate.evaluation_error / 30


def test_fourier_layers_are_certified_too():
    model = nn.Sequential(ts.FourierOrthoConv2d(1, 4, 3), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(4 * 64, 3))
    images = torch.rand(8, 1, 8, 8)
    certificate = ts.certify(model, (images, predicted(model, images)))
    assert certificate.radii.max() > 0
    assert certificate.evaluation_error < 1e-4


def test_small_maps_are_certified_too():
    # Plain torch cannot wrap around a map that is smaller than the padding, so the reference must not be plain torch.
    model = nn.Sequential(ts.OrthoConv2d(4, 4, 7), nn.Flatten(), ts.OrthoLinear(16, 3))
    images = torch.rand(8, 4, 2, 2)
    assert ts.certify(model, (images, predicted(model, images))).radii.max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nobody_gets_inside(dtype):
    model = network(classes=3).to(dtype)
    images = torch.rand(32, 1, 8, 8).to(dtype)
    labels = predicted(model, images)
    certificate = ts.certify(model, (images, labels))
    assert (certificate.radii > 0).double().mean() > 0.5
    moved = ts.attacks.pgd_l2(model, images, labels, certificate.radii, box=None)
    assert torch.equal(predicted(model, moved)[certificate.radii > 0], labels[certificate.radii > 0])
    for _ in range(50):
        noise = torch.randn(images.shape, dtype=torch.float64)
        noise *= (certificate.radii / noise.flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
        found = predicted(model, (images.double() + 0.999 * noise).to(dtype))
        assert torch.equal(found[certificate.radii > 0], labels[certificate.radii > 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_image_that_is_computed_exactly_does_not_speak_for_those_around_it(dtype):
    for seed in range(30):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(dtype)
        with torch.no_grad():
            model[1].bias *= 8
        black = torch.zeros(1, 1, 8, 8, dtype=dtype)
        labels = predicted(model, black)
        certificate = ts.certify(model, (black, labels))
        assert certificate.evaluation_error > 0
        if not float(certificate.program_radii):
            continue
        moved = ts.attacks.pgd_l2(model, black, labels, certificate.program_radii, box=None)
        assert torch.equal(predicted(model, moved), labels)


class _InSinglePrecision(nn.Module):
    """Logits in float32, whatever the dtype."""

    def __init__(self, features, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias.to(torch.float32))


def test_the_reference_is_in_float64_whatever_the_model_asks_for():
    for seed in range(50):
        torch.manual_seed(seed)
        model, x = _InSinglePrecision(512, 2), torch.rand(1, 512) * 20
        with torch.no_grad():
            at_x = model.weight.double() @ x[0].double()
            model.bias.copy_(3e-5 * torch.randn(2) - at_x.float())
            exact = at_x + model.bias.double()
        labels = predicted(model, x)
        assert ts.certify(model, (x, labels)).radii == 0 or exact.argmax() == labels


def test_parts_in_single_precision_do_not_keep_a_model_from_being_certified():
    model = nn.Sequential(nn.Flatten(), ts.OrthoLinear(64, 16), ts.MaxMin(), _InSinglePrecision(16, 3)).eval()
    images = torch.rand(8, 1, 8, 8)
    assert ts.certify(model, (images, predicted(model, images))).radii.max() > 0


def test_large_values_inside_are_seen_around_an_image_that_hides_them():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(1), model[0].bias.fill_(1024)
        model[2].weight.copy_(torch.tensor([[0.0], [1.0]])), model[2].bias.copy_(torch.tensor([1.0, -1023.0]))
    x = torch.tensor([[2.0**-13]])
    radius = float(ts.certify(model, (x, torch.tensor([1]))).program_radii)
    assert model(x - 2.0**-14).argmax() == 0
    assert radius <= 2.0**-14


def test_autocast_rounds_what_it_hides():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 2)

        def forward(self, x):
            return self.linear(x).float()

    model, step = Single(), 2.0**-7
    with torch.no_grad():
        model.linear.weight.copy_(torch.tensor([[0.0], [1.0]])), model.linear.bias.fill_(1)
    x = torch.tensor([[step]])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x - step / 2).argmax() == 0
        assert float(ts.certify(model, (x, torch.tensor([1]))).program_radii) <= step / 2


def test_curve_and_table_and_json():
    radii = torch.tensor([0.0, 0.1, 0.5, 2.0, math.inf], dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4])
    certificate = ts.Certificate(
        radii,
        torch.tensor([1, 1, 2, 3, 4]),
        labels,
        (36 / 255, 0.3, 1.0),
        1.0,
        True,
        1e-9,
        torch.full((5,), 0.01, dtype=torch.float64),
        1e-7,
        5,
        0,
        (1, 8, 8),
    )
    assert certificate.clean_accuracy == 0.8
    curve = certificate.curve(5)
    assert [radius for radius, _ in curve] == [0, 0.5, 1, 1.5, 2]
    assert [accuracy for _, accuracy in curve] == pytest.approx([0.8, 0.4, 0.4, 0.4, 0.2])
    assert certificate.curve(2, 0.2) == [(0.0, 0.8), (0.2, pytest.approx(0.6))]
    with pytest.raises(ValueError, match="points=1"):
        certificate.curve(1)
    text = str(certificate)
    assert "certified at 36/255    60.00%" in text
    assert "certified at 0.3" in text
    assert "255/255" in text
    content = json.loads(certificate.to_json())
    assert content["certified"][0]["certified_accuracy"] == pytest.approx(0.6)
    assert content["radii"][-1] is None
    again = ts.Certificate.from_json(certificate.to_json())
    assert str(again) == text
    assert torch.equal(again.radii, radii)
    assert again.to_json() == certificate.to_json()


def test_an_infinite_constant_comes_back_from_json():
    zeros = torch.zeros(2, dtype=torch.int64)
    certificate = ts.Certificate(
        zeros.double(), zeros, zeros, (0.5,), math.inf, False, 0.0, zeros.double(), 0.0, 0, 0, (4,)
    )
    assert ts.Certificate.from_json(certificate.to_json()).lipschitz == math.inf


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"radii": 3}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not a certificate"):
        ts.Certificate.from_json(text)


def test_curve_where_everything_is_safe():
    safe = torch.full((2,), math.inf, dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.int64)
    certificate = ts.Certificate(safe, zeros, zeros, (0.5,), 0.0, False, 0.0, zeros.double(), 0.0, 0, 0, (4,))
    assert certificate.curve(2) == [(0.0, 1.0), (0.5, 1.0)]
    assert "of all logits" in str(certificate)


IMAGES, LABELS = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((IMAGES, LABELS[:3]), {}, "4 images and 3 labels"),
        ((IMAGES, LABELS + 1), {}, "from 1 to 3 must be from 0 to 2"),
        ((IMAGES[:0], LABELS[:0]), {}, "no data"),
        ([], {}, "no data"),
        ((IMAGES.mul(255).to(torch.uint8), LABELS), {}, "torch.uint8 must be floating point"),
        ((IMAGES / 0, LABELS), {}, "not finite"),
        ((IMAGES, LABELS), {"input_shape": (7,)}, r"\(4, 6\) .* must be floating point and \(batch, 7\)"),
        ([(IMAGES, LABELS), (IMAGES[:, :5], LABELS)], {}, r"\(4, 5\)"),
        ((IMAGES, LABELS), {"epsilons": []}, "at least one"),
        ((IMAGES, LABELS), {"epsilons": [-1.0]}, "none negative"),
        ((IMAGES, LABELS), {"measured_samples": -1}, "measured_samples=-1"),
        ((IMAGES, LABELS), {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_certify_refuses_nonsense(data, options, message):
    with pytest.raises(ValueError, match=message):
        ts.certify(nn.Linear(6, 3), data, **options)


def test_models_that_cannot_be_certified():
    with pytest.raises(NoRuleError, match="LayerNorm"):
        ts.certify(nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)), (IMAGES, LABELS))
    broken = nn.Linear(6, 3)
    broken.bias.data[0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        ts.certify(broken, (IMAGES, LABELS))


def test_outputs_and_images_of_another_kind_are_refused():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(TypeError, match=r"logits \(batch, classes\), not list"):
        ts.certify(Pair(6, 3), (IMAGES, LABELS))
    with pytest.raises(TypeError, match="found a batch of"):
        ts.certify(nn.Linear(6, 3), [([1.0, 2.0], LABELS)], input_shape=(6,))


def test_radii_at_the_ends_of_the_floats():
    label, eye = torch.tensor([0]), torch.eye(2, dtype=torch.float64)

    def radius(logits, lipschitz, scale=None, error=0.0):
        head = None if scale is None else scale * eye
        return float(
            ts.certified_radius(torch.tensor([logits], dtype=torch.float64), label, lipschitz, head, error=error)
        )

    assert radius([1e-300, 0.0], 1e-200, 1e-200) == pytest.approx(1e100 / SQRT2, rel=1e-9)
    assert radius([1.0, 0.0], 1e-200, 1e-200) == pytest.approx(sys.float_info.max)  # finite: about 7e399
    assert radius([1e308, -1e308], 1.0) == pytest.approx(1e308 / SQRT2 * 2)
    assert 0 <= radius([5e-324, 0.0], 1.0) <= 5e-324
    assert radius([5e-324, 0.0], 1e-300) == pytest.approx(5e-324 * 1e300 / SQRT2, rel=1e-9)
    assert radius([1.0, 0.0], 1e200, 1e200) == 0.0
    assert radius([1.0, 0.0], 0.0) == math.inf
    assert radius([0.0, 0.0], 0.0) == 0.0
    assert radius([1.0, 0.0], 1.0, error=0.25) == pytest.approx(0.75 / SQRT2)
    for wrong in (torch.zeros(5), torch.zeros(1, 1)):
        with pytest.raises(ValueError, match="one for each of 1 samples"):
            radius([1.0, 0.0], 1.0, error=wrong)


def test_compiled_models_are_certified_as_what_they_are():
    model = nn.Linear(6, 3)
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(ts.certify(compiled, (IMAGES, LABELS)).radii, ts.certify(model, (IMAGES, LABELS)).radii)


WRONG = {
    "labels as a number": lambda m: ts.certified_radius(torch.randn(2, 3), 0),
    "logits as a list": lambda m: ts.certified_radius([[1.0, 2.0]], torch.tensor([0])),
    "head as text": lambda m: ts.certified_radius(torch.randn(2, 3), torch.tensor([0, 1]), head="a"),
    "labels as a list": lambda m: ts.certify(m, (torch.randn(2, 6), [0, 1])),
    "images as a list": lambda m: ts.certify(m, [([[1.0] * 6], torch.tensor([0]))]),
    "one tensor": lambda m: ts.certify(m, torch.randn(2, 6)),
    "nothing": lambda m: ts.certify(m, None),
    "a number": lambda m: ts.certify(m, 3),
    "a triple": lambda m: ts.certify(m, [(torch.randn(2, 6), torch.tensor([0, 1]), 3)]),
    "one radius": lambda m: ts.certify(m, (torch.randn(2, 6), torch.tensor([0, 1])), epsilons=0.5),
    "a shape that is a number": lambda m: ts.certify(m, (torch.randn(2, 6), torch.tensor([0, 1])), input_shape=6),
    "no batch": lambda m: ts.certify(m, (torch.randn(2, 6), torch.tensor([0, 1])), batch_size=0),
    "tuples": lambda m: ts.certify(nn.Sequential(m, _Tuple()), (torch.randn(2, 6), torch.tensor([0, 1]))),
    "no data": lambda m: ts.certify(m, (torch.randn(0, 6), torch.zeros(0).long())),
    "a shape for inputs": lambda m: ts.lipschitz_lower_bound(m, (6,)),
    "audit of other inputs": lambda m: ts.audit(m, (6,), inputs=torch.randn(2, 4)),
    "audit of a list": lambda m: ts.audit(m, (6,), inputs=[torch.randn(2, 6)]),
    "audit of nothing": lambda m: ts.audit(nn.Linear(6, 0), (6,)),
    "a function": lambda m: ts.lipschitz_bound(lambda x: x, (6,)),
}


class _Tuple(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_answered(name):
    with pytest.raises((ValueError, TypeError)) as caught:
        WRONG[name](nn.Linear(6, 3))
    assert len(str(caught.value)) > 20


def test_audits_of_models_without_a_lower_bound():
    weight = torch.randn(3, 2)

    class OneDtype(nn.Module):
        def forward(self, x):
            return x @ weight

    report = ts.audit(OneDtype(), (3,))
    assert report.lower_bound is None
    assert report.bound > 0


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [(36 / 255, "36/255"), (1.0, "255/255"), (0.0, "0"), (0.3, "0.3"), (1e-9, "1e-09"), (1e308, "1e+308")],
)
def test_a_radius_has_one_text(epsilon, text):
    assert radius_text(epsilon) == text
    assert radius_text(float(f"{epsilon:.6g}")) == text  # as `metrics.jsonl` keeps it
