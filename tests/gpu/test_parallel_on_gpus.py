"""The models that two ranks share in ``tests/patch/parallel_worker.py``, on two GPUs of this host with NCCL."""

import os
from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start

from tilekern.compile.toolchain import toolkit

WORKER = Path(__file__).parents[1] / "patch" / "parallel_worker.py"
pytestmark = [
    pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here"),
]


def test_two_gpus_give_the_losses_logits_and_gradients_of_one(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name == "TILEKERN_CACHE_DIR"}
    kept["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    ended = finish(start(tmp_path, WORKER, 2, "cuda", tmp_path, TILEKERN_ON_MISS="compile", **kept))
    assert [code for _, _, code in ended] == [0, 0], "\n".join((said + error)[-3000:] for said, error, _ in ended)
