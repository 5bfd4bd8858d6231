import threading

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
    wanted_name,
)

ONE, OTHER = "0123456789abcdef", "fedcba9876543210"


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
    assert second["problem"]["rows"] == 1


def test_a_root_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not note_wanted(tmp_path / "file", "rms_norm", PROBLEM, H200, "no record")
    assert read_wanted(tmp_path / "file") == []
    assert clear_wanted(tmp_path / "file") == 0


def test_bad_files_are_left_out(tmp_path):
    note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
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
    def note():
        note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")

    threads = [threading.Thread(target=note) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list((tmp_path / "v1" / "wanted").iterdir())) == 1


def test_misses_of_all_processes_add_up_and_a_process_replaces_its_own(tmp_path):
    assert not note_misses(tmp_path, ONE, {}), "there is no list yet"
    note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
    name = wanted_name("rms_norm", PROBLEM, H200)
    assert read_misses(tmp_path) == {}
    assert note_misses(tmp_path, ONE, {name: 3})
    assert note_misses(tmp_path, OTHER, {name: 10, "f" * 64: 1})
    assert note_misses(tmp_path, ONE, {name: 5})
    assert read_misses(tmp_path) == {name: 15, "f" * 64: 1}
    assert len(read_wanted(tmp_path)) == 1


def test_a_count_that_no_process_can_reach_counts_for_nothing(tmp_path):
    note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
    name = wanted_name("rms_norm", PROBLEM, H200)
    note_misses(tmp_path, ONE, {name: 10**400})
    note_misses(tmp_path, OTHER, {name: 7})
    assert read_misses(tmp_path) == {name: 7}


def test_the_name_is_that_of_the_file_and_of_what_is_read_back(tmp_path):
    note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
    [item] = read_wanted(tmp_path)
    name = wanted_name(item["kernel"], item["problem"], item["target"])
    assert (tmp_path / "v1" / "wanted" / f"{name}.json").exists()


def test_bad_counts_are_no_counts(tmp_path):
    note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
    name = wanted_name("rms_norm", PROBLEM, H200)
    folder = tmp_path / "v1" / "wanted"
    bad = (b"", b"\xff", b"[]", b'{"schema": 99, "misses": {"%s": 1}}', b'{"schema": 1, "misses": 3}')
    bad += (b'{"schema": 1, "misses": {"%s": -4}}', b'{"schema": 1, "misses": {"%s": true}}')
    for number, content in enumerate(bad):
        (folder / f"{number:08x}.misses").write_bytes(content.replace(b"%s", name.encode()))
    note_misses(tmp_path, ONE, {name: 2})
    assert read_misses(tmp_path) == {name: 2}


def test_counts_cannot_name_other_files(tmp_path):
    note_wanted(tmp_path, "rms_norm", PROBLEM, H200, "no record")
    for process in ("", "../../../etc", "UPPERCASE", "0" * 65):
        with pytest.raises(CacheError):
            note_misses(tmp_path, process, {})
    with pytest.raises(CacheError):
        note_misses(tmp_path, ONE, {"../x": 1})
    with pytest.raises(CacheError):
        remove_wanted(tmp_path, ["../../x"])


def test_what_is_served_is_removed_with_counts_of_nothing_else(tmp_path):
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


def test_counts_in_a_folder_that_cannot_be_written_are_no_error(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "wanted").write_text("a file where the list should be")
    assert not note_misses(tmp_path, ONE, {})
    assert read_misses(tmp_path) == {}
    assert remove_wanted(tmp_path, []) == 0
