"""Nothing that a candidate does hurts another one: measuring processes that die, hang or err, with no GPU."""

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from isolation_samples import (
    RIGHT,
    TIMING,
    be_killed,
    crash,
    hang,
    hang_with_a_child,
    illegal_address,
    is_alive,
    memory_is_gone,
    once,
    process_of,
    segfault,
)
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.runtime.workers import disposable
from tilekern.tuning.measure import process
from tilekern.tuning.measure.process import TOOK, Worker, measure_task
from tilekern.tuning.measure.stage import entrants
from tilekern.tuning.measure.tasks import CUDA, INPUTS, QUEUE, Task

pytestmark = pytest.mark.processes

LIMIT_S = 1.0


@pytest.fixture
def task(compiled_sweep, h200):
    """Four entrants of one problem."""
    found = entrants(*SMALL, h200, compiled_sweep.compiled(), ())[:4]
    return Task(*SMALL, h200, tuple(found), {}, found[0].key)


@pytest.fixture
def keys(task):
    return [entrant.key for entrant in task.entrants]


@pytest.fixture
def measure(monkeypatch, tmp_path, task):
    """Has the task measured by processes in which something happens; the lines, and how each process was told to go."""
    workers = []

    def run(checking=None, racing=None):
        serve = process_of(checking or {}, racing or {}, tmp_path / "started")
        monkeypatch.setattr(process, "serve", serve)
        monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
        workers.append(Worker(tmp_path, launch_timeout_s=LIMIT_S))
        lines = list(measure_task(workers[-1], task))
        return lines, (tmp_path / "started").read_text().split()

    yield run
    for worker in workers:
        worker.close()


def quarantined(lines):
    return {line["candidate"]: line["reason"] for journal, line in lines if journal == "quarantine"}


def timed(lines):
    return [line["candidate"] for journal, line in lines if journal == "measured" and "timing" in line]


def test_where_nothing_happens_one_process_does_all(measure, task, keys):
    lines, started = measure()
    assert quarantined(lines) == {}
    assert timed(lines) == keys
    assert lines[0] == ("measured", {"candidate": keys[0], "check": RIGHT.as_dict()})
    assert lines[-2][1]["timing"] == TIMING.as_dict()
    assert lines[-1] == (TOOK, {"kernel": task.kernel, "problem": task.problem.key, "seconds": {"race": 1.0}})
    assert started == ["queued"]


@pytest.mark.parametrize(
    ("where", "act", "reason"),
    [
        ("checking", crash, "the process died (exit code 7)"),
        ("checking", hang, "no answer within 1 s"),
        ("racing", segfault, "the process died (SIGSEGV)"),
        ("racing", illegal_address, "AcceleratorError: CUDA error: an illegal memory access was encountered"),
        ("racing", hang, "no answer within 1 s"),
    ],
)
def test_a_fault_costs_the_candidate_at_work_and_no_other(measure, keys, where, act, reason):
    started_at = time.perf_counter()
    lines, started = measure(**{where: {keys[1]: act}})
    took_s = time.perf_counter() - started_at
    assert quarantined(lines) == {keys[1]: reason}
    assert timed(lines) == [keys[0], *keys[2:]]
    checked = Counter(line["candidate"] for journal, line in lines if journal == "measured" and "timing" not in line)
    assert set(checked.values()) == {1}, "what was checked is not checked again"
    faulted_in_race = where == "racing" and act is not hang
    assert started == (["queued", "careful", "careful"] if faulted_in_race else ["queued", "queued"])
    assert took_s < 60, "what hangs does so for ten minutes"


def test_a_fault_in_a_race_is_not_laid_at_the_door_of_the_one_behind_it(measure, keys):
    """Queued launches run ahead of the host: the one that is announced has only been launched after the culprit."""

    def fault_later(connection, task):
        if not task.careful:
            illegal_address(connection, task)

    def fault_now(connection, task):
        if task.careful:
            illegal_address(connection, task)

    lines, _ = measure(racing={keys[1]: fault_now, keys[2]: fault_later})
    assert list(quarantined(lines)) == [keys[1]]
    assert timed(lines) == [keys[0], *keys[2:]]


def test_a_hang_that_fills_the_queue_is_found(measure, keys):
    """The host then waits before it has announced anybody."""

    def hang_if_queued(connection, task):
        if not task.careful:
            hang()

    def hang_if_careful(connection, task):
        if task.careful:
            hang()

    lines, started = measure(racing={QUEUE: hang_if_queued, keys[2]: hang_if_careful})
    assert quarantined(lines) == {keys[2]: "no answer within 1 s"}
    assert timed(lines) == [*keys[:2], keys[3]]
    assert started == ["queued", "careful", "careful"]


def test_a_fault_in_a_race_that_does_not_come_again_costs_nobody(measure, keys, tmp_path):
    lines, started = measure(racing={keys[1]: once(tmp_path / "mark", illegal_address)})
    assert quarantined(lines) == {}
    assert timed(lines) == keys
    assert started == ["queued", "careful"]


