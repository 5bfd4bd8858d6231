"""Configs of all families: the real config classes of transformers, the real models' parameters, published forms."""

import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tilekern.errors import InputError
from tuning.families import HEAD_NORM_TYPES, WHOLE_NORM_TYPES, model_of_config

# Families with no such sizes at their defaults: state-space and recurrent models have no attention heads, BLT is four
# models in one, and GLM-4-MoE's default heads do not divide its hidden states.
WITHOUT = {
    "blt": "hidden_size",
    "falcon_mamba": "num_attention_heads",
    "glm4_moe": "head_dim",
    "mamba": "num_attention_heads",
    "mamba2": "num_attention_heads",
    "rwkv": "num_attention_heads",
    "xlstm": "num_attention_heads",
}
# Families of several modalities, or with an encoder, whose decoder has no such sizes at its defaults: heads that do not
# divide the hidden states, and latent heads without a rotary part.
WITHOUT_OTHERS = {
    "glm4v_moe": "lacks 'head_dim'",
    "glm5_next": "latent attention whose heads have no rotary part is not served",
    "qwen3_omni_moe": "lacks 'head_dim'",
    "qwen3_omni_moe_thinker": "lacks 'head_dim'",
}
OTHERS = sorted(
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()
    | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
)
# Families that between them use each way of saying a size, with what makes a small model of them.
REAL = {
    "bloom": {"n_layer": 2},
    "deepseek_v3": {"num_hidden_layers": 4},
    "ernie4_5_vl_moe": {"text_config": {"num_hidden_layers": 2}},
    "falcon": {"num_hidden_layers": 2},
    "gemma3_text": {"num_hidden_layers": 2},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "gpt2": {"n_layer": 2},
    "gpt_bigcode": {"n_layer": 2},
    "gpt_oss": {"num_hidden_layers": 2},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1]},
    "mixtral": {"num_hidden_layers": 2},
    "mpt": {"n_layers": 2},
    "olmo2": {"num_hidden_layers": 2},
    "opt": {"num_hidden_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "switch_transformers": {"num_layers": 4, "num_sparse_decoder_layers": 2},
    "t5": {"num_layers": 2, "d_kv": 32},
    "whisper": {"decoder_layers": 2, "encoder_layers": 2},
}
AUTOS = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None, "vocab_size": 50257}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
MOE = LLAMA | {"model_type": "some_moe", "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
LATENT = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64}
ADJUSTED = LLAMA | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": float("inf")}


@functools.cache
def defaults(model_type):
    try:
        return CONFIG_MAPPING[model_type]().to_dict()
    except Exception as error:  # noqa: BLE001 (transformers' own validation of its own defaults)
        pytest.skip(f"transformers refuses its defaults: {error}")


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_model_of_transformers_has_a_shape_or_an_error_that_names_the_field(model_type):
    config = defaults(model_type)
    if model_type in WITHOUT:
        with pytest.raises(InputError, match=f"^{model_type}: the config lacks '{WITHOUT[model_type]}'"):
            model_of_config(config, model_type)
        return
    shape = model_of_config(config, model_type).shape
    text = config.get("text_config") or config.get("decoder") or config
    assert shape.hidden in text.values()
    assert shape.vocabulary in text.values()
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_dim % 2 == 0


@pytest.mark.parametrize("model_type", OTHERS)
def test_the_decoder_of_every_other_language_model_of_transformers_has_a_shape(model_type):
    config = defaults(model_type)
    if model_type in WITHOUT_OTHERS:
        with pytest.raises(InputError, match=WITHOUT_OTHERS[model_type]):
            model_of_config(config, model_type)
        return
    shape = model_of_config(config, model_type).shape
    assert shape.heads % shape.kv_heads == shape.head_dim % 2 == 0


@pytest.mark.parametrize("model_type", REAL)
def test_the_sizes_are_those_of_the_real_model(model_type):
    config = CONFIG_MAPPING[model_type](**REAL[model_type])
    with torch.device("meta"):
        model = next(auto for auto in AUTOS if type(config) in auto._model_mapping).from_config(config)
    found = {size for parameter in model.parameters() for size in parameter.shape}
    for kind in model_of_config(config.to_dict(), model_type).layers:
        shape = kind.shape
        assert {shape.hidden, shape.vocabulary} <= found, kind
        # A gate and what it gates are often one matrix, and so are q, k and v.
        if kind.take("swiglu"):
            assert found & {shape.intermediate, 2 * shape.intermediate}, kind
        if kind.take("attention"):
            q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            assert found & {q, q + 2 * kv}, kind
            assert found & {kv, 2 * kv, q + 2 * kv}, kind


