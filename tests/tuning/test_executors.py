"""Tasks over the GPUs of this host: who takes which, in which order, and what a GPU that fails costs; with no GPU."""

import itertools
import os
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from isolation_samples import RIGHT
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.tuning.executors import FINISHED, local, work
from tilekern.tuning.executors.local import LocalExecutor
from tilekern.tuning.measure import gpu
from tilekern.tuning.measure.process import LAUNCH_TIMEOUT_S
from tilekern.tuning.measure.stage import entrants
from tilekern.tuning.measure.tasks import Task

ROWS = (256, 1 << 20, 512, 1 << 22, 1024, 1 << 21)


@pytest.fixture
def tasks(compiled_sweep, h200):
    """Tasks of many sizes, four entrants each."""
    kernel, problem = SMALL
    found = tuple(entrants(kernel, problem, h200, compiled_sweep.compiled(), ())[:4])
    return [Task(kernel, problem.but(rows=rows), h200, found, {}, found[0].key) for rows in ROWS]


class Workers:
    """Stands where worker processes are started: notes which GPU is given what, and what is closed."""

    def __init__(self, pause_s=0.0, broken=()):
        self._pause_s, self._broken = pause_s, broken
        self.taken, self.closed = [], []
        # Device, rows and columns of each problem; devices whose worker was made, and whose process was.
        self.problems, self.started, self.begun = [], [], []
        self.at_task = threading.Event()

    def start(self, _cache, device, launch_timeout_s):
        assert launch_timeout_s == LAUNCH_TIMEOUT_S
        self.started.append(device)
        return Worker(self, device)

    def measure(self, worker, task):
        self.taken.append((worker.device, task.problem["rows"]))
        self.problems.append((worker.device, task.problem["rows"], task.problem["columns"]))
        yield "measured", {"candidate": f"{worker.device} {task.problem['rows']}"}
        self.at_task.set()
        time.sleep(self._pause_s)
        if worker.device in self._broken:
            raise InputError(f"GPU {worker.device} does not start")
        yield "measured", {"candidate": f"{worker.device} {task.problem['rows']} timed"}


class Worker:
    def __init__(self, workers, device):
        self.device, self._workers = device, workers

    def process(self):
        self._workers.begun.append(self.device)

    def close(self):
        self._workers.closed.append(self.device)


@pytest.fixture
def use(monkeypatch):
    """Make the executor use workers on GPUs of these names."""

    def given(workers, names):
        monkeypatch.setattr(local, "Worker", workers.start)
        monkeypatch.setattr(local, "measure_task", workers.measure)
        monkeypatch.setattr(local, "devices", lambda: list(names))
        return workers

    return given


def rows_done(lines):
    return [line["problem"] for journal, line in lines if journal == FINISHED]


def test_each_task_is_measured_once_and_each_gpu_has_work(use, tasks, tmp_path):
    workers = use(Workers(pause_s=0.05), ["0", "1", "2"])
    lines = list(LocalExecutor(tmp_path).run(tasks))
    assert sorted(rows for _, rows in workers.taken) == sorted(ROWS)
    assert {device for device, _ in workers.taken} == {"0", "1", "2"}
    assert sorted(rows_done(lines)) == sorted(task.problem.key for task in tasks)
    assert sorted(workers.closed) == ["0", "1", "2"]


def test_the_longest_goes_first(use, tasks, tmp_path):
    workers = use(Workers(), ["0"])
    list(LocalExecutor(tmp_path).run(tasks))
    assert [rows for _, rows in workers.taken] == sorted(ROWS, reverse=True)


def test_many_candidates_take_longer_than_few(tasks):
    few = replace(tasks[0], entrants=tasks[0].entrants[:1])
    assert work.longest_first([few, tasks[0]]) == [tasks[0], few]


def of_families(task, *named):
    """Tasks whose families differ as these letters do; the rows are those of the letters' capitals where they are."""
    columns = {letter: 1024 * (place + 1) for place, letter in enumerate(sorted({name.lower() for name in named}))}
    rows = {True: 1 << 16, False: 1 << 14}
    problems = [SMALL[1].but(rows=rows[name.isupper()], columns=columns[name.lower()]) for name in named]
    return [replace(task, problem=problem) for problem in problems]


def test_problems_of_one_family_stand_together_the_longest_family_first(tasks):
    a, big_a, b, c, big_c = of_families(tasks[0], "a", "A", "b", "c", "C")
    assert work.family(a) == work.family(big_a) != work.family(b)
    assert work.longest_first([a, b, big_a, c, big_c]) == [big_c, c, big_a, a, b]


