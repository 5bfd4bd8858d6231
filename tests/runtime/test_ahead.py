"""What a step will miss is compiled in worker processes, and calls wait for no more than their own."""

import functools
import os
import signal
import subprocess
import sys
import time

import ahead_samples
import msgspec
import pytest
import rank_jobs
from environments import ROOT, environment, python_path
from interrupts import hear_interrupts
from marks import needs_compiler
from one_record import GPU, H200, PROBLEM, SIZES, SPEC, numbers

from tilekern.errors import CompileFailed, NoVariant
from tilekern.kernels import spec_named
from tilekern.runtime import ahead, dispatch
from tilekern.runtime.defaults import AHEAD
from tilekern.spec import ALIGNED, GENERIC

PATIENCE_S = 120
pytestmark = [needs_compiler, pytest.mark.processes, pytest.mark.usefixtures("root", "nothing_coming")]
# Three problems of a step, two of which are the same to the compiler but for their name.
STEP = [(SPEC, PROBLEM), (SPEC, PROBLEM.but(rows=128)), (spec_named("scale"), spec_named("scale").problem(
    rows=64, columns=48, dtype="bfloat16"))]  # fmt: skip


@pytest.fixture
def nothing_coming():
    """As each of these tests begins and ends."""
    AHEAD.finish()
    AHEAD._coming.clear()
    yield
    for batch in AHEAD._batches:
        batch.order.is_over.set()
    AHEAD.finish()
    AHEAD._coming.clear()


@pytest.fixture
def workers_that(monkeypatch):
    """Have workers run another function than theirs."""

    def do(function, **options):
        monkeypatch.setattr(ahead, "compile_item", functools.partial(function, **options))

    return do


def sizes(rows):
    return rows, *SIZES[1:]


def test_all_are_compiled_and_stored_as_by_calls(root, tmp_path, monkeypatch):
    begun = dispatch.compile_ahead(STEP, H200)
    assert [(coming.spec, coming.problem) for coming in begun] == STEP
    AHEAD.finish()
    assert not AHEAD._coming
    found = [dispatch.find(*named, H200).record for named in STEP]
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "by calls"))
    dispatch.forget()
    for named, record in zip(STEP, found, strict=True):
        dispatch.compile_default(*named, H200)
        own = dispatch.find(*named, H200).record
        assert msgspec.structs.replace(record, created=own.created) == own


def test_equal_code_is_compiled_once(monkeypatch):
    taken, take = [], ahead._Batch._take

    def note(batch, answer):
        taken.append(answer.line["key"])
        take(batch, answer)

    monkeypatch.setattr(ahead._Batch, "_take", note)
    dispatch.compile_ahead(STEP, H200)
    AHEAD.finish()
    assert len(taken) == len(set(taken)) == 4, "two kernels, two variants each"


def test_what_a_cache_or_a_library_has_is_left_out(root):
    library = spec_named("fused_linear_cross_entropy")
    composite = library.problem(rows=64, hidden=128, vocabulary=256, dtype="bfloat16")
    dispatch.compile_default(*STEP[0], H200)
    begun = dispatch.compile_ahead([*STEP[::2], (library, composite), STEP[2]], H200)
    assert [coming.spec.name for coming in begun] == ["scale"]


def test_a_call_waits_for_its_aligned_variant_alone(root, tmp_path, workers_that):
    go_on = tmp_path / "go on"
    workers_that(ahead_samples.generic_later, go_on=str(go_on))
    dispatch.compile_ahead(STEP, H200)
    plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1)
    aligned, generic = plan._kernel.variants
    assert (aligned.name, aligned.load()[:4]) == (ALIGNED, b"\x7fELF")
    assert not records_of(root, 64), "a record has both variants"
    go_on.touch()
    assert generic.load()[:4] == b"\x7fELF"
    AHEAD.finish()
    record = dispatch.find(SPEC, PROBLEM, H200).record
    assert len(records_of(root, 64)) == 1
    assert generic.symbol == record.artifacts[GENERIC].symbol
    assert generic.assumptions == [x for x in record.artifacts[GENERIC].assumptions if x["kind"] != "constant"]
    # The plan runs by that very record, so that nothing better is found later.
    assert dispatch.resolved()[SPEC.name, PROBLEM] == record
    assert dispatch.look_again() == 0


