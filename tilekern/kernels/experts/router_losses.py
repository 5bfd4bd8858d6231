"""Losses of a router (uneven use of experts, large logits) and the gradient of its logits.

With p the softmax of a row of logits, ``counts[e]`` the rows whose ids have expert e, and R rows, the balance is
``experts * sum_e (counts[e] / R) * (sum_rows p[e] / R)`` (Fedus, Zoph and Shazeer 2021, arXiv:2101.03961, equations 4
to 6) and z is the mean of ``lse^2``, lse being the logarithm of the sum of exp(logits) (Zoph and others 2022,
arXiv:2202.08906, equation 5). Shares weight the rows; R is then their sum.

The forward stores each block's sums of p, counts and sum of lse^2. For the gradient, ``slopes[e]`` is the losses'
derivative by p[e] and ``pull`` their derivative by lse^2 / 2: ``dlogits = share * p * (slopes - sum(p * slopes) + pull
* lse)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.router import choices_of, largest
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import Table, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load, power_of_two, row_tiles
from tilekern.spec import Array, Config, Dimension, KernelSpec, Problem, ScalarParameter, Space, Value, cdiv

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
_INFINITY = math.inf
# Elements of the tiles of a step.
_FEWEST, _MOST = 256, 4096


def _softmax(logits, step, lane, experts, tile_m, width):
    """Return the softmax [tile_m, width] of a step of rows, and the logarithm of its divisor [tile_m, 1]."""
    x = load(logits, (step, 0), (tile_m, width), True, 0, False).astype(ct.float32)
    x = ct.where(lane < experts, x, -_INFINITY)
    top = ct.max(x, axis=1, keepdims=True)
    # The difference first: one fused product and sum would lose the digits of large x.
    powers = ct.exp2((x - top) * _LOG2_E, flush_to_zero=True)
    total = ct.sum(powers, axis=1, keepdims=True)
    return powers * (1.0 / total), top + ct.log2(total) * _LN_2


def _share(shares, step, tile_m, rows, masked):
    """Return the weight of each row [tile_m, 1]; 0 beyond the last one."""
    row = step * tile_m + ct.reshape(ct.arange(tile_m, dtype=ct.int32), (tile_m, 1))
    share = ct.where(row < rows, 1.0, 0.0)
    if ct.static_eval(masked):
        share = ct.reshape(load(shares, (step,), (tile_m,), True, 0, False).astype(ct.float32), (tile_m, 1))
    return share


@ct.kernel
def router_losses_forward(
    logits, ids, shares, choices, probabilities, counts, squares, experts: ConstInt, tile_m: ConstInt,
    width: ConstInt, masked: ConstBool,
):  # fmt: skip
    """Resident blocks; logits [rows, experts], ids [rows, choices], shares [rows].

    probabilities and counts are [blocks, experts], squares [blocks, 1].
    """
    lane = ct.reshape(ct.arange(width, dtype=ct.int32), (1, width))
    added, chosen = ct.zeros((tile_m, width), ct.float32), ct.zeros((tile_m, width), ct.float32)
    square = ct.zeros((tile_m, 1), ct.float32)
    for step in range(ct.bid(0), ct.cdiv(logits.shape[0], tile_m), ct.num_blocks(0)):
        p, lse = _softmax(logits, step, lane, experts, tile_m, width)
        share = _share(shares, step, tile_m, logits.shape[0], masked)
        # An ignored row may hold any values.
        added = added + ct.where(share > 0.0, p * share, 0.0)
        square = square + ct.where(share > 0.0, lse * lse * share, 0.0)
        for k in range(choices):
            here = load(ids, (step, k), (tile_m, 1), True, 0, False).astype(ct.int32) == lane
            chosen = chosen + ct.where(here, share, 0.0)
    block = ct.bid(0)
    ct.store(probabilities, (block, 0), ct.sum(added, axis=0, keepdims=True), allow_tma=False)
    ct.store(counts, (block, 0), ct.sum(chosen, axis=0, keepdims=True), allow_tma=False)
    ct.store(squares, (block, 0), ct.sum(square, axis=0, keepdims=True), allow_tma=False)


@ct.kernel
def router_losses_backward(
    logits, shares, slopes, pull, dlogits, experts: ConstInt, tile_m: ConstInt, width: ConstInt, masked: ConstBool
):
    """``tile_m`` rows a step; logits and dlogits [rows, experts], shares [rows], slopes [1, experts], pull [1, 1]."""
    lane = ct.reshape(ct.arange(width, dtype=ct.int32), (1, width))
    slope = load(slopes, (0, 0), (1, width), True, 0, False)
    gain = load(pull, (0, 0), (1, 1), False, 0, False)
    for step in range(ct.bid(0), ct.cdiv(logits.shape[0], tile_m), ct.num_blocks(0)):
        p, lse = _softmax(logits, step, lane, experts, tile_m, width)
        share = _share(shares, step, tile_m, logits.shape[0], masked)
        gradient = p * (slope - ct.sum(p * slope, axis=1, keepdims=True) + gain * lse)
        gradient = ct.where(share > 0.0, gradient * share, 0.0)
        ct.store(dlogits, (step, 0), gradient.astype(dlogits.dtype), allow_tma=False)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent"],
        "tile_m": row_tiles(problem["experts"], _FEWEST, _MOST),
        "occupancy": [2, 4],
        "num_worker_warps": [0, 8],
    }


def _config(problem: Problem) -> Config:
    tile_m = row_tiles(problem["experts"], _FEWEST, 2 * _FEWEST)[-1]
    return Config(schedule="persistent", tile_m=tile_m, occupancy=4, num_worker_warps=0)


_LOGITS, _SUMS = ("rows", "experts"), ("blocks", "experts")


def _shares(problem: Problem) -> Array:
    """Return the shares of all rows, or one element that is not aligned."""
    return Array("shares", "float32", ("rows",), aligned=problem["masked"], flag="masked")


def _arrays(problem: Problem) -> Arrays:
    choices = choices_of(problem)
    return (
        Array("logits", "dtype", _LOGITS),
        # Read element by element, so their rows may begin anywhere.
        Array("ids", "int64", ("rows", f"{choices}"), aligned=False),
        _shares(problem),
        ScalarParameter("choices", "int32", choices),
        *(Array(name, "float32", _SUMS, "output") for name in ("probabilities", "counts")),
        Array("squares", "float32", ("blocks", "1"), "output", aligned=False),
    )


def _backward_arrays(problem: Problem) -> Arrays:
    return (
        Array("logits", "dtype", _LOGITS),
        _shares(problem),
        Array("slopes", "float32", ("1", "experts")),
        Array("pull", "float32", ("1", "1"), aligned=False),
        Array("dlogits", "dtype", _LOGITS, "output"),
    )


def sums(logits: Any, ids: Any, shares: Any) -> tuple[Any, Any, Any]:
    """Return (sums of p, counts, sum of lse^2) by torch, [experts], [experts], [1]; shares None stands for ones."""
    if shares is None:
        shares = logits.new_ones(len(logits))
    share = shares.to(logits.dtype)[:, None]
    logits = logits.where(share > 0, 0.0)
    counts = logits.new_zeros(logits.shape).scatter_add_(1, ids, share.expand(ids.shape)).sum(0)
    squares = (logits.logsumexp(1, keepdim=True).square() * share).sum(0)
    return (logits.softmax(1) * share).sum(0), counts, squares


def _reference(logits: Any, ids: Any, shares: Any, choices: int, masked: bool) -> dict[str, Any]:
    found = sums(logits.double(), ids, shares.double() if masked else None)
    return dict(zip(("probabilities", "counts", "squares"), found, strict=True))


def _reference_backward(logits: Any, shares: Any, slopes: Any, pull: Any, masked: bool) -> dict[str, Any]:
    wide, slopes = logits.double(), slopes.double()
    p = wide.softmax(1)
    gradient = p * (slopes - (p * slopes).sum(1, keepdim=True) + pull.double() * wide.logsumexp(1, keepdim=True))
    if masked:
        share = shares.double()[:, None]
        gradient = (gradient * share).where(share > 0, 0.0)
    return {"dlogits": gradient}


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw similar logits; with shares every third row has the weight 0."""
    import torch

    rows, dtype = problem["rows"], getattr(torch, problem["dtype"])
    logits = 0.5 + torch.rand((rows, problem["experts"]), generator=generator, device=device)
    shares = 0.5 + torch.rand((rows,), generator=generator, device=device)
    shares[2::3] = 0
    return {"logits": logits.to(dtype), "shares": shares if problem["masked"] else shares.new_zeros(1)}


