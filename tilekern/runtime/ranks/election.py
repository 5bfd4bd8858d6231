"""The status of each rank, and the verdict that each rank draws from all of them by itself."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilekern.cache import Corrupt
from tilekern.cache.keys import check_digest, check_name
from tilekern.cache.records import parse_object
from tilekern.errors import RanksDiffer
from tilekern.spec.targets import LISTED, Target

# From the strictest to the laxest; the strictest of any rank counts for all.
POLICIES = ("error", "fallback", "compile")
_ARCH = re.compile(r"sm_[0-9]{2,3}")
_LONGEST_NAME = 100
_LARGEST = 2**53


@dataclass(frozen=True)
class Status:
    """The state of one rank.

    Attributes:
        target: its GPU; None if it has none.
        toolkit: the key of its compiler; None if it has none.
        policy: its own miss policy.
        signed: whether it loads only signed records.
        sources: the digest of its version of tilekern and of the kernels' sources.
        libraries: the libraries that may run a config instead of a kernel.
        digest: the digest of the records in its caches.
        packs: the digest of those that are not in folders; as ``digest`` if it read them all.
    """

    target: Target | None
    toolkit: str | None
    policy: str
    signed: bool
    sources: str
    libraries: list[str]
    digest: str
    packs: str

    def to_bytes(self) -> bytes:
        """Return the status as bytes for another rank."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Status:
        """Return the status that another rank sent, with every field checked.

        Raises:
            CacheError: it is not a status.
        """
        try:
            said = parse_object(data.decode())
        except UnicodeDecodeError:
            raise Corrupt("it is not UTF-8") from None
        if said.keys() != {field.name for field in dataclasses.fields(cls)}:
            raise Corrupt("its fields are not those of a status")
        if said["toolkit"] is not None:
            check_name("the toolkit's key", said["toolkit"])
        if said["policy"] not in POLICIES or type(said["signed"]) is not bool:
            raise Corrupt(f"its policies are not known: {said['policy']!r:.40}, {said['signed']!r:.40}")
        if not isinstance(said["libraries"], list):
            raise Corrupt("its libraries are not a list")
        for name in said["libraries"]:
            check_name("a library", name)
        check_digest("sources", said["sources"])
        check_digest("digest", said["digest"])
        check_digest("packs", said["packs"])
        return cls(**said | {"target": None if said["target"] is None else _target(said["target"])})


@dataclass(frozen=True)
class Group:
    """The ranks with GPUs of one arch.

    Attributes:
        members: the ranks, sorted.
        leader: the lowest of them; all run its records.
        target: the leader's GPU.
        policy: the miss policy of all of them.
        differ: whether one has other records than the leader.
        packs_differ: whether one has other records that are not in folders.
    """

    members: tuple[int, ...]
    leader: int
    target: Target
    policy: str
    differ: bool
    packs_differ: bool


@dataclass(frozen=True)
class Verdict:
    """The verdict on the statuses of all ranks.

    Attributes:
        groups: by arch, sorted.
        notes: what the user of each rank should see.
    """

    groups: Mapping[str, Group]
    notes: tuple[str, ...]


def verdict_on(statuses: Sequence[Status]) -> Verdict:
    """Return the verdict on the statuses of all ranks, in their order.

    Raises:
        RanksDiffer: they cannot run the same kernels.
    """
    for rank, status in enumerate(statuses):
        if status.sources != statuses[0].sources:
            raise RanksDiffer(f"rank {rank} runs another tilekern than rank 0; install the same on all nodes")
        if status.signed != statuses[0].signed:
            raise RanksDiffer(f"TILEKERN_TRUST of rank {rank} is another than rank 0's; set the same on all nodes")
    of_arch: dict[str, dict[int, Status]] = {}
    for rank, status in enumerate(statuses):
        if status.target is not None:
            of_arch.setdefault(status.target.arch, {})[rank] = status
    notes = []
    if len(of_arch) > 1:
        notes.append(f"the ranks have GPUs of {', '.join(of_arch)}, each of which runs kernels of its own")
    groups = {arch: _group(arch, members, notes) for arch, members in sorted(of_arch.items())}
    return Verdict(groups, tuple(notes))


def _group(arch: str, members: Mapping[int, Status], notes: list[str]) -> Group:
    leader = min(members)
    first = members[leader]
    assert first.target is not None
    for rank, status in members.items():
        if status.libraries != first.libraries:
            both = " and ".join(", ".join(each.libraries) or "none" for each in (status, first))
            raise RanksDiffer(
                f"rank {rank} has other libraries than rank {leader} ({both}); install the same on all nodes"
            )
    policies = {status.policy for status in members.values()}
    policy = min(policies, key=POLICIES.index)
    if len(policies) > 1:
        notes.append(
            f"the ranks on {arch} have different miss policies ({', '.join(sorted(policies))}): all use {policy}"
        )
    toolkits = {status.toolkit for status in members.values()}
    if policy == "compile" and (len(toolkits) > 1 or None in toolkits):
        policy = "fallback"
        notes.append(f"not all ranks on {arch} have the same compiler: a miss runs the model's own op on all")
    differ, packs_differ = (
        any(getattr(status, name) != getattr(first, name) for status in members.values())
        for name in ("digest", "packs")
    )
    return Group(tuple(members), leader, first.target, policy, differ, packs_differ)


def _target(said: Any) -> Target:
    """Return the GPU that another rank says it has, checked, since lookups, compiles and messages use it."""
    fields = {field.name: field.type for field in dataclasses.fields(Target)}
    if not isinstance(said, dict) or said.keys() != fields.keys():
        raise Corrupt("its target does not have the fields of one")
    for name, kind in fields.items():
        if kind == "str":
            is_known = isinstance(said[name], str)
        else:
            types = (int, float) if kind == "float" else (int,)
            is_known = type(said[name]) in types and 0 < said[name] < _LARGEST
        if not is_known:
            raise Corrupt(f"its target has {said[name]!r:.60} for {name}")
    if not _ARCH.fullmatch(said["arch"]) or not said["name"].isprintable() or len(said["name"]) > _LONGEST_NAME:
        raise Corrupt(f"its target is {said['name']!r:.60} of {said['arch']!r:.20}")
    target = Target(**said)
    check_name("the target's key", target.key)
    if any(known.key == target.key and known != target for known in LISTED):
        raise Corrupt(f"its target is another {target.name} than the one that is known")
    return target
