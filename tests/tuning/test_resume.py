"""A measure stage that is killed at any moment and goes on, and what its journals say by then."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from recorded import COPY_US, GPU, RIGHT, RecordedExecutor, timing
from tuning_samples import THREE

from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, Config
from tilekern.tuning.compile.stage import wanted
from tilekern.tuning.measure.stage import measure_all, tasks
from tilekern.tuning.pipeline import NO_TOOLKIT
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")
# What they compile to is what SMALL does: the number of rows is no part of it.


def copied(compiled_sweep: Sweep, folder: Path) -> Sweep:
    sweep = Sweep(Path(shutil.copytree(compiled_sweep.folder, folder)))
    sweep.begin(sweep.target, "test", THREE)
    assert not list(wanted(sweep))
    return sweep


@pytest.fixture
def sweep(compiled_sweep: Sweep, tmp_path: Path) -> Sweep:
    return copied(compiled_sweep, tmp_path / "sweep")


def measure(sweep: Sweep, executor: RecordedExecutor, strategy: str = "race"):
    return measure_all(sweep, executor, keep_winners, strategy)


def outcome(sweep: Sweep) -> list:
    """All that the winners' records say but for when they were made, and the digest that comes of it."""
    found = [json.loads(winner.record.to_json()) for winner, _ in winners(sweep, NO_TOOLKIT)]
    return [{name: value for name, value in record.items() if name not in ("created", "sha256")} for record in found]


def journal(sweep: Sweep, name: str) -> list[dict]:
    path = sweep.folder / f"{name}.jsonl"
    whole = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in whole if line.endswith("}")]


@pytest.mark.nightly
def test_kills_at_any_moment_change_nothing_about_the_outcome(compiled_sweep: Sweep, sweep: Sweep, tmp_path: Path):
    calm = copied(compiled_sweep, tmp_path / "calm")
    measure(calm, RecordedExecutor())
    chance, kills, checks = random.Random(0), 0, 0
    while True:
        run = FORK.Process(target=measure, args=(Sweep(sweep.folder), RecordedExecutor(pause_s=0.02)))
        run.start()
        run.join(chance.uniform(0.05, 0.3))
        if run.exitcode is not None:
            break
        os.kill(run.pid, signal.SIGKILL)
        run.join()
        kills += 1
        found = [line["candidate"] for line in journal(sweep, "measured") if "race" not in line]
        assert len(found) >= checks
        checks = len(found)
    assert run.exitcode == 0
    assert kills >= 5
    # No check was done twice, no race was left half.
    assert Counter(found).most_common(1)[0][1] == 1
    assert len({line["problem"] for line in sweep.races().values()}) == 3
    assert outcome(sweep) == outcome(calm)
    assert [record["provenance"] for record in outcome(sweep)] == ["measured"] * 3


def test_a_stage_that_is_done_does_nothing(sweep: Sweep):
    first = measure(sweep, RecordedExecutor())
    again = RecordedExecutor()
    second = measure(sweep, again)
    assert again.tasks == []
    assert (first.timed, first.wrong, first.quarantined) == (second.timed, second.wrong, second.quarantined)
    assert first.timed == sum(not key.startswith("copy|") for key in sweep.measured()) - 3  # the generic variants


def test_half_a_race_counts_for_nothing_and_its_checks_for_all(sweep: Sweep):
    measure(sweep, RecordedExecutor())
    before, timed = outcome(sweep), sum("timing" in line for line in sweep.measured().values())
    path = sweep.folder / "races.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert sum("timing" in line for line in sweep.measured().values()) == timed * 2 / 3
    again = RecordedExecutor()
    measure(sweep, again)
    assert [task.problem for task in again.tasks] == [THREE[-1][1]]
    assert again.checked == []
    assert outcome(sweep) == before


