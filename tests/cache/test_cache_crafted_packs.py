"""Packs that were made to do harm: each is refused with one line before anything is written, and empty as a layer."""

import hashlib
import io
import json
import os
import random
import resource
import stat
import struct
import uuid
import warnings
import zipfile
import zlib

import pytest
from cache_samples import digest_of, find, make, outcome, quietly
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tilekern.cache import CacheError, Corrupt, PackLayer, Store, UnknownSchema, install_pack, write_pack
from tilekern.cache.packs import archives

RECORD, BLOBS = make()
RECORD_PATH = str(RECORD.address.path)
KEY = "ab" * 32


def members(*records):
    """Return the members of a pack of records by path."""
    found = {}
    for record, blobs in records or [(RECORD, BLOBS)]:
        for data in blobs.values():
            found |= blob(data)
        found[str(record.address.path)] = record.to_json().encode()
    return found


def manifest_of(contents, schema=1):
    entries = {name: {"sha256": hashlib.sha256(d).hexdigest(), "size": len(d)} for name, d in contents.items()}
    return json.dumps({"format": "tilekern-pack", "schema": schema, "members": entries}).encode()


def pack(path, contents, *, schema=1, manifest=None, infos=None, method=zipfile.ZIP_DEFLATED):
    """A zip file of ``contents`` with a manifest that fits; ``infos`` gives some members another header."""
    manifest = manifest_of(contents, schema) if manifest is None else manifest
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, data in [("manifest.json", manifest), *contents.items()]:
            archive.writestr((infos or {}).get(name, name), data)
    return path


def blob(data):
    """A blob among a pack's contents."""
    digest = hashlib.sha256(data).hexdigest()
    return {f"v1/blobs/{digest[:2]}/{digest}": data}


def refused(path, tmp_path, *words, kind=Corrupt, as_layer=True):
    there = tmp_path / "there"
    with pytest.raises(kind) as caught:
        install_pack(path, Store(there))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    assert all(word in message for word in words), message
    assert not there.exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]
    if as_layer:
        with pytest.warns(RuntimeWarning):
            assert find([PackLayer(path)]) is None


def test_the_pack_that_the_crafted_ones_are_made_from_is_sound(tmp_path):
    assert install_pack(pack(tmp_path / "a.pack", members()), Store(tmp_path / "there")).records == 1


@pytest.mark.parametrize(
    "name",
    [
        "/v1/sm_90-h200-132/t/k/rows=1.json",
        "//host/share/rows=1.json",
        "C:/v1/t/t/k/rows=1.json",
        "C:rows=1.json",
        "../rows=1.json",
        "v1/../../rows=1.json",
        "v1/sm_90/t/../rows=1.json",
        "v1/sm_90/./k/rows=1.json",
        "v1/sm_90//k/rows=1.json",
        "v1/sm_90/t/k/../../../../../etc/cron.d/rows=1.json",
        "v1\\sm_90\\t\\k\\rows=1.json",
        "v1/sm_90/t/..\\..\\k/rows=1.json",
        "v1/sm_90/t/k./rows=1.json",
        "v1/sm_90/t./k/rows=1.json",
        "v1/sm_90/t/k /rows=1.json",
        "v1/sm_90/t/ k/rows=1.json",
        "v1/sm_90/t/k/rows=1.json.",
        "v1/sm_90/t/k/rows=1.json ",
        "v1/sm_90/t/k/rows=1.json/",
        "v1/sm_90/t/con/rows=1.json",
        "v1/sm_90/t/NUL.k/rows=1.json",
        "v1/sm_90/Com1/k/rows=1.json",
        "v1/lpt9.x.y/t/k/rows=1.json",
        "v1/aux/t/k/rows=1.json",
        "v1/sm_90/t/.k/rows=1.json",
        "v1/sm_90/t/-k/rows=1.json",
        "v1/sm_90/t/k:stream/rows=1.json",
        "v1/sm_90/t/k*/rows=1.json",
        "v1/sm_90/t/k\n/rows=1.json",
        "v1/sm_90/t/k\x1b[2J/rows=1.json",
        "v1/sm_90/t/k\x7f/rows=1.json",
        "v1/sm_90/t/ﬁ/rows=1.json",
        "v1/sm_90/t/k\u202e/rows=1.json",
        "v1/sm_90/t/\uff4b/rows=1.json",
        "v1/sm_90/t/k/rows=\uff11.json",
        "v1/sm_90/t/k/rows=1,rows=2.json",
        f"v1/sm_90/t/{'k' * 101}/rows=1.json",
        f"v1/sm_90/t/k/rows={'1' * 5000}.json",
        "v1/wanted/t/k/rows=1.json",
        "v1/incoming/t/k/rows=1.json",
        "v1/signatures/t/k/rows=1.json",
        "v1/blobs/00/../rows=1.json",
        f"v1/signatures/ab/{'cd' * 32}.{KEY}.sig",
        f"v1/signatures/ab/{KEY}.{KEY}.seal",
        "v1/signatures/../x.sig",
        ".sig",
        ".json",
        "rows=1.json",
        "readme.txt",
        "v2/sm_90/t/k/rows=1.json",
        "v1/sm_90/t/k/rows=1.txt",
        "v1/",
        "v1/blobs/00/" + "0" * 64,
        "v1/blobs/zz/zz",
        "manifest.json/x",
    ],
)
@pytest.mark.parametrize("schema", [1, 2])
def test_a_path_that_a_cache_cannot_have_is_refused(tmp_path, name, schema):
    refused(pack(tmp_path / "a.pack", members() | {name: b"x"}, schema=schema), tmp_path)


