"""The lookup: which record serves a problem on a target, among all layers.

Order of preference, strongest first: the exact target before another GPU of the same arch, of which the likest comes
first; the problem's own bucket
before the nearest one; a record of today's search space before one of another; an earlier layer before a later one; the
toolkit installed here before the newest. A record of another space gives way to none of a weaker provenance.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord, UnknownSchema, Untrusted
from tilekern.cache.freshness import DATED, FRESH, NOT_FRESH, STALE, freshness
from tilekern.cache.keys import Value, problem_key
from tilekern.cache.layers import Layer
from tilekern.cache.records import PROVENANCES, Record
from tilekern.cache.trust.policy import must_be_signed
from tilekern.warning import warn_once

_outcomes: Counter[str] = Counter()


@dataclass(frozen=True)
class Hit:
    """A record that serves a problem, with the bytes of its artifacts, whose digests were checked.

    Attributes:
        record: the record.
        layer: where it stood.
        exact_target: False where it was made for another GPU of the same arch.
        exact_bucket: False where it was made for other bucketed sizes.
        fresh: False where the search space has changed since, so that it is not known to be the best.
    """

    record: Record
    layer: Layer
    exact_target: bool
    exact_bucket: bool
    _blobs: Mapping[str, bytes] = field(repr=False)
    fresh: bool = True

    def load(self, variant: str) -> bytes:
        """The artifact of a variant, for example ``aligned``.

        Raises:
            CacheError: the record has no such variant.
        """
        artifact = self.record.artifacts.get(variant)
        if artifact is None:
            raise CacheError(
                f"{self.record.kernel} has the variants {', '.join(self.record.artifacts)}, not {variant!r}"
            )
        return self._blobs[artifact.sha256]


class Step(NamedTuple):
    """One thing that a lookup tried, and what came of it.

    Attributes:
        layer: the layer's name; None where the step is about all layers.
        target_key: the GPU; ``sm_90-*`` where the step is about all other GPUs of an arch.
        toolkit_key: the toolkit; None where the layer has none for this GPU.
        problem: the problem of the record; None where there was no record to try.
        outcome: ``taken``, ``not_there``, ``stale``, ``dated`` (taken only where nothing fresh is), ``weaker`` (fresh,
            and of a weaker provenance than a dated one), ``unknown_schema``, ``untrusted``, ``bad``, ``no_records``
            (the layer has none for this GPU, or no layer has another GPU of the arch) or ``no_other_bucket``.
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
        verb = "" if self.outcome == "taken" else "passed over, "
        return f"{self.layer or 'all layers'}: {where}: {verb}{self.detail}"


@dataclass(frozen=True)
class _Candidate:
    layer: Layer
    target_key: str
    toolkit_key: str
    problem: dict[str, Value]

    def step(self, outcome: str, detail: str) -> Step:
        return Step(self.layer.name, self.target_key, self.toolkit_key, self.problem, outcome, detail)


def lookup(
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
) -> Hit | None:
    """The best record for a problem whose blobs are all there and intact, or None: the first of :func:`hits`."""
    found = hits(
        kernel, problem, bucketed=bucketed, target_key=target_key, arch=arch, toolkit_key=toolkit_key, source=source,
        layers=layers, trace=trace, unlikeness=unlikeness,
    )  # fmt: skip
    return next(found, None)


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
) -> Iterator[Hit]:
    """The records that serve a problem and whose blobs are all there and intact, the best first.

    Nothing is read for one that is not asked for: whoever can use the first reads no other.

    Args:
        kernel: the spec's name.
        problem: the problem with bucketed sizes, in the order of the spec's dimensions.
        bucketed: the names of the dimensions of which a record of another size may serve.
        target_key: the GPU's key, ``sm_90-h200-132``.
        arch: the GPU's arch, ``sm_90``; records of targets ``sm_90-*`` may serve.
        toolkit_key: the toolkit installed here, or None.
        source: the digest of the kernel's source today; records of another one are stale and never used.
        layers: where to look, first to last.
        trace: where given, takes each step: what was passed over and why, and what was taken.
        unlikeness: orders the keys of other GPUs, the best first, as :meth:`tilekern.spec.targets.Target.unlikeness`
            does; by name where it is not given.

    Raises:
        CacheError: ``problem`` has no key, or ``TILEKERN_TRUST`` is not a policy.
    """
    problem_key(problem)
    must_be_signed()
    steps: list[Step] = [] if trace is None else trace
    wanted = dict(problem)
    for target in itertools.chain([target_key], _relatives(target_key, arch, layers, steps, unlikeness)):
        for of_a_problem in _candidates(kernel, wanted, bucketed, target, toolkit_key, layers, steps):
            for found in _in_order(kernel, of_a_problem, source, steps):
                exact = target == target_key, found.candidate.problem is wanted
                yield Hit(found.record, found.candidate.layer, *exact, found.blobs, found.freshness == FRESH)


