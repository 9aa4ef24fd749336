import copy

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import train


def test_rows_have_norm_one_always():
    head = ts.UnitNormLinear(6, 4)
    assert isinstance(head, nn.Linear)
    for _ in range(3):
        train(head, (6,), steps=40)
        torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(4))
    assert float(head.free_tensors[0].detach().norm(dim=1).max()) < 10  # reconditioned now and then


def test_each_output_is_tight_but_not_all_together():
    head = ts.UnitNormLinear(3, 3)
    with torch.no_grad():
        head.free_tensors[0].copy_(torch.tensor([[1.0, 0, 0], [2.0, 1e-3, 0], [0, 0, 5.0]]))
    assert float(torch.linalg.matrix_norm(head.weight.detach(), 2)) > 1.4


def test_pairwise_certificate_is_exact():
    head = ts.UnitNormLinear(5, 4).double()
    weight = head.weight.detach()
    expected = torch.stack([torch.stack([(a - b).norm() for b in weight]) for a in weight])
    torch.testing.assert_close(head.pairwise_norms(), expected)
    x = torch.randn(20, 5, dtype=torch.float64)
    logits = head(x)
    radii, best = head.certified_radii(logits).detach(), logits.argmax(1)
    assert (radii >= 0).all()
    norms = torch.where(expected > 0, expected, torch.inf)
    for point, radius, winner in zip(x, radii, best, strict=True):
        value = head(point)
        rival = ((value[winner] - value) / norms[winner]).masked_fill(torch.arange(4) == winner, torch.inf).argmin()
        direction = weight[rival] - weight[winner]
        inside = head(point + 0.999 * radius * direction / direction.norm())
        outside = head(point + 1.001 * radius * direction / direction.norm())
        assert inside.argmax() == winner
        assert outside[rival] > outside[winner]
    wrong = head.certified_radii(logits, (best + 1) % 4)
    assert (wrong <= 0).all()
    assert (radii >= (logits.topk(2).values.diff().abs().squeeze() / 2 - 1e-12)).all()  # never worse than margin / 2


def test_equal_rows_and_zero_rows():
    head = ts.UnitNormLinear(3, 2)
    with torch.no_grad():
        head.free_tensors[0].copy_(torch.ones(2, 3))
        head.bias.copy_(torch.tensor([1.0, 0.0]))
    assert head.certified_radii(head(torch.randn(4, 3))).tolist() == [float("inf")] * 4
    logits = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert head.certified_radii(logits, torch.tensor([0, 0])).tolist() == [0.0, -float("inf")]
    with torch.no_grad():
        head.free_tensors[0].zero_()
    y = head(torch.randn(4, 3))
    y.sum().backward()
    assert head.free_tensors[0].grad.isfinite().all()
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(2))


def test_torch_habits():
    head = ts.UnitNormLinear(6, 4)
    x = torch.randn(2, 6)
    plain = ts.to_torch(head)
    assert type(plain) is nn.Linear
    torch.testing.assert_close(plain(x), head(x))
    other = ts.UnitNormLinear(6, 4)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(x), head(x))
    rows = nn.functional.normalize(torch.randn(4, 6), dim=1)
    other.weight = rows
    torch.testing.assert_close(other.weight, rows)
    head.eval()
    with torch.no_grad():
        assert head.weight is head.weight
    short = copy.deepcopy(head).bfloat16()
    assert short(x.bfloat16()).dtype == torch.bfloat16
    assert short.free_tensors[0].dtype == torch.float32
    assert repr(head) == "UnitNormLinear(in_features=6, out_features=4, bias=True)"
    with pytest.raises(ValueError, match="out_features=0"):
        ts.UnitNormLinear(3, 0)
    with pytest.raises(ValueError, match="norms from 2 to 2"):
        head.weight = 2 * rows


def test_gradcheck():
    head = ts.UnitNormLinear(4, 3).double()
    free = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(head.parametrization.build, free)
