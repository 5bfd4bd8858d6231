"""Scenes on top of the fault layer, each in a process of its own: ``python cache_faulty.py SCENE ROOT``."""

import errno
import json
import os
import sys
import time
from pathlib import Path

from cache_samples import PROBLEM, blob_file, find, make, outcome, put
from faults import Faults

from tilekern.cache import FolderLayer, Store

FAULTS = Faults()


def a_folder_that_vanishes_in_the_middle_of_a_write_is_made_again(root):
    for operation in ("mkdir", "open", "rename"):
        for after in range(3):
            with FAULTS.failing(root, errno.ENOENT, after, [operation]):
                put(root, operation.encode(), b"%d" % after)
            assert find([FolderLayer(root, "user")]).load("generic") == b"%d" % after
    assert not list(Store(root).leftovers())


def a_folder_that_is_deleted_while_it_is_made_is_made_again(root):
    put(root)
    with FAULTS.failing(root, errno.EEXIST, 0, ["mkdir"]):
        put(root, b"other", problem={**PROBLEM, "rows": 1}, kernel="other")
    assert len(list(Store(root).entries())) == 2


def a_record_that_cannot_be_read_is_not_replaced(root):
    path = put(root)
    path.write_text(text := json.dumps({"schema": 99}))
    record, blobs = make(b"new")
    with FAULTS.failing(root, errno.EIO, 0, ["read"]):
        _, error = outcome(lambda: Store(root).write(record, blobs))
    assert error == f"cannot read {path}: Input/output error"
    assert path.read_text() == text


def a_stale_handle_is_opened_again(root):
    put(root, b"one", b"two")
    for operation, calls in (("open", 3), ("read", 6), ("stat", 3)):
        for after in range(calls):
            with FAULTS.failing(root, errno.ESTALE, after, [operation]):
                assert find([FolderLayer(root, "user")]).load("aligned") == b"one"
    with FAULTS.failing(root, errno.ESTALE, 0, ["read"], "fail on"):
        assert find([FolderLayer(root, "user")]) is None


def no_blob_is_removed_where_records_cannot_be_seen(root):
    path = put(root, b"one")
    for operation in ("open", "read", "list"):
        for error in (errno.EIO, errno.ESTALE, errno.ENOENT):
            with FAULTS.failing(root, error, 0, [operation], "fail on"):
                garbage = Store(root).collect_garbage(grace_s=-1.0)
            assert garbage.blobs == 0
            assert blob_file(root, b"one").exists(), (operation, error)
    assert path.exists()


def a_listing_says_what_it_cannot_read(root):
    path = put(root)
    with FAULTS.failing(root, errno.EIO, 0, ["open", "stat"], "fail on"):
        (entry,) = Store(root).entries()
    assert (entry.path, entry.problem, entry.record) == (path, f"cannot read {path}: Input/output error", None)


def a_clock_that_goes_back_loses_nothing(root):
    """The clock says that it is long before the files were written, and long after, while they are in work."""
    store = Store(root)
    for offset_s in (-(10**8), 10**8, 0.0):
        FAULTS.set_clock(offset_s)
        assert abs(time.time() - offset_s) > 10**8
        put(root, b"one", b"%d" % offset_s)
        waiting = blob_file(root, b"waits for its record")
        waiting.parent.mkdir(exist_ok=True)
        waiting.write_bytes(b"waits for its record")
        store.collect_garbage()
        assert waiting.exists() or offset_s > 0
        put(root, b"waits for its record", problem={**PROBLEM, "rows": 1})
        for problem in (PROBLEM, {**PROBLEM, "rows": 1}):
            assert find([FolderLayer(root, "user")], problem).exact_bucket
    FAULTS.set_clock(-(10**8))
    assert store.remove(store.entries())
    assert store.collect_garbage().blobs == 0
    FAULTS.set_clock(0.0)
    os.utime(waiting, (0, 0))
    assert store.collect_garbage().blobs == 1


SCENES = {name: scene for name, scene in vars().items() if name.startswith(("a_", "no_"))}

if __name__ == "__main__":
    SCENES[sys.argv[1]](Path(sys.argv[2]))
