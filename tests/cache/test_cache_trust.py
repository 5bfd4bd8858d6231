"""Which records are loaded: the policy, trust roots, signatures and seals."""

import hashlib
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cache_samples import (
    PROBLEM,
    blob_file,
    digest_of,
    files_of,
    find,
    make,
    new_key,
    put,
    quietly,
    sealed,
    signed_pack,
)  # fmt: skip
from msgspec.structs import replace

from tilekern.cache import (
    CacheError,
    FolderLayer,
    PackLayer,
    Store,
    Untrusted,
    default_layers,
    install_pack,
    write_pack,
)
from tilekern.cache.keys import signature_path
from tilekern.cache.trust.policy import read_signatures, trust_roots
from tilekern.cache.trust.signing import SigningKey, generate_key, is_signed


def test_any_loads_unsigned_records_and_makes_no_secret(tmp_path, monkeypatch, settings):
    for policy in ("", "any"):
        monkeypatch.setenv("TILEKERN_TRUST", policy)
        put(tmp_path / "cache")
        assert find([FolderLayer(tmp_path / "cache", "user")])
    assert not settings.exists()
    assert not (tmp_path / "cache" / "v1" / "signatures").exists()


@pytest.mark.parametrize("policy", ["sigend", "SIGNED", "1"])
def test_an_unknown_policy_stops_every_lookup(tmp_path, monkeypatch, policy):
    put(tmp_path)
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    with pytest.raises(CacheError, match="TILEKERN_TRUST must be one of any, signed"):
        find([FolderLayer(tmp_path, "user")])


def test_signed_never_loads_unsigned_records_and_warns_once_for_each_layer(tmp_path, roots, monkeypatch):
    write_pack(tmp_path / "unsigned.pack", [make()])
    with monkeypatch.context() as other:
        other.delenv("TILEKERN_TRUST")
        put(tmp_path / "cache")
    layers = [FolderLayer(tmp_path / "cache", "once-a"), PackLayer(tmp_path / "unsigned.pack", "once-b")]
    trace = []
    with pytest.warns(RuntimeWarning, match="TILEKERN_TRUST is signed") as caught:
        assert [find(layers, trace=trace) for _ in range(3)] == [None] * 3
    assert [name for c in caught for name in ("once-a", "once-b") if name in str(c.message)] == ["once-a", "once-b"]
    assert len(caught) == 2
    assert [step.outcome for step in trace].count("untrusted") == 6
    assert "no trust root signed it" in str(trace[0])


def test_a_later_layer_serves_if_the_first_is_not_trusted(tmp_path, key, roots):
    write_pack(tmp_path / "unsigned.pack", [make()])
    layers = [PackLayer(tmp_path / "unsigned.pack"), PackLayer(signed_pack(tmp_path / "signed.pack", key))]
    assert quietly(layers).layer.name == "signed.pack"


