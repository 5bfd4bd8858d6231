"""Kernels that turn the heads of q and k by their tokens' angles, alone or together with a norm of each head.

Such a kernel consists of three functions, called by :func:`each_step`: a block takes some tokens of one batch entry,
loads their angles once, and goes through the heads of q, then of k.

- ``read(x, place, shape, form)`` loads a step of heads of one array, in its stored dtype.
- ``angles(turns, at, t, tile_t, form)`` returns the tokens' angles for ``turn``.
- ``turn(y, tiles, weights, angles, sums, place, shape, form)`` stores a step's results in ``y``, and returns the sums
  with the step's share added; ``tiles`` are those of all arrays that are read.

``place`` is the tile index of a step in all axes except the last, ``shape`` its size there, ``form`` a tuple defined by
the kernel; if heads are read in halves, it begins with their ``cut``: (half, width, whole, bounded, tma, latency). The
arrays have tokens before heads, like the projections' outputs, or heads before tokens. All batch entries share the
angles of a single one. :func:`spec` makes the spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import cute_heads, tables
from tilekern.kernels.families.arrays import Arrays, bytes_of, drawn, followed_by_sum, tensors
from tilekern.kernels.families.overlap import is_few
from tilekern.kernels.tiles import grid_of, load, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    CuteKernel,
    Dimension,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
    name_of,
)


def each_step(read, angles, turn, q, k, turns, sums, sizes, form):
    """Turn all heads by blocks that take steps of tokens; unrolled, every load is issued before its first use.

    ``q`` and ``k`` are each (arrays that are read, array that is written, weights); ``sums`` are the sums of q and of
    k.
    """
    heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, heads_first = sizes
    q_sums, k_sums = sums
    tokens, turned = (2, 1) if ct.static_eval(heads_first) else (1, 2)
    across = ct.cdiv(q[0][0].shape[tokens], tile_t)
    for item in range(ct.bid(0), q[0][0].shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, turns[0].shape[turns[0].ndim - 3] - 1)
        q_steps, k_steps = (), ()
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_steps = q_steps + (_read_all(read, q[0], b, t, h, tile_t, tile_h, heads_first, form),)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_steps = k_steps + (_read_all(read, k[0], b, t, h, tile_t, tile_hk, heads_first, form),)
        by = angles(turns, at, t, tile_t, form)
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                place, shape = _step(b, t, h, tile_t, tile_h, heads_first)
                q_sums = turn(q[1], q_steps[h], q[2], by, q_sums, place, shape, form)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                place, shape = _step(b, t, h, tile_t, tile_hk, heads_first)
                k_sums = turn(k[1], k_steps[h], k[2], by, k_sums, place, shape, form)
        else:
            for h in range(ct.cdiv(q[0][0].shape[turned], tile_h)):
                place, shape = _step(b, t, h, tile_t, tile_h, heads_first)
                tiles = _read_all(read, q[0], b, t, h, tile_t, tile_h, heads_first, form)
                q_sums = turn(q[1], tiles, q[2], by, q_sums, place, shape, form)
            for h in range(ct.cdiv(k[0][0].shape[turned], tile_hk)):
                place, shape = _step(b, t, h, tile_t, tile_hk, heads_first)
                tiles = _read_all(read, k[0], b, t, h, tile_t, tile_hk, heads_first, form)
                k_sums = turn(k[1], tiles, k[2], by, k_sums, place, shape, form)
    return q_sums, k_sums


def _step(b, t, h, tile_t, tile_h, heads_first):
    """Return the place and the shape of a step of tokens and heads, in all axes except the last."""
    # One return: the front end turns a return inside an `if` into a loop.
    return ((b, h, t), (1, tile_h, tile_t)) if ct.static_eval(heads_first) else ((b, t, h), (1, tile_t, tile_h))


def _read_all(read, arrays, b, t, h, tile_t, tile_h, heads_first, form):
    place, shape = _step(b, t, h, tile_t, tile_h, heads_first)
    tiles = ()
    for n in ct.static_iter(range(len(arrays))):
        tiles = tiles + (read(arrays[n], place, shape, form),)
    return tiles


def halves(array, axis, half, whole):
    """Return views of the two halves of a head, and the tile index of each along the last axis.

    If the half is a power of two, both are tiles of the array itself, which TMA can load; else they are slices.
    """
    if ct.static_eval(whole):
        return array, array, 0, 1
    return array.slice(axis, 0, half), array.slice(axis, half, 2 * half), 0, 0


def read_halves(x, place, shape, form):
    """Load both halves of a step of heads, in the array's dtype."""
    half, width, whole, bounded, tma, latency = form[0]
    xa, xb, ia, ib = halves(x, 3, half, whole)
    one = load(xa, place + (ia,), shape + (width,), bounded, latency, tma)
    return one, load(xb, place + (ib,), shape + (width,), bounded, latency, tma)


