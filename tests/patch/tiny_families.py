"""A model of each family, small enough for a test, with sizes that no tile divides; of some with images, too."""

import inspect
from copy import deepcopy
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "attn_implementation": "eager",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    "attention_dropout": 0.0, "residual_dropout": 0.0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_shared_experts": 1, "output_router_logits": True,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "num_key_value_heads": 3, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# A layer of linear attention and one of the usual, of which the rotation turns a part of each head.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
# A layer that sees a few tokens and one that sees all, of which some families rotate the first one's heads alone.
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
DROPOUTS = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
# The part of a multimodal model that is not tested here.
VISION = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "embed_dim": 16, "out_hidden_size": 24, "num_heads": 2,
    "num_attention_heads": 2, "intermediate_size": 20, "image_size": 28, "patch_size": 14,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}


def _seeing(**text):
    return {"text_config": SIZES | text, "vision_config": VISION, "image_token_id": 60, "video_token_id": 59}


# What a family needs beside the sizes.
OWN: dict[str, dict] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "axk1", "dots1"), EXPERTS | LATENT),
    **dict.fromkeys(("hy_v3", "solar_open"), EXPERTS),
    **dict.fromkeys(("afmoe", "exaone_moe", "laguna"), EXPERTS | WINDOWED),
    "exaone4": WINDOWED,
    "flint": EXPERTS | WINDOWED | {"mlp_only_layers": [1]},
    "glm4_moe": EXPERTS | {"use_qk_norm": True},
    "mellum": EXPERTS | {"mlp_layer_types": ["sparse", "dense"]},
    "qwen2_moe": EXPERTS | {"mlp_only_layers": [1], "shared_expert_intermediate_size": 20},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1]},
    # transformers 5.0.0 takes hidden states of it for the router's logits.
    "qwen3_next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 20, "output_router_logits": False},
    "qwen3_5": LINEAR | MROPE | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": EXPERTS | LINEAR | MROPE | {
        "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 20,
    },
    "llama4": EXPERTS | {
        "model_type": "llama4_text", "intermediate_size_mlp": 20, "moe_layers": [1], "no_rope_layers": [1, 0],
        "output_router_logits": False,
    },
    # The last layer takes the keys of the second.
    "gemma4": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1, "final_logit_softcapping": 20.0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "falcon_h1": {
        "mamba_d_ssm": 24, "mamba_n_heads": 6, "mamba_d_head": 4, "mamba_d_state": 6, "mamba_chunk_size": 4,
        "mlp_multipliers": [0.7, 1.3], "lm_head_multiplier": 0.6,
    },
    "bloom": {"n_head": 3, "n_layer": 2},
    "apertus1p5": {"model_type": "apertus1p5_text"},
    "bailing_hybrid": EXPERTS | LATENT | {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {
        "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_chunk_size": 4, "attn_layer_indices": [1],
    },
    "cohere2_moe": EXPERTS | WINDOWED | {"mlp_layer_types": ["dense", "sparse"]},
    "phi4_multimodal": {
        "vision_config": VISION | {"crop_size": 28},
        "audio_config": {"hidden_size": 16, "intermediate_size": 20, "num_blocks": 1, "num_attention_heads": 2,
                         "nemo_conv_channels": 4, "ext_pw_out_channel": 16},
    },
    "codegen": DROPOUTS | {"num_attention_heads": 4, "rotary_dim": 4},
    "falcon_mamba": {"state_size": 4},
    "gemma3n": {
        "model_type": "gemma3n_text", "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61,
        "num_kv_shared_layers": 0, "layer_types": WINDOWED["layer_types"], "laurel_rank": 4, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text", "num_kv_shared_layers": 0, "layer_types": WINDOWED["layer_types"],
    },
    "glm_moe_dsa": EXPERTS | LATENT | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "kimi_linear": EXPERTS | LATENT | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm3": {"layer_types": ["full_attention", "conv"]},
    "mimo_v2_flash": EXPERTS | {"layer_types": ["full_attention", "full_attention"], "v_head_dim": 8},
    "mistral4": EXPERTS | LATENT | {"qk_head_dim": 14, "head_dim": 14},
    "olmo_hybrid": LINEAR,
    "zaya": EXPERTS | {"num_experts_per_tok": 1},
    **dict.fromkeys(("lara_mini", "nemotron_h"), EXPERTS),
    "longcat_flash": EXPERTS | LATENT,
    "aria": {"model_type": "aria_text"},
    "deepseek_v32": EXPERTS | LATENT | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3": WINDOWED | {"model_type": "gemma3_text"},
    "granitemoehybrid": {
        "mamba_n_heads": 6, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 20,
        "position_embedding_type": "rope",
    },
    "jamba": EXPERTS | {
        "attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    **dict.fromkeys(("granitemoe", "gpt_oss", "olmoe"), EXPERTS),
    "cohere": {"use_qk_norm": True},
    "stablelm": {"qk_layernorm": True},
    "granitemoeshared": {"shared_intermediate_size": 20},
    "granitemoe_swa": {"shared_intermediate_size": 20},
    "minicpm3": LATENT,
    "mixtral": EXPERTS,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl", "hunyuan_vl"), _seeing(**MROPE)),
    "qwen3_vl_moe": _seeing(**EXPERTS | MROPE | {"mlp_only_layers": [1]}),
    "glm4v_moe": _seeing(**EXPERTS | {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 0]}}),
    "ernie4_5_vl_moe": _seeing(**EXPERTS | MROPE | {"moe_intermediate_size": [20, 20]}),
    "mllama": _seeing(cross_attention_layers=[]),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), DROPOUTS),
    "gptj": DROPOUTS | {"rotary_dim": 4},
    "phi": DROPOUTS | {
        "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "falcon": {"hidden_dropout": 0.0, "head_dim": None},
    "gpt_neo": {
        "num_layers": 2, "num_heads": 3, "attention_types": [[["global", "local"], 1]], "resid_dropout": 0.0,
        "embed_dropout": 0.0,
    },
    "mpt": {"d_model": 24, "n_layers": 2, "n_heads": 4},
    "opt": {"dropout": 0.0, "word_embed_proj_dim": 24, "ffn_dim": 36},
    "xglm": {
        "d_model": 24, "ffn_dim": 36, "num_layers": 2, "attention_heads": 3, "dropout": 0.0, "layerdrop": 0.0,
        "activation_dropout": 0.0,
    },
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0},
    "phimoe": EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    **dict.fromkeys(
        ("idefics3", "aya_vision", "llava_next", "got_ocr2"),
        _seeing(model_type="llama"),
    ),
}  # fmt: skip
IDS = torch.randint(3, 55, (2, 7), generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(5))
# Of 4 by 2 patches each, two frames in each patch.
PATCHES = {
    "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5)),
    "image_grid_thw": torch.tensor([[1, 4, 2]] * 2),
}
TOWER = {
    "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def _towers(text, tower, text_more=(), **vision):
    """The configuration of a text model of one type with a tower of another."""
    return {
        "text_config": SIZES | {"model_type": text} | dict(text_more),
        "vision_config": TOWER | {"model_type": tower} | vision,
        "image_token_id": 60, "image_token_index": 60, "vision_feature_layer": -1,
    }  # fmt: skip


def _grids(text_more=(), **vision):
    """The configuration of a family that takes grids of patches."""
    return {
        "text_config": SIZES | MROPE | dict(text_more), "vision_config": VISION | vision, "image_token_id": 60,
        "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57, "image_start_token_id": 58,
        "image_end_token_id": 57,
    }  # fmt: skip


class Seen(NamedTuple):
    """How a model is made that is given images.

    Attributes:
        config: of a model of the type ``model_type``, or of the name under which it is listed.
        tokens: how many tokens each image takes.
        inputs: the forward's other arguments.
        without: ops of its families that such a model does not run.
    """

    config: dict
    tokens: int
    inputs: dict
    model_type: str = ""
    without: tuple[str, ...] = ()


PIXELS = {"pixel_values": IMAGES}
# Of each of 4 by 4 patches its column and its row.
PLACES = torch.tensor([[[x, y] for y in range(4) for x in range(4)]] * 2)
SIZED = PIXELS | {"image_sizes": torch.tensor([[28, 28]] * 2)}
SEEING = {
    "llava": Seen(_towers("llama", "clip_vision_model"), 4, PIXELS),
    "pixtral": Seen(
        _towers("mistral", "pixtral", head_dim=8) | {"vision_feature_select_strategy": "full"}, 4, SIZED, "llava"
    ),
    "mistral3": Seen(_towers("mistral", "pixtral", head_dim=8) | {"spatial_merge_size": 2}, 1, SIZED),
    "paligemma": Seen(
        _towers("gemma", "siglip_vision_model", projection_dim=24) | {"projection_dim": 24}, 4, PIXELS
    ),
    "clip": Seen(_towers("llama", "clip_vision_model", hidden_act="gelu"), 4, PIXELS, "llava"),
    "siglip": Seen(_towers("gemma3_text", "siglip_vision_model") | {"mm_tokens_per_image": 4}, 4, PIXELS, "gemma3"),
    "llava_next": Seen(
        _towers("llama", "clip_vision_model") | {"image_grid_pinpoints": [[28, 28]]},
        10, {"pixel_values": torch.stack((IMAGES, IMAGES), 1), "image_sizes": SIZED["image_sizes"]},
    ),
    "aya_vision": Seen(_towers("cohere2", "siglip_vision_model") | {"downsample_factor": 2}, 1, PIXELS),
    "gemma3": Seen(_towers("gemma3_text", "siglip_vision_model") | {"mm_tokens_per_image": 4}, 4, PIXELS),
    "internvl": Seen(
        _towers("qwen2", "internvl_vision", image_size=[28, 28], patch_size=[14, 14], use_qk_norm=True), 1, PIXELS
    ),
    "smolvlm": Seen(
        _towers("llama", "smolvlm_vision") | {"scale_factor": 2}, 1, {"pixel_values": IMAGES[:, None]}
    ),
    "idefics3": Seen(
        _towers("llama", "idefics3_vision") | {"scale_factor": 2}, 1, {"pixel_values": IMAGES[:, None]}
    ),
    "mllama": Seen(
        _towers(
            "mllama_text_model", "mllama_vision_model", {"cross_attention_layers": [1]}, num_global_layers=1,
            attention_heads=2, vision_output_dim=32, intermediate_layers_indices=[0], max_num_tiles=1,
            supported_aspect_ratios=[[1, 1]],
        ),
        1,
        {
            "pixel_values": IMAGES[:, None, None], "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        },
    ),
    "qwen2_vl": Seen(_grids(hidden_size=24), 2, PATCHES),
    "qwen2_5_vl": Seen(_grids(fullatt_block_indexes=[0]), 2, PATCHES),
    "qwen3_vl": Seen(_grids(), 2, PATCHES),
    "qwen3_5": Seen(_grids(LINEAR), 2, PATCHES),
    "qwen3_vl_moe": Seen(_grids(EXPERTS | {"mlp_only_layers": [1]}), 2, PATCHES),
    "qwen3_5_moe": Seen(_grids(EXPERTS | LINEAR | {"shared_expert_intermediate_size": 20}), 2, PATCHES),
    "glm4v": Seen(_grids(), 2, PATCHES),
    "glm4v_moe": Seen(_grids(OWN["glm4v_moe"]["text_config"]), 2, PATCHES),
    "hunyuan_vl": Seen(
        _grids(max_image_size=56, text_hidden_size=24), 6, PATCHES | {"pixel_values": PATCHES["pixel_values"][:, ::2]}
    ),
    "llama4": Seen(
        _towers(
            "llama4_text", "llama4_vision_model", OWN["llama4"], patch_size=7, vision_output_dim=20,
            projector_input_dim=20, projector_output_dim=20, intermediate_size=64,
        ) | {"pad_token_id": 0},
        4, PIXELS, without=("fused_linear_cross_entropy",),
    ),
    "gemma4": Seen(
        _towers(
            "gemma4_text", "gemma4_vision", OWN["gemma4"], head_dim=8, num_key_value_heads=2, patch_size=4,
            pooling_kernel_size=2, position_embedding_size=8,
        ),
        4, {"pixel_values": IMAGES[:, :, :16, :16].reshape(2, 16, 48), "image_position_ids": PLACES},
    ),
}  # fmt: skip


def make(model_type):
    """A model in float32 whose norms are not all ones, tokens [2, some], and its forward's other arguments."""
    if model_type in SEEING and model_type not in OWN:
        return make_seeing(model_type)
    config = _config({"model_type": model_type} | SIZES | OWN.get(model_type, {}))
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    return _made(AutoModelForCausalLM if is_text else AutoModelForImageTextToText, config), IDS, {}


def make_seeing(name):
    """The same of a model that sees images, whose tokens are among the others."""
    seen = SEEING[name]
    config = _config({"model_type": seen.model_type or name} | seen.config)
    model = _made(AutoModelForImageTextToText, config)
    ids = torch.cat((IDS[:, :2], torch.full((2, seen.tokens), 60), IDS[:, 2:]), 1)
    taken = inspect.signature(model.forward).parameters
    kinds = {key: (ids == 60).long() for key in ("token_type_ids", "mm_token_type_ids") if key in taken}
    return model, ids, seen.inputs | kinds


def _config(arguments):
    """A configuration of what is not None; copied, as it writes into what it is given."""
    return AutoConfig.for_model(**deepcopy({name: x for name, x in arguments.items() if x is not None}))


def _made(auto, config):
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model
