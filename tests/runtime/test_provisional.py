"""Running jobs take records that are published after they started, between two steps, and say what they missed."""

import gc
import json
import shutil
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from environments import environment
from marks import needs_compiler
from msgspec.structs import replace
from one_record import GPU, H200, PROBLEM, SIZES, SPEC
from torch.utils.checkpoint import checkpoint

from tilekern import cache
from tilekern.errors import InputError
from tilekern.runtime import dispatch, provisional

EVERY_S = "0.05"
PATIENCE_S = 60

pytestmark = [
    pytest.mark.processes,
    needs_compiler,
]


@pytest.fixture(autouse=True)
def watching(root, monkeypatch):
    """A process that looks for records again and again, and has seen no optimizer yet."""
    monkeypatch.setenv("TILEKERN_ON_MISS", "fallback")
    monkeypatch.setenv("TILEKERN_LOOKUP_AGAIN_S", EVERY_S)
    dispatch._watch._graded = False
    # Tensors that other tests of this process have left are none of a job's: what is frozen is not listed.
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.unfreeze()


def publish(compiled, root, **changes):
    """Publish like another process: blobs first, then the record, each in one step."""
    layer = cache.FolderLayer(compiled, "compiled")
    [tools] = layer.toolkits(H200.key)
    record = layer.read_record(H200.key, tools, SPEC.name, dict(PROBLEM))
    blobs = {digest: layer.read_blob(digest) for digest in record.digests}
    cache.Store(root).write(replace(record, **changes), blobs)


def measured(default_us=2.0):
    return {"provenance": "measured", "measurement": {"median_us": 1.0, "default_us": default_us}}


def plan(*sizes):
    return dispatch.plan_for(SPEC, GPU, *(sizes or SIZES))


def until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def threads():
    return {thread.name for thread in threading.enumerate()}


def watched():
    return list(dispatch._watch._problems.values())


def test_a_call_without_gradients_takes_what_was_published(root, compiled):
    with torch.no_grad():
        assert plan() is None
        publish(compiled, root)
        found = until(plan)
    assert found.config == SPEC.default(PROBLEM, H200)
    assert dispatch.stats()[SPEC.name] | {"misses": 1, "hits": 1} == dispatch.stats()[SPEC.name]


def test_training_takes_it_when_an_optimizer_has_made_its_step(root, compiled):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert plan() is None
    publish(compiled, root)
    until(lambda: watched()[0].better)
    time.sleep(5 * float(EVERY_S))
    assert plan() is None, "in the middle of a step"
    weight.sum().backward()
    optimizer.step()
    assert plan() is not None


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_an_optimizer_that_steps_in_the_backward_changes_plans_at_its_end(root, compiled, reentrant):
    """A forward that a checkpoint runs again, and a backward that looks plans up, see what the first forward saw."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in weights}
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            seen.append(plan())
            return x * 1.0

        @staticmethod
        def backward(_, gradient):
            seen.append(plan())
            return gradient

    def part(x, weight):
        return Looks.apply(x * weight)

    def loss():
        x = torch.ones(2, requires_grad=True)
        for weight in weights:
            x = part(x, weight) if reentrant is None else checkpoint(part, x, weight, use_reentrant=reentrant)
        return x.sum()

    found = loss()
    publish(compiled, root)
    until(lambda: watched()[0].better)
    found.backward()
    assert set(seen) == {None}, "all of the step"
    assert len(seen) == (6 if reentrant else 4), "the other kind of checkpoint runs again what it needs alone"
    assert plan() is not None


def test_an_eval_before_training_does_not_let_a_step_see_two_plans(root, compiled):
    """Once an optimizer was seen, plans change at its steps alone."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()
    with torch.no_grad():
        dispatch._watch._hook()
        assert plan() is None
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()
    publish(compiled, root)
    until(lambda: watched()[0].better)
    assert plan() is None
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()
    assert plan() is not None


def test_an_eval_comes_first_and_the_first_step_takes_long(root, compiled):
    """Lightning's sanity check and a compiled model's first step look like this."""
    weight = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert plan() is None
    loss = (weight * 2).sum()
    publish(compiled, root)
    until(lambda: watched()[0].better)
    time.sleep(5 * float(EVERY_S))
    assert plan() is None, "between a forward and its backward"
    loss.backward()
    del loss
    assert until(plan)


