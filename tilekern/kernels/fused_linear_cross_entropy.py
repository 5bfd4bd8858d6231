"""Cross entropy of ``hidden @ weight.T`` without the logits: chunk by chunk, with both gradients in the same pass.

For each chunk of rows: logits by a matrix product, loss and the gradient in their place by one kernel
(:mod:`tilekern.kernels.cross_entropy.fused`), then ``dhidden = dlogits @ weight`` and ``dweight += dlogits.T @
hidden``. The memory above inputs and gradients is one chunk of logits. Small chunks make ``dweight`` be read and
written more often, large ones need more memory, so the number of rows in a chunk is for the tuner to choose; so is
whether cuBLAS runs the products or what won each of them (:mod:`tilekern.kernels.matmul.product`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilekern.kernels.cross_entropy import fused as cross_entropy_fused
from tilekern.kernels.cross_entropy import separate as cross_entropy
from tilekern.kernels.matmul import product as linear
from tilekern.spec import (
    ITEM_BYTES,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    LibraryCall,
    Problem,
    Space,
    Value,
    cdiv,
)
from tilekern.targets import Target

_MOST_CHUNK_BYTES = 700 << 20
_PITCH = 16
# Chunks are whole tiles of the products.
_STEP = 128
_GENERIC_CHUNK = 256


@dataclass
class Beside:
    """The results of a loss beside its value and the gradients of the spec, chunk by chunk.

    Attributes:
        lse: the log of the sum of exponentials of each row, float32 [rows]; made for all losses.
        predicted: the place of the largest logit of each row, int64 [rows], where the options ask for it.
        shares: the probability of each row's target, float32 [rows], where the options scale by it.
        dbias: the gradient of the bias, float32 [vocabulary], where it is wanted.
    """

    lse: Any = None
    predicted: Any = None
    shares: Any = None
    dbias: Any = None


@dataclass(frozen=True)
class LossOptions:
    """A loss's parameters beside logits and targets; the fields of torch's ``cross_entropy`` mean the same here.

    ``class_weight`` is float32 [vocabulary]. ``hidden_gradient`` and ``weight_gradient`` say which gradients are
    wanted; ``wide_sums`` adds the weight's gradient up in float32. ``bias`` [vocabulary], of the dtype of the weight,
    is added to the logits; ``token_scaling`` multiplies each loss by the probability of its target, through which no
    gradient flows; ``predicted`` asks for the places of the largest logits. ``beside`` takes what there is.
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
        """The flags of the cross-entropy specs: weighted, smoothed, capped."""
        return self.class_weight is not None, self.label_smoothing > 0, self.softcap is not None

    def arguments(self, device: Any) -> tuple[Any, ...]:
        """The arguments of the cross-entropy kernels that these options make up."""
        return cross_entropy.option_arguments(
            self.class_weight, self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, device
        )


PlanFor = Callable[..., Any]
# (a, b, out, names of the flags that are set) -> out
Product = Callable[[Any, Any, Any, tuple[str, ...]], Any]
# The three products, as the flags of the spec ``matmul``.
LOGITS, DHIDDEN, DWEIGHT, MORE_DWEIGHT = ("b_transposed",), (), ("a_transposed",), ("a_transposed", "accumulated")


def split(rows: int, chunk: int) -> list[slice]:
    """As few parts of at most ``chunk`` rows as there can be, of the same size but for the last."""
    size = min(chunk, _whole(cdiv(rows, cdiv(rows, chunk))))
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]


def _whole(rows: int) -> int:
    return cdiv(rows, _STEP) * _STEP


def chunk_plans(
    plan_for: PlanFor, spec: KernelSpec, chunk: int, hidden: Any, vocabulary: int, options: LossOptions
) -> list[tuple[slice, Any]] | None:
    """The rows of each chunk with the plan of its kernel; None where one has none."""
    parts = split(hidden.shape[0], chunk)
    sizes = [(part.stop - part.start, vocabulary, hidden.dtype, *options.flags) for part in parts]
    plans = [plan_for(spec, hidden.device, *size) for size in sizes]
    return None if None in plans else list(zip(parts, plans, strict=True))


