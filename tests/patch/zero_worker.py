"""One of two ranks that train a tiny Qwen3 by DeepSpeed's ZeRO-3, with parts of each parameter on each.

    python zero_worker.py MEET RANK COUNT HOW

HOW has words: ``patched``, and ``leaf`` if a layer is gathered at once. The last line is a JSON document.
"""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from tiny_qwen3 import make

import tilekern
from tilekern.runtime.dispatch import counters

MEET, RANK, COUNT, HOW = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split()
STEPS = 3


def main():
    dist.init_process_group("gloo", init_method=MEET, rank=RANK, world_size=COUNT)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    if "patched" in HOW:
        tilekern.apply(model_type="qwen3")
    model = make(attention="tilekern" if "patched" in HOW else "eager").train()
    kind = type(model.model.layers[0])
    sharing = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if "leaf" in HOW:
        sharing["leaf_module"] = {"classes": [f"{kind.__module__}.{kind.__qualname__}"]}
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": sharing, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    torch.manual_seed(RANK)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, 331, (2, 9))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [safe_get_full_fp32_param(p).norm().item() for p in model.parameters()]
    whole = sum(tilekern.report(model).whole.values()) if "patched" in HOW else 0
    fused = counters("fused_linear_cross_entropy").launches
    found = {"losses": losses, "weights": weights, "whole": whole, "fused": fused}
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    dist.destroy_process_group()


main()
