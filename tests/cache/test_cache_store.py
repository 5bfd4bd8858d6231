import errno
import json
import os
import resource
import signal
import time

import pytest
from cache_samples import PROBLEM, blob_file, failing_folders, find, make, put
from msgspec.structs import replace

from tilekern.cache import CacheError, FolderLayer, Missing, Store, UnknownSchema, install_pack, write_pack
from tilekern.cache.files import read_whole, write_whole
from tilekern.cache.folders import is_gone, set_aside, write_below


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_round_trip(tmp_path):
    record, blobs = make()
    path = Store(tmp_path).write(record, blobs)
    key = "rows=8192,columns=4096,dtype=bfloat16"
    assert path == tmp_path / "v1/sm_90-h200-132/tileiras-13.4.92/rms_norm" / f"{key}.json"
    assert files(tmp_path) == sorted(
        [str(path.relative_to(tmp_path)), *(f"v1/blobs/{digest[:2]}/{digest}" for digest in blobs)]
    )
    (entry,) = Store(tmp_path).entries()
    assert (entry.record, entry.problem, entry.unknown_schema, entry.path) == (record, None, False, path)
    assert entry.size_bytes == path.stat().st_size + sum(map(len, blobs.values()))
    hit = find([FolderLayer(tmp_path, "user")])
    assert hit.record == record
    assert hit.load("aligned") == blobs[record.artifacts["aligned"].sha256]
    with pytest.raises(CacheError, match="'odd'"):
        hit.load("odd")


def test_an_intact_blob_is_kept_and_a_bad_one_replaced(tmp_path):
    put(tmp_path, b"one")
    blob = blob_file(tmp_path, b"one")
    before = blob.stat().st_ino
    put(tmp_path, b"one")
    assert blob.stat().st_ino == before
    blob.write_bytes(b"bad")
    put(tmp_path, b"one")
    assert blob.read_bytes() == b"one"


def test_blobs_that_are_there_need_not_be_given(tmp_path):
    record, blobs = make()
    store = Store(tmp_path)
    with pytest.raises(Missing):
        store.write(record, {})
    assert files(tmp_path) == []
    store.write(record, blobs)
    store.write(replace(record, candidates=99), {})
    assert next(store.entries()).record.candidates == 99


@pytest.mark.parametrize("damage", ["digest", "size", "unclaimed", "field"])
def test_inconsistent_contents_are_not_written(tmp_path, damage):
    record, blobs = make(b"one")
    artifact = record.artifacts["aligned"]
    if damage == "digest":
        blobs = {artifact.sha256: b"two"}
    elif damage == "size":
        record = replace(record, artifacts={"aligned": replace(artifact, size=4)})
    elif damage == "unclaimed":
        blobs["0" * 64] = b"stray"
    else:
        record = replace(record, target={})
    with pytest.raises(CacheError):
        Store(tmp_path).write(record, blobs)
    assert files(tmp_path) == []


def test_a_root_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "cache"
    write_pack(tmp_path / "a.pack", [make()])
    for write in (lambda: put(root), lambda: install_pack(tmp_path / "a.pack", Store(root))):
        with pytest.raises(CacheError, match=r"cannot write to the cache folder .*file/cache: Not a directory"):
            write()
    assert list(Store(root).entries()) == []
    assert find([FolderLayer(root, "user", writable=True)]) is None


