"""Linear layers of few rows, as in decoding: whether their kernel serves a call, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.kernels.families.placeholders import placeholder
from tilekern.kernels.matmul.product import MOST_ELEMENTS
from tilekern.kernels.matmul.space import is_tile
from tilekern.kernels.skinny import split
from tilekern.kernels.skinny.linear import SPEC, sizes
from tilekern.kernels.skinny.projections import SPEC as PROJECTIONS
from tilekern.kernels.skinny.tiles import MOST_ROWS, USUAL
from tilekern.ops.registration import PLAIN, as_rows, is_eager, needs_gradient, run_product, shaped
from tilekern.runtime.dispatch import MOST_PLANS, Plan, by_parts, is_invariant, memo, plan_for, refused, tuned_plan_for
from tilekern.spec import Config

# The plans of kinds of calls; None for torch's product.
_known: dict[tuple[Any, ...], Plan | None] = memo()


def is_few(x: Tensor) -> bool:
    """Return whether ``x`` [..., in_features] has rows, and not more than the kernel is made for."""
    return x.dim() > 0 and 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def is_served(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether a call has few rows and is neither differentiated, traced nor cast by autocast.

    ``others`` are weights and biases. A transposed weight would be copied, so it is not served.
    """
    if not is_few(x) or needs_gradient(x, *others) or not is_eager(x, *others):
        return False
    return all(other is None or other.stride(-1) == 1 for other in others)