def raw_renamed(path, old, new):
    """Give a member another name of the same length, in both headers, as no writer would."""
    data = path.read_bytes()
    assert len(old) == len(new)
    assert data.count(old) >= 2
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    "name", [b"v1/sm_90/t/kk/rows=\0.json", b"v1/sm_90/t/k\0/rows=1.json", b"v1/sm_90/t/\xff\xfe/rows=1.json"]
)
def test_a_name_with_a_nul_or_invalid_bytes_is_refused(tmp_path, name):
    contents = members() | {"v1/sm_90/t/kk/rows=1.json": b"x"}
    path = pack(tmp_path / "a.pack", contents, manifest=manifest_of(contents).replace(b"sm_90/t/kk", b"sm_90/t/zz"))
    raw_renamed(path, b"v1/sm_90/t/kk/rows=1.json", name)
    refused(path, tmp_path)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
@pytest.mark.parametrize("name", ["manifest.json", RECORD_PATH])
def test_a_link_a_folder_or_a_device_is_refused(tmp_path, kind, name):
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (kind | 0o777) << 16
    refused(pack(tmp_path / "a.pack", members(), infos={name: info}), tmp_path, "plain file")


@pytest.mark.parametrize(
    ("one", "other"),
    [("rms_norm", "RMS_norm"), ("k", "K")],
)
def test_names_that_differ_in_case_alone_are_refused_and_never_written(tmp_path, one, other):
    records = [make(kernel=one), make(kernel=other)]
    refused(pack(tmp_path / "a.pack", members(*records)), tmp_path, "upper and lower case")
    with pytest.raises(CacheError, match="upper and lower case"):
        write_pack(tmp_path / "b.pack", records)
    assert not (tmp_path / "b.pack").exists()


def test_folders_that_differ_in_case_alone_are_refused(tmp_path):
    one, other = make(), make(problem={**RECORD.problem, "rows": 1}, target={**RECORD.target, "key": "SM_90-h200-132"})
    refused(pack(tmp_path / "a.pack", members(one, other)), tmp_path, "upper and lower case")


def test_a_member_that_is_not_in_the_manifest_is_refused(tmp_path):
    path = pack(tmp_path / "a.pack", members() | {"../escape": b"x"}, manifest=manifest_of(members()))
    refused(path, tmp_path, "not in both")


def test_a_missing_or_unreferenced_blob_is_refused(tmp_path):
    whole, (first, *_) = members(), sorted(RECORD.digests)
    missing = {name: data for name, data in whole.items() if first not in name}
    for number, contents in enumerate((missing, whole | blob(b"stray"))):
        (tmp_path / str(number)).mkdir()
        refused(pack(tmp_path / str(number) / "a.pack", contents), tmp_path / str(number), "refer", as_layer=False)


def test_a_record_under_another_records_name_is_refused(tmp_path):
    contents = members()
    contents[str(replace(RECORD, kernel="swiglu").address.path)] = contents.pop(RECORD_PATH)
    path = pack(tmp_path / "a.pack", contents)
    refused(path, tmp_path, "its contents belong at", as_layer=False)
    with pytest.raises(Corrupt, match="its contents belong at"), pytest.warns(RuntimeWarning, match="is bad"):
        PackLayer(path).read_record(RECORD.target["key"], RECORD.toolkit["key"], "swiglu", RECORD.problem)


