"""Ranks of one job run the same kernels: they compare what their caches hold, and the lowest rank's choice is all's.

When. A problem's plan is found at its first call, and not every rank makes every call: so nothing is exchanged there.
The exchange is made once, at a moment that all ranks come to: in :func:`tilekern.apply` or
:func:`tilekern.apply_to_model` where torch.distributed is up by then, else when ``init_process_group`` has come to its
end, which ``apply`` sees to. :func:`agree` makes it again, or where neither was called. From then on a lookup reads the
snapshot that was agreed on and no cache (:class:`tilekern.agreement.Agreement`), so that a problem is answered alike on
whichever rank asks for it, whenever it does, whatever has become of the caches, and with no further exchange.

How. Through the store that ranks meet at, and not by a collective: it needs neither a device nor a communicator, which
a job may not have chosen yet, and cannot be taken for a collective of the job's own. Each rank puts a status of some
hundred bytes there; rank 0 reads them and says who leads: of each arch the lowest rank with such a GPU. Where all
digests are equal that is all. Else the leader gives the names and digests of its records to those that differ, they
name what they lack, and it gives them that, once for all. Whoever waits does so for the timeout of the process group.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tilekern import __version__, dispatch
from tilekern.agreement import Agreement
from tilekern.cache import CacheError, default_layers, problem_key
from tilekern.cache.trust import must_be_signed
from tilekern.errors import InputError, RanksDiffer, TilekernError
from tilekern.kernels import all_specs
from tilekern.provisional import of_several_ranks
from tilekern.snapshot import Snapshot, digest_of, identity
from tilekern.source import digest_of_module
from tilekern.spec import KernelSpec, Problem
from tilekern.targets import Target, resolve
from tilekern.toolchain import toolkit
from tilekern.warmup import is_named, sizes_of
from tilekern.warning import warn_once

if TYPE_CHECKING:
    import torch

# A store takes values of at most 8 MiB.
_CHUNK_BYTES = 4 << 20
# How much of the timeout rank 0 waits for all others, so that they have its verdict within theirs.
_FIRST = 0.8
# Process groups without a store that their ranks share.
_WITHOUT_STORE = ("fake", "mpi")
_round = 0
_agreed_in: weakref.ref[Any] | None = None
_unarm: Callable[[], None] | None = None


@dataclass(frozen=True)
class Agreed:
    """What came of an exchange on this rank.

    Attributes:
        ranks: how many took part.
        leader: whose records are run here.
        digest: of the records that were agreed on, in hexadecimal.
        records: how many these are.
        received: how many of them came from the leader, since the caches here lacked them.
        sent_bytes: what this rank put into the store.
        received_bytes: what it read from there.
        seconds: what it took, the caches' reading included.
    """

    ranks: int
    leader: int
    digest: str
    records: int
    received: int
    sent_bytes: int
    received_bytes: int
    seconds: float


def agree() -> Agreed | None:
    """Have all ranks of the job run the kernels of one: compare what their caches hold, and take over what differs.

    Every rank must call it, between two steps: it drops all plans, and the caches of the leader are read anew. Without
    torch.distributed, with one rank and without a GPU nothing is done, and None returned.

    Raises:
        RanksDiffer: a rank did not come within the process group's timeout, has other sources of the kernels, or could
            not take the records over.
    """
    global _agreed_in, _round  # noqa: PLW0603
    if not of_several_ranks():
        return None
    import torch.distributed as dist

    if dist.get_backend() in _WITHOUT_STORE:
        return None
    _round += 1
    exchange = _Exchange(_round)
    try:
        done = exchange.run()
        _agreed_in = weakref.ref(dist.group.WORLD)
        return done
    except RuntimeError as error:  # of the store: a rank is gone, or the network to it
        reason = " ".join(str(error).split())[:200]
        raise RanksDiffer(f"rank {exchange.rank} lost the ranks that it agrees with on kernels: {reason}") from None


def agree_when_up() -> None:
    """What patching does: agree at once where torch.distributed is up and has not agreed, else as soon as it is up."""
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
    """A digest of the records that run here; equal ones on two ranks mean that they run the same kernels.

    Args:
        model: None for what this process has resolved so far, the model's own op where there is no record; a model for
            what it would resolve: all records whose exact sizes its configuration names.
        gpu: with a model, for which GPU: ``auto``, a name or an arch.

    Returns:
        64 hexadecimal digits.

    Raises:
        InputError: the model has no configuration, or there is no such GPU.
    """
    if model is None:
        lines = [
            f"{kernel}/{problem_key(dict(problem))}/{record and identity(record)}"
            for (kernel, problem), record in dispatch.resolved().items()
        ]
        return digest_of(sorted(lines))
    sizes, target = sizes_of(model), dispatch.here() if gpu == "auto" else resolve(gpu)
    if target is None:
        raise InputError("cache_digest: this machine has no CUDA GPU; name one, for example gpu='H200'")
    return _snapshot(target, lambda spec, problem: is_named(spec, problem, sizes)).digest


def _snapshot(target: Target, wanted: Callable[[KernelSpec, Problem], bool] | None = None) -> Snapshot:
    tools = toolkit()
    return Snapshot.take(target.arch, default_layers(), tools.key if tools else None, wanted)


class _Exchange:
    """One agreement among the ranks of the default process group; ``number`` counts them in this process."""

    def __init__(self, number: int) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(f"tilekern/{number}", _get_default_store())
        self._timeout: datetime.timedelta = self._store.timeout
        self.sent_bytes = self.received_bytes = 0

    def run(self) -> Agreed | None:
        """Take part; dispatch goes by the outcome from here on."""
        started = time.perf_counter()
        target = None if dispatch.interpreting() else dispatch.here()
        own = Snapshot({})
        try:
            own = own if target is None else _snapshot(target)
            status = _status(target, own)
        except (TilekernError, CacheError, OSError) as error:
            status = {"error": str(error)}
        self._put(f"status/{self.rank}", json.dumps(status).encode())
        if self.rank == 0:
            self._put("verdict", json.dumps(self._judged()).encode())
        verdict = json.loads(self._get("verdict", 0))
        if "error" in verdict:
            raise RanksDiffer(verdict["error"])
        if target is None:
            return None
        group = verdict["groups"][target.arch]
        for note in verdict["notes"]:
            warn_once(note)
        agreed, received = own, 0
        if group["leader"] == self.rank:
            self._lead(own, target.arch, group["differ"])
        elif self.rank in group["differ"]:
            agreed, received = self._follow(own, target.arch, group["leader"])
        dispatch.agree_on(Agreement(agreed, Target(**group["target"]), group["policy"]))
        return Agreed(
            self.ranks, group["leader"], agreed.digest, len(agreed), received,
            self.sent_bytes, self.received_bytes, time.perf_counter() - started,
        )  # fmt: skip

    def _judged(self) -> dict[str, Any]:
        """Rank 0's verdict on the statuses of all."""
        try:
            self._wait([(f"status/{rank}", rank) for rank in range(self.ranks)], self._timeout * _FIRST)
        except RanksDiffer as error:
            return {"error": str(error)}
        return verdict_on([json.loads(self._get(f"status/{rank}", rank)) for rank in range(self.ranks)])

    def _lead(self, own: Snapshot, arch: str, differ: Sequence[int]) -> None:
        if not differ:
            return
        self._put(f"index/{arch}", zlib.compress(json.dumps(own.index()).encode()))
        lacking: set[str] = set()
        for rank in differ:
            lacking.update(json.loads(zlib.decompress(self._get(f"lacks/{rank}", rank))))
        contents = own.contents(lacking)
        chunks = [contents[at : at + _CHUNK_BYTES] for at in range(0, len(contents), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._put(f"contents/{arch}/{number}", chunk)
        self._put(f"contents/{arch}", str(len(chunks)).encode())

    def _follow(self, own: Snapshot, arch: str, leader: int) -> tuple[Snapshot, int]:
        index = json.loads(zlib.decompress(self._get(f"index/{arch}", leader)))
        lacking = own.lacks(index)
        self._put(f"lacks/{self.rank}", zlib.compress(json.dumps(lacking).encode()))
        contents = None
        if lacking:
            chunks = int(self._get(f"contents/{arch}", leader))
            contents = b"".join(self._get(f"contents/{arch}/{number}", leader) for number in range(chunks))
        try:
            return own.reduced_to(index, contents), len(lacking)
        except CacheError as error:
            raise RanksDiffer(f"rank {self.rank} cannot take over the records of rank {leader}: {error}") from None

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self.sent_bytes += len(value)

    def _get(self, key: str, by: int) -> bytes:
        self._wait([(key, by)], self._timeout)
        value: bytes = self._store.get(key)
        self.received_bytes += len(value)
        return value

    def _wait(self, expected: Sequence[tuple[str, int]], timeout: datetime.timedelta) -> None:
        """Until all keys are there, each of which the rank beside it puts.

        Raises:
            RanksDiffer: one did not come in time.
        """
        try:
            self._store.wait([key for key, _ in expected], timeout)
        except RuntimeError as error:
            late = [rank for key, rank in expected if not self._is_there(key)]
            if not late:
                return
            raise RanksDiffer(
                f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}{' and others' * (len(late) > 8)} did not "
                f"come to agree on kernels within {timeout.total_seconds():g} s; every rank must call "
                f"tilekern.apply, and be alive ({' '.join(str(error).split())[:80]})"
            ) from None

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False


def _status(target: Target | None, own: Snapshot) -> dict[str, Any]:
    """What a rank says of itself, in some hundred bytes."""
    tools = toolkit()
    sources = digest_of([__version__, *(f"{n}/{digest_of_module(s.module)}" for n, s in sorted(all_specs().items()))])
    return {
        "target": None if target is None else asdict(target),
        "toolkit": tools.key if tools else None,
        "policy": dispatch.miss_policy(),
        "signed": must_be_signed(),
        "sources": sources,
        "digest": own.digest,
    }


def verdict_on(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who leads and who follows, from the statuses of all ranks in their order.

    Returns:
        ``groups``: by arch the ``leader``, its ``target`` and ``policy``, and the ranks that ``differ``; ``notes`` that
        all ranks should see. Or ``error``, which all ranks raise.
    """
    groups: dict[str, dict[str, Any]] = {}
    notes = []
    for rank, status in enumerate(statuses):
        if "error" in status:
            return {"error": f"rank {rank} cannot say which kernels it would run: {status['error']}"}
        if status["sources"] != statuses[0]["sources"]:
            return {"error": f"rank {rank} runs another tilekern than rank 0; install the same on all nodes of the job"}
        if status["signed"] != statuses[0]["signed"]:
            return {"error": f"TILEKERN_TRUST of rank {rank} is another than rank 0's; set the same on all nodes"}
        if status["target"] is None:
            continue
        arch = status["target"]["arch"]
        first = {"leader": rank, "differ": [], **{name: status[name] for name in ("target", "policy")}}
        group = groups.setdefault(arch, first)
        if status["digest"] != statuses[group["leader"]]["digest"]:
            group["differ"].append(rank)
    if len(groups) > 1:
        notes.append(f"the ranks have GPUs of {', '.join(groups)}, each of which runs kernels of its own")
    for arch, group in groups.items():
        toolkits = {s["toolkit"] for s in statuses if s["target"] is not None and s["target"]["arch"] == arch}
        if group["policy"] == "compile" and (len(toolkits) > 1 or None in toolkits):
            group["policy"] = "fallback"
            notes.append(f"not all ranks on {arch} have the same compiler: a miss runs the model's own op on all")
    return {"groups": groups, "notes": notes}


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
