"""Old records of good signers: what a newer one keeps out, and what a list of a trust root takes back."""

import json
import os
import warnings

import pytest
from cache_samples import PROBLEM, digest_of, find, make, new_key, outcome, put, quietly, signed_pack

from tilekern.cache import CacheError, FolderLayer, PackLayer, Store, Untrusted, install_pack, write_pack
from tilekern.cache.trust import revoking
from tilekern.cache.trust.policy import Signers, require_trusted
from tilekern.cache.trust.revoking import read_revoked, write_revoked
from tilekern.runtime.ranks.held import Held

OLD, NEW = (make(created=f"2026-{month}-01T12:00:00Z", created_by=month) for month in ("01", "11"))


def test_an_old_signed_record_takes_nothing_back(tmp_path, key, roots):
    store = Store(tmp_path / "cache")
    for name, one in (("new", NEW), ("old", OLD)):
        installed = install_pack(signed_pack(tmp_path / f"{name}.pack", key, records=[one]), store)
        assert installed.records == (name == "new")
    assert find([FolderLayer(store.root, "user")]).record.created_by == "11"


@pytest.mark.parametrize("vouched", ["unsigned", "another key"])
def test_a_record_that_is_not_loaded_does_not_keep_out_a_signed_one(tmp_path, key, roots, monkeypatch, vouched):
    store = Store(tmp_path / "cache")
    keys = [new_key(tmp_path / "other")] if vouched == "another key" else []
    with monkeypatch.context() as any_policy:
        any_policy.setenv("TILEKERN_TRUST", "any")
        install_pack(signed_pack(tmp_path / "new.pack", *keys, records=[NEW]), store)
    assert install_pack(signed_pack(tmp_path / "old.pack", key, records=[OLD]), store).records == 1
    assert find([FolderLayer(store.root, "user")]).record.created_by == "01"


def test_revoked_records_are_never_loaded(tmp_path, key, roots, monkeypatch):
    pack = signed_pack(tmp_path / "a.pack", key, new_key(tmp_path / "other"), records=[OLD])
    store = Store(tmp_path / "cache")
    install_pack(pack, store)
    put(tmp_path / "sealed", b"mine", created_by="sealed")
    places = [FolderLayer(store.root, "user"), PackLayer(pack), FolderLayer(tmp_path / "sealed", "sealed")]
    assert all(find([place]) for place in places)
    sealed = find([places[2]]).record
    write_revoked(tmp_path / "team.revoked", [digest_of(OLD[0]), digest_of(sealed)], key)
    assert [quietly([place]) for place in places] == [None] * 3
    with pytest.raises(Untrusted, match=r"a trust root has revoked it.*nothing was unpacked"):
        install_pack(pack, Store(tmp_path / "elsewhere"))
    held = Held(OLD[0], OLD[1], {f"{digest_of(OLD[0])}.{key.public_key}.sig": key.sign(OLD[0].data)})
    with pytest.raises(Untrusted, match="revoked"):
        held.require_trusted()
    assert find([PackLayer(tmp_path / "a.pack", "wheel", "wheel")]), "as its code, it came with an install"
    monkeypatch.setenv("TILEKERN_TRUST", "any")
    assert find([places[0]])


def test_other_records_are_loaded_as_before(tmp_path, key, roots):
    pack = signed_pack(tmp_path / "a.pack", key, records=[NEW, make(b"x", problem={**PROBLEM, "rows": 1})])
    write_revoked(tmp_path / "team.revoked", [digest_of(OLD[0])], key)
    assert find([PackLayer(pack)]).exact_bucket
    assert find([PackLayer(pack)], {**PROBLEM, "rows": 1}).exact_bucket


def test_the_users_own_lists_lie_beside_the_users_own_roots(tmp_path, key, roots, settings, monkeypatch):
    pack = signed_pack(tmp_path / "a.pack", key, records=[OLD])
    settings.mkdir(parents=True)
    (settings / "trust-roots").write_text(roots.read_text())
    monkeypatch.delenv("TILEKERN_TRUST_ROOTS")
    assert find([PackLayer(pack)])
    write_revoked(settings / "b.revoked", [digest_of(OLD[0])], key)
    assert quietly([PackLayer(pack)]) is None


def test_the_list_of_another_key_says_nothing_and_is_warned_about(tmp_path, key, roots):
    pack = signed_pack(tmp_path / "a.pack", key, records=[OLD])
    write_revoked(tmp_path / "stranger.revoked", [digest_of(OLD[0])], new_key(tmp_path / "other"))
    with pytest.warns(RuntimeWarning, match=r"stranger\.revoked revokes nothing: the key that signed it"):
        assert find([PackLayer(pack)])


