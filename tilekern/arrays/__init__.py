"""Kernels on arrays of any library, without torch: memory and streams of the CUDA driver, and plans to launch.

Use::

    from tilekern import arrays

    stream = arrays.device(0).stream()
    gate, up, y = (arrays.empty((4096, 12288), "bfloat16", stream) for _ in range(3))
    swiglu = arrays.plan("swiglu_forward", rows=4096, columns=12288, dtype="bfloat16")
    swiglu.launch(stream, gate, up, y)
"""

from tilekern.arrays.planning import ArrayPlan, plan
from tilekern.arrays.views import Array, empty
from tilekern.runtime.driver import Device, Event, Graph, Stream, device

__all__ = ["Array", "ArrayPlan", "Device", "Event", "Graph", "Stream", "device", "empty", "plan"]
