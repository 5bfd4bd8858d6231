"""Trainings of a small Llama by each loss: with tilekern's ops, and with torch's formulas over whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaModel

from tilekern import ops
from tilekern.integrations import losses

IGNORED = -100


@dataclass(frozen=True)
class Sizes:
    """Of the model, its batches and its training."""

    vocabulary: int = 83
    hidden: int = 32
    sequences: int = 4
    tokens: int = 12
    steps: int = 6
    learning_rate: float = 0.1
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Step:
    """What a loss is made from; rows are [sequences, tokens]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    labels: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        return self.labels != IGNORED

    @property
    def logits(self) -> torch.Tensor:
        return self.hidden @ self.weight.T

    @property
    def teacher_logits(self) -> torch.Tensor:
        return self.teacher_hidden @ self.teacher_weight.T

    def log_probs(self, fused: bool) -> torch.Tensor:
        """Of the labels, 0 where a row does not count."""
        if fused:
            return ops.linear_log_probs(self.hidden, self.weight, self.labels)[0]
        return chosen(self.logits, self.labels)

    @property
    def reference_log_probs(self) -> torch.Tensor:
        return chosen(self.teacher_logits, self.labels)


def chosen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of each label, [sequences, tokens]; 0 where it does not count."""
    every = logits.float().log_softmax(-1)
    return every.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORED)


def divergence(step: Step, beta: float) -> torch.Tensor:
    """The Jensen-Shannon divergence of both models' probabilities, the mean over the rows that count."""
    student, teacher = step.logits.float().softmax(-1), step.teacher_logits.float().softmax(-1)
    mixed = beta * teacher + (1 - beta) * student
    terms = beta * teacher * (teacher / mixed).log() + (1 - beta) * student * (student / mixed).log()
    return terms.sum(-1)[step.counted].mean()


