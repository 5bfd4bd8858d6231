"""Call time: (spec, problem) -> plan, in microseconds; what happens on a miss; and the counters.

A plan is looked up once for each combination of real sizes, then found in a dictionary. A lookup costs a few
file reads the first time, and never needs a compiler, unless the miss policy ``compile`` has to fill in.
The plan of a miss is looked up again now and then, off the calls' path (:mod:`tilekern.runtime.provisional`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from tilekern.errors import CacheMiss, CannotRun, InputError, RanksDiffer, TilekernError, ToolchainMissing
from tilekern.runtime.libraries import libraries_here, library_of, runnable
from tilekern.runtime.plans import Counters, InterpretedPlan, LibraryPlan, Plan, plan_of
from tilekern.runtime.provisional import Watch, is_settled, of_several_ranks
from tilekern.spec import ALIGNED, GENERIC, Config, Implementation, KernelSpec, LibraryCall, Problem
from tilekern.targets import INTERPRETED, Target, here
from tilekern.warning import warn_once

if TYPE_CHECKING:
    from tilekern.cache import Hit, Layer, Record, Step
    from tilekern.runtime.ranks.agreement import Agreement
    from tilekern.tracing.recorder import Trace

MissPolicy = Literal["compile", "fallback", "error"]
COUNTED = ("hits", "nearest", "misses", "fallbacks", "compiled", "launches")
# Real sizes that are remembered; a job with more distinct ones looks up again, at some tens of microseconds each.
MOST_PLANS = 65536


@dataclass
class State:
    """The state that one process keeps of its calls.

    ``plans`` are by real sizes, and ``refusals`` say why some are None; ``memos`` are what ops keep beside them.
    ``resolved`` is what the problems that were asked for run by, at their buckets, where None is the model's own op, or
    a library's default that no record could be kept of. ``layers`` are those of this process once they were looked up;
    ``policy`` is None where the environment says it. Where ranks agreed, ``agreement`` stands for the caches; a
    ``trace`` answers for meta tensors.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    counters: dict[str, Counters] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], Plan | None] = field(default_factory=dict)
    refusals: dict[tuple[Any, ...], str] = field(default_factory=dict)
    memos: list[dict[Any, Any]] = field(default_factory=list)
    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    resolved: dict[tuple[str, Problem], Record | None] = field(default_factory=dict)
    layers: list[Layer] | None = None
    policy: MissPolicy | None = None
    agreement: Agreement | None = None
    trace: Trace | None = None


_state = State()
# Why this thread was refused a plan last: who counts the fallback that comes of it need not know.
_refused = threading.local()
# The reason where an op itself refused: plans were not asked for.
UNTAKEN = "arguments that no kernel takes"


def interpreting() -> bool:
    """Whether kernels run on the CPU (``TILEKERN_INTERPRET=1``)."""
    return os.environ.get("TILEKERN_INTERPRET", "0") not in ("", "0")


def set_miss_policy(policy: str | None) -> None:
    """Set what a lookup does that finds nothing; None goes by ``TILEKERN_ON_MISS``, else ``compile``.

    Raises:
        InputError: no such policy.
    """
    _state.policy = None if policy is None else _checked_policy(policy, "on_miss")
    if _state.agreement is not None:
        _state.agreement.policy = policy or _state.agreement.policy


def miss_policy(*, agreed: bool = True) -> MissPolicy:
    """The policy in force; where not ``agreed``, the one that this process would have without other ranks."""
    if agreed and _state.agreement is not None:
        return _checked_policy(_state.agreement.policy, "the ranks' agreement")
    return _state.policy or _checked_policy(os.environ.get("TILEKERN_ON_MISS") or "compile", "TILEKERN_ON_MISS")


def _checked_policy(policy: str, where: str) -> MissPolicy:
    if policy not in get_args(MissPolicy):
        raise InputError(f"{where}: unknown miss policy {policy!r}; known: {', '.join(get_args(MissPolicy))}")
    return policy  # type: ignore[return-value]


def counters(kernel: str) -> Counters:
    """The counters of one kernel."""
    return _state.counters.setdefault(kernel, Counters())


def stats() -> dict[str, dict[str, int]]:
    """Counters of every kernel that was asked for, each with the names of :data:`COUNTED`."""
    return {
        kernel: {name: getattr(found, name) for name in COUNTED} for kernel, found in sorted(_state.counters.items())
    }


def reasons() -> dict[str, dict[str, int]]:
    """Why calls of each kernel that has fallbacks ran the model's own op, with how often, the commonest first."""
    return {
        kernel: dict(sorted(found.reasons.items(), key=lambda item: -item[1]))
        for kernel, found in sorted(_state.counters.items())
        if found.reasons
    }


