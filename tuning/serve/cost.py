"""Cost of a miss: the time that each launch loses until the problem is tuned, estimated before anything is timed."""

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

# How many times the roofline's time is taken for what runs now, where no prediction can be made: a middle of what
# torch's own ops take on the H200 (1.7 times for swiglu, 24 times for qk_norm_rope), and of what defaults take.
OWN_OP, DEFAULT = 4.0, 1.5
ReadBlob = Callable[[str], bytes]


@dataclass(frozen=True)
class Lost:
    """Seconds that a launch loses, never negative, and what the estimate rests on: ``predicted`` or ``roofline``."""

    seconds: float
    basis: str


def lost(
    kernel: str, problem: Problem, target: Target, sweep: Sweep, record: Record | None, read_blob: ReadBlob
) -> Lost:
    """The loss of one launch of a problem: the time of what runs now, less that of the predicted winner.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        sweep: where candidates of the problem may have been compiled already.
        record: what runs now; None for the model's own op.
        read_blob: gives an artifact of the record by its sha256.

    Raises:
        tilekern.cache.CacheError: the artifact cannot be read.
    """
    floor_s = launch_s(kernel, problem, target)
    try:
        known = ranking(sweep, kernel, problem, target)
    except InputError:  # nothing was planned in the folder yet
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
    """The predicted time of the config that runs now; None where the record has no artifact to predict from."""
    item = candidate(kernel, problem, Config(record.config), ALIGNED, target)
    for other, said in known:
        if other.config == item.config:
            return said.seconds
    # Where a library runs the config, the artifacts are those of another.
    artifact = None if item.is_library else record.artifacts.get(ALIGNED)
    if artifact is None:
        return None
    code = read_machine_code(code_of(read_blob(artifact.sha256), artifact.symbol), target.capability)
    return predict(item, Resources(**artifact.resources), target, code).seconds
