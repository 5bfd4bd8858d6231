"""Preflight: lists, before a job starts, the records that it needs, and those that its caches lack.

The problems are those that the job's own steps ask for (:mod:`tilekern.tuning.plan`), and each is looked up as the job
will look it up. So what a preflight calls served is what the job's first call finds. A job that runs in the invariant
mode also needs a kernel of one bit class for each problem that has rows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tilekern.cache import (
    NOT_FRESH,
    PROVENANCES,
    STALE,
    CacheError,
    Hit,
    Layer,
    Store,
    default_layers,
    freshness,
    problem_key,
    user_root,
)
from tilekern.compile.toolchain import Toolkit, require_toolkit
from tilekern.errors import InputError, needing
from tilekern.kernels import spec_named
from tilekern.runtime.dispatch import find
from tilekern.runtime.recorder import Named
from tilekern.runtime.rows import why_varies
from tilekern.runtime.settings import check_settings
from tilekern.spec import INVARIANT, Config, Problem
from tilekern.spec.bits import sizes_of_class
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target, here, resolve
from tilekern.tuning.plan.steps import CONTEXT, Planned, as_tuple, steps_of

if TYPE_CHECKING:
    from tilekern.tuning.pipeline import Options, Tell

EXACT, NEAREST, OTHER_GPU, MISSING = STATES = ("exact", "nearest", "other_gpu", "missing")
# What is asked of a problem's record: that any serves; that it is of the very bucket and GPU; that it was measured.
SERVED, OWN, MEASURED = DEMANDS = ("served", "exact", "measured")
TUNE, COMPILE = WAYS = ("tune", "compile")


@dataclass(frozen=True)
class Need:
    """A problem that the job will ask for, at its buckets, and the record that it will find.

    Attributes:
        kernel: the spec's name.
        problem: its values.
        state: ``exact``; ``nearest``: another bucket's record serves; ``other_gpu``: one of another GPU of the arch
            does; ``missing``.
        provenance: ``measured``, ``predicted`` or ``default``; None where nothing serves.
        serving: the address of the record that serves, ``target/toolkit/kernel/problem``; None where nothing does.
        layer: where that stands.
        is_stale: whether a layer has a record of the very problem that an edit of the kernel made stale.
        why: what kept :func:`fix` from making a record; else None.
        fresh: False where the search space has changed since the record that serves was chosen, so that it is not known
            to be the best; None where nothing serves.
        needs_class: whether the job needs a kernel of one bit class.
        bits: the class of that kernel; None where there is none.
        varies: why the record that serves has no such kernel to run, although the job needs one; else None.
        launches: how often the traced steps launch it by default configs; 0 if only another winner of a composite or of
            a grid would, and None if that is not known.
        unused: whether it is a part of composites whose winners launch others, so that no job asks for it.
    """

    kernel: str
    problem: Problem
    state: str
    provenance: str | None
    serving: str | None
    layer: str | None
    is_stale: bool
    why: str | None = None
    fresh: bool | None = None
    needs_class: bool = False
    bits: str | None = None
    varies: str | None = None
    launches: int | None = None
    unused: bool = False

    def meets(self, demand: str) -> bool:
        """Return whether the record meets a demand, one of :data:`DEMANDS`, and has the bit class that is needed.

        What no job asks for meets any.
        """
        if self.unused:
            return True
        if self.varies:
            return False
        if demand == SERVED:
            return self.state != MISSING
        return self.state == EXACT and (demand == OWN or self.provenance == MEASURED)

    def as_json(self) -> dict[str, Any]:
        """Return the need as ``--json`` prints it."""
        fields = {name: value for name, value in vars(self).items() if name != "is_stale"}
        bucketed = [d.name for d in spec_named(self.kernel).dimensions if d.kind == "bucketed"]
        return fields | {"problem": dict(self.problem), "bucketed": bucketed, "stale": self.is_stale}


@dataclass(frozen=True)
class Share:
    """The share of a step's launches whose problem has a record that serves; launches are from 1 on.

    A layer's kernels count once for each layer. A composite, such as the backward of attention, counts beside the
    kernels that it launches, since without its record none of them runs.

    Attributes:
        launches: all launches of the traced steps.
        by_state: the launches by the state of their problem, one of :data:`STATES`.
        missing: the launches without a record by kernel, most first.
        records: how many records serve; some may serve several problems.
    """

    launches: int
    by_state: Mapping[str, int]
    missing: Mapping[str, int]
    records: int

    @property
    def served(self) -> int:
        """Return the launches whose problem has a record."""
        return self.launches - self.by_state[MISSING]

    @property
    def percent(self) -> int:
        """Return the served share, rounded down, so that 100 means all."""
        return 100 * self.served // self.launches

    def as_json(self) -> dict[str, Any]:
        """Return the share as ``--json`` prints it."""
        return {
            "percent": self.percent,
            "launches": self.launches,
            "served": self.served,
            "by_state": dict(self.by_state),
            "missing": dict(self.missing),
            "records": self.records,
        }


@dataclass(frozen=True)
class Preflight:
    """The needs of a job, in the plan's order, and the demand on them; ``is_here``: the GPU here is the target."""

    model: str
    target: Target
    demand: str
    needs: tuple[Need, ...]
    is_here: bool
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> list[Need]:
        """Return the needs whose record is missing or does not meet the demand."""
        return [need for need in self.needs if not need.meets(self.demand)]

    @property
    def cannot_fix(self) -> str | None:
        """Return why :func:`fix` cannot make the missing records here; None if it can, or none are missing."""
        asks = self.must_be_measured
        if asks is None or self.is_here or not self.missing:
            return None
        return (
            f"no {self.target.name} is here, and {asks} asks for records that were timed on one: --fix cannot "
            "make them on this machine"
        )

    @property
    def must_be_measured(self) -> str | None:
        """Return the option by which missing records must be measured; None if none of them must be."""
        if self.demand == MEASURED:
            return "--need measured"
        return "--invariant" if any(need.needs_class for need in self.missing) else None

    def counts(self) -> dict[str, int]:
        """Return the number of needs by state."""
        found = Counter(need.state for need in self.needs)
        return {name: found[name] for name in STATES}

    @property
    def share(self) -> Share | None:
        """The share of the launches that have a record; None if no launches are known."""
        by_state, missing = Counter(dict.fromkeys(STATES, 0)), Counter[str]()
        for need in self.needs:
            by_state[need.state] += need.launches or 0
            if need.state == MISSING and need.launches:
                missing[need.kernel] += need.launches
        if not by_state.total():
            return None
        records = len({need.serving for need in self.needs if need.serving})
        return Share(by_state.total(), by_state, dict(missing.most_common()), records)

    def provenances(self, state: str | None = None) -> dict[str, int]:
        """Return the number of served needs by provenance, of all states or of one."""
        found = Counter(need.provenance for need in self.needs if state in (None, need.state))
        return {name: found[name] for name in PROVENANCES}

    def invariant_counts(self) -> dict[str, int] | None:
        """Return the number of needs with a bit class and without, of those that need one; None if none does."""
        classes = [need.bits for need in self.needs if need.needs_class]
        return {"with": len(classes) - classes.count(None), "without": classes.count(None)} if classes else None

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "model": self.model,
            "target": self.target.describe(),
            "need": self.demand,
            "invariant": self.invariant_counts(),
            "complete": not self.missing,
            "counts": self.counts(),
            "provenances": self.provenances(),
            "share": share.as_json() if (share := self.share) else None,
            "problems": [need.as_json() for need in self.needs],
            "missing": [need.as_json() for need in self.missing],
            "cannot_fix": self.cannot_fix,
            "notes": list(self.notes),
        }


