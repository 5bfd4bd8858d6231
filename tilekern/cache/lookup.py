"""The lookup: which record serves a problem on a target, among all layers.

Order of preference, strongest first: the exact target before another GPU of the same arch; the problem's own bucket
before the nearest one; an earlier layer before a later one; the toolkit installed here before the newest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilekern.cache.errors import CacheError, MissingRecord, UnknownSchema, Untrusted
from tilekern.cache.files import report_once
from tilekern.cache.keys import Value, problem_key
from tilekern.cache.layers import Layer
from tilekern.cache.records import Record
from tilekern.cache.trust import must_be_signed

_skipped: Counter[str] = Counter()


@dataclass(frozen=True)
class Hit:
    """A record that serves a problem, with the bytes of its artifacts, whose digests were checked.

    Attributes:
        record: the record.
        layer: where it stood.
        exact_target: False where it was made for another GPU of the same arch.
        exact_bucket: False where it was made for other bucketed sizes.
    """

    record: Record
    layer: Layer
    exact_target: bool
    exact_bucket: bool
    _blobs: Mapping[str, bytes] = field(repr=False)

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


@dataclass(frozen=True)
class _Candidate:
    layer: Layer
    target_key: str
    toolkit_key: str
    problem: dict[str, Value]


def lookup(
    kernel: str,
    problem: Mapping[str, Value],
    *,
    bucketed: Collection[str],
    target_key: str,
    arch: str,
    toolkit_key: str | None,
    source_digest: str,
    layers: Sequence[Layer],
    trace: list[str] | None = None,
) -> Hit | None:
    """The best record for a problem whose blobs are all there and intact, or None.

    Args:
        kernel: the spec's name.
        problem: the problem with bucketed sizes, in the order of the spec's dimensions.
        bucketed: the names of the dimensions of which a record of another size may serve.
        target_key: the GPU's key, ``sm_90-h200-132``.
        arch: the GPU's arch, ``sm_90``; records of targets ``sm_90-*`` may serve.
        toolkit_key: the toolkit installed here, or None.
        source_digest: the kernel's source of today; records of another one are stale and never used.
        layers: where to look, first to last.
        trace: where given, takes one line for each record that was passed over, and one for the hit.

    Raises:
        CacheError: ``problem`` has no key, or ``TILEKERN_TRUST`` is no policy.
    """
    problem_key(problem)
    must_be_signed()
    notes: list[str] = [] if trace is None else trace
    for target in itertools.chain([target_key], _relatives(target_key, arch, layers)):
        for candidate, is_exact in _candidates(kernel, dict(problem), bucketed, target, toolkit_key, layers):
            found = _read(kernel, candidate, source_digest, notes)
            if found:
                notes.append(f"{_where(kernel, candidate)}: taken")
                return Hit(found[0], candidate.layer, target == target_key, is_exact, found[1])
    return None


def skipped() -> dict[str, int]:
    """How many records lookups of this process passed over: ``stale``, ``unknown_schema``, ``bad``, ``untrusted``."""
    return {reason: _skipped[reason] for reason in ("stale", "unknown_schema", "bad", "untrusted")}


def _relatives(target_key: str, arch: str, layers: Sequence[Layer]) -> Iterator[str]:
    """Other GPUs of the same arch; listed only when they are needed."""
    names = {name for layer in layers for name in layer.targets() if name.startswith(f"{arch}-")}
    yield from sorted(names - {target_key})


def _candidates(
    kernel: str,
    problem: dict[str, Value],
    bucketed: Collection[str],
    target: str,
    toolkit_key: str | None,
    layers: Sequence[Layer],
) -> Iterator[tuple[_Candidate, bool]]:
    """Where to look on one target, best first, and whether it is the problem's own bucket."""
    for layer, toolkit in _places(layers, target, toolkit_key):
        yield _Candidate(layer, target, toolkit, problem), True
    others = [
        (distance, place, _Candidate(layer, target, toolkit, other))
        for place, (layer, toolkit) in enumerate(_places(layers, target, toolkit_key))
        for other in layer.problems(target, toolkit, kernel)
        if (distance := _distance(problem, other, bucketed)) is not None
    ]
    for _, _, candidate in sorted(others, key=lambda item: item[:2]):
        yield candidate, False


def _places(layers: Sequence[Layer], target: str, toolkit_key: str | None) -> Iterator[tuple[Layer, str]]:
    for layer in layers:
        for toolkit in _by_preference(layer.toolkits(target), toolkit_key):
            yield layer, toolkit


def _by_preference(toolkits: list[str], installed: str | None) -> list[str]:
    """The installed toolkit, then the others from the newest to the oldest."""
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


def _read(
    kernel: str, candidate: _Candidate, source_digest: str, notes: list[str]
) -> tuple[Record, dict[str, bytes]] | None:
    """The record and its blobs, or None with the reason noted."""
    layer = candidate.layer
    try:
        record = layer.read_record(candidate.target_key, candidate.toolkit_key, kernel, candidate.problem)
        if record.source_digest == source_digest:
            return record, {digest: layer.read_blob(digest) for digest in sorted(record.digests)}
        reason, kind = "stale: made from another version of the kernel's source", "stale"
    except UnknownSchema as error:
        reason, kind = str(error), "unknown_schema"
    except Untrusted as error:
        reason, kind = str(error), "untrusted"
        report_once(f"untrusted {layer.name}", f"tilekern: no such record of {layer.name} is loaded: {reason}")
    except MissingRecord:
        reason, kind = "not there", None
    except CacheError as error:
        reason, kind = str(error), "bad"
    if kind:
        _skipped[kind] += 1
    notes.append(f"{_where(kernel, candidate)}: passed over, {reason}")
    return None


def _where(kernel: str, candidate: _Candidate) -> str:
    key = problem_key(candidate.problem)
    return f"{candidate.layer.name}: {candidate.target_key}/{candidate.toolkit_key}/{kernel}/{key}"
