"""Finds the plan of a call, (spec, problem) -> plan, in microseconds; handles misses and keeps the counters.

A plan is looked up once for each combination of real sizes, then found in a dictionary. The first lookup reads a few
files and needs no compiler, unless there is no record and the miss policy is ``compile``. The plan of a miss is looked
up again periodically, outside the calls' path (:mod:`tilekern.runtime.provisional`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from tilekern.compile.library import libraries_here, library_of
from tilekern.errors import (
    CacheMiss,
    CannotRun,
    InputError,
    NoVariant,
    RanksDiffer,
    RowsVary,
    TilekernError,
    ToolchainMissing,
)
from tilekern.runtime.locks import ForkLock
from tilekern.runtime.plans import Counters, InterpretedPlan, LibraryPlan, Plan, plan_of, unwatched
from tilekern.runtime.provisional import Watch, is_settled, of_several_ranks
from tilekern.runtime.requirements import driver_release, unmet
from tilekern.runtime.rows import has_rows, invariant_artifact, overruled, why_varies
from tilekern.spec import ALIGNED, GENERIC, INVARIANT, Config, Implementation, KernelSpec, LibraryCall, Problem
from tilekern.spec.targets import INTERPRETED, Target, here
from tilekern.warning import warn_once

if TYPE_CHECKING:
    from tilekern.cache import Address, Hit, Layer, Record, Step
    from tilekern.runtime.ahead import Coming
    from tilekern.runtime.ranks.agreement import Agreement
    from tilekern.runtime.recorder import Trace

MissPolicy = Literal["compile", "fallback", "error"]
COUNTED = ("hits", "nearest", "misses", "substitutes", "fallbacks", "compiled", "launches")
# Real sizes that are remembered; a job with more distinct ones looks up again, at some tens of microseconds each.
MOST_PLANS = 65536
# A kernel, a problem at its buckets, and the key of a target.
_Asked = tuple[str, Problem, str]
# A kernel, a problem at its buckets, and whether the default stands for a record or kernels for those of a composite.
_What = Literal["default", "parts"]
_Noted = tuple[str, Problem, _What]


@dataclass(frozen=True)
class Foreseen:
    """What the step of a model asks for.

    Attributes:
        model: the model's name.
        problems: kernels and problems at their buckets, in the order of their calls.
        cost_s: returns how much longer the step takes on the GPU if the model's own ops run in place of some kernels,
            by the bytes that both move; None if that is not known.
    """

    model: str
    problems: Sequence[tuple[KernelSpec, Problem]]
    cost_s: Callable[[Collection[str]], float | None]


# What the kernels of a composite are found to be: the config that runs, then what its op needs to launch them.
_Composed = TypeVar("_Composed", bound=tuple[Any, ...])
# Returns what the step that runs now asks for on a GPU; None if it cannot tell.
Foresight = Callable[[Target], Foreseen | None]


@dataclass(frozen=True)
class _Caller:
    """Where a plan runs, and on what.

    Attributes:
        device: the GPU's number.
        has_torch: whether its arrays are torch's. If not, no library's call takes them, and there is no op of a model
            to run in place of a kernel.
    """

    device: int
    has_torch: bool = True

    def libraries(self) -> list[str]:
        """Return the libraries that can run."""
        return libraries_here() if self.has_torch else []

    def must_raise(self) -> bool:
        """Return whether nothing but a kernel may run."""
        return not self.has_torch or miss_policy() == "error"


class _Failure(NamedTuple):
    """Why a default could not be compiled, and whether that was for want of a compiler."""

    reason: str
    lacks_compiler: bool


@dataclass
class State:
    """The state that one process keeps of its calls.

    Attributes:
        plans: by real sizes; None for the model's own op.
        refusals: why plans are None.
        memos: dictionaries that ops keep beside the plans.
        kernels: by their artifacts; they are never dropped, since a captured graph may launch the code they loaded.
        resolved: the hit that each problem, at its bucket, runs by; None for the model's own op, or for a library's
            default without a record.
        unkept: defaults that were compiled here and could not be stored in a cache.
        failed: why defaults could not be compiled, so that each is tried once.
        told: missing problems that one warning has named together.
        misfits: addresses of valid records that fit no kernel.
        layers: the layers of this process, once they were looked up.
        policy: the miss policy; None goes by the environment.
        foresight: returns what the running step asks for, for a miss; None if no model is patched.
        invariant: whether kernels of one bit class run (``tilekern.invariant``).
        strict: whether what may make a token's row depend on others is an error in that mode.
        classes: the bit classes that run (:func:`tilekern.runtime.rows.why_varies`).
        varying: by kernel, why its rows may depend on others although ``invariant``.
        substitutes: what runs in place of a record, or of the kernels of a composite's config, by :func:`_note`.
        of_other_mode: the plans, refusals, hits and memos of the mode that is not on.
        agreement: what the ranks agreed on, which replaces the caches.
        trace: answers for meta tensors.
    """

    lock: ForkLock = field(default_factory=ForkLock)
    counters: dict[str, Counters] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], Plan | None] = field(default_factory=dict)
    refusals: dict[tuple[Any, ...], str] = field(default_factory=dict)
    memos: list[dict[Any, Any]] = field(default_factory=list)
    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    resolved: dict[tuple[str, Problem], Hit | None] = field(default_factory=dict)
    unkept: dict[_Asked, Hit] = field(default_factory=dict)
    failed: dict[_Asked, _Failure] = field(default_factory=dict)
    told: set[_Asked] = field(default_factory=set)
    misfits: set[Address] = field(default_factory=set)
    layers: list[Layer] | None = None
    policy: MissPolicy | None = None
    foresight: Foresight | None = None
    invariant: bool = field(default_factory=lambda: os.environ.get("TILEKERN_INVARIANT") in ("1", "strict"))
    strict: bool = False
    classes: dict[tuple[Any, ...], str] = field(default_factory=dict)
    varying: dict[str, str] = field(default_factory=dict)
    substitutes: dict[_Noted, str] = field(default_factory=dict)
    of_other_mode: list[dict[Any, Any]] = field(default_factory=list)
    agreement: Agreement | None = None
    trace: Trace | None = None


_state = State()
# Why this thread was last refused a plan, for the fallback that is counted next.
_refused = threading.local()
# The reason if an op itself refused and no plan was asked for.
UNTAKEN = "arguments that no kernel takes"


def interpreting() -> bool:
    """Whether kernels run on the CPU (``TILEKERN_INTERPRET=1``)."""
    return os.environ.get("TILEKERN_INTERPRET", "0") not in ("", "0")


def set_miss_policy(policy: str | None) -> None:
    """Set what happens when a lookup finds nothing; None goes by ``TILEKERN_ON_MISS``, else ``compile``.

    Raises:
        InputError: the policy is unknown.
    """
    _state.policy = None if policy is None else _checked_policy(policy, "on_miss")
    if _state.agreement is not None:
        _state.agreement.policy = policy or _state.agreement.policy


def miss_policy(*, agreed: bool = True) -> MissPolicy:
    """Return the policy in force; without ``agreed`` the one that this process would have without other ranks."""
    if agreed and _state.agreement is not None:
        return _checked_policy(_state.agreement.policy, "the ranks' agreement")
    return _state.policy or _checked_policy(os.environ.get("TILEKERN_ON_MISS") or "compile", "TILEKERN_ON_MISS")


def _checked_policy(policy: str, where: str) -> MissPolicy:
    if policy not in get_args(MissPolicy):
        raise InputError(f"{where}: unknown miss policy {policy!r}; known: {', '.join(get_args(MissPolicy))}")
    return policy  # type: ignore[return-value]


def counters(kernel: str) -> Counters:
    """Return the counters of one kernel."""
    return _state.counters.setdefault(kernel, Counters())


def stats() -> dict[str, dict[str, int]]:
    """Return the counters of every kernel that was asked for, each with the names of :data:`COUNTED`."""
    return {
        kernel: {name: getattr(found, name) for name in COUNTED} for kernel, found in sorted(_state.counters.items())
    }


def reasons() -> dict[str, dict[str, int]]:
    """Return why and how often calls of each kernel ran the model's own op, the most frequent reason first."""
    return {
        kernel: dict(sorted(found.reasons.items(), key=lambda item: -item[1]))
        for kernel, found in sorted(_state.counters.items())
        if found.reasons
    }


