"""Weights of another library's model into a model of ours: orthogonium's checkpoints, and plain ``state_dict`` s.

What orthogonium keeps are free tensors, so its weights are computed here by its formulas, and our free tensors found
for them. In the notation of its format, a kernel is ``E_n ∘ … ∘ E_1 ∘ M``: ``E`` are 2x2 kernels, each of two
projectors, and ``M`` is the product of two block reflectors. With a stride comes an orthonormal matrix over the taps of
one step, on the left. These are kernels that ``aoc`` has, and the projectors can be read off them (``AOC.solve``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.naming import pick, shown
from trysquare.nn.layers.block import Block
from trysquare.nn.layers.conv import OrthogonalConvolution
from trysquare.nn.layers.heads import UnitNormLinear
from trysquare.nn.layers.potential import PotentialConv
from trysquare.nn.linalg.checks import require_dense
from trysquare.nn.linalg.kernels import compose
from trysquare.nn.linalg.rescaling import contract_rows, unit_rows
from trysquare.nn.parametrizations import AOC
from trysquare.nn.parametrizations.base import ParametrizedWeight

# What is called otherwise there, in residual blocks.
_THEIR_NAMES = {"branch": "fn", "scale": "alpha", "logit": "alpha"}
# What may be missing, because it is a constant there.
_CONSTANT = {"num_batches_tracked": 0, "running_mean": 0.0, "angle": math.pi / 4}
_POWER_STEPS = 3


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], *, orthogonalizer: str = "bjorck"
) -> dict[str, float]:
    """Load the ``state_dict`` of an orthogonium model, or of a plain one, into the same network made of our layers.

    Modules are matched by their names, so write the network with the same ones. A weight that our layer can have is set
    exactly, to rounding, any other one to the nearest (``layer.project_``). Biases, running means and factors of
    residuals are copied. ``docs/coming-from.md`` says which layer of orthogonium is which of ours.

    Args:
        model: a network with our layers; it is changed in place.
        weights: what ``state_dict()`` of the other one returned: of orthogonium 0.0.4 (its AOC and RKO convolutions,
            linear layers, SLL blocks, centerings and residuals), or with plain weights, as ``vanilla_export`` of
            deel-torchlip and ``parametrize.remove_parametrizations`` leave them.
        orthogonalizer: by which of orthogonium's methods the other network was made, which its checkpoints do not say:
            ``"bjorck"`` (its default), ``"qr"``, ``"cholesky"`` or ``"exponential"``.

    Returns:
        For each weight, how far ours is from the one that the other network used, relative to the norm of that: about
        1e-7 where it is the same.

    Raises:
        ValueError: if names or shapes do not fit, numbers are not finite, complex or not there (sparse or nested
            tensors, the meta device), or there is no such orthogonalizer. The model is then partly loaded.
        TypeError: if ``model`` is no module.

    >>> plain = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> model = nn.Sequential(OrthoLinear(8, 4), nn.ReLU(), UnitNormLinear(4, 2))
    >>> moved = ts.load_weights(model, plain.state_dict())
    >>> sorted(moved), bool(torch.equal(model[0].bias, plain[0].bias))
    (['0.weight', '2.weight'], True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        require_dense(f"{name} of the model", tensor, meta=False)
    state = _State(weights, orthogonalizer)
    moved = dict(_load(model, state, "", ""))
    state.refuse_unused()
    return moved


def _load(module: nn.Module, state: _State, path: str, their_path: str) -> Iterator[tuple[str, float]]:
    if isinstance(module, ParametrizedWeight) and hasattr(module, "parametrizations"):
        yield f"{path}weight", _load_weight(module, state, their_path)
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for name in own.keys() - module._non_persistent_buffers_set:
        _copy(own[name], name, state, their_path)
    for name, child in module.named_children():
        if name != "parametrizations":
            theirs = name if state.holds(f"{their_path}{name}.") else _THEIR_NAMES.get(name, name)
            yield from _load(child, state, f"{path}{name}.", f"{their_path}{theirs}.")


@torch.no_grad()
def _copy(target: Tensor, name: str, state: _State, path: str) -> None:
    value = state.take(f"{path}{name}")
    if value is None and name in _THEIR_NAMES:
        value = state.take(f"{path}{_THEIR_NAMES[name]}")
        if value is not None and name == "logit":  # the share of the branch; theirs is that of the skip
            value = -value
    if value is None and name in _CONSTANT:
        value = torch.full_like(target, _CONSTANT[name])
    if value is None:
        raise ValueError(f"there is no {path}{name} for the {name} of shape {tuple(target.shape)} in the model")
    if name == "running_mean" and value.numel() == 1:  # as it is before training
        value = value.expand(target.numel())
    if value.numel() != target.numel():
        raise ValueError(f"{path}{name} has the shape {tuple(value.shape)}, and {tuple(target.shape)} in the model")
    target.copy_(value.reshape(target.shape))
    if not target.isfinite().all():
        raise ValueError(f"{path}{name} holds numbers that are not finite, or too large for {target.dtype}")


def _load_weight(layer: ParametrizedWeight, state: _State, path: str) -> float:
    made, shape = layer.parametrization, tuple(layer.parametrization.weight_shape)
    try:
        weight, whole = state.weight(path, layer)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"the shapes of what {path}weight is made of do not fit each other: {error}") from error
    if tuple(weight.shape) != shape:
        raise ValueError(f"{path}weight has the shape {tuple(weight.shape)}, and {shape} in the model, of {layer}")
    if whole is not None and isinstance(made, AOC) and whole.shape[1] == made.geometry.inner_channels:
        # Projectors cannot be read off a kernel with channels cut off, and can off the whole one.
        with torch.no_grad():
            for tensor, free in zip(layer.free_tensors, made.solve(whole), strict=True):
                tensor.copy_(free)
    return layer.project_(weight)


