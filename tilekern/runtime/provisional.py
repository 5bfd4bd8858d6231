"""Looks provisional plans up again, outside the calls' path, and replaces them when a better record was published.

A plan is settled if its record was measured on this very GPU for the problem's own bucket, and is fresh. Any other plan
is provisional: the model's own op, a default, a prediction, a neighbour's record, a record of another search space. A
thread looks these up again every ``TILEKERN_LOOKUP_AGAIN_S`` seconds (60; 0: never), so that a running job takes what
was published since it started. Calls pay nothing for it.

A plan is replaced between two steps, never inside one: activation checkpointing compares a second forward with the
first, and a backward that looks up its plans must see what its forward saw. With gradients, the moment is after the
step of a torch optimizer, or at the end of the backward if the optimizer steps inside it. Without gradients nothing
outlives a call, and the thread replaces the plan itself, after it has checked that no tensor waits for a backward: a
job may evaluate first and then train, and inside a compiled graph gradients look switched off.

Ranks of one job would not find a record at the same moment. So a job of several ranks looks nothing up again unless the
variable is set; ranks that agreed on their kernels (:mod:`tilekern.patch.comparing`) find nothing new even then, until
they agree again.

The same thread writes down, at most once a minute, how often problems without a record were run.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilekern.errors import TilekernError
from tilekern.runtime.locks import ForkLock
from tilekern.runtime.plans import Plan
from tilekern.runtime.settings import AGAIN, seconds_of
from tilekern.spec import Problem
from tilekern.spec.targets import Target
from tilekern.warning import warn, warn_once

if TYPE_CHECKING:
    from pathlib import Path

    from tilekern.cache import Hit

INTERVAL_S = 60.0
# A process writes down its misses at most this often.
NOTE_EVERY_S = 60.0
# torch's id of the current backward in a thread that is in no backward.
_NO_BACKWARD = -1


def interval_s() -> float:
    """Return the seconds between two lookups, by ``TILEKERN_LOOKUP_AGAIN_S``; 0 is never.

    Raises:
        InputError: the variable is not a number of seconds.
    """
    seconds = seconds_of(os.environ.get(AGAIN, ""))
    return INTERVAL_S if seconds is None else seconds


def is_settled(found: Hit | None) -> bool:
    """Return whether nothing better than this record can be published for its problem."""
    if found is None or not found.fresh:
        return False
    return found.exact_target and found.exact_bucket and found.record.provenance == "measured"


@dataclass
class _Problem:
    """A problem with provisional plans.

    ``found`` is the record it runs by, None for the model's own op. ``takers`` put a record's plan in place, by the
    plan's key. ``plans`` run by ``found``; ``past_launches`` are those of plans dropped since. ``better`` was found
    later and is not in use yet.
    """

    kernel: str
    item: str
    root: Path | None
    look: Callable[[], Hit | None]
    found: Hit | None
    plans: list[Plan] = field(default_factory=list)
    takers: dict[Hashable, Callable[[Hit], Plan | None]] = field(default_factory=dict)
    past_launches: int = 0
    better: Hit | None = None

    @property
    def launches(self) -> int:
        """Launches of its current plans and of dropped ones."""
        return self.past_launches + sum(plan.launches for plan in self.plans)

    @property
    def is_missed(self) -> bool:
        """Whether no cache had a tuned or predicted record of it."""
        return self.found is None or self.found.record.provenance == "default"


class Watch:
    """The provisional problems of this process.

    Args:
        fallbacks: returns how many calls of a kernel ran the model's own op.
        renewed: called after plans were replaced, to drop copies elsewhere.
    """

    def __init__(self, fallbacks: Callable[[str], int], renewed: Callable[[], None]) -> None:
        self._fallbacks, self._renewed = fallbacks, renewed
        self._graded = self._hooked = self._noted_at_exit = False
        self._lock = ForkLock()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Reset what belongs to one process: a forked child does not have the thread."""
        # Set to end the thread; None where there is none.
        self._end: threading.Event | None = None
        self._process = secrets.token_hex(8)
        self._problems: dict[Hashable, _Problem] = {}
        self._noted: dict[Path, dict[str, int]] = {}
        self._noted_at = time.monotonic()

    def add(
        self, kernel: str, problem: Problem, target: Target, look: Callable[[], Hit | None], found: Hit | None,
        plan: Plan | None, key: Hashable, take: Callable[[Hit], Plan | None],
    ) -> None:  # fmt: skip
        """Watch a plan of a problem at its buckets; ``found`` and ``plan`` are None for the model's own op.

        ``look`` looks the problem up; ``take`` replaces the plan ``key`` by that of a later record and returns it.

        Raises:
            InputError: ``TILEKERN_LOOKUP_AGAIN_S`` is not a number.
        """
        from tilekern import cache

        every_s = interval_s()
        item, root = cache.wanted_name(kernel, problem, target.describe()), cache.user_root_if_any()
        with self._lock:
            new = _Problem(kernel, item, root, look, found)
            watched = self._problems.setdefault((kernel, problem, target.key), new)
            watched.takers[key] = take
            watched.plans += [plan] if plan else []
            self._hook()
            if every_s and self._end is None:
                self._start(every_s)

    def _start(self, every_s: float) -> None:
        end = threading.Event()
        try:
            threading.Thread(target=self._work, args=(every_s, end), name="tilekern lookup", daemon=True).start()
        except RuntimeError as error:  # the process may have no more threads
            warn_once(f"{error}; what is published from now on is not taken by this job, unless it calls look_again")
        else:
            self._end = end

    def let_go(self) -> None:
        """Drop all plans, whose launches so far still count; their problems are looked up anew."""
        with self._lock:
            for watched in self._problems.values():
                watched.past_launches = watched.launches
                watched.plans, watched.takers = [], {}

    def forget(self) -> None:
        """Stop watching."""
        with self._lock:
            self._problems.clear()
            self._noted.clear()
            if self._end is not None:
                self._end.set()
                self._end = None

    def look(self) -> None:
        """Look up each provisional problem; better records wait for :meth:`take`."""
        from tilekern.cache import CacheError

        for watched in self._listed():
            with contextlib.suppress(TilekernError, CacheError, OSError):
                found = watched.look()
                if found is not None and (watched.found is None or found.record != watched.found.record):
                    watched.better = found

    def take(self) -> int:
        """Replace the plans for which a better record was found, and return how many."""
        taken = 0
        for name, watched in list(self._problems.items()):
            better, watched.better = watched.better, None
            if better is None:
                continue
            watched.found, before, watched.past_launches = better, watched.plans, 0
            watched.plans = []
            for take in list(watched.takers.values()):
                try:
                    plan = take(better)
                except Exception as error:  # noqa: BLE001 (a record that no plan comes of must not end the job's step)
                    warn(f"a new record of {watched.kernel} is not used: {error}")
                    watched.plans = before
                else:
                    watched.plans += [plan] if plan else []
                    taken += plan is not None
            if is_settled(better):
                with self._lock:
                    self._problems.pop(name, None)
        if taken:
            self._renewed()
        return taken

    def note(self) -> None:
        """Write down how often missed problems were run, in the cache with their wanted list."""
        from tilekern import cache

        for root, misses in self._misses().items():
            if misses != self._noted.get(root) and cache.note_misses(root, self._process, misses):
                self._noted[root] = misses
        self._noted_at = time.monotonic()

    def _misses(self) -> dict[Path, dict[str, int]]:
        """Return the runs of each missed problem.

        Fallbacks are counted by kernel; each of its problems without a plan gets an even share.
        """
        missed = [watched for watched in self._listed() if watched.is_missed]
        lacking = [watched.kernel for watched in missed if watched.found is None]
        found: dict[Path, dict[str, int]] = {}
        for watched in missed:
            runs = watched.launches
            if watched.found is None:
                runs += self._fallbacks(watched.kernel) // lacking.count(watched.kernel)
            if watched.root is not None:
                found.setdefault(watched.root, {})[watched.item] = max(1, runs)
        return found

    def _listed(self) -> list[_Problem]:
        return list(self._problems.values())

    def _hook(self) -> None:
        """Hook into the end of the process and, where torch is loaded, optimizers' steps, from the first plan on."""
        if not self._noted_at_exit:
            self._noted_at_exit = True
            atexit.register(self.note)
        if "torch" not in sys.modules:
            return
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._graded |= torch.is_grad_enabled()
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        import torch

        self._graded = True
        if not any(watched.better for watched in self._listed()) or _waits():
            return
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            self.take()
        else:  # the gradients that are still to come must see what their forward saw
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        import torch

        # A checkpoint's own backward comes to its end inside of another one's node.
        if torch._C._current_autograd_node() is None:
            self.take()

    def _work(self, every_s: float, end: threading.Event) -> None:
        taken = False
        while not end.wait(every_s):
            with self._lock:
                if not self._problems and self._end is end:
                    self._end = None
                    return
            if not _waits():
                self.look()
                if taken:
                    # A call that was at work then may have remembered what it had found just before.
                    self._renewed()
                better = any(watched.better for watched in self._listed())
                taken = better and not self._graded and not _awaits_backward() and self.take() > 0
            if time.monotonic() - self._noted_at > NOTE_EVERY_S:
                self.note()


def _awaits_backward() -> bool:
    """Return whether any tensor of this process has a gradient function, as between a forward and its backward."""
    if "torch" not in sys.modules:
        return False
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        found = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
        return any(tensor.grad_fn is not None for tensor in found)


def of_several_ranks() -> bool:
    """Return whether this process is one of several ranks of torch.distributed."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _waits() -> bool:
    """Return whether this is one of several ranks, and lookups at different moments were not asked for."""
    return not os.environ.get(AGAIN) and of_several_ranks()
