"""Judge a candidate's results against its spec's reference in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilekern.spec import ArrayParameter, DeviceKernel, KernelSpec, Problem, Tolerance

# Keeps the error of a result that should be zero finite, and larger than any tolerance unless it is zero.
_TINY = 1e-30
# Each about half of the one before it.
_PRIMES = (1009, 509, 251, 127, 61, 31, 13, 7, 3, 1)


@dataclass(frozen=True)
class Check:
    """The outcome for one candidate: the largest relative and elementwise errors, and the reason of a failure.

    ``cases`` holds the cases of :meth:`tilekern.tuning.verify.battery.Battery.confirm` in order, as plain data: their
    name ``case``, ``sizes``, ``passed``, ``relative_error``, ``elementwise_error``, and ``reason`` and ``note`` if any.
    It is empty for a candidate that was only screened. ``bits`` is its bit class
    (:mod:`tilekern.tuning.verify.bit_classes`): empty if a row's bits depend on the rows around it, None if not known.
    """

    passed: bool
    relative_error: float
    elementwise_error: float
    reason: str = ""
    cases: Sequence[Mapping[str, Any]] = ()
    bits: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the check as journals and records keep it."""
        return {
            "passed": self.passed,
            "relative_error": self.relative_error,
            "elementwise_error": self.elementwise_error,
            **({"reason": self.reason} if self.reason else {}),
            **({"cases": [dict(case) for case in self.cases]} if self.cases else {}),
            **({} if self.bits is None else {"bits": self.bits}),
        }


@dataclass(frozen=True)
class Leeway:
    """The errors that one result is allowed on top of the tolerance.

    Attributes:
        norm: an error of the norm, on top; and
        peak: of each element: what float32 loses in torch too.
        plain: if the inputs hold NaN or infinity, the result without them, in float64; and
        reached: which elements depend on them. The other elements are right if they match ``plain``, whatever the
            reference says: it gives NaN for zero times a masked NaN, and a kernel that never reads masked elements is
            better.
        tainted: if the inputs hold infinity, which elements may be NaN whatever the reference says, or infinite if it
            says NaN: the elements that are NaN if NaN replaces infinity in the inputs.
        is_coarse: whether operands are rounded, so that a sum near 0, and infinity times it, may have either sign.
    """

    norm: float = 0.0
    peak: float = 0.0
    plain: Any = None
    reached: Any = None
    tainted: Any = None
    is_coarse: bool = False


def odd_problem(spec: KernelSpec, problem: Problem, largest: int = 1009) -> Problem:
    """Return the problem with bucketed sizes that no tile divides: primes, at most ``largest``.

    A batch becomes 2, and the other sizes are then about half as large.
    """
    bucketed = [d.name for d in spec.dimensions if d.kind == "bucketed"]
    batched = "batch" in bucketed and len(bucketed) > 1
    most = largest // 2 + 5 if batched else largest
    changes = {name: next(p for p in _PRIMES if p <= min(most, problem[name])) for name in bucketed}
    return problem.but(**changes | ({"batch": 2} if batched else {}))


def make_outputs(spec: KernelSpec, problem: Problem, blocks: int, device: str) -> dict[str, Any]:
    """Make outputs filled with NaN, or the least integer, so that unwritten elements show."""
    import torch

    made: dict[str, Any] = {}
    for name, (shape, dtype_name) in spec.outputs(problem, blocks).items():
        dtype = getattr(torch, dtype_name)
        filler = math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        made[name] = torch.full(shape, filler, dtype=dtype, device=device)
    return made


