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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cache_samples import VARIANTS, content, find, sample
from tilekern.cache import CacheError, FolderLayer, Hit, PackLayer, Store, install_pack, write_pack
from tilekern.cache.keys import blob_path

PROBLEMS, SIZE_BYTES = 3, 2000
# Every so many packs are unpacked too.
UNPACK_EVERY = 8
SLOW_S = 2.0
Change = Callable[[bytearray, random.Random, bytes], None]
Judge = Callable[[Hit | None, int, bool], str]


def run(folder: Path, first: int, count: int) -> dict[str, Any]:
    """Try mutations; ``counts`` of the outcomes, ``faults``, ``slowest_ms`` and ``peak_mib`` of this process."""
    bench, slowest_s = _Bench(folder), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(first, first + count):
            started = time.perf_counter()
            bench.try_one(number)
            slowest_s = max(slowest_s, time.perf_counter() - started)
    if slowest_s > SLOW_S:
        bench.faults.append(f"a mutation took {slowest_s:.1f} s")
    return {
        "counts": dict(sorted(bench.counts.items())),
        "faults": bench.faults,
        "slowest_ms": round(1000 * slowest_s, 3),
        "peak_mib": round(_peak_mib(), 1),
    }


class _Bench:
    """A small cache and its pack, as they were written, and what became of their mutations."""

    def __init__(self, folder: Path) -> None:
        self.root, self.pack, self.unpacked = folder / "cache", folder / "mutated.pack", folder / "unpacked"
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        store = Store(self.root)
        made = [sample(number, 1, SIZE_BYTES) for number in range(PROBLEMS)]
        self.records = [record for record, _ in made]
        self.paths = [store.write(record, blobs) for record, blobs in made]
        write_pack(self.pack, made)
        self.packed = self.pack.read_bytes()

    def try_one(self, number: int) -> None:
        """Make one mutation, read it, and note what came of it."""
        draw = random.Random(number)
        kind = draw.choice(("record", "forged_record", "blob", "pack"))
        try:
            outcome = getattr(self, f"_{kind}")(draw)
        except Exception as error:  # noqa: BLE001 (whatever a reader raises, it is a fault of the cache)
            self.faults.append(f"mutation {number} of a {kind}: {error!r:.500}")
            return
        self.counts[f"{kind}: {outcome}"] += 1

    def _record(self, draw: random.Random) -> str:
        number = draw.randrange(PROBLEMS)
        return self._in_folder(self.paths[number], number, draw, self._as_written)

    def _forged_record(self, draw: random.Random) -> str:
        """With a digest that fits what it was changed to, so that its fields are all that can be wrong with it."""
        number = draw.randrange(PROBLEMS)
        return self._in_folder(self.paths[number], number, draw, self._judged, _sealed)

    def _blob(self, draw: random.Random) -> str:
        number = draw.randrange(PROBLEMS)
        digest = self.records[number].artifacts[draw.choice(VARIANTS)].sha256
        return self._in_folder(self.root / blob_path(digest), number, draw, self._as_written)

    def _in_folder(
        self, path: Path, number: int, draw: random.Random, judge: Judge, finish: Callable[[bytes], bytes] = bytes
    ) -> str:
        good = path.read_bytes()
        try:
            changed = finish(_mutated(good, draw))
            path.write_bytes(changed)
            hit = find([FolderLayer(self.root, "user", writable=draw.random() < 0.1)], number)
            return judge(hit, number, changed == good)
        finally:
            path.write_bytes(good)

    def _pack(self, draw: random.Random) -> str:
        changed, number = _mutated(self.packed, draw), draw.randrange(PROBLEMS)
        self.pack.write_bytes(changed)
        hit = find([PackLayer(self.pack)], number)
        outcome = self._as_written(hit, number, changed == self.packed)
        if draw.randrange(UNPACK_EVERY) == 0:
            self._unpack()
        return outcome

    def _unpack(self) -> None:
        shutil.rmtree(self.unpacked, ignore_errors=True)
        store = Store(self.unpacked)
        try:
            install_pack(self.pack, store)
        except CacheError as error:
            if "\n" in str(error) or self.unpacked.exists():
                raise AssertionError(f"refused, but not in one line with nothing written: {error}") from None
            self.counts["unpacking: refused"] += 1
            return
        for number, record in enumerate(self.records):
            hit = find([FolderLayer(self.unpacked, "user")], number)
            if hit is None or hit.record != record:
                raise AssertionError(f"unpacked {hit!r} in place of {record!r}")
            self._as_written(hit, number, True)
        self.counts["unpacking: as it was packed"] += 1

    def _as_written(self, hit: Hit | None, number: int, same: bool) -> str:
        if hit and hit.record != self.records[number]:
            raise AssertionError(f"another record than was written: {hit.record!r}")
        return self._judged(hit, number, same)

    def _judged(self, hit: Hit | None, number: int, same: bool) -> str:
        if hit is None:
            if same:
                raise AssertionError("nothing was changed, and nothing was found")
            return "miss"
        for variant in hit.record.artifacts:
            data = hit.load(variant)
            if data not in [content(number, 1, written, SIZE_BYTES) for written in VARIANTS]:
                raise AssertionError(f"a changed artifact was loaded: {data!r:.100}")
        if hit.record.address != self.records[number].address:
            raise AssertionError(f"the record of another problem: {hit.record.address}")
        same_record = hit.record == self.records[number]
        return "hit, as it was written" if same_record else "hit, another value in a sound record"