def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path):
    put(tmp_path, b"old")
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CacheError, match=r"cannot write to the cache folder .*: File too large"):
            put(tmp_path, b"new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert files(tmp_path) == before
    assert find([FolderLayer(tmp_path, "user")]).load("aligned") == b"old"


def test_a_record_of_another_schema_is_left_alone(tmp_path):
    path = put(tmp_path)
    path.write_text(text := json.dumps({"schema": 99, "blob": "f" * 64}))
    with pytest.raises(UnknownSchema, match="left alone"):
        put(tmp_path)
    assert path.read_text() == text
    (entry,) = Store(tmp_path).entries()
    assert entry.unknown_schema
    assert entry.address.kernel == "rms_norm"


def test_entries_name_what_is_wrong_with_each_file(tmp_path):
    put(tmp_path)
    good = put(tmp_path, problem={**PROBLEM, "rows": 1})
    (good.parent / "rows=2.json").write_text("{")
    (good.parent / "rows=3.json").write_bytes(good.read_bytes())
    (good.parent / "rows=4.json").mkdir()
    (good.parent / "odd name.json").write_bytes(b"\xff")
    (tmp_path / "v1" / "stray.json").write_bytes(good.read_bytes())
    problems = {entry.path.name: entry.problem for entry in Store(tmp_path).entries() if entry.problem}
    assert sorted(problems) == ["odd name.json", "rows=2.json", "rows=3.json", "stray.json"]
    assert "belong" in problems["rows=3.json"]
    assert sum(1 for entry in Store(tmp_path).entries() if entry.record) == 2


@pytest.fixture
def unlistable(monkeypatch):
    return failing_folders(monkeypatch)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, unlistable):
    unlistable.append(put(tmp_path, b"one").parent)
    put(tmp_path, b"two", kernel="swiglu")
    store = Store(tmp_path)
    found = list(store.entries())
    assert [entry.path.name for entry in found if entry.record] == ["rows=8192,columns=4096,dtype=bfloat16.json"]
    assert (found[-1].path, found[-1].address, found[-1].size_bytes) == (unlistable[0], None, 0)
    assert found[-1].problem == f"cannot list {unlistable[0]}: Input/output error"
    assert not store.remove(entry for entry in list(store.entries()) if not entry.record)
    unlistable[:] = [tmp_path / "v1"]
    assert [entry.path for entry in store.entries()] == [tmp_path / "v1"]
    assert list(Store(tmp_path / "none").entries()) == []


def test_blobs_of_records_in_a_folder_that_cannot_be_listed_are_kept(tmp_path, unlistable):
    unlistable.append(put(tmp_path, b"one").parent)
    age(blob_file(tmp_path, b"one"), 1000)
    garbage = Store(tmp_path).collect_garbage()
    assert (garbage.blobs, "cannot list" in (garbage.kept or "")) == (0, True)
    assert blob_file(tmp_path, b"one").exists()


def test_a_good_file_that_was_put_there_meanwhile_is_not_set_aside(tmp_path):
    path = put(tmp_path)
    good = path.read_bytes()
    path.write_text("{")
    _, seen = read_whole(path, 1000)
    write_whole(path, good)
    assert not set_aside(tmp_path, path.relative_to(tmp_path), seen)
    assert path.read_bytes() == good
    assert not list(Store(tmp_path).leftovers())


def test_blobs_that_no_record_refers_to_are_garbage(tmp_path):
    store = Store(tmp_path)
    put(tmp_path, b"shared", b"first")
    put(tmp_path, b"shared", b"second", problem={**PROBLEM, "rows": 1})
    first = next(entry for entry in store.entries() if entry.record.problem["rows"] == 8192)
    released = store.remove([first])
    assert not first.path.exists()
    assert store.collect_garbage().blobs == 0
    garbage = store.collect_garbage(released)
    assert (garbage.blobs, garbage.size_bytes) == (1, len(b"first"))
    assert blob_file(tmp_path, b"shared").exists()


def test_young_blobs_and_temporary_files_wait_for_their_writer(tmp_path):
    store = Store(tmp_path)
    put(tmp_path, b"one")
    store.remove(store.entries())
    temporary = blob_file(tmp_path, b"one").with_name(".x.tmp")
    temporary.write_bytes(b"half")
    aside = temporary.with_name("y.bad")
    aside.write_bytes(b"bad")
    assert store.collect_garbage().blobs == 0
    assert temporary.exists()
    assert not aside.exists()
    age(temporary, 1000)
    age(blob_file(tmp_path, b"one"), 1000)
    assert store.collect_garbage().blobs == 1
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"schema": 99, "blob": "%s"}', None),
        ('{"schema": 1, "artifacts": {"a": "%s"', None),
        ('{"schema": 99, "blob": "%.9s"}', "may refer to any blob"),
    ],
)
def test_blobs_of_records_that_cannot_be_read_are_kept(tmp_path, text, kept):
    path = put(tmp_path, b"one")
    blob = blob_file(tmp_path, b"one")
    age(blob, 1000)
    path.write_text(text % blob.name)
    garbage = Store(tmp_path).collect_garbage()
    assert garbage.blobs == 0
    assert garbage.kept is None if kept is None else kept in garbage.kept
    assert blob.exists()


