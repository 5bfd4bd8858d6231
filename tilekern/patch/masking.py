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
from tilekern.ops.packing import can_read
from tilekern.patch.guards import constant_in_graphs
from tilekern.patch.ledger import content
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
from tilekern.warning import warn_once


def mask(*, local_size: int | None = None, config: Any = None, **given: Any) -> Any:
    """Return a mask as transformers asks for it: None wherever the kernels' own causality and window say all of it.

    A row that holds several sequences, by its ``position_ids``, gets a :class:`ToldMask`, as does a prompt with room of
    a cache behind it. The window is in the mask where layers do not hand theirs to their attention function:
    Qwen2-MoE's and Phi-MoE's.

    Padding, blocks of images and the like give SDPA's boolean mask. So does what only its values can tell, while a
    graph is traced or captured: a mask of padding, and position ids of the user's. A model for which transformers has
    neither SDPA nor flash attention always gets the additive one that it is written for.

    Raises:
        InputError: the model computes its attention by itself, where no mask would mean that each token sees all; or
            it hands over keys that no mask is made for.
    """
    from transformers.masking_utils import and_masks, eager_mask, packed_sequence_mask_function, sdpa_mask

    reading = reading_of(type(config))
    if reading.refusal:
        raise InputError(f'attn_implementation="tilekern": {reading.refusal}; use "eager"')
    own = local_size is None or (reading.hands_window and _is_own(local_size, config, given))
    ask = _Ask(given, reading, own, config)
    if ask.is_dropped_in_graph():
        return None
    found, numbers = ask.sequences()
    if found is not None:
        if ask.is_plain:
            return ToldMask(*found, local_size, ask.queries, ask.keys, 1)
        if not ask.is_joined:
            numbers = number_of_tokens(found.starts, ask.keys)
    if numbers is not None:
        function = and_masks(given["mask_function"], packed_sequence_mask_function(numbers[None]))
        given |= {"mask_function": function, "allow_is_causal_skip": False}
    if reading.by_mask_alone:
        return eager_mask(**given | {"allow_is_bidirectional_skip": False}, local_size=local_size, config=config)
    made = sdpa_mask(**given, local_size=None if own else local_size, config=config)
    if made is None and ask.is_causal and 1 < ask.queries < ask.keys:
        return ask.with_room(local_size)
    if made is not None and not ask.can_read:
        made.says_packing_alone = ask.is_plain and numbers is None
        made.lacks_sequences = ask.is_row and not ask.is_joined and numbers is None
    return made


class _Ask:
    """What transformers asks a mask for.

    Attributes:
        queries, keys: how many there are.
        is_causal: whether no query sees a later key.
        is_joined: whether transformers keeps sequences apart in its function, as it does while it cannot look.
        is_plain: whether the function says no more than causality, the layers' own window and where sequences begin.
        is_row: whether it is one row from its first token on, which may hold several sequences.
        can_read: whether values may be read now.
    """

    def __init__(self, given: dict[str, Any], reading: Reading, own: bool, config: Any) -> None:
        self.given, self.reading, self.config = given, reading, config
        self.padding, function = given.get("attention_mask"), given["mask_function"]
        # Releases before 5.17 hand over the places of the queries.
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
        if torch.compiler.is_compiling():  # which cannot look into a function
            return not self.given.get("allow_is_causal_skip", True) and _is_made_by(function, "and_masks")
        return self.numbers is not None

    def is_dropped_in_graph(self) -> bool:
        """Whether nothing but causality and the window is to be said, while a graph is made, of which None says all.

        transformers makes a mask then, and keeps sequences apart by positions that a model counted by itself, too.
        """
        if self.can_read or not self.is_plain or self.padding is not None or self.reading.reads_mask:
            return False
        if not 1 < self.queries == self.keys or self.given.get("kv_offset", 0):
            return False
        if torch.compiler.is_compiling():
            # Where transformers joins nothing, the attention function does.
            return not self.is_joined or not are_given_in_graph()
        return not positions_of_call().are_given or not (self.is_row or self.is_joined)

    def sequences(self) -> tuple[Sequences | None, torch.Tensor | None]:
        """Return the sequences of a row, or the number of each token's, [tokens], where values are not looked at."""
        if not self.is_row or torch.compiler.is_compiling():
            return None, None
        told, joined = positions_of_call(), self.numbers
        ids = told.ids if told.ids is not None and told.ids.shape[-1] == self.keys else None
        given = joined is not None or (ids is not None and told.are_given and not told.are_seen)
        if not given or (self.padding is not None and self.padding.shape[-1] != self.keys):
            return None, None
        if self.can_read and has_values(ids) and (self.padding is None or bool(self.padding.all())):
            self.padding = None
            return self._read(told, joined if ids is None else ids), None
        if joined is not None:
            return None, None
        self.is_plain = False
        return None, number_of_sequences(ids, self.padding).to(self.given.get("device"))

    def _read(self, told: Positions, ids: torch.Tensor) -> Sequences | None:
        """Return the sequences of a row whose values may be read; None if there is one."""
        if told.starts is not None:
            return Sequences(told.starts.int(), self.keys)
        found = look(ids, None if self.numbers is None else self.numbers[0])
        if found is None:
            return None
        _warn_of_mixing(self.config, self.reading)
        return found.to(self.given.get("device"))

    def with_room(self, window: int | None) -> torch.Tensor:
        """Return the mask of a prompt at the beginning of a cache with room behind it."""
        from transformers.masking_utils import sdpa_mask

        if not self.can_read or not self.is_plain:
            return sdpa_mask(**self.given | {"allow_is_causal_skip": False})
        none = torch.empty(0, dtype=torch.int32, device=self.given.get("device", "cpu"))
        return ToldMask(none, self.queries, window, self.queries, self.keys, self.given["batch_size"])


