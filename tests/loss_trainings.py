"""Trainings of a small Llama by each loss: with tilekern's ops, and with torch's formulas over whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import loss_formulas as formulas
import torch
import torch.nn.functional as F  # noqa: N812
from loss_formulas import IGNORED
from transformers import LlamaConfig, LlamaModel

from tilekern import ops
from tilekern.integrations import losses


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, its batches and its training."""

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
    """Inputs of a loss; rows are [sequences, tokens]."""

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
        """Return log-probabilities of the labels, 0 for rows that do not count."""
        if fused:
            return ops.linear_log_probs(self.hidden, self.weight, self.labels)[0]
        return formulas.chosen(self.logits.float(), self.labels)

    @property
    def reference_log_probs(self) -> torch.Tensor:
        return formulas.chosen(self.teacher_logits.float(), self.labels)


def rows(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of both models, of the rows that count alone, [rows, vocabulary]."""
    both = (step.logits, step.teacher_logits)
    student, teacher = (x.float().log_softmax(-1)[step.counted] for x in both)
    return student, teacher


def _rewards(step: Step) -> torch.Tensor:
    """From -1 to 1, of what a sequence is and not of where it stands in the batch."""
    return step.labels.clamp(min=0).sum(1) % 8 / 3.5 - 1


def _good(step: Step) -> torch.Tensor:
    return torch.arange(len(step.labels), device=step.labels.device) < len(step.labels) // 2


def _of_log_probs(loss: Callable[[Any, Step, torch.Tensor], torch.Tensor]) -> tuple[Any, str]:
    """A loss of a step and its log-probabilities, by :mod:`tilekern.integrations.losses` or by the formulas."""

    def of_step(step: Step, fused: bool) -> torch.Tensor:
        return loss(losses if fused else formulas, step, step.log_probs(fused))

    return of_step, "linear_log_probs_forward"


def _kto(by: Any, step: Step, p: torch.Tensor) -> torch.Tensor:
    ref = step.reference_log_probs
    return by.kto(p, ref, _good(step), by.kto_baseline(p, ref), beta=0.02, undesirable_weight=0.7)


PREFERENCES = {
    "dpo": _of_log_probs(lambda by, step, p: by.dpo(p, step.reference_log_probs, beta=0.02)),
    "ipo": _of_log_probs(lambda by, step, p: by.ipo(p, step.reference_log_probs, step.counted, beta=1.0)),
    "kto": _of_log_probs(_kto),
    "orpo": _of_log_probs(lambda by, step, p: by.orpo(p, step.counted, beta=0.2)),
    "cpo": _of_log_probs(lambda by, step, p: by.cpo(p, step.counted, beta=0.02)),
    "simpo": _of_log_probs(lambda by, step, p: by.simpo(p, step.counted)),
}


def _group(kind: str, level: str = "token") -> tuple[Any, str]:
    """GRPO with a divergence, of completions that a policy made which lay a little nearer to the reference."""
    bound = {"epsilon_high": 1.1} if kind == "cispo" else {}

    def loss(by: Any, step: Step, p: torch.Tensor) -> torch.Tensor:
        # VESPO's factor, of a product over all tokens, would be 0 further away.
        near = torch.lerp(p.detach(), step.reference_log_probs, 0.02 if kind == "vespo" else 0.2)
        tokens = step.labels.shape[1]
        found = by.grpo(
            p, _rewards(step), step.counted, old_log_probs=near, ref_log_probs=step.reference_log_probs,
            loss_type=kind, level=level, beta=0.05, max_completion_length=tokens, **bound,
        )  # fmt: skip
        # Sums of whole sequences have gradients that are too large for the rate of the others.
        return found / tokens if kind == "luspo" else found

    return _of_log_probs(loss)


GROUPS = {name: _group(name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")} | {
    "gspo": _group("grpo", "sequence"), "luspo": _group("luspo", "sequence"),
}  # fmt: skip


def _top_k(step: Step, fused: bool) -> torch.Tensor:
    """Distillation of the teacher's four likeliest ids and of all others as one."""
    by = losses if fused else formulas
    taught, ids = step.teacher_logits.float().log_softmax(-1).topk(4)
    return by.top_k_distillation(by.top_k_log_probs(step.hidden, step.weight, ids), taught, step.counted)


def _jsd(step: Step, fused: bool) -> torch.Tensor:
    heads = (step.hidden, step.weight, step.teacher_hidden, step.teacher_weight)
    return (losses if fused else formulas).jsd(*heads, step.counted, beta=0.25)


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
                lambda student, teacher: formulas.divergence(student, teacher, 0.25).mean(),
            ),
            "jsd",
        ),
        "fused_linear_jsd": (_jsd, "fused_linear_jsd"),
        "top_k_distillation": (_top_k, "linear_log_probs_forward"),
    }
    | PREFERENCES
    | GROUPS
)


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