@needing("tilekern.preflight")
def preflight(
    config: Any, tokens: int | Sequence[int] | None = None, *, gpu: str = "auto", sequence: int | Sequence[int] = (),
    dtype: Any = ("bfloat16",), ops: str | Sequence[str] | None = None,
    attention: str | Sequence[str] = ("tilekern",),
    tp: int = 1, packed: bool = False, padded: bool = False, checkpointing: bool = False, optimizer: str = "adamw",
    experts: bool = False, fp8: bool | str = False, decode: int | Sequence[int] | None = None,
    context: int | Sequence[int] = CONTEXT,
    chunk: int | Sequence[int] = (), paged: bool = False, invariant: bool = False, engine: bool = False,
    weight_dtype: str | None = None, need: str = SERVED, cache_dir: str | Path | None = None,
) -> Preflight:  # fmt: skip
    """List the records that a job will need, and whether the caches have them; nothing is written, compiled or
    launched.

    Args:
        config: what the job trains: a preset's name, the path of a config.json, a hub id, a configuration of
            transformers or its dictionary, all of which are patched for this; a model, which is asked as it is; or a
            traced plan (:func:`tilekern.trace`) or its file, to which none of the arguments down to ``paged``
            applies. Of a model, the lengths and whether they are packed or padded count.
        tokens: tokens of a step, batch times sequence; by default 2048 and 8192, for an engine none. One number or
            several, as ``sequence``, ``dtype``, ``ops`` and ``attention`` are one or several.
        gpu: the GPU that the job will run on: ``auto`` (the one here), a name, an arch or a key.
        sequence: tokens of a sequence; a step is one sequence where none is given.
        dtype: the dtypes to train in: ``bfloat16`` or ``bf16``, ``float16`` or ``fp16``, ``float32`` or ``fp32``, or
            torch's own.
        ops: the ops of the job, ``attention`` and ``adamw`` among them; all where None.
        attention: the names of ``attn_implementation``.
        tp: the tensor-parallel degree.
        packed: whether sequences are packed into a batch of one.
        padded: whether they are padded to one length, with a mask.
        checkpointing: whether activations are made again in the backward.
        optimizer: ``adamw`` or ``none``.
        fp8: the format of 8-bit floats of linear layers and experts, as ``apply(fp8=...)`` has it; or False.
        experts: whether layers of experts run tilekern's, as ``apply(experts=True)`` has it.
        decode: how many sequences generation decodes at once, one number or several; by default none, for an engine 1.
        context: tokens of a decoded sequence, the new one included.
        chunk: tokens of a prompt that are computed at once, where prompts are computed in chunks too.
        paged: whether tokens are decoded by transformers' ``generate_batch`` too.
        invariant: whether the job also runs in the invariant mode, ``apply(invariant=True)``. Each problem that has
            rows there must have a kernel of one bit class, the same at all its sizes.
        engine: whether the job runs the engine of :mod:`tilekern.inference`, by the config that is given, in place of
            training. The arguments from ``ops`` to ``experts`` and ``paged`` then do not apply.
        weight_dtype: ``int8`` for an engine with int8 weights; by default they are in ``dtype``.
        need: what is asked of a problem's record: ``served`` by any, ``exact``: of the very bucket and GPU,
            ``measured``: there and measured.
        cache_dir: the cache that stands in for the user's; further layers are read as ever.

    Raises:
        InputError: anything that was named is not known, a step cannot be traced, or it asks for no kernel.
    """
    check_settings()
    steps = steps_of(
        tokens=as_tuple(tokens), sequence=as_tuple(sequence), dtype=as_tuple(dtype), ops=as_tuple(ops),
        attention=as_tuple(attention), tp=tp, packed=packed, padded=padded, checkpointing=checkpointing,
        optimizer=optimizer, experts=experts, fp8=fp8, decode=as_tuple(decode), context=as_tuple(context),
        chunk=as_tuple(chunk), paged=paged, invariant=invariant, engine=engine, weight_dtype=weight_dtype,
    )  # fmt: skip
    target = resolve(gpu)
    from tilekern.tuning.plan.choosing import plan_of_anything

    planned = plan_of_anything(config, steps, target, user_root())
    return preflight_of(planned, target, need, cache_dir)


