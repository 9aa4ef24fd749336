"""Models on disk: weights, and the function that makes the model to put them in."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    target = Path(path)
    content = {"factory": factory, "arguments": dict(arguments or {}), "state_dict": model.state_dict()}
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(content, file)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_model(source: str | os.PathLike[str]) -> nn.Module:
    """A model in eval mode, from a checkpoint file or from ``"package.module:factory"``.

    The working directory is importable, as with ``python -m``. A checkpoint runs the factory that it names: load only
    files that you trust.

    Raises:
        ValueError: if there is no such file or factory, or the file is not a checkpoint of ours.
    """
    if Path(source).is_file():
        content = _read(Path(source))
        model = _make(content["factory"], content["arguments"])
        model.load_state_dict(content["state_dict"])
    else:
        model = _make(str(source), {})
    return model.eval()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that torch can load: {error}") from error
    if not isinstance(content, dict) or set(content) != _KEYS:
        raise ValueError(f"{path} is not a checkpoint of trysquare, which holds {sorted(_KEYS)}: see save_checkpoint")
    return content


def _make(factory: str, arguments: Mapping[str, Any]) -> nn.Module:
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ValueError(f"{factory!r} must be a checkpoint file that exists, or 'package.module:factory'")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {factory!r}: {error}") from error
    model = make if isinstance(make, nn.Module) else make(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{factory!r} made {type(model).__name__}, not an nn.Module")
    return model
