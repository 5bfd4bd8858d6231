"""SwiGLU's elementwise part (Shazeer 2020, arXiv:2002.05202): ``y = silu(gate) * up``, forward and backward.

With s = sigmoid(gate): ``y = gate * s * up``; ``dgate = dy * up * s * (1 + gate * (1 - s))``; ``dup = dy * gate * s``.
All in float32 registers, rounded once. The backward computes s again, so that no activation is kept; one form of it
also makes y again, for a caller that did not keep y either.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.tiles import (
    TMA_NEEDS_HOPPER,
    ConstBool,
    ConstInt,
    grid_of,
    hints,
    is_bounded,
    load,
    power_of_two,
)
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
    outputs_of,
)
from tilekern.targets import Target

_LOG2_E = 1.4426950408889634


def _sigmoid(x):
    """1 / (1 + exp(-x)) by the hardware's exponential and reciprocal: 2 ulp; exact division costs 20 % of time."""
    grown = 1.0 + ct.exp2(x * -_LOG2_E, flush_to_zero=True)
    return ct.truediv(1.0, grown, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def _forward_tile(gate, up, y, item, columns, tile_m, tile_n, bounded, latency, tma):
    across = ct.cdiv(columns, tile_n)
    index = (item // across, item % across)
    g = load(gate, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    u = load(up, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    ct.store(y, index, (g * _sigmoid(g) * u).astype(y.dtype), check_bounds=bounded, allow_tma=tma)


def _backward_tile(dy, gate, up, dgate, dup, item, columns, tile_m, tile_n, bounded, latency, tma):
    across = ct.cdiv(columns, tile_n)
    index = (item // across, item % across)
    d = load(dy, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    g = load(gate, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    u = load(up, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    s = _sigmoid(g)
    slope = d * u * s * (1.0 + g * (1.0 - s))
    ct.store(dgate, index, slope.astype(dgate.dtype), check_bounds=bounded, allow_tma=tma)
    ct.store(dup, index, (d * g * s).astype(dup.dtype), check_bounds=bounded, allow_tma=tma)


def _remake_tile(dy, gate, up, dgate, dup, y, item, columns, tile_m, tile_n, bounded, latency, tma):
    across = ct.cdiv(columns, tile_n)
    index = (item // across, item % across)
    d = load(dy, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    g = load(gate, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    u = load(up, index, (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
    s = _sigmoid(g)
    slope = d * u * s * (1.0 + g * (1.0 - s))
    ct.store(dgate, index, slope.astype(dgate.dtype), check_bounds=bounded, allow_tma=tma)
    ct.store(dup, index, (d * g * s).astype(dup.dtype), check_bounds=bounded, allow_tma=tma)
    ct.store(y, index, (g * s * u).astype(y.dtype), check_bounds=bounded, allow_tma=tma)


@ct.kernel
def swiglu_forward_block(
    gate, up, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool, latency: ConstInt,
    tma: ConstBool,
):  # fmt: skip
    """One tile a block."""
    _forward_tile(gate, up, y, ct.bid(0), columns, tile_m, tile_n, bounded, latency, tma)


@ct.kernel
def swiglu_forward_persistent(
    gate, up, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool, latency: ConstInt,
    tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over tiles."""
    tiles = ct.cdiv(gate.shape[0], tile_m) * ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
        _forward_tile(gate, up, y, item, columns, tile_m, tile_n, bounded, latency, tma)


@ct.kernel
def swiglu_backward_block(
    dy, gate, up, dgate, dup, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool,
    latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """One tile a block."""
    _backward_tile(dy, gate, up, dgate, dup, ct.bid(0), columns, tile_m, tile_n, bounded, latency, tma)


@ct.kernel
def swiglu_backward_persistent(
    dy, gate, up, dgate, dup, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool,
    latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over tiles."""
    tiles = ct.cdiv(gate.shape[0], tile_m) * ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
        _backward_tile(dy, gate, up, dgate, dup, item, columns, tile_m, tile_n, bounded, latency, tma)


@ct.kernel
def swiglu_remake_block(
    dy, gate, up, dgate, dup, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool,
    latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """One tile a block."""
    _remake_tile(dy, gate, up, dgate, dup, y, ct.bid(0), columns, tile_m, tile_n, bounded, latency, tma)


@ct.kernel
def swiglu_remake_persistent(
    dy, gate, up, dgate, dup, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool,
    latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over tiles."""
    tiles = ct.cdiv(gate.shape[0], tile_m) * ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
        _remake_tile(dy, gate, up, dgate, dup, y, item, columns, tile_m, tile_n, bounded, latency, tma)


DIMENSIONS = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))


def _matrices(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[Array, ...]:
    shape = ("rows", "columns")
    given = tuple(Array(name, "dtype", shape) for name in inputs)
    return given + tuple(Array(name, "dtype", shape, "output") for name in outputs)


_FORWARD_ARRAYS = _matrices(("gate", "up"), ("y",))
_BACKWARD_ARRAYS = _matrices(("dy", "gate", "up"), ("dgate", "dup"))
_REMAKE_ARRAYS = _matrices(("dy", "gate", "up"), ("dgate", "dup", "y"))


def _wastes_little(columns: int, tile_n: int) -> bool:
    """Whether at most a third of the columns of a row's tiles lie beyond the row's end."""
    return cdiv(columns, tile_n) * tile_n <= 1.5 * columns


def _tile_widths(columns: int) -> list[int]:
    """Wide tiles where they fit the row, else narrower ones, the widest last."""
    wide = [n for n in (1024, 2048, 4096) if n <= power_of_two(columns) and _wastes_little(columns, n)]
    narrow = [n for n in (256, 512) if n <= power_of_two(columns) and _wastes_little(columns, n)]
    return wide or narrow or [min(256, power_of_two(columns))]


def _axes(problem: Problem) -> dict[str, list[Value]]:
    widths = _tile_widths(problem["columns"])
    return {
        "schedule": ["persistent", "block"],
        "tile_m": sorted({max(1, elements // n) for elements in (1024, 2048) for n in widths}),
        "tile_n": list(widths),
        "occupancy": [2, 8],
        "num_worker_warps": [0, 8],
        "tma": [False],
        "latency": [0],
    }


def _sized(most: int) -> Constraint:
    return Constraint(
        f"a tile of fewer than 1024 or more than {most} elements starves the memory system or spills",
        lambda problem, config, target: 1024 <= config["tile_m"] * config["tile_n"] <= most,
    )


def _implementation(spec: KernelSpec, problem: Problem, config: Config, function: Any) -> Implementation:
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    constants = (
        ("columns", columns),
        ("tile_m", tile_m),
        ("tile_n", tile_n),
        ("bounded", is_bounded(tile_m, columns, tile_n)),
        ("latency", config["latency"]),
        ("tma", config["tma"]),
    )
    across = cdiv(columns, tile_n)
    return Implementation(
        function=function,
        parameters=spec.parameters(problem),
        constants=constants,
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["rows"], tile_m) * across, config, sm_count),
        hints=hints(config),
    )


def _implement_forward(problem: Problem, config: Config) -> Implementation:
    function = swiglu_forward_block if config["schedule"] == "block" else swiglu_forward_persistent
    return _implementation(FORWARD, problem, config, function)


def _implement_backward(problem: Problem, config: Config) -> Implementation:
    function = swiglu_backward_block if config["schedule"] == "block" else swiglu_backward_persistent
    return _implementation(BACKWARD, problem, config, function)


def _implement_remake(problem: Problem, config: Config) -> Implementation:
    function = swiglu_remake_block if config["schedule"] == "block" else swiglu_remake_persistent
    return _implementation(REMAKE, problem, config, function)


def _default(problem: Problem, target: Target) -> Config:
    width = _tile_widths(problem["columns"])[0]
    return Config(
        schedule="block", tile_m=max(1, 1024 // width), tile_n=width, occupancy=8,
        num_worker_warps=0, tma=False, latency=0,
    )  # fmt: skip


def _generic(problem: Problem) -> Config:
    width = min(256, power_of_two(problem["columns"]))
    return Config(
        schedule="persistent", tile_m=max(1, 256 // width), tile_n=width, occupancy=1, num_worker_warps=0, tma=False,
        latency=0,
    )  # fmt: skip


def _random(names: tuple[str, ...], problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    shape, dtype = (problem["rows"], problem["columns"]), getattr(torch, problem["dtype"])
    return {name: torch.randn(shape, generator=generator, device=device).to(dtype) for name in names}


def reference_forward(gate: Any, up: Any) -> dict[str, Any]:
    """The formula in float64."""
    wide = gate.double()
    return {"y": wide * wide.sigmoid() * up.double()}


def reference_backward(dy: Any, gate: Any, up: Any) -> dict[str, Any]:
    """The gradients of :func:`reference_forward` in float64."""
    d, g, u = dy.double(), gate.double(), up.double()
    s = g.sigmoid()
    return {"dgate": d * u * s * (1 + g * (1 - s)), "dup": d * g * s}


def reference_remake(dy: Any, gate: Any, up: Any) -> dict[str, Any]:
    """The gradients and y itself in float64."""
    return {**reference_backward(dy, gate, up), **reference_forward(gate, up)}


def _matrix_bytes(problem: Problem) -> int:
    return int(problem["rows"] * problem["columns"] * ITEM_BYTES[problem["dtype"]])


FORWARD = KernelSpec(
    name="swiglu_forward",
    summary="y = silu(gate) * up",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_axes, (_sized(8192), TMA_NEEDS_HOPPER)),
    ops=("swiglu",),
    implement=_implement_forward,
    default=_default,
    generic=_generic,
    inputs=lambda problem, generator, device: _random(("gate", "up"), problem, generator, device),
    outputs=outputs_of(_FORWARD_ARRAYS),
    reference=reference_forward,
    bytes_moved=lambda problem: 3 * _matrix_bytes(problem),
    flops=lambda problem: 5 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    arrays=_FORWARD_ARRAYS,
)

BACKWARD = KernelSpec(
    name="swiglu_backward",
    summary="gradients of swiglu with respect to gate and up",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_axes, (_sized(4096), TMA_NEEDS_HOPPER)),
    ops=("swiglu",),
    implement=_implement_backward,
    default=_default,
    generic=_generic,
    inputs=lambda problem, generator, device: _random(("dy", "gate", "up"), problem, generator, device),
    outputs=outputs_of(_BACKWARD_ARRAYS),
    reference=reference_backward,
    bytes_moved=lambda problem: 5 * _matrix_bytes(problem),
    flops=lambda problem: 12 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    arrays=_BACKWARD_ARRAYS,
)

REMAKE = KernelSpec(
    name="swiglu_backward_remake",
    summary="gradients of swiglu, and its result once more",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_axes, (_sized(4096), TMA_NEEDS_HOPPER)),
    ops=("swiglu",),
    implement=_implement_remake,
    default=_default,
    generic=_generic,
    inputs=lambda problem, generator, device: _random(("dy", "gate", "up"), problem, generator, device),
    outputs=outputs_of(_REMAKE_ARRAYS),
    reference=reference_remake,
    bytes_moved=lambda problem: 6 * _matrix_bytes(problem),
    flops=lambda problem: 14 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    arrays=_REMAKE_ARRAYS,
)

SPECS = (FORWARD, BACKWARD, REMAKE)
