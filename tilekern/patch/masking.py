"""The masks of ``attn_implementation="tilekern"``, and how a model's code uses them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilekern.errors import InputError
from tilekern.kernels.attention.forward import SPEC
from tilekern.ops.packing import can_read
from tilekern.patch import context_parallel, padding
from tilekern.patch.decoding import with_keys
from tilekern.patch.guards import constant_in_graphs
from tilekern.patch.ledger import content
from tilekern.patch.padding import Padding, padding_of
from tilekern.patch.positions import (
    Positions,
    Sequences,
    are_given_in_graph,
    has_values,
    look,
    number_of_sequences,
    number_of_tokens,
    positions_of_call,
)  # fmt: skip
from tilekern.patch.told import ToldMask
from tilekern.runtime.dispatch import is_invariant, note_varying
from tilekern.warning import warn_once


def mask(*, local_size: int | None = None, config: Any = None, **given: Any) -> Any:
    """Return a mask for transformers; None if causality and window of the kernels describe it completely.

    A row with several sequences, according to its ``position_ids``, gets a :class:`ToldMask`; so does a prompt with
    unused cache room behind it. The mask includes the window if layers do not pass theirs to the attention function
    (Qwen2-MoE and Phi-MoE).

    Padding behind the tokens needs no mask. Other padding gives a :class:`ToldMask` in the invariant mode; else, as
    blocks of images and the like do, SDPA's boolean mask. While a graph is traced or captured, so does
    everything that depends on values: a padding mask, and position ids of the user's. A model for which transformers
    supports neither SDPA nor flash attention always gets the additive mask that it expects.

    Raises:
        InputError: the model computes its attention by itself, where a missing mask would let each token see all; or it
            passes keys that no mask is made for; or context parallelism shards it and cannot serve it.
    """
    reading = reading_of(type(config))
    if reading.refusal:
        raise InputError(f'attn_implementation="tilekern": {reading.refusal}; use "eager"')
    own = local_size is None or (reading.hands_window and _is_own(local_size, config, given))
    before = given.get("kv_offset", 0)
    if local_size is not None and type(before) is int and before > 0:
        note_dropped_keys()
    ask = _Ask(given, reading, own, config)
    shards = context_parallel.shards_here()
    return _mask_here(ask, local_size) if shards is None else ask.of_shards(shards, local_size)


def _mask_here(ask: _Ask, local_size: int | None) -> Any:
    """Return :func:`mask` for tokens that are all on this rank."""
    from transformers.masking_utils import and_masks, eager_mask, packed_sequence_mask_function, sdpa_mask

    given = ask.given
    if ask.is_dropped_in_graph():
        return None
    other = ask.other_padding()
    if other is not None and is_invariant():
        return ToldMask.around(other, local_size, ask.queries, ask.keys)
    found, numbers = ask.sequences()
    if found is not None:
        if ask.is_plain:
            return ToldMask(*found, local_size, ask.queries, ask.keys, 1)
        if not ask.is_joined:
            numbers = number_of_tokens(found.starts, ask.keys)
    if numbers is not None:
        function = and_masks(given["mask_function"], packed_sequence_mask_function(numbers[None]))
        given |= {"mask_function": function, "allow_is_causal_skip": False}
    if ask.reading.by_mask_alone:
        return eager_mask(**given | {"allow_is_bidirectional_skip": False}, local_size=local_size, config=ask.config)
    made = sdpa_mask(**given, local_size=None if ask.is_own else local_size, config=ask.config)
    if made is None and ask.is_causal and 1 < ask.queries < ask.keys:
        return ask.with_room(local_size)
    if made is not None and not ask.can_read:
        made.says_packing_alone = ask.is_plain and numbers is None
        made.lacks_sequences = ask.is_row and not ask.is_joined and numbers is None
    if made is not None and ask.queries == 1 and ask.is_plain:
        made = with_keys(made, given, ask.can_read)
    return made


def note_dropped_keys() -> None:
    """Note, in the invariant mode, that a cache has dropped keys outside of a window."""
    if is_invariant():
        note_varying(SPEC.name, "a cache that drops keys outside of the window, where tiles begin elsewhere")


class _Ask:
    """The arguments of transformers' request for a mask.

    Attributes:
        queries, keys: their numbers.
        is_own: whether layers pass the window to the attention function.
        is_causal: whether no query sees a later key.
        is_joined: whether transformers' mask function already separates sequences, as it does if values are unreadable.
        is_plain: whether the mask function only expresses causality, the layers' window and the starts of sequences.
        is_row: whether it is a single row from its first token on, which may hold several sequences.
        can_read: whether values may be read now.
    """

    def __init__(self, given: dict[str, Any], reading: Reading, own: bool, config: Any) -> None:
        self.given, self.reading, self.config = given, reading, config
        self.padding, function = given.get("attention_mask"), given["mask_function"]
        # Releases before 5.17 pass the positions of the queries.
        self.is_own = own
        self.queries = given["q_length"] if "q_length" in given else len(given["cache_position"])
        self.keys = given["kv_length"]
        self.is_causal = _is_causal(given)
        self.numbers = None if torch.compiler.is_compiling() else _numbers(function)
        self.can_read = can_read() and has_values(self.numbers) and has_values(self.padding)
        self.is_joined = self._is_joined(function)
        self.is_plain = (
            own and self.is_causal and not reading.by_mask_alone and not given.get("use_vmap", False)
            and not _shows_blocks(function, reading)
        )  # fmt: skip
        self.is_row = self.is_causal and given["batch_size"] == 1 and 1 < self.queries == self.keys

    def _is_joined(self, function: Any) -> bool:
        if torch.compiler.is_compiling():  # it cannot inspect a function
            # For one new token after a static cache a mask is always wanted, of a function that has no name here.
            wanted = not self.given.get("allow_is_causal_skip", True)
            return wanted and self.queries > 1 and _is_made_by(function, "and_masks")
        return self.numbers is not None

    def of_shards(self, shards: context_parallel.Shards, window: int | None) -> ToldMask:
        """Return the mask of whole rows, which the ranks of a context share."""
        if not self.is_plain or self.given.get("kv_offset", 0) or self.queries != self.keys:
            raise InputError(
                'attn_implementation="tilekern" in context_parallel serves causal masks and windows without a cache, '
                f'and {self.config.model_type} asks for another one; use "sdpa"'
            )
        batch = self.given["batch_size"]
        return context_parallel.mask_of(shards, positions_of_call(), self.padding, batch, self.queries, window)

    def is_dropped_in_graph(self) -> bool:
        """Return whether, while a graph is made, None expresses the mask: only causality and the window are needed.

        transformers makes a mask in this case, and also separates sequences by positions that the model counted itself.
        """
        if self.can_read or not self.is_plain or self.padding is not None or self.reading.reads_mask:
            return False
        if not 1 < self.queries == self.keys or self.given.get("kv_offset", 0):
            return False
        if torch.compiler.is_compiling():
            # If transformers does not separate the sequences, the attention function does.
            return not self.is_joined or not are_given_in_graph()
        return not positions_of_call().are_given or not (self.is_row or self.is_joined)

    def other_padding(self) -> Padding | None:
        """Drop a mask of padding that stands behind the tokens, which causality hides; return other padding.

        It is None if the mask says more than padding, causality and the layers' window.
        """
        mask, tokens = self.padding, self._tokens()
        # Outside of the mode only a whole prompt's mask is dropped; to read that of each token would make each wait.
        is_whole = tokens == self.queries == self.keys
        is_wanted = self.is_plain and not self.reading.reads_mask and (is_whole or is_invariant())
        if not is_wanted or self.is_joined or self.given.get("kv_offset", 0):
            return None
        # A token after a cache needs no mask, or tells the number of its keys; a chunk of a prompt needs one.
        if mask is None and tokens is not None and 1 < self.queries < tokens:
            return Padding(((0, tokens),) * self.given["batch_size"], tokens, torch.device(self.given["device"]))
        if mask is None or mask.dim() != 2 or mask.shape[1] != tokens:
            return None
        found = padding_of(mask) if self.can_read else None
        if self._holds_sequences(found) or (found is not None and tokens < self.keys and found.is_none):
            return None
        if is_whole and (padding.is_behind_in_graph or (found and found.is_behind)):
            self.padding = self.given["attention_mask"] = None
            return None
        return found

    def _tokens(self) -> int | None:
        """Return the number of tokens so far; None if only the GPU knows it, or reading it is not worth the wait."""
        offset = self.given.get("q_offset", self.keys - self.queries)
        if isinstance(offset, torch.Tensor):  # of a static cache
            wanted = self.can_read and is_invariant() and (self.queries > 1 or self.padding is not None)
            offset = int(offset) if wanted else None
        return None if offset is None else int(offset) + self.queries

    def _holds_sequences(self, found: Padding | None) -> bool:
        """Return whether positions of the user's show that a row holds several sequences."""
        ids = positions_of_call().ids if found is not None and self.is_row else None
        if found is None or ids is None or not has_values(ids) or ids.shape[-1] != self.keys:
            return False
        first, end = found.runs[0]
        return bool((ids.reshape(-1, self.keys)[:, first:end].diff() != 1).any())

    def sequences(self) -> tuple[Sequences | None, torch.Tensor | None]:
        """Return the sequences of a row, or, if values cannot be read, each token's sequence number, [tokens]."""
        if not self.is_row or torch.compiler.is_compiling():
            return None, None
        told, joined = positions_of_call(), self.numbers
        ids = told.ids if told.ids is not None and told.ids.shape[-1] == self.keys else None
        given = joined is not None or (ids is not None and told.are_given and not told.are_seen)
        if not given or (self.padding is not None and self.padding.shape[-1] != self.keys):
            return None, None
        if told.starts is not None and self.padding is None and not self.is_joined:
            return Sequences(told.starts.int(), self.keys), None
        if self.can_read and has_values(ids) and (self.padding is None or bool(self.padding.all())):
            self.padding = None
            return self._read(told, joined if ids is None else ids), None
        if joined is not None:
            return None, None
        self.is_plain = False
        return None, number_of_sequences(ids, self.padding).to(self.given.get("device"))

    def _read(self, told: Positions, ids: torch.Tensor) -> Sequences | None:
        """Return the sequences of a row with readable values; None if it has one sequence."""
        if told.starts is not None:
            return Sequences(told.starts.int(), self.keys)
        found = look(ids, None if self.numbers is None else self.numbers[0])
        if found is None:
            return None
        _warn_of_mixing(self.config, self.reading)
        return found.to(self.given.get("device"))

    def with_room(self, window: int | None) -> torch.Tensor:
        """Return the mask of a prompt at the beginning of a cache that has more room."""
        from transformers.masking_utils import sdpa_mask

        if not self.can_read or not self.is_plain:
            return sdpa_mask(**self.given | {"allow_is_causal_skip": False})
        none = torch.empty(0, dtype=torch.int32, device=self.given.get("device", "cpu"))
        return ToldMask(none, self.queries, window, self.queries, self.keys, self.given["batch_size"])


