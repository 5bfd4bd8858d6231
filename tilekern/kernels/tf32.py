"""Products of float32 arrays by TF32: the operands are rounded for the matrix units, and all sums are in float32.

TF32 has the range of float32 and 10 bits of mantissa. A product of two such numbers is exact in float32, so each term
of a sum is off by up to 2^-10 of itself if operands are rounded to nearest. Without the rounding, products of float32
run on a GPU's scalar units, at a tenth of the speed or less.

The kernels are those of ``matmul``, ``skinny_linear``, ``skinny_linear_int8`` and ``grouped_linear``, under names of
their own: whoever asks those for float32 gets no TF32. A kernel here is a copy, in which the function that multiplies
is one of this module. The compiler leaves the rounding of tiles that TMA loads to the load, so that operands do not
pass through registers (sm_90 and sm_100).

A tile of ``tile_k`` numbers has the bytes of one with twice as many of a half type, and its sums are the same. So the
search space, the default and the generic config are those of a half type with half of ``tile_k``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import cuda.tile as ct

from tilekern.compile.rebinding import Rebinder
from tilekern.kernels.grouped import product as grouped
from tilekern.kernels.grouped.tiles import gathered, group_at, rows_of, sources, weight_tile
from tilekern.kernels.matmul import product as matmul
from tilekern.kernels.skinny import int8, linear
from tilekern.kernels.skinny import tiles as skinny
from tilekern.kernels.tiles import load
from tilekern.spec import Config, Constraint, DeviceKernel, KernelSpec, Problem, Space, Value, python_of
from tilekern.spec.targets import Target


def _operand(array, outer, step, tile_outer, tile_k, depth_first, latency):
    """Load a tile [tile_outer, tile_k] of an operand of ``matmul``, rounded."""
    if ct.static_eval(depth_first):
        return load(array, (step, outer), (tile_k, tile_outer), True, latency, True).astype(ct.tfloat32).transpose()
    return load(array, (outer, step), (tile_outer, tile_k), True, latency, True).astype(ct.tfloat32)


def _sums(x, weight, up, i, j, first, last, gated, tile_m, tile_n, tile_k, latency):
    """Return the sums of steps ``first`` to ``last`` of x @ weight^T and x @ up^T, [tile_n, tile_m] each."""
    total, factor = ct.zeros((tile_n, tile_m), ct.float32), ct.zeros((tile_n, tile_m), ct.float32)
    for step in range(first, last):
        tokens = load(x, (i, step), (tile_m, tile_k), True, latency, True).astype(ct.tfloat32).transpose()
        tile = load(weight, (j, step), (tile_n, tile_k), True, latency, True)
        total = ct.mma(tile.astype(ct.tfloat32), tokens, total)
        if ct.static_eval(gated):
            tile = load(up, (j, step), (tile_n, tile_k), True, latency, True)
            factor = ct.mma(tile.astype(ct.tfloat32), tokens, factor)
    return total, factor


def _int8_sums(x, weight, up, i, j, gated, tile_m, tile_n, tile_k, latency, by_float32):
    """Return the sums of int8 weights, which TF32 holds exactly; both ways of widening them are the same code."""
    return _sums(x, weight, up, i, j, 0, ct.cdiv(x.shape[1], tile_k), gated, tile_m, tile_n, tile_k, latency)


def _grouped_tile(
    x, weight, offsets, order, slots, bias, y, item, experts, groups, turns, tile_m, tile_n, tile_k, group_m, latency,
    inner_first,
):  # fmt: skip
    """Compute tile number ``item`` of all places, without a bias and rows of no expert."""
    place, j = matmul.place_and_column(item, y.shape[0] // tile_m + groups, ct.cdiv(y.shape[1], tile_n), group_m)
    expert = group_at(offsets, place, tile_m, groups, turns)
    begin, end = rows_of(offsets, expert, experts, y.shape[0])
    i = place - (begin // tile_m + expert)
    first = begin + i * tile_m
    if first < end:
        if ct.static_eval(order is not None):
            tokens = sources(order, first, slots, tile_m)
        else:
            view = x.tiled_view((tile_m, tile_k), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1, tile_k))
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for step in range(ct.cdiv(x.shape[1], tile_k)):
            if ct.static_eval(order is not None):
                left = gathered(x, tokens, step, tile_k, latency)
            else:
                left = view.load((first, step), latency=ct.static_eval(latency if latency > 0 else None))
            right = weight_tile(weight, expert, j, step, tile_n, tile_k, inner_first, latency)
            total = ct.mma(left.astype(ct.tfloat32), right.astype(ct.tfloat32).transpose(), total)
        ct.store(y.slice(0, begin, end), (i, j), total)


_COPIES = Rebinder(
    ct,
    {
        matmul._operand: _operand,
        skinny.sums: _sums,
        int8._sums: _int8_sums,
        grouped._tile: _grouped_tile,
    },
)


@functools.cache
def _by_tf32(kernel: Any) -> Any:
    """Return the copy of a device function, with a name of its own."""
    original = python_of(kernel)
    copy = _COPIES.function(original)
    copy.__name__, copy.__module__ = f"{original.__name__}_tf32", __name__
    copy.__annotations__ = typing.get_type_hints(original, include_extras=True)
    return ct.kernel(copy)


def _spec(spec: KernelSpec, only: Mapping[str, Value], off: Collection[str] = ()) -> KernelSpec:
    """Return the spec of a kernel's copy, without the dimension ``dtype``.

    Args:
        spec: the kernel's.
        only: axes of a config of which one value is left.
        off: flags that no problem has.
    """
    flags = dict.fromkeys(off, False)

    def whole(problem: Problem) -> Problem:
        return problem.but(**flags, dtype="float32")

    def half(problem: Problem) -> Problem:
        # Of bfloat16 some are left to libraries.
        return problem.but(**flags, dtype="float16")

    def config_of(config: Config) -> Config:
        return config.but(tile_k=config["tile_k"] // 2, **only)

    def axes(problem: Problem) -> Mapping[str, Sequence[Value]]:
        found: dict[str, Any] = dict(spec.space.axes(half(problem)))
        return found | {name: [value] for name, value in only.items()} | {"tile_k": [k // 2 for k in found["tile_k"]]}

    def of_half(constraint: Constraint) -> Constraint:
        def holds(problem: Problem, config: Config, target: Target) -> bool:
            return constraint.holds(half(problem), config.but(tile_k=2 * config["tile_k"]), target)

        return Constraint(constraint.reason, holds)

    def implement(problem: Problem, config: Config) -> DeviceKernel:
        made = spec.device(whole(problem), config)
        return dataclasses.replace(
            made,
            function=_by_tf32(made.function),
            grid=lambda sizes, sm_count: made.grid(whole(sizes), sm_count),
        )

    taken = inspect.signature(spec.reference).parameters
    return dataclasses.replace(
        spec,
        name=f"{spec.name}_tf32",
        summary=f"{spec.summary}, of float32 operands that are rounded to TF32",
        module=__name__,
        dimensions=tuple(d for d in spec.dimensions if d.name not in (*off, "dtype")),
        space=Space(axes, tuple(map(of_half, spec.space.constraints))),
        implement=implement,
        default=lambda problem, target: config_of(spec.default(half(problem), target)),
        generic=lambda problem: config_of(spec.generic(half(problem))),
        inputs=lambda problem, generator, device: spec.inputs(whole(problem), generator, device),
        outputs=lambda problem, blocks: spec.outputs(whole(problem), blocks),
        reference=functools.partial(spec.reference, **{name: False for name in off if name in taken}),
        bytes_moved=lambda problem: spec.bytes_moved(whole(problem)),
        flops=lambda problem: spec.flops(whole(problem)),
        result_dtype=lambda problem: "tfloat32",
        variations={
            name: lambda problem, generator, device, draw=draw: draw(whole(problem), generator, device)
            for name, draw in spec.variations.items()
        },
    )


_TILE: Mapping[str, Value] = {"implementation": "tile"}
SPECS = (
    _spec(matmul.SPEC, _TILE, ("a_transposed", "silu", "accumulated")),
    _spec(linear.SPEC, _TILE, ("accumulated",)),
    _spec(int8.WIDENED, {"widening": "float32"}),
    _spec(grouped.SPEC, _TILE, ("inner_first", "biased", "partial")),
)
