"""The parts that the cross-entropy specs share: arrays, scalars, a constraint, inputs and references."""

from __future__ import annotations

import math
from typing import Any

from tilekern.kernels.families.placeholders import placeholder
from tilekern.kernels.families.vocabulary import COLUMNS, LOGITS, ROWS
from tilekern.spec import Array, Config, Constraint, Problem, ScalarParameter, Value
from tilekern.spec.targets import Target

FLAGS = ("weighted", "smoothed", "capped")
PLAIN: dict[str, Value] = dict.fromkeys(FLAGS, False)
READ = (Array("logits", "dtype", LOGITS), Array("target", "int32", ROWS))
OPTIONS = (
    Array("weight", "float32", COLUMNS, flag="weighted"),
    # The sum of the class weights.
    Array("weight_sum", "float32", (), flag="weighted"),
    ScalarParameter("ignore_index", "int32"),
    ScalarParameter("smoothing", "float32"),
    ScalarParameter("z_loss", "float32"),
    ScalarParameter("softcap", "float32"),
)
DLOGITS = Array("dlogits", "dtype", LOGITS, "output")


def option_arguments(
    class_weight: Any, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, device: Any
) -> tuple[Any, ...]:
    """Return the kernels' arguments from ``weight`` to ``softcap``, for float32 class weights [vocabulary] or None."""
    if class_weight is None:
        import torch

        weight, weight_sum = (placeholder(ndim, torch.float32, device) for ndim in (2, 1))
    else:
        weight, weight_sum = class_weight.view(1, -1), class_weight.sum().view(1)
    return weight, weight_sum, ignore_index, float(label_smoothing), float(z_loss), float(softcap or 1.0)


def _steps_fit(problem: Problem, config: Config, target: Target) -> bool:
    workers = 32 * (config["num_worker_warps"] or 4)
    # A thread of a pass over a row holds a step's elements, and a maximum and a sum for each lane.
    live = config["tile_n"] * (config["unroll"] + 2) / workers
    # TMA adds four warps a block.
    registers = target.registers / ((workers + 128 * config["tma"]) * config["occupancy"])
    return bool(live <= 0.8 * registers)


STEPS_FIT = Constraint("the registers cannot hold a step's elements, maxima and sums at this occupancy", _steps_fit)


def logits_and_options(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw logits, a few of a row large, so that no softmax is flat; targets, some of them ignored; and options."""
    import torch

    rows, vocabulary = problem["rows"], problem["vocabulary"]
    logits = 0.5 + 3 * torch.rand((rows, vocabulary), generator=generator, device=device)
    logits[:, :: vocabulary // 8 + 1] += math.log(1 + vocabulary / 8)
    target = torch.randint(vocabulary, (rows,), generator=generator, device=device, dtype=torch.int32)
    target[3::7] = -100
    weight = torch.ones((1, 1), device=device)
    if problem["weighted"]:
        weight = 0.5 + torch.rand((1, vocabulary), generator=generator, device=device)
    return {
        "logits": logits.to(getattr(torch, problem["dtype"])),
        "target": target,
        "weight": weight,
        "weight_sum": weight.sum(1),
        "ignore_index": -100,
        "smoothing": 0.125,
        "z_loss": 0.0625,
        "softcap": 3.5,
    }


def upstream(problem: Problem, generator: Any, device: str) -> Any:
    """Draw upstream gradients of the rows' losses, some of them 0."""
    import torch

    scale = 0.5 + torch.rand((problem["rows"],), generator=generator, device=device)
    scale[5::11] = 0
    return scale


def capped_logits(logits: Any, softcap: float, capped: bool) -> Any:
    """Return the logits in float64, after the cap if there is one."""
    wide = logits.double()
    return softcap * (wide / softcap).tanh() if capped else wide


def _share(target: Any, weight: Any, weighted: bool, ignore_index: int) -> Any:
    """Return the targets' class weights, 0 if ignored, and the targets as indices of classes."""
    valid = target != ignore_index
    classes = target.long().where(valid, 0)
    return (weight.double()[0, classes] if weighted else 1.0) * valid.double(), classes


def reference_rows(
    logits: Any, target: Any, weight: Any, weight_sum: Any, ignore_index: int, smoothing: float, z_loss: float,
    softcap: float, weighted: bool, smoothed: bool, capped: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return loss and lse of every row in float64; targets must be classes or ignored."""
    x = capped_logits(logits, softcap, capped)
    share, classes = _share(target, weight, weighted, ignore_index)
    valid = target != ignore_index
    lse = x.logsumexp(1) * valid
    gaps = x.logsumexp(1, keepdim=True) - x
    loss = share * gaps.gather(1, classes[:, None])[:, 0]
    if smoothed:
        even = (gaps * weight.double() if weighted else gaps).mean(1) * valid
        loss = (1 - smoothing) * loss + smoothing * even
    return {"loss": loss + z_loss * lse.square(), "lse": lse}


def reference_gradient(
    logits: Any, target: Any, lse: Any, scale: Any, weight: Any, weight_sum: Any, ignore_index: int, smoothing: float,
    z_loss: float, softcap: float, weighted: bool, smoothed: bool, capped: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the gradient of ``(scale * loss).sum()`` by the logits in float64, for the given lse."""
    x, vocabulary = capped_logits(logits, softcap, capped), logits.shape[1]
    share, classes = _share(target, weight, weighted, ignore_index)
    valid = target != ignore_index
    lse, kept = lse.double()[:, None], 1 - smoothing * smoothed
    every = smoothing * smoothed / vocabulary * (weight.double() if weighted else x.new_ones((1, vocabulary)))
    # An ignored row has the gradient 0; its lse may be 0, with which large logits overflow.
    softmax = (x - lse).exp().masked_fill(~valid[:, None], 0)
    gradient = softmax * (kept * share[:, None] + every.sum() + 2 * z_loss * lse) - every
    gradient.scatter_add_(1, classes[:, None], -kept * share[:, None])
    if capped:
        gradient *= 1 - (x / softcap).square()
    return {"dlogits": gradient * (scale.double() * valid)[:, None]}
