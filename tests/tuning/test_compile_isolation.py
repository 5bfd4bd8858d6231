"""A compile that kills its compiler costs one candidate, and no core waits for another at the end."""

import functools
import gzip
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from isolation_samples import compile_by, die_at, faulty_compiler, hang_at, is_alive, note_at
from tuning_samples import COMPILED, SMALL

from tilekern.compile import cutile
from tilekern.compile.toolchain import Toolkit, toolkit
from tilekern.errors import CompileFailed, CompileInterrupted, CompileTimeout, InputError
from tilekern.runtime.workers.pool import Answer, Lost
from tilekern.spec import Config, Problem
from tilekern.spec.targets import resolve
from tilekern.tuning.compile import stage as compiling
from tilekern.tuning.compile.order import Order
from tilekern.tuning.compile.pool import compile_in_order, start_server
from tilekern.tuning.compile.stage import compile_all, wanted
from tilekern.tuning.sweep.candidates import candidate, candidates
from tilekern.tuning.sweep.folder import Sweep

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def lacking(sweep):
    """The keys of the artifacts that a sweep lacks."""
    return {found.artifact for found in wanted(sweep)}


@pytest.fixture
def sweep(tmp_path, h200):
    """A sweep of a few candidates."""
    found = Sweep(tmp_path / "sweep")
    found.begin(h200, "test", [SMALL], {SMALL: [item.config for item in candidates(*SMALL, h200)[:5]]})
    return found


@pytest.fixture
def stage(tmp_path, sweep, monkeypatch):
    """Runs the compile stage with a compiler that fails for one candidate; that one's line."""

    def run(fault, timeout_s=60.0, memory_bytes=1 << 32, again=False, status="failed"):
        compiler = faulty_compiler(tmp_path, fault, again=again)
        monkeypatch.setattr(compiling, "compile_one", functools.partial(compile_by, compiler, tmp_path))
        summary = compile_all(sweep, 2, timeout_s, memory_bytes=memory_bytes)
        lines = Sweep(sweep.folder).compiled()
        assert set(lines) == {item.artifact for item in sweep.candidates(*SMALL)}
        lost = {name: [line for line in lines.values() if line["status"] == name] for name in ("failed", "open")}
        counts = len(lines), len(lost["failed"]), len(lost["open"])
        assert (summary.compiled, summary.failed, summary.open) == counts
        return lost[status]

    return run


def test_a_compiler_that_crashes_costs_one_candidate(stage):
    (line,) = stage("kill -SEGV $$")
    assert line["reason"] == "tileiras ended with signal 11: no message"
    assert line["toolkit"]["key"] == toolkit().key


def test_a_compiler_that_hangs_is_killed_with_what_it_runs(stage, tmp_path):
    """tileiras runs ptxas, in which a large tile's time is spent."""
    pid_file = tmp_path / "pid"
    started = time.perf_counter()
    (line,) = stage(f"sleep 600 & echo $! > {pid_file}; wait", timeout_s=4.0)
    assert time.perf_counter() - started < 60
    assert (line["reason"], line["gave_up_after_s"]) == ("tileiras exceeded 4 s", 4.0)
    assert not is_alive(int(pid_file.read_text()))


def test_a_compiler_that_eats_memory_is_stopped_at_its_limit(stage):
    eater = f"""exec {sys.executable} -c 'x = []
while True: x.append(b"x" * (1 << 25))'"""
    (line,) = stage(eater, memory_bytes=3 << 29)
    assert line["reason"].startswith("took 1.5 GiB of memory: tileiras ended with exit code 1")


def test_a_compiler_that_is_killed_from_outside_is_run_once_more(stage):
    assert stage("kill -KILL $$") == []


@pytest.mark.nightly
def test_a_compiler_that_is_killed_twice_is_tried_again_by_the_next_run(stage, sweep):
    (line,) = stage("kill -KILL $$", again=True, status="open")
    assert line["reason"] == "tileiras ended with signal 9: no message"
    assert line["key"] in lacking(sweep)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("echo 'LLVM ERROR: IO failure on output stream: No space left on device' >&2; exit 1", "open"),
        ("echo 'error: operand 0 has a shape that cannot be' >&2; exit 1", "failed"),
    ],
)
def test_what_a_compiler_lacked_leaves_a_candidate_open_and_what_it_rejected_has_failed(stage, sweep, fault, status):
    (line,) = stage(fault, again=True, status=status)
    assert (line["key"] in lacking(sweep)) == (status == "open")


