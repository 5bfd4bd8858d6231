"""Registers tilekern's attention and experts in transformers by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tilekern.runtime.switches import ATTENTIONS, IMPLEMENTATION


def register(attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register the attentions, which get ``deterministic`` as first argument, and their masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, deterministic in ATTENTIONS.items():
        AttentionInterface.register(name, partial(attend, deterministic))
        AttentionMaskInterface.register(name, mask)


def register_experts(run: Callable[..., Any]) -> None:
    """Register the experts, if this transformers has such a registry."""
    with contextlib.suppress(ImportError):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run)
