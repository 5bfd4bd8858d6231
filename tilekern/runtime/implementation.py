"""Make the names of our attention and experts known to transformers, with the code behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tilekern.runtime.switches import ATTENTIONS, IMPLEMENTATION


def register(attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make the names known to transformers, with what computes attention, by ``deterministic`` first, and masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, deterministic in ATTENTIONS.items():
        AttentionInterface.register(name, partial(attend, deterministic))
        AttentionMaskInterface.register(name, mask)


def register_experts(run: Callable[..., Any]) -> None:
    """Make the name of experts known to transformers, with what computes them; without the door nothing is done."""
    with contextlib.suppress(ImportError):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run)
