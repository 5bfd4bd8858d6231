"""An executor that answers with what an H200 measured once, so that the measure stage runs with no GPU."""

import functools
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tilekern.runtime.workers.pool import Answer
from tilekern.spec import Config, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.compile.order import Order
from tilekern.tuning.executors import FINISHED
from tilekern.tuning.measure.process import Noted
from tilekern.tuning.measure.tasks import Entrant, Task
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import copy_key

GPU = {"gpu": "NVIDIA H200", "driver": "580.159.03", "torch": "2.11.0"}
RIGHT = {"passed": True, "relative_error": 1e-7, "elementwise_error": 1e-7}
WRONG = {"passed": False, "relative_error": 0.5, "elementwise_error": 0.9, "reason": "y: relative error"}
COPY_US = 3.0
# Of candidates of CuTe DSL, which the record is older than: more than that of any of cuTile's.
CUTE_US = 1000.0


@functools.cache
def times() -> dict[tuple[str, Problem, Config], float]:
    """Medians in microseconds of a sweep of Qwen3-8B on an H200."""
    data = Path(__file__).with_name("data") / "qwen3-8b-h200.json.gz"
    rows = json.loads(gzip.decompress(data.read_bytes()))["rows"]
    return {(r["kernel"], Problem(r["problem"]), Config(r["config"])): r["median_us"] for r in rows}


class RecordedExecutor:
    """Measures tasks one after another, from the record.

    Args:
        pause_s: how long a check takes; a race takes three times as long.
        gpu: what it says of the GPU.
        factors: how many times slower than recorded a config is, by its key, or by the problem's rows and its key.
        wrong: keys of the configs that fail their checks.
        crashing: keys of the configs that go into quarantine.
    """

    def __init__(self, pause_s=0.0, gpu=GPU, factors=None, wrong=(), crashing=()):
        self._pause_s, self._gpu, self._factors = pause_s, gpu, factors or {}
        self._wrong, self._crashing = set(wrong), set(crashing)
        self.tasks: list[Task] = []
        self.checked: list[str] = []

    def __enter__(self) -> "RecordedExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""

    def describe_gpu(self, target: Target) -> dict[str, str]:  # noqa: ARG002
        return dict(self._gpu)

    def width(self, target: Target) -> int:  # noqa: ARG002
        return 1

    def run(self, tasks: Sequence[Task]) -> Iterator[Noted]:
        for task in tasks:
            self.tasks.append(task)
            yield from self._measure(task)
            yield FINISHED, {"kernel": task.kernel, "problem": task.problem.key}

    def _measure(self, task: Task) -> Iterator[Noted]:
        checks = {key: check.as_dict() for key, check in task.checks.items()}
        for entrant in task.entrants:
            name = entrant.candidate.config.key
            if name in self._crashing and entrant.is_aligned:
                yield "quarantine", {"candidate": entrant.key, "reason": "the process died (exit code 7)"}
            elif entrant.key not in checks:
                checks[entrant.key] = WRONG if name in self._wrong and entrant.is_aligned else RIGHT
                self.checked.append(entrant.key)
                time.sleep(self._pause_s)
                yield "measured", {"candidate": entrant.key, "check": checks[entrant.key]}
        racing = [e for e in task.entrants if e.is_aligned and checks.get(e.key, WRONG)["passed"]]
        time.sleep(3 * self._pause_s)
        fastest = min(map(self.time_us, racing), default=0.0)
        for entrant in racing:
            time_us = self.time_us(entrant)
            samples = 85 if time_us <= 1.04 * fastest or entrant.key == task.stay else 5
            yield "measured", {"candidate": entrant.key, "check": checks[entrant.key], **timing(time_us, samples)}
        if racing:
            yield "measured", {"candidate": copy_key(task.kernel, task.problem), **timing(COPY_US)}

    def time_us(self, entrant: Entrant) -> float:
        item = entrant.candidate
        name = item.config.key
        factor = self._factors.get(name, self._factors.get((item.problem["rows"], name), 1.0))
        return factor * (CUTE_US if item.backend.name == "cute" else times()[item.kernel, item.problem, item.config])


def timing(median_us: float, samples: int = 85) -> dict:
    return {"timing": {"median_us": round(median_us, 3), "spread_us": 0.1, "samples": samples}}


class Known:
    """A pool that answers with what an earlier sweep compiled, one artifact at a time.

    Args:
        sweep: the earlier sweep.
        before: called with each candidate before its answer is given.
    """

    def __init__(self, sweep: Sweep, before=lambda _: None) -> None:
        self._sweep, self._lines, self._before = sweep, sweep.compiled(), before
        self.compiled: list[str] = []

    def __call__(self, order: Order, compile_one, jobs, limit_s, memory_bytes):  # noqa: ARG002
        item = None
        while (item := order.take(item)) is not None and not order.is_over.is_set():
            self._before(item)
            line = self._lines[item.artifact]
            self.compiled.append(item.artifact)
            yield Answer({name: line[name] for name in line if name not in ("seal", "toolkit")},
                         self._sweep.cubin(line["sha256"]))  # fmt: skip
