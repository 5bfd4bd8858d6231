"""Hugging Face configs: where a model's decoder is described, and under which name its family keeps each size."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tilekern.errors import InputError

LARGEST = 1 << 24
# Where multimodal and encoder-decoder configs keep the decoder, the outermost first.
_NESTS = ("vlm_config", "thinker_config", "text_config", "language_config", "llm_config", "decoder")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
# Names that the attribute maps of transformers' config classes lack, or have for the encoder; a dot goes one level
# down.
_OTHER_NAMES = {
    "head_dim": ("d_head", "dim_head", "attention_head_size", "kv_channels", "d_kv"),
    "intermediate_size": (
        "ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner", "ffn_hidden_size", "d_ff", "dff", "dim_ff",
        "feed_forward_size", "ffn_config.ffn_hidden_size",
    ),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k", "ffn_config.moe_top_k"),
    "num_hidden_layers": ("decoder_layers", "num_decoder_layers", "num_layers"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num", "attn_config.kv_n_heads"),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": (
        "shared_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
    ),
    "sliding_window": ("sliding_window_size", "attention_window_size", "window_size"),
    "vocab_size": ("padded_vocab_size",),
}  # fmt: skip


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the decoder: of a multimodal model its text config, else the whole.

    transformers leaves the defaults of their class out of nested configs, and out of those alone: where such a part
    lacks a size, the class that it names fills it in.
    """
    found = config
    while nests := [found[name] for name in _NESTS if isinstance(found.get(name), Mapping) and found[name]]:
        found = nests[0]
    if found is config or all(found.get(field) is not None for field in _NEEDED):
        return found
    return {**_completed(found), **{field: value for field, value in found.items() if value is not None}}


def _class_of(model_type: Any) -> Any:
    """transformers' config class of a model type, None where it has none. The import takes seconds."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return None
    return CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its class; empty where there is no such class or it refuses the values."""
    found = _class_of(config.get("model_type"))
    try:
        return dict(found.from_dict(dict(config)).to_dict()) if found else {}
    except Exception:  # noqa: BLE001 (each class refuses in its own way; the sizes are checked and named here later)
        return {}


class Fields:
    """Reads the sizes of one decoder, whatever its family calls them.

    Args:
        config: the decoder's config.
        name: what errors call it.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    @functools.cached_property
    def _attribute_map(self) -> Mapping[str, str]:
        return getattr(_class_of(self.config.get("model_type")), "attribute_map", {})

    def _at(self, path: str) -> Any:
        found: Any = self.config
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def find(self, field: str) -> tuple[str, Any]:
        """The name under which a field is kept, and its value; ``field`` and None where it has no value."""
        for name in (field, *_OTHER_NAMES.get(field, ())):
            if (value := self._at(name)) is not None:
                return name, value
        return field, None

    def size(self, field: str, fallback: int | None = None) -> int:
        """A size; where the config has none under any known name, the fallback.

        Raises:
            InputError: there is neither, or the value is no size; the message names the field.
        """
        name, value = self.find(field)
        if value is None and fallback is None:
            name = self._attribute_map.get(field, field)
            value = self._at(name)
        if value is None:
            value = fallback
        if value is None:
            raise InputError(f"{self.name}: the config lacks {field!r}; a decoder's config.json has it")
        return self.checked(name, value)

    def sizes(self, field: str, fallback: int | None = None) -> list[int]:
        """The distinct sizes of a field that may be a list with one for each layer.

        Raises:
            InputError: as for ``size``.
        """
        name, value = self.find(field)
        if isinstance(value, list) and value:
            return list(dict.fromkeys(self.checked(name, size) for size in value))
        return [self.size(field, fallback)]

    def optional(self, field: str) -> int | None:
        """A size, or None where the config has none or says 0, as some do for what they lack.

        Raises:
            InputError: the value is no size.
        """
        name, value = self.find(field)
        return None if value is None or value == 0 else self.checked(name, value)

    def checked(self, name: str, value: Any) -> int:
        """The value of a field, if it is one that a model can have.

        Raises:
            InputError: it is none.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            said = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            raise InputError(f"{self.name}: {name} is {said}; expected a whole number from 1 to {LARGEST}")
        return value

    def refused(self, words: str) -> InputError:
        """The error that says what is wrong with this config."""
        return InputError(f"{self.name}: {words}")
