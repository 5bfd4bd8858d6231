#!/usr/bin/env python3
"""Build the data packages: for each GPU that tilekern/prebuilt/ has packs of, a wheel with the records of all of them.

    python .ci/data_packages.py dist --key release.key

A record or an artifact that several packs have is stored once. Records of one problem that differ: of these, measured
ones come first, then predicted ones and defaults; records of today's search space before others; those with an
invariant kernel before others; then the newest. The same packs and key give the same bytes.

Needs the extras tilekern[tools,ship], and tilekern[trust] for a key. `.ci/release.py` runs this and checks the wheels.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from packaging.version import Version

# The checkout's own tilekern reads its packs.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tilekern import __version__
from tilekern.cache import (
    DATED,
    FRESH,
    PROVENANCES,
    Address,
    CacheError,
    Pack,
    Record,
    checked_contents,
    write_pack,
)  # fmt: skip
from tilekern.cache.trust.signing import SigningKey
from tilekern.cache_tools.shared.installed import freshness_of
from tilekern.cache_tools.shared.packs import read_contents, sha256_of
from tilekern.cache_tools.shared.wheels import write_wheel
from tilekern.runtime.data_packages import ALIKE, PACKAGES
from tilekern.spec import INVARIANT

ROOT = Path(__file__).resolve().parents[1]
LARGEST_BYTES = 60_000_000


class Chosen(NamedTuple):
    """A record, and the pack that it is taken from."""

    record: Record
    pack: Pack


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build the data packages of all GPUs from tilekern/prebuilt/*.pack.")
    parser.add_argument("out", type=Path, help="folder for the wheels")
    parser.add_argument("--key", type=Path, help="private key of `tilekern-cache keygen`; default: no signatures")
    options = parser.parse_args()
    packs = sorted((ROOT / "tilekern" / "prebuilt").glob("*.pack"))
    try:
        for line in build(packs, options.out, __version__, options.key and SigningKey(options.key)):
            print(line, flush=True)
    except CacheError as error:
        raise SystemExit(f"data packages: {error}") from None


def build(packs: Sequence[Path], out: Path, version: str, key: SigningKey | None = None) -> Iterator[str]:
    """Build the data package of each GPU that packs have records of, and yield a line about each.

    Args:
        packs: the packs; of records that are equally good, the earlier pack's counts.
        out: the folder for the wheels.
        version: tilekern's version, which is that of the packages.
        key: signs every record.

    Raises:
        CacheError: a pack is bad or has a stale record, a GPU has no package, or a wheel is too large.
    """
    opened = [Pack(path) for path in packs]
    chosen = choose(opened)
    if unnamed := chosen.keys() - PACKAGES.keys():
        raise CacheError(f"{min(unnamed)} has no package yet; name it in tilekern/runtime/data_packages.py")
    for target_key, records in sorted(chosen.items()):
        name = PACKAGES[target_key]
        with TemporaryDirectory() as folder:
            union = Path(folder, "records.pack")
            write_pack(union, whole(records.values()), _signatures(opened, records.values(), key))
            needed = ["tilekern", *([ALIKE[name]] if name in ALIKE else [])]
            more = {"license": "Apache-2.0", "dependencies": [f"{one}{fitting(version)}" for one in needed]}
            wheel = write_wheel(read_contents(union), name, version, name.replace("-", "_"), out, more)
        size_bytes = wheel.stat().st_size
        if size_bytes > LARGEST_BYTES:
            wheel.unlink()
            raise CacheError(f"{name} has {size_bytes:,} bytes and may have {LARGEST_BYTES:,}; leave models out of it")
        of = sum(target_key in {address.target_key for address in pack.records} for pack in opened)
        signed = ", signed" if key else ""
        yield f"{wheel.name}: {len(records):,} records of {of} packs, {size_bytes:,} bytes{signed}, {sha256_of(wheel)}"


def fitting(version: str) -> str:
    """Return the versions of tilekern that the records of a version are for: from it to the next minor version.

    A minor version may make records stale. An older one may be without the kernel that a record was made for.
    """
    major, minor = Version(version).release[:2]
    return f">={version},<{major}.{minor + 1}"


def choose(packs: Sequence[Pack]) -> dict[str, dict[Address, Chosen]]:
    """Return the record of each address that packs have, by the GPU's key and the address.

    Raises:
        CacheError: a pack is bad, or a record is stale.
    """
    chosen: dict[str, dict[Address, Chosen]] = {}
    for pack in packs:
        for record, _ in checked_contents(pack):
            if freshness_of(record) not in (FRESH, DATED):
                raise CacheError(f"{pack.path.name}: {record.address.path} is stale; tune or refresh it first")
            of_gpu = chosen.setdefault(record.address.target_key, {})
            other = of_gpu.get(record.address)
            if other is None or order(record) < order(other.record):
                of_gpu[record.address] = Chosen(record, pack)
    return chosen


def order(record: Record) -> tuple[int, bool, bool, float]:
    """Return a sort key of records of one address, the best first."""
    return (
        PROVENANCES.index(record.provenance),
        freshness_of(record) == DATED,
        INVARIANT not in (record.measurement or {}),
        -datetime.fromisoformat(record.created).timestamp(),
    )


def whole(chosen: Iterable[Chosen]) -> Iterator[tuple[Record, dict[str, bytes]]]:
    """Yield records with their blobs."""
    for record, pack in chosen:
        yield record, {digest: pack.read_blob(digest) for digest in record.digests}


def _signatures(packs: Sequence[Pack], chosen: Iterable[Chosen], key: SigningKey | None) -> dict[str, dict[str, bytes]]:
    """Return the signatures that records have in their packs, and those by a key."""
    signatures: dict[str, dict[str, bytes]] = {}
    for pack in packs:
        for digest, of_record in pack.signatures().items():
            signatures.setdefault(digest, {}).update(of_record)
    if key:
        for record, _ in chosen:
            text = record.to_json().encode()
            signatures.setdefault(hashlib.sha256(text).hexdigest(), {})[key.public_key] = key.sign(text)
    return signatures


if __name__ == "__main__":
    main()
