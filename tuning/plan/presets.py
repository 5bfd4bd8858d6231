"""Models known by name without a network: the sizes of their published configurations."""

from __future__ import annotations

from typing import Any


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return _sizes(
        "qwen3", hidden, intermediate, layers, (heads, 8), 151936, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=40960, rope_theta=1e6,
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


_GEMMA_2 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA_3 = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
_LLAMA_3_2_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_2 = {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": _LLAMA_3_2_ROPE}
_QWEN_2_5 = (3584, 18944, 28, (28, 4), 152064)
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True}
_QWEN_3_MOE = {
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "llama-3-8b": _sizes("llama", 4096, 14336, 32, (32, 8), 128256, max_position_embeddings=8192, rope_theta=5e5),
    "llama-3.2-1b": _sizes("llama", 2048, 8192, 16, (32, 8), 128256, max_position_embeddings=131072, **_LLAMA_3_2),
    "qwen2.5-7b": _sizes("qwen2", *_QWEN_2_5, rope_theta=1e6),
    "gemma-2-9b": _sizes("gemma2", 3584, 14336, 42, (16, 8), 256000, **_GEMMA_2),
    "mistral-7b": _sizes("mistral", 4096, 14336, 32, (32, 8), 32768, sliding_window=None, rope_theta=1e6),
    "gemma-3-1b": _sizes("gemma3_text", 1152, 6912, 26, (4, 1), 262144, sliding_window=512, **_GEMMA_3),
    "gemma-3-12b": _sizes("gemma3_text", 3840, 15360, 48, (16, 8), 262208, sliding_window=1024, **_GEMMA_3),
    "phi-4": _sizes("phi3", 5120, 17920, 40, (40, 10), 100352, pad_token_id=100349, rope_theta=2.5e5),
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "text_config": _sizes("qwen2_5_vl_text", *_QWEN_2_5, rope_parameters=_MROPE),
        "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584},
        "tie_word_embeddings": False,
    },
    "olmo-2-7b": _sizes("olmo2", 4096, 11008, 32, (32, 32), 100352, rope_theta=5e5),
    "gpt-oss-20b": _sizes("gpt_oss", 2880, 2880, 24, (64, 8), 201088, num_local_experts=32, **_GPT_OSS),
    "qwen3-30b-a3b": _sizes("qwen3_moe", 2048, 6144, 48, (32, 4), 151936, **_QWEN_3_MOE),
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
