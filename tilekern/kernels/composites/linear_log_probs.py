"""Log-probabilities and entropies of a language model's head, and their gradients, chunk by chunk of its rows.

:mod:`tilekern.kernels.composites.head` and the kernels of :mod:`tilekern.kernels.log_probs` compute a chunk. The
backward begins with the last chunk, whose logits the forward leaves in a :class:`Room`, and computes the other chunks'
logits again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from tilekern.kernels import log_probs
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
from tilekern.spec import Config, Problem


@dataclass(frozen=True)
class Wanted:
    """The gradients to compute; ``wide_sums`` adds up the weight's gradient in float32."""

    hidden: bool = True
    weight: bool = True
    bias: bool = False
    wide_sums: bool = False


class Room:
    """The memory of the last chunk of logits, from a forward to its backward.

    Only one room of a process holds memory: if several forwards come before the first backward, the others keep none.
    """

    _holding: weakref.ref[Room] | None = None

    def __init__(self) -> None:
        self._part: slice | None = None
        self._memory: Any = None

    def keep(self, part: slice, memory: Any) -> None:
        """Hold the memory of a forward, with the logits of these rows, unless another room holds memory."""
        other = Room._holding() if Room._holding else None
        if other is None or other is self or other._memory is None:
            self._part, self._memory, Room._holding = part, memory, weakref.ref(self)

    def give(self) -> tuple[slice | None, Any]:
        """Return the rows and the memory, once, since a backward writes gradients there; None each if there is none."""
        part, memory = self._part, self._memory
        self._part = self._memory = None
        return part, memory


def results(
    plan_for: PlanFor, config: Config, hidden: Any, weight: Any, ids: Any, bias: Any, options: log_probs.Options,
    room: Room | None,
) -> tuple[Any, Any, Any] | None:  # fmt: skip
    """Return log-probability, entropy and lse of each row.

    Args:
        plan_for: gives the plan of the kernel over rows, and of the products.
        config: ``chunk`` is the number of rows with logits in memory; ``products`` chooses the implementation of
            products.
        hidden: [rows, hidden].
        weight: [vocabulary, hidden], of the same dtype.
        ids: int32 [rows].
        bias: [vocabulary], of that dtype too, or None.
        options: temperature, cap, and the id of rows that do not count.
        room: keeps the last chunk's logits for the backward; None if no backward follows.

    Returns:
        Float32 [rows] each; None if no kernel serves the problem.
    """
    import torch

    sizes = (len(hidden), weight.shape[0], hidden.dtype, *options.flags(bias))
    plans = chunk_plans(plan_for, (log_probs.FORWARD,), config["chunk"], hidden.device, *sizes)
    if plans is None:
        return None
    head = Head(plan_for, config, hidden, weight, plans[0][0].stop)
    log_prob, entropy, lse = (torch.empty(len(ids), dtype=torch.float32, device=hidden.device) for _ in range(3))
    for part, plan in plans:
        of_rows = (x[part] for x in (log_prob, entropy, lse))
        plan.launch(
            hidden.get_device(), *log_probs.before_ids(head.logits(part), bias), ids[part], *options.scalars, *of_rows
        )
    if room is not None:
        room.keep(plans[-1][0], head.memory)
    return log_prob, entropy, lse


def gradients(
    plan_for: PlanFor, config: Config, hidden: Any, weight: Any, ids: Any, bias: Any, lse: Any, entropy: Any,
    dlog_probs: Any, dentropy: Any, dlse: Any, options: log_probs.Options, wanted: Wanted, room: Room | None,
) -> tuple[Any, Any, Any] | None:  # fmt: skip
    """Return dhidden, dweight and dbias of the results of :func:`results`; its arguments mean the same here.

    Sums over chunks begin with the last one, whether its logits are in the room or not, and so have the same bits. The
    slopes are float32 [rows]. A gradient that is not wanted is None; all are None if no kernel serves the problem.
    dbias is float32, and so is dweight if its sums are wide.
    """
    sizes = (len(hidden), weight.shape[0], hidden.dtype, *options.flags(bias))
    plans = chunk_plans(plan_for, (log_probs.BACKWARD,), config["chunk"], hidden.device, *sizes)
    if plans is None:
        return None
    graded = (wanted.hidden, wanted.weight, wanted.bias)
    kept, memory = (None, None) if room is None else room.give()
    head = Head(
        plan_for, config, hidden, weight, plans[0][0].stop, graded=graded, wide_sums=wanted.wide_sums, memory=memory
    )
    for part, plan in (plans[-1], *plans[:-1]):
        logits = head.room(part) if part == kept and head.memory is memory else head.logits(part)
        of_rows = (x[part] for x in (ids, lse, entropy, dlog_probs, dentropy, dlse))
        plan.launch(hidden.get_device(), *log_probs.before_ids(logits, bias), *of_rows, *options.scalars, logits)
        head.take(part)
    return head.gradients


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    inputs = matrices(problem, generator, device)
    ids = log_probs.drawn_ids(problem, generator, device)
    return inputs | {"ids": ids, "bias": None, "options": log_probs.Options(), "room": None}


