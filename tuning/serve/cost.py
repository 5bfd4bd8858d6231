"""Estimates the cost of a miss: the time that each launch loses until the problem is tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilekern.cache import Record
from tilekern.compile.cubin import Resources, code_of
from tilekern.errors import InputError
from tilekern.spec import ALIGNED, Config, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.predict.ranking import Prediction, predict, ranking
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.sweep.candidates import Candidate, candidate
from tilekern.tuning.sweep.folder import Sweep

# Time of the model's own op and of a default config over the roofline's, without a prediction. On the H200, torch's own
# ops take from 1.7 times (swiglu) to 24 times (qk_norm_rope).
OWN_OP, DEFAULT = 4.0, 1.5
ReadBlob = Callable[[str], bytes]


@dataclass(frozen=True)
class Lost:
    """The seconds that a launch loses, at least 0, and the basis of the estimate: ``predicted`` or ``roofline``."""

    seconds: float
    basis: str


def lost(
    kernel: str, problem: Problem, target: Target, sweep: Sweep, record: Record | None, read_blob: ReadBlob
) -> Lost:
    """Estimate the loss of one launch: the time of the current kernel, less that of the predicted winner.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        sweep: may hold compiled candidates of the problem.
        record: the record that serves now; None for the model's own op.
        read_blob: returns an artifact of the record by its sha256.

    Raises:
        tilekern.cache.CacheError: the artifact cannot be read.
    """
    floor_s = launch_s(kernel, problem, target)
    try:
        known = ranking(sweep, kernel, problem, target)
    except InputError:  # the folder has no plan yet
        known = []
    best_s = known[0][1].seconds if known else floor_s
    if record is None:
        return Lost(max(0.0, OWN_OP * floor_s - best_s), "roofline")
    now = _predicted(kernel, problem, target, record, read_blob, known)
    if now is None:
        return Lost(max(0.0, DEFAULT * floor_s - best_s), "roofline")
    return Lost(max(0.0, now - best_s), "predicted" if known else "roofline")


def _predicted(
    kernel: str, problem: Problem, target: Target, record: Record, read_blob: ReadBlob,
    known: list[tuple[Candidate, Prediction]],
) -> float | None:  # fmt: skip
    """Return the predicted time of the record's config; None if it has no artifact to predict from."""
    item = candidate(kernel, problem, Config(record.config), ALIGNED, target)
    for other, said in known:
        if other.config == item.config:
            return said.seconds
    # If a library runs the config, the artifacts belong to another config.
    artifact = None if item.is_library else record.artifacts.get(ALIGNED)
    if artifact is None:
        return None
    code = read_machine_code(code_of(read_blob(artifact.sha256), artifact.symbol), target.capability)
    return predict(item, Resources(**artifact.resources), target, code).seconds
