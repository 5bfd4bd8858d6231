"""Calls when caches, homes, disks, processes and clocks are not as they should be."""

import contextlib
import dataclasses
import errno
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import warnings

import msgspec
import pytest
import torch
from marks import needs_compiler
from one_record import GPU, H200, PROBLEM, SIZES, SPEC, numbers, record_of

from tilekern import cache
from tilekern.compile import cutile
from tilekern.errors import CacheMiss, CompileFailed, CompileInterrupted, RanksDiffer
from tilekern.runtime import defaults, dispatch
from tilekern.runtime.ranks import agreement
from tilekern.runtime.ranks.snapshot import Snapshot

pytestmark = [needs_compiler, pytest.mark.usefixtures("root")]


def counted(monkeypatch, owner, name):
    """The arguments of each call of a function from now on."""
    calls, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or function(*given))
    return calls


def test_a_compiled_default_that_cannot_be_kept_runs_and_is_compiled_once(root, monkeypatch):
    """What is kept in no cache: other sizes of the bucket, and those that are looked up again, take it from memory."""
    root.parent.mkdir(exist_ok=True)
    root.write_text("a file where the cache's folder should be")
    compiled = counted(monkeypatch, defaults, "compiled_default")
    with pytest.warns(UserWarning, match="each process compiles them anew: set TILEKERN_CACHE_DIR"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES).config == SPEC.default(PROBLEM, H200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch._state.plans.clear()
        for rows in (50, 51, 52):
            assert dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) is not None
    assert len(compiled) == 1
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1, hits=3)


def test_a_default_that_cannot_be_compiled_is_tried_once(root, monkeypatch):
    def refuse(*_):
        raise CompileFailed("it does not like it")

    monkeypatch.setattr(cutile, "_assemble", refuse)
    compiled = counted(monkeypatch, defaults, "compiled_default")
    with pytest.warns(UserWarning, match="could not be compiled .it does not like it.; the model's own op runs"):
        assert [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 51, 52)] == [None] * 3
    assert len(compiled) == 1


def rewritten(root, **changes):
    """Put the record of a cache down with other contents, and the digest that belongs to them."""
    path = record_of(root)
    record = cache.Record.from_json(path.read_bytes())
    path.write_text(msgspec.structs.replace(record, **changes).to_json())
    return record


def without_field(artifact):
    (first, *others) = artifact.assumptions
    lacking = {name: value for name, value in first.items() if name != "base_bytes"}
    return msgspec.structs.replace(artifact, assumptions=[lacking, *others])


MALFORMED = {
    "no config": lambda _: {"config": {}},
    "a config of another form": lambda record: {"config": {**record.config, "tile_m": "wide"}},
    "no generic variant": lambda record: {"artifacts": {"aligned": record.artifacts["aligned"]}},
    "an assumption without a field": lambda record: {
        "artifacts": {name: without_field(one) for name, one in record.artifacts.items()}
    },
}


def plans_of(rows):
    return dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:])


def refusal_of(rows):
    with pytest.raises(CacheMiss) as refused:
        plans_of(rows)
    return str(refused.value)


@pytest.mark.parametrize("fault", MALFORMED)
@pytest.mark.parametrize("policy", ["fallback", "error", "compile"])
def test_a_whole_record_that_fits_no_kernel_is_passed_over_and_said_once(filled, monkeypatch, policy, fault):
    before = cache.Record.from_json(record_of(filled).read_bytes())
    rewritten(filled, **MALFORMED[fault](before), provenance="measured", measurement={"median_us": 1.0})
    dispatch.set_miss_policy(policy)
    ask = plans_of if policy != "error" else refusal_of
    with pytest.warns(UserWarning, match=f"user: v1/{H200.key}/.* is passed over: .*; tune it again") as said:
        answers = [ask(rows) for rows in (50, 51)]
    assert sum("passed over" in str(one.message) for one in said) == 1
    if policy == "error":
        for line in answers:
            assert re.search("swiglu_forward for rows=64,.* on H200; .*compiler here: tileiras-.*; driver: ", line)
    else:
        assert [plan is not None for plan in answers] == [policy == "compile"] * 2
    if policy == "compile":
        # What fits nothing is no better than the default, whatever it says of itself.
        assert cache.Record.from_json(record_of(filled).read_bytes()).config == before.config


