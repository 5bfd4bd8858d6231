"""linear_log_probs: log-probabilities and entropies of a language model's head, ``log_softmax(hidden @ weight.T)``."""

from __future__ import annotations

import contextlib

import torch

from tilekern.ops.registration import check_devices, check_softcap, is_autocast


def linear_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, bias: torch.Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The log-probability of one id for each row, and the entropy of all ids, of a head's logits.

    ``logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature``, without the cap where there is
    none. Both results can be differentiated, once. Under autocast ``hidden``, ``weight`` and ``bias`` are cast as a
    linear layer's are.

    Args:
        hidden: [..., hidden]; bfloat16, float16 or float32, any strides.
        weight: [vocabulary, hidden], of the dtype of ``hidden``.
        ids: [...], of a whole-number dtype; values are taken as int32. A row whose id is not in the vocabulary has the
            log-probability NaN, and NaN as its gradients.
        bias: [vocabulary], of the dtype of ``weight``, or None; added in float32.
        temperature: positive and finite.
        softcap: positive and finite, or None for no cap.
        ignore_index: the id of rows that do not count: both results are 0, and so are their gradients.

    Returns:
        Log-probabilities and entropies in nats, both [...] in float32 (float64 for float64).

    Raises:
        ValueError: shapes or devices do not fit, ``ids`` has another dtype, or an option has a value that it cannot
            have.
    """
    check_options("linear_log_probs", temperature, softcap)
    log_probs, entropy, _ = rows_of_head(hidden, weight, ids, bias, temperature, softcap, ignore_index)
    return log_probs, entropy


def check_options(op: str, temperature: float, softcap: float | None) -> None:
    """Refuse a temperature or a cap by which no logits can be divided."""
    check_softcap(op, softcap)
    if not 1e-30 <= temperature <= 1e30:
        raise ValueError(f"{op}: temperature must be positive and finite (1e-30 to 1e+30), got {temperature}")


def rows_of_head(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, temperature: float,
    softcap: float | None, ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Log-probabilities, entropies, and the logarithms of the sums of exponentials, cast by autocast; [...] each."""
    _check(hidden, weight, ids, bias)
    kind = hidden.device.type
    cast = is_autocast(kind)
    if cast and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False) if cast else contextlib.nullcontext():
        return _formula(hidden, weight, ids, bias, float(temperature), softcap, ignore_index)


def _check(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None) -> None:
    if not hidden.dim() or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_log_probs: hidden must be [..., hidden] and weight [vocabulary, hidden], "
            f"got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if ids.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_log_probs: ids must be {list(hidden.shape[:-1])} as the rows of hidden are, got {list(ids.shape)}"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"linear_log_probs: ids must be of an integer dtype, got {ids.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_log_probs: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    check_devices("linear_log_probs", hidden=hidden, weight=weight, ids=ids, bias=bias)


def _formula(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, temperature: float,
    softcap: float | None, ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    product = torch.promote_types(hidden.dtype, weight.dtype)
    logits = (hidden.to(product) @ weight.to(product).t()).to(dtype)
    logits = logits if bias is None else logits + bias.to(dtype)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    lse = logits.logsumexp(-1)
    log_softmax = logits - lse[..., None]
    counted, known = ids != ignore_index, (ids >= 0) & (ids < weight.shape[0])
    places = ids.long().where(known, 0)[..., None] if weight.shape[0] else ids.long()[..., None]
    log_probs = log_softmax.gather(-1, places)[..., 0].where(known, torch.nan)
    probabilities = log_softmax.exp()
    # A probability of 0, whose logarithm is -inf, adds nothing.
    entropy = -(probabilities * log_softmax.masked_fill(probabilities == 0, 0)).sum(-1)
    return tuple(x.where(counted, 0) for x in (log_probs, entropy, lse))  # type: ignore[return-value]
