"""What a checkpoint keeps of attention, so that it does not run again in the backward.

A checkpoint of a layer keeps the layer's input, and computes all else again. Attention is the dear part of that: its
work grows with the square of the tokens, and what its backward needs, the result and a number for each row of scores,
is no larger than the layer's input. torch's own selective checkpoints run a layer under a dispatch mode, which is slow
and hides launches; the contexts here only tell attention's launch to keep its results, or to take them.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tilekern.ops.registration import keeps_graph
from tilekern.warning import warn_once

_Results = tuple[Tensor, ...]


def keep_attention(*, offload: bool = False) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Let checkpoints keep attention's results, so that their backward does not compute attention again.

    Give it to torch's checkpoints as their ``context_fn``:

    - ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": tilekern.keep_attention})``
    - ``torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=tilekern.keep_attention)``

    Gradients are bit by bit those without checkpoints. A layer keeps 2 bytes for each token and column of its
    attention's result and 4 for each token and head, until its backward; all else is computed again. It serves
    attention "tilekern", and :func:`tilekern.ops.attention`, by their kernels; other attentions run again.

    Args:
        offload: whether results of a GPU are kept in pinned memory of the host. They are copied on the stream of the
            computation. Give ``functools.partial(tilekern.keep_attention, offload=True)``.

    Returns:
        The contexts of the forward and of the forward that runs again.
    """
    kept: list[_Kept | None] = []
    return _Forward(kept, offload), _Again(kept, offload)


class _Kept:
    """What one call of attention gave.

    Attributes:
        key: what the call was asked.
    """

    def __init__(self, key: Any, results: _Results, offload: bool) -> None:
        self.key, self._device = key, results[0].device
        self._is_copied = offload and _is_elsewhere(self._device)
        # Without their history, which leads to this checkpoint.
        self._results = tuple(_on_host(x) if self._is_copied else x.detach() for x in results)
        self._versions = self._written()

    def results(self) -> _Results | None:
        """Return the results; None if they were written over."""
        if self._is_copied:
            return tuple(x.to(self._device, non_blocking=True, copy=True) for x in self._results)
        return tuple(x.detach() for x in self._results) if self._versions == self._written() else None

    def _written(self) -> list[int]:
        return [x._version for x in self._results]


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu"


def _on_host(x: Tensor) -> Tensor:
    """Return a copy in pinned memory; what reads it on the same stream comes later."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return copy.copy_(x.detach(), non_blocking=True)


class _Checkpoint:
    """The run of a checkpoint in this thread, as a context.

    Attributes:
        kept: what calls of attention gave, in their order; None for what is needed no more.
    """

    def __init__(self, kept: list[_Kept | None], offload: bool) -> None:
        self.kept, self._offload = kept, offload

    def __enter__(self) -> None:
        self._around, _thread.run = _thread.run, self

    def __exit__(self, *_: object) -> None:
        _thread.run = self._around

    def taken(self, key: Any) -> _Results | None:  # noqa: ARG002
        return None

    def keep(self, key: Any, results: _Results) -> None:
        pass


class _Forward(_Checkpoint):
    def keep(self, key: Any, results: _Results) -> None:
        _Again.is_of_use = True
        self.kept.append(_Kept(key, results, self._offload))


class _Again(_Checkpoint):
    # Whether any checkpoint has kept something.
    is_of_use = False

    def __enter__(self) -> None:
        super().__enter__()
        self._next = 0
        if not self.is_of_use:
            warn_once(
                "keep_attention: no kernel of tilekern's attention ran in this checkpoint, so attention runs again; "
                'use attn_implementation="tilekern"'
            )

    def taken(self, key: Any) -> _Results | None:
        place, self._next = self._next, self._next + 1
        kept = self.kept[place] if place < len(self.kept) else None
        if kept is None:
            return None
        if kept.key != key:
            raise RuntimeError(
                "keep_attention: the forward that runs again calls attention with other shapes or options than the "
                "first; a checkpoint must compute the same each time"
            )
        if not keeps_graph():
            self.kept[place] = None
        return kept.results()


class _Thread(threading.local):
    """This thread; run: the innermost checkpoint that runs in it."""

    run: _Checkpoint | None = None


_thread = _Thread()


def taken(q: Tensor, k: Tensor, call: Any) -> Any:
    """Return the results that a checkpoint has kept of an attention that is called now; None if it must be computed."""
    return None if _thread.run is None else _thread.run.taken((q.shape, k.shape, q.dtype, call))


def keep(q: Tensor, k: Tensor, call: Any, results: _Results) -> None:
    """Let the checkpoint that runs, if one does, keep an attention's results."""
    if _thread.run is not None:
        _thread.run.keep((q.shape, k.shape, q.dtype, call), results)
