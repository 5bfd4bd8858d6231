"""Records, blobs and packs with random changes, given to the readers.

``python tests/stress/mutations.py FOLDER FIRST COUNT`` tries the mutations of these numbers and prints one JSON
document; a mutation follows from its number alone, so one that fails is tried again by itself. Right is: a lookup gives
a miss, or the very record and artifacts that were written, or, where someone made the record's digest anew, that
record with the artifacts that were written; unpacking refuses in one line and writes nothing, or writes
what was packed; a reader raises nothing but a CacheError, soon, and takes no memory to speak of.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.cache_samples import VARIANTS, content, find, sample
from tilekern.cache import CacheError, FolderLayer, Hit, PackLayer, Store, install_pack, write_pack
from tilekern.cache.keys import blob_path

PROBLEMS, SIZE_BYTES = 3, 2000
# Every so many packs are unpacked too.
UNPACK_EVERY = 8
SLOW_S = 2.0
NUMBERS = (0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1)
LITERALS = (
    b"null", b"true", b"NaN", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 2000, b'"\\ud800"', b'"\\u0000"', b"-1",
    b"../../", b"/etc/passwd", b'"schema": 4,', b'"schema": 3,', b'"schema": 1,', b"\xff\xfe", b"PK\x05\x06",
    b"PK\x01\x02", *(bytes([one]) for one in b'\0\x80\xff"{}[]:,-0123456789eE.\\/\n'),
)  # fmt: skip


def run(folder: Path, first: int, count: int) -> dict[str, Any]:
    """Try mutations; ``counts`` of the outcomes, ``faults``, ``slowest_ms`` and ``peak_mib`` of this process."""
    bench, slowest_s = _Bench(folder), 0.0
    counts, faults = Counter[str](), list[str]()
    warnings.simplefilter("ignore")
    for number in range(first, first + count):
        draw, started = random.Random(number), time.perf_counter()
        kind = draw.choice(("record", "forged record", "blob", "pack"))
        try:
            counts[f"{kind}: {bench.read_mutated(kind, draw)}"] += 1
            if kind == "pack" and draw.randrange(UNPACK_EVERY) == 0:
                counts[f"unpacking: {bench.unpacked()}"] += 1
        except Exception as error:  # noqa: BLE001 (whatever a reader raises, it is a fault of the cache)
            faults.append(f"mutation {number} of a {kind}: {error!r:.500}")
        slowest_s = max(slowest_s, time.perf_counter() - started)
    if slowest_s > SLOW_S:
        faults.append(f"a mutation took {slowest_s:.1f} s")
    figures = {"slowest_ms": round(1000 * slowest_s, 3), "peak_mib": round(_peak_mib(), 1)}
    return {"counts": dict(sorted(counts.items())), "faults": faults, **figures}


class _Bench:
    """A small cache and its pack as they were written; one file at a time is another one while it is read."""

    def __init__(self, folder: Path) -> None:
        self.root, self.pack, self.there = folder / "cache", folder / "mutated.pack", folder / "unpacked"
        made = [sample(number, 1, SIZE_BYTES) for number in range(PROBLEMS)]
        self.records = [record for record, _ in made]
        for record, blobs in made:
            Store(self.root).write(record, blobs)
        write_pack(self.pack, made)
        self.packed = self.pack.read_bytes()

    def read_mutated(self, kind: str, draw: random.Random) -> str:
        """Look a problem up beside one mutated file; a forged record has a digest that fits it."""
        number = draw.randrange(PROBLEMS)
        record = self.records[number]
        if kind == "pack":
            self.pack.write_bytes(_mutated(self.packed, draw))
            same = self.pack.read_bytes() == self.packed
            return self._judged(find([PackLayer(self.pack)], number), number, same)
        blob = blob_path(record.artifacts[draw.choice(VARIANTS)].sha256)
        path = self.root / (blob if kind == "blob" else record.address.path)
        good = path.read_bytes()
        try:
            path.write_bytes(_mutated(good, draw))
            if kind == "forged record":
                path.write_bytes(_sealed(path.read_bytes()))
            same = path.read_bytes() == good
            hit = find([FolderLayer(self.root, "user", writable=draw.random() < 0.1)], number)
            return self._judged(hit, number, same, may_differ=kind == "forged record")
        finally:
            path.write_bytes(good)

    def unpacked(self) -> str:
        """Unpack the pack as it is now."""
        shutil.rmtree(self.there, ignore_errors=True)
        try:
            install_pack(self.pack, Store(self.there))
        except CacheError as error:
            if "\n" in str(error) or self.there.exists():
                raise AssertionError(f"refused, but not in one line with nothing written: {error}") from None
            return "refused"
        for number in range(PROBLEMS):
            self._judged(find([FolderLayer(self.there, "user")], number), number, same=True)
        return "as it was packed"

    def _judged(self, hit: Hit | None, number: int, same: bool, may_differ: bool = False) -> str:
        record = self.records[number]
        if hit is None:
            if same:
                raise AssertionError("nothing was changed, and nothing was found")
            return "miss"
        if hit.record.address != record.address or not (may_differ or hit.record == record):
            raise AssertionError(f"another record than was written: {hit.record!r}")
        for variant in hit.record.artifacts:
            data = hit.load(variant)
            if data not in [content(number, 1, written, SIZE_BYTES) for written in VARIANTS]:
                raise AssertionError(f"a changed artifact was loaded: {data!r:.100}")
        return "hit, as it was written" if hit.record == record else "hit, another value in a sound record"


def _sealed(data: bytes) -> bytes:
    """Return a record's bytes with a digest at its end that fits, if it still has one."""
    contents, found, _ = data.rpartition(b',\n "sha256": "')
    return contents + found + f'{hashlib.sha256(contents).hexdigest()}"\n}}\n'.encode() if found else data


def _peak_mib() -> float:
    """The most memory that this program held. What getrusage says may be that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four pieces of them replaced."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        start, source = (draw.randrange(len(data) + 1) for _ in range(2))
        end = start + draw.choice((0, 1, 1, 1, 4, draw.randrange(40), draw.randrange(5000), len(data)))
        piece = data[start:end]
        flipped = bytes(byte ^ 1 << draw.randrange(8) for byte in piece[:1])
        new = draw.choice(
            (
                b"",
                bytes(len(piece)),
                flipped + piece[1:],
                flipped + piece[1:],
                draw.randbytes(draw.randrange(1, 40)),
                data[source : source + draw.randrange(400)],
                draw.choice(NUMBERS).to_bytes(4, "little"),
                draw.choice(LITERALS),
            )
        )
        data = data[:start] + new + data[end:]
    return data


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