def write_halves(y, one, other, place, form, tma=False):
    """Store both halves of a step of heads."""
    half, _, whole, bounded, _, _ = form[0]
    ya, yb, ia, ib = halves(y, 3, half, whole)
    ct.store(ya, place + (ia,), one.astype(y.dtype), check_bounds=bounded, allow_tma=tma)
    ct.store(yb, place + (ib,), other.astype(y.dtype), check_bounds=bounded, allow_tma=tma)


def read_angles(array, at, t, tile_t, form):
    """Load the tokens' cosines or sines in float32, shaped to broadcast over heads behind them."""
    half, width, whole, bounded, _, _ = form[0]
    first = array if ct.static_eval(whole) else array.slice(2, 0, half)
    tile = load(first, (at, t, 0), (1, tile_t, width), bounded, 0, False).astype(ct.float32)
    return ct.reshape(tile, (1, tile_t, 1, width))


def is_second():
    """Return which number of a pair is its second."""
    return ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 1, 1, 2)) == 1


def parts_of_pairs(pairs):
    """Return the first and the second numbers of pairs, with a last axis of 1.

    Each is a sum with one term that is 0: a thread that has loaded 16 bytes has whole pairs. Tiles that are extracted
    and concatenated would go through shared memory.
    """
    one = ct.sum(ct.where(is_second(), 0.0, pairs), axis=4, keepdims=True)
    return one, ct.sum(ct.where(is_second(), pairs, 0.0), axis=4, keepdims=True)


TOKENS_FIRST = (("batch", "tokens", "heads", "head_dim"), ("batch", "tokens", "kv_heads", "head_dim"))
HEADS_FIRST = (("batch", "heads", "tokens", "head_dim"), ("batch", "kv_heads", "tokens", "head_dim"))
GRADIENTS = ("dq_out", "dk_out", "dq", "dk")


def arrays_of(
    shapes: tuple[tuple[str, ...], ...], rest: Arrays, read: str, written: str,
    names: tuple[str, str, str, str] = ("q", "k", "q_out", "k_out"),
) -> Arrays:  # fmt: skip
    """Return the arrays of a kernel that reads q and k in one dtype and writes them in another; ``rest`` is between."""
    (of_q, of_k), (q, k, q_out, k_out) = shapes, names
    given = (Array(q, read, of_q), Array(k, read, of_k), *rest)
    return (*given, Array(q_out, written, of_q, "output"), Array(k_out, written, of_k, "output"))


def angles_of(*shape: str) -> Arrays:
    """Return the arrays of cosines and sines."""
    return Array("cos", "angle_dtype", shape), Array("sin", "angle_dtype", shape)


