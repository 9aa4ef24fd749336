"""Models on disk: weights, and what makes the model to put them in.

The format is safetensors, with the factory, its arguments and a digest in the metadata. Reading a file runs nothing
that it names, and one flipped bit anywhere in it is an error.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trysquare.files import LARGEST_MODEL, read_file, write_whole
from trysquare.lab.pickles import read_archive
from trysquare.naming import shown
from trysquare.nn.parametrizations.base import gathered

REGISTRY = "trysquare.models:build"
"""The factory that a file may name and have called: it makes the models of ``trysquare.models``."""

# What a file may name: nothing that a shell or a terminal would take for more than a name.
_FACTORY = re.compile(r"[\w.]+:[\w.]+")
_KEYS = {"factory", "arguments", "state_dict"}
_NO_DIGEST = "0" * 64
_DIGEST_KEY = '"sha256":"'
Factory = Callable[..., nn.Module] | str
Content = dict[str, Any]
"""What a file about a model holds, by name."""


def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, factory: str, arguments: Mapping[str, object] | None = None
) -> None:
    """Write a model so that ``load_model`` can make it again.

    What is to be written is read back first, and the factory is called, on the meta device if it can be, to see that
    the weights fit the model that it makes. The file is replaced in one step: an interrupted write leaves the old one.
    ``safetensors.torch.load_file`` reads the weights. All ranks must call it for a model that ``fully_shard`` has
    spread over them; the file holds the whole.

    Args:
        path: file to write.
        model: what ``factory(**arguments)`` returned, after training.
        factory: ``"package.module:function"``.
        arguments: keyword arguments of plain types.

    Raises:
        ValueError: if the factory has no such name, an argument is not of a plain type, the model holds something
            else than tensors, or ``load_model`` could not make it again; nothing is written then.
        ImportError: if safetensors is not installed.
    """
    content = encoded(model, factory, arguments)
    found = _read_safetensors(content)
    try:
        require_fit(_remade(factory, found["arguments"]).state_dict(), found["state_dict"])
    except ValueError as error:
        described = f"{shown(factory)} with {shown(found['arguments'])}"
        raise ValueError(f"{described} does not make this model again, so that nothing is saved: {error}") from error
    write_whole(path, content)


def _remade(factory: str, arguments: Mapping[str, object]) -> nn.Module:
    """What a factory makes, without numbers where it can, and without a trace in those that are drawn next."""
    make = _built if factory == REGISTRY else partial(_made, factory)
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return make(arguments)
        except ValueError:  # it may look at its numbers
            return make(arguments)


def encoded(model: nn.Module, factory: str, arguments: Mapping[str, object] | None = None) -> bytes:
    """Return the content of a file of ``save_checkpoint``, with nothing said about whether it can be loaded.

    Raises:
        ValueError: as ``save_checkpoint``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(factory, str) or not _FACTORY.fullmatch(factory):
        raise ValueError(f"factory={shown(factory)} must be 'package.module:function', what makes the model again")
    tensors = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{key} of the model is {type(value).__name__}, and a checkpoint holds tensors alone")
        whole = gathered(value.detach())
        tensors[key] = whole.cpu().contiguous().clone()  # tied weights share memory, which the format refuses
    try:
        described = json.dumps(_encoded(dict(arguments or {})), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments={shown(arguments)} must be of plain types: {error}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    metadata = {"factory": factory, "arguments": described, "parameters": str(parameters), "sha256": _NO_DIGEST}
    return _sealed(_safetensors().save(tensors, metadata))


def _sealed(content: bytes) -> bytes:
    """Return the same with its digest in place of zeros."""
    place = _digest_place(content)
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:place] + digest + content[place + len(digest) :]


def _digest_place(content: bytes) -> int:
    """Return where the digest is in the header of a file; -1 if it has none."""
    length = int.from_bytes(content[:8], "little")
    place = content.find(_DIGEST_KEY.encode(), 8, 8 + length)
    return place + len(_DIGEST_KEY) if place >= 0 else -1


