"""The lookup: which record serves a problem on a target, among all layers.

Order of preference, strongest first:

- the exact target before other GPUs of the same arch, the most similar first;
- in the invariant mode, a record with a kernel of a bit class before one without;
- the problem's own bucket before the nearest one;
- a record of today's search space before one of another space, unless the latter has the stronger provenance;
- an earlier layer before a later one;
- the toolkit installed here before the newest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord, UnknownSchema, Untrusted
from tilekern.cache.freshness import DATED, FRESH, NOT_FRESH, STALE, freshness, has_class
from tilekern.cache.keys import Value, problem_key
from tilekern.cache.layers import Layer
from tilekern.cache.records import PROVENANCES, Record
from tilekern.cache.trust.policy import must_be_signed
from tilekern.spec.kernel_spec import INVARIANT
from tilekern.warning import warn_once


@dataclass(frozen=True)
class Hit:
    """A record that serves a problem, with the bytes of its artifacts, whose digests were checked.

    Attributes:
        record: the record.
        layer: the layer that has it.
        exact_target: False if it was made for another GPU of the same arch.
        exact_bucket: False if it was made for other bucketed sizes.
        blobs: its artifacts by sha256.
        fresh: False if the search space has changed since, so that it is not known to be the best.
        lost: why the artifact of its invariant kernel cannot be loaded; empty if it can, or there is none. The others
            can always be loaded.
    """

    record: Record
    layer: Layer
    exact_target: bool
    exact_bucket: bool
    blobs: Mapping[str, bytes] = field(repr=False)
    fresh: bool = True
    lost: str = ""

    def load(self, variant: str) -> bytes:
        """Return the artifact of a variant, for example ``aligned``.

        Raises:
            CacheError: the record has no such variant, or it is ``lost``.
        """
        artifact = self.record.artifacts.get(variant)
        if artifact is None:
            raise CacheError(
                f"{self.record.kernel} has the variants {', '.join(self.record.artifacts)}, not {variant!r}"
            )
        if artifact.sha256 not in self.blobs:
            raise CacheError(self.lost)
        return self.blobs[artifact.sha256]

    def in_layer(self, layer: Layer) -> Hit:
        """Return the same of another layer."""
        return replace(self, layer=layer)


# How a step begins whose record is not passed over; those that are kept serve if no better one does.
_VERBS = {"taken": "", **dict.fromkeys(("dated", "weaker", "classless"), "kept for later, ")}


class Step(NamedTuple):
    """One record that a lookup tried, and the outcome.

    Attributes:
        layer: the layer's name; None if the step is about all layers.
        target_key: the GPU; ``sm_90-*`` if the step is about all other GPUs of an arch.
        toolkit_key: the toolkit; None if the layer has none for this GPU.
        problem: the problem of the record; None if there was no record to try.
        outcome: ``taken``, ``not_there``, ``stale``, ``dated`` (taken only if nothing is fresh), ``weaker`` (fresh,
            but of a weaker provenance than a dated one), ``classless`` (taken only if no other record of the GPU has
            an invariant kernel), ``unknown_schema``, ``untrusted``, ``bad``, ``no_records`` (the layer has none for
            this GPU, or no layer has another GPU of the arch) or ``no_other_bucket``.
        detail: the outcome in words.
    """

    layer: str | None
    target_key: str
    toolkit_key: str | None
    problem: dict[str, Value] | None
    outcome: str
    detail: str

    def __str__(self) -> str:
        parts = (self.target_key, self.toolkit_key, self.problem and problem_key(self.problem))
        where = "/".join(part for part in parts if part)
        verb = _VERBS.get(self.outcome, "passed over, ")
        return f"{self.layer or 'all layers'}: {where}: {verb}{self.detail}"


@dataclass(frozen=True)
class _Candidate:
    layer: Layer
    target_key: str
    toolkit_key: str
    problem: dict[str, Value]

    def step(self, outcome: str, detail: str) -> Step:
        return Step(self.layer.name, self.target_key, self.toolkit_key, self.problem, outcome, detail)


def lookup(kernel: str, problem: Mapping[str, Value], **options: Any) -> Hit | None:
    """Return the first of :func:`hits`, which takes the same arguments, or None."""
    return next(hits(kernel, problem, **options), None)


def hits(
    kernel: str,
    problem: Mapping[str, Value],
    *,
    bucketed: Collection[str],
    target_key: str,
    arch: str,
    toolkit_key: str | None,
    source: str,
    layers: Sequence[Layer],
    trace: list[Step] | None = None,
    unlikeness: Callable[[str], Any] = str,
    invariant: bool = False,
) -> Iterator[Hit]:
    """Yield the records that serve a problem and whose blobs are all there and intact, the best first.

    Records are read as they are asked for: a caller that uses the first hit reads no other. A record whose invariant
    kernel's blob alone is missing or damaged still serves.

    Args:
        kernel: the spec's name.
        problem: the problem with bucketed sizes, in the order of the spec's dimensions.
        bucketed: names of the dimensions in which a record of another size may serve.
        target_key: the GPU's key, ``sm_90-h200-132``.
        arch: the GPU's arch, ``sm_90``; records of targets ``sm_90-*`` may serve.
        toolkit_key: the toolkit installed here, or None.
        source: the digest of the kernel's source today; records of another source are stale and never used.
        layers: where to look, first to last.
        trace: a list to which each step is added: what was passed over and why, and what was taken.
        unlikeness: sort key of other GPUs' keys, as :meth:`tilekern.spec.targets.Target.unlikeness`; default by name.
        invariant: whether, of the records of one GPU, those with an invariant kernel come first: a shipped record of
            the problem itself, which has none, would otherwise hide a user's of another bucket.

    Raises:
        CacheError: ``problem`` has no key, or ``TILEKERN_TRUST`` is not a policy.
    """
    problem_key(problem)
    must_be_signed()
    steps: list[Step] = [] if trace is None else trace
    wanted = dict(problem)

    def targets() -> Iterator[str]:
        yield target_key
        names = {name for layer in layers for name in layer.targets() if name.startswith(f"{arch}-")} - {target_key}
        if not names:
            steps.append(Step(None, f"{arch}-*", None, None, "no_records", f"no layer has another GPU of {arch}"))
        yield from sorted(names, key=unlikeness)

    for target in targets():
        problems = _candidates(kernel, wanted, bucketed, target, toolkit_key, layers, steps)
        in_order = (found for of_a_problem in problems for found in _in_order(kernel, of_a_problem, source, steps))
        for found in _classed_first(in_order, steps) if invariant else in_order:
            exact = target == target_key, found.candidate.problem is wanted
            yield Hit(
                found.record, found.candidate.layer, *exact, found.blobs, found.freshness == FRESH, found.lost
            )  # fmt: skip


def _candidates(
    kernel: str,
    problem: dict[str, Value],
    bucketed: Collection[str],
    target: str,
    toolkit_key: str | None,
    layers: Sequence[Layer],
    steps: list[Step],
) -> Iterator[Iterable[_Candidate]]:
    """Yield the candidates on one target: those of the problem itself, then of other buckets, nearest first."""
    places = []

    def own() -> Iterator[_Candidate]:
        for layer in layers:
            toolkits = by_preference(layer.toolkits(target), toolkit_key)
            if not toolkits:
                steps.append(Step(layer.name, target, None, None, "no_records", "nothing for this GPU"))
            for toolkit in toolkits:
                places.append((layer, toolkit))
                yield _Candidate(layer, target, toolkit, problem)

    yield own()
    others: list[tuple[tuple[float, float, str], int, _Candidate]] = []
    for place, (layer, toolkit) in enumerate(places):
        near = [
            (distance, place, _Candidate(layer, target, toolkit, other))
            for other in layer.problems(target, toolkit, kernel)
            if (distance := _distance(problem, other, bucketed)) is not None
        ]
        others += near
        if not near:
            steps.append(Step(layer.name, target, toolkit, None, "no_other_bucket", "no other bucket of this problem"))
    for _, nearest in itertools.groupby(sorted(others, key=lambda item: item[:2]), key=lambda item: item[0]):
        yield [candidate for _, _, candidate in nearest]


def by_preference(toolkits: Iterable[str], installed: str | None) -> list[str]:
    """Return toolkits in the order of a lookup: the installed one, then the others from the newest to the oldest."""
    toolkits = list(toolkits)
    if len(toolkits) < 2:
        return toolkits  # a version's pattern takes longer to compile than the rest of a first lookup
    newest_first = sorted(toolkits, key=_version, reverse=True)
    return sorted(newest_first, key=lambda toolkit: toolkit != installed)


def _version(toolkit: str) -> list[tuple[int, str]]:
    """Return a sort key under which 13.10 comes after 13.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[^0-9]+", toolkit)]


