"""Answers questions about the values of meta tensors as for an ordinary batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_YES = (_aten.all, _aten.eq, _aten.ge, _aten.gt, _aten.le, _aten.lt)
_NO = (_aten.any, _aten.ne)


class OrdinaryValues(TorchDispatchMode):
    """Answers a model's branches on values, such as whether a mask is all ones.

    Results of ``all`` and comparisons are true, results of ``any`` and ``!=`` are false. Other questions raise, as
    usual on meta tensors. This also gives the shapes of grouped products in other dtypes than bfloat16, which torch
    computes but refuses on meta tensors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default and hasattr(args[0], "is_so"):
            return args[0].is_so
        if func is _aten._grouped_mm.default and args[0].is_meta and args[0].dtype != torch.bfloat16:
            return _grouped(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        kind = func.overloadpacket
        if (kind in _YES or kind in _NO) and made.device.type == "meta":
            made.is_so = kind in _YES
        return made


def _grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows of a [rows, inner], or if b is [inner, columns] each group of columns of a."""
    return a.new_empty((len(offs), len(a), b.shape[1]) if b.dim() == 2 else (len(a), b.shape[2]))