def product_of(plan_for: PlanFor, config: Config) -> Product:
    """The product of a config: cuBLAS, or the winner of each product."""
    return functools.partial(linear.by_winner, plan_for) if config["products"] == "tuned" else linear.by_cublas


def room_for_logits(rows: int, vocabulary: int, like: Any) -> Any:
    """Room for a chunk of logits, whose rows begin at multiples of 16 elements for any vocabulary."""
    import torch

    pitch = -(-vocabulary // _PITCH) * _PITCH
    # oneDNN's bfloat16 products on AMX read what lies behind a row, and NaN there would spread.
    make = torch.zeros if like.device.type == "cpu" else torch.empty
    return make((rows, pitch), dtype=like.dtype, device=like.device)[:, :vocabulary]


def _room(held: Any, part: slice) -> Any:
    return held[: part.stop - part.start]


def losses(plan_for: PlanFor, config: Config, hidden: Any, weight: Any, target: Any, options: LossOptions) -> Any:
    """The loss of each row alone, float32 [rows]; None where no kernel serves the problem."""
    import torch

    rows, vocabulary = hidden.shape[0], weight.shape[0]
    device, number = hidden.device, hidden.get_device()
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    lse = torch.empty_like(loss)
    arguments = options.arguments(device)
    plans = chunk_plans(plan_for, cross_entropy.FORWARD, config["chunk"], hidden, vocabulary, options)
    if plans is None:
        return None
    held, product = room_for_logits(plans[0][0].stop, vocabulary, hidden), product_of(plan_for, config)
    beside = room_beside(options, lse)
    for part, plan in plans:
        logits = _biased(product(hidden[part], weight, _room(held, part), LOGITS), options)
        plan.launch(number, logits, target[part], *arguments, loss[part], lse[part])
        note(beside, part, logits, target[part], options)
    return loss if beside.shares is None else loss * beside.shares


def gradients(
    plan_for: PlanFor, config: Config, hidden: Any, weight: Any, target: Any, scale: Any, options: LossOptions
) -> tuple[Any, Any, Any] | None:
    """Loss of each row and the gradients of ``sum(scale * loss)``.

    Args:
        plan_for: gives the plan of the cross-entropy kernel and of the products.
        config: ``chunk`` rows have their logits at a time; ``products`` says who multiplies.
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
    plans = chunk_plans(plan_for, cross_entropy_fused.FUSED, config["chunk"], hidden, vocabulary, options)
    if plans is None:
        return None
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    lse = torch.empty_like(loss)
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if options.hidden_gradient else None
    dweight = None
    arguments = options.arguments(device)
    held, product = room_for_logits(plans[0][0].stop, vocabulary, hidden), product_of(plan_for, config)
    beside, before = room_beside(options, lse), None
    if options.token_scaling:
        before = chunk_plans(plan_for, cross_entropy.FORWARD, config["chunk"], hidden, vocabulary, options)
        if before is None:
            return None
    for number_of_chunk, (part, plan) in enumerate(plans):
        x = hidden[part]
        logits = _biased(product(x, weight, _room(held, part), LOGITS), options)
        slope = scale[part]
        if before is not None:
            # The gradient is made with the loss, so what multiplies both must be known before.
            before[number_of_chunk][1].launch(number, logits, target[part], *arguments, loss[part], lse[part])
        note(beside, part, logits, target[part], options)
        if before is not None:
            slope = slope * beside.shares[part]
        plan.launch(number, logits, target[part], slope, *arguments, loss[part], lse[part], logits)
        if options.bias_gradient:
            beside.dbias += logits.sum(0, dtype=torch.float32)
        if dhidden is not None:
            product(logits, weight, dhidden[part], DHIDDEN)
        if options.weight_gradient and options.wide_sums and x.dtype != torch.float32:
            dweight = added_wide(dweight, logits, x)
        elif options.weight_gradient:
            first = dweight is None
            dweight = torch.empty(weight.shape, dtype=x.dtype, device=device) if first else dweight
            product(logits, x, dweight, DWEIGHT if first else MORE_DWEIGHT)
    return loss if beside.shares is None else loss * beside.shares, dhidden, dweight


def room_beside(options: LossOptions, lse: Any) -> Beside:
    """Memory for what the options ask for, in the place that they have for it."""
    import torch

    beside = Beside() if options.beside is None else options.beside
    beside.lse = lse
    beside.shares = torch.empty_like(lse) if options.token_scaling else None
    beside.predicted = torch.empty_like(lse, dtype=torch.int64) if options.predicted else None
    beside.dbias = torch.zeros_like(options.bias, dtype=torch.float32) if options.bias_gradient else None
    return beside


def _biased(logits: Any, options: LossOptions) -> Any:
    return logits if options.bias is None else logits.add_(options.bias)


def note(beside: Beside, part: slice, logits: Any, target: Any, options: LossOptions) -> None:
    """Keep the wanted results of a chunk's logits, whose ``lse`` is known where shares are."""
    if options.predicted:
        beside.predicted[part] = logits.argmax(-1)
    if options.token_scaling:
        labels = target.clamp(0, logits.shape[1] - 1).long()
        at_target = logits.gather(1, labels[:, None])[:, 0].to(beside.lse.dtype)
        if options.softcap is not None:
            at_target = options.softcap * (at_target / options.softcap).tanh()
        beside.shares[part] = (at_target - beside.lse[part]).exp().masked_fill(target == options.ignore_index, 0)


def added_wide(dweight: Any, dlogits: Any, x: Any) -> Any:
    """``dweight + dlogits.T @ x`` in float32; a new tensor for the first chunk."""
    import torch

    if not x.is_cuda:
        product = torch.mm(dlogits.t().float(), x.float())
        return product if dweight is None else dweight.add_(product)
    if dweight is None:
        return torch.mm(dlogits.t(), x, out_dtype=torch.float32)
    return torch.addmm(dweight, dlogits.t(), x, out_dtype=torch.float32)


_INPUTS = ("hidden", "weight", "target", "scale", "options")


def _implement(problem: Problem, config: Config) -> LibraryCall:
    def call(plan_for: PlanFor, *inputs: Any) -> Any:
        return gradients(plan_for, config, *inputs)

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


def _most_rows(problem: Problem) -> int:
    """Rows whose logits take no more than a chunk's may, in whole tiles; one tile where not even that fits."""
    row_bytes = problem["vocabulary"] * ITEM_BYTES[problem["dtype"]]
    return int(max(_MOST_CHUNK_BYTES // row_bytes // _STEP, 1) * _STEP)


def _chunks(problem: Problem) -> list[int]:
    """All rows, or a part of them: the fewest parts that fit, and parts by powers of two and three times those."""
    rows = problem["rows"]
    halvings = [1 << n for n in range(rows.bit_length())]
    parts = {cdiv(rows, _most_rows(problem)), *halvings, *(3 * n for n in halvings)}
    return sorted({_whole(cdiv(rows, n)) for n in parts}, reverse=True)


def _fits(problem: Problem, chunk: int) -> bool:
    return chunk <= _most_rows(problem)


def _largest(problem: Problem) -> int:
    return next(chunk for chunk in _chunks(problem) if _fits(problem, chunk))


def _is_small(problem: Problem, chunk: int) -> bool:
    return 2 * chunk <= _largest(problem)


_FEW_BYTES = Constraint(
    "a chunk of logits takes more than 700 MiB", lambda problem, config, target: _fits(problem, config["chunk"])
)
_FEW_CHUNKS = Constraint(
    "with half the rows that fit, the weight's gradient is read and written twice as often: 1 to 4 % more time on H200",
    lambda problem, config, target: not _is_small(problem, config["chunk"]),
)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {"chunk": [*_chunks(problem)], "products": ["cublas", "tuned"]}


def _default(problem: Problem, target: Target) -> Config:
    """The largest chunk, since each one more rounds the weight's gradient once more; cuBLAS needs no record."""
    return Config(chunk=_largest(problem), products="cublas")


SPEC = KernelSpec(
    name="fused_linear_cross_entropy",
    summary="cross entropy of hidden @ weight.T and both gradients, without the logits",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("hidden", "exact"),
        Dimension("vocabulary", "exact"),
        Dimension("dtype", "dtype"),
    ),
    space=Space(_axes, (_FEW_BYTES, _FEW_CHUNKS)),
    implement=_implement,
    default=_default,
    generic=lambda problem: Config(chunk=_GENERIC_CHUNK, products="cublas"),
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
