"""The commands prune and clear: what they delete, announce, and leave for running jobs."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_samples import B200, H200, PROBLEM, blob_file, changing, files_of, find, made_today, put, toolkit
from command_line import KEY

from tilekern.cache import FolderLayer, Store
from tilekern.cache.folders import unlink_seen
from tilekern.cache_tools.shared import removing
from tilekern.compile.toolchain import toolkit as installed

pytestmark = pytest.mark.processes

TODAY = made_today()
DAY_S = 86400
notes_access = pytest.mark.skipif(
    bool(os.statvfs("/tmp").f_flag & getattr(os, "ST_NOATIME", 0)), reason="the file system notes no access times"
)


@pytest.fixture
def rows_left(cli):
    def left():
        return sorted(record["problem"]["rows"] for record in cli.json("ls", "--kernel", "rms_norm")["records"])

    return left


def used_before(path, days):
    """Give a record's file the times of one that was written and last read so long ago."""
    moment = time.time() - days * DAY_S
    os.utime(path, (moment, moment))


def of_rows(rows, **changes):
    return {"problem": {**PROBLEM, "rows": rows}, **TODAY, **changes}


@pytest.mark.parametrize(
    "limits",
    [
        ["--stale"],
        ["--keep-toolkits", "1"],
        ["--unused-for", "30d"],
        ["--max-size", "9K"],
        ["--max-size", "0"],
        ["--stale", "--unused-for", "1w", "--max-size", "20K"],
    ],
)
def test_a_dry_run_says_what_the_run_then_does(cli, cache, limits):
    put(cache, b"one" * 100, b"shared" * 500, **of_rows(1))
    put(cache, b"shared" * 500, **of_rows(2, toolkit=toolkit("13.9.0")))
    used_before(put(cache, b"old" * 100, **of_rows(2)), 60)
    before, size = files_of(cache), cli.json("stats")["bytes"]
    planned = cli.json("prune", *limits, "--dry-run")
    assert files_of(cache) == before
    done = cli.json("prune", *limits, "--yes")
    assert planned["removed"] > 0
    for name in ("records", "removed", "blobs", "bytes", "bytes_left", "left_alone"):
        assert done[name] == planned[name]
    assert done["bytes_left"] == cli.json("stats")["bytes"] == size - done["bytes"]
    assert cli.json("verify")["broken"] == []
    assert cli.json("stats")["orphans"]["count"] == 0
    assert cli.json("prune", *limits, "--dry-run")["removed"] == 0


def test_prune_says_what_goes_and_why(cli, cache):
    used_before(put(cache, b"x", **of_rows(7, source_digest="0" * 64)), 40)
    code, out, err = cli("prune", "--stale", "--unused-for", "30d", "--dry-run")
    group, header, line, *_ = out.splitlines()
    assert (code, err) == (0, "")
    assert group == "sm_90-h200-132, tileiras-13.4.92"
    assert header.split() == ["KERNEL", "PROBLEM", "SIZE", "LAST", "USED", "WHY"]
    assert "rows=7," in line
    assert line.endswith("stale, unused")
    assert "40d ago" in line
    assert "4 records and 4 blobs would go: " in out
    assert cli("prune", "--stale", "--yes")[1].splitlines()[-1].startswith("removed 4 records and 4 blobs, ")


def test_stale_records_go_and_those_that_cannot_be_judged_stay(cli, root):
    put(root, **of_rows(1))
    put(root, **of_rows(2, source_digest="0" * 64))
    put(root, **of_rows(4, module="no_such_module.at_all"))
    cli.json("prune", "--stale", "--yes")
    assert [r["problem"]["rows"] for r in cli.json("ls")["records"]] == [1, 4]


def test_toolkits_are_kept_in_the_order_of_a_lookup(cli, root):
    here = installed().describe()
    for tools, changes in (
        (toolkit("99.1.0"), {}),
        (toolkit("99.10.0"), {}),
        (toolkit("99.11.0"), {"source_digest": "0" * 64}),
        (here, {}),
    ):
        put(root, tools["key"].encode(), **of_rows(1, toolkit=tools, **changes))
    put(root, **of_rows(2, toolkit=toolkit("1.0.0")))
    put(root, **of_rows(1, toolkit=toolkit("1.0.0"), target=B200))
    cli.json("prune", "--keep-toolkits", "2", "--yes")
    left = {(r["target"], r["problem"]["rows"], r["toolkit"]) for r in cli.json("ls")["records"]}
    assert left == {
        (H200["key"], 1, here["key"]),
        (H200["key"], 1, "tileiras-99.10.0"),
        (H200["key"], 2, "tileiras-1.0.0"),
        (B200["key"], 1, "tileiras-1.0.0"),
    }


def test_the_least_used_go_first_until_the_cache_is_small_enough(cli, rows_left, root):
    for rows, days in ((1, 3), (2, 30), (4, 1), (8, 20)):
        used_before(put(root, b"%d" % rows * 5000, **of_rows(rows)), days)
    size = cli.json("stats")["bytes"]
    document = cli.json("prune", "--max-size", str(size - 7000), "--yes")
    assert rows_left() == [1, 4]
    assert [record["reasons"] for record in document["records"]] == [["least used"]] * 2
    assert document["bytes_left"] <= size - 7000


