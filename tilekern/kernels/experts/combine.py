"""The sum of each token's expert rows: ``y[t] = sum_k weights[t, k] * (x[ranks[t, k]] + bias[expert])``.

It is summed in float32 in the order of k, with the same bits in every run, and rounded once. A slot without an expert
adds nothing, whatever its row holds. Without weights it is the gradient of :mod:`tilekern.kernels.experts.gather`.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.rows import EXPERTS, SPACE, bias_of, constants, default, generic, routing, sizes
from tilekern.kernels.families.arrays import ROWS
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load
from tilekern.spec import Array, Config, Dimension, Problem, ScalarParameter

# Up to this many experts, all rows are loaded before the first one is used.
_UNROLLED = 8


def _row(x, ranks, experts, weights, bias, total, token, k, c, shape, bounded, biased, weighted):
    """Return the share of the k-th expert in tile ``c`` of a token."""
    rank = ct.load(ranks, (token, k), ())
    expert = ct.load(experts, (rank,), ())
    tile = load(x, (rank, c), shape, bounded, 0, False).astype(ct.float32)
    if ct.static_eval(biased):
        of = ct.minimum(expert, bias.shape[0] - 1)
        tile = tile + load(bias, (of, c), shape, bounded, 0, False).astype(ct.float32)
    if ct.static_eval(weighted):
        tile = tile * ct.load(weights, (token, k), ()).astype(ct.float32)
    return ct.where(expert < total, tile, 0.0)


@ct.kernel
def experts_combine(
    x, ranks, experts, weights, bias, total, y, choices: ConstInt, tile_n: ConstInt, bounded: ConstBool,
    biased: ConstBool, weighted: ConstBool, unrolled: ConstBool,
):  # fmt: skip
    """x [rows, columns], ranks and weights [tokens, choices], experts [rows], bias [experts, columns].

    y is [tokens, columns], ``total`` the number of experts.
    """
    shape = (1, tile_n)
    for token in range(ct.bid(0), y.shape[0], ct.num_blocks(0)):
        for c in range(ct.cdiv(y.shape[1], tile_n)):
            added = ct.zeros(shape, ct.float32)
            if ct.static_eval(unrolled):
                tiles = ()
                for k in ct.static_iter(range(choices)):
                    row = _row(x, ranks, experts, weights, bias, total, token, k, c, shape, bounded, biased, weighted)
                    tiles = tiles + (row,)
                for k in ct.static_iter(range(choices)):
                    added = added + tiles[k]
            else:
                for k in range(ranks.shape[1]):
                    row = _row(x, ranks, experts, weights, bias, total, token, k, c, shape, bounded, biased, weighted)
                    added = added + row
            ct.store(y, (token, c), added.astype(y.dtype), check_bounds=bounded, allow_tma=False)


_ARRAYS = (
    Array("x", "dtype", ROWS),
    # Read element by element, so their rows may begin anywhere.
    Array("ranks", "int32", ("tokens", "choices"), aligned=False),
    Array("experts", "int32", ("rows",)),
    Array("weights", "weight_dtype", ("tokens", "choices"), aligned=False, flag="weighted"),
    bias_of(),
    ScalarParameter("total", "int32", EXPERTS),
    Array("y", "dtype", ("tokens", "columns"), "output"),
)


def _constants(problem: Problem, config: Config) -> dict[str, bool]:
    choices = problem["choices"]
    unrolled = choices <= _UNROLLED and config["tile_n"] * choices <= 8 * 1024
    return constants(problem, config) | {"unrolled": unrolled}


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    known = routing(problem["rows"], generator, device)
    return {"ranks": known["ranks"].view(problem["tokens"], problem["choices"]), "experts": known["experts"]}


def reference(
    x: Any, ranks: Any, experts: Any, weights: Any, bias: Any, total: int, biased: bool, weighted: bool
) -> dict[str, Any]:
    """Compute the sums of each token."""
    rows, chosen = x.double()[ranks.long()], experts.long()[ranks.long()]
    if biased:
        rows = rows + bias.double()[chosen.clamp(max=total - 1)]
    if weighted:
        rows = rows * weights.double()[..., None]
    return {"y": rows.where((chosen < total)[..., None], 0.0).sum(1)}


SPEC = spec(
    "experts_combine",
    "the rows of each token's experts, weighted and added up in a fixed order",
    (
        Dimension("tokens", "bucketed"),
        *(Dimension(name, "exact") for name in ("choices", "columns")),
        *(Dimension(name, "dtype") for name in ("dtype", "weight_dtype")),
        *(Dimension(name, "flag") for name in ("biased", "weighted")),
    ),
    lambda problem: _ARRAYS,
    reference,
    function=lambda problem, config: experts_combine,
    sizes=lambda problem: sizes(problem) | {"rows": problem["tokens"] * problem["choices"]},
    constants=_constants,
    grid=lambda sizes, config, sm_count: grid_of(sizes["tokens"], config, sm_count),
    space=SPACE,
    default=lambda problem, target: default(problem, 1024),
    generic=generic,
    given=_given,
    flops=lambda problem: 2 * problem["tokens"] * problem["choices"] * problem["columns"],
)

SPECS = (SPEC,)
