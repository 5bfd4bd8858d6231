"""route: sort the slots of a layer of experts (the choices of its tokens) by expert; without a gradient.

It is written by hand: with two launches and results whose sizes are numbers, a declaration would have to bring all
of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilekern.kernels.experts import route as kernels
from tilekern.ops.registration import check_dtype, is_traced
from tilekern.runtime.dispatch import Plan, count_fallback, plan_for


class Routing(NamedTuple):
    """The slots ``t * choices + k`` sorted by expert, keeping the order of an expert's slots.

    Attributes:
        offsets: int32 [experts], the end of each expert's rows, as in torch's grouped product (``offs``).
        order: int32 [tokens * choices], the slot of each row.
        ranks: int32 [tokens, choices], the row of each slot.
        experts: int32 [tokens * choices], the expert of each row.
    """

    offsets: Tensor
    order: Tensor
    ranks: Tensor
    experts: Tensor


def route(ids: Tensor, experts: int) -> Routing:
    """Sort the slots of tokens by their experts, without waiting for the host.

    Args:
        ids: [tokens, choices], any integers. A slot whose id is not from 0 to ``experts`` - 1 comes last, and its row's
            expert is ``experts``; with expert parallelism, ranks mark the experts of other ranks like this.
        experts: the number of experts.

    Raises:
        ValueError: ``ids`` has another shape or is not of an integer dtype, or there are no experts.
    """
    if ids.dim() != 2 or experts < 1:
        raise ValueError(
            f"route: ids must be [tokens, choices] of at least one expert, got {list(ids.shape)} and {experts}"
        )
    check_dtype("route", "ids", ids, whole=True)
    plans = None if is_traced(ids) else plans_of(ids, experts)
    if plans is not None:
        return launched(plans, ids, experts)
    if not torch.compiler.is_compiling():
        count_fallback(kernels.PLACE)
    offsets, order, ranks, chosen = kernels.routed(ids, experts)
    return Routing(offsets, order, ranks.view(ids.shape), chosen)


def plans_of(ids: Tensor, experts: int) -> tuple[Plan, Plan] | None:
    """Return the plans of both launches, or None if torch must sort."""
    if not ids.numel() or experts > kernels.MOST_EXPERTS or ids.dtype not in (torch.int32, torch.int64):
        return None
    sizes = (ids.numel(), experts, ids.dtype == torch.int64)
    count, place = (plan_for(spec, ids.device, *sizes) for spec in (kernels.COUNT, kernels.PLACE))
    return None if count is None or place is None else (count, place)


def launched(plans: tuple[Plan, Plan], ids: Tensor, experts: int) -> Routing:
    """Compute the routing by two kernels."""
    device, rows = ids.get_device(), ids.numel()
    slots = ids.contiguous().view(-1)
    counts = torch.empty(kernels.parts(rows), kernels.width_of(experts), dtype=torch.int32, device=ids.device)
    plans[0].launch(device, slots, experts, counts)
    offsets, order, ranks, chosen = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (experts, rows, rows, rows)
    )
    plans[1].launch(device, slots, counts, experts, offsets, order, ranks, chosen)
    return Routing(offsets, order, ranks.view(ids.shape), chosen)
