"""Small models of transformers with weights so large that their tokens differ, prompts for them, and their launches."""

from collections import Counter

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, END = 97, 3
SMALL = {"vocab_size": VOCABULARY, "eos_token_id": END, "bos_token_id": 1}
OF_GPT2 = SMALL | {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 300}
OF_LLAMA = SMALL | {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 300, "head_dim": 16,
}  # fmt: skip
OF_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, OF_GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, OF_LLAMA | {"rope_parameters": LLAMA3}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, OF_LLAMA | {"tie_word_embeddings": True}),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, OF_LLAMA | OF_EXPERTS),
}
# What the three above do not have.
VARIANTS = {
    "gpt2, heads of 5": (GPT2LMHeadModel, GPT2Config, OF_GPT2 | {"n_embd": 15}),
    "gpt2, its own head and inner": (
        GPT2LMHeadModel, GPT2Config, OF_GPT2 | {"tie_word_embeddings": False, "n_inner": 50}
    ),
    "llama, tied, one key head": (
        LlamaForCausalLM, LlamaConfig, OF_LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "llama, linear, biased": (
        LlamaForCausalLM, LlamaConfig, OF_LLAMA | {"rope_parameters": LINEAR, "attention_bias": True}
    ),
    "llama, a key head for each, heads of 12": (
        LlamaForCausalLM, LlamaConfig, OF_LLAMA | {"num_key_value_heads": 4, "head_dim": None}
    ),
    "llama, one layer": (LlamaForCausalLM, LlamaConfig, OF_LLAMA | {"num_hidden_layers": 1}),
    "qwen3, its own head, wide heads": (Qwen3ForCausalLM, Qwen3Config, OF_LLAMA | {"head_dim": 32}),
}  # fmt: skip


def save(name, folder):
    """Make a model of ``MODELS`` or ``VARIANTS``, save it in a folder, and return it."""
    kind, config, sizes = (MODELS | VARIANTS)[name]
    torch.manual_seed(5)
    model = kind(config(**sizes)).eval()
    if kind is Qwen3MoeForCausalLM:
        model.set_experts_implementation("eager")  # the default has no float64
    draw_weights(model, 0.25)
    model.save_pretrained(folder)
    return model


def draw_weights(model, std):
    """Draw matrices with a deviation, weights of norms around 1, and biases around 0."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=std)
            else:
                weight.normal_(0 if name.endswith("bias") else 1, 0.1)


def ids_of(*lengths, seed=0):
    """Return prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def counts_of(trace):
    """How often a trace launches each kernel."""
    counts = Counter()
    for (kernel, _), count in trace.launches.items():
        counts[kernel] += count
    return dict(counts)
