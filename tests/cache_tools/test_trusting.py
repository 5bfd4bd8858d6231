"""The commands keygen, sign, revoke and verify, and what pack and unpack do about signatures."""

import hashlib
import sys

import pytest
from cache_samples import PROBLEM, blob_file, put, sealed

from tilekern.cache import Store
from tilekern.cache.trust.revoking import read_revoked


@pytest.fixture
def cache(root):
    """Two records that no model needs."""
    put(root, b"one")
    put(root, b"two", problem={**PROBLEM, "rows": 1})
    return root


@pytest.fixture
def pack(tmp_path, cache, cli):
    cli.said("pack", tmp_path / "a.pack")
    return tmp_path / "a.pack"


def trust(monkeypatch, key):
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", f"{key}.pub")


def counts(document):
    signatures = document["signatures"]
    return signatures["trusted"], signatures["other_key"], signatures["unsigned"], len(signatures["bad"])


def test_keygen_writes_a_key_for_its_owner_and_a_line_for_others(cli, tmp_path):
    document = cli.json("keygen", tmp_path / "k", "--name", "the  team")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "k.pub").read_text() == f"ed25519 {document['public_key']} the team\n"
    assert document["trust_root"] == f"ed25519 {document['public_key']} the team"
    assert document["trust_roots"] == str(tmp_path / "settings/tilekern/trust-roots")
    assert cli.json("keygen", tmp_path / "other")["public_key"] != document["public_key"]


@pytest.mark.parametrize("half", ["private", "public"])
def test_a_keygen_that_fails_leaves_nothing_behind(cli, tmp_path, monkeypatch, half):
    (tmp_path / "kept").mkdir()
    before = sorted(tmp_path.rglob("*"))

    def fail(path, *_):
        raise OSError(28, "No space left on device", str(path))

    place = {"private": "cache.files.write_in", "public": "cache_tools.commands.keygen.write_whole"}[half]
    monkeypatch.setattr(f"tilekern.{place}", fail)
    cli.refused("keygen", tmp_path / "kept/new/folders/team.key", says="No space left")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_signed_pack_verifies_and_stays_so_when_it_is_unpacked_and_packed_again(
    cli, key, pack, tmp_path, monkeypatch
):
    unsigned = pack.read_bytes()
    assert counts(cli.json("verify", pack)) == (0, 0, 2, 0)
    assert cli.json("sign", pack, "--key", key)["signed"] == 2
    assert counts(cli.json("verify", pack)) == (0, 2, 0, 0)
    trust(monkeypatch, key)
    document = cli.json("verify", pack, "--signed")
    assert counts(document) == (2, 0, 0, 0)
    assert document["signatures"]["by"] == {"build team": 2}
    assert "2 trusted (2 by build team)" in cli.said("verify", pack)
    signed = pack.read_bytes()
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    cli.said("unpack", pack, "--cache-dir", tmp_path / "there")
    assert counts(cli.json("verify", tmp_path / "there")) == (2, 0, 0, 0)
    cli.said("pack", tmp_path / "b.pack", "--cache-dir", tmp_path / "there")
    assert (tmp_path / "b.pack").read_bytes() == signed != unsigned
    cli.said("sign", pack, "--key", key)
    assert pack.read_bytes() == signed, "the same key gives the same signatures"


def test_signatures_of_several_keys_stand_side_by_side(cli, key, pack, tmp_path, monkeypatch):
    cli.said("keygen", tmp_path / "other.key")
    for one in (key, tmp_path / "other.key"):
        cli.said("sign", pack, "--key", one)
    for one in (key, tmp_path / "other.key"):
        trust(monkeypatch, one)
        assert counts(cli.json("verify", pack, "--signed")) == (2, 0, 0, 0)


def test_a_cache_is_signed_in_place(cli, key, cache, tmp_path, monkeypatch):
    (cache / "v1/sm_90-h200-132/tileiras-13.4.92/rms_norm/rows=3.json").write_text("{")
    assert cli.json("sign", cache, "--key", key) == {
        "path": str(cache),
        "public_key": (tmp_path / "team.key.pub").read_text().split()[1],
        "signed": 2,
        "left_out": 1,
    }
    trust(monkeypatch, key)
    assert counts(cli.json("verify", code=1)) == (2, 0, 0, 0)


def test_verify_signed_fails_for_unsigned_records(cli, key, cache, pack, monkeypatch):
    for place in ([], [pack]):
        assert counts(cli.json("verify", *place)) == (0, 0, 2, 0)
        cli.said("verify", *place, "--signed", code=1)
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    for place in ([], [pack]):
        cli.said("verify", *place, code=1)


@pytest.mark.parametrize("content", ["another record's", b"", b"0" * 128, b"x" * 1000])
def test_a_wrong_signature_is_named(key, cache, cli, content):
    cli.said("sign", cache, "--key", key)
    one, other = sorted((cache / "v1/signatures").rglob("*.sig"))
    one.write_bytes(other.read_bytes() if isinstance(content, str) else content)
    document = cli.json("verify", code=1)
    assert counts(document) == (0, 1, 1, 1)
    assert document["broken"] == document["signatures"]["bad"]
    assert "is not its own" in cli.said("verify", code=1)


