"""A small Qwen3 on the GPU, the text that it learns, and how it is run with patches and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilekern

TEXT = Path(__file__).parent / "data" / "harbour.txt"
CONFIG = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 256,
}  # fmt: skip
ROWS, TOKENS = 4, 512
LEARNING_RATE = 5e-4


def make(attention: str) -> Any:
    """The model with always the same bfloat16 weights and float32 frequencies, as ``from_pretrained`` makes one."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**CONFIG, max_position_embeddings=TOKENS, use_cache=False, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()


def batches(count: int) -> torch.Tensor:
    """[count, ROWS, TOKENS]: the bytes of the text from random places on, always the same ones."""
    data = torch.tensor(list(TEXT.read_bytes()))
    starts = torch.randint(len(data) - TOKENS, (count, ROWS, 1), generator=torch.Generator().manual_seed(2))
    return data[starts + torch.arange(TOKENS)].cuda()


@dataclass(frozen=True)
class Order:
    """A choice of nothing but the order in which sums are taken.

    ``attention`` picks the library's attention, whose tiles differ (SDPA's formula where it does not serve); ``rows``
    is the order of the batch's rows, over which weights' gradients are summed; ``split`` lets matrix products add
    partial sums that are rounded to bfloat16, which is torch's default.
    """

    attention: SDPBackend
    rows: tuple[int, ...]
    split: bool = True

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """The order holds inside."""
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_bf16_reduced_precision_reduction
        matmul.allow_bf16_reduced_precision_reduction = self.split
        try:
            with sdpa_kernel([self.attention, SDPBackend.MATH], set_priority=True):
                yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = before


USUAL = Order(SDPBackend.FLASH_ATTENTION, (0, 1, 2, 3))
ORDERS = (
    USUAL,
    Order(SDPBackend.CUDNN_ATTENTION, (3, 2, 1, 0)),
    Order(SDPBackend.FLASH_ATTENTION, (2, 0, 3, 1), split=False),
    Order(SDPBackend.EFFICIENT_ATTENTION, (1, 3, 0, 2)),
    Order(SDPBackend.MATH, (0, 2, 1, 3)),
    Order(SDPBackend.CUDNN_ATTENTION, (1, 0, 3, 2), split=False),
)


@contextmanager
def patched() -> Iterator[None]:
    """All patches hold inside."""
    tilekern.apply()
    try:
        yield
    finally:
        tilekern.reset()


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each byte from those before it."""
    return model(input_ids=ids, labels=ids).loss


def curve(
    attention: str, steps: int, order: Order = USUAL, change: Callable[[Any], object] | None = None
) -> torch.Tensor:
    """The losses of all steps of a training, float64 [steps] on the CPU; ``change`` may alter the model before it."""
    model = make(attention)
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)
    losses = []
    with order.chosen():
        for ids in batches(steps):
            loss = loss_of(model, ids[list(order.rows)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def gradients(attention: str, ids: Sequence[torch.Tensor], *, exact: bool = False) -> list[dict[str, torch.Tensor]]:
    """Every parameter's gradient by name for each batch, in float64; ``exact`` computes in float64 too."""
    model = make(attention)
    model = model.double() if exact else model
    found = []
    with USUAL.chosen():
        for batch in ids:
            model.zero_grad()
            loss_of(model, batch).backward()
            found.append({name: p.grad.double() for name, p in model.named_parameters()})
    return found