def rows(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of both models, of the rows that count alone, [rows, vocabulary]."""
    both = (step.logits, step.teacher_logits)
    student, teacher = (x.float().log_softmax(-1)[step.counted] for x in both)
    return student, teacher


def _rewards(step: Step) -> torch.Tensor:
    """From -1 to 1, of what a sequence is and not of where it stands in the batch."""
    return step.labels.clamp(min=0).sum(1) % 8 / 3.5 - 1


def _halves(each: torch.Tensor) -> torch.Tensor:
    """What the chosen sequences have more than the rejected ones."""
    better, worse = each.chunk(2)
    return better - worse


def _preference(
    fused: Callable[[Step, torch.Tensor], torch.Tensor], formula: Callable[[Step, torch.Tensor], torch.Tensor]
) -> tuple[Callable[[Step, bool], torch.Tensor], str]:
    """A loss by its function in tilekern and by its formula, both of a step and its log-probabilities."""

    def loss(step: Step, by_op: bool) -> torch.Tensor:
        return (fused if by_op else formula)(step, step.log_probs(by_op))

    return loss, "linear_log_probs_forward"


def _means(step: Step, log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs.sum(1) / step.counted.sum(1)


def _nll(step: Step, log_probs: torch.Tensor) -> torch.Tensor:
    """Of the chosen sequences."""
    half = len(log_probs) // 2
    return -log_probs[:half][step.counted[:half]].mean()


def _good(step: Step) -> torch.Tensor:
    return torch.arange(len(step.labels), device=step.labels.device) < len(step.labels) // 2


def _kto(step: Step, p: torch.Tensor) -> torch.Tensor:
    lead = (p - step.reference_log_probs).sum(1)
    margin = 0.02 * (lead - lead.mean().detach().clamp(min=0))
    return torch.where(_good(step), torch.sigmoid(-margin), 0.7 * torch.sigmoid(margin)).mean()


def _log_odds(step: Step, p: torch.Tensor) -> torch.Tensor:
    means = _means(step, p)
    return means - torch.log(1 - means.exp())


PREFERENCES = {
    "dpo": _preference(
        lambda step, p: losses.dpo(p, step.reference_log_probs, beta=0.02),
        lambda step, p: F.softplus(-0.02 * _halves((p - step.reference_log_probs).sum(1))).mean(),
    ),
    "ipo": _preference(
        lambda step, p: losses.ipo(p, step.reference_log_probs, step.counted, beta=1.0),
        lambda step, p: (_halves(_means(step, p - step.reference_log_probs)) - 0.5).square().mean(),
    ),
    "kto": _preference(
        lambda step, p: losses.kto(
            p, step.reference_log_probs, _good(step), losses.kto_baseline(p, step.reference_log_probs), beta=0.02,
            undesirable_weight=0.7,
        ),
        _kto,
    ),
    "orpo": _preference(
        lambda step, p: losses.orpo(p, step.counted, beta=0.2),
        lambda step, p: _nll(step, p) + 0.2 * F.softplus(-_halves(_log_odds(step, p))).mean(),
    ),
    "cpo": _preference(
        lambda step, p: losses.cpo(p, step.counted, beta=0.02),
        lambda step, p: _nll(step, p) + F.softplus(-0.02 * _halves(p.sum(1))).mean(),
    ),
    "simpo": _preference(
        lambda step, p: losses.simpo(p, step.counted),
        lambda step, p: F.softplus(0.5 - 2 * _halves(_means(step, p))).mean(),
    ),
}  # fmt: skip


def _terms(kind: str, p: torch.Tensor, ratio: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """The policy's loss of each token, [sequences, tokens] or [sequences, 1]."""
    if kind == "cispo":
        return -weight.detach().clamp(max=1.1) * gain * p
    if kind == "sapo":
        heat = torch.where(gain > 0, 1.0, 1.05)
        return -4 / heat * torch.sigmoid(heat * (weight - 1)) * gain
    if kind == "vespo":
        whole = ratio.sum(1, keepdim=True).exp().detach()
        shape = torch.where(gain >= 0, whole**2 * (3 - 3 * whole).exp(), whole**3 * (2 - 2 * whole).exp())
        return -shape * gain * p
    return -torch.minimum(weight * gain, weight.clamp(0.8, 1.2) * gain)


def _group(kind: str, level: str = "token") -> tuple[Callable[[Step, bool], torch.Tensor], str]:
    """GRPO with a divergence, of completions that a policy made which lay a little nearer to the reference."""

    def near(step: Step, p: torch.Tensor) -> torch.Tensor:
        # VESPO's factor, of a product over all tokens, would be 0 further away.
        return torch.lerp(p.detach(), step.reference_log_probs, 0.02 if kind == "vespo" else 0.2)

    def fused(step: Step, p: torch.Tensor) -> torch.Tensor:
        tokens = step.labels.shape[1]
        loss = losses.grpo(
            p, _rewards(step), step.counted, old_log_probs=near(step, p), ref_log_probs=step.reference_log_probs,
            loss_type=kind, level=level, beta=0.05, epsilon_high=1.1 if kind == "cispo" else None,
            max_completion_length=tokens,
        )  # fmt: skip
        return loss / tokens if kind == "luspo" else loss

    def formula(step: Step, p: torch.Tensor) -> torch.Tensor:
        counted, ratio, lead = step.counted.to(p.dtype), p - near(step, p), step.reference_log_probs - p
        lengths = counted.sum(1)
        weight = ratio.exp() if level == "token" else (ratio.sum(1) / lengths).exp()[:, None]
        terms = _terms(kind, p, ratio, weight, _rewards(step)[:, None]) + 0.05 * (lead.exp() - lead - 1)
        sums = (terms * counted).sum(1)
        if kind in ("grpo", "sapo"):
            return (sums / lengths).mean()
        # Sums of whole sequences have gradients that are too large for the rate of the others.
        return sums.sum() / (counted.numel() if kind in ("dr_grpo", "luspo") else counted.sum())

    return _preference(fused, formula)


GROUPS = {name: _group(name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")} | {
    "gspo": _group("grpo", "sequence"), "luspo": _group("luspo", "sequence"),
}  # fmt: skip


def _top_k(step: Step, fused: bool) -> torch.Tensor:
    """Distillation of the teacher's four likeliest ids and of all others as one."""
    every = step.teacher_logits.float().log_softmax(-1)
    taught, ids = every.topk(4)
    if fused:
        found = losses.top_k_log_probs(step.hidden, step.weight, ids)
        return losses.top_k_distillation(found, taught, step.counted)
    known = step.logits.float().log_softmax(-1).gather(-1, ids).exp()
    one, other = (torch.cat((x, 1 - x.sum(-1, keepdim=True)), -1) for x in (taught.exp(), known))
    return (one * (one / other).log()).sum(-1)[step.counted].mean()


def _by_probabilities(op: Callable[..., Any], formula: Callable[..., Any]) -> Callable[[Step, bool], Any]:
    def loss(step: Step, fused: bool) -> Any:
        return (op if fused else formula)(*rows(step))

    return loss


# Each takes a step and whether tilekern's op makes the loss; beside it, a spec that runs then.
LOSSES: dict[str, tuple[Callable[[Step, bool], torch.Tensor], str]] = (
    {
        "cross_entropy": (
            lambda step, fused: (ops.cross_entropy if fused else F.cross_entropy)(
                step.logits.flatten(0, 1).float(), step.labels.flatten()
            ),
            "cross_entropy_forward",
        ),
        "fused_linear_cross_entropy": (
            lambda step, fused: (
                ops.fused_linear_cross_entropy(step.hidden.flatten(0, 1), step.weight, step.labels.flatten())
                if fused
                else F.cross_entropy(step.logits.flatten(0, 1).float(), step.labels.flatten())
            ),
            "fused_linear_cross_entropy",
        ),
        "kl_div": (
            _by_probabilities(
                lambda student, teacher: ops.kl_div(student, teacher, log_target=True),
                lambda student, teacher: F.kl_div(student, teacher, reduction="batchmean", log_target=True),
            ),
            "kl_div_forward",
        ),
        "tvd": (
            _by_probabilities(
                lambda student, teacher: ops.tvd(student.exp(), teacher.exp()),
                lambda student, teacher: (student.exp() - teacher.exp()).abs().sum(1).mean() / 2,
            ),
            "tvd",
        ),
        "jsd": (
            _by_probabilities(
                lambda student, teacher: ops.jsd(student, teacher, beta=0.25),
                lambda student, teacher: _mixed(student, teacher, 0.25),
            ),
            "jsd",
        ),
        "fused_linear_jsd": (
            lambda step, fused: (
                losses.jsd(step.hidden, step.weight, step.teacher_hidden, step.teacher_weight, step.counted, beta=0.25)
                if fused
                else divergence(step, 0.25)
            ),
            "fused_linear_jsd",
        ),
        "top_k_distillation": (_top_k, "linear_log_probs_forward"),
    }
    | PREFERENCES
    | GROUPS
)


def _mixed(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    terms = beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)
    return terms.sum(1).mean()


def _llama(sizes: Sizes, seed: int) -> tuple[Any, torch.nn.Linear]:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, vocab_size=sizes.vocabulary, max_position_embeddings=sizes.tokens, use_cache=False,
    )  # fmt: skip
    model, head = LlamaModel(config), torch.nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
    return model.to(sizes.device, sizes.dtype), head.to(sizes.device, sizes.dtype)


def _batches(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, [steps, sequences, tokens]: each id follows from the one before; a part is not counted."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(sizes.vocabulary, (sizes.steps, sizes.sequences, 1), generator=generator)
    ids = (start + 7 * torch.arange(sizes.tokens + 1)) % sizes.vocabulary
    lengths = torch.randint(sizes.tokens // 2, sizes.tokens + 1, start.shape, generator=generator)
    labels = ids[..., 1:].where(torch.arange(sizes.tokens) < lengths, IGNORED)
    return ids[..., :-1].to(sizes.device), labels.to(sizes.device)


def curve(
    name: str, *, fused: bool, sizes: Sizes | None = None, order: Sequence[int] | None = None,
    features: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The losses of a training, float64 [steps] on the CPU; always from the same weights, on the same batches.

    Args:
        name: of :data:`LOSSES`.
        fused: whether tilekern's ops make the loss.
        sizes: of the model and its training.
        order: of a batch's sequences, in which sums over them are taken; pairs of sequences must stay pairs.
        features: the order of the head's input, in which each logit is summed.
    """
    sizes = sizes or Sizes()
    loss_of, _ = LOSSES[name]
    (model, head), (teacher, teacher_head) = _llama(sizes, 0), _llama(sizes, 1)
    teacher_head.requires_grad_(False)
    # Adam's steps would be the same ones for gradients that are too large.
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=sizes.learning_rate, momentum=0.9)
    found = []
    for ids, labels in zip(*_batches(sizes), strict=True):
        at = list(range(sizes.sequences)) if order is None else list(order)
        with torch.no_grad():
            taught = teacher(ids[at]).last_hidden_state
        hidden = model(ids[at]).last_hidden_state
        heads = (hidden, head.weight, taught, teacher_head.weight)
        inputs = heads if features is None else [x[..., features.to(x.device)] for x in heads]
        loss = loss_of(Step(*inputs, labels[at]), fused)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().double().cpu())
    return torch.stack(found)
