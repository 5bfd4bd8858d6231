"""The journal's file: torn lines, two writers, kills, full disks; and that one run at a time holds a sweep folder."""

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_samples import COMPILED, SMALL

import tilekern.tuning.sweep.journal
from tilekern.errors import InputError
from tilekern.spec.targets import resolve
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.journal import Journal

FORK = multiprocessing.get_context("fork")
texts = st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.floats(allow_nan=False), max_size=4)


def read(path: Path) -> dict:
    """The whole file, by a reader that has seen nothing of it before."""
    return Journal(path, "key").latest()


@given(st.lists(texts, min_size=1, max_size=6), st.data())
def test_a_torn_last_line_costs_nothing_but_itself(tmp_path_factory, facts, data):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    lines = [{"key": str(number), "facts": found} for number, found in enumerate(facts)]
    journal = Journal(path, "key")
    for line in lines:
        journal.append(line)
    whole = path.read_bytes()
    cut = data.draw(st.integers(1, len(whole.split(b"\n")[-2])))
    path.write_bytes(whole[:-cut])
    more = {"key": "more"}
    Journal(path, "key").append(more)
    expected = lines if cut == 1 else lines[:-1]
    assert list(read(path).values()) == [*expected, more]
    assert list(journal.latest().values()) == [*expected, more]


def test_a_journal_that_is_appended_to_a_torn_one_loses_no_line(tmp_path):
    lines = [json.dumps({"name": name, "facts": {"of": {"n": name}}}) for name in ("a", "b", "c")]
    for at in range(1, len(lines[1])):
        path = tmp_path / f"{at}.jsonl"
        path.write_text(f"{lines[0]}\n{lines[1][:at]}")
        with path.open("a") as file:
            file.write(f"{lines[2]}\n{lines[0]}\n")
        assert Journal(path, "name").latest().keys() == {"a", "c"}


def test_a_line_without_its_newline_counts_once(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"key": "a", "n": 1}')
    journal = Journal(path, "key")
    assert journal.latest() == {"a": {"key": "a", "n": 1}}
    journal.append({"key": "b", "n": 2})
    assert journal.latest() == {"a": {"key": "a", "n": 1}, "b": {"key": "b", "n": 2}}


def test_text_that_is_not_a_line_of_the_journal_is_skipped(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'[1]\n7\n\n{"other": 1}\n{"key": 3}\n\xff\xfe\n\x00\x00\n{"key": "a"}\n')
    assert read(path) == {"a": {"key": "a"}}


def append_many(path: Path, writer: int, count: int) -> None:
    journal = Journal(path, "key")
    for number in range(count):
        journal.append({"key": f"{writer} {number}", "filler": "x" * random.Random(number).randrange(20_000)})


