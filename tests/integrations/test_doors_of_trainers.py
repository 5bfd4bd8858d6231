"""The doors of ``docs/trainers.md`` for programs that are not edited, by torchrun and accelerate themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import late_trainer
import pytest
from environments import ROOT, environment, installed

from tilekern.patch.families import FAMILIES

FOLDER = Path(__file__).parent
SCRIPT, MODULE = str(FOLDER / "late_trainer.py"), ["-m", "late_trainer"]
LAUNCH = [sys.executable, SCRIPT, "launch"]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node"]
ACCELERATE = ["accelerate", "launch", "--main_process_port", "0"]
# How each program is started on two ranks, the value of TILEKERN_APPLY, and what trains there. ``accelerate launch``
# starts them by what torchrun is, so that a command under torchrun which takes the variable along would be no third.
DOORS = {
    "axolotl": ([*LAUNCH, *ACCELERATE, "--multi_gpu", "--num_processes", "2", *MODULE], "-swiglu", ["program"]),
    "torchrun": (
        [*TORCHRUN, "2", "-m", "tilekern.run", "--no-swiglu", SCRIPT, "--callback"], "", ["program", "callback"],
    ),
}  # fmt: skip
# What each op asks for in a training step of Qwen3.
KERNELS = {
    "rms_norm": "rms_norm_forward", "swiglu": "swiglu_forward", "qk_norm_rope": "qk_norm_rope_forward",
    "fused_add_rms_norm": "fused_add_rms_norm_forward", "fused_linear_cross_entropy": "fused_linear_cross_entropy",
}  # fmt: skip

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """The loss of the program as it is."""
    return late_trainer.train(tmp_path_factory.mktemp("unpatched"), 1e-2)["loss"]


@pytest.mark.parametrize("door", DOORS)
def test_a_program_that_is_not_edited_trains_patched_models_on_all_ranks(tmp_path, lost, door):
    command, said, trained = DOORS[door]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(installed(tmp_path), ROOT, FOLDER, PATH=path, TILEKERN_APPLY=said, OMP_NUM_THREADS="1")
    command = [*command, str(tmp_path), "--lr", "1e-2"]
    ran = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-?.json")}
    assert told.keys() == {f"{name}-{rank}" for name in trained for rank in range(2)}
    for name, each in told.items():
        assert each["loss"] == pytest.approx(lost, rel=1e-5)
        assert (each["ranks"], each["attention"], each["early"]) == (2, late_trainer.ATTENTION, [])
        callback = name.startswith("callback")
        left_out = "" if callback else "swiglu"
        # A model that is patched by itself needs no rope where norms of heads are fused with it.
        served = {*FAMILIES["qwen3"].ops} - {left_out, "rope" if callback else ""}
        assert served <= {*each["ops"]}
        assert left_out not in each["ops"]
        assert {*KERNELS.values()} - {KERNELS.get(left_out)} == {*KERNELS.values()} & {*each["asked"]}
    # The first rank alone says what serves which modules.
    assert ran.stderr.count("tilekern: fused_linear_cross_entropy: patched") == trained.count("callback")
