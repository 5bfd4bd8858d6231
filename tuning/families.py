"""From a Hugging Face config to the layers whose kernels are planned: what the families of models differ in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilekern.spec import ModelShape, cdiv
from tuning.configs import LARGEST, Fields, decoder_config

# As their modeling files in transformers have them: types that normalise q and k head by head, and types that
# normalise all heads of a token at once.
HEAD_NORM_TYPES = frozenset((
    "afmoe", "apertus", "beam", "doge", "dots1", "exaone4", "exaone_moe", "flint", "gemma3_text", "gemma3n_text",
    "gemma4_text", "gemma4_unified_text", "glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "inkling_text",
    "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "mellum", "minimax_m3_vl_text", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text",
    "qwen4_exp_text",
))  # fmt: skip
WHOLE_NORM_TYPES = frozenset(("flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe"))
# Types whose MLP is four times as wide as the hidden states where the config says nothing.
_FOUR_TIMES = frozenset(("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "xlm"))
_MULTIPLES = ("intermediate_multiple_size", "expansion_ratio")
# Types that count the gate and what it gates as one width.
_GATE_COUNTED = frozenset(("moshi", "recurrent_gemma"))
# Where the plain layers of a model with experts have their width, if not in ``intermediate_size``.
_PLAIN_WIDTHS = ("intermediate_size_mlp", "dense_intermediate_size")
# Fields that give some of the layers other heads.
_OTHER_HEADS = (
    {
        "num_attention_heads": "swa_num_attention_heads",
        "num_key_value_heads": "swa_num_key_value_heads",
        "head_dim": "swa_head_dim",
    },
    {"num_key_value_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"},
)


@dataclass(frozen=True)
class Layers:
    """Layers of a model that share their sizes.

    ``only`` are the ops that are planned for them, all where None, and ``without`` those that are not. Each token
    makes ``rows_per_token`` rows there: in a layer of experts, one for each expert that it is sent to.
    """

    shape: ModelShape
    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    rows_per_token: int = 1

    def take(self, op: str) -> bool:
        """Whether an op is planned for these layers."""
        return op not in self.without and (self.only is None or op in self.only)


@dataclass(frozen=True)
class Model:
    """A model's decoder: its kinds of layers, the commonest first, and what no plan of it can hold, by op."""

    name: str
    layers: tuple[Layers, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The sizes of the commonest layers."""
        return self.layers[0].shape


def model_of_config(config: Mapping[str, Any], name: str) -> Model:
    """The layers in a Hugging Face config; those of the text part of a multimodal one.

    Raises:
        InputError: a field is missing or has a value that no model can have; the message names it.
    """
    decoder = decoder_config(config)
    layers: dict[Layers, None] = {}
    left_out: dict[tuple[str, str], None] = {}
    for other in ({}, *_other_heads(decoder)):
        fields = Fields({**decoder, **other}, name)
        layers |= dict.fromkeys(_layers(fields))
        left_out |= dict.fromkeys(_left_out(fields))
    return Model(name, tuple(layers), tuple(left_out))


def _other_heads(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What some of the layers have in place of the config's own fields."""
    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        yield from (changes for changes in by_layer.values() if isinstance(changes, Mapping))
    for names in _OTHER_HEADS:
        changes = {field: config[name] for field, name in names.items() if config.get(name) is not None}
        if changes:
            yield changes
    heads = config.get("num_attention_heads_per_layer")
    yield from ({"num_attention_heads": count} for count in (heads if isinstance(heads, list) else ()))


def _layers(fields: Fields) -> Iterator[Layers]:
    shape = _shape(fields)
    channels, values = _channels(fields, shape)
    served = channels == shape.head_dim and channels == values
    dense = _dense_widths(fields)
    without = frozenset([*([] if served else ["attention"]), *([] if dense else ["swiglu", "linear"])])
    for width in dense or [shape.intermediate]:
        yield Layers(replace(shape, intermediate=width), without=without)
    if channels == values and not served:
        yield Layers(replace(shape, kv_heads=shape.heads, head_dim=channels), only=frozenset({"attention"}))
    for width in _norm_widths(fields, shape):
        yield Layers(replace(shape, hidden=width, qk_norm=False), only=frozenset({"rms_norm"}))
    for experts in _expert_widths(fields):
        # No kernel here multiplies by several experts' weights at once; their activation is a kernel like any other.
        rows = max(fields.sizes("num_experts_per_tok", 1))
        yield Layers(replace(shape, intermediate=experts), only=frozenset({"swiglu"}), rows_per_token=rows)


def _shape(fields: Fields) -> ModelShape:
    config = fields.config
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.optional("kv_lora_rank") is not None and fields.find("qk_rope_head_dim")[1] == 0:
        raise fields.refused("qk_rope_head_dim is 0; latent attention whose heads have no rotary part is not served")
    if _is_latent(fields):
        # The one key that carries positions is shared by all heads.
        kv_heads, head_dim = 1, fields.size("qk_rope_head_dim")
    else:
        kv_heads = fields.size("num_key_value_heads", heads)
        if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
            kv_heads = 1
        head_dim = fields.size("head_dim", hidden // heads if hidden % heads == 0 else None)
    if heads % kv_heads:
        raise fields.refused(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise fields.refused(f"head_dim is {head_dim}; rotary embedding needs an even one")
    widths = [*_dense_widths(fields), *_expert_widths(fields)]
    model_type = str(config.get("model_type", "unknown"))
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return ModelShape(
        name=fields.name,
        model_type=model_type,
        hidden=hidden,
        intermediate=widths[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=fields.size("num_hidden_layers", len(kinds) if isinstance(kinds, list) and kinds else None),
        vocabulary=fields.size("vocab_size"),
        qk_norm=model_type in HEAD_NORM_TYPES and config.get("use_qk_norm", True) is not False,
        sliding_window=_window(fields),
    )


def _is_latent(fields: Fields) -> bool:
    """Whether keys and values are made from one latent vector (multi-head latent attention, DeepSeek-V2)."""
    return fields.optional("kv_lora_rank") is not None and fields.optional("qk_rope_head_dim") is not None


def _channels(fields: Fields, shape: ModelShape) -> tuple[int, int]:
    """Channels of each head that scores are made of, and channels of its values."""
    plain = fields.optional("qk_nope_head_dim") if _is_latent(fields) else None
    channels = shape.head_dim + (plain or 0)
    return channels, fields.optional("v_head_dim") or channels


def _left_out(fields: Fields) -> Iterator[tuple[str, str]]:
    channels, values = _channels(fields, _shape(fields))
    if channels != values:
        yield "attention", f"its heads have {channels} channels in q and k and {values} in v, the kernels one number"


def _norm_widths(fields: Fields, shape: ModelShape) -> list[int]:
    """Widths of norms besides those of the hidden states and of single heads."""
    if _is_latent(fields):
        return [size for name in ("q_lora_rank", "kv_lora_rank") if (size := fields.optional(name))]
    if shape.model_type in WHOLE_NORM_TYPES:
        return [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim]
    return []


def _window(fields: Fields) -> int | None:
    """The sliding window, if one is in use; some families carry one that is switched off."""
    kinds = fields.config.get("layer_types")
    if fields.config.get("use_sliding_window", True) is not True:
        return None
    if isinstance(kinds, list) and kinds and not any("sliding" in str(kind) for kind in kinds):
        return None
    return fields.optional("sliding_window")


def _has_experts(fields: Fields) -> bool:
    """Whether some layers send a token to a few of many MLPs."""
    config = fields.config
    if config.get("is_moe") is False or config.get("enable_moe_block") is False:
        return False
    return (fields.optional("num_experts") or 0) > 1


def _expert_widths(fields: Fields) -> list[int]:
    """Widths of the experts; some multimodal models have narrower ones for what is no text, named last."""
    if not _has_experts(fields):
        return []
    named = fields.find("moe_intermediate_size")[1]
    return fields.sizes("moe_intermediate_size" if named else "intermediate_size")


def _dense_widths(fields: Fields) -> list[int]:
    """Widths of the MLPs that every token goes through, shared experts among them."""
    found = _mlp_widths(fields) if not _has_experts(fields) or _has_dense_layers(fields) else []
    if _has_experts(fields):
        shared = fields.optional("shared_expert_intermediate_size")
        count = fields.optional("num_shared_experts")
        if shared is None and count is not None:
            shared = fields.checked("the shared experts' width", count * _expert_widths(fields)[0])
        found += [shared] if shared else []
    return list(dict.fromkeys(found))


def _mlp_widths(fields: Fields) -> list[int]:
    """Widths of the MLPs that stand where no experts do."""
    model_type = str(fields.config.get("model_type"))
    for name in _PLAIN_WIDTHS:
        if (width := fields.optional(name)) is not None:
            return [width]
    multiple = next((size for name in _MULTIPLES if (size := fields.optional(name))), None)
    if multiple is None and model_type in _FOUR_TIMES:
        multiple = 4
    found = fields.sizes("intermediate_size", fields.size("hidden_size") * multiple if multiple else None)
    if fields.config.get("block_auto_adjust_ff_dim"):
        return [_adjusted(fields, width) for width in found]
    if model_type in _GATE_COUNTED:
        return [fields.checked("half of intermediate_size", width // 2) for width in found]
    return found


def _adjusted(fields: Fields, width: int) -> int:
    """The width that LFM2 makes of the one in its config."""
    factor, multiple = fields.config.get("block_ffn_dim_multiplier"), fields.optional("block_multiple_of") or 1
    width = 2 * width // 3
    if isinstance(factor, int | float):
        if not 0 < factor * width <= LARGEST:
            raise fields.refused(f"block_ffn_dim_multiplier {factor} makes no width of {width}")
        width = int(factor * width)
    return fields.checked("the adjusted intermediate_size", multiple * cdiv(width, multiple))


def _has_dense_layers(fields: Fields) -> bool:
    """Whether a model with experts has plain MLPs of the width ``intermediate_size`` too."""
    config = fields.config
    if isinstance(config.get("mlp_layer_types"), list):
        return "dense" in config["mlp_layer_types"]
    if isinstance(config.get("moe_layers"), list):
        return len(config["moe_layers"]) < fields.size("num_hidden_layers")
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if config.get(name) is not None:
            return fields.optional(name) is not None
    if isinstance(config.get("mlp_only_layers"), list):
        return bool(config["mlp_only_layers"]) or (fields.optional("decoder_sparse_step") or 1) > 1
    if (fields.optional("decoder_sparse_step") or 1) > 1:
        return True
    named = fields.find("moe_intermediate_size")[1], fields.find("intermediate_size")[1]
    return bool(named[0]) and named[1] is not None
