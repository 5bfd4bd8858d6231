"""Losses of post-training, each computed by a few torch operations on log-probabilities.

The log-probabilities come from :func:`tilekern.ops.linear_log_probs`, or, if the vocabulary is split over ranks, from
``sharded_linear_log_probs``, so the logits never exist. Preference losses take ``log_probs`` [2 * pairs, tokens]: the
chosen sequences first, then the rejected ones, as in TRL's trainers. ``mask`` has the shape of ``log_probs`` and is not
0 for tokens that count (``ids != ignore_index`` for the head's ids). ``log_probs`` is already 0 for other tokens.
Results are scalars: means over pairs or sequences.
"""

from __future__ import annotations

import math
from typing import Any

from tilekern.errors import needing

with needing(__name__):
    import torch
    from torch.nn.functional import embedding, logsigmoid
    from torch.utils.checkpoint import checkpoint

from tilekern.ops.fused_linear_jsd import fused_linear_jsd
from tilekern.ops.linear_log_probs import linear_log_probs

__all__ = [
    "cpo", "dpo", "grpo", "ipo", "jsd", "kto", "kto_baseline", "orpo", "simpo", "top_k_distillation",
    "top_k_log_probs",
]  # fmt: skip
_REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# Bounds of the logarithms of VESPO's importance weights, for a token and for a sequence.
_MOST, _LEAST = 20.0, math.log(1e-8)