def agree_on(agreement: Agreement | None) -> None:
    """Drop all plans, and from now on look up in what the ranks agreed on; None returns to the caches."""
    with _state.lock:
        _state.agreement = agreement
        forget()


def resolved() -> dict[tuple[str, Problem], Record | None]:
    """Return the record that each problem asked for, at its bucket, runs by; None for the model's own op."""
    from tilekern.runtime.defaults import AHEAD

    AHEAD.finish()
    with _state.lock:
        return {named: None if found is None else found.record for named, found in _state.resolved.items()}


def forget() -> None:
    """Drop all plans of this process, so that the next calls look in the cache again.

    Counters, the agreement of ranks and the code of captured graphs stay.
    """
    with _state.lock:
        for kept in (
            _state.plans, _state.refusals, _state.resolved, _state.unkept, _state.failed, _state.told, _state.misfits,
            _state.classes, _state.varying, _state.substitutes, _state.of_other_mode,
        ):  # fmt: skip
            kept.clear()
        _watch.forget()
        _empty_memos()
        _state.layers = None


def set_invariant(*, on: bool) -> bool:
    """Turn the invariant mode on or off, with plans of its own; return whether it was on."""
    with _state.lock:
        before = _state.invariant
        if on != before:
            tables: list[dict[Any, Any]] = [_state.plans, _state.refusals, _state.resolved, *_state.memos]
            others, _state.of_other_mode = _state.of_other_mode, [dict(table) for table in tables]
            # An op that was imported since has a memo that the other mode did not have.
            for place, table in enumerate(tables):
                table.clear()
                table.update(others[place] if place < len(others) else {})
            _state.invariant = on
        return before


def is_invariant() -> bool:
    """Return whether the invariant mode is on."""
    return _state.invariant


def set_strict(*, on: bool) -> None:
    """Make what may vary in the invariant mode an error, or only a note again."""
    _state.strict = on


def note_varying(kernel: str, reason: str) -> None:
    """Note why a kernel's rows depend on others in the invariant mode.

    Raises:
        RowsVary: the mode is strict.
    """
    if _state.strict:
        raise RowsVary(f"rows of {kernel} may depend on others: {reason}")
    _state.varying[kernel] = reason


def varying() -> dict[str, str]:
    """Return by kernel why its rows may depend on others although the invariant mode was on."""
    return dict(_state.varying)


def substitutes() -> dict[str, str]:
    """Return by kernel what runs in place of a record that no cache holds, or of kernels that a composite chose."""
    found: dict[str, dict[str, None]] = {}
    with _state.lock:
        for (kernel, _, _), runs in _state.substitutes.items():
            found.setdefault(kernel, {})[runs] = None
    return {kernel: "; ".join(runs) for kernel, runs in found.items()}


def look_again() -> int:
    """Look up provisional plans now, use better ones from the next call on, and return how many plans changed.

    A thread does this automatically (:mod:`tilekern.runtime.provisional`). Call this in a job without a torch
    optimizer, between two steps, never between a forward and its backward. Ranks that agreed on their kernels find
    nothing new this way; they call :func:`tilekern.agree` instead.
    """
    _watch.look()
    return _watch.take()


def trace_by(trace: Trace | None) -> None:
    """Let a trace answer for meta tensors, and see other calls too if it is ``real``; None ends it."""
    _state.trace = trace


