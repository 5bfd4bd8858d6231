"""Loads of Hopper's tensor memory accelerator, by descriptors that a kernel writes itself.

cuTile's launcher passes no descriptors. A block writes its own in global memory, 128 bytes at a multiple of 128, where
it stores a part of its result once all has been loaded.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

# Codes of a descriptor's fields.
_FLOAT16, _BFLOAT16, _SWIZZLE_128 = 6, 10, 3


@cute.jit
def describe(place, target, lane, start, axes, numeric: cutlass.Constexpr):
    """Write a descriptor of an array of half numbers; the lanes of a warp call it together.

    Args:
        place: 128 bytes of shared memory at a multiple of 128, in which the descriptor is drafted.
        target: address of the descriptor in global memory. This warp may use it, and others after :func:`see`.
        lane: number of the thread in the warp.
        start: address of the array.
        axes: for each axis, from the columns on: its size, how many of it a box has, and the bytes from one to the
            next, None for columns. A box has zeros past the size.
        numeric: dtype of the array.
    """
    cute.make_tensor(cute.recast_ptr(place, dtype=Int32) + lane, cute.make_layout(1))[0] = Int32(0)
    cute.arch.sync_warp()
    if lane == 0:
        fill(place.toint(), start, axes, numeric)
    cute.arch.sync_warp()
    publish(target, place.toint())


def fill(place: Any, start: Any, axes: Any, numeric: Any) -> None:
    """Write the fields of a descriptor in shared memory. Pieces of 16 bytes are swizzled in rows of 128."""
    replace(place, "global_address", start, wide=True)
    replace(place, "rank", len(axes) - 1)
    for axis, (size, count, _) in enumerate(axes):
        replace(place, "global_dim", Int32(size), axis)
        replace(place, "box_dim", Int32(count), axis)
        replace(place, "element_stride", Int32(1), axis)
    for axis, (_, _, step) in enumerate(axes[1:]):
        replace(place, "global_stride", step, axis, wide=True)
    replace(place, "elemtype", _BFLOAT16 if numeric is cutlass.BFloat16 else _FLOAT16)
    replace(place, "interleave_layout", 0)
    replace(place, "swizzle_mode", _SWIZZLE_128)
    replace(place, "fill_mode", 0)


@dsl_user_op
def replace(
    place: Any, field: str, value: Any, axis: int | None = None, *, wide: bool = False, loc: Any = None, ip: Any = None
) -> None:
    """Write a field of a descriptor in shared memory; codes are Python's numbers."""
    name = f"tensormap.replace.tile.{field}.shared::cta.b1024.b{64 if wide else 32} [$0]"
    name += "" if axis is None else f", {axis}"
    operands, values = "r", [Int32(place).ir_value(loc=loc, ip=ip)]
    if isinstance(value, int):
        name += f", {value}"
    else:
        name, operands = name + ", $1", "r,l" if wide else "r,r"
        values.append((Int64 if wide else Int32)(value).ir_value(loc=loc, ip=ip))
    llvm.inline_asm(None, values, f"{name};", operands, has_side_effects=True, is_align_stack=False)


@dsl_user_op
def publish(target: Any, source: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Copy a warp's descriptor from shared to global memory, and show it to the tensor memory accelerator."""
    values = [Int64(target).ir_value(loc=loc, ip=ip), Int32(source).ir_value(loc=loc, ip=ip)]
    llvm.inline_asm(
        None, values,
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [$0], [$1], 128;\n"
        "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "l,r", has_side_effects=True, is_align_stack=False,
    )  # fmt: skip


@dsl_user_op
def see(descriptor: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Let a warp use a descriptor that another one has published before a barrier of both."""
    llvm.inline_asm(
        None, [Int64(descriptor).ir_value(loc=loc, ip=ip)], "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
        "l", has_side_effects=True, is_align_stack=False,
    )  # fmt: skip


@dsl_user_op
def load_box(
    target: Any, descriptor: Any, place: tuple[Any, ...], barrier: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Start to load a box into shared memory, from a place on each axis, and have its bytes counted by a barrier."""
    values = [Int32(target).ir_value(loc=loc, ip=ip), Int64(descriptor).ir_value(loc=loc, ip=ip)]
    values += [Int32(x).ir_value(loc=loc, ip=ip) for x in (*place, barrier)]
    axes = ", ".join(f"${2 + n}" for n in range(len(place)))
    llvm.inline_asm(
        None, values,
        f"cp.async.bulk.tensor.{len(place)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{axes}}}], [${2 + len(place)}];", f"r,l{',r' * (1 + len(place))}", has_side_effects=True,
        is_align_stack=False,
    )  # fmt: skip
