"""Keeps the figures of records that an edit made stale and whose machine code is what it was.

A record is stale when the digest of its kernel's source differs, although the edit may change nothing that it runs, as
where a helper is renamed. So the front end lowers each of its configs anew. Where that gives the bytecode that an
artifact was assembled from, the artifact is today's. Where it does not, or the record does not say, the config is
compiled, and the artifact is today's if it has the same machine code, constants and needs of the GPU. A record whose
artifacts are all today's goes on with today's digest. Its figures, its check and its date stay, and the figures say in
``carried_over`` that they were carried.

Some of what the digest covers is not in the artifacts:

- A library's call, or a composite's sequence of launches, is Python. That it is the same must be said (``same_calls``).
  A composite is also as good as the parts that it launches: each of them must have a record of today.
- The number of blocks is worked out at the launch, and records do not hold it. An edit of that needs another tune.
- Whether the space is still the one that the winner was the best of is told by its size and by the configs that the
  record names. If either differs, the new record is not known to be the best. A refresh tries only some candidates, so
  the size of a refreshed record's space must be said (``same_spaces``).

A record that is carried over into another space is dated: it serves as before, and is not known to be the best. One of
a kernel's default, which has no figures, is carried over if its config is today's default.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tilekern import __version__
from tilekern.cache import (
    FRESH,
    SCHEMA,
    STALE,
    Address,
    Artifact,
    CacheError,
    FolderLayer,
    Record,
    Store,
    freshness,
    write_pack,
)
from tilekern.cache.packs.pack import Pack
from tilekern.compile.cubin import code_of, constants_of, read_resources
from tilekern.kernels import all_specs
from tilekern.runtime.records import launch_in
from tilekern.runtime.workers.pool import FRONTEND_TIMEOUT_S, MEMORY_BYTES, Answer, Lost
from tilekern.spec import Config, KernelSpec, Problem, variant_of
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target, of_key
from tilekern.tuning.compile.order import Order
from tilekern.tuning.compile.pool import compile_in_order
from tilekern.tuning.compile.stage import TIMEOUT_S, compile_unless_same
from tilekern.tuning.plan.choosing import parts_of
from tilekern.tuning.sweep.candidates import Candidate, candidate, candidates

# Where a record's figures say that they were carried over: the first time, which names the source that was measured,
# and the last time with how often that was done.
HISTORY = "carried_over"
# A record with the bytes of its artifacts by sha256.
Held = tuple[Record, Mapping[str, bytes]]
# The keys of a GPU and of a toolkit, a kernel, and the exact sizes of its problem.
_Part = tuple[str, str, str, frozenset[tuple[str, Any]]]


@dataclass(frozen=True)
class Left:
    """A record that stays stale, and why."""

    record: Record
    reason: str


@dataclass
class Carried:
    """Outcome for the records of a pack or a cache.

    ``carried`` holds each old record with the new one and its artifacts; ``current`` counts those of today's source.
    """

    carried: list[tuple[Record, Held]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    current: int = 0
    compiled: int = 0

    def fresh(self, new: Record) -> bool:
        """Return whether a new record is known to be the best, too."""
        return freshness(new, source_digest(new.module)) == FRESH


@dataclass(frozen=True)
class _Plan:
    """A stale record as today's source would make it, and the candidates of its artifacts."""

    record: Record
    blobs: Mapping[str, bytes]
    spec: KernelSpec
    problem: Problem
    target: Target
    items: Mapping[str, Candidate]


def carry_over(
    places: Sequence[Sequence[Held]], toolkit_key: str, jobs: int, *, same_calls: bool = False,
    same_spaces: bool = False, progress: Callable[[int, int], None] | None = None,
) -> list[Carried]:  # fmt: skip
    """Carry over the records of packs and caches whose machine code is the same; write nothing.

    Args:
        places: the records of each with their artifacts. A composite's parts may be in any of them, as lookups find
            them in all that are installed.
        toolkit_key: the toolkit that is installed; records of another one stay as they are.
        jobs: compile workers.
        same_calls: whether libraries are called, and composites launch their parts, as when the records were made.
        same_spaces: whether the search spaces are those of the records' sources.
        progress: called with the number of artifacts that are lowered or compiled, and of all.

    Returns:
        The outcome for each place.
    """
    outcomes, today = [Carried() for _ in places], set[_Part]()
    plans: list[tuple[Carried, _Plan]] = []
    for held, found in zip(places, outcomes, strict=True):
        for record, blobs in held:
            plan = _planned(record, blobs, toolkit_key, same_calls=same_calls)
            if plan is None:
                found.current += 1
                today.add(_part(record.address, record.kernel, record.problem))
            elif isinstance(plan, Left):
                found.left.append(plan)
            else:
                plans.append((found, plan))
    made = _compiled([plan for _, plan in plans], jobs, progress)
    addresses = {
        id(found): {record.address for record, _ in held} for found, held in zip(outcomes, places, strict=True)
    }
    # Composites last, when it is known which of their parts are of today.
    for found, plan in sorted(plans, key=lambda pair: _is_composite(pair[1])):
        found.compiled += sum(not _is_same(made[item.artifact]) for item in plan.items.values())
        reason = _difference(plan, made) or _missing_part(plan, today) or _clash(plan, addresses[id(found)])
        if reason:
            found.left.append(Left(plan.record, reason))
        else:
            found.carried.append((plan.record, _carried(plan, made, same_spaces=same_spaces)))
            today.add(_part(plan.record.address, plan.spec.name, plan.problem))
    return outcomes


