"""What a fresh process pays for the cache: ``python -m benchmarks.caching.cold KERNELS NUMBER [NEAR]`` prints JSON.

It imports the cache, makes the default layers and looks up problem ``NUMBER`` of the first ``KERNELS`` kernels, with
``NEAR`` in another bucket. Nothing is imported before the clock starts but what Python itself needs.
"""

import sys
import time

started = time.perf_counter()

from tilekern.cache import default_layers, lookup  # noqa: E402 (the import is timed)

imported = time.perf_counter()


def main(kernels: str, number: str, near: str = "") -> None:
    """Look up and print the seconds of each part; each lookup must hit."""
    layers = default_layers()
    layered = time.perf_counter()
    lookups_s = []
    for kernel in range(int(kernels)):
        problem = {"rows": 8191 if near else 8192, "columns": 128 * (int(number) + 1), "dtype": "bfloat16"}
        before = time.perf_counter()
        hit = lookup(
            f"kernel_{kernel}", problem, bucketed=["rows"], target_key="sm_90-h200-132", arch="sm_90",
            toolkit_key="tileiras-13.4.92", source_digest="0" * 64, layers=layers,
        )  # fmt: skip
        lookups_s.append(time.perf_counter() - before)
        if hit is None or hit.exact_bucket == bool(near):
            raise SystemExit(f"kernel_{kernel} {problem} gave {hit}")
    done = time.perf_counter()

    import json

    parts = {"import_s": imported - started, "layers_s": layered - imported, "lookups_s": lookups_s}
    print(json.dumps({**parts, "all_s": done - started}))


if __name__ == "__main__":
    main(*sys.argv[1:])
