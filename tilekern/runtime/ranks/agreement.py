"""The agreement of a job's ranks on what to run: one snapshot, one target and one miss policy for all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tilekern.cache import Hit
from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import CompileInterrupted, CompileTimeout, RanksDiffer
from tilekern.runtime.defaults import default_in_cache, made_default
from tilekern.runtime.ranks.merged import Merged
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.targets import Target

# Between two tries at a compile that failed for what passes, in seconds.
_PAUSES_S = (1.0, 5.0, 20.0)


@dataclass
class Agreement:
    """The rules for every lookup of this process while they are in force.

    Attributes:
        snapshot: the only place where records are looked up.
        target: the GPU that records are looked up for, also on a rank with another model of its arch.
        policy: the miss policy.
        compiled: defaults that misses compiled here. Each serves only its own problem; as a neighbour it would serve
            only on the ranks that happened to need it.
    """

    snapshot: Snapshot | Merged
    target: Target
    policy: str
    compiled: dict[tuple[str, Problem], Hit] = field(default_factory=dict)

    def covers(self, target: Target) -> bool:
        """Return whether its kernels run on a GPU; this process may have several."""
        return target.arch == self.target.arch

    def compile(self, spec: KernelSpec, problem: Problem) -> bool:
        """Compile a problem's default config, with the same result on each rank.

        It is stored in the user's cache if that can be written and has no record of the problem. Ranks that share a
        cache leave the compile to one of them. What the compiler rejects it rejects on every rank. A failure for a
        reason that passes (memory, a disk, a signal) may not have hit other ranks, so it is tried again for half a
        minute.

        Returns:
            Whether this rank compiled it.

        Raises:
            RanksDiffer: it could not be compiled here, for a reason that other ranks may not have met.
            CompileFailed: the compiler rejected it.
        """
        key = require_toolkit().key
        for pause_s in (*_PAUSES_S, None):
            try:
                made, is_ours = made_default(
                    spec, problem, self.target, lambda: default_in_cache(spec, problem, self.target, key)
                )
                break
            except (CompileInterrupted, CompileTimeout, OSError, MemoryError) as error:
                if pause_s is None or isinstance(error, CompileTimeout):
                    raise RanksDiffer(
                        f"this rank cannot compile {spec.name} for {problem.key}, which other ranks may have compiled: "
                        f"{str(error) or type(error).__name__}; mend that, or tune before the job"
                    ) from None
            time.sleep(pause_s)
        self.compiled[spec.name, problem] = made.in_layer(self.snapshot)
        return is_ours