def records_of(root, rows):
    return [path for path in root.rglob(f"rows={rows},*.json") if SPEC.name in path.parts]


def warned_of(recwarn, text):
    return [one for one in recwarn if text in str(one.message)]


@pytest.mark.parametrize("fault", ["none", "die"])
def test_what_workers_do_not_bring_is_compiled_by_its_call(root, workers_that, fault):
    workers_that(getattr(ahead_samples, fault))
    dispatch.compile_ahead(STEP, H200)
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    assert len(records_of(root, 64)) == 1
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1)


def test_a_generic_variant_that_no_worker_brings_is_compiled_when_it_is_launched(root, workers_that, monkeypatch):
    workers_that(ahead_samples.no_generic)
    dispatch.compile_ahead(STEP, H200)
    generic = dispatch.plan_for(SPEC, GPU, *SIZES)._kernel.variants[1]
    AHEAD.finish()
    real = ahead.compile_candidate

    def refuse(*_, **__):
        raise CompileFailed("the compiler does not like it")

    monkeypatch.setattr(ahead, "compile_candidate", refuse)
    with pytest.raises(NoVariant, match=r"its generic variant could not be compiled \(the compiler does not"):
        generic.load()
    monkeypatch.setattr(ahead, "compile_candidate", real)
    assert generic.load()[:4] == b"\x7fELF"
    assert not records_of(root, 64)


def test_without_processes_calls_compile_and_it_is_said_once(root, monkeypatch, recwarn):
    def refuse():
        raise OSError("no more processes")

    monkeypatch.setattr(ahead.SERVER, "start", refuse)
    dispatch.compile_ahead(STEP, H200)
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    dispatch.compile_ahead(STEP, H200)
    AHEAD.finish()
    assert len(warned_of(recwarn, "no processes can compile kernels on all cores (no more processes)")) == 1


def test_a_cache_that_cannot_be_written_keeps_nothing_from_running(root, recwarn):
    root.write_text("a file where the cache's folder should be")
    dispatch.compile_ahead(STEP, H200)
    AHEAD.finish()
    assert len(warned_of(recwarn, "each process compiles them anew")) == 1
    plans = [dispatch.plan_for(SPEC, GPU, *sizes(rows)) for rows in (50, 128)]
    assert None not in plans
    assert dispatch.stats()[SPEC.name] == numbers(misses=2, compiled=2)
    assert [variant.load()[:4] for variant in plans[0]._kernel.variants] == [b"\x7fELF"] * 2
    dispatch.look_again()
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is plans[0]


def test_a_long_wait_is_said_once(monkeypatch, recwarn):
    monkeypatch.setattr(ahead, "LONG_S", 0.01)
    dispatch.compile_ahead(STEP, H200)
    for rows in (50, 128):
        dispatch.plan_for(SPEC, GPU, *sizes(rows))
    assert len(warned_of(recwarn, "compiling 3 kernels that no cache holds, on ")) == 1


def test_another_process_s_turn_is_left_to_it(root, monkeypatch):
    from tilekern.cache.turns import turn
    from tilekern.runtime.records import turn_of

    with turn(root, turn_of(SPEC, PROBLEM, H200)):
        begun = dispatch.compile_ahead(STEP, H200)
    assert [(coming.spec, coming.problem) for coming in begun] == STEP[1:]


