"""Layers that say what they compute in calls of torch alone, from which a module of ``torch.fx`` is made.

The forward pass of a layer looks at its input and refuses what it cannot be for, and chooses derivatives that torch
does not have. A tracer can follow neither. ``plain_forward`` is the same function without both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, fx, nn


class Traceable:
    """Mixin for modules with a ``plain_forward``: what ``forward`` does in eval mode, by calls of torch alone."""

    plain_forward: Callable[..., Tensor]

    def as_torch(self) -> nn.Module:
        """Return the same function as a module of ``torch.fx``, with the same tensors and modules inside."""

        class Tracer(fx.Tracer):  # within a function, so that a pickled module does not name it
            traced_func_name = "plain_forward"
            proxy_buffer_attributes = True

            def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
                return True

        module = cast("nn.Module", self)
        graph = Tracer().trace(module)
        for node in graph.nodes:
            # Others are names that the generated code does not import; a list, a script takes for a tensor.
            node.type = list[Tensor] if node.type == "list[Tensor]" else None
        return fx.GraphModule(module, graph, type(module).__name__)


def shifted(x: Tensor, by: Tensor | None) -> Tensor:
    """Add a number to each channel, whatever the number of axes."""
    return x if by is None else (x.transpose(1, -1) + by).transpose(1, -1)
