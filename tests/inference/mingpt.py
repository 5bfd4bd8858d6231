"""GPT-2 as minGPT names its parts: blocks with norms before, learned positions, gelu by tanh, and a head of its own."""

import math

import torch
from torch import nn

# By minGPT's names of models: layers, heads and width.
SIZES = {
    "nano": (3, 3, 48),
    "tile-small": (4, 4, 64),
    "micro": (4, 4, 128),
    "tile-medium": (6, 4, 128),
    "mini": (6, 6, 192),
    "tile-large": (8, 8, 256),
    "gpt2": (12, 12, 768),
}


class Attention(nn.Module):
    """Causal attention; the mask is a buffer, which a state dict contains."""

    def __init__(self, heads: int, width: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.ones(positions, positions).tril()[None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, width = x.shape[-2:]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).split(width, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        masked = scores.masked_fill(self.bias[:, :, :count, :count] == 0, -math.inf)
        return self.c_proj((masked.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, heads: int, width: int, positions: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(heads, width, positions)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        inner = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](inner)


class MinGPT(nn.Module):
    """The logits of ids [batch, tokens]."""

    def __init__(self, size: str, vocabulary: int, positions: int) -> None:
        super().__init__()
        layers, heads, width = SIZES[size]
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocabulary, width),
            "wpe": nn.Embedding(positions, width),
            "h": nn.ModuleList(Block(heads, width, positions) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[-1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of transformers' GPT-2 as minGPT's, which stores the weights of products as [out, in]."""
    products = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    return {name: tensor.T.contiguous() if name.endswith(products) else tensor for name, tensor in tensors.items()}