def _planned(record: Record, blobs: Mapping[str, bytes], toolkit_key: str, *, same_calls: bool) -> _Plan | Left | None:
    """Return how to make a record's artifacts anew, or why that proves nothing; None if the record is of today."""
    spec = all_specs().get(record.kernel)
    if spec is None:
        is_ours = record.module.startswith("tilekern.")
        how = "this version of tilekern does not have the kernel"
        return Left(record, how if is_ours else f"it is of the module {record.module}; pass --specs {record.module}")
    if freshness(record, source_digest(spec.module)) != STALE:
        return None
    problem, target = _problem_today(spec, record.problem), of_key(record.target["key"])
    if problem is None:
        return Left(record, "its problem has other dimensions today")
    if target is None:
        return Left(record, f"its GPU {record.target['key']} is not known here")
    if reason := next(_objections(record, spec, problem, target, toolkit_key, same_calls=same_calls), None):
        return Left(record, reason)
    items = {
        variant: candidate(spec.name, problem, Config(artifact.config), variant_of(variant), target)
        for variant, artifact in record.artifacts.items()
    }
    return _Plan(record, blobs, spec, problem, target, items)


def _objections(
    record: Record, spec: KernelSpec, problem: Problem, target: Target, toolkit_key: str, *, same_calls: bool
) -> Iterator[str]:  # fmt: skip
    """Yield the reasons why the machine code cannot prove that a stale record is still right."""
    if record.toolkit["key"] != toolkit_key:
        yield f"{record.toolkit['key']} made it, and {toolkit_key} is installed"
    try:
        winner, compiled = Config(record.config), _configs(record.artifacts)
    except TypeError as error:
        yield f"its config cannot be read: {error}"
        return
    if any(spec.space.of(problem, config) is None for config in (winner, *compiled)):
        yield "its config has other parameters today"
        return
    if record.provenance == "default" and winner != spec.default(problem, target):
        yield "today's default is another config; a job or a preflight compiles it"
    if any(spec.is_library(problem, config) for config in compiled):
        yield "a library runs today what a kernel ran"
    if spec.is_library(problem, winner) and not same_calls:
        yield "a library or a composite runs it, whose code cannot be compared; see --same-calls"
    if not record.artifacts and not spec.is_library(problem, winner):
        yield "it has no artifacts"


def _configs(artifacts: Mapping[str, Artifact]) -> list[Config]:
    return [Config(artifact.config) for artifact in artifacts.values()]


def _problem_today(spec: KernelSpec, values: Mapping[str, Any]) -> Problem | None:
    """Return a record's problem with new flags off; None if its dimensions have changed."""
    return spec.problem_of(spec.with_flags_off(values))


def _compiled(
    plans: Sequence[_Plan], jobs: int, progress: Callable[[int, int], None] | None
) -> dict[str, Answer | Lost]:
    """Compile the artifacts of some plans, each once; return outcomes by key."""
    by_target: dict[str, dict[str, Candidate]] = {}
    known: dict[str, set[str | None]] = {}
    targets = {plan.target.key: plan.target for plan in plans}
    for plan in plans:
        for variant, item in plan.items.items():
            known.setdefault(item.artifact, set()).add(plan.record.artifacts[variant].bytecode)
            by_target.setdefault(plan.target.key, {})[item.artifact] = item
    # Records that share an artifact today may have had different bytecode; then none is compared.
    agreed = {key: next(iter(found)) for key, found in known.items() if len(found) == 1}
    bytecodes = {key: found for key, found in agreed.items() if found is not None}
    made: dict[str, Answer | Lost] = {}
    for key, items in by_target.items():
        compiles = functools.partial(
            compile_unless_same, target=targets[key], timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES, known=bytecodes
        )
        limit_s, order = TIMEOUT_S + FRONTEND_TIMEOUT_S, Order(list(items.values()))
        for answer in compile_in_order(order, compiles, min(jobs, len(items)), limit_s, MEMORY_BYTES):
            made[answer.item.artifact if isinstance(answer, Lost) else answer.line["key"]] = answer
            if progress:
                progress(len(made), len(known))
    return made


