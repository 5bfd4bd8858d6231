"""Rank candidates by compile-time facts, without a GPU: for ``predicted`` winners, and as the order of measuring.

The facts are the artifact's resources and machine code and the launch grid. The model that turns them into a time is in
:mod:`tilekern.tuning.predict.launch_costs` and :mod:`tilekern.tuning.predict.cost_model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilekern.compile.cubin import Resources
from tilekern.compile.library import library_of
from tilekern.spec import ALIGNED, ITEM_BYTES, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.compile.machine_code import MachineCode
from tilekern.tuning.predict.cost_model import (
    COMPOSITE,
    DEFAULT_BONUS,
    LIBRARIES,
    LIBRARY,
    LIBRARY_CALLS,
    LIBRARY_OVERHEAD_S,
    MEMORY,
    ODD_ROWS,
    PRODUCTS,
    Weights,
)
from tilekern.tuning.predict.launch_costs import Costs, memory_costs, product_costs, resident_blocks, unread
from tilekern.tuning.predict.roofline import ARITHMETIC, roofline
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep


@dataclass(frozen=True)
class Prediction:
    """The model's prediction of a candidate: seconds, and the facts behind them.

    ``bonus`` is the share by which others must be faster to rank before it.
    """

    seconds: float
    resident_blocks: int
    in_flight_bytes: float
    spills: bool
    bonus: float = 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Return a key that sorts spilling candidates last."""
        return self.spills, self.seconds * (1 - self.bonus)


def predict(candidate: Candidate, resources: Resources, target: Target, code: MachineCode | None = None) -> Prediction:
    """Predict the time of a candidate on a target; infinite if no block fits on an SM.

    Args:
        candidate: a candidate with a device function.
        resources: the resources of its artifact.
        target: the GPU.
        code: the counts of its machine code; by default estimated from the size of the code.
    """
    spills = resources.stack_bytes > 0
    if resident_blocks(resources, target) == 0:
        return Prediction(math.inf, 0, 0.0, spills)
    costs, weights = costs_of(candidate, resources, target, code or unread(resources))
    bonus = DEFAULT_BONUS if candidate.config == candidate.spec.default(candidate.problem, target) else 0.0
    return Prediction(weights.seconds(costs), costs.resident_blocks, costs.in_flight_bytes, spills, bonus)


def costs_of(candidate: Candidate, resources: Resources, target: Target, code: MachineCode) -> tuple[Costs, Weights]:
    """Return the terms of a candidate's launch, and the weights for its kind."""
    if roofline(candidate.kernel, candidate.problem, target).bound == ARITHMETIC:
        return product_costs(candidate, resources, code, target), PRODUCTS
    return memory_costs(candidate, resources, code, target), MEMORY


def predict_library(candidate: Candidate, target: Target) -> Prediction:
    """Predict the time of a library's call: the roofline's time over the share of it that libraries reach."""
    call = candidate.spec.implement(candidate.problem, candidate.config)
    factor = COMPOSITE if call.composite else LIBRARIES.get(library_of(candidate.config) or "", LIBRARY)
    measured = LIBRARY_CALLS if target.has_scaled_products else {}
    overhead_s, factor = measured.get(candidate.kernel, (LIBRARY_OVERHEAD_S, factor))
    if _multiplies_odd_rows(candidate):
        factor *= ODD_ROWS
    seconds = overhead_s + factor * roofline(candidate.kernel, candidate.problem, target).seconds
    bonus = DEFAULT_BONUS if candidate.config == candidate.spec.default(candidate.problem, target) else 0.0
    return Prediction(seconds, 1, 0.0, spills=False, bonus=bonus)


def _multiplies_odd_rows(candidate: Candidate) -> bool:
    """Return whether a library multiplies matrices whose rows are no whole 16 bytes."""
    problem = candidate.problem
    products = candidate.config.get("products", "cublas" if problem.get("inner") else "")
    sides = [problem.get(name) or 0 for name in ("vocabulary", "inner", "columns")]
    return products == "cublas" and any(side * ITEM_BYTES[problem["dtype"]] % 16 for side in sides)


def ranking(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> list[tuple[Candidate, Prediction]]:
    """Rank the compiled candidates of a problem, the best predicted first; only aligned variants can win.

    Candidates that the cost model was not fitted to (``Backend.is_predicted``) come last until they are timed.
    """
    compiled = sweep.compiled()
    found = []
    for item in sweep.candidates(kernel, problem):
        line = compiled.get(item.artifact)
        if item.is_library and item.variant == ALIGNED:
            found.append((item, predict_library(item, target)))
        elif item.variant == ALIGNED and line is not None and line["status"] == "ok":
            found.append((item, predict(item, Resources(**line["resources"]), target, code_in(line))))
    return sorted(found, key=lambda pair: (not pair[0].backend.is_predicted, pair[1].rank))


def code_in(line: dict[str, Any]) -> MachineCode | None:
    """Return the counts of machine code in an artifact's journal line; None in lines of earlier versions."""
    kept = line.get("machine_code")
    return MachineCode.from_dict(kept) if kept is not None else None


def predict_best(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> Candidate | None:
    """Return the predicted winner of a problem, or None if nothing compiled."""
    ranked = ranking(sweep, kernel, problem, target)
    return ranked[0][0] if ranked else None
