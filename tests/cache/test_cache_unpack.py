"""An unpack is all or nothing: killed at any step, on a disk that is full at any step, and beside other processes."""

import errno
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cache_samples import PROBLEM, blob_file, find, make, put

from tilekern.cache import CacheError, FolderLayer, Store, UnknownSchema, install_pack, write_pack
from tilekern.cache.keys import blob_path
from tilekern.cache.packs.incoming import Incoming

ROWS = (1, 64, 8192)
WRITING = ("os.mkdir", "os.rename", "os.link", "os.utime")
CHANGING = (*WRITING, "os.remove", "os.rmdir")


def changes(event, arguments):
    """Return whether an audit event is a call that changes the file system."""
    return event in CHANGING or (event == "open" and bool(arguments[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)))


def needs_room(event, arguments):
    return event in WRITING or (event == "open" and bool(arguments[2] & os.O_CREAT))


@pytest.fixture
def pack(tmp_path):
    """Three records that share a blob; the cache has an older one in place of the last."""
    records = [make(b"new %d" % r * 50, b"shared", problem={**PROBLEM, "rows": r}, created_by="new") for r in ROWS]
    write_pack(tmp_path / "new.pack", records)
    return tmp_path / "new.pack"


@pytest.fixture
def cache(tmp_path):
    put(tmp_path / "cache", b"old", b"shared", created_by="old")
    put(tmp_path / "cache", b"other", kernel="swiglu")
    return tmp_path / "cache"


OLD, NEW = {8192: "old"}, dict.fromkeys(ROWS, "new")


def seen_by_tools(root):
    return {
        e.record.problem["rows"]: e.record.created_by for e in Store(root).entries() if e.record.kernel == "rms_norm"
    }


