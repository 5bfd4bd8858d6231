"""Make the ranks of a job run the same kernels: they compare their caches, and the lowest rank's choice wins.

Not every rank calls every op, so looking up a problem's plan exchanges nothing. The ranks exchange once, when
all are there: in :func:`tilekern.apply` or :func:`tilekern.apply_to_model` if torch.distributed is up, else at the end
of ``init_process_group``. :func:`agree` repeats it. From then on lookups read the agreed snapshot instead of the caches
(:class:`tilekern.runtime.ranks.agreement.Agreement`).

The steps use :class:`tilekern.runtime.ranks.peers.Peers`:

1. Each rank sends a status of some hundred bytes.
2. From the statuses every rank derives the leader of each arch: the lowest rank with such a GPU
   (:mod:`tilekern.runtime.ranks.election`). If all digests of an arch are equal, nothing else is sent.
3. Otherwise the leader lists its records, the others request the records that they need, and the leader sends these
   once to all.
4. Each rank lists the records that it does not trust; all ranks drop these.
5. All ranks compare their final records.

A rank trusts another rank no more than a cache: records are checked field by field, and with
``TILEKERN_TRUST=signed`` each rank uses its own trust roots.
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
from tilekern.runtime.ranks.election import Group, Status, verdict_on
from tilekern.runtime.ranks.exchange import Taken, compare, take_over
from tilekern.runtime.ranks.held import identity
from tilekern.runtime.ranks.merged import Merged
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
        ranks: number of ranks that took part.
        leader: the rank whose records are run here.
        digest: digest of what was agreed on, in hexadecimal: of caches that are equal on all ranks, else of records.
        records: number of agreed records; in equal caches, of which none is read, those of older sources count too.
        received: number of records that came from the leader because the caches here did not have them.
        untrusted: number of the leader's records that were left out because a rank does not trust them.
        sent_bytes: bytes sent by this rank.
        received_bytes: bytes received from the others.
        seconds: duration, including the reading of the caches.
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
    """Make all ranks of the job run the leader's kernels: compare the caches and copy the records that differ.

    Every rank must call it, between two steps: it drops all plans and reads the leader's caches again. Without
    torch.distributed, with a single rank or without a GPU it does nothing and returns None.

    Raises:
        RanksDiffer: a rank did not come within the process group's timeout, has other sources of the kernels, could
            not take the records over, or has other records in the end.
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
    except (RuntimeError, MemoryError) as error:  # a rank died, or the network failed
        reason = f"{one_line(str(error)):.200}"
        raise RanksDiffer(f"rank {dist.get_rank()} lost the ranks that it agrees with on kernels: {reason}") from None


def agree_when_up() -> None:
    """Agree at once if torch.distributed is up and has not agreed yet, else as soon as it is up."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    _arm()
    if dist.is_initialized() and (_agreed_in is None or _agreed_in() is not dist.group.WORLD):
        agree()


def unarm() -> None:
    """Stop agreeing when torch.distributed comes up."""
    global _unarm  # noqa: PLW0603
    if _unarm is not None:
        _unarm()
        _unarm = None


def cache_digest(model: torch.nn.Module | None = None, *, gpu: str = "auto") -> str:
    """Return a digest of the records that run here; equal digests on two ranks mean that they run the same kernels.

    Args:
        model: None for the lookups of this process so far; a lookup without a record counts as the model's own op. With
            a model, the digest is of the lookups of its training step, patched or not, for any number of tokens.
        gpu: with a model, the GPU: ``auto``, a name or an arch.

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
    return Snapshot.take(**_lookups(target), wanted=wanted)


def _own_records(target: Target) -> Merged | Snapshot:
    """Return what this rank would run: its layers, or all their records, of which each rank may trust others."""
    return _snapshot(target) if must_be_signed() else Merged(**_lookups(target))


def _lookups(target: Target) -> dict[str, Any]:
    """Return where this process looks records up, and how."""
    tools = toolkit()
    return {
        "arch": target.arch, "layers": default_layers(), "toolkit_key": tools.key if tools else None,
        "invariant": dispatch.is_invariant(),
    }  # fmt: skip


def _taken_over(peers: Peers, group: Group, own: Merged | Snapshot) -> Taken:
    """Take over the records of this rank's group: those of folders, if all else is equal, else all."""
    if isinstance(own, Snapshot):
        return take_over(peers, group.leader, own)
    if group.packs_differ:
        return take_over(peers, group.leader, own.snapshot())
    taken = take_over(peers, group.leader, own.folders)
    assert isinstance(taken.snapshot, Snapshot)
    return taken._replace(snapshot=own.having(taken.snapshot))


def _agreed(number: int) -> Agreed | None:
    """Take part in one agreement and make dispatch use the outcome; ``number`` counts this process's agreements."""
    started = time.perf_counter()
    target = None if dispatch.interpreting() else dispatch.here()
    own: Merged | Snapshot = Snapshot(())
    said: bytes | Exception
    try:
        own = own if target is None else _own_records(target)
        tools = toolkit()
        specs = sorted(all_specs().items())
        sources = digest_of([__version__, *(f"{name}/{source_digest(spec.module)}" for name, spec in specs)])
        policy, compiler = dispatch.miss_policy(agreed=False), tools.key if tools else None
        packs = own.rest if isinstance(own, Merged) else own.digest
        said = Status(
            target, compiler, policy, must_be_signed(), sources, libraries_here(), own.digest, packs
        ).to_bytes()
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
            if each.differ and each is group:
                taken = _taken_over(peers, each, own)
            elif each.differ:
                take_over(peers, each.leader, None)
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
    """Agree at the end of each ``init_process_group``, whichever module's name it is called by."""
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