def _is_own(local_size: int, config: Any, given: dict[str, Any]) -> bool:
    """Return whether a local mask equals the window that layers pass to the attention function: causal, not chunked.

    Bidirectional masks count a window differently.
    """
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return local_size == getattr(config, "sliding_window", None) and not chunked and _is_causal(given)


def _is_causal(given: dict[str, Any]) -> bool:
    return "allow_is_bidirectional_skip" not in given


def _is_made_by(function: Any, name: str) -> bool:
    return isinstance(function, FunctionType) and function.__qualname__.startswith(f"{name}.")


def _numbers(function: Any) -> torch.Tensor | None:
    """Return the tokens' sequence numbers, [batch, tokens], if a mask function separates sequences; else None."""
    for part in _functions(function):
        if _is_made_by(part, "packed_sequence_mask_function"):
            return content((part.__closure__ or (None,))[0])
    return None


def _shows_blocks(function: FunctionType, reading: Reading) -> bool:
    if torch.compiler.is_compiling():  # it cannot inspect a function
        return reading.shows_blocks
    return any(_is_made_by(part, "or_masks") for part in _functions(function))


def _functions(made: Any) -> Iterator[FunctionType]:
    """Yield a function and the functions in its closure."""
    if isinstance(made, FunctionType):
        yield made
        for cell in made.__closure__ or ():
            yield from _functions(content(cell))
    elif isinstance(made, tuple):
        for one in made:
            yield from _functions(one)


