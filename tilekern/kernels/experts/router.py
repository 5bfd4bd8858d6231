"""Routers: each token's K experts and their weights, in float32, and the gradient of its logits.

By softmax: the K largest logits choose the experts. With p the softmax of all logits, ``weights[k] = scale *
p[ids[k]]``; normalised, p is the softmax of the chosen logits alone, which is the same as p of all over its sum.
``dlogits = scale * p * (g - sum(g * p))``, g being dweights at the chosen experts and 0 elsewhere.

By sigmoid (DeepSeek-V3, arXiv:2412.19437): ``s = sigmoid(logits)``, and the K largest s + bias in the kept groups
choose the experts; kept are the groups with the largest sums of their two best. ``weights[k] = scale * s[ids[k]]``,
normalised over ``sum_k s[ids[k]] + 1e-20``. The bias affects only the choice and has no gradient.

The largest are found one after the other, each as the maximum of the rest. Among equals the lower id is first, and NaN
counts as infinity. So the ids are K different experts for any logits, and the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import Table, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load, power_of_two, row_tiles
from tilekern.spec import Array, Config, Dimension, KernelSpec, Problem, ScalarParameter, Space, Value, cdiv

# A step cannot hold a row of more logits.
MOST_EXPERTS = 256
# Each group is compared with every group.
MOST_GROUPS = 32
_LOG2_E = 1.4426950408889634
_INFINITY = math.inf
# The lane, after all experts, of elements that may not be chosen.
_NOWHERE = 1 << 20
# Added to a sum of sigmoids, so that it is never 0.
_LEAST = 1e-20
# Elements of the tiles of a step.
_FEWEST, _MOST = 256, 4096


def _better(value, lane, other, other_lane):
    """Return the larger of two; among equals, the lower lane."""
    takes = (other > value) | ((other == value) & (other_lane < lane))
    return ct.where(takes, other, value), ct.where(takes, other_lane, lane)


def _best(keys, lanes):
    """Return the largest of each row and its lane, [tile_m, 1] each."""
    return ct.reduce((keys, lanes), 1, _better, (-_INFINITY, _NOWHERE), keepdims=True)


def _ordered(x):
    """Replace NaN by the largest value."""
    return ct.where(ct.isnan(x), _INFINITY, x)


def _chosen(keys, lanes, number, tile_m, wide):
    """Return the ``number`` largest of each row and their lanes, [tile_m, wide] each; then -infinity and 0."""
    place = ct.reshape(ct.arange(wide, dtype=ct.int32), (1, wide))
    values, ids = ct.full((tile_m, wide), -_INFINITY, ct.float32), ct.zeros((tile_m, wide), ct.int32)
    for k in range(number):
        value, lane = _best(keys, lanes)
        values, ids = ct.where(place == k, value, values), ct.where(place == k, lane, ids)
        keys, lanes = ct.where(lanes == lane, -_INFINITY, keys), ct.where(lanes == lane, _NOWHERE, lanes)
    return values, ids


def _power(x, top):
    # The difference first: one fused product and sum would lose the digits of large x.
    return ct.exp2((x - top) * _LOG2_E, flush_to_zero=True)


def _sigmoid(x):
    """Return sigmoid(x) and its derivative, without a difference or an infinite power."""
    power = ct.exp2(-ct.abs(x) * _LOG2_E, flush_to_zero=True)
    share = 1.0 / (1.0 + power)
    return ct.where(x < 0.0, power, 1.0) * share, power * share * share


def _lanes(tile_m, width, experts):
    """Return the expert of each element of [tile_m, width], and whether that expert exists [1, width]."""
    lane = ct.reshape(ct.arange(width, dtype=ct.int32), (1, width))
    return lane + ct.zeros((tile_m, width), ct.int32), lane < experts


def _stored(array, step, tile):
    ct.store(array, (step, 0), tile.astype(array.dtype), allow_tma=False)


@ct.kernel
def router_softmax_forward(
    logits, choices, scale, ids, weights, experts: ConstInt, tile_m: ConstInt, width: ConstInt, wide: ConstInt,
    normalized: ConstBool,
):  # fmt: skip
    """``tile_m`` rows a step; logits [tokens, experts], ids and weights [tokens, choices]."""
    lane, is_expert = _lanes(tile_m, width, experts)
    for step in range(ct.bid(0), ct.cdiv(logits.shape[0], tile_m), ct.num_blocks(0)):
        x = load(logits, (step, 0), (tile_m, width), True, 0, False).astype(ct.float32)
        keys = ct.where(is_expert, _ordered(x), -_INFINITY)
        values, found = _chosen(keys, ct.where(is_expert, lane, _NOWHERE), choices, tile_m, wide)
        top = ct.max(values, axis=1, keepdims=True)
        powers = _power(values, top)
        if ct.static_eval(normalized):
            total = ct.sum(powers, axis=1, keepdims=True)
        else:
            total = ct.sum(_power(keys, top), axis=1, keepdims=True)
        _stored(ids, step, found)
        _stored(weights, step, powers * (scale / total))


def _slopes(dweights, ids, step, lane, tile_m, width):
    """Return dweights at the chosen experts and 0 elsewhere, and whether an expert is chosen, [tile_m, width] each."""
    slopes, is_chosen = ct.zeros((tile_m, width), ct.float32), ct.zeros((tile_m, width), ct.float32)
    for k in range(ids.shape[1]):
        here = load(ids, (step, k), (tile_m, 1), True, 0, False).astype(ct.int32) == lane
        slope = load(dweights, (step, k), (tile_m, 1), True, 0, False).astype(ct.float32)
        slopes, is_chosen = ct.where(here, slope, slopes), ct.where(here, 1.0, is_chosen)
    return slopes, is_chosen > 0.0


@ct.kernel
def router_softmax_backward(
    dweights, logits, ids, scale, dlogits, experts: ConstInt, tile_m: ConstInt, width: ConstInt,
    normalized: ConstBool,
):  # fmt: skip
    """``tile_m`` rows a step; logits and dlogits [tokens, experts], ids and dweights [tokens, choices]."""
    lane, is_expert = _lanes(tile_m, width, experts)
    for step in range(ct.bid(0), ct.cdiv(logits.shape[0], tile_m), ct.num_blocks(0)):
        x = load(logits, (step, 0), (tile_m, width), True, 0, False).astype(ct.float32)
        slopes, is_chosen = _slopes(dweights, ids, step, lane, tile_m, width)
        x = ct.where(is_expert, x, -_INFINITY)
        powers = _power(x, ct.max(x, axis=1, keepdims=True))
        if ct.static_eval(normalized):
            powers = ct.where(is_chosen, powers, 0.0)
        p = powers * (1.0 / ct.sum(powers, axis=1, keepdims=True))
        mean = ct.sum(p * slopes, axis=1, keepdims=True)
        _stored(dlogits, step, p * (slopes - mean) * scale)


def _in_kept_groups(keys, kept, tile_m, groups, wide_groups, wide_size):
    """Return whether an expert's group is one of the ``kept`` best, [tile_m, wide_groups, 1]."""
    lane = ct.reshape(ct.arange(wide_size, dtype=ct.int32), (1, 1, wide_size))
    lanes = lane + ct.zeros((tile_m, wide_groups, wide_size), ct.int32)
    first, at = ct.reduce((keys, lanes), 2, _better, (-_INFINITY, _NOWHERE), keepdims=True)
    second = ct.max(ct.where(lanes == at, -_INFINITY, keys), axis=2, keepdims=True)
    group = ct.arange(wide_groups, dtype=ct.int32)
    mine, other = ct.reshape(group, (1, wide_groups, 1)), ct.reshape(group, (1, 1, wide_groups))
    score = _ordered(first + second)
    of_other = ct.reshape(score, (tile_m, 1, wide_groups))
    is_ahead = (of_other > score) | ((of_other == score) & (other < mine))
    return ct.sum(ct.where(is_ahead & (other < groups), 1, 0), axis=2, keepdims=True) < kept