def test_late_candidates_race_only_against_the_leaders(sweep: Sweep):
    kernel, problem = THREE[0]
    items = [item for item in candidates(kernel, problem, sweep.target) if item.variant == ALIGNED]
    late = items[5]
    path = sweep.folder / "compiled.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    # Its twins go with it, since one of them would be measured in its place.
    code = sweep.compiled()[late.artifact]["code_sha256"]
    path.write_text("".join(line for line in whole if json.loads(line)["code_sha256"] != code))
    measure(sweep, RecordedExecutor())
    path.write_text("".join(whole))
    [task, *_] = tasks(sweep, [(kernel, problem)], "race")
    keys = {entrant.key for entrant in task.entrants}
    assert late.key in keys
    assert task.stay in keys
    assert 3 <= len(keys) <= 6
    assert set(task.checks) == keys - {late.key}
    # The newcomer is the fastest by far on the day of the second race, on which all are slow.
    slow = dict.fromkeys([item.config.key for item in items], 10.0) | {late.config.key: 2.0}
    measure(sweep, RecordedExecutor(factors=slow))
    assert outcome(sweep)[0]["config"] == dict(late.config)


def test_another_strategy_times_all_again(sweep: Sweep):
    measure(sweep, RecordedExecutor(), "race")
    again = RecordedExecutor()
    measure(sweep, again, "exhaustive")
    assert [len(task.entrants) for task in again.tasks] == [len(again.tasks[0].entrants)] * 3
    assert again.checked == []
    assert list(tasks(sweep, THREE, "exhaustive")) == []


def test_candidates_left_untimed_by_a_strategy_are_done(sweep: Sweep, monkeypatch):
    few = RecordedExecutor()
    measuring = few._measure
    monkeypatch.setattr(few, "_measure", lambda task: (x for i, x in enumerate(measuring(task)) if i % 2 == 0))
    measure(sweep, few)
    assert sum("timing" in line for line in sweep.measured().values()) < sum(len(t.entrants) - 1 for t in few.tasks)
    again = RecordedExecutor()
    measure(sweep, again)
    assert {entrant.candidate.variant for task in again.tasks for entrant in task.entrants} <= {ALIGNED, "generic"}
    assert sum(len(task.entrants) for task in again.tasks) < sum(len(task.entrants) for task in few.tasks) / 2


def test_a_quarantine_holds_for_its_toolkit_and_driver(sweep: Sweep):
    kernel, problem = THREE[0]
    config = candidates(kernel, problem, sweep.target)[3].config
    measure(sweep, RecordedExecutor(crashing=[config.key]))
    bad = {item.key for named in THREE for item in candidates(*named, sweep.target) if item.config == config}
    assert sweep.quarantined() == dict.fromkeys(bad, "the process died (exit code 7)")
    assert list(tasks(sweep, THREE, "race")) == []
    sweep.note("gpu", GPU | {"driver": "590.1"})
    assert sweep.quarantined() == {}
    [task, *_] = tasks(sweep, THREE, "race")
    assert bad & {entrant.key for entrant in task.entrants}
    sweep.note("gpu", GPU)
    assert sweep.quarantined().keys() == bad
    for line in journal(sweep, "compiled"):
        sweep.note("compiled", line | {"toolkit": line["toolkit"] | {"key": "tileiras-99-cuda_tile-9"}})
    assert sweep.quarantined() == {}
    sweep.note("quarantine", *({"candidate": key, "reason": "of old"} for key in bad))
    assert sweep.quarantined() == dict.fromkeys(bad, "of old")


def test_a_twin_of_a_crashed_candidate_does_not_run(sweep: Sweep):
    kernel, problem = THREE[0]
    first = candidates(kernel, problem, sweep.target)[0]
    lines = sweep.compiled()
    code = lines[first.artifact]["code_sha256"]
    twins = {c.key for c in candidates(kernel, problem, sweep.target) if lines[c.artifact]["code_sha256"] == code}
    sweep.note("quarantine", {"candidate": first.key, "reason": "hung"})
    running = {e.key for task in tasks(sweep, [(kernel, problem)], "race") for e in task.entrants}
    assert running
    assert not running & twins