def test_a_gpu_stays_with_its_family_then_takes_one_that_nobody_is_at_then_the_longest(tasks):
    a, b, c = of_families(tasks[0], "a", "b", "c")
    families = [work.family(task) for task in (a, b, c)]
    assert work.place_of_next([a, b, c], families[1], families) == 1
    assert work.place_of_next([a, b, c], None, families[:1]) == 1
    assert work.place_of_next([a, b], families[2], families[:2]) == 0


def test_each_family_is_measured_on_one_gpu_until_there_is_nothing_else(use, tasks, tmp_path):
    workers = use(Workers(pause_s=0.02), ["0", "1"])
    todo = of_families(tasks[0], *"aAbBcCdD")
    list(LocalExecutor(tmp_path).run(todo))
    assert len(workers.taken) == len(todo)
    seen = {}
    for device, _, columns in workers.problems:
        seen.setdefault(columns, set()).add(device)
    # The last family to be begun may be shared at the end.
    assert sum(len(found) > 1 for found in seen.values()) <= 1


def test_inside_a_context_workers_stay_from_one_run_to_the_next(use, tasks, tmp_path):
    workers = use(Workers(pause_s=0.01), ["0", "1"])
    with LocalExecutor(tmp_path) as executor:
        assert sorted(workers.started) == sorted(workers.begun) == ["0", "1"]
        for _ in range(2):
            assert len(rows_done(executor.run(tasks))) == len(tasks)
        assert workers.closed == []
    assert sorted(workers.started) == sorted(workers.closed) == ["0", "1"]


def test_a_worker_that_failed_does_not_stay(use, tasks, tmp_path):
    workers = use(Workers(broken=["0"]), ["0"])
    with LocalExecutor(tmp_path) as executor:
        with pytest.raises(InputError, match="GPU 0 does not start"):
            list(executor.run(tasks))
        assert workers.closed == ["0"]
    assert workers.closed == ["0"]


def test_a_task_s_lines_come_in_their_order(use, tasks, tmp_path):
    use(Workers(pause_s=0.01), ["0", "1"])
    said = [line.get("candidate", line.get("problem")) for _, line in LocalExecutor(tmp_path).run(tasks)]
    for task in tasks:
        rows = str(task.problem["rows"])
        mine = [text for text in said if text == task.problem.key or text.split()[1:2] == [rows]]
        device = mine[0].split()[0]
        assert mine == [f"{device} {rows}", f"{device} {rows} timed", task.problem.key]


def test_no_more_gpus_than_asked_for_or_than_tasks(use, tasks, tmp_path):
    workers = use(Workers(), ["0", "1", "2", "3"])
    list(LocalExecutor(tmp_path, most=2).run(tasks))
    assert sorted(workers.closed) == ["0", "1"]
    workers.closed.clear()
    list(LocalExecutor(tmp_path).run(tasks[:3]))
    assert sorted(workers.closed) == ["0", "1", "2"]


def test_a_gpu_that_fails_costs_its_task_and_the_others_do_the_rest(use, tasks, tmp_path):
    workers = use(Workers(pause_s=0.05, broken=["1"]), ["0", "1"])
    lines = []
    with pytest.raises(InputError, match="GPU 1 does not start"):
        lines.extend(LocalExecutor(tmp_path).run(tasks))  # all that come before the error
    [lost] = [rows for device, rows in workers.taken if device == "1"]
    assert sorted(rows_done(lines)) == sorted(task.problem.key for task in tasks if task.problem["rows"] != lost)
    assert Counter(rows for _, rows in workers.taken) == Counter(ROWS)
    assert sorted(workers.closed) == ["0", "1"]


def test_where_all_gpus_fail_it_is_said(use, tasks, tmp_path):
    workers = use(Workers(broken=["0", "1"]), ["0", "1"])
    with pytest.raises(InputError, match=r"GPU [01] does not start"):
        list(LocalExecutor(tmp_path).run(tasks))
    assert len(workers.taken) == 2


def test_who_takes_no_more_lines_stops_the_gpus(use, tasks, tmp_path):
    workers = use(Workers(pause_s=0.1), ["0", "1"])
    running = LocalExecutor(tmp_path).run(tasks)
    next(running)
    running.close()
    deadline = time.monotonic() + 10
    while len(workers.closed) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(workers.closed) == ["0", "1"]
    assert len(workers.taken) <= 2


