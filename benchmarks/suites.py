"""Choose the cases of a run: the fixed sizes that the targets name, or a model's over a range of token counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.cases import Case, rms_norm_case, rope_case, swiglu_case, training_cases
from benchmarks.fused_cases import (
    attention_case,
    cross_entropy_case,
    fused_add_rms_norm_case,
    fused_linear_cross_entropy_case,
    linear_case,
    qk_norm_rope_case,
)
from benchmarks.suite_cases import SUITE, fixed_suite_cases, sizes_of


def fixed_cases() -> list[Case]:
    """Return the cases of the targets: Llama-3-8B's and Qwen3-8B's sizes, mostly at 8192 tokens."""
    return [
        *training_cases(),
        fused_add_rms_norm_case(8192, 4096),
        qk_norm_rope_case(1, 8192),
        cross_entropy_case(4096, 128256),
        fused_linear_cross_entropy_case(8192, 4096, 128256),
        fused_linear_cross_entropy_case(8192, 4096, 151936),
        attention_case(4, 4096, 32, 32),
        attention_case(1, 8192, 32, 8),
        linear_case(8192, 4096, 14336),
        *fixed_suite_cases(),
    ]


def model_cases(config: Any, tokens: int) -> list[Case]:
    """Return every op of a model's layer and head at one token count, batch 1; one case for each op."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, intermediate, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    cases = [
        rms_norm_case(tokens, hidden),
        swiglu_case(tokens, intermediate),
        rope_case(1, tokens, heads, kv_heads, head_dim),
        fused_add_rms_norm_case(tokens, hidden),
        cross_entropy_case(tokens, vocabulary),
        fused_linear_cross_entropy_case(tokens, hidden, vocabulary),
        attention_case(1, tokens, heads, kv_heads, head_dim),
        linear_case(tokens, hidden, intermediate),
    ]
    if config.model_type == "qwen3":
        cases.insert(4, qk_norm_rope_case(1, tokens, heads, kv_heads, head_dim))
    sizes = sizes_of(config, tokens)
    return [*cases, *(op.case(sizes, "bfloat16") for op in SUITE.values())]


def sweep_cases(config: Any, tokens: Sequence[int], ops: Sequence[str]) -> list[tuple[int, Case]]:
    """Return a model's cases of these ops over token counts, in order, each with its count."""
    return [(count, case) for count in tokens for case in model_cases(config, count) if case.op in ops]
