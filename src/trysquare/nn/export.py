"""Models in plain torch, and in files that run without this library."""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.files import write_whole
from trysquare.nn.sharing import refuse_sharded


@runtime_checkable
class PlainLayer(Protocol):
    """A layer or block that says what it is in plain torch."""

    def as_torch(self) -> nn.Module:
        """Return the same function, with the weights that it has now, in layers of ``torch.nn``."""
        ...


def to_torch(model: nn.Module, *, keep: tuple[type[nn.Module], ...] = ()) -> nn.Module:
    """Copy a model with every layer of this library replaced by plain ``torch.nn`` layers of the same function.

    Replaced is every module that has a method ``as_torch``, which returns a plain module. What has no
    counterpart in ``torch.nn`` (sorting activations, residuals, pooling that is scaled) becomes a module
    of ``torch.fx``, so that no class of this library is left; centerings take off their running means.
    The one exception are recurrent layers with another nonlinearity than tanh and ReLU, which are copied
    with plain weights, and classes of your own that override ``forward`` of a layer.

    The original is not touched. Layers that occur several times stay shared. Plain circular padding
    cannot wrap around more than once, so the copy refuses feature maps smaller than the padding.

    Args:
        model: any model.
        keep: classes of this library that are copied as they are.

    Raises:
        ValueError: if the model holds a convolution whose kernel depends on the size of the image, or is spread over
            processes by ``fully_shard``.

    >>> plain = to_torch(nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU()))
    >>> type(plain[0]).__name__
    'Conv2d'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    refuse_sharded(model)
    # A copy that is given beforehand replaces the module wherever it occurs.
    replaced: dict[int, nn.Module] = {}
    original = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for module in _inside_out(model, set()):
        if isinstance(module, PlainLayer) and not isinstance(module, keep) and _as_written_here(module):
            plain = module.as_torch()
            shares = any(id(part) in original for part in (*plain.modules(), *plain.parameters(), *plain.buffers()))
            replaced[id(module)] = copy.deepcopy(plain, replaced) if shares else plain
    return copy.deepcopy(model, replaced)


def _inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """All modules, each after those inside of it."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _inside_out(child, seen)
        yield module


def _as_written_here(module: nn.Module) -> bool:
    """Whether nobody has overridden what a layer computes, besides what says so."""
    forward = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    plain = next(cls for cls in type(module).__mro__ if "as_torch" in vars(cls))
    ours = forward.__module__.split(".")[0] in ("trysquare", "torch")
    return (ours or issubclass(plain, forward)) and "forward" not in vars(module)


def with_fixed_weights(model: nn.Module) -> nn.Module:
    """Copy a model with every parametrized tensor replaced by its present value, and no gradients for parameters.

    The layers stay what they are (``to_torch`` also makes them plain), so the copy computes the same function bit for
    bit, builds no weights, and can be cast to float64 without being built again. Fourier layers, whose weights
    depend on the image size, are copied as they are. The original is not touched.

    >>> copy = ts.export.with_fixed_weights(nn.Sequential(OrthoLinear(4, 4)))
    >>> [name for name, _ in copy.named_parameters()]
    ['0.bias', '0.weight']
    """
    with torch.no_grad():
        copied = copy.deepcopy(model)
        for original, twin in list(zip(model.modules(), copied.modules(), strict=True)):
            if parametrize.is_parametrized(original):
                names = original.get_submodule("parametrizations")._modules
                _fix(twin, {name: getattr(original, name).detach().clone() for name in names})
    return copied.requires_grad_(False)


def _fix(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    # Not torch's remove_parametrizations, which takes the property off the class that the original still needs.
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


FORMATS = {"torch": "model.pt2", "onnx": "model.onnx"}
"""File formats that run without this library, with the usual name of a file."""

# Largest difference of outputs at which a file counts as the same function.
_SAME = 1e-5


def export(model: nn.Module, path: str | os.PathLike[str], example: Tensor, file_format: str = "torch") -> float:
    """Write a model as a file that runs without this library, read it back, and compare both.

    Args:
        model: any model; it is exported in eval mode with the weights that it has now.
        path: the file. It appears when it is complete and has been compared.
        example: a batch of inputs, of at least 2. The file takes any number of them.
        file_format: ``"torch"`` (``torch.export.load(path).module()`` runs it) or ``"onnx"``.

    Returns:
        The largest difference of outputs on the example.

    Raises:
        ValueError: if the format is not known, or the outputs differ by more than 1e-5 (times the largest output, where
            that is above 1).
        ImportError: if the packages for ONNX are not installed.
        OSError: if the file cannot be written.

    >>> from tempfile import mkdtemp
    >>> model = nn.Sequential(nn.Flatten(), OrthoLinear(64, 10))
    >>> ts.export.export(model, mkdtemp() + "/model.pt2", torch.rand(2, 1, 8, 8)) < 1e-5
    True
    """
    if file_format not in FORMATS:
        raise ValueError(f"format {file_format!r} must be one of {', '.join(map(repr, FORMATS))}")
    plain = to_torch(model).eval().requires_grad_(False)
    content, run = (_as_program if file_format == "torch" else _as_onnx)(plain, example)
    with torch.no_grad():
        training = {module: module.training for module in model.modules()}
        wanted = model.eval()(example)
        for module, mode in training.items():
            module.training = mode
    difference = float((run(example) - wanted).abs().max())
    limit = _SAME * max(1.0, float(wanted.abs().max()))
    if not difference <= limit:
        raise ValueError(f"the exported model differs by {difference:.1e} from the original, more than {limit:.1e}")
    write_whole(path, content)
    return difference


Exported = tuple[bytes, Callable[[Tensor], Tensor]]
"""Content of a file, and the function in it."""


def _as_program(model: nn.Module, example: Tensor) -> Exported:
    buffer = io.BytesIO()
    torch.export.save(_traced(model, example), buffer)
    content = buffer.getvalue()
    return content, torch.export.load(io.BytesIO(content)).module()


def _traced(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)


def _as_onnx(model: nn.Module, example: Tensor) -> Exported:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX needs onnx, onnxscript and onnxruntime: pip install 'trysquare[export]'") from error
    with _quiet():
        program: Any = torch.onnx.export(_traced(model, example), dynamo=True, verbose=False)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content)
    name = session.get_inputs()[0].name
    return content, lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about its own future, and about packages that it does not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
