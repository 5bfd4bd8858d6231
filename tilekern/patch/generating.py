"""Let linear layers of few rows run kernels while a model of transformers generates, and its steps be replayed.

A decode step reads each weight for a few tokens. q, k, v and gated MLPs are patched with their families; the other
linear layers, the attention's output and the head among them, are reached by torch's function, which is exchanged
during ``generate`` and ``generate_batch`` alone.

In the invariant mode the caches that ``generate`` makes keep the keys that have left a window: without them a tile of
keys begins elsewhere than in training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tilekern.ops import linear_layers
from tilekern.patch.graphs import has_graphs
from tilekern.runtime.dispatch import is_invariant
from tilekern.runtime.locks import ForkLock

_HOME, _KIND = "transformers.generation.utils", "GenerationMixin"
_NAMES = ("generate", "generate_batch")
# transformers' tables of the layers of caches, by the kind of a model's layer.
_TABLES = ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING")
_WHOLE, _WINDOWED, _WINDOW = "full_attention", "sliding_attention", "sliding_window"
_lock = ForkLock()


def stand_in(is_on: bool) -> None:
    """Exchange the methods if their module was imported, or put them back."""
    kind = getattr(sys.modules.get(_HOME), _KIND, None)
    for owner in () if kind is None else kind.__mro__:
        for name in _NAMES:
            now = vars(owner).get(name)
            original = getattr(now, "tilekern_original", None)
            if is_on and now is not None and original is None:
                setattr(owner, name, _by_kernels(now))
            elif not is_on and original is not None:
                setattr(owner, name, original)


def _by_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        if original.__name__ == "generate" and has_graphs(self):
            options.setdefault("disable_compile", True)  # transformers compiles the steps of a static cache
        with linear_layers.exchanged(), _keys_kept() if is_invariant() else contextlib.nullcontext():
            return original(self, *args, **options)

    generate.tilekern_original = original  # type: ignore[attr-defined]
    return generate


class _Whole:
    """Makes the layer of a cache that keeps all keys, in place of one that drops those outside of a window."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table, self.original, self.users = table, table[_WINDOWED], 0

    def __call__(self, **given: Any) -> Any:
        given.pop(_WINDOW, None)
        return self.table[_WHOLE](**given)


@contextlib.contextmanager
def _keys_kept() -> Iterator[None]:
    """Let new caches keep the keys outside of windows; releases without such tables make their own."""
    home = sys.modules["transformers.cache_utils"]
    tables = [table for table in (getattr(home, name, {}) for name in _TABLES) if {_WHOLE, _WINDOWED} <= table.keys()]
    with _lock:
        for table in tables:
            if not isinstance(table[_WINDOWED], _Whole):
                table[_WINDOWED] = _Whole(table)
            table[_WINDOWED].users += 1
    try:
        yield
    finally:
        # Another thread may still generate.
        with _lock:
            for table in tables:
                table[_WINDOWED].users -= 1
                if not table[_WINDOWED].users:
                    table[_WINDOWED] = table[_WINDOWED].original
