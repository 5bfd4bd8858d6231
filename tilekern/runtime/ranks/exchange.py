"""Takes over the records of the leading rank, step by step with all ranks, and compares the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from tilekern.cache import CacheError, Untrusted
from tilekern.cache.trust.policy import must_be_signed
from tilekern.errors import RanksDiffer
from tilekern.runtime.ranks.agreement import Agreement
from tilekern.runtime.ranks.held import Held, unpacked
from tilekern.runtime.ranks.merged import Merged
from tilekern.runtime.ranks.peers import Peers
from tilekern.runtime.ranks.snapshot import Snapshot, digest_of

_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_RECORDS = 2**20
_LARGEST_CONTENTS = 2**31


class Taken(NamedTuple):
    """The records that a rank has taken over.

    Attributes:
        snapshot: the leader's records, without those that a rank does not trust; layers that are equal on all ranks.
        received: the number of records that came from the leader.
        untrusted: the number of the leader's records that are left out.
        note: which these are, for the user; empty if there are none.
    """

    snapshot: Snapshot | Merged
    received: int = 0
    untrusted: int = 0
    note: str = ""


def take_over(peers: Peers, leader: int, own: Snapshot | None) -> Taken:
    """Take over the leader's records; every rank must call it, without ``own`` records if its GPU is of another arch.

    Raises:
        RanksDiffer: on all ranks, if one of them cannot take them over.
    """
    leads, held = peers.rank == leader, Snapshot(()) if own is None else own
    own_index = b"".join(map(bytes.fromhex, held.identities)) if leads else b""
    index = _parsed(peers.broadcast(own_index, leader, _MOST_RECORDS * _DIGEST_BYTES))
    lacked = set(index) - set(held.identities) if own is not None else set()
    wanted = _chosen_by_any(peers, "say which records it lacks", index, lacked)
    contents = peers.broadcast(held.contents(wanted) if leads else b"", leader, _LARGEST_CONTENTS)
    whole, reasons = held, dict[str, str]()
    failure: CacheError | None = None
    try:
        if own is not None:
            received = [one for one in unpacked(contents) if one.identity in lacked] if lacked else []
            whole, reasons = own.having(index, received), _reasons(received)
    except CacheError as error:
        failure = error
    refused = _chosen_by_any(peers, f"take over the records of rank {leader}", index, failure or reasons)
    if own is None or not refused:
        return Taken(whole, len(lacked))
    return Taken(
        whole.having([name for name in index if name not in refused]),
        len(lacked - refused.keys()),
        len(refused),
        _note(whole, leader, {**refused, **dict.fromkeys(reasons, peers.rank)}, reasons),
    )


def compare(peers: Peers, groups: Collection[Collection[int]], agreement: Agreement | None) -> None:
    """Check that all ranks of a group agreed on the same; every rank must call it.

    Raises:
        RanksDiffer: on all ranks, if two of a group differ.
    """
    said = bytes(_DIGEST_BYTES)
    if agreement is not None:
        target = json.dumps(asdict(agreement.target), sort_keys=True)
        said = bytes.fromhex(digest_of([agreement.snapshot.digest, target, agreement.policy]))
    found = peers.gather("say what it holds", said, _DIGEST_BYTES)
    for members in groups:
        first = min(members)
        for rank in members:
            if found[rank] != found[first]:
                raise RanksDiffer(
                    f"rank {rank} holds other records than rank {first} after they were exchanged; something changed "
                    "what they sent: start the job again on a network that others cannot reach"
                )


def _parsed(index: bytes) -> list[str]:
    found = [index[at : at + _DIGEST_BYTES].hex() for at in range(0, len(index), _DIGEST_BYTES)]
    if len(index) % _DIGEST_BYTES or len(set(found)) != len(found):
        raise RanksDiffer("the index of the rank that leads is damaged")
    return found


def _chosen_by_any(
    peers: Peers, what: str, index: Sequence[str], chosen: Collection[str] | Exception
) -> dict[str, int]:
    """Return the records of the index that some rank chose, each with the lowest such rank.

    Raises:
        RanksDiffer: on all ranks, if one of them has an error, or sends no valid choice.
    """
    size = -(-len(index) // 8)
    flags = bytearray(size)  # one bit for each record of the index
    if not isinstance(chosen, Exception):
        for at, name in enumerate(index):
            flags[at // 8] |= (name in chosen) << at % 8
    found: dict[str, int] = {}
    for rank, said in enumerate(peers.gather(what, chosen if isinstance(chosen, Exception) else bytes(flags), size)):
        if len(said) != size:
            raise RanksDiffer(f"rank {rank} cannot {what}: {len(said)} bytes must be {size}")
        for at, name in enumerate(index) if any(said) else ():
            if said[at // 8] >> at % 8 & 1:
                found.setdefault(name, rank)
    return found


def _reasons(received: Collection[Held]) -> dict[str, str]:
    """Return why this rank does not trust received records, by their identities.

    Records of equal identity in its own caches were trusted there, and are not received: an identity covers all that a
    GPU runs.
    """
    found = {}
    for one in received if must_be_signed() else ():
        try:
            one.require_trusted()
        except Untrusted as error:
            found[one.identity] = str(error)
    return found


def _note(whole: Snapshot, leader: int, refused: Mapping[str, int], reasons: Mapping[str, str]) -> str:
    name = min(refused, key=lambda name: name not in reasons)
    place = whole.place_of(name)
    reason = f": {reasons[name]}" if name in reasons else ""
    return (
        f"{len(refused)} of the {len(whole)} records of rank {leader} run on no rank, {place.kernel} for "
        f"{place.problem_key} among them, which rank {refused[name]} does not trust{reason}; sign them, or take their "
        "signer's key into the trust roots of every rank"
    )
