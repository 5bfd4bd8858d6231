"""append_to_cache: the keys and values of new tokens go into a cache, with the norms and the rotation of q and k.

Its launch is written for it: a cache has two layouts, and there may be no norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tilekern.kernels.append_to_cache import SPEC, written
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops.operation import operation
from tilekern.ops.qk_norm_rope import qk_norm_rope
from tilekern.ops.registration import check_tensors, disjoint, promoted, whole_numbers
from tilekern.ops.rope import check_angles, rope
from tilekern.runtime.dispatch import Plan, plan_for
from tilekern.spec import Array


class Plans(NamedTuple):
    """The plan of a call, the pairs that are rotated, and the dtype of the new q."""

    plan: Plan
    pairs: int
    dtype: torch.dtype


def append_to_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *,
    table: Tensor | None = None, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0, rotary_dim: int | None = None, interleaved: bool = False, norm_last: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate ``q`` and ``k``, after a norm of each head if there are weights, and write ``k`` and ``v`` into a cache.

    The results have the bits of :func:`tilekern.ops.qk_norm_rope`, or without weights :func:`tilekern.ops.rope`, and a
    copy. ``positions`` and ``table`` are read on the GPU alone, so a captured graph may be replayed after they have
    changed.

    Args:
        q: [batch, tokens, heads, head_dim]; bfloat16, float16 or float32, any strides, as all tensors here.
        k, v: [batch, tokens, kv_heads, head_dim], of the dtype of ``q``.
        cos, sin: [1 or batch, tokens, rotary_dim / 2 or rotary_dim] (or without the first dimension), the angles of the
            tokens; of ``rotary_dim`` numbers the second half repeats the first.
        keys, values: the cache, of the dtype of ``q``, which is changed: [batch, kv_heads, room, head_dim], or with a
            ``table`` [pages, page_size, kv_heads, head_dim].
        positions: [1 or batch, tokens] of integers, the row of each token in the cache of its sequence; no two tokens
            of a sequence share one. Tokens whose row is negative, or not in the room, are not written. For rows that
            are counted over all pages, pass ``pages.flatten(0, 1).transpose(0, 1)[None]`` as a cache of one sequence.
        table: [batch, most pages] of integers, the pages of each sequence in order. Pages of -1 are not written.
        q_weight, k_weight: [head_dim], the norms' weights; None for no norms.
        eps: added to the mean squares.
        offset: added to the weights, in float32; 1 for Gemma.
        rotary_dim: how many numbers at the beginning of each head are rotated; None for the whole head.
        interleaved: rotate the pairs (x[2i], x[2i + 1]) by angle i instead of (x[i], x[i + rotary_dim / 2]). Angles of
            ``rotary_dim`` numbers then have each angle twice in a row.
        norm_last: rotate first and normalise the result.

    Returns:
        The new q, contiguous, in the dtype that torch promotes ``q``, its weight and ``cos`` to.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit.
        RuntimeError: a gradient is needed.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    if interleaved and cos.shape[-1] == (rotary_dim or q.shape[-1]):
        cos, sin = cos[..., ::2], sin[..., ::2]
    return _append_to_cache(
        q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim, norm_last,
        interleaved,
    )  # fmt: skip


def _check(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor, table: Tensor | None, eps: float, offset: float,
    rotary_dim: int | None, norm_last: bool, interleaved: bool,
) -> None:  # fmt: skip
    def must_be(sizes: Sequence[int | str], **tensors: Tensor) -> None:
        """Refuse tensors with other sizes; names stand for any size."""
        for name, x in tensors.items():
            if x.dim() != len(sizes) or any(a != b for a, b in zip(x.shape, sizes, strict=True) if isinstance(b, int)):
                said = ", ".join(map(str, sizes))
                raise ValueError(f"append_to_cache: {name} must have the shape [{said}], got {list(x.shape)}")

    must_be(("batch", "tokens", "heads", "head_dim"), q=q)
    batch, tokens, _, size = q.shape
    must_be((batch, tokens, "kv_heads", size), k=k)
    heads = k.shape[2]
    must_be(k.shape, v=v)
    must_be((batch, heads, "room", size) if table is None else ("pages", "page_size", heads, size), keys=keys)
    must_be(keys.shape, values=values)
    must_be((1 if positions.shape[:1] == (1,) else batch, tokens), positions=positions)
    if table is not None:
        must_be((batch, "pages"), table=table)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("append_to_cache: q_weight and k_weight must both be given, or both be None")
    if q_weight is not None and k_weight is not None:
        must_be((size,), q_weight=q_weight, k_weight=k_weight)
    rotary = size if rotary_dim is None else rotary_dim
    if not 0 < rotary <= size:
        raise ValueError(f"append_to_cache: rotary_dim must be from 2 to {size} as the heads' size, got {rotary}")
    check_angles("append_to_cache", cos, sin, batch, tokens, rotary)
    numbers = {"positions": positions, "table": table}
    others = {"k": k, "v": v, "keys": keys, "values": values}
    for name, x in others.items():
        if x.dtype != q.dtype:
            raise ValueError(f"append_to_cache: {name} must be {q.dtype} as q is, got {x.dtype}")
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    check_tensors("append_to_cache", *numbers, q=q, **others, **weights, cos=cos, sin=sin, **numbers)


def _find(
    graded: bool, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor, table: Tensor | None, eps: float, offset: float,
    rotary_dim: int | None, norm_last: bool, interleaved: bool,
) -> Plans | None:  # fmt: skip
    if not q.numel() or not k.numel() or not keys.numel() or (table is not None and not table.numel()):
        return None
    weight, normed = q if q_weight is None else q_weight, q_weight is not None
    if cos.dtype != sin.dtype or (k_weight is not None and k_weight.dtype != weight.dtype):
        return None
    batch, tokens, heads, size = q.shape
    pairs = (size if rotary_dim is None else rotary_dim) // 2
    plan = plan_for(
        SPEC, q.device, tokens, batch, heads, k.shape[2], size, pairs, normed, normed and norm_last, interleaved,
        table is not None, q.dtype, weight.dtype, cos.dtype,
    )  # fmt: skip
    return None if plan is None else Plans(plan, pairs, promoted(q.dtype, weight.dtype, cos.dtype))


def _launch(
    plans: Plans, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor, table: Tensor | None, eps: float, offset: float,
    rotary_dim: int | None, norm_last: bool, interleaved: bool,
) -> Tensor:  # fmt: skip
    (plan, pairs, dtype), device = plans, q.device
    made = torch.empty(q.shape, dtype=dtype, device=device)
    if cos.shape[2] != pairs:
        cos, sin = cos[..., :pairs], sin[..., :pairs]
    weights = (placeholder(1, q.dtype, device),) * 2 if q_weight is None else (q_weight, k_weight)
    plan.launch(
        q.get_device(), disjoint(q), disjoint(k), disjoint(v), *weights, disjoint(cos), disjoint(sin),
        whole_numbers(positions, 2, device), whole_numbers(table, 2, device), float(eps), float(offset), made, keys,
        values,
    )  # fmt: skip
    if not keys.is_inference():
        increment_version((keys, values))
    return made


def _fake(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, *rest: Any
) -> Tensor:
    return q.new_empty(q.shape, dtype=promoted(q.dtype, (q if q_weight is None else q_weight).dtype, cos.dtype))


_Q, _K = ("batch", "tokens", "heads", "head_dim"), ("batch", "tokens", "kv_heads", "head_dim")
_CACHE, _ANGLES = ("batch", "kv_heads", "room", "head_dim"), ("batch", "tokens", "angles")


@operation(
    SPEC, name="append_to_cache", arrays=(
        Array("q", "dtype", _Q), Array("k", "dtype", _K), Array("v", "dtype", _K),
        Array("q_weight", "weight_dtype", ("head_dim",)), Array("k_weight", "weight_dtype", ("head_dim",)),
        Array("cos", "angle_dtype", _ANGLES), Array("sin", "angle_dtype", _ANGLES),
        Array("keys", "dtype", _CACHE), Array("values", "dtype", _CACHE),
        Array("positions", "int32", ("batch", "tokens")), Array("table", "int32", ("batch", "pages")),
        Array("q_out", "dtype*weight_dtype*angle_dtype", _Q, "output"),
    ), updates=("keys", "values"), key=("rotary_dim", "norm_last", "interleaved"), check=_check, find=_find,
    launch=_launch, fake=_fake, shapes={
        # A kernel serves any room, which may grow with each token.
        "keys": "(keys.shape[:2], keys.shape[3:], keys.numel() > 0) if table is None else keys.shape",
        "values": "values.shape == keys.shape",
    }, no_gradient="call it under torch.no_grad(), or use tilekern.ops.qk_norm_rope or rope",
)  # fmt: skip
def _append_to_cache(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor, table: Tensor | None, eps: float, offset: float,
    rotary_dim: int | None, norm_last: bool, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Compute the op by other ops, and rewrite the whole cache."""
    how: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    if q_weight is not None:
        q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset=offset, norm_last=norm_last, **how)
    else:
        turned = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, twice=True, **how)
        q, k = (x.transpose(1, 2) for x in turned)
    if keys.numel() and (table is None or table.numel()):
        keys.copy_(written(keys, k, positions, table))
        values.copy_(written(values, v, positions, table))
    return q.contiguous()
