"""Cross entropy of ``hidden @ weight.T`` without the logits: chunk by chunk, with both gradients in the same pass.

:mod:`tilekern.kernels.composites.head` computes a chunk; one kernel (:mod:`tilekern.kernels.cross_entropy.fused`)
computes the loss, and overwrites the logits with the gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from tilekern.kernels.composites.head import (
    Head,
    PlanFor,
    chunk_plans,
    gradients_of,
    matrices,
    matrix_bytes,
    product_flops,
    spec_of_head,
)
from tilekern.kernels.cross_entropy import fused as cross_entropy_fused
from tilekern.kernels.cross_entropy import separate as cross_entropy
from tilekern.spec import Config, Problem


@dataclass
class Beside:
    """Further results of a loss, chunk by chunk.

    Attributes:
        lse: the log of the sum of exponentials of each row, float32 [rows], for all losses.
        predicted: the index of the largest logit of each row, int64 [rows], if the options ask for it.
        shares: the probability of each row's target, float32 [rows], if the options scale by it.
        dbias: the gradient of the bias, float32 [vocabulary], if it is wanted.
    """

    lse: Any = None
    predicted: Any = None
    shares: Any = None
    dbias: Any = None


@dataclass(frozen=True)
class LossOptions:
    """A loss's parameters besides logits and targets; the fields of torch's ``cross_entropy`` mean the same here.

    ``class_weight`` is float32 [vocabulary]. ``hidden_gradient`` and ``weight_gradient`` say which gradients are
    wanted; ``wide_sums`` adds the weight's gradient up in float32. ``bias`` [vocabulary], of the dtype of the weight,
    is added to the logits; ``token_scaling`` multiplies each loss by the probability of its target, through which no
    gradient flows; ``predicted`` asks for the indices of the largest logits. Further results go to ``beside``.
    """

    class_weight: Any = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    hidden_gradient: bool = True
    weight_gradient: bool = True
    wide_sums: bool = False
    bias: Any = None
    bias_gradient: bool = False
    token_scaling: bool = False
    predicted: bool = False
    beside: Beside | None = field(default=None, compare=False)

    @functools.cached_property
    def flags(self) -> tuple[bool, bool, bool]:
        """Return the flags of the cross-entropy specs: weighted, smoothed, capped."""
        return self.class_weight is not None, self.label_smoothing > 0, self.softcap is not None

    def arguments(self, device: Any) -> tuple[Any, ...]:
        """Return the arguments of the cross-entropy kernels for these options."""
        return cross_entropy.option_arguments(
            self.class_weight, self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, device
        )


def plans(
    plan_for: PlanFor, config: Config, hidden: Any, weight: Any, options: LossOptions, *, loss: bool, gradient: bool
) -> list[tuple[Any, ...]] | None:
    """Return each chunk with the plans of the loss alone and of the loss with its gradient; None if one has no plan.

    An unwanted plan is None too.
    """
    specs = (cross_entropy.FORWARD if loss else None, cross_entropy_fused.FUSED if gradient else None)
    sizes = (len(hidden), weight.shape[0], hidden.dtype, *options.flags)
    return chunk_plans(plan_for, specs, config["chunk"], hidden.device, *sizes)


def loss_and_gradients(
    plan_for: PlanFor, config: Config, hidden: Any, weight: Any, target: Any, scale: Any, options: LossOptions
) -> tuple[Any, Any, Any] | None:
    """Return the loss of each row and the gradients of ``sum(scale * loss)``.

    Args:
        plan_for: gives the plans of the cross-entropy kernels and of the products.
        config: ``chunk`` is the number of rows with logits in memory; ``products`` chooses the implementation of
            products.
        hidden: [rows, hidden].
        weight: [vocabulary, hidden], of the same dtype.
        target: int32 [rows].
        scale: float32 [rows]; None for the loss alone.
        options: the loss.

    Returns:
        The loss, float32 [rows], dhidden and dweight, None for a gradient that is not wanted; None if no kernel serves
        the problem.
    """
    import torch

    alone, device = scale is None, hidden.device
    with_loss = alone or options.token_scaling
    chunks = plans(plan_for, config, hidden, weight, options, loss=with_loss, gradient=not alone)
    if chunks is None:
        return None
    wanted = (options.hidden_gradient, options.weight_gradient, options.bias_gradient)
    head = Head(
        plan_for, config, hidden, weight, chunks[0][0].stop, bias=options.bias,
        graded=(False, False, False) if alone else wanted, wide_sums=options.wide_sums,
    )  # fmt: skip
    loss, lse = (torch.empty(len(hidden), dtype=torch.float32, device=device) for _ in range(2))
    beside, arguments, number = room_beside(options, lse), options.arguments(device), hidden.get_device()
    for part, forward, fused in chunks:
        logits, of_rows = head.logits(part), (loss[part], lse[part])
        if forward is not None:
            # Token scaling needs the shares before the gradient, which they multiply too.
            forward.launch(number, logits, target[part], *arguments, *of_rows)
        note(beside, part, logits, target[part], options)
        if fused is not None:
            slope = scale[part] if beside.shares is None else scale[part] * beside.shares[part]
            fused.launch(number, logits, target[part], slope, *arguments, *of_rows, logits)
            head.take(part)
    dhidden, dweight, beside.dbias = head.gradients
    return loss if beside.shares is None else loss * beside.shares, dhidden, dweight


def room_beside(options: LossOptions, lse: Any) -> Beside:
    """Allocate the further results that the options ask for."""
    import torch

    beside = Beside() if options.beside is None else options.beside
    beside.lse = lse
    beside.shares = torch.empty_like(lse) if options.token_scaling else None
    beside.predicted = torch.empty_like(lse, dtype=torch.int64) if options.predicted else None
    return beside


def note(beside: Beside, part: slice, logits: Any, target: Any, options: LossOptions) -> None:
    """Store the further results of a chunk's logits; shares need their ``lse``."""
    if options.predicted:
        beside.predicted[part] = logits.argmax(-1)
    if options.token_scaling:
        labels = target.clamp(0, logits.shape[1] - 1).long()
        at_target = logits.gather(1, labels[:, None])[:, 0].to(beside.lse.dtype)
        if options.softcap is not None:
            at_target = options.softcap * (at_target / options.softcap).tanh()
        beside.shares[part] = (at_target - beside.lse[part]).exp().masked_fill(target == options.ignore_index, 0)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, vocabulary = problem["rows"], problem["vocabulary"]
    return matrices(problem, generator, device) | {
        "target": torch.randint(0, vocabulary, (rows,), generator=generator, device=device, dtype=torch.int32),
        "scale": torch.rand(rows, generator=generator, device=device) + 0.5,
        "options": LossOptions(),
    }


def reference(hidden: Any, weight: Any, target: Any, scale: Any, options: LossOptions) -> dict[str, Any]:
    """Return loss and gradients through the logits in float64, for plain options."""
    import torch

    assert options == LossOptions(), "the reference knows the plain loss only"
    x, w, wanted = hidden.double(), weight.double(), target.long()
    probabilities = torch.log_softmax(x @ w.t(), -1)
    loss = -probabilities.gather(1, wanted[:, None])[:, 0]
    probabilities.exp_()
    probabilities[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
    probabilities *= scale.double()[:, None]
    return {"loss": loss, "dhidden": probabilities @ w, "dweight": probabilities.t() @ x}


SPEC = spec_of_head(
    loss_and_gradients,
    name="fused_linear_cross_entropy",
    summary="cross entropy of hidden @ weight.T and both gradients, without the logits",
    inputs=_inputs,
    outputs=lambda problem, blocks: {"loss": ((problem["rows"],), "float32")} | gradients_of(problem),
    reference=reference,
    bytes_moved=lambda problem: 2 * matrix_bytes(problem),
    flops=lambda problem: 3 * product_flops(problem),
)
SPECS = (SPEC,)