def sizes_of(x: Tensor, weight: Tensor, *on: str | None) -> tuple[Any, ...] | None:
    """Return the sizes of a call for ``plan_for``, with the flags ``on``; None if the kernel does not serve them.

    In the invariant mode a gate's products are rounded first, as those of many rows are; nothing else is served there
    beside products.
    """
    columns, inner = weight.shape
    if not columns or not is_few(x) or max(weight.numel(), x.numel(), MOST_ROWS * columns) > MOST_ELEMENTS:
        return None
    flags = [name for name in on if name is not None]
    if is_invariant():
        if flags and flags[0] == "gated":
            flags.append("rounded")
        elif not {"biased"}.issuperset(flags):
            return None
    return tuple(sizes(x.numel() // inner, inner, columns, x.dtype, flags).values())


def is_tuned(x: Tensor, weight: Tensor, *on: str | None) -> bool:
    """Return whether a record says that the kernel is the fastest for a call, with the flags ``on``."""
    return tuned(x, weight, *on) is not None


def tuned(x: Tensor, weight: Tensor, *on: str | None) -> Plan | None:
    """Return the kernel's plan for a call, with the flags ``on``, if a record says that it is the fastest."""
    found = sizes_of(x, weight, *on)
    return None if found is None else planned(tuned_plan_for, x.device, found)


def planned(find: Callable[..., Plan | None], device: torch.device, found: tuple[Any, ...]) -> Plan | None:
    """Return the kernel's plan for sizes of :func:`sizes_of`, by ``plan_for`` or ``tuned_plan_for``.

    Sums in parts are two kernels more. If one has no plan, it is noted and said that cuBLAS runs.
    """
    plan = find(SPEC, device, *found)
    if plan is not None and "splits" in (config := plan.config):
        given = dict(zip((d.name for d in SPEC.dimensions), found, strict=True))
        by_parts(SPEC, device, given, config, lambda: _run_in_place_of(config, device, given))
    return plan


def _run_in_place_of(config: Config, device: torch.device, sizes: dict[str, Any]) -> tuple[Config]:
    """Return the config that runs in place of one of sums in parts: cuBLAS if one of its two kernels has no plan."""
    sizes = {**sizes, "splits": config["splits"]}
    plans = [plan_for(kernel, device, *(sizes[d.name] for d in kernel.dimensions)) for kernel in split.SPECS]
    return (Config(implementation="cublas") if None in plans else config,)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return ``x @ weight^T + bias`` by the kernel if a record says that it is the fastest; else None.

    Where none does, a call costs one look in a dictionary.
    """
    shape = x.shape
    if torch.compiler.is_compiling() or not shape or x.numel() > MOST_ROWS * shape[-1]:
        return None
    plan = _plan((shape, weight.shape, x.dtype, x.get_device(), x.is_meta, bias is None), _alone, x, weight, bias)
    if plan is None:
        return None
    try:
        return launched(plan, x, weight, bias=bias)
    except NoVariant as error:
        refused(SPEC, error)
        return None


def _alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> Plan | None:
    """Return the plan of one product, if a record says that the kernel is the fastest for it."""
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1]
    return tuned(x, weight, None if bias is None else "biased") if fits else None


def _plan(
    key: tuple[Any, ...], find: Callable[..., Plan | None], x: Tensor, *others: Tensor | None
) -> Plan | None:  # fmt: skip
    """Return the plan of a kind of calls, found once; None if no kernel serves this call."""
    try:
        plan = _known[key]
    except KeyError:
        if not is_served(x, *others):
            return None
        plan = find(x, *others)
        # A trace of a model, whose tensors are on meta, asks for what each model needs.
        if not x.is_meta and len(_known) < MOST_PLANS:
            _known[key] = plan
    return plan if plan is not None and is_served(x, *others) else None


def projections(x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> tuple[Tensor, ...] | None:
    """Return ``x @ weight^T`` for three weights by one launch if a record names its kernel; else None.

    In the invariant mode the products' own kernels must be those of their classes, and this one add up as they do.
    """
    weights, shape = (q_weight, k_weight, v_weight), x.shape
    if torch.compiler.is_compiling() or not shape or x.numel() > MOST_ROWS * shape[-1]:
        return None
    if any(type(given) not in PLAIN or given.device != x.device for given in (x, *weights)):
        return None
    key = shape, *(weight.shape for weight in weights), x.dtype, x.get_device(), x.is_meta
    plan = _plan(key, _joined, x, *weights)
    if plan is None or any(weight.dtype != x.dtype for weight in weights):
        return None
    rows = as_rows(x)

    def results() -> tuple[Tensor, ...]:
        return tuple(torch.empty((rows.shape[0], w.shape[0]), dtype=x.dtype, device=x.device) for w in weights)

    try:
        made = plan.run(x.get_device(), (rows, *map(as_rows, weights)), results)
    except NoVariant as error:
        refused(PROJECTIONS, error)
        return None
    return tuple(shaped(y, *shape[:-1], y.shape[1]) for y in made)


def _joined(x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> Plan | None:
    """Return the plan of three products in one launch, if a record says that it is the fastest for them."""
    found = sizes_of(x, q_weight) if q_weight.dim() == 2 else None
    ends = {q_weight.shape[1:], k_weight.shape[1:], x.shape[-1:]}
    if found is None or k_weight.shape != v_weight.shape or len(ends) > 1:
        return None
    columns, terms = q_weight.shape
    plan = tuned_plan_for(PROJECTIONS, x.device, x.numel() // terms, terms, columns, k_weight.shape[0], x.dtype)
    if plan is None or not is_invariant():
        return plan
    of_each = [tuned(x, weight) for weight in (q_weight, k_weight)]
    return plan if all(one is not None and _adds_alike(one, plan) for one in of_each) else None


def _adds_alike(one: Plan, other: Plan) -> bool:
    """Return whether two plans of few rows have tiles of the same instructions, so the same sums."""
    configs = one.config, other.config
    return all(map(is_tile, configs)) and len({config["tile_n"] >= USUAL for config in configs}) == 1


def launched(plan: Plan, x: Tensor, weight: Tensor, up: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Run the kernel's plan and return its result, [..., columns]."""
    rows, columns, absent = as_rows(x), weight.shape[0], placeholder(2, x.dtype, x.device)
    factors = as_rows(weight), absent if up is None else as_rows(up)
    addends = placeholder(1, x.dtype, x.device) if bias is None else bias.contiguous(), absent
    return shaped(run_product(plan, (rows.shape[0], columns), rows, *factors, *addends), *x.shape[:-1], columns)
