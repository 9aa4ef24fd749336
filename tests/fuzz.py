"""Random networks against their bounds: ``python -m tests.fuzz --networks 20000 --workers 2``, or ``--minutes 60``.

Each network is a random program of modules (torch's and ours), functional calls, views, writes in place, slices,
broadcasts and branches. Its bound is compared with the largest stretch that differences of the function itself find:
dense matrices of central differences, followed uphill, and random pairs. Autograd is not asked.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import trysquare as ts

MOST_NUMBERS = 96
TIGHT = 0.99


def _halves(v):
    a, b = v.chunk(2, 1)
    return a, b


def _neighbours(v):
    return v[:, ::2], v[:, 1::2]


def _written(v, dice):
    out = torch.zeros(v.shape, dtype=v.dtype)
    half = v.shape[1] // 2
    out[:, :half] = v[:, half : 2 * half]
    out[:, half:] = dice_scale(dice) * v[:, half:]
    return out


def dice_scale(dice):
    return dice.choice([-2.0, -1.0, -0.5, 0.0, 0.3, 1.0, 1.7, 3.0])


def _set_part(v, c):
    w = v.clone()
    w[:, :1] = c
    w[:, -1] = w[:, 0] - v[:, -1]
    return w


def _later_write(v, c):
    y = v * 2
    z = y.view(y.shape)
    y.mul_(c)
    return z + v


def _permuted_write(v, c):
    """Whether this writes into ``y`` or a copy depends on how torch lays out results."""
    y = v.transpose(1, -1).relu()
    y.transpose(1, -1).reshape(len(v), -1).mul_(c)
    return y


def _recurrence(v, c):
    """States that read one slice more each time, and the first of them once more."""
    state, states = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        state = torch.tanh(c * state + v[:, t] - (state if t == 2 else 0))
        states.append(state)
    return torch.stack(states, 1)


def _block(dice):
    """``x - f Wᵀ σ(W x + b)`` of the last axis, or of maps, right and nearly right."""
    seed, f, spoiled = dice.randrange(1 << 30), dice.choice([-2.0, 0.5, 1.0, 2.0, 3.0]), dice.random() < 0.4
    act = dice.choice([torch.relu, torch.tanh, torch.sigmoid, F.softplus, lambda v: F.leaky_relu(v, 0.3)])
    mode, left, hidden = dice.choice(["constant", "circular"]), dice.randint(0, 2), dice.randint(1, 4)

    def block(v):
        if v.ndim == 3:
            w = (
                torch.empty(hidden, v.shape[1], 3, dtype=v.dtype).copy_(
                    _TABLE[: hidden * v.shape[1] * 3].view(hidden, -1, 3)
                )
                / 3
            )
            h = act(F.conv1d(F.pad(v, (left, 2 - left), mode=mode), w))
            back = F.conv_transpose1d(F.pad(h, (2, 2), mode=mode), w)[..., 2 + left + spoiled :][..., : v.shape[-1]]
            return v - f * back
        w = _TABLE[seed % 500 : seed % 500 + hidden * v.shape[-1]].view(hidden, -1).to(v.dtype) / 2
        back = F.linear(act(F.linear(v, w)), w.mT * (1.5 if spoiled else 1))
        return v - f * back

    return block


_TABLE = torch.randn(2000, generator=torch.Generator().manual_seed(0))


# From one value ``v``, with a number ``c`` and dice for whatever else is drawn: each returns a function of a value.
ONE = {
    "relu": lambda c, d: torch.relu, "relu_": lambda c, d: F.relu_, "abs": lambda c, d: torch.abs,
    "tanh": lambda c, d: torch.tanh, "sigmoid": lambda c, d: torch.sigmoid, "sin": lambda c, d: torch.sin,
    "neg": lambda c, d: torch.neg, "gelu": lambda c, d: F.gelu, "silu": lambda c, d: F.silu, "mish": lambda c, d: F.mish,
    "elu": lambda c, d: lambda v: F.elu(v, abs(c) + 0.1), "selu": lambda c, d: F.selu,
    "celu": lambda c, d: lambda v: F.celu(v, abs(c) + 0.1), "softplus": lambda c, d: F.softplus,
    "hardswish": lambda c, d: F.hardswish, "hardsigmoid": lambda c, d: F.hardsigmoid,
    "leaky": lambda c, d: lambda v: F.leaky_relu(v, c), "logsigmoid": lambda c, d: F.logsigmoid,
    "softshrink": lambda c, d: F.softshrink, "tanhshrink": lambda c, d: F.tanhshrink,
    "softsign": lambda c, d: nn.Softsign(), "erf": lambda c, d: torch.erf, "atan": lambda c, d: torch.atan,
    "clamp": lambda c, d: lambda v: v.clamp(-abs(c), abs(c)),
    "clamp by a tensor": lambda c, d: lambda v: v.clamp(torch.linspace(-1, c, 3).view(3, *[1] * (v.ndim - 1)).amin(0)),
    "clamp broadcast": lambda c, d: lambda v: torch.clamp_min(v[:, :1], torch.linspace(-1, 1, 4, dtype=v.dtype).view(1, 4, *[1] * (v.ndim - 2))),
    "scale": lambda c, d: lambda v: c * v, "divide": lambda c, d: lambda v: v / (c or 1.5),
    "scale each": lambda c, d: lambda v: v * torch.linspace(-c, 1, v.shape[1], dtype=v.dtype).view(-1, *[1] * (v.ndim - 2)),
    "broadcast": lambda c, d: lambda v: v[:, :1] * torch.linspace(0, 1, 3, dtype=v.dtype).view(3, *[1] * (v.ndim - 2)),
    "shift": lambda c, d: lambda v: 1 - v, "rsub": lambda c, d: lambda v: torch.rsub(v, 2.0, alpha=c),
    "mul_": lambda c, d: lambda v: v.mul_(c), "add_ part": lambda c, d: lambda v: v[:, :1].add_(v[:, -1:]),
    "mul_ part": lambda c, d: lambda v: v[:, ::2].mul_(c), "clamp_": lambda c, d: lambda v: v.clamp_(-1, 1),
    "set part": lambda c, d: lambda v: _set_part(v, c), "later write": lambda c, d: lambda v: _later_write(v, c),
    "written": lambda c, d: lambda v, s=d.random(): _written(v, random.Random(s)),
    "flip": lambda c, d: lambda v: v.flip(1), "roll": lambda c, d: lambda v: v.roll(2, -1),
    "slice": lambda c, d: lambda v: v[:, ::2], "part": lambda c, d: lambda v: v[:, : max(1, v.shape[1] // 2)],
    "narrow": lambda c, d: lambda v: v.narrow(-1, 0, max(1, v.shape[-1] - 1)),
    "chunk": lambda c, d: lambda v: v.chunk(2, 1)[-1], "unbind": lambda c, d: lambda v: torch.stack(v.unbind(-1)[::-1], -1),
    "permuted": lambda c, d: lambda v: v.transpose(1, -1).contiguous(), "flatten": lambda c, d: lambda v: v.flatten(1),
    "view": lambda c, d: lambda v: v.reshape(len(v), -1), "unsqueeze": lambda c, d: lambda v: v.unsqueeze(1) if v.ndim < 4 else v,
    "split": lambda c, d: lambda v: torch.cat(v.split(1, 1)[::-1], 1), "index": lambda c, d: lambda v: v[:, [0, -1, 0]],
    "index_select": lambda c, d: lambda v: v.index_select(-1, torch.tensor([0, 0])),
    "take": lambda c, d: lambda v: v[..., None].expand(*v.shape, 2).flatten(1), "repeat": lambda c, d: lambda v: v.repeat(1, 2, *[1] * (v.ndim - 2)),
    "interleave": lambda c, d: lambda v: v.repeat_interleave(2, 1), "tril": lambda c, d: lambda v: v.tril() if v.ndim > 2 else v,
    "mask": lambda c, d: lambda v: v.masked_fill(torch.arange(v.shape[-1]) % 2 == 0, c),
    "where": lambda c, d: lambda v: torch.where(torch.arange(v.shape[-1]) % 2 == 0, v, c * v),
    "mean": lambda c, d: lambda v: v.mean(1, True), "sum": lambda c, d: lambda v: v.sum(-1, keepdim=True),
    "mean all": lambda c, d: lambda v: v.flatten(1).mean(1, True), "centre": lambda c, d: lambda v: v - v.mean(1, True),
    "amax": lambda c, d: lambda v: v.amax(1, True), "max": lambda c, d: lambda v: v.max(-1, True).values,
    "topk": lambda c, d: lambda v: v.topk(1, 1).values, "sort": lambda c, d: lambda v: v.sort(1).values,
    "sorted pairs": lambda c, d: lambda v: v[:, : v.shape[1] // 2 * 2].unflatten(1, (-1, 2)).sort(2).values.flatten(1, 2),
    "logsumexp": lambda c, d: lambda v: v.logsumexp(1, True), "norm": lambda c, d: lambda v: v.norm(dim=1, keepdim=True),
    "softmax": lambda c, d: lambda v: v.softmax(-1), "log_softmax": lambda c, d: lambda v: v.log_softmax(1),
    "maxmin halves": lambda c, d: lambda v: torch.cat([torch.max(*_halves(v)), torch.min(*_halves(v))], 1),
    "maxmin neighbours": lambda c, d: lambda v: torch.stack([torch.maximum(*_neighbours(v)), torch.minimum(*_neighbours(v))], 2).flatten(1, 2),
    "maxmin where": lambda c, d: lambda v: torch.cat([torch.where(v[:, ::2] > v[:, 1::2], v[:, ::2], v[:, 1::2]), torch.where(v[:, ::2] > v[:, 1::2], v[:, 1::2], v[:, ::2])], 1),
    "abs by max": lambda c, d: lambda v: torch.max(v, -v), "abs by where": lambda c, d: lambda v: torch.where(v < 0, -v, v),
    "jump": lambda c, d: lambda v: torch.where(v > 0.5, v, c * v), "detach": lambda c, d: lambda v: v.detach() * 1.5,
    "pad zeros": lambda c, d: lambda v: F.pad(v, (1, 1)), "crop": lambda c, d: lambda v: F.pad(v, (-1, 1)),
    "pad any": lambda c, d: lambda v, m=d.choice(["circular", "reflect", "replicate"]), p=(d.randint(-1, 2), d.randint(-1, 2)): F.pad(v, p, mode=m) if v.ndim == 3 else v,
    "pad any 2d": lambda c, d: lambda v, m=d.choice(["circular", "reflect", "replicate"]), p=tuple(d.randint(-1, 2) for _ in range(4)): F.pad(v, p, mode=m) if v.ndim == 4 else v,
    "avg_pool": lambda c, d: lambda v, k=d.randint(1, 3), s=d.randint(1, 2): F.avg_pool1d(v, k, s) if v.ndim == 3 else F.avg_pool2d(v, k, s),
    "max_pool": lambda c, d: lambda v, k=d.randint(1, 3), s=d.randint(1, 2): F.max_pool1d(v, k, s) if v.ndim == 3 else F.max_pool2d(v, k, s),
    "adaptive": lambda c, d: lambda v, k=d.randint(1, 3): F.adaptive_avg_pool1d(v, k) if v.ndim == 3 else F.adaptive_avg_pool2d(v, k),
    "adaptive max": lambda c, d: lambda v, k=d.randint(1, 3): F.adaptive_max_pool2d(v, k),
    "nearest": lambda c, d: lambda v: F.interpolate(v, scale_factor=2), "linear up": lambda c, d: lambda v: F.interpolate(v, size=5, mode="linear") if v.ndim == 3 else F.interpolate(v, size=(3, 4), mode="bilinear", align_corners=True),
    "unfold": lambda c, d: lambda v: F.unfold(v, 2), "windows": lambda c, d: lambda v: v.unfold(-1, 2, 1).flatten(-2),
    "shuffle": lambda c, d: lambda v: F.pixel_unshuffle(v, 2), "channel shuffle": lambda c, d: lambda v: F.channel_shuffle(v, 2),
    "prelu": lambda c, d: lambda v: F.prelu(v, torch.tensor([c], dtype=v.dtype)),
    "float": lambda c, d: lambda v: v.double().to(v.dtype), "square": lambda c, d: lambda v: v * v,
    "weight in forward": lambda c, d: lambda v, m=_matrix(d, 99, 1): F.linear(v, _reflector(m[: v.shape[-1]].to(v.dtype))),
    "matmul": lambda c, d: lambda v, m=_matrix(d, 99, 3): v @ m[: v.shape[-1]].to(v.dtype),
    "left matmul": lambda c, d: lambda v, m=_matrix(d, 3, 99): m[:, : v.shape[-2]].to(v.dtype) @ v if v.ndim > 2 else v,
    "einsum": lambda c, d: lambda v, m=_matrix(d, 99, 2): torch.einsum("bc...,cd->bd...", v, m[: v.shape[1]].to(v.dtype)),
    "permuted write": lambda c, d: lambda v: _permuted_write(v, c), "nothing": lambda c, d: lambda v: torch.cat([v, v[:, :0].relu()], 1),
    "channels last": lambda c, d: lambda v: v.contiguous(memory_format=torch.channels_last) * 1.0 if v.ndim == 4 else v,
    "block": lambda c, d: _block(d), "two sides": lambda c, d: lambda v: torch.cat([v.relu(), (-v).relu()], 1),
    "root": lambda c, d: lambda v: (v.pow(2).sum(1, keepdim=True) + abs(c)).sqrt(), "root of halves": lambda c, d: lambda v: (0.5 * v**2 + abs(c) * v.flip(1) ** 2) ** 0.5,
    "norm pool": lambda c, d: lambda v: F.lp_pool1d(v, 2, 2) if v.ndim == 3 else F.lp_pool2d(v, 2, 2, 1), "hypot": lambda c, d: lambda v: torch.hypot(v, c * v.flip(1)),
    "wrong root": lambda c, d: lambda v: (v.pow(2) * torch.linspace(c, 1, v.shape[-1], dtype=v.dtype)).sum(1, keepdim=True).abs().sqrt(),
    "min and max": lambda c, d: lambda v: torch.cat([v.min(1, keepdim=True)[0], v.max(1, keepdim=True)[0]], 1),
    "lerp": lambda c, d: lambda v: torch.lerp(v, v.flip(1), c), "aminmax": lambda c, d: lambda v: torch.cat([v.amin(1, True), v.amax(1, True)], 1),
    "running sums": lambda c, d: lambda v: v.cumsum(1), "running sums back": lambda c, d: lambda v: (c * v.flip(-1)).cumsum(-1),
    "index_add": lambda c, d: lambda v: v.index_add(1, torch.zeros(v.shape[1] // 2, dtype=torch.long), v[:, : v.shape[1] // 2], alpha=c),
    "scatter_add": lambda c, d: lambda v: v.new_ones(v[:, :2].shape).scatter_add(1, (torch.arange(v[0].numel()) % v[:, :2].shape[1]).view(1, *v.shape[1:]).expand(v.shape), v),
    "accumulated": lambda c, d: lambda v: v.index_put((torch.arange(len(v))[:, None], torch.zeros(1, 2, dtype=torch.long)), v[:, -2:], accumulate=True) if v.shape[1] > 1 else v,
    "recurrence": lambda c, d: lambda v: _recurrence(v, c),
    "bell": lambda c, d: lambda v: (-(v.tanh() ** 2)).exp(), "log": lambda c, d: lambda v: (v.abs() + abs(c) + 0.1).log(),
    "inverse": lambda c, d: lambda v: c / (v.clamp_min(-1) + 1.25), "root of clamped": lambda c, d: lambda v: v.clamp(0.25, 3 + c).sqrt(),
    "power": lambda c, d: lambda v, n=d.choice([2, 3, -1, 0.5, 1.5, -2.5]): (v.sigmoid() + (c > 0)) ** n, "cosh": lambda c, d: lambda v: (c * v.sin()).cosh(),
    "exp of a mean": lambda c, d: lambda v: (c * v.clamp(-2, 1)).mean(1, True).exp(), "rsqrt": lambda c, d: lambda v: (v.relu() + 0.5).rsqrt() - 0 * v,
    "power of a shifted one": lambda c, d: lambda v: (2 - c * v.softmax(-1)).maximum(v.tanh()) ** 3,
    "vmap": lambda c, d: torch.vmap(lambda row: row * 2), "batch write": lambda c, d: lambda v: v.index_put((torch.tensor([0]),), v[:1] * c),
}  # fmt: skip
TWO = {
    "add": lambda c: lambda v, w: v + w, "sub": lambda c: lambda v, w: torch.sub(v, w, alpha=c),
    "maximum": lambda c: torch.maximum, "minimum": lambda c: torch.minimum, "cat": lambda c: lambda v, w: torch.cat([v, w], 1),
    "add_": lambda c: lambda v, w: v.add_(w, alpha=c), "copy_": lambda c: lambda v, w: v[:, :1].copy_(w[:, :1]),
    "stack": lambda c: lambda v, w: torch.stack([v, w], 1).flatten(1, 2), "product": lambda c: lambda v, w: v * w,
    "mix": lambda c: lambda v, w: torch.lerp(v, w, 0.25), "where": lambda c: lambda v, w: torch.where(v > w, v, w),
    "exp of two": lambda c: lambda v, w: torch.exp(v.clamp_max(0.5) - c * w.sigmoid()),
    "logaddexp": lambda c: torch.logaddexp, "logaddexp2": lambda c: lambda v, w: torch.logaddexp2(c * v, w),
    "both": lambda c: lambda v, w: torch.cat([torch.max(v, w), torch.min(v, w)], 1),
}  # fmt: skip


def _matrix(dice, rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(dice.randrange(1 << 30)))


def _reflector(v):
    return torch.eye(len(v), dtype=v.dtype) - 2 * v @ v.mT / (v.mT @ v)


def _modules(shape, dice):
    """Modules that may follow a value of this shape (with its batch)."""
    channels, last = shape[1], shape[-1]
    out = dice.randint(1, 4)
    made = [lambda: nn.Linear(last, out), lambda: ts.OrthoLinear(last, out), lambda: nn.Tanhshrink(), lambda: ts.Abs(),
            lambda: parametrizations.weight_norm(nn.Linear(last, out)), lambda: parametrizations.orthogonal(nn.Linear(last, out)),
            lambda: parametrizations.spectral_norm(nn.Linear(last, out)).eval(), lambda: ts.MaxMin(),
            lambda: nn.Dropout(0.5), lambda: ts.NActivation(channels), lambda: ts.UnitNormLinear(last, out),
            lambda: ts.LayerCentering(channels), lambda: nn.PReLU()]  # fmt: skip
    if len(shape) == 2:
        made += [lambda: nn.BatchNorm1d(channels), lambda: ts.SLLLinear(channels), lambda: ts.SandwichLinear(channels, out),
                 lambda: ts.ConvexResidual(nn.Linear(channels, channels)), lambda: ts.L2Residual(ts.OrthoLinear(channels, channels)),
                 lambda: ts.to_torch(ts.SLLLinear(channels)), lambda: ts.to_torch(ts.SandwichLinear(channels, out)), lambda: nn.Sequential(nn.Linear(channels, out), nn.ReLU(), nn.Linear(out, 3)),
                 lambda: ts.GroupSort(2), lambda: ts.Householder(channels), lambda: ts.CPLLinear(channels)]  # fmt: skip
    if len(shape) in (3, 4):
        dims = len(shape) - 2
        conv, up = (nn.Conv1d, nn.ConvTranspose1d) if dims == 1 else (nn.Conv2d, nn.ConvTranspose2d)
        ours, ours_up = (
            (ts.OrthoConv1d, ts.OrthoConvTranspose1d) if dims == 1 else (ts.OrthoConv2d, ts.OrthoConvTranspose2d)
        )
        mode = dice.choice(["zeros", "circular", "reflect", "replicate"])
        k, s, p, dil = dice.randint(1, 3), dice.randint(1, 2), dice.randint(0, 1), dice.randint(1, 2)
        made += [lambda: conv(channels, out, k, s, p, dil, padding_mode=mode), lambda: up(channels, out, k, s, min(p, k - 1)),
                 lambda: ours(channels, out, k, s), lambda: ours_up(channels, out, k, s), lambda: ours(channels, out, k, method=dice.choice(list(ts.METHODS))),
                 lambda: ts.to_torch(ours_up(channels, out, k, s)), lambda: ts.to_torch(ours(channels, out, k, s)),
                 lambda: (nn.BatchNorm1d if dims == 1 else nn.BatchNorm2d)(channels), lambda: nn.Sequential(nn.ReflectionPad1d(1) if dims == 1 else nn.CircularPad2d(1), conv(channels, out, k)),
                 lambda: ts.LearnableResidual(ours(channels, channels, k)), lambda: ts.ConcatResidual(ours(channels // 2, channels // 2, k)),
                 lambda: ts.GlobalL2NormPool(), lambda: (ts.SLLBlock1d if dims == 1 else ts.SLLBlock2d)(channels),
                 lambda: ts.to_torch((ts.SLLBlock1d if dims == 1 else ts.SLLBlock2d)(channels, padding_mode=dice.choice(["zeros", "circular"]))),
                 lambda: ts.to_torch((ts.SLLAOCBlock1d if dims == 1 else ts.SLLAOCBlock2d)(channels, out, 3, s, padding_mode=dice.choice(["zeros", "circular"]))),
                 lambda: ts.to_torch((ts.SandwichAOCConv1d if dims == 1 else ts.SandwichAOCConv2d)(channels, out, 2, s)),
                 lambda: ts.to_torch((ts.SLLAOCBlockTranspose1d if dims == 1 else ts.SLLAOCBlockTranspose2d)(channels, out, 3, s)),
                 lambda: (ts.L2NormPool1d if dims == 1 else ts.L2NormPool2d)(2, 1), lambda: (ts.SandwichAOCConv1d if dims == 1 else ts.SandwichAOCConv2d)(channels, channels),
                 lambda: (ts.FourierOrthoConv1d if dims == 1 else ts.FourierOrthoConv2d)(channels, out, k)]  # fmt: skip
    return dice.choice(made)()


class Program(nn.Module):
    """A random network: steps on a growing list of values."""

    def __init__(self, seed):
        super().__init__()
        dice = random.Random(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList()
        self.own = nn.Parameter(torch.zeros(1))  # without one, a model has no dtype of its own
        self.dtype = torch.float64 if dice.random() < 0.8 else torch.float32
        self.shape = dice.choice(
            [(dice.randint(2, 8),), (dice.randint(1, 4), dice.randint(3, 6)), (dice.randint(1, 3), 4, 4), (2, 3, 3)]
        )
        self.steps, self.said = [], []
        self.second = self.shape if dice.random() < 0.15 else None
        values = [torch.randn(2, *shape, dtype=self.dtype) for shape in (self.shape, self.second) if shape]
        self.eval()
        for _ in range(dice.randint(2, 9)):
            self._grow(values, dice)
        used = [i for i, v in enumerate(values) if v.ndim >= 2]
        self.kept = dice.sample(used, min(dice.randint(1, 2), len(used))) if dice.random() < 0.4 else [len(values) - 1]
        self.double() if self.dtype == torch.float64 else self.float()

    def _grow(self, values, dice):
        i, c, kind = dice.choice([len(values) - 1, dice.randrange(len(values))]), dice_scale(dice), dice.random()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if kind < 0.5:
                    name = dice.choice(list(ONE))
                    step, operands = ONE[name](c, dice), (i,)
                elif kind < 0.68:
                    name = dice.choice(list(TWO))
                    step, operands = TWO[name](c), (i, dice.randrange(len(values)))
                else:
                    module = _modules(values[i].shape, dice).to(self.dtype).eval()
                    step, operands, name = module, (i,), type(module).__name__
                result = step(*(values[k].clone() for k in operands))
                if (
                    result.ndim < 2
                    or len(result) != 2
                    or not 0 < result[0].numel() <= MOST_NUMBERS
                    or not result.isfinite().all()
                ):
                    return
        except (ValueError, RuntimeError, IndexError, TypeError, NotImplementedError):
            return
        if isinstance(step, nn.Module):
            self.parts.append(step)
            step = len(self.parts) - 1
        self.steps.append((step, operands))
        self.said.append((name, operands, c))
        values.append(result)

    def forward(self, x, y=None):
        values = [x] if y is None else [x, y]
        for step, operands in self.steps:
            function = self.parts[step] if isinstance(step, int) else step
            values.append(function(*(values[i] for i in operands)))
        return torch.cat([values[i].flatten(1) for i in self.kept], 1)


@torch.no_grad()
def largest_stretch(model, shapes, seed, tries=3, uphill=3):
    """Largest ``|f(a) - f(b)| / |a - b|`` seen, by differences alone."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    exact = model.dtype == torch.float64
    total, step = sum(sizes), 1e-6 if exact else 1e-2

    def call(points):
        parts = [
            p.unflatten(1, shape).clone().to(model.dtype)
            for p, shape in zip(points.split(sizes, 1), shapes, strict=True)
        ]
        return model(*parts).double()

    best = 0.0
    for number in range(tries):
        x = torch.randn(total, generator=generator, dtype=torch.float64) * (0.3, 1.0, 4.0)[number % 3]
        for _ in range(uphill):
            move = step * torch.eye(total, dtype=torch.float64)
            difference = (call(x + move) - call(x - move)) / (2 * step)
            if not difference.isfinite().all():
                break
            _, _, right = torch.linalg.svd(difference.mT, full_matrices=False)
            # The direction that the differences say, and what the function does along it.
            for distance in (step, 100 * step, 0.3):
                a, b = x + distance * right[0], x - distance * right[0]
                pair = call(torch.stack([a, b]))
                rounding = (1e-13 if exact else 1e-5) * float(pair.norm() + 1)
                best = max(best, (float((pair[0] - pair[1]).norm()) - rounding) / float((a - b).norm()))
            x = x + 0.5 * right[0] + 0.1 * torch.randn(total, generator=generator, dtype=torch.float64)
    return best


