"""Links and other files that have no business in a cache: nothing outside it is written, moved or deleted."""

import os
import time
from pathlib import Path

import pytest
from cache_samples import PROBLEM, blob_file, find, make, outcome, put, put_odd, quietly
from test_cache_unpack import killed

from tilekern.cache import CacheError, FolderLayer, Store, clear_wanted, install_pack, note_wanted, write_pack
from tilekern.cache import folders as folders_of_a_cache
from tilekern.cache.folders import opened
from tilekern.cache.keys import blob_path, is_place

OTHER_USER = 12345
RECORD = make()[0].address.path
DIGEST = "4c" * 32


@pytest.fixture
def own(tmp_path):
    """A folder of the user's outside the cache, with files of many names, an hour old."""
    own = tmp_path / "own"
    for name in ("thesis.tex", "a/data.bin", DIGEST, "x.bad", "x.tmp", "x.dropped", f"{'0' * 64}.{'1' * 64}.sig",
                 "wanted.json", "d/e/f/rows=1.json", str(RECORD)):  # fmt: skip
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("mine\n")
    for path in own.rglob("*"):
        os.utime(path, (time.time() - 3600,) * 2)
    return own


def seen(folder):
    return {
        path: (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }  # fmt: skip


PLACES = ["v1", "v1/incoming", "v1/incoming/x", "v1/incoming/x/v1", "v1/incoming/x.tmp", "v1/incoming/x/v1/blobs",
          "v1/blobs", "v1/blobs/4c", "v1/blobs/zz", "v1/signatures", "v1/signatures/00", "v1/wanted",
          str(RECORD.parents[2]), str(RECORD.parent)]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_no_operation_on_the_cache_changes_anything_through_a_link(tmp_path, own, place):
    root = tmp_path / "from-elsewhere"
    (root / place).parent.mkdir(parents=True)
    (root / place).symlink_to(own)
    before, store = seen(own), Store(root)
    write_pack(tmp_path / "a.pack", [make()])
    list(store.entries())
    list(store.leftovers())
    assert seen(own) == before, "by looking"
    quietly([FolderLayer(root, "user", writable=True)])
    for write in (
        store.finish,
        lambda: store.collect_garbage(grace_s=-1),
        lambda: store.remove(store.entries()),
        lambda: install_pack(tmp_path / "a.pack", store),
        lambda: store.write(*make(created_by="again")),
        lambda: note_wanted(root, "swiglu", PROBLEM, {"key": "k"}, "asked"),
        lambda: clear_wanted(root),
    ):
        said = outcome(write)[1]
        assert said is None or "is a link, and nothing is written or deleted through a link inside a cache" in said
        assert seen(own) == before
    assert (root / place).is_symlink() or "incoming" in place


def test_a_file_in_incoming_is_not_moved_through_a_link_on_its_way(tmp_path, own):
    root, there = tmp_path / "cache", RECORD.parent
    place = killed(root, {RECORD: b"theirs"})
    (root / there).parent.mkdir(parents=True)
    (root / there).symlink_to(own)
    before = seen(own)
    Store(root).finish()
    assert seen(own) == before
    assert (place / RECORD).exists()


@pytest.mark.parametrize(
    "name",
    ["h/profile", "profile", ".nfs0001", "v1/.nfs0001", "v1/blobs/4c/" + "5" * 64, "v1/wanted/" + "0" * 64 + ".json",
     "v1/incoming/y/" + str(RECORD), "v1/t/k", "v1/t/k/rms_norm/rows.json", "v1/t/k/rms_norm/a\nb=1.json",
     "v1/signatures/00/" + "0" * 64, "sweeps/x", pytest.param("/".join(["d"] * 300), id="deep")],
)  # fmt: skip
def test_other_files_stay_in_incoming_without_an_error(tmp_path, name):
    root = put(tmp_path / "cache").parents[4]
    place = killed(root, {Path(name): b"stray", blob_path(DIGEST): b"blob"})
    Store(root).finish()
    assert (place / name).read_bytes() == b"stray"
    assert not (root / name).exists()
    assert (root / blob_path(DIGEST)).read_bytes() == b"blob"
    assert find([FolderLayer(root, "user", writable=True)])
    assert place in Store(root).leftovers()
    assert len(list(Store(root).entries())) == 1


@pytest.mark.parametrize("kind", ["a link to a file", "a link to a device", "pipe", "socket", "folder"])
def test_only_regular_files_are_moved_out_of_incoming(tmp_path, own, kind):
    root = tmp_path / "cache"
    path = killed(root, {blob_path(DIGEST): b"blob"}) / blob_path("5" * 64)
    if kind == "a link to a file":
        path.parent.mkdir()
        path.symlink_to(own / "thesis.tex")
    else:
        put_odd(path, kind)
    Store(root).finish()
    assert not os.path.lexists(root / blob_path("5" * 64))
    assert (root / blob_path(DIGEST)).exists()


def test_a_folder_where_a_file_of_incoming_goes_stops_it_before_its_record(tmp_path):
    root = tmp_path / "cache"
    place = killed(root, {RECORD: b"record", blob_path(DIGEST): b"blob"})
    (root / blob_path(DIGEST)).mkdir(parents=True)
    Store(root).finish()
    assert (place / RECORD).exists()
    assert not (root / RECORD).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("what", ["folder", "file", "abandoned"])
def test_what_another_user_left_in_incoming_is_theirs_to_finish(tmp_path, what):
    root = tmp_path / "cache"
    place = killed(root, {blob_path(DIGEST): b"theirs"}, "x.tmp" if what == "abandoned" else "x")
    os.chown(place / blob_path(DIGEST) if what == "file" else place, OTHER_USER, 0)
    Store(root).finish()
    Store(root).collect_garbage(grace_s=-1)
    assert (place / blob_path(DIGEST)).exists()
    assert not (root / blob_path(DIGEST)).exists()


def test_an_unpack_into_a_cache_with_a_link_is_refused_before_anything_is_committed(tmp_path, own):
    root = tmp_path / "cache"
    (root / "v1").mkdir(parents=True)
    (root / "v1/blobs").symlink_to(own)
    write_pack(tmp_path / "a.pack", [make()])
    for _ in range(2):
        with pytest.raises(CacheError, match="v1/blobs is a link, and nothing is written"):
            install_pack(tmp_path / "a.pack", Store(root))
        assert not (root / "v1/incoming").exists()


def test_the_root_and_what_leads_to_it_may_be_links(tmp_path):
    (tmp_path / "disk/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "disk/cache").symlink_to("deep")
    store = Store(tmp_path / "link/cache")
    write_pack(tmp_path / "a.pack", [make()])
    assert install_pack(tmp_path / "a.pack", store).records == 1
    put(store.root, b"more", problem={**PROBLEM, "rows": 1})
    (entry,) = (entry for entry in store.entries() if entry.record.problem["rows"] == 1)
    assert not store.is_linked(entry.path)
    assert store.collect_garbage(store.remove([entry])).blobs == 1
    assert find([FolderLayer(store.root, "user", writable=True)])
    assert (tmp_path / "disk/deep" / RECORD).exists()


def test_a_bad_file_behind_a_link_is_passed_over_and_stays(tmp_path, own):
    root = put(tmp_path / "cache").parents[4]
    folder = (root / RECORD).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / RECORD.name).write_text("{")
    assert quietly([FolderLayer(root, "user", writable=True)]) is None
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [RECORD.name]


def test_records_behind_a_link_stay_and_keep_their_blobs(tmp_path):
    root = put(tmp_path / "cache", b"one").parents[4]
    folder = (root / RECORD).parents[2]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(root / "v1")
    store = Store(root)
    (entry,) = (entry for entry in store.entries() if entry.record)
    assert store.is_linked(entry.path)
    assert not store.remove([entry])
    assert store.collect_garbage(grace_s=-1).blobs == 0
    assert blob_file(root, b"one").exists()
    assert find([FolderLayer(root, "user")]).load("aligned") == b"one"


def test_a_link_that_takes_a_folders_place_at_the_last_moment_is_not_followed(tmp_path, own, monkeypatch):
    """Another user of a shared cache replaces a folder between the check and its use."""
    root = tmp_path / "cache"
    blob = root / blob_path(DIGEST)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"garbage")
    os.utime(blob, (0, 0))
    garbage, before = Store.garbage, seen(own)

    def then_exchanged(self, *arguments):
        found = garbage(self, *arguments)
        blob.parent.rename(tmp_path / "aside")
        blob.parent.symlink_to(own)
        return found

    monkeypatch.setattr(Store, "garbage", then_exchanged)
    found = Store(root).collect_garbage()
    assert found.blobs == 0
    assert "blobs/4c is a link" in found.kept
    assert seen(own) == before