def skipped() -> dict[str, int]:
    """How many records lookups of this process passed over: ``stale``, ``unknown_schema``, ``bad``, ``untrusted``."""
    return {reason: _outcomes[reason] for reason in ("stale", "unknown_schema", "bad", "untrusted")}


def _relatives(
    target_key: str, arch: str, layers: Sequence[Layer], steps: list[Step], unlikeness: Callable[[str], Any]
) -> Iterator[str]:
    """Other GPUs of the same arch, the likest first; listed only when they are needed."""
    names = {name for layer in layers for name in layer.targets() if name.startswith(f"{arch}-")} - {target_key}
    if not names:
        steps.append(Step(None, f"{arch}-*", None, None, "no_records", f"no layer has another GPU of {arch}"))
    yield from sorted(names, key=unlikeness)


def _candidates(
    kernel: str,
    problem: dict[str, Value],
    bucketed: Collection[str],
    target: str,
    toolkit_key: str | None,
    layers: Sequence[Layer],
    steps: list[Step],
) -> Iterator[Iterable[_Candidate]]:
    """The places to look on one target: those of the problem itself, then those of others that may serve for it."""
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
    """Toolkits in the order of a lookup: the installed one, then the others from the newest to the oldest."""
    toolkits = list(toolkits)
    if len(toolkits) < 2:
        return toolkits  # comparing versions compiles a pattern, which takes longer than the rest of a first lookup
    newest_first = sorted(toolkits, key=_version, reverse=True)
    return sorted(newest_first, key=lambda toolkit: toolkit != installed)


def _version(toolkit: str) -> list[tuple[int, str]]:
    """A key under which 13.10 comes after 13.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[^0-9]+", toolkit)]


def _distance(
    problem: Mapping[str, Value], other: Mapping[str, Value], bucketed: Collection[str]
) -> tuple[float, float, str] | None:
    """How far another problem's bucket is: sum of |log2 ratio|, then larger first; None where it cannot serve."""
    if problem.keys() != other.keys() or problem == other:
        return None
    total = size = 0.0
    for name, value in problem.items():
        found = other[name]
        if name not in bucketed:
            if found != value or type(found) is not type(value):
                return None
            continue
        if type(value) is not int or type(found) is not int or value < 1 or found < 1:
            return None
        total += abs(math.log2(found) - math.log2(value))
        size += math.log2(found)
    return total, -size, problem_key(other)


class _Found(NamedTuple):
    candidate: _Candidate
    record: Record
    blobs: dict[str, bytes]
    freshness: str

    @property
    def rank(self) -> int:
        """Of the provenance; 0 is the strongest."""
        return PROVENANCES.index(self.record.provenance)


def _in_order(kernel: str, candidates: Iterable[_Candidate], source: str, steps: list[Step]) -> Iterator[_Found]:
    """Of one problem's candidates those that are fresh, then those that are valid."""
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
    steps.append(found.candidate.step("taken", detail))
    return found


def _read(kernel: str, candidate: _Candidate, source: str, steps: list[Step]) -> _Found | None:
    """The record and its blobs, or None with the step that says why."""
    try:
        found = _load(kernel, candidate, source)
        outcome, detail = STALE, "stale: made from another source of the kernel"
    except UnknownSchema as error:
        found, outcome, detail = None, "unknown_schema", str(error)
    except Untrusted as error:
        found, outcome, detail, layer = None, "untrusted", str(error), candidate.layer.name
        warn_once(f"no such record of {layer} is loaded: {detail}", about=f"untrusted {layer}")
    except MissingRecord:
        found, outcome, detail = None, "not_there", "not there"
    except CacheError as error:
        found, outcome, detail = None, "bad", str(error)
        if not isinstance(error, Corrupt | Missing):  # a layer reports what is damaged; what is gone is a plain miss
            warn_once(f"a record of {kernel} is passed over: {detail}", about=detail)
    if found is None:
        _outcomes[outcome] += 1
        steps.append(candidate.step(outcome, detail))
    return found


def _load(kernel: str, candidate: _Candidate, source: str) -> _Found | None:
    """The record and its blobs, or None where the record is stale."""
    layer, place = candidate.layer, (candidate.target_key, candidate.toolkit_key, kernel, candidate.problem)
    for is_last in (False, True):
        record = layer.read_record(*place)
        worth = freshness(record, source)
        if worth == STALE:
            return None
        try:
            blobs = {sha256: layer.read_blob(sha256) for sha256 in sorted(record.digests)}
            return _Found(candidate, record, blobs, worth)
        except Missing:
            # The record may have been removed, or another one put in its place, since it was read: look again.
            if is_last:
                raise
    return None