def _forward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    given = _inputs(problem, generator, device)
    return given | {"ids": largest(given["logits"], choices_of(problem))}


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    given, shape = _inputs(problem, generator, device), (1, problem["experts"])
    slopes = 0.5 + torch.rand(shape, generator=generator, device=device)
    return given | {"slopes": slopes, "pull": 0.5 + torch.rand((1, 1), generator=generator, device=device)}


def _spec(
    name: str, summary: str, function: Any, arrays: Table, reference: Callable[..., dict[str, Any]], given: Any,
    flops: Callable[[Problem], int], exact: tuple[str, ...], **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of the sums or of the gradient, with ``flops`` operations for each logit."""
    return spec(
        name, summary,
        (
            Dimension("rows", "bucketed"), *(Dimension(size, "exact") for size in exact),
            Dimension("dtype", "dtype"), Dimension("masked", "flag"),
        ),
        arrays, reference,
        function=lambda problem, config: function,
        sizes=lambda problem: {"width": power_of_two(problem["experts"])},
        grid=lambda sizes, config, sm_count: grid_of(cdiv(sizes["rows"], config["tile_m"]), config, sm_count),
        space=Space(_axes),
        default=lambda problem, target: _config(problem),
        generic=_config,
        given=given,
        flops=lambda problem: problem["rows"] * problem["experts"] * flops(problem),
        **more,
    )  # fmt: skip


FORWARD = _spec(
    "router_losses_forward",
    "sums of a router's probabilities, of its choices and of the squares of its logsumexps",
    router_losses_forward,
    _arrays,
    _reference,
    _forward_inputs,
    lambda problem: 6 + choices_of(problem),
    ("experts", "choices"),
    results=lambda outputs: {name: x.double().sum(0) for name, x in outputs.items()},
)
BACKWARD = _spec(
    "router_losses_backward",
    "gradient of a router's losses by its logits",
    router_losses_backward,
    _backward_arrays,
    _reference_backward,
    _backward_inputs,
    lambda problem: 10,
    ("experts",),
)
SPECS = (FORWARD, BACKWARD)