def _distance(
    problem: Mapping[str, Value], other: Mapping[str, Value], bucketed: Collection[str]
) -> tuple[float, float, str] | None:
    """Return how far another bucket is: sum of |log2 ratio|, then larger first; None if it cannot serve."""
    if problem.keys() != other.keys() or problem == other:
        return None
    total = size = 0.0
    for name, value in problem.items():
        other_value = other[name]
        if name not in bucketed:
            if other_value != value or type(other_value) is not type(value):
                return None
            continue
        if type(value) is not int or type(other_value) is not int or value < 1 or other_value < 1:
            return None
        total += abs(math.log2(other_value) - math.log2(value))
        size += math.log2(other_value)
    return total, -size, problem_key(other)


class _Found(NamedTuple):
    candidate: _Candidate
    record: Record
    blobs: dict[str, bytes]
    freshness: str
    lost: str

    @property
    def rank(self) -> int:
        """The rank of the provenance; 0 is the strongest."""
        return PROVENANCES.index(self.record.provenance)


def _in_order(kernel: str, candidates: Iterable[_Candidate], source: str, steps: list[Step]) -> Iterator[_Found]:
    """Yield one problem's candidates: fresh ones first, then dated ones, then fresh ones of a weaker provenance."""
    dated: list[_Found] = []
    weaker: list[_Found] = []
    for candidate in candidates:
        found = _read(kernel, candidate, source, steps)
        if found is None:
            continue
        if found.freshness == DATED:
            steps.append(candidate.step(DATED, NOT_FRESH))
            dated.append(found)
        elif not dated or found.rank <= dated[0].rank:
            yield _taken(found, "taken", steps)
        else:
            steps.append(candidate.step("weaker", f"{found.record.provenance}, and a dated one is better founded"))
            weaker.append(found)
    yield from (_taken(found, f"taken, {NOT_FRESH}", steps) for found in dated)
    yield from (_taken(found, "taken", steps) for found in weaker)


