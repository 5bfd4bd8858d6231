"""Ops on DTensors: each rank computes its own rows or elements, and torch adds up the gradients of the weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_dtensor(*tensors: Tensor | None) -> bool:
    """Return whether one of the tensors is a DTensor; none can be if the module is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def by_shards(
    op: Callable[..., Any], rows: tuple[Tensor, ...], vectors: tuple[Any, ...], *options: Any, gathered: int
) -> Any:
    """Run an op of matrices of one shape, sharded over ranks, and of vectors that all rows share.

    Partial sums are reduced first. Sharded dimensions stay sharded, except the last ones, which are gathered.

    Args:
        op: called with local tensors, ``op(*rows, *vectors, *options)``.
        rows: [..., columns]; at least one is a DTensor, and others must be whole on each rank.
        vectors: of any shape, or None; DTensors of any placement, or whole on each rank.
        options: further arguments of the op.
        gathered: the number of last dimensions that the op needs whole: 1 for rows, 0 for single elements.

    Returns:
        The op's results as DTensors, with the sharding of the first DTensor, except gathered dimensions.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    first = next(x for x in rows if isinstance(x, DTensor))
    mesh, whole = first.device_mesh, [Replicate()] * first.device_mesh.ndim
    split = first.dim() - gathered
    placed = [p if p.is_shard() and p.dim % first.dim() < split else Replicate() for p in first.placements]
    of_vectors = [Partial() if p.is_shard() else Replicate() for p in placed]

    def distributed(x: Tensor) -> DTensor:
        return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, whole, run_check=False)

    local = [distributed(x).redistribute(mesh, placed).to_local() for x in rows]
    shared = [
        None if x is None else distributed(x).redistribute(mesh, whole).to_local(grad_placements=of_vectors)
        for x in vectors
    ]
    found = op(*local, *shared, *options)
    stride = torch.empty(first.shape, dtype=first.dtype, device="meta").stride()

    def shown(y: Tensor) -> DTensor:
        return DTensor.from_local(y, mesh, placed, run_check=False, shape=first.shape, stride=stride)

    return tuple(map(shown, found)) if isinstance(found, tuple) else shown(found)