def _difference(plan: _Plan, made: Mapping[str, Answer | Lost]) -> str | None:
    """Return how a record's artifacts differ from today's; None if all are the same."""
    for variant, item in plan.items.items():
        answer, before = made[item.artifact], plan.record.artifacts[variant]
        if _is_same(answer):
            continue
        if isinstance(answer, Lost) or answer.cubin is None:
            reason = answer.reason if isinstance(answer, Lost) else answer.line["reason"]
            return f"{variant}: it does not compile any more: {reason}"
        try:
            old = _runs(plan.blobs[before.sha256], before.symbol)
        except Exception as error:  # noqa: BLE001 (the reader of ELF files raises anything on a file that is none)
            return f"{variant}: its artifact cannot be read: {error}"
        new = _runs(answer.cubin, answer.line["symbol"])
        if differing := [name for name in old if old[name] != new[name]]:
            return f"{variant}: other {' and '.join(differing)} than before"
    return None


def _is_same(answer: Answer | Lost) -> bool:
    """Return whether a candidate was lowered to the bytecode of its artifact."""
    return isinstance(answer, Answer) and answer.line["status"] == "same"


def _runs(cubin: bytes, symbol: str) -> dict[str, Any]:
    return {
        "machine code": code_of(cubin, symbol),
        "constants": constants_of(cubin, symbol),
        "needs of the GPU": read_resources(cubin, symbol),
    }


def _is_composite(plan: _Plan) -> bool:
    return plan.spec.implement(plan.problem, Config(plan.record.config)).composite


def _missing_part(plan: _Plan, today: Container[_Part]) -> str | None:
    """Return the first part of a composite's winner that has no record of today; None if all have one."""
    if not _is_composite(plan):
        return None
    for kernel, problem in parts_of((plan.spec.name, plan.problem), Config(plan.record.config), plan.target):
        if _part(plan.record.address, kernel, problem) not in today:
            return f"its part {kernel} {problem.key} has no record of today here"
    return None


def _part(address: Address, kernel: str, problem: Mapping[str, Any]) -> _Part:
    """Return how a composite's parts are found.

    By their exact sizes, as a neighbouring bucket's record serves, too. A part's flags are not the composite's: the
    head of a model with capped logits launches no other part than capped.
    """
    exact = (dimension.name for dimension in all_specs()[kernel].dimensions if dimension.kind in ("exact", "dtype"))
    return *address[:2], kernel, frozenset((name, problem[name]) for name in exact)


def _clash(plan: _Plan, addresses: Container[Address]) -> str | None:
    moved = msgspec.structs.replace(plan.record, problem=dict(plan.problem))
    is_other = moved.address != plan.record.address and moved.address in addresses
    return f"a record of {plan.problem.key} is there already" if is_other else None


def _carried(plan: _Plan, made: Mapping[str, Answer | Lost], *, same_spaces: bool) -> Held:
    """Return a record with today's digests and artifacts, and its old figures."""
    record, blobs, artifacts = plan.record, {}, {}
    for variant, item in plan.items.items():
        answer = made[item.artifact]
        assert isinstance(answer, Answer)
        if _is_same(answer):
            artifacts[variant] = record.artifacts[variant]
            blobs[record.artifacts[variant].sha256] = plan.blobs[record.artifacts[variant].sha256]
            continue
        assert answer.cubin is not None
        digest = hashlib.sha256(answer.cubin).hexdigest()
        blobs[digest] = answer.cubin
        artifacts[variant] = msgspec.structs.replace(
            record.artifacts[variant], sha256=digest, size=len(answer.cubin), symbol=answer.line["symbol"],
            assumptions=answer.line["assumptions"], resources=answer.line["resources"],
            launch=launch_in(answer.line.get("launch")), compiler=answer.line.get("compiler"),
            bytecode=answer.line.get("bytecode"),
        )  # fmt: skip
    today = source_digest(plan.spec.module)
    is_same = record.provenance == "default" or _is_same_space(
        plan, promised=same_spaces and record.space_digest == record.source_digest
    )
    return msgspec.structs.replace(
        record,
        schema=SCHEMA,
        module=plan.spec.module,
        problem=dict(plan.problem),
        source_digest=today,
        space_digest=today if is_same else record.space_digest,
        artifacts=artifacts,
        **_with_history(record, "identical machine code"),
    ), blobs


