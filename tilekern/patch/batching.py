"""Let transformers' continuous batching (``generate_batch``) run ``attn_implementation="tilekern"``.

transformers asks whether an implementation is a flash attention: one that takes packed sequences and pages and needs no
mask. It asks by its name, and there is no registry. So the question is exchanged in the modules of continuous batching,
and so is the one whether a cache's pages may be read in place. A release that asks otherwise refuses the implementation
as it did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from tilekern.patch.exchanging import exchange
from tilekern.runtime.switches import ATTENTIONS

Function = Callable[..., Any]
_HOME = "transformers.generation.continuous_batching"
_IS_FLASH, _HAS_TABLE = "is_flash_attention_requested", "ensure_decode_fast_path_is_available"
# The modules that ask, with what they ask.
_ASKED = (
    ("initialization", _IS_FLASH),
    ("cache", _IS_FLASH),
    ("continuous_api", _IS_FLASH),
    ("initialization", _HAS_TABLE),
)


def stand_in(is_on: bool) -> None:
    """Exchange the questions, or put them back."""
    if not is_on and f"{_HOME}.continuous_api" not in sys.modules:
        return
    with contextlib.suppress(ImportError):
        homes = {name: importlib.import_module(f"{_HOME}.{name}") for name, _ in _ASKED}
        if not _is_known(homes):
            return
        for module, name in _ASKED:
            exchange(homes[module], name, functools.partial(_OF[name], homes[module]), is_on=is_on)


def _is_known(homes: dict[str, Any]) -> bool:
    """Return whether this release asks as is exchanged here, and hands over what :mod:`tilekern.patch.paged` reads."""
    needs = {*_ASKED, ("initialization", "group_layers_by_attn_type"), ("initialization", "ATTN_TYPE_TO_ALLOCATOR")}
    if not all(hasattr(homes[module], name) for module, name in needs):
        return False
    return "kwargs" in inspect.signature(homes["cache"].PagedAttentionCache.update).parameters


def _is_flash(home: Any, original: Function) -> Function:  # noqa: ARG001
    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        if version is None and name in ATTENTIONS:
            return True
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _has_table(home: Any, original: Function) -> Function:
    @functools.wraps(original)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> Any:
        kinds = home.group_layers_by_attn_type(config)
        if config._attn_implementation in ATTENTIONS and all(
            home.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds
        ):
            return None
        return original(config, cb_config, user_requested)

    return ensure_decode_fast_path_is_available


_OF = {_IS_FLASH: _is_flash, _HAS_TABLE: _has_table}
