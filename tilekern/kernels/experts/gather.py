"""Copy rows of tokens in the order of experts: ``y[r] = x[order[r] // choices]``.

It brings the gradient of a layer of experts to its rows. If the down product has a bias, ``shares`` is the part
``sum_c x[token, c] * bias[expert, c]`` of the gradient of a row's routing weight, in float32.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.rows import SPACE, bias_of, constants, default, expert_of, generic, routing, sizes
from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import MATRIX, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load
from tilekern.spec import ITEM_BYTES, Array, Dimension, Problem, ScalarParameter, cdiv


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


def _sizes(problem: Problem) -> dict[str, int]:
    """Return sizes of inputs with two choices for each token, if there are two rows."""
    choices = min(2, problem["rows"])
    return sizes(problem) | {"choices": choices, "tokens": cdiv(problem["rows"], choices)}


def _arrays(problem: Problem) -> Arrays:
    return (
        Array("x", "dtype", ("tokens", "columns")),
        Array("order", "int32", ("rows",)),
        Array("experts", "int32", ("rows",)),
        bias_of(),
        ScalarParameter("choices", "int32", problem["choices"]),
        Array("y", "dtype", ROWS, "output"),
        # Not written without a bias.
        Array("shares", "float32", ("rows",), "output" if problem["biased"] else "input", flag="biased"),
    )


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    known = routing(problem["rows"], generator, device)
    return {name: known[name] for name in ("order", "experts")}


def reference(
    x: Any, order: Any, experts: Any, bias: Any, choices: int, biased: bool, shares: Any = None
) -> dict[str, Any]:
    """Copy the rows; multiply them by the bias if there is one."""
    y = x.double()[order.long() // choices]
    if not biased:
        return {"y": y}
    return {"y": y, "shares": (y * bias.double()[experts.long().clamp(max=len(bias) - 1)]).sum(1)}


def _bytes(problem: Problem) -> int:
    """Return the bytes of each row's token and of its expert's bias, which may have left the cache."""
    each = ITEM_BYTES[problem["dtype"]] * problem["columns"] * (2 + problem["biased"])
    return problem["rows"] * (each + (12 if problem["biased"] else 4))


SPEC = spec(
    "gather_rows",
    "rows of tokens copied in the order of experts",
    (*MATRIX, Dimension("biased", "flag")),
    _arrays,
    reference,
    function=lambda problem, config: gather_rows,
    sizes=_sizes,
    constants=constants,
    grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
    space=SPACE,
    default=lambda problem, target: default(problem, 2048),
    generic=generic,
    given=_given,
    bytes_moved=_bytes,
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
)

SPECS = (SPEC,)