@pytest.mark.parametrize(("fault", "status"), [("while true; do :; done", "open"), ("sleep 60", "failed")])
def test_who_gets_no_processor_is_open_and_who_hangs_has_failed(tmp_path, monkeypatch, fault, status):
    """The share of the processor is looked up; here less than a whole one is as little as none."""
    monkeypatch.setattr(cutile, "_STARVED", 2.0)
    with pytest.raises(CompileFailed, match=r"exceeded 0\.5 s") as failed:
        cutile._run(["/bin/sh", "-c", fault], {}, 0.5)
    assert type(failed.value) is (CompileInterrupted if status == "open" else CompileTimeout)


def test_a_worker_that_is_killed_is_replaced(stage):
    assert stage("kill -KILL $PPID") == []


@pytest.mark.nightly
def test_a_worker_that_is_killed_twice_leaves_its_candidate_open(stage, sweep):
    (line,) = stage("kill -KILL $PPID; sleep 5", again=True, status="open")
    assert line["reason"] == "the compile worker died (SIGKILL)"
    assert line["key"] in lacking(sweep)


@pytest.mark.nightly
def test_a_compiler_leaves_no_files_behind(stage, tmp_path):
    """Not even one that is killed."""
    stage("touch $TMPDIR/left; sleep 600", timeout_s=4.0)
    assert list(tmp_path.glob("**/*left*")) == []


@pytest.mark.parametrize(
    ("act", "reason", "timed_out"),
    [
        (hang_at, "the compile worker gave no answer within 3 s", True),
        (die_at, "the compile worker died (exit code 11)", False),
    ],
)
def test_a_front_end_that_fails_costs_one_candidate(h200, act, reason, timed_out):
    items = candidates(*SMALL, h200)[:8]
    found = compile_in_order(Order(items), functools.partial(act, items[3].artifact), 2, 3.0, 4 << 30)
    lost, answers = [], []
    for answer in found:
        (lost if isinstance(answer, Lost) else answers).append(answer)
    assert lost == [Lost(items[3], reason, timed_out)]
    assert all(isinstance(answer, Answer) for answer in answers)
    assert {answer.line["key"] for answer in answers} == {item.artifact for item in items} - {items[3].artifact}


class Deadly:
    """Ends the worker that it is handed to, as a main program does that cannot be imported there."""

    def __call__(self, *_, **__):
        pytest.fail("it was called")

    def __reduce__(self):
        return os._exit, (7,)


def test_workers_that_cannot_start_are_no_candidates_fault(sweep, monkeypatch):
    monkeypatch.setattr(compiling, "compile_one", Deadly())
    with pytest.raises(InputError, match=r"workers die before they can take a candidate \(exit code 7\)"):
        compile_all(sweep, 2)
    assert sweep.compiled() == {}


def test_failures_are_tried_again_only_by_another_toolkit(sweep, monkeypatch):
    item, other = sweep.candidates(*SMALL)[:2]
    tools = toolkit()
    failed, made = {"status": "failed", "reason": "a crash"}, COMPILED | {"sha256": sweep.store(b"an artifact")}
    for key, line in ((item.artifact, failed), (other.artifact, made)):
        sweep.note("compiled", line | {"key": key, "toolkit": tools.describe()})
    assert item.artifact not in lacking(sweep)
    newer = Toolkit(tools.path, "99.9.1", tools.cuda_tile)
    monkeypatch.setattr(compiling, "toolkit", lambda: newer)
    assert item.artifact in lacking(sweep)
    assert other.artifact not in lacking(sweep)


def test_a_failure_of_another_toolkit_is_tried_again_if_a_toolkit_is_installed(sweep, monkeypatch):
    item = sweep.candidates(*SMALL)[0]
    sweep.note("compiled", {"key": item.artifact, "status": "failed", "reason": "x", "toolkit": {"key": "old"}})
    assert item.artifact in lacking(sweep)
    monkeypatch.setattr(compiling, "toolkit", lambda: None)
    assert item.artifact not in lacking(sweep)


def test_the_line_of_a_failure_names_its_toolkit(sweep):
    compile_all(sweep, jobs=2, timeout_s=0.001)
    assert {line["toolkit"]["key"] for line in sweep.compiled().values()} == {toolkit().key}


@functools.cache
def recorded():
    """Candidates with the seconds that the front end and the compiler once took for them."""
    data = Path(__file__).with_name("data") / "compile-seconds.json.gz"
    found = {}
    for row in json.loads(gzip.decompress(data.read_bytes()))["rows"]:
        item = candidate(row["kernel"], Problem(row["problem"]), Config(row["config"]), row["variant"], resolve("H200"))
        found[item] = (row["frontend_s"], row["tileiras_s"])
    return found