@pytest.mark.parametrize("model_type", sorted(HEAD_NORM_TYPES | WHOLE_NORM_TYPES))
def test_the_models_that_normalise_q_and_k_do_so_in_transformers(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    path = Path(inspect.getfile(CONFIG_MAPPING[model_type]))
    code = path.with_name(path.name.replace("configuration_", "modeling_")).read_text()
    norms = re.findall(r"self\.(?:q_norm|q_layernorm|query_layernorm) = \w*RMSNorm\(\s*([^)]*)", code)
    whole = [norm for norm in norms if re.search(r"num_attention_heads|hidden_size", norm)]
    assert whole if model_type in WHOLE_NORM_TYPES else len(whole) < len(norms)


def test_gpt2_is_four_times_as_wide_where_it_says_nothing():
    shape = model_of_config(GPT2, "gpt2").shape
    assert (shape.hidden, shape.heads, shape.head_dim, shape.intermediate) == (768, 12, 64, 3072)
    assert model_of_config(GPT2 | {"n_inner": 1000}, "gpt2").shape.intermediate == 1000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2 | {"n_embd": -1}, "gpt: n_embd is -1; expected a whole number"),
        (GPT2 | {"n_head": None}, "gpt: the config lacks 'num_attention_heads'"),
        (LLAMA | {"vocab_size": None}, "lacks 'vocab_size'"),
        (LLAMA | {"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
        (LLAMA | {"sliding_window": "long"}, "sliding_window is 'long'"),
        (LLAMA | {"intermediate_size": [8192, 0]}, "intermediate_size is 0"),
        (LLAMA | {"intermediate_size": ["x" * 200]}, r"intermediate_size is 'x+\.\.\.; expected"),
        (MOE | {"moe_intermediate_size": 1.5}, r"moe_intermediate_size is 1\.5"),
        (LATENT | {"qk_rope_head_dim": 63}, "head_dim is 63; rotary embedding needs an even one"),
        (LATENT | {"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0; latent attention whose heads have no rotary part"),
        ({"text_config": {"model_type": "llama", "hidden_size": 64.5}}, r"hidden_size is 64\.5"),
        ({"model_type": ["llama"]}, "lacks 'hidden_size'"),
        (LLAMA | {"model_type": ["llama"], "vocab_size": 0}, "vocab_size is 0"),
        (LLAMA | {"num_attention_heads_per_layer": [8, [8]]}, r"num_attention_heads is \[8\]"),
        (LLAMA | {"model_type": "moshi", "intermediate_size": 1}, "half of intermediate_size is 0"),
        (MOE | {"num_shared_experts": 1 << 24}, "the shared experts' width is"),
        (ADJUSTED, "block_ffn_dim_multiplier inf makes no width of"),
        (ADJUSTED | {"block_ffn_dim_multiplier": 1e30}, "makes no width of"),
        (ADJUSTED | {"block_ffn_dim_multiplier": 1e-9}, "the adjusted intermediate_size is 0"),
    ],
)
def test_a_field_is_named_as_the_family_names_it(config, words):
    with pytest.raises(InputError, match=words):
        model_of_config(config, "gpt")


@pytest.mark.parametrize("nests", [("text_config",), ("language_config",), ("llm_config",), ("decoder",),
                                   ("thinker_config", "text_config")])  # fmt: skip
def test_the_decoder_of_a_multimodal_model_is_found(nests):
    config = LLAMA
    for nest in reversed(nests):
        config = {"model_type": "several", "hidden_size": 7, nest: config, "vision_config": {"hidden_size": 1152}}
    assert model_of_config(config, "x") == model_of_config(LLAMA, "x")


def test_what_a_nested_config_leaves_out_is_the_default_of_its_class():
    """As google/gemma-3-4b-it and llava-hf/llava-1.5-7b-hf are published."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    gemma = model_of_config({"model_type": "gemma3", "text_config": text}, "gemma").shape
    assert (gemma.hidden, gemma.heads, gemma.kv_heads, gemma.head_dim) == (2560, 8, 4, 256)
    assert (gemma.intermediate, gemma.layers, gemma.vocabulary, gemma.sliding_window) == (10240, 34, 262208, 1024)
    assert gemma.qk_norm
    llava = model_of_config({"text_config": {"model_type": "llama", "vocab_size": 32064}}, "llava").shape
    assert (llava.hidden, llava.heads, llava.intermediate, llava.vocabulary) == (4096, 32, 11008, 32064)


def test_a_falcon_that_shares_one_key_among_all_heads():
    config = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
              "multi_query": True, "vocab_size": 65024}  # fmt: skip
    shape = model_of_config(config, "falcon").shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate) == (71, 1, 64, 18176)
    newer = model_of_config(config | {"num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8,
                                      "new_decoder_architecture": True}, "falcon").shape  # fmt: skip
    assert newer.kv_heads == 8


@pytest.mark.parametrize(
    ("more", "dense", "experts"),
    [
        ({"first_k_dense_replace": 1, "n_shared_experts": 2}, {14336, 2816}, {(1408, 6)}),
        ({"first_k_dense_replace": 0, "shared_expert_intermediate_size": 5632}, {5632}, {(1408, 6)}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, set(), {(1408, 6)}),
        ({"mlp_only_layers": [0]}, {14336}, {(1408, 6)}),
        ({"mlp_layer_types": ["sparse", "sparse"]}, set(), {(1408, 6)}),
        ({"moe_intermediate_size": None, "num_experts_per_tok": 2}, set(), {(14336, 2)}),
        ({"num_experts": 0}, {14336}, set()),
    ],
)
def test_the_widths_of_a_model_with_experts(more, dense, experts):
    kinds = [kind for kind in model_of_config(MOE | more, "moe").layers if kind.take("swiglu")]
    assert {kind.shape.intermediate for kind in kinds if kind.only is None} == dense
    assert {(kind.shape.intermediate, kind.rows_per_token) for kind in kinds if kind.only is not None} == experts


@pytest.mark.parametrize(("plain", "values", "served"), [(128, 128, False), (192, 256, True)])
def test_latent_attention_turns_one_key_and_has_attention_where_its_heads_have_one_size(plain, values, served):
    """DeepSeek-V3 and GLM-4.7-Flash: 192 channels against 128, and 256 against 256."""
    model = model_of_config(LATENT | {"qk_nope_head_dim": plain, "v_head_dim": values}, "latent")
    assert (model.shape.heads, model.shape.kv_heads, model.shape.head_dim) == (32, 1, 64)
    attending = [(kind.shape.kv_heads, kind.shape.head_dim) for kind in model.layers if kind.take("attention")]
    assert attending == ([(32, 256)] if served else [])
    assert [op for op, _ in model.left_out] == ([] if served else ["attention"])
    assert {kind.shape.hidden for kind in model.layers if kind.take("rms_norm")} == {4096, 1536, 512}


def test_norms_over_all_heads_are_as_wide_as_these():
    """OLMo 2: q has 32 heads of 128, k has 8."""
    kinds = model_of_config(LLAMA | {"model_type": "olmo2", "hidden_size": 5120, "head_dim": 128}, "olmo").layers
    assert {kind.shape.hidden for kind in kinds if kind.take("rms_norm")} == {5120, 4096, 1024}
    assert not any(kind.shape.qk_norm for kind in kinds)


def test_layers_whose_heads_differ():
    by_layer = LLAMA | {"per_layer_config": {"05": {"head_dim": 512}, "11": {"head_dim": 512}}}
    assert [kind.shape.head_dim for kind in model_of_config(by_layer, "x").layers] == [128, 512]
    windowed = LLAMA | {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16}
    assert [(k.shape.heads, k.shape.kv_heads) for k in model_of_config(windowed, "x").layers] == [(32, 8), (64, 16)]
    counted = LLAMA | {"head_dim": 128, "num_attention_heads_per_layer": [32, 48, 32]}
    assert [kind.shape.heads for kind in model_of_config(counted, "x").layers] == [32, 48]


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, 4096),
        ({"sliding_window_size": 512}, 512),
        ({"sliding_window": 0}, None),
        ({"sliding_window": None}, None),
    ],
)
def test_a_window_counts_where_it_is_in_use(more, window):
    assert model_of_config(LLAMA | more, "x").shape.sliding_window == window
