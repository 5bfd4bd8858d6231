"""The mode in which a row depends on itself alone: it has the same bits among 1, 64 or 8192 rows.

Kernels of one bit class run then, which ``python -m tilekern.tune --invariant`` finds and records name. The products of
``torch.nn.functional.linear``, so of ``torch.nn.Linear`` too, are among them, as cuBLAS chooses its kernel by the
number of rows. A kernel whose record names none runs as before; that is said once, and :func:`tilekern.report` lists
it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from tilekern.errors import InputError
from tilekern.ops import linear_layers, strictness
from tilekern.runtime import dispatch
from tilekern.warning import warn_once

_lock = threading.Lock()
# How often the mode is on: whether strictly, of each context, of ``apply``, of the environment.
_on: list[bool] = []
# What ``tilekern.apply`` asked for.
_chosen: list[bool] = []
_CHOICES = (False, True, "strict")


@contextlib.contextmanager
def invariant(*, strict: bool = False) -> Iterator[None]:
    """Run kernels of one bit class inside.

    Each mode keeps its plans, so that entering again looks nothing up. The mode is the whole process's: enter it while
    no other thread calls an op. Code that ``torch.compile`` has traced keeps the mode of its trace, as CUDA graphs do
    that are not :func:`tilekern.graphed`'s.

    Args:
        strict: raise :class:`tilekern.errors.RowsVary` where a row may depend on others: a kernel has no class, torch
            runs instead of one, or torch's own products, attention or means run inside of a module's forward, which
            costs the host time. Gradients and losses are sums over rows, and are not judged.
    """
    _begin(strict)
    try:
        yield
    finally:
        _end(strict)
        for kernel, reason in dispatch.varying().items():
            warn_once(f"invariant: rows of {kernel} may depend on others: {reason}", about=f"varying {kernel}")


def check_choice(wish: bool | str) -> None:
    """Raise InputError unless a choice is False, True or ``"strict"``."""
    if not any(wish is known or (isinstance(known, str) and wish == known) for known in _CHOICES):
        raise InputError(f'invariant must be False, True or "strict", got {wish!r}')


def choose(wish: bool | str) -> None:
    """Turn the mode on or off for the process, as ``tilekern.apply(invariant=...)`` asks.

    Contexts and ``TILEKERN_INVARIANT`` turn it on beside that.
    """
    while _chosen:
        _end(_chosen.pop())
    if wish:
        _chosen.append(wish == "strict")
        _begin(_chosen[-1])


def _begin(strict: bool) -> None:
    with _lock:
        if not _on:
            dispatch.set_invariant(on=True)
            linear_layers.take()
        _on.append(strict)
        _watch()


def _end(strict: bool) -> None:
    with _lock:
        _on.remove(strict)
        if not _on:
            linear_layers.give_back()
            dispatch.set_invariant(on=False)
        _watch()


def _watch() -> None:
    dispatch.set_strict(on=any(_on))
    strictness.watch(any(_on))


if dispatch.is_invariant():
    _begin(os.environ["TILEKERN_INVARIANT"] == "strict")
