"""Measure fresh processes of the engine, from their start to the first logits and token; and what is installed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.inference import BENCHMARK, Job, full_name
from benchmarks.inference_models import architecture_named, random_tensors, write_checkpoint
from benchmarks.jobs import Found
from benchmarks.providers import OURS, one_line
from benchmarks.results import Row
from benchmarks.sources import with_sources

PROCESSES, OF_TORCH = 7, 3
LIMIT_S = 120.0
# Tokens of the sequence whose logits, and of the prompt whose next token, come first.
TOKENS = 64
MB = 1_000_000
# Steps of :mod:`benchmarks.first_logits`; weights are loaded in one of them.
STEPS, LOAD = ("interpreter", "import", "gpu", "first", "load"), "load"
_IMPORT = "import time; started = time.perf_counter(); import torch; print(time.perf_counter() - started)"
# Of tilekern's folder, but not of the engine: packs of models, and what Python writes.
_NOT_CORE = ("prebuilt", "__pycache__")


def start(job: Job) -> Iterator[Found]:
    """Time fresh processes with a cache that has all kernels; sum what is installed."""
    if OURS in job.ways:
        try:
            yield from _engines(job)
        except (OSError, subprocess.SubprocessError, metadata.PackageNotFoundError) as error:
            yield f"{job.label} start: {OURS} left out: {one_line(error)}"
    if "torch" in job.ways:
        took = [float(_said([sys.executable, "-c", _IMPORT])) for _ in range(OF_TORCH)]
        yield _row(f"{job.label} start, import alone", full_name("torch"), "import_s", took)


def _engines(job: Job) -> Iterator[Row]:
    of = architecture_named(job.model)
    used: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), job.model, random_tensors(of, job.dtype))
        for what in ("logits", "token"):
            # The first may compile kernels, and reads files for the first time.
            first, *others = [_process(folder, what) for _ in range(1 + PROCESSES)]
            used |= first["artifacts"]
            yield from with_sources(list(_rows(f"{job.label} start, first {what}", others)), first["kernels"])
    yield from installed(f"{job.label} installed", used)


def _rows(case: str, processes: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the median of each step, and of all but loading the weights."""
    for step in STEPS:
        yield _row(case, OURS, f"{step}_s", [one["seconds"][step] for one in processes])
    apart = [sum(one["seconds"][step] for step in STEPS if step != LOAD) for one in processes]
    yield _row(case, OURS, "without_load_s", apart)


def _row(case: str, who: str, metric: str, values: list[float]) -> Row:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Row(
        BENCHMARK, case, who, metric, round(statistics.median(values), 5), "s", round((high - low) / 2, 5)
    )  # fmt: skip


def _process(folder: str, what: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.first_logits", folder, str(TOKENS), what, repr(time.time())]
    found = dict(json.loads(_said(command)))
    if found["imported"]:
        raise ChildProcessError(f"the engine has imported {', '.join(found['imported'])}")
    return found


def _said(command: list[str]) -> str:
    """Return the last line that a process says.

    Raises:
        ChildProcessError: it fails; the error is its last line.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=dict(os.environ), check=False
    )
    if done.returncode:
        raise ChildProcessError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300])
    return done.stdout.strip().splitlines()[-1]


def installed(case: str, artifacts: dict[str, int]) -> Iterator[Row]:
    """Yield megabytes of tilekern without packs, of what it needs, of the artifacts of a model, and their sum.

    Args:
        case: the case in the results.
        artifacts: bytes by digest.
    """
    parts = {"tilekern": _bytes_of(core_files()), "dependencies": sum(map(_bytes_of, dependencies().values()))}
    parts |= {"artifacts": sum(artifacts.values())}
    for name, count in (parts | {"all": sum(parts.values())}).items():
        yield Row(BENCHMARK, case, OURS, f"{name}_mb", round(count / MB, 4), "MB")
    packs = _bytes_of((ROOT / "tilekern" / "prebuilt").glob("*.pack"))
    yield Row(BENCHMARK, case, OURS, "packs_mb", round(packs / MB, 4), "MB")


def core_files() -> Iterator[Path]:
    """Yield the files of tilekern's wheel, but for its packs."""
    yield ROOT / "tilekern_startup.py"
    for folder, folders, names in os.walk(ROOT / "tilekern", followlinks=True):
        folders[:] = [name for name in folders if name not in _NOT_CORE]
        yield from (Path(folder, name) for name in names)


def dependencies() -> dict[str, list[Path]]:
    """Return the files of all distributions that tilekern needs without extras, by name; without compiled Python."""
    found: dict[str, list[Path]] = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = _needed(project["dependencies"])
    while wanted:
        name = wanted.pop()
        if name not in found:
            files = metadata.distribution(name).files or []
            found[name] = [Path(str(file.locate())) for file in files if file.suffix != ".pyc"]
            wanted += _needed(metadata.requires(name) or ())
    return found


def _needed(requirements: Iterable[str]) -> list[str]:
    """Return the names of the distributions that requirements ask for here, without extras."""
    from packaging.requirements import Requirement

    asked = map(Requirement, requirements)
    return [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())
