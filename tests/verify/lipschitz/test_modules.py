"""Rules of torch's modules: what their forward pass tests and rounds is what the rule tests and rounds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.verify.lipschitz.networks import Fn, bound, jacobian_norm
from trysquare.verify.lipschitz import NoRuleError


class MyPool(nn.MaxPool2d):
    pass


class MyPad(nn.ReflectionPad2d):
    pass


class MyAdaptive(nn.AdaptiveAvgPool2d):
    pass


class MyAverage(nn.AvgPool1d):
    pass


class LoudPool(nn.MaxPool2d):
    def forward(self, x):
        return 10 * super().forward(x)


def test_subclasses_have_the_rule_of_their_parent_unless_they_compute_something_else():
    for mine, plain, shape in (
        (MyPool(3, 2), nn.MaxPool2d(3, 2), (2, 6, 6)),
        (MyPad(2), nn.ReflectionPad2d(2), (2, 4, 4)),
        (MyAdaptive(2), nn.AdaptiveAvgPool2d(2), (2, 5, 5)),
        (MyAverage(2), nn.AvgPool1d(2), (2, 5)),
    ):
        assert ts.lipschitz_bound(mine, shape) == ts.lipschitz_bound(plain, shape)
    loud = ts.lipschitz_bound(LoudPool(3, 2), (2, 6, 6))
    assert loud == pytest.approx(10 * ts.lipschitz_bound(nn.MaxPool2d(3, 2), (2, 6, 6)))


def test_celu_and_softplus_where_they_are_not_lipschitz():
    with pytest.raises(NoRuleError, match="alpha"):
        ts.lipschitz_bound(nn.CELU(-1.0), (4,))
    with pytest.raises(NoRuleError, match="alpha"):
        bound(lambda m, x: F.celu(x, alpha=-1.0), (4,))
    assert ts.lipschitz_bound(nn.CELU(0.1), (4,)) == pytest.approx(1)
    for layer in (nn.Softplus(threshold=0), nn.Softplus(threshold=19.9), nn.Softplus(beta=0.0)):
        with pytest.raises(NoRuleError, match=r"jump|beta"):
            ts.lipschitz_bound(layer, (4,))
    assert ts.lipschitz_bound(nn.Softplus(), (4,)) == pytest.approx(1)
    with pytest.raises(NoRuleError, match="jump"):
        bound(lambda m, x: F.softplus(x, 1.0, 0.0), (4,))


def test_normalisation_is_read_as_forward_reads_it():
    layer = nn.InstanceNorm1d(3, track_running_stats=True).eval()
    layer.running_var.fill_(0.25)
    assert ts.lipschitz_bound(layer, (3, 5)) == pytest.approx(2, rel=1e-4)
    layer.track_running_stats = False
    with pytest.raises(NoRuleError, match=r"running_mean|running statistics"):
        ts.lipschitz_bound(layer, (3, 5))
    without = nn.BatchNorm1d(3, track_running_stats=False).eval()
    with pytest.raises(NoRuleError, match="running statistics"):
        ts.lipschitz_bound(without, (3,))


def test_rules_are_not_about_inputs_in_a_list():
    class Added(nn.Module):
        def forward(self, parts):
            return torch.exp(parts[0]) + parts[1]

    ts.lipschitz.rule(Added)(lambda layer, *shapes: 2.0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.added = Added()

        def forward(self, x):
            return self.added([x, 2 * x])

    with pytest.raises(NoRuleError, match=r"exp of Added at 'added'"):
        ts.lipschitz_bound(Net(), (4,))


def test_slopes_are_rounded_as_torch_rounds_them():
    for layer in (nn.LeakyReLU(1.1), nn.ELU(1.1), nn.RReLU(0.3, 1.1)):
        assert ts.lipschitz_bound(layer.eval(), (4,)) >= (1.0 if isinstance(layer, nn.RReLU) else 1.10000002)
    assert ts.lipschitz_bound(nn.LeakyReLU(-1.1), (4,)) >= 1.10000002


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), [(1000, 3), (7, 20), (100, 33), (3, 1000)])
def test_interpolation_has_the_weights_of_its_dtype(size, out, dtype):
    for corners in (False, True):
        layer = nn.Upsample(out, mode="linear", align_corners=corners)
        model = nn.Sequential(layer, Fn(lambda m, x: x + m.zero, zero=torch.zeros(1, dtype=dtype)))
        matrix = layer(torch.eye(size, dtype=dtype).unsqueeze(1)).squeeze(1).double()
        norm = float(torch.linalg.matrix_norm(matrix, 2))
        found = ts.lipschitz_bound(model, (1, size))
        assert norm <= found * (1 + 1e-12)
        assert found <= norm * (1 + (0.02 if dtype == torch.bfloat16 else 1e-3))


def test_sizes_in_a_list():
    for layer in (nn.Upsample(size=[7, 5]), nn.Upsample(scale_factor=(2.0, 1.5)), nn.MaxPool2d([2, 3])):
        assert jacobian_norm(layer, torch.randn(2, 4, 6)) <= ts.lipschitz_bound(layer, (2, 4, 6)) * (1 + 1e-12)


def test_embeddings_take_tokens_only():
    table = nn.Embedding(7, 4)
    norm = float(torch.linalg.matrix_norm(table.weight.detach().double(), 2))
    assert ts.lipschitz_bound(table, (3,)) == pytest.approx(norm, rel=1e-6)
    assert bound(lambda m, x: F.embedding(x, m.w), (3,), w=table.weight.detach()) == pytest.approx(norm, rel=1e-6)
    with pytest.raises(NoRuleError, match=r"[Tt]okens"):
        ts.lipschitz_bound(nn.Sequential(nn.Linear(3, 3), table), (3,))

    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, x):
            return self.table(x.to(torch.long).clamp(0, 6))

    with pytest.raises(NoRuleError, match=r"integers.*embedding"):
        ts.lipschitz_bound(Rounds(), (3,))

    class Both(Rounds):
        def forward(self, x):
            return self.table(x) + x.unsqueeze(-1)

    with pytest.raises(NoRuleError, match=r"[Tt]okens"):
        ts.lipschitz_bound(Both(), (3,))

    class OneHot(nn.Module):
        """The function whose constant the bound is: of one-hot vectors."""

        def forward(self, x):
            return x @ table.double().weight

    assert jacobian_norm(OneHot(), torch.eye(7)[:3]) == pytest.approx(norm)


def test_a_rule_is_about_forward_and_what_is_around_it_is_followed():
    class Loud(nn.Module):
        def __call__(self, x):
            return 10 * super().__call__(x)

        def forward(self, x):
            return torch.exp(x.clamp(max=0))

    ts.lipschitz.rule(Loud)(lambda layer, shape: 1.2)
    assert ts.lipschitz_bound(nn.Sequential(Loud()), (4,)) == pytest.approx(12)
