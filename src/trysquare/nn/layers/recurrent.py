"""Recurrent layers whose matrices are orthogonal, so they make neither states nor gradients grow or vanish."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from trysquare.naming import pick, shown
from trysquare.nn.geometry import Sizes, flag, number, positive
from trysquare.nn.layers.activations import Abs, FullSort, GroupSort, Householder, MaxMin, NActivation
from trysquare.nn.layers.linear import OrthoLinear
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.linalg.bounds import singular_value_range
from trysquare.nn.linalg.checks import require_dense
from trysquare.nn.linalg.lattice import ROUND_UP
from trysquare.nn.linalg.operator import checked_weight
from trysquare.nn.linalg.precision import as_autocast
from trysquare.nn.parametrizations.base import Device, ParametrizedWeight
from trysquare.torch_internals import hooks_of

__all__ = ["LastState", "OrthoRNN", "OrthoRNNCell"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "abs": Abs, "maxmin": MaxMin}
# Modules that are 1-Lipschitz on vectors, whatever their parameters; Householder says itself how nearly.
_CONTRACTIONS = (nn.Tanh, nn.ReLU, nn.Identity, nn.Hardtanh, Abs, MaxMin, GroupSort, FullSort, NActivation)
# Between which angles rotations are drawn, for each way to start.
_ANGLES: dict[str, tuple[float, float] | None] = {
    "henaff": (-math.pi, math.pi),
    "cayley": (0.0, math.pi / 2),
    "identity": (0.0, 0.0),
    "random": None,
}


def _activation(nonlinearity: str | nn.Module, size: int) -> nn.Module:
    """Return a module of its own for the states of a layer.

    Raises:
        ValueError: if it is not known to be 1-Lipschitz, or does not take states of this size.
    """
    if isinstance(nonlinearity, str):
        nonlinearity = pick(_ACTIVATIONS, nonlinearity, "nonlinearity")()
    if type(nonlinearity) not in (*_CONTRACTIONS, Householder):
        names = ", ".join(cls.__name__ for cls in (*_CONTRACTIONS, Householder))
        raise ValueError(
            f"nonlinearity={shown(nonlinearity)} is not known to be 1-Lipschitz; use one of "
            f"{', '.join(map(repr, _ACTIVATIONS))}, or a module: {names}"
        )
    if getattr(nonlinearity, "dim", 1) not in (1, -1):
        raise ValueError(f"nonlinearity={nonlinearity} must act on the features of (batch, features), on axis 1")
    with torch.no_grad():  # a size that it does not take is refused here, and not at the first pass
        nonlinearity(torch.zeros(1, size, device=next((t.device for t in nonlinearity.parameters()), None)))
    return copy.deepcopy(nonlinearity)


def _in_planes(first: Tensor, second: Tensor, size: int, rest: float) -> Tensor:
    """Return the matrix with blocks ``[[first, -second], [second, first]]``, and ``rest`` where one row is left."""
    blocks = torch.stack([torch.stack([first, -second], -1), torch.stack([second, first], -1)], -2)
    return torch.block_diag(*blocks, *([first.new_full((1, 1), rest)] if size % 2 else []))


def _free_start(turn: OrthoLinear, init: str) -> Tensor:
    """Return the free matrix from which a recurrent matrix starts as ``init`` says, float64 on the CPU."""
    size, between = turn.in_features, pick(_ANGLES, init, "init")
    if between is None:
        return turn.parametrization.draw()[0]
    low, high = between
    angles = low + (high - low) * torch.rand(size // 2, dtype=torch.float64)
    if turn.orthogonalizer == "exponential":  # of M - Mᵀ, which has no inverse in closed form, but for rotations
        return _in_planes(torch.zeros_like(angles), angles / 2, size, 0.0)
    return turn.parametrization.solve(_in_planes(angles.cos(), angles.sin(), size, 1.0))[0]


class OrthoRNNCell(nn.Module):
    """An ``nn.RNNCell`` with orthogonal matrices: ``h' = σ(W_in x + b + W h)``.

    ``W`` is square orthogonal and ``W_in`` has orthonormal columns, or rows if the state is smaller than the input. As
    every layer, it builds its matrices at each call in training: loop within ``ts.built``, or use ``OrthoRNN``, which
    builds them once per sequence.

    Args:
        input_size: features of the input.
        hidden_size: features of the state.
        bias: whether to add a learnable bias, which starts at 0 (a single one; torch's two only add up).
        nonlinearity: ``"tanh"``, ``"relu"``, ``"abs"`` or ``"maxmin"`` (the last two are isometric: gradients keep
            their norm through any number of steps), or a 1-Lipschitz activation as a module (``GroupSort``,
            ``Householder``, ...), which is copied.
        device: device of the parameters.
        dtype: dtype of the matrices; free tensors are kept in float32 or float64.
        init: what the recurrent matrix starts as. Rotations in planes by angles that are uniform in [-π, π]
            (``"henaff"``; Henaff, Szlam and LeCun, 2016) or in [0, π/2] (``"cayley"``; Helfrich, Willmott and Ye,
            2018), the ``"identity"``, or ``"random"``: what the orthogonalizer starts from, by default uniformly
            distributed.
        orthogonalizer: how free matrices are made orthonormal (see ``linalg.orthogonalize``).

    Raises:
        ValueError: if an argument has no meaning.

    >>> OrthoRNNCell(3, 8)(torch.randn(5, 3)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str | nn.Module = "tanh",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        init: str = "henaff",
        orthogonalizer: str = "cholesky",
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = positive("input_size", input_size), positive("hidden_size", hidden_size)
        self.function = _activation(nonlinearity, hidden_size)
        pick(_ANGLES, init, "init")
        self.init = init
        self.read = OrthoLinear(
            input_size, hidden_size, flag("bias", bias), device, dtype, orthogonalizer=orthogonalizer
        )
        self.turn = OrthoLinear(hidden_size, hidden_size, False, device, dtype, orthogonalizer=orthogonalizer)
        self._restart()

    def reset_parameters(self) -> None:
        """Draw new matrices and set the bias to 0."""
        self.read.reset_parameters()
        self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        self.turn.parametrization.writes.forget()
        self.turn.free_tensors[0].copy_(_free_start(self.turn, self.init))
        if self.read.bias is not None:
            self.read.bias.zero_()

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:  # noqa: A002
        """Return the next state from an input ``([batch,] input_size)`` and the state, 0 if there is none."""
        _check_features(input, self.input_size, (1, 2))
        if hx is not None and require_dense("hx", hx).shape != (*input.shape[:-1], self.hidden_size):
            raise ValueError(f"hx has shape {tuple(hx.shape)}, not {(*input.shape[:-1], self.hidden_size)}")
        single = input.ndim == 1
        projected = self._projected(input.unsqueeze(0) if single else input)
        state = projected.new_zeros(projected.shape) if hx is None else hx.unsqueeze(0) if single else hx
        after = self.function(projected + F.linear(state, self.turn.weight))
        return after.squeeze(0) if single else after

    def _projected(self, x: Tensor) -> Tensor:
        return F.linear(x, self.read.weight, self.read.bias)

    @torch.no_grad()
    def norms(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return certified bounds: by how much a step amplifies its input, and by how much the state before it.

        Args:
            dtype: of the state, to which an activation may round its factors.

        Raises:
            ValueError: if hooks or replaced methods make it compute something else, or weights are not finite.
        """
        modules = [self, self.read, self.turn, self.function]
        if any(any(hooks_of(module)) or "forward" in vars(module) for module in modules):
            raise ValueError(
                f"{type(self).__name__} or a part of it has hooks or another forward: its norm is not known"
            )
        slope = 1.0
        if isinstance(self.function, Householder):
            slope = self.function.lipschitz_constant((self.hidden_size,), dtype)
        elif type(self.function) not in _CONTRACTIONS:
            raise ValueError(f"the activation {self.function} is not known to be 1-Lipschitz")
        read, turn = (_norm_of(layer) * slope for layer in (self.read, self.turn))
        return read, turn

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, init={self.init}"


def _norm_of(layer: nn.Linear) -> float:
    if isinstance(layer, ParametrizedWeight):
        weight = layer.exact_weight()
    else:
        weight = checked_weight(as_autocast(layer.weight), type(layer).__name__)
    return singular_value_range([weight.unsqueeze(0)], lowest=False)[1]


def _check_features(x: Tensor, features: int, ndims: Sequence[int]) -> None:
    if require_dense("input", x).ndim not in ndims or x.shape[-1] != features:
        raise ValueError(
            f"input of shape {tuple(x.shape)} must have {' or '.join(map(str, ndims))} axes, the last of "
            f"input_size={features}"
        )


def _grown(norm: float, steps: int) -> float:
    """Return by how much so many steps amplify at most, infinity if that is beyond all numbers."""
    try:
        return max(1.0, norm) ** steps
    except OverflowError:
        return math.inf


def _sum_norm(length: int) -> float:
    """Return the norm of the triangular matrix of ones that makes sums of the first ``k`` of ``length`` numbers."""
    return ROUND_UP / (2 * math.sin(math.pi / (4 * length + 2)))


class Recurrence(OrthoRNNCell):
    """One layer of ``OrthoRNN`` in one direction: sequences ``(batch, length, input_size)`` to all states.

    It is called by ``OrthoRNN`` and bounded as a whole.
    """

    reverse = False

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override] # noqa: A002
        """Return the states ``(batch, length, hidden_size)`` from the state 0 on."""
        return torch.stack(self.states(self._projected(input).unbind(1), None)[0], 1)

    def states(self, projected: Sequence[Tensor], start: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Return the state after each step, and the last one of each sequence.

        Args:
            projected: ``W_in x + b`` for each step; a step has as many rows as there are sequences that go on until
                then, the longest ones first.
            start: the state before the first step of each sequence.
        """
        weight = self.turn.weight  # built here, once for all steps
        if start is None:
            start = projected[0].new_zeros(len(projected[0]), self.hidden_size)
        made, ended, state = [], [], start
        if self.reverse:
            state = start[:0]
        for step in reversed(projected) if self.reverse else projected:
            if len(step) < len(state):
                ended.append(state[len(step) :])
                state = state[: len(step)]
            elif len(step) > len(state):
                state = torch.cat([state, start[len(state) : len(step)]])
            state = self.function(step + F.linear(state, weight))
            made.append(state)
        last = torch.cat([state, *reversed(ended)]) if ended else state
        return made[::-1] if self.reverse else made, last

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Return the constant of all states together; see ``linalg.operator.LipschitzLayer``.

        With norms ``r`` of reading and ``t`` of turning, state ``k`` moves by at most ``Σ_{j≤k} t^(k-j) r |δx_j|``.
        The matrix of these numbers is at most ``r max(1, t)^(length - 1)`` times the one of sums.
        """
        read, turn = self.norms(dtype)
        length = input_shape[0]
        return read * _grown(turn, length - 1) * _sum_norm(length) * ROUND_UP


class _ReverseRecurrence(Recurrence):
    """The same from the last step to the first."""

    reverse = True


class OrthoRNN(nn.Module):
    """An ``nn.RNN`` with orthogonal matrices: ``h_t = σ(W_in x_t + b + W h_{t-1})``; see ``OrthoRNNCell``.

    Arguments, inputs and outputs are those of ``nn.RNN``, packed sequences included. Recurrent matrices are built once
    per sequence. ``layers`` holds the cells, those of the two directions of a layer side by side; for plain torch
    use ``ts.to_torch``, which makes an ``nn.RNN`` of it if the nonlinearity is tanh or ReLU.

    ``lipschitz_bound`` of a model with ``batch_first=True`` has a certified constant for a sequence of a given length:
    ``1 / (2 sin(π / (4 length + 2)))`` for all states of a layer together, about 0.64 times the length. That of the
    last state alone is the root of the length: use ``LastState``.

    Args:
        input_size: features of the input.
        hidden_size: features of a state.
        num_layers: number of layers, each of which reads the states of the one before.
        nonlinearity: as of ``OrthoRNNCell``.
        bias: whether to add learnable biases.
        batch_first: whether sequences are ``(batch, length, features)`` and not ``(length, batch, features)``.
        dropout: probability with which states are dropped between layers in training.
        bidirectional: whether a second cell of each layer reads the sequence backwards.
        device: device of the parameters.
        dtype: dtype of the matrices.
        init: what recurrent matrices start as; as of ``OrthoRNNCell``.
        orthogonalizer: how free matrices are made orthonormal.

    Raises:
        ValueError: if an argument has no meaning.

    >>> output, h_n = OrthoRNN(3, 8, num_layers=2, batch_first=True)(torch.randn(5, 7, 3))
    >>> output.shape, h_n.shape
    (torch.Size([5, 7, 8]), torch.Size([2, 5, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str | nn.Module = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        init: str = "henaff",
        orthogonalizer: str = "cholesky",
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = positive("input_size", input_size), positive("hidden_size", hidden_size)
        self.num_layers = positive("num_layers", num_layers)
        self.batch_first, self.bidirectional = flag("batch_first", batch_first), flag("bidirectional", bidirectional)
        self.dropout = number("dropout", dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
        self.bias = flag("bias", bias)
        self.layers = nn.ModuleList()
        ways: list[type[Recurrence]] = [Recurrence, _ReverseRecurrence] if self.bidirectional else [Recurrence]
        for layer in range(self.num_layers):
            size = hidden_size * len(ways) if layer else input_size
            for way in ways:
                self.layers.append(
                    way(
                        size,
                        hidden_size,
                        self.bias,
                        nonlinearity,
                        device,
                        dtype,
                        init=init,
                        orthogonalizer=orthogonalizer,
                    )
                )

    @property
    def num_directions(self) -> int:
        """1, or 2 if the layer is bidirectional."""
        return 1 + self.bidirectional

    def reset_parameters(self) -> None:
        """Draw new matrices and set biases to 0."""
        for layer in self._cells:
            layer.reset_parameters()

    @property
    def _cells(self) -> list[Recurrence]:
        return list(self.layers)  # type: ignore[arg-type]

    def forward(
        self,
        input: Tensor | PackedSequence,  # noqa: A002
        hx: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Return all states of the last layer, and the last state of each layer and direction.

        Args:
            input: ``(length, batch, input_size)``, with the first two exchanged for ``batch_first``, without the batch,
                or a packed sequence.
            hx: first states ``(num_layers * num_directions, batch, hidden_size)``, 0 if there are none.
        """
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        _check_features(input, self.input_size, (2, 3))
        single = input.ndim == 2
        x = input.unsqueeze(0) if single else input if self.batch_first else input.transpose(0, 1)
        if 0 in x.shape[:2]:
            raise ValueError(f"input of shape {tuple(input.shape)} has no sequence, or one of length 0")
        starts = self._starts(require_dense("hx", hx).unsqueeze(1) if single and hx is not None else hx, len(x))
        lasts: list[Tensor] = []
        for depth in range(self.num_layers):
            outputs = []
            for cell, start in self._of_layer(depth, starts):
                if start is None:
                    found = cell(x)
                    lasts.append(found[:, 0 if cell.reverse else -1])
                else:
                    states, last = cell.states(cell._projected(x).unbind(1), start)
                    found = torch.stack(states, 1)
                    lasts.append(last)
                outputs.append(found)
            x = self._joined(outputs, depth)
        output, h_n = x, torch.stack(lasts)
        if single:
            return output.squeeze(0), h_n.squeeze(1)
        return output if self.batch_first else output.transpose(0, 1), h_n

    def _packed(self, packed: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        _check_features(packed.data, self.input_size, (2,))
        sizes: list[int] = packed.batch_sizes.tolist()
        starts = self._starts(hx, sizes[0])
        if starts is not None and packed.sorted_indices is not None:
            starts = [start.index_select(0, packed.sorted_indices) for start in starts]
        x, lasts = packed.data, []
        for depth in range(self.num_layers):
            outputs = []
            for cell, start in self._of_layer(depth, starts):
                states, last = cell.states(cell._projected(x).split(sizes), start)
                outputs.append(torch.cat(states))
                lasts.append(last)
            x = self._joined(outputs, depth)
        h_n = torch.stack(lasts)
        if packed.unsorted_indices is not None:
            h_n = h_n.index_select(1, packed.unsorted_indices)
        return PackedSequence(x, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), h_n

    def _of_layer(self, depth: int, starts: list[Tensor] | None) -> list[tuple[Recurrence, Tensor | None]]:
        first = depth * self.num_directions
        places = range(first, first + self.num_directions)
        return [(self._cells[k], None if starts is None else starts[k]) for k in places]

    def _joined(self, outputs: list[Tensor], depth: int) -> Tensor:
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return F.dropout(x, self.dropout, self.training) if self.dropout and depth + 1 < self.num_layers else x

    def _starts(self, hx: Tensor | None, batch: int) -> list[Tensor] | None:
        if hx is None:
            return None
        wanted = (self.num_layers * self.num_directions, batch, self.hidden_size)
        if require_dense("hx", hx).shape != wanted:
            raise ValueError(f"hx has shape {tuple(hx.shape)}, not {wanted} (without the batch if the input has none)")
        return list(hx.unbind())

    @torch.no_grad()
    def as_torch(self) -> nn.Module:
        """Return an ``nn.RNN`` with these matrices for tanh and ReLU; a copy with plain linear layers for others."""
        kinds = {nn.Tanh: "tanh", nn.ReLU: "relu"}
        function = type(self._cells[0].function)
        if function not in kinds:
            linear = [layer for cell in self._cells for layer in (cell.read, cell.turn)]
            return copy.deepcopy(self, {id(layer): layer.as_torch() for layer in linear})
        plain = nn.RNN(
            self.input_size, self.hidden_size, self.num_layers, kinds[function], self.bias, self.batch_first,
            self.dropout, self.bidirectional, device=self._cells[0].turn.weight.device,
            dtype=self._cells[0].turn.weight.dtype,
        )  # fmt: skip
        for k, cell in enumerate(self._cells):
            name = f"l{k // self.num_directions}" + ("_reverse" if cell.reverse else "")
            getattr(plain, f"weight_ih_{name}").copy_(cell.read.weight)
            getattr(plain, f"weight_hh_{name}").copy_(cell.turn.weight)
            if self.bias:
                getattr(plain, f"bias_ih_{name}").copy_(cell.read.bias)
                getattr(plain, f"bias_hh_{name}").zero_()
        return plain.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, batch_first={self.batch_first}"


class LastState(Traceable, nn.Module):
    """The last state of the last layer of a recurrent layer, as one tensor ``(batch, features)``.

    It goes into ``nn.Sequential``, in front of a classifier, where ``OrthoRNN`` itself with its two results does not,
    and has a sharper constant: a bidirectional layer ends with the last states of both directions side by side.

    Args:
        rnn: an ``OrthoRNN``, or ``nn.RNN``, with ``batch_first=True``.

    >>> model = nn.Sequential(LastState(OrthoRNN(3, 8, batch_first=True)), OrthoLinear(8, 4))
    >>> model(torch.randn(5, 16, 3)).shape
    torch.Size([5, 4])
    >>> round(ts.lipschitz_bound(model, (16, 3)), 4)  # the root of the length
    4.0
    """

    def __init__(self, rnn: OrthoRNN | nn.RNN) -> None:
        super().__init__()
        if not isinstance(rnn, OrthoRNN | nn.RNN):
            raise TypeError(f"rnn={shown(rnn)} must be an OrthoRNN or nn.RNN")
        if not rnn.batch_first:
            raise ValueError(
                "batch_first=False: LastState takes sequences (batch, length, features); use batch_first=True"
            )
        self.rnn = rnn

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return ``(batch, hidden_size * directions)`` from ``(batch, length, input_size)``."""
        directions = 1 + int(self.rnn.bidirectional)
        last = self.rnn(input)[1][-directions:]
        return last.transpose(0, 1).flatten(1)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.rnn(input)[1][-1 - int(self.rnn.bidirectional) :].transpose(0, 1).flatten(1)

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Return the constant for sequences of the given length; see ``linalg.operator.LipschitzLayer``.

        The last state of one layer moves by at most ``Σ_j |δx_j|``, the root of the length times ``|δx|``. That of
        layer ``L`` weights ``δx_j`` by the number of ways from step ``j`` to the last one, ``C(length - 1 - j + L - 1,
        L - 1)``, times the norms on the way. Where two directions meet, all states of the layers below are bounded
        together.

        Raises:
            ValueError: if it is not known what the layer computes, or it drops states at random.
        """
        rnn, length = self.rnn, input_shape[0]
        if type(rnn) is not OrthoRNN or any(hooks_of(rnn)) or "forward" in vars(rnn):
            raise ValueError(f"only an OrthoRNN without hooks has a certified constant, not {type(rnn).__name__}")
        if rnn.training and rnn.dropout and rnn.num_layers > 1:
            raise ValueError("dropout amplifies in training mode: call model.eval() first")
        reads, turns = zip(*(cell.norms(dtype) for cell in rnn._cells), strict=True)
        growth = _grown(max(turns), length - 1) * ROUND_UP
        if not rnn.bidirectional:
            layers = rnn.num_layers
            ways = sum(math.comb(k + layers - 1, layers - 1) ** 2 for k in range(length)) if layers > 1 else length
            return math.prod(reads) * growth * math.sqrt(ways) * ROUND_UP
        below = (math.sqrt(2) * growth * _sum_norm(length)) ** (rnn.num_layers - 1)
        pairs = [max(reads[k : k + 2]) for k in range(0, len(reads), 2)]
        return math.prod(pairs) * below * growth * math.sqrt(2 * length) * ROUND_UP