def test_a_job_of_its_own_optimizer_looks_again_by_a_call(root, compiled, monkeypatch):
    monkeypatch.setenv("TILEKERN_LOOKUP_AGAIN_S", "0")
    assert plan() is None
    publish(compiled, root)
    assert dispatch.look_again() == 1
    assert plan() is not None
    assert dispatch.look_again() == 0


def test_memos_of_ops_are_renewed_too(root, compiled):
    remembered = dispatch.memo()
    with torch.no_grad():
        dispatch.keep(remembered, "call", plan())
        publish(compiled, root)
        until(lambda: plan() is not None and "call" not in remembered)


def test_every_size_of_the_bucket_is_renewed_with_a_grid_of_its_own(root, compiled):
    with torch.no_grad():
        assert plan() is None
        assert plan(33, 48, torch.bfloat16) is None
        assert len(watched()) == 1
        publish(compiled, root)
        few, many = until(lambda: plan(33, 48, torch.bfloat16)), until(plan)
    assert few is not many
    assert few._kernel is many._kernel


def test_a_neighbour_s_record_makes_room_for_the_own_one(root, compiled):
    publish(compiled, root, **measured())
    with torch.no_grad():
        before = plan(300, 48, torch.bfloat16)
        assert before is not None
        [item] = watched()
        assert not item.is_missed
        publish(compiled, root, problem=dict(PROBLEM.but(rows=512)), config=dict(SPEC.generic(PROBLEM)), **measured())
        after = until(lambda: (found := plan(300, 48, torch.bfloat16)) is not before and found)
    assert after.config == SPEC.generic(PROBLEM)
    until(lambda: not watched())


def test_a_measured_record_is_settled_and_costs_no_thread(root, compiled):
    publish(compiled, root, **measured())
    assert plan() is not None
    assert watched() == []
    publish(compiled, root, config=dict(SPEC.generic(PROBLEM)), **measured())
    before = plan()
    assert dispatch.look_again() == 0
    assert plan() is before


def test_the_thread_ends_when_nothing_is_left_to_look_up(root, compiled):
    with torch.no_grad():
        assert plan() is None
        assert "tilekern lookup" in threads()
        publish(compiled, root, **measured())
        until(plan)
        until(lambda: "tilekern lookup" not in threads())
        assert dispatch.plan_for(SPEC, GPU, 50, 49, torch.bfloat16) is None
    assert "tilekern lookup" in threads()


@pytest.mark.parametrize("cleared", [False, True])
def test_a_record_that_no_plan_comes_of_and_a_cache_that_was_cleared_leave_the_old_plan(root, compiled, cleared):
    publish(compiled, root)
    before = plan()
    if cleared:
        shutil.rmtree(root)
        assert dispatch.look_again() == 0
    else:
        publish(compiled, root, config={"schedule": "of another time"}, **measured())
        with pytest.warns(UserWarning, match="is passed over: its config does not fit the kernel"):
            assert dispatch.look_again() == 0
    assert plan() is before


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 60), ("", 60), *((x, None) for x in ("soon", "-1", "inf", "nan"))]
)
def test_the_interval_is_a_minute_unless_it_is_set_and_a_bad_one_is_named(monkeypatch, value, expected):
    monkeypatch.delenv("TILEKERN_LOOKUP_AGAIN_S")
    if value is not None:
        monkeypatch.setenv("TILEKERN_LOOKUP_AGAIN_S", value)
    if expected:
        assert provisional.interval_s() == expected
        return
    with pytest.raises(InputError, match="TILEKERN_LOOKUP_AGAIN_S must be a number of seconds, 0 for never"):
        provisional.interval_s()


