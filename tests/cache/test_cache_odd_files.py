"""Pipes, devices, sockets, folders and huge files that others put in the place of a file."""

import os
import sys
import tracemalloc

import pytest
from cache_samples import blob_file, make, put, put_odd, quietly

from tilekern.cache import Corrupt, FolderLayer, Pack, PackLayer, Store, note_wanted, read_misses, read_wanted
from tilekern.cache.files import open_to_append, read_whole

KINDS = ["pipe", "socket", "folder", "device", "a link to a device", "a link to itself"]
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", KINDS)
def test_irregular_files_are_refused_at_once(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    record = put(tmp_path / "cache", b"one", b"two")
    put_odd(tmp_path / "odd", kind)
    with pytest.raises(Exception, match="odd") as caught:
        read_whole(tmp_path / "odd", 100)
    assert "is not a regular file" in str(caught.value) or kind in ("socket", "a link to itself")
    for path in (record, blob_file(tmp_path / "cache", b"one"), tmp_path / "a.pack"):
        put_odd(path, kind)
    assert quietly([FolderLayer(tmp_path / "cache", "user", writable=True), PackLayer(tmp_path / "a.pack")]) is None
    put(tmp_path / "wanted")
    for name in ("0" * 64 + ".json", "0" * 8 + ".misses"):
        put_odd(tmp_path / "wanted/v1/wanted" / name, kind)
    note_wanted(tmp_path / "wanted", "swiglu", {"rows": 1}, {"key": "k"}, "asked")
    assert len(read_wanted(tmp_path / "wanted")) == 1
    assert read_misses(tmp_path / "wanted") == {}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_pack_is_a_regular_file(tmp_path, kind):
    put_odd(tmp_path / "a.pack", kind)
    with pytest.raises(Exception, match="a pack is a file"):
        Pack(tmp_path / "a.pack")


def test_a_pipe_that_replaces_a_pack_while_it_is_opened_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.pack")
    (tmp_path / "file").write_text("")
    regular = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    with pytest.raises(Exception, match="a pack is a file"):
        Pack(tmp_path / "a.pack")
    monkeypatch.undo()


def test_a_huge_file_takes_no_memory(tmp_path):
    """The file is sparse: the size of a disk, without contents."""
    record = put(tmp_path / "cache", b"one", b"two")
    for path in (record, blob_file(tmp_path / "cache", b"one")):
        os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="has 1099511627776 bytes, and may have at most 100"):
            read_whole(record, 100)
        assert quietly([FolderLayer(tmp_path / "cache", "user", writable=True)]) is None
        [entry] = Store(tmp_path / "cache").entries()
        assert "has 1099511627776 bytes" in entry.problem
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_of_just_the_size_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_whole(tmp_path / "file", 100)[0] == b"x" * 100
    with pytest.raises(Corrupt):
        read_whole(tmp_path / "file", 99)


@pytest.mark.parametrize("kind", [*KINDS, "a link to a file"])
def test_nothing_is_appended_to_what_is_not_a_regular_file(tmp_path, kind):
    (tmp_path / "own").write_text("mine")
    if kind == "a link to a file":
        (tmp_path / "journal").symlink_to("own")
    else:
        put_odd(tmp_path / "journal", kind)
    with pytest.raises(OSError, match=r"journal|No such device|Is a directory"):
        open_to_append(tmp_path / "journal", 0o644)
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_what_is_refused_leaves_no_descriptor_open(tmp_path):
    put_odd(tmp_path / "pipe", "pipe")
    (tmp_path / "large").write_bytes(b"xx")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pipe", "large"):
        with pytest.raises(Corrupt):
            read_whole(tmp_path / name, 1)
    with pytest.raises(OSError, match="not a regular file"):
        open_to_append(tmp_path / "pipe", 0o644)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("depth", [1000, 200_000])
def test_endlessly_nested_json_is_not_a_record(tmp_path, depth):
    record = put(tmp_path / "cache")
    text = make()[0].to_json().replace('"runners_up": [', '"runners_up": [' + "[" * depth + "]" * depth + ", ", 1)
    record.write_text(text)
    assert quietly([FolderLayer(tmp_path / "cache", "user", writable=True)]) is None