def test_a_link_that_comes_while_a_folder_is_opened_is_not_followed(tmp_path, own, monkeypatch):
    (tmp_path / "cache/v1/blobs").mkdir(parents=True)
    open_ = os.open

    def late(path, flags, *arguments, **options):
        if path == "blobs":
            (tmp_path / "cache/v1/blobs").rmdir()
            (tmp_path / "cache/v1/blobs").symlink_to(own)
        return open_(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(OSError, match="is a link"), opened(tmp_path / "cache", "v1", "blobs"):
        pass
    monkeypatch.undo()


def test_no_descriptor_is_left_open(tmp_path, own):
    (tmp_path / "cache/v1").mkdir(parents=True)
    (tmp_path / "cache/v1/blobs").symlink_to(own)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for names, wrong in ((("v1", "blobs"), "v1/blobs"), (("v1", "none"), "v1/none"), (("none", "v1"), "none")):
        with pytest.raises(OSError, match=r"link|directory") as caught, opened(tmp_path / "cache", *names):
            pass
        assert caught.value.filename == str(tmp_path / "cache" / wrong)
    list(folders_of_a_cache.files_inside(tmp_path / "cache", "v1"))
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before


def test_the_places_of_a_cache_are_those_that_it_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    put(tmp_path / "cache")
    written = [path.relative_to(tmp_path / "cache") for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(written) == 4
    assert all(map(is_place, written))