def preflight_of(
    planned: Planned, target: Target, need: str = SERVED, cache_dir: str | Path | None = None
) -> Preflight:
    """List the records that a plan's problems will need; arguments as of :func:`preflight`.

    Raises:
        InputError: no such ``need``.
    """
    if need not in DEMANDS:
        raise InputError(f"unknown need {need!r}; known: {', '.join(DEMANDS)}")
    layers = _layers(cache_dir)
    needs = _needs(planned.problems, target, layers, planned.invariant, planned.launches, need)
    at_hand = here()
    is_here = at_hand is not None and at_hand.key == target.key
    return Preflight(planned.name, target, need, needs, is_here, planned.notes)


def without_served(planned: Planned, target: Target, cache_dir: str | Path | None = None) -> Planned:
    """Return a plan without the problems whose records the caches have: measured ones if the GPU is here, else any.

    A problem that shares its bit class with a missing one stays, as all sizes of a class are tuned at once.
    """
    at_hand = here()
    found = preflight_of(planned, target, MEASURED if at_hand and at_hand.key == target.key else OWN, cache_dir)
    left = set(_to_tune(found)[0])
    problems = tuple(named for named in planned.problems if named in left)
    note = f"{len(planned.problems) - len(problems)} of {len(planned.problems)} problems have their records"
    return dataclasses.replace(planned, problems=problems, notes=(*planned.notes, note))