def says_packing_alone(made: Any) -> bool:
    """Return whether a mask only expresses packed sequences, causality and the layer's window.

    A copy of the mask loses this attribute; the result computed with it is the same.
    """
    return getattr(made, "says_packing_alone", False)


def lacks_sequences(made: Any) -> bool:
    """Return whether a mask was made while the sequences in its row could not be read."""
    return made is None or getattr(made, "lacks_sequences", False)


def _warn_of_mixing(config: Any, reading: Reading) -> None:
    """Warn once that layers other than attention process a packed row as one sequence."""
    kinds = getattr(config, "layer_types", None)
    if any(re.search(_RECURRENT, kind) for kind in kinds) if kinds else reading.recurrent:
        warn_once(
            f"{config.model_type}: position_ids begin again within a row, and only its attention keeps the sequences "
            "apart; its convolutions and recurrent layers run over the row as one: train on rows of one sequence each"
        )


class Reading(NamedTuple):
    """How a model's code uses its masks.

    Attributes:
        refusal: why attention "tilekern" cannot serve it; empty if it can.
        asks: features of its layers that attention "tilekern" does not compute, each with the name of the module that
            such layers have.
        by_mask_alone: whether its layers may pass no or a wrong ``is_causal``, or add the mask by themselves in places.
        hands_window: whether layers pass their window to the attention function.
        shows_blocks: whether blocks of tokens, for example of an image, may see each other in addition to causality.
        reads_mask: whether it reads its mask itself, so that a mask is required.
        recurrent: whether it has layers, such as Mamba, that process a row as one sequence.
    """

    refusal: str = ""
    asks: tuple[tuple[str, str], ...] = ()
    by_mask_alone: bool = False
    hands_window: bool = True
    shows_blocks: bool = False
    reads_mask: bool = False
    recurrent: bool = False