def agree_on(agreement: Agreement | None) -> None:
    """Drop all plans and look up from now on in what the ranks of a job agreed on; None: in the caches again."""
    with _state.lock:
        _state.agreement = agreement
        forget()


def resolved() -> dict[tuple[str, Problem], Record | None]:
    """The record by which each problem that was asked for, at its bucket, runs, or None for the model's own op."""
    with _state.lock:
        return dict(_state.resolved)


def forget() -> None:
    """Drop all plans and kernels of this process: the next calls look the cache up again. Counters stay.

    The agreement of ranks stays in force.
    """
    with _state.lock:
        for found in _state.counters.values():
            found.forgotten_launches = found.launches
            found.plans.clear()
        _state.plans.clear()
        _state.refusals.clear()
        _state.kernels.clear()
        _state.resolved.clear()
        _watch.forget()
        _empty_memos()
        _state.layers = None


def look_again() -> int:
    """Look up at once what is provisional, and run what was found from the next call on; how many plans changed.

    A thread does so by itself (:mod:`tilekern.runtime.provisional`). This is for a job that has no optimizer of
    torch's: call it between two steps, never between a forward and its backward. Ranks that agreed on their kernels
    find nothing new in this way; for them :func:`tilekern.agree` is what is called there.
    """
    _watch.look()
    return _watch.take()


def trace_by(trace: Trace | None) -> None:
    """Have a trace answer for meta tensors, and see what others ask for if it wants to; None ends it."""
    _state.trace = trace


def _empty_memos() -> None:
    for kept in _state.memos:
        kept.clear()


_watch = Watch(lambda kernel: counters(kernel).fallbacks, _empty_memos)


def memo() -> dict[Any, Any]:
    """A dictionary in which an op may keep what it found for a kind of call; :func:`forget` empties it."""
    found: dict[Any, Any] = {}
    _state.memos.append(found)
    return found


def keep(found: dict[Any, Any], key: Any, value: Any) -> Any:
    """Put a value into a memo of :func:`memo` unless it is full, and give it back.

    None is not kept: the model's own op runs then, and who counts that needs to be told the reason.
    """
    if value is not None and len(found) < MOST_PLANS:
        found[key] = value
    return value


def plan_for(spec: KernelSpec, device: Any, *sizes: Any) -> Plan | None:
    """The plan of a problem, or None where the model's own op must run.

    Args:
        device: the tensors' torch device.
        sizes: values of the spec's dimensions in their order: numbers, bools and torch dtypes.

    Raises:
        CacheMiss: nothing serves the problem, or this machine cannot run what does, and the miss policy is ``error``.
    """
    if device.type == "meta":  # nothing is computed there, by whomever; a trace notes what would be
        if _state.trace is not None:
            return _state.trace.plan(spec, _problem(spec, sizes))
        _refuse("tensors without values, on meta")
        return None
    # On the CPU the answer depends on the environment, and a look at it costs nothing there.
    key = (spec.name, device.index if device.type == "cuda" else interpreting(), *sizes)
    try:
        plan = _state.plans[key]
    except KeyError:
        with _state.lock:
            _refused.reason = None
            plan = _resolve(spec, device, sizes, key)
            if len(_state.plans) >= MOST_PLANS:
                _state.plans.clear()
                _state.refusals.clear()
            if plan is None:
                _state.refusals[key] = getattr(_refused, "reason", None) or UNTAKEN
            _state.plans[key] = plan
            return plan
    if plan is None:
        _refuse(_state.refusals.get(key, UNTAKEN))
    return plan


def _refuse(reason: str) -> None:
    """Note why there is no plan, for :func:`count_fallback`."""
    _refused.reason = reason


def count_fallback(spec: KernelSpec | str, reason: str = "") -> None:
    """Note that a call ran the model's own op.

    Args:
        spec: the kernel that would have run, or its name.
        reason: why, in few words and without sizes; where empty, why this thread was refused a plan just before.
    """
    name = spec if isinstance(spec, str) else spec.name
    if _state.trace is not None and not _state.trace.real:
        _state.trace.fallbacks[name] += 1
        return
    why = reason or getattr(_refused, "reason", None) or UNTAKEN
    _refused.reason = None
    found = counters(name)
    found.fallbacks += 1
    found.reasons[why] = found.reasons.get(why, 0) + 1


def _problem(spec: KernelSpec, sizes: Sequence[Any]) -> Problem | None:
    names = [d.name for d in spec.dimensions]
    values = [
        str(v).removeprefix("torch.") if d.kind == "dtype" else v for d, v in zip(spec.dimensions, sizes, strict=True)
    ]
    try:
        return spec.problem(**dict(zip(names, values, strict=True)))
    except ValueError as error:
        warn_once(f"{error}; the model's own op runs instead")
        _refuse("sizes that no kernel takes")
        return None


