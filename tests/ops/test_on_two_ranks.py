"""Ops of two processes: rows of DTensors, and a head whose vocabulary is spread over both."""

from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_ranks_have_the_results_and_the_gradients_of_one(tmp_path):
    job = start(
        tmp_path, Path(__file__).parent / "rank_worker.py", 2, modules="torch,torch.distributed.tensor,tilekern.ops",
        TILEKERN_INTERPRET="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    ended = finish(job)
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error for _, error, _ in ended)
