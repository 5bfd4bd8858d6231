import threading

import pytest
from cache_samples import H200, PROBLEM

from tilekern.cache import CacheError, clear_wanted, note_wanted, read_wanted


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
