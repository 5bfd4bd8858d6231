"""The rows of each token's experts added up: ``y[t] = sum_k weights[t, k] * (x[ranks[t, k]] + bias[expert])``.

In float32, in the order of k, so in the same bits in every run, and rounded once. A slot of no expert adds nothing,
whatever its row holds. Without weights it is the gradient of the copies that each of a token's experts got.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.route import routed
from tilekern.kernels.experts.rows import EXPERTS, SPACE, bias_of, constants, default, generic
from tilekern.kernels.grouped.routing import drawn_experts
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, hints, load
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
)

# The rows of so many experts are all asked for before the first one is used.
_UNROLLED = 8


def _row(x, ranks, experts, weights, bias, total, token, k, c, shape, bounded, biased, weighted):
    """The share of the k-th expert in tile ``c`` of a token."""
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


def _implement(problem: Problem, config: Config) -> Implementation:
    dtype, columns, choices = problem["dtype"], problem["columns"], problem["choices"]
    return Implementation(
        function=experts_combine,
        parameters=(
            ArrayParameter("x", dtype, 2, columns),
            # Read one by one, so their rows may begin anywhere.
            ArrayParameter("ranks", "int32", 2, choices, aligned=False),
            ArrayParameter("experts", "int32", 1),
            ArrayParameter("weights", problem["weight_dtype"], 2, aligned=False),
            bias_of(dtype, columns, problem["biased"]),
            ScalarParameter("total", "int32"),
            ArrayParameter("y", dtype, 2, columns, "output"),
        ),
        constants=(
            ("choices", choices),
            *constants(problem, config),
            ("biased", problem["biased"]),
            ("weighted", problem["weighted"]),
            ("unrolled", choices <= _UNROLLED and config["tile_n"] * choices <= 8 * 1024),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["tokens"], config, sm_count),
        hints=hints(config),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    tokens, choices, columns = problem["tokens"], problem["choices"], problem["columns"]
    rows = tokens * choices
    _, _, ranks, chosen = routed(drawn_experts(rows, EXPERTS, generator, device), EXPERTS)
    bias = (EXPERTS, columns) if problem["biased"] else (1, 1)
    weights = (tokens, choices) if problem["weighted"] else (1, 1)
    x, bias, weights = (
        torch.randn(size, generator=generator, device=device).to(getattr(torch, problem[dtype]))
        for size, dtype in (((rows, columns), "dtype"), (bias, "dtype"), (weights, "weight_dtype"))
    )
    ranks = ranks.view(tokens, choices)
    return {"x": x, "ranks": ranks, "experts": chosen, "weights": weights, "bias": bias, "total": EXPERTS}


def reference(
    x: Any, ranks: Any, experts: Any, weights: Any, bias: Any, total: int, biased: bool, weighted: bool
) -> dict[str, Any]:
    """The sums of each token."""
    rows, chosen = x.double()[ranks.long()], experts.long()[ranks.long()]
    if biased:
        rows = rows + bias.double()[chosen.clamp(max=total - 1)]
    if weighted:
        rows = rows * weights.double()[..., None]
    return {"y": rows.where((chosen < total)[..., None], 0.0).sum(1)}


def _bytes(problem: Problem) -> int:
    tokens, choices = problem["tokens"], problem["choices"]
    each = ITEM_BYTES[problem["dtype"]] * problem["columns"] * (choices + 1)
    return tokens * (each + choices * (8 + ITEM_BYTES[problem["weight_dtype"]] * problem["weighted"]))


SPEC = KernelSpec(
    name="experts_combine",
    summary="the rows of each token's experts, weighted and added up in a fixed order",
    module=__name__,
    dimensions=(
        Dimension("tokens", "bucketed"),
        Dimension("choices", "exact"),
        Dimension("columns", "exact"),
        Dimension("dtype", "dtype"),
        Dimension("weight_dtype", "dtype"),
        Dimension("biased", "flag"),
        Dimension("weighted", "flag"),
    ),
    space=SPACE,
    implement=_implement,
    default=lambda problem, target: default(problem, 1024),
    generic=generic,
    inputs=_inputs,
    outputs=lambda problem, blocks: {"y": ((problem["tokens"], problem["columns"]), problem["dtype"])},
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: 2 * problem["tokens"] * problem["choices"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (SPEC,)
