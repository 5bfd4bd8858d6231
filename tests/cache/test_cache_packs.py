import hashlib
import json
import random
import stat
import uuid
import warnings
import zipfile

import pytest
from cache_samples import PROBLEM, SOURCE, find, make, outcome, put
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tilekern.cache import (
    CacheError,
    Corrupt,
    PackLayer,
    Store,
    UnknownSchema,
    has_better,
    install_pack,
    write_pack,
)

SECOND = {"problem": {**PROBLEM, "rows": 1}}


# By a clock that is far ahead.
AHEAD = "2099-01-01T00:00:00+00:00"


def rebuilt(path, change):
    """Write the pack anew from its members after ``change(members)``, with a manifest that fits."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != "manifest.json"}
    change(members)
    manifest = {
        "format": "tilekern-pack",
        "schema": 1,
        "members": {n: {"sha256": hashlib.sha256(d).hexdigest(), "size": len(d)} for n, d in members.items()},
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, data in members.items():
            archive.writestr(name, data)


def refused(path, root, kind=Corrupt):
    with pytest.raises(kind) as caught:
        install_pack(path, Store(root))
    assert "\n" not in str(caught.value)
    assert not root.exists()


@pytest.fixture
def path(tmp_path):
    write_pack(tmp_path / "a.pack", [make(), make(b"x", **SECOND)])
    return tmp_path / "a.pack"


def test_a_pack_carries_a_cache(path, tmp_path):
    store = Store(tmp_path / "there")
    assert install_pack(path, store) == 2
    assert {entry.record.problem["rows"] for entry in store.entries()} == {1, 8192}
    assert find([PackLayer(path)]).record == make()[0]


def test_the_same_contents_give_the_same_bytes(tmp_path):
    contents = [make(), make(b"x", **SECOND)]
    write_pack(tmp_path / "a.pack", contents)
    write_pack(tmp_path / "b.pack", iter(contents[::-1]))
    assert (tmp_path / "a.pack").read_bytes() == (tmp_path / "b.pack").read_bytes()


def test_what_does_not_fit_together_is_not_packed(tmp_path):
    record, blobs = make()
    for contents in ([(record, {})], [(record, blobs)] * 2, [(record, dict.fromkeys(blobs, b"bad"))]):
        with pytest.raises(CacheError):
            write_pack(tmp_path / "a.pack", contents)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="Not a directory"):
        write_pack(tmp_path / "file" / "a.pack", [(record, blobs)])


@pytest.mark.parametrize(
    ("present", "offered", "stays"),
    [("measured", "predicted", True), ("predicted", "measured", False), ("predicted", "predicted", False)],
)
def test_a_better_source_stays(tmp_path, present, offered, stays):
    put(tmp_path / "cache", provenance=present, created_by="present")
    write_pack(tmp_path / "a.pack", [make(provenance=offered, created_by="offered")])
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache")) == (not stays)
    (entry,) = Store(tmp_path / "cache").entries()
    assert entry.record.created_by == ("present" if stays else "offered")


@pytest.mark.parametrize(
    ("present", "offered", "stays"),
    [
        ({}, {"created": "2026-07-01T12:00:00+00:00"}, True),
        ({}, {"created": "2026-09-01T12:00:00+00:00"}, False),
        ({}, {"created": "2026-09-01T12:00:00+00:00", "provenance": "predicted"}, True),
        ({"provenance": "predicted"}, {"created": "2026-07-01T12:00:00Z"}, False),
        ({"source_digest": "1" * 64}, {"created": "2026-07-01T12:00:00Z"}, True),
        ({"source_digest": "1" * 64}, {"created": "2026-09-01T12:00:00Z"}, False),
    ],
)
@pytest.mark.parametrize("space", [SOURCE, "0" * 64])
def test_the_newer_record_stays(tmp_path, present, offered, stays, space):
    put(tmp_path / "cache", created_by="present", **present)
    write_pack(tmp_path / "a.pack", [make(space_digest=space, created_by="offered", **offered)])
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache")) == (not stays)
    (entry,) = Store(tmp_path / "cache").entries()
    assert entry.record.created_by == ("present" if stays else "offered")


@pytest.mark.parametrize("month", ["07", "09"])
@pytest.mark.parametrize(("of_today", "stays"), [("1" * 64, True), (SOURCE, False), ("2" * 64, None)])
def test_of_two_sources_that_of_today_stays_whatever_the_dates_say(tmp_path, month, of_today, stays):
    """An old pack takes nothing back; and after a downgrade of tilekern the old pack is the one that serves."""
    put(tmp_path / "cache", created_by="present", source_digest="1" * 64)
    write_pack(tmp_path / "a.pack", [make(created_by="offered", created=f"2026-{month}-01T12:00:00Z")])
    install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"), today=lambda _: of_today)
    (entry,) = Store(tmp_path / "cache").entries()
    kept = month == "07" if stays is None else stays
    assert entry.record.created_by == ("present" if kept else "offered")


def test_what_was_made_just_now_is_newer_than_any_date(tmp_path):
    put(tmp_path / "cache", created_by="present", created="2099-01-01T12:00:00Z")
    made = make(created_by="tuned")
    write_pack(tmp_path / "a.pack", [made])
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache")) == 0
    digest = hashlib.sha256(made[0].to_json().encode()).hexdigest()
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"), made_now=[digest]) == 1
    assert not has_better(Store(tmp_path / "cache"), made[0], made_now=True)


@pytest.mark.parametrize(
    "name",
    [
        "../escape",
        "/etc/escape",
        "v1/../../escape.json",
        "v1/blobs/../../escape",
        "v1/sm_90/t/k/../rows=1.json",
        "v1\\sm_90\\t\\k\\rows=1.json",
        "readme.txt",
        "v1/",
        "v1/blobs/00/" + "0" * 64,
        "v1/blobs/zz/zz",
        "v1/wanted/t/k/rows=1.json",
        "manifest.json/x",
    ],
)
def test_a_name_outside_the_layout_is_refused(path, tmp_path, name):
    rebuilt(path, lambda members: members.update({name: b"x"}))
    refused(path, tmp_path / "there")


def test_a_member_that_is_not_in_the_manifest_is_refused(path, tmp_path):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../escape", b"x")
    refused(path, tmp_path / "there")


def test_a_member_that_stands_twice_is_refused(path, tmp_path):
    name = str(make()[0].address.path)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(name, b"x")
    refused(path, tmp_path / "there")


def test_a_link_is_refused(path, tmp_path):
    record, _ = make()
    with zipfile.ZipFile(path) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in members.items():
            if info.filename == str(record.address.path):
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, data)
    refused(path, tmp_path / "there")


def test_a_blob_that_is_missing_or_nobodys_is_refused(path, tmp_path):
    digest = sorted(make()[0].digests)[0]
    stray = hashlib.sha256(b"stray").hexdigest()
    rebuilt(path, lambda members: members.update({f"v1/blobs/{stray[:2]}/{stray}": b"stray"}))
    refused(path, tmp_path / "there")
    rebuilt(path, lambda members: members.pop(f"v1/blobs/{stray[:2]}/{stray}"))
    rebuilt(path, lambda members: members.pop(f"v1/blobs/{digest[:2]}/{digest}"))
    refused(path, tmp_path / "there")


def test_a_record_under_another_records_name_is_refused(path, tmp_path):
    record, _ = make()
    other = replace(record, kernel="swiglu").address.path
    rebuilt(path, lambda members: members.update({str(other): members.pop(str(record.address.path))}))
    refused(path, tmp_path / "there")
    with pytest.raises(Corrupt, match="its contents belong at"):
        install_pack(path, Store(tmp_path / "there"), own=True)
    with pytest.raises(Corrupt, match="its contents belong at"), pytest.warns(RuntimeWarning, match="is bad"):
        PackLayer(path).read_record(record.target["key"], record.toolkit["key"], "swiglu", record.problem)


def test_a_size_that_is_not_bounded_is_refused(path, tmp_path):
    name = str(make()[0].address.path)
    rebuilt(path, lambda members: members.update({name: b" " * (16 * 2**20 + 1)}))
    refused(path, tmp_path / "there")


def test_another_schema_is_named(path, tmp_path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", '{"format": "tilekern-pack", "schema": 3}')
    refused(path, tmp_path / "there", UnknownSchema)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"format": "tilekern-pack", "schema": 1}', "\xff"])
def test_a_bad_manifest_is_named(path, tmp_path, manifest):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", manifest)
    refused(path, tmp_path / "there")


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 8), cut=st.booleans())
def test_changed_bytes_give_an_error_or_a_whole_cache(path, tmp_path, seed, changes, cut):
    chance = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(changes):
        data[chance.randrange(len(data))] = chance.randrange(256)
    damaged = tmp_path / "damaged.pack"
    damaged.write_bytes(data[: chance.randrange(len(data))] if cut else data)
    store = Store(tmp_path / uuid.uuid4().hex)
    _, error = outcome(lambda: install_pack(damaged, store))
    assert all(entry.problem is None for entry in store.entries())
    assert error is None or ("\n" not in error and not store.root.exists())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hit = find([PackLayer(damaged)])
    assert hit is None or hit.record.kernel == "rms_norm"


@pytest.mark.parametrize(
    ("present", "offered", "stays"),
    [
        ({"space_digest": "0" * 64, "created": AHEAD}, {}, False),
        ({}, {"space_digest": "0" * 64, "created": AHEAD}, True),
        ({}, {"source_digest": "1" * 64, "created": AHEAD}, True),
        ({"source_digest": "1" * 64, "created": AHEAD}, {"provenance": "predicted"}, False),
        ({"provenance": "predicted"}, {"space_digest": "0" * 64}, False),
    ],
    ids=["old space", "offers an old space", "offers an old source", "old source", "offers what was measured"],
)
def test_the_source_of_today_decides_and_no_clock(tmp_path, present, offered, stays):
    put(tmp_path / "cache", created_by="present", **present)
    write_pack(tmp_path / "a.pack", [make(created_by="offered", **offered)])
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"), today=lambda _: SOURCE) == (not stays)
    (entry,) = Store(tmp_path / "cache").entries()
    assert entry.record.created_by == ("present" if stays else "offered")
