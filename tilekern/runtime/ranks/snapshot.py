"""A snapshot in memory of one machine's caches for an arch, which ranks compare and take over.

A snapshot answers lookups as its layers did, also after their files are gone. For each GPU of the arch it has the one
record of a problem that a lookup would have found, with its artifacts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from tilekern.cache import Corrupt, Hit, Layer, Missing, MissingRecord, Record, lookup, problem_key
from tilekern.cache.keys import Value
from tilekern.cache.trust.policy import must_be_signed
from tilekern.kernels import all_specs
from tilekern.runtime.ranks.held import Held, Place, packed
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.source import source_digest


class Snapshot:
    """Records for the GPUs of one arch; a layer (:class:`tilekern.cache.Layer`) in memory.

    Each record stands at the place that it states itself.

    Args:
        held: the records.

    Raises:
        Corrupt: two of them have one place.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self._held: dict[Place, Held] = {}
        for one in sorted(held, key=lambda one: one.place):
            if one.place in self._held:
                raise Corrupt(f"there are two records of {one.place.kernel} for {one.place.problem_key}")
            self._held[one.place] = one
        self._known = {one.identity: one for one in self._held.values()}
        self._blobs = {digest: data for one in self._held.values() for digest, data in one.blobs.items()}
        self.name = "agreed"

    def __len__(self) -> int:
        return len(self._held)

    @classmethod
    def take(
        cls, arch: str, layers: Sequence[Layer], toolkit_key: str | None,
        wanted: Callable[[KernelSpec, Problem], bool] | None = None, *, invariant: bool = False,
    ) -> Snapshot:  # fmt: skip
        """Return the records that lookups for GPUs of an arch would find now, without bad and stale ones.

        ``wanted`` says which problems to take; None takes all. ``invariant``: the lookups of the invariant mode.
        """
        held = []
        for place, spec, problem in dict.fromkeys(_places(arch, layers)):
            if wanted is not None and not wanted(spec, problem):
                continue
            found = found_at(place, spec, dict(problem), layers, toolkit_key, invariant=invariant)
            if found is not None:
                held.append(Held(found.record, found.blobs, _signatures(found.record, found.layer)))
        return cls(held)

    @property
    def digest(self) -> str:
        """The digest of all that it makes a GPU run, in hexadecimal."""
        return digest_of("/".join([*place, one.identity]) for place, one in self._held.items())

    @property
    def places(self) -> list[Place]:
        """The places of its records, sorted."""
        return list(self._held)

    @property
    def identities(self) -> list[str]:
        """The identity of each record, in the order of places."""
        return list(self._known)

    def place_of(self, identity: str) -> Place:
        """Return the place of one of its records."""
        return self._known[identity].place

    def contents(self, identities: Collection[str]) -> bytes:
        """Return some of its records as bytes for :func:`tilekern.runtime.ranks.held.unpacked`."""
        return packed(one for name, one in self._known.items() if name in identities)

    def having(self, identities: Collection[str], others: Iterable[Held] = ()) -> Snapshot:
        """Return the snapshot of just the given records, from its own and others.

        Raises:
            Missing: a record is in neither.
            Corrupt: two of them have one place.
        """
        known = {one.identity: one for one in others} | self._known
        if lacking := set(identities) - known.keys():
            raise Missing(f"{len(lacking)} of {len(identities)} records did not come along, {min(lacking)} among them")
        return Snapshot(known[name] for name in identities)

    def targets(self) -> list[str]:
        """Return its target keys, sorted."""
        return sorted({place.target_key for place in self._held})

    def toolkits(self, target_key: str) -> list[str]:
        """Return its toolkit keys for a target, sorted."""
        found = {one.record.toolkit["key"] for place, one in self._held.items() if place.target_key == target_key}
        return sorted(found)

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """Return the problems with a record."""
        return [
            one.record.problem for place, one in self._held.items()
            if place[:2] == (target_key, kernel) and one.record.toolkit["key"] == toolkit_key
        ]  # fmt: skip

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """Return one record.

        Raises:
            MissingRecord: it is not there.
        """
        one = self._held.get(Place(target_key, kernel, problem_key(problem)))
        if one is None or one.record.toolkit["key"] != toolkit_key:
            raise MissingRecord(f"the ranks agreed on no record of {kernel} for {problem_key(problem)}")
        return one.record

    def read_blob(self, sha256: str) -> bytes:
        """Return one blob, whose digest was checked when the snapshot was made.

        Raises:
            Missing: it is not there.
        """
        if sha256 not in self._blobs:
            raise Missing(f"the ranks agreed on no blob {sha256}")
        return self._blobs[sha256]

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """Return the signatures and seals of a record, by the names of their files."""
        return {
            name: text for one in self._held.values() for name, text in one.signatures.items()
            if name.startswith(f"{record_sha256}.")
        }  # fmt: skip


def found_at(
    place: Place, spec: KernelSpec, problem: dict[str, Value], layers: Sequence[Layer], toolkit_key: str | None, *,
    invariant: bool,
) -> Hit | None:  # fmt: skip
    """Return the record at a place that a lookup through layers finds, none of another GPU or other sizes."""
    return lookup(
        spec.name, problem, bucketed=(), target_key=place.target_key, arch=place.target_key, toolkit_key=toolkit_key,
        source=source_digest(spec.module), layers=layers, invariant=invariant,
    )  # fmt: skip


def digest_of(lines: Iterable[str]) -> str:
    """Return the sha256 of lines in their order, in hexadecimal."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _signatures(record: Record, layer: Layer) -> dict[str, bytes]:
    """Return the signatures by which another rank trusts a record; none unless the policy is ``signed``."""
    return layer.signatures(hashlib.sha256(record.data).hexdigest()) if must_be_signed() else {}


def _places(arch: str, layers: Sequence[Layer]) -> Iterator[tuple[Place, KernelSpec, Problem]]:
    """Yield every problem of today's specs that a layer has for a GPU of the arch, repeated if in several."""
    for layer in layers:
        for target in (key for key in layer.targets() if key.startswith(f"{arch}-")):
            for toolkit in layer.toolkits(target):
                for spec in all_specs().values():
                    for values in layer.problems(target, toolkit, spec.name):
                        problem = spec.problem_of(values)
                        if problem is not None:
                            yield Place(target, spec.name, problem_key(problem)), spec, problem
