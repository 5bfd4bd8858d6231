"""Plans of misses, until something better is there: looked up again now and then, off the calls' path.

A plan is settled where its record was measured on this very GPU for the problem's own bucket, and is fresh. Any other
(the model's own op, a default, a prediction, a neighbour's record, one of another search space) is provisional. A
thread looks these up again every ``TILEKERN_LOOKUP_AGAIN_S`` seconds (60; 0: never), so that a running job takes what
was published since it started, and no call pays for it: what calls read are the same dictionaries as ever.

A plan is replaced between two steps, never inside one. Where gradients are in play that is when an optimizer of torch
has made its step; of one that steps inside of the backward, at the end of that backward. In the middle of a step,
activation checkpointing runs a forward for the second time and holds it against the first, and a backward that looks
its own plans up must see what its forward saw. Without gradients nothing outlives a call, and the thread replaces the
plan itself, once it has made sure that no tensor waits for a backward (a job may evaluate first, and train then; inside
of a compiled graph gradients look switched off). Ranks of one job would not find a record at the same moment, so a job
of several ranks looks nothing up again unless the variable is set; and ranks that agreed on their kernels
(:mod:`tilekern.patch.comparing`) find nothing new even then, until they agree again.

The same thread writes down, at most every minute, how often the problems that no cache held were run.
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
# How often a process writes down its misses at most.
NOTE_EVERY_S = 60.0
# The number of the backward that a thread is in, where it is in none.
_NO_BACKWARD = -1


def interval_s() -> float:
    """Seconds between two lookups of what is provisional, by ``TILEKERN_LOOKUP_AGAIN_S``; 0: none.

    Raises:
        InputError: the variable is not such a number.
    """
    seconds = seconds_of(os.environ.get(AGAIN, ""))
    return INTERVAL_S if seconds is None else seconds


def is_settled(found: Hit | None) -> bool:
    """Whether nothing better can be published for a problem than what was found for it."""
    if found is None or not found.fresh:
        return False
    return found.exact_target and found.exact_bucket and found.record.provenance == "measured"


@dataclass
class _Problem:
    """A problem that is provisional.

    ``found`` is what it runs by, None for the model's own op; ``takers`` put a record's plan in place, by the plan's
    key; ``plans`` are those that run by ``found``, and ``past_launches`` those of plans that were let go of; ``better``
    was found later and is not taken yet.
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
        """Launches of what it runs by."""
        return self.past_launches + sum(plan.launches for plan in self.plans)

    @property
    def is_missed(self) -> bool:
        """Whether no cache held it: nothing was tuned for it, nor predicted."""
        return self.found is None or self.found.record.provenance == "default"


class Watch:
    """The provisional problems of this process.

    Args:
        fallbacks: how many calls of a kernel ran the model's own op.
        renewed: called when plans were replaced, so that none is remembered elsewhere.
    """

    def __init__(self, fallbacks: Callable[[str], int], renewed: Callable[[], None]) -> None:
        self._fallbacks, self._renewed = fallbacks, renewed
        self._graded = self._hooked = False
        self._lock = ForkLock()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Make anew what belongs to one process: a forked child does not have the thread."""
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
        """Watch a plan.

        Args:
            kernel: the spec's name.
            problem: at its buckets.
            target: the GPU.
            look: looks the problem up.
            found: what the plan comes of; None for the model's own op.
            plan: the plan that runs, None for the model's own op.
            key: names the plan.
            take: puts the plan of what is found later in its place, and gives it.

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
        """Keep no plan, as what runs by them is looked up anew; what they launched so far counts."""
        with self._lock:
            for watched in self._problems.values():
                watched.past_launches = watched.launches
                watched.plans, watched.takers = [], {}

    def forget(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            self._problems.clear()
            self._noted.clear()
            if self._end is not None:
                self._end.set()
                self._end = None

    def look(self) -> None:
        """Look each provisional problem up; what is better waits for :meth:`take`."""
        from tilekern.cache import CacheError

        for watched in self._listed():
            with contextlib.suppress(TilekernError, CacheError, OSError):
                found = watched.look()
                if found is not None and (watched.found is None or found.record != watched.found.record):
                    watched.better = found

    def take(self) -> int:
        """Replace the plans for which something better was found; how many."""
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
        """Write down how often missed problems were run, in the cache that their wanted list is in."""
        from tilekern import cache

        for root, misses in self._misses().items():
            if misses != self._noted.get(root) and cache.note_misses(root, self._process, misses):
                self._noted[root] = misses
        self._noted_at = time.monotonic()

    def _misses(self) -> dict[Path, dict[str, int]]:
        """Launches of what runs in the place of each missed problem; fallbacks are told by the kernel alone, and each
        of its problems that has no plan gets an even share.
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
        """Know of optimizers' steps and of the end of the process, from the first provisional plan on."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._graded |= torch.is_grad_enabled()
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_post_hook(self._after_step)
            atexit.register(self.note)

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
    """Whether any tensor of this process remembers how it was made, as all do between a forward and its backward."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        found = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
        return any(tensor.grad_fn is not None for tensor in found)


def of_several_ranks() -> bool:
    """Whether this process is one rank of several, by torch.distributed."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _waits() -> bool:
    """Whether this is one rank of several, and nobody has asked for lookups that may come at different moments."""
    return not os.environ.get(AGAIN) and of_several_ranks()
