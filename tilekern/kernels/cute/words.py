"""Replace ``ct`` while CuTe DSL compiles a formula: define the cuTile functions that formulas use.

A tile is a :class:`Part`: the elements that one thread holds, or one value that all threads of a row share.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
from cutlass import Float32, cute

from tilekern.kernels.cute.arguments import NUMERIC
from tilekern.spec.targets import HAS


def bare(value: Any) -> Any:
    """Return the value inside a part, or any other value itself."""
    return value.value if isinstance(value, Part) else value


class Part:
    """A thread's share of a tile, with a tile's operators."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def astype(self, dtype: Any) -> Part:
        """See ``ct.astype``."""
        return Part(self.value.to(NUMERIC[dtype.name]))

    def __add__(self, other: Any) -> Part:
        return Part(self.value + bare(other))

    def __radd__(self, other: Any) -> Part:
        return Part(bare(other) + self.value)

    def __sub__(self, other: Any) -> Part:
        return Part(self.value - bare(other))

    def __rsub__(self, other: Any) -> Part:
        return Part(bare(other) - self.value)

    def __mul__(self, other: Any) -> Part:
        return Part(self.value * bare(other))

    def __rmul__(self, other: Any) -> Part:
        return Part(bare(other) * self.value)

    def __truediv__(self, other: Any) -> Part:
        return Part(self.value / bare(other))

    def __rtruediv__(self, other: Any) -> Part:
        return Part(Float32(bare(other)) / self.value)

    def __neg__(self) -> Part:
        return Part(-self.value)

    def __gt__(self, other: Any) -> Part:
        return Part(self.value > bare(other))


class Words:
    """Replacement for the module ``cuda.tile``.

    Args:
        capability: compute capability of the GPU as one number: 90 for sm_90.
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability

    float32, float16, bfloat16, int32 = ct.float32, ct.float16, ct.bfloat16, ct.int32

    @staticmethod
    def static_eval(value: Any) -> Any:
        """See ``ct.static_eval``."""
        return value

    @staticmethod
    def rsqrt(x: Any) -> Part:
        """See ``ct.rsqrt``."""
        return Part(cute.math.rsqrt(bare(x)))

    @staticmethod
    def exp2(x: Any, *, flush_to_zero: bool = False) -> Part:
        """See ``ct.exp2``."""
        return Part(cute.math.exp2(bare(x), fastmath=flush_to_zero))

    @staticmethod
    def where(condition: Part, x: Any, y: Any) -> Part:
        """See ``ct.where``; numbers are float32."""
        where = condition.value
        full = (cute.full_like(where, one, Float32) if isinstance(one, float) else bare(one) for one in (x, y))
        return Part(cute.where(where, *full))

    def grid_dependency_control_wait(self) -> None:
        """See ``ct.grid_dependency_control_wait``; GPUs before sm_90 launch nothing early."""
        if self._capability in HAS["dependent_launch"]:
            cute.arch.griddepcontrol_wait()

    def grid_dependency_control_launch_dependents(self) -> None:
        """See ``ct.grid_dependency_control_launch_dependents``; GPUs before sm_90 launch nothing early."""
        if self._capability in HAS["dependent_launch"]:
            cute.arch.griddepcontrol_launch_dependents()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"kernels of CuTe DSL do not know ct.{name}; add it to {__name__}")
