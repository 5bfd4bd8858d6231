"""``tune status`` says where a sweep stands, disturbs nobody, and needs no right to write."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from recorded import GPU, RecordedExecutor
from tuning_samples import THREE

from tilekern.tuning import cli
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.publishing import keep_winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep


@pytest.fixture
def sweep(compiled_sweep: Sweep, tmp_path: Path) -> Sweep:
    sweep = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    sweep.begin(sweep.target, "a model", THREE)
    return sweep


@pytest.fixture
def status(sweep, capsys):
    def run(*arguments: str):
        assert cli.main(["status", str(sweep.folder), *arguments]) == 0
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in arguments else text

    return run


def test_a_planned_sweep_has_all_before_it(tmp_path, h200, capsys):
    Sweep(tmp_path).begin(h200, "a model", THREE)
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    artifacts = {item.artifact for named in THREE for item in candidates(*named, h200)}
    assert (found["model"], found["target"]["name"]) == ("a model", "H200")
    assert (found["compile"]["artifacts"], found["compile"]["done"], found["compile"]["left"]) == (
        len(artifacts), 0, len(artifacts)
    )  # fmt: skip
    assert (found["measure"]["problems"], found["measure"]["done"], found["measure"]["left"]) == (3, 0, 3)
    assert found["compile"]["left_s"] > 0
    assert found["measure"]["left_s"] > 0
    assert (found["gpu"], found["held"], found["last_line_s"]) == (None, False, None)


def test_what_failed_is_wrong_or_is_in_quarantine_is_named_with_its_reason(sweep: Sweep, status):
    kernel, problem = THREE[0]
    items = candidates(kernel, problem, sweep.target)
    wrong, crashing = items[1], items[3]
    failed = items[5].artifact
    sweep.note("compiled", {"key": failed, "status": "failed", "reason": "tileiras exceeded 60 s"})
    executor = RecordedExecutor(wrong=[wrong.config.key], crashing=[crashing.config.key])
    measure_all(sweep, executor, keep_winners)
    found = status("--json")
    assert (found["compile"]["failed"], found["compile"]["reasons"]) == (1, ["tileiras exceeded 60 s"])
    assert found["measure"]["done"] == 3
    assert found["measure"]["wrong"][wrong.key] == "y: relative error"
    assert found["measure"]["quarantined"][crashing.key] == "the process died (exit code 7)"
    assert len(found["measure"]["wrong"]) == len(found["measure"]["quarantined"]) == 3
    assert found["gpu"] == GPU
    assert found["measure"]["left_s"] == found["compile"]["left_s"] == 0
    text = status()
    for part in ("a model for H200 (sm_90)", "measure: 3 of 3 problems, 3 wrong, 3 in quarantine", "driver 580.159.03",
                 f"wrong: {wrong.key}: y: relative error", "failed: tileiras exceeded 60 s", "no run is at work",
                 f"quarantined: {crashing.key}: the process died (exit code 7)"):  # fmt: skip
        assert part in text


def test_a_problem_without_a_possible_winner_is_done(sweep: Sweep, status):
    *aligned, generic = candidates(*THREE[0], sweep.target)
    for item in aligned:
        sweep.note("compiled", {"key": item.artifact, "status": "failed", "reason": "tileiras: no"})
    assert status("--json")["measure"]["done"] == 3
    sweep.note("compiled", {"key": generic.artifact, "status": "failed", "reason": "tileiras: no"})
    assert (status("--json")["measure"]["done"], status("--json")["measure"]["left"]) == (3, 0)


def test_a_problem_whose_artifacts_are_not_all_tried_is_not_done(sweep: Sweep, status):
    path = sweep.folder / "compiled.jsonl"
    kept = path.read_text()
    path.write_text("".join(kept.splitlines(keepends=True)[1:]))
    measure_all(Sweep(sweep.folder), RecordedExecutor(), keep_winners)
    assert status("--json")["measure"]["done"] == 0
    path.write_text(kept)
    measure_all(Sweep(sweep.folder), RecordedExecutor(), keep_winners)
    assert status("--json")["measure"]["done"] == 3


@pytest.mark.processes
def test_a_run_at_work_is_named_with_what_it_has_done(sweep: Sweep, status):
    context = multiprocessing.get_context("fork")
    arguments = (Sweep(sweep.folder), RecordedExecutor(pause_s=0.01), keep_winners)
    run = context.Process(target=measure_all, args=arguments)
    run.start()
    try:
        while not sweep.races():
            assert run.is_alive()
            time.sleep(0.005)
        found = status("--json")
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.join()
    assert found["held"]
    assert (found["holder"]["stage"], found["holder"]["process"]) == ("measure", run.pid)
    assert 1 <= found["measure"]["done"] <= 2
    assert found["last_line_s"] < 20
    assert status("--json")["held"] is False
    assert "no run is at work" in status()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_where_the_time_went_is_told_the_longest_part_first(sweep: Sweep, status):
    assert "time of measuring" not in status()
    assert status("--json")["measure"]["parts_s"] == {}
    for problem, seconds in zip(THREE, (1.0, 2.0, 70.25), strict=True):
        race = {"race": str(seconds), "kernel": problem[0], "problem": problem[1].key, "gpu": GPU, "untimed": {}}
        sweep.note("races", race | {"strategy": "race", "seconds": {"screening": 2 * seconds, "race": 1.0}})
    assert status("--json")["measure"]["parts_s"] == {"screening": 146.5, "race": 3.0}
    assert "time of measuring: screening 2 min, race 3 s" in status()


def test_a_folder_that_may_only_be_read_has_a_status(sweep: Sweep, status):
    with sweep.running("measure"):
        pass
    for path in (sweep.folder, *sweep.folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    assert status("--json")["measure"]["problems"] == 3


def test_the_status_changes_nothing(sweep: Sweep, status):
    measure_all(sweep, RecordedExecutor(), keep_winners)
    before = {path: path.read_bytes() for path in sweep.folder.rglob("*") if path.is_file()}
    status()
    assert {path: path.read_bytes() for path in sweep.folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_is_not_a_sweep_gives_a_one_line_error(tmp_path, capsys):
    assert cli.main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"tilekern: {tmp_path} holds no sweep: it has no sweep.json; give the folder of one"
    )
    assert cli.main(["status", str(tmp_path / "nowhere")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_escape_sequences_of_a_folder_are_not_obeyed(sweep: Sweep, status, capsys):
    """Of the plan, of a journal, and in an error about a name."""
    evil = "\x1b[2J\x1b]0;owned\x07\rno run is at work\x9b"
    plan = json.loads((sweep.folder / "sweep.json").read_text())
    (sweep.folder / "sweep.json").write_text(json.dumps(plan | {"model": f"{evil}qwen"}))
    key = candidates(*THREE[0], sweep.target)[0].artifact
    sweep.note("compiled", {"key": key, "status": "failed", "reason": f"{evil}reason\nfailed: forged"})
    sweep.note("skipped", {"skipped": f"{evil}problem", "reason": evil})
    sweep.note("gpu", {"gpu": f"{evil}gpu", "driver": evil})
    said = status()
    assert "\\x1b]0;owned\\x07" in said
    assert "qwen" in said
    assert "reason\\nfailed: forged" in said
    assert cli.main(["status", str(sweep.folder / evil)]) == 2
    said += capsys.readouterr().err + status("--json")["model"].replace(evil, "")
    assert all(letter.isprintable() or letter == "\n" for letter in said)