# A job whose step begins with three misses; what it does then is its argument.
JOB = """
import functools, os, sys, time
import ahead_samples
from one_record import GPU, H200, SIZES, SPEC
from test_ahead import STEP
from tilekern.runtime import ahead, dispatch
from tilekern.runtime.defaults import AHEAD

dispatch.here = lambda _device=None: H200
what, at_work = sys.argv[1:]
if what in ("exit", "wait"):
    ahead.compile_item = functools.partial(ahead_samples.hang, begun=at_work)
begun = dispatch.compile_ahead(STEP, H200)
while what in ("exit", "wait") and not os.path.exists(at_work):
    time.sleep(0.01)
print(len(begun), flush=True)
if what == "wait":
    try:
        dispatch.plan_for(SPEC, GPU, *SIZES)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
if what == "share":
    plans = [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 128)]
    AHEAD.finish()
    print(None in plans)
if what == "fork":
    child = os.fork()
    if not child:
        assert not AHEAD._coming and not AHEAD._batches
        os._exit(0 if dispatch.plan_for(SPEC, GPU, *SIZES) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(dispatch.plan_for(SPEC, GPU, *SIZES) is not None, flush=True)
"""


def job(root, what):
    env = environment(ROOT, ROOT / "tests", ROOT / "tests" / "runtime", TILEKERN_CACHE_DIR=str(root))
    return subprocess.Popen(
        [sys.executable, "-c", JOB, what, root.with_name("at work")], env=env, text=True, preexec_fn=hear_interrupts,  # noqa: PLW1509 (one call)
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def sessions_of(parent):
    """The processes that a process has started, by what started them, which live."""
    return subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.parametrize("what", ["exit", "wait"])
def test_the_end_of_a_job_ends_its_workers_and_leaves_no_half_record(root, what):
    with job(root, what) as process:
        assert process.stdout.readline() == "3\n"
        server = sessions_of(process.pid)
        started = time.monotonic()
        if what == "wait":
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said, errors) == (0, "interrupted\n" if what == "wait" else "", "")
    assert time.monotonic() - started < 15, "a worker sleeps for minutes"
    assert server, "workers were at work"
    assert not [name for name in server if os.path.exists(f"/proc/{name}/exe")]
    assert not list((root / "turns").iterdir())
    assert not list(root.rglob("v1/*/*/*/*.json"))


def test_a_child_that_is_forked_meanwhile_compiles_its_own(root):
    with job(root, "fork") as process:
        said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said.split()) == (0, ["3", "0", "True"]), errors


def test_of_several_processes_with_one_cache_one_compiles_each(root):
    jobs = [job(root, "share") for _ in range(3)]
    ended = [process.communicate(timeout=PATIENCE_S) for process in jobs]
    counts, lacking = zip(*(said.split() for said, _ in ended), strict=True)
    assert (sum(map(int, counts)), set(lacking)) == (3, {"False"}), ended
    assert len(list(root.rglob("v1/*/*/*/*.json"))) == 3
    assert not list((root / "turns").iterdir())


# A rank of a job on two machines, each with a cache of its own, which ranks share.
RANK = """
import os, sys
import torch.distributed as dist
from one_record import GPU, H200, SIZES, SPEC
from test_ahead import STEP
import tilekern
from tilekern.runtime import dispatch
from tilekern.runtime.defaults import AHEAD

meet, rank, ranks, root = sys.argv[1:]
os.environ["TILEKERN_CACHE_DIR"] = os.path.join(root, str(int(rank) // 2))
dispatch.here = lambda _device=None: H200
dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=int(ranks))
tilekern.agree()
begun = dispatch.compile_ahead(STEP, H200)
plans = [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 128)]
print(len(begun), None in plans, tilekern.cache_digest())
"""


def test_the_ranks_of_each_machine_share_the_work_and_run_the_same(root, tmp_path):
    job = rank_jobs.start(
        tmp_path, RANK, 4, root, TILEKERN_ON_MISS="compile",
        PYTHONPATH=python_path(ROOT, ROOT / "tests", ROOT / "tests" / "runtime"),
    )  # fmt: skip
    ended = rank_jobs.finish(job)
    counts, lacking, digests = zip(*(out.split() for out, _, _ in ended), strict=True)
    assert [sum(map(int, counts[:2])), sum(map(int, counts[2:]))] == [3, 3], ended
    assert (set(lacking), len(set(digests))) == ({"False"}, 1)
    for machine in "01":
        assert len(list((root / machine).rglob("v1/*/*/*/*.json"))) == 3
