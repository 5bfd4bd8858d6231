"""Ops run their kernels on the CPU in these tests."""

import pytest

from tilekern.runtime import dispatch


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_INTERPRET", "1")
        dispatch.forget()
        yield
    dispatch.forget()


@pytest.fixture
def without_interpreter(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET")
    dispatch.forget()
    yield
    dispatch.forget()