# A bias that a model's code adds to a mask for additional keys (DeepSeek V4's compressed keys).
_ADDED_KEYS = r"torch\.cat\(\[attention_mask, \w*bias"
# Arguments of attention functions that no kernel here supports, each with the module that makes them.
_ASKED = {
    "indices": ("indexer", "has an indexer choose the keys of each query"),
    "block_indices": ("indexer", "has an indexer choose the blocks of keys of each query"),
    "sinks": ("sink_proj", "has an attention sink of each query"),
}
# Layers that are not attention, by the names of classes and of ``layer_types``.
_RECURRENT = "Mamba|mamba|GatedDelta|KimiDelta|linear_attention|Lightning|ShortConv|conv|Recurrent|recurrent|hybrid"
_readings: dict[type, Reading] = {}


@constant_in_graphs
def reading_of(config: type) -> Reading:
    """Return how the code of models with such a configuration uses masks; missing code counts as harmless."""
    if config in _readings:
        return _readings[config]
    models = next(filter(None, map(_models, config.__mro__)), [])
    if not models:
        # Code that is imported later may give the answer.
        return Reading()
    return _readings.setdefault(config, _read(models))


def _models(config: type) -> list[Any]:
    """Return the models with such a configuration, their common base first.

    The auto classes do not know every part of a model. The model's code is beside its configuration's, and has been
    imported when a mask is requested.
    """
    beside = f"{config.__module__.rpartition('.')[0]}.modeling_"
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(beside)]
    found = [x for module in modules for x in vars(module).values() if isinstance(x, type)]
    return [x for x in found if getattr(x, "config_class", None) is config]


def _read(models: list[Any]) -> Reading:
    sdpa, flash, any_backend = (
        any(getattr(model, f"_supports_{name}") for model in models)
        for name in ("sdpa", "flash_attn", "attention_backend")
    )
    asks = any(hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS") for model in models)
    names = [model.__name__ for model in models]
    name = next((name for name in names if not name.endswith("PreTrainedModel")), names[0])
    if not (asks or sdpa or any_backend):
        return Reading(f"{name} computes its attention by itself")
    sources = [_source(module) for module in {model.__module__ for model in models}]

    def reads(pattern: str) -> bool:
        return any(re.search(pattern, source, re.MULTILINE) for source in sources)

    if reads(_ADDED_KEYS):
        return Reading(f"{name} adds compressed keys, and a bias for them, behind those of its mask")
    return Reading(
        by_mask_alone=not (sdpa or flash or any_backend),
        hands_window=reads(r"^\s+sliding_window="),
        shows_blocks=not all(sources) or reads("block_sequence_ids"),
        asks=tuple((maker, f"{name} {why}") for argument, (maker, why) in _ASKED.items() if reads(_hands(argument))),
        reads_mask=reads("allow_is_causal_skip=False|indexed_attention"),
        recurrent=reads(rf"^class \w*({_RECURRENT})"),
    )


def _hands(argument: str) -> str:
    """Return a pattern for a call of the attention function that passes an argument."""
    return rf"attention_interface\((?:(?!\n\s*\)\n)[\s\S])*\n\s+{argument}="


def refusal_of(model: torch.nn.Module) -> str:
    """Return why attention "tilekern" cannot serve a model; empty if it can."""
    reading = reading_of(type(getattr(model, "config", None)))
    if reading.refusal or not reading.asks:
        return reading.refusal
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return next((reason for maker, reason in reading.asks if maker in names), "")


def _source(module: str) -> str:
    """Return a module's code; empty if it is not available, in which case a mask is always made."""
    try:
        return inspect.getsource(sys.modules[module])
    except OSError:
        return ""
