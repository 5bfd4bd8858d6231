"""Programs of transformers, TRL, peft, accelerate and torch train alike, patched and as they are."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from gpu_processes import ended
from gpu_tolerances import OF_LOSSES
from programs import PROGRAMS

from tilekern.compile.toolchain import toolkit

WORKER = Path(__file__).with_name("programs.py")


def result_of(name, how):
    """The last line that a program prints."""
    program = PROGRAMS[name]
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={program.ranks}"]
    one_gpu = {"CUDA_VISIBLE_DEVICES": "0"} if program.gpus == 1 else {}
    run = ended(WORKER, name, how, start=ranks if program.ranks > 1 else (), HF_HUB_OFFLINE="1", **one_gpu)
    said = [line for line in run.stdout.splitlines() if line.startswith('{"losses"')]
    assert run.returncode == 0, f"{name} {how} ended with {run.returncode}: {run.stderr[-2500:]}"
    return json.loads(said[-1])


@pytest.mark.parametrize("how", ["patched", "captured"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_alike(name, how):
    if torch.cuda.device_count() < PROGRAMS[name].gpus:
        pytest.skip(f"needs {PROGRAMS[name].gpus} GPUs")
    mine, theirs = result_of(name, how), result_of(name, "plain")
    fallbacks = {kernel: each["fallbacks"] for kernel, each in mine["counted"].items() if each["fallbacks"]}
    sys.stdout.write(
        f"{name}: {mine['losses']}, as it is {theirs['losses']}, fell back: {fallbacks}, graphs: {mine['graphs']}\n"
    )
    assert len(mine["losses"]) == len(theirs["losses"]) > 0
    assert all(map(math.isfinite, mine["losses"]))
    # A machine without a compiler has the records of the packs, and falls back where these do not reach.
    if toolkit() is not None:
        assert set(fallbacks) <= set(PROGRAMS[name].may_fall_back)
    assert mine["counted"]["rms_norm_forward"]["launches"] + mine["counted"]["fused_add_rms_norm_forward"]["launches"]
    if not PROGRAMS[name].draws:
        pairs = zip(mine["losses"], theirs["losses"], strict=True)
        assert all(abs(a - b) <= OF_LOSSES * max(1, abs(b)) for a, b in pairs), (mine["losses"], theirs["losses"])
