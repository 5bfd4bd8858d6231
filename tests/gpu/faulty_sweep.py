"""Sweeps the faulty kernel with the package that stands first on ``PYTHONPATH``; prints what became of each config.

Run as ``python faulty_sweep.py FOLDER LAUNCH_TIMEOUT_S``; a script of its own, since workers import it anew.
"""

import json
import shutil
import sys
import time
from pathlib import Path

from tilekern.kernels import faulty
from tilekern.spec.targets import here
from tilekern.tuning.compile.pool import start_server
from tilekern.tuning.compile.stage import compile_all, default_jobs
from tilekern.tuning.executors.local import LocalExecutor
from tilekern.tuning.measure.stage import measure_all, tasks
from tilekern.tuning.publishing import keep_winners
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.journal import Journal
from tilekern.tuning.sweep.lines import is_copy
from tilekern.tuning.sweep.quarantine import shared

SMALL, HUGE = (faulty.SPEC.problem(rows=rows, columns=4096, dtype="float32") for rows in (4096, 1 << 25))
GOOD = [faulty.config("none", tile_n, occupancy) for tile_n in (512, 1024, 2048, 4096) for occupancy in (2, 4)]
# All get as many samples, so that their figures can be compared.
STRATEGY = "exhaustive"
BAD = [faulty.config(fault) for fault in (*faulty.ON_GPU, *faulty.IN_CALL)]


class Watched:
    """An executor that knows when each line came."""

    def __init__(self, executor):
        self._executor, self.came = executor, []

    def describe_gpu(self, target):
        return self._executor.describe_gpu(target)

    def run(self, todo):
        started = time.perf_counter()
        for journal, line in self._executor.run(todo):
            self.came.append([round(time.perf_counter() - started, 2), journal, name_of(line.get("candidate", ""))])
            yield journal, line


def name_of(key):
    """A config without what all have: ``fault=spin,tile_n=1024,occupancy=4``; another key as it is."""
    config = key.split("|")[2] if key.startswith("faulty|") else key
    return config.removeprefix("schedule=persistent,").removesuffix(",num_worker_warps=0,tma=False")


def planned(folder, problems):
    """A sweep of problems with the configs to try of each, compiled."""
    sweep = Sweep(folder)
    named = {("faulty", problem): configs for problem, configs in problems.items()}
    sweep.begin(here(), "faulty", list(named), named)
    assert compile_all(sweep, default_jobs()).failed == 0
    return sweep


def measured(sweep, root, launch_timeout_s):
    """Measure a sweep; what is known of each config after it."""
    with LocalExecutor(sweep.cache, 1, launch_timeout_s) as local, shared(sweep, root):
        executor = Watched(local)
        summary = measure_all(sweep, executor, keep_winners, STRATEGY)
    lines = {key: line for key, line in sweep.measured().items() if not is_copy(key)}
    return {
        "seconds": summary.seconds,
        "came": executor.came,
        "timed": {name_of(key): line["timing"]["median_us"] for key, line in lines.items() if "timing" in line},
        "failed": {name_of(k): line["check"]["reason"] for k, line in lines.items() if is_wrong(line)},
        "quarantined": {name_of(key): reason for key, reason in sweep.quarantined().items()},
        "skipped": [line["reason"] for line in Journal(sweep.folder / "skipped.jsonl", "skipped").latest().values()],
    }


def left(sweep, root):
    """The configs that another measure stage would try."""
    with shared(sweep, root):
        return [name_of(e.key) for task in tasks(sweep, [("faulty", SMALL)], STRATEGY) for e in task.entrants]


def is_wrong(line):
    return not line.get("check", {"passed": True})["passed"]


def main(folder, launch_timeout_s):
    root = folder / "root"
    start_server()
    good = planned(folder / "good", {SMALL: GOOD})
    found = {"good": measured(good, root, launch_timeout_s)}
    every = planned(folder / "every", {HUGE: GOOD[:1], SMALL: [*GOOD[:4], *BAD, *GOOD[4:]]})
    found["every"] = measured(every, root, launch_timeout_s)
    found["left"] = left(every, root)
    # Another folder on the same machine: what was compiled is there, what was measured is not.
    other = Sweep(folder / "other")
    shutil.copytree(every.folder / "artifacts", other.folder / "artifacts")
    for name in ("sweep.json", "compiled.jsonl", "gpu.jsonl"):
        shutil.copy(every.folder / name, other.folder)
    found["other"] = left(other, root)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
