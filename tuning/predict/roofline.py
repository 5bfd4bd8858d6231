"""Compute the roofline: the least time of a problem on a GPU, and whether memory or arithmetic bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from tilekern.kernels import spec_named
from tilekern.spec import Problem
from tilekern.spec.targets import Target

MEMORY, ARITHMETIC = "memory", "arithmetic"
# The time to start a launch.
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
        """Return the longer of the two."""
        return max(self.memory_s, self.arithmetic_s)

    @property
    def bound(self) -> str:
        """Return which one is longer: ``memory`` or ``arithmetic``."""
        return ARITHMETIC if self.arithmetic_s > self.memory_s else MEMORY


def roofline(kernel: str, problem: Problem, target: Target, copy_s: float | None = None) -> Roofline:
    """Compute the roofline of a problem.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        copy_s: measured seconds of a copy of the same bytes; by default the rate of a large copy is used.
    """
    spec = spec_named(kernel)
    if copy_s is None:
        copy_s = spec.bytes_moved(problem) / (target.copy_gbs * 1e9)
    # The first dtype of a problem is its products'.
    dtype = next((str(problem[d.name]) for d in spec.dimensions if d.kind == "dtype"), spec.result_dtype(problem))
    return Roofline(copy_s, spec.flops(problem) / (1e12 * target.product_tflops(dtype)))


def launch_s(kernel: str, problem: Problem, target: Target) -> float:
    """Return the seconds of a launch that reaches the roofline."""
    return LAUNCH_S + roofline(kernel, problem, target).seconds
