"""The compile stage on a Ray cluster: each Ray task compiles some candidates of a device function on one CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray

from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import InputError
from tilekern.tuning.compile.order import Order
from tilekern.tuning.compile.pool import Answer, Compile, Lost
from tilekern.tuning.executors.node import CompileWork, compile_on_node
from tilekern.tuning.executors.ray_nodes import reason_of
from tilekern.tuning.sweep.candidates import Candidate

# Candidates of one Ray task, which lowers their device function once: few, so that no CPU waits long for the last one.
MOST = 4
# How often it is looked whether the work is to be given up, in seconds.
_LOOK_EVERY_S = 1.0


def compile_on_cluster(
    order: Order, compile_one: Compile, jobs: int, limit_s: float, memory_bytes: int
) -> Iterator[Answer | Lost]:
    """Have candidates compiled on the cluster; Ray runs the tasks of a lost node again, on another one.

    Args:
        order: the candidates.
        compile_one: what a worker runs.
        jobs: how many Ray tasks at once; where the cluster has fewer CPUs, Ray keeps the others waiting.
        limit_s: how long a worker may be at a candidate, in seconds.
        memory_bytes: how much address space a worker, and each process that it starts, may have.

    Raises:
        InputError: a node has another compiler or none, or some candidates were lost with their nodes.
        ToolchainMissing: this host has no compiler.
    """
    toolkit_key = require_toolkit().key
    order.take_in()
    remote = ray.remote(compile_on_node).options(num_cpus=1, max_retries=1)
    at_work: dict[Any, list[Candidate]] = {}

    def begin(before: Candidate | None) -> None:
        if items := _take(order, before):
            work = CompileWork.of(toolkit_key, items, compile_one, limit_s, memory_bytes)
            at_work[remote.remote(work)] = items

    lost: list[str] = []
    try:
        for _ in range(jobs):
            begin(None)
        while at_work and not order.is_over.is_set():
            done, _ = ray.wait(list(at_work), timeout=_LOOK_EVERY_S)
            for ref in done:
                items = at_work.pop(ref)
                answers = _answers(ref, items, lost)
                begin(items[-1])
                yield from answers
    finally:
        for ref in at_work:
            ray.cancel(ref, force=True)
    if lost:
        raise InputError(f"{len(lost)} artifacts were not compiled, as {lost[0]}; run again for them")


def _take(order: Order, before: Candidate | None) -> list[Candidate]:
    """The next candidates for one Ray task, as one worker would take them after another."""
    found: list[Candidate] = []
    while len(found) < MOST and (item := order.take(before)):
        found.append(item)
        before = item
    return found


def _answers(ref: Any, items: list[Candidate], lost: list[str]) -> list[Answer | Lost]:
    """The outcome for candidates; of those that were lost it is only noted why, as they are to be tried again."""
    try:
        found: list[Answer | Lost] = ray.get(ref)
        return found
    except ray.exceptions.RayTaskError as error:
        raise InputError(reason_of(error)) from None
    except ray.exceptions.RayError as error:
        lost += [reason_of(error)] * len(items)
        return []