def arguments_of(implementation: DeviceKernel, inputs: dict[str, Any], outputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a launch's arguments in the device function's order, without constants, which the cubin contains."""
    return tuple(
        outputs[p.name] if isinstance(p, ArrayParameter) and p.role == "output" else inputs[p.name]
        for p in implementation.parameters
    )


def expected_results(spec: KernelSpec, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the reference's results; it is given the flags of the problem that it takes by name."""
    wanted = inspect.signature(spec.reference).parameters
    flags = {d.name: problem[d.name] for d in spec.dimensions if d.kind == "flag" and d.name in wanted}
    return dict(spec.reference(**inputs, **flags))


def compare(spec: KernelSpec, problem: Problem, outputs: dict[str, Any], expected: Mapping[str, Any]) -> Check:
    """Judge outputs against the reference by the spec's tolerance, as :func:`judge` does."""
    return judge(spec.results(outputs), expected, spec.tolerance(problem))


def judge(
    results: Mapping[str, Any], expected: Mapping[str, Any], tolerance: Tolerance,
    leeway: Mapping[str, Leeway] | None = None,
) -> Check:  # fmt: skip
    """Judge results: NaN and infinity where the reference has them and nowhere else, the rest near it.

    Args:
        results: the results to judge, by name.
        expected: the right results, in float64, by name.
        tolerance: errors allowed of the norm and of each element, over the elements that are finite.
        leeway: the errors allowed on top, by name.
    """
    worst = Check(True, 0.0, 0.0)
    for name, reference in expected.items():
        extra = (leeway or {}).get(name, Leeway())
        relative, elementwise, reason = _judged(results[name], reference, extra)
        allowed = tolerance
        if extra.norm or extra.peak:
            finite = reference[reference.isfinite()]
            norm, peak = (float(size) + _TINY for size in (finite.norm(), finite.abs().max()))
            allowed = Tolerance(tolerance.relative + extra.norm / norm, tolerance.elementwise + extra.peak / peak)
        passed = within(relative, elementwise, allowed) and not reason
        reason = reason or f"relative error {relative:.2e}, elementwise {elementwise:.2e}, allowed {allowed}"
        worst = Check(
            worst.passed and passed,
            max(worst.relative_error, relative),
            max(worst.elementwise_error, elementwise),
            worst.reason or ("" if passed else f"{name}: {reason}"),
        )
    return worst


def within(relative: float, elementwise: float, tolerance: Tolerance) -> bool:
    """Return whether errors are inside a tolerance; NaN is not."""
    return relative <= tolerance.relative and elementwise <= tolerance.elementwise


def errors(actual: Any, reference: Any) -> tuple[float, float]:
    """Return ||actual - reference|| / ||reference|| and max|actual - reference| / max|reference|, infinite for NaN."""
    reference = reference.detach().double()
    return _ratios(reference - actual.detach().double(), reference)


def _ratios(difference: Any, reference: Any) -> tuple[float, float]:
    """Return the norm and the peak of one divided by the other's."""
    import torch

    if difference.numel() == 0:
        return 0.0, 0.0
    size = torch.linalg.vector_norm
    figures = [size(difference), size(reference), size(difference, math.inf), size(reference, math.inf)]
    norm, of_norm, peak, of_peak = torch.stack(figures).tolist()
    found = (norm / (of_norm + _TINY), peak / (of_peak + _TINY))
    return tuple(value if math.isfinite(value) else math.inf for value in found)  # type: ignore[return-value]


def widened(x: Any) -> Any:
    """Return 8-bit floats in float32, since torch compares and tests none, and any other tensor as it is."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _judged(actual: Any, reference: Any, extra: Leeway) -> tuple[float, float, str]:
    """Return both errors over the finite elements, and a description of wrong other elements."""
    if actual.shape != reference.shape:
        return math.inf, math.inf, f"its shape is {tuple(actual.shape)}, not {tuple(reference.shape)}"
    relative, elementwise = errors(actual, reference)
    if math.isfinite(relative) and math.isfinite(elementwise):
        return relative, elementwise, ""
    # Elements may be infinite or NaN where the rounded reference is too. Results may be large, so steps that need no
    # float64 run in their own dtype.
    dtype, actual, reference = actual.dtype, widened(actual.detach()), reference.detach().double()
    held = widened(reference.to(dtype))
    if extra.reached is not None:
        better = actual.isfinite() & ~held.isfinite() & ~extra.reached
        if bool(better.any()):
            better &= extra.plain.isfinite()
            reference = extra.plain.where(better, reference)
            held = widened(reference.to(dtype))
    if extra.tainted is not None:
        held = actual.where(extra.tainted & (actual.isnan() | actual.isinf() & held.isnan()), held)
    if extra.is_coarse:
        held = actual.where(actual.isinf() & held.isinf(), held)
    if said := _misplaced(actual, held):
        return math.inf, math.inf, said
    beyond = ~held.isfinite()
    difference = (reference - actual).masked_fill_(beyond, 0)
    return (*_ratios(difference, reference.masked_fill(beyond, 0)), "")


def _misplaced(actual: Any, reference: Any) -> str:
    """Describe elements that are NaN or infinite where a reference of the same dtype differs."""
    odd = (actual != reference) & ~(actual.isfinite() & reference.isfinite()) & ~(actual.isnan() & reference.isnan())
    if not bool(odd.any()):
        return ""
    actual, reference = actual[odd], reference[odd]
    mistakes = {
        "are not finite where the reference is": ~actual.isfinite() & reference.isfinite(),
        "are finite where the reference is not": actual.isfinite() & ~reference.isfinite(),
        "are infinite where the reference is NaN": actual.isinf() & reference.isnan(),
        "are infinite with the wrong sign": actual.isinf() & reference.isinf(),
        "are NaN where the reference is infinite": actual.isnan() & reference.isinf(),
    }
    return "; ".join(f"{count} elements {what}" for what, which in mistakes.items() if (count := int(which.sum())))
