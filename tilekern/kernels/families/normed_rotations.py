"""Code shared by kernels that rotate heads and normalise each head, and by their gradients.

In the backward each block adds up its tokens' share of both weights' gradients in float32 and stores it as one row of
``partial`` [blocks, 2 * head_dim], the weight of q first; the spec ``column_sum`` adds the rows up in a fixed order. q
and k are read anyway, so the norms are computed again and the forward saves only its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, gradients, tensors
from tilekern.kernels.families.rotations import (
    GRADIENTS,
    TOKENS_FIRST,
    arrays_of,
    default_of,
    each_step,
    halves,
    space_of,
)
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, add_pairs, load, power_of_two
from tilekern.spec import Array, Config, Problem, ScalarParameter
from tilekern.spec.targets import Target

EPS = ScalarParameter("eps", "float32", 1e-6)


def read_weight(weight, form):
    """Load both halves of a weight in float32, shaped to broadcast over tokens and heads."""
    half, width, whole, bounded, _, _ = form[0]
    wa, wb, ia, ib = halves(weight, 0, half, whole)
    one = load(wa, (ia,), (width,), bounded, 0, False).astype(ct.float32)
    other = load(wb, (ib,), (width,), bounded, 0, False).astype(ct.float32)
    return ct.reshape(one, (1, 1, 1, width)), ct.reshape(other, (1, 1, 1, width))


def over_heads(one, other):
    """Return two sums over each head, by one reduction: one barrier among a block's warps instead of two."""
    return ct.reduce((one, other), 3, add_pairs, (0.0, 0.0), keepdims=True)


def each_step_with_sums(read, angles, pull, q, k, turns, partial, sizes, form):
    """Run :func:`each_step` for heads in halves, and store the sums of both weights' gradients in ``partial``."""
    _, _, tile_t, tile_h, tile_hk, _, _ = sizes
    half, width, whole, _, _, _ = form[0]
    q_zeros = ct.zeros((1, tile_t, tile_h, width), ct.float32)
    k_zeros = ct.zeros((1, tile_t, tile_hk, width), ct.float32)
    zeros = ((q_zeros, q_zeros), (k_zeros, k_zeros))
    q_sums, k_sums = each_step(read, angles, pull, q, k, turns, zeros, sizes, form)
    _store_sums(partial, q_sums, 0, half, width, whole)
    _store_sums(partial, k_sums, 2, half, width, whole)


def _store_sums(partial, sums, offset, half, width, whole):
    """Store one weight's gradient as a piece of this block's row."""
    for i in ct.static_iter(range(2)):
        row = ct.reshape(ct.sum(ct.sum(sums[i], axis=2), axis=1), (1, width))
        if ct.static_eval(whole):
            ct.store(partial, (ct.bid(0), offset + i), row)
        else:
            piece = partial.slice(1, (offset + i) * half, (offset + i + 1) * half)
            ct.store(piece, (ct.bid(0), 0), row)


def given(angles: Arrays, *scalars: ScalarParameter) -> Arrays:
    """Return the inputs of both directions besides q and k."""
    weights = (Array("q_weight", "weight_dtype", ("head_dim",)), Array("k_weight", "weight_dtype", ("head_dim",)))
    return (*weights, *angles, *scalars)


def arrays_of_gradients(rest: Arrays, product: str) -> Arrays:
    """Return the arrays of the backward; ``product`` is the dtype of the forward's results."""
    q, k = (Array(name, "dtype", shape) for name, shape in zip("qk", TOKENS_FIRST, strict=True))
    partial = Array("partial", "float32", ("blocks", "2*head_dim"), "scratch")
    return (*arrays_of(TOKENS_FIRST, (q, k, *rest), product, "dtype", GRADIENTS), partial)


SPACE = space_of(tma=[False])
SPACE_OF_GRADIENTS = space_of(("persistent",), (2, 3, 4), (TMA_NEEDS_HOPPER,), tma=[False, True])


def default(problem: Problem, target: Target) -> Config:
    """Return the default of the forward."""
    return default_of(problem, "block", 1024, 4, tma=False)


def default_of_gradients(arrays: Arrays, problem: Problem) -> Config:
    """Return the default of the backward with these arrays."""
    pairs, product = problem.get("pairs", problem["head_dim"] // 2), tensors(arrays)[0].dtype_in(problem)
    # Twice as many elements take the compiler 4 s in float32, or if heads do not fill a tile; pairs spill.
    short = product != "float32" and pairs == power_of_two(pairs) and not problem.get("interleaved")
    return default_of(problem, "persistent", 1024 if short else 512, 2, tma=False)


def normed(x: Any, weight: Any, eps: float) -> Any:
    """Return the RMSNorm of each head, in the dtype of ``x``."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def gradients_of(forward: Callable[..., dict[str, Any]], dq_out: Any, dk_out: Any, **given: Any) -> dict[str, Any]:
    """Return the gradients of a forward's reference except those of the angles; ``given`` are its inputs."""
    found = gradients(forward, {"q_out": dq_out, "k_out": dk_out}, **given)
    return {name: found[name] for name in ("dq", "dk", "dq_weight", "dk_weight")}


def results(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients, those of the weights added up over blocks."""
    dq_weight, dk_weight = outputs["partial"].double().sum(0).chunk(2)
    return {"dq": outputs["dq"], "dk": outputs["dk"], "dq_weight": dq_weight, "dk_weight": dk_weight}
