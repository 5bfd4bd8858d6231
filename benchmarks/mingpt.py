"""GPT-2 as minGPT names its parts: blocks with norms before, learned positions, gelu by tanh, and a head of its own.

The tests compare the engine's logits with it, and the benchmarks its speed: with minGPT's attention, whose scores are
in memory, and with SDPA; whole sequences, and one token after the other with a cache of fixed size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
Way = Literal["eager", "sdpa"]
_PRODUCTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@dataclass(frozen=True)
class Room:
    """A layer's part of a cache: keys and values [batch, heads, context, head_dim].

    ``position`` [1] is that of the new token, and ``mask`` [1, 1, 1, context] is true up to it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor


class Attention(nn.Module):
    """Causal attention; the mask is a buffer, which a state dict contains."""

    def __init__(self, heads: int, width: int, positions: int, way: Way) -> None:
        super().__init__()
        self.heads, self.way = heads, way
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.ones(positions, positions).tril()[None, None])

    def forward(self, x: torch.Tensor, room: Room | None = None) -> torch.Tensor:
        """Return the attention of x [batch, tokens, width]; with ``room`` that of one token to all before it."""
        width = x.shape[-1]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).split(width, -1))
        if room is not None:
            room.keys.index_copy_(2, room.position, k)
            room.values.index_copy_(2, room.position, v)
            out = nn.functional.scaled_dot_product_attention(q, room.keys, room.values, attn_mask=room.mask)
        elif self.way == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            count = x.shape[-2]
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            masked = scores.masked_fill(self.bias[:, :, :count, :count] == 0, -math.inf)
            out = masked.softmax(-1) @ v
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, heads: int, width: int, positions: int, way: Way) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(heads, width, positions, way)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: torch.Tensor, room: Room | None = None) -> torch.Tensor:
        """Return the residual stream after the block."""
        x = x + self.attn(self.ln_1(x), room)
        inner = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](inner)


class MinGPT(nn.Module):
    """The logits of ids [batch, tokens]."""

    def __init__(
        self, size: str | tuple[int, int, int], vocabulary: int, positions: int, way: Way = "eager"
    ) -> None:  # fmt: skip
        """Make a model of one of :data:`SIZES`, or of layers, heads and width."""
        super().__init__()
        layers, heads, width = SIZES[size] if isinstance(size, str) else size
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocabulary, width),
            "wpe": nn.Embedding(positions, width),
            "h": nn.ModuleList(Block(heads, width, positions, way) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, tokens, vocabulary]."""
        return self._logits(ids, torch.arange(ids.shape[-1], device=ids.device), [None] * len(self.transformer["h"]))

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, rooms: list[Room | None]) -> torch.Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](positions)
        for block, room in zip(parts["h"], rooms, strict=True):
            x = block(x, room)
        return self.lm_head(parts["ln_f"](x))


class Decoding:
    """Sequences with a cache of fixed size, of which each step takes the likeliest next token.

    Attributes:
        ids: [batch, 1], the tokens that a step takes, and then those that it chose.
        position: [1], where they are in their sequences.
    """

    def __init__(self, model: MinGPT, batch: int, context: int) -> None:
        weight, blocks = model.lm_head.weight, model.transformer["h"]
        heads, width = blocks[0].attn.heads, weight.shape[1]
        device, dtype = weight.device, weight.dtype
        self._model = model
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(context, device=device)
        shape = len(blocks), 2, batch, heads, context, width // heads
        self._caches = torch.zeros(shape, dtype=dtype, device=device)

    def step(self) -> None:
        """Take the tokens into the cache, choose the next ones, and advance."""
        mask = (self._places <= self.position)[None, None, None]
        rooms: list[Room | None] = [Room(keys, values, self.position, mask) for keys, values in self._caches]
        self.ids.copy_(self._model._logits(self.ids, self.position, rooms).argmax(-1))
        self.position.add_(1)


def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of transformers' GPT-2 as minGPT's, which stores the weights of products as [out, in].

    The same turns minGPT's into transformers'.
    """
    return {name: tensor.T.contiguous() if name.endswith(_PRODUCTS) else tensor for name, tensor in tensors.items()}
