import pytest
from cache_samples import new_key


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Give each test its own folder of settings, which does not exist yet, and no policy of the caller."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for name in ("TILEKERN_TRUST", "TILEKERN_TRUST_ROOTS", "TILEKERN_TRUST_SHARED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "settings" / "tilekern"


@pytest.fixture
def key(tmp_path):
    return new_key(tmp_path / "key")


@pytest.fixture
def roots(tmp_path, key, monkeypatch):
    """The policy ``signed``, with one trust root."""
    (tmp_path / "roots").write_text(f"# ours\n\ned25519 {key.public_key} build team\n")
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "roots"))
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    return tmp_path / "roots"