def _with_history(record: Record, reason: str) -> dict[str, Any]:
    """Return a record's figures by field, with a note that they were carried over; a default has none.

    Of the notes before, the first stays. A record of an earlier version may have all, and nothing of their number.
    """
    name, figures = ("measurement", record.measurement) if record.measurement else ("prediction", record.prediction)
    before = figures.get(HISTORY, []) if figures else []
    step = {
        "because": reason,
        "source_digest": record.source_digest,
        "space_digest": record.space_digest,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "created_by": f"tilekern {__version__}",
        "times": 1 + (before[-1].get("times", len(before)) if before else 0),
    }
    return {name: {**figures, HISTORY: [*before[:1], step]}} if figures else {}


def _is_same_space(plan: _Plan, *, promised: bool) -> bool:
    """Return whether today's space has the number of candidates that were tried, and all configs of the record.

    A tune without an optional backend tries none of its candidates, and one without bit classes none that are for them.
    The number does not count if the space is ``promised`` to be the same.
    """
    spaces = (candidates(plan.spec.name, plan.problem, plan.target, for_bits=for_bits) for for_bits in (False, True))
    return any(_is_of(plan.record, found, promised=promised) for found in spaces)


def _is_of(record: Record, found: Sequence[Candidate], *, promised: bool) -> bool:
    """Return whether these candidates, all or without optional backends, are as many as were tried."""
    known = {item.config for item in found}
    optional = Counter(item.backend.name for item in found if item.backend.is_optional)
    tried = {
        len(found) - sum(left_out)
        for count in range(len(optional) + 1)
        for left_out in itertools.combinations(optional.values(), count)
    }
    try:
        return (promised or record.candidates in tried) and known.issuperset(_named_configs(record))
    except TypeError:  # values that no config can have
        return False


def _named_configs(record: Record) -> Iterator[Config]:
    yield Config(record.config)
    yield from _configs(record.artifacts)
    yield from (Config(one["config"]) for one in record.runners_up if isinstance(one, dict) and "config" in one)
    if record.best_kernel:
        yield Config(record.best_kernel.config)


def held_in_pack(path: Path) -> list[Held]:
    """Return the records of a pack with their artifacts.

    Raises:
        tilekern.cache.CacheError: the pack is not sound, or another version of tilekern wrote a record of it.
    """
    pack = Pack(path)
    found: list[Held] = []
    for address in pack.records:
        record = pack.read_record(address)
        found.append((record, {digest: pack.read_blob(digest) for digest in record.digests}))
    return found


def held_in_cache(root: Path) -> list[Held]:
    """Return the records of a cache with their artifacts, but for bad and untrusted ones."""
    layer = FolderLayer(root, str(root), as_use=False)
    found: list[Held] = []
    for target_key in layer.targets():
        for toolkit_key in layer.toolkits(target_key):
            for kernel in layer.kernels(target_key, toolkit_key):
                for problem in layer.problems(target_key, toolkit_key, kernel):
                    with contextlib.suppress(CacheError):
                        record = layer.read_record(target_key, toolkit_key, kernel, problem)
                        found.append((record, {digest: layer.read_blob(digest) for digest in record.digests}))
    return found


def write_to_pack(path: Path, held: Sequence[Held], found: Carried) -> int:
    """Replace a pack by one with the carried records; return how many of these had signatures.

    Signatures of the other records stay. A record that was carried over is another text, which has to be signed anew.

    Raises:
        tilekern.cache.CacheError: it cannot be written.
    """
    signatures, replaced = Pack(path).signatures(), {id(old): new for old, new in found.carried}
    write_pack(path, [replaced.get(id(record), (record, blobs)) for record, blobs in held], signatures)
    return sum(hashlib.sha256(old.data).hexdigest() in signatures for old, _ in found.carried)


def write_to_cache(store: Store, found: Carried) -> None:
    """Write the carried records into their cache.

    Raises:
        tilekern.cache.CacheError: it cannot be written.
    """
    for _, (record, blobs) in found.carried:
        store.write(record, blobs)
