"""Checks a candidate against its spec's reference before it may be timed: wrong never wins."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

from tilekern.spec import ArrayParameter, Implementation, KernelSpec, Problem, Tolerance


@dataclass(frozen=True)
class Check:
    """The outcome for one candidate: the largest relative and elementwise errors, and why it failed, if it did."""

    passed: bool
    relative_error: float
    elementwise_error: float
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The check as a record keeps it."""
        return {
            "passed": self.passed,
            "relative_error": self.relative_error,
            "elementwise_error": self.elementwise_error,
            **({"reason": self.reason} if self.reason else {}),
        }


def odd_problem(spec: KernelSpec, problem: Problem, largest: int = 1009) -> Problem:
    """The problem with bucketed sizes that no tile divides: primes, at most ``largest``."""
    primes = [p for p in (1009, 509, 251, 127, 61, 31, 13, 7, 3, 1) if p <= largest]
    changes = {d.name: next(p for p in primes if p <= problem[d.name]) for d in spec.dimensions if d.kind == "bucketed"}
    if {"batch", "tokens"} <= set(changes):
        changes |= {"batch": 2, "tokens": next(p for p in primes if p <= max(1, changes["tokens"] // 2))}
    return problem.but(**changes)


def make_outputs(spec: KernelSpec, problem: Problem, blocks: int, device: str) -> dict[str, Any]:
    """Outputs filled with NaN, so that an element that was not written shows."""
    import torch

    return {
        name: torch.full(shape, math.nan, dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in spec.outputs(problem, blocks).items()
    }


def launch_arguments(
    implementation: Implementation, inputs: dict[str, Any], outputs: dict[str, Any]
) -> tuple[Any, ...]:
    """The launch's arguments in the device function's order."""
    named = [
        outputs[p.name] if isinstance(p, ArrayParameter) and p.role == "output" else inputs[p.name]
        for p in implementation.parameters
    ]
    return (*named, *(value for _, value in implementation.constants))


def expected_results(spec: KernelSpec, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """The reference's results; flags of the problem that the reference asks for are passed by name."""
    wanted = inspect.signature(spec.reference).parameters
    flags = {d.name: problem[d.name] for d in spec.dimensions if d.kind == "flag" and d.name in wanted}
    return dict(spec.reference(**inputs, **flags))


def compare(spec: KernelSpec, problem: Problem, outputs: dict[str, Any], expected: dict[str, Any]) -> Check:
    """Judge outputs against the reference; not a number anywhere is a failure."""
    results = spec.results(outputs)
    worst = Check(True, 0.0, 0.0)
    for name, reference in expected.items():
        relative, elementwise = errors(results[name], reference)
        tolerance = spec.tolerance(problem)
        passed = within(relative, elementwise, tolerance)
        reason = (
            ""
            if passed
            else f"{name}: relative error {relative:.2e}, elementwise {elementwise:.2e}, allowed {tolerance}"
        )
        worst = Check(
            worst.passed and passed,
            max(worst.relative_error, relative),
            max(worst.elementwise_error, elementwise),
            worst.reason or reason,
        )
    return worst


def within(relative: float, elementwise: float, tolerance: Tolerance) -> bool:
    """Whether errors are inside a tolerance; NaN is not."""
    return relative <= tolerance.relative and elementwise <= tolerance.elementwise


def errors(actual: Any, reference: Any) -> tuple[float, float]:
    """||actual - reference|| / ||reference|| and max|actual - reference| / max|reference|; infinite where NaN is."""
    actual, reference = actual.detach(), reference.detach()
    difference = actual.double() - reference.double()
    if difference.numel() == 0:
        return 0.0, 0.0
    tiny = 1e-30
    relative = float(difference.norm() / (reference.double().norm() + tiny))
    elementwise = float(difference.abs().max() / (reference.double().abs().max() + tiny))
    return tuple(value if math.isfinite(value) else math.inf for value in (relative, elementwise))  # type: ignore[return-value]
