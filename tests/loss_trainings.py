"""Trainings of a small Llama by each loss: with tilekern's ops, and with torch's formulas over whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaModel

from tilekern import losses, ops

IGNORED = -100


@dataclass(frozen=True)
class Sizes:
    """Of the model, its batches and its training."""

    vocabulary: int = 83
    hidden: int = 32
    sequences: int = 4
    tokens: int = 12
    steps: int = 12
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
    return torch.linspace(-1, 1, len(step.labels), device=step.labels.device)


def _dpo(step: Step, fused: bool) -> torch.Tensor:
    if fused:
        return losses.dpo(step.log_probs(True), step.reference_log_probs, beta=0.02)
    better, worse = (step.log_probs(False) - step.reference_log_probs).sum(1).chunk(2)
    return F.softplus(-0.02 * (better - worse)).mean()


def _grpo(step: Step, fused: bool) -> torch.Tensor:
    rewards, beta = _rewards(step), 0.05
    log_probs, reference = step.log_probs(fused), step.reference_log_probs
    if fused:
        return losses.grpo(log_probs, rewards, step.counted, ref_log_probs=reference, beta=beta)
    weight, lead = (log_probs - log_probs.detach()).exp(), reference - log_probs
    terms = -weight * rewards[:, None] + beta * (lead.exp() - lead - 1)
    return terms[step.counted].mean()


def _by_probabilities(op: Callable[..., Any], formula: Callable[..., Any]) -> Callable[[Step, bool], Any]:
    def loss(step: Step, fused: bool) -> Any:
        return (op if fused else formula)(*rows(step))

    return loss


# Each takes a step and whether tilekern's op makes the loss; beside it, a spec that runs then.
LOSSES: dict[str, tuple[Callable[[Step, bool], torch.Tensor], str]] = {
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
    "dpo": (_dpo, "linear_log_probs_forward"),
    "grpo": (_grpo, "linear_log_probs_forward"),
}


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


def curve(name: str, *, fused: bool, sizes: Sizes | None = None, order: Sequence[int] | None = None) -> torch.Tensor:
    """The losses of a training, float64 [steps] on the CPU; always from the same weights, on the same batches.

    Args:
        name: of :data:`LOSSES`.
        fused: whether tilekern's ops make the loss.
        sizes: of the model and its training.
        order: of a batch's sequences, in which sums over them are taken; pairs of sequences must stay pairs.
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
        loss = loss_of(Step(hidden, head.weight, taught, teacher_head.weight, labels[at]), fused)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().double().cpu())
    return torch.stack(found)
