"""The conversation with a measuring process that may die or fall silent, and what needs a GPU."""

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.targets import here
from tuning import measuring, process
from tuning.executors.local import LocalExecutor
from tuning.measuring import entrants
from tuning.publishing import keep_winners
from tuning.tasks import Task
from tuning.timing import Timing
from tuning.verifying import Check, compare, odd_problem

RIGHT = Check(passed=True, relative_error=0.0, elementwise_error=0.0)
TIMING = Timing(5.0, 0.1, 20)


def take(connection: Connection) -> list[str]:
    """The keys of a task's entrants, after the first of them was announced and checked."""
    task = connection.recv()
    keys = [entrant.key for entrant in task.entrants]
    connection.send(("begin", keys[0]))
    connection.send(("checked", (keys[0], RIGHT)))
    return keys


def crash_at_the_second(connection: Connection, *_: object) -> None:
    keys = take(connection)
    if len(keys) == 3:
        connection.send(("begin", keys[1]))
        connection.close()
        os._exit(7)
    connection.send(("timed", dict.fromkeys(keys[:1], TIMING)))
    connection.send(("done", None))


def hang_at_the_second(connection: Connection, *_: object) -> None:
    keys = take(connection)
    if len(keys) == 3:
        connection.send(("begin", keys[1]))
        time.sleep(600)
    connection.send(("done", None))


def die_early(connection: Connection, *_: object) -> None:
    connection.recv()
    connection.send(("begin", "inputs"))
    os._exit(9)


@pytest.fixture
def measure(monkeypatch, compiled_sweep, h200, tmp_path):
    """Has a task of three entrants measured by a process that runs another function than the one that needs a GPU."""

    def run(function):
        monkeypatch.setattr(process, "serve", function)
        monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
        found = entrants(*SMALL, h200, compiled_sweep.compiled(), ())[:3]
        task = Task(*SMALL, h200, tuple(found), {}, found[0].key)
        return [entrant.key for entrant in found], list(process.measure_task(process.Worker(tmp_path), task))

    return run


def test_a_crash_costs_the_candidate_in_flight(measure):
    keys, lines = measure(crash_at_the_second)
    assert [line for journal, line in lines if journal == "quarantine"] == [
        {"candidate": keys[1], "reason": "the process died (exit code 7)"}
    ]
    assert lines[-1] == (
        "measured", {"candidate": keys[0], "check": RIGHT.as_dict(), "timing": TIMING.as_dict()}
    )  # fmt: skip


def test_a_hang_is_killed_after_the_steps_time(measure, monkeypatch):
    monkeypatch.setattr(process, "STEP_TIMEOUT_S", 0.5)
    started = time.perf_counter()
    keys, lines = measure(hang_at_the_second)
    assert ("quarantine", {"candidate": keys[1], "reason": "no answer within 0.5 s"}) in lines
    assert time.perf_counter() - started < 30


def test_a_process_that_dies_before_any_candidate_ends_the_stage(measure):
    with pytest.raises(InputError, match="failed at inputs"):
        measure(die_early)


@pytest.mark.skipif(here() is not None, reason="this machine has a GPU")
def test_measuring_without_a_gpu_is_refused(compiled_sweep):
    with pytest.raises(InputError, match="needs a GPU and this machine has none"):
        measuring.measure_all(compiled_sweep, LocalExecutor(compiled_sweep.cache), keep_winners)


def test_a_timing_of_samples():
    assert Timing.of([5.0]) == Timing(5.0, 0.0, 1)
    found = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median_us, found.spread_us, found.samples) == (3.0, 1.0, 5)


def test_odd_sizes_are_inside_the_bucket_and_odd():
    kernel, problem = SMALL
    from tilekern.kernels import spec_named

    odd = odd_problem(spec_named(kernel), problem)
    assert odd["rows"] == 251
    assert odd["columns"] == problem["columns"]


def test_a_poisoned_output_fails_the_check():
    import torch

    from tilekern.kernels import spec_named

    spec = spec_named("column_sum")
    problem = spec.problem(rows=3, columns=4, dtype="float32")
    expected = {"y": torch.ones(4, dtype=torch.float64)}
    right = torch.ones(4)
    assert compare(spec, problem, {"y": right}, expected).passed
    holed = right.clone()
    holed[2] = float("nan")
    check = compare(spec, problem, {"y": holed}, expected)
    assert not check.passed
    assert check.relative_error == float("inf")
