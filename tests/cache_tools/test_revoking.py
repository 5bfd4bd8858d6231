"""The command revoke, and what verify and unpack say of records that were taken back."""

import hashlib

import pytest
from cache_samples import PROBLEM, put

from tilekern.cache import Store
from tilekern.cache.trust.revoking import read_revoked


@pytest.fixture
def team(cli, tmp_path, monkeypatch):
    """A key that is a trust root, and the arguments that revoke with it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    assert cli("keygen", str(tmp_path / "team.key"), "--name", "team")[0] == 0
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "team.key.pub"))
    return ["--key", str(tmp_path / "team.key"), "--out", str(tmp_path / "team.revoked")]


def run(capsys, *arguments):
    from tilekern.cache_tools.__main__ import main

    code = main(list(map(str, arguments)))
    return code, *capsys.readouterr()


@pytest.fixture
def cli(capsys):
    return lambda *arguments: run(capsys, *arguments)


def test_records_are_taken_back_by_pack_cache_file_and_digest(cli, cache, tmp_path, team, monkeypatch):
    key, pack = team[1], tmp_path / "all.pack"
    cli("sign", cache, "--key", key)
    cli("pack", pack, "--cache-dir", cache)
    digests = {hashlib.sha256(data).hexdigest() for _, data in Store(cache).read_entries()}
    assert len(digests) == 3
    extra = put(tmp_path / "more", b"more", problem={**PROBLEM, "rows": 7})
    (cache / "v1/sm_90-h200-132/tileiras-13.4.92/rms_norm/bad.json").write_text("{")
    assert "revoked 1 record by key" in cli("revoke", "0" * 64, *team)[1]
    assert "has 2" in cli("revoke", extra, *team)[1]
    assert "has 5; 1 unreadable record left out" in cli("revoke", cache, *team)[1]
    assert "revoked 3 records" in cli("revoke", pack, *team)[1]
    _, listed = read_revoked(tmp_path / "team.revoked")
    assert listed == digests | {"0" * 64, hashlib.sha256(extra.read_bytes()).hexdigest()}
    assert "0 trusted, 0 by keys that are not trust roots, 0 unsigned, 3 revoked" in cli("verify", pack)[1]
    assert cli("verify", pack, "--signed")[0] == 1
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    code, _, err = cli("unpack", pack, "--cache-dir", tmp_path / "there")
    assert code == 2
    assert "a trust root has revoked it" in err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.pack"], "there is no pack nothing.pack"),
        (["0" * 63], "there is no pack"),
        (["CACHE/none.json"], "none.json"),
        (["0" * 64, "--out", "list.json"], "must end in .revoked"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_revoked_is_one_line(cli, cache, team, arguments, words):
    code, out, err = cli("revoke", *(word.replace("CACHE", str(cache)) for word in arguments), *team[:2],
                         *([] if "--out" in arguments else team[2:]))  # fmt: skip
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
