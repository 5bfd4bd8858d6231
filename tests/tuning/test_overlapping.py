"""Problems are measured while others are compiled: what comes of it, what ends it, and who waits for whom; no GPU."""

import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from recorded import Known, RecordedExecutor
from tuning_samples import SMALL, WIDE, needs_compiler

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.runtime.workers.pool import Answer
from tilekern.tuning.compile import stage
from tilekern.tuning.compile.order import Order, turns_of
from tilekern.tuning.compile.stage import Compiling, Readiness, compile_all
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.pipeline import NO_TOOLKIT
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.journal import Journal

SCALE = ("scale", spec_named("scale").problem(rows=8192, columns=4096, dtype="bfloat16"))


def overlapped(sweep: Sweep, pool, executor, **options):
    with Compiling(functools.partial(compile_all, sweep, 1, pool=pool)) as compiling:
        found = measure_all(sweep, executor, keep_winners, coming=compiling.problems(), **options)
        return found, compiling.summary()


@pytest.fixture
def sweep(both, tmp_path):
    return both.again(tmp_path / "sweep")


def configs(sweep: Sweep):
    return {(winner.kernel, winner.problem.key): winner.record.config for winner, _ in winners(sweep, NO_TOOLKIT)}


pytestmark = needs_compiler


@pytest.mark.slow
def test_a_problem_is_measured_while_others_are_compiled(both, sweep):
    """The last artifact waits until a problem was measured, which would not come where the stages are apart."""
    seen = threading.Event()
    names = {item.artifact for item in both.candidates(*WIDE)}

    def before(item):
        if item.artifact in names:
            assert seen.wait(60)

    told = []

    def progress(done, total):
        told.append((done, total))
        seen.set()

    pool = Known(both, before)
    measured, compiled = overlapped(sweep, pool, RecordedExecutor(), progress=progress)
    assert compiled.compiled == len(pool.compiled) == len(both.compiled())
    assert told[-1] == (4, 4)
    assert configs(sweep) == configs(both)
    assert measured.timed == sum("timing" in line for key, line in both.measured().items() if "copy" not in key)
    stages = {run["stage"]: run for run in sweep.runs()}
    assert stages.keys() == {"compile", "measure"}
    assert all(run["ended"] for run in stages.values())


@pytest.mark.slow
def test_compiled_candidates_are_measured_at_once_and_only_once(both, tmp_path):
    sweep = Sweep(Path(shutil.copytree(both.folder, tmp_path / "copy")))
    (sweep.folder / "races.jsonl").unlink()
    (sweep.folder / "measured.jsonl").unlink()
    executor, pool = RecordedExecutor(), Known(both)
    overlapped(sweep, pool, executor)
    assert pool.compiled == []
    assert len(executor.tasks) == 4
    overlapped(sweep, pool, executor)
    assert len(executor.tasks) == 4


def test_waiting_for_compilers_does_not_count_as_time_of_the_measure_stage(both, sweep):
    overlapped(sweep, Known(both, lambda _: time.sleep(0.15)), RecordedExecutor())
    seconds = {run["stage"]: run["seconds"] for run in sweep.runs()}
    assert seconds["compile"] > 0.15 * len(both.compiled())
    assert seconds["measure"] < seconds["compile"] / 2


def test_what_ends_the_compile_stage_is_raised_when_what_is_there_is_measured(both, sweep):
    lines = []

    def before(item):
        if lines.append(item.artifact) or len(lines) == len(both.compiled()):
            raise InputError("the disk is full")

    executor = RecordedExecutor()
    with pytest.raises(InputError, match="the disk is full"):
        overlapped(sweep, Known(both, before), executor)
    assert sweep.races()
    assert len(sweep.compiled()) == len(both.compiled()) - 1
    # The next run does the rest alone.
    pool, raced = Known(both), len(sweep.races())
    overlapped(sweep, pool, executor)
    assert len(pool.compiled) == 1
    assert len(sweep.races()) == 4
    assert len(executor.tasks) == 4 > raced
    assert configs(sweep) == configs(both)


