import pytest

import tilekern
from tilekern.runtime import dispatch


@pytest.fixture(autouse=True)
def nothing_patched(unpatched):
    """Start and end each of these tests with nothing patched."""


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run on the CPU."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")


@pytest.fixture
def interpreted_llama(interpreted):
    """Llama is patched, and its kernels run on the CPU."""
    dispatch.forget()
    tilekern.apply(model_type="llama")
    yield
    tilekern.reset()
    dispatch.forget()
