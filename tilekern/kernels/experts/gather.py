"""Rows of tokens copied in the order of experts: ``y[r] = x[order[r] // choices]``.

The gradient of a layer of experts comes to its rows in this way. Where the down product has a bias, the routing weight
of a row gets ``sum_c x[token, c] * bias[expert, c]`` as a part of its gradient: ``shares``, in float32.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.route import routed
from tilekern.kernels.experts.rows import EXPERTS, SPACE, bias_of, constants, default, expert_of, generic
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


@ct.kernel
def gather_rows(x, order, experts, bias, choices, y, shares, tile_n: ConstInt, bounded: ConstBool, biased: ConstBool):
    """x [tokens, columns], order and experts [rows], bias [experts, columns], y [rows, columns], shares [rows]."""
    for row in range(ct.bid(0), order.shape[0], ct.num_blocks(0)):
        token = ct.load(order, (row,), ()) // choices
        share = ct.zeros((1, tile_n), ct.float32)
        if ct.static_eval(biased):
            expert = expert_of(experts, row, bias)
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            tile = load(x, (token, c), (1, tile_n), bounded, 0, False)
            ct.store(y, (row, c), tile, check_bounds=bounded, allow_tma=False)
            if ct.static_eval(biased):
                added = load(bias, (expert, c), (1, tile_n), bounded, 0, False)
                share = share + tile.astype(ct.float32) * added.astype(ct.float32)
        if ct.static_eval(biased):
            ct.store(shares, (row,), ct.sum(share, axis=1), allow_tma=False)


def _implement(problem: Problem, config: Config) -> Implementation:
    dtype, columns = problem["dtype"], problem["columns"]
    return Implementation(
        function=gather_rows,
        parameters=(
            ArrayParameter("x", dtype, 2, columns),
            ArrayParameter("order", "int32", 1),
            ArrayParameter("experts", "int32", 1),
            bias_of(dtype, columns, problem["biased"]),
            ScalarParameter("choices", "int32"),
            ArrayParameter("y", dtype, 2, columns, "output"),
            # Not written without a bias.
            ArrayParameter("shares", "float32", 1, role="output" if problem["biased"] else "input"),
        ),
        constants=(*constants(problem, config), ("biased", problem["biased"])),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        hints=hints(config),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, columns, dtype = problem["rows"], problem["columns"], getattr(torch, problem["dtype"])
    _, order, _, chosen = routed(drawn_experts(rows, EXPERTS, generator, device), EXPERTS)
    choices = min(2, rows)
    shape = (-(-rows // choices), columns)
    bias = (EXPERTS, columns) if problem["biased"] else (1, 1)
    x, bias = (torch.randn(size, generator=generator, device=device).to(dtype) for size in (shape, bias))
    given = {"x": x, "order": order, "experts": chosen, "bias": bias, "choices": choices}
    return given if problem["biased"] else given | {"shares": torch.zeros(1, device=device)}


def reference(
    x: Any, order: Any, experts: Any, bias: Any, choices: int, biased: bool, shares: Any = None
) -> dict[str, Any]:
    """The rows, and where there is a bias their products with it."""
    y = x.double()[order.long() // choices]
    if not biased:
        return {"y": y}
    return {"y": y, "shares": (y * bias.double()[experts.long().clamp(max=len(bias) - 1)]).sum(1)}


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    rows, columns = problem["rows"], problem["columns"]
    shares = {"shares": ((rows,), "float32")} if problem["biased"] else {}
    return {"y": ((rows, columns), problem["dtype"]), **shares}


def _bytes(problem: Problem) -> int:
    each = ITEM_BYTES[problem["dtype"]] * problem["columns"] * (2 + problem["biased"])
    return problem["rows"] * (each + (12 if problem["biased"] else 4))


SPEC = KernelSpec(
    name="gather_rows",
    summary="rows of tokens copied in the order of experts",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("columns", "exact"),
        Dimension("dtype", "dtype"),
        Dimension("biased", "flag"),
    ),
    space=SPACE,
    implement=_implement,
    default=lambda problem, target: default(problem, 2048),
    generic=generic,
    inputs=_inputs,
    outputs=_outputs,
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (SPEC,)