def test_a_key_outside_the_trust_roots_is_not_enough(tmp_path, key, roots):
    other = new_key(tmp_path / "other")
    pack = signed_pack(tmp_path / "a.pack", other)
    assert quietly([PackLayer(pack)]) is None
    with pytest.raises(Untrusted, match=r"a\.pack: v1/.*no trust root signed it.*nothing was unpacked"):
        install_pack(pack, Store(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    both = signed_pack(tmp_path / "both.pack", other, key)
    assert quietly([PackLayer(both)])


def test_a_layer_gives_the_signatures_and_seals_of_a_record(tmp_path, key, roots):
    pack = signed_pack(tmp_path / "a.pack", key, new_key(tmp_path / "other"))
    install_pack(pack, Store(tmp_path / "cache"))
    folder, packed = FolderLayer(tmp_path / "cache", "user"), PackLayer(pack)
    digest = digest_of(make()[0])
    assert folder.signatures(digest) == packed.signatures(digest)
    assert folder.signatures(digest)[signature_path(digest, key.public_key).name] == key.sign(make()[0].data)
    assert len(folder.signatures(digest)) == 2
    put(tmp_path / "cache")
    assert sorted(Path(name).suffix for name in folder.signatures(digest)) == [".seal", ".sig", ".sig"]
    (tmp_path / "cache" / signature_path(digest, "0" * 64)).mkdir()
    assert len(folder.signatures(digest)) == 3, "what cannot be read is left out"
    for layer in (folder, packed, FolderLayer(tmp_path / "none", "none"), PackLayer(tmp_path / "key")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert layer.signatures("0" * 64) == {}


def test_a_record_knows_the_bytes_that_signatures_are_over(tmp_path):
    text = make()[0].to_json()
    path = put(tmp_path)
    spaced = sealed(text.replace('"schema": 4,', '"schema":   4,'))
    path.write_text(spaced)
    record = find([FolderLayer(tmp_path, "user")]).record
    assert record.data == spaced.encode() != record.to_json().encode()
    assert replace(record, candidates=5).data == replace(record, candidates=5).to_json().encode()


def test_one_unsigned_record_keeps_a_pack_out(tmp_path, key, roots):
    signed, unsigned = make(), make(b"x", problem={**PROBLEM, "rows": 1})
    data = signed[0].to_json().encode()
    mark = {hashlib.sha256(data).hexdigest(): {key.public_key: key.sign(data)}}
    write_pack(tmp_path / "a.pack", [signed, unsigned], mark)
    with pytest.raises(Untrusted, match="rows=1,"):
        install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    layer = PackLayer(tmp_path / "a.pack", "partly-signed")
    assert find([layer]).exact_bucket
    with pytest.warns(RuntimeWarning, match="TILEKERN_TRUST"):
        assert find([layer], {**PROBLEM, "rows": 1}).record.problem["rows"] == 8192


def test_records_made_here_under_signed_are_sealed_and_loaded(tmp_path, roots, settings):
    put(tmp_path / "cache")
    assert find([FolderLayer(tmp_path / "cache", "user")])
    assert (settings / "seal.key").stat().st_mode & 0o777 == 0o600
    put(tmp_path / "cache", b"again", created_by="again")
    assert find([FolderLayer(tmp_path / "cache", "user")]).load("aligned") == b"again"


def test_what_the_tuner_publishes_under_signed_is_its_own(tmp_path, roots):
    records = [make(), make(b"x", problem={**PROBLEM, "rows": 1})]
    own = [digest_of(record) for record, _ in records]
    write_pack(tmp_path / "results.pack", records)
    with pytest.raises(Untrusted, match="rows=1,"):  # what others put there between writing and reading
        install_pack(tmp_path / "results.pack", Store(tmp_path / "cache"), own=own[:1])
    assert install_pack(tmp_path / "results.pack", Store(tmp_path / "cache"), own=own).records == 2
    assert find([FolderLayer(tmp_path / "cache", "user")])
    assert quietly([PackLayer(tmp_path / "results.pack")]) is None


def test_a_seal_is_worth_nothing_to_another_user_or_for_another_record(tmp_path, roots, settings):
    put(tmp_path / "cache")
    layer = FolderLayer(tmp_path / "cache", "user")
    [seal] = (tmp_path / "cache/v1/signatures").rglob("*.seal")
    (settings / "seal.key").rename(settings / "kept")
    assert quietly([layer]) is None
    put(tmp_path / "elsewhere")
    assert (settings / "seal.key").read_bytes() != (settings / "kept").read_bytes()
    assert quietly([layer]) is None
    (settings / "kept").replace(settings / "seal.key")
    assert find([layer])
    other = replace(make()[0], created_by="forged").to_json().encode()
    (tmp_path / "cache" / make()[0].address.path).write_bytes(other)
    digest = hashlib.sha256(other).hexdigest()
    forged = seal.parent.parent / digest[:2] / seal.name.replace(seal.name[:64], digest)
    forged.parent.mkdir(exist_ok=True)
    forged.write_bytes(seal.read_bytes())
    assert quietly([layer]) is None


@pytest.mark.parametrize(
    ("place", "mode", "words"),
    [
        ("seal.key", 0o640, r"seal\.key must be yours and readable only by you"),
        (".", 0o777, r"seal\.key is not used: .*can be written by others \(mode 0777\)"),
    ],
)
def test_a_secret_that_others_can_read_or_replace_is_not_used(tmp_path, roots, settings, place, mode, words):
    put(tmp_path / "cache")
    before = (settings / place).stat().st_mode
    (settings / place).chmod(mode)
    with pytest.warns(RuntimeWarning, match=words):
        assert find([FolderLayer(tmp_path / "cache", f"exposed {place}")]) is None
    with pytest.raises(CacheError, match=words):
        put(tmp_path / "cache", created_by="next")
    (settings / place).chmod(before)
    assert find([FolderLayer(tmp_path / "cache", f"exposed {place}")])


@pytest.mark.processes
def test_many_writers_make_one_secret(tmp_path, roots, settings):
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            put(tmp_path / "cache", problem={**PROBLEM, "rows": 2**number})
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    layer = FolderLayer(tmp_path / "cache", "user")
    assert all(find([layer], {**PROBLEM, "rows": 2**n}).exact_bucket for n in range(8))
    assert [path.name for path in settings.iterdir()] == ["seal.key"]


@pytest.mark.parametrize("place", ["record", "blob", "signature"])
@pytest.mark.parametrize("where", ["cache", "pack"])
def test_a_change_of_one_byte_is_never_loaded(tmp_path, key, roots, monkeypatch, place, where):
    """Also where every hash is made to fit again: that is what a signature is for."""
    record, blobs = make(b"one" * 99)
    data = record.to_json().encode()
    signature = key.sign(data)
    if place == "record":
        record = replace(record, config={"occupancy": 1})
    elif place == "blob":
        changed = b"two" * 99
        artifact = replace(record.artifacts["aligned"], sha256=hashlib.sha256(changed).hexdigest())
        record, blobs = replace(record, artifacts={"aligned": artifact}), {artifact.sha256: changed}
    else:
        signature = (b"1" if signature[:1] == b"0" else b"0") + signature[1:]
    digest = digest_of(record)
    write_pack(tmp_path / "a.pack", [(record, blobs)], {digest: {key.public_key: signature}})
    if where == "pack":
        assert quietly([PackLayer(tmp_path / "a.pack")]) is None
        with pytest.raises(Untrusted):
            install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"))
        return
    layer = FolderLayer(tmp_path / "cache", "user")
    put(tmp_path / "sealed")  # makes a secret, so that seals are looked for, too
    monkeypatch.setenv("TILEKERN_TRUST", "any")
    install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"))
    assert find([layer])
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    assert quietly([layer]) is None


def test_the_wheels_own_packs_are_as_trusted_as_its_code_and_those_of_other_packages_are_not(tmp_path, roots):
    write_pack(tmp_path / "a.pack", [make()])
    (tmp_path / "a.pack").chmod(0o666)
    assert find([PackLayer(tmp_path / "a.pack", "wheel", "wheel")])
    assert quietly([PackLayer(tmp_path / "a.pack", "package", "package")]) is None
    origins = {layer.origin for layer in default_layers() if isinstance(layer, PackLayer) and "prebuilt:" in layer.name}
    assert origins == {"wheel"}


def test_removed_records_take_their_signatures_along(tmp_path, key, roots):
    install_pack(signed_pack(tmp_path / "a.pack", key), Store(tmp_path / "cache"))
    put(tmp_path / "cache", b"own", problem={**PROBLEM, "rows": 1})
    store = Store(tmp_path / "cache")
    folder = tmp_path / "cache/v1/signatures"
    assert sorted(path.suffix for path in folder.rglob("*.s*")) == [".seal", ".sig"]
    store.remove([entry for entry in store.entries() if entry.record.problem["rows"] == 1])
    store.collect_garbage(grace_s=-1)
    assert [path.suffix for path in folder.rglob("*.s*")] == [".sig"]
    assert find([FolderLayer(tmp_path / "cache", "user")])


def test_without_cryptography_nothing_signed_is_loaded_and_the_extra_is_named(tmp_path, key, roots, monkeypatch):
    pack = signed_pack(tmp_path / "a.pack", key)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.warns(RuntimeWarning, match=r"pip install 'tilekern\[trust\]'"):
        assert find([PackLayer(pack, "no-cryptography")]) is None
    with pytest.raises(Untrusted, match=r"tilekern\[trust\]"):
        install_pack(pack, Store(tmp_path / "cache"))
    put(tmp_path / "cache")
    assert find([FolderLayer(tmp_path / "cache", "user")]), "a seal needs the standard library alone"


def test_the_users_roots_count_if_the_environment_names_none(tmp_path, key, roots, settings, monkeypatch):
    pack = signed_pack(tmp_path / "a.pack", key)
    monkeypatch.delenv("TILEKERN_TRUST_ROOTS")
    assert trust_roots() == ()
    assert quietly([PackLayer(pack)]) is None
    settings.mkdir(parents=True)
    (settings / "trust-roots").write_text(roots.read_text())
    assert find([PackLayer(pack)])
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "none"))
    assert quietly([PackLayer(pack)]) is None, "the environment's files stand in place of the user's"


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("ed25519 abc name", 0o644, "line 1"),
        ("# fine\nrsa 00", 0o644, "line 2"),
        ("\0", 0o644, "line 1"),
        ("", 0o664, "can be written by others"),
        ("", 0o646, "can be written by others"),
    ],
)
def test_invalid_trust_roots_trust_nobody(tmp_path, key, roots, text, mode, words):
    pack = signed_pack(tmp_path / "a.pack", key)
    roots.write_text(f"{text}\n{roots.read_text()}" if text else roots.read_text())
    roots.chmod(mode)
    with pytest.raises(CacheError, match=words) as caught:
        trust_roots()
    assert "\n" not in str(caught.value)
    with pytest.warns(RuntimeWarning, match=words):
        assert find([PackLayer(pack, f"bad-roots-{words}-{mode}-{len(text)}")]) is None