def foresee_by(foresight: Foresight | None) -> None:
    """Ask ``foresight`` at a miss what else the running step will miss; None asks nothing."""
    _state.foresight = foresight


def meta_stands_for() -> str | None:
    """Return the type of device that meta tensors of the running trace stand for; None without one."""
    return None if _state.trace is None else _state.trace.stands_for


def traced_target() -> Target | None:
    """Return the GPU that meta tensors of the running trace are for; None without one."""
    return None if _state.trace is None else _state.trace.target


def _empty_memos() -> None:
    for kept in _state.memos:
        kept.clear()


_watch = Watch(lambda kernel: counters(kernel).fallbacks, _empty_memos)


def memo() -> dict[Any, Any]:
    """Return a dictionary in which an op keeps plans by the kind of call; :func:`forget` empties it."""
    plans: dict[Any, Any] = {}
    _state.memos.append(plans)
    return plans


def keep(memo: dict[Any, Any], key: Any, value: Any) -> Any:
    """Put a value into a dictionary of :func:`memo` unless that is full, and return the value.

    None is not kept, since each fallback is counted with the reason of its own refusal.
    """
    if value is not None and len(memo) < MOST_PLANS:
        memo[key] = value
    return value


def plan_for(spec: KernelSpec, device: Any, *sizes: Any) -> Plan | None:
    """Return the plan of a problem, or None if the model's own op must run.

    Args:
        device: the tensors' torch device.
        sizes: values of the spec's dimensions in their order: numbers, bools and torch dtypes.

    Raises:
        CacheMiss: no record serves the problem, or this machine cannot run it, and the miss policy is ``error``.
    """
    if device.type == "meta":  # nothing is computed there; a trace notes what would be
        if _state.trace is not None:
            return _state.trace.plan(spec, _problem(spec, sizes))
        _refuse("tensors without values, on meta")
        return None
    # On the CPU the answer depends on the environment, and a look at it costs nothing there. (A bool would be a GPU's
    # number.)
    key = (spec.name, device.index if device.type == "cuda" else f"{device.type} {interpreting()}", *sizes)
    try:
        plan = _state.plans[key]
    except KeyError:
        if getattr(_refused, "looks_nothing_up", False):
            raise InputError(f"{spec.name} is called with tensors on {device} in a step on meta tensors") from None
        with _state.lock:
            if key in _state.plans:  # another thread has looked it up meanwhile
                return plan_for(spec, device, *sizes)
            _refused.reason = None
            _make_room()
            plan = _resolve(spec, device, sizes, key)
            if plan is None:
                _state.refusals[key] = getattr(_refused, "reason", None) or UNTAKEN
            _state.plans[key] = plan
            return plan
    if plan is None:
        _refuse(_state.refusals.get(key, UNTAKEN))
    return plan


def _make_room() -> None:
    """Drop all plans if there are too many."""
    if len(_state.plans) >= MOST_PLANS:
        _state.plans.clear()
        _state.refusals.clear()
        _empty_memos()
        _watch.let_go()


@dataclass(frozen=True)
class _Held:
    """A kernel of a composite without a plan: why, what mends it, and the subject of the warning."""

    spec: KernelSpec
    reason: str
    remedy: str
    about: str


def by_parts(
    spec: KernelSpec, device: Any, sizes: Mapping[str, Any], config: Config, look: Callable[[], _Composed | None]
) -> _Composed | None:
    """Return what ``look`` finds for a composite that may run by other kernels than those of its config.

    If it does, that is counted, noted for :func:`substitutes` and said once, in place of the warnings of the lookups
    inside, whose kernels have no model's own op. To be called where plans are looked up, not where they are launched.

    Args:
        spec: the composite.
        device: the tensors' torch device.
        sizes: real sizes of the problem by dimension; others may be among them.
        config: the config that the plan of the composite has.
        look: asks :func:`plan_for` for the plans of the kernels, and returns them after the config that runs; None if
            the model's own op must run.
    """
    if device.type == "meta":
        return look()
    before, held = getattr(_refused, "held", None), list[_Held]()
    _refused.held = held
    try:
        found = look()
    finally:
        _refused.held = before
    problem = _problem(spec, [sizes[d.name] for d in spec.dimensions])
    if found is None or problem is None:
        for one in held:
            _tell_of_own_op(one.spec, one.reason, one.remedy, one.about)
        own_op_runs(spec, device, *(sizes[d.name] for d in spec.dimensions))
        return found
    named: _Noted = (spec.name, spec.bucketed(problem), "parts")
    with _state.lock:
        if found[0] == config:
            _state.substitutes.pop(named, None)
            return found
        _refused.reason = None
        names = ", ".join(dict.fromkeys(one.spec.name for one in held))
        if names:
            _note(named, f"{found[0].key} in place of {config.key}, since {names} have no plan")
            warn_once(
                f"{spec.name} runs {found[0].key} in place of {config.key}, since {names} have no plan: "
                f"{held[0].reason}{held[0].remedy and '; '}{held[0].remedy}",
                about=f"{spec.name} by {found[0].key}",
            )
        else:  # said before, for the same kernels
            _note(named, _state.substitutes.get(named, f"{found[0].key} in place of {config.key}"))
    return found


def composed(spec: KernelSpec, plan: Plan, call: Callable[..., tuple[Any, ...]]) -> Plan:
    """Return a composite's plan that looks up none of its kernels' again: ``call`` has their plans, and takes inputs.

    To be kept in a :func:`memo`, which is emptied when one of them changes.
    """
    own = LibraryPlan(unwatched(call) if _state.invariant else call, plan.config)
    counters(spec.name).add(own)
    return own


def own_op_runs(spec: KernelSpec, device: Any, *sizes: Any) -> None:
    """Take back that something runs in place of a composite's record: its kernels have no plans.

    To be called by ops, with the arguments of :func:`plan_for`, where that gave a plan that they do not run.
    """
    problem = None if device.type == "meta" else _problem(spec, sizes)
    if problem is not None:
        with _state.lock:
            for what in get_args(_What):
                _state.substitutes.pop((spec.name, spec.bucketed(problem), what), None)


