"""Kernels that turn the heads of q and k by their tokens' angles, alone or beside a norm of each head.

Such a kernel is three functions, and :func:`each_step` around them: a block takes some tokens of one batch entry, loads
their angles once, and goes through the heads of q, then of k.

- ``read(x, place, shape, form)`` gives a step of heads, as it is stored, of one array.
- ``angles(turns, at, t, tile_t, form)`` gives the tokens' angles, which ``turn`` takes.
- ``turn(y, tiles, weights, angles, sums, place, shape, form)`` stores a step's results in ``y``, and returns the sums
  with its share added to them; ``tiles`` are those of all arrays that are read.

``place`` is the tile index of a step in all axes but the last, ``shape`` its size there, ``form`` a tuple that is the
kernel's own; that of one that takes heads in halves begins with their ``cut``: (half, width, whole, bounded, tma,
latency). The arrays have tokens before heads, as the projections leave them, or heads before tokens. The angles of a
single batch entry are shared by all. The rest is :func:`spec`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import cute_heads
from tilekern.kernels.families.arrays import Arrays, bytes_of, drawn, followed_by_sum, tensors
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.kernels.tiles import grid_of, hints, load, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    CuteKernel,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
    module_of,
    name_of,
    outputs_of,
    parameters_of,
)
from tilekern.spec.targets import Target


def each_step(read, angles, turn, q, k, turns, sums, sizes, form):
    """Turn all heads by blocks that take steps of tokens; unrolled, every load is issued before its first use.

    ``q`` and ``k`` are each (arrays that are read, array that is written, weights); ``sums`` are those of q and of k.
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
    """The place and the shape of a step of tokens and heads, in all axes but the last."""
    # Returned in one place: of a return inside an `if` the front end makes a loop.
    return ((b, h, t), (1, tile_h, tile_t)) if ct.static_eval(heads_first) else ((b, t, h), (1, tile_t, tile_h))


def _read_all(read, arrays, b, t, h, tile_t, tile_h, heads_first, form):
    place, shape = _step(b, t, h, tile_t, tile_h, heads_first)
    tiles = ()
    for n in ct.static_iter(range(len(arrays))):
        tiles = tiles + (read(arrays[n], place, shape, form),)
    return tiles


def halves(array, axis, half, whole):
    """Views of the two halves of a head and the tile index of each along the last axis.

    Where the half is a power of two both are tiles of the array itself, which TMA can load; else they are slices.
    """
    if ct.static_eval(whole):
        return array, array, 0, 1
    return array.slice(axis, 0, half), array.slice(axis, half, 2 * half), 0, 0


def read_halves(x, place, shape, form):
    """Both halves of a step of heads, in the array's dtype."""
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
    """The tokens' cosines or sines in float32, shaped to broadcast over heads behind them."""
    half, width, whole, bounded, _, _ = form[0]
    first = array if ct.static_eval(whole) else array.slice(2, 0, half)
    tile = load(first, (at, t, 0), (1, tile_t, width), bounded, 0, False).astype(ct.float32)
    return ct.reshape(tile, (1, tile_t, 1, width))


def is_second():
    """Which of a pair is its second number."""
    return ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 1, 1, 2)) == 1


def parts_of_pairs(pairs):
    """The first and the second numbers of pairs, with a last axis of 1.

    They are sums of which one term is 0: a thread that has loaded 16 bytes has whole pairs. Tiles that are extracted
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
    """The arrays of a kernel that reads q and k of one dtype and writes them in another; ``rest`` stands between."""
    (of_q, of_k), (q, k, q_out, k_out) = shapes, names
    given = (Array(q, read, of_q), Array(k, read, of_k), *rest)
    return (*given, Array(q_out, written, of_q, "output"), Array(k_out, written, of_k, "output"))


def angles_of(*shape: str) -> Arrays:
    """The arrays of cosines and sines."""
    return Array("cos", "angle_dtype", shape), Array("sin", "angle_dtype", shape)


def dimensions_of(arrays: Arrays, sizes: tuple[str, ...], flags: tuple[str, ...]) -> tuple[Dimension, ...]:
    """Tokens, heads and their size, further sizes, flags, and the dtypes, the weights' where there are weights."""
    exact = ("heads", "kv_heads", "head_dim", *sizes)
    weighted = any(array.dtype == "weight_dtype" for array in tensors(arrays))
    dtypes = ("dtype", *(("weight_dtype",) if weighted else ()), "angle_dtype")
    return (
        Dimension("tokens", "bucketed"),
        Dimension("batch", "bucketed"),
        *(Dimension(name, "exact") for name in exact),
        *(Dimension(name, "flag") for name in flags),
        *(Dimension(name, "dtype") for name in dtypes),
    )


