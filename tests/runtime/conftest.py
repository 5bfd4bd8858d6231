import shutil

import pytest
from one_record import asked_for_nothing

from tilekern.compile import cutile


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty cache of the user, an H200 that is not there, and a process that has asked for nothing yet."""
    with asked_for_nothing(tmp_path / "cache", monkeypatch) as root:
        yield root


@pytest.fixture
def filled(root, compiled):
    """The user's cache with one record."""
    shutil.copytree(compiled, root)
    return root


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine with a filled cache needs no compiler."""
    cutile.toolkit.cache_clear()
    monkeypatch.setattr(cutile, "_tileiras", lambda: None)
    yield
    cutile.toolkit.cache_clear()