def array_plan_for(spec: KernelSpec, device: int, target: Target, problem: Problem) -> Plan:
    """Return the plan of a problem for arrays that need not be torch's, to be launched by :meth:`Plan.queue`.

    It is looked up, compiled on a miss and counted as by :func:`plan_for`, with two differences: a record whose winner
    is a library's call serves by its best kernel, and there is no op of a model to fall back to.

    Args:
        device: the GPU's number.
        target: that GPU, as the driver describes it.
        problem: the problem with its real sizes.

    Raises:
        CacheMiss: no record serves, or this machine cannot run it, and no default may or can be compiled.
        CannotRun: the driver or cuda-tile is too old.
    """
    key = ("arrays", spec.name, device, problem)
    with _state.lock:
        plan = _state.plans.get(key)
        if plan is None:
            _make_room()
            if wrong := unmet(has_torch=False):
                raise CannotRun(wrong)
            plan = _looked_up(spec, problem, target, key, _Caller(device, has_torch=False))
            assert plan is not None, "a caller without torch gets a plan or an error"
            _state.plans[key] = plan
        return plan


def tuned_plan_for(spec: KernelSpec, device: Any, *sizes: Any) -> Plan | None:
    """Return the plan of a measured record as :func:`plan_for` does; None, without a count or a compile, if none is.

    For calls that something else serves well: only a measurement says that a kernel is faster, and, in the invariant
    mode, that it has the same bits if it rounds any.
    """
    needs_class = _state.invariant and has_rows(spec.name)
    if device.type != "cuda":
        if needs_class:
            return None
        if device.type == "meta" and _state.trace is not None:
            return _state.trace.plan(spec, _problem(spec, sizes), dispensable=True)
        return plan_for(spec, device, *sizes) if device.type == "meta" or interpreting() else None
    key = ("tuned", spec.name, device.index, *sizes)
    try:
        return _state.plans[key]
    except KeyError:
        problem, target = _problem(spec, sizes), here(device.index)
        with _state.lock, contextlib.suppress(OSError):
            found = None if problem is None or target is None else find(spec, spec.bucketed(problem), target)
            plan = None
            if problem is not None and found is not None and found.record.provenance == "measured":
                classes, libraries = _state.classes, libraries_here()
                serves = not needs_class or not why_varies(spec, problem, found, classes, libraries)
                plan = plan_for(spec, device, *sizes) if serves else None
            _state.plans[key] = plan
            return plan
    return None


def _let_go(kernels: Container[str]) -> None:
    """Forget the plans of kernels that :func:`tuned_plan_for` found, so that they are looked up again."""
    gone = [key for key in _state.plans if key[0] == "tuned" and key[1] in kernels]
    for key in gone:
        del _state.plans[key]
    if gone:
        _empty_memos()


def _refuse(reason: str) -> None:
    """Note why there is no plan, for the next :func:`count_fallback`."""
    _refused.reason = reason


def count_fallback(spec: KernelSpec | str, reason: str = "", *, by_modules: bool = False) -> None:
    """Count a call that ran the model's own op.

    Args:
        spec: the kernel that would have run, or its name.
        reason: why, in few words and without sizes; if empty, why this thread was last refused a plan.
        by_modules: whether modules, which are judged themselves, compute all but a sum of two terms.

    Raises:
        RowsVary: the invariant mode is strict, and the kernel's results are rows of tokens.
    """
    name = spec if isinstance(spec, str) else spec.name
    if _state.trace is not None and not _state.trace.real:
        _state.trace.fallbacks[name] += 1
        return
    why = reason or getattr(_refused, "reason", None) or UNTAKEN
    _refused.reason = None
    if _state.strict and has_rows(name) and not by_modules:
        raise RowsVary(f"rows of {name} may depend on others: torch's own operations run ({why})")
    found = counters(name)
    found.fallbacks += 1
    found.reasons[why] = found.reasons.get(why, 0) + 1


def refused(spec: KernelSpec, error: NoVariant) -> None:
    """Warn once that no artifact of a kernel allows the arguments, so that the model's own op runs.

    Raises:
        CacheMiss: the miss policy is ``error``.
    """
    if miss_policy() == "error":
        raise CacheMiss(str(error)) from None
    warn_once(f"{error}; the model's own op runs", about=f"no variant of {spec.name}")


def _problem(spec: KernelSpec, sizes: Sequence[Any]) -> Problem | None:
    names = [d.name for d in spec.dimensions]
    values = [
        str(v).removeprefix("torch.") if d.kind == "dtype" else v for d, v in zip(spec.dimensions, sizes, strict=True)
    ]
    try:
        return spec.problem(**dict(zip(names, values, strict=True)))
    except ValueError as error:
        if any(hasattr(size, "grad_fn") for size in sizes):
            _refuse("torch.jit.trace, which makes tensors of sizes")
            return None
        warn_once(f"{error}; the model's own op runs instead")
        _refuse("sizes that no kernel takes")
        return None


def _resolve(spec: KernelSpec, device: Any, sizes: Sequence[Any], key: tuple[Any, ...]) -> Plan | None:
    problem = _problem(spec, sizes)
    if problem is None:
        return None
    if interpreting():
        config = _by_kernels(spec, problem, spec.default(problem, INTERPRETED))
        way = spec.implement(problem, config)
        assert isinstance(way, Implementation | LibraryCall), "the interpreter only runs cuTile's kernels"
        if isinstance(way, LibraryCall):
            plan: Plan | None = _library_plan(way, config)
        else:
            plan = InterpretedPlan(way, config, way.grid(problem, INTERPRETED.sm_count))
        return _keep(spec, plan, problem)
    if device.type != "cuda":
        warn_once(
            f"{spec.name} was called on {device.type}; kernels run on CUDA devices (or anywhere under "
            "TILEKERN_INTERPRET=1), so the model's own op runs instead"
        )
        _refuse(f"tensors on the device {device.type}")
        return None
    if wrong := unmet():
        if miss_policy() == "error":
            raise CacheMiss(wrong)
        warn_once(f"{wrong}; until then the model's own ops run")
        _refuse("a requirement that is not met")
        return None
    target = here(device.index)
    assert target is not None
    return _looked_up(spec, problem, target, key, _Caller(device.index))


