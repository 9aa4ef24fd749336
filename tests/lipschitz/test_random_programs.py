"""Random programs: the bound of whatever is followed is above the dense Jacobian, by differences of the function."""

import random

import pytest
import torch
import torch.nn.functional as F

import trysquare as ts
from tests.lipschitz.networks import Fn
from trysquare.lipschitz import NoRuleError

WEIGHTS = {n: torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(1, 40)}


ONE = {
    "relu": lambda v, c: torch.relu(v),
    "abs": lambda v, c: v.abs(),
    "tanh": lambda v, c: torch.tanh(v),
    "sigmoid": lambda v, c: v.sigmoid(),
    "sin": lambda v, c: torch.sin(input=v),
    "neg": lambda v, c: -v,
    "scale": lambda v, c: c * v,
    "divide": lambda v, c: v / c,
    "shift": lambda v, c: 1 - v,
    "matmul": lambda v, c: v @ WEIGHTS[v.size(1)],
    "flip": lambda v, c: v.flip(1),
    "roll": lambda v, c: v.roll(2, 1),
    "slice": lambda v, c: v[:, ::2],
    "part": lambda v, c: v[:, :2],
    "chunk": lambda v, c: v.chunk(2, 1)[0],
    "mean": lambda v, c: v.mean(1, True),
    "sum": lambda v, c: v.sum(dim=1, keepdim=True),
    "amax": lambda v, c: v.amax(1, True),
    "repeat": lambda v, c: v.repeat(1, 2),
    "copies": lambda v, c: v.unsqueeze(2).expand(-1, -1, 2).flatten(1),
    "spread": lambda v, c: v.repeat_interleave(2, dim=1),
    "pad": lambda v, c: F.pad(v, (1, 1)),
    "softmax": lambda v, c: v.softmax(-1),
    "leaky": lambda v, c: F.leaky_relu(v, c),
    "clamp": lambda v, c: v.clamp(-c, c),
    "transposed": lambda v, c: v.unsqueeze(1).transpose(1, 2).squeeze(2),
    "multiply in place": lambda v, c: v.mul_(c),
    "multiply a part in place": lambda v, c: v[:, :1].mul_(c),
    "relu in place": lambda v, c: F.relu(v, inplace=True),
    "add to a part in place": lambda v, c: v[:, :1].add_(v[:, -1:]),
    "divide in place": lambda v, c: v.div_(c),
}
TWO = {
    "add": lambda v, w, c: v + w,
    "sub": lambda v, w, c: torch.sub(v, w, alpha=c),
    "maximum": lambda v, w, c: torch.maximum(v, w),
    "minimum": lambda v, w, c: torch.min(v, w),
    "cat": lambda v, w, c: torch.cat([v, w], dim=1),
    "add in place": lambda v, w, c: v.add_(w, alpha=c),
}


def program(dice):
    """Steps ``(name, operands, constant)`` on a growing list of values, the sizes of which are all that is known."""
    sizes = [dice.randint(2, 5)]
    start, steps = sizes[0], []
    for _ in range(dice.randint(3, 9)):
        name, i, c = dice.choice([*ONE, *TWO]), dice.randrange(len(sizes)), dice.uniform(0.1, 3)
        if name in ONE:
            if sizes[i] > 12 or (name == "matmul" and sizes[i] not in WEIGHTS):
                continue
            with torch.no_grad():
                sizes.append(ONE[name](torch.ones(2, sizes[i], dtype=torch.float64), c).shape[1])
            steps.append((name, (i,), c))
        else:
            fits = [j for j in range(len(sizes)) if name == "cat" or sizes[j] in (1, sizes[i])]
            j = dice.choice(fits)
            sizes.append(sizes[i] + sizes[j] if name == "cat" else sizes[i])
            steps.append((name, (i, j), c))
    kept = dice.sample(range(len(sizes)), min(2, len(sizes)))
    return start, steps, kept, sizes


def network(steps, kept, sizes):
    def forward(m, x):
        values = [x * m.one]
        for name, operands, c in steps:
            if name == "matmul":
                values.append(values[operands[0]] @ WEIGHTS[sizes[operands[0]]])
            else:
                values.append((ONE | TWO)[name](*(values[i] for i in operands), c))
        return torch.cat([values[i] for i in kept], 1)

    return Fn(forward, one=torch.ones(1, dtype=torch.float64))


@torch.no_grad()
def slope(model, x, step=1e-6):
    """Norm of the matrix of differences across a point, without autograd, which refuses some writes in place."""
    move = step * torch.eye(x.numel(), dtype=torch.float64)
    return float(torch.linalg.matrix_norm((model(x + move) - model(x - move)) / (2 * step), 2))


@pytest.mark.parametrize("block", range(10))
def test_bounds_of_random_programs_are_above_their_jacobians(block):
    followed = 0
    for seed in range(40 * block, 40 * (block + 1)):
        size, steps, kept, sizes = program(random.Random(seed))
        model = network(steps, kept, sizes)
        try:
            bound = ts.lipschitz_bound(model, (size,))
        except NoRuleError:
            continue
        followed += 1
        seen = max(slope(model, 2 * torch.randn(size, dtype=torch.float64)) for _ in range(4))
        assert seen <= bound * (1 + 1e-6) + 1e-7, (seed, steps, kept)
    assert followed > 30
