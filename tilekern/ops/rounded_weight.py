"""A weight that was rounded to 8-bit floats before ranks gathered it: other operations get its numbers in its dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RoundedWeight(Tensor):
    """A weight [out, in] of a float dtype of which there are only e4m3 numbers and a scale for each row.

    :func:`tilekern.ops.fp8_linear.fp8_linear` reads both as they are; any other operation of torch gets their product.
    Gradients are of the weight's dtype.

    Attributes:
        numbers: [out, in], e4m3.
        scale: [out], float32, powers of two.
    """

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> RoundedWeight:
        """Make a weight of a dtype around its parts, which it shares."""
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.scale = numbers, scale
        return made

    def __repr__(self, **_: Any) -> str:
        return f"RoundedWeight({list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor."""
        return (self.numbers.float() * self.scale[:, None]).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS and _keeps_shape(*args):
            weight = args[0]
            return cls(weight.numbers, weight.scale, weight.dtype)
        given = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*given[0], **given[1])


# What FSDP2 and nn.Parameter make of a weight.
_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)


def _keeps_shape(weight: Tensor, size: Any = None, stride: Any = None, offset: int | None = None) -> bool:
    return size is None or (tuple(size) == weight.shape and tuple(stride) == weight.stride() and not offset)
