"""The rows of new tokens in a static cache of keys and values, and its count of tokens, in one launch.

It is written by hand and not declared: it has no results, and where no kernel serves its caller does the work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tilekern.errors import NoVariant
from tilekern.kernels.cache_rows import SPEC
from tilekern.ops.registration import check_devices, disjoint, is_traced, needs_gradient
from tilekern.runtime.dispatch import MOST_PLANS, Plan, memo, refused, tuned_plan_for

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A prompt is written once, and copies of torch's take as long as a kernel.
MOST_TOKENS = 64
# The plans of kinds of calls; None for torch.
_known: dict[tuple[Any, ...], Plan | None] = memo()


def cache_rows(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> bool:
    """Write ``k`` and ``v`` into a cache behind its tokens, and count them; return False if no kernel serves.

    The count is read on the GPU alone, so a captured graph may be replayed.

    Args:
        k, v: [batch, kv_heads, tokens, head_dim], of at most 64 tokens; any strides, as all tensors here.
        keys, values: [batch, kv_heads, room, head_dim], the cache, which is changed. Tokens behind its end are counted,
            not written.
        count: the number of tokens in the cache, one number of int64, which is changed.

    Raises:
        ValueError: the shapes, the devices or the count do not fit.
    """
    tensors = k, v, keys, values, count
    key = tuple((x.shape, x.dtype, x.device) for x in tensors)
    try:
        plan = _known[key]
    except KeyError:
        plan = _found(*tensors)
        # A trace of a model, whose tensors are on meta, asks for what each model needs.
        if not k.is_meta and len(_known) < MOST_PLANS:
            _known[key] = plan
    is_plain = all(type(x) is Tensor for x in tensors)
    if plan is None or not is_plain or is_traced(k) or needs_gradient(k, v, keys, values):
        return False
    try:
        plan.launch(k.get_device(), disjoint(k), disjoint(v), count.view(1), k.shape[2], keys, values)
    except NoVariant as error:
        refused(SPEC, error)
        return False
    increment_version([x for x in (keys, values, count) if not x.is_inference()])
    return True


def _found(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Plan | None:
    """Return the plan of a kind of call; None if torch is to do the work."""
    check_devices("cache_rows", k=k, v=v, keys=keys, values=values, count=count)
    for name, x in {"k": k, "v": v, "keys": keys, "values": values}.items():
        if x.dim() != 4:
            raise ValueError(f"cache_rows: {name} must have four dimensions, got {list(x.shape)}")
    batch, heads, tokens, size = k.shape
    wanted = {"v": (v, tokens, v), "keys": (keys, keys.shape[2], k), "values": (values, keys.shape[2], v)}
    for name, (x, rows, new) in wanted.items():
        if x.shape != (shape := (batch, heads, rows, new.shape[3])):
            raise ValueError(f"cache_rows: {name} must have the shape {list(shape)}, got {list(x.shape)}")
    if count.numel() != 1 or count.dtype != torch.int64:
        raise ValueError(f"cache_rows: count must be one number of int64, got {list(count.shape)} of {count.dtype}")
    is_copy = v.shape == k.shape and k.dtype == v.dtype == keys.dtype == values.dtype
    if not is_copy or k.dtype not in DTYPES or tokens > MOST_TOKENS or not k.numel() or not keys.numel():
        return None
    return tuned_plan_for(SPEC, k.device, batch * tokens, heads, size, k.dtype)