def step_elements(problem: Problem, config: Config) -> int:
    """Return the elements of each half that a block holds in one tile of q."""
    return int(config["tile_t"] * config["tile_h"] * power_of_two(problem["head_dim"] // 2))


# Steps of heads that are written out, and the bytes of them that the blocks on an SM, four or more, hold at once: a
# third of its registers. The compiler takes 1 s for a loop; 73 and 155 heads of 92, written out, took it 29 s, as
# do fewer that spill.
_MOST_STEPS, _MOST_BYTES = 8, 80 << 10


def _steps(problem: Problem, config: Config, item_bytes: int) -> dict[str, int | bool]:
    """Return the heads of k in a tile, whether tiles reach beyond the edges, and whether all steps are written out.

    If they are, each load is issued before its first use; else steps loop.

    Args:
        item_bytes: bytes that a block reads for each element of q and k.
    """
    tile_t, tile_h = config["tile_t"], config["tile_h"]
    tile_hk = min(tile_h, power_of_two(problem["kv_heads"]))
    steps, kv_steps = cdiv(problem["heads"], tile_h), cdiv(problem["kv_heads"], tile_hk)
    held = 2 * (steps * tile_h + kv_steps * tile_hk) * tile_t * power_of_two(problem["head_dim"] // 2)
    few = held * item_bytes * max(4, config["occupancy"]) <= _MOST_BYTES
    tails = problem["heads"] % tile_h or problem["kv_heads"] % tile_hk
    return {
        "tile_hk": int(tile_hk),
        "bounded": bool(tile_t > 1 or tails),
        "unrolled": bool(few and steps + kv_steps <= _MOST_STEPS),
    }


_SIZED = Constraint(
    "a step of fewer than 512 elements of each half starves the memory system, more than 2048 take minutes to compile; "
    "several tokens are for steps whose heads are all in one tile",
    lambda problem, config, target: (
        step_elements(problem, config) <= max(2048, power_of_two(problem["head_dim"] // 2))
        and (config["tile_t"] == 1 or config["tile_h"] == power_of_two(problem["heads"]))
        and (step_elements(problem, config) >= 512 or config["tile_t"] == 4)
    ),
)


def space_of(
    schedules: tuple[str, ...] = ("block", "persistent"), occupancies: tuple[int, ...] = (2, 4, 8),
    constraints: tuple[Constraint, ...] = (), **more: list[Value],
) -> Space:  # fmt: skip
    """Return the space of tiles of some heads of a token, or all heads of one to four; ``more`` are further axes."""

    def axes(problem: Problem) -> dict[str, list[Value]]:
        most = power_of_two(problem["heads"])
        return {
            "schedule": list(schedules),
            "tile_t": [1, 2, 4],
            "tile_h": sorted({min(most, n) for n in (2, 4, 8, 16, 32, 64)}),
            "occupancy": list(occupancies),
            "num_worker_warps": [0, 8],
            **more,
        }

    return Space(axes, (_SIZED, *constraints))


def default_of(problem: Problem, schedule: str, elements: int, occupancy: int, **more: Value) -> Config:
    """Return a config whose tiles have as many heads, then tokens, as hold ``elements`` elements of each half."""
    width, most = power_of_two(problem["head_dim"] // 2), power_of_two(problem["heads"])
    tile_h = max(1, min(most, elements // width))
    tile_t = max(1, min(4, elements // (width * tile_h))) if tile_h == most else 1
    tiles = {"schedule": schedule, "tile_t": tile_t, "tile_h": tile_h}
    return Config({**tiles, "occupancy": occupancy, "num_worker_warps": 0, **more})


def generic(problem: Problem) -> Config:
    """Return a config of one token and few heads a tile."""
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 256 // width))
    return Config(schedule="persistent", tile_t=1, tile_h=tile_h, occupancy=1, num_worker_warps=0, tma=False)


def cut_in_halves(problem: Problem) -> dict[str, int | bool]:
    """Return the constants of a kernel that reads both halves of each head as tiles."""
    half = problem["head_dim"] // 2
    width = power_of_two(half)
    return {"half": half, "width": width, "whole": width == half, "bounded": width != half}


def _angles_of_a_token(problem: Problem) -> int:
    """Return the cosines that are read for a token: one a rotated pair, or one a number if the halves differ."""
    return int(problem["head_dim"] if problem.get("full") else problem.get("pairs", problem["head_dim"] // 2))


def drawn_angles(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw the cosines and sines of angles of any size, [batch, tokens, angles of a token]."""
    import torch

    shape = (problem["batch"], problem["tokens"], _angles_of_a_token(problem))
    angles = torch.rand(shape, generator=generator, device=device) * 6.0
    dtype = getattr(torch, problem["angle_dtype"])
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def drawn_angles_twice(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw angles like :func:`drawn_angles`, each stored twice like Hugging Face's."""
    import torch

    return {name: torch.cat((x, x), -1) for name, x in drawn_angles(problem, generator, device).items()}


_IN_MEMORY: dict[tuple[str, ...], tuple[str, ...]] = dict(zip(HEADS_FIRST, TOKENS_FIRST, strict=True))


def _drawn_heads(arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw all inputs except the angles; in memory heads follow tokens, like the projections' outputs."""
    given = [array for array in tensors(arrays, "input") if array.dtype != "angle_dtype"]
    stored = [dataclasses.replace(array, shape=_IN_MEMORY.get(array.shape, array.shape)) for array in given]
    scalars = [scalar for scalar in arrays if isinstance(scalar, ScalarParameter)]
    values = drawn((*stored, *scalars), problem, generator, device)
    seen = {array.name: values[array.name].transpose(1, 2) for array in given if array.shape in _IN_MEMORY}
    return values | seen


def rotated(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    """Turn heads [batch, tokens, heads, head_dim] by angles [batch, tokens, pairs]; numbers after the pairs stay."""
    import torch

    size, c, s = 2 * cos.shape[-1], cos.unsqueeze(2), sin.unsqueeze(2)
    part, rest = x[..., :size], x[..., size:]
    one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    both = one * c - other * s, other * c + one * s
    return torch.cat((torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest), -1)


def _heads(arrays: Arrays, *roles: str) -> list[Array]:
    """Return the arrays of q and k and their gradients."""
    return [array for array in tensors(arrays, *roles) if array.shape in (*TOKENS_FIRST, *HEADS_FIRST)]


def _bytes(arrays: Arrays, problem: Problem) -> int:
    angles = 2 * problem["tokens"] * _angles_of_a_token(problem) * ITEM_BYTES[problem["angle_dtype"]]
    weights = bytes_of((array for array in tensors(arrays) if array.dtype == "weight_dtype"), problem)
    return bytes_of(_heads(arrays), problem) + angles + weights * (2 if tensors(arrays, "scratch") else 1)


def spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], *, flops: int,
    cut: Callable[[Problem], dict[str, int | bool]] = cut_in_halves,
    angles: Callable[[Problem, Any, str], dict[str, Any]] = drawn_angles,
    sizes: tuple[str, ...] = (), flags: tuple[str, ...] = (), inverse: Arrays = (), unrolls_lone: bool = False,
    cute: bool = False, **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a kernel that turns heads, with the kernel's name.

    Args:
        function: the kernel, which calls :func:`each_step`; its parameters are the arrays and scalars, then constants:
            of the problem, of the config, of ``cut``, ``tile_hk`` for the heads of k in a tile, ``unrolled``,
            ``bounded``, and ``few`` if it calls :func:`~tilekern.kernels.families.overlap.launch_next`.
        arrays: in the order of the kernel; the first and the last ones are the heads of :func:`arrays_of`; scalars with
            their samples, unless ``angles`` draws them. The first output's dtype sets the tolerance.
        flops: floating-point operations for each element of q and k.
        cut: problem -> the constants that cut heads into tiles, and whether these make a tile ``bounded``.
        angles: draws the angles, and other inputs that are not in ``arrays``.
        sizes: names of exact dimensions besides the heads' dimensions.
        flags: names of dimensions that are True or False.
        inverse: the arrays of problems that turn back, if their dtypes differ.
        unrolls_lone: whether steps are written out even if one block is on an SM. The generic config has one block, and
            its loads of single elements are long code.
        cute: whether CuTe DSL compiles the kernel too, as it can if its steps are those of
            :func:`tilekern.kernels.families.normed_rotations.each_step_with_sums`.
        more: further arguments of :func:`tilekern.kernels.families.tables.spec`.
    """
    weighted = any(array.dtype == "weight_dtype" for array in tensors(arrays))
    scratch = tensors(arrays, "scratch")

    def table(problem: Problem) -> Arrays:
        return inverse if inverse and problem["inverse"] else arrays

    def all_flops(problem: Problem) -> int:
        heads = problem["heads"] + problem["kv_heads"]
        return int(flops * problem["batch"] * problem["tokens"] * heads * problem["head_dim"])

    def constants(problem: Problem, config: Config) -> dict[str, Any]:
        read = [x.dtype_in(problem) for x in tensors(table(problem), "input") if "heads" in x.shape]
        cuts, steps = cut(problem), _steps(problem, config, sum(ITEM_BYTES[dtype] for dtype in read))
        unrolled = steps["unrolled"] and (unrolls_lone or config["occupancy"] > 1)
        bounded, few = bool(steps["bounded"] or cuts["bounded"]), is_few(problem["tokens"], problem["batch"])
        return {**cuts, **steps, "unrolled": unrolled, "bounded": bounded, "few": few}

    def by_cute(function: Any, parameters: Any, problem: Problem, config: Config) -> CuteKernel:
        return cute_heads.implement(function, parameters, more.get("dependent", False), problem, config)

    fields: dict[str, Any] = {"generic": generic, "arrays": arrays} | more
    if cute:
        fields["space"] = dataclasses.replace(fields["space"], beside=(cute_heads.SPACE,))
    return tables.spec(
        name_of(function),
        summary,
        (
            *(Dimension(name, "bucketed") for name in ("tokens", "batch")),
            *(Dimension(name, "exact") for name in ("heads", "kv_heads", "head_dim", *sizes)),
            *tables.flags_of(flags),
            *(Dimension(name, "dtype") for name in ("dtype", *["weight_dtype"][:weighted], "angle_dtype")),
        ),
        table,
        reference,
        function=function,
        constants=constants,
        grid=lambda sizes, config, sm_count: grid_of(
            sizes["batch"] * cdiv(sizes["tokens"], config["tile_t"]), config, sm_count
        ),
        given=lambda problem, generator, device: {
            **angles(problem, generator, device),
            **_drawn_heads(table(problem), problem, generator, device),
        },
        cute=by_cute,
        bytes_moved=lambda problem: _bytes(table(problem), problem),
        flops=all_flops,
        result_dtype=lambda problem: _heads(table(problem), "output")[0].dtype_in(problem),
        follower=followed_by_sum(scratch[0], "weight_dtype") if scratch else None,
        **fields,
    )
