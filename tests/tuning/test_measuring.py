"""The conversation with a measuring process that may die or fall silent, and what needs a GPU."""

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.targets import here, resolve
from tuning import measuring
from tuning.publishing import keep_winners
from tuning.timing import Timing
from tuning.verifying import compare, odd_problem


def crash(connection: Connection, *_: object) -> None:
    connection.recv()
    connection.send(("begin", "candidate 1"))
    connection.send(("checked", ("candidate 1", "a check")))
    connection.send(("begin", "candidate 2"))
    connection.close()
    os._exit(7)


def hang(connection: Connection, *_: object) -> None:
    connection.recv()
    connection.send(("begin", "candidate 1"))
    time.sleep(600)


def finish(connection: Connection, *_: object) -> None:
    connection.recv()
    connection.send(("begin", "candidate 1"))
    connection.send(("timed", {"candidate 1": "a timing"}))
    connection.send(("done", None))


@pytest.fixture
def worker(monkeypatch):
    """A worker whose process runs another function than the one that needs a GPU."""

    def make(function):
        monkeypatch.setattr(measuring, "serve", function)
        monkeypatch.setattr(measuring, "get_context", lambda _: get_context("fork"))
        return measuring.Worker("folder", resolve("H200"))

    return make


def test_a_crash_costs_the_candidate_in_flight(worker):
    checks, timings = {}, {}
    lost = measuring._converse(worker(crash), "task", checks, timings)
    assert lost is not None
    assert lost[0] == "candidate 2"
    assert "died (exit code 7)" in lost[1]
    assert checks == {"candidate 1": "a check"}


def test_a_hang_is_killed_after_the_steps_time(worker, monkeypatch):
    monkeypatch.setattr(measuring, "STEP_TIMEOUT_S", 0.5)
    started = time.perf_counter()
    lost = measuring._converse(worker(hang), "task", {}, {})
    assert lost == ("candidate 1", "no answer within 0.5 s")
    assert time.perf_counter() - started < 30


def test_answers_arrive(worker):
    timings = {}
    assert measuring._converse(worker(finish), "task", {}, timings) is None
    assert timings == {"candidate 1": "a timing"}


@pytest.mark.skipif(here() is not None, reason="this machine has a GPU")
def test_measuring_without_a_gpu_is_refused(compiled_sweep):
    with pytest.raises(InputError, match="needs a GPU and this machine has none"):
        measuring.measure_all(compiled_sweep, keep_winners)


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
