#!/usr/bin/env python3
"""Build the data packages: for each GPU that tilekern/prebuilt/ has packs of, a wheel with the records of all of them.

    python .ci/data_packages.py dist --key release.key

A record or an artifact that several packs have is stored once. If packs have different records of a problem, the
package has the best (`tilekern.cache.why_better`). The same packs and key give the same bytes.

    python .ci/data_packages.py --settle

writes the best record of each problem into every pack that has one of it. A lookup takes the record of the first pack,
as comparing those of all packs would mean to open all of them first; so the first one must be as good as any.

Needs the extras tilekern[tools,ship], and tilekern[trust] for a key. `.ci/release.py` runs this and checks the wheels.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
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
    Address,
    CacheError,
    Pack,
    Record,
    checked_contents,
    why_better,
    write_pack,
)  # fmt: skip
from tilekern.cache.trust.signing import SigningKey
from tilekern.cache_tools.shared.installed import freshness_of, today_of
from tilekern.cache_tools.shared.packs import read_contents, sha256_of
from tilekern.cache_tools.shared.wheels import write_wheel
from tilekern.runtime.data_packages import ALIKE, PACKAGES

ROOT = Path(__file__).resolve().parents[1]
LARGEST_BYTES = 60_000_000


class Chosen(NamedTuple):
    """A record, and the pack that it is taken from."""

    record: Record
    pack: Pack


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build the data packages of all GPUs from tilekern/prebuilt/*.pack.")
    parser.add_argument("out", nargs="?", type=Path, help="folder for the wheels")
    parser.add_argument(
        "--settle", action="store_true", help="build nothing; give each pack the best record of all packs"
    )
    parser.add_argument("--key", type=Path, help="private key of `tilekern-cache keygen`; default: no signatures")
    options = parser.parse_args()
    if bool(options.out) == options.settle or (options.settle and options.key):
        parser.error("name either a folder for the wheels or --settle, which takes no key")
    packs = sorted((ROOT / "tilekern" / "prebuilt").glob("*.pack"))
    try:
        key = options.key and SigningKey(options.key)
        for line in settle(packs) if options.settle else build(packs, options.out, __version__, key):
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
            if other is None or why_better(record, other.record, today_of(record)):
                of_gpu[record.address] = Chosen(record, pack)
    return chosen


def settle(packs: Sequence[Path]) -> Iterator[str]:
    """Write each pack anew that has a worse record than another pack has of the same problem; yield a line about each.

    Raises:
        CacheError: as :func:`build`, or a pack cannot be written.
    """
    opened = [Pack(path) for path in packs]
    best = {address: one for of_gpu in choose(opened).values() for address, one in of_gpu.items()}
    for pack in opened:
        own = {address: Chosen(pack.read_record(address), pack) for address in pack.records}
        better = {
            address: best[address]
            for address, one in own.items()
            if why_better(best[address].record, one.record, today_of(one.record))
        }
        if better:
            records = (own | better).values()
            # The open packs keep the files that they had.
            write_pack(pack.path, whole(records), _signatures(opened, records, None))
            yield f"{pack.path.name}: {len(better):,} of {len(own):,} records are now those of other packs"


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
