"""Trainings of small models with experts: with all patches, and as transformers has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern

EXPERTS, CHOICES, LAYERS = 8, 2, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": EXPERTS, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, its batches and its training."""

    vocabulary: int = 61
    hidden: int = 32
    sequences: int = 2
    tokens: int = 12
    steps: int = 8
    learning_rate: float = 0.1
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def _model(family: str, sizes: Sizes, attention: str) -> Any:
    config = AutoConfig.for_model(
        family, hidden_size=sizes.hidden, intermediate_size=sizes.hidden, moe_intermediate_size=sizes.hidden,
        num_attention_heads=4, num_key_value_heads=2, head_dim=sizes.hidden // 4, num_hidden_layers=LAYERS,
        num_experts_per_tok=CHOICES, vocab_size=sizes.vocabulary, max_position_embeddings=sizes.tokens,
        sliding_window=sizes.tokens // 2, initializer_range=sizes.hidden**-0.5, use_cache=False, pad_token_id=0,
        **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.to(sizes.device, sizes.dtype).train()


def batches(sizes: Sizes) -> torch.Tensor:
    """Ids [steps, sequences, tokens], each of which follows from the one before; always the same ones."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(sizes.vocabulary, (sizes.steps, sizes.sequences, 1), generator=generator)
    return ((start + 7 * torch.arange(sizes.tokens)) % sizes.vocabulary).to(sizes.device)


def curve(
    family: str, experts: str, sizes: Sizes, attention: str = "eager", order: Sequence[int] | None = None
) -> torch.Tensor:
    """The losses of a training, float64 [steps] on the CPU; always from the same weights, on the same batches.

    Args:
        family: of :data:`FAMILIES`.
        experts: transformers' name of the implementation of experts; with ``tilekern`` all patches hold.
        sizes: of the model and its training.
        attention: transformers' name of the attention.
        order: of a batch's sequences, in which sums over them are taken.
    """
    model = _model(family, sizes, attention)
    if experts == "tilekern":
        tilekern.apply_to_model(model, experts=True)
    else:
        model.set_experts_implementation(experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=sizes.learning_rate, momentum=0.9)
    losses = []
    for ids in batches(sizes):
        rows = ids if order is None else ids[list(order)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double().cpu())
    tilekern.reset()
    return torch.stack(losses)
