"""Run the candidates of one problem on the GPU here, to check and to time them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilekern.errors import CannotRun
from tilekern.kernels import spec_named
from tilekern.runtime.launcher import PrebuiltKernel, Variant
from tilekern.runtime.plans import Plan, plan_of
from tilekern.runtime.records import launch_in
from tilekern.spec import KernelSpec, LibraryCall, Problem, cdiv
from tilekern.spec.targets import Target
from tilekern.tuning.measure.followers import inputs_behind, problem_behind
from tilekern.tuning.measure.gpu import captured, load_code
from tilekern.tuning.measure.tasks import Entrant, Task
from tilekern.tuning.measure.timing import Launch, Timing, rewriting
from tilekern.tuning.strategies.lineup import ranked
from tilekern.tuning.verify.check import Check, arguments_of, make_outputs, odd_problem

if TYPE_CHECKING:
    from tilekern.tuning.verify.bit_classes import Placed
    from tilekern.tuning.verify.cases import Kept

# Launches of other candidates between two runs that must give the same bits.
_MOST_BETWEEN = 3
# Of a streamed kernel: all copies of its inputs together are this many times as large as the L2, which need not evict
# what is oldest; and a sample has at least this many launches, of which the first alone overlaps no other.
_TIMES_L2, _LEAST_IN_A_ROW = 4, 4


class Bench:
    """Runs the candidates of one problem on the GPU here.

    Args:
        task: the problem and its candidates.
        announce: called with an entrant's key before a launch that checks it, and with None when that is over.
        kept: data shared by the problems of this process; by default none.
    """

    def __init__(
        self, task: Task, announce: Callable[[str | None], None] = lambda _: None, kept: Kept | None = None
    ) -> None:
        import torch

        # Not at the top: the parent of a measuring process imports this module without torch.
        from tilekern.tuning.verify.battery import Battery
        from tilekern.tuning.verify.canaries import in_whole_rows
        from tilekern.tuning.verify.cases import Kept, Room

        self._torch, self._task, self._target, self._problem = torch, task, task.target, task.problem
        self._spec, self._announce, self._kept = spec_named(task.kernel), announce, kept or Kept()
        room = Room.of("cuda", keeps=not task.frugal)
        self._battery = Battery(self._spec, task.problem, task.target.sm_count, room=room, kept=self._kept)
        self._kernels: dict[str, PrebuiltKernel] = {}
        # By the name of a variation; None for ordinary inputs.
        self._inputs: dict[str | None, dict[str, Any]] = {}
        self._copies: dict[str | None, list[dict[str, Any]]] = {}
        self._outputs: dict[Any, Any] = {}
        self._prepared: dict[str, Launch] = {}
        self._laid_out = in_whole_rows
        self._turns = turns_of(self._spec, self._problem, self._target)

    def kernel(self, entrant: Entrant) -> PrebuiltKernel | None:
        """Return the launchable kernel of an entrant; None if a library runs it."""
        if entrant.key not in self._kernels:
            item, line = entrant.candidate, entrant.compiled
            if item.is_library:
                return None
            function = item.spec.device(item.problem, item.config).function
            load = lambda: self._task.cubins[line["sha256"]]  # noqa: E731
            variant = Variant(item.variant, line["symbol"], line["assumptions"], load, launch_in(line.get("launch")))
            self._kernels[entrant.key] = PrebuiltKernel(function, [variant])
        return self._kernels[entrant.key]

    def check(self, entrant: Entrant) -> Check:
        """Screen an entrant before it is timed; the same code is screened once."""
        code = self._code(entrant)
        check = None if code is None else self._kept.checks.get(code)
        if check is None:
            check = self._battery.screen(entrant.candidate.config, self._runner(entrant))
            if code is not None:
                self._kept.checks[code] = check
        return check

    def _code(self, entrant: Entrant) -> Hashable:
        """Return a key of everything that determines an entrant's work at sizes that do not grow with the problem's.

        None for a sequence of kernels and libraries, whose plans may change before the next problem.
        """
        item, odd = entrant.candidate, odd_problem(self._spec, self._problem)
        implementation = self._spec.implement(odd, item.config)
        if implementation.makes_artifact:
            return (item.kernel, odd.key, item.config.key, item.variant, entrant.compiled["sha256"])
        return None if implementation.composite else (item.kernel, odd.key, item.config.key)

    def confirm(self, entrant: Entrant) -> Check:
        """Run the whole battery on an entrant, which it must pass to win."""
        others = [(key, run) for key, run in self._prepared.items() if key != entrant.key][:_MOST_BETWEEN]

        def between() -> None:
            for key, run in others:
                self._watched(key, run)

        return self._battery.confirm(entrant.candidate.config, self._runner(entrant), between, self._code(entrant))

    def placements(self) -> Iterator[list[Placed]]:
        """Yield the placements of rows that tell a bit class (:class:`tilekern.tuning.verify.battery.Battery`)."""
        return self._battery.placements()

    def digests(self, placements: Sequence[Placed], entrant: Entrant) -> dict[str, str]:
        """Return the digests of an entrant's results for rows so placed."""
        return self._battery.digests(placements, entrant.candidate.config, self._runner(entrant))

    def load(self, variation: str | None = None) -> dict[str, Any]:
        """Return the inputs at full size, shared by all entrants, with the changes of a variation."""
        if variation not in self._inputs:
            generator = self._torch.Generator(device="cuda").manual_seed(0)
            if variation is None:
                found = self._spec.inputs(self._problem, generator, "cuda")
            else:
                found = self.load() | self._spec.variations[variation](self._problem, generator, "cuda")
            self._inputs[variation] = {
                name: self._laid_out(value) if isinstance(value, self._torch.Tensor) else value
                for name, value in found.items()
            }
        return self._inputs[variation]

    def prepare(self, entrant: Entrant, variation: str | None = None) -> Launch:
        """Return a function that launches the entrant at full size, and its follower.

        Of a streamed kernel, one that launches it as often as it is timed in a row, each time on the next copy.
        """
        kernel, blocks = self.kernel(entrant), entrant.candidate.blocks(self._target.sm_count)
        outputs = self._shared_outputs(blocks) if blocks else {}
        followers = [self._following(blocks, outputs)] if blocks in self._task.followers else []
        launches = [
            _all_of(self._launch(kernel, entrant, self._problem, inputs, outputs, in_place=True), *followers)
            for inputs in self._copied(variation)
        ]
        found = _in_turn(launches)
        if variation is None:
            self._prepared[entrant.key] = found
        return self._in_a_row(found)

    def _following(self, blocks: int, outputs: dict[str, Any]) -> Launch:
        """Return a function that launches the follower of entrants with this many blocks, on their output."""
        follower, entrant = self._spec.follower, self._task.followers[blocks]
        assert follower is not None
        spec, config = entrant.candidate.spec, entrant.candidate.config
        problem = problem_behind(follower, self._problem, blocks)
        assert problem is not None
        implementation = spec.device(problem, config)
        plan = plan_of(self.kernel(entrant), implementation, config, problem, self._target)
        inputs = inputs_behind(spec, problem, outputs[follower.array])
        made = make_outputs(spec, problem, plan.blocks, "cuda")
        return functools.partial(plan.launch, 0, *arguments_of(implementation, inputs, made))

    def load_code(self, key: str) -> bool:
        """Load the code of a prepared entrant without running it; return False for a library, which loads its own."""
        if key not in self._kernels:
            return False
        load_code(self._prepared[key])
        return True

    def arguments(self, entrant: Entrant) -> tuple[Any, ...]:
        """Return the arguments of a launch at full size; all entrants share the arrays."""
        implementation = self._spec.device(self._problem, entrant.candidate.config)
        outputs = self._shared_outputs(entrant.candidate.blocks(self._target.sm_count))
        return arguments_of(implementation, self.load(), outputs)

    def copy(self) -> Launch:
        """Return a function that copies as many bytes as the problem must move, half read and half written."""
        torch = self._torch
        size = max(1, self._spec.bytes_moved(self._problem) // 2)

        def one() -> Launch:
            source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
            sink = torch.empty_like(source)
            return lambda: sink.copy_(source)

        return self._in_a_row(_in_turn([one() for _ in range(self._turns)]))

    @property
    def in_a_row(self) -> int | None:
        """How many launches of a streamed kernel are timed in a row: each copy as often; None if it is not streamed."""
        return cdiv(_LEAST_IN_A_ROW, self._turns) * self._turns if self._spec.streamed else None

    def _in_a_row(self, launch: Launch) -> Launch:
        """Return a function that replays as many launches of a streamed kernel as are timed in a row."""
        return launch if self.in_a_row is None else captured(launch, self.in_a_row)

    def _copied(self, variation: str | None) -> list[dict[str, Any]]:
        """Return the inputs, and copies of them that the launches take in turn."""
        if variation not in self._copies:
            inputs, tensor = self.load(variation), self._torch.Tensor
            self._copies[variation] = [inputs] + [
                {name: self._laid_out(x.clone()) if isinstance(x, tensor) else x for name, x in inputs.items()}
                for _ in range(1, self._turns)
            ]
        return self._copies[variation]

    def refresh(self) -> Launch | None:
        """Return a launch that puts the inputs into L2, if they are there in real use of the spec."""
        if not self._spec.inputs_in_l2:
            return None
        inputs = self._inputs.get(None, {}).values()
        return rewriting(value for value in inputs if isinstance(value, self._torch.Tensor))

    def _runner(self, entrant: Entrant) -> Any:
        """Return the function by which the battery runs an entrant."""
        kernel = self.kernel(entrant)

        def run(problem: Problem, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
            return self._watched(entrant.key, self._launch(kernel, entrant, problem, inputs, outputs))

        return run

    def _watched(self, key: str, launch: Launch) -> Any:
        """Launch and wait, so that a fault shows while its candidate is announced."""
        self._announce(key)
        found = launch()
        self._torch.cuda.synchronize()
        self._announce(None)
        return found

    def _shared_outputs(self, blocks: int) -> dict[str, Any]:
        """Return outputs of the full size, shared by all entrants; each entrant writes all of them."""
        found = {}
        for name, kind in self._spec.outputs(self._problem, blocks).items():
            if (name, kind) not in self._outputs:
                shape, dtype = kind
                made = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device="cuda")
                self._outputs[name, kind] = self._laid_out(made)
            found[name] = self._outputs[name, kind]
        return found

    def _launch(
        self, kernel: Any, entrant: Entrant, problem: Problem, inputs: dict[str, Any], outputs: dict[str, Any],
        *, in_place: bool = False,
    ) -> Any:  # fmt: skip
        """Return a function that launches and fills the outputs; a library's returns its own outputs.

        ``in_place`` lets a library update an input, as its op does; a check needs the inputs again.
        """
        implementation = self._spec.implement(problem, entrant.candidate.config)
        if isinstance(implementation, LibraryCall):
            call = implementation.bound(plan_of_part, in_place=in_place)
            return functools.partial(call, *(inputs[name] for name in implementation.inputs))
        plan = plan_of(kernel, implementation, entrant.candidate.config, problem, self._target)
        return functools.partial(plan.launch, 0, *arguments_of(implementation, inputs, outputs))


def plan_of_part(spec: KernelSpec, device: Any, *sizes: Any) -> Plan:
    """Return the plan of a kernel that a composite launches.

    Raises:
        CannotRun: it has none, and the composite would run, and be timed by, something else than its config says.
    """
    from tilekern.runtime.dispatch import plan_for

    plan = plan_for(spec, device, *sizes)
    if plan is None:
        raise CannotRun(f"no cache holds {spec.name} at {sizes}, which the config launches; tune that first")
    return plan


def turns_of(spec: KernelSpec, problem: Problem, target: Target) -> int:
    """Count the copies of the inputs that launches to be timed take in turn: one if the spec is not streamed."""
    return cdiv(_TIMES_L2 * target.l2_bytes, max(1, spec.bytes_moved(problem))) if spec.streamed else 1


def _all_of(first: Launch, *others: Launch) -> Launch:
    """Return a function that runs launches one after the other."""

    def launch() -> None:
        first()
        for other in others:
            other()

    return launch if others else first


def _in_turn(launches: Sequence[Launch]) -> Launch:
    """Return a function that runs one of the launches, each time the next."""
    turns = itertools.cycle(launches)

    def launch() -> None:
        next(turns)()

    return launch if len(launches) > 1 else launches[0]


def to_confirm(
    entrants: Sequence[Entrant], timings: Mapping[str, Timing], checks: Mapping[str, Check], *, invariant: bool = False
) -> Iterator[Entrant]:  # fmt: skip
    """Yield the entrants that must pass the whole battery after a race.

    First the generic variant, which every record carries. Then the ranking of the race until one has passed; if that
    one is a call of a library or a composite, further until a kernel has, since its record carries that too. Then, if
    ``invariant``, until one of each bit class has. The caller puts each outcome into ``checks`` before it asks for the
    next entrant.
    """
    yield from (entrant for entrant in entrants if not entrant.is_aligned and checks[entrant.key].passed)
    raced = {entrant.key: entrant for entrant in entrants if entrant.key in timings}
    order = ranked({key: timings[key].as_dict() for key in raced})
    has_winner = False
    for key in order:
        is_call = raced[key].candidate.is_library
        if has_winner and is_call:
            continue
        yield raced[key]
        if checks[key].passed and not is_call:
            break
        has_winner |= checks[key].passed
    stood = {checks[key].bits for key in order if checks[key].passed and checks[key].cases}
    for key in order if invariant else ():
        if checks[key].passed and checks[key].bits and checks[key].bits not in stood:
            yield raced[key]
            if checks[key].passed:
                stood.add(checks[key].bits)
