"""Journals with lines that are JSON and lack something: whoever reads a sweep passes them over."""

import json
import shutil
from pathlib import Path

import pytest
from recorded import RecordedExecutor

from tilekern.tuning import cli
from tilekern.tuning.commands.status import standing
from tilekern.tuning.compile.stage import wanted
from tilekern.tuning.measure.stage import measure_all, tasks
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import is_whole

# With the field that says what a line is about.
JOURNALS = {
    "compiled": "key", "measured": "candidate", "quarantine": "candidate", "gpu": "gpu", "races": "race",
    "skipped": "skipped", "runs": "run", "chosen": "chosen",
}  # fmt: skip

CHOSEN = {"chosen": "r", "of": "k|p", "race": "r"}
RACE = {"race": "r", "kernel": "k", "problem": "p", "strategy": "race", "untimed": {}}


@pytest.fixture
def sweep(compiled_sweep, tmp_path):
    """One that has been measured, with a line in each journal."""
    found = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    bad = found.candidates(*found.problems()[0])[3]
    measure_all(found, RecordedExecutor(crashing=[bad.config.key]), keep_winners)
    found.note("skipped", {"skipped": "swiglu_forward|rows=1", "reason": "its inputs do not fit"})
    (race,) = found.races().values()
    name = f"{race['kernel']}|{race['problem']}"
    step = {"token_us": 9.0, "otherwise_us": 9.5, "tried": 2}
    found.note("chosen", {"chosen": name, "of": name, "race": race["race"], "candidate": "none", "step": step})
    return found


def lines(sweep, journal):
    return [json.loads(line) for line in (sweep.folder / f"{journal}.jsonl").read_text().splitlines()]


def rewritten(sweep, journal, found):
    """The sweep with other lines in a journal, which are sealed as its own are."""
    (sweep.folder / f"{journal}.jsonl").unlink()
    again = Sweep(sweep.folder)
    again.note(journal, *found)
    return again


@pytest.fixture
def said(sweep, tmp_path):
    """Return the output of status and report, without the age of the last line."""

    def run():
        found = tmp_path / "report.json"
        assert cli.main(["report", str(sweep.folder), "--json", str(found)]) == 0
        return standing(Sweep(sweep.folder, foreign=True)) | {"last_line_s": None}, json.loads(found.read_text())

    return run


@pytest.mark.parametrize("journal", JOURNALS)
def test_every_line_of_a_sweep_is_whole(sweep, journal):
    found = lines(sweep, journal)
    assert found
    assert all(is_whole(journal, line) for line in found)


def test_lines_that_lack_a_field_or_hold_another_type_are_passed_over(sweep, said):
    before = said()
    for journal, key in JOURNALS.items():
        *_, last = lines(sweep, journal)
        lacking = [{name: last[name] for name in last if name != lost} for lost in last]
        changed = [last | {name: [7]} for name in last]
        torn = [line | {key: "r"} for line in (*lacking, *changed, {}) if not is_whole(journal, line | {key: "r"})]
        assert torn or journal == "measured"
        with (sweep.folder / f"{journal}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in torn)
    assert said() == before


@pytest.mark.parametrize(
    ("journal", "line"),
    [
        ("races", {"race": "r"}),
        ("compiled", {"key": "r", "status": "ok"}),
        ("compiled", {"key": "r", "status": "failed"}),
        ("compiled", {"key": "r", "status": "lost", "reason": "x"}),
        ("measured", {"candidate": "r", "check": {"passed": True}}),
        ("measured", {"candidate": "r", "timing": {}}),
        ("measured", {"candidate": "r", "timing": {"median_us": 5.0}}),
        ("measured", {"candidate": "r", "timing": {"median_us": 0.0, "samples": 5}}),
        ("measured", {"candidate": "r", "timing": {"median_us": float("nan"), "samples": 5}}),
        ("measured", {"candidate": "r", "timing": {"median_us": 5.0, "samples": "5"}}),
        ("measured", {"candidate": "r", "timing": {"median_us": 5.0, "samples": 5, "behind": "far"}}),
        ("races", RACE | {"untimed": {"c": []}}),
        ("races", RACE | {"seconds": {"a": ""}}),
        ("quarantine", {"candidate": "r"}),
        ("quarantine", {"candidate": "r", "reason": "x", "libraries": "torch"}),
        ("skipped", {"skipped": "r"}),
        ("measured", {"candidate": "r", "timing": {"median_us": 10**400, "samples": 5}}),
        ("measured", {"candidate": "r", "timing": {"median_us": 5.0, "samples": 5, "behind": float("inf")}}),
        ("measured", {"candidate": "r", "check": {"passed": False, "relative_error": 10**400, "elementwise_error": 0}}),
        ("races", RACE | {"seconds": {"a": float("nan")}}),
        ("chosen", CHOSEN | {"candidate": "c"}),
        ("chosen", CHOSEN | {"step": {"token_us": 9.0, "otherwise_us": 9.5, "tried": 2}}),
        ("gpu", {"gpu": "r"}),
        ("gpu", {"gpu": "r", "driver": "5", "torch": float("nan")}),
        ("runs", {"run": "r"}),
    ],
)
def test_what_readers_take_must_be_there(journal, line):
    assert not is_whole(journal, line)


def test_the_error_of_a_wrong_candidate_may_be_no_number():
    for error in (float("inf"), float("nan"), 3):
        check = {"passed": False, "relative_error": error, "elementwise_error": 1.5}
        assert is_whole("measured", {"candidate": "r", "check": check})


def test_an_artifact_whose_machine_code_was_counted_otherwise_is_compiled_again(sweep):
    line = lines(sweep, "compiled")[0]
    counted = {"whole": {}}, {"whole": {"of_another": 3}, "loops": []}, {"whole": {"cycles": "3"}, "loops": []}
    changed = [*({"machine_code": code} for code in counted), {"tileiras_s": None}]
    assert is_whole("compiled", line)
    assert not any(is_whole("compiled", line | change) for change in changed)
    assert line["key"] in sweep.compiled()
    again = rewritten(sweep, "compiled", [line | changed[1], *lines(sweep, "compiled")[1:]])
    assert [item.artifact for item in wanted(again)] == [line["key"]]


def test_a_line_that_names_no_kernel_is_in_no_kernels_mean(sweep):
    _, *kept = lines(sweep, "compiled")
    unnamed = [{name: line[name] for name in line if name != "kernel"} for line in kept]
    compile_stage = standing(rewritten(sweep, "compiled", unnamed))["compile"]
    assert (compile_stage["done"], compile_stage["left"]) == (len(kept), 1)
    assert compile_stage["left_s"] > 0


def test_a_time_whose_check_was_lost_is_measured_again(sweep):
    last = next(line for line in reversed(lines(sweep, "measured")) if "check" in line and "timing" in line)
    kept = [line for line in lines(sweep, "measured") if line["candidate"] != last["candidate"]]
    unchecked = {name: last[name] for name in last if name != "check"}
    again = rewritten(sweep, "measured", [*kept, unchecked])
    assert last["candidate"] not in again.measured()
    [task] = tasks(again, again.problems(), "race")
    assert last["candidate"] in {entrant.key for entrant in task.entrants}
    assert [winner.record.provenance for winner, _ in winners(again, {})] == ["measured"]


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_folder_in_a_journals_place_is_named(sweep, journal, capsys):
    path = sweep.folder / f"{journal}.jsonl"
    path.unlink()
    path.mkdir()
    assert cli.main(["status", str(sweep.folder)]) == 2
    assert f"{path} is not a regular file" in capsys.readouterr().err
