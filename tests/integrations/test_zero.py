"""DeepSpeed's ZeRO-3: parameters that are whole only while their module runs, on two ranks of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, environment

pytest.importorskip("deepspeed", reason="pip install deepspeed")
WORKER = Path(__file__).with_name("zero_worker.py")
PATIENCE_S = 300
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.processes]


def trained(folder, how):
    """What the first of two ranks found, and what it said."""
    meet = folder / how.replace(" ", "_")
    env = environment(
        ROOT, ROOT / "tests" / "patch", OMP_NUM_THREADS="1", TILEKERN_INTERPRET="1", DS_ACCELERATOR="cpu",
        LOCAL_RANK="0", TILEKERN_CACHE_DIR=str(folder / "cache"),
    )  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, meet, str(rank), how], env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], found[0][1][-2000:] + found[1][1][-2000:]
    return json.loads(found[0][0].splitlines()[-1]), found[0][1]


def test_losses_and_weights_are_those_of_the_model_as_it_is_by_parts_and_by_layers(tmp_path):
    expected, _ = trained(tmp_path, "as it is")
    for how, whole in (("patched", 0), ("patched leaf", 6)):
        found, said = trained(tmp_path, how)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
        assert (found["whole"], found["fused"] > 0) == (whole, True)
        assert ('"leaf_module": {"classes": ["transformers.models.qwen3' in said) == (not whole)