def test_a_candidate_that_does_not_compile_costs_itself(both, sweep):
    bad = both.candidates(*WIDE)[1].artifact

    class Failing(Known):
        def __call__(self, *arguments):
            for answer in super().__call__(*arguments):
                failed = {**answer.line, "status": "failed", "reason": "ptxas"}
                yield Answer(failed) if answer.line["key"] == bad else answer

    _, summary = overlapped(sweep, Failing(both), RecordedExecutor())
    assert summary.failed == 1
    assert len(sweep.races()) == 4


def test_an_error_of_the_measure_stage_ends_the_compilers(both, sweep):
    """Ctrl-C too: the compilers of a thread do not go on behind a run that is over."""

    class Interrupted(RecordedExecutor):
        def run(self, tasks):
            for _ in tasks:
                raise KeyboardInterrupt
            yield  # a generator

    pool = Known(both, lambda _: time.sleep(0.05))
    with pytest.raises(KeyboardInterrupt):
        overlapped(sweep, pool, Interrupted())
    assert len(pool.compiled) < len(both.compiled())
    assert all(run["ended"] for run in sweep.runs())
    assert sweep.holder.is_held() is False
    overlapped(sweep, Known(both), RecordedExecutor())
    assert configs(sweep) == configs(both)


@pytest.mark.processes
def test_a_kill_in_the_middle_takes_nothing_of_what_was_done(both, sweep):
    arguments = (Sweep(sweep.folder), Known(both, lambda _: time.sleep(0.02)), RecordedExecutor(pause_s=0.02))
    run = multiprocessing.get_context("fork").Process(target=overlapped, args=arguments)
    run.start()
    while not sweep.races():
        assert run.is_alive()
        time.sleep(0.005)
    os.kill(run.pid, signal.SIGKILL)
    run.join()
    raced, done = sweep.races(), sweep.compiled()
    assert len(raced) < 4
    pool, executor = Known(both), RecordedExecutor()
    overlapped(sweep, pool, executor)
    assert sorted([*pool.compiled, *done]) == sorted(both.compiled())
    again = Counter((task.kernel, task.problem.key) for task in executor.tasks)
    assert not again.keys() & {(race["kernel"], race["problem"]) for race in raced.values()}
    assert configs(sweep) == configs(both)


def test_a_problem_is_ready_when_the_last_of_its_artifacts_was_tried():
    told = []
    readiness = Readiness(told.append)
    readiness.tried("x")
    for name, lacking in (("a", {"1", "2"}), ("b", {"2"}), ("c", set()), ("d", {"x"})):
        readiness.list(name, lacking)
    assert told == ["c", "d"]
    readiness.tried("2")
    assert told == ["c", "d", "b"]
    readiness.tried("1")
    readiness.tried("1")
    assert told == ["c", "d", "b", "a"]


def test_kernels_that_are_soon_compiled_come_first_and_all_of_one_before_the_next(h200):
    turns = turns_of([WIDE, SCALE])
    assert turns == {SCALE: 0, WIDE: 1}
    order = Order([*candidates(*WIDE, h200), *candidates(*SCALE, h200)], turns)
    order.take_in()
    taken = []
    while (item := order.take(None)) is not None:
        taken.append(item.kernel)
    assert taken == sorted(taken, reverse=True)


def test_compilers_beside_the_measure_stage_give_way(both, h200):
    """Niceness is of a thread, and of what it starts."""
    found = []

    def compiles():
        found.append(stage.compile_one(both.candidates(*SMALL)[0], h200, 60.0, 1 << 34, stage.BESIDE_NICENESS))
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=compiles)
    thread.start()
    thread.join()
    assert found[0].line["status"] == "ok"
    assert found[1] == max(before, stage.BESIDE_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_threads_that_share_a_journal_lose_no_line(tmp_path):
    journal = Journal(tmp_path / "a.jsonl", "key")

    def write(name):
        for number in range(200):
            journal.append({"key": f"{name} {number}"})
            assert f"{name} {number}" in journal.latest()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.latest()) == 800
    assert len(Journal(journal.path, "key").latest()) == 800
