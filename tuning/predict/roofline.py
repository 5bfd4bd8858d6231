"""The roofline: below which time no launch of a problem can be on a GPU, and whether memory or arithmetic says so."""

from __future__ import annotations

from dataclasses import dataclass

from tilekern.kernels import spec_named
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.targets import Target

MEMORY, ARITHMETIC = "memory", "arithmetic"
# What starting a launch takes, however little it does.
LAUNCH_S = 2.5e-6


@dataclass(frozen=True)
class Roofline:
    """The least time of a problem on a target.

    Attributes:
        memory_s: seconds of a copy of the bytes that must move, each read or written once.
        arithmetic_s: seconds of the floating-point operations at the peak by datasheet of products of the dtype.
    """

    memory_s: float
    arithmetic_s: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.memory_s, self.arithmetic_s)

    @property
    def bound(self) -> str:
        """Which of the two is the longer: ``memory`` or ``arithmetic``."""
        return ARITHMETIC if self.arithmetic_s > self.memory_s else MEMORY


def roofline(kernel: str, problem: Problem, target: Target, copy_s: float | None = None) -> Roofline:
    """The roofline of a spec's problem.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        copy_s: seconds of a copy of the same bytes where one was timed; else what a large copy reaches is taken.
    """
    spec = spec_named(kernel)
    if copy_s is None:
        copy_s = spec.bytes_moved(problem) / (target.copy_gbs * 1e9)
    return Roofline(copy_s, spec.flops(problem) / (1e12 * target.product_tflops(_dtype_of(spec, problem))))


def _dtype_of(spec: KernelSpec, problem: Problem) -> str:
    """The dtype of what is multiplied, which is a problem's first one; float32 where it has none."""
    return next((str(problem[d.name]) for d in spec.dimensions if d.kind == "dtype"), "float32")


def launch_s(kernel: str, problem: Problem, target: Target) -> float:
    """Seconds of a launch that reaches the roofline."""
    return LAUNCH_S + roofline(kernel, problem, target).seconds