def _looked_up(
    spec: KernelSpec, problem: Problem, target: Target, key: tuple[Any, ...], caller: _Caller
) -> Plan | None:
    try:
        plan = _cached(spec, problem, target, key, caller)
    except OSError as error:
        reason = f"{spec.name} cannot be looked up on {target.name} ({error})"
        if _state.agreement is not None:
            raise RanksDiffer(f"{reason}, which other ranks may not have met") from None
        _say_own_op(spec, reason, caller)
        return None
    return _keep(spec, plan, problem)


def _keep(spec: KernelSpec, plan: Plan | None, problem: Problem) -> Plan | None:
    if plan is not None:
        counters(spec.name).add(plan)
    if _state.trace is not None and _state.trace.real:
        _state.trace.see(spec, problem, plan)
    return plan


def _cached(spec: KernelSpec, problem: Problem, target: Target, key: tuple[Any, ...], caller: _Caller) -> Plan | None:
    if _state.agreement is None and of_several_ranks():
        warn_once(
            "the ranks of this job have not agreed on their kernels and may run different ones; call "
            "tilekern.agree() on every rank when torch.distributed is up, before the first step"
        )
    wanted = spec.bucketed(problem)
    count = counters(spec.name)
    found, plan = _served(spec, problem, wanted, target, caller)
    if found is None:
        count.misses += 1
        found = _on_miss(spec, wanted, target, caller)
        if found is not None:
            plan = _plan_or_own(spec, problem, target, caller, found)
        elif config := _unrecorded_default(spec, wanted, target):
            config = _by_kernels(spec, problem, config)
            _note((spec.name, wanted, "default"), f"its default {config.key} without a record")
            call = spec.implement(problem, config)
            assert isinstance(call, LibraryCall)
            if _state.invariant and not call.composite:
                _note_unless_sum(spec, problem, "nothing is tuned, and a library runs; tune with --invariant")
            plan = _library_plan(call, config)
    else:
        count.hits += 1
        count.nearest += not found.exact_bucket
    _state.resolved[spec.name, wanted] = None if plan is None else found
    if not is_settled(found):
        look = functools.partial(find, spec, wanted, target)
        take = functools.partial(_take, spec, problem, target, key, caller)
        _watch.add(spec.name, wanted, target, look, found, plan, key, take)
    return plan


def _served(
    spec: KernelSpec, problem: Problem, wanted: Problem, target: Target, caller: _Caller
) -> tuple[Hit | None, Plan | None]:
    """Return the best record that this machine can run, with its plan; if it can run none, the best without a plan."""
    refused: tuple[Hit, str] | None = None
    for found in _hits(spec, wanted, target):
        hit = _own_default(spec, wanted, target, found) if caller.has_torch else found
        try:
            plan = _made(spec, problem, target, caller, hit)
        except CannotRun as error:
            refused = refused or (hit, _cannot_run(hit.record, error))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (a bad record must not keep the next one from serving)
            _pass_over(hit, error)
        else:
            if refused is not None:
                warn_once(f"{refused[1]}; another record serves")
            return hit, plan
    if refused is None:
        return None, None
    _say_own_op(spec, refused[1], caller)
    return refused[0], None


def _cannot_run(record: Record, error: CannotRun) -> str:
    return (
        f"this machine cannot run {record.kernel} for {record.address.problem_key}, made by {record.toolkit['key']} "
        f"for {record.target['key']}: {error}"
    )


def _say_own_op(spec: KernelSpec, reason: str, caller: _Caller) -> None:
    """Warn once that the model's own op runs, and why; raise CacheMiss if it must not."""
    if caller.must_raise():
        raise CacheMiss(f"{reason} ({_compiler_and_driver()})") from None
    _refuse("a record that this machine cannot run")
    _tell_of_own_op(spec, reason, about=f"{spec.name} {reason}")


def _tell_of_own_op(spec: KernelSpec, reason: str, remedy: str = "", about: str = "") -> None:
    """Warn once that the model's own op runs, unless a composite asks, which may have other kernels."""
    held: list[_Held] | None = getattr(_refused, "held", None)
    if held is not None:
        held.append(_Held(spec, reason, remedy, about))
    else:
        warn_once(f"{reason}; the model's own op runs{remedy and '; '}{remedy}", about=about or None)


def _unrecorded_default(spec: KernelSpec, wanted: Problem, target: Target) -> Config | None:
    """Return the default config of a problem if it needs neither a record nor a compiler here; else None.

    Such is a composite, whose kernels have records of their own, and the call of an installed library. It runs in this
    process only: without a compiler there is no toolkit to store a record under. Ranks may have other libraries, but
    all have the same composites.
    """
    agreement = _state.agreement
    if miss_policy() != "compile" or (agreement is not None and not agreement.covers(target)):
        return None
    config = spec.default(wanted, target if agreement is None else agreement.target)
    if spec.implement(wanted, config).composite:
        return config
    return config if agreement is None and library_of(config) in libraries_here() else None


def _note(named: _Noted, runs: str) -> None:
    """Count a lookup after which something else runs than a record's kernels, and note what does."""
    counters(named[0]).substitutes += 1
    _state.substitutes[named] = runs


