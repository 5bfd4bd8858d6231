"""Models of a known shape with random bf16 weights, made where they are trained."""

from __future__ import annotations

from typing import Any

from tilekern.spec import ModelShape


def make_model(shape: ModelShape, layers: int = 0, attention: str = "sdpa", device: str = "cuda") -> Any:
    """A causal language model of these sizes in training mode, which keeps no cache of keys and values.

    Args:
        shape: the sizes; its model type names the family in transformers.
        layers: number of layers, 0 for as many as the shape has.
        attention: transformers' name of the attention implementation.
        device: where the weights are made; none of them passes through another device.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.model_type, vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=layers or shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    finally:
        torch.set_default_dtype(before)
