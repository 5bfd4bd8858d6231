"""Start processes and ranks, and judge how they end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import rank_jobs
import torch

ROOT = Path(__file__).parents[2]


def path_of(*first: Path) -> str:
    """Where Python looks: in these folders first, or in this checkout, then where this process was told to."""
    return os.pathsep.join([*map(str, first or (ROOT,)), *filter(None, [os.environ.get("PYTHONPATH")])])


def clean_environment(*first: Path) -> dict[str, str]:
    """The environment without tilekern's settings; imports come from these folders first, or from this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TILEKERN_")}
    return kept | {"PYTHONPATH": path_of(*first)}


def counts_of_graphs() -> list[str]:
    """What the graphs of this process's models have counted."""
    from tilekern.patch.graphs import _models, graphs_of

    return [str(found) for model in _models for found in graphs_of(model).values()]


def ended(
    script: Path | str, *arguments: str, start: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script of this checkout that has come to its end, which may take five minutes."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *start, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path_of(), **environment}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def assert_ranks_end_well(folder: Path, worker: str, count: int, *arguments: object) -> None:
    """Run a worker of ``tests/patch`` on ``cuda`` as ranks that see all GPUs of this host."""
    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    seen = {"TILEKERN_ON_MISS": "compile", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus)}
    seen |= {name: value for name, value in os.environ.items() if name == "TILEKERN_CACHE_DIR"}
    file = ROOT / "tests" / "patch" / worker
    ranks = rank_jobs.finish(rank_jobs.start(folder, file, count, "cuda", *arguments, **seen))
    said = "\n".join((out + error)[-3000:] for out, error, _ in ranks)
    assert [code for _, _, code in ranks] == [0] * count, said