def _encoded(value: object) -> object:
    """Plain types as JSON has them, with tuples told from lists."""
    if isinstance(value, tuple):
        return {"tuple": [_encoded(part) for part in value]}
    if isinstance(value, list):
        return [_encoded(part) for part in value]
    if isinstance(value, dict):
        return {"dict": {str(key): _encoded(part) for key, part in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r:.60} is {type(value).__name__}")


def _decoded(value: object) -> object:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if isinstance(value, dict) and set(value) == {"tuple"}:
        return tuple(_decoded(part) for part in value["tuple"])
    if isinstance(value, dict) and set(value) == {"dict"}:
        return {key: _decoded(part) for key, part in value["dict"].items()}
    if isinstance(value, dict):
        raise ValueError("an argument is not of a plain type")
    return value


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("models are files of safetensors: pip install 'trysquare[train]'") from error
    return safetensors.torch


def packed(content: Mapping[str, object]) -> bytes:
    """Return what ``torch.save`` writes, behind a line with its digest."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    body = buffer.getvalue()
    return _SEAL + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


_SEAL = b"trysquare checkpoint, sha256 "


def unpacked(path: Path) -> Content:
    """Return what ``packed`` was given, after a look at its digest; older files have none.

    Raises:
        ValueError: if it is damaged, something else, or claims more memory than its length.
    """
    content = read_file(path, LARGEST_MODEL)
    if content.startswith(_SEAL):
        line, _, content = content.partition(b"\n")
        if line.removeprefix(_SEAL) != hashlib.sha256(content).hexdigest().encode():
            raise ValueError(f"{path} is damaged: its digest is another one than it says")
    elif not content.startswith(b"PK"):
        raise ValueError(f"{path} is not a checkpoint of a run, or damaged in its first line")
    try:
        found = read_archive(content)
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint of a run: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a checkpoint of a run: it holds a {type(found).__name__}")
    return found


def load_model(source: str | os.PathLike[str], factory: Factory | None = None) -> nn.Module:
    """Return a model in eval mode, from a checkpoint file, a run directory, or ``"package.module:factory"``.

    No code in a file is run: a model of ``trysquare.models`` is made again from its name and arguments; for any other
    model, say what makes it. While the module of a factory that you name is imported, the working directory is the last
    place where Python looks for it, and for what it imports.

    Args:
        source: a file of ``save_checkpoint``, the directory of a run, or a factory.
        factory: what makes the model of a file, called with the arguments in it; a function, or
            ``"package.module:function"``.

    Raises:
        ValueError: if there is no such file or factory, the factory fails, the file is damaged or not a checkpoint of
            ours, it names a factory of somebody else, or its weights do not fit the model.
    """
    path = model_file(source)
    if path is None:
        if factory is not None:
            raise ValueError(f"{str(source)!r} is no file: leave factory={factory!r} out, or give a checkpoint")
        return _made(str(source), {}).eval()
    content = read_checkpoint(path)
    if factory is None and content["factory"] != REGISTRY:
        named = content["factory"]
        command = f"trysquare audit {shlex.quote(str(path))} --factory {shlex.quote(named)}"
        raise ValueError(
            f"{path} is a model of {shown(named)}, and what a file names is not run. If you trust it, say so: "
            f"ts.load_model({str(path)!r}, factory={named!r}), or {command}"
        )
    weights, arguments = content["state_dict"], content["arguments"]
    try:
        if factory is None:
            # On the meta device, which takes no memory: arguments of a stranger may ask for any amount of it.
            with torch.device("meta"):
                require_fit(_built(arguments).state_dict(), weights)
        model = _built(arguments) if factory is None else _made(factory, arguments)
        require_fit(model.state_dict(), weights)
        model.load_state_dict(weights)
    except (_MisfitError, RuntimeError) as error:
        described = f"{shown(content['factory'])} with {shown(arguments)}"
        raise ValueError(f"{path} holds weights of another model than {described}: {error}") from error
    return model.eval()


class _MisfitError(ValueError):
    """Weights that are not those of a model."""


def require_fit(wanted: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Compare weights from a file with those of the model that they are for, before any of them is copied.

    Number formats may be others if nothing is lost: bfloat16 becomes float32, and float64 does not.

    Args:
        wanted: the state of the model, which may be on the meta device.
        found: that of the file.

    Raises:
        ValueError: if names, shapes or number formats differ; it names the first that does.
    """
    for name, value in wanted.items():
        if name not in found:
            raise _MisfitError(f"{shown(name)} is missing in the file")
        weight = found[name]
        if not isinstance(weight, Tensor) or not isinstance(value, Tensor):
            raise _MisfitError(f"{shown(name)} is {type(weight).__name__} in the file, not a tensor")
        if weight.shape != value.shape:
            shapes = f"{shown(tuple(weight.shape))} in the file and {shown(tuple(value.shape))} in the model"
            raise _MisfitError(f"{shown(name)} has the shape {shapes}")
        both_float = weight.is_floating_point() and value.is_floating_point()
        if weight.dtype != value.dtype and not (
            both_float and torch.promote_types(weight.dtype, value.dtype) == value.dtype
        ):
            raise _MisfitError(
                f"{shown(name)} is {weight.dtype} in the file and {value.dtype} in the model; save a model of the "
                "number format that its factory makes"
            )
    for name in found:
        if name not in wanted:
            raise _MisfitError(f"the model has no {shown(name)}, which is in the file")


MODEL_FILES = ("model.safetensors", "model.pt")
"""Names of the model's file in a run directory: the present one, and that of older runs."""


def model_file(source: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint that is meant: a file, or that of a run directory; ``None`` if it is neither.

    Raises:
        ValueError: if it is a directory without one.
    """
    path = Path(source)
    if path.is_dir():
        path = next((path / name for name in MODEL_FILES if (path / name).is_file()), path / MODEL_FILES[0])
        if not path.is_file():
            raise ValueError(f"{path} does not exist: {source} is not the directory of a run that has saved a model")
    return path if path.is_file() else None


def read_checkpoint(path: Path) -> Content:
    """Return what ``save_checkpoint`` wrote: factory, arguments, weights, and the number of parameters.

    Raises:
        ValueError: if it is something else, or damaged.
    """
    try:
        content = read_file(path, LARGEST_MODEL)
        found = _read_old(content) if content.startswith(b"PK") else _read_safetensors(content)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or not a checkpoint of trysquare.save_checkpoint ({type(error).__name__}: "
            f"{_first_line(error)})"
        ) from error
    for name, kind in (("factory", str), ("arguments", dict), ("state_dict", dict)):
        if not isinstance(found[name], kind):
            raise ValueError(
                f"{path} holds {name}={shown(found[name])}, which must be a {kind.__name__}: see save_checkpoint"
            )
    if not _FACTORY.fullmatch(found["factory"]):
        raise ValueError(f"{path} holds factory={shown(found['factory'])}, which must be 'package.module:function'")
    return found


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else "it ends too early"


def _read_safetensors(content: bytes) -> Content:
    place = _digest_place(content)
    if place < 0:
        raise ValueError("it has no digest")
    digest, zeros = content[place : place + len(_NO_DIGEST)], _NO_DIGEST.encode()
    if hashlib.sha256(content[:place] + zeros + content[place + len(zeros) :]).hexdigest().encode() != digest:
        raise ValueError("its digest is another one than it says")
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header["__metadata__"]
    return {
        "factory": metadata["factory"],
        "arguments": _decoded(json.loads(metadata["arguments"])),
        "state_dict": _safetensors().load(content),
        "parameters": int(metadata["parameters"]),
    }


def _read_old(content: bytes) -> Content:
    """Return a file of ``torch.save``, as there were before safetensors."""
    found = read_archive(content)
    if not isinstance(found, dict) or set(found) != _KEYS:
        raise ValueError(f"it must hold {sorted(_KEYS)}")
    weights = found["state_dict"].values() if isinstance(found["state_dict"], dict) else ()
    return {**found, "parameters": sum(value.numel() for value in weights if isinstance(value, Tensor))}


def _built(arguments: Mapping[str, object]) -> nn.Module:
    """Return a model of ``trysquare.models``; nothing else is imported or run for it."""
    if not isinstance(arguments.get("name"), str) or not all(isinstance(key, str) for key in arguments):
        raise ValueError(f"the arguments {shown(arguments)} must be the name of a model, and options by their names")
    return _called(importlib.import_module("trysquare.lab.models").build, REGISTRY, arguments)


def _made(factory: Factory, arguments: Mapping[str, object]) -> nn.Module:
    """Return what the factory of a user makes."""
    if not isinstance(factory, str):
        return _called(factory, getattr(factory, "__name__", repr(factory)), arguments)
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ValueError(f"{shown(factory)} must be a checkpoint file that exists, or 'package.module:factory'")
    if module_name.startswith(".") or "/" in module_name or module_name.endswith(".py"):
        raise ValueError(f"{shown(factory)} names a file; name the module: {_as_module(Path(module_name))}:{name}")
    # Last, so that no file there takes the place of an installed module; and only for what the user has named.
    here = os.getcwd()
    sys.path.append(here)
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # whatever the module does
        raise ValueError(f"cannot import {shown(factory)}: {_named(error)}") from error
    finally:
        if here in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]
    return make if isinstance(make, nn.Module) else _called(make, factory, arguments)


def _called(make: Callable[..., object], name: str, arguments: Mapping[str, object]) -> nn.Module:
    try:
        model = make(**arguments)
    except (Exception, SystemExit) as error:  # whatever the factory does
        raise ValueError(f"{shown(name)} failed: {_named(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{shown(name)} made {type(model).__name__}, not an nn.Module")
    return model


def _as_module(path: Path) -> str:
    """Return how ``python -m`` would name a file, from the working directory or from its own folder."""
    parts = path.with_suffix("").parts
    if path.is_absolute() or ".." in parts:
        return f"in the folder {path.parent}, {parts[-1]}"
    return ".".join(part for part in parts if part != ".")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