class Interrupted(Store):
    """A store in which another process does something right after the first look at what records refer to."""

    def __init__(self, root, meanwhile):
        super().__init__(root)
        self.meanwhile = [meanwhile]

    def _references(self, without=()):
        found = super()._references(without)
        while self.meanwhile:
            self.meanwhile.pop()()
        return found


def test_a_blob_whose_record_comes_during_garbage_collection_stays(tmp_path):
    put(tmp_path, b"one")
    Store(tmp_path).remove(Store(tmp_path).entries())
    garbage = Interrupted(tmp_path, lambda: put(tmp_path, b"one")).collect_garbage(grace_s=-1.0)
    assert garbage.blobs == 0
    assert find([FolderLayer(tmp_path, "user")]).load("aligned") == b"one"
    assert not list(Store(tmp_path).leftovers())


def test_garbage_collection_that_loses_sight_of_the_records_gives_back_what_it_took(tmp_path):
    put(tmp_path, b"one")
    record = put(tmp_path, b"two", problem={**PROBLEM, "rows": 1})
    put(tmp_path, b"three", problem={**PROBLEM, "rows": 1})
    garbage = Interrupted(tmp_path, lambda: record.write_text('{"schema": 99}')).collect_garbage(grace_s=-1.0)
    assert (garbage.blobs, "may refer to any blob" in garbage.kept) == (0, True)
    assert blob_file(tmp_path, b"two").exists()


def test_the_next_garbage_collection_finishes_that_of_a_killed_one(tmp_path):
    put(tmp_path, b"one")
    for data in (b"one", b"nobody's"):
        blob = blob_file(tmp_path, data)
        blob.parent.mkdir(exist_ok=True)
        blob.with_name(f"{blob.name}.0123456789ab.dropped").write_bytes(data)
    blob_file(tmp_path, b"one").unlink()
    assert len(list(Store(tmp_path).leftovers())) == 2
    assert Store(tmp_path).collect_garbage().blobs == 1
    assert find([FolderLayer(tmp_path, "user")]).load("aligned") == b"one"
    assert not list(Store(tmp_path).leftovers())


def test_a_blob_that_vanishes_before_its_record_is_written_again(tmp_path, monkeypatch):
    record, blobs = make(b"one")
    Store(tmp_path).write(record, blobs)

    def write_and_lose(root, path, data):
        blob_file(tmp_path, b"one").unlink(missing_ok=True)
        write_below(root, path, data)

    monkeypatch.setattr("tilekern.cache.store.write_below", write_and_lose)
    Store(tmp_path).write(replace(record, candidates=99), {})
    hit = find([FolderLayer(tmp_path, "user")])
    assert (hit.record.candidates, hit.load("aligned")) == (99, b"one")


def test_a_record_that_was_rewritten_after_it_was_listed_is_not_removed(tmp_path):
    path = put(tmp_path, b"old")
    age(path, 10)
    listed = list(Store(tmp_path).entries())
    put(tmp_path, b"new")
    assert Store(tmp_path).remove(listed) == []
    assert find([FolderLayer(tmp_path, "user")]).load("aligned") == b"new"


def test_a_folder_that_was_deleted_and_came_back_is_not_a_fault(tmp_path):
    """Another process may create it between the failed listing and the check."""
    (tmp_path / "nothing").symlink_to(tmp_path / "gone")
    assert is_gone(FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path)))
    assert is_gone(NotADirectoryError(errno.ENOTDIR, "Not a directory", str(tmp_path / "file" / "below")))
    for there in (tmp_path / "nothing", tmp_path):
        kind = FileNotFoundError if there.is_symlink() else NotADirectoryError
        assert not is_gone(kind(errno.ENOENT, "", str(there)))
    assert not is_gone(PermissionError(errno.EACCES, "Permission denied", str(tmp_path)))