def _plan_or_own(spec: KernelSpec, problem: Problem, target: Target, caller: _Caller, found: Hit) -> Plan | None:
    """Return the plan of a record that was just made; None for the model's own op if this machine cannot run it."""
    try:
        return _made(spec, problem, target, caller, found)
    except CannotRun as error:
        _say_own_op(spec, _cannot_run(found.record, error), caller)
        return None


def _made(spec: KernelSpec, problem: Problem, target: Target, caller: _Caller, found: Hit) -> Plan:
    """Return the plan of a record's winner, or of its best kernel if the winner's library is missing or switched off.

    In the invariant mode it is that of the record's invariant kernel if there is one.

    Raises:
        CannotRun: the record has no best kernel, or the driver refuses the artifact.
    """
    config, library = Config(found.record.config), library_of(found.record.config)
    libraries = caller.libraries()
    if _state.invariant:
        if caller.has_torch and spec.implement(problem, config).composite:
            allowed = _by_kernels(spec, problem, _allowed(spec, problem, target, found, config))
            return _planned(spec, problem, target, caller.device, found, allowed, ())
        reason = why_varies(spec, problem, found, _state.classes, libraries)
        if not reason:
            _let_go(overruled(spec, problem, _state.classes))
            return _invariant_plan(spec, problem, target, caller.device, found)
        _note_unless_sum(spec, problem, reason)
    if not caller.has_torch and isinstance(spec.implement(problem, config), LibraryCall):
        if found.record.best_kernel is None:
            raise CannotRun("its winner is a call of torch, which takes no other arrays, and it holds no kernel")
        config = Config(found.record.best_kernel.config)
    elif library is not None and library not in libraries:
        if found.record.best_kernel is None:
            what = f"{spec.name} {found.record.address.problem_key}"
            raise CannotRun(f"{library}, which won {what}, is not here, and its record holds no kernel; tune it again")
        config = Config(found.record.best_kernel.config)
        warn_once(f"{library} is not here; {spec.name} runs its best kernel")
    config = _allowed(spec, problem, target, found, config)
    return _planned(spec, problem, target, caller.device, found, config, (ALIGNED, GENERIC))


def _allowed(spec: KernelSpec, problem: Problem, target: Target, found: Hit, config: Config) -> Config:
    """Return a record's config, or a composite's default where the config of a neighbouring bucket is not allowed.

    What is kept of more tokens, say, may exceed the room that the space gives it. Where defaults must not run without a
    record, the neighbour's does.
    """
    if found.exact_bucket or not spec.implement(problem, config).composite:
        return config
    wanted = spec.bucketed(problem)
    # Ranks that agreed run the same default, though their GPUs differ.
    target = target if _state.agreement is None else _state.agreement.target
    if spec.space.violated(wanted, config, target) is None:
        return config
    default = _unrecorded_default(spec, wanted, target)
    if default is None:
        return config
    _note((spec.name, wanted, "default"), f"its default {default.key} in place of {config.key} of another bucket")
    return default


def _by_kernels(spec: KernelSpec, problem: Problem, config: Config) -> Config:
    """Return the config that runs: in the invariant mode a composite's products are kernels' too.

    Each kernel that a composite launches is asked for in the mode; its own calls of a library are not.
    """
    if _state.invariant and config.get("products") == "cublas" and spec.implement(problem, config).composite:
        return config.but(products="tuned")
    return config


def _library_plan(call: LibraryCall, config: Config) -> Plan:
    bound = call.bound(plan_for)
    return LibraryPlan(unwatched(bound) if _state.invariant else bound, config)


def _note_unless_sum(spec: KernelSpec, problem: Problem, reason: str) -> None:
    """Note that a kernel's rows may depend on others, if its results are rows of tokens."""
    if has_rows(spec.name, problem):
        note_varying(spec.name, reason)


def _planned(
    spec: KernelSpec, problem: Problem, target: Target, device: int, found: Hit, config: Config, names: Sequence[str]
) -> Plan:
    """Return the plan of a config, by some of the record's artifacts."""
    implementation = spec.implement(problem, config)
    if isinstance(implementation, LibraryCall):
        return _library_plan(implementation, config)
    key = (device, spec.name, *(found.record.artifacts[name].sha256 for name in names))
    if key not in _state.kernels:
        from tilekern.runtime.driver import check_accepts
        from tilekern.runtime.launcher import prebuilt

        check_accepts(found.load(names[0]))
        _state.kernels[key] = prebuilt(implementation.function, found.record.artifacts, found.load, names)
    return plan_of(_state.kernels[key], implementation, config, problem, target)


def _invariant_plan(spec: KernelSpec, problem: Problem, target: Target, device: int, found: Hit) -> Plan:
    """Return the plan of a record's invariant kernel; arguments of another bit class are refused at the launch."""
    facts = (found.record.measurement or {})[INVARIANT]
    config, wide = Config(facts["config"]), invariant_artifact(found.record)
    return _planned(spec, problem, target, device, found, config, (wide, GENERIC) if facts["generic"] else (wide,))


def _take(
    spec: KernelSpec, problem: Problem, target: Target, key: tuple[Any, ...], caller: _Caller, found: Hit
) -> Plan | None:
    """Replace a plan by that of a later record, unless it was dropped since or ranks agreed on another."""
    with _state.lock:
        if key not in _state.plans or (_state.agreement is not None and found.layer is not _state.agreement.snapshot):
            return None
        _state.substitutes.pop((spec.name, spec.bucketed(problem), "default"), None)
        plan = _keep(spec, _made(spec, problem, target, caller, found), problem)
        _state.resolved[spec.name, spec.bucketed(problem)] = found
        counters(spec.name).hits += 1
        # Last, since calls read it without the lock and the plan must be counted by then.
        _state.plans[key] = plan
        return plan