def fix(
    found: Preflight, by: str = TUNE, *, cache_dir: str | Path | None = None, jobs: int | None = None,
    gpus: int | None = None, timeout_s: float | None = None, tell: Tell = lambda *_: None,
) -> Preflight:  # fmt: skip
    """Make the missing records, put them into the cache, and look again.

    If a problem has no bit class, all sizes that share its class are tuned at once, those that have a record too.

    Args:
        found: what a preflight found.
        by: ``tune``: as the tuner does, measured where the GPU is here, else predicted; ``compile``: the default config
            of each problem, as a miss of the job would.
        cache_dir: the cache to fill; the user's where None.
        jobs: compile workers; one for each core where None.
        gpus: how many GPUs to measure on at most.
        timeout_s: seconds that one compile may take; as the tuner's where None.
        tell: told the stage at work, and how much of how many is done in it.

    Raises:
        InputError: the demand cannot be met in this way or here, the cache cannot be written or is held by a tuner.
        ToolchainMissing: no compiler is installed.
        tilekern.cache.CacheError: the cache cannot be written.
    """
    if not found.missing:
        return found
    tools = require_fixable(found, by)
    named, classed = _to_tune(found)
    root = Path(cache_dir or user_root())
    from tilekern.tuning.pipeline import TIMEOUT_S, Options
    from tilekern.tuning.serve.loop import tune
    from tilekern.tuning.serve.watched import PREDICTED, WatchedCache

    options = Options(jobs=jobs, gpus=gpus, timeout_s=timeout_s or TIMEOUT_S)
    if by == COMPILE:
        failed = _compile(named, found.target, root, options, tell)
    else:
        cache = WatchedCache(root, found.target, tools.key, MEASURED if found.is_here else PREDICTED)
        with cache.held():
            done = tune(cache, named, options, tell, classed)
        failed = {pair: result for pair, result in done.items() if isinstance(result, str)}
    launches = {(need.kernel, need.problem): need.launches for need in found.needs}
    again = _needs(launches, found.target, _layers(cache_dir), _classed(found), launches, found.demand, failed)
    return dataclasses.replace(found, needs=again)


def _classed(found: Preflight) -> set[Named]:
    """Return the problems that need a kernel of one bit class."""
    return {(need.kernel, need.problem) for need in found.needs if need.needs_class}


