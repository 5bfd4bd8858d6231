"""Measure start-up: the lag of a job's first step, a kernel's first launch, an import, and the cache's command line.

The first step of a fresh process is compared with its second. Peers that compile keep compiled code on disk: each
provider's first process gets empty compiler caches (``first_step_lag_cold``), later processes find them filled.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.cases import training_cases
from benchmarks.environment import ROOT, facts, require_gpu, version_of
from benchmarks.kernels import Keep
from benchmarks.prebuilt import arguments_of, bare_plan, launcher_of
from benchmarks.providers import OURS
from benchmarks.records import fill
from benchmarks.results import Results, Row
from tilekern.spec.targets import Target
from tilekern.tuning.measure.timing import Timing

LAYERS, TOKENS, WARM_PROCESSES = 2, 2048, 3
RECORDS = 1000
NAMES = (OURS, "transformers", "liger-triton")
_DISTRIBUTIONS = {"transformers": "transformers", "liger-triton": "liger-kernel"}
_IMPORT = """
import sys, time
started = time.perf_counter()
import tilekern
print(time.perf_counter() - started)
assert "torch" not in sys.modules and "cuda.tile" not in sys.modules
"""


def measure(names: Sequence[str], keep: Keep) -> Results:
    """Time first steps, first launches, the import and ``cache_tools ls``.

    Args:
        names: of :data:`NAMES`.
        keep: called after each part with its name and the results so far, so that an interrupted run keeps them.

    Raises:
        InputError: there is no GPU, or a kernel is missing from the cache.
    """
    target = require_gpu()
    results = Results(facts())
    notes = results.run["notes"]
    parts: dict[str, Callable[[], list[Row]]] = {
        "commands": command_rows,
        **{f"first steps of {name}": functools.partial(_first_steps, name, notes) for name in names},
        # Last: from here this process holds the GPU, which would disturb the timed processes.
        "first launches": functools.partial(_first_loads, target),
    }
    for part, rows in parts.items():
        results.rows.extend(rows())
        keep(part, results)
    return results


def command_rows(repeats: int = 7) -> list[Row]:
    """Time ``import tilekern`` and ``python -m tilekern.cache_tools ls`` on many records, by the wall; needs no GPU."""
    rows = []
    imports = [float(_output(sys.executable, "-c", _IMPORT)) for _ in range(repeats)]
    rows.append(_row("import tilekern", OURS, "import", [1000 * seconds for seconds in imports], "ms"))
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), RECORDS)
        listing = [sys.executable, "-m", "tilekern.cache_tools", "ls", "--cache-dir", folder]
        for case, command in {
            f"cache_tools ls, {RECORDS} records": listing,
            "python -c 'import tilekern'": [sys.executable, "-c", "import tilekern"],
            "python -c pass": [sys.executable, "-c", "pass"],
        }.items():
            rows.append(_row(case, OURS, "process", [_wall(*command) for _ in range(repeats)], "s"))
    return rows


def _first_steps(provider: str, notes: list[str]) -> list[Row]:
    version = _DISTRIBUTIONS.get(provider)
    try:
        name = f"{provider} {version_of(version)}" if version else provider
        with tempfile.TemporaryDirectory() as folder:
            cold, *warm = [_steps(provider, folder) for _ in range(1 + WARM_PROCESSES)]
    except (metadata.PackageNotFoundError, subprocess.SubprocessError) as error:
        if provider == OURS:
            raise
        said = getattr(error, "stderr", None) or str(error)
        notes.append(f"{provider} left out: {said.strip().splitlines()[-1][:300]}")
        return []
    case = f"qwen3-8b, {LAYERS} layers, {TOKENS} tokens"
    first = [one["steps_s"][0] for one in warm]
    second = [one["steps_s"][1] for one in warm]
    return [
        _row(case, name, "first_step_lag_cold", [cold["steps_s"][0] - cold["steps_s"][1]], "s"),
        _row(case, name, "first_step_lag", [a - b for a, b in zip(first, second, strict=True)], "s"),
        _row(case, name, "first_step", first, "s"),
        _row(case, name, "second_step", second, "s"),
        _row(case, name, "last_step", [one["steps_s"][-1] for one in warm], "s"),
        _row(case, name, "loss", [one["loss"] for one in warm], "nat"),
    ]


def _steps(provider: str, caches: str) -> dict[str, Any]:
    """Run one fresh process with the compilers' caches in our folder."""
    folders = {"TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    environment = {**os.environ, **folders}
    said = _output(sys.executable, "-m", "benchmarks.step", provider, str(LAYERS), str(TOKENS), environment=environment)
    return dict(json.loads(said.splitlines()[-1]))


def _first_loads(target: Target) -> list[Row]:
    """Time the lookup and first launch of kernels not loaded in this process yet; the driver is already set up."""
    import torch

    parts = [part for case in training_cases() for part in (case.forward, case.backward)]
    launcher_of(*parts[0], target)()
    torch.cuda.synchronize()
    loads: dict[str, list[float]] = {}
    for spec, problem in parts[1:]:
        arguments = arguments_of(spec, problem, bare_plan(spec, problem, target))
        torch.cuda.synchronize()
        started = time.perf_counter()
        plan = bare_plan(spec, problem, target)
        found = time.perf_counter()
        plan.launch(0, *arguments)
        done = time.perf_counter()
        loads.setdefault("first_launch", []).append(1000 * (done - found))
        loads.setdefault("lookup_and_first_launch", []).append(1000 * (done - started))
    return [_row("kernels not loaded yet", OURS, metric, times, "ms") for metric, times in loads.items()]


def _output(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT, env=environment or dict(os.environ)
    )
    return done.stdout


def _wall(*command: str) -> float:
    started = time.perf_counter()
    _output(*command)
    return time.perf_counter() - started


def _row(case: str, provider: str, metric: str, values: Sequence[float], unit: str) -> Row:
    timing = Timing.of(list(values))
    return Row("startup", case, provider, metric, round(statistics.median(values), 5), unit, round(timing.spread_us, 5))