def find(
    spec: KernelSpec,
    bucketed: Problem,
    target: Target,
    *,
    layers: Sequence[Layer] | None = None,
    trace: list[Step] | None = None,
    invariant: bool | None = None,
) -> Hit | None:
    """Return the cache's record for a problem at its buckets, with checked artifacts, or None.

    It is looked up in ``layers``, else in what the ranks agreed on, else in the layers of this process; ``trace`` takes
    the steps of the lookup. ``invariant`` says whether it is one of the invariant mode; by default, of this process's
    mode. The GPU need not be here.
    """
    return next(_hits(spec, bucketed, target, layers=layers, trace=trace, invariant=invariant), None)


def _hits(
    spec: KernelSpec,
    bucketed: Problem,
    target: Target,
    *,
    layers: Sequence[Layer] | None = None,
    trace: list[Step] | None = None,
    invariant: bool | None = None,
) -> Iterator[Hit]:
    """Yield the records that :func:`find` looks for, the best first, without those that fit no kernel."""
    from tilekern import cache
    from tilekern.compile.toolchain import toolkit
    from tilekern.spec.source import source_digest

    asked = (spec.name, bucketed, target.key)
    agreed = _state.agreement if layers is None else None
    kept = _state.unkept.get(asked) if layers is None else None
    if agreed is not None:
        if not agreed.covers(target):
            return
        kept = None
        if (spec.name, bucketed) in agreed.compiled:
            yield agreed.compiled[spec.name, bucketed]
        target, layers = agreed.target, [agreed.snapshot]
    elif layers is None:
        layers = _state.layers = cache.default_layers() if _state.layers is None else _state.layers
    tools = toolkit()
    found = cache.hits(
        spec.name,
        dict(bucketed),
        bucketed=[d.name for d in spec.dimensions if d.kind == "bucketed"],
        target_key=target.key,
        arch=target.arch,
        toolkit_key=tools.key if tools else None,
        source=source_digest(spec.module),
        layers=layers,
        trace=trace,
        unlikeness=target.unlikeness,
        invariant=(_state.invariant if invariant is None else invariant) and has_rows(spec.name, bucketed),
    )
    for hit in found:
        reason = _misfit(spec, bucketed, target, hit.record)
        if reason is None:
            yield hit
            continue
        _pass_over(hit, reason)
        if trace is not None:
            trace[-1] = trace[-1]._replace(outcome="bad", detail=reason)
    if kept is not None:
        yield kept


def _misfit(spec: KernelSpec, problem: Problem, target: Target, record: Record) -> str | None:
    """Return why a valid record fits no kernel; None if it does."""
    try:
        others = [record.best_kernel.config] if record.best_kernel else []
        if invariant := (record.measurement or {}).get(INVARIANT):
            others.append(invariant["config"])
        for config in (record.config, *others):
            implementation = spec.implement(problem, Config(config))
            implementation.grid(problem, target.sm_count)
            missing = {ALIGNED, GENERIC} - record.artifacts.keys()
            if missing and implementation.makes_artifact:
                return f"it has no {' and no '.join(sorted(missing))} artifact"
    except Exception as error:  # noqa: BLE001 (a config of other fields may raise anything)
        return f"its config does not fit the kernel, {type(error).__name__}: {error}"
    return None


def _pass_over(hit: Hit, reason: object) -> None:
    """Note that a record fits no kernel, and warn once."""
    _state.misfits.add(hit.record.address)
    where = f"{hit.layer.name}: {hit.record.address.path}"
    warn_once(f"{where} is passed over: {reason}; tune it again", about=f"misfit {where}")


def _own_default(spec: KernelSpec, wanted: Problem, target: Target, found: Hit) -> Hit:
    """Return the problem's own default instead of a neighbouring bucket's if that needs no compiler; else ``found``.

    A composite's default depends on its rows: the default for few rows splits many rows into small chunks, and each
    chunk rounds the weight's gradient once more.
    """
    from tilekern import cache

    is_neighbours = found.record.provenance == "default" and not found.exact_bucket
    if not is_neighbours or _state.agreement is not None or miss_policy() != "compile":
        return found
    if not spec.is_library(wanted, spec.default(wanted, target)):
        return found
    try:
        compile_default(spec, wanted, target)
        return find(spec, wanted, target) or found
    except (TilekernError, cache.CacheError, OSError):
        return found


def _on_miss(spec: KernelSpec, wanted: Problem, target: Target, caller: _Caller) -> Hit | None:
    from tilekern import cache
    from tilekern.runtime.data_packages import install_or

    policy = miss_policy()
    if _state.agreement is not None and not _state.agreement.covers(target):
        # It is unknown what the other ranks run on such a GPU, so a record of its own would break the agreement.
        why = f"the ranks agreed on kernels for a {_state.agreement.target.name}, which do not run on a {target.name}"
        if caller.must_raise():
            raise CacheMiss(f"{why}; give each rank GPUs of one architecture")
        warn_once(f"{why}; the model's own op runs there")
        _refuse("a GPU of another architecture than the ranks agreed for")
        return None
    if root := cache.user_root_if_any():
        cache.note_wanted(root, spec.name, dict(wanted), target.describe(), f"not in any cache; policy {policy}")
    tune = f"{install_or(target)}tune it with: python -m tilekern.tune MODEL --gpu {target.option}"
    missing = f"no cache holds {spec.name} for {wanted.key} on {target.name}"
    if policy == "error" or (policy == "fallback" and not caller.has_torch):
        raise CacheMiss(f"{missing}; {tune} ({_compiler_and_driver()})")
    if not caller.has_torch and spec.is_library(wanted, spec.default(wanted, target)):
        raise CacheMiss(f"{missing}, and its default is a call of torch, which takes no other arrays; {tune}")
    why, refusal = "", "no record, and the miss policy fallback"
    if policy == "compile":
        asked = (spec.name, wanted, target.key)
        if asked not in _state.failed:
            # Whatever keeps the step from being foreseen, its calls can compile what they miss.
            with contextlib.suppress(Exception):
                _look_ahead(spec, wanted, target)
            try:
                return _compiled(spec, wanted, target)
            except RanksDiffer:
                raise
            except (TilekernError, cache.CacheError, OSError, MemoryError) as error:
                # Not the error: its traceback would hold the frames of this step, and so their tensors.
                _state.failed[asked] = _Failure(str(error), isinstance(error, ToolchainMissing))
        failure = _state.failed[asked]
        why = f" and its default config could not be compiled ({failure.reason})"
        if not caller.has_torch:
            raise CacheMiss(f"{missing}{why}; {tune}")
        refusal = f"no record, and {'no compiler' if failure.lacks_compiler else 'none was compiled'}"
        if config := _unrecorded_default(spec, wanted, target):
            library = library_of(config)
            default, unless = (f"a call of {library}", "") if library else (config.key, " if its kernels have records")
            warn_once(
                f"no cache holds {spec.name} on {target.name}; its default, {default}, runs{unless}; {tune}",
                about=f"default of {spec.name} on {target.key}",
            )
            return None
    if (spec.name, wanted, target.key) not in _state.told or getattr(_refused, "held", None) is not None:
        _tell_of_own_op(spec, f"no cache holds {spec.name} for this model on {target.name}{why}", tune)
    _refuse(refusal)
    return None


