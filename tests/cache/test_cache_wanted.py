import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cache_samples import H200, PROBLEM

from tilekern.cache import (
    CacheError,
    clear_wanted,
    note_misses,
    note_wanted,
    read_misses,
    read_wanted,
    remove_wanted,
    sum_up_misses,
    wanted_name,
)

ONE, OTHER = "0123456789abcdef", "fedcba9876543210"


def listed(root):
    """The name of a problem that is on the list from now on."""
    note_wanted(root, "rms_norm", PROBLEM, H200, "no record")
    return wanted_name("rms_norm", PROBLEM, H200)


def test_a_problem_is_written_down_once(tmp_path):
    assert note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
    assert not note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "another reason")
    assert note_wanted(tmp_path, "rms_norm", {**PROBLEM, "rows": 1}, H200, "no record")
    (first, second) = sorted(read_wanted(tmp_path), key=lambda item: -item["problem"]["rows"])
    assert (first["kernel"], first["problem"], first["target"], first["reason"]) == (
        "rms_norm",
        PROBLEM,
        H200,
        "no record",
    )
    assert list(first["problem"]) == list(PROBLEM)
    name = wanted_name(first["kernel"], first["problem"], first["target"])
    assert (tmp_path / "v1" / "wanted" / f"{name}.json").exists()
    assert second["problem"]["rows"] == 1


def test_a_root_that_cannot_be_written_is_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not note_wanted(tmp_path / "file", "rms_norm", PROBLEM, H200, "no record")
    assert read_wanted(tmp_path / "file") == []
    assert clear_wanted(tmp_path / "file") == 0


def test_bad_files_are_left_out(tmp_path):
    listed(tmp_path)
    folder = tmp_path / "v1" / "wanted"
    for name, content in {"a": b"", "b": b"\xff", "c": b"{}", "d": b'{"schema": 1, "kernel": 3}', "e": b"[1]"}.items():
        (folder / f"{name}.json").write_bytes(content)
    assert len(read_wanted(tmp_path)) == 1
    assert clear_wanted(tmp_path) == 6
    assert read_wanted(tmp_path) == []


def test_a_problem_without_a_key_is_refused(tmp_path):
    with pytest.raises(CacheError):
        note_wanted(tmp_path, "rms_norm", {"rows": 1.5}, H200, "no record")


def test_many_at_once_leave_one_file(tmp_path):
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(listed, [tmp_path] * 32))
    assert len(list((tmp_path / "v1" / "wanted").iterdir())) == 1


def test_misses_of_all_processes_add_up_and_a_process_replaces_its_own(tmp_path):
    assert not note_misses(tmp_path, ONE, {}), "there is no list yet"
    name = listed(tmp_path)
    assert read_misses(tmp_path) == {}
    assert note_misses(tmp_path, ONE, {name: 3})
    assert note_misses(tmp_path, OTHER, {name: 10, "f" * 64: 1})
    assert note_misses(tmp_path, ONE, {name: 5})
    assert read_misses(tmp_path) == {name: 15, "f" * 64: 1}
    assert len(read_wanted(tmp_path)) == 1


def test_an_impossible_count_is_ignored(tmp_path):
    name = listed(tmp_path)
    note_misses(tmp_path, ONE, {name: 10**400})
    note_misses(tmp_path, OTHER, {name: 7})
    assert read_misses(tmp_path) == {name: 7}


def test_bad_counts_are_ignored(tmp_path):
    name = listed(tmp_path)
    folder = tmp_path / "v1" / "wanted"
    bad = (b"", b"\xff", b"[]", b'{"schema": 99, "misses": {"%s": 1}}', b'{"schema": 1, "misses": 3}')
    bad += (b'{"schema": 1, "misses": {"%s": -4}}', b'{"schema": 1, "misses": {"%s": true}}')
    for number, content in enumerate(bad):
        (folder / f"{number:08x}.misses").write_bytes(content.replace(b"%s", name.encode()))
    note_misses(tmp_path, ONE, {name: 2})
    assert read_misses(tmp_path) == {name: 2}


def test_counts_cannot_name_other_files(tmp_path):
    listed(tmp_path)
    for process in ("", "../../../etc", "UPPERCASE", "0" * 65):
        with pytest.raises(CacheError):
            note_misses(tmp_path, process, {})
    with pytest.raises(CacheError):
        note_misses(tmp_path, ONE, {"../x": 1})
    with pytest.raises(CacheError):
        remove_wanted(tmp_path, ["../../x"])


def test_served_problems_are_removed_with_their_counts(tmp_path):
    others = {**PROBLEM, "rows": 1}
    for problem in (PROBLEM, others):
        note_wanted(tmp_path, "rms_norm", problem, H200, "no record")
    first, second = (wanted_name("rms_norm", problem, H200) for problem in (PROBLEM, others))
    note_misses(tmp_path, ONE, {first: 1})
    note_misses(tmp_path, OTHER, {first: 1, second: 2})
    assert remove_wanted(tmp_path, [first, "0" * 64]) == 1
    assert [item["problem"] for item in read_wanted(tmp_path)] == [others]
    assert read_misses(tmp_path) == {first: 1, second: 2}
    assert clear_wanted(tmp_path) == 1
    assert list((tmp_path / "v1" / "wanted").iterdir()) == []


def test_counts_in_a_folder_that_cannot_be_written_are_not_an_error(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "wanted").write_text("a file where the list should be")
    assert not note_misses(tmp_path, ONE, {})
    assert read_misses(tmp_path) == {}
    assert remove_wanted(tmp_path, []) == 0


def counts_of(root):
    return sorted((root / "v1" / "wanted").glob("*.misses"))


def leave_counts(root, processes, misses, days=2):
    for number in range(processes):
        note_misses(root, f"{number:08x}", misses)
    old = time.time() - days * 86400
    for path in counts_of(root):
        os.utime(path, (old, old))


def test_counts_of_ended_processes_are_merged(tmp_path):
    name = listed(tmp_path)
    leave_counts(tmp_path, 40, {name: 3, "0" * 64: 5})
    assert note_misses(tmp_path, "f" * 8, {name: 7})
    assert len(counts_of(tmp_path)) == 2
    assert read_misses(tmp_path) == {name: 40 * 3 + 7}, "and what is not on the list any more counts for nothing"
    assert list((tmp_path / "v1" / "wanted").glob(".*")) == []


def test_counts_of_running_processes_and_other_versions_are_not_merged(tmp_path):
    name = listed(tmp_path)
    leave_counts(tmp_path, 3, {name: 3}, days=0)
    other = tmp_path / "v1" / "wanted" / f"{'e' * 8}.misses"
    other.write_text('{"schema": 99, "counts": []}')
    os.utime(other, (0, 0))
    before = {path: path.read_bytes() for path in counts_of(tmp_path)}
    assert sum_up_misses(tmp_path) == 0
    assert {path: path.read_bytes() for path in counts_of(tmp_path)} == before


def test_two_merges_at_once_count_each_process_once(tmp_path):
    name = listed(tmp_path)
    leave_counts(tmp_path, 60, {name: 1})
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(sum_up_misses, [tmp_path] * 4))
    assert sum(taken) == 60
    assert read_misses(tmp_path) == {name: 60}
