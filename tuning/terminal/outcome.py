"""The outcome of a tuning run, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilekern.spec.targets import Target
    from tilekern.tuning.publishing import Winner


@dataclass
class Outcome:
    """The outcome of a run, in the form of ``--json``; ``packs`` are the records of each model's pack, by its path.

    ``is_whole`` says whether every problem that was to have a winner has one.
    """

    model: str
    target: Target
    toolkit: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    winners: list[Winner] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compile: dict[str, Any] = field(default_factory=dict)
    measure: dict[str, Any] = field(default_factory=dict)
    results: str | None = None
    cache: str | None = None
    packs: dict[str, int] = field(default_factory=dict)
    is_whole: bool = True

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints."""
        return {
            "model": self.model,
            "target": self.target.describe(),
            "toolkit": self.toolkit,
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "compile": self.compile,
            "measure": self.measure,
            "problems": [_problem_json(winner) for winner in self.winners],
            "results": self.results,
            "cache": self.cache,
            "packs": self.packs,
            "notes": self.notes,
        }


def _problem_json(winner: Winner) -> dict[str, Any]:
    record = winner.record
    return {
        "kernel": winner.kernel,
        "problem": record.problem,
        "config": record.config,
        "provenance": record.provenance,
        "candidates": record.candidates,
        "failed": record.failed,
        "time_us": round(winner.time_us, 3),
        "share_of_roofline": round(winner.share, 4),
        "bound": winner.roofline.bound,
        "gain_over_default": round(winner.gain, 4),
    }
