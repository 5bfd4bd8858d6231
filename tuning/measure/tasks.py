"""Tasks and answers of a measuring process: plain data that travels between processes and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilekern.spec import ALIGNED, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.verify.check import Check


def on(key: str, variation: str) -> str:
    """The name of an entrant's launch on other inputs."""
    return f"{key} on {variation}"


@dataclass(frozen=True)
class Entrant:
    """A candidate with its compiled artifact's journal line."""

    candidate: Candidate
    compiled: dict[str, Any]

    @property
    def key(self) -> str:
        """The candidate's key."""
        return self.candidate.key

    @property
    def is_aligned(self) -> bool:
        """Whether it can win; the generic variant is only checked."""
        return self.candidate.variant == ALIGNED


@dataclass(frozen=True)
class Task:
    """One problem to measure, with all that it takes.

    ``entrants`` are checked unless ``checks`` knows them already; those that pass are timed by ``strategy``. The
    entrant of key ``stay`` gets a figure however slow it is, as the default that gains are told against. ``cubins``
    holds the artifacts by sha256. ``predicted`` holds times in seconds by the entrants' keys. ``careful`` asks for one
    launch at a time, so that it is known which one faults; ``frugal``, for a battery that makes its cases anew for each
    candidate, where the GPU's memory did not hold them. ``timed`` names the variations of the spec's inputs that
    are timed too. ``followers`` holds what is launched right behind a candidate, by its number of blocks, and is timed
    with it.
    """

    kernel: str
    problem: Problem
    target: Target
    entrants: tuple[Entrant, ...]
    cubins: Mapping[str, bytes]
    stay: str
    checks: Mapping[str, Check] = field(default_factory=dict)
    strategy: str = "race"
    predicted: Mapping[str, float] = field(default_factory=dict)
    careful: bool = False
    frugal: bool = False
    timed: tuple[str, ...] = ()
    followers: Mapping[int, Entrant] = field(default_factory=dict)

    def without(self, key: str) -> Task:
        """The task that is left when an entrant is taken out."""
        return replace(self, entrants=tuple(entrant for entrant in self.entrants if entrant.key != key))

    def entrant(self, key: str) -> Entrant | None:
        """The entrant of a key; None where it has none of this key."""
        return next((entrant for entrant in self.entrants if entrant.key == key), None)