def _resolve(spec: KernelSpec, device: Any, sizes: Sequence[Any], key: tuple[Any, ...]) -> Plan | None:
    problem = _problem(spec, sizes)
    if problem is None:
        return None
    if interpreting():
        return _keep(spec, _interpreted(spec, problem), problem)
    if device.type != "cuda":
        warn_once(
            f"{spec.name} was called on {device.type}; kernels run on CUDA devices (or anywhere under "
            "TILEKERN_INTERPRET=1), so the model's own op runs instead"
        )
        _refuse(f"tensors on the device {device.type}")
        return None
    target = here(device.index)
    assert target is not None
    return _keep(spec, _cached(spec, problem, target, key), problem)


def _keep(spec: KernelSpec, plan: Plan | None, problem: Problem) -> Plan | None:
    if plan is not None:
        counters(spec.name).plans.append(plan)
    if _state.trace is not None and _state.trace.real:
        _state.trace.see(spec, problem, plan)
    return plan


def _interpreted(spec: KernelSpec, problem: Problem) -> Plan:
    config = spec.default(problem, INTERPRETED)
    implementation = spec.implement(problem, config)
    if isinstance(implementation, LibraryCall):
        return LibraryPlan(implementation.bound(plan_for), config)
    assert isinstance(implementation, Implementation), "the interpreter runs cuTile's kernels alone"
    blocks = implementation.grid(problem, INTERPRETED.sm_count)
    return InterpretedPlan(implementation, config, blocks)


def _cached(spec: KernelSpec, problem: Problem, target: Target, key: tuple[Any, ...]) -> Plan | None:
    if _state.agreement is None and of_several_ranks():
        warn_once(
            "the ranks of this job have not agreed on their kernels and may run different ones; call "
            "tilekern.agree() on every rank when torch.distributed is up, before the first step"
        )
    wanted = spec.bucketed(problem)
    found = find(spec, wanted, target)
    count = counters(spec.name)
    if found is None:
        count.misses += 1
        found = _on_miss(spec, wanted, target)
    else:
        count.hits += 1
        found = _own_default(spec, wanted, target, found)
        count.nearest += not found.exact_bucket
    if found is None:
        plan = _by_library(spec, problem, wanted, target)
    else:
        plan = _made_or_own(spec, problem, target, key[1], found)
    _state.resolved[spec.name, wanted] = None if found is None or plan is None else found.record
    if not is_settled(found):
        look, take = functools.partial(find, spec, wanted, target), functools.partial(_take, spec, problem, target, key)
        _watch.add(spec.name, wanted, target, look, found, plan, key, take)
    return plan


def _by_library(spec: KernelSpec, problem: Problem, wanted: Problem, target: Target) -> Plan | None:
    """The plan of :func:`_library_default`."""
    config = _library_default(spec, wanted, target)
    if config is None:
        return None
    implementation = spec.implement(problem, config)
    assert isinstance(implementation, LibraryCall)
    return LibraryPlan(implementation.bound(plan_for), config)


def _library_default(spec: KernelSpec, wanted: Problem, target: Target) -> Config | None:
    """The default of a problem where a library that is here runs it, which needs no compiler; else None.

    It runs for this process alone, where no record of it could be kept: without a compiler there is no toolkit to keep
    it under.
    """
    if miss_policy() != "compile" or _state.agreement is not None:
        return None
    config = spec.default(wanted, target)
    return config if library_of(config) in libraries_here() else None


def _made_or_own(spec: KernelSpec, problem: Problem, target: Target, device: int, found: Hit) -> Plan | None:
    """The plan of a record, or None for the model's own op where this machine cannot run it."""
    try:
        return _made(spec, problem, target, device, found)
    except CannotRun as error:
        if miss_policy() == "error":
            raise CacheMiss(str(error)) from None
        warn_once(f"{error}; the model's own op runs")
        _refuse("a record that this machine cannot run")
        return None


def _made(spec: KernelSpec, problem: Problem, target: Target, device: int, found: Hit) -> Plan:
    config = runnable(found.record)
    if config != Config(found.record.config):
        warn_once(f"{found.record.config['implementation']} is not here; {spec.name} runs its best kernel")
    implementation = spec.implement(problem, config)
    if isinstance(implementation, LibraryCall):
        return LibraryPlan(implementation.bound(plan_for), config)
    key = (device, spec.name, found.record.artifacts[ALIGNED].sha256, found.record.artifacts[GENERIC].sha256)
    from tilekern.launcher import prebuilt

    if key not in _state.kernels:
        _state.kernels[key] = prebuilt(implementation.function, found.record.artifacts, found.load)
    return plan_of(_state.kernels[key], implementation, config, problem, target)


