"""Tensors that the backward of the op that made them keeps, so that a layer may keep them for nothing.

Attention keeps its result. A layer of 8-bit floats behind it keeps that too, whatever view of it it reads, and rounds
it again in the backward, where its numbers would be kept beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_KEPT = "_tilekern_kept"


def tell_kept(y: Any) -> None:
    """Note that the backward of what made ``y`` keeps ``y``."""
    if type(y) is Tensor and y.requires_grad and not torch.compiler.is_compiling():
        _whole(y).__dict__[_KEPT] = True


def is_kept(x: Tensor) -> bool:
    """Return whether keeping ``x`` takes no memory.

    Not while hooks are in force that pack what is kept, as those of checkpoints, which know tensors by their order
    alone, and those that copy each to the host.
    """
    whole = _whole(x)
    if _KEPT not in whole.__dict__ or whole.numel() != x.numel():
        return False
    return not are_packed()


def are_packed() -> bool:
    """Return whether hooks are in force that pack what is kept."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _whole(x: Tensor) -> Tensor:
    return x if x._base is None else x._base