def test_another_schema_is_named(tmp_path):
    manifest = b'{"format": "tilekern-pack", "schema": 3}'
    refused(pack(tmp_path / "a.pack", {}, manifest=manifest), tmp_path, "schema 3", kind=UnknownSchema, as_layer=False)


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{}", b'{"format": "tilekern-pack", "schema": 1}', b"\xff"])
def test_a_bad_manifest_is_named(tmp_path, manifest):
    refused(pack(tmp_path / "a.pack", {}, manifest=manifest), tmp_path)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 8), cut=st.booleans())
def test_changed_bytes_give_an_error_or_a_whole_cache(tmp_path, seed, changes, cut):
    chance, path = random.Random(seed), pack(tmp_path / "a.pack", members())
    data = bytearray(path.read_bytes())
    for _ in range(changes):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(data[: chance.randrange(len(data))] if cut else data)
    store = Store(tmp_path / uuid.uuid4().hex)
    _, error = outcome(lambda: install_pack(path, store))
    assert all(entry.problem is None for entry in store.entries())
    assert error is None or ("\n" not in error and not store.root.exists())
    hit = quietly([PackLayer(path)])
    assert hit is None or hit.record.kernel == "rms_norm"


def test_names_that_are_one_after_unicode_normalisation_are_refused(tmp_path):
    names = {f"v1/sm_90/t/k{e}/rows=1.json": b"x" for e in ("\u00e9", "e\u0301")}
    refused(pack(tmp_path / "a.pack", members() | names), tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", RECORD_PATH])
def test_a_duplicate_member_is_refused(tmp_path, name):
    path = pack(tmp_path / "a.pack", members())
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(name, archive.read(name))
    refused(path, tmp_path, "twice")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(tmp_path, method):
    refused(pack(tmp_path / "a.pack", members(), method=method), tmp_path, "stored or deflated")


def test_an_encrypted_member_is_refused(tmp_path):
    path = pack(tmp_path / "a.pack", members())
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    refused(path, tmp_path, "encrypted")


@pytest.mark.parametrize("damage", ["before", "after", "comment"])
def test_bytes_around_the_zip_are_refused(tmp_path, damage):
    path = pack(tmp_path / "a.pack", members())
    data = path.read_bytes()
    comment = data[:-2] + struct.pack("<H", 3) + b"abc"
    path.write_bytes({"before": b"#!/bin/sh\n" + data, "after": data + b"\n", "comment": comment}[damage])
    refused(path, tmp_path)


def test_a_bomb_of_zeros_is_refused_before_it_is_inflated(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.pack", members() | blob(bytes(72 * 2**20)))
    monkeypatch.setattr(zlib, "decompressobj", lambda *_: pytest.fail("it was inflated"))
    refused(path, tmp_path, "times as many")


def test_a_member_is_read_only_up_to_its_stated_size(tmp_path):
    """The headers and the manifest say one size, the deflated stream goes on for half a gigabyte."""
    contents = members()
    path = pack(tmp_path / "a.pack", contents)
    digest = next(iter(BLOBS))
    stream = zlib.compressobj(9, wbits=-15)
    once = stream.compress(bytes(2**20)) + stream.flush(zlib.Z_FULL_FLUSH)
    deflated = once * 512 + stream.flush()
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    file, directory = io.BytesIO(), b""
    for name, content in [("manifest.json", manifest_of(contents)), *contents.items()]:
        body = deflated if name.endswith(digest) else zlib.compress(content)[2:-4]
        # Of what would be read at the size that is said, so that the digest alone tells.
        crc = zlib.crc32(bytes(len(content))) if name.endswith(digest) else infos[name].CRC
        start, text = file.tell(), name.encode()
        common = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, crc, len(body), len(content), len(text), 0)
        file.write(b"PK\3\4" + common + text + body)
        directory += b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHLL", 0, 0, 0, 0, start) + text
    count, place = len(contents) + 1, file.tell()
    file.write(directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), place, 0))
    path.write_bytes(file.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(path, tmp_path, "not what the manifest says")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_members_that_share_their_bytes_count_by_what_they_unpack_to(tmp_path, monkeypatch):
    """Overlapping members, as in a bomb whose ratio is not deflate's: all names point at one stream."""
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED", 2**20)
    with io.BytesIO() as file:
        data = os.urandom(2**10) * 2**6
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", b"{}")
            archive.writestr("kernel", data)
            archive.filelist += [archive.filelist[1]] * 3000
        (tmp_path / "a.pack").write_bytes(file.getvalue())
    refused(tmp_path / "a.pack", tmp_path, "times as many")


def test_too_many_members_are_counted_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_entries", lambda *_: pytest.fail("the list of members was read"))
    count = archives.MOST_MEMBERS + 1
    directory = (b"PK\1\2" + bytes(42)) * count
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), 0, 0)
    (tmp_path / "a.pack").write_bytes(directory + end)
    refused(tmp_path / "a.pack", tmp_path, f"{count} members")


