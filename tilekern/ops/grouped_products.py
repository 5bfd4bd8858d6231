"""The products of a layer of experts, whose rows are sorted by expert: the one place that says what computes them.

Today that is torch's grouped product (``torch.nn.functional.grouped_mm``, before 2.10 ``torch._grouped_mm``), which
waits for nothing on a GPU in bfloat16. It refuses tensors whose rows do not begin at multiples of 16 bytes, float64,
and the CPU of older releases: those go expert by expert through torch's ordinary product, which reads the offsets on
the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``y[r] = x[r] @ weight[e].T`` for each row r and its expert e; differentiable.

    Args:
        x: [rows, in_features], sorted by expert.
        weight: [experts, out_features, in_features] of x's dtype, or such a view of [experts, in_features,
            out_features].
        offsets: int32 [experts], the end of each expert's rows.

    Returns:
        [rows, out_features]; rows behind the last offset are not written.
    """
    if x.is_meta or not x.shape[0]:
        # Of the right shape, and with gradients of zeros.
        return x @ weight[0].t()
    product = _product(x, weight)
    if product is not None:
        return product(x, weight.transpose(1, 2), offs=offsets)
    with _without_autocast(x):
        return _joined([piece @ w.t() for piece, w in zip(_pieces(x, offsets), weight, strict=True)], x)


def grouped_outer(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``dweight[e] = dy_e.T @ x_e`` over the rows of each expert, zeros for one without rows: the weight's gradient.

    Args:
        dy: [rows, out_features], sorted by expert.
        x: [rows, in_features] of dy's dtype.
        offsets: int32 [experts], the end of each expert's rows.

    Returns:
        [experts, out_features, in_features], contiguous.
    """
    if dy.is_meta or not x.shape[0]:
        return dy.new_zeros(len(offsets), dy.shape[1], x.shape[1])
    product = _product(dy, x)
    if product is not None:
        return product(dy.t(), x, offs=offsets)
    pieces = zip(_pieces(dy, offsets), _pieces(x, offsets), strict=True)
    with _without_autocast(x):
        return torch.stack([slope.t() @ rows for slope, rows in pieces])


def _product(a: torch.Tensor, b: torch.Tensor) -> Callable[..., Any] | None:
    """torch's grouped product, where it takes tensors like these."""
    if a.dtype not in (torch.bfloat16, torch.float16, torch.float32) or a.dtype != b.dtype:
        return None
    if torch.compiler.is_compiling() and a.dtype != torch.bfloat16:
        return None
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None or not (_begins_well(a) and _begins_well(b)):
        return None
    if a.is_cuda:
        return product if torch.cuda.get_device_capability(a.device) >= (8, 0) else None
    # Of the CPU this name came with the product.
    return product if hasattr(torch.nn.functional, "grouped_mm") else None


def _begins_well(x: torch.Tensor) -> bool:
    """Whether a tensor and its rows, or columns, begin at multiples of 16 bytes."""
    *outer, one, other = x.stride()
    spread = [stride for stride in (one, other) if stride != 1] or [x.shape[-1]]
    steps = len(spread) == 1 and all(stride * x.element_size() % 16 == 0 for stride in (*outer, *spread))
    return steps and (torch.compiler.is_compiling() or x.data_ptr() % 16 == 0)


def _pieces(x: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    """The rows of each expert."""
    ends = offsets.tolist()
    return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _joined(pieces: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The rows of all experts, and zeros for those of none."""
    rest = x.shape[0] - sum(map(len, pieces))
    return torch.cat([*pieces, pieces[0].new_zeros(rest, pieces[0].shape[1])])


def _without_autocast(x: torch.Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)
