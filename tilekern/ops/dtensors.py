"""Ops on DTensors: each rank works on its own rows or elements, and torch adds up what the weights get."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def is_dtensor(*tensors: torch.Tensor | None) -> bool:
    """Whether one of some tensors is a DTensor; none is where nobody has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def by_shards(
    op: Callable[..., Any], rows: tuple[torch.Tensor, ...], vectors: tuple[Any, ...], *options: Any, gathered: int
) -> Any:
    """An op of matrices of one shape, of which each rank has a part, and of vectors that all rows share.

    Sums are completed before; dimensions that are sharded stay so, but for the last ones that are gathered.

    Args:
        op: called with local tensors, ``op(*rows, *vectors, *options)``.
        rows: [..., columns], of which one at least is a DTensor; others are taken for whole on each rank.
        vectors: of any shape, or None; DTensors of any placement, or whole on each rank.
        options: what else the op takes.
        gathered: how many of the last dimensions the op must have whole: 1 for rows, 0 for single elements.

    Returns:
        The op's results as DTensors, sharded as the first DTensor of the rows is, but for what was gathered.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    first = next(x for x in rows if isinstance(x, DTensor))
    mesh, whole = first.device_mesh, [Replicate()] * first.device_mesh.ndim
    split = first.dim() - gathered
    placed = [p if p.is_shard() and p.dim % first.dim() < split else Replicate() for p in first.placements]
    of_vectors = [Partial() if p.is_shard() else Replicate() for p in placed]

    def distributed(x: torch.Tensor) -> DTensor:
        return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, whole, run_check=False)

    local = [distributed(x).redistribute(mesh, placed).to_local() for x in rows]
    shared = [
        None if x is None else distributed(x).redistribute(mesh, whole).to_local(grad_placements=of_vectors)
        for x in vectors
    ]
    found = op(*local, *shared, *options)
    stride = torch.empty(first.shape, dtype=first.dtype, device="meta").stride()

    def shown(y: torch.Tensor) -> DTensor:
        return DTensor.from_local(y, mesh, placed, run_check=False, shape=first.shape, stride=stride)

    return tuple(map(shown, found)) if isinstance(found, tuple) else shown(found)
