"""The head's log-probabilities with the vocabulary spread over two processes."""

from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start

from tilekern.ops import sharded_linear_log_probs


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_ranks_have_the_results_and_the_gradients_of_one(tmp_path):
    worker = Path(__file__).parent / "sharded_head_worker.py"
    ended = finish(start(tmp_path, worker, 2, TILEKERN_INTERPRET="1", GLOO_SOCKET_IFNAME="lo"))
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error for _, error, _ in ended)


def test_bad_input_is_refused_before_anything_is_sent():
    hidden, weight, ids = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^sharded_linear_log_probs: first must not be negative, got -1"):
        sharded_linear_log_probs(hidden, weight, ids, -1)
    with pytest.raises(ValueError, match=r"^sharded_linear_log_probs: temperature must be positive"):
        sharded_linear_log_probs(hidden, weight, ids, 0, temperature=-1.0)
