"""Make the cases of one problem: inputs of one kind at one size each, with their right results.

Most are about values, at sizes that are the same for all buckets, so problems share them (:class:`Kept`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilekern.spec import TOLERANCES, KernelSpec, Problem, bucket
from tilekern.tuning.verify import adversarial
from tilekern.tuning.verify.adversarial import Change, drawn, placed
from tilekern.tuning.verify.canaries import GuardedInputs
from tilekern.tuning.verify.check import Check, Leeway, expected_results, judge, odd_problem, widened

# A candidate may have this many times torch's own float32 error on top of the tolerance: it sums in another order, its
# exponentials and quotients are the hardware's, and three tf32 products that make one of float32 keep 2^-21.
FLOAT32_SLACK = 16.0
# Large draws keep torch's float32 within this many times the tolerance of float32 results: a softmax of larger scores
# depends on their last bits, in which no two implementations agree.
_FLOAT32_TOLERANCES = 4.0
# Nor are exponentials of larger numbers taken: a kernel may multiply and subtract the largest in one rounding, and the
# power of a difference that should be 0 then grows with the numbers. Few rows may show none of this by chance.
_LARGEST_EXPONENT = 2.0**13
# Their results stay below the largest number of their dtype by this factor, for sums in another order.
_HEADROOM = 4.0
# The most rows of cases about values, in the order in which they are tried: with the first, a sequence of a batch is
# nearly two tiles of 128. Such a case may cost the edges of a bucket divided by the second number.
_SMALL, _SMALL_PART = (509, 251, 127, 61, 31, 13, 7, 3, 1), 20
# Cases that no current problem uses may hold the room of a reference divided by this.
_KEPT_ROOM = 4
# The outcomes of cases as plain data, up to the first that failed, and its reason.
Outcomes = tuple[Sequence[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Room:
    """The limit of a reference: bytes that calls of torch's functions write, and floating-point operations.

    ``keeps`` says whether cases stay for the next candidate, up to as many bytes in total.
    """

    bytes: int
    flops: int
    keeps: bool = True

    @classmethod
    def of(cls, device: str, *, keeps: bool = True) -> Room:
        """Return a quarter of a GPU's memory, and the operations of a data-centre GPU in about a tenth of a second."""
        if torch.device(device).type != "cuda":
            return cls(1 << 28, 1 << 30, keeps)
        return cls(torch.cuda.get_device_properties(device).total_memory // 4, 4 * 10**12, keeps)


@dataclass
class Case:
    """Inputs of one kind at one size, with their right results.

    ``leeway`` is what :func:`tilekern.tuning.verify.check.judge` allows each result. ``padded`` asks for gaps between
    rows. ``limits`` computes a leeway that takes longer, for results that fail with the first.
    """

    name: str
    problem: Problem
    inputs: dict[str, Any]
    expected: dict[str, Any]
    leeway: Mapping[str, Leeway] = field(default_factory=dict)
    padded: bool = False
    note: str = ""
    limits: Callable[[], Mapping[str, Leeway]] | None = None
    # By whether rows are padded; a library takes them as they are.
    _guarded: dict[bool, GuardedInputs] = field(default_factory=dict)

    def guarded(self, *, padded: bool) -> GuardedInputs:
        """Return the inputs between canaries, the same for all candidates, which must not change them."""
        if padded not in self._guarded:
            self._guarded[padded] = GuardedInputs(self.inputs, padded=padded)
        return self._guarded[padded]

    def forget_guarded(self) -> None:
        """Drop the guarded inputs after a run wrote to them; they are made again."""
        self._guarded.clear()

    @property
    def bytes(self) -> int:
        """Return the bytes of its arrays, without those that it shares with other cases."""
        guarded = (value for found in self._guarded.values() for value in found.values.values())
        extra = (value for found in self.leeway.values() for value in (found.reached, found.tainted))
        return _bytes_of([*self.inputs.values(), *self.expected.values(), *guarded, *extra])


def _bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the distinct tensors among values."""
    found = {id(x): x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor)}
    return sum(found.values())


class _BytesWritten(TorchFunctionMode):
    """Counts the bytes of all tensors that torch's functions return, without their temporary ones.

    One of torch's dispatch modes would count those too, but takes a second to load.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, tuple | list) else (found,)
        given = {id(value) for value in args}
        self.total += _bytes_of(
            x for x in made if isinstance(x, torch.Tensor) and id(x) not in given and not x._is_view()
        )
        return found


class ValueCases:
    """The cases that are about values, at odd sizes that do not grow with the problem's.

    Args:
        spec: the spec.
        problem: a problem; all whose :func:`tilekern.tuning.verify.check.odd_problem` is the same have the same cases.
        device: where its inputs are, as torch names it.
        room: what a reference may cost.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, device: str, room: Room) -> None:
        self._spec, self._device, self._room = spec, device, room
        self._bucketed = [d.name for d in spec.dimensions if d.kind == "bucketed"]
        self._odd = odd_problem(spec, problem)
        inputs, self._draws = adversarial.drawn_and_counted(spec, self._odd, device)
        with _BytesWritten() as written:
            expected = expected_results(spec, self._odd, inputs)
        self.random = Case("random", self._odd, inputs, expected)
        tried = [odd_problem(spec, problem, most) for most in _SMALL]
        # The reference's bytes that do not depend on the bucketed sizes, like weights' gradients, and those that grow
        # with them.
        least_inputs = drawn(spec, tried[-1], device)
        with _BytesWritten() as least:
            expected_results(spec, tried[-1], least_inputs)
        self._fixed_bytes, self._growing_bytes = least.total, max(0, written.total - least.total)
        part = Room(max(room.bytes // _SMALL_PART, 2 * self._fixed_bytes), room.flops // _SMALL_PART)
        self._small = next((one for one in tried if self.fits(one, part)), tried[-1])
        # By their index among the makers.
        self._made: dict[int, list[Case]] = {}

    @property
    def bytes(self) -> int:
        """Return the bytes of the arrays of all kept cases."""
        shared = (value for found in self.__dict__.get("_unpoisoned", ()) for value in found.values())
        kept = [self.random, *(case for made in self._made.values() for case in made)]
        return sum(case.bytes for case in kept) + _bytes_of(shared)

    def all(self) -> Iterator[Case]:
        """Yield all cases, the random one first; each is made when first needed, and kept if there is room."""
        yield self.random
        makers: list[Callable[[], list[Case]]] = [
            self._tails,
            # The largest draws that float32 carries: nothing overflows, and torch's own float32 is exact enough.
            lambda: [self._scaled(self._power)],
            lambda: [self._changed("zeros", adversarial.zeros)],
            lambda: [self._changed("one-hot rows", adversarial.one_hot_rows)],
            *(functools.partial(self._varied, name) for name in self._spec.variations),
            *(functools.partial(self._poisoned, draw) for draw in range(self._draws)),
        ]
        for place, make in enumerate(makers):
            if place in self._made:
                yield from self._made[place]
                continue
            cases = make()
            yield from cases
            if self._room.keeps and self.bytes + sum(case.bytes for case in cases) <= self._room.bytes:
                self._made[place] = cases

    def fits(self, problem: Problem, room: Room | None = None) -> bool:
        """Return whether the reference of a problem fits the room, or another room.

        Its bytes are taken to grow as the product of the bucketed sizes, like attention's scores.
        """
        room = room or self._room
        growth = math.prod(problem[name] / self._odd[name] for name in self._bucketed)
        bytes_written = self._fixed_bytes + self._growing_bytes * growth
        return bytes_written <= room.bytes and self._spec.flops(problem) <= room.flops

    def plain(self, name: str, problem: Problem, **more: Any) -> Case:
        """Make a case of ordinary inputs."""
        inputs = drawn(self._spec, problem, self._device)
        return Case(name, problem, inputs, expected_results(self._spec, problem, inputs), **more)

    def _varied(self, name: str) -> list[Case]:
        """Make a variation of the inputs, at the sizes of the random case."""
        generator = torch.Generator(device=self._device).manual_seed(adversarial.SEED)
        inputs = self.random.inputs | self._spec.variations[name](self._odd, generator, self._device)
        return [Case(name, self._odd, inputs, expected_results(self._spec, self._odd, inputs))]

    def _tails(self) -> list[Case]:
        """Make a case with one row less than whole tiles, and gaps between rows."""
        sizes = {name: max(1, bucket(self._small[name]) - 1) for name in self._bucketed}
        return [self.plain("tails", self._small.but(**sizes), padded=True)]

    @functools.cached_property
    def _power(self) -> int:
        carried = itertools.takewhile(lambda power: self._is_carried(self._scaled(power)), adversarial.POWERS)
        return max(carried, default=0)

    def _scaled(self, power: int) -> Case:
        return self._changed("large magnitudes", adversarial.scaled(power), f"draws times 2^{power}")

    def _is_carried(self, case: Case) -> bool:
        """Return whether inputs and results are finite in their dtypes, and float32 is exact enough."""
        spec, problem = self._spec, case.problem
        dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in spec.outputs(problem, 1).items()}
        held = [x for x in case.inputs.values() if isinstance(x, torch.Tensor)]
        held += [(_HEADROOM * x).to(dtypes.get(name, torch.float32)) for name, x in case.expected.items()]
        if case.leeway.keys() != case.expected.keys() or not all(bool(widened(x).isfinite().all()) for x in held):
            return False
        if adversarial.largest_exponent(spec, problem, case.inputs) > _LARGEST_EXPONENT:
            return False
        exact = TOLERANCES["float32"].times(spec.roundings * _FLOAT32_TOLERANCES * FLOAT32_SLACK)
        for name, x in case.expected.items():
            leeway, norm, peak = case.leeway[name], float(x.norm()), float(x.abs().max())
            if leeway.norm > exact.relative * norm or leeway.peak > exact.elementwise * peak:
                return False
        if not spec.is_library(problem, spec.generic(problem)):
            return True
        # A sequence of libraries and kernels holds what they hand on in the problem's dtype.
        half = adversarial.results_in(getattr(torch, problem["dtype"]), spec, problem, case.inputs)
        return judge(half, case.expected, spec.tolerance(problem)).passed

    def _changed(self, name: str, change: Change, note: str = "") -> Case:
        """Make a case of changed draws, with torch's own float32 error as leeway if that is finite."""
        spec, problem = self._spec, self._small
        inputs = drawn(spec, problem, self._device, change)
        wide, narrow = (
            adversarial.results_in(dtype, spec, problem, inputs) for dtype in (torch.float64, torch.float32)
        )
        lost = {result: (narrow[result].double() - right).abs() for result, right in wide.items()}
        leeway = {
            result: Leeway(FLOAT32_SLACK * float(error.norm()), FLOAT32_SLACK * float(error.max()))
            for result, error in lost.items()
            if bool(error.isfinite().all())
        }
        return Case(name, problem, inputs, expected_results(spec, problem, inputs), leeway, note=note)

    @functools.cached_property
    def _unpoisoned(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return inputs, results, and results without intermediate rounding."""
        inputs = drawn(self._spec, self._small, self._device)
        smooth = adversarial.results_in(torch.float64, self._spec, self._small, inputs)
        return inputs, expected_results(self._spec, self._small, inputs), smooth

    def _poisoned(self, draw: int) -> list[Case]:
        """Put NaN, then infinity, into a draw: it must appear where the reference has it, and nowhere else."""
        spec, problem, found = self._spec, self._small, []
        plain, right, smooth = self._unpoisoned
        probed = drawn(spec, problem, self._device, placed(draw, adversarial.PROBE))
        reached = adversarial.reached(smooth, adversarial.results_in(torch.float64, spec, problem, probed))
        is_coarse = spec.result_dtype(problem) == "tfloat32"
        leeway = {name: Leeway(plain=right[name], reached=x, is_coarse=is_coarse) for name, x in reached.items()}
        for what, mark in (("nan", math.nan), ("infinity", math.inf if draw % 2 else -math.inf)):
            inputs = drawn(spec, problem, self._device, placed(draw, mark))
            if names := adversarial.changed_names(plain, inputs):
                expected = expected_results(spec, problem, inputs)
                limits = (
                    functools.cache(functools.partial(self._limits, draw, mark, leeway)) if math.isinf(mark) else None
                )
                found.append(Case(f"{what} in {', '.join(names)}", problem, inputs, expected, leeway, limits=limits))
                # Infinity may reach what NaN reaches.
                leeway = {name: replace(extra, tainted=expected[name].isnan()) for name, extra in leeway.items()}
        return found

    def _limits(self, draw: int, mark: float, leeway: Mapping[str, Leeway]) -> dict[str, Leeway]:
        """Return leeway for what infinity changes and leaves finite, as a score of minus infinity changes the others'.

        The reference gives NaN there for zero times a masked infinity. Right are the results with a large number.
        """
        spec, problem = self._spec, self._small
        probed = [
            drawn(spec, problem, self._device, placed(draw, math.copysign(x, mark))) for x in adversarial.FAR_PROBES
        ]
        near, far = (adversarial.results_in(torch.float64, spec, problem, inputs) for inputs in probed)
        right, reached = expected_results(spec, problem, probed[0]), adversarial.reached(near, far)
        return {name: replace(extra, plain=right[name], reached=reached[name]) for name, extra in leeway.items()}


class Kept:
    """The data that problems of one process share.

    Attributes:
        checks: outcomes of screening, by all that they depend on.
        outcomes: outcomes of all cases about values, by all that they depend on.
    """

    def __init__(self) -> None:
        self.checks: dict[Hashable, Check] = {}
        self.outcomes: dict[Hashable, Outcomes] = {}
        self._values: OrderedDict[Hashable, ValueCases] = OrderedDict()

    def values(self, spec: KernelSpec, problem: Problem, device: str, room: Room) -> ValueCases:
        """Return the cases about values of a problem; the least recently used ones make room."""
        key = (spec.name, odd_problem(spec, problem).key, device, room)
        if key not in self._values:
            most_bytes = room.bytes // _KEPT_ROOM
            while self._values and sum(values.bytes for values in self._values.values()) > most_bytes:
                self._values.popitem(last=False)
            self._values[key] = ValueCases(spec, problem, device, room)
        self._values.move_to_end(key)
        return self._values[key]
