"""Scenes on a small disk of their own, in a process that may mount one: ``python cache_disks.py SCENE ROOT``."""

import contextlib
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

from cache_samples import PROBLEM, find, make, outcome, put

from tilekern.cache import FolderLayer, Store, install_pack, note_wanted, write_pack


def mount(root, options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)], check=True)


def a_disk_that_fills_up(root):
    """At every level of free space a new record is whole or refused in one line, and the old one stays."""
    mount(root, "size=256k")
    put(root, b"old")
    filler, refused = root / "filler", 0
    other = {**PROBLEM, "rows": 1}
    for filled in range(60):
        with contextlib.suppress(OSError):  # in the end it takes all that is left
            filler.write_bytes(bytes(4096 * filled))
        record, blobs = make(b"new" * 10_000, b"%d" % filled, problem=other)
        _, error = outcome(lambda record=record, blobs=blobs: Store(root).write(record, blobs))
        assert error in (None, f"cannot write to the cache folder {root}: No space left on device"), error
        refused += error is not None
        assert not list(Store(root).leftovers())
        assert all(entry.record for entry in Store(root).entries())
        assert find([FolderLayer(root, "user")]).load("aligned") == b"old"
        written = find([FolderLayer(root, "user")], other)
        assert not error or written is None or written.load("generic") != b"%d" % filled
        filler.unlink()
        Store(root).collect_garbage(grace_s=-1.0)
    assert 0 < refused < 60


def a_disk_that_becomes_read_only(root):
    mount(root, "size=1m")
    put(root, b"old")
    bad = put(root, b"bad", problem={**PROBLEM, "rows": 1})
    bad.write_text("{")
    mount(root, "remount,ro")
    user = FolderLayer(root, "user", writable=True)
    _, error = outcome(lambda: put(root, b"new"))
    assert error == f"cannot write to the cache folder {root}: Read-only file system", error
    assert not note_wanted(root, "rms_norm", PROBLEM, {}, "no record")
    assert find([user]).load("aligned") == b"old"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not find([user], {**PROBLEM, "rows": 1}).exact_bucket
    assert len(caught) == 1, "what is bad is said, and cannot be set aside"
    assert bad.read_text() == "{"
    _, error = outcome(lambda: Store(root).remove(Store(root).entries()))
    assert error.endswith("Read-only file system"), error


def an_unpack_that_disks_have_room_for_or_not(root):
    """An unpack writes all or nothing, on a disk of any size."""
    disk, cache, outcomes = root / "disk", root / "cache", []
    disk.mkdir()
    put(cache, b"old", b"shared", created_by="old")
    records = [make(b"new %d" % rows * 50, b"shared", problem={**PROBLEM, "rows": rows}) for rows in (1, 64, 8192)]
    write_pack(root / "new.pack", records)
    for pages in range(4, 80, 4):
        mount(disk, f"size={pages * 4}k,mode=755")
        try:
            shutil.copytree(cache, disk / "cache")
        except shutil.Error:
            continue
        before = sorted((disk / "cache").rglob("*"))
        _, error = outcome(lambda: install_pack(root / "new.pack", Store(disk / "cache")))
        assert error in (None, f"cannot write to the cache folder {disk / 'cache'}: No space left on device"), error
        assert error is None or sorted((disk / "cache").rglob("*")) == before
        for record, blobs in records:
            hit = find([FolderLayer(disk / "cache", "user")], record.problem)
            expected = blobs[record.artifacts["aligned"].sha256] if error is None else b"old"
            assert (hit.load("aligned"), hit.exact_bucket or bool(error)) == (expected, True)
        outcomes.append(error is None)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


SCENES = (a_disk_that_fills_up, a_disk_that_becomes_read_only, an_unpack_that_disks_have_room_for_or_not)

if __name__ == "__main__":
    {scene.__name__: scene for scene in SCENES}[sys.argv[1]](Path(sys.argv[2]))
