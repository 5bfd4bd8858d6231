"""A model of each family, small enough for a test, with sizes that no tile divides."""

from copy import deepcopy

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
    **dict.fromkeys(("glm4_moe", "hy_v3", "laguna", "solar_open"), EXPERTS),
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
    "gemma4": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61,
        "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 20.0,
    },
    "falcon_h1": {
        "mamba_d_ssm": 24, "mamba_n_heads": 6, "mamba_d_head": 4, "mamba_d_state": 6, "mamba_chunk_size": 4,
        "mlp_multipliers": [0.7, 1.3], "lm_head_multiplier": 0.6,
    },
    "bloom": {"n_head": 3, "n_layer": 2},
    "aria": {"model_type": "aria_text"},
    "deepseek_v32": EXPERTS | LATENT | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3": {"model_type": "gemma3_text"},
    "granitemoehybrid": {
        "mamba_n_heads": 6, "layer_types": ["attention", "attention"], "shared_intermediate_size": 20,
        "position_embedding_type": "rope",
    },
    "jamba": EXPERTS | {
        "attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "lfm2_moe": EXPERTS | {"layer_types": ["full_attention", "conv"]},
    "granitemoeshared": {"shared_intermediate_size": 20},
    "granitemoe_swa": {"shared_intermediate_size": 20},
    "minicpm3": LATENT,
    "mixtral": EXPERTS,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl", "hunyuan_vl"), _seeing(**MROPE)),
    "qwen3_vl_moe": _seeing(**EXPERTS | MROPE | {"mlp_only_layers": [1]}),
    "glm4v_moe": _seeing(**EXPERTS | {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 0]}}),
    "ernie4_5_vl_moe": _seeing(**EXPERTS | MROPE | {"moe_intermediate_size": [20, 20]}),
    "mllama": _seeing(cross_attention_layers=[]),
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0},
    "phimoe": EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    **dict.fromkeys(
        ("llava", "internvl", "mistral3", "smolvlm", "idefics3", "aya_vision", "llava_next", "got_ocr2"),
        _seeing(model_type="llama"),
    ),
}  # fmt: skip
IDS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(3))


def make(model_type):
    """A model in float32 whose norms are not all ones."""
    torch.manual_seed(0)
    # Copied, as configurations write into what they are given.
    config = AutoConfig.for_model(**{"model_type": model_type} | deepcopy(SIZES | OWN.get(model_type, {})))
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model
