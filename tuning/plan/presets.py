"""Models known by name without a network: the sizes of their published configurations."""

from __future__ import annotations

from typing import Any


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return _sizes(
        "qwen3", hidden, intermediate, layers, (heads, 8), 151936, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=40960, rope_theta=1e6,
    )  # fmt: skip


def _qwen2(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocabulary: int = 152064, *, tied: bool = False
) -> dict[str, Any]:
    return _sizes("qwen2", hidden, intermediate, layers, heads, vocabulary, tie_word_embeddings=tied, rope_theta=1e6)


def _llama_3(
    hidden: int, intermediate: int, layers: int, heads: int, *, factor: float = 32.0, tied: bool = True
) -> dict[str, Any]:
    """Return a size of Llama 3.1 (factor 8) or later, whose rotations are stretched."""
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return _sizes(
        "llama", hidden, intermediate, layers, (heads, 8), 128256, head_dim=64 if hidden == 2048 else 128,
        max_position_embeddings=131072, rope_parameters=rope, tie_word_embeddings=tied,
    )  # fmt: skip


def _mistral(
    kind: str, intermediate: int, layers: int, vocabulary: int, hidden: int = 4096, **more: Any
) -> dict[str, Any]:
    own = {"head_dim": 128, "sliding_window": None, "rope_theta": 1e6}
    return _sizes(kind, hidden, intermediate, layers, (32, 8), vocabulary, **own | more)


def _gemma_2(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], head_dim: int = 256
) -> dict[str, Any]:
    return _sizes(
        "gemma2", hidden, intermediate, layers, heads, 256000, head_dim=head_dim, sliding_window=4096,
        query_pre_attn_scalar=256 if head_dim == 256 else hidden // heads[0], attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, tie_word_embeddings=True,
    )  # fmt: skip


def _gemma_3(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocabulary: int = 262208, window: int = 1024,
    head_dim: int = 256,
) -> dict[str, Any]:  # fmt: skip
    """Return a size of Gemma 3; from 4B on it is the text model of one that reads images."""
    return _sizes(
        "gemma3_text", hidden, intermediate, layers, heads, vocabulary, head_dim=head_dim, sliding_window=window,
        query_pre_attn_scalar=256 if head_dim == 256 else hidden // heads[0], tie_word_embeddings=True,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _sizes(
        "gpt_oss", 2880, 2880, layers, (64, 8), 201088, head_dim=64, num_local_experts=experts, num_experts_per_tok=4,
        sliding_window=128, attention_bias=True,
    )  # fmt: skip


