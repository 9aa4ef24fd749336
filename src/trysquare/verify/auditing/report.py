"""What an audit found, as a table and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from trysquare.files import JsonObject, or_infinite, read_json, without_infinities

_HEADER = ("layer", "type", "geometry", "σ min", "σ max", "bound", "so far", "verdict", "remark")
_EXTREMES = ("smallest", "largest")
_VERDICT = _HEADER.index("verdict")
_COLOURS = {"orthogonal": "green", "1-Lipschitz": "cyan", "amplifies": "red", "not certified": "yellow"}


@dataclass(frozen=True)
class LayerAudit:
    """One row of the table.

    Attributes:
        name: path of the module, or of the function that the forward pass calls.
        type: class or function.
        geometry: shapes, and the numbers of a convolution.
        smallest: smallest singular value, or a certified lower bound on it (the remark says which); ``None`` if it was
            not computed or there is none.
        largest: largest singular value found; of a layer that is not linear and whose bound is above 1, the largest
            Jacobian norm seen. A lower bound on the layer's own Lipschitz constant, to rounding. ``None`` if there is
            none.
        bound: certified upper bound on the layer's own Lipschitz constant.
        bound_so_far: certified bound of the network up to here; ``None`` inside of a block.
        verdict: ``"orthogonal"`` (all singular values are 1), ``"1-Lipschitz"`` (the bound is at most 1),
            ``"amplifies"`` (the constant is above 1), or ``"not certified"`` (the bound is above 1, and nothing that
            was found is).
        remark: why, and what to do.
        depth: 0 for what the network's forward pass calls, 1 for the layers inside of a block of ours, and so on.
        spectrum: all singular values where they were asked for and affordable.
    """

    name: str
    type: str
    geometry: str
    smallest: float | None
    largest: float | None
    bound: float
    bound_so_far: float | None
    verdict: str
    remark: str
    depth: int = 0
    spectrum: list[float] | None = field(default=None, repr=False)

    @classmethod
    def from_dict(cls, content: JsonObject) -> LayerAudit:
        """Return the row of its part of a report in JSON."""
        row: JsonObject = {name: str(content[name]) for name in ("name", "type", "geometry", "verdict", "remark")}
        row |= {name: content[name] if content[name] is None else float(content[name]) for name in _EXTREMES}
        row |= {"bound": or_infinite(content["bound"]), "depth": int(content["depth"])}
        row["bound_so_far"] = None if row["depth"] else or_infinite(content["bound_so_far"])
        row["spectrum"] = None if content["spectrum"] is None else list(map(float, content["spectrum"]))
        return cls(**row)

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        numbers = (self.smallest, self.largest, self.bound, self.bound_so_far)
        name = "  " * self.depth + self.name
        return [name, self.type, self.geometry, *map(_number, numbers), self.verdict, self.remark]


@dataclass(frozen=True)
class AuditReport:
    """What ``audit`` found.

    Attributes:
        layers: a row for each module and function on the way, in the order in which they run; a block of ours is
            followed by the layers inside of it.
        bound: certified upper bound on the Lipschitz constant of the network.
        lower_bound: largest Jacobian norm seen; ``None`` if the inputs are tokens, which have no Jacobian.
        input_shape: shape of the inputs that it holds for; a tuple of shapes if there are several.
    """

    layers: list[LayerAudit]
    bound: float
    lower_bound: float | None
    input_shape: tuple[Any, ...]

    @property
    def ratio(self) -> float | None:
        """Bound over lower bound: 1 if the bound is known to be exact."""
        if self.lower_bound is None:
            return None
        return self.bound / self.lower_bound if self.lower_bound else math.inf

    def to_json(self) -> str:
        """Return the report as JSON, where infinite numbers become ``null``; ``from_json`` reads it."""
        content = {**asdict(self), "ratio": self.ratio}
        return json.dumps(without_infinities(content), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> AuditReport:
        """Return the report that ``to_json`` wrote.

        Raises:
            ValueError: if the text is something else.
        """
        return read_json(text, "an audit", cls._from_content)

    @classmethod
    def _from_content(cls, content: JsonObject) -> AuditReport:
        layers = [LayerAudit.from_dict(layer) for layer in content["layers"]]
        lower = None if content["lower_bound"] is None else float(content["lower_bound"])
        return cls(layers, or_infinite(content["bound"]), lower, _shape(content["input_shape"]))

    # ``print`` works with torch and numpy alone; ``__rich__`` below adds colours where rich is installed.
    def __str__(self) -> str:
        lines = [list(_HEADER), *(row.cells for row in self.layers)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in [*padded, "", self.summary])

    @property
    def summary(self) -> str:
        """The three numbers of the whole network."""
        several = (
            self.input_shape if self.input_shape and isinstance(self.input_shape[0], tuple) else (self.input_shape,)
        )
        shape = " and ".join(" x ".join(map(str, one)) for one in several)
        bound = f"Inputs of {shape}: certified Lipschitz bound {self.bound:.6g}"
        if self.lower_bound is None:
            return f"{bound} with respect to one-hot vectors; no lower bound: tokens have no Jacobian"
        return f"{bound}, lower bound found {self.lower_bound:.6g}, ratio {self.ratio:.4g}"

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(*_HEADER)
        for row in self.layers:
            cells = [escape(cell) for cell in row.cells]
            cells[_VERDICT] = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
            table.add_row(*cells)
        return Group(table, self.summary)


def _shape(content: Any) -> tuple[Any, ...]:
    return tuple(_shape(part) if isinstance(part, list) else int(part) for part in content)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
