"""Journals with lines that are JSON and lack something: whoever reads a sweep passes them over."""

import json
import shutil
from pathlib import Path

import pytest
from recorded import RecordedExecutor

from tuning import cli
from tuning.commands.status import standing
from tuning.lines import is_whole
from tuning.measuring import measure_all
from tuning.publishing import keep_winners
from tuning.sweep import Sweep

# With the field that says what a line is about.
JOURNALS = {
    "compiled": "key", "measured": "candidate", "quarantine": "candidate", "gpu": "gpu", "races": "race",
    "skipped": "skipped", "runs": "run",
}  # fmt: skip


@pytest.fixture
def sweep(compiled_sweep, tmp_path):
    """One that has been measured, with a line in each journal."""
    found = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    bad = found.candidates(*found.problems()[0])[3]
    measure_all(found, RecordedExecutor(crashing=[bad.config.key]), keep_winners)
    found.note("skipped", {"skipped": "swiglu_forward|rows=1", "reason": "its inputs do not fit"})
    return found


def lines(sweep, journal):
    return [json.loads(line) for line in (sweep.folder / f"{journal}.jsonl").read_text().splitlines()]


@pytest.fixture
def said(sweep, tmp_path):
    """What status and report say, but for the age of the last line."""

    def run():
        found = tmp_path / "report.json"
        assert cli.main(["report", str(sweep.folder), "--json", str(found)]) == 0
        return standing(Sweep(sweep.folder)) | {"last_line_s": None}, json.loads(found.read_text())

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
        ("quarantine", {"candidate": "r"}),
        ("quarantine", {"candidate": "r", "reason": "x", "libraries": "torch"}),
        ("skipped", {"skipped": "r"}),
        ("gpu", {"gpu": "r"}),
        ("runs", {"run": "r"}),
    ],
)
def test_what_readers_take_must_be_there(journal, line):
    assert not is_whole(journal, line)


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_folder_in_a_journals_place_is_named(sweep, journal, capsys):
    path = sweep.folder / f"{journal}.jsonl"
    path.unlink()
    path.mkdir()
    assert cli.main(["status", str(sweep.folder)]) == 2
    assert f"{path} cannot be read: Is a directory" in capsys.readouterr().err
