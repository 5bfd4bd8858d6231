"""Two GPUs of one host measure a sweep in little more than half of one GPU's time."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tuner_process import clean_environment

from tilekern.toolchain import toolkit
from tuning.gpu import devices
from tuning.sweep import Sweep

# Large enough that the start of the workers, which two GPUs do not halve, is a small part of one GPU's time.
OPS = "rms_norm,fused_add_rms_norm,qk_norm_rope,swiglu,rope,cross_entropy,attention,linear"
TOKENS = "2048,4096,8192,16384,32768"
MOST = 0.6
pytestmark = [
    pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed"),
    pytest.mark.skipif(torch.cuda.is_available() and len(devices()) < 2, reason="there are not two GPUs alike here"),
]


def tune(folder: Path, *arguments: str) -> dict:
    """Run the tuner with the folder's cache; what it prints."""
    env = clean_environment()
    command = [sys.executable, "-m", "tilekern.tune", *arguments, "--cache-dir", str(folder / "cache"), "--json"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def raced(sweep: Sweep) -> set[tuple[str, str]]:
    return {(race["kernel"], race["problem"]) for race in sweep.races().values()}


def test_two_gpus_take_little_more_than_half_the_time_of_one(tmp_path):
    compiled = tmp_path / "compiled"
    tune(tmp_path, "qwen3-8b", "--ops", OPS, "--tokens", TOKENS, "--stages", "plan,compile", "--sweep", str(compiled))
    seconds, sweeps = {}, {}
    for gpus in (1, 2):
        folder = tmp_path / f"{gpus}"
        sweeps[gpus] = Sweep(Path(shutil.copytree(compiled, folder / "sweep")))
        arguments = ("--stages", "measure", "--sweep", str(folder / "sweep"), "--gpus", str(gpus))
        seconds[gpus] = tune(folder, *arguments)["seconds"]["measure"]
    ratio = seconds[2] / seconds[1]
    sys.stdout.write(f"one GPU {seconds[1]:.1f} s, two GPUs {seconds[2]:.1f} s: {ratio:.3f}\n")
    named = {(kernel, problem.key) for kernel, problem in sweeps[1].problems()}
    assert raced(sweeps[1]) == raced(sweeps[2]) == named
    timed = [{key for key, line in sweep.measured().items() if "check" in line} for sweep in sweeps.values()]
    assert timed[0] == timed[1]
    assert ratio <= MOST
