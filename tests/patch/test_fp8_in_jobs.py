"""Models of 8-bit floats that two processes train, by DDP, FSDP2 and tensor parallelism; the worker does it."""

from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start

WORKER = Path(__file__).with_name("fp8_worker.py")


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_give_the_losses_and_gradients_of_one_and_gather_8_bits(tmp_path):
    ended = finish(start(tmp_path, WORKER, 2, "cpu", tmp_path, GLOO_SOCKET_IFNAME="lo"))
    if any(code == 77 for _, _, code in ended):
        pytest.skip(ended[0][0].strip().splitlines()[-1])
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error[-3000:] for _, error, _ in ended)