@pytest.mark.processes
def test_lines_of_processes_that_append_at_once_do_not_mix(tmp_path):
    path = tmp_path / "journal.jsonl"
    writers = [FORK.Process(target=append_many, args=(path, writer, 150)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # A writer that looked while another was at it may have begun on a fresh line for nothing.
    assert all(json.loads(line) for line in path.read_bytes().splitlines() if line)
    assert read(path).keys() == {f"{writer} {number}" for writer in range(4) for number in range(150)}


def append_for_ever(path: Path, run: int, said) -> None:
    journal = Journal(path, "key")
    for number in range(10**9):
        journal.append({"key": f"{run} {number}", "filler": "x" * 50_000})
        os.write(said, number.to_bytes(8))


@pytest.mark.nightly
def test_what_was_appended_before_a_kill_is_there_after_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    reader = Journal(path, "key")
    expected = set()
    for run in range(25):
        ours, theirs = os.pipe()
        writer = FORK.Process(target=append_for_ever, args=(path, run, theirs))
        writer.start()
        os.close(theirs)
        time.sleep(random.Random(run).uniform(0.002, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        with os.fdopen(ours, "rb") as said:
            numbers = said.read()
        expected |= {f"{run} {number}" for number in range(len(numbers) // 8)}
        found = reader.latest().keys()
        assert expected <= found
        assert len(found) <= len(expected) + run + 1
    assert len(expected) > 50


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    parsed = []
    loads = json.loads
    monkeypatch.setattr(tilekern.tuning.sweep.journal.json, "loads", lambda text: parsed.append(text) or loads(text))
    journal = Journal(tmp_path / "journal.jsonl", "key")
    journal.append(*({"key": str(number)} for number in range(1000)))
    for number in range(100):
        journal.append({"key": f"more {number}"})
        assert len(journal.latest()) == 1001 + number
    assert len(parsed) == 1100


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path, other = tmp_path / "journal.jsonl", tmp_path / "other"
    journal = Journal(path, "key")
    journal.append({"key": "a"}, {"key": "b"})
    assert len(journal.latest()) == 2
    other.write_text('{"key": "c", "n": 1}\n' * 9)
    other.rename(path)
    assert list(journal.latest()) == ["c"]
    path.write_text('{"key": "d"}\n')
    assert list(journal.latest()) == ["d"]
    path.unlink()
    assert journal.latest() == {}


def test_a_line_is_synced_at_most_each_second_and_at_the_end(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(tilekern.tuning.sweep.journal.os, "fsync", synced.append)
    journal = Journal(tmp_path / "journal.jsonl", "key")
    for number in range(50):
        journal.append({"key": str(number)})
    assert len(synced) == 1
    journal.sync()
    journal.sync()
    assert len(synced) == 2


def test_an_artifact_that_finds_no_place_is_said_in_one_line(sweep: Sweep, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
        sweep.store(b"cubin")
    assert not list((sweep.folder / "artifacts").iterdir())


def test_a_full_disk_is_said_in_one_line(sweep: Sweep, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
        sweep.note("compiled", {"key": "a"})


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(resolve("H200"), "test", [SMALL])
    return sweep


def hold(folder: Path, has_it, seconds: float) -> None:
    sweep = Sweep(folder)
    with sweep.running("compile"):
        has_it.set()
        for number in range(int(100 * seconds)):
            time.sleep(0.01)
            sweep.note("compiled", {"key": str(number)} | COMPILED)


@pytest.mark.processes
def test_two_runs_on_one_folder_are_distinguished(sweep: Sweep):
    has_it = FORK.Event()
    other = FORK.Process(target=hold, args=(sweep.folder, has_it, 60))
    other.start()
    assert has_it.wait(20)
    assert sweep.holder.is_held()
    said = rf"held by another run: compile on .*, process {other.pid}, since .*; wait for its end"
    for work in (lambda: sweep.begin(resolve("H200"), "test", [SMALL]), sweep.running("measure").__enter__):
        with pytest.raises(InputError, match=said):
            work()
    assert sweep.problems() == [SMALL]
    assert sweep.compiled()
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert sweep.holder.is_held() is False
    with sweep.running("measure"):
        assert sweep.holder.is_held()
    assert sweep.holder.is_held() is False


@pytest.mark.processes
def test_the_time_of_runs_is_kept_even_of_one_that_was_killed(sweep: Sweep, monkeypatch):
    monkeypatch.setattr("tilekern.tuning.sweep.holding.BEAT_S", 0.05)
    has_it = FORK.Event()
    other = FORK.Process(target=hold, args=(sweep.folder, has_it, 60))
    other.start()
    assert has_it.wait(20)
    time.sleep(0.6)
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with sweep.running("measure"):
        time.sleep(0.2)
    killed, ended = sweep.runs()
    assert (killed["stage"], killed["ended"]) == ("compile", False)
    assert 0.2 <= killed["seconds"] <= 60
    assert (ended["stage"], ended["ended"]) == ("measure", True)
    assert 0.2 <= ended["seconds"] <= 60


def test_a_run_takes_the_lock_it_has_again(sweep: Sweep):
    with sweep.running("compile"):
        sweep.begin(resolve("H200"), "again", [SMALL])
        with sweep.running("measure"):
            pass
        assert sweep.holder.is_held()
    assert sweep.model == "again"


def test_the_next_run_removes_partial_files_of_a_killed_one(sweep: Sweep):
    left = sweep.folder / "artifacts" / ".new-0123"
    left.write_bytes(b"half")
    with sweep.running("compile"):
        assert not left.exists()
