"""A small model of 8-bit floats whose layers all have one size, so that few kernels are compiled.

``python fp8_training.py [SIDE [plain]]`` trains it for two steps, and prints the losses and what fell back.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import tilekern
import tilekern.fp8

SIDE = 512
SIZES = {
    "vocab_size": 2048, "hidden_size": SIDE, "intermediate_size": SIDE, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
    "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip
LAYERS = 14


def made(dtype=torch.bfloat16, device="cuda", *, converted=True, patched=False, side=SIDE):
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": side, "intermediate_size": side}
    sizes |= {"attn_implementation": "tilekern"} if patched else {}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes)).to(dtype).to(device).train()
    if patched:
        tilekern.apply_to_model(model)
    if converted:
        assert len(tilekern.fp8.convert(model)) == LAYERS
    return model


def ids(device="cuda"):
    """Tokens that can be learnt: each is the one before and a constant."""
    return ((torch.arange(2)[:, None] * 17 + 5 * torch.arange(256)) % 2048).to(device)


def loss_of(model):
    tokens = ids(next(model.parameters()).device)
    return model(input_ids=tokens, labels=tokens).loss


def step(model, scale=1.0):
    """The loss, and each gradient of the loss times ``scale``."""
    model.zero_grad()
    loss = loss_of(model)
    (loss * scale).backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters())]


def losses(model, steps=2):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        found.append(float(step(model)[0]))
        optimizer.step()
    return found


def fallbacks():
    return {
        kernel: n["fallbacks"] for kernel, n in tilekern.stats().items() if kernel.startswith("fp8") and n["fallbacks"]
    }


if __name__ == "__main__":
    side, *plain = sys.argv[1:] or (SIDE,)
    found = losses(made(side=int(side), converted=not plain))
    sys.stdout.write(json.dumps({"losses": found, "fallbacks": fallbacks()}) + "\n")