def test_the_next_record_serves_where_the_best_one_fits_nothing(filled, compiled, monkeypatch):
    rewritten(filled, config={})
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(compiled))
    with pytest.warns(UserWarning, match="is passed over"):
        plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert plan.config == SPEC.default(PROBLEM, H200)
    assert dispatch.stats()[SPEC.name] == numbers(hits=1)
    steps = []
    assert dispatch.find(SPEC, SPEC.bucketed(PROBLEM), H200, layers=cache.default_layers(), trace=steps).record.config
    assert [step.outcome for step in steps][-2:] == ["bad", "taken"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("policy", ["fallback", "error", "compile"])
def test_system_errors_of_a_lookup_end_no_step(root, monkeypatch, policy, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache, "default_layers", fail)
    dispatch.set_miss_policy(policy)
    if policy == "error":
        with pytest.raises(CacheMiss, match=f"swiglu_forward cannot be looked up on H200 .*{os.strerror(number)}"):
            dispatch.plan_for(SPEC, GPU, *SIZES)
        return
    with pytest.warns(UserWarning, match=f"{os.strerror(number)}.*; the model's own op runs") as said:
        assert [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 51)] == [None] * 2
    assert len(said) == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("not a program", "Exec format error"),
        ("no room", "No usable temporary directory"),
        ("no processes", "Resource temporarily unavailable"),
    ],
)
def test_system_errors_of_a_compiler_end_no_step(root, monkeypatch, tmp_path, fault, reason):
    if fault == "not a program":
        (tmp_path / "tileiras").write_bytes(b"\x7fELF damaged")
        (tmp_path / "tileiras").chmod(0o755)
        tools = dataclasses.replace(cutile.toolkit(), path=tmp_path / "tileiras")
        monkeypatch.setattr(cutile, "toolkit", lambda: tools)
    elif fault == "no room":
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "nowhere")])
    else:
        monkeypatch.setattr(subprocess, "Popen", refuse_processes)
    with pytest.warns(UserWarning, match=f"could not be compiled .*{reason}.*; the model's own op runs"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
    assert dispatch.stats()[SPEC.name] == numbers(misses=1)


def refuse_processes(*_, **__):
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_without_a_home_what_is_compiled_runs(root, monkeypatch):
    def nobody(_):
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "TILEKERN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(
        UserWarning, match="no home folder, .*; until then this process keeps what it compiles to itself"
    ):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    assert dispatch.plan_for(SPEC, GPU, 51, *SIZES[1:]) is not None
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1, hits=1)


@pytest.mark.processes
def test_one_of_several_processes_compiles_a_miss(root, tmp_path, monkeypatch):
    """Each child writes a byte where it compiles; those that waited read what the first one wrote."""
    true = defaults.compiled_default

    def counted_by_a_file(*given):
        with (tmp_path / "compiled").open("ab") as file:
            file.write(b".")
        time.sleep(0.5)
        return true(*given)

    monkeypatch.setattr(defaults, "compiled_default", counted_by_a_file)
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = dispatch.plan_for(SPEC, GPU, *SIZES) is None
            os._exit(status)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert (tmp_path / "compiled").read_bytes() == b"."
    assert list((root / "turns").iterdir()) == []


@pytest.mark.processes
def test_a_child_that_is_forked_during_a_lookup_goes_on(root, monkeypatch):
    """A DataLoader forks its workers whenever it likes."""
    inside, go_on = threading.Event(), threading.Event()
    true = cache.default_layers

    def slow(*given, **more):
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait(60)
        return true(*given, **more)

    monkeypatch.setattr(cache, "default_layers", slow)
    monkeypatch.setenv("TILEKERN_ON_MISS", "fallback")
    thread = threading.Thread(target=dispatch.plan_for, args=(SPEC, GPU, *SIZES))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        dispatch.plan_for(SPEC, torch.device("cpu"), *SIZES)
        dispatch.plan_for(SPEC, GPU, 51, *SIZES[1:])
        os._exit(0)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def passing(_):
    raise CompileInterrupted("tileiras ended with signal 9: no message")


@pytest.fixture
def agreed(root, monkeypatch):
    """A rank whose job has agreed on an empty snapshot, and which waits for nothing."""
    monkeypatch.setattr(agreement, "_PAUSES_S", (0.0, 0.0))
    dispatch.agree_on(agreement.Agreement(Snapshot(()), H200, "compile"))
    yield root
    dispatch.agree_on(None)


def test_a_rank_that_cannot_compile_what_others_may_have_compiled_does_not_go_its_own_way(agreed, monkeypatch):
    tries = []
    monkeypatch.setattr(cutile, "_assemble", lambda *given: passing(tries.append(given)))
    with pytest.raises(RanksDiffer, match=r"this rank cannot compile swiglu_forward .*signal 9"):
        dispatch.plan_for(SPEC, GPU, *SIZES)
    assert len(tries) == 3


def test_a_rank_tries_again_after_what_passes(agreed, monkeypatch):
    true, tries = cutile._assemble, []

    def second(*given):
        tries.append(given)
        return passing(given) if len(tries) == 1 else true(*given)

    monkeypatch.setattr(cutile, "_assemble", second)
    assert dispatch.plan_for(SPEC, GPU, *SIZES).config == SPEC.default(PROBLEM, H200)
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1)


def test_a_rejected_default_is_rejected_on_all_ranks(agreed, monkeypatch):
    def reject(*_):
        raise CompileFailed("tileiras ended with exit code 1: no such op")

    monkeypatch.setattr(cutile, "_assemble", reject)
    with pytest.warns(UserWarning, match="no such op.*; the model's own op runs"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None


def test_a_rank_s_lookup_that_the_system_refuses_is_not_passed_over(agreed, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(cache, "hits", fail)
    with pytest.raises(RanksDiffer, match="which other ranks may not have met"):
        dispatch.plan_for(SPEC, GPU, *SIZES)