def test_a_measurement_of_other_machine_code_does_not_count(sweep: Sweep):
    measure(sweep, RecordedExecutor())
    kernel, problem = THREE[0]
    item = candidates(kernel, problem, sweep.target)[0]
    assert "timing" in sweep.measured()[item.key]
    line = sweep.compiled()[item.artifact]
    sweep.note("compiled", line | {"code_sha256": "0" * 64})
    assert item.key not in sweep.measured()
    sweep.note("compiled", line)
    assert "timing" in sweep.measured()[item.key]


def test_the_check_of_a_line_that_follows_a_timing_counts(sweep: Sweep):
    measure(sweep, RecordedExecutor())
    best = outcome(sweep)[0]
    item = next(c for c in candidates(*THREE[0], sweep.target) if dict(c.config) == best["config"])
    code = sweep.compiled()[item.artifact]["code_sha256"]
    sweep.note("measured", {"candidate": item.key, "check": RIGHT, "code_sha256": code})
    assert outcome(sweep)[0] == best
    wrong = {"candidate": item.key, "check": RIGHT | {"passed": False}, "code_sha256": code}
    sweep.note("measured", wrong)
    assert outcome(sweep)[0]["config"] != best["config"]


def test_a_problem_that_cannot_be_measured_is_named_and_tried_again(sweep: Sweep, monkeypatch):
    """As a worker does whose inputs do not fit, at one problem of three."""
    small, reason = RecordedExecutor(), "inputs: CUDA out of memory"
    told = ("skipped", {"kernel": "column_sum", "problem": THREE[1][1].key, "reason": reason})
    measuring = small._measure
    monkeypatch.setattr(small, "_measure", lambda task: [told] if task.problem == THREE[1][1] else measuring(task))
    measure(sweep, small)
    assert sweep.skipped() == {f"column_sum|{THREE[1][1].key}": reason}
    assert [record["provenance"] for record in outcome(sweep)] == ["measured", "predicted", "measured"]
    again = RecordedExecutor()
    measure(sweep, again)
    assert [task.problem for task in again.tasks] == [THREE[1][1]]
    assert sweep.skipped() == {}
    assert [record["provenance"] for record in outcome(sweep)] == ["measured"] * 3


def test_a_race_that_a_crash_broke_off_counts_from_its_new_start(sweep: Sweep, monkeypatch):
    """A crash after the race, as in a last check: the others race again in a new process, and the first times go."""
    broken = RecordedExecutor()
    measuring = broken._measure

    def twice(task):
        first = list(measuring(task))
        yield from first
        lost = next(line["candidate"] for _, line in first if "timing" in line)
        yield "quarantine", {"candidate": lost, "reason": "hung"}
        for journal, line in first:
            if "timing" in line and line["candidate"] != lost:
                yield journal, line | {"timing": line["timing"] | {"samples": 7}}

    monkeypatch.setattr(broken, "_measure", twice)
    measure(sweep, broken)
    timings = [line["timing"] for line in sweep.measured().values() if "timing" in line]
    assert timings
    assert {timing["samples"] for timing in timings} == {7}
    assert len(sweep.quarantined()) == 3


class Confirming(RecordedExecutor):
    """Checks the fastest again after the race, as the worker does, and finds some of them wrong."""

    def __init__(self, wrong: Config) -> None:
        super().__init__()
        self.found_wrong = wrong

    def _measure(self, task):
        yield from super()._measure(task)
        racing = [entrant for entrant in task.entrants if entrant.is_aligned]
        for entrant in sorted(racing, key=self.time_us)[:2]:
            passed = entrant.candidate.config != self.found_wrong
            check = RIGHT | {"passed": passed, "cases": [{"case": "zeros", "passed": passed}]}
            yield "measured", {"candidate": entrant.key, "check": check}


