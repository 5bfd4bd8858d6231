"""One form of a decode step, captured: one new token of each sequence, after transformers' static cache.

The graph reads and writes the cache in its place. What Python counts beside it, a replay counts too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tilekern.compile.garbage import search_put_off
from tilekern.patch import static_caches
from tilekern.patch.captured import CAPTURE_FAILED, Refused, Room, as_captured, why
from tilekern.patch.decoding import keys_of
from tilekern.patch.padding import Keys, Padding
from tilekern.patch.told import ToldMask

_CACHES = ("cache", "past_key_values")
_PLAIN = (type(None), bool, int, float, str)
# The number of tokens that Python counts in the layers of a window's cache.
_COUNT = "cumulative_length_int"


def captured_kinds() -> set[type]:
    """Return the classes of a static cache's layers that a graph may write to."""
    utils: Any = sys.modules["transformers.cache_utils"]
    return {utils.StaticLayer, utils.StaticSlidingWindowLayer}


class Token(NamedTuple):
    """The arguments of a decode step.

    Attributes:
        name: the name of the cache's argument.
        cache: the cache.
        tensors: by argument, and the key in it if it is a dictionary of masks.
        constants: plain values likewise.
        masks: likewise, those of padding that are told and not made.
    """

    name: str
    cache: Any
    tensors: dict[tuple[str, str], Tensor]
    constants: dict[tuple[str, str], Any]
    masks: dict[tuple[str, str], ToldMask]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Token | None:
        """Tell a decode step's arguments from each other; None if a call is none.

        Raises:
            Refused: the step cannot be captured.
        """
        name = next((name for name in _CACHES if arguments.get(name) is not None), None)
        ids = arguments.get("input_ids")
        layers = [] if name is None else getattr(arguments[name], "layers", [])
        if name is None or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or not layers:
            return None
        if not all(getattr(x, "is_compileable", False) and x.is_initialized for x in layers):
            return None  # of another kind, or the first token
        other = next((x for x in layers if type(x) not in captured_kinds()), None)
        if other is not None:
            raise Refused(f"a cache with layers of {type(other).__name__}")
        found = cls(name, arguments[name], {}, {}, {})
        for argument, value in arguments.items():
            for key, one in value.items() if isinstance(value, dict) else (("", value),):
                found._take(argument, key, one)
        masks = [x for (argument, _), x in found.tensors.items() if argument == "attention_mask"]
        if any(x.dim() < 4 for x in masks):
            raise Refused("a mask of padding, which grows; transformers' generate gives one of four dimensions")
        if not masks and not found.masks and found.counts:
            raise Refused("a window's cache without masks")
        return found

    def _take(self, argument: str, key: str, value: Any) -> None:
        if type(value) is Tensor:
            self.tensors[argument, key] = value
        elif isinstance(value, _PLAIN):
            self.constants[argument, key] = value
        elif type(value) is ToldMask and value.padding is not None:
            self.masks[argument, key] = value
        elif argument != self.name:
            raise Refused(f"the argument {argument} of the type {type(value).__name__}")

    @property
    def counts(self) -> list[int]:
        """Return what Python counts in the layers of windows."""
        return [getattr(x, _COUNT) for x in self.cache.layers if hasattr(x, _COUNT)]

    def set_counts(self, numbers: list[int]) -> None:
        """Set these counts."""
        for layer, number in zip((x for x in self.cache.layers if hasattr(x, _COUNT)), numbers, strict=True):
            setattr(layer, _COUNT, number)

    @property
    def key(self) -> tuple[Any, ...]:
        """What two steps with one cache share that the same graph serves."""
        told: dict[tuple[str, str], Any]
        told = {path: (x.shape, x.dtype, _kind(keys_of(x))) for path, x in self.tensors.items()}
        told |= {path: (x.shape, x.window, _kind(_padding_of(x).keys)) for path, x in self.masks.items()}
        tensors = ((x.keys, x.values, x.cumulative_length) for x in self.cache.layers)
        places = [x.data_ptr() for x in chain.from_iterable(tensors)]
        full = [getattr(x, _COUNT, 0) >= x.max_cache_len for x in self.cache.layers]
        return frozenset(told.items()), frozenset(self.constants.items()), *places, *full


