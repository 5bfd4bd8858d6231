"""Models with shipped records train under the allocator that most trainers ask for, as fast as under torch's own.

``python test_allocators_on_gpu.py PRESET LAYERS`` is the process that trains one, and prints what it saw.
"""

import json
import statistics
import sys
import time

import pytest
from gpu_processes import ended

STEPS, TOKENS = 20, 4096
# Two processes of one kind differ by a percent or two.
SLOWER = 1.05
MODELS = ("qwen3-8b", "llama-3-8b", "gemma-2-9b", "gpt-oss-20b", "qwen3-30b-a3b")
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def train(preset, layers):
    import torch

    import tilekern
    from benchmarks.models import make_model
    from tilekern.tuning.plan.configs import config_named

    tilekern.apply(experts=True)
    _, config = config_named(preset)
    model = make_model(config, layers, "tilekern")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 32000, (1, TOKENS), generator=torch.Generator().manual_seed(1)).cuda()
    losses, seconds = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    fallbacks = {kernel: n["fallbacks"] for kernel, n in tilekern.stats().items() if n["fallbacks"]}
    step_s, peak = statistics.median(seconds[STEPS // 2 :]), torch.cuda.max_memory_allocated()
    said = {"losses": losses, "step_s": step_s, "peak_bytes": peak, "fallbacks": fallbacks}
    sys.stdout.write(json.dumps(said) + "\n")


def in_process(preset, layers, **environment):
    run = ended(__file__, preset, str(layers), **environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("preset", MODELS)
def test_expandable_segments_cost_nothing(preset):
    usual, expandable = (in_process(preset, 2, **environment) for environment in ({}, EXPANDABLE))
    speeds = [TOKENS / run["step_s"] for run in (usual, expandable)]
    sys.stdout.write(f"{preset}: {speeds[0]:.0f} tokens/s, {speeds[1]:.0f} in expandable segments\n")
    assert expandable["losses"] == usual["losses"]
    assert expandable["losses"][-1] < expandable["losses"][0]
    assert not expandable["fallbacks"]
    assert expandable["step_s"] < SLOWER * usual["step_s"]


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
