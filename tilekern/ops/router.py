"""router: choose the experts of each token and their weights by the logits of a layer's router.

It is written by hand and not declared: its ids are a result without a gradient, which the backward reads, and softmax
and sigmoid have specs of their own. Under ``torch.compile`` torch's own operations run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.kernels.experts import router as kernels
from tilekern.ops.dtensors import is_dtensor
from tilekern.ops.registration import (
    check_devices,
    check_vectors,
    differentiable_once,
    is_traced,
    needs_gradient,
    plans_of_both,
)
from tilekern.runtime.dispatch import Plan, count_fallback, keep, memo

SCORES = ("softmax", "sigmoid")


class Choice(NamedTuple):
    """The experts of tokens.

    Attributes:
        ids: int64 [tokens, choices], without a gradient; those of a token differ, the best one first.
        weights: [tokens, choices].
    """

    ids: Tensor
    weights: Tensor


class _How(NamedTuple):
    """How experts are chosen."""

    choices: int
    scores: str
    normalized: bool
    groups: int
    kept: int
    scale: float
    dtype: torch.dtype


Plans = tuple[Plan, Plan | None]
_known: dict[Any, Plans | None] = memo()


def router(
    logits: Tensor, choices: int, *, scores: str = "softmax", normalized: bool = True, bias: Tensor | None = None,
    groups: int = 1, kept_groups: int = 1, scale: float = 1.0, dtype: torch.dtype | None = None,
) -> Choice:  # fmt: skip
    """Choose the experts of each token, in float32.

    With ``softmax`` the experts with the largest logits are chosen, and the weights are their shares of the softmax.
    Normalised weights are the softmax of the chosen logits alone, as in GPT-OSS. With ``sigmoid`` the experts with the
    largest ``sigmoid(logits) + bias`` are chosen, from the ``kept_groups`` groups with the largest sums of their two
    best. The weights are the sigmoids, divided by their sum plus 1e-20 if normalised (DeepSeek-V3, arXiv:2412.19437).
    Of equal experts the lower id comes first, and NaN is the largest.

    Args:
        logits: [tokens, experts]; bfloat16, float16 or float32. For sigmoids they are cast to float32.
        choices: the number of experts per token, from 1 to experts.
        scores: ``softmax`` or ``sigmoid``.
        normalized: whether the weights of a token sum to ``scale``.
        bias: [experts] or None, added to sigmoids for the choice only, without a gradient.
        groups: the number of equal groups of adjacent experts; for sigmoids.
        kept_groups: the number of groups whose experts may be chosen.
        scale: a factor of all weights.
        dtype: dtype of the weights; None means the dtype of ``logits``.

    Raises:
        ValueError: shapes or devices do not fit, or an option has an invalid value.
    """
    how = _How(choices, scores, normalized, groups, kept_groups, float(scale), dtype or logits.dtype)
    _check(logits, bias, how)
    if scores == "sigmoid" and logits.dtype != torch.float64:
        logits = logits.float()
    if bias is not None:
        bias = bias.detach().to(logits.dtype)
    plans = None if is_traced(logits) or is_dtensor(logits) else _found(logits, how)
    if plans is None and not torch.compiler.is_compiling():
        count_fallback(kernels.SIGMOID if scores == "sigmoid" else kernels.SOFTMAX)
    if plans is None:
        return formula(logits, bias, how)
    if needs_gradient(logits):
        return Choice(*_Router.apply(logits, bias, how, plans))
    return _run(logits, bias, how, plans[0])


def _check(logits: Tensor, bias: Tensor | None, how: _How) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"router: logits must be [tokens, experts] of floats, got {logits.dtype} {list(logits.shape)}")
    experts = logits.shape[1]
    if not 1 <= how.choices <= experts:
        raise ValueError(f"router: choices must be from 1 to {experts}, the number of experts, got {how.choices}")
    if how.scores not in SCORES:
        raise ValueError(f"router: scores must be one of {', '.join(SCORES)}, got {how.scores!r}")
    if how.scores == "softmax" and (bias is not None or how.groups != 1):
        raise ValueError("router: only scores='sigmoid' takes a bias and groups")
    check_vectors("router", experts, bias=bias)
    if how.groups < 1 or experts % how.groups or (how.groups > 1 and experts < 2 * how.groups):
        raise ValueError(f"router: groups must cut {experts} experts into parts of two or more, got {how.groups}")
    if not 1 <= how.kept <= how.groups or how.kept * (experts // how.groups) < how.choices:
        raise ValueError(
            f"router: kept_groups must be from 1 to {how.groups}, of {how.choices} experts or more, got {how.kept}"
        )
    check_devices("router", logits=logits, bias=bias)


def _found(logits: Tensor, how: _How) -> Plans | None:
    """Return the plans of a kind of call; None if torch must do the work."""
    graded = needs_gradient(logits)
    key = (logits.get_device(), logits.shape, logits.dtype, how._replace(kept=0, scale=0.0), graded)
    try:
        return _known[key]
    except KeyError:
        found = _find(logits, how, graded)
        return keep(_known, key, found) if logits.is_cuda else found


def _find(logits: Tensor, how: _How, graded: bool) -> Plans | None:
    tokens, experts = logits.shape
    if not tokens or experts > kernels.MOST_EXPERTS or how.groups > kernels.MOST_GROUPS:
        return None
    if torch.float64 in (logits.dtype, how.dtype):
        return None
    device, sizes, last = logits.device, (tokens, how.choices, experts), (how.dtype, how.normalized)
    if how.scores == "sigmoid":
        forward = kernels.SIGMOID, *sizes, how.groups, *last
        return plans_of_both(graded, device, forward, (kernels.SIGMOID_BACKWARD, *sizes, *last))
    values = *sizes, logits.dtype, *last
    return plans_of_both(graded, device, (kernels.SOFTMAX, *values), (kernels.SOFTMAX_BACKWARD, *values))


def _run(logits: Tensor, bias: Tensor | None, how: _How, plan: Plan) -> Choice:
    """Run one launch."""
    tokens, experts = logits.shape
    shape, device, logits = (tokens, how.choices), logits.get_device(), logits.contiguous()
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=how.dtype, device=logits.device)
    given: tuple[Any, ...] = (logits,)
    if how.scores == "sigmoid":
        added = logits.new_zeros(experts) if bias is None else bias.contiguous()
        given = (logits.view(tokens, how.groups, -1), added.view(how.groups, -1), how.kept)
    plan.launch(device, *given, how.choices, how.scale, ids, weights)
    return Choice(ids, weights)


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, how: _How, plans: Plans) -> tuple[Tensor, Tensor]:
        ids, weights = _run(logits, bias, how, plans[0])
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        ctx.how, ctx.plan = how, plans[1]
        return ids, weights

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor | None, dweights: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        logits = logits.contiguous()
        dlogits = torch.empty_like(logits)
        ctx.plan.launch(logits.get_device(), dweights.contiguous(), logits, ids, ctx.how.scale, dlogits)
        return dlogits, None, None, None


def formula(logits: Tensor, bias: Tensor | None, how: _How) -> Choice:
    """Compute the op in torch's own operations."""
    (tokens, experts), number = logits.shape, (how.choices, how.scale, how.normalized)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if how.scores == "sigmoid":
        bias = wide.new_zeros(experts) if bias is None else bias
        size = experts // how.groups
        ids, weights = kernels.by_sigmoid(
            wide.reshape(tokens, how.groups, size), bias.view(how.groups, size), how.kept, *number
        )
    else:
        ids, weights = kernels.by_softmax(wide, *number)
    return Choice(ids, weights.to(how.dtype))
