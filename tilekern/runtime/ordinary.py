"""Answers questions about the values of meta tensors as for an ordinary batch, and casts them as autocast does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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


class ProductsCast(TorchFunctionMode):
    """Casts the inputs of matrix products as autocast does, which does not know meta tensors.

    Args:
        kind: the type of device whose autocast counts.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and torch.is_autocast_enabled(self._kind):
            args, kwargs = tree_map(self._cast, (tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        is_cast = isinstance(value, torch.Tensor) and value.is_meta and value.dtype in _CAST
        return value.to(torch.get_autocast_dtype(self._kind)) if is_cast else value


_CAST = (torch.float32, torch.float16, torch.bfloat16)
_functional = torch.nn.functional
_PRODUCTS = {
    *(_functional.linear, _functional.conv1d, _functional.conv2d, _functional.conv3d),
    _functional.scaled_dot_product_attention,
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
    *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm, torch.Tensor.bmm),
}