def _olmo_2(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return _sizes("olmo2", hidden, intermediate, layers, (heads, heads), 100352, rope_theta=5e5)


def _granite(hidden: int, intermediate: int, head_dim: int, logits_scaling: float) -> dict[str, Any]:
    return _sizes(
        "granite", hidden, intermediate, 40, (32, 8), 49159, tie_word_embeddings=True, embedding_multiplier=12.0,
        attention_multiplier=1 / head_dim, residual_multiplier=0.22, logits_scaling=logits_scaling, rope_theta=1e7,
    )  # fmt: skip


def _qwen3_vl(hidden: int, intermediate: int, vision: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    text = _sizes(
        "qwen3_vl_text", hidden, intermediate, 36, (32, 8), 151936, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=262144, rope_parameters=_INTERLEAVED_MROPE,
    )  # fmt: skip
    own = {"model_type": "qwen3_vl", "out_hidden_size": hidden}
    return {
        "model_type": "qwen3_vl", "text_config": text, "vision_config": own | vision, "tie_word_embeddings": tied,
    }  # fmt: skip


def _qwen3_5(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], value_heads: int, *, tied: bool = False
) -> dict[str, Any]:
    """Return a size of Qwen3.5's text model; ``value_heads``: of its linear attention."""
    return _sizes(
        "qwen3_5_text", hidden, intermediate, layers, heads, 248320, head_dim=256, tie_word_embeddings=tied,
        linear_num_value_heads=value_heads,
    )  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Return a size of GPT-2, without its dropout of 0.1: today it is trained without."""
    return _sizes(
        "gpt2", hidden, 4 * hidden, layers, (heads, heads), 50257, max_position_embeddings=1024,
        tie_word_embeddings=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def _mingpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Return a size of minGPT, whose head has a weight of its own."""
    return _gpt2(layers, hidden, heads) | {"tie_word_embeddings": False}


def _sizes(
    kind: str, hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocabulary: int, **more: Any
) -> dict[str, Any]:
    """Return a configuration of the model type ``kind``; ``heads``: of queries, and of keys and values."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


_QWEN_2_5_7B = (3584, 18944, 28, (28, 4), 152064)
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_INTERLEAVED_MROPE = {
    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True
}  # fmt: skip
_SMALL_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48, "long_factor": [32.0] * 48,
}  # fmt: skip
_QWEN_3_MOE = {
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
_QWEN_3_NEXT = {
    "head_dim": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
_QWEN_3_5_MOE = _QWEN_3_NEXT | {"num_experts": 256, "num_experts_per_tok": 8}
_LLAMA_4 = {"head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1}
_DEEPSEEK_V2 = {
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _sizes("qwen3_moe", 2048, 6144, 48, (32, 4), 151936, **_QWEN_3_MOE),
    "qwen3-next-80b-a3b": _sizes("qwen3_next", 2048, 5120, 48, (16, 2), 151936, **_QWEN_3_NEXT),
    "qwen3-vl-4b": _qwen3_vl(2560, 9728, _SMALL_VISION, tied=True),
    "qwen3-vl-8b": _qwen3_vl(4096, 12288, _LARGE_VISION, tied=False),
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, (16, 4), 32),
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, (24, 4), 48),
    "qwen3.5-35b-a3b": _sizes("qwen3_5_moe_text", 2048, 512, 40, (16, 2), 248320, **_QWEN_3_5_MOE),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, (14, 2), 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, (12, 2), 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, (16, 2), 151936, tied=True),
    "qwen2.5-7b": _qwen2(*_QWEN_2_5_7B),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, (40, 8)),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, (40, 8)),
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "text_config": _sizes("qwen2_5_vl_text", *_QWEN_2_5_7B, rope_parameters=_MROPE),
        "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584},
        "tie_word_embeddings": False,
    },
    "llama-3-8b": _sizes("llama", 4096, 14336, 32, (32, 8), 128256, max_position_embeddings=8192, rope_theta=5e5),
    "llama-3.1-8b": _llama_3(4096, 14336, 32, 32, factor=8.0, tied=False),
    "llama-3.2-1b": _llama_3(2048, 8192, 16, 32),
    "llama-3.2-3b": _llama_3(3072, 8192, 28, 24),
    "llama-3.3-70b": _llama_3(8192, 28672, 80, 64, factor=8.0, tied=False),
    "llama-4-scout": _sizes("llama4_text", 5120, 8192, 48, (40, 8), 202048, **_LLAMA_4),
    "mistral-7b": _mistral("mistral", 14336, 32, 32768),
    "mistral-small-24b": _mistral("mistral", 32768, 40, 131072, hidden=5120, rope_theta=1e8),
    "ministral-8b": _mistral("mistral", 12288, 36, 131072, sliding_window=32768, rope_theta=1e8),
    "mixtral-8x7b": _mistral("mixtral", 14336, 32, 32000, num_local_experts=8, num_experts_per_tok=2),
    "gemma-2-2b": _gemma_2(2304, 9216, 26, (8, 4)),
    "gemma-2-9b": _gemma_2(3584, 14336, 42, (16, 8)),
    "gemma-2-27b": _gemma_2(4608, 36864, 46, (32, 16), head_dim=128),
    "gemma-3-1b": _gemma_3(1152, 6912, 26, (4, 1), 262144, window=512),
    "gemma-3-4b": _gemma_3(2560, 10240, 34, (8, 4)),
    "gemma-3-12b": _gemma_3(3840, 15360, 48, (16, 8)),
    "gemma-3-27b": _gemma_3(5376, 21504, 62, (32, 16), head_dim=128),
    "phi-4": _sizes("phi3", 5120, 17920, 40, (40, 10), 100352, pad_token_id=100349, rope_theta=2.5e5),
    "phi-4-mini": _sizes(
        "phi3",
        3072,
        8192,
        32,
        (24, 8),
        200064,
        tie_word_embeddings=True,
        pad_token_id=199999,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        sliding_window=262144,
        rope_parameters=_LONG,
    ),
    "gpt-oss-20b": _gpt_oss(24, experts=32),
    "gpt-oss-120b": _gpt_oss(36, experts=128),
    "olmo-2-1b": _olmo_2(2048, 8192, 16, 16),
    "olmo-2-7b": _olmo_2(4096, 11008, 32, 32),
    "olmo-2-13b": _olmo_2(5120, 13824, 40, 40),
    "granite-3.3-2b": _granite(2048, 8192, 64, 8.0),
    "granite-3.3-8b": _granite(4096, 12800, 128, 16.0),
    "smollm3-3b": _sizes("smollm3", 2048, 11008, 36, (16, 4), 128256, tie_word_embeddings=True, rope_theta=5e6),
    "glm-4-9b": _sizes("glm4", 4096, 13696, 40, (32, 2), 151552, head_dim=128, attention_bias=True),
    "deepseek-v2-lite": _sizes("deepseek_v2", 2048, 10944, 27, (16, 16), 102400, **_DEEPSEEK_V2),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "mingpt-nano": _mingpt(3, 48, 3),
    "mingpt-tile-small": _mingpt(4, 64, 4),
    "mingpt-micro": _mingpt(4, 128, 4),
    "mingpt-tile-medium": _mingpt(6, 128, 4),
    "mingpt-mini": _mingpt(6, 192, 6),
    "mingpt-tile-large": _mingpt(8, 256, 8),
}