class _State:
    """A ``state_dict``, and what of it was used.

    Args:
        tensors: by name.
        orthogonalizer: by which orthogonium makes matrices orthonormal.
    """

    def __init__(self, tensors: Mapping[str, Tensor], orthogonalizer: str) -> None:
        pairs = list(tensors.items()) if isinstance(tensors, Mapping) else [(None, None)]
        if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
            raise ValueError("weights must be a state_dict: tensors by name")
        for name, value in pairs:
            if require_dense(f"{name}", value, meta=False).is_complex():
                raise ValueError(f"{name} holds complex numbers, of which the model would keep the real parts")
        self._tensors, self._used = tensors, set[str]()
        self._orthonormal = pick(_ORTHONORMAL, orthogonalizer, "orthogonalizer of orthogonium")
        self._orthogonalizer = orthogonalizer

    def holds(self, start: str) -> bool:
        """Whether there is an entry whose name starts so."""
        return any(name.startswith(start) for name in self._tensors)

    def take(self, name: str) -> Tensor | None:
        """Return an entry, if there is one, and note that it was used."""
        self._used.add(name)
        return self._tensors.get(name)

    def refuse_unused(self) -> None:
        """Refuse to leave something out, but what orthogonium keeps and never uses.

        Raises:
            ValueError: if an entry was not used.
        """
        if left := sorted(name for name in self._tensors.keys() - self._used if not f".{name}".endswith(".q")):
            raise ValueError(f"the model has no place for {shown(left)}; give its modules the names of the other ones")

    def weight(self, path: str, layer: Any) -> tuple[Tensor, Tensor | None]:
        """Return a weight in float64, and, where that is a kernel with channels cut off, the whole kernel.

        Raises:
            ValueError: if there is none, or one whose formula is not known.
        """
        self._require_sizes(path, layer)
        if isinstance(layer, Block):
            return self._contraction(f"{path}kernel", path, layer), None
        plain = self.take(f"{path}weight")
        if plain is not None:
            if plain.shape != layer.parametrization.weight_shape:  # before memory is taken for it
                raise ValueError(
                    f"{path}weight has the shape {tuple(plain.shape)}, and "
                    f"{tuple(layer.parametrization.weight_shape)} in the model, of {layer}"
                )
            return plain.detach().double().cpu(), None
        if self.holds(f"{path}parametrizations.weight_1."):
            inner, groups = self._kernel(path, "weight_1"), layer.groups
            whole = compose(self._matrix(path, "weight_2", groups), inner.flatten(0, 1), groups)
            return whole[:, : layer.geometry.group_in], whole
        shape = self._tensors.get(f"{path}parametrizations.weight.original", torch.empty(0)).shape
        if isinstance(layer, UnitNormLinear):
            return unit_rows(self._free(path, "weight")[0]), None
        if shape == layer.weight.shape or not isinstance(layer, OrthogonalConvolution):
            matrix = self._matrix(path, "weight", getattr(layer, "groups", 1))
            axes = zip(layer.kernel_size, layer.stride, strict=True) if matrix.ndim > 2 else ()
            return matrix / math.prod(-(-k // s) for k, s in axes) ** 0.5, None
        kernel, n, m = self._kernel(path, "weight"), layer.geometry.group_out, layer.geometry.group_in
        kernel = kernel.transpose(1, 2) if n < m else kernel
        return kernel[:, :n, :m].flatten(0, 1), None

    def _require_sizes(self, path: str, layer: ParametrizedWeight) -> None:
        """Refuse free tensors that are too large to be those of such a layer, before they take memory and time.

        Raises:
            ValueError: if one is; it names the sizes.
        """
        most = math.prod(layer.parametrization.weight_shape)
        if isinstance(layer, OrthogonalConvolution):
            made = layer.geometry
            widest = max(made.group_in * math.prod(made.stride), made.group_out)
            most = max(most, 2 * made.groups * math.prod(made.kernel_size) * widest**2)
        for name, value in self._tensors.items():
            if name.startswith(f"{path}parametrizations.") and not 1 <= value.numel() <= most:
                raise ValueError(f"{name} has {value.numel()} numbers, and at most {most} make the weight of {layer}")

    def _free(self, path: str, name: str, normed: str | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the free tensor of a weight, and the vectors that its power iteration starts from.

        Args:
            path: of the layer.
            name: of the weight.
            normed: what in the parametrization has the vectors; ``None`` if there are none.

        Raises:
            ValueError: if there is no such tensor, or another kind of parametrization.
        """
        start = f"{path}parametrizations.{name}."
        found = {key.removeprefix(start) for key in self._tensors if key.startswith(start)}
        vectors = [] if normed is None else [f"{normed}.parametrizations.{vector}.original" for vector in "uv"]
        if found != {"original", *vectors}:
            raise ValueError(
                f"{start[:-1]} holds {shown(sorted(found))}, and {shown(sorted({'original', *vectors}))} is what it "
                f"would be in orthogonium with orthogonalizer={self._orthogonalizer!r}. Of other parametrizations the "
                "formula is not known: take them off first (torch.nn.utils.parametrize.remove_parametrizations, or "
                "vanilla_export of deel-torchlip)"
            )
        self._used |= {start + name for name in found}
        free = self._tensors[f"{start}original"].detach().double().cpu()
        return free, None if normed is None else self._tensors[start + vectors[0]].detach().double().cpu()

    def _made_orthonormal(self, path: str, name: str, groups: int, normed: str) -> Tensor:
        """Return orthonormal matrices, after a few steps of power iteration by whose norms they are divided."""
        free, start = self._free(path, name, None if self._orthogonalizer == "cholesky" else normed)
        matrices = free.view(groups, len(free) // groups, -1) if groups else free
        if start is not None:
            if start.shape != (*matrices.shape[:-1], 1):
                raise ValueError(
                    f"{path}parametrizations.{name}: a vector of shape {tuple(start.shape)} does not fit matrices of "
                    f"shape {tuple(matrices.shape)}"
                )
            u = F.normalize(start, dim=-2)
            for _ in range(_POWER_STEPS):
                v = F.normalize(matrices.mT @ u, dim=-2)
                u = F.normalize(matrices @ v, dim=-2)
            matrices = matrices / (u.mT @ matrices @ v)
        return self._orthonormal(matrices).reshape(free.shape)

    def _matrix(self, path: str, name: str, groups: int) -> Tensor:
        """Return an orthonormal matrix for each group, as a weight: of a linear layer, or over the taps of a kernel."""
        matrix = self._tensors.get(f"{path}parametrizations.{name}.original", torch.empty(0)).ndim == 2
        return self._made_orthonormal(path, name, 0 if matrix else groups, "0" if matrix else "0.pi")

    def _kernel(self, path: str, name: str) -> Tensor:
        """Return a kernel ``(g, c, c, k, k)``, of frames ``(g, 2 k, c, h)``."""
        shape = self._tensors.get(f"{path}parametrizations.{name}.original", torch.empty(0)).shape
        if shape[-1:] == (1,):  # of two or three channels: vectors
            frames = F.normalize(self._free(path, name)[0], dim=-2)
        else:
            frames = self._made_orthonormal(path, name, 0, "0")
        if frames.ndim != 4 or frames.shape[1] % 2:
            raise ValueError(f"{path}parametrizations.{name}.original has the shape {tuple(shape)}, which is no kernel")
        projectors, size = frames @ frames.mT, frames.shape[1] // 2
        one = torch.eye(frames.shape[-2], dtype=frames.dtype)
        kernel = ((one - 2 * projectors[:, 0]) @ (one - 2 * projectors[:, 1]))[..., None, None]
        taps = torch.stack((projectors, one - projectors), -1)
        for place in _order(size - 1):
            down, across = taps[:, 2 + place, ..., None], taps[:, 1 + size + place, ..., None, :]
            kernel = compose(down, compose(across, kernel, dims=2), dims=2)
        return kernel

    def _contraction(self, name: str, path: str, layer: Any) -> Tensor:
        """Return the kernel of an SLL block, whose weights ``q`` cancel."""
        start = f"{path}parametrizations.kernel."
        free = self.take(f"{start}original")
        if not isinstance(layer, PotentialConv) or free is None or self.take(f"{start}0.q") is None:
            raise ValueError(f"{name} is not that of a SDPBasedLipschitzResBlock of orthogonium, which is a SLLBlock2d")
        kernel = free.detach().double().cpu().unflatten(0, (layer.groups, -1))
        return contract_rows(kernel, dims=2).flatten(0, 1)


def _order(count: int) -> list[int]:
    """Return which 2x2 kernels are applied first: they are composed in pairs, as long as their number is even."""
    runs = [[place] for place in range(count)]
    while len(runs) % 2 == 0 and len(runs) > 1:
        half = len(runs) // 2
        runs = [first + later for first, later in zip(runs[:half], runs[half:], strict=True)]
    return [place for run in runs for place in run]


def _bjorck(matrices: Tensor) -> Tensor:
    for _ in range(12):
        matrices = 1.5 * matrices - 0.5 * matrices @ matrices.mT @ matrices
    return matrices


def _qr(matrices: Tensor) -> Tensor:
    if matrices.shape[-2] < matrices.shape[-1]:
        return _qr(matrices.mT).mT
    found, triangle = torch.linalg.qr(matrices)
    return found * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _cholesky(matrices: Tensor) -> Tensor:
    gram = matrices @ matrices.mT + 1e-5 * torch.eye(matrices.shape[-2], dtype=matrices.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(gram), matrices, upper=False)


def _exponential(matrices: Tensor) -> Tensor:
    n, m = matrices.shape[-2:]
    square = F.pad(matrices, (0, max(0, n - m), 0, max(0, m - n)))
    return torch.linalg.matrix_exp((square - square.mT) / 2)[..., :n, :m]


_ORTHONORMAL: dict[str, Callable[[Tensor], Tensor]] = {
    "bjorck": _bjorck, "qr": _qr, "cholesky": _cholesky, "exponential": _exponential,
}  # fmt: skip
