"""Log-probabilities of one id a row and entropies of rows of logits, and the gradient of both in the logits' place.

With x a row of logits, b an optional bias, cap an optional ``softcap * tanh(x / softcap)``, s = 1 / temperature:
``z = cap(x + b) * s``, ``lse = log(sum(exp(z)))`` and ``p = exp(z - lse)``. Of the id y a row has
``log_prob = z_y - lse`` and ``entropy = lse - sum(p * z)``. The gradient is
``dz_c = [c = y] dlog_prob + p_c * (dlse - dlog_prob - dentropy * (z_c - lse + entropy))``.

The forward reads a row once, as cross entropy does (:mod:`tilekern.kernels.cross_entropy.tiles`). The backward reads a
row's lse and entropy, so that each tile of the gradient needs that tile of the logits alone.

Rows with the id ``ignore_index`` give 0, and so does the backward for rows whose slopes are all 0, whatever they hold.
Any other id outside the vocabulary gives a log-probability and an lse of NaN, and so NaN in the backward. A slope that
is not finite gives NaN to its row: infinity times ``z_c - lse + entropy`` would have the sign of a rounding error where
that is near 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy.problem import STEPS_MATCH, matrix, matrix_bytes, step_axes, step_shapes
from tilekern.kernels.cross_entropy.problem import vector as rows_of
from tilekern.kernels.cross_entropy.tiles import (
    INFINITY,
    LN_2,
    NAN,
    capped_and_slope,
    columns_of,
    exponential,
    load_logits,
    load_weights,
    store_row,
    store_zeros,
    target_logit,
)
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)

# The first running maximum: finite, so that no difference of two maxima is infinity less infinity.
LOWEST = -3.4028234663852886e38
# In the place of differences below it: the exponential is 0 in float32 all the same, and products with it are not NaN.
LEAST = -1000.0


def load_scores(logits, bias, row, c, tile_n, bounded, columns, scale, softcap, biased, capped, tma):
    """Tile ``c`` of a row's z, minus infinity beyond the edge, and the derivative of z by the logit."""
    x = load_logits(logits, row, c, tile_n, bounded, tma)
    slope = ct.full((1, tile_n), 1.0, ct.float32)
    if biased:
        x = x + load_weights(bias, c, tile_n, bounded).astype(ct.float32)
    if capped:
        x, slope = capped_and_slope(x, softcap)
        if bounded:
            x = ct.where(columns_of(c, tile_n) < columns, x, -INFINITY)
    return x * scale, slope * scale


def _scan_step(
    peak, mass, pull, logits, bias, row, first, count, partial, columns, tile_n, scale, softcap, biased, capped, tma
):  # fmt: skip
    """Add ``count`` tiles, the last of them partial or not, to each lane's running maximum and sums."""
    tiles = ()
    for i in ct.static_iter(range(count)):
        bounded = ct.static_eval(partial and i == count - 1)
        z, _ = load_scores(
            logits, bias, row, first + i, tile_n, bounded, columns, scale, softcap, biased, capped, tma
        )  # fmt: skip
        tiles = tiles + (z,)
    top = peak
    for i in ct.static_iter(range(count)):
        top = ct.maximum(top, tiles[i])
    mass, pull = _moved(mass, pull, peak, top)
    for i in ct.static_iter(range(count)):
        left = tiles[i] - top
        share = exponential(left)
        mass = mass + share
        pull = pull + share * ct.maximum(left, LEAST)
    return top, mass, pull


def _moved(mass, pull, peak, top):
    """Sums of ``exp(z - peak)`` and of that times ``z - peak``, for a maximum ``top`` in the place of ``peak``."""
    left = ct.maximum(peak - top, LEAST)
    fading = exponential(left)
    return mass * fading, fading * (pull + left * mass)


