"""Small models for the engine's tests on GPUs."""

import torch

# Of Llama and Qwen3, beside a vocabulary.
OF_LLAMA = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 64,
}  # fmt: skip


def save(kind, config, folder):
    """Save a model with weights that are the same in each run, and return it."""
    torch.manual_seed(5)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.08) if weight.dim() > 1 else weight.normal_(1, 0.1)
    model.save_pretrained(folder)
    return model