def test_a_removed_trust_root_neither_signs_nor_revokes(tmp_path, key, roots):
    """It was stolen: its line is removed from the trust roots."""
    other = new_key(tmp_path / "stolen")
    store, ours = Store(tmp_path / "cache"), make(b"ours", problem={**PROBLEM, "rows": 1})
    roots.write_text(f"{roots.read_text()}ed25519 {other.public_key} stolen\n")
    install_pack(signed_pack(tmp_path / "theirs.pack", other, records=[NEW]), store)
    install_pack(signed_pack(tmp_path / "ours.pack", key, records=[ours]), store)
    layer = FolderLayer(store.root, "user")
    assert find([layer]).exact_bucket
    write_revoked(tmp_path / "stolen.revoked", [digest_of(ours[0])], other)
    assert not find([layer], ours[0].problem).exact_bucket
    roots.write_text(f"ed25519 {key.public_key} ours\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find([layer], ours[0].problem).exact_bucket
        assert not find([layer]).exact_bucket
    with pytest.raises(Untrusted):
        install_pack(tmp_path / "theirs.pack", Store(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    "damage",
    ["a record more", "a record less", "no signature", "another's signature", "a list for another purpose", "empty",
     "a pipe", "huge", "others may write it"],
)  # fmt: skip
def test_a_damaged_list_stops_all_loading_and_is_named(tmp_path, key, roots, damage):
    """Otherwise an attacker who flips a bit of it would have revoked records loaded again."""
    pack, path = signed_pack(tmp_path / "a.pack", key, records=[NEW]), tmp_path / "team.revoked"
    write_revoked(path, ["0" * 64, "1" * 64], key)
    line, signer = path.read_bytes().splitlines(keepends=True)
    if damage == "a record more":
        path.write_bytes(line.replace(b'["', b'["' + b"2" * 64 + b'", "') + signer)
    elif damage == "a record less":
        path.write_bytes(line.replace(b'"' + b"0" * 64 + b'", ', b"") + signer)
    elif damage == "no signature":
        path.write_bytes(line)
    elif damage == "another's signature":
        other = new_key(tmp_path / "other")
        path.write_bytes(line + f"{key.public_key} ".encode() + other.sign(line[:-1], revoking._PURPOSE))
    elif damage == "a list for another purpose":
        path.write_bytes(line + f"{key.public_key} ".encode() + key.sign(line[:-1]))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "huge":
        os.truncate(path, 1 << 40)
    else:
        path.chmod(0o666)
    with pytest.raises(Untrusted, match=r"team\.revoked"):
        require_trusted(NEW[0].to_json().encode(), lambda _: key.sign(NEW[0].to_json().encode()))
    assert quietly([PackLayer(pack)]) is None


def test_a_list_grows_and_is_its_signer_s_alone(tmp_path, key):
    path = tmp_path / "team.revoked"
    write_revoked(path, ["1" * 64], key)
    assert write_revoked(path, ["0" * 64, "1" * 64], key) == {"0" * 64, "1" * 64}
    assert read_revoked(path) == (key.public_key, {"0" * 64, "1" * 64})
    document = json.loads(path.read_bytes().splitlines()[0])
    assert document == {"schema": 1, "records": ["0" * 64, "1" * 64]}
    before = path.read_bytes()
    for again, name, words in (
        ([], "team.json", "must end in .revoked"),
        (["x"], "team.revoked", "64 lower-case hexadecimal digits"),
        ([f"{number:064x}" for number in range(70_000)], "team.revoked", "begin another list"),
    ):
        assert words in outcome(lambda again=again, name=name: write_revoked(tmp_path / name, again, key))[1]
    with pytest.raises(CacheError, match="is the list of another key"):
        write_revoked(path, [], new_key(tmp_path / "other"))
    assert path.read_bytes() == before


def test_without_lists_nothing_is_read_for_them(tmp_path, key, roots, monkeypatch):
    monkeypatch.setattr(revoking, "read_revoked", None)
    (tmp_path / "notes.txt").write_text("")
    assert not Signers().is_revoked(b"record")
    assert find([PackLayer(signed_pack(tmp_path / "a.pack", key))])


def test_a_list_of_a_later_schema_is_refused(tmp_path, key, roots):
    line = json.dumps({"schema": 2, "records": []}).encode()
    data = line + f"\n{key.public_key} ".encode() + key.sign(line, revoking._PURPOSE)
    (tmp_path / "later.revoked").write_bytes(data)
    with pytest.raises(CacheError, match="must have schema 1"):
        read_revoked(tmp_path / "later.revoked")
    write_pack(tmp_path / "a.pack", [NEW])
    assert quietly([PackLayer(tmp_path / "a.pack")]) is None
