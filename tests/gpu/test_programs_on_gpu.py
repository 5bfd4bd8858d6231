"""Programs of transformers, TRL, peft, accelerate and torch train alike, patched and as they are."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import PROGRAMS

from tilekern.compile.toolchain import toolkit

WORKER = Path(__file__).with_name("programs.py")
ROOT = WORKER.parents[2]
LIMIT_S = 300
# bfloat16 weights that an optimizer has moved: the orders of sums differ from the first step on.
NEAR = 2e-2


def run(name, how):
    """The last line that a program prints."""
    program = PROGRAMS[name]
    start = (
        []
        if program.ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={program.ranks}"]
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if program.gpus == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *start, str(WORKER), name, how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = [line for line in ended.stdout.splitlines() if line.startswith('{"losses"')]
    assert said, f"{name} {how} ended with {ended.returncode}: {ended.stderr[-2500:]}"
    return json.loads(said[-1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_alike(name):
    if torch.cuda.device_count() < PROGRAMS[name].gpus:
        pytest.skip(f"needs {PROGRAMS[name].gpus} GPUs")
    mine, theirs = run(name, "patched"), run(name, "plain")
    fallbacks = {kernel: each["fallbacks"] for kernel, each in mine["counted"].items() if each["fallbacks"]}
    sys.stdout.write(f"{name}: {mine['losses']}, as it is {theirs['losses']}, fell back: {fallbacks}\n")
    assert len(mine["losses"]) == len(theirs["losses"]) > 0
    assert all(map(math.isfinite, mine["losses"]))
    # A machine without a compiler has the records of the packs, and falls back where these do not reach.
    if toolkit() is not None:
        assert set(fallbacks) <= set(PROGRAMS[name].may_fall_back)
    assert mine["counted"]["rms_norm_forward"]["launches"] + mine["counted"]["fused_add_rms_norm_forward"]["launches"]
    if not PROGRAMS[name].draws:
        pairs = zip(mine["losses"], theirs["losses"], strict=True)
        assert all(abs(a - b) <= NEAR * max(1, abs(b)) for a, b in pairs), (mine["losses"], theirs["losses"])