@contextlib.contextmanager
def looking_nothing_up() -> Iterator[None]:
    """Refuse lookups of this thread, which another one waits for that holds the lock; a trace's answers go on."""
    _refused.looks_nothing_up = True
    try:
        yield
    finally:
        _refused.looks_nothing_up = False


def _look_ahead(spec: KernelSpec, wanted: Problem, target: Target) -> None:
    """Begin to compile all that the running step will miss, on all cores; without a compiler say what it is, once."""
    from tilekern.compile.toolchain import toolkit

    if _state.foresight is None or _state.trace is not None:
        return
    goal = target if _state.agreement is None else _state.agreement.target
    if not toolkit():
        asked = (spec.name, wanted, target.key)
        if asked not in _state.told and (foreseen := _state.foresight(target)):
            _tell_of_missing(foreseen, target)
        return
    from tilekern.runtime.defaults import AHEAD

    if not AHEAD.is_coming(spec, wanted, goal) and (foreseen := _state.foresight(target)):
        compile_ahead([(spec, wanted), *foreseen.problems], goal)


def _tell_of_missing(foreseen: Foreseen, target: Target) -> None:
    from tilekern.runtime.data_packages import install_or

    lacking = missing(foreseen.problems, target)
    # A default that a library runs needs no compiler.
    names = sorted({spec.name for spec, _ in lacking})
    if not names:
        return
    _state.told |= {(spec.name, problem, target.key) for spec, problem in lacking}
    cost_s = foreseen.cost_s(names)
    cost = "" if cost_s is None else f", which costs some {1000 * cost_s:.2g} ms of GPU time a step by the bytes moved"
    warn_once(
        f"no cache holds {len(lacking)} of the {len(foreseen.problems)} problems that a step of {foreseen.model} asks "
        f"for on {target.name}, and no compiler is installed; the model's own ops, or other kernels of the same op, "
        f"run for {', '.join(names)}{cost}; "
        f"mend it with: {install_or(target)}pip install 'tilekern[compile]'"
    )


def missing(problems: Iterable[tuple[KernelSpec, Problem]], target: Target) -> list[tuple[KernelSpec, Problem]]:
    """Return the problems, at their buckets, for which a call compiles a default, each once."""
    return [
        (spec, problem)
        for spec, problem in dict.fromkeys(problems)
        if not spec.is_library(problem, spec.default(problem, target))
        and (spec.name, problem, target.key) not in _state.failed
        and find(spec, problem, target) is None
    ]


def compile_ahead(problems: Iterable[tuple[KernelSpec, Problem]], target: Target) -> list[Coming]:
    """Begin to compile the defaults of problems without a record, on all cores; return them.

    A call of such a problem waits for its own one. Other processes with this cache have their turn at what is left out.
    """
    from tilekern.compile.toolchain import require_toolkit
    from tilekern.runtime.defaults import default_in_cache, make_ahead

    key = require_toolkit().key

    def by_another(spec: KernelSpec, problem: Problem) -> Hit | None:
        if _state.agreement is not None:
            return default_in_cache(spec, problem, target, key)
        return find(spec, problem, target)

    return make_ahead(missing(problems, target), target, by_another, misfits=_state.misfits)


def _compiled(spec: KernelSpec, wanted: Problem, target: Target) -> Hit | None:
    """Return the default of a problem, compiled by this process or meanwhile by another."""
    if _state.agreement is None:
        is_ours = compile_default(spec, wanted, target)
    else:
        is_ours = _state.agreement.compile(spec, wanted)
    counters(spec.name).compiled += is_ours
    return find(spec, wanted, target)


def _compiler_and_driver() -> str:
    """Return the toolkit and the driver of this machine, for an error."""
    from tilekern.compile.toolchain import toolkit

    tools = toolkit()
    return f"compiler here: {tools.key if tools else 'none'}; driver: {driver_release() or 'none'}"


def compile_default(spec: KernelSpec, problem: Problem, target: Target) -> bool:
    """Compile both variants of a problem's default config and store it in the user's cache unless it has a better one.

    If the cache cannot be written, this process keeps it. Of several processes that want the same only one compiles.

    Returns:
        Whether it was compiled here, and not meanwhile by another process.

    Raises:
        ToolchainMissing: no compiler is installed.
        CompileFailed: the compiler rejected it, or could not work.
        OSError: the compiler could not be run.
    """
    from tilekern.runtime.defaults import made_default

    def by_another() -> Hit | None:
        found = find(spec, problem, target)
        return found if found is not None and found.exact_target and found.exact_bucket else None

    made, is_ours = made_default(spec, problem, target, by_another, misfits=_state.misfits)
    if by_another() is None:
        _state.unkept[spec.name, problem, target.key] = made
    return is_ours