@ct.kernel
def router_sigmoid_forward(
    logits, bias, kept, choices, scale, ids, weights, groups: ConstInt, size: ConstInt, tile_m: ConstInt,
    wide_groups: ConstInt, wide_size: ConstInt, wide: ConstInt, normalized: ConstBool,
):  # fmt: skip
    """``tile_m`` rows a step; logits [tokens, groups, size], bias [groups, size], ids and weights [tokens, choices]."""
    shape, width = (tile_m, wide_groups, wide_size), ct.static_eval(wide_groups * wide_size)
    group = ct.reshape(ct.arange(wide_groups, dtype=ct.int32), (1, wide_groups, 1))
    member = ct.reshape(ct.arange(wide_size, dtype=ct.int32), (1, 1, wide_size))
    is_expert = (group < groups) & (member < size)
    lane = ct.where(is_expert, group * size + member, _NOWHERE) + ct.zeros(shape, ct.int32)
    added = load(bias, (0, 0), (wide_groups, wide_size), True, 0, False).astype(ct.float32)
    added = ct.reshape(added, (1, wide_groups, wide_size))
    is_choice = ct.reshape(ct.arange(wide, dtype=ct.int32), (1, wide)) < choices
    for step in range(ct.bid(0), ct.cdiv(logits.shape[0], tile_m), ct.num_blocks(0)):
        x = load(logits, (step, 0, 0), shape, True, 0, False).astype(ct.float32)
        share, _ = _sigmoid(x)
        keys = ct.where(is_expert, _ordered(share + added), -_INFINITY)
        lanes = lane
        if ct.static_eval(groups > 1):
            is_kept = _in_kept_groups(keys, kept, tile_m, groups, wide_groups, wide_size)
            keys, lanes = ct.where(is_kept, keys, -_INFINITY), ct.where(is_kept, lane, _NOWHERE)
        flat = (tile_m, width)
        _, found = _chosen(ct.reshape(keys, flat), ct.reshape(lanes, flat), choices, tile_m, wide)
        row = step * tile_m + ct.reshape(ct.arange(tile_m, dtype=ct.int32), (tile_m, 1))
        # The choice used the sum with the bias; subtracting the bias again would lose digits.
        value, _ = _sigmoid(ct.gather(logits, (row, found // size, found % size)).astype(ct.float32))
        value = ct.where(is_choice, value, 0.0)
        if ct.static_eval(normalized):
            value = value / (ct.sum(value, axis=1, keepdims=True) + _LEAST)
        _stored(ids, step, found)
        _stored(weights, step, value * scale)


@ct.kernel
def router_sigmoid_backward(
    dweights, logits, ids, scale, dlogits, experts: ConstInt, tile_m: ConstInt, width: ConstInt,
    normalized: ConstBool,
):  # fmt: skip
    """``tile_m`` rows a step; logits and dlogits [tokens, experts], ids and dweights [tokens, choices]."""
    lane, _ = _lanes(tile_m, width, experts)
    for step in range(ct.bid(0), ct.cdiv(logits.shape[0], tile_m), ct.num_blocks(0)):
        x = load(logits, (step, 0), (tile_m, width), True, 0, False).astype(ct.float32)
        slopes, is_chosen = _slopes(dweights, ids, step, lane, tile_m, width)
        value, rise = _sigmoid(x)
        if ct.static_eval(normalized):
            value = ct.where(is_chosen, value, 0.0)
            total = ct.sum(value, axis=1, keepdims=True) + _LEAST
            mean = ct.sum(value / total * slopes, axis=1, keepdims=True)
            slopes, rise = slopes - mean, rise / total
        _stored(dlogits, step, ct.where(is_chosen, rise * slopes * scale, 0.0))


def choices_of(problem: Problem) -> int:
    """Return the choices of a token; it does not choose an expert twice."""
    return min(problem["choices"], problem["experts"])


def groups_of(problem: Problem) -> int:
    """Return the number of groups, or 1 if the experts do not divide into that many of at least two each."""
    if "expert_groups" not in problem:
        return 1
    groups, experts = problem["expert_groups"], problem["experts"]
    return groups if groups <= MOST_GROUPS and experts % groups == 0 and experts >= 2 * groups else 1


def _widths(problem: Problem) -> tuple[int, int]:
    """Return the sizes of the tile's axes of groups and of experts of a group."""
    groups = groups_of(problem)
    return power_of_two(groups), power_of_two(problem["experts"] // groups)


def _elements(problem: Problem) -> int:
    """Return the elements of a row: its experts, or the pairs of groups if there are more."""
    groups, size = _widths(problem)
    return max(groups * size, groups * groups)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block"],
        "tile_m": row_tiles(_elements(problem), _FEWEST, _MOST),
        "occupancy": [4, 8],
        "num_worker_warps": [0, 8],
    }


def _config(problem: Problem, occupancy: int) -> Config:
    tile_m = row_tiles(_elements(problem), _FEWEST, 2 * _FEWEST)[-1]
    return Config(schedule="block", tile_m=tile_m, occupancy=occupancy, num_worker_warps=0)


def _sizes(problem: Problem) -> dict[str, Any]:
    wide_groups, wide_size = _widths(problem)
    groups, experts = groups_of(problem), problem["experts"]
    return {
        "dtype": problem.get("dtype", "float32"),
        "picked": choices_of(problem),
        "groups": groups,
        "size": experts // groups,
        "wide_groups": wide_groups,
        "wide_size": wide_size,
        "width": power_of_two(experts),
        "wide": power_of_two(choices_of(problem)),
    }


# Read and written element by element, so their rows may begin anywhere.
_WEIGHTS, _PICKED = ("weights", "weight_dtype", ("tokens", "picked")), ("ids", "int64", ("tokens", "picked"))
_CHOICE = (Array(*_PICKED, "output", aligned=False), Array(*_WEIGHTS, "output", aligned=False))
_NUMBER, _SCALE = ScalarParameter("choices", "int32"), ScalarParameter("scale", "float32", 1.5)
_LOGITS = ("tokens", "experts")
_BACKWARD_ARRAYS = (
    Array("dweights", "weight_dtype", ("tokens", "picked"), aligned=False),
    Array("logits", "dtype", _LOGITS),
    Array(*_PICKED, aligned=False),
    _SCALE,
    Array("dlogits", "dtype", _LOGITS, "output"),
)


def _sigmoid_arrays(problem: Problem) -> Arrays:
    of_group = f"experts/{problem['groups']}"
    return (
        Array("logits", "dtype", ("tokens", "groups", of_group)), Array("bias", "dtype", ("groups", of_group)),
        ScalarParameter("kept", "int32"), _NUMBER, _SCALE, *_CHOICE,
    )  # fmt: skip


def largest(keys: Any, number: int) -> Any:
    """Return by torch the ids of the ``number`` largest in the last axis: NaN first, lower ids first among equals."""
    return keys.masked_fill(keys.isnan(), math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :number]


def by_softmax(logits: Any, choices: int, scale: float, normalized: bool) -> tuple[Any, Any]:
    """Return (ids, weights) by torch, in the dtype of ``logits``."""
    ids = largest(logits.detach(), choices)
    if normalized:
        return ids, scale * logits.gather(-1, ids).softmax(-1)
    return ids, scale * logits.softmax(-1).gather(-1, ids)


def by_sigmoid(logits: Any, bias: Any, kept: int, choices: int, scale: float, normalized: bool) -> tuple[Any, Any]:
    """Return (ids, weights) by torch, in the dtype of ``logits`` [tokens, groups, size]; bias [groups, size]."""
    import torch

    keys = logits.detach().sigmoid() + bias
    if keys.shape[1] > 1:
        best = largest(keys.masked_fill(keys.isnan(), math.inf).topk(2).values.sum(-1), kept)
        is_left_out = torch.ones_like(keys[..., 0], dtype=torch.bool).scatter_(1, best, False)
        # Below all experts of the kept groups.
        keys = keys.clamp(min=torch.finfo(keys.dtype).min).masked_fill(is_left_out[..., None], -math.inf)
    ids = largest(keys.flatten(1), choices)
    weights = logits.flatten(1).gather(1, ids).sigmoid()
    return ids, scale * (weights / (weights.sum(-1, keepdim=True) + _LEAST) if normalized else weights)


def _reference_softmax(logits: Any, choices: int, scale: float, normalized: bool) -> dict[str, Any]:
    ids, weights = by_softmax(logits.double(), choices, scale, normalized)
    return {"ids": ids.double(), "weights": weights}


def _reference_sigmoid(
    logits: Any, bias: Any, kept: int, choices: int, scale: float, normalized: bool
) -> dict[str, Any]:
    ids, weights = by_sigmoid(logits.double(), bias.double(), kept, choices, scale, normalized)
    return {"ids": ids.double(), "weights": weights}


def _reference_softmax_backward(dweights: Any, logits: Any, ids: Any, scale: float, normalized: bool) -> dict[str, Any]:
    """Compute the gradient without autograd: a non-finite logit spoils its row, even if it is not chosen."""
    wide = logits.double()
    slopes = wide.new_zeros(wide.shape).scatter_(1, ids, dweights.double())
    powers = (wide - wide.amax(1, keepdim=True)).exp()
    if normalized:
        powers = powers.where(slopes.new_zeros(slopes.shape).scatter_(1, ids, 1.0) > 0, 0.0)
    p = powers / powers.sum(1, keepdim=True)
    return {"dlogits": scale * p * (slopes - (p * slopes).sum(1, keepdim=True))}


def _reference_sigmoid_backward(dweights: Any, logits: Any, ids: Any, scale: float, normalized: bool) -> dict[str, Any]:
    """Compute the gradient without autograd, which leaves a rounding error instead of 0 for a single expert."""
    slopes, chosen = dweights.double(), logits.double().gather(1, ids)
    share, rise = chosen.sigmoid(), chosen.sigmoid() * (-chosen).sigmoid()
    if normalized:
        total = share.sum(1, keepdim=True) + _LEAST
        slopes, rise = slopes - (share / total * slopes).sum(1, keepdim=True), rise / total
    return {"dlogits": slopes.new_zeros(logits.shape).scatter_(1, ids, scale * rise * slopes)}


def _softmax_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    logits = 2 * torch.randn((problem["tokens"], problem["experts"]), generator=generator, device=device)
    return {"logits": logits.to(getattr(torch, problem["dtype"])), "choices": choices_of(problem)}


def _sigmoid_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw sigmoids in 64 steps, and a bias that separates equal ones and sums of two by more than float32's error."""
    import torch

    tokens, experts, groups = problem["tokens"], problem["experts"], groups_of(problem)
    drawn = torch.rand((tokens, experts), generator=generator, device=device)
    step = (64 * drawn).floor() % 64
    bias = torch.arange(experts, device=device) / (256 * experts)
    return {
        "logits": ((step + 0.5) / 64).logit().view(tokens, groups, -1),
        "bias": bias.view(groups, -1),
        "kept": max(cdiv(choices_of(problem) * groups, experts), groups // 2),
        "choices": choices_of(problem),
    }


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw similar logits and slopes of both signs: no result is a small difference of large terms."""
    import torch

    shape, dtype = (problem["tokens"], problem["experts"]), getattr(torch, problem["dtype"])
    logits = torch.rand(shape, generator=generator, device=device).to(dtype)
    ids = largest(logits, choices_of(problem))
    dweights = 0.5 + torch.rand(ids.shape, generator=generator, device=device)
    dweights[:, ::2] *= -1
    dweights = dweights.to(getattr(torch, problem["weight_dtype"]))
    return {"dweights": dweights, "logits": logits, "ids": ids}


def _spec(
    name: str, summary: str, function: Any, arrays: Table, reference: Callable[..., dict[str, Any]], given: Any,
    flops: int, of_kind: tuple[Dimension, ...],
) -> KernelSpec:  # fmt: skip
    """Return the spec of a router or its gradient, with ``flops`` operations for each logit and one for each choice."""
    return spec(
        name, summary,
        (
            Dimension("tokens", "bucketed"), Dimension("choices", "exact"), Dimension("experts", "exact"), *of_kind,
            Dimension("weight_dtype", "dtype"), Dimension("normalized", "flag"),
        ),
        arrays, reference,
        function=lambda problem, config: function,
        sizes=_sizes,
        grid=lambda sizes, config, sm_count: grid_of(cdiv(sizes["tokens"], config["tile_m"]), config, sm_count),
        space=Space(_axes),
        default=lambda problem, target: _config(problem, 8),
        generic=lambda problem: _config(problem, 4),
        given=given,
        flops=lambda problem: problem["tokens"] * problem["experts"] * (flops + choices_of(problem)),
    )  # fmt: skip


_DTYPE = (Dimension("dtype", "dtype"),)

SOFTMAX = _spec(
    "router_softmax_forward",
    "the K largest logits of each token and their shares of the softmax",
    router_softmax_forward,
    lambda problem: (Array("logits", "dtype", _LOGITS), _NUMBER, _SCALE, *_CHOICE),
    _reference_softmax,
    _softmax_inputs,
    4,
    _DTYPE,
)
SOFTMAX_BACKWARD = _spec(
    "router_softmax_backward",
    "gradient of the logits of a router by softmax",
    router_softmax_backward,
    lambda problem: _BACKWARD_ARRAYS,
    _reference_softmax_backward,
    _backward_inputs,
    8,
    _DTYPE,
)
SIGMOID = _spec(
    "router_sigmoid_forward",
    "the K experts of each token with the largest sigmoid and bias in the best groups, and their sigmoids",
    router_sigmoid_forward,
    _sigmoid_arrays,
    _reference_sigmoid,
    _sigmoid_inputs,
    6,
    (Dimension("expert_groups", "exact"),),
)
SIGMOID_BACKWARD = _spec(
    "router_sigmoid_backward",
    "gradient of the logits of a router by sigmoid",
    router_sigmoid_backward,
    lambda problem: _BACKWARD_ARRAYS,
    _reference_sigmoid_backward,
    _backward_inputs,
    8,
    (),
)
SPECS = (SOFTMAX, SOFTMAX_BACKWARD, SIGMOID, SIGMOID_BACKWARD)
