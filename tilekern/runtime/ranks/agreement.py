"""The agreement of a job's ranks on what to run: one snapshot, one target and one miss policy for all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from tilekern.cache import Hit
from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import CompileInterrupted, CompileTimeout, RanksDiffer
from tilekern.runtime.defaults import default_in_cache, made_default
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.targets import Target

# Between two tries at a compile that failed for what passes, in seconds.
_PAUSES_S = (1.0, 5.0, 20.0)


@dataclass
class Agreement:
    """The rules that every lookup of this process goes by while they are in force.

    Attributes:
        snapshot: where records are looked up, and nowhere else.
        target: the GPU that records are looked up for; a rank on another model of its arch uses it too.
        policy: what a miss does.
        compiled: defaults that a miss has compiled here. Each serves its own problem alone: as a neighbour it would
            serve on the ranks that happened to need it.
    """

    snapshot: Snapshot
    target: Target
    policy: str
    compiled: dict[tuple[str, Problem], Hit] = field(default_factory=dict)

    def covers(self, target: Target) -> bool:
        """Whether its kernels run on a GPU: this process may have others than the one that it agreed for."""
        return target.arch == self.target.arch

    def compile(self, spec: KernelSpec, problem: Problem) -> bool:
        """Compile a problem's default config, which all ranks can and which comes out alike on each.

        It is kept in the user's cache where that can be written and has no record of the problem; it runs in any case.
        Ranks that share a cache leave it to one of them. What the compiler rejects it rejects on every rank. For what
        passes (memory, a disk, a signal) other ranks may have been spared, so it is tried again, for half a minute.

        Returns:
            Whether it was compiled by this rank.

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
        self.compiled[spec.name, problem] = replace(made, layer=self.snapshot)
        return is_ours