def test_a_key_is_for_its_owner_alone_and_never_overwritten(tmp_path, key):
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CacheError, match="never overwritten"):
        generate_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(CacheError, match="chmod 600"):
        SigningKey(tmp_path / "key")


# The second is an X448 key of 32 bytes, which a fuzzer found, and on which cryptography fails.
@pytest.mark.parametrize(
    "text", ["", "MC4CAQAwBQYDK2VvBCIEIJAVdRdVnJjiuTXgmZ/iwRdVnJjiuTwasdUrD5WxEM2K\n-----END PRIVATE KEY-----\n"]
)
def test_a_file_that_is_not_a_private_key_is_refused(tmp_path, text):
    (tmp_path / "none").write_text(f"-----BEGIN PRIVATE KEY-----\n{text}")
    (tmp_path / "none").chmod(0o600)
    with pytest.raises(CacheError, match="is not an Ed25519 private key"):
        SigningKey(tmp_path / "none")


def test_a_signature_is_of_the_purpose_too(key):
    """A signature that the same key made for another purpose is not valid for a record."""
    assert is_signed(key.public_key, b"record", key.sign(b"record"))
    bare = key._key.sign(b"record").hex().encode() + b"\n"
    assert not is_signed(key.public_key, b"record", bare)
    for wrong in (b"", b"0" * 129, key.sign(b"record")[:-1], key.sign(b"record") + b"\n", key.sign(b"record").upper()):
        assert not is_signed(key.public_key, b"record", wrong)
    assert not is_signed("00" * 32, b"record", key.sign(b"record"))


