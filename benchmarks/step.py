"""Run forward and backward of Qwen3-8B with few layers repeatedly in a fresh process; print the times as JSON.

python -m benchmarks.step PROVIDER LAYERS TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks import models
from tilekern.tuning.plan.configs import config_named

STEPS = 4


def patch(provider: str) -> None:
    """Patch Qwen3 like a user of the provider, before the model is made; ``transformers`` does nothing."""
    if provider == "tilekern":
        import tilekern

        tilekern.apply()
    elif provider == "liger-triton":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    elif provider != "transformers":
        raise SystemExit(f"unknown provider {provider}")


def make_model(layers: int, device: str = "cuda") -> Any:
    """Make Qwen3-8B with fewer layers and random bf16 weights."""
    return models.make_model(config_named("qwen3-8b")[1], layers, device=device)


def main(provider: str, layers: int, tokens: int) -> dict[str, Any]:
    """Print the seconds of each step, including a wait for the GPU, and the loss."""
    import torch

    patch(provider)
    model = make_model(layers)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
    steps_s = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.cuda.synchronize()
        steps_s.append(time.perf_counter() - started)
    return {"steps_s": steps_s, "loss": float(loss)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