class TokenStep:
    """The graph of one form of a model's decode step with one cache.

    Args:
        model: the model; the call runs its hooks and its forward.
        token: a step of the form.
        room: the memory of the model's graphs.

    Raises:
        Refused: the step cannot be captured.
    """

    def __init__(self, model: torch.nn.Module, token: Token, room: Room) -> None:
        self._inputs = {path: _held(x) for path, x in token.tensors.items()}
        self._shown = {path: _Shown(_padding_of(x)) for path, x in token.masks.items()}
        self._recording, self._lock = room.recording(), room.lock
        counts, lengths = token.counts, [x.cumulative_length for x in token.cache.layers]
        before = [x.clone() for x in lengths]
        try:
            with as_captured(), search_put_off():
                self._recording.record(lambda: self._run(model, token))
        except Exception as error:  # noqa: BLE001
            raise Refused(f"{CAPTURE_FAILED}: {why(error)}") from None
        finally:
            token.set_counts(counts)
            for length, value in zip(lengths, before, strict=True):
                length.copy_(value)

    def __call__(self, token: Token) -> Any:
        """Return what the model returns for a step of this form."""
        with self._lock:
            for path, given in token.tensors.items():
                mine = self._inputs[path]
                mine.copy_(given)
                if (keys := keys_of(mine)) is not None and (other := keys_of(given)) is not None:
                    keys.copy_(other)
            for path, told in token.masks.items():
                self._shown[path].keys.copy_(_padding_of(told).keys)
            counts = [number + 1 for number in token.counts]
            self._recording.replay()
            token.set_counts(counts)
            fields = {name: x.clone() if isinstance(x, Tensor) else x for name, x in self._fields.items()}
        return self._kind(**fields | dict.fromkeys(self._caches, token.cache))

    def _run(self, model: torch.nn.Module, token: Token) -> list[Tensor | None]:
        arguments: dict[str, Any] = {token.name: token.cache}
        masks = {path: self._shown[path].around(told) for path, told in token.masks.items()}
        for (argument, key), value in (self._inputs | token.constants | masks).items():
            if key:
                arguments.setdefault(argument, {})[key] = value
            else:
                arguments[argument] = value
        with _counted(token.cache):
            result = model(**arguments)
        if not isinstance(result, dict):
            raise Refused(f"a result of the type {type(result).__name__}")
        self._kind: Any = type(result)
        self._caches = [name for name, x in result.items() if x is token.cache]
        self._fields = {name: x for name, x in result.items() if x is not token.cache}
        wrong = next((x for x in self._fields.values() if not isinstance(x, (Tensor, *_PLAIN))), None)
        if wrong is not None:
            raise Refused(f"a result of the type {type(wrong).__name__}")
        return [x for x in self._fields.values() if isinstance(x, Tensor)]


@contextlib.contextmanager
def _counted(cache: Any) -> Iterator[None]:
    """Let each layer of a static cache write a token and count it in one launch.

    Where no kernel does, each layer writes it in two, and one launch counts it for all of them.

    Raises:
        Refused: a layer without a kernel is updated twice.
    """
    kind: Any = sys.modules["transformers.cache_utils"].StaticLayer
    counted: list[Tensor] = []

    def updated(layer: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        def update(key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            if static_caches.writes(layer, key_states, value_states):
                return layer.keys, layer.values
            length = layer.cumulative_length
            if any(x is length for x in counted):
                raise Refused("a layer's cache is updated twice in a step")
            for cached, new in ((layer.keys, key_states), (layer.values, value_states)):
                cached.index_copy_(2, length.view(1), new)
            counted.append(length)
            return layer.keys, layer.values

        return update

    layers = [layer for layer in cache.layers if type(layer) is kind]
    for layer in layers:
        layer.update = updated(layer)
    try:
        yield
        if counted:
            torch._foreach_add_(counted, 1)
    finally:
        for layer in layers:
            del layer.update


class _Shown:
    """The padding of a mask, of which a graph has only what the GPU reads."""

    def __init__(self, padding: Padding) -> None:
        self.tokens, self.keys = padding.tokens, padding.keys.clone()

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"padding whose {name} a graph has not; tune the kernel for decoding, which reads its ends alone")

    def around(self, mask: ToldMask) -> ToldMask:
        """Return a mask with this padding, else like another one."""
        batch, _, queries, keys = mask.shape
        return ToldMask(self.keys.lengths, mask.longest, mask.window, queries, keys, batch, cast("Padding", self))


def _held(x: Tensor) -> Tensor:
    """Return memory for an input, with that of the keys that a mask tells."""
    held = x.clone()
    if (keys := keys_of(x)) is not None:
        held.shown_keys = keys.clone()
    return held


def _padding_of(mask: ToldMask) -> Padding:
    assert mask.padding is not None
    return mask.padding


def _kind(keys: Keys | None) -> tuple[bool, bool]:
    return keys is not None, keys is not None and keys.starts is not None
