"""The commands keygen, sign and verify, and what pack and unpack do about signatures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cache_samples import PROBLEM, blob_file, put, sealed

from tilekern.cache import Store
from tilekern.cache_tools.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("TILEKERN_TRUST", "TILEKERN_TRUST_ROOTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli(capsys):
    def run(*arguments, code=0):
        assert main([str(one) for one in arguments]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.err if code == 2 else captured.out

    return run


@pytest.fixture
def as_json(cli):
    return lambda *arguments, **options: json.loads(cli(*arguments, "--json", **options))


@pytest.fixture
def key(tmp_path, cli):
    cli("keygen", tmp_path / "team.key", "--name", "build team")
    return tmp_path / "team.key"


@pytest.fixture
def cache(tmp_path):
    put(tmp_path / "cache", b"one")
    put(tmp_path / "cache", b"two", problem={**PROBLEM, "rows": 1})
    return tmp_path / "cache"


@pytest.fixture
def pack(tmp_path, cache, cli):
    cli("pack", tmp_path / "a.pack")
    return tmp_path / "a.pack"


def trust(monkeypatch, key):
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", f"{key}.pub")


def counts(document):
    signatures = document["signatures"]
    return signatures["trusted"], signatures["other_key"], signatures["unsigned"], len(signatures["bad"])


def test_keygen_writes_a_key_for_its_owner_and_a_line_for_others(as_json, tmp_path):
    document = as_json("keygen", tmp_path / "k", "--name", "the  team")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "k.pub").read_text() == f"ed25519 {document['public_key']} the team\n"
    assert document["trust_root"] == f"ed25519 {document['public_key']} the team"
    assert document["trust_roots"] == str(tmp_path / "settings/tilekern/trust-roots")
    assert as_json("keygen", tmp_path / "other")["public_key"] != document["public_key"]


def test_a_signed_pack_verifies_and_stays_so_when_it_is_unpacked_and_packed_again(
    as_json, cli, key, pack, tmp_path, monkeypatch
):
    unsigned = pack.read_bytes()
    assert counts(as_json("verify", pack)) == (0, 0, 2, 0)
    assert as_json("sign", pack, "--key", key)["signed"] == 2
    assert counts(as_json("verify", pack)) == (0, 2, 0, 0)
    trust(monkeypatch, key)
    document = as_json("verify", pack, "--signed")
    assert counts(document) == (2, 0, 0, 0)
    assert document["signatures"]["by"] == {"build team": 2}
    assert "2 trusted (2 by build team)" in cli("verify", pack)
    signed = pack.read_bytes()
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    cli("unpack", pack, "--cache-dir", tmp_path / "there")
    assert counts(as_json("verify", tmp_path / "there")) == (2, 0, 0, 0)
    cli("pack", tmp_path / "b.pack", "--cache-dir", tmp_path / "there")
    assert (tmp_path / "b.pack").read_bytes() == signed != unsigned
    cli("sign", pack, "--key", key)
    assert pack.read_bytes() == signed, "the same key gives the same signatures"


def test_signatures_of_several_keys_stand_side_by_side(as_json, cli, key, pack, tmp_path, monkeypatch):
    cli("keygen", tmp_path / "other.key")
    for one in (key, tmp_path / "other.key"):
        cli("sign", pack, "--key", one)
    for one in (key, tmp_path / "other.key"):
        trust(monkeypatch, one)
        assert counts(as_json("verify", pack, "--signed")) == (2, 0, 0, 0)


def test_a_cache_is_signed_in_place(as_json, cli, key, cache, tmp_path, monkeypatch):
    (cache / "v1/sm_90-h200-132/tileiras-13.4.92/rms_norm/rows=3.json").write_text("{")
    assert as_json("sign", cache, "--key", key) == {
        "path": str(cache),
        "public_key": (tmp_path / "team.key.pub").read_text().split()[1],
        "signed": 2,
        "left_out": 1,
    }
    trust(monkeypatch, key)
    assert counts(as_json("verify", code=1)) == (2, 0, 0, 0)


def test_verify_fails_where_it_must_be_signed_and_is_not(as_json, cli, key, cache, pack, monkeypatch):
    for place in ([], [pack]):
        assert counts(as_json("verify", *place)) == (0, 0, 2, 0)
        cli("verify", *place, "--signed", code=1)
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    for place in ([], [pack]):
        cli("verify", *place, code=1)


def test_a_signature_that_is_another_records_is_named(as_json, key, cache, cli):
    cli("sign", cache, "--key", key)
    one, other = sorted((cache / "v1/signatures").rglob("*.sig"))
    one.write_bytes(other.read_bytes())
    document = as_json("verify", code=1)
    assert counts(document) == (0, 1, 1, 1)
    assert document["broken"] == document["signatures"]["bad"]
    assert "is not its own" in cli("verify", code=1)


@pytest.mark.parametrize("content", [b"", b"0" * 128, b"x" * 1000])
def test_a_damaged_signature_is_named(as_json, key, cache, cli, content):
    cli("sign", cache, "--key", key)
    next((cache / "v1/signatures").rglob("*.sig")).write_bytes(content)
    document = as_json("verify", code=1)
    assert counts(document) == (0, 1, 1, 1)
    assert document["broken"] == document["signatures"]["bad"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "no zip"])
def test_verify_of_a_bad_pack_names_what_is_broken(as_json, cli, pack, damage):
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 0xFF
    pack.write_bytes({"truncated": data[:-30], "changed": data, "no zip": b"PK" * 50}[damage])
    (broken,) = as_json("verify", pack, code=1)["broken"]
    assert broken["path"] == str(pack)
    assert "1 broken" in cli("verify", pack, code=1)


def test_what_is_broken_is_not_signed(cli, key, cache, pack):
    blob_file(cache, b"one").write_bytes(b"bad")
    assert "sha256" in cli("sign", cache, "--key", key, code=2)
    assert not (cache / "v1/signatures").exists()
    blob_file(cache, b"one").unlink()
    assert "verify" in cli("sign", cache, "--key", key, code=2)
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 0xFF
    pack.write_bytes(data)
    cli("sign", pack, "--key", key, code=2)
    assert pack.read_bytes() == data


def test_an_artifact_of_another_size_than_its_record_says_is_neither_signed_nor_packed(cli, key, cache, tmp_path):
    (path,) = (cache / "v1").rglob("rms_norm/rows=1,*.json")
    path.write_text(sealed(path.read_text().replace('"size": 3', '"size": 4')))
    assert "another size" in cli("sign", cache, "--key", key, code=2)
    assert not (cache / "v1/signatures").exists()
    assert "another size" in cli("pack", tmp_path / "a.pack", code=2)
    assert not (tmp_path / "a.pack").exists()


def test_a_record_that_is_replaced_after_it_was_checked_is_not_signed(as_json, cli, key, cache, monkeypatch):
    path = next((cache / "v1").rglob("rms_norm/*.json"))
    read_blob = Store.read_blob

    def replacing(store, digest):
        path.write_text(sealed(path.read_text().replace('"occupancy": 4', '"occupancy": 16')))
        return read_blob(store, digest)

    monkeypatch.setattr(Store, "read_blob", replacing)
    cli("sign", cache, "--key", key)
    trust(monkeypatch, key)
    assert counts(as_json("verify")) == (1, 0, 1, 0)


def test_unpack_refuses_what_is_unsigned_where_it_must_be_signed(cli, pack, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    message = cli("add", pack, "--cache-dir", tmp_path / "there", code=2)
    assert "no trust root signed it" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sign", "a.pack"], ["--key"]),
        (["sign", "a.pack", "--key", "nowhere"], ["nowhere"]),
        (["sign", "nowhere.pack", "--key", "team.key"], ["nowhere.pack"]),
        (["sign", "a.pack", "--key", "team.key.pub"], ["team.key.pub", "chmod 600"]),
        (["sign", "a.pack", "--key", "."], ["."]),
        (["keygen", "team.key"], ["never overwritten"]),
        (["keygen", "no/such/../../team.key.pub/x"], ["team.key.pub"]),
        (["keygen", "x", "--name", "\x1b[2J"], ["printable"]),
        (["verify", "nowhere.pack"], ["nowhere.pack"]),
    ],
)
def test_bad_input_is_one_line(key, pack, tmp_path, arguments, words):
    command = [sys.executable, "-m", "tilekern.cache_tools", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tilekern: ")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_verify_prints_nothing_under_a_policy_that_is_none(cli, cache, pack, monkeypatch, capsys):
    monkeypatch.setenv("TILEKERN_TRUST", "sgned")
    for place in (cache, pack):
        assert main(["verify", str(place), "--json"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "TILEKERN_TRUST" in said.err


def test_verify_takes_one_place(cli, cache, pack):
    assert "not both" in cli("verify", pack, "--cache-dir", cache, code=2)


def test_verify_names_what_others_can_write_and_no_job_loads(cli, cache):
    cache.chmod(0o777)
    said = cli("verify", cache)
    assert said.count("not loaded by any job: 2 records: ") == said.count("chmod -R go-w") == 1


def test_a_key_s_owner_has_a_name(cli, tmp_path):
    assert "--name must be" in cli("keygen", tmp_path / "other.key", "--name", " ", code=2)
    assert not list(tmp_path.glob("other.key*"))


def test_signing_without_cryptography_names_the_extra(cli, key, pack, as_json, monkeypatch):
    cli("sign", pack, "--key", key)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    assert "pip install 'tilekern[trust]'" in cli("sign", pack, "--key", key, code=2)
    trust(monkeypatch, key)
    document = as_json("verify", pack)
    assert "tilekern[trust]" in document["signatures"]["unchecked"]
    assert counts(document)[0] == 0
    assert "some signatures were not checked" in cli("verify", pack)
    cli("verify", pack, "--signed", code=1)