@pytest.mark.parametrize("damage", ["truncated", "changed", "no zip"])
def test_verify_of_a_bad_pack_names_what_is_broken(cli, pack, damage):
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 0xFF
    pack.write_bytes({"truncated": data[:-30], "changed": data, "no zip": b"PK" * 50}[damage])
    (broken,) = cli.json("verify", pack, code=1)["broken"]
    assert broken["path"] == str(pack)
    assert "1 broken" in cli.said("verify", pack, code=1)


def test_broken_records_are_not_signed(cli, key, cache, pack):
    blob_file(cache, b"one").write_bytes(b"bad")
    assert "sha256" in cli.said("sign", cache, "--key", key, code=2)
    assert not (cache / "v1/signatures").exists()
    blob_file(cache, b"one").unlink()
    assert "verify" in cli.said("sign", cache, "--key", key, code=2)
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 0xFF
    pack.write_bytes(data)
    cli.said("sign", pack, "--key", key, code=2)
    assert pack.read_bytes() == data


def test_an_artifact_of_another_size_than_its_record_says_is_neither_signed_nor_packed(cli, key, cache, tmp_path):
    (path,) = (cache / "v1").rglob("rms_norm/rows=1,*.json")
    path.write_text(sealed(path.read_text().replace('"size": 3', '"size": 4')))
    assert "another size" in cli.said("sign", cache, "--key", key, code=2)
    assert not (cache / "v1/signatures").exists()
    assert "another size" in cli.said("pack", tmp_path / "a.pack", code=2)
    assert not (tmp_path / "a.pack").exists()


def test_a_record_that_is_replaced_after_it_was_checked_is_not_signed(cli, key, cache, monkeypatch):
    path = next((cache / "v1").rglob("rms_norm/*.json"))
    read_blob = Store.read_blob

    def replacing(store, digest):
        path.write_text(sealed(path.read_text().replace('"occupancy": 4', '"occupancy": 16')))
        return read_blob(store, digest)

    monkeypatch.setattr(Store, "read_blob", replacing)
    cli.said("sign", cache, "--key", key)
    trust(monkeypatch, key)
    assert counts(cli.json("verify")) == (1, 0, 1, 0)


def test_under_signed_unpack_refuses_unsigned_records(cli, pack, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    cli.refused("add", pack, root=tmp_path / "there", says="no trust root signed it")
    assert not (tmp_path / "there").exists()


def test_verify_prints_nothing_under_an_unknown_policy(cli, cache, pack, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "sgned")
    for place in (cache, pack):
        cli.refused("verify", place, "--json", says="TILEKERN_TRUST")


def test_verify_names_what_others_can_write_and_no_job_loads(cli, cache):
    cache.chmod(0o777)
    said = cli.said("verify", cache)
    assert said.count("not loaded by any job: 2 records: ") == said.count("chmod -R go-w") == 1


def test_signing_without_cryptography_names_the_extra(cli, key, pack, monkeypatch):
    cli.said("sign", pack, "--key", key)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    assert "pip install 'tilekern[trust]'" in cli.said("sign", pack, "--key", key, code=2)
    trust(monkeypatch, key)
    document = cli.json("verify", pack)
    assert "tilekern[trust]" in document["signatures"]["unchecked"]
    assert counts(document)[0] == 0
    assert "some signatures were not checked" in cli.said("verify", pack)
    assert "without a trust root's signature" in cli.said("verify", pack, "--signed", code=1)


def test_records_are_taken_back_by_pack_cache_file_and_digest(cli, cache, tmp_path, key, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", f"{key}.pub")
    pack, by_key = tmp_path / "all.pack", ("--key", key, "--out", tmp_path / "team.revoked")
    cli.said("sign", cache, "--key", key)
    cli.said("pack", pack)
    digests = {hashlib.sha256(data).hexdigest() for _, data in Store(cache).read_entries()}
    assert len(digests) == 2
    extra = put(tmp_path / "more", b"more", problem={**PROBLEM, "rows": 7})
    (cache / "v1/sm_90-h200-132/tileiras-13.4.92/rms_norm/bad.json").write_text("{")
    assert "revoked 1 record by key" in cli.said("revoke", "0" * 64, *by_key)
    assert "has 2" in cli.said("revoke", extra, *by_key)
    assert "has 4; 1 unreadable record left out" in cli.said("revoke", cache, *by_key)
    assert "revoked 2 records" in cli.said("revoke", pack, *by_key)
    _, listed = read_revoked(tmp_path / "team.revoked")
    assert listed == digests | {"0" * 64, hashlib.sha256(extra.read_bytes()).hexdigest()}
    assert "0 trusted, 0 by keys that are not trust roots, 0 unsigned, 2 revoked" in cli.said("verify", pack)
    cli.said("verify", pack, "--signed", code=1)
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    cli.refused("unpack", pack, root=tmp_path / "there", says="a trust root has revoked it")
    assert not (tmp_path / "there").exists()
