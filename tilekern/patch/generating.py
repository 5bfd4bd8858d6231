"""Let linear layers of few rows run kernels while a model of transformers generates, and its steps be replayed.

A decode step reads each weight for a few tokens. q, k, v and gated MLPs are patched with their families; the other
linear layers, the attention's output and the head among them, are reached by torch's function, which is exchanged
during ``generate`` and ``generate_batch`` alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tilekern.ops import linear_layers
from tilekern.patch.graphs import has_graphs

_HOME, _KIND = "transformers.generation.utils", "GenerationMixin"
_NAMES = ("generate", "generate_batch")


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
        with linear_layers.exchanged():
            return original(self, *args, **options)

    generate.tilekern_original = original  # type: ignore[attr-defined]
    return generate
