import pytest


@pytest.fixture(autouse=True)
def nothing_patched(unpatched):
    """As each of these tests begins and ends."""


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run on the CPU."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