def test_hashes_are_checked_at_each_load_and_not_only_at_import(tmp_path):
    """A file that was good and has changed since is bad, in a folder and in an open pack."""
    good = random.Random(0).randbytes(100_000)
    write_pack(tmp_path / "open.pack", [make(good)])
    install_pack(tmp_path / "open.pack", Store(tmp_path / "cache"))
    folder, pack = FolderLayer(tmp_path / "cache", "user"), PackLayer(tmp_path / "open.pack")
    hits = [find([folder]), find([pack])]
    blob_file(tmp_path / "cache", good).write_bytes(good[:-1] + b"!")
    with open(tmp_path / "open.pack", "r+b") as file:
        file.seek(50_000)
        file.write(b"changed")
    with pytest.warns(RuntimeWarning) as caught:
        assert (find([folder]), find([pack])) == (None, None)
    assert len(caught) == 2
    assert [hit.load("aligned") for hit in hits] == [good] * 2, "a hit holds the bytes that were checked"


def test_a_shared_folder_with_signatures_beside_is_safe_to_allow(tmp_path, key, roots, monkeypatch):
    """A record that a colleague can write is loaded only if a trust root signed it."""
    install_pack(signed_pack(tmp_path / "a.pack", key), Store(tmp_path / "team"))
    for path in ((tmp_path / "team"), *(tmp_path / "team").rglob("*")):
        path.chmod(0o777)
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")
    layer = FolderLayer(tmp_path / "team", "team")
    assert find([layer])
    path = tmp_path / "team" / make()[0].address.path
    path.write_text(make(created_by="a colleague")[0].to_json())
    assert quietly([layer]) is None