def step_elements(problem: Problem, config: Config) -> int:
    """Elements of each half that a block holds in one tile of q."""
    return int(config["tile_t"] * config["tile_h"] * power_of_two(problem["head_dim"] // 2))


def _tile_of_kv_heads(problem: Problem, config: Config) -> int:
    """Heads of k in one tile."""
    return int(min(config["tile_h"], power_of_two(problem["kv_heads"])))


def _held_elements(problem: Problem, config: Config) -> int:
    """Elements of both halves of q and k that a block holds at once."""
    tile_h, tile_hk = config["tile_h"], _tile_of_kv_heads(problem, config)
    heads = cdiv(problem["heads"], tile_h) * tile_h + cdiv(problem["kv_heads"], tile_hk) * tile_hk
    return int(2 * heads * config["tile_t"] * power_of_two(problem["head_dim"] // 2))


# Steps of heads that are written out, and the bytes of them that the blocks on an SM, four or more, hold at once: a
# third of its registers. The compiler takes 1 s for a loop; 73 and 155 heads of 92, written out, took it 29 s, and so
# do fewer that spill.
_MOST_STEPS, _MOST_BYTES = 8, 80 << 10


def _is_unrolled(problem: Problem, config: Config, item_bytes: int) -> bool:
    """Whether all steps of heads are written out, so that each load is issued before its first use; else they loop.

    ``item_bytes`` are those that a block reads for each element of q and k.
    """
    steps = cdiv(problem["heads"], config["tile_h"]) + cdiv(problem["kv_heads"], _tile_of_kv_heads(problem, config))
    held = _held_elements(problem, config) * item_bytes * max(4, config["occupancy"])
    return bool(steps <= _MOST_STEPS and held <= _MOST_BYTES)


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
    """Tiles of some of the heads of one token, or of all heads of one to four tokens; ``more`` are further axes."""
    return Space(lambda problem: _axes(problem, schedules, occupancies, more), (_SIZED, *constraints))


def _axes(
    problem: Problem, schedules: tuple[str, ...], occupancies: tuple[int, ...], more: Mapping[str, list[Value]]
) -> dict[str, list[Value]]:  # fmt: skip
    most = power_of_two(problem["heads"])
    return {
        "schedule": list(schedules),
        "tile_t": [1, 2, 4],
        "tile_h": sorted({min(most, n) for n in (2, 4, 8, 16, 32, 64)}),
        "occupancy": list(occupancies),
        "num_worker_warps": [0, 8],
        **more,
    }


def default_of(problem: Problem, schedule: str, elements: int, occupancy: int, **more: Value) -> Config:
    """A config whose tiles have as many heads, then tokens, as hold ``elements`` elements of each half."""
    width, most = power_of_two(problem["head_dim"] // 2), power_of_two(problem["heads"])
    tile_h = max(1, min(most, elements // width))
    tile_t = max(1, min(4, elements // (width * tile_h))) if tile_h == most else 1
    tiles = {"schedule": schedule, "tile_t": tile_t, "tile_h": tile_h}
    return Config({**tiles, "occupancy": occupancy, "num_worker_warps": 0, **more})


def generic(problem: Problem) -> Config:
    """One token and few heads a tile."""
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 256 // width))
    return Config(schedule="persistent", tile_t=1, tile_h=tile_h, occupancy=1, num_worker_warps=0, tma=False)


def cut_in_halves(problem: Problem) -> dict[str, int | bool]:
    """The constants of a kernel that takes both halves of each head as tiles."""
    half = problem["head_dim"] // 2
    width = power_of_two(half)
    return {"half": half, "width": width, "whole": width == half, "bounded": width != half}


def _implement(
    function: Any, arrays: Arrays, dimensions: tuple[Dimension, ...], constants: tuple[str, ...],
    cut: Callable[[Problem], dict[str, int | bool]], unrolls_lone: bool, dependent: bool, problem: Problem,
    config: Config,
) -> Implementation | CuteKernel:  # fmt: skip
    parameters = parameters_of(arrays, dimensions, problem)
    if is_cute(config):
        return cute_heads.implement(function, parameters, dependent, problem, config)
    tile_t, tile_hk, cuts = config["tile_t"], _tile_of_kv_heads(problem, config), cut(problem)
    tails = problem["heads"] % config["tile_h"] or problem["kv_heads"] % tile_hk
    read = [array.dtype_in(problem) for array in tensors(arrays, "input") if "heads" in array.shape]
    unrolled = _is_unrolled(problem, config, sum(ITEM_BYTES[dtype] for dtype in read))
    values = {
        **problem,
        **config,
        **cuts,
        "tile_hk": tile_hk,
        "unrolled": unrolled and (unrolls_lone or config["occupancy"] > 1),
        "bounded": bool(tile_t > 1 or tails or cuts["bounded"]),
    }
    return Implementation(
        function=function,
        parameters=parameters,
        constants=tuple((name, values[name]) for name in constants),
        grid=lambda sizes, sm_count: grid_of(sizes["batch"] * cdiv(sizes["tokens"], tile_t), config, sm_count),
        hints=hints(config),
        dependent=dependent,
    )


def _angles_of_a_token(problem: Problem) -> int:
    """Its cosines that are read: one for each pair that turns, or for each number where the halves have their own."""
    return int(problem["head_dim"] if problem.get("full") else problem.get("pairs", problem["head_dim"] // 2))


def drawn_angles(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """The cosines and sines of angles of any size, [batch, tokens, angles of a token]."""
    import torch

    shape = (problem["batch"], problem["tokens"], _angles_of_a_token(problem))
    angles = torch.rand(shape, generator=generator, device=device) * 6.0
    dtype = getattr(torch, problem["angle_dtype"])
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def drawn_angles_twice(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """As :func:`drawn_angles`, each stored twice, as Hugging Face does."""
    import torch

    return {name: torch.cat((x, x), -1) for name, x in drawn_angles(problem, generator, device).items()}


_IN_MEMORY: dict[tuple[str, ...], tuple[str, ...]] = dict(zip(HEADS_FIRST, TOKENS_FIRST, strict=True))


def _drawn_heads(arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """All inputs but the angles; heads as projections leave them in memory, where tokens come before them."""
    given = [array for array in tensors(arrays, "input") if array.dtype != "angle_dtype"]
    stored = [dataclasses.replace(array, shape=_IN_MEMORY.get(array.shape, array.shape)) for array in given]
    scalars = [scalar for scalar in arrays if isinstance(scalar, ScalarParameter)]
    values = drawn((*stored, *scalars), problem, generator, device)
    seen = {array.name: values[array.name].transpose(1, 2) for array in given if array.shape in _IN_MEMORY}
    return values | seen


def rotated(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    """Heads [batch, tokens, heads, head_dim] turned by angles [batch, tokens, pairs]; numbers behind the pairs stay."""
    import torch

    size, c, s = 2 * cos.shape[-1], cos.unsqueeze(2), sin.unsqueeze(2)
    part, rest = x[..., :size], x[..., size:]
    one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    both = one * c - other * s, other * c + one * s
    return torch.cat((torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest), -1)


def _heads(arrays: Arrays, *roles: str) -> list[Array]:
    """The arrays of q and k and their gradients."""
    return [array for array in tensors(arrays, *roles) if array.shape in (*TOKENS_FIRST, *HEADS_FIRST)]


def _elements(problem: Problem) -> int:
    """Elements of q and k together."""
    heads = problem["heads"] + problem["kv_heads"]
    return int(problem["batch"] * problem["tokens"] * heads * problem["head_dim"])


def _bytes(arrays: Arrays, problem: Problem) -> int:
    """Heads and weights once, with the weights' gradients where there are any; the angles of one batch entry."""
    angles = 2 * problem["tokens"] * _angles_of_a_token(problem) * ITEM_BYTES[problem["angle_dtype"]]
    weights = bytes_of((array for array in tensors(arrays) if array.dtype == "weight_dtype"), problem)
    return bytes_of(_heads(arrays), problem) + angles + weights * (2 if tensors(arrays, "scratch") else 1)


def spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], *,
    constants: tuple[str, ...], space: Space, default: Callable[[Problem, Target], Config], flops: int,
    generic: Callable[[Problem], Config] = generic,
    cut: Callable[[Problem], dict[str, int | bool]] = cut_in_halves,
    angles: Callable[[Problem, Any, str], dict[str, Any]] = drawn_angles,
    sizes: tuple[str, ...] = (), flags: tuple[str, ...] = (), inverse: Arrays = (), unrolls_lone: bool = False,
    dependent: bool = False, results: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    cute: bool = False,
) -> KernelSpec:  # fmt: skip
    """The spec of a kernel that turns heads, which has the kernel's name.

    Args:
        function: the kernel, which calls :func:`each_step`; its parameters are the arrays and scalars, then the
            constants.
        arrays: in the order of the kernel; in front and at the back heads as :func:`arrays_of` gives them; scalars with
            their samples, where ``angles`` does not draw them. The first output's dtype sets the tolerance.
        constants: their names in the order of the kernel: of the problem, of the config, of ``cut``, ``tile_hk`` for
            the heads of k in a tile, ``unrolled`` and ``bounded``.
        cut: the constants that say how heads are cut into tiles, and whether these make a tile ``bounded``.
        flops: floating-point operations for each element of q and k.
        angles: draws the angles, and other inputs that are not in ``arrays``.
        sizes: names of exact dimensions beyond those of heads.
        flags: names of dimensions that are True or False.
        inverse: the arrays of problems that turn back, where their dtypes are others.
        unrolls_lone: whether steps are written out where one block is on an SM, too. As the generic config has it,
            its loads of single elements are long code.
        cute: whether CuTe DSL compiles the kernel too, as it can where its steps are those of
            :func:`tilekern.kernels.families.normed_rotations.each_step_with_sums`.
    """
    dimensions = dimensions_of(arrays, sizes, flags)
    scratch = tensors(arrays, "scratch")
    return KernelSpec(
        name=name_of(function),
        summary=summary,
        module=module_of(function),
        dimensions=dimensions,
        space=dataclasses.replace(space, beside=(cute_heads.SPACE,)) if cute else space,
        implement=lambda problem, config: _implement(
            function, _of(problem, arrays, inverse), dimensions, constants, cut, unrolls_lone, dependent, problem,
            config,
        ),
        default=default,
        generic=generic,
        inputs=lambda problem, generator, device: {
            **angles(problem, generator, device),
            **_drawn_heads(_of(problem, arrays, inverse), problem, generator, device),
        },
        outputs=lambda problem, blocks: outputs_of(_of(problem, arrays, inverse))(problem, blocks),
        reference=reference,
        results=results,
        bytes_moved=lambda problem: _bytes(_of(problem, arrays, inverse), problem),
        flops=lambda problem: flops * _elements(problem),
        result_dtype=lambda problem: _heads(_of(problem, arrays, inverse), "output")[0].dtype_in(problem),
        follower=followed_by_sum(scratch[0], "weight_dtype") if scratch else None,
        arrays=arrays,
    )  # fmt: skip


def _of(problem: Problem, arrays: Arrays, inverse: Arrays) -> Arrays:
    """The arrays of a problem's direction."""
    return inverse if inverse and problem["inverse"] else arrays
