"""Records with their artifacts and signatures in memory, and as bytes for another rank.

Records travel byte for byte as in their files, since signatures cover bytes. Nothing is compressed: sending an artifact
of some ten kilobytes takes less time than compressing it, and the stated size bounds the memory that the receiver uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from tilekern.cache import Corrupt, Missing, Record, problem_key
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, parse_object, record_of
from tilekern.cache.trust.policy import require_trusted
from tilekern.spec import INVARIANT

# Bytes of the head's own size, and the most bytes of the head, which has the sizes of the rest: enough for some hundred
# thousand signed records.
_HEAD, _LARGEST_HEAD = 8, 2**26


class Place(NamedTuple):
    """What a record is for; two records of one place never serve at once, even from different toolkits."""

    target_key: str
    kernel: str
    problem_key: str


@dataclass(frozen=True)
class Held:
    """A record with its artifacts.

    Attributes:
        record: the record.
        blobs: its artifacts by sha256; that of its invariant kernel is left out if the sender cannot read it.
        signatures: its signatures and seals by the names of their files; empty if the policy asks for none.
        place: what it is for, as it states itself.
        identity: the digest of what it makes a GPU run.
    """

    record: Record
    blobs: Mapping[str, bytes]
    signatures: Mapping[str, bytes]
    place: Place = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        own = Place(self.record.target["key"], self.record.kernel, problem_key(self.record.problem))
        object.__setattr__(self, "place", own)
        object.__setattr__(self, "identity", identity(self.record, lost=self.record.digests > self.blobs.keys()))

    def require_trusted(self) -> None:
        """Check that a trust root of this rank signed it, or the user of this rank sealed it.

        Raises:
            Untrusted: neither did, or that cannot be determined.
        """

        def signature(path: PurePosixPath) -> bytes:
            if path.name not in self.signatures:
                raise Missing(f"there is no {path}")
            return self.signatures[path.name]

        require_trusted(self.record.data, signature)


def identity(record: Record, *, lost: bool = False) -> str:
    """Return the digest of what a record makes a GPU run, in hexadecimal; times, checks and dates do not count.

    ``lost`` says whether the artifact of its invariant kernel cannot be loaded.
    """
    same = (record.measurement or {}).get(INVARIANT) or {}
    parts = {
        "kernel": record.kernel,
        "problem": record.problem,
        "target": record.target["key"],
        "source": record.source_digest,
        "config": record.config,
        "best_kernel": record.best_kernel and record.best_kernel.config,
        "invariant": {name: same.get(name) for name in ("config", "bits", "generic")},
        "artifacts": {
            name: [artifact.sha256, artifact.symbol, artifact.assumptions, msgspec.to_builtins(artifact.launch)]
            for name, artifact in record.artifacts.items()
            if not (lost and name == INVARIANT)
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def packed(held: Iterable[Held]) -> bytes:
    """Return records, signatures and artifacts as bytes for :func:`unpacked`: a head with the sizes, then the bytes."""
    taken = list(held)
    blobs = {digest: data for one in taken for digest, data in one.blobs.items()}
    head = {
        "records": [
            {"size": len(one.record.data), "signatures": {name: text.hex() for name, text in one.signatures.items()}}
            for one in taken
        ],
        "blobs": [len(data) for data in blobs.values()],
    }
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(_HEAD, "big"), text, *(one.record.data for one in taken), *blobs.values()])


def unpacked(data: bytes) -> list[Held]:
    """Return the records in bytes from another rank; every field is checked.

    Raises:
        Corrupt: the bytes are not what :func:`packed` makes, or an artifact that a record names is missing.
        UnknownSchema: another version of tilekern wrote a record.
    """
    try:
        length = int.from_bytes(data[:_HEAD], "big")
        if length > min(_LARGEST_HEAD, len(data)):
            raise Corrupt(f"the head has {length} bytes, and may have {_LARGEST_HEAD}")
        start = _HEAD + length
        head = parse_object(data[_HEAD:start].decode())
        entries = [(entry["size"], _signatures(entry["signatures"])) for entry in head["records"]]
        parts = _parts(data, start, [size for size, _ in entries], head["blobs"])
        records = [record_of(next(parts)) for _ in entries]
        blobs = {hashlib.sha256(part).hexdigest(): part for part in parts}
        return [
            Held(record, _blobs_of(record, blobs), signatures)
            for record, (_, signatures) in zip(records, entries, strict=True)
        ]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise Corrupt(f"the records do not have the form in which ranks send them: {error!r:.100}") from None


def _blobs_of(record: Record, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a record's artifacts; only that of its invariant kernel may be missing.

    Raises:
        KeyError: another one is missing.
    """
    return {
        artifact.sha256: blobs[artifact.sha256]
        for name, artifact in record.artifacts.items()
        if name != INVARIANT or artifact.sha256 in blobs
    }


def _signatures(named: Mapping[str, str]) -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in named.items()}


def _parts(data: bytes, start: int, records: Sequence[int], blobs: Sequence[int]) -> Iterator[bytes]:
    """The records, then the artifacts, of which ``data`` must hold all and nothing else.

    Raises:
        Corrupt: it holds something else, or a size is not one that a record or an artifact may have.
    """
    bounds = [*((size, LARGEST_RECORD) for size in records), *((size, LARGEST_BLOB) for size in blobs)]
    if not all(type(size) is int and 0 <= size <= largest for size, largest in bounds):
        raise Corrupt("a record or an artifact has a size that none may have")
    if start + sum(size for size, _ in bounds) != len(data):
        raise Corrupt("the records and artifacts do not have the sizes that their head says")
    return _cut(data, start, [size for size, _ in bounds])


def _cut(data: bytes, start: int, sizes: Iterable[int]) -> Iterator[bytes]:
    for size in sizes:
        yield data[start : start + size]
        start += size