_PART_ROWS = 1024


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    inputs = _inputs(problem, generator, device)
    weight, ids, options = inputs["weight"].float(), inputs["ids"], inputs["options"]
    # In parts, since all logits at once may not fit; of rounded logits, else the gradient of a nearly certain row,
    # which is a small difference, would be only rounding.
    parts = zip(inputs["hidden"].split(_PART_ROWS), ids.split(_PART_ROWS), strict=True)
    held = (((x.float() @ weight.t()).to(x.dtype).float(), of_part) for x, of_part in parts)
    known = [log_probs.row_results(logits, of_part, options.ignore_index) for logits, of_part in held]
    saved = {name: torch.cat([part[name] for part in known]) for name in ("lse", "entropy")}
    # With such slopes few gradients differ in sign from the others, so no sum is a small difference.
    least = {"dlog_probs": 0.0, "dentropy": 0.0, "dlse": 1.5}
    slopes = {name: x + torch.rand(len(ids), generator=generator, device=device) for name, x in least.items()}
    for slope in slopes.values():
        slope[5::11] = 0
    return inputs | saved | slopes | {"wanted": Wanted(bias=True)}


def reference_forward(
    hidden: Any, weight: Any, ids: Any, bias: Any, options: log_probs.Options, room: Room | None
) -> dict[str, Any]:
    """Return the results through the logits in float64, for plain options."""
    assert (bias, options, room) == (None, log_probs.Options(), None), "the reference knows plain logits only"
    return log_probs.row_results(hidden.double() @ weight.double().t(), ids, options.ignore_index)


def reference_backward(
    hidden: Any, weight: Any, ids: Any, bias: Any, lse: Any, entropy: Any, dlog_probs: Any, dentropy: Any, dlse: Any,
    options: log_probs.Options, wanted: Wanted, room: Room | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the gradients in float64 through rounded logits and their rounded gradient, for plain options.

    If many columns are equal, their sums may consist only of rounding errors.
    """
    assert (bias, options, room) == (None, log_probs.Options(), None), "the reference knows plain logits only"
    x, w = hidden.double(), weight.double()
    of_rows = (ids, lse, entropy, dlog_probs, dentropy, dlse)
    dlogits = log_probs.score_gradient((x @ w.t()).to(hidden.dtype).double(), *of_rows, options.ignore_index)
    dlogits = dlogits.to(hidden.dtype).double()
    return {"dhidden": dlogits @ w, "dweight": dlogits.t() @ x, "dbias": dlogits.sum(0)}


FORWARD = spec_of_head(
    results,
    name="linear_log_probs_forward",
    summary="log-probabilities and entropies of hidden @ weight.T, without the logits",
    inputs=_inputs,
    outputs=lambda problem, blocks: dict.fromkeys(("log_probs", "entropy", "lse"), ((problem["rows"],), "float32")),
    reference=reference_forward,
    bytes_moved=matrix_bytes,
    flops=product_flops,
)
BACKWARD = spec_of_head(
    gradients,
    name="linear_log_probs_backward",
    summary="gradients of the log-probabilities and entropies of hidden @ weight.T, without the logits",
    inputs=_backward_inputs,
    outputs=lambda problem, blocks: gradients_of(problem) | {"dbias": ((problem["vocabulary"],), "float32")},
    reference=reference_backward,
    bytes_moved=lambda problem: 2 * matrix_bytes(problem),
    flops=lambda problem: 3 * product_flops(problem),
)
SPECS = (FORWARD, BACKWARD)
