"""Let FSDP2 gather weights of layers of 8-bit floats as such: a byte for a number in place of two or four.

FSDP2 shards a weight by its rows. A row's scale is of that row alone, so each rank rounds its own rows, and the ranks
gather the numbers and scales that each would have rounded the whole weight to. torch asks a shard for two functions,
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torch.distributed.fsdp); they are put on the shard's tensor, so
parameters, gradients, optimizers and checkpoints stay those of before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilekern.errors import InputError
from tilekern.ops.fp8_linear import rounded
from tilekern.ops.rounded_weight import RoundedWeight
from tilekern.patch.fp8 import AFTER, BEFORE, Linear
from tilekern.runtime.switches import ROWWISE


def gather(model: torch.nn.Module) -> list[str]:
    """Have FSDP2 gather the weights of converted layers in 8 bits, with the same results and gradients to the bit.

    Call it after ``fully_shard`` and before the first step. Other weights are gathered in their dtype: those of other
    layers, those whose rows the ranks cannot share evenly, and those on a mesh of one rank.

    Between gathering and resharding such a layer has no other weight than the rounded one, so calls that run in its
    dtype (docs/fp8.md) read that. Under autocast a weight of float32 is rounded to 8 bits at once, without it to the
    dtype of autocast first.

    Args:
        model: a model of which :func:`convert` converted layers ``rowwise``, sharded by FSDP2.

    Returns:
        The names of the layers whose weights are gathered so, in the model's order.

    Raises:
        InputError: there is no such layer, a step has run already, or the model's weights are offloaded to the host.
    """
    found = dict(_shards_of(model))
    if not found:
        raise InputError(
            f"{type(model).__name__} has no layer of 8-bit floats whose rows FSDP2 shards evenly over 2 ranks or more; "
            "call tilekern.fp8.convert(model), then fully_shard, then this"
        )
    for shard, device in found.values():
        if shard.device.type != device:
            raise InputError("offloaded weights are gathered in their dtype; leave offload_policy out to gather 8 bits")
    for shard, _ in found.values():
        vars(shard).update({BEFORE: _rounded_shard, AFTER: _whole})
    return list(found)


def _shards_of(model: torch.nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, str]]]:
    """Yield the layers whose weights are to be gathered, with their shards and the type of their mesh's device."""
    sharded: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            if getattr(module._get_fsdp_state(), "_is_root", None) is not None:
                raise InputError("FSDP2 has gathered weights already; call tilekern.fp8.gather before the first step")
            sharded.update((id(inner), inner) for inner in module.modules())
    for name, layer in model.named_modules():
        # Other formats have scales of blocks, which ranks that share rows may cut.
        is_rowwise = isinstance(layer, Linear) and layer.fp8 == ROWWISE
        if is_rowwise and id(layer) in sharded and _is_by_rows(layer.weight):
            yield name, (layer.weight._local_tensor, layer.weight.device_mesh.device_type)


def _is_by_rows(weight: Any) -> bool:
    """Return whether the ranks of one axis of a mesh have as many rows each, and others the same."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(weight, DTensor):
        return False
    *others, last = weight.placements
    ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
    is_whole = all(type(place) is Replicate for place in others) and type(last) is Shard and last.dim == 0
    return is_whole and ranks > 1 and weight.shape[0] % ranks == 0


def _rounded_shard(
    _mesh: Any, _size: Any, _stride: Any, module: torch.nn.Module, mp_policy: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
    """Return what a rank gives: the numbers and scales of its rows; nothing else is handed on."""
    shard: Any = module.weight._local_tensor
    return rounded(shard.detach().to(mp_policy.param_dtype or shard.dtype)), None


def _whole(
    gathered: tuple[torch.Tensor, torch.Tensor], _handed: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Return the weight of what all ranks gave, and what torch must free beside that; ``out`` shares its memory."""
    return None if out is not None else (RoundedWeight(*gathered, dtype), ())
