"""The formulas of post-training losses (:mod:`tilekern.integrations.losses`), in float64, over whole rows.

Those of TRL's trainers are held to ``tilekern.integrations.losses`` apart, in ``integrations/test_trl.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

IGNORED = -100
Tensor = torch.Tensor


def chosen(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each label, [sequences, tokens]; 0 where it does not count."""
    every = logits.log_softmax(-1)
    return every.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORED)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _lead(each: Tensor) -> Tensor:
    """Return the lead of the chosen sequences over the rejected ones."""
    better, worse = each.chunk(2)
    return better - worse


def _means(p: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([row[counts].mean() for row, counts in zip(p, mask, strict=True)])


def _nll(p: Tensor, mask: Tensor) -> Tensor:
    """Return the mean loss of the chosen sequences."""
    half = len(p) // 2
    return -p[:half][mask[:half]].mean()


def dpo(p: Tensor, ref: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    margin = beta * _lead((p - ref).sum(1))
    return ((1 - label_smoothing) * F.softplus(-margin) + label_smoothing * F.softplus(margin)).mean()


def ipo(p: Tensor, ref: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    return (_lead(_means(p - ref, mask)) - 1 / (2 * beta)).square().mean()


def orpo(p: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    odds = _means(p, mask).exp()
    return _nll(p, mask) + beta * F.softplus(-_lead(torch.log(odds / (1 - odds)))).mean()


def cpo(p: Tensor, mask: Tensor, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    return F.softplus(-beta * _lead(p.sum(1))).mean() + alpha * _nll(p, mask)


def simpo(p: Tensor, mask: Tensor, beta: float = 2.0, gamma: float = 0.5, alpha: float = 0.0) -> Tensor:
    return F.softplus(gamma - beta * _lead(_means(p, mask))).mean() + alpha * _nll(p, mask)


def kto(
    p: Tensor, ref: Tensor, desirable: Tensor, baseline: Any, beta: float = 0.1, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    margin = beta * ((p - ref).sum(1) - baseline)
    good, bad = desirable_weight * torch.sigmoid(-margin), undesirable_weight * torch.sigmoid(margin)
    return torch.where(desirable, good, bad).mean()


def kto_baseline(p: Tensor, ref: Tensor) -> Tensor:
    return (p - ref).sum(1).mean().detach().clamp(min=0)


def _terms(p: Tensor, ratio: Tensor, weight: Tensor, gain: Tensor, loss_type: str, sampling_ratio: Any, **options: Any):
    """The policy's loss of each token, [sequences, tokens] or [sequences, 1]."""
    if loss_type == "vespo":
        whole = ratio.sum(1, keepdim=True).exp().detach() * sampling_ratio
        shape = torch.where(gain >= 0, whole**2 * (3 - 3 * whole).exp(), whole**3 * (2 - 2 * whole).exp())
        return -shape * gain * p
    if loss_type == "cispo":
        loss = -weight.detach().clamp(max=options["epsilon_high"]) * gain * p
    elif loss_type == "sapo":
        heat = torch.where(gain > 0, 1.0, 1.05)
        loss = -4 / heat * torch.sigmoid(heat * (weight - 1)) * gain
    else:
        low = options.get("epsilon", 0.2)
        clipped = weight.clamp(1 - low, 1 + (options.get("epsilon_high") or low))
        loss = -torch.minimum(weight.clamp(max=options.get("delta")) * gain if options.get("delta") else weight * gain,
                              clipped * gain)  # fmt: skip
    return loss * sampling_ratio


def grpo(
    p: Tensor, advantages: Tensor, mask: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, loss_type: str,
    level: str = "token", beta: float = 0.0, kl_weighted: bool = False, sampling_ratio: Any = 1.0,
    max_completion_length: int = 0, num_items: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    ratio, lead = (p - old_log_probs) * mask, ref_log_probs - p
    weight = ratio.exp() if level == "token" else _means(ratio, mask).exp()[:, None]
    terms = _terms(p, ratio, weight, advantages[:, None], loss_type, sampling_ratio, **options)
    terms = terms + beta * (lead.exp() - lead - 1) * (weight if kl_weighted else 1)
    if loss_type in ("grpo", "sapo"):
        return _means(terms.expand_as(p), mask).mean()
    counted = mask.sum() if num_items is None else num_items
    divisors = {"bnpo": mask.sum(), "dr_grpo": len(p) * max_completion_length, "luspo": len(p)}
    return (terms * mask).sum() / divisors.get(loss_type, counted)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Jensen and Shannon's generalised one of each row, of logarithms of probabilities."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixed = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


def jsd(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, mask: Tensor, beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    heads = ((hidden, weight), (teacher_hidden, teacher_weight))
    every = [_wide(x @ w.T / temperature).log_softmax(-1) for x, w in heads]
    return divergence(*every, beta)[mask].mean()


def top_k_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Any = 0.0, temperature: float = 1.0, softcap: Any = None
) -> Tensor:
    logits = _wide(hidden @ weight.T + bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1).gather(-1, ids)


def top_k_distillation(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, tail: bool = True) -> Tensor:
    rows = []
    for t, x in zip(teacher_log_probs[mask], log_probs[mask], strict=True):
        p, q = t.exp(), torch.where(t > -torch.inf, x.exp(), 0)
        p, q = (torch.cat((one, 1 - one.sum()[None])) if tail else one / one.sum() for one in (p, q))
        rows.append((p[p > 0] * torch.log(p[p > 0] / q[p > 0])).sum())
    return torch.stack(rows).mean()
