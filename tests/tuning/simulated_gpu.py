"""A measuring process whose GPU is this machine's CPU: all of the worker's own code runs, kernels by the interpreter.

What stands for CUDA is as little as will do: tensors asked for on ``cuda`` lie on the CPU, a launch runs the kernel at
once, and events read how long the thread has computed. Times mean nothing; what is checked, timed and told is real.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.runtime import plans
from tilekern.spec import CuteKernel, name_of
from tilekern.tuning.measure import bench, worker


class Event:
    """A CUDA event that reads how long its thread has computed: what else the machine does takes no time on a GPU."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.thread_time()

    def synchronize(self) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        """A launch runs at once, which is not the host's delay."""
        return False

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1000 * (end._at - self._at)


class OnTheCpu(TorchFunctionMode):
    """Makes tensors on the CPU wherever ``cuda`` is asked for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {name: "cpu" if name == "device" else value for name, value in (kwargs or {}).items()}
        return function(*("cpu" if isinstance(value, str) and value == "cuda" else value for value in args), **options)


class Generator(torch.Generator):
    """A generator on the CPU, whatever device is asked for."""

    def __new__(cls, *_: object, **__: object) -> Generator:
        return super().__new__(cls, "cpu")


class SimulatedPlan(plans.InterpretedPlan):
    """A plan of the interpreter that looks for no races, which take their time."""

    __slots__ = ()

    def launch(self, device: int, *arguments: Any) -> None:  # noqa: ARG002
        interpreter.launch(self._kernel, self.grid, arguments + self._constants, check_races=False)


def _plan_of(kernel: Any, implementation: Any, config: Any, problem: Any, target: Any) -> SimulatedPlan:
    blocks = implementation.grid(problem, target.sm_count)
    if isinstance(implementation, CuteKernel):  # the interpreter runs the same formulas in cuTile, right on any grid
        spec = spec_named(name_of(implementation.function))
        implementation = spec.device(problem, spec.generic(problem))
    return SimulatedPlan(implementation, config, blocks)


def serve(*arguments: Any) -> None:
    """Serve as a worker does (:mod:`tilekern.tuning.measure.worker`), on the simulated GPU; it changes its process."""
    torch.Generator = Generator  # type: ignore[misc]
    cuda = {
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (8 << 30, 16 << 30),
        "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
        "_sleep": lambda _: None,
    }
    for name, stands_in in cuda.items():
        setattr(torch.cuda, name, stands_in)
    bench.plan_of = _plan_of
    bench.load_code = lambda _: None
    bench.PrebuiltKernel = lambda function, _: function  # type: ignore[assignment, misc]
    worker.Stopwatch.warm_clocks = lambda _: None  # type: ignore[method-assign, assignment]
    with OnTheCpu():
        worker.serve(*arguments)
