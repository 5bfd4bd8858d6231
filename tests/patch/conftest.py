import pytest
import torch

import tilekern
from tilekern.runtime import dispatch


@pytest.fixture(autouse=True)
def unpatched():
    """Every test starts and ends with nothing patched and no plan remembered."""
    torch.set_num_threads(1)
    tilekern.reset()
    dispatch.forget()
    yield
    tilekern.reset()
    dispatch.set_miss_policy(None)
    dispatch.forget()


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run on the CPU."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