def dpo(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return ``-log sigmoid(beta * (r_chosen - r_rejected))``, ``r = log(p / p_ref)`` (arXiv 2305.18290, eq. 7).

    Args:
        log_probs, ref_log_probs: [2 * pairs, tokens], of the policy and of the reference; ``r`` is of a sequence.
        beta: how strongly the policy is kept close to the reference.
        label_smoothing: the probability that a pair has the opposite order (conservative DPO).
    """
    chosen, rejected = (log_probs - ref_log_probs).sum(-1).chunk(2)
    return _smoothed(beta * (chosen - rejected), label_smoothing).mean()


def ipo(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """Return ``(r_chosen - r_rejected - 1 / (2 * beta))^2``, ``r`` a sequence's mean (arXiv 2310.12036, eq. 17).

    Args:
        log_probs, ref_log_probs, mask: [2 * pairs, tokens].
        beta: the paper's tau.
    """
    chosen, rejected = _means(log_probs - ref_log_probs, mask).chunk(2)
    return (chosen - rejected - 1 / (2 * beta)).square().mean()


def kto(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, desirable: torch.Tensor, baseline: torch.Tensor | float, *,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Return ``weight * (1 - sigmoid(+-beta * (r - baseline)))`` of single sequences (arXiv 2402.01306, eq. 8).

    Args:
        log_probs, ref_log_probs: [sequences, tokens].
        desirable: [sequences] bool, whether a sequence is a good answer; then the sign is plus.
        baseline: the divergence from which ``r`` is measured, one number, from :func:`kto_baseline`.
        beta: how strongly the policy is kept close to the reference.
        desirable_weight, undesirable_weight: the weights of good and of bad answers.
    """
    margin = beta * ((log_probs - ref_log_probs).sum(-1) - baseline)
    signed = torch.where(desirable, margin, -margin)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    return (weight * (1 - torch.sigmoid(signed))).mean()


def kto_baseline(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Return ``max(0, mean(r))`` of answers to other prompts, without a gradient (arXiv 2402.01306, section 4.1).

    Args:
        log_probs, ref_log_probs: [sequences, tokens], of pairs of a prompt and the answer to another prompt. With
            several ranks, take the mean over the ranks before the maximum.
    """
    return (log_probs - ref_log_probs).sum(-1).mean().detach().clamp(min=0)


def orpo(
    log_probs: torch.Tensor, mask: torch.Tensor, *, beta: float = 0.1, chosen_nll: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``nll - beta * log sigmoid(log odds_chosen - log odds_rejected)`` (arXiv 2403.07691, eqs. 6 and 7).

    The odds are ``p / (1 - p)`` with ``log p`` the mean over a sequence's tokens.

    Args:
        log_probs, mask: [2 * pairs, tokens].
        beta: the paper's lambda.
        chosen_nll: the loss of the chosen sequences, a scalar; None computes it from their tokens in ``log_probs``. TRL
            includes the prompts' tokens.
    """
    means = _means(log_probs, mask)
    chosen, rejected = (means - _log_of_rest(means)).chunk(2)
    nll = _chosen_nll(log_probs, mask) if chosen_nll is None else chosen_nll
    return nll - beta * logsigmoid(chosen - rejected).mean()


def cpo(
    log_probs: torch.Tensor, mask: torch.Tensor, *, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return ``-log sigmoid(beta * (log p_chosen - log p_rejected)) + alpha * nll`` (arXiv 2401.08417, eqs. 3 to 5).

    Args:
        log_probs, mask: [2 * pairs, tokens].
        beta: the weight of the difference.
        alpha: the weight of the chosen tokens' loss.
        label_smoothing: the probability that a pair has the opposite order.
    """
    chosen, rejected = log_probs.sum(-1).chunk(2)
    return _smoothed(beta * (chosen - rejected), label_smoothing).mean() + alpha * _chosen_nll(log_probs, mask)


def simpo(
    log_probs: torch.Tensor, mask: torch.Tensor, *, beta: float = 2.0, gamma: float = 0.5, alpha: float = 0.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Return ``-log sigmoid(beta * (m_chosen - m_rejected) - gamma)``, ``m`` the mean (arXiv 2405.14734, eq. 6).

    Args:
        log_probs, mask: [2 * pairs, tokens]; ``m`` is the mean over a sequence.
        beta: the weight of the difference.
        gamma: the target margin, in units of the loss's argument.
        alpha: the weight of the chosen tokens' loss (CPO-SimPO).
        label_smoothing: the probability that a pair has the opposite order.
    """
    chosen, rejected = _means(log_probs, mask).chunk(2)
    loss = _smoothed(beta * (chosen - rejected) - gamma, label_smoothing).mean()
    return loss + alpha * _chosen_nll(log_probs, mask) if alpha else loss


def grpo(
    log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *,
    old_log_probs: torch.Tensor | None = None, ref_log_probs: torch.Tensor | None = None, loss_type: str = "dapo",
    level: str = "token", epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None,
    beta: float = 0.0, kl_weighted: bool = False, sampling_ratio: torch.Tensor | None = None,
    max_completion_length: int | None = None, num_items: torch.Tensor | float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_gammas: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0)),
) -> torch.Tensor:  # fmt: skip
    """Return the loss ``-min(w * A, clip(w) * A)``, ``w = p / p_old``, plus a divergence (arXiv 2402.03300).

    ``w`` is the importance weight. The values of ``loss_type`` are:

    - ``grpo``: the mean over each sequence, then over the sequences.
    - ``bnpo``: the mean over all tokens.
    - ``dr_grpo`` (arXiv 2503.20783): divides by sequences times ``max_completion_length``.
    - ``dapo`` (arXiv 2503.14476): divides by ``num_items``.
    - ``cispo`` (arXiv 2506.13585): divides by ``num_items``; the terms are ``A * log p`` times the weight, which is
      bounded from above by ``epsilon_high`` and has no gradient.
    - ``sapo`` (arXiv 2511.20347): has ``4 / t * sigmoid(t * (w - 1)) * A`` instead of the clipped terms, and the mean
      of ``grpo``.
    - ``luspo`` (arXiv 2602.05261): the sum of each sequence's terms, then the mean over the sequences; the weights are
      of sequences.
    - ``vespo`` (arXiv 2602.10693): the terms are ``A * log p`` times ``w^k * exp(lambda * (1 - w))``, without a
      gradient, where ``w`` is the product of a sequence's weights; divides like ``dapo``.

    Args:
        log_probs: [sequences, tokens], of the completions.
        advantages: [sequences], or [sequences, tokens].
        mask: [sequences, tokens].
        old_log_probs: of the policy that made the completions; None means ``log_probs`` without their gradient.
        ref_log_probs: of the reference; needed if ``beta`` is not 0.
        loss_type: how terms are computed and added up, see above.
        level: level of the importance weight: ``token``, or ``sequence`` for the mean of a sequence's logarithms (GSPO,
            arXiv 2507.18071).
        epsilon: weights are clipped from below at ``1 - epsilon``.
        epsilon_high: weights are clipped from above at ``1 + epsilon_high``; None means ``epsilon``.
        delta: upper bound of the unclipped weight (INTELLECT-2).
        beta: the weight of the divergence ``exp(d) - d - 1``, ``d = log(p_ref / p)``.
        kl_weighted: multiplies the divergence by the importance weight, which makes its gradient unbiased.
        sampling_ratio: a factor for each token, [sequences, tokens] or [sequences, 1], that corrects for samples of
            another engine. For ``vespo`` it is a factor of the sequence's weight.
        max_completion_length: the divisor of ``dr_grpo``.
        num_items: the number of tokens that count, over all batches of a step; None means those of ``mask``.
        sapo_temperatures: t for positive advantages and for others.
        vespo_gammas: (k, lambda) for advantages of 0 or more, and for negative ones.

    Raises:
        ValueError: ``loss_type`` or ``level`` is unknown, they do not fit together, or an argument that they or
            ``beta`` need is None.
    """
    _check_grpo(loss_type, level, beta, ref_log_probs, max_completion_length, epsilon_high)
    mask = mask.to(log_probs.dtype)
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio = log_probs - (log_probs.detach() if old_log_probs is None else old_log_probs)
    weight = torch.exp(ratio if level == "token" else _means(ratio, mask)[:, None])
    if loss_type == "cispo":
        loss = -weight.clamp(max=epsilon_high).detach() * advantages * log_probs
    elif loss_type == "sapo":
        temperature = torch.where(advantages > 0, *sapo_temperatures)
        loss = -torch.sigmoid(temperature * (weight - 1)) * 4 / temperature * advantages
    elif loss_type == "vespo":
        loss = -_vespo_factor(ratio, advantages, mask, sampling_ratio, vespo_gammas) * advantages * log_probs
    else:
        clipped = weight.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
        loss = -torch.minimum(
            weight.clamp(max=delta) * advantages if delta else weight * advantages, clipped * advantages
        )
    if sampling_ratio is not None and loss_type != "vespo":
        loss = loss * sampling_ratio
    if beta and ref_log_probs is not None:
        difference = ref_log_probs - log_probs
        divergence = torch.exp(difference) - difference - 1
        loss = loss + beta * (divergence * weight if kl_weighted else divergence)
    loss = loss.expand_as(log_probs)
    if loss_type in ("grpo", "sapo"):
        return _means(loss, mask).mean()
    divisor: Any = mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        divisor = len(loss) * (max_completion_length or 1)
    elif loss_type == "luspo":
        divisor = max(1, len(loss))
    elif loss_type in ("dapo", "cispo", "vespo") and num_items is not None:
        divisor = num_items
    return (loss * mask).sum() / divisor


@torch.no_grad()
def _vespo_factor(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, sampling_ratio: torch.Tensor | None,
    gammas: tuple[tuple[float, float], tuple[float, float]],
) -> torch.Tensor:  # fmt: skip
    """Return ``w^k * exp(lambda * (1 - w))``: [sequences, 1], or [sequences, tokens] if advantages have this shape."""
    log = (ratio.clamp(-_MOST, _MOST) * mask).sum(-1, keepdim=True)
    if sampling_ratio is not None:
        each = sampling_ratio.log().clamp(_LEAST, _MOST)
        log = log + (each if each.shape[-1] == 1 else (each * mask).sum(-1, keepdim=True))
    log = log.clamp(_LEAST, _MOST)
    power, decay = (torch.where(advantages >= 0, *both) for both in zip(*gammas, strict=True))
    return torch.exp(power * log + decay * (1 - log.exp()))


def _check_grpo(
    loss_type: str, level: str, beta: float, ref_log_probs: torch.Tensor | None, most: int | None, high: float | None
) -> None:
    if loss_type not in _REDUCTIONS:
        raise ValueError(f"grpo: loss_type must be one of {', '.join(_REDUCTIONS)}, got {loss_type!r}")
    if level not in ("token", "sequence"):
        raise ValueError(f"grpo: level must be token or sequence, got {level!r}")
    if loss_type == "luspo" and level != "sequence":
        raise ValueError("grpo: luspo has weights of sequences; pass level='sequence'")
    needed = {
        "ref_log_probs, which beta asks for": beta and ref_log_probs is None,
        "max_completion_length, which dr_grpo divides by": loss_type == "dr_grpo" and most is None,
        "epsilon_high, the bound of cispo": loss_type == "cispo" and high is None,
    }
    for name, missing in needed.items():
        if missing:
            raise ValueError(f"grpo: {name}, is missing")


def jsd(
    hidden: torch.Tensor, weight: torch.Tensor, teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor,
    mask: torch.Tensor, *, beta: float = 0.5, temperature: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Return the mean generalised Jensen-Shannon divergence of two heads' distributions over the rows that count.

    ``beta * KL(T || M) + (1 - beta) * KL(S || M)`` with ``M = beta * T + (1 - beta) * S``; ``KL(T || S)`` for beta 0
    and ``KL(S || T)`` for 1 (arXiv 2306.13649, eq. 1).

    Args:
        hidden, weight: [..., hidden] and [vocabulary, hidden], of the student.
        teacher_hidden, teacher_weight: [..., any] and [vocabulary, any]; they get no gradient.
        mask: [...].
        beta: from 0 to 1.
        temperature: divides both models' logits.

    Raises:
        ValueError: as :func:`tilekern.ops.fused_linear_jsd`.
    """
    labels = torch.where(mask != 0, 0, -1)
    return fused_linear_jsd(hidden, weight, teacher_hidden, teacher_weight, labels, beta, -1, temperature)


def top_k_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, bias: torch.Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return log-probabilities of several ids per row, using :func:`tilekern.ops.linear_log_probs` for the first id.

    The logits of the other ids are products of the rows with gathered weights. They are computed for chunks of rows
    that need no more memory than the head, and again in the backward.

    Args:
        hidden, weight, bias, temperature, softcap: as in ``linear_log_probs``.
        ids: [..., k], of the vocabulary.

    Returns:
        [..., k] in float32 (float64 for float64).
    """
    rows, places = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, ids.shape[-1])
    first, _ = linear_log_probs(rows, weight, places[:, 0], bias=bias, temperature=temperature, softcap=softcap)

    def of_rows(some: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.bmm(embedding(chosen, weight), some[:, :, None])[..., 0].to(first.dtype)
        logits = logits if bias is None else logits + bias[chosen].to(first.dtype)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return logits / temperature

    step = max(1, weight.shape[0] // max(1, ids.shape[-1]))
    parts = zip(rows.split(step), places.split(step), strict=True)
    again = {"use_reentrant": False, "preserve_rng_state": False}
    logits = torch.cat([checkpoint(of_rows, some, chosen, weight, **again) for some, chosen in parts])
    return (logits - logits[:, :1] + first[:, None]).view(ids.shape)


def top_k_distillation(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, mask: torch.Tensor, *, tail: bool = True
) -> torch.Tensor:
    """Return ``KL(teacher || student)`` over the teacher's k likeliest ids, as the mean over the rows that count.

    Args:
        log_probs: [..., k], the student's log-probabilities of these ids, by :func:`top_k_log_probs`.
        teacher_log_probs: [..., k]; -inf marks missing ids if there are fewer than k.
        mask: [...].
        tail: whether all other ids count as one more id with the remaining probability; else both are normalised over
            the k ids.
    """
    counted = (mask != 0)[..., None]
    known = (teacher_log_probs > -torch.inf) | ~counted
    t, s = (x.where(counted, 0).masked_fill(~known, -torch.inf) for x in (teacher_log_probs, log_probs))
    if tail:
        t, s = (torch.cat((x, _log_of_rest(x.logsumexp(-1, keepdim=True).clamp(max=-1e-7))), -1) for x in (t, s))
        known = torch.cat((known, torch.ones_like(known[..., :1])), -1)
    else:
        t, s = (x - x.logsumexp(-1, keepdim=True) for x in (t, s))
    terms = t.exp() * (t.masked_fill(~known, 0) - s.masked_fill(~known, 0))
    return _mean(terms.sum(-1), mask)


def _mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over all that counts; 0 if nothing does."""
    counted = mask.to(x.dtype)
    return (x * counted).sum() / counted.sum().clamp(min=1)


def _means(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the counted tokens of each sequence, [sequences]; 0 if none counts."""
    counted = mask.to(x.dtype)
    return (x * counted).sum(-1) / counted.sum(-1).clamp(min=1)


def _chosen_nll(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the loss of the chosen sequences: the mean over their counted tokens."""
    return -_mean(log_probs.chunk(2)[0], mask.chunk(2)[0])


def _smoothed(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    loss = -logsigmoid(margin)
    return loss if not label_smoothing else (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-margin)


def _log_of_rest(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 - exp(x))`` for x below 0, accurate on both sides of -log 2."""
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x.masked_fill(near, -1))))