def test_nothing_to_do_needs_no_gpu(use, tmp_path):
    use(Workers(), [])
    assert list(LocalExecutor(tmp_path).run([])) == []


def test_no_gpu_is_said(use, tasks, tmp_path):
    use(Workers(), [])
    with pytest.raises(InputError, match="no GPU here"):
        list(LocalExecutor(tmp_path).run(tasks))


def test_what_is_left_of_a_task_needs_no_check_twice(tasks):
    task = tasks[0]
    first, second, third, fourth = (entrant.key for entrant in task.entrants)
    lines = [
        ("measured", {"candidate": first, "check": RIGHT.as_dict()}),
        ("quarantine", {"candidate": second, "reason": "it hung"}),
        ("measured", {"candidate": third, "check": RIGHT.as_dict(), "timing": {"median_us": 1.0}}),
    ]
    left = work.left_of(task, lines)
    assert [entrant.key for entrant in left.entrants] == [first, third, fourth]
    assert left.checks == {first: RIGHT, third: RIGHT}
    assert left == replace(task.without(second), checks=left.checks)


def test_the_rows_of_the_tasks_order_them_by_their_roofline(tasks):
    spec = spec_named(tasks[0].kernel)
    ordered = work.longest_first(tasks)
    moved = [spec.bytes_moved(task.problem) for task in ordered]
    assert moved == sorted(moved, reverse=True)


@pytest.fixture
def host(monkeypatch):
    """A host with GPUs of these names, of which ``CUDA_VISIBLE_DEVICES`` may show some; torch counts those it shows."""

    def given(names, visible=None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: names[index])

    return given


H200, OTHER = "NVIDIA H200", "NVIDIA A10"
UUIDS = ("GPU-4d1f9c32-6a2f-0b5e-8a51-3f6f0f1c2a77", "GPU-9e7a1b54-11c3-45d0-b6a2-70c1d2e3f480")
MIG = "MIG-2f1c7a90-5b3e-5d2c-9a8f-0e1d2c3b4a59"


@pytest.mark.parametrize(
    ("names", "visible", "found"),
    [
        ([H200, H200], None, ["0", "1"]),
        ([H200, OTHER, H200], None, ["0", "2"]),
        ([H200, H200], "3,5", ["3", "5"]),
        ([H200, H200], " 5 , 3 ", ["5", "3"]),
        ([H200, OTHER], ",".join(UUIDS), [UUIDS[0]]),
        ([H200, H200], ",".join(UUIDS), list(UUIDS)),
        ([f"{H200} MIG 1g.18gb"], MIG, [MIG]),
        ([H200], "2,-1,3", ["2"]),
        ([], "", []),
        ([], None, []),
    ],
    ids=["all", "unlike", "numbers", "spaces", "unlike uuids", "uuids", "mig", "cut off", "hidden", "none"],
)
def test_gpus_are_named_as_their_processes_will_know_them(host, names, visible, found):
    host(names, visible)
    assert gpu.devices() == found
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_tasks_that_come_one_by_one_are_measured_while_the_next_is_awaited(use, tasks, tmp_path):
    """Each comes only when the one before it is over, which a list of all would wait for without end."""
    workers, over = use(Workers(), ["0", "1"]), threading.Semaphore(1)

    def coming():
        for task in tasks:
            assert over.acquire(timeout=30)
            yield task

    done = []
    for journal, line in LocalExecutor(tmp_path).run(coming()):
        if journal == FINISHED:
            done.append(line["problem"])
            over.release()
    assert done == [task.problem.key for task in tasks]
    assert sorted(workers.closed) == ["0", "1"]


def test_an_error_of_what_brings_tasks_is_raised_when_the_task_at_work_is_over(use, tasks, tmp_path):
    workers = use(Workers(pause_s=0.05), ["0"])

    def coming():
        yield tasks[0]
        assert workers.at_task.wait(30)
        raise InputError("no compiler")

    lines = LocalExecutor(tmp_path).run(coming())
    assert FINISHED in (journal for journal, _ in itertools.islice(lines, 3))
    with pytest.raises(InputError, match="no compiler"):
        list(lines)


def test_who_stops_listening_waits_for_no_task_that_is_still_to_come(use, tasks, tmp_path):
    workers, never = use(Workers(), ["0", "1"]), threading.Event()

    def coming():
        yield tasks[0]
        never.wait(60)

    lines = LocalExecutor(tmp_path).run(coming())
    next(lines)
    lines.close()
    deadline = time.monotonic() + 30
    while len(workers.closed) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    never.set()