def _scan_row(logits, bias, row, columns, tile_n, unroll, scale, softcap, biased, capped, tma):
    """One read of a row: the maximum of z, the sum of ``e = exp(z - maximum)``, and that of ``e * (z - maximum)``;
    (1, 1) each.

    Each lane of a tile keeps a maximum of its own. Steps of ``unroll`` whole tiles need no check of bounds; the rest is
    one step.
    """
    peak = ct.full((1, tile_n), LOWEST, ct.float32)
    mass = ct.zeros((1, tile_n), ct.float32)
    pull = ct.zeros((1, tile_n), ct.float32)
    whole = ct.static_eval(columns // (tile_n * unroll))
    for step in range(whole):
        peak, mass, pull = _scan_step(
            peak, mass, pull, logits, bias, row, step * unroll, unroll, False, columns, tile_n, scale, softcap, biased,
            capped, tma,
        )  # fmt: skip
    rest = ct.static_eval(-(-columns // tile_n) - whole * unroll)
    if rest > 0:
        peak, mass, pull = _scan_step(
            peak, mass, pull, logits, bias, row, whole * unroll, rest, columns % tile_n != 0, columns, tile_n, scale,
            softcap, biased, capped, tma,
        )  # fmt: skip
    top = ct.max(peak, axis=1, keepdims=True)
    mass, pull = _moved(mass, pull, peak, top)
    return top, ct.sum(mass, axis=1, keepdims=True), ct.sum(pull, axis=1, keepdims=True)


def _score_of(logits, bias, row, label, scale, softcap, biased, capped):
    """z of the row's id, (1, 1); NaN where that is not in the vocabulary."""
    x = target_logit(logits, row, label, softcap, False)
    if biased:
        place = (ct.zeros((1, 1), ct.int32), ct.full((1, 1), label, ct.int32))
        x = x + ct.gather(bias, place, padding_value=NAN).astype(ct.float32)
    if capped:
        x, _ = capped_and_slope(x, softcap)
    return x * scale


def _forward_row(
    logits, bias, ids, ignore_index, scale, softcap, log_probs, entropy, lse, row, columns, tile_n, unroll, biased,
    capped, tma,
):  # fmt: skip
    label = ct.load(ids, (row,), ())
    if label == ignore_index:
        for result in ct.static_iter((log_probs, entropy, lse)):
            store_row(result, row, ct.zeros((1, 1), ct.float32))
    else:
        at_id = _score_of(logits, bias, row, label, scale, softcap, biased, capped)
        top, total, pull = _scan_row(
            logits, bias, row, columns, tile_n, unroll, scale, softcap, biased, capped, tma
        )  # fmt: skip
        log_total = ct.log2(total) * LN_2
        store_row(log_probs, row, (at_id - top) - log_total)
        store_row(entropy, row, log_total - pull / total)
        store_row(lse, row, ct.where((label < 0) | (label >= columns), NAN, top + log_total))


@ct.kernel
def log_probs_forward(
    logits, bias, ids, ignore_index, scale, softcap, log_probs, entropy, lse, columns: ConstInt, tile_n: ConstInt,
    unroll: ConstInt, persistent: ConstBool, biased: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; logits [rows, columns], bias [1, columns].

    ids and the results [rows].
    """
    if ct.static_eval(persistent):
        for row in range(ct.bid(0), logits.shape[0], ct.num_blocks(0)):
            _forward_row(
                logits, bias, ids, ignore_index, scale, softcap, log_probs, entropy, lse, row, columns, tile_n, unroll,
                biased, capped, tma,
            )  # fmt: skip
    else:
        _forward_row(
            logits, bias, ids, ignore_index, scale, softcap, log_probs, entropy, lse, ct.bid(0), columns, tile_n,
            unroll, biased, capped, tma,
        )  # fmt: skip


def _element(vector, row):
    return ct.reshape(ct.load(vector, (row,), (1,)), (1, 1))


def _backward_tile(
    logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits, row, c, columns,
    tile_n, bounded, biased, capped,
):  # fmt: skip
    label = ct.load(ids, (row,), ())
    at_id, of_entropy, of_lse = (
        ct.load(dlog_probs, (row,), ()),
        ct.load(dentropy, (row,), ()),
        ct.load(dlse, (row,), ()),
    )
    if (label == ignore_index) | ((at_id == 0.0) & (of_entropy == 0.0) & (of_lse == 0.0)):
        store_zeros(dlogits, row, c, tile_n, bounded)
    else:
        share = of_lse - at_id
        finite = (ct.abs(share) < INFINITY) & (ct.abs(at_id) < INFINITY) & (ct.abs(of_entropy) < INFINITY)
        shift = ct.where(finite, _element(lse, row), NAN)
        z, slope = load_scores(logits, bias, row, c, tile_n, bounded, columns, scale, softcap, biased, capped, False)
        left = z - shift
        surprise = ct.maximum(left, LEAST) + _element(entropy, row)
        gradient = exponential(left) * (share - of_entropy * surprise)
        gradient = ct.where(columns_of(c, tile_n) == label, gradient + at_id, gradient)
        ct.store(
            dlogits, (row, c), (gradient * slope).astype(dlogits.dtype), check_bounds=bounded, allow_tma=False
        )  # fmt: skip


def _backward_item(
    logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits, item, columns,
    tile_n, biased, capped,
):  # fmt: skip
    """One tile; only the last of a row has its bounds checked."""
    across = ct.static_eval(-(-columns // tile_n))
    row, c = item // across, item % across
    if c < columns // tile_n:
        _backward_tile(
            logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits, row, c,
            columns, tile_n, False, biased, capped,
        )  # fmt: skip
    elif columns % tile_n != 0:
        _backward_tile(
            logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits, row, c,
            columns, tile_n, True, biased, capped,
        )  # fmt: skip


@ct.kernel
def log_probs_backward(
    logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits,
    columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, biased: ConstBool, capped: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; dlogits may be the memory of logits, both [rows, columns].

    bias [1, columns], ids, lse, entropy and their slopes [rows].
    """
    if ct.static_eval(persistent):
        for item in range(ct.bid(0), logits.shape[0] * ct.cdiv(columns, tile_n), ct.num_blocks(0)):
            _backward_item(
                logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits,
                item, columns, tile_n, biased, capped,
            )  # fmt: skip
    else:
        _backward_item(
            logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits,
            ct.bid(0), columns, tile_n, biased, capped,
        )  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The parameters beside logits, bias and ids."""

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float | None = None

    @property
    def scalars(self) -> tuple[int, float, float]:
        """The arguments from ``ignore_index`` to ``softcap``."""
        return self.ignore_index, 1.0 / self.temperature, float(self.softcap or 1.0)

    def flags(self, bias: Any) -> tuple[bool, bool]:
        """The flags of the specs, biased and capped, for a bias or None."""
        return bias is not None, self.softcap is not None


def before_ids(logits: Any, bias: Any) -> tuple[Any, Any]:
    """The first arguments of the kernels, for a bias [vocabulary] of the dtype of the logits, or None."""
    return logits, _no_bias(logits.dtype, logits.device) if bias is None else bias.view(1, -1)


@functools.cache
def _no_bias(dtype: Any, device: Any) -> Any:
    import torch

    return torch.zeros((1, 1), dtype=dtype, device=device)


_DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("vocabulary", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("biased", "flag"),
    Dimension("capped", "flag"),
)
_FORWARD_RESULTS = ("log_probs", "entropy", "lse")
_SLOPES = ("dlog_probs", "dentropy", "dlse")
_SCALARS = (
    ScalarParameter("ignore_index", "int32"), ScalarParameter("scale", "float32"), ScalarParameter("softcap", "float32")
)  # fmt: skip


def _bias(problem: Problem) -> ArrayParameter:
    """The bias [1, vocabulary]; [1, 1], unread and of a stride that nothing divides, where there is none."""
    extent = problem["vocabulary"] if problem["biased"] else None
    return ArrayParameter("bias", problem["dtype"], 2, extent, aligned=problem["biased"])


def _constants(problem: Problem, config: Config) -> tuple[tuple[str, Any], ...]:
    return (
        ("persistent", config["schedule"] == "persistent"),
        ("biased", problem["biased"]),
        ("capped", problem["capped"]),
    )


def _implement_forward(problem: Problem, config: Config) -> Implementation:
    return Implementation(
        function=log_probs_forward,
        parameters=(
            matrix("logits", problem), _bias(problem), rows_of("ids", "int32"), *_SCALARS,
            *(rows_of(name, role="output") for name in _FORWARD_RESULTS),
        ),
        constants=(
            ("columns", problem["vocabulary"]), ("tile_n", config["tile_n"]), ("unroll", config["unroll"]),
            *_constants(problem, config), ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        hints=hints(config),
    )  # fmt: skip


def _implement_backward(problem: Problem, config: Config) -> Implementation:
    vocabulary, tile_n = problem["vocabulary"], config["tile_n"]
    return Implementation(
        function=log_probs_backward,
        parameters=(
            matrix("logits", problem), _bias(problem), rows_of("ids", "int32"), rows_of("lse"), rows_of("entropy"),
            *map(rows_of, _SLOPES), *_SCALARS, matrix("dlogits", problem, "output"),
        ),
        constants=(("columns", vocabulary), ("tile_n", tile_n), *_constants(problem, config)),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"] * cdiv(vocabulary, tile_n), config, sm_count),
        hints=hints(config),
    )  # fmt: skip


def _forward_axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        **step_axes(problem["vocabulary"]),
        "occupancy": [2, 4, 8],
        "tma": [True, False],
    }


def backward_axes(problem: Problem) -> dict[str, list[Value]]:
    """The axes of a gradient that is made of each tile of the logits alone; :data:`TILES_FULL` constrains them."""
    width = power_of_two(problem["vocabulary"])
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({min(width, n) for n in (1024, 2048, 4096)}),
        "num_worker_warps": [0, 8],
        "occupancy": [4, 8],
    }


STEPS_FIT = Constraint(
    "the registers cannot hold a step's elements, maxima and two sums at this occupancy",
    lambda problem, config, target: (
        config["tile_n"] * (config["unroll"] + 3) * config["occupancy"] <= 0.8 * target.registers
    ),
)
TILES_FULL = Constraint(
    "a tile gives each thread 8 to 32 elements, fewer only where a row is shorter than that",
    lambda problem, config, target: (
        8 <= config["tile_n"] // (32 * (config["num_worker_warps"] or 4)) <= 32
        or config["tile_n"] == power_of_two(problem["vocabulary"]) < 4096
    ),
)


def _forward_config(schedule: str, tile_n: int, unroll: int) -> Config:
    return Config(schedule=schedule, tile_n=tile_n, unroll=unroll, num_worker_warps=0, occupancy=4, tma=False)


def _forward_default(problem: Problem) -> Config:
    """Long rows by resident blocks, which end together; short ones by as many blocks as there are rows."""
    shapes = step_shapes(problem["vocabulary"], 0)
    return _forward_config("block" if len(shapes) < 4 else "persistent", *shapes[0])


def backward_config(problem: Problem, schedule: str, widest: int, occupancy: int) -> Config:
    """A config of such a gradient."""
    tile_n = min(widest, power_of_two(problem["vocabulary"]))
    return Config(schedule=schedule, tile_n=tile_n, num_worker_warps=0, occupancy=occupancy)


def drawn_ids(problem: Problem, generator: Any, device: str) -> Any:
    """An id for each row, some of them ``ignore_index``; int32."""
    import torch

    ids = torch.randint(problem["vocabulary"], (problem["rows"],), generator=generator, device=device)
    ids[3::7] = -100
    return ids.to(torch.int32)


def _drawn(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, vocabulary = problem["rows"], problem["vocabulary"]
    dtype = getattr(torch, problem["dtype"])
    bias = torch.zeros((1, 1), device=device, dtype=dtype)
    logits = 2 * torch.randn((rows, vocabulary), generator=generator, device=device)
    if problem["biased"]:
        bias = torch.randn((1, vocabulary), generator=generator, device=device).to(dtype)
    return {
        "logits": logits.to(dtype), "bias": bias, "ids": drawn_ids(problem, generator, device), "ignore_index": -100,
        "scale": 0.75, "softcap": 5.0,
    }  # fmt: skip


_PART_ROWS = 2048


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    inputs = _drawn(problem, generator, device)
    options = {name: inputs[name] for name in ("bias", "ignore_index", "scale", "softcap")}
    options |= {"biased": problem["biased"], "capped": problem["capped"]}
    # In parts, since in float64 all logits at once may not fit.
    parts = zip(inputs["logits"].split(_PART_ROWS), inputs["ids"].split(_PART_ROWS), strict=True)
    known = [reference_forward(logits, ids=ids, **options) for logits, ids in parts]
    saved = {name: torch.cat([part[name] for part in known]).float() for name in ("lse", "entropy")}
    slopes = {name: torch.randn((problem["rows"],), generator=generator, device=device) for name in _SLOPES}
    slopes["dentropy"][4::11] = 0
    for slope in slopes.values():
        slope[5::11] = 0
    return inputs | saved | slopes


def _scores(logits: Any, bias: Any, scale: float, softcap: float, biased: bool, capped: bool) -> Any:
    """z in float64."""
    x = logits.double() + bias.double() if biased else logits.double()
    return (softcap * (x / softcap).tanh() if capped else x) * scale


def row_results(z: Any, ids: Any, ignore_index: int) -> dict[str, Any]:
    """The results of rows of z, in its dtype; the ids must be in the vocabulary, or ignored."""
    counted = ids != ignore_index
    lse = z.logsumexp(1)
    logs = z - lse[:, None]
    p = logs.exp()
    log_probs = logs.gather(1, ids.long().where(counted, 0)[:, None])[:, 0]
    entropy = -(p * logs.where(p != 0, 0)).sum(1)
    results = {"log_probs": log_probs, "entropy": entropy, "lse": lse}
    return {name: x.where(counted, 0) for name, x in results.items()}


def _has_gradient(ids: Any, ignore_index: int, *slopes: Any) -> Any:
    """Whether a row counts and one of its slopes is not 0."""
    return (ids != ignore_index) & sum(slope != 0 for slope in slopes).bool()


def score_gradient(
    z: Any, ids: Any, lse: Any, entropy: Any, dlog_probs: Any, dentropy: Any, dlse: Any, ignore_index: int
) -> Any:
    """The gradient by z in float64, of the lse and the entropy that were saved."""
    at_id, of_entropy, of_lse = (slope.double() for slope in (dlog_probs, dentropy, dlse))
    counted = _has_gradient(ids, ignore_index, at_id, of_entropy, of_lse)
    share = of_lse - at_id
    finite = share.isfinite() & at_id.isfinite() & of_entropy.isfinite()
    logs = z - lse.double()[:, None]
    p = logs.exp()
    surprise = logs.where(p != 0, 0) + entropy.double()[:, None]
    gradient = p * (share[:, None] - of_entropy[:, None] * surprise)
    gradient.scatter_add_(1, ids.long().where(counted, 0)[:, None], at_id[:, None])
    return gradient.where(finite[:, None], float("nan")).where(counted[:, None], 0)


def reference_forward(
    logits: Any, bias: Any, ids: Any, ignore_index: int, scale: float, softcap: float, biased: bool, capped: bool
) -> dict[str, Any]:
    """The results in float64."""
    return row_results(_scores(logits, bias, scale, softcap, biased, capped), ids, ignore_index)


def reference_backward(
    logits: Any, bias: Any, ids: Any, lse: Any, entropy: Any, dlog_probs: Any, dentropy: Any, dlse: Any,
    ignore_index: int, scale: float, softcap: float, biased: bool, capped: bool,
) -> dict[str, Any]:  # fmt: skip
    """The gradient by the logits in float64, of the lse and the entropy that are given."""
    z = _scores(logits, bias, scale, softcap, biased, capped)
    gradient = score_gradient(z, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index) * scale
    if capped:
        gradient = gradient * (1 - (z / scale / softcap).square())
    return {"dlogits": gradient.where(_has_gradient(ids, ignore_index, dlog_probs, dentropy, dlse)[:, None], 0)}


def _bias_bytes(problem: Problem) -> int:
    return problem["vocabulary"] * ITEM_BYTES[problem["dtype"]] if problem["biased"] else 0


FORWARD = KernelSpec(
    name="log_probs_forward",
    summary="log-probability of one id, entropy, and log of the sum of exponentials of every row of logits",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(_forward_axes, (STEPS_MATCH, STEPS_FIT, TMA_NEEDS_HOPPER)),
    implement=_implement_forward,
    default=lambda problem, target: _forward_default(problem),
    generic=lambda problem: _forward_config("persistent", min(512, power_of_two(problem["vocabulary"])), 1),
    inputs=_drawn,
    outputs=lambda problem, blocks: dict.fromkeys(_FORWARD_RESULTS, ((problem["rows"],), "float32")),
    reference=reference_forward,
    bytes_moved=lambda problem: matrix_bytes(problem) + _bias_bytes(problem) + 16 * problem["rows"],
    flops=lambda problem: 8 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: "float32",
)
BACKWARD = KernelSpec(
    name="log_probs_backward",
    summary="gradient of log-probabilities, entropies and lse by the logits, in place if asked",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(backward_axes, (TILES_FULL,)),
    implement=_implement_backward,
    default=lambda problem, target: backward_config(problem, "block", 4096, 8),
    generic=lambda problem: backward_config(problem, "persistent", 512, 4),
    inputs=_backward_inputs,
    outputs=lambda problem, blocks: {"dlogits": ((problem["rows"], problem["vocabulary"]), problem["dtype"])},
    reference=reference_backward,
    bytes_moved=lambda problem: 2 * matrix_bytes(problem) + _bias_bytes(problem) + 24 * problem["rows"],
    flops=lambda problem: 10 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
)
SPECS = (FORWARD, BACKWARD)