@pytest.mark.parametrize("policy", ["any", "signed"])
def test_a_lookup_writes_nothing_under_either_policy(tmp_path, key, roots, monkeypatch, policy):
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    install_pack(signed_pack(tmp_path / "a.pack", key), Store(tmp_path / "cache"))
    before = files_of(tmp_path)
    assert find([FolderLayer(tmp_path / "cache", "user", writable=True)])
    assert find([FolderLayer(tmp_path / "cache", "user", writable=True)], {**PROBLEM, "rows": 1})
    assert find([PackLayer(tmp_path / "a.pack")])
    assert files_of(tmp_path) == before


@pytest.mark.processes
def test_any_loads_no_cryptography(tmp_path):
    put(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from cache_samples import find; "
        "from tilekern.cache import FolderLayer; assert find([FolderLayer(sys.argv[1], 'user')]); "
        "assert not {'cryptography', 'platformdirs'} & set(sys.modules)"
    )
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(here)], cwd=here.parents[1], check=True)


def test_invalid_signatures_in_a_cache_are_left_out(tmp_path, key):
    digest = "ab" * 32
    good, bad = (tmp_path / signature_path(digest, public) for public in (key.public_key, "cd" * 32))
    good.parent.mkdir(parents=True)
    good.write_bytes(key.sign(b"record"))
    bad.write_bytes(b"nonsense")
    (good.parent / f"{digest}.short.sig").write_bytes(b"")
    assert list(read_signatures(tmp_path, digest)) == [key.public_key]


def test_roots_that_others_can_replace_trust_nobody(tmp_path, key, roots, monkeypatch):
    """A folder above the file, a link to it, or what a link on the way leads to: who can write it chooses the roots."""
    pack = signed_pack(tmp_path / "a.pack", key)
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    (shared / "mine" / "roots").write_text(roots.read_text())
    (tmp_path / "link").symlink_to(shared / "mine")
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe" / "roots").write_text(roots.read_text())
    (shared / "back").symlink_to(tmp_path / "safe")
    ways = [shared / "mine" / "roots", tmp_path / "link" / "roots", shared / "back" / "roots"]
    for way in ways:
        monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(way))
        shared.chmod(0o755)
        assert len(trust_roots()) == 1
        shared.chmod(0o777)
        monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")  # is about caches, and allows nothing here
        with pytest.raises(Untrusted, match=r"shared can be written by others \(mode 0777\); run chmod go-w on it"):
            trust_roots()
        assert quietly([PackLayer(pack, str(way))]) is None
        shared.chmod(0o1777)  # as /tmp: nobody replaces what is another's there
        assert len(trust_roots()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("place", ["roots", ".", "link"])
def test_roots_of_another_user_trust_nobody(tmp_path, roots, monkeypatch, place):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "roots").write_text(roots.read_text())
    (folder / "link").symlink_to(roots)
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(folder / ("link" if place == "link" else "roots")))
    assert len(trust_roots()) == 1
    os.chown(folder / place, 12345, 0, follow_symlinks=False)
    with pytest.raises(Untrusted, match=r"belongs to another user .uid 12345.*use a copy of your own"):
        trust_roots()


def test_nothing_above_a_home_is_looked_at(tmp_path, roots, monkeypatch):
    home = tmp_path / "homes" / "user"
    home.mkdir(parents=True)
    (home / "roots").write_text(roots.read_text())
    (tmp_path / "homes").chmod(0o777)
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(home / "roots"))
    with pytest.raises(Untrusted):
        trust_roots()
    monkeypatch.setenv("HOME", str(home))
    assert len(trust_roots()) == 1


@pytest.mark.parametrize("strip", [False, True])
def test_a_private_key_for_a_root_is_refused_and_not_shown(tmp_path, monkeypatch, strip):
    generate_key(tmp_path / "team.key")
    text = (tmp_path / "team.key").read_text()
    secrets = text.splitlines()[1:-1]
    if strip:
        (tmp_path / "team.key").write_text("\n".join(secrets))
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "team.key"))
    with pytest.raises(CacheError, match="is not a trust root" if strip else "is a private key.*pub file") as caught:
        trust_roots()
    assert not [line for line in secrets if line[:12] in str(caught.value)]
