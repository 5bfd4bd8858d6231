"""What runs in a disposable measuring process: check candidates, then time them."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from tuning.bench import Bench
from tuning.racing import race
from tuning.tasks import COPY, Entrant, Task
from tuning.timing import Stopwatch
from tuning.verifying import Check

CUDA, INPUTS, RACE = "start of CUDA", "inputs", "race"


def serve(connection: Connection, cache: str, device: str | None) -> None:
    """Answer the parent's tasks until it hangs up; each step is announced before it is taken.

    Args:
        connection: where tasks come from and answers go to: ``(kind, value)`` with the kinds ``begin`` (a step's
            name), ``checked`` (an entrant's key and its check), ``timed`` (timings by key) and ``done``.
        cache: the folder of the cache that composites look kernels up in.
        device: which of the host's GPUs to use, as ``CUDA_VISIBLE_DEVICES`` names it; None for the first.
    """
    os.environ["TILEKERN_CACHE_DIR"] = cache
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    watch: Stopwatch | None = None
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if watch is None:
            connection.send(("begin", CUDA))
            watch = Stopwatch(2 * task.target.l2_bytes)
            watch.warm_clocks()
        _measure(connection, watch, task)
        connection.send(("done", None))


def _measure(connection: Connection, watch: Stopwatch, task: Task) -> None:
    connection.send(("begin", INPUTS))
    bench = Bench(task)
    checks = dict(task.checks)
    for entrant in task.entrants:
        if entrant.key not in checks:
            connection.send(("begin", entrant.key))
            checks[entrant.key] = _checked(bench, entrant)
            connection.send(("checked", (entrant.key, checks[entrant.key])))
    racing = [entrant for entrant in task.entrants if entrant.is_aligned and checks[entrant.key].passed]
    if not racing:
        return
    launches = {}
    for entrant in racing:
        connection.send(("begin", entrant.key))
        launches[entrant.key] = bench.prepare(entrant)
        watch.round([launches[entrant.key]])
    launches[COPY] = bench.copy()
    connection.send(("begin", RACE))
    connection.send(("timed", race(watch, launches, [COPY, task.stay])))


def _checked(bench: Bench, entrant: Entrant) -> Check:
    import torch

    try:
        return bench.check(entrant)
    except torch.AcceleratorError:
        raise  # the CUDA context is gone: this process must go too
    except Exception as error:  # noqa: BLE001 (what a launch can raise is open; the reason goes into the journal)
        return Check(False, float("inf"), float("inf"), f"{type(error).__name__}: {error}".splitlines()[0][:300])