def _to_tune(found: Preflight) -> tuple[list[Named], set[Named]]:
    """Return the missing problems with all that share the bit class of one of them, and those that need a class."""
    missing, classed = {(need.kernel, need.problem) for need in found.missing}, _classed(found)
    sizes = {named: sizes_of_class(spec_named(named[0]), named[1]) for named in classed}
    lacking = {sizes[named] for named in missing & classed}
    problems = ((need.kernel, need.problem) for need in found.needs)
    named = [pair for pair in problems if pair in missing or (pair in classed and sizes[pair] in lacking)]
    return named, classed.intersection(named)


def require_fixable(found: Preflight, by: str) -> Toolkit:
    """Refuse a :func:`fix` that cannot do what is asked, before it begins; return the compiler.

    Raises:
        InputError: the demand cannot be met in this way or here.
        ToolchainMissing: no compiler is installed.
    """
    if found.cannot_fix:
        raise InputError(f"{found.cannot_fix}; run it where the GPU is, or ask for less")
    if (asks := found.must_be_measured) and by == COMPILE:
        raise InputError(f"--by compile measures nothing, and {asks} asks for that; leave --by out")
    return require_toolkit()


def _compile(
    named: Sequence[Named], target: Target, root: Path, options: Options, tell: Tell
) -> dict[Named, str]:  # fmt: skip
    """Put the default config of each problem into a cache; return the reasons of those that failed."""
    from tilekern.tuning.pipeline import Pipeline
    from tilekern.tuning.sweep.folder import Sweep, folder_in

    sweep = Sweep(folder_in(root, f"preflight-{target.key}-{require_toolkit().key}"))
    defaults = {(kernel, problem): [spec_named(kernel).default(problem, target)] for kernel, problem in named}
    sweep.begin(target, "preflight", named, defaults)
    pipeline = Pipeline(sweep, Store(root), dataclasses.replace(options, stages=("compile",)), tell)
    pipeline.work()
    # Nothing was chosen: the only candidate is the heuristic's.
    chosen: dict[str, Any] = {"provenance": "default", "prediction": None, "runners_up": []}
    for winner, blobs in (found := pipeline.winners()):
        pipeline.store.write(msgspec.structs.replace(winner.record, **chosen), blobs)
    made = {(winner.kernel, winner.problem) for winner, _ in found}
    return {pair: pipeline.why_not(*pair) for pair in named if pair not in made}


def _layers(cache_dir: str | Path | None) -> list[Layer]:
    return default_layers(Path(cache_dir) if cache_dir else None, looking=True)


def _needs(
    problems: Iterable[Named], target: Target, layers: Sequence[Layer], invariant: Collection[Named],
    launches: Mapping[Named, int | None], demand: str, failed: Mapping[Named, str] | None = None,
) -> tuple[Need, ...]:  # fmt: skip
    classes: dict[tuple[Any, ...], str] = {}
    found = {
        named: _need(*named, target, layers, (failed or {}).get(named), classes if named in invariant else None)
        for named in problems
    }
    # A plan that knows launches has none of the problems that only another winner asks for.
    unknown = 0 if launches else None
    found = {named: dataclasses.replace(need, launches=launches.get(named, unknown)) for named, need in found.items()}
    if any(need.launches == 0 and not need.meets(demand) for need in found.values()):
        for named in _unused(found, target, layers, demand, invariant):
            found[named] = dataclasses.replace(found[named], unused=not found[named].launches)
    return tuple(found.values())


