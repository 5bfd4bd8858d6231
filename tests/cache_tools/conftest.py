import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))
from cache_samples import B200, PROBLEM, put, toolkit
from command_line import Commands
from ship_samples import make_pack

from tilekern.cache_tools.shared import removing


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Give each test its own cache, settings and width, and no policy of the caller; nothing waits before deleting."""
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(removing, "READING_S", 0.0)
    for name in ("TILEKERN_TRUST", "TILEKERN_TRUST_ROOTS", "TILEKERN_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root(tmp_path):
    """The cache that commands work on; it is not there yet."""
    return tmp_path / "cache"


@pytest.fixture
def cache(root):
    """Three records: two on the H200 (one of them predicted), one on the B200."""
    put(root, b"one" * 100)
    put(root, b"two" * 100, problem={**PROBLEM, "rows": 1024}, provenance="predicted", measurement=None)
    put(root, b"three" * 100, target=B200, toolkit=toolkit("13.5.0"), kernel="swiglu", created="2020-01-01T00:00:00Z")
    return root


@pytest.fixture
def pack(tmp_path):
    """A pack of two records, one of them for a B200."""
    return make_pack(tmp_path)


@pytest.fixture
def key(tmp_path, cli):
    """The file of a private key; its public half lies beside it."""
    cli.said("keygen", tmp_path / "team.key", "--name", "build team")
    return tmp_path / "team.key"


@pytest.fixture
def cli(capsys):
    return Commands(capsys)