def test_one_that_fails_after_its_race_never_wins(sweep: Sweep):
    sweep.begin(sweep.target, "test", THREE[:1])
    measure(sweep, RecordedExecutor())
    [before] = outcome(sweep)
    measure(sweep, Confirming(Config(before["config"])), "exhaustive")
    [after] = outcome(sweep)
    medians = sorted(line["timing"]["median_us"] for line in sweep.measured().values() if "race" in line)
    medians = [us for us in medians if us != COPY_US]
    assert before["measurement"]["median_us"] == medians[0]
    assert after["measurement"]["median_us"] == medians[1]
    assert after["check"]["cases"] == [{"case": "zeros", "passed": True}]
    assert before["config"] not in [one["config"] for one in after["runners_up"]]
    assert after["failed"] == 1


def test_two_machines_journals_become_one(compiled_sweep: Sweep, sweep: Sweep, tmp_path: Path):
    """One measures with one driver what the other, which was killed in a line, did not come to."""
    whole = copied(compiled_sweep, tmp_path / "whole")
    measure(whole, RecordedExecutor())
    other = copied(compiled_sweep, tmp_path / "other")
    sweep.begin(sweep.target, "test", THREE[:2])
    measure(sweep, RecordedExecutor())
    other.begin(other.target, "test", THREE[1:])
    measure(other, RecordedExecutor(gpu=GPU | {"driver": "590.1"}))
    with (other.folder / "measured.jsonl").open("a") as file:
        file.write('{"candidate": "col')
    for path in sorted(other.folder.glob("*.jsonl")):
        with (sweep.folder / path.name).open("a") as file:
            file.write(path.read_text())
    sweep.begin(sweep.target, "test", THREE)
    again = RecordedExecutor()
    measure(sweep, again)
    assert again.tasks == []
    found = outcome(sweep)
    assert [record["config"] for record in found] == [record["config"] for record in outcome(whole)]
    # Each measurement names the driver that it was made with, whichever came last.
    drivers = [record["measurement"].pop("driver") for record in found]
    assert drivers == [GPU["driver"], "590.1", "590.1"]
    assert [r["measurement"] | {"driver": GPU["driver"]} for r in found] == [r["measurement"] for r in outcome(whole)]


def test_a_plan_may_limit_a_problem_to_some_configs(sweep: Sweep):
    kernel, problem = THREE[0]
    space = [item.config for item in candidates(kernel, problem, sweep.target) if item.variant == ALIGNED]
    limit = [space[7], space[3], space[7]]
    sweep.begin(sweep.target, "test", THREE[:2], {THREE[0]: limit})
    items = Sweep(sweep.folder).candidates(kernel, problem)
    assert [item.config for item in items] == [space[7], space[3], spec_named(kernel).generic(problem)]
    assert [item.variant for item in items] == ["aligned", "aligned", "generic"]
    assert sweep.candidates(*THREE[1]) == candidates(*THREE[1], sweep.target)
    executor = RecordedExecutor()
    measure(sweep, executor)
    assert {e.candidate.config for e in executor.tasks[0].entrants if e.is_aligned} == {space[7], space[3]}
    assert executor.tasks[0].stay == items[0].key
    [record, _] = outcome(sweep)
    assert record["candidates"] == 3
    assert Config(record["config"]) in limit
    assert "default_us" not in record["measurement"]


def test_journals_are_read_once_a_stage(sweep: Sweep, monkeypatch):
    """The time of a stage grows with the journal's length, not with its square."""
    measure(sweep, RecordedExecutor())
    noise = {"check": RIGHT, "race": "old", "code_sha256": None, **timing(1.0)}
    sweep.note("measured", *({"candidate": f"other|{number}||", **noise} for number in range(20_000)))
    counts = Counter()
    for name in ("compiled", "measured", "races", "quarantined"):
        read = getattr(Sweep, name)
        monkeypatch.setattr(Sweep, name, lambda self, name=name, read=read: counts.update([name]) or read(self))
    started = time.perf_counter()
    measure(sweep, RecordedExecutor())
    list(winners(sweep, NO_TOOLKIT))
    assert time.perf_counter() - started < 20
    assert max(counts.values()) <= 8
