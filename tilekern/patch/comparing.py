"""Make the ranks of a job run the same kernels: they compare their caches, and the lowest rank's choice wins.

Not every rank calls every op, so nothing is exchanged when a problem's plan is looked up. The ranks exchange once, when
all of them are there: in :func:`tilekern.apply` or :func:`tilekern.apply_to_model` if torch.distributed is up, else at
the end of ``init_process_group``. :func:`agree` repeats it. From then on lookups read the agreed snapshot and no cache
(:class:`tilekern.runtime.ranks.agreement.Agreement`).

The steps are those of :class:`tilekern.runtime.ranks.peers.Peers`. Each rank says in some hundred bytes what it has.
Every rank finds the leader from that: for each arch the lowest rank with such a GPU
(:mod:`tilekern.runtime.ranks.election`). If all digests of an arch are equal, nothing else is sent. Otherwise the
leader names its records, the others ask for those that they need, the leader sends them once for all, and each rank
names those that it does not trust, which all drop. At the end all compare what they hold.

No rank trusts another more than a cache: records are checked field by field, and with ``TILEKERN_TRUST=signed`` each
rank asks its own trust roots.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilekern import __version__
from tilekern.cache import CacheError, default_layers, problem_key
from tilekern.cache.trust.policy import must_be_signed
from tilekern.compile.library import libraries_here
from tilekern.compile.toolchain import toolkit
from tilekern.errors import InputError, RanksDiffer, TilekernError
from tilekern.kernels import all_specs
from tilekern.patch.warmup import asked_by, exact_part
from tilekern.runtime import dispatch
from tilekern.runtime.provisional import of_several_ranks
from tilekern.runtime.ranks.agreement import Agreement
from tilekern.runtime.ranks.election import Status, verdict_on
from tilekern.runtime.ranks.exchange import Taken, compare, take_over
from tilekern.runtime.ranks.held import identity
from tilekern.runtime.ranks.peers import Peers, one_line
from tilekern.runtime.ranks.snapshot import Snapshot, digest_of
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target, resolve
from tilekern.warning import warn_once

if TYPE_CHECKING:
    import torch

_LARGEST_STATUS = 2**14
# Process groups without a store that their ranks share.
_WITHOUT_STORE = ("fake", "mpi")
_round = 0
_agreed_in: weakref.ref[Any] | None = None
_unarm: Callable[[], None] | None = None


@dataclass(frozen=True)
class Agreed:
    """The outcome of an exchange on this rank.

    Attributes:
        ranks: how many took part.
        leader: whose records are run here.
        digest: of the records that were agreed on, in hexadecimal.
        records: how many these are.
        received: how many of them came from the leader, since the caches here did not have them.
        untrusted: how many of the leader's records were left out, since a rank does not trust them.
        sent_bytes: how much this rank said.
        received_bytes: how much the others said to it.
        seconds: what it took, the caches' reading included.
    """

    ranks: int
    leader: int
    digest: str
    records: int
    received: int
    untrusted: int
    sent_bytes: int
    received_bytes: int
    seconds: float


def agree() -> Agreed | None:
    """Have all ranks of the job run the kernels of one: compare what their caches hold, and take over what differs.

    Every rank must call it, between two steps: it drops all plans, and the caches of the leader are read anew. Without
    torch.distributed, with one rank and without a GPU nothing is done, and None returned.

    Raises:
        RanksDiffer: a rank did not come within the process group's timeout, has other sources of the kernels, could
            not take the records over, or holds other ones in the end.
    """
    global _agreed_in, _round  # noqa: PLW0603
    if not of_several_ranks():
        return None
    import torch.distributed as dist

    if dist.get_backend() in _WITHOUT_STORE:
        return None
    _round += 1
    try:
        done = _agreed(_round)
        _agreed_in = weakref.ref(dist.group.WORLD)
        return done
    except (RuntimeError, MemoryError) as error:  # a rank is gone, or the network to it
        reason = f"{one_line(str(error)):.200}"
        raise RanksDiffer(f"rank {dist.get_rank()} lost the ranks that it agrees with on kernels: {reason}") from None


def agree_when_up() -> None:
    """Agree, as patching does: at once where torch.distributed is up and has not agreed, else as soon as it is up."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    _arm()
    if dist.is_initialized() and (_agreed_in is None or _agreed_in() is not dist.group.WORLD):
        agree()


