"""Measures and compiles on a Ray cluster; Ray schedules the work.

The job carries tilekern's code; nodes need its dependencies. Lines come back by calls that each wait for the next few,
since ``ray://`` has no streaming generators.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from tilekern.cache import Store, write_pack
from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import InputError
from tilekern.runtime.workers.pool import Answer, Compile, Lost
from tilekern.spec.targets import Target
from tilekern.tuning.compile.order import Order
from tilekern.tuning.executors.node import CompileWork, GpuNode, code_digest, compile_on_node
from tilekern.tuning.executors.ray_measuring import Measuring
from tilekern.tuning.executors.ray_nodes import (
    FREE_WITHIN_S,
    ask_again,
    connect,
    gpus_like,
    is_rays_own,
    reason_of,
    start_actor,
)
from tilekern.tuning.measure.process import LAUNCH_TIMEOUT_S, Noted
from tilekern.tuning.measure.tasks import Task
from tilekern.tuning.sweep.candidates import Candidate

# Candidates of one Ray task, which lowers their device function once; few, so that no CPU waits long for the last task.
MOST = 4
# Seconds between two looks whether the work is to be given up.
_LOOK_EVERY_S = 1.0


class ClusterExecutor:
    """Measures on the cluster's GPUs of the target's type, one actor each, and compiles on its CPUs.

    Args:
        address: ``ray://HOST:PORT``; None for the cluster that this host belongs to, or else a new one on this host.
        cache: the folder of the cache that composites look kernels up in.
        most: how many GPUs to use at most; all where None.
        launch_timeout_s: the least time that a candidate is given for what it launches.
        node: what runs on each GPU.

    Raises:
        InputError: the cluster cannot be reached, or has another Ray or Python.
    """

    def __init__(
        self, address: str | None, cache: Path, most: int | None = None, launch_timeout_s: float = LAUNCH_TIMEOUT_S,
        node: type[GpuNode] = GpuNode,
    ) -> None:  # fmt: skip
        self._cache, self._most, self._launch_timeout_s, self._node = cache, most, launch_timeout_s, node
        self._described: dict[str, dict[str, str]] = {}
        connect(address)

    @property
    def cores(self) -> int:
        """Return how many CPUs the cluster has, busy or not."""
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def spare_cores(self, target: Target) -> int:
        """Return how many CPUs are left for compilers while the cluster measures: each GPU in use holds one.

        Raises:
            InputError: no node has a GPU of the target's type.
        """
        return self.cores - self.width(target)

    def width(self, target: Target) -> int:
        """Return how many GPUs of the cluster measure at once, free now or not; no node is asked.

        Raises:
            InputError: no node has a GPU of the target's type.
        """
        _, count = gpus_like(target)
        return min(count, self._most or count)

    def describe_gpu(self, target: Target) -> dict[str, str]:
        """Return a GPU of the target's type, its driver, torch and libraries; :meth:`run` leaves others out.

        A worker that dies before it has answered, as on a busy node, is replaced.

        Raises:
            InputError: no node has such a GPU, none becomes free in ten minutes, or the node cannot measure.
        """
        try:
            self._described[target.key] = ask_again(lambda: self._describe(target), is_rays_own)
        except ray.exceptions.RayError as error:
            raise InputError(reason_of(error)) from None
        return dict(self._described[target.key])

    def _describe(self, target: Target) -> dict[str, str]:
        actor = start_actor(self._node, target, self._launch_timeout_s)
        try:
            asked = actor.describe.remote(code_digest(), target)
            if not ray.wait([asked], timeout=FREE_WITHIN_S)[0]:
                raise InputError(f"no {target.name} of the cluster became free within {FREE_WITHIN_S:g} s")
            found: dict[str, str] = ray.get(asked)
            return found
        finally:
            ray.kill(actor)

    def run(self, tasks: Iterable[Task]) -> Iterator[Noted]:
        """Measure the tasks, the longest available first.

        A lost node costs the candidate in flight: another node does the rest of its task, once.

        Raises:
            InputError: no GPU is left that could measure.
        """
        coming = iter(tasks)
        first = next(coming, None)
        if first is None:
            return
        target = first.target
        at_most = self.width(target)
        if isinstance(tasks, Sequence):
            at_most = min(len(tasks), at_most)
        else:
            tasks = itertools.chain([first], coming)
        gpu = self._described.get(target.key) or self.describe_gpu(target)
        measuring = Measuring(
            tasks, target, gpu, self._pack(), lambda: start_actor(self._node, target, self._launch_timeout_s)
        )  # fmt: skip
        yield from measuring.lines(at_most)

    def compile_in_order(
        self, order: Order, compile_one: Compile, jobs: int, limit_s: float, memory_bytes: int
    ) -> Iterator[Answer | Lost]:
        """Compile candidates as :func:`tilekern.tuning.compile.pool.compile_in_order` does on this host.

        If the cluster has fewer CPUs than ``jobs``, Ray keeps tasks waiting. It runs the tasks of a lost node again.

        Raises:
            InputError: a node has another compiler or none, or some candidates were lost with their nodes.
            ToolchainMissing: this host has no compiler to compare the nodes' with.
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

    def _pack(self) -> bytes:
        """Return the cache as one pack; empty if it has no records."""
        store = Store(self._cache)
        found = [entry.record for entry in store.entries() if entry.record]
        if not found:
            return b""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "winners.pack"
            write_pack(path, [(record, {name: store.read_blob(name) for name in record.digests}) for record in found])
            return path.read_bytes()


def _take(order: Order, before: Candidate | None) -> list[Candidate]:
    """Take the next candidates for one Ray task, in the order of a single worker."""
    found: list[Candidate] = []
    while len(found) < MOST and (item := order.take(before)):
        found.append(item)
        before = item
    return found


def _answers(ref: Any, items: list[Candidate], lost: list[str]) -> list[Answer | Lost]:
    """Return the outcomes; candidates that were lost are only noted in ``lost``, and tried again by the next run."""
    try:
        found: list[Answer | Lost] = ray.get(ref)
        return found
    except ray.exceptions.RayTaskError as error:
        raise InputError(reason_of(error)) from None
    except ray.exceptions.RayError as error:
        lost += [reason_of(error)] * len(items)
        return []
