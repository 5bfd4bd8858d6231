"""Files that an earlier tilekern wrote are read as it meant them, and a later one's are left alone.

``tests/golden`` is the root of a cache, as version 0.1.0 wrote it: the wanted list with its counts, what the service
keeps, and the machine's quarantine. A change of a format must bring a new schema, a reader of the old one, and a new
golden file beside the old ones, which stay as they are.
"""

import json
import shutil
from pathlib import Path

import pytest

from tilekern.cache import (
    note_misses,
    note_wanted,
    parse_problem_key,
    read_misses,
    read_wanted,
    remove_wanted,
    wanted_name,
)
from tilekern.spec.targets import resolve
from tilekern.tuning.serve.history import Failures
from tilekern.tuning.serve.watched import PREDICTED, WatchedCache
from tilekern.tuning.sweep import quarantine

GOLDEN = Path(__file__).parent / "golden"
TARGET = {"key": "sm_90-h200-132", "name": "H200", "arch": "sm_90", "sm_count": 132}
SWIGLU = {"rows": 2048, "columns": 3072, "dtype": "bfloat16"}
ATTENTION = {
    "batch": 1, "queries": 4096, "keys": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True,
    "windowed": False, "capped": False, "sinks": False, "packed": False, "dtype": "bfloat16",
}  # fmt: skip
REASON = "not in any cache; policy fallback"
NAMES = {
    "swiglu_forward": "6a1184b124db5b81d6b3922572788cc1e3e4c7b7388c2b52fccb24a376100b9e",
    "attention_forward": "05a1e31318c79b416ff676c6fe719bb2fa80be4a07e31d0662565f913b16f6ce",
}
LATER = {"schema": 2, "kernels": ["swiglu_forward"], "misses": {NAMES["swiglu_forward"]: {"runs": 3}}}


@pytest.fixture
def root(tmp_path):
    """A copy that may be written."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "cache"))


def test_the_wanted_list_is_read():
    assert read_wanted(GOLDEN) == [
        {
            "kernel": "swiglu_forward", "problem": SWIGLU, "target": TARGET, "reason": REASON,
            "created": "2026-08-01T12:00:00+00:00",
        },
        {
            "kernel": "attention_forward", "problem": ATTENTION, "target": TARGET, "reason": REASON,
            "created": "2026-08-02T12:00:00+00:00",
        },
    ]  # fmt: skip
    assert [list(item["problem"]) for item in read_wanted(GOLDEN)] == [list(SWIGLU), list(ATTENTION)]


def test_the_counts_of_all_processes_are_added_up():
    assert read_misses(GOLDEN) == {NAMES["swiglu_forward"]: 41, NAMES["attention_forward"]: 2}


def test_the_name_of_a_problem_has_not_changed():
    assert wanted_name("swiglu_forward", SWIGLU, TARGET) == NAMES["swiglu_forward"]
    assert wanted_name("attention_forward", ATTENTION, TARGET) == NAMES["attention_forward"]


def test_what_is_written_today_is_what_was_written(tmp_path):
    assert note_wanted(tmp_path, "swiglu_forward", SWIGLU, resolve("H200").describe(), REASON)
    assert note_misses(tmp_path, "0123456789abcdef", {NAMES["swiglu_forward"]: 40, NAMES["attention_forward"]: 2})
    written = {path.name: path for path in (tmp_path / "v1" / "wanted").iterdir()}
    kept = {path.name: path for path in (GOLDEN / "v1" / "wanted").iterdir()}
    name = f"{NAMES['swiglu_forward']}.json"
    today, then = (json.loads(files[name].read_text()) for files in (written, kept))
    assert today | {"created": None} == then | {"created": None}
    assert list(today) == list(then)
    assert written["0123456789abcdef.misses"].read_bytes() == kept["0123456789abcdef.misses"].read_bytes()


def test_a_problem_is_not_noted_again_and_can_be_taken_off(root):
    assert not note_wanted(root, "swiglu_forward", SWIGLU, TARGET, "again")
    assert remove_wanted(root, [NAMES["swiglu_forward"]]) == 1
    assert [item["kernel"] for item in read_wanted(root)] == ["attention_forward"]
    assert sorted(path.name for path in (root / "v1" / "wanted").glob("*.misses")) == ["0123456789abcdef.misses"]


def test_the_list_of_a_later_version_is_left_alone(root):
    folder = root / "v1" / "wanted"
    item, counts = folder / f"{NAMES['swiglu_forward']}.json", folder / "00112233.misses"
    for path in (item, counts):
        path.write_text(json.dumps(LATER))
    assert [each["kernel"] for each in read_wanted(root)] == ["attention_forward"]
    assert read_misses(root)[NAMES["swiglu_forward"]] == 41, "those of the known schema"
    assert not note_wanted(root, "swiglu_forward", SWIGLU, TARGET, REASON)
    assert remove_wanted(root, [NAMES["attention_forward"]]) == 1
    for path in (item, counts):
        assert json.loads(path.read_text()) == LATER


def test_the_service_works_off_an_old_list(root):
    queue = WatchedCache(root, resolve("H200"), "tileiras-1.0-cuda_tile-1.0", PREDICTED).queue()
    assert {item.kernel: item.misses for item in queue} == {"swiglu_forward": 41, "attention_forward": 2}
    assert {item.name for item in queue} == set(NAMES.values())


def test_the_service_knows_what_it_did_and_what_failed():
    oldest, newest = map(json.loads, (GOLDEN / "service" / "history.jsonl").read_text().splitlines()[-2:])
    assert (oldest["event"], oldest["kernel"]) == ("published", "swiglu_forward")
    assert (newest["event"], newest["kernel"]) == ("failed", "attention_forward")
    assert [parse_problem_key(line["problem"]) for line in (oldest, newest)] == [SWIGLU, ATTENTION]
    failures = Failures(GOLDEN / "service" / "failed.jsonl")
    state = {"source": "ssssssss", "toolkit": "t", "goal": "measured"}
    assert failures.why(NAMES["attention_forward"], state) == "none of its candidates came to a time"
    assert failures.why(NAMES["attention_forward"], state | {"source": "another"}) is None
    assert failures.why(NAMES["swiglu_forward"], state) is None


def test_the_quarantine_is_read():
    (line,) = quarantine._read(GOLDEN / "quarantine" / TARGET["key"])
    assert line["candidate"].startswith("rms_norm_forward|rows=2048,columns=4096,")
    assert line["reason"] == "it hung for 5.0 s while it was timed"
    assert (line["toolkit"]["key"], line["driver"]) == ("tileiras-13.4.92-cuda_tile-1.7.0", "580.95.05")
