"""Let layers of transformers' static caches write the rows of new tokens, and count them, in one launch.

transformers makes the rows' places, counts, and copies keys and values in five launches of each layer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.ops.cache_rows import cache_rows
from tilekern.patch.exchanging import exchange

_HOME, _KIND, _METHOD = "transformers.cache_utils", "StaticLayer", "update"
# The method of releases whose layers count as the kernel does.
_USES = {"cumulative_length", "add_", "index_copy_"}


def stand_in(is_on: bool) -> None:
    """Exchange the method if its module was imported, or put it back."""
    kind: Any = getattr(sys.modules.get(_HOME), _KIND, None)
    used = getattr(getattr(getattr(kind, _METHOD, None), "__code__", None), "co_names", ())
    if kind is not None and (not is_on or _USES.issubset(used)):
        exchange(kind, _METHOD, functools.partial(_by_kernel, kind), is_on=is_on)


def writes(layer: Any, k: Tensor, v: Tensor) -> bool:
    """Write new tokens behind those of a layer and count them by the kernel; return False if it does not serve."""
    if torch.compiler.is_compiling() or not layer.is_initialized or layer.cumulative_length.dtype != torch.int64:
        return False
    return cache_rows(k, v, layer.keys, layer.values, layer.cumulative_length)


def _by_kernel(kind: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        # A window's layer may call this method for its own.
        if type(self) is kind and writes(self, key_states, value_states):
            return self.keys, self.values
        return original(self, key_states, value_states, *args, **options)

    return update