def unarm() -> None:
    """Agree no more when torch.distributed comes up."""
    global _unarm  # noqa: PLW0603
    if _unarm is not None:
        _unarm()
        _unarm = None


def cache_digest(model: torch.nn.Module | None = None, *, gpu: str = "auto") -> str:
    """Return a digest of the records that run here; equal ones on two ranks mean that they run the same kernels.

    Args:
        model: None for what this process has resolved so far, the model's own op where there is no record; a model for
            what a training step of it, patched or not as it is, would resolve, however many tokens it has.
        gpu: with a model, for which GPU: ``auto``, a name or an arch.

    Returns:
        64 hexadecimal digits.

    Raises:
        InputError: the model has no configuration or its step cannot be traced, or there is no such GPU.
    """
    if model is None:
        lines = [
            f"{kernel}/{problem_key(dict(problem))}/{record and identity(record)}"
            for (kernel, problem), record in dispatch.resolved().items()
        ]
        return digest_of(sorted(lines))
    target = dispatch.here() if gpu == "auto" else resolve(gpu)
    if target is None:
        raise InputError("cache_digest: this machine has no CUDA GPU; name one, for example gpu='H200'")
    asked = asked_by(model, target)
    return _snapshot(target, lambda spec, problem: exact_part(spec, problem) in asked).digest


def _snapshot(target: Target, wanted: Callable[[KernelSpec, Problem], bool] | None = None) -> Snapshot:
    tools = toolkit()
    return Snapshot.take(target.arch, default_layers(), tools.key if tools else None, wanted)


def _agreed(number: int) -> Agreed | None:
    """Take part in one agreement; dispatch goes by the outcome from here on. ``number`` counts them in this process."""
    started = time.perf_counter()
    target, own = None if dispatch.interpreting() else dispatch.here(), Snapshot(())
    said: bytes | Exception
    try:
        own = own if target is None else _snapshot(target)
        tools = toolkit()
        specs = sorted(all_specs().items())
        sources = digest_of([__version__, *(f"{name}/{source_digest(spec.module)}" for name, spec in specs)])
        policy, compiler = dispatch.miss_policy(agreed=False), tools.key if tools else None
        said = Status(target, compiler, policy, must_be_signed(), sources, libraries_here(), own.digest).to_bytes()
    except (TilekernError, CacheError, OSError) as error:
        said = error
    with Peers(number) as peers:
        statuses = []
        for rank, data in enumerate(peers.gather("say which kernels it would run", said, _LARGEST_STATUS)):
            try:
                statuses.append(Status.from_bytes(data))
            except CacheError as error:
                raise RanksDiffer(f"what rank {rank} says of itself is not a status: {one_line(str(error))}") from None
        verdict = verdict_on(statuses)
        group = verdict.groups.get(target.arch) if target is not None else None
        taken = Taken(own)
        for each in verdict.groups.values():
            if each.differ:
                found = take_over(peers, each.leader, own if each is group else None)
                taken = found if each is group else taken
        agreement = None if group is None else Agreement(taken.snapshot, group.target, group.policy)
        compare(peers, [each.members for each in verdict.groups.values()], agreement)
    for note in filter(None, (*verdict.notes, taken.note)):
        warn_once(note)
    if group is None or agreement is None:
        return None
    dispatch.agree_on(agreement)
    return Agreed(
        peers.ranks, group.leader, taken.snapshot.digest, len(taken.snapshot), taken.received, taken.untrusted,
        peers.sent_bytes, peers.received_bytes, time.perf_counter() - started,
    )  # fmt: skip


def _arm() -> None:
    """Agree whenever ``init_process_group`` has come to its end, by whichever module's name it is called."""
    global _unarm  # noqa: PLW0603
    if _unarm is not None:
        return
    import torch.distributed as dist

    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        agree()
        return result

    def exchange(old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("init_process_group") is old:
                module.__dict__["init_process_group"] = new

    exchange(original, init_process_group)
    _unarm = functools.partial(exchange, init_process_group, original)
