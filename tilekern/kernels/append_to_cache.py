"""Write the keys and values of new tokens into a cache, and turn q: norms, rotation and copies in one launch.

q and k are normalised and rotated as by :mod:`tilekern.kernels.qk_norm_rope`, with its arithmetic, so that generation
has the bits of training: ``normed`` turns the norm on, and ``norm_last``, ``interleaved``, the offset of the weights
and the numbers of a head that are not rotated mean the same. Values are copied.

A step is one token and some heads, of q or of k and v together: a few tokens of decoding fill more of a GPU than with
a block for each. The row of a token in the cache is known by the GPU alone, so a captured graph may be replayed after
positions have changed. Tokens whose position is negative or behind the end of the room are not written.

Layout: q and q_out [batch, tokens, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim]; cos and sin
[1 or batch, tokens, pairs]; positions [1 or batch, tokens] int32, each token's place in the cache of its sequence. A
cache is [batch, kv_heads, room, head_dim], or, if ``paged``, [pages, page_size, kv_heads, head_dim] with ``table``
[batch, pages of a sequence] int32, as in :mod:`tilekern.kernels.decode_attention`. All have any strides.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.normed_rotations import EPS
from tilekern.kernels.families.overlap import is_few, launch_next
from tilekern.kernels.families.rotations import TOKENS_FIRST, angles_of, drawn_angles, rotated
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.qk_norm_rope import (
    cut,
    general_angles,
    numbers_of,
    pieces_of,
    read_parts,
    read_weights,
    reference_general,
    turned,
    write_parts,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, ScalarParameter, Space, Value, cdiv
from tilekern.spec.targets import Target


def _normalised(x, weight, offset, form):
    """Return parts of heads divided by their root mean square, times the weights."""
    (pairs, _, _, _, _, _), rest, _, eps, _ = form
    weights, z = read_weights(weight, offset, form), ()
    square = ct.sum(x[0] * x[0] + x[1] * x[1], axis=3, keepdims=True)
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        square = square + ct.sum(x[2 + i] * x[2 + i], axis=3, keepdims=True)
    rstd = ct.rsqrt(square / (2 * pairs + rest) + eps)
    for i in ct.static_iter(range(2 + len(pieces_of(pairs, rest)))):
        z = z + (x[i] * rstd * weights[i],)
    return z


def _made(x, weight, turns, place, shape, offset, normed, form):
    """Load a step of heads; return it in float32, normalised and rotated."""
    numbers = numbers_of(read_parts(x, place, shape, form), shape, form)
    norm_last = ct.static_eval(form[4])
    if ct.static_eval(normed and not norm_last):
        numbers = _normalised(numbers, weight, offset, form)
    numbers = turned(numbers, turns[0], turns[1])
    if ct.static_eval(normed and norm_last):
        numbers = _normalised(numbers, weight, offset, form)
    return numbers


def _write(cache, numbers, place, h, tile_h, paged, form):
    """Store the heads of a token in the row (entry, slot) of a cache."""
    entry, slot = place
    if ct.static_eval(paged):
        write_parts(cache, numbers, (entry, slot, h), (1, 1, tile_h), form)
    elif ct.static_eval(form[2]):
        write_parts(cache, numbers, (entry, h, slot), (1, tile_h, 1), form)
    else:
        shape = ct.static_eval((1, tile_h, 1, form[0][1]))
        one, other = ct.reshape(numbers[0], shape), ct.reshape(numbers[1], shape)
        write_parts(cache, (one, other) + numbers[2:], (entry, h, slot), (1, tile_h, 1), form)


def _place(positions, table, cache, b, t, paged):
    """Return the row (entry, slot) of a token in the cache, and whether it is there."""
    position = ct.load(positions, (ct.minimum(b, positions.shape[0] - 1), t), ())
    inside = ct.maximum(position, 0)
    if ct.static_eval(paged):
        size, most = cache.shape[1], table.shape[1]
        page = ct.load(table, (b, ct.minimum(inside // size, most - 1)), ())
        entry, slot = page, inside % size
        there = (position >= 0) & (position < most * size) & (page >= 0) & (page < cache.shape[0])
    else:
        entry, slot = b, position
        there = (position >= 0) & (position < cache.shape[2])
    return (entry, slot), there


def _step(
    item, q, k, v, q_weight, k_weight, cos, sin, positions, table, offset, q_out, keys, values, sizes, normed, paged,
    form,
):  # fmt: skip
    heads, kv_heads, tile_h, tile_hk = sizes
    steps = ct.static_eval(cdiv(heads, tile_h))
    all_steps = ct.static_eval(steps + cdiv(kv_heads, tile_hk))
    step, token = item % all_steps, item // all_steps
    b, t = token // q.shape[1], token % q.shape[1]
    turns = general_angles((cos, sin), ct.minimum(b, cos.shape[0] - 1), t, 1, form)
    if step < steps:
        place, shape = (b, t, step), (1, 1, tile_h)
        write_parts(q_out, _made(q, q_weight, turns, place, shape, offset, normed, form), place, shape, form)
    else:
        h, shape = step - steps, (1, 1, tile_hk)
        row, there = _place(positions, table, keys, b, t, paged)
        plain = ct.static_eval((form[0], form[1], False, None, False))
        copied = read_parts(v, (b, t, h), shape, plain)
        numbers = _made(k, k_weight, turns, (b, t, h), shape, offset, normed, form)
        if there:
            _write(keys, numbers, row, h, tile_hk, paged, form)
            _write(values, copied, row, h, tile_hk, paged, plain)


@ct.kernel
def append_to_cache(
    q, k, v, q_weight, k_weight, cos, sin, positions, table, eps, offset, q_out, keys, values, heads: ConstInt,
    kv_heads: ConstInt, pairs: ConstInt, rest: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt,
    whole: ConstBool, bounded: ConstBool, persistent: ConstBool, normed: ConstBool, norm_last: ConstBool,
    interleaved: ConstBool, paged: ConstBool, few: ConstBool,
):  # fmt: skip
    """One token and some heads a block, or resident blocks that loop; the layout is that of the module."""
    # Its launch overlaps the end of the kernel that writes v, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    form = ((pairs, width, whole, bounded, False, 0), rest, interleaved, eps, norm_last)
    steps = ct.static_eval(cdiv(heads, tile_h) + cdiv(kv_heads, tile_hk))
    each_step(
        _step, q.shape[0] * q.shape[1] * steps, persistent,
        (q, k, v, q_weight, k_weight, cos, sin, positions, table, offset, q_out, keys, values,
         (heads, kv_heads, tile_h, tile_hk), normed, paged, form),
    )  # fmt: skip


FLAGS = ("normed", "norm_last", "interleaved", "paged")
DIMENSIONS = (
    *(Dimension(name, "bucketed") for name in ("tokens", "batch")),
    *(Dimension(name, "exact") for name in ("heads", "kv_heads", "head_dim", "pairs")),
    *flags_of(FLAGS),
    *(Dimension(name, "dtype") for name in ("dtype", "weight_dtype", "angle_dtype")),
)


def _sizes(problem: Problem) -> dict[str, Any]:
    """Return the sizes of a cache that the tokens of the inputs fill, at positions that all sequences share."""
    tokens, batch, heads = problem["tokens"], problem["batch"], problem["kv_heads"]
    page_size = math.gcd(tokens, 16)
    pages = tokens // page_size
    cache = (batch * pages, page_size, heads) if problem["paged"] else (batch, heads, tokens)
    return {**dict(zip(("entries", "second", "third"), cache, strict=True)), "pages": pages, "positions": 1}


_Q, _K = TOKENS_FIRST
_CACHE = ("entries", "second", "third", "head_dim")
_ARRAYS: Arrays = (
    Array("q", "dtype", _Q),
    Array("k", "dtype", _K),
    Array("v", "dtype", _K),
    *(Array(name, "weight_dtype", ("head_dim",), flag="normed") for name in ("q_weight", "k_weight")),
    *angles_of("batch", "tokens", "pairs"),
    Array("positions", "int32", ("positions", "tokens"), aligned=False),
    Array("table", "int32", ("batch", "pages"), aligned=False, flag="paged"),
    EPS,
    ScalarParameter("offset", "float32", 0.75),
    Array("q_out", "dtype*weight_dtype*angle_dtype", _Q, "output"),
    Array("keys", "dtype", _CACHE, "output"),
    Array("values", "dtype", _CACHE, "output"),
)


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw angles; tokens are in another order than their rows, pages in the opposite one.

    All sequences share the rows, so that the tuner finds no bit class: it would move rows with their tokens.
    """
    import torch

    tokens = torch.arange(problem["tokens"], dtype=torch.int32, device=device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    if problem["paged"]:
        pages = torch.arange(problem["entries"], dtype=torch.int32, device=device)
        table = pages.flip(0).view(problem["batch"], problem["pages"])
    positions = (tokens.flip(0)[None] + 1) % problem["tokens"]
    return {**drawn_angles(problem, generator, device), "positions": positions, "table": table}


def written(cache: Any, x: Any, positions: Any, table: Any) -> Any:
    """Return a cache with the rows of tokens [batch, tokens, kv_heads, head_dim], in its layout; ``table`` or None."""
    import torch

    rows = cache.transpose(1, 2) if table is None else cache
    (entries, size), (batch, tokens) = rows.shape[:2], x.shape[:2]
    position = positions.long().expand(batch, tokens)
    if table is None:
        entry, room = torch.arange(batch, device=x.device)[:, None], size
    else:
        room = size * table.shape[1]
        entry = table.long().gather(1, (position // size).clamp(0, table.shape[1] - 1))
    there = (position >= 0) & (position < room) & (entry >= 0) & (entry < entries)
    # Tokens without a place go to a row behind the last.
    place = (entry * size + position % size).where(there, entries * size)
    found = torch.cat((rows.flatten(0, 1), rows.new_zeros(1, *rows.shape[2:])))
    found[place] = x.to(cache.dtype)
    found = found[:-1].view(rows.shape)
    return found.transpose(1, 2) if table is None else found


def reference(
    q: Any, k: Any, v: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, positions: Any, table: Any, eps: float,
    offset: float, normed: bool, norm_last: bool, interleaved: bool, paged: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the formula in float64, for tokens that fill their cache."""
    if normed:
        made = reference_general(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        q_out, k_out = made["q_out"], made["k_out"]
    else:
        q_out, k_out = (rotated(x.double(), cos.double(), sin.double(), interleaved=interleaved) for x in (q, k))
    batch, tokens, heads, size = k.shape
    page_size = tokens // table.shape[1] if paged else 0
    shape = (batch * table.shape[1], page_size, heads, size) if paged else (batch, heads, tokens, size)
    keys, values = (
        written(q_out.new_empty(shape), x, positions, table if paged else None) for x in (k_out, v.double())
    )
    return {"q_out": q_out, "keys": keys, "values": values}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    most = power_of_two(problem["heads"])
    return {
        "schedule": ["block", "persistent"],
        "tile_h": sorted({min(most, n) for n in (1, 2, 4, 8, 16, 32)}),
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
    }


_SIZED = Constraint(
    "a step of more than 4096 numbers takes minutes to compile",
    lambda problem, config, target: (
        config["tile_h"] == 1 or config["tile_h"] * power_of_two(problem["head_dim"]) <= 4096
    ),
)


def _tile(problem: Problem, numbers: int) -> int:
    """Return as many heads as hold some numbers."""
    return min(32, power_of_two(problem["heads"]), max(1, numbers // power_of_two(problem["head_dim"])))


def _default(problem: Problem, target: Target) -> Config:
    """Return the tiles of the default of :mod:`tilekern.kernels.qk_norm_rope`: sums over a head have its order."""
    return Config(schedule="block", tile_h=_tile(problem, 2048), occupancy=4, num_worker_warps=0)


def _generic(problem: Problem) -> Config:
    return Config(schedule="persistent", tile_h=_tile(problem, 512), occupancy=1, num_worker_warps=0)


def _tile_hk(problem: Problem, config: Config) -> int:
    return min(int(config["tile_h"]), power_of_two(problem["kv_heads"]))


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    tile_h, tile_hk, cuts = config["tile_h"], _tile_hk(problem, config), cut(problem)
    tails = problem["heads"] % tile_h or problem["kv_heads"] % tile_hk
    few = is_few(problem["tokens"], problem["batch"])
    return {**cuts, "tile_hk": tile_hk, "bounded": bool(tails or cuts["bounded"]), "few": few}


SPEC = spec(
    "append_to_cache",
    "q and k, normalised and rotated, and the rows of k and v in a cache, dense or in pages",
    DIMENSIONS,
    _ARRAYS,
    reference,
    function=append_to_cache,
    sizes=_sizes,
    constants=_constants,
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["batch"]
        * sizes["tokens"]
        * (cdiv(sizes["heads"], config["tile_h"]) + cdiv(sizes["kv_heads"], _tile_hk(sizes, config))),
        config,
        sm_count,
    ),
    space=Space(_axes, (_SIZED,)),
    default=_default,
    generic=_generic,
    given=_given,
    flops=lambda problem: (
        7 * problem["batch"] * problem["tokens"] * (problem["heads"] + problem["kv_heads"]) * problem["head_dim"]
    ),
    # q may be wider.
    result_dtype=lambda problem: problem["dtype"],
    dependent=True,
)
SPECS = (SPEC,)
