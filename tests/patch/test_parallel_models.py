"""Models that two processes share, by FSDP2 and by transformers' own plans; what they do is in the worker."""

from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.nightly
def test_two_processes_give_the_losses_logits_and_gradients_of_one(tmp_path):
    ended = finish(start(tmp_path, WORKER, 2, "cpu", tmp_path, TILEKERN_INTERPRET="1", GLOO_SOCKET_IFNAME="lo"))
    if any(code == 77 for _, _, code in ended):
        pytest.skip(ended[0][0].strip().splitlines()[-1])
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error[-3000:] for _, error, _ in ended)
