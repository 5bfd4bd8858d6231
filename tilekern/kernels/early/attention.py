"""Attention's forward whose launch overlaps the end of the kernel before, otherwise ``attention_forward``.

Its queries, keys and values have just been written, so it is timed with them in L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import cuda.tile as ct

from tilekern.kernels.attention import forward
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Config, DeviceKernel, Problem, Space, Value, python_of

_attend = python_of(forward.attention_forward)


@ct.kernel
def early_attention_forward(
    q, k, v, sink_logits, query_starts, key_starts, most_queries, scale, softcap, window, out, lse, heads: ConstInt,
    kv_heads: ConstInt, depth: ConstInt, tile_m: ConstInt, tile_n: ConstInt, budget: ConstInt, latency: ConstInt,
    persistent: ConstBool, one_loop: ConstBool, ahead: ConstBool, apart: ConstBool, causal: ConstBool,
    windowed: ConstBool, capped: ConstBool, sinks: ConstBool, packed: ConstBool, precise: ConstBool,
):  # fmt: skip
    """Take and give what ``attention_forward`` does."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    _attend(
        q, k, v, sink_logits, query_starts, key_starts, most_queries, scale, softcap, window, out, lse, heads,
        kv_heads, depth, tile_m, tile_n, budget, latency, persistent, one_loop, ahead, apart, causal, windowed, capped,
        sinks, packed, precise,
    )  # fmt: skip


def _axes(problem: Problem) -> Mapping[str, Sequence[Value]]:
    return {**forward.SPEC.space.axes(problem), "implementation": ["tile"]}


def _implement(problem: Problem, config: Config) -> DeviceKernel:
    made = forward.SPEC.device(problem, config)
    return dataclasses.replace(made, function=early_attention_forward, dependent=True)


SPEC = dataclasses.replace(
    forward.SPEC,
    name="early_attention_forward",
    summary=f"{forward.SPEC.summary}, launched before its predecessor has ended",
    module=__name__,
    space=Space(_axes, forward.SPEC.space.constraints),
    implement=_implement,
    inputs_in_l2=True,
)

SPECS = (SPEC,)
