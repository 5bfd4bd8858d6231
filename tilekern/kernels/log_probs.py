"""Log-probabilities of one id a row, entropies of rows of logits, and their gradient, which may overwrite the logits.

With x a row of logits, b an optional bias, cap an optional ``softcap * tanh(x / softcap)``, s = 1 / temperature:
``z = cap(x + b) * s``, ``lse = log(sum(exp(z)))`` and ``p = exp(z - lse)``. Of the id y a row has
``log_prob = z_y - lse`` and ``entropy = lse - sum(p * z)``. The gradient is
``dz_c = [c = y] dlog_prob + p_c * (dlse - dlog_prob - dentropy * (z_c - lse + entropy))``.

The forward reads a row once, like cross entropy (:mod:`tilekern.kernels.cross_entropy.tiles`). The backward reads a
row's lse and entropy, so that each tile of the gradient needs only that tile of the logits.

Rows with the id ``ignore_index`` give 0. The backward also gives 0 for rows whose slopes are all 0, whatever they hold.
Any other id outside the vocabulary gives a log-probability and an lse of NaN, and so NaN in the backward. A slope that
is not finite gives NaN to its row: infinity times ``z_c - lse + entropy`` would have the sign of a rounding error if
that is near 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy import tiles as shared
from tilekern.kernels.families import vocabulary as family
from tilekern.kernels.families.placeholders import placeholder
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, each_step
from tilekern.spec import Array, Config, Constraint, Problem, ScalarParameter, Space, Value
from tilekern.spec.targets import Target

# The least difference: its exponential is 0 in float32 like those of smaller ones, and products with it are not NaN.
LEAST = -1000.0


def _load_scores(logits, bias, row, c, bounded, form):
    """Load tile ``c`` of a row's z, minus infinity beyond the edge, and return it with its derivative by the logit."""
    columns, tile_n, scale, softcap, biased, capped, tma = form
    x = shared.load_logits(logits, row, c, tile_n, bounded, tma)
    slope = ct.full((1, tile_n), 1.0, ct.float32)
    if biased:
        x = x + shared.load_weights(bias, c, tile_n, bounded).astype(ct.float32)
    if capped:
        x, slope = shared.capped_and_slope(x, softcap)
        if bounded:
            x = ct.where(shared.columns_of(c, tile_n) < columns, x, -shared.INFINITY)
    return x * scale, slope * scale


def _scan_step(sums, first, count, partial, logits, bias, row, form):
    """Add ``count`` tiles, the last of them partial or not, to each lane's running maximum and sums."""
    mass, peak, pull = sums
    tiles = ()
    for i in ct.static_iter(range(count)):
        z, _ = _load_scores(logits, bias, row, first + i, ct.static_eval(partial and i == count - 1), form)
        tiles = tiles + (z,)
    top = peak
    for i in ct.static_iter(range(count)):
        top = ct.maximum(top, tiles[i])
    mass, pull = _moved(mass, pull, peak, top)
    for i in ct.static_iter(range(count)):
        left = tiles[i] - top
        share = shared.exponential(left)
        mass = mass + share
        pull = pull + share * ct.maximum(left, LEAST)
    return mass, top, pull


def _moved(mass, pull, peak, top):
    """Rescale sums of ``exp(z - peak)``, and of that times ``z - peak``, to a maximum ``top`` instead of ``peak``."""
    left = ct.maximum(peak - top, LEAST)
    fading = shared.exponential(left)
    return mass * fading, fading * (pull + left * mass)


