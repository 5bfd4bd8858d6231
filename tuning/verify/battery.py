"""Run the checks that a candidate must pass before it may win.

Every candidate is screened, on odd sizes with ordinary inputs. The few that could win run all cases of their problem:
sizes at the edges of its bucket, padded rows, large magnitudes, zeros, one-hot rows, the variations of its spec's
inputs, NaN and infinity in each draw, and the full size twice for the same bits. Cases that do not grow with the
problem's sizes run once for the same code. The backward of an op has specs of its own, with their own references in
float64. All arrays stand between canaries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tilekern.errors import CannotRun
from tilekern.spec import Config, KernelSpec, LibraryCall, Problem, bucket
from tilekern.tuning.verify import bit_classes
from tilekern.tuning.verify.adversarial import drawn
from tilekern.tuning.verify.bit_classes import Placed
from tilekern.tuning.verify.canaries import Guarded, GuardedInputs, bits, guarded
from tilekern.tuning.verify.cases import Case, Kept, Outcomes, Room
from tilekern.tuning.verify.check import Check, judge, make_outputs

# Runs a candidate on a problem with inputs and outputs by name; returns a library's results, None for a kernel.
Run = Callable[[Problem, dict[str, Any], dict[str, Any]], Any]


class Battery:
    """The cases of one problem, made once for all its candidates.

    Args:
        spec: the spec.
        problem: the problem, of the sizes that are timed.
        sm_count: number of SMs of the GPU, on which a grid depends.
        device: torch's name of the device to run on.
        room: what a reference may cost; by default what the device allows.
        kept: data shared with the batteries of other problems; by default none.
    """

    def __init__(
        self, spec: KernelSpec, problem: Problem, sm_count: int, device: str = "cuda", room: Room | None = None,
        kept: Kept | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._problem, self._sm_count, self._device = spec, problem, sm_count, device
        self._kept = kept or Kept()
        self.values = self._kept.values(spec, problem, device, room or Room.of(device))

    @functools.cached_property
    def edges(self) -> list[Case]:
        """Return the largest and smallest sizes of the bucket, or of a smaller bucket if those cost too much."""
        largest, bucketed = self._problem, [d.name for d in self._spec.dimensions if d.kind == "bucketed"]
        while not self.values.fits(largest) and any(largest[name] > 1 for name in bucketed):
            largest = largest.but(**{name: max(1, largest[name] // 2) for name in bucketed})
        note = "" if largest == self._problem else "the reference costs too much at full size"
        smallest = largest.but(**{name: bucket(largest[name]) // 2 + 1 for name in bucketed})
        ends = [("bucket", largest), *([("smallest of the bucket", smallest)] if smallest != largest else [])]
        return [self.values.plain(name, problem, note=note) for name, problem in ends]

    def screen(self, config: Config, run: Run) -> Check:
        """Run odd sizes with ordinary inputs, twice for the same bits unless the flag ``deterministic`` is off."""
        case = self.values.random
        outputs, damage = self._launched(case, config, run)
        check = self._check(case, outputs, damage)
        if check.passed and (difference := self._difference(outputs, lambda: self._launched(case, config, run))):
            return Check(False, check.relative_error, check.elementwise_error, difference)
        return check

    def confirm(
        self, config: Config, run: Run, between: Callable[[], None] = lambda: None, code: Hashable = None
    ) -> Check:
        """Run all cases up to the first that fails, then the full size twice.

        Args:
            config: the candidate's config.
            run: runs it.
            between: called between the two runs at full size, to leave other traces on the GPU.
            code: the key under which outcomes of cases about values are kept: all that they depend on; None if unknown.
        """
        if code is None or code not in self._kept.outcomes:
            told, reason = self._stood(self.values.all(), config, run)
            if code is not None:
                self._kept.outcomes[code] = told, reason
        else:
            told, reason = self._kept.outcomes[code]
        if not reason:
            more, reason = self._stood(self.edges, config, run)
            told = [*told, *more]
        if not reason:
            wrong = self._repeat(config, run, between)
            reason = f"repeat: {wrong}" if wrong else ""
            told = [*told, {"case": "repeat", "sizes": self._sizes(self._problem), "passed": not wrong}]
        figures = ("relative_error", "elementwise_error")
        relative, elementwise = (max(case.get(figure, 0.0) for case in told) for figure in figures)
        return Check(not reason, relative, elementwise, reason, told)

    def placements(self) -> Iterator[list[Placed]]:
        """Yield the placements of rows that tell a candidate's bit class; none if results have no rows."""
        return bit_classes.placements(self._spec, self._problem, self._device)

    def digests(self, placements: Sequence[Placed], config: Config, run: Run) -> dict[str, str]:
        """Return the digests of the rows' results (:func:`tilekern.tuning.verify.bit_classes.digests_of`).

        An empty one stands for a config that cannot be of a class.
        """
        if not bit_classes.can_agree(self._spec, config):
            return {"": ""}
        launched = (
            (one, self._bare(one.case, config, run) if one.bare else self._launched(one.case, config, run)[0])
            for one in placements
        )
        return bit_classes.digests_of((one, outputs | self._spec.results(outputs)) for one, outputs in launched)

    def _stood(self, cases: Iterable[Case], config: Config, run: Run) -> Outcomes:
        """Return the outcomes of cases up to the first that fails, and its reason."""
        told: list[dict[str, Any]] = []
        for case in cases:
            check = self._check(case, *self._launched(case, config, run))
            told.append(
                {
                    "case": case.name,
                    "sizes": self._sizes(case.problem),
                    "passed": check.passed,
                    "relative_error": float(f"{check.relative_error:.3g}"),
                    "elementwise_error": float(f"{check.elementwise_error:.3g}"),
                    **({"note": case.note} if case.note else {}),
                    **({"reason": check.reason} if check.reason else {}),
                }
            )
            if not check.passed:
                return told, f"{case.name}: {check.reason}"
        return told, ""

    def _check(self, case: Case, outputs: dict[str, Any], damage: str) -> Check:
        """Judge a run; damage fails it whatever its errors are."""
        tolerance, results = self._spec.tolerance(case.problem), self._spec.results(outputs)
        check = judge(results, case.expected, tolerance, case.leeway)
        if not check.passed and case.limits is not None:
            check = judge(results, case.expected, tolerance, case.limits())
        return Check(False, check.relative_error, check.elementwise_error, damage) if damage else check

    def _launched(self, case: Case, config: Config, run: Run) -> tuple[dict[str, Any], str]:
        """Return the outputs of a run, and a description of the damage that it did."""
        spec, problem = self._spec, case.problem
        implementation = spec.implement(problem, config)
        if isinstance(implementation, LibraryCall):
            inputs = case.guarded(padded=False)
            return self._of_library(problem, inputs.values, run), self._damage(case, inputs, {})
        inputs = case.guarded(padded=case.padded)
        arrays = {
            name: guarded(shape, getattr(torch, dtype), self._device, padded=case.padded)
            for name, (shape, dtype) in spec.outputs(problem, implementation.grid(problem, self._sm_count)).items()
        }
        outputs = {name: found.array for name, found in arrays.items()}
        run(problem, inputs.values, outputs)
        return outputs, self._damage(case, inputs, arrays)

    def _of_library(self, problem: Problem, inputs: dict[str, Any], run: Run) -> dict[str, Any]:
        """Return the outputs of a library's run by name."""
        made = run(problem, inputs, {})
        if made is None:
            name = self._spec.name
            raise CannotRun(f"no cache holds a kernel that {name} launches at {problem.key}; tune that first")
        return dict(zip(self._spec.outputs(problem, 1), made, strict=True))

    def _bare(self, case: Case, config: Config, run: Run) -> dict[str, Any]:
        """Return the outputs of a run without canaries."""
        spec, problem = self._spec, case.problem
        implementation = spec.implement(problem, config)
        if isinstance(implementation, LibraryCall):
            return self._of_library(problem, case.inputs, run)
        outputs = make_outputs(spec, problem, implementation.grid(problem, self._sm_count), self._device)
        run(problem, case.inputs, outputs)
        return outputs

    def _damage(self, case: Case, inputs: GuardedInputs, outputs: dict[str, Guarded]) -> str:
        """Describe what a run wrote to its inputs and around its outputs, and what it did not write."""
        found = {f"the input {name} or memory around it was written to": x for name, x in inputs.changes().items()}
        found |= {f"memory around {name} was written to": made.is_torn() for name, made in outputs.items()}
        # What is no result by itself, as parts that another launch adds up, may have gaps; if one counts it is NaN. Nor
        # is what the problem's flags leave out, of which the reference gives nothing.
        results = self._spec.results({name: made.array for name, made in outputs.items()}) if outputs else {}
        found |= {
            f"elements of {name} were not written": made.unwritten()
            for name, made in outputs.items()
            if results.get(name) is made.array and name in self.values.random.expected
        }
        counts = torch.stack([x.long() for x in found.values()]).tolist()
        said = [
            what if seen.dtype is torch.bool else f"{count} {what}"
            for (what, seen), count in zip(found.items(), counts, strict=True)
            if count
        ]
        if said:
            case.forget_guarded()
        return "; ".join(said)

    def _difference(self, first: dict[str, Any], again: Callable[[], tuple[dict[str, Any], str]]) -> str:
        """Describe how the outputs of another run differ; empty if they need not agree."""
        if not self._problem.get("deterministic", True):
            return ""
        second, damage = again()
        changed = [name for name in first if not torch.equal(bits(first[name]), bits(second[name]))]
        differ = [f"{int((bits(first[name]) != bits(second[name])).sum())} elements of {name}" for name in changed]
        return damage or (f"two runs on the same inputs differ in {', '.join(differ)}" if differ else "")

    @functools.cached_property
    def _full(self) -> Case:
        return Case("repeat", self._problem, drawn(self._spec, self._problem, self._device), {})

    def _repeat(self, config: Config, run: Run, between: Callable[[], None]) -> str:
        """Describe the fault of two runs at full size, with other launches between them."""
        full = self._full
        outputs, damage = self._launched(full, config, run)
        if damage:
            return damage
        between()
        return self._difference(outputs, lambda: self._launched(full, config, run))

    def _sizes(self, problem: Problem) -> str:
        return ",".join(f"{d.name}={problem[d.name]}" for d in self._spec.dimensions if d.kind == "bucketed")