def _take(spec: KernelSpec, problem: Problem, target: Target, key: tuple[Any, ...], found: Hit) -> Plan | None:
    """Put what was found later in the place of a plan, unless that was dropped since, or ranks agreed on another."""
    with _state.lock:
        if key not in _state.plans or (_state.agreement is not None and found.layer is not _state.agreement.snapshot):
            return None
        plan = _keep(spec, _made(spec, problem, target, key[1], found), problem)
        _state.resolved[spec.name, spec.bucketed(problem)] = found.record
        counters(spec.name).hits += 1
        # Last, as calls read it without the lock: who has the plan finds it counted.
        _state.plans[key] = plan
        return plan


def find(
    spec: KernelSpec,
    bucketed: Problem,
    target: Target,
    *,
    layers: Sequence[Layer] | None = None,
    trace: list[Step] | None = None,
) -> Hit | None:
    """The cache's record for a problem at its buckets, with artifacts that were checked, or None.

    Where ranks agreed, it is looked up in what they agreed on, for the target that they agreed on.

    Args:
        spec: the kernel.
        bucketed: the problem.
        target: the GPU, which need not be here.
        layers: where to look, in place of what ranks agreed on and of the layers that this process keeps.
        trace: where given, takes the lookup's steps.
    """
    from tilekern import cache
    from tilekern.source.digests import digests_of
    from tilekern.toolchain import toolkit

    agreed = _state.agreement if layers is None else None
    if agreed is not None:
        if (spec.name, bucketed) in agreed.compiled:
            return agreed.compiled[spec.name, bucketed]
        target, layers = agreed.target, [agreed.snapshot]
    elif layers is None:
        layers = _state.layers = cache.default_layers() if _state.layers is None else _state.layers
    tools = toolkit()
    return cache.lookup(
        spec.name,
        dict(bucketed),
        bucketed=[d.name for d in spec.dimensions if d.kind == "bucketed"],
        target_key=target.key,
        arch=target.arch,
        toolkit_key=tools.key if tools else None,
        source=digests_of(spec.module, spec.name),
        layers=layers,
        trace=trace,
    )


def _own_default(spec: KernelSpec, wanted: Problem, target: Target, found: Hit) -> Hit:
    """The problem's own default in the place of another bucket's, where it takes no compiler's time; else ``found``.

    A composite's default is made for its rows: that of few rows takes many in small chunks, each of which rounds the
    weight's gradient once more.
    """
    from tilekern import cache

    is_neighbours = found.record.provenance == "default" and not found.exact_bucket
    if not is_neighbours or _state.agreement is not None or miss_policy() != "compile":
        return found
    if not spec.is_library(wanted, spec.default(wanted, target)):
        return found
    with contextlib.suppress(TilekernError, cache.CacheError):
        compile_default(spec, wanted, target)
        return find(spec, wanted, target) or found
    return found


def _on_miss(spec: KernelSpec, wanted: Problem, target: Target) -> Hit | None:
    from tilekern import cache

    policy = miss_policy()
    cache.note_wanted(
        cache.user_root(), spec.name, dict(wanted), target.describe(), f"not in any cache; policy {policy}"
    )
    tune = f"tune it with: python -m tilekern.tune MODEL --gpu {target.name}"
    if policy == "error":
        raise CacheMiss(f"no cache holds {spec.name} for {wanted.key} on {target.name}; {tune}")
    why, refusal = "", "no record, and the miss policy fallback"
    if policy == "compile":
        try:
            if _state.agreement is None:
                compile_default(spec, wanted, target)
            else:
                _state.agreement.compile(spec, wanted)
            counters(spec.name).compiled += 1
            return find(spec, wanted, target)
        except RanksDiffer:
            raise
        except (TilekernError, cache.CacheError) as error:
            why = f" and its default config could not be compiled and kept ({error})"
            refusal = f"no record, and {'no compiler' if isinstance(error, ToolchainMissing) else 'none was compiled'}"
            if config := _library_default(spec, wanted, target):
                library = library_of(config)
                warn_once(
                    f"no cache holds {spec.name} on {target.name}; its default, a call of {library}, runs; {tune}"
                )
                return None
    warn_once(f"no cache holds {spec.name} for this model on {target.name}{why}; the model's own op runs; {tune}")
    _refuse(refusal)
    return None


def compile_default(spec: KernelSpec, problem: Problem, target: Target) -> None:
    """Compile the default config of a problem, both variants, and keep it in the user's cache, unless better is there.

    Raises:
        ToolchainMissing: no compiler is installed.
        CompileFailed: the compiler rejected it.
        tilekern.cache.CacheError: the user's cache cannot be written.
    """
    from tilekern import cache
    from tilekern.runtime.records import compiled_default

    record, blobs = compiled_default(spec, problem, target)
    store = cache.Store(cache.user_root())
    # The tuner may have published a winner while the compiler ran.
    if not cache.has_better(store, record):
        store.write(record, blobs)
