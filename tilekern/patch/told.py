"""A causal mask described by a few numbers; the dense mask is made only when it is read."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.ops.attention import shown
from tilekern.patch.padding import Padding


class ToldMask(torch.Tensor):
    """A boolean mask [1, 1, queries, keys] of a causal attention; kernels read only its attributes.

    The query at ``i`` sees the keys up to ``i``, at a distance below ``window``, in its own sequence. Keys behind the
    queries are unused room of a cache, which no query sees. With ``padding`` the queries are instead the last ones of
    its tokens, and no query sees padding. Any torch operation gets the dense mask; a kernel gets the attributes, so the
    mask uses no memory if layers pass it to an attention function.

    Attributes:
        starts: [sequences + 1] int32, the start of each sequence; empty if there is one sequence.
        longest: at least the length of the longest sequence.
        window: number of keys that a query sees, itself included; None means all.
        padding: where padding stands in the rows of a batch; None without padding.
    """

    starts: torch.Tensor
    longest: int
    window: int | None
    padding: Padding | None

    @staticmethod
    def __new__(
        cls, starts: torch.Tensor, longest: int, window: int | None, queries: int, keys: int, batch: int,
        padding: Padding | None = None,
    ) -> ToldMask:  # fmt: skip
        """Make a mask on the device of ``starts``, without its values."""
        size = (batch, 1, queries, keys)
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=starts.device)
        made.starts, made.longest, made.window, made.padding = starts, longest, window, padding
        return made

    @classmethod
    def around(cls, padding: Padding, window: int | None, queries: int, keys: int) -> ToldMask:
        """Make the mask of a padded batch."""
        return cls(padding.starts, padding.longest, window, queries, keys, len(padding.runs), padding)

    def __repr__(self, **_: Any) -> str:
        return f"ToldMask({list(self.shape)}, {max(1, len(self.starts) - 1)} sequences, window={self.window})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dense(self) -> torch.Tensor:
        """Return the dense mask."""
        batch, _, queries, keys = self.shape
        device = self.starts.device
        if self.padding is not None:
            tokens = self.padding.tokens
            held = torch.zeros(batch * tokens, dtype=torch.bool, device=device).index_fill(0, self.padding.places, True)
            seen = shown(queries, tokens, device, True, self.window, None) & held.view(batch, 1, 1, tokens)
            return torch.nn.functional.pad(seen, (0, keys - tokens))
        starts = self.starts if len(self.starts) else None
        seen = shown(queries, queries, device, True, self.window, starts)
        return torch.nn.functional.pad(seen, (0, keys - queries)).expand(batch, 1, queries, keys)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = args[0] if args else None
        if func in _THE_SAME and isinstance(mask, cls) and kwargs.get("dtype", torch.bool) == torch.bool:
            # A model that is spread over devices moves the mask to each.
            batch, _, queries, keys = mask.shape
            device = torch.device(kwargs.get("device") or mask.starts.device)
            if mask.padding is not None:
                return cls.around(mask.padding.to(device), mask.window, queries, keys)
            return cls(mask.starts.to(device), mask.longest, mask.window, queries, keys, batch)
        given = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*given[0], **given[1])

    # torch.compile takes the mask apart and puts it together, so that compiled layers can read its attributes, too.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        padding = self.padding
        return ["starts"], (self.longest, self.window, padding and (padding.runs, padding.tokens))

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, torch.Tensor], words: tuple[Any, ...], size: Any, stride: Any
    ) -> ToldMask:
        longest, window, padded = words
        padding = None if padded is None else Padding(padded[0], padded[1], tensors["starts"].device)
        return cls(tensors["starts"], longest, window, size[2], size[3], size[0], padding)


_THE_SAME = (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
