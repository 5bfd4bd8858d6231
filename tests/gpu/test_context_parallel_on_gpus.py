"""Sequences that ranks share in ``tests/patch/context_worker.py``, on two and four GPUs of this host with NCCL."""

import pytest
import torch
from gpu_processes import assert_ranks_end_well

from tilekern.compile.toolchain import toolkit

pytestmark = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_give_the_losses_and_gradients_of_one(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"there are not {ranks} GPUs here")
    assert_ranks_end_well(tmp_path, "context_worker.py", ranks)
