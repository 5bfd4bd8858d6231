"""Models of a known shape with random bf16 weights, made where they are trained."""

from __future__ import annotations

from typing import Any


def make_model(config: Any, layers: int = 0, attention: str = "sdpa", device: str = "cuda") -> Any:
    """A causal language model of these sizes in training mode, which keeps no cache of keys and values.

    Args:
        config: the configuration, of which the sizes count; the head has a weight of its own.
        layers: number of layers, 0 for as many as the configuration has.
        attention: transformers' name of the attention implementation.
        device: where the weights are made; none of them passes through another device.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(
        config.model_type, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=layers or config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(made, attn_implementation=attention).train()
    finally:
        torch.set_default_dtype(before)