def test_an_artifact_that_another_record_needs_frees_nothing(cli, rows_left, root):
    for rows, days in ((1, 3), (2, 30)):
        used_before(put(root, b"shared" * 5000, **of_rows(rows)), days)
    document = cli.json("prune", "--unused-for", "10d", "--yes")
    assert (document["removed"], document["blobs"], rows_left()) == (1, 0, [1])
    assert document["bytes"] < 6000
    assert find([FolderLayer(root, "user")], {**PROBLEM, "rows": 1}, source=TODAY["source_digest"]) is not None


def test_unreadable_files_are_left_alone(cli, cache):
    paths = [entry.path for entry in Store(cache).entries()]
    paths[0].write_text("{")
    paths[1].write_text('{"schema": 99}')
    document = cli.json("prune", "--max-size", "0", "--yes")
    assert (document["removed"], document["blobs"], document["left_alone"]) == (1, 0, 2)
    assert "may refer to any blob" in document["kept"]
    assert paths[0].exists()
    assert paths[1].exists()


@notes_access
def test_a_lookup_counts_as_use_and_inspecting_does_not(cli, tmp_path, rows_left, root):
    for rows in (1, 8192):
        used_before(put(root, **of_rows(rows)), 30)
    for command in (
        ["ls"],
        ["ls", "--layers"],
        ["stats"],
        ["verify"],
        ["show", "rms_norm", KEY],
        ["pack", str(tmp_path / "out.pack")],
        ["prune", "--stale", "--dry-run"],
    ):
        assert cli(*command)[0] == 0
    planned = cli.json("prune", "--unused-for", "1d", "--dry-run")
    assert (planned["removed"], planned["evidence"]) == (2, "access_time")
    before = files_of(root)
    assert find([FolderLayer(root, "user")], source=TODAY["source_digest"]) is not None
    assert files_of(root) == before
    cli.json("prune", "--unused-for", "1d", "--yes")
    assert rows_left() == [8192]


@pytest.fixture
def job(root, recwarn):
    """Start a lookup that stops between a record and its artifacts; it goes on in silence when it is told to."""
    stopped, told = threading.Event(), threading.Event()

    def stop():
        stopped.set()
        assert told.wait(60)

    with ThreadPoolExecutor(1) as thread:

        def start():
            looking = thread.submit(find, [changing(root, stop)])
            assert stopped.wait(60)

            def goes_on():
                told.set()
                hit = looking.result(60)
                assert not recwarn.list
                return hit and hit.load("aligned")

            return goes_on

        yield start
        told.set()


@pytest.mark.parametrize("command", [["prune", "--max-size", "0"], ["clear", "--all"]])
def test_a_job_keeps_what_it_has_loaded(cli, command, root):
    put(root, b"machine code")
    hit = find([FolderLayer(root, "user")])
    assert cli.json(*command, "--yes")["removed"] == 1
    assert not blob_file(root, b"machine code").exists()
    assert hit.load("aligned") == b"machine code"


@pytest.mark.parametrize("command", [["prune", "--max-size", "0"], ["clear", "--all"]])
def test_a_job_that_has_read_a_record_still_finds_its_artifacts(cli, job, command, monkeypatch, root):
    path = put(root, b"machine code")
    goes_on, ended = job(), []

    def sleep(seconds):
        """The job goes on in the moment between the deletion of records and that of artifacts."""
        assert seconds == removing.READING_S
        assert not path.exists()
        ended.append(goes_on())

    monkeypatch.setattr(removing, "time", SimpleNamespace(sleep=sleep))
    assert cli.json(*command, "--yes")["blobs"] == 1
    assert ended == [b"machine code"]


@pytest.mark.parametrize("newer", [None, b"newer code"])
def test_a_job_that_stops_for_longer_has_a_plain_miss_or_what_was_written_meanwhile(cli, job, root, newer):
    put(root, b"machine code")
    goes_on = job()
    cli.json("prune", "--max-size", "0", "--yes")
    if newer:
        put(root, newer)
    assert goes_on() == newer


def test_a_file_that_is_replaced_during_its_deletion_is_put_back(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("old")
    status = os.stat(path)
    seen = (status.st_ino, status.st_mtime_ns, status.st_size)
    rename = os.rename

    def late(*names, **folders):
        (tmp_path / "next").write_text("new!")
        os.replace(tmp_path / "next", path)
        rename(*names, **folders)

    monkeypatch.setattr(os, "rename", late)
    assert unlink_seen(path.parent, Path(path.name), seen) is False
    monkeypatch.undo()
    assert [found.name for found in tmp_path.iterdir()] == ["record.json"]
    assert path.read_text() == "new!"
    assert unlink_seen(path.parent, Path(path.name), seen) is False
    status = os.stat(path)
    assert unlink_seen(path.parent, Path(path.name), (status.st_ino, status.st_mtime_ns, status.st_size)) is True
    assert list(tmp_path.iterdir()) == []
