"""Cross entropy of ``hidden @ weight.T`` without the logits: chunk by chunk, with both gradients in the same pass.

For each chunk of rows: logits by a matrix product, loss and the gradient in their place by one kernel
(:mod:`tilekern.kernels.cross_entropy_fused`), then ``dhidden = dlogits @ weight`` and
``dweight += dlogits.T @ hidden``. The memory above inputs and gradients is one chunk of logits. Small chunks make
``dweight`` be read and written more often, large ones need more memory, so the number of rows in a chunk is for the
tuner to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilekern.kernels import cross_entropy, cross_entropy_fused
from tilekern.spec import (
    ITEM_BYTES,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    LibraryCall,
    ModelShape,
    Problem,
    Space,
    Value,
)
from tilekern.targets import Target

_MOST_CHUNK_BYTES = 700 << 20
_PITCH = 16
_CHUNKS = (256, 512, 1024, 1536, 2048, 3072, 4096, 8192)


@dataclass(frozen=True)
class LossOptions:
    """What a loss is made of beside logits and targets; the fields of torch's ``cross_entropy`` mean the same here.

    ``class_weight`` is float32 [vocabulary]. ``hidden_gradient`` and ``weight_gradient`` say which gradients are
    wanted; ``wide_sums`` adds the weight's gradient up in float32.
    """

    class_weight: Any = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    hidden_gradient: bool = True
    weight_gradient: bool = True
    wide_sums: bool = False

    @functools.cached_property
    def flags(self) -> tuple[bool, bool, bool]:
        """The flags of the cross-entropy specs: weighted, smoothed, capped."""
        return self.class_weight is not None, self.label_smoothing > 0, self.softcap is not None

    def arguments(self, device: Any) -> tuple[Any, ...]:
        """The arguments of the cross-entropy kernels that these options make up."""
        return cross_entropy.option_arguments(
            self.class_weight, self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, device
        )


PlanFor = Callable[..., Any]


def chunk_plans(
    plan_for: PlanFor, spec: KernelSpec, chunk: int, hidden: Any, vocabulary: int, options: LossOptions
) -> list[tuple[slice, Any]] | None:
    """The rows of each chunk with the plan of its kernel; None where one has none."""
    parts = [slice(first, min(hidden.shape[0], first + chunk)) for first in range(0, hidden.shape[0], chunk)]
    sizes = [(part.stop - part.start, vocabulary, hidden.dtype, *options.flags) for part in parts]
    plans = [plan_for(spec, hidden.device, *size) for size in sizes]
    return None if None in plans else list(zip(parts, plans, strict=True))


def _held(rows: int, vocabulary: int, like: Any) -> Any:
    """Room for a chunk of logits, whose rows begin at multiples of 16 elements for any vocabulary."""
    import torch

    pitch = -(-vocabulary // _PITCH) * _PITCH
    return torch.empty((rows, pitch), dtype=like.dtype, device=like.device)[:, :vocabulary]


def _room(held: Any, part: slice) -> Any:
    return held[: part.stop - part.start]


def losses(plan_for: PlanFor, chunk: int, hidden: Any, weight: Any, target: Any, options: LossOptions) -> Any:
    """The loss of each row alone, float32 [rows]; None where no kernel serves the problem."""
    import torch

    rows, vocabulary = hidden.shape[0], weight.shape[0]
    device, number = hidden.device, hidden.get_device()
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    lse = torch.empty_like(loss)
    arguments = options.arguments(device)
    held = _held(min(chunk, rows), vocabulary, hidden)
    plans = chunk_plans(plan_for, cross_entropy.FORWARD, chunk, hidden, vocabulary, options)
    if plans is None:
        return None
    for part, plan in plans:
        logits = torch.mm(hidden[part], weight.t(), out=_room(held, part))
        plan.launch(number, logits, target[part], *arguments, loss[part], lse[part])
    return loss


def gradients(
    plan_for: PlanFor, chunk: int, hidden: Any, weight: Any, target: Any, scale: Any, options: LossOptions
) -> tuple[Any, Any, Any] | None:
    """Loss of each row and the gradients of ``sum(scale * loss)``.

    Args:
        plan_for: gives the plan of the cross-entropy kernel.
        chunk: rows whose logits exist at a time.
        hidden: [rows, hidden].
        weight: [vocabulary, hidden], of the same dtype.
        target: int32 [rows].
        scale: float32 [rows].
        options: the loss.

    Returns:
        The loss, float32 [rows], dhidden and dweight, None for a gradient that is not wanted; None where no kernel
        serves the problem.
    """
    import torch

    rows, vocabulary = hidden.shape[0], weight.shape[0]
    device, number = hidden.device, hidden.get_device()
    plans = chunk_plans(plan_for, cross_entropy_fused.FUSED, chunk, hidden, vocabulary, options)
    if plans is None:
        return None
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    lse = torch.empty_like(loss)
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if options.hidden_gradient else None
    dweight = None
    arguments = options.arguments(device)
    held = _held(min(chunk, rows), vocabulary, hidden)
    for part, plan in plans:
        x = hidden[part]
        logits = torch.mm(x, weight.t(), out=_room(held, part))
        plan.launch(number, logits, target[part], scale[part], *arguments, loss[part], lse[part], logits)
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[part])
        if options.weight_gradient:
            dweight = _added(dweight, logits, x, wide=options.wide_sums)
    return loss, dhidden, dweight


def _added(dweight: Any, dlogits: Any, x: Any, *, wide: bool) -> Any:
    """``dweight + dlogits.T @ x``, in place; a new tensor for the first chunk."""
    import torch

    if not wide or x.dtype == torch.float32:
        return torch.mm(dlogits.t(), x) if dweight is None else dweight.addmm_(dlogits.t(), x)
    if not x.is_cuda:
        product = torch.mm(dlogits.t().float(), x.float())
        return product if dweight is None else dweight.add_(product)
    if dweight is None:
        return torch.mm(dlogits.t(), x, out_dtype=torch.float32)
    return torch.addmm(dweight, dlogits.t(), x, out_dtype=torch.float32)


_INPUTS = ("hidden", "weight", "target", "scale", "options")


def _implement(problem: Problem, config: Config) -> LibraryCall:
    def call(plan_for: PlanFor, *inputs: Any) -> Any:
        return gradients(plan_for, config["chunk"], *inputs)

    return LibraryCall(call, _INPUTS, composite=True)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, width, vocabulary = problem["rows"], problem["hidden"], problem["vocabulary"]
    dtype = getattr(torch, problem["dtype"])

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    return {
        "hidden": normal(rows, width).to(dtype),
        "weight": (normal(vocabulary, width) / width**0.5).to(dtype),
        "target": torch.randint(0, vocabulary, (rows,), generator=generator, device=device, dtype=torch.int32),
        "scale": torch.rand(rows, generator=generator, device=device) + 0.5,
        "options": LossOptions(),
    }


def reference(hidden: Any, weight: Any, target: Any, scale: Any, options: LossOptions) -> dict[str, Any]:
    """Loss and gradients through the logits in float64, for plain options."""
    import torch

    assert options == LossOptions(), "the reference knows the plain loss only"
    x, w, wanted = hidden.double(), weight.double(), target.long()
    probabilities = torch.log_softmax(x @ w.t(), -1)
    loss = -probabilities.gather(1, wanted[:, None])[:, 0]
    probabilities.exp_()
    probabilities[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
    probabilities *= scale.double()[:, None]
    return {"loss": loss, "dhidden": probabilities @ w, "dweight": probabilities.t() @ x}


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    rows, width = problem["rows"], problem["hidden"]
    return {
        "loss": ((rows,), "float32"),
        "dhidden": ((rows, width), problem["dtype"]),
        "dweight": ((problem["vocabulary"], width), problem["dtype"]),
    }


def workloads(shape: ModelShape, tokens: int, dtype: str, target: Target) -> list[dict[str, Value]]:
    """The head of the model and its loss."""
    return [{"rows": tokens, "hidden": shape.hidden, "vocabulary": shape.vocabulary, "dtype": dtype}]


def _fits(problem: Problem, chunk: int) -> bool:
    return bool(chunk * problem["vocabulary"] * ITEM_BYTES[problem["dtype"]] <= _MOST_CHUNK_BYTES)


_SMALL_CHUNK = Constraint(
    "a chunk of logits takes more than 700 MiB",
    lambda problem, config, target: config["chunk"] == _CHUNKS[0] or _fits(problem, config["chunk"]),
)


def _chunks(problem: Problem) -> list[Value]:
    """Chunks up to all rows: a larger one is the same as one of all rows."""
    return [chunk for chunk in _CHUNKS if chunk == _CHUNKS[0] or chunk < 2 * problem["rows"]]


def _default(problem: Problem, target: Target) -> Config:
    """The largest chunk: each one more rounds the weight's gradient once more."""
    return Config(chunk=max((chunk for chunk in _CHUNKS if _fits(problem, chunk)), default=_CHUNKS[0]))


SPEC = KernelSpec(
    name="linear_cross_entropy",
    summary="cross entropy of hidden @ weight.T and both gradients, without the logits",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("hidden", "exact"),
        Dimension("vocabulary", "exact"),
        Dimension("dtype", "dtype"),
    ),
    space=Space(lambda problem: {"chunk": _chunks(problem)}, (_SMALL_CHUNK,)),
    ops=("fused_linear_cross_entropy",),
    workloads=workloads,
    implement=_implement,
    default=_default,
    generic=lambda problem: Config(chunk=_CHUNKS[0]),
    inputs=_inputs,
    outputs=_outputs,
    reference=reference,
    bytes_moved=lambda problem: (
        2 * problem["hidden"] * (problem["rows"] + problem["vocabulary"]) * ITEM_BYTES[problem["dtype"]]
    ),
    flops=lambda problem: 6 * problem["rows"] * problem["hidden"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
    roundings=2,
)

SPECS = (SPEC,)
