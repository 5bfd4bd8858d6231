"""embedding: the rows of a table by the ids of tokens, with or without those of a second table by their positions.

Its launch is written for it, because there may be no second table, and its checks, because ids have any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.embedding import SPEC, embedded
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors, disjoint, whole_numbers
from tilekern.runtime.dispatch import Plan, plan_for


def _check(ids: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None) -> None:
    if weight.dim() != 2 or not weight.shape[0]:
        raise ValueError(f"embedding: weight must be [vocabulary, columns] and not empty, got {list(weight.shape)}")
    if (positions is None) != (position_weight is None):
        raise ValueError("embedding: positions and position_weight must both be given, or both be None")
    if positions is not None and position_weight is not None:
        if positions.shape != ids.shape:
            raise ValueError(f"embedding: positions must have the shape {list(ids.shape)}, got {list(positions.shape)}")
        columns, shape = weight.shape[1], position_weight.shape
        if len(shape) != 2 or not shape[0] or shape[1] != columns:
            raise ValueError(
                f"embedding: position_weight must be [positions, {columns}] and not empty, got {list(shape)}"
            )
        if position_weight.dtype != weight.dtype:
            raise ValueError(
                f"embedding: position_weight must be {weight.dtype} as weight is, got {position_weight.dtype}"
            )
    check_tensors(
        "embedding", "ids", "positions", ids=ids, weight=weight, positions=positions, position_weight=position_weight
    )  # fmt: skip


def _find(
    graded: bool, ids: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None
) -> Plan | None:
    if not ids.numel() or not weight.numel():
        return None
    return plan_for(SPEC, ids.device, ids.numel(), weight.shape[1], weight.dtype, positions is not None)


def _launch(
    plan: Plan, ids: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None
) -> Tensor:  # fmt: skip
    out = torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    flat = ids.reshape(-1).to(torch.int64)
    places = whole_numbers(None if positions is None else positions.reshape(-1), 1, ids.device)
    table = placeholder(2, weight.dtype, weight.device) if position_weight is None else disjoint(position_weight)
    plan.launch(ids.get_device(), disjoint(flat), disjoint(weight), places, table, out.view(-1, weight.shape[1]))
    return out


def _fake(ids: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@operation(
    SPEC, check=_check, find=_find, launch=_launch, fake=_fake,
    no_gradient="call it under torch.no_grad(), or use torch.nn.functional.embedding",
)  # fmt: skip
def embedding(
    ids: Tensor, weight: Tensor, positions: Tensor | None = None, position_weight: Tensor | None = None
) -> Tensor:
    """Return ``weight[ids]``, or ``weight[ids] + position_weight[positions]`` rounded once; without a gradient.

    An id or a position outside of its table makes its row zeros. The host reads no number.

    Args:
        ids: [...], the tokens; an integer tensor.
        weight: [vocabulary, columns]; bfloat16, float16 or float32, any strides.
        positions: the positions of the tokens, in the shape of ``ids``; an integer tensor. None adds nothing.
        position_weight: [positions, columns], of the dtype of ``weight``; it is given if ``positions`` are.

    Returns:
        [..., columns], contiguous, in the dtype of ``weight``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a table is empty.
        RuntimeError: a gradient is needed.
    """
    return embedded(ids, weight, positions, position_weight)
