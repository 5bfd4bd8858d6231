import pytest


@pytest.fixture(autouse=True)
def nothing_patched(unpatched):
    """Start and end each of these tests with nothing patched."""


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run on the CPU."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
