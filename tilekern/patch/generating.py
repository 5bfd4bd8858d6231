"""Let linear layers of few rows run kernels while a model of transformers generates, and its steps be replayed.

A decode step reads each weight for a few tokens. q, k, v and gated MLPs are patched with their families; the other
linear layers, the attention's output and the head among them, are reached by torch's function, which is exchanged
during ``generate`` and ``generate_batch`` alone.

A captured step takes the host less than the GPU, but transformers waits after each token to know whether all sequences
have ended. So it is let read that one step late, as it does on Apple's GPUs, and drops the step too many: of greedy
calls, since that step would draw a random number, and where only transformers' own code sees its token. Calls of such a
model share a static cache, as a graph writes to the cache that it was captured with.

In the invariant mode new caches keep the keys that have left a window: without them a tile of keys begins elsewhere
than in training.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from tilekern.ops import linear_layers
from tilekern.patch.exchanging import exchange
from tilekern.patch.graphs import graphs_of_instance, has_graphs
from tilekern.patch.token_graphs import captured_kinds
from tilekern.runtime.dispatch import is_invariant

_HOME, _KIND = "transformers.generation.utils", "GenerationMixin"
_NAMES = ("generate", "generate_batch")
# transformers' tables of the layers of caches, by the kind of a model's layer.
_TABLES = ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING")
_WHOLE, _WINDOWED, _WINDOW = "full_attention", "sliding_attention", "sliding_window"
# transformers' choice whether to read late that generation ends, which it makes on "mps" alone.
_STOPS, _IS_LATE, _LATE = "DeferredStopCheck", "is_supported", "mps"
# The method that makes a static cache for a call, and the loop of tokens.
_PREPARE, _LOOP = "_prepare_static_cache", "_sample"
_FOREIGN = "custom_generate"
# Those of an object that an attribute alone holds, as Python counts them for a call.
_REFERENCES = 2


class _Replayed:
    """A call of ``generate`` for a model with graphs.

    Attributes:
        cache: its static cache, which the next call may get.
        may_end_late: whether nobody would notice a step too many.
    """

    cache: Any = None
    may_end_late = False


_replayed: ContextVar[_Replayed | None] = ContextVar("_replayed", default=None)


def stand_in(is_on: bool) -> None:
    """Exchange the methods if their module was imported, or put them back."""
    home = sys.modules.get(_HOME)
    for owner in getattr(getattr(home, _KIND, None), "__mro__", ()):
        for name in _NAMES:
            exchange(owner, name, _by_kernels, is_on=is_on)
        exchange(owner, _PREPARE, _shared, is_on=is_on)
        exchange(owner, _LOOP, _looked_at, is_on=is_on)
    if hasattr(home, _STOPS):  # since transformers 5.24
        exchange(getattr(home, _STOPS), _IS_LATE, _late, is_on=is_on)
    _keep_keys(is_on)


def _by_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        call = _Replayed() if has_graphs(self) else None
        if original.__name__ == "generate" and call is not None:
            options.setdefault("disable_compile", True)  # transformers compiles the steps of a static cache
        before = _replayed.set(call)
        try:
            with linear_layers.exchanged():
                found = original(self, *args, **options)
        finally:
            _replayed.reset(before)
        graphs = graphs_of_instance(self)
        if graphs is not None and call is not None and call.cache is not None:
            # The result, or a hook of the user's, may hold the cache.
            is_held = sys.getrefcount(call.cache) > _REFERENCES or options.get(_FOREIGN) is not None
            graphs.cache = None if is_held else call.cache
        return found

    return generate


def _looked_at(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **options: Any) -> Any:
        if (call := _replayed.get()) is not None:
            given = signature.bind(self, *args, **options).arguments
            lists = (given.get("logits_processor") or (), given.get("stopping_criteria") or ())
            seen_by = [type(one).__module__.partition(".")[0] for some in lists for one in some]
            draws = getattr(given.get("generation_config"), "do_sample", True)
            call.may_end_late = not draws and all(name == "transformers" for name in seen_by)
        return original(self, *args, **options)

    return sample


def _late(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_supported(
        device: torch.device, cache: Any, cache_is_returned: bool, *args: Any, **options: Any
    ) -> bool:  # fmt: skip
        call = _replayed.get()
        # From a cache that the caller gets, a step too many would have to be taken back.
        is_late = call is not None and call.may_end_late and device.type == "cuda" and not cache_is_returned
        return original(torch.device(_LATE) if is_late else device, cache, cache_is_returned, *args, **options)

    return is_supported


def _shared(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **options: Any) -> Any:
        given = signature.bind(self, *args, **options).arguments
        call, graphs = _replayed.get(), graphs_of_instance(self)
        # Inside of autocast regions a cache may be of another dtype than the model.
        if call is None or graphs is None or "batch_size" not in given or torch.is_autocast_enabled(self.device.type):
            return original(self, *args, **options)
        # Another thread may generate with this model meanwhile, and needs a cache of its own.
        kept, graphs.cache = graphs.cache, None
        if given.get("prefill_chunk_size") is not None:
            kept = None  # transformers gives the new cache its memory at once
        made = original(self, *args, **options)
        if kept is not None and _serves(kept, made, self, given["batch_size"]):
            kept.reset()
            made = kept
        call.cache = made
        return made

    return prepare


def _serves(kept: Any, made: Any, model: Any, batch_size: int) -> bool:
    """Return whether a static cache is what a new one, which has no memory yet, would become."""
    # A cache of encoder and decoder has no layers of its own, and those of other kinds are not captured.
    of_kept, of_made = (getattr(cache, "layers", []) for cache in (kept, made))
    kinds = [type(x) for x in of_made]
    if not kinds or not captured_kinds().issuperset(kinds) or kinds != [type(x) for x in of_kept]:
        return False
    return not getattr(made, "offloading", False) and all(
        old.is_initialized
        and old.max_cache_len == new.max_cache_len
        and old.keys.shape[0] == batch_size
        and (old.keys.dtype, old.keys.device) == (model.dtype, model.device)
        and old.keys.is_inference() == torch.is_inference_mode_enabled()
        for old, new in zip(of_kept, of_made, strict=True)
    )


def _keep_keys(is_on: bool) -> None:
    """Let caches that are made in the invariant mode keep keys outside of windows, or leave that to transformers."""
    home = sys.modules.get("transformers.cache_utils")
    for table in (getattr(home, name, {}) for name in _TABLES):
        original = getattr(table.get(_WINDOWED), "tilekern_original", None)
        if is_on and original is None and {_WHOLE, _WINDOWED} <= table.keys():
            table[_WINDOWED] = _whole_in_the_mode(table)
        elif not is_on and original is not None:
            table[_WINDOWED] = original


def _whole_in_the_mode(table: dict[str, Any]) -> Callable[..., Any]:
    original = table[_WINDOWED]

    def layer(**given: Any) -> Any:
        if not is_invariant():
            return original(**given)
        given.pop(_WINDOW, None)
        return table[_WHOLE](**given)

    layer.tilekern_original = original  # type: ignore[attr-defined]
    return layer
