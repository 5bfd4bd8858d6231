"""Measure the cost of the cache in a fresh process: ``python -m benchmarks.cache_cold CLOCK KERNELS NUMBER [NEAR]``.

It imports the cache, makes the default layers, looks up problem ``NUMBER`` of the first ``KERNELS`` kernels, with
``NEAR`` in another bucket, and prints JSON. It imports torch before the clock starts: every job that runs kernels does
so, and torch and the cache share many imports from Python's library. ``CLOCK`` is ``wall``, or ``processor``: seconds
of CPU time, which other processes on a busy machine do not lengthen.
"""

import sys
import time

import torch  # noqa: F401

clock = time.perf_counter if sys.argv[1] == "wall" else time.process_time
started = clock()

from tilekern.cache import default_layers, lookup  # noqa: E402 (the import is timed)

imported = clock()

from benchmarks.cache_samples import SOURCE  # noqa: E402 (a job has its sources' digests noted)


def main(kernels: str, number: str, near: str = "") -> None:
    """Look up and print the seconds of each part; each lookup must hit."""
    layers = default_layers()
    layered = clock()
    lookups_s = []
    for kernel in range(int(kernels)):
        problem = {"rows": 8191 if near else 8192, "columns": 128 * (int(number) + 1), "dtype": "bfloat16"}
        before = clock()
        hit = lookup(
            f"kernel_{kernel}", problem, bucketed=["rows"], target_key="sm_90-h200-132", arch="sm_90",
            toolkit_key="tileiras-13.4.92", source=SOURCE, layers=layers,
        )  # fmt: skip
        lookups_s.append(clock() - before)
        if hit is None or hit.exact_bucket == bool(near):
            raise SystemExit(f"kernel_{kernel} {problem} gave {hit}")
    done = clock()

    import json

    parts = {"import_s": imported - started, "layers_s": layered - imported, "lookups_s": lookups_s}
    print(json.dumps({**parts, "all_s": done - started}))


if __name__ == "__main__":
    main(*sys.argv[2:])