@functools.cache
def batch(item):
    made = item.spec.device(item.problem, item.config)
    return made.function, made.parameters, made.constants, item.variant


def busy(order, jobs):
    """How much of the time of ``jobs`` workers that take candidates in an order is work, 0 to 1."""
    order.take_in()
    times, lowering = recorded(), {}
    for item, (frontend_s, _) in times.items():
        lowering[batch(item)] = max(frontend_s, lowering.get(batch(item), 0.0))
    free = [(0.0, place, None) for place in range(jobs)]
    end, done = 0.0, []
    while free:
        now, place, item = heapq.heappop(free)
        if item is not None:
            done.append(item)
            end = now
        following = order.take(item)
        if following is not None:
            again = item is None or batch(item) != batch(following)
            takes = times[following][1] + (lowering[batch(following)] if again else 0.0)
            heapq.heappush(free, (now + takes, place, following))
    assert Counter(done) == Counter(times.keys())
    return (sum(tileiras_s for _, tileiras_s in times.values()) + sum(lowering.values())) / (jobs * end)


@pytest.mark.parametrize(("jobs", "least"), [(1, 0.999), (2, 0.99), (8, 0.98), (16, 0.96)])
def test_workers_have_work_to_the_end(jobs, least):
    """Replayed from a recorded stage of two seconds for the longest and 0.3 s for the average candidate."""
    assert busy(Order(recorded()), jobs) > least


def test_what_is_put_back_comes_again_and_every_candidate_once(h200):
    items = candidates(*SMALL, h200)
    order, taken, before = Order(items), [], None
    while (item := order.take(before)) is not None:
        if item.artifact == items[4].artifact and item not in taken:
            order.put_back(item)
        taken.append(item)
        before = item
    assert sorted(item.artifact for item in taken) == sorted([*(item.artifact for item in items), items[4].artifact])


def test_the_first_candidates_compile_while_the_others_are_listed(h200, tmp_path):
    """The listing waits for a worker to be at the first one: were it to come before all work, it would wait forever."""
    items = candidates(*SMALL, h200)[:6]

    def listed():
        yield items[0]
        deadline = time.monotonic() + 60
        while not (tmp_path / items[0].artifact).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield from items[1:]

    found = compile_in_order(Order(listed()), functools.partial(note_at, tmp_path), 1, 60.0, 4 << 30)
    assert sorted(answer.line["key"] for answer in found) == sorted(item.artifact for item in items)


def test_what_is_listed_later_is_handed_out_when_nothing_else_is_left(h200):
    items = candidates(*SMALL, h200)
    order = Order(iter(items))
    assert len(order) == 0
    assert order.take_in(3) == 3
    taken = [order.take(None) for _ in items]
    assert sorted(item.artifact for item in taken) == sorted(item.artifact for item in items)
    assert len(order) == len(items)
    assert order.take(None) is None
    assert order.take_in() == 0


def test_a_long_temporary_folder_works(tmp_path, monkeypatch):
    """The path of the socket that workers are asked for through has at most 107 bytes."""
    usual, chosen = str(tmp_path / ("a" * 60) / ("b" * 60)), []
    monkeypatch.setattr("tempfile.tempdir", usual)
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: chosen.append(tempfile.gettempdir()))
    monkeypatch.setattr("multiprocessing.forkserver.ForkServer.ensure_running", lambda _: None)
    start_server()
    assert (chosen, tempfile.gettempdir()) == (["/tmp"], usual)


# Starts the server of workers, interrupts it again and again while its modules load, and asks it for one. Nothing
# guards the program: a worker that imported it again would do all this once more.
INTERRUPTED = """
import os, signal, sys, time
from multiprocessing import forkserver
from tilekern.tuning.compile.pool import SERVER, start_server
print("begun", flush=True)
start_server()
server = SERVER.pid
for _ in range(20):
    os.kill(server, signal.SIGINT)
    time.sleep(0.1)
worker = SERVER.process(print, "worked")
worker.start()
worker.join(60)
assert SERVER.pid == server, "it died, and another took its place"
assert forkserver._forkserver._forkserver_pid is None, "the job's own is another one"
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the parent goes without"
"""


@pytest.mark.nightly
def test_an_interrupt_while_the_server_loads_is_not_its_to_handle(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=90, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (found.returncode, found.stderr, found.stdout) == (0, "", "begun\nworked\n")
