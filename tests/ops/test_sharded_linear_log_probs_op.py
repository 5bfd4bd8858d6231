"""The head's log-probabilities with the vocabulary spread over two processes."""

from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_ranks_have_the_results_and_the_gradients_of_one(tmp_path):
    worker = Path(__file__).parent / "sharded_head_worker.py"
    ended = finish(start(tmp_path, worker, 2, TILEKERN_INTERPRET="1", GLOO_SOCKET_IFNAME="lo"))
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error for _, error, _ in ended)