def test_a_process_at_its_limit_of_threads_goes_on(root, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.warns(UserWarning, match="can't start new thread; what is published from now on is not taken"):
        assert plan() is None
    assert plan(51, *SIZES[1:]) is None


def test_ever_new_sizes_leave_no_plans_behind_and_lose_no_miss(root, compiled, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_PLANS", 4)
    publish(compiled, root)
    for rows in range(33, 60):
        plan(rows, *SIZES[1:]).launches += 1
    (problem,) = watched()
    assert len(problem.plans) <= 5
    assert len(problem.takers) <= 5
    assert problem.launches == 27


def test_zero_starts_no_thread(root, monkeypatch):
    until(lambda: "tilekern lookup" not in threads())
    monkeypatch.setenv("TILEKERN_LOOKUP_AGAIN_S", "0")
    assert plan() is None
    assert "tilekern lookup" not in threads()


def test_launches_of_a_default_are_misses(root, compiled):
    publish(compiled, root)
    cache.note_wanted(root, SPEC.name, dict(PROBLEM), H200.describe(), "not in any cache")
    plan().launches = 40
    plan(33, 48, torch.bfloat16).launches = 2
    dispatch._watch.note()
    assert list(cache.read_misses(root).values()) == [42]
    publish(compiled, root, **measured())
    dispatch.look_again()
    dispatch._watch.note()
    assert list(cache.read_misses(root).values()) == [42], "what was lost stays said"


def test_fallbacks_are_shared_by_the_kernel_s_missed_problems(root):
    for columns in (48, 49):
        assert dispatch.plan_for(SPEC, GPU, 50, columns, torch.bfloat16) is None
    for _ in range(10):
        dispatch.count_fallback(SPEC)
    dispatch._watch.note()
    assert list(cache.read_misses(root).values()) == [5, 5]


JOB = """
import sys, time, warnings
import torch
from tilekern.runtime import dispatch
from tilekern.runtime import provisional
from tilekern.kernels import spec_named
from tilekern.spec.targets import resolve

warnings.simplefilter("ignore")
dispatch.here = lambda _device=None: resolve("H200")
spec, device, known = spec_named("swiglu_forward"), torch.device("cuda", 0), dispatch.memo()


def op():
    "What the ops do: a dictionary first, then dispatch; the model's own op where there is no plan."
    try:
        plan = known["plan"]
    except KeyError:
        plan = dispatch.keep(known, "plan", dispatch.plan_for(spec, device, 50, 48, torch.bfloat16))
    if plan is None:
        dispatch.count_fallback(spec)
    return plan
"""


def job(code, root, **more):
    env = environment(TILEKERN_CACHE_DIR=str(root), TILEKERN_ON_MISS="fallback", **more)
    return subprocess.Popen([sys.executable, "-c", JOB + code], env=env, stdout=subprocess.PIPE, text=True)


def test_a_job_writes_its_misses_down_when_it_ends_and_its_fork_looks_nothing_up_and_counts_nothing(root):
    code = """
op()
import os
pid = os.fork()
if not pid:
    assert not dispatch._watch._problems and dispatch._watch._end is None
    assert op() is None
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
for _ in range(122): op()
"""
    assert job(code, root).wait(PATIENCE_S) == 0
    [wanted] = cache.read_wanted(root)
    name = cache.wanted_name(wanted["kernel"], wanted["problem"], wanted["target"])
    assert cache.read_misses(root) == {name: 123}


@pytest.mark.parametrize("asked", [False, True])
def test_ranks_of_a_job_look_up_nothing_unless_asked_to(root, compiled, monkeypatch, asked):
    monkeypatch.setattr(provisional, "of_several_ranks", lambda: True)
    monkeypatch.setattr(provisional, "INTERVAL_S", float(EVERY_S))
    if not asked:
        monkeypatch.delenv("TILEKERN_LOOKUP_AGAIN_S")
    with torch.no_grad():
        assert plan() is None
        publish(compiled, root)
        if asked:
            until(plan)
        else:
            time.sleep(10 * float(EVERY_S))
            assert plan() is None


@pytest.mark.nightly
def test_a_running_job_takes_what_the_service_publishes(root, tmp_path):
    """Three real processes: the job misses and goes on, the service tunes, the job's next lookup has it."""
    code = """
with torch.no_grad():
    while (plan := op()) is None:
        time.sleep(0.005)
    print(plan.config.key, flush=True)
    print(dispatch.stats()[spec.name]["fallbacks"] > 0, flush=True)
"""
    process = job(code, root, TILEKERN_LOOKUP_AGAIN_S="0.1")
    try:
        until(lambda: cache.read_wanted(root))
        env = environment()
        served = subprocess.run(
            [sys.executable, "-m", "tilekern.tune", "serve", "--once", "--gpu", "H200", "--cache-dir", root, "--json"],
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert served.returncode == 0, served.stderr
        [published] = json.loads(served.stdout)["published"]
        said = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    finally:
        process.kill()
    assert said == [",".join(f"{k}={v}" for k, v in published["config"].items()), "True"]
    assert cache.read_wanted(root) == []