def test_every_candidate_but_the_last_may_fail(measure, keys):
    lines, _ = measure({keys[0]: crash, keys[1]: hang}, {keys[2]: segfault})
    assert list(quarantined(lines)) == keys[:3]
    assert timed(lines) == keys[3:]


def test_where_all_fail_the_task_ends(measure, keys):
    lines, started = measure(dict.fromkeys(keys, crash))
    assert list(quarantined(lines)) == keys
    assert timed(lines) == []
    assert len(started) == len(keys)


def test_a_hang_takes_what_it_started_along(measure, keys, tmp_path):
    pid_file = tmp_path / "pid"
    lines, _ = measure({keys[0]: hang_with_a_child(pid_file)})
    assert quarantined(lines) == {keys[0]: "no answer within 1 s"}
    assert not is_alive(int(pid_file.read_text()))


@pytest.mark.parametrize("act", [be_killed, memory_is_gone])
def test_what_may_be_anothers_doing_is_tried_once_more(measure, keys, act, tmp_path):
    lines, started = measure({keys[2]: once(tmp_path / "mark", act)})
    assert quarantined(lines) == {}
    assert timed(lines) == keys
    assert len(started) == 2


@pytest.mark.parametrize(
    ("act", "journal", "reason"),
    [
        (be_killed, "open", "the process died (SIGKILL)"),
        (memory_is_gone, "quarantine", "OutOfMemoryError: CUDA out of memory."),
    ],
    ids=["killed", "memory"],
)
def test_what_happens_twice_is_the_candidates_own_unless_somebody_else_does_it(measure, keys, act, journal, reason):
    lines, started = measure({keys[2]: act})
    assert [line for name, line in lines if name in ("open", "quarantine")] == [
        {"candidate": keys[2], "reason": reason}
    ]
    assert journal in dict(lines)
    assert timed(lines) == [*keys[:2], keys[3]]
    assert len(started) == 3


def test_inputs_that_fail_once_cost_nothing(measure, keys, tmp_path):
    lines, started = measure({INPUTS: once(tmp_path / "mark", memory_is_gone)})
    assert timed(lines) == keys
    assert started == ["queued", "queued+frugal"]


def test_inputs_that_do_not_fit_cost_their_problem_and_not_the_stage(measure, task):
    lines, started = measure({INPUTS: memory_is_gone})
    reason = "inputs: OutOfMemoryError: CUDA out of memory."
    assert lines == [("skipped", {"kernel": task.kernel, "problem": task.problem.key, "reason": reason})]
    assert len(started) == 2


def test_a_gpu_that_does_not_start_ends_the_stage(measure):
    with pytest.raises(InputError, match=r"failed at its start of CUDA: the process died \(exit code 7\)"):
        measure({CUDA: crash})


def test_a_step_of_no_candidate_has_a_limit_too(measure, monkeypatch):
    monkeypatch.setattr(process, "STEP_TIMEOUT_S", 0.5)
    lines, _ = measure({INPUTS: hang})
    assert [line["reason"] for _, line in lines] == ["inputs: no answer within 0.5 s"]


def test_a_process_serves_one_task_after_another(monkeypatch, tmp_path, task, keys):
    monkeypatch.setattr(process, "serve", process_of({}, {}, tmp_path / "started"))
    monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
    worker = Worker(tmp_path)
    at_work = worker.process()
    for _ in range(2):
        assert timed(measure_task(worker, task)) == keys
    assert worker.process() is at_work
    worker.close()


def test_the_limit_grows_with_what_a_problem_must_move(task):
    worker, spec = Worker(Path()), spec_named(task.kernel)
    small = worker.limit_s(task.entrants[0].key, task)
    assert process.LAUNCH_TIMEOUT_S < small < process.LAUNCH_TIMEOUT_S + 0.1
    large = replace(task, problem=spec.problem(rows=1 << 22, columns=1 << 13, dtype="float32"))
    assert small + 5 < worker.limit_s(task.entrants[0].key, large) < 60


# A parent that is killed while its worker hangs.
PARENT = """
import os, signal, sys, time
from multiprocessing import get_context
from tilekern.runtime.workers import disposable

def hang(pid_file):
    disposable.begin()
    with open(pid_file + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(pid_file + ".new", pid_file)
    time.sleep(600)

if __name__ == "__main__":
    process = get_context("spawn").Process(target=hang, args=(sys.argv[1],), daemon=True)
    process.start()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_parent_leaves_no_process_behind(tmp_path):
    script, pid_file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, script, pid_file], env=environment, check=False)
    assert ran.returncode == -9
    pid, deadline = int(pid_file.read_text()), time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_a_kill_for_memory_is_said(monkeypatch):
    """The kernel counts such kills; a machine need not run out of memory for this test."""
    kills = iter([3, 4])
    monkeypatch.setattr(disposable, "_out_of_memory_kills", lambda: next(kills))
    obituary = disposable.Obituary()
    killed = get_context("fork").Process(target=be_killed)
    killed.start()
    killed.join()
    assert obituary.of(killed) == "SIGKILL: the host ran out of memory"