def _taken(found: _Found, detail: str, steps: list[Step]) -> _Found:
    lost = f", without its invariant kernel: {found.lost}" if found.lost else ""
    steps.append(found.candidate.step("taken", detail + lost))
    return found


def _classed_first(in_order: Iterable[_Found], steps: list[Step]) -> Iterator[_Found]:
    """Yield records, those with an invariant kernel that can be loaded before the others."""
    others = []
    for found in in_order:
        if has_class(found.record) and not found.lost:
            yield found
        else:
            steps[-1] = steps[-1]._replace(outcome="classless", detail=found.lost or "it has no invariant kernel")
            others.append(found)
    yield from (_taken(found, "taken", steps) for found in others)


def _read(kernel: str, candidate: _Candidate, source: str, steps: list[Step]) -> _Found | None:
    """Return the record and its blobs, or None with a step that says why."""
    try:
        found = _load(kernel, candidate, source)
        outcome, detail = STALE, "stale: made from another source of the kernel"
    except UnknownSchema as error:
        found, outcome, detail = None, "unknown_schema", str(error)
    except Untrusted as error:
        found, outcome, detail, layer = None, "untrusted", str(error), candidate.layer.name
        warn_once(f"a record of {layer} is not loaded: {detail}", about=f"untrusted {layer}")
    except MissingRecord:
        found, outcome, detail = None, "not_there", "not there"
    except CacheError as error:
        found, outcome, detail = None, "bad", str(error)
        if not isinstance(error, Corrupt | Missing):  # a layer reports damage, and a missing file is a plain miss
            warn_once(f"a record of {kernel} is passed over: {detail}", about=detail)
    if found is None:
        steps.append(candidate.step(outcome, detail))
        package = getattr(candidate.layer, "package", None)
        if package and outcome in (STALE, "unknown_schema"):
            warn_once(other_versions(package))
    return found


def other_versions(package: str) -> str:
    """Return the warning that an installed package has records which this tilekern does not use."""
    return (
        f"{package} has records for other versions of their kernels, which are not used; "
        f"update it: pip install -U {package}"
    )


def _load(kernel: str, candidate: _Candidate, source: str) -> _Found | None:
    """Return the record and its blobs, or None if the record is stale."""
    layer, place = candidate.layer, (candidate.target_key, candidate.toolkit_key, kernel, candidate.problem)
    for is_last in (False, True):
        record = layer.read_record(*place)
        worth = freshness(record, source)
        if worth == STALE:
            return None
        try:
            blobs, error = _read_blobs(layer, record)
        except Missing:
            # The record may have been removed or replaced since it was read: look again.
            if is_last:
                raise
            continue
        if is_last or not isinstance(error, Missing):
            return _Found(candidate, record, blobs, worth, str(error or ""))
    return None


def _read_blobs(layer: Layer, record: Record) -> tuple[dict[str, bytes], CacheError | None]:
    """Return a record's blobs, and why that of its invariant kernel is not among them, if so."""
    needed = {artifact.sha256 for name, artifact in record.artifacts.items() if name != INVARIANT}
    blobs = {sha256: layer.read_blob(sha256) for sha256 in sorted(needed)}
    try:
        return blobs | {sha256: layer.read_blob(sha256) for sha256 in record.digests - needed}, None
    except CacheError as error:
        return blobs, error
