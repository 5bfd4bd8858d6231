"""log_probs: log-probabilities and entropies of logits, as generation gives them; without a gradient.

Its launch is written for it: another kernel checks the ids first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import log_probs as kernels
from tilekern.ops.labels import checked, refuse_outside
from tilekern.ops.operation import operation
from tilekern.ops.registration import (
    as_rows,
    check_ids,
    check_softcap,
    check_temperature,
    check_tensors,
    shaped,
)
from tilekern.runtime.dispatch import Plan, plan_for
from tilekern.spec import Array

_INT32 = torch.iinfo(torch.int32)
_ROW = ("rows",)
_ARRAYS = (
    Array("logits", "dtype", ("rows", "vocabulary")), Array("ids", "int32", _ROW),
    Array("log_probs", "dtype*float32", _ROW, "output"), Array("entropy", "dtype*float32", _ROW, "output"),
)  # fmt: skip


def log_probs(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, softcap: float | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one id per row of logits, and the entropy.

    It has the bits of :func:`linear_log_probs` where the logits are its head's, as inside :func:`tilekern.invariant`:
    so a sampler's logits tell what a trainer computes. ``log_softmax(softcap * tanh(logits / softcap) / temperature)``;
    without a cap there is no tanh.

    Args:
        logits: [..., vocabulary]; bfloat16, float16 or float32, any strides.
        ids: [...], of an integer dtype. A row whose id is not in the vocabulary has NaN as its log-probability, and a
            later call raises.
        temperature: positive and finite.
        softcap: positive and finite, or None for no cap.
        ignore_index: the id of rows that do not count: both results are 0.

    Returns:
        Log-probabilities and entropies in nats, both [...] in float32 (float64 for float64).

    Raises:
        ValueError: shapes or devices do not fit, ``ids`` has another dtype, an option has an invalid value, or an
            earlier call on this device got an id outside the vocabulary (:func:`tilekern.check_labels`).
        RuntimeError: a gradient is needed.
    """
    check_softcap("log_probs", softcap)
    check_temperature("log_probs", temperature)
    found: tuple[Tensor, Tensor] = _log_probs(logits, ids, float(temperature), softcap, ignore_index)
    return found


def of_logits(
    logits: Tensor, ids: Tensor, temperature: float, softcap: float | None, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities, entropies and logsumexps in torch's own operations."""
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    lse = logits.logsumexp(-1)
    log_softmax = logits - lse[..., None]
    counted = ids != ignore_index
    at_id = log_softmax.gather(-1, ids.long().where(counted, 0)[..., None])[..., 0]
    probabilities = log_softmax.exp()
    # A probability of 0, whose logarithm is -inf, adds nothing.
    entropy = -(probabilities * log_softmax.masked_fill(probabilities == 0, 0)).sum(-1)
    return at_id.where(counted, 0), entropy.where(counted, 0), lse.where(counted, 0)


def _check(logits: Tensor, ids: Tensor, *_: Any) -> None:
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"log_probs: logits must be [..., vocabulary] of at least one token, got {list(logits.shape)}")
    check_ids("log_probs", "ids", ids, logits=logits)
    check_tensors("log_probs", "ids", logits=logits, ids=ids)


def _find(
    graded: bool, logits: Tensor, ids: Tensor, temperature: float, softcap: float | None, ignore_index: int
) -> tuple[Plan] | None:
    if not logits.numel() or not _INT32.min <= ignore_index <= _INT32.max:
        return None
    sizes = (ids.numel(), logits.shape[-1], logits.dtype, False, softcap is not None)
    plan = plan_for(kernels.FORWARD, logits.device, *sizes)
    return None if plan is None else (plan,)


def _launch(
    plans: tuple[Plan], logits: Tensor, ids: Tensor, temperature: float, softcap: float | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    labels, _ = checked("log_probs", ids, logits.shape[-1], ignore_index)
    options = kernels.Options(ignore_index, temperature, softcap)
    found = [ids.new_empty(ids.numel(), dtype=torch.float32) for _ in range(3)]
    plans[0].launch(logits.get_device(), *kernels.before_ids(as_rows(logits), None), labels, *options.scalars, *found)
    return shaped(found[0], *ids.shape), shaped(found[1], *ids.shape)


@operation(
    kernels.FORWARD, name="log_probs", arrays=_ARRAYS, key=("softcap is not None", "ignore_index"), check=_check,
    find=_find, launch=_launch, no_gradient="call it under torch.no_grad(), or use linear_log_probs",
)  # fmt: skip
def _log_probs(
    logits: Tensor, ids: Tensor, temperature: float = 1.0, softcap: float | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    refuse_outside("log_probs", ids, logits.shape[-1], ignore_index)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return of_logits(wide, ids, temperature, softcap, ignore_index)[:2]