def test_a_member_behind_4_gib_is_refused(tmp_path):
    """Its place would be in a field of its own, which packs do not have."""
    path = pack(tmp_path / "a.pack", members())
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\1\2") + 42
    data[place : place + 4] = b"\xff" * 4
    path.write_bytes(data)
    refused(path, tmp_path, "4 GiB")


def test_a_list_of_members_that_is_too_long_is_not_read(tmp_path):
    length = archives.LARGEST_DIRECTORY + 1
    with open(tmp_path / "a.pack", "wb") as file:
        file.truncate(length)
        file.seek(length)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, length, 0, 0))
    refused(tmp_path / "a.pack", tmp_path, f"{length} bytes")


def test_a_manifest_that_inflates_without_end_is_refused(tmp_path):
    refused(pack(tmp_path / "a.pack", {}, manifest=b" " * (65 * 2**20)), tmp_path)


@pytest.mark.parametrize("size", [-1, 16 * 2**20 + 1, 2**40, 1.5, "1", True, None])
def test_an_invalid_size_is_refused(tmp_path, size):
    manifest = json.loads(manifest_of(members()))
    manifest["members"][RECORD_PATH]["size"] = size
    refused(pack(tmp_path / "a.pack", members(), manifest=json.dumps(manifest).encode()), tmp_path, "size")


def test_a_blob_of_another_size_than_the_record_says_is_refused(tmp_path):
    wrong = {name: replace(artifact, size=artifact.size + 1) for name, artifact in RECORD.artifacts.items()}
    refused(
        pack(tmp_path / "a.pack", members((replace(RECORD, artifacts=wrong), BLOBS))), tmp_path, "size", as_layer=False
    )


def test_forbidden_members_of_a_pack_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tilekern.cache.packs.writing.MOST_MEMBERS", 3)
    with pytest.raises(CacheError, match="select fewer records"):
        write_pack(tmp_path / "a.pack", [make()])
    monkeypatch.undo()
    monkeypatch.setattr("tilekern.cache.packs.writing.MOST_BYTES", 1000)
    with pytest.raises(CacheError, match="4 GiB"):
        write_pack(tmp_path / "a.pack", [make()])
    monkeypatch.undo()
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED", 0)
    with pytest.raises(CacheError, match="times as many"):
        write_pack(tmp_path / "a.pack", [make(bytes(2**22))])
    assert list(tmp_path.iterdir()) == []


def signature(digest, key=KEY, text=b"0" * 128 + b"\n"):
    return {f"v1/signatures/{digest[:2]}/{digest}.{key}.sig": text}


def test_signatures_belong_to_records_and_to_version_2(tmp_path):
    digest = digest_of(RECORD)
    signed = pack(tmp_path / "a.pack", members() | signature(digest), schema=2)
    assert install_pack(signed, Store(tmp_path / "c")).records == 1
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    refused(pack(tmp_path / "one/a.pack", members() | signature(digest)), tmp_path / "one", "has no signatures")
    stray = members() | signature("0" * 64)
    refused(pack(tmp_path / "other/a.pack", stray, schema=2), tmp_path / "other", "no record")


@pytest.mark.parametrize("text", [b"", b"0" * 128, b"0" * 129, b"G" * 128 + b"\n", b"0" * 500])
def test_a_signature_of_another_form_is_refused(tmp_path, text):
    digest = digest_of(RECORD)
    path = pack(tmp_path / "a.pack", members() | signature(digest, text=text), schema=2)
    with pytest.raises(Corrupt):
        install_pack(path, Store(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_a_pack_that_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.pack")
    with pytest.raises(CacheError, match="a pack is a file"):
        install_pack(tmp_path / "a.pack", Store(tmp_path / "there"))
    with pytest.raises(CacheError):
        install_pack("nul\0.pack", Store(tmp_path / "there"))
