"""Models on disk: weights, and the function that makes the model to put them in."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trysquare.files import write_whole

_KEYS = {"factory", "arguments", "state_dict"}


def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, factory: str, arguments: Mapping[str, Any] | None = None
) -> None:
    """Write a model so that ``load_model`` can make it again.

    The file is loadable with ``torch.load(weights_only=True)``, and replaced in one step: an interrupted write leaves
    the old one.

    Args:
        path: file to write.
        model: what ``factory(**arguments)`` returned, after training.
        factory: ``"package.module:function"``.
        arguments: keyword arguments of plain types.
    """
    content = {"factory": factory, "arguments": dict(arguments or {}), "state_dict": model.state_dict()}
    write_whole(path, packed(content))


def packed(content: Mapping[str, Any]) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def load_model(source: str | os.PathLike[str]) -> nn.Module:
    """A model in eval mode, from a checkpoint file, a run directory, or ``"package.module:factory"``.

    The working directory is importable, as with ``python -m``. A checkpoint runs the factory that it names: load only
    files that you trust.

    Raises:
        ValueError: if there is no such file or factory, the factory fails, the file is not a checkpoint of ours, or
            its weights do not fit the model that the factory makes.
    """
    path = model_file(source)
    if path is None:
        return _make(str(source), {}).eval()
    content = read_checkpoint(path)
    model = _make(content["factory"], content["arguments"])
    try:
        model.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        described = f"{content['factory']} with {content['arguments']}"
        raise ValueError(f"{path} holds weights of another model than {described}: {error}") from error
    return model.eval()


def model_file(source: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that is meant: a file, or ``model.pt`` in a run directory; ``None`` if it is neither.

    Raises:
        ValueError: if it is a directory without one.
    """
    path = Path(source)
    if path.is_dir():
        path /= "model.pt"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: {source} is not the directory of a run that has saved a model")
    return path if path.is_file() else None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What ``save_checkpoint`` wrote: factory, arguments and weights.

    Raises:
        ValueError: if it is something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else "it ends too early"
        raise ValueError(
            f"{path} is truncated or not a checkpoint of trysquare.save_checkpoint ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(content, dict) or set(content) != _KEYS:
        raise ValueError(f"{path} is not a checkpoint of trysquare, which holds {sorted(_KEYS)}: see save_checkpoint")
    for name, kind in (("factory", str), ("arguments", dict), ("state_dict", dict)):
        if not isinstance(content[name], kind):
            raise ValueError(
                f"{path} holds {name}={content[name]!r:.60}, which must be a {kind.__name__}: see save_checkpoint"
            )
    return content


def _make(factory: str, arguments: Mapping[str, Any]) -> nn.Module:
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ValueError(f"{factory!r} must be a checkpoint file that exists, or 'package.module:factory'")
    if module_name.startswith(".") or "/" in module_name or module_name.endswith(".py"):
        raise ValueError(f"{factory!r} names a file; name the module: {_as_module(Path(module_name))}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever the module does
        raise ValueError(f"cannot import {factory!r}: {_named(error)}") from error
    if isinstance(make, nn.Module):
        return make
    try:
        model = make(**arguments)
    except Exception as error:  # whatever the factory does
        raise ValueError(f"{factory!r} failed: {_named(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{factory!r} made {type(model).__name__}, not an nn.Module")
    return model


def _as_module(path: Path) -> str:
    """How ``python -m`` would name a file, from the working directory or from its own folder."""
    parts = path.with_suffix("").parts
    if path.is_absolute() or ".." in parts:
        return f"in the folder {path.parent}, {parts[-1]}"
    return ".".join(part for part in parts if part != ".")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
