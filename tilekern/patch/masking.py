"""The masks of ``attn_implementation="tilekern"``, and what a model's own code makes of them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilekern.errors import InputError
from tilekern.patch.constant import constant_in_graphs
from tilekern.patch.wrapped import content


def mask(*, local_size: int | None = None, config: Any = None, **given: Any) -> Any:
    """A mask as transformers asks for it: None wherever the kernels' own causality and window say all of it.

    The window is in the mask where layers do not hand theirs to their attention function: Qwen2-MoE's and Phi-MoE's.

    Padding, sequences packed without ``cu_seq_lens``, blocks of images and the like give SDPA's boolean mask. A model
    for which transformers has neither SDPA nor flash attention always gets the additive one that it is written for.

    Raises:
        InputError: the model computes its attention by itself, where no mask would mean that each token sees all.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    reading = reading_of(type(config))
    if alone := reading.alone:
        raise InputError(f'attn_implementation="tilekern": {alone} computes its attention by itself; use "eager"')
    if reading.by_mask_alone:
        return eager_mask(**given | {"allow_is_bidirectional_skip": False}, local_size=local_size, config=config)
    own = local_size is None or (reading.hands_window and _is_own(local_size, config, given))
    made = sdpa_mask(**given, local_size=None if own else local_size, config=config)
    if made is not None and own and _is_packing(given, reading):
        made.says_packing_alone = True
    return made


def _is_own(local_size: int, config: Any, given: dict[str, Any]) -> bool:
    """Whether a local mask is the window that layers hand to the attention function: causal, and no chunks.

    Masks in both directions count a window in another way.
    """
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return local_size == getattr(config, "sliding_window", None) and not chunked and _is_causal(given)


def _is_causal(given: dict[str, Any]) -> bool:
    return "allow_is_bidirectional_skip" not in given


def _is_packing(given: dict[str, Any], reading: Reading) -> bool:
    """Whether a mask, aside from its window, says no more than causality and where sequences begin.

    It does not where the user gave a mask, where a function of the model's shapes it (which is called by vmap), or
    where blocks are shown beside what it is made of: before sequences are kept apart (transformers 5.24) or after.
    """
    shaped = given.get("attention_mask") is not None or given.get("use_vmap", False)
    function = given["mask_function"]
    joined = isinstance(function, FunctionType) and function.__qualname__.startswith("and_masks.")
    return joined and not shaped and _is_causal(given) and not _shows_blocks(function, reading)


def _shows_blocks(function: FunctionType, reading: Reading) -> bool:
    if torch.compiler.is_compiling():  # which cannot look into a function
        return reading.shows_blocks
    return any(one.__qualname__.startswith("or_masks.") for one in _functions(function))


def _functions(made: Any) -> Iterator[FunctionType]:
    """A function, and those that it has been made of."""
    if isinstance(made, FunctionType):
        yield made
        for cell in made.__closure__ or ():
            yield from _functions(content(cell))
    elif isinstance(made, tuple):
        for one in made:
            yield from _functions(one)


def says_packing_alone(made: Any) -> bool:
    """Whether the starts of packed sequences, causality and the layer's window say all that a mask says.

    A copy of the mask does not know it; what is computed with it is the same.
    """
    return getattr(made, "says_packing_alone", False)


class Reading(NamedTuple):
    """How a model's code uses its masks.

    Attributes:
        alone: the model's name, where it never asks for an attention function; else empty.
        by_mask_alone: whether its layers may say nothing, or what is not so, of their causality, and add the mask by
            themselves here and there.
        hands_window: whether layers hand their window to the attention function.
        shows_blocks: whether blocks of tokens, as of an image, may see each other beside what is causal.
    """

    alone: str = ""
    by_mask_alone: bool = False
    hands_window: bool = True
    shows_blocks: bool = False


_readings: dict[type, Reading] = {}


@constant_in_graphs
def reading_of(config: type) -> Reading:
    """How the code of models with such a configuration uses masks; code that is not found counts as harmless."""
    if config in _readings:
        return _readings[config]
    models = next(filter(None, map(_models, config.__mro__)), [])
    if not models:
        # Code that is imported later may answer.
        return Reading()
    return _readings.setdefault(config, _read(models))


def _models(config: type) -> list[Any]:
    """The models with such a configuration, their common base first.

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
    if not (asks or sdpa or any_backend):
        names = [model.__name__ for model in models]
        return Reading(alone=next((name for name in names if not name.endswith("PreTrainedModel")), names[0]))
    sources = [_source(module) for module in {model.__module__ for model in models}]
    return Reading(
        by_mask_alone=not (sdpa or flash or any_backend),
        hands_window=any(re.search(r"^\s+sliding_window=", source, re.MULTILINE) for source in sources),
        shows_blocks=any(not source or "block_sequence_ids" in source for source in sources),
    )


def _source(module: str) -> str:
    """The code of a module; empty where it is not at hand, for which a mask is what is right in any case."""
    try:
        return inspect.getsource(sys.modules[module])
    except OSError:
        return ""