def _is_own(local_size: int, config: Any, given: dict[str, Any]) -> bool:
    """Return whether a local mask is the window that layers hand to the attention function: causal, and no chunks.

    Masks in both directions count a window in another way.
    """
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return local_size == getattr(config, "sliding_window", None) and not chunked and _is_causal(given)


def _is_causal(given: dict[str, Any]) -> bool:
    return "allow_is_bidirectional_skip" not in given


def _is_made_by(function: Any, name: str) -> bool:
    return isinstance(function, FunctionType) and function.__qualname__.startswith(f"{name}.")


def _numbers(function: Any) -> torch.Tensor | None:
    """Return the numbers of the tokens' sequences, [batch, tokens], in a function that keeps them apart; else None."""
    for part in _functions(function):
        if _is_made_by(part, "packed_sequence_mask_function"):
            return content((part.__closure__ or (None,))[0])
    return None


def _shows_blocks(function: FunctionType, reading: Reading) -> bool:
    if torch.compiler.is_compiling():  # which cannot look into a function
        return reading.shows_blocks
    return any(_is_made_by(part, "or_masks") for part in _functions(function))


def _functions(made: Any) -> Iterator[FunctionType]:
    """Yield a function, and those that it has been made of."""
    if isinstance(made, FunctionType):
        yield made
        for cell in made.__closure__ or ():
            yield from _functions(content(cell))
    elif isinstance(made, tuple):
        for one in made:
            yield from _functions(one)


def says_packing_alone(made: Any) -> bool:
    """Return whether the starts of packed sequences, causality and the layer's window say all that a mask says.

    A copy of the mask does not know it; what is computed with it is the same.
    """
    return getattr(made, "says_packing_alone", False)


def lacks_sequences(made: Any) -> bool:
    """Return whether a mask was made while nobody could look whether its row holds several sequences."""
    return made is None or getattr(made, "lacks_sequences", False)


def _warn_of_mixing(config: Any, reading: Reading) -> None:
    """Say once that a packed row goes through layers that are no attention as one sequence."""
    kinds = getattr(config, "layer_types", None)
    if any(re.search(_RECURRENT, kind) for kind in kinds) if kinds else reading.recurrent:
        warn_once(
            f"{config.model_type}: position_ids begin again within a row, and only its attention keeps the sequences "
            "apart; its convolutions and recurrent layers run over the row as one: train on rows of one sequence each"
        )


class Reading(NamedTuple):
    """How a model's code uses its masks.

    Attributes:
        refusal: why attention "tilekern" cannot serve it; empty where it can.
        asks: what its layers may ask for that attention "tilekern" does not compute, each with the name of the module
            that they have then.
        by_mask_alone: whether its layers may say nothing, or what is not so, of their causality, and add the mask by
            themselves here and there.
        hands_window: whether layers hand their window to the attention function.
        shows_blocks: whether blocks of tokens, as of an image, may see each other beside what is causal.
        reads_mask: whether it reads its mask by itself, so that there must be one.
        recurrent: whether it has layers, as of Mamba, that run over a row as one sequence.
    """

    refusal: str = ""
    asks: tuple[tuple[str, str], ...] = ()
    by_mask_alone: bool = False
    hands_window: bool = True
    shows_blocks: bool = False
    reads_mask: bool = False
    recurrent: bool = False


# A bias that a model's code adds to a mask for keys of its own (DeepSeek V4's compressed ones).
_ADDED_KEYS = r"torch\.cat\(\[attention_mask, \w*bias"
# What an attention function may be handed beside a mask, and none here computes; by which module it is made.
_ASKED = {
    "indices": ("indexer", "has an indexer choose the keys of each query"),
    "block_indices": ("indexer", "has an indexer choose the blocks of keys of each query"),
    "sinks": ("sink_proj", "has an attention sink of each query"),
}
# Layers that are no attention, by the names of classes and of ``layer_types``.
_RECURRENT = "Mamba|mamba|GatedDelta|KimiDelta|linear_attention|Lightning|ShortConv|conv|Recurrent|recurrent|hybrid"
_readings: dict[type, Reading] = {}


@constant_in_graphs
def reading_of(config: type) -> Reading:
    """Return how the code of models with such a configuration uses masks; code that is not found counts as harmless."""
    if config in _readings:
        return _readings[config]
    models = next(filter(None, map(_models, config.__mro__)), [])
    if not models:
        # Code that is imported later may answer.
        return Reading()
    return _readings.setdefault(config, _read(models))


def _models(config: type) -> list[Any]:
    """Return the models with such a configuration, their common base first.

    The auto classes do not know every part of a model. Its code lies beside its configuration's, and is imported where
    a mask is asked for.
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
    """Return a call of the attention function that hands an argument over."""
    return rf"attention_interface\((?:(?!\n\s*\)\n)[\s\S])*\n\s+{argument}="


def refusal_of(model: torch.nn.Module) -> str:
    """Return why attention "tilekern" cannot serve a model; empty where it can."""
    reading = reading_of(type(getattr(model, "config", None)))
    if reading.refusal or not reading.asks:
        return reading.refusal
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return next((reason for maker, reason in reading.asks if maker in names), "")


def _source(module: str) -> str:
    """Return the code of a module; empty where it is not at hand, for which a mask is what is right in any case."""
    try:
        return inspect.getsource(sys.modules[module])
    except OSError:
        return ""