def _unused(
    needs: Mapping[Named, Need], target: Target, layers: Sequence[Layer], demand: str, invariant: Collection[Named]
) -> Iterable[Named]:
    """Return the parts of composites that no winner launches; all parts are raced where a composite has no record."""
    from tilekern.tuning.plan.choosing import parts_of, with_parts

    parts, used = set(), set()
    for named, need in needs.items():
        own = set(with_parts([named], target)) - {named}
        hit = None
        if own and need.meets(demand):
            hit = find(spec_named(need.kernel), need.problem, target, layers=layers, invariant=named in invariant)
        used |= own if hit is None else set(parts_of(named, Config(hit.record.config), target))
        parts |= own
    return needs.keys() & (parts - used)


def _need(
    kernel: str, problem: Problem, target: Target, layers: Sequence[Layer], why: str | None,
    classes: dict[tuple[Any, ...], str] | None,
) -> Need:  # fmt: skip
    """Return the need of a problem.

    ``classes`` are the bit classes that run, by sizes, and None if it needs none.
    """
    spec = spec_named(kernel)
    hit = find(spec, problem, target, layers=layers, invariant=classes is not None)
    is_stale = (hit is None or _state(hit) != EXACT) and _has_stale(kernel, problem, target, layers)
    needs_class, bits, varies = False, None, None
    if classes is not None:
        # The kernels that a composite launches need a class, each by itself; another spec's may serve instead.
        config = spec.default(problem, target) if hit is None else Config(hit.record.config)
        needs_class = not spec.implement(problem, config).composite and sizes_of_class(spec, problem)[0] == kernel
        if needs_class and hit is not None:
            varies = why_varies(spec, problem, hit, classes, None) or None
            bits = None if varies else (hit.record.measurement or {})[INVARIANT]["bits"]
    if hit is None:
        return Need(kernel, problem, MISSING, None, None, None, is_stale, why, needs_class=needs_class)
    return Need(
        kernel, problem, _state(hit), hit.record.provenance, "/".join(hit.record.address), hit.layer.name, is_stale,
        why, hit.fresh, needs_class, bits, varies,
    )  # fmt: skip


def _state(hit: Hit) -> str:
    if not hit.exact_target:
        return OTHER_GPU
    return EXACT if hit.exact_bucket else NEAREST


def _has_stale(kernel: str, problem: Problem, target: Target, layers: Sequence[Layer]) -> bool:
    today = source_digest(spec_named(kernel).module)
    for layer in layers:
        for tools in layer.toolkits(target.key):
            try:
                record = layer.read_record(target.key, tools, kernel, dict(problem))
            except CacheError:
                continue
            if freshness(record, today) == STALE:
                return True
    return False


def share_line(found: Preflight) -> str | None:
    """Describe the share of the launches that have a record in one line for people; None if none are known."""
    share = found.share
    if share is None:
        return None
    states = ", ".join(
        f"{share.by_state[state]:,} {state.replace('_', ' ')}" for state in STATES[:-1] if share.by_state[state]
    )
    line = f"{share.percent} % of {share.launches:,} launches have a record{f': {states}' * bool(states)}"
    served = sum(need.state != MISSING for need in found.needs)
    if share.records < served:
        records = "1 record serves" if share.records == 1 else f"{share.records:,} records serve"
        line += f" ({records} {served:,} problems)"
    if share.missing:
        rest = ", ".join(f"{kernel} {number:,}" for kernel, number in share.missing.items())
        line += f"; the other {share.by_state[MISSING]:,}: {rest}"
    if idle := sum(need.state == MISSING and not need.launches for need in found.needs):
        line += f"; {idle} missing problem{'s' * (idle != 1)} only with another winner"
    return line


def line_of(need: Need) -> str:
    """Describe a missing record in one line for people."""
    state = f"{need.state}, {need.provenance}" if need.provenance else need.state
    stale = "; there is one, which an edit of the kernel made stale" if need.is_stale else ""
    dated = f"; {NOT_FRESH}" if need.fresh is False else ""
    varies = f"; no bit class: {need.varies}" if need.varies else ""
    why = f"; {need.why}" if need.why else ""
    return f"{need.kernel} {problem_key(dict(need.problem))}: {state}{stale}{dated}{varies}{why}"