def _scan_row(logits, bias, row, unroll, form):
    """Read a row once; return the maximum of z, and the sums of ``e = exp(z - maximum)`` and ``e * (z - maximum)``.

    All three have the shape (1, 1). Each lane of a tile keeps its own maximum.
    """
    columns, tile_n, _, _, _, _, _ = form
    zeros = ct.zeros((1, tile_n), ct.float32)
    none = (zeros, ct.full((1, tile_n), shared.LOWEST, ct.float32), zeros)
    whole = ct.static_eval(columns // (tile_n * unroll))
    mass, peak, pull = family.each_part(_scan_step, none, whole, columns, tile_n, unroll, (logits, bias, row, form))
    top = ct.max(peak, axis=1, keepdims=True)
    mass, pull = _moved(mass, pull, peak, top)
    return top, ct.sum(mass, axis=1, keepdims=True), ct.sum(pull, axis=1, keepdims=True)


def _score_of(logits, bias, row, label, form):
    """Return z of the row's id, (1, 1); NaN if the id is not in the vocabulary."""
    _, _, scale, softcap, biased, capped, _ = form
    x = shared.target_logit(logits, row, label, softcap, False)
    if biased:
        place = (ct.zeros((1, 1), ct.int32), ct.full((1, 1), label, ct.int32))
        x = x + ct.gather(bias, place, padding_value=shared.NAN).astype(ct.float32)
    if capped:
        x, _ = shared.capped_and_slope(x, softcap)
    return x * scale


def _forward_row(row, logits, bias, ids, ignore_index, log_probs, entropy, lse, unroll, form):
    label = ct.load(ids, (row,), ())
    if label == ignore_index:
        for result in ct.static_iter((log_probs, entropy, lse)):
            shared.store_row(result, row, ct.zeros((1, 1), ct.float32))
    else:
        at_id = _score_of(logits, bias, row, label, form)
        top, total, pull = _scan_row(logits, bias, row, unroll, form)
        log_total = ct.log2(total) * shared.LN_2
        shared.store_row(log_probs, row, (at_id - top) - log_total)
        shared.store_row(entropy, row, log_total - pull / total)
        shared.store_row(lse, row, ct.where((label < 0) | (label >= form[0]), shared.NAN, top + log_total))


@ct.kernel
def log_probs_forward(
    logits, bias, ids, ignore_index, scale, softcap, log_probs, entropy, lse, columns: ConstInt, tile_n: ConstInt,
    unroll: ConstInt, persistent: ConstBool, biased: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; logits [rows, columns], bias [1, columns].

    ids and the results [rows].
    """
    form = (columns, tile_n, scale, softcap, biased, capped, tma)
    arguments = (logits, bias, ids, ignore_index, log_probs, entropy, lse, unroll, form)
    each_step(_forward_row, logits.shape[0], persistent, arguments)


def _backward_tile(row, c, bounded, logits, bias, ids, saved, slopes, ignore_index, dlogits, form):
    label = ct.load(ids, (row,), ())
    at_id = ct.load(slopes[0], (row,), ())
    of_entropy, of_lse = ct.load(slopes[1], (row,), ()), ct.load(slopes[2], (row,), ())
    tile_n = ct.static_eval(form[1])
    if (label == ignore_index) | ((at_id == 0.0) & (of_entropy == 0.0) & (of_lse == 0.0)):
        shared.store_zeros(dlogits, row, c, tile_n, bounded)
    else:
        share = of_lse - at_id
        finite = (
            (ct.abs(share) < shared.INFINITY)
            & (ct.abs(at_id) < shared.INFINITY)
            & (ct.abs(of_entropy) < shared.INFINITY)
        )
        shift = ct.where(finite, family.load_number(saved[0], row), shared.NAN)
        z, slope = _load_scores(logits, bias, row, c, bounded, form)
        left = z - shift
        surprise = ct.maximum(left, LEAST) + family.load_number(saved[1], row)
        gradient = shared.exponential(left) * (share - of_entropy * surprise)
        gradient = ct.where(shared.columns_of(c, tile_n) == label, gradient + at_id, gradient)
        ct.store(
            dlogits, (row, c), (gradient * slope).astype(dlogits.dtype), check_bounds=bounded, allow_tma=False
        )  # fmt: skip


@ct.kernel
def log_probs_backward(
    logits, bias, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index, scale, softcap, dlogits,
    columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, biased: ConstBool, capped: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; dlogits may be the memory of logits, both [rows, columns].

    bias [1, columns], ids, lse, entropy and their slopes [rows].
    """
    form = (columns, tile_n, scale, softcap, biased, capped, False)
    slopes = (dlog_probs, dentropy, dlse)
    arguments = (logits, bias, ids, (lse, entropy), slopes, ignore_index, dlogits, form)
    family.each_tile(_backward_tile, logits.shape[0], columns, tile_n, persistent, arguments)


@dataclass(frozen=True)
class Options:
    """The parameters besides logits, bias and ids."""

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float | None = None

    @property
    def scalars(self) -> tuple[int, float, float]:
        """Return the arguments from ``ignore_index`` to ``softcap``."""
        return self.ignore_index, 1.0 / self.temperature, float(self.softcap or 1.0)

    def flags(self, bias: Any) -> tuple[bool, bool]:
        """Return the flags of the specs, biased and capped, for a bias or None."""
        return bias is not None, self.softcap is not None


def before_ids(logits: Any, bias: Any) -> tuple[Any, Any]:
    """Return the first arguments of the kernels, for a bias [vocabulary] of the dtype of the logits, or None."""
    return logits, placeholder(2, logits.dtype, logits.device) if bias is None else bias.view(1, -1)


_FLAGS = ("biased", "capped")
_RESULTS, _SLOPES = ("log_probs", "entropy", "lse"), ("dlog_probs", "dentropy", "dlse")
_READ = (
    Array("logits", "dtype", family.LOGITS),
    Array("bias", "dtype", family.COLUMNS, flag="biased"),
    Array("ids", "int32", family.ROWS),
)
_SCALARS = (
    ScalarParameter("ignore_index", "int32"), ScalarParameter("scale", "float32"), ScalarParameter("softcap", "float32")
)  # fmt: skip


def _forward_axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        **family.step_axes(problem["vocabulary"]),
        "occupancy": [2, 4, 8],
        "tma": [True, False],
    }


STEPS_FIT = Constraint(
    "the registers cannot hold a step's elements, maxima and two sums at this occupancy",
    lambda problem, config, target: (
        config["tile_n"] * (config["unroll"] + 3) * config["occupancy"] <= 0.8 * target.registers
    ),
)


def _forward_default(problem: Problem, target: Target) -> Config:
    """Return resident blocks for long rows, which end together; a block a row for short ones."""
    shapes = family.step_shapes(problem["vocabulary"], 0)
    return family.step_config("block" if len(shapes) < 4 else "persistent", *shapes[0])


def drawn_ids(problem: Problem, generator: Any, device: str) -> Any:
    """Draw an id for each row, some of them ``ignore_index``; int32."""
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


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    inputs = _drawn(problem, generator, device)
    options = {name: inputs[name] for name in ("bias", "ignore_index", "scale", "softcap")}
    known = functools.partial(reference_forward, **options, **{flag: problem[flag] for flag in _FLAGS})
    saved = family.by_parts(
        lambda logits, ids: known(logits, ids=ids), inputs["logits"], inputs["ids"], names=("lse", "entropy")
    )
    slopes = {name: torch.randn((problem["rows"],), generator=generator, device=device) for name in _SLOPES}
    slopes["dentropy"][4::11] = 0
    for slope in slopes.values():
        slope[5::11] = 0
    return inputs | saved | slopes


def _scores(logits: Any, bias: Any, scale: float, softcap: float, biased: bool, capped: bool) -> Any:
    x = logits.double() + bias.double() if biased else logits.double()
    return (softcap * (x / softcap).tanh() if capped else x) * scale


def row_results(z: Any, ids: Any, ignore_index: int) -> dict[str, Any]:
    """Return the results of rows of z, in its dtype; the ids must be in the vocabulary, or ignored."""
    counted = ids != ignore_index
    lse = z.logsumexp(1)
    logs = z - lse[:, None]
    p = logs.exp()
    log_probs = logs.gather(1, ids.long().where(counted, 0)[:, None])[:, 0]
    entropy = -(p * logs.where(p != 0, 0)).sum(1)
    results = {"log_probs": log_probs, "entropy": entropy, "lse": lse}
    return {name: x.where(counted, 0) for name, x in results.items()}


def _has_gradient(ids: Any, ignore_index: int, *slopes: Any) -> Any:
    """Return whether a row counts and one of its slopes is not 0."""
    return (ids != ignore_index) & sum(slope != 0 for slope in slopes).bool()


def score_gradient(
    z: Any, ids: Any, lse: Any, entropy: Any, dlog_probs: Any, dentropy: Any, dlse: Any, ignore_index: int
) -> Any:
    """Return the gradient by z in float64, for the saved lse and entropy."""
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
    """Return the results in float64."""
    return row_results(_scores(logits, bias, scale, softcap, biased, capped), ids, ignore_index)


def reference_backward(
    logits: Any, bias: Any, ids: Any, lse: Any, entropy: Any, dlog_probs: Any, dentropy: Any, dlse: Any,
    ignore_index: int, scale: float, softcap: float, biased: bool, capped: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the gradient by the logits in float64, for the given lse and entropy."""
    z = _scores(logits, bias, scale, softcap, biased, capped)
    gradient = score_gradient(z, ids, lse, entropy, dlog_probs, dentropy, dlse, ignore_index) * scale
    if capped:
        gradient = gradient * (1 - (z / scale / softcap).square())
    return {"dlogits": gradient.where(_has_gradient(ids, ignore_index, dlog_probs, dentropy, dlse)[:, None], 0)}


FORWARD = family.spec(
    log_probs_forward,
    "log-probability of one id, entropy, and log of the sum of exponentials of every row of logits",
    (*_READ, *_SCALARS, *family.of_rows(*_RESULTS, role="output")),
    reference_forward,
    flags=_FLAGS,
    flops=8,
    space=Space(_forward_axes, (family.STEPS_MATCH, STEPS_FIT, TMA_NEEDS_HOPPER)),
    default=_forward_default,
    generic=family.generic_steps,
    inputs=_drawn,
    exact_as="float32",
)
BACKWARD = family.spec(
    log_probs_backward,
    "gradient of log-probabilities, entropies and lse by the logits, in place if asked",
    (
        *_READ,
        *family.of_rows("lse", "entropy", *_SLOPES),
        *_SCALARS,
        Array("dlogits", "dtype", family.LOGITS, "output"),
    ),
    reference_backward,
    flags=_FLAGS,
    flops=10,
    space=family.SPACE_OF_TILES,
    default=lambda problem, target: family.tile_config(problem, "block", 4096, 8),
    generic=family.generic_tiles,
    inputs=_backward_inputs,
)
SPECS = (FORWARD, BACKWARD)
