"""The Kullback-Leibler divergence of probabilities from log-probabilities, like torch's ``kl_div``.

Each element of the target t and of the input x adds ``t * log(t) - t * x``, where ``0 * log(0)`` is 0. With
``log_target`` the target holds logarithms, and each element adds ``exp(t) * (t - x)``. The gradient by x is ``-t`` or
``-exp(t)``, so the backward does not read x. Each direction has two kernels: over rows, which sums each row in float32,
and over elements, without sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import elements, rows
from tilekern.kernels.families.arrays import ROWS
from tilekern.kernels.families.logarithms import log2
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array, KernelSpec, Problem

_LN_2, _LOG2_E = 0.6931471805599453, 1.4426950408889634
_NAN = float("nan")
# The bits of infinity, as an integer: above those of any finite positive number, and below those of all others.
_INFINITY_BITS = 0x7F800000


def _of_probabilities(x, target):
    usual = ct.bitcast(target, ct.uint32) < _INFINITY_BITS
    entropy = ct.where(usual, target * (log2(target) * _LN_2), ct.where(target >= 0.0, target, _NAN))
    return (-target * x + entropy,)


def _of_logs(x, target):
    return (ct.exp2(target * _LOG2_E, flush_to_zero=True) * (target - x),)


@ct.kernel
def kl_div_forward(
    input, target, loss, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, log_target: ConstBool,
):  # fmt: skip
    """input and target [rows, columns], loss [rows]."""
    formula = _of_logs if ct.static_eval(log_target) else _of_probabilities

    def terms(tiles, weights, known):
        return formula(tiles[0], tiles[1])

    def statistics(held, columns):
        return rows.add_up(terms, 1, held, (), False)

    rows.forward(
        statistics, None, (input, target), (), (loss,), (), columns, tile_m, tile_n, chunks, persistent, long, bounded,
        tma,
    )  # fmt: skip


@ct.kernel
def kl_div_elements_forward(
    input, target, loss, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool, log_target: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""
    formula = _of_logs if ct.static_eval(log_target) else _of_probabilities
    elements.each_tile(formula, (input, target), (loss,), columns, tile_m, tile_n, persistent, bounded)


def _slope(dloss, target):
    return (-dloss * target,)


def _slope_of_logs(dloss, target):
    return (-dloss * ct.exp2(target * _LOG2_E, flush_to_zero=True),)


@ct.kernel
def kl_div_backward(
    dloss, target, dinput, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool, log_target: ConstBool,
):  # fmt: skip
    """dloss [rows] or [rows, columns], target and dinput [rows, columns]."""
    formula = _slope_of_logs if ct.static_eval(log_target) else _slope
    elements.each_tile(formula, (dloss, target), (dinput,), columns, tile_m, tile_n, persistent, bounded)


def reference_elements(input: Any, target: Any, log_target: bool) -> dict[str, Any]:
    """Return the formula in float64."""
    import torch

    loss = torch.nn.functional.kl_div(input.double(), target.double(), reduction="none", log_target=log_target)
    return {"loss": loss}


def reference_rows(input: Any, target: Any, log_target: bool) -> dict[str, Any]:
    """Return the sums over rows of :func:`reference_elements`."""
    return {"loss": reference_elements(input, target, log_target)["loss"].sum(-1)}


def reference_backward(dloss: Any, target: Any, log_target: bool) -> dict[str, Any]:
    """Return the gradient of either by the input in float64."""
    probabilities = target.double().exp() if log_target else target.double()
    return {"dinput": -probabilities * (dloss if dloss.dim() == 2 else dloss[:, None]).double()}


_INPUT, _TARGET = Array("input", "dtype", ROWS), Array("target", "dtype", ROWS, nonnegative=True)
_FLAGS = ("log_target",)

FORWARD = rows.spec(
    kl_div_forward,
    "loss = sum(target * (log(target) - input)) of each row",
    (_INPUT, _TARGET, Array("loss", "dtype*float32", ("rows",), "output")),
    reference_rows,
    flags=_FLAGS,
    live=2,
    flops=4,
    cute=False,
)
BACKWARD = elements.spec(
    kl_div_backward,
    "gradient of the sums over rows of kl_div with respect to input",
    (Array("dloss", "float32", ("rows",)), _TARGET, Array("dinput", "dtype", ROWS, "output")),
    reference_backward,
    flags=_FLAGS,
    flops=1,
)
ELEMENTS_FORWARD = elements.spec(
    kl_div_elements_forward,
    "loss = target * (log(target) - input)",
    (_INPUT, _TARGET, Array("loss", "dtype", ROWS, "output")),
    reference_elements,
    flags=_FLAGS,
    flops=4,
)
ELEMENTS_BACKWARD = replace(
    elements.spec(
        kl_div_backward,
        "gradient of kl_div, element by element, with respect to input",
        (Array("dloss", "dtype", ROWS), _TARGET, Array("dinput", "dtype", ROWS, "output")),
        reference_backward,
        flags=_FLAGS,
        flops=1,
    ),
    name="kl_div_elements_backward",
)


def _on_logs(spec: KernelSpec) -> KernelSpec:
    """Check and time a spec on logarithms of probabilities if the target holds them.

    The exponential of a positive number might not fit float32.
    """

    def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
        given = spec.inputs(problem, generator, device)
        return given | {"target": -given["target"]} if problem["log_target"] else given

    return replace(spec, inputs=inputs)


SPECS = tuple(map(_on_logs, (FORWARD, BACKWARD, ELEMENTS_FORWARD, ELEMENTS_BACKWARD)))
