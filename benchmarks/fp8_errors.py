"""Measure what 8-bit floats change in each linear layer of a model: its operands, its result and both gradients.

The operands are those of a training step in bfloat16: a layer's input x, its weight, and dy, the gradient of its
result. The products of these numbers in float64 are the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.providers import FP8

# The same products by torch in the operands' dtype, and 8-bit ones whose turned matrices have a scale for each column.
TORCH, COLUMNS = "torch", "scales-by-column"
Figures = Mapping[str, Mapping[str, float]]


class Operands(NamedTuple):
    """The operands of a linear layer's three products: x [tokens, in], weight [out, in], dy [tokens, out]."""

    x: Any
    weight: Any
    dy: Any


def operands_of(model: Any, ids: Any) -> Iterator[tuple[str, Operands]]:
    """Take a training step's forward and backward; yield the operands of each linear layer for 8-bit floats.

    Args:
        model: a model in training mode, whose layers are not converted. Its gradients are dropped.
        ids: tokens [batch, sequence], which are the labels too.
    """
    from tilekern.fp8 import convert, restore

    names = convert(model)
    restore(model)
    seen: dict[str, dict[str, Any]] = {name: {} for name in names}

    def kept(name: str) -> Any:
        def hook(_: Any, given: Any, result: Any) -> None:
            seen[name]["x"] = given[0].detach().flatten(0, -2)
            result.register_hook(lambda dy: seen[name].update(dy=dy.detach().flatten(0, -2)))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(kept(name)) for name in names]
    model(input_ids=ids, labels=ids).loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    for name in names:
        found = seen.pop(name)
        yield name, Operands(found["x"], model.get_submodule(name).weight.detach(), found["dy"])


class Eight(NamedTuple):
    """A layer's operands and products by 8-bit floats: e4m3 numbers and scales, as they are and turned, by name."""

    rows: Mapping[str, Any]
    turned: Mapping[str, Any]
    products: Mapping[str, Any]


def eight(operands: Operands) -> Eight:
    """Compute a layer's three products as the op does."""
    from tilekern.ops.fp8_linear import multiplied, rounded, turned

    dtype = operands.x.dtype
    rows = {name: rounded(each.contiguous()) for name, each in operands._asdict().items()}
    across = {
        "x": turned(*rows["x"], dtype),
        "weight": turned(operands.weight, rows["weight"][1], dtype),
        "dy": turned(*rows["dy"], dtype),
    }
    return Eight(rows, across, {"y": multiplied(rows["x"], rows["weight"], dtype), **_gradients(rows, across, dtype)})


def _gradients(rows: Mapping[str, Any], turned: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    from tilekern.ops.fp8_linear import multiplied

    return {
        "dx": multiplied(rows["dy"], turned["weight"], dtype),
        "dweight": multiplied(turned["dy"], turned["x"], dtype, over_rows=True),
    }


def errors_of(operands: Operands) -> Figures:
    """Return the figures of a layer by provider.

    ``NAME_error`` is the norm of the difference over the norm: of an operand (``x``, ``weight``, ``dy``) after it is
    rounded, and of a product (``y``, ``dx``, ``dweight``). ``NAME_flushed`` is the share of the numbers that are not
    zero and become zero in the turned matrix. ``dweight_cosine`` is that of the weight's gradient to float64's.
    """
    from tilekern.kernels.fp8.scales import scaled_rows

    named, ours = operands._asdict(), eight(operands)
    exact = _products(*(each.double() for each in operands))
    by_column = {name: scaled_rows(each.t().contiguous()) for name, each in named.items()}
    found = {
        FP8: ours.products,
        TORCH: _products(*operands),
        COLUMNS: _gradients(ours.rows, by_column, operands.x.dtype),
    }
    figures = {
        who: {f"{name}_error": relative(c, exact[name]) for name, c in products.items()}
        for who, products in found.items()
    }
    for name, each in named.items():
        numbers, scale = ours.rows[name]
        figures[FP8][f"{name}_error"] = relative(numbers.double() * scale[:, None], each)
        figures[FP8][f"{name}_flushed"] = flushed(each, ours.turned[name][0])
    figures[FP8]["dweight_cosine"] = cosine(ours.products["dweight"], exact["dweight"])
    return figures


def _products(x: Any, weight: Any, dy: Any) -> dict[str, Any]:
    return {"y": x @ weight.t(), "dx": dy @ weight, "dweight": dy.t() @ x}


def relative(found: Any, exact: Any) -> float:
    """Return the norm of the difference over the norm of ``exact``; 0 if both are zero."""
    wrong, norm = (float(each.norm()) for each in (found.double() - exact.double(), exact.double()))
    return wrong / norm if norm else math.inf if wrong else 0.0


def cosine(one: Any, other: Any) -> float:
    """Return the cosine of the angle between two tensors; 1 if both are zero."""
    one, other = one.double().flatten(), other.double().flatten()
    norms = float(one.norm() * other.norm())
    return float(one @ other) / norms if norms else float(float(one.norm()) == float(other.norm()))


def flushed(before: Any, turned: Any) -> float:
    """Return the share of the numbers of a matrix that are not zero, and are zero in the turned one."""
    is_there = before != 0
    lost = is_there & (turned.float().t() == 0)
    return float(lost.sum()) / max(1, int(is_there.sum()))
