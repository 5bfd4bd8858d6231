"""Check that modules and tensors are ordinary, so that a fused op computes the same as calling the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as modules

from tilekern.runtime.dispatch import count_fallback

Function = TypeVar("Function", bound=Callable[..., object])
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


SUBCLASS = "a subclass of Tensor"
SHAPES = "shapes or dtypes that the op does not take"


def constant_in_graphs(function: Function) -> Function:
    """Mark a function whose result is constant in a graph that torch.compile traces.

    ``torch.compiler.assume_constant_result`` sets the same attribute but imports ``torch._dynamo``, which adds 0.9 s to
    each ``import tilekern.patch`` (3 s without bytecode).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def count_own(kernel: str, reason: str) -> None:
    """Count a call that runs the model's own code in spite of a patch; in torch.compile, once for each traced graph.

    Args:
        kernel: the name of the kernel that would have run.
        reason: a few words.
    """
    count_fallback(kernel, reason)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Return whether no tensor is of a subclass (DTensor and the like)."""
    return all(type(tensor) in _TENSORS for tensor in tensors)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether calling a module runs more than its forward."""
    return any(getattr(module, name, None) for name in _HOOKS) or has_global_hooks()


def has_global_hooks() -> bool:
    """Return whether a global hook makes calling any module run more than its forward."""
    return bool(
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


def is_from(function: Any, *homes: str) -> bool:
    """Return whether a function's code was written in one of the modules that ``homes`` names.

    Its globals decide: ``functools.wraps`` gives a wrapper the ``__module__`` of the wrapped function.
    """
    return getattr(function, "__globals__", {}).get("__name__") in homes


def forward_of(module: torch.nn.Module) -> Any:
    """Return the function of a module's own forward, else of its class's; None if its own is not a method."""
    own = module.__dict__.get("forward")
    return type(module).forward if own is None else getattr(own, "__func__", None)


def is_bare_linear(module: torch.nn.Module) -> bool:
    """Return whether calling a module is only ``x @ weight.T``: no bias, adapter, hook, or forward of its own."""
    return type(module) is torch.nn.Linear and module.bias is None and is_as_written(module)


def is_as_written(module: torch.nn.Module) -> bool:
    """Return whether calling a linear layer only runs its class's own forward on plain weights."""
    kind = type(module)
    return (
        "forward" not in module.__dict__
        and is_from(kind.forward, kind.__module__)
        and is_plain(*(x for x in (module.weight, module.bias) if x is not None))
        and not has_hooks(module)
    )