def _sealed(data: bytes) -> bytes:
    """A record's bytes with the digest of what stands before it, where there is still one to be seen."""
    contents, found, _ = data.rpartition(b',\n "sha256": "')
    return contents + found + f'{hashlib.sha256(contents).hexdigest()}"\n}}\n'.encode() if found else data


def _peak_mib() -> float:
    """The most memory that this program held. What getrusage says may be that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four changes."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(_CHANGES)(changed, draw, data)
    return bytes(changed)


def _place(changed: bytearray, draw: random.Random, longest: int = 40) -> slice:
    start = draw.randrange(len(changed) + 1)
    return slice(start, start + draw.randrange(1, longest))


def _flip(changed: bytearray, draw: random.Random, _: bytes) -> None:
    if changed:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)


def _byte(changed: bytearray, draw: random.Random, _: bytes) -> None:
    if changed:
        changed[draw.randrange(len(changed))] = draw.choice(
            (0, 0xFF, 0x80, *b'"{}[]:,-0189eE.\\/\n', draw.randrange(256))
        )


def _cut(changed: bytearray, draw: random.Random, _: bytes) -> None:
    del changed[_place(changed, draw)]


def _truncate(changed: bytearray, draw: random.Random, _: bytes) -> None:
    del changed[draw.randrange(len(changed) + 1) :]


def _insert(changed: bytearray, draw: random.Random, _: bytes) -> None:
    place = _place(changed, draw)
    changed[place.start : place.start] = draw.randbytes(place.stop - place.start)


def _zero(changed: bytearray, draw: random.Random, _: bytes) -> None:
    place = _place(changed, draw, 5000)
    changed[place] = bytes(len(changed[place]))


def _copy(changed: bytearray, draw: random.Random, data: bytes) -> None:
    """A piece of the same file in another place, or twice."""
    source, place = _place(bytearray(data), draw, 400), _place(changed, draw, 400)
    changed[place if draw.random() < 0.5 else slice(place.start, place.start)] = data[source]


def _number(changed: bytearray, draw: random.Random, _: bytes) -> None:
    """Another digit, or a number where a format may have a length, an offset or a count."""
    digits = [place for place, value in enumerate(changed) if 0x30 <= value <= 0x39]
    if digits and draw.random() < 0.5:
        changed[draw.choice(digits)] = draw.choice(b"0123456789-e")
    elif len(changed) >= 4:
        start = draw.randrange(len(changed) - 3)
        changed[start : start + 4] = draw.choice((0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little")


def _literal(changed: bytearray, draw: random.Random, _: bytes) -> None:
    """A piece of JSON, or a path, in place of some bytes."""
    place = _place(changed, draw, 8)
    changed[place] = draw.choice(_LITERALS)


_LITERALS = (
    b"null", b"true", b"NaN", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 2000, b'"\\ud800"', b'"\\u0000"', b"-1",
    b"../../", b"/etc/passwd", b'"schema": 4,', b'"schema": 3,', b'"schema": 1,', b"\xff\xfe", b"PK\x05\x06",
    b"PK\x01\x02",
)  # fmt: skip
_CHANGES: tuple[Change, ...] = (_flip, _flip, _byte, _cut, _truncate, _insert, _zero, _copy, _number, _literal)


def main(folder: str, first: str, count: str) -> None:
    """The program."""
    print(json.dumps(run(Path(folder), int(first), int(count))))


if __name__ == "__main__":
    main(*sys.argv[1:])
