"""Describe the environment of a run, for the results file."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from tilekern.compile.toolchain import toolkit
from tilekern.errors import InputError
from tilekern.spec.targets import Target, here

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Replaces a GPU's name if there is no GPU or the benchmark uses none.
NO_GPU = "none"


def facts(gpu: str | None = None) -> dict[str, Any]:
    """Return date, GPU, driver, toolkit, torch and commit of a run that starts now.

    Args:
        gpu: the GPU's name if it is not this host's GPU.
    """
    import torch

    target = here()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu or (target.name if target else NO_GPU),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "toolkit": tools.key if (tools := toolkit()) else f"none (cuda-tile {metadata.version('cuda-tile')})",
        "torch": torch.__version__,
        "commit": os.environ.get("BENCHMARK_COMMIT") or _said("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown",
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "notes": [],
    }


def require_gpu() -> Target:
    """Return this host's GPU.

    Raises:
        InputError: there is no GPU.
    """
    target = here()
    if target is None:
        raise InputError("this benchmark needs a CUDA GPU and this machine has none")
    return target


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution."""
    return metadata.version(distribution)


def _said(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.splitlines()[0].strip() if said.strip() else ""