def seen_by_jobs(root):
    """Return what lookups of a new process find, with their artifacts checked."""
    layer, seen = FolderLayer(root, "user", writable=True), {}
    for rows in ROWS:
        hit = find([layer], {**PROBLEM, "rows": rows})
        if hit and hit.exact_bucket:
            seen[rows] = hit.record.created_by
            assert hit.load("aligned") == (b"old" if seen[rows] == "old" else b"new %d" % rows * 50)
    return seen


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def interrupted(root, pack, step, act):
    """Run an unpack in a process whose ``step``-th change of the file system is met by ``act``; status and message."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        left = [step]

        def hook(event, arguments):
            if changes(event, arguments):
                left[0] -= 1
                if left[0] < 0:
                    act(event, arguments)

        sys.addaudithook(hook)
        try:
            install_pack(pack, Store(root))
        except CacheError as error:
            os.write(writing, str(error).encode())
            os._exit(2)
        os._exit(0)
    os.close(writing)
    status = os.waitpid(child, 0)[1]
    with open(reading) as pipe:
        return status, pipe.read()


def is_whole(root):
    """Return whether the folder of an unpack is complete and only its files must be moved."""
    return any(path.suffix != ".tmp" for path in (root / "v1" / "incoming").glob("*"))


def kill(event, arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def fill(event, arguments):
    if needs_room(event, arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.processes
@pytest.mark.nightly
def test_killed_at_any_step_it_is_all_or_nothing(cache, pack, tmp_path):
    outcomes = []
    for step in range(1000):
        root = tmp_path / f"killed-{step}"
        shutil.copytree(cache, root)
        status, _ = interrupted(root, pack, step, kill)
        before = files(root)
        seen = seen_by_tools(root), seen_by_jobs(root)
        assert files(root) == before, "looking at it writes nothing"
        # Between the rename that decides and the last move some records are the new ones; each is whole.
        assert seen in ((OLD, OLD), (NEW, NEW)) or is_whole(root), (step, seen)
        assert all(made == "new" or OLD.get(rows) == made for rows, made in seen[1].items())
        Store(root).finish()
        assert seen_by_jobs(root) in (OLD, NEW)
        outcomes.append(seen_by_jobs(root) == NEW)
        install_pack(pack, Store(root))
        assert seen_by_jobs(root) == NEW
        Store(root).collect_garbage(grace_s=-1)
        assert not any("incoming" in path or path.endswith(".tmp") for path in files(root))
        shutil.rmtree(root)
        if status == 0:
            break
    assert status == 0
    assert len(outcomes) > 30
    assert outcomes == sorted(outcomes), "once it is in, it stays in"
    assert 5 < outcomes.index(True) < len(outcomes) - 5, "steps before and after the one that decides"


@pytest.mark.nightly
def test_on_a_disk_that_is_full_at_any_step_it_is_all_or_nothing(cache, pack, tmp_path):
    before, outcomes = files(cache), []
    for step in range(1000):
        root = tmp_path / f"full-{step}"
        shutil.copytree(cache, root)
        status, message = interrupted(root, pack, step, fill)
        if os.waitstatus_to_exitcode(status) == 2:
            assert message == f"cannot write to the cache folder {root}: No space left on device"
        Store(root).finish()
        left = files(root)
        seen = seen_by_tools(root)
        assert seen in (OLD, NEW), (step, seen)
        if seen == OLD:
            assert left == before
        outcomes.append(seen == NEW)
        shutil.rmtree(root)
        if status == 0 and outcomes[-1]:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes.index(True) > 5


def test_a_record_of_another_schema_stops_it_before_the_first_write(cache, pack):
    path = cache / make()[0].address.path
    path.write_text('{"schema": 99}')
    before = files(cache)
    with pytest.raises(UnknownSchema, match="left alone"):
        install_pack(pack, Store(cache))
    assert files(cache) == before


def test_the_bytes_of_a_record_arrive_as_they_were(pack, tmp_path):
    install_pack(pack, Store(tmp_path / "there"))
    write_pack(
        tmp_path / "again.pack",
        [
            (entry.record, {digest: Store(tmp_path / "there").read_blob(digest) for digest in entry.record.digests})
            for entry in Store(tmp_path / "there").entries()
        ],
    )
    assert (tmp_path / "again.pack").read_bytes() == pack.read_bytes()


def killed(root, files, name="abc"):
    """Leave what an unpack leaves that was killed when its files were whole and none was moved; a minute ago."""
    place = root / "v1" / "incoming" / name
    for path, data in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    for path in (place, *place.rglob("*")):
        os.utime(path, (time.time() - 100,) * 2)
    return place


def test_the_next_writer_finishes_a_killed_unpack(cache):
    record, blobs = make(b"killed", problem={**PROBLEM, "rows": 3})
    data = Store(cache.parent / "other").write(record, blobs).read_bytes()
    killed(cache, {record.address.path: data, **{blob_path(name): blob for name, blob in blobs.items()}})
    assert record.address not in [entry.address for entry in Store(cache).entries()]
    put(cache, b"another", kernel="geglu")
    assert record.address in [entry.address for entry in Store(cache).entries()]
    assert find([FolderLayer(cache, "user")], record.problem).load("aligned") == b"killed"
    assert not any("incoming" in path for path in files(cache))


def test_an_incoming_record_is_not_listed_and_keeps_its_blobs(cache):
    record, blobs = make(b"on its way", problem={**PROBLEM, "rows": 2})
    store = Store(cache)
    store.write(record, blobs)
    (entry,) = [entry for entry in store.entries() if entry.record.problem["rows"] == 2]
    data = entry.path.read_bytes()
    entry.path.unlink()
    blob = blob_file(cache, b"on its way")
    os.utime(blob, (0, 0))
    with Incoming(cache) as incoming:
        incoming.add({record.address.path: data})
        assert len(list(store.entries())) == 2
        assert find([FolderLayer(cache, "user", writable=True)], record.problem).exact_bucket is False
        assert store.collect_garbage().blobs == 0
        incoming.commit()
    assert find([FolderLayer(cache, "user")], record.problem).load("aligned") == b"on its way"


def test_files_of_a_killed_unpack_are_deleted_after_a_while(cache):
    half = cache / "v1" / "incoming" / "abc.tmp" / "v1" / "t" / "k" / "half.json"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"{")
    Store(cache).collect_garbage()
    assert half.exists()
    for path in (half, *half.parents[:4]):
        os.utime(path, (time.time() - 1000,) * 2)
    assert list(Store(cache).leftovers()) == [cache / "v1" / "incoming" / "abc.tmp"]
    Store(cache).collect_garbage()
    assert not (cache / "v1" / "incoming").exists()


@pytest.mark.processes
def test_many_at_once_leave_whole_records(pack, tmp_path):
    root, children = tmp_path / "there", []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(5):
                    install_pack(pack, Store(root))
                code = 0 if seen_by_jobs(root) == NEW else 3
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert seen_by_tools(root) == NEW
    assert not any("incoming" in path for path in files(root))


def test_a_look_at_an_unfinished_unpack_writes_nothing_and_says_it(cache):
    place = killed(cache, {make()[0].address.path: b"{}"})
    before = files(cache)
    assert find([FolderLayer(cache, "shared")]).record.created_by == "old"
    with pytest.warns(RuntimeWarning, match="1 pack.* whose unpacking was killed; the next command that writes"):
        assert find([FolderLayer(cache, "user", writable=True)]).record.created_by == "old"
    assert len(list(Store(cache).entries())) == 2
    assert list(Store(cache).leftovers()) == [place]
    assert files(cache) == before


@pytest.mark.parametrize("place", ["v1/blobs", "v1/sm_90-h200-132"])
def test_a_pack_is_refused_if_part_of_the_cache_is_on_another_disk(tmp_path, place):
    """Nothing can be moved there, neither by the unpack nor by a later process."""
    others = [Path(path) for path in ("/dev/shm", "/run/shm", "/var/tmp") if os.access(path, os.W_OK)]
    other = next((path for path in others if path.stat().st_dev != tmp_path.stat().st_dev), None)
    if other is None:
        pytest.skip("there is one disk here")
    write_pack(tmp_path / "a.pack", [make()])
    root = tmp_path / "cache"
    with tempfile.TemporaryDirectory(dir=other) as far:
        (root / place).parent.mkdir(parents=True)
        (root / place).symlink_to(far)
        for _ in range(2):
            with pytest.raises(CacheError, match="is a link, and nothing is written"):
                install_pack(tmp_path / "a.pack", Store(root))
        left = [path for path in (*root.rglob("*"), *Path(far).rglob("*")) if path.is_file()]
    assert left == []
