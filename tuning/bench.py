"""Runs the candidates of one problem on the GPU at hand: once to check them, as often as wanted to time them."""

from __future__ import annotations

from typing import Any

from tilekern.kernels import spec_named
from tilekern.launcher import PrebuiltKernel, Variant, launch, may_depend
from tilekern.spec import LibraryCall, Problem
from tuning.tasks import Entrant, Task
from tuning.verifying import Check, compare, expected_results, launch_arguments, make_outputs, odd_problem

SEED = 20251


class Bench:
    """Runs the candidates of one problem on the GPU at hand."""

    def __init__(self, task: Task) -> None:
        import torch

        self._torch, self._task, self._target, self._problem = torch, task, task.target, task.problem
        self._spec, problem = spec_named(task.kernel), task.problem
        self._odd = odd_problem(self._spec, problem)
        self._generator = torch.Generator(device="cuda").manual_seed(SEED)
        self._odd_inputs = self._spec.inputs(self._odd, self._generator, "cuda")
        self._expected = expected_results(self._spec, self._odd, self._odd_inputs)
        self._inputs: dict[str, Any] | None = None
        self._outputs: dict[Any, Any] = {}

    def kernel(self, entrant: Entrant) -> Any:
        """The launchable kernel of an entrant; None where a library runs it."""
        item, line = entrant.candidate, entrant.compiled
        if item.is_library:
            return None
        function = self._spec.device(item.problem, item.config).function
        variant = Variant(item.variant, line["symbol"], line["assumptions"], lambda: self._task.cubins[line["sha256"]])
        return PrebuiltKernel(function, [variant])

    def check(self, entrant: Entrant) -> Check:
        """Run an entrant twice on odd sizes with poisoned outputs: right, and the same bits both times.

        A problem with a flag ``deterministic`` that is off asks for no such promise.
        """
        torch = self._torch
        kernel = self.kernel(entrant)
        first = self._run(kernel, entrant, self._odd, self._odd_inputs)
        check = compare(self._spec, self._odd, first, self._expected)
        if not check.passed:
            return check
        if not self._problem.get("deterministic", True):
            return check
        again = self._run(kernel, entrant, self._odd, self._odd_inputs)
        if any(not torch.equal(first[name], again[name]) for name in first):
            return Check(False, check.relative_error, check.elementwise_error, "two runs on the same inputs differ")
        return check

    def _shared_outputs(self, blocks: int) -> dict[str, Any]:
        """Outputs of the full size, the same for all entrants: each writes all of them."""
        found = {}
        for name, kind in self._spec.outputs(self._problem, blocks).items():
            if (name, kind) not in self._outputs:
                shape, dtype = kind
                self._outputs[name, kind] = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device="cuda")
            found[name] = self._outputs[name, kind]
        return found

    def _run(self, kernel: Any, entrant: Entrant, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
        blocks = self._blocks(entrant, problem)
        outputs = make_outputs(self._spec, problem, blocks, "cuda") if blocks else {}
        run = self._launch(kernel, entrant, problem, inputs, outputs)
        given = run()
        self._torch.cuda.synchronize()
        return outputs if given is None else dict(zip(self._spec.outputs(problem, 1), given, strict=True))

    def _blocks(self, entrant: Entrant, problem: Problem) -> int:
        """The grid of an entrant; 0 where a library runs it."""
        if entrant.candidate.is_library:
            return 0
        return self._spec.device(problem, entrant.candidate.config).grid(problem, self._target.sm_count)

    def _launch(
        self, kernel: Any, entrant: Entrant, problem: Problem, inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> Any:
        """A function that launches and fills the outputs; a library's gives outputs of its own."""
        implementation = self._spec.implement(problem, entrant.candidate.config)
        if isinstance(implementation, LibraryCall):
            from tilekern.dispatch import plan_for

            call, given = implementation.bound(plan_for), [inputs[name] for name in implementation.inputs]
            return lambda: call(*given)
        blocks = implementation.grid(problem, self._target.sm_count)
        arguments = launch_arguments(implementation, inputs, outputs)
        dependent = may_depend(implementation, self._target)
        return lambda: launch(_stream(), (blocks,), kernel, arguments, dependent=dependent)

    def prepare(self, entrant: Entrant) -> Any:
        """A function that launches the entrant at full size."""
        if self._inputs is None:
            self._inputs = self._spec.inputs(self._problem, self._generator, "cuda")
        blocks = self._blocks(entrant, self._problem)
        outputs = self._shared_outputs(blocks) if blocks else {}
        return self._launch(self.kernel(entrant), entrant, self._problem, self._inputs, outputs)

    def copy(self) -> Any:
        """A function that copies as many bytes as the problem must move, half read and half written."""
        torch = self._torch
        size = max(1, self._spec.bytes_moved(self._problem) // 2)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        sink = torch.empty_like(source)
        return lambda: sink.copy_(source)


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)
