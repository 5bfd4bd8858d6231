"""What the caches of one machine hold for a GPU, read once and kept in memory: what ranks compare and take over.

A snapshot answers lookups as the layers did that it was taken from, and goes on doing so when their files are gone. It
holds, for each GPU of the arch, the one record of a problem that a lookup would have found, with its artifacts.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilekern.cache import Layer, Missing, MissingRecord, Record, lookup, problem_key
from tilekern.cache.errors import Corrupt
from tilekern.cache.keys import Value
from tilekern.cache.records import check_blob
from tilekern.kernels import all_specs
from tilekern.source import digest_of_module
from tilekern.spec import KernelSpec, Problem


class Place(NamedTuple):
    """What a record is for: two records of one place never serve at once, whatever their toolkits are."""

    target_key: str
    kernel: str
    problem_key: str


@dataclass(frozen=True)
class Held:
    """A record with its artifacts, by sha256, and the digest of what it makes a GPU run."""

    record: Record
    blobs: Mapping[str, bytes]
    identity: str


def identity(record: Record) -> str:
    """The digest of what a record makes a GPU run, in hexadecimal; times, checks and dates are no part of it."""
    parts = {
        "kernel": record.kernel,
        "problem": record.problem,
        "target": record.target["key"],
        "source": record.source_digest,
        "config": record.config,
        "artifacts": {
            name: [artifact.sha256, artifact.symbol, artifact.assumptions]
            for name, artifact in record.artifacts.items()
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Snapshot:
    """Records for the GPUs of one arch; a layer (:class:`tilekern.cache.Layer`) that no disk is behind.

    Args:
        held: the records by their places.
    """

    def __init__(self, held: Mapping[Place, Held]) -> None:
        self._held = dict(sorted(held.items()))
        self._blobs = {digest: data for one in self._held.values() for digest, data in one.blobs.items()}
        self.name = "agreed"

    def __len__(self) -> int:
        return len(self._held)

    @classmethod
    def take(
        cls, arch: str, layers: Sequence[Layer], toolkit_key: str | None,
        wanted: Callable[[KernelSpec, Problem], bool] | None = None,
    ) -> Snapshot:  # fmt: skip
        """What lookups for GPUs of an arch would find now, bad and stale records left out.

        Args:
            arch: the GPUs' arch, ``sm_90``.
            layers: where to look, first to last.
            toolkit_key: the toolkit installed here, or None.
            wanted: which problems to take; all where it is None.
        """
        held = {}
        for place, spec, problem in dict.fromkeys(_places(arch, layers)):
            if wanted is not None and not wanted(spec, problem):
                continue
            found = lookup(
                spec.name, dict(problem), bucketed=(), target_key=place.target_key, arch=place.target_key,
                toolkit_key=toolkit_key, source_digest=digest_of_module(spec.module), layers=layers,
            )  # fmt: skip
            if found is not None:
                blobs = {one.sha256: found.load(name) for name, one in found.record.artifacts.items()}
                held[place] = Held(found.record, blobs, identity(found.record))
        return cls(held)

    @property
    def digest(self) -> str:
        """The digest of all that it makes a GPU run, in hexadecimal; equal snapshots run the same everywhere."""
        return digest_of("/".join([*place, one.identity]) for place, one in self._held.items())

    def index(self) -> dict[str, list[str]]:
        """The identity of each record with its place: ``identity -> [target key, kernel, problem key]``."""
        return {one.identity: list(place) for place, one in self._held.items()}

    def lacks(self, index: Mapping[str, Sequence[str]]) -> list[str]:
        """The identities of an index that it has no record of."""
        return sorted(index.keys() - {one.identity for one in self._held.values()})

    def contents(self, identities: Collection[str]) -> bytes:
        """Records and the artifacts that they name, as bytes for :meth:`reduced_to`."""
        taken = [one for one in self._held.values() if one.identity in identities]
        blobs = {digest: data for one in taken for digest, data in one.blobs.items()}
        head = {
            "records": [one.record.to_json() for one in taken],
            "blobs": {digest: len(blobs[digest]) for digest in sorted(blobs)},
        }
        text = json.dumps(head).encode()
        whole = [len(text).to_bytes(8, "big"), text, *(blobs[digest] for digest in sorted(blobs))]
        return zlib.compress(b"".join(whole))

    def reduced_to(self, index: Mapping[str, Sequence[str]], contents: bytes | None) -> Snapshot:
        """The snapshot that an index is of, made of its own records and of those in ``contents``.

        Raises:
            CacheError: ``contents`` is damaged, or the two do not hold all of the index.
        """
        known = {one.identity: one for one in self._held.values()}
        for one in () if contents is None else _unpacked(contents):
            known.setdefault(one.identity, one)
        if lacking := index.keys() - known.keys():
            raise Missing(f"{len(lacking)} of {len(index)} records did not come along, {min(lacking)} among them")
        return Snapshot({Place(*place): known[name] for name, place in index.items()})

    def targets(self) -> list[str]:
        """The target keys that it has, sorted."""
        return sorted({place.target_key for place in self._held})

    def toolkits(self, target_key: str) -> list[str]:
        """The toolkit keys that it has for a target, sorted."""
        found = {one.record.toolkit["key"] for place, one in self._held.items() if place.target_key == target_key}
        return sorted(found)

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """The problems that it has a record of."""
        return [
            one.record.problem for place, one in self._held.items()
            if place[:2] == (target_key, kernel) and one.record.toolkit["key"] == toolkit_key
        ]  # fmt: skip

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """One record.

        Raises:
            MissingRecord: it is not there.
        """
        one = self._held.get(Place(target_key, kernel, problem_key(problem)))
        if one is None or one.record.toolkit["key"] != toolkit_key:
            raise MissingRecord(f"the ranks agreed on no record of {kernel} for {problem_key(problem)}")
        return one.record

    def read_blob(self, sha256: str) -> bytes:
        """One blob, whose digest was checked when the snapshot was made.

        Raises:
            Missing: it is not there.
        """
        if sha256 not in self._blobs:
            raise Missing(f"the ranks agreed on no blob {sha256}")
        return self._blobs[sha256]


def digest_of(lines: Iterable[str]) -> str:
    """The sha256 of lines in their order, in hexadecimal."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _places(arch: str, layers: Sequence[Layer]) -> Iterator[tuple[Place, KernelSpec, Problem]]:
    """Every problem of today's specs that a layer names for a GPU of the arch, as often as it is there."""
    for layer in layers:
        for target in (key for key in layer.targets() if key.startswith(f"{arch}-")):
            for toolkit in layer.toolkits(target):
                for spec in all_specs().values():
                    for values in layer.problems(target, toolkit, spec.name):
                        problem = spec.problem_of(values)
                        if problem is not None:
                            yield Place(target, spec.name, problem_key(problem)), spec, problem


def _unpacked(contents: bytes) -> Iterator[Held]:
    try:
        data = zlib.decompress(contents)
        start = 8 + int.from_bytes(data[:8], "big")
        head = json.loads(data[8:start])
        blobs = {}
        for digest, size in head["blobs"].items():
            blobs[digest] = check_blob(data[start : start + size], digest)
            start += size
        for text in head["records"]:
            record = Record.from_json(text)
            yield Held(record, {digest: blobs[digest] for digest in record.digests}, identity(record))
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"what came of another rank is damaged: {error}") from None
