"""Models that two processes train as trainers wrap them; what they do is in the worker."""

from pathlib import Path

import pytest
import torch
from rank_jobs import finish, start

WORKER = Path(__file__).with_name("trainer_worker.py")


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_wrapped_models_learn_as_they_are_and_their_layers_are_one_op(tmp_path):
    environment = {"modules": "torch,transformers,peft", "TILEKERN_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = finish(start(tmp_path, WORKER, 2, **environment))
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error[-3000:] for _, error, _ in ended)
