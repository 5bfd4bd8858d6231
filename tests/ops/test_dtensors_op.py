"""Norms and swiglu on DTensors of two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_each_rank_works_on_its_own_rows(tmp_path):
    worker = Path(__file__).parent / "dtensor_worker.py"
    environment = os.environ | {"TILEKERN_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(worker.parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(tmp_path / "store"), str(rank)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
