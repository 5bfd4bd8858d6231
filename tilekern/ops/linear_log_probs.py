"""linear_log_probs: log-probabilities and entropies of a language model's head, ``log_softmax(hidden @ weight.T)``.

Its launches are written by hand: both directions are composites, which run only if every chunk's kernel has a plan, and
another kernel checks the ids first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import log_probs
from tilekern.kernels.composites import linear_log_probs as composite
from tilekern.kernels.composites.head import chunk_plans
from tilekern.ops.labels import checked, refuse_outside
from tilekern.ops.log_probs import of_logits
from tilekern.ops.operation import operation
from tilekern.ops.registration import (
    cast_as_products,
    check_head,
    check_ids,
    check_softcap,
    check_temperature,
    check_tensors,
    check_vectors,
    disjoint,
    fresh,
    shaped,
    uncast,
)
from tilekern.runtime.dispatch import Plan, own_op_runs, plan_for
from tilekern.spec import Array, KernelSpec

_INT32 = torch.iinfo(torch.int32)
# The plans of a call with gradients end with the room for its backward.
Graded = tuple[Plan, Plan] | tuple[Plan, Plan, composite.Room]
Plans = tuple[Plan, None] | Graded
Results = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_ROW = ("rows",)
_ARRAYS = (
    Array("hidden", "dtype", ("rows", "hidden")), Array("weight", "dtype", ("vocabulary", "hidden")),
    Array("ids", "int32", _ROW), Array("bias", "dtype", ("vocabulary",)),
    Array("log_probs", "dtype*float32", _ROW, "output"), Array("entropy", "dtype*float32", _ROW, "output"),
    Array("lse", "dtype*float32", _ROW, "output"),
)  # fmt: skip


def linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, wide_sums: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probability of one id per row and the entropy, from a head whose logits are never stored.

    ``logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature``; without a cap there is no tanh.
    Both results can be differentiated, once. Under autocast ``hidden``, ``weight`` and ``bias`` are cast as a linear
    layer's are.

    Args:
        hidden: [..., hidden]; bfloat16, float16 or float32, any strides.
        weight: [vocabulary, hidden], of the dtype of ``hidden``.
        ids: [...], of an integer dtype. A row whose id is not in the vocabulary has NaN as its log-probability and as
            its gradients, and a later call raises.
        bias: [vocabulary], of the dtype of ``weight``, or None; added in float32.
        temperature: positive and finite.
        softcap: positive and finite, or None for no cap.
        ignore_index: the id of rows that do not count: both results are 0, and so are their gradients.
        wide_sums: add up the gradient of ``weight`` over chunks of rows in float32, which takes 4 bytes per element.

    Returns:
        Log-probabilities and entropies in nats, both [...] in float32 (float64 for float64).

    Raises:
        ValueError: shapes or devices do not fit, ``ids`` has another dtype, an option has an invalid value, or an
            earlier call on this device got an id outside the vocabulary (:func:`tilekern.check_labels`).
    """
    check_options("linear_log_probs", temperature, softcap)
    found = rows_of_head(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    return found[:2]


def check_options(op: str, temperature: float, softcap: float | None) -> None:
    """Raise ValueError for a temperature or a cap that is not positive and finite."""
    check_softcap(op, softcap)
    check_temperature(op, temperature)


def rows_of_head(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float, softcap: float | None,
    ignore_index: int, wide_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return log-probabilities, entropies and logsumexps, [...] each, with the casts of autocast."""
    hidden, weight, bias = cast_as_products(hidden, weight, bias)
    with uncast(hidden.device.type):
        found: tuple[Tensor, Tensor, Tensor] = _rows(
            hidden, weight, ids, bias, float(temperature), softcap, ignore_index, wide_sums
        )
        return found


def _check(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, *_: Any) -> None:
    check_head("linear_log_probs", hidden=hidden, weight=weight)
    check_ids("linear_log_probs", "ids", ids, hidden=hidden)
    check_vectors("linear_log_probs", weight.shape[0], bias=bias)
    check_tensors("linear_log_probs", "ids", hidden=hidden, weight=weight, ids=ids, bias=bias)


def _find(
    graded: bool, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None, ignore_index: int, wide_sums: bool,
) -> Plans | None:  # fmt: skip
    """Return the composites' plans if all of their parts have plans too."""
    if not hidden.numel() or not weight.numel() or weight.dtype != hidden.dtype:
        return None
    if (bias is not None and bias.dtype != weight.dtype) or not _INT32.min <= ignore_index <= _INT32.max:
        return None
    rows, vocabulary, dtype = ids.numel(), weight.shape[0], hidden.dtype
    sizes = (rows, vocabulary, dtype, bias is not None, softcap is not None)

    def find(whole: KernelSpec, part: KernelSpec) -> Plan | None:
        asked = (whole, hidden.device, rows, hidden.shape[-1], vocabulary, dtype)
        plan = plan_for(*asked)
        if plan is None:
            return None
        found = chunk_plans(plan_for, (part,), plan.config["chunk"], hidden.device, *sizes)
        if found is None:
            own_op_runs(*asked)
        return None if found is None else plan

    forward = find(composite.FORWARD, log_probs.FORWARD)
    if forward is None or not graded:
        return None if forward is None else (forward, None)
    backward = find(composite.BACKWARD, log_probs.BACKWARD)
    return None if backward is None else (forward, backward)


def _matrices(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return disjoint(hidden.reshape(-1, hidden.shape[-1])), disjoint(weight)


def _labels(ids: Tensor) -> Tensor:
    return ids.to(torch.int32).contiguous().view(-1)


def _launch(
    plans: Plans, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None, ignore_index: int, _: bool,
) -> Results:  # fmt: skip
    labels, _ = checked("linear_log_probs", ids, weight.shape[0], ignore_index)
    options = log_probs.Options(ignore_index, temperature, softcap)
    inputs = (*_matrices(hidden, weight), labels, None if bias is None else bias.contiguous(), options, _room(plans))

    def allocate() -> tuple[Tensor, ...]:
        return tuple(ids.new_empty(ids.numel(), dtype=torch.float32) for _ in range(3))

    log_prob, entropy, lse = plans[0].run(hidden.get_device(), inputs, allocate)
    return shaped(log_prob, *ids.shape), shaped(entropy, *ids.shape), shaped(lse, *ids.shape)


def _room(plans: Plans) -> composite.Room | None:
    return plans[2] if len(plans) == 3 else None


def _launch_backward(
    plans: Graded, needs: tuple[bool, ...], dlog_probs: Tensor, dentropy: Tensor, dlse: Tensor, hidden: Tensor,
    weight: Tensor, ids: Tensor, bias: Tensor | None, entropy: Tensor, lse: Tensor, temperature: float,
    softcap: float | None, ignore_index: int, wide_sums: bool,
) -> Gradients:  # fmt: skip
    options = log_probs.Options(ignore_index, temperature, softcap)
    wanted = composite.Wanted(needs[0], needs[1], bias is not None and needs[3], wide_sums)
    of_rows = (x.float().contiguous().view(-1) for x in (lse, entropy, dlog_probs, dentropy, dlse))
    rows, table = _matrices(hidden, weight)
    own = None if bias is None else bias.contiguous()
    inputs = (rows, table, _labels(ids), own, *of_rows, options, wanted, _room(plans))

    def allocate() -> tuple[Tensor | None, ...]:
        asked = zip((rows, table, bias), (wanted.hidden, wanted.weight, wanted.bias), strict=True)
        return tuple(fresh(x) if x is not None and is_asked else None for x, is_asked in asked)

    dhidden, dweight, dbias = plans[1].run(hidden.get_device(), inputs, allocate)
    return (
        None if dhidden is None else shaped(dhidden, *hidden.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


@operation(
    composite.FORWARD, composite.BACKWARD, name="linear_log_probs", ungraded=("ids",), arrays=_ARRAYS,
    reads=("hidden", "weight", "ids", "bias", "entropy", "lse"), key=("softcap is not None", "ignore_index"),
    check=_check, find=_find, launch=_launch, launch_backward=_launch_backward,
)  # fmt: skip
def _rows(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, wide_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_outside("linear_log_probs", ids, weight.shape[0], ignore_index)
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    product = torch.promote_types(hidden.dtype, weight.dtype)
    logits = (hidden.to(product) @ weight.to(product).t()).to(dtype)
    logits = logits if bias is None else logits + bias.to(dtype)
    return of_logits(logits, ids, temperature, softcap, ignore_index)


_known_plans = _rows.functions["plans_of"]  # type: ignore[attr-defined]


def _plans_of(graded: bool, *arguments: Any) -> Plans | None:
    """Return the plans, and for a call with gradients also the room that passes logits to its backward."""
    plans: Plans | None = _known_plans(graded, *arguments)
    return (*plans, composite.Room()) if graded and plans is not None else plans


_rows.functions["plans_of"] = _plans_of  # type: ignore[attr-defined]
