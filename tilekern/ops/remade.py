"""Inputs of layers that need not be kept for the backward, since another op keeps what they are made from.

A norm keeps its own input, and attention its result. So a layer of 8-bit floats behind them keeps nothing: in the
backward the norm runs again, and its result is rounded again. The ops before tell so with the tensor that they return;
only where such layers are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.ops.registration import is_autocast

# Attributes of tensors.
_MADE, _KEPT = "_tilekern_made", "_tilekern_kept"


class _State:
    """Whether layers that ask are in use in this process; others need not pay for telling."""

    is_wanted = False


state = _State()


class Made(NamedTuple):
    """How a tensor of a version is made again: ``make(*sources)``, of tensors that are kept anyway."""

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]
    version: int = 0


def want() -> None:
    """Have ops tell from now on."""
    state.is_wanted = True


def tell(y: Any, make: Callable[..., Tensor], *sources: Any) -> None:
    """Note that ``y`` is ``make(*sources)``, which the backward of what made it keeps.

    Not under autocast, in which a backward does not run.
    """
    if _is_told(y) and not is_autocast(y):
        y.__dict__[_MADE] = Made(make, sources, y._version)


def tell_kept(y: Any) -> None:
    """Note that the backward of what made ``y`` keeps ``y``, whatever view of it is read."""
    if _is_told(y):
        _whole(y).__dict__[_KEPT] = True


def _is_told(y: Any) -> bool:
    return state.is_wanted and type(y) is Tensor and y.requires_grad and not torch.compiler.is_compiling()


def found(x: Tensor, *, several: bool) -> Made | None:
    """Return how a layer's input is made again; None if the layer has to keep what it reads.

    ``several``: whether all layers with this input ask at once; else what is computed again would be, for each.
    """
    made: Made | None = x.__dict__.get(_MADE)
    if made is not None:
        return made if several and made.version == x._version else None
    whole = _whole(x)
    return Made(_itself, (x,)) if _KEPT in whole.__dict__ and whole.numel() == x.numel() else None


def _whole(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


def _itself(x: Tensor) -> Tensor:
    return x
