"""The agreement of a job's ranks on what to run: one snapshot, one target and one miss policy for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilekern.cache import CacheError, FolderLayer, Hit, Record, Store, user_root
from tilekern.errors import CompileTimeout, RanksDiffer
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.runtime.records import compiled_default
from tilekern.spec import KernelSpec, Problem
from tilekern.targets import Target


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

    def compile(self, spec: KernelSpec, problem: Problem) -> Hit:
        """Compile a problem's default config, which all ranks can and which comes out alike on each.

        It is kept in the user's cache where that can be written and has no record of the problem; it runs in any case.

        Raises:
            RanksDiffer: the compiler took too long here, which it may not have on another rank.
            CompileFailed: the compiler rejected it, as it does on every rank.
        """
        try:
            record, blobs = compiled_default(spec, problem, self.target)
        except CompileTimeout as error:
            raise RanksDiffer(f"{error}; other ranks may have compiled {spec.name} for {problem.key}") from None
        made = Hit(record, self.snapshot, True, True, blobs)
        self.compiled[spec.name, problem] = made
        _keep(record, blobs)
        return made


def _keep(record: Record, blobs: dict[str, bytes]) -> None:
    """Put a record into the user's cache unless there is one from the same source, which may be a better one."""
    root, place = user_root(), record.address
    try:
        present = FolderLayer(root, "user").read_record(*place[:3], record.problem)
        if present.source_digest == record.source_digest:
            return
    except CacheError:
        pass
    try:
        Store(root).write(record, blobs)
    except CacheError:
        return  # it runs from memory; the next start compiles it again
