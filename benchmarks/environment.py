"""The environment of a run: the facts that every results file carries."""

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
# In the place of a GPU's name, where there is none or what was measured uses none.
NO_GPU = "none"


def facts(gpu: str | None = None) -> dict[str, Any]:
    """Date, GPU, driver, toolkit, torch and commit of a run that starts now.

    Args:
        gpu: the GPU's name where it is not the one at hand.
    """
    import torch

    target = here()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu or (target.name if target else NO_GPU),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "toolkit": tools.key if (tools := toolkit()) else f"none (cuda-tile {metadata.version('cuda-tile')})",
        "torch": torch.__version__,
        "commit": os.environ.get("TILEKERN_COMMIT") or _said("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown",
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "notes": [],
    }


def require_gpu() -> Target:
    """The GPU at hand.

    Raises:
        InputError: there is none.
    """
    target = here()
    if target is None:
        raise InputError("this benchmark needs a CUDA GPU and this machine has none")
    return target


def version_of(distribution: str) -> str:
    """The version of an installed distribution."""
    return metadata.version(distribution)


def _said(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.splitlines()[0].strip() if said.strip() else ""
