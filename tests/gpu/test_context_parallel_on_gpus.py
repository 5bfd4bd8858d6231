"""Sequences that ranks share in ``tests/patch/context_worker.py``, on two and four GPUs of this host with NCCL."""

import os
from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start

from tilekern.compile.toolchain import toolkit

WORKER = Path(__file__).parents[1] / "patch" / "context_worker.py"
pytestmark = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_give_the_losses_and_gradients_of_one(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"there are not {ranks} GPUs here")
    kept = {name: os.environ[name] for name in ("TILEKERN_CACHE_DIR", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    ended = finish(start(tmp_path, WORKER, ranks, "cuda", TILEKERN_ON_MISS="compile", **kept))
    assert [code for _, _, code in ended] == [0] * ranks, "\n".join((said + error)[-3000:] for said, error, _ in ended)