@dataclass
class Tally:
    """What became of many networks."""

    certified: int = 0
    tight: int = 0
    refused: Counter = field(default_factory=Counter)
    unsound: list = field(default_factory=list)
    raised: list = field(default_factory=list)

    def add(self, other):
        self.certified += other.certified
        self.tight += other.tight
        self.refused += other.refused
        self.unsound += other.unsound
        self.raised += other.raised

    def __str__(self):
        total = self.certified + sum(self.refused.values()) + len(self.raised)
        lines = [
            f"{total} networks: {self.certified} certified, {self.tight} of them tight (stretch above {TIGHT} of the bound),",
            f"{sum(self.refused.values())} refused, {len(self.unsound)} unsound, {len(self.raised)} other exceptions",
        ]
        lines += [f"  {number:6d}  {reason}" for reason, number in self.refused.most_common(25)]
        lines += [f"UNSOUND {entry}" for entry in self.unsound[:20]] + [f"RAISED {entry}" for entry in self.raised[:20]]
        return "\n".join(lines)


def reason_of(error):
    """The kind of an error, without names, numbers and places."""
    text = re.sub(r"\([^()]*\.py:\d+.*?\)(?=[:,;. ]|$)", "", str(error))
    text = re.sub(r"'[^']*'|[\d.]+|\([^)]*\)", "_", text)
    return text[:90]


