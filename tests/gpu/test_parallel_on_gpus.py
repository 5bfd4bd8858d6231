"""The models that two ranks share in ``tests/patch/parallel_worker.py``, on two GPUs of this host with NCCL."""

import pytest
import torch
from gpu_processes import assert_ranks_end_well

from tilekern.compile.toolchain import toolkit

pytestmark = [
    pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here"),
]


def test_two_gpus_give_the_losses_logits_and_gradients_of_one(tmp_path):
    assert_ranks_end_well(tmp_path, "parallel_worker.py", 2, tmp_path)
