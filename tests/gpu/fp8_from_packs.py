"""``python fp8_from_packs.py PRESET``: a training step of two layers of a preset by 8-bit floats.

It prints launches, fallbacks and misses of the kernels of 8-bit floats that were asked for, as JSON.
"""

import json
import sys

import torch

import tilekern
from benchmarks.models import make_model
from tilekern.tuning.plan.configs import config_named


def counts(preset, tokens=4096, device="cuda"):
    tilekern.apply(fp8=True)
    model = make_model(config_named(preset)[1], layers=2, attention="tilekern", device=device)
    ids = torch.randint(0, 1000, (1, tokens), device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)
    names = ("launches", "fallbacks", "misses")
    found = {kernel: [n[name] for name in names] for kernel, n in tilekern.stats().items() if kernel.startswith("fp8")}
    return {kernel: numbers for kernel, numbers in found.items() if any(numbers)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(counts(sys.argv[1])) + "\n")