def judge(seed, tally):
    """Try one network."""
    model = Program(seed)
    shapes = [shape for shape in (model.shape, model.second) if shape]
    try:
        bound = ts.lipschitz_bound(model, shapes if len(shapes) > 1 else shapes[0])
    except (ValueError, TypeError) as error:
        tally.refused[reason_of(error)] += 1
        return
    except Exception:
        tally.raised.append((seed, model.said, traceback.format_exc()[-600:]))
        return
    tally.certified += 1
    try:
        seen = largest_stretch(model, shapes, seed)
    except RuntimeError:  # writes in place that only single samples allow
        return
    slack = 1e-6 if model.dtype == torch.float64 else 2e-3
    tally.tight += seen > TIGHT * bound
    if seen > bound * (1 + slack) + (1e-9 if model.dtype == torch.float64 else 1e-4):
        tally.unsound.append((seed, bound, seen, model.shape, model.said, model.kept))


def run(seeds, minutes=None):
    """Try networks until seeds or time are over."""
    torch.set_num_threads(1)
    tally, started = Tally(), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            judge(seed, tally)
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                break
    return tally


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=1000)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=0, help="first network")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    last = given.seed + (10**9 if given.minutes else given.networks)
    shares = [range(given.seed + i, last, given.workers) for i in range(given.workers)]
    total = Tally()
    with ProcessPoolExecutor(given.workers) as pool:
        for tally in pool.map(run, shares, [given.minutes] * given.workers):
            total.add(tally)
    print(total)
    raise SystemExit(bool(total.unsound or total.raised))


if __name__ == "__main__":
    main()
