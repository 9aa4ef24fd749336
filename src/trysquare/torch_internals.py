"""The private parts of torch that this library uses, each with the reason; checked with torch 2.13.

Torch may change them in any release. ``tests/test_architecture.py`` sees to it that no other module uses one. Names
here are torch's own callables wherever that is possible, because several are asked for each kernel that is built, and a
Python frame for each would be a good part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch._subclasses.fake_tensor
import torch.utils._device
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils import _python_dispatch, _pytree

# Whether a transform of ``torch.func`` is active: these need autograd functions to be applied torch's general way, and
# tensors under them have no version counters to watch. There is no public question for that.
transforms_are_active = torch._C._are_functorch_transforms_active

# The stack of active transforms, and what says that one of them is forward mode: to refuse forward mode within forward
# mode, which loses terms (torch 2.13).
transforms = torch._C._functorch.get_interpreter_stack
FORWARD_MODE = torch._C._functorch.TransformType.Jvp

# Whether ``vmap`` or another transform has wrapped a tensor, and the tensor inside: to look at a value on the host.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
unwrap = torch._C._functorch.get_unwrapped

# The level of ``torch.autograd.forward_ad.dual_level``, -1 outside of all: there is a public way to enter, none to ask.
forward_mode_level: partial[int] = partial(attrgetter("_current_level"), forward_ad)

# What ``make_fx`` records with, or ``None``: a graph of it is run for other values than those seen.
graph_recorder: partial[object] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)

# Whether backward will compute the gradient of a node: ``needs_input_grad`` is about the graph, not about this pass.
will_run = torch._C._will_engine_execute_node

# The trace of ``torch.jit.trace``, or ``None``: a tracer wants plain operations.
jit_trace = torch._C._get_tracing_state

# The switches of each backend for float32 products of fewer digits, by backend and operation. The public properties
# (``torch.backends.cuda.matmul.fp32_precision``) cover only some of the backends and operations.
precision_of = torch._C._get_fp32_precision_getter
set_precision_of = torch._C._set_fp32_precision_setter

# Tensors without numbers that modules with real parameters take, so that a model can be traced with its sizes. The
# public way to them (``torch.export``) loses the modules.
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode

# A tensor that shares the version counter of another one, so that writes to it are noticed without keeping it alive.
make_subclass = torch.Tensor._make_subclass

# An assertion that an accelerator checks without stalling the host.
assert_on_device = torch._assert_async

# What torch does to a module when a tensor of it is parametrized for the first time, and for each such tensor: to make
# it again from a pickle, which torch itself refuses to write because the class that it makes has no name in a module.
make_parametrized = parametrize._inject_new_class
make_property = parametrize._inject_property

# What a plan of tensor parallelism asks a module first, and who asks for it: there is no public way to refuse a plan.
PLAN_APPLIED = "_distribute_module_applied"
PLANNER = "distribute_module"

# Tensors inside of lists, dictionaries and named tuples. There is no public module for them.
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# A mode that sees every call of ATen. Torch documents it, and has it in a private module.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# The classes behind all layers of dropout, normalisation and spectral norm, which compute something else in training.
DIFFERENT_IN_TRAINING = (_DropoutNd, _NormBase, _SpectralNorm)

# A function of ATen with its schema, as dispatch modes are given it, and the arguments of a call of it.
Operator = torch._ops.OpOverload
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_Function = TypeVar("_Function", bound=Callable[..., object])
_Wrapper = TypeVar("_Wrapper", bound=torch.Tensor)


def constant_when_traced(function: _Function) -> _Function:
    """Have ``torch.compile`` call a function while it traces, and take the result for a constant.

    The public ``torch.compiler.assume_constant_result`` does only this, but first imports the compiler, which takes
    seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


Hooks = list[Callable[..., object]]


def hooks_of(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Return what runs before and after the forward pass of a module, hooks of all modules included.

    Torch has public ways to add and to remove hooks, and none to see them.
    """
    before = (*_module._global_forward_pre_hooks.values(), *module._forward_pre_hooks.values())
    after = (*module._forward_hooks.values(), *_module._global_forward_hooks.values())
    return list(before), list(after)


def goes_to_aot_autograd() -> bool:
    """Whether the graph that ``torch.compile`` traces now goes to AOTAutograd, by the name or kind of its backend."""
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: object = InstructionTranslator.current_tx().output.compiler_fn
    except (AttributeError, LookupError):  # torch.export, whose graphs have no gradients
        return True
    given = getattr(getattr(backend, "_torchdynamo_orig_backend", backend), "compiler_fn", backend)
    name = getattr(backend, "__name__", "")
    return isinstance(given, AotAutograd) or name.startswith("aot") or name in ("inductor", "cudagraphs", "openxla")


# Functionalization, which turns views and writes in place into calls without side effects: to trace models. The public
# ways in are ``torch.func.functionalize``, which refuses autograd functions, and ``torch.export``, whose import takes
# seconds. What follows is what ``torch._subclasses.functional_tensor`` does.
to_functional = torch._to_functional_tensor
from_functional = torch._from_functional_tensor
is_functional = torch._is_functional_tensor
synchronize = torch._sync  # type: ignore[attr-defined]
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
# Whether a tensor is conjugated or negated only by name, which all tensors around it must know too.
_BITS = torch._C._additional_keys_to_prop_for_wrapper_tensors.add(torch._C.DispatchKey.ZeroTensor)


def functionalized(func: Operator, args: Args, kwargs: Kwargs) -> object:
    """Call a function of ATen on functional tensors; views stay views."""
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(_FUNCTIONALIZE)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE) - _BITS
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        views = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
        try:
            return func._op_dk(_FUNCTIONALIZE, *args, **kwargs)
        finally:
            torch._functionalize_enable_reapply_views(views)  # type: ignore[attr-defined]


def without_memory(cls: type[_Wrapper], like: torch.Tensor) -> _Wrapper:
    """Make a tensor of a subclass that has shape, strides and dtype of another, and nothing to read."""
    made: _Wrapper = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, like.stride(), like.storage_offset(), None, like.dtype, like.layout, like.device, False, False,
        None, False, False, _BITS & torch._C._dispatch_keys(like),
    )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


# Of a subclass whose calls a dispatch mode sees: torch must not wrap their results in it.
no_torch_function = torch._C._disabled_torch_function_impl


def computes_by_itself(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor, and not torch, says what calls on it compute."""
    cls, plain = type(tensor), torch.Tensor
    inherited = getattr(cls.__torch_function__, "__func__", None) is plain.__torch_function__.__func__  # type: ignore[attr-defined]
    own_function = not inherited and cls.__torch_function__ is not no_torch_function
    return own_function or cls.__torch_dispatch__ is not plain.__torch_dispatch__


def function_modes() -> int:
    """Return how many modes see calls of torch's Python functions, and may change what these compute.

    Those that only say on which device tensors are made are not counted.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    return sum(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)


# Our own bookkeeping while a model runs is none of these modes' business.
without_function_modes = torch._C.DisableTorchFunction

# Whether tensors are made without numbers.
fake_mode: partial[object] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


def is_composite(func: Operator) -> bool:
    """Whether a function of ATen is made of others, which a dispatch mode sees instead of it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
