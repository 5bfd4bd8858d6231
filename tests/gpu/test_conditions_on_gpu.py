"""A model trains alike, patched and as it is, under every condition of CUDA, torch and the environment that is known.

Each condition has a process of its own. At small sizes kernels are compiled where a compiler is; at the widths of
Qwen3-8B the shipped records serve.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conditions import CONDITIONS
from gpu_processes import ended

WORKER = Path(__file__).with_name("conditions.py")
# What fails without our patches too is no failure of theirs. These may; anything else must run.
MAY_FAIL_AS_IT_IS = {"replicas_of_data_parallel", "default_device_meta_in_steps", "warnings_are_errors"}
# Conditions whose kernels depend on the width, or which were seen to fail at real widths alone.
WIDE = [
    "as_usual", "expandable_segments", "expandable_segments_checkpointed", "default_dtype_bfloat16",
    "default_device_cuda", "second_gpu_after_the_first_was_used", "layers_on_two_gpus", "whole_step_captured",
    "layers_compiled", "layers_compiled_to_reduce_overhead", "whole_compiled", "mem_pool", "deterministic_algorithms",
    "out_of_memory_and_on",
]  # fmt: skip


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """A cache that the conditions share, so that each kernel is compiled once."""
    return os.environ.get("TILEKERN_CACHE_DIR") or str(tmp_path_factory.mktemp("kernels"))


def train(name, size, kernels):
    condition = CONDITIONS[name]
    if torch.cuda.device_count() < condition.gpus:
        pytest.skip(f"needs {condition.gpus} GPUs")
    try:
        run = ended(WORKER, name, size, **{"TILEKERN_CACHE_DIR": kernels, **condition.environment})
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{name} did not end within {error.timeout} s")
    lines = [line for line in run.stdout.splitlines() if line.startswith(("OK ", "SKIP ", "FAIL "))]
    assert lines, f"the process ended with {run.returncode}: {run.stderr[-2000:]}"
    said = lines[-1]
    sys.stdout.write(f"{name}, {size}: {said}\n")
    if said.startswith("SKIP") and name in MAY_FAIL_AS_IT_IS:
        pytest.skip(said[5:])
    assert said.startswith("OK"), f"{said}\n{run.stderr[-2000:]}"
    assert run.returncode == 0, f"the process ended with {run.returncode}: {run.stderr[-2000:]}"


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_small_model_trains_alike(name, kernels):
    train(name, "small", kernels)


# Their own steps are captured, or are as many as they say.
OWN_GRAPHS = {name for name in CONDITIONS if "captured" in name or "replayed" in name}


@pytest.mark.parametrize("name", [name for name in CONDITIONS if name not in OWN_GRAPHS])
def test_a_captured_model_trains_alike(name, kernels):
    train(name, "captured", kernels)


@pytest.mark.parametrize("name", WIDE)
def test_a_model_of_real_width_trains_alike(name, kernels):
    train(name, "wide", kernels)
