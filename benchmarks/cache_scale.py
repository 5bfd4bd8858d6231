"""Measure listing, lookup, check and start-up on a cache of 100,000 records."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.cache_samples import TARGET, TOOLKIT, content, problem, sample
from benchmarks.environment import NO_GPU, ROOT, facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.cache.files import ask_for, read_whole
from tilekern.cache.keys import blob_path
from tilekern.tuning.measure.timing import Timing

RECORDS, FEW_RECORDS, KERNELS = 100_000, 200, 40
# The means of the wheel's own packs: 157 records of 7.6 kB with 92 blobs of 33 kB.
BLOB_BYTES, RUNNERS_UP, RECORDS_OF_A_BLOB = 33_000, 40, 1.7
CHECKED_RECORDS = 6_000
OTHER = {"key": "sm_100-b200-148", "name": "B200", "arch": "sm_100"}


def fill(root: Path, records: int, blobs: int) -> int:
    """Write real-size records of many kernels and two targets, without the store's fsync; return the bytes written."""
    written, digests = 0, [_blob(root, number) for number in range(blobs)]
    written += blobs * BLOB_BYTES
    for number in range(records):
        kernel, target = number % KERNELS, (dict(TARGET), dict(OTHER))[number // KERNELS % 2]
        runners_up = [{"config": {"occupancy": o, "tile": 1024}, "median_us": 38.1 + o} for o in range(RUNNERS_UP)]
        record, _ = sample(
            number // (2 * KERNELS), 1, kernel=f"kernel_{kernel}", module=f"made_up.kernel_{kernel}", target=target,
            toolkit=dict(TOOLKIT), runners_up=runners_up,
        )  # fmt: skip
        draw = random.Random(number)
        artifacts = {
            name: replace(one, sha256=draw.choice(digests), size=BLOB_BYTES) for name, one in record.artifacts.items()
        }
        path = root / record.address.path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = replace(record, artifacts=artifacts).to_json()
        written += path.write_bytes(text.encode())
    return written


def _blob(root: Path, number: int) -> str:
    data = content(number, 1, "aligned", BLOB_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    path = root / blob_path(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return digest


def measure(records: Sequence[int] = (FEW_RECORDS, RECORDS), repeats: int = 3) -> Results:
    """Time the commands and lookups on caches of few records and of many.

    Args:
        records: the number of records in each cache.
        repeats: samples of each measurement that takes a whole process.
    """
    results = Results(facts(gpu=NO_GPU))
    with tempfile.TemporaryDirectory() as folder:
        for count in records:
            root, case = Path(folder) / str(count), f"{count:,} records"
            fill(root, count, 100)
            results.rows.extend(_lookups(case, root, count, repeats))
            results.rows.extend(_listing(case, root, repeats))
        checked = min(CHECKED_RECORDS, max(records))
        for case, blobs in (("usual mix", int(checked / RECORDS_OF_A_BLOB)), ("mostly artifacts", 3 * checked)):
            root = Path(folder) / case
            written = fill(root, checked if case == "usual mix" else checked // 20, blobs)
            results.rows.extend(_checking(root, case, written, repeats))
    return results


def _lookups(case: str, root: Path, records: int, repeats: int) -> Iterator[Row]:
    """Time first lookups in fresh processes, from disk and from the page cache, and start-up with many kernels."""
    number = records // (2 * KERNELS) - 1
    for metric, kernels, evicted, near in (
        ("first_lookup_off_disk", 1, True, ""),
        ("first_lookup", 1, False, ""),
        ("lookup_off_disk", KERNELS, True, ""),
        ("lookup", KERNELS, False, ""),
        ("lookup_of_nearest", KERNELS, False, "near"),
    ):
        samples = []
        for _ in range(repeats):
            if evicted:
                _evict(root, number)
            samples.append(_cold(root, "wall" if evicted else "processor", str(kernels), str(number), near))
        lookups = [1000 * s for one in samples for s in one["lookups_s"]]
        yield _row(case, metric, lookups, "ms")
        if kernels == KERNELS and not near:
            name = "start_off_disk" if evicted else "start"
            yield _row(f"{KERNELS} kernels, {case}", name, [1000 * one["all_s"] for one in samples], "ms")
            yield _row(f"{KERNELS} kernels, {case}", f"{name}_import", [1000 * s["import_s"] for s in samples], "ms")
            yield _row(f"{KERNELS} kernels, {case}", f"{name}_layers", [1000 * s["layers_s"] for s in samples], "ms")
    yield _row(case, "disk_alone", [1000 * s for _ in range(repeats) for s in _disk_alone(root, number)], "ms")


def _disk_alone(root: Path, number: int) -> Iterator[float]:
    """Time reading a record from disk, then its artifacts at once, for each kernel: the lower bound of a lookup."""
    records = sorted(root.glob(f"v1/{TARGET['key']}/*/*/{_file_of(number)}"))
    artifacts = [sorted({one["sha256"] for one in json.loads(p.read_bytes())["artifacts"].values()}) for p in records]
    blobs = [[str(root / blob_path(digest)) for digest in digests] for digests in artifacts]
    _evict(root, number)
    for record, paths in zip(records, blobs, strict=True):
        started = time.perf_counter()
        read_whole(record, record.stat().st_size + 1)
        ask_for(paths)
        for path in paths:
            read_whole(path, BLOB_BYTES + 1)
        yield time.perf_counter() - started


def _file_of(number: int) -> str:
    return ",".join(f"{key}={value}" for key, value in problem(number).items()) + ".json"


def _cold(root: Path, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "TILEKERN_CACHE_DIR": str(root)}
    return dict(json.loads(_output("benchmarks.cache_cold", *arguments, environment=environment)))


def _evict(root: Path, number: int) -> None:
    """Drop the files of one problem of every kernel from the page cache; folders stay in the system's memory."""
    for path in [*root.glob(f"v1/*/*/*/{_file_of(number)}"), *root.glob("v1/blobs/*/*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _listing(case: str, root: Path, repeats: int) -> Iterator[Row]:
    """Time a process that lists one kernel's records."""
    times = [
        _times("tilekern.cache_tools", "ls", "--kernel", "kernel_7", "--cache-dir", str(root)) for _ in range(repeats)
    ]
    yield _row(case, "ls_filtered", [wall for wall, _ in times], "s")
    yield _row(case, "ls_filtered_processor", [processor for _, processor in times], "s")


def _checking(root: Path, case: str, written: int, repeats: int) -> Iterator[Row]:
    """Time `verify` in its own process; it uses one core only."""
    times = [_times("tilekern.cache_tools", "verify", "--cache-dir", str(root)) for _ in range(repeats)]
    yield _row(case, "verified", [written / 1e6], "MB")
    yield _row(case, "verify", [wall for wall, _ in times], "s")
    yield _row(case, "verify_rate", [written / 1e6 / processor for _, processor in times], "MB/s")


def _times(*command: str) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    _output(*command, environment=dict(os.environ))
    wall, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def _output(module: str, *arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=True, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    return done.stdout


def _row(case: str, metric: str, values: list[float], unit: str) -> Row:
    timing = Timing.of(values)
    return Row("cache_scale", case, OURS, metric, round(timing.median_us, 4), unit, round(timing.spread_us, 4))
