"""The strict invariant mode: inside a module's forward, torch may not sum a row in an order that other rows decide.

Torch's products, attention and means choose a kernel by the number of rows. A watch over torch's functions is entered
with each outermost module's forward, and left with it; backwards and losses outside of modules are not watched.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tilekern.errors import RowsVary

_PRODUCTS = frozenset((
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "conv1d",
    "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum", "inner", "linear",
    "matmul", "mm", "multi_head_attention_forward", "mv", "scaled_dot_product_attention", "tensordot",
))  # fmt: skip
_SUMS = frozenset(("mean", "norm", "std", "sum", "var", "var_mean", "vector_norm"))


class _Watch(torch.overrides.TorchFunctionMode):
    """Refuses products and means of rows that torch computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's, unless it may make a row depend on others."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name in _PRODUCTS and _adds(name, args)) or (name in _SUMS and _is_of_rows(name, args, kwargs)):
            raise RowsVary(
                f"torch.{name} runs inside a module's forward, and chooses its kernel by the number of rows; patch the "
                "module, or leave strict out"
            )
        return func(*args, **kwargs)


class _Thread(threading.local):
    """Whether this thread is in a module's forward."""

    is_inside = False


_thread = _Thread()
# As it was found when the watch began; another library may have exchanged it before.
_own_call = torch.nn.Module.__call__


def watch(is_on: bool) -> None:
    """Begin to watch the calls of all modules, in all threads, or end it.

    Hooks would do, but code that looks for hooks, ours too, runs otherwise where it finds some.
    """
    global _own_call  # noqa: PLW0603
    if is_on == (torch.nn.Module.__call__ is _called):
        return
    if is_on:
        _own_call = torch.nn.Module.__call__
    torch.nn.Module.__call__ = _called if is_on else _own_call


def _called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _thread.is_inside or torch.compiler.is_compiling():
        return _own_call(self, *args, **kwargs)
    _thread.is_inside = True
    try:
        with _Watch():
            return _own_call(self, *args, **kwargs)
    finally:
        _thread.is_inside = False


def _adds(name: str, args: Any) -> bool:
    """Return whether a product of floating-point numbers adds several terms: rotary angles are products of one."""
    given = [x for x in args if isinstance(x, torch.Tensor)]
    if not any(x.is_floating_point() for x in given):
        return False
    return not (name in ("matmul", "__matmul__", "bmm", "mm") and given[0].dim() > 1 and given[0].shape[-1] == 1)


def _is_of_rows(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a sum is over the last axis of floating-point numbers alone, as a norm's is."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
        return False
    place = 2 if name in ("norm", "vector_norm") else 1  # after the order of the norm
    over = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(over, bool) or not isinstance(over, int | tuple | list):
        return False
    axes = {axis % x.dim() for axis in ([over] if isinstance(over, int) else over)}
    return axes == {x.dim() - 1}
