"""DeepSpeed's ZeRO-3: parameters that are whole only while their module runs, on two ranks of this machine."""

import json
from pathlib import Path

import pytest
from rank_jobs import finish, start

pytest.importorskip("deepspeed", reason="pip install deepspeed")
WORKER = Path(__file__).with_name("zero_worker.py")
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.processes]


def trained(folder, how):
    """What the first of two ranks found, and what it said."""
    env = {"TILEKERN_INTERPRET": "1", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    meet = f"file://{folder / how.replace(' ', '_')}"
    ranks = finish(start(folder, WORKER, 2, how, meet=meet, TILEKERN_CACHE_DIR=str(folder / "cache"), **env))
    assert [code for _, _, code in ranks] == [0, 0], "\n".join(error[-2000:] for _, error, _ in ranks)
    out, error, _ = ranks[0]
    return json.loads(out.splitlines()[-1]), error


def test_losses_and_weights_are_those_of_the_model_as_it_is_by_parts_and_by_layers(tmp_path):
    expected, _ = trained(tmp_path, "as it is")
    for how, whole in (("patched", 0), ("patched leaf", 6)):
        found, said = trained(tmp_path, how)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
        assert (found["whole"], found["fused"] > 0) == (whole, True)
        assert ('"leaf_module": {"classes": ["transformers.models.qwen3' in said) == (not whole)
