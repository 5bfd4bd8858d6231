"""Whether kernels serve all of a call and of its gradients, asked before it runs.

An op of several kernels, of which only some have plans, would run torch's operations between launches: slower than the
op that it stands for. So the op first runs on meta tensors, where each kernel is noted instead of launched, and then
asks for their plans.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.runtime.dispatch import (
    count_fallback,
    counters,
    keep,
    memo,
    plan_for,
    refused,
    traced_target,
    tuned_plan_for,
)
from tilekern.runtime.plans import LibraryPlan, Plan
from tilekern.spec import Config, KernelSpec
from tilekern.spec.targets import Target, here

# A kernel and its problem's sizes.
Asked = tuple[KernelSpec, tuple[Any, ...]]
# Of a library: takes a kernel's inputs, returns its outputs.
Call = Callable[..., tuple[Tensor, ...]]
# While a thread notes: what it has noted, and the GPU that it is for.
_noting = threading.local()
_gpu = functools.cache(here)
_known: dict[Any, bool] = memo()
_plans: dict[Any, Plan] = memo()


def target_of(x: Tensor) -> Target | None:
    """Return the GPU of a call on a tensor: its own; on meta that of the call to come, or of the running trace."""
    if x.is_cuda:
        return _gpu(x.get_device())
    return getattr(_noting, "target", None) or traced_target() if x.is_meta else None


def launch(spec: KernelSpec, dimensions: tuple[Any, ...], *arrays: Any) -> bool:
    """Launch a kernel that no library replaces; return False, counted, if torch must compute its outputs.

    Args:
        spec: the kernel.
        dimensions: the values of its problem, in their order.
        arrays: its inputs, the first a tensor, and its outputs.
    """
    device = arrays[0].get_device()
    plan = _plans.get((spec.name, device, dimensions)) or _plan_of(spec, dimensions, arrays[0])
    if plan is None:
        return False
    try:
        plan.launch(device, *arrays)
    except NoVariant as error:
        refused(spec, error)
        count_fallback(spec)
        return False
    return True


def written(
    spec: KernelSpec, dimensions: tuple[Any, ...], given: tuple[Any, ...], allocate: Callable[[], tuple[Tensor, ...]],
    fast: Callable[[tuple[Any, ...], Tensor], Call | None] | None = None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Return a kernel's outputs, of memory that ``allocate`` makes, or a library's; None, counted, if torch computes.

    Args:
        spec: the kernel.
        dimensions: the values of its problem, in their order.
        given: its inputs, the first a tensor.
        allocate: returns its outputs, in their order.
        fast: takes the dimensions and the first input; returns torch's one fast call for them, if it has one. That runs
            unless a measurement says that a kernel is faster.
    """
    device = given[0].get_device()
    plan = _plans.get((spec.name, device, dimensions)) or _plan_of(spec, dimensions, given[0], fast)
    if plan is None:
        return None
    try:
        return plan.run(device, given, allocate)
    except NoVariant as error:
        refused(spec, error)
    count_fallback(spec)
    return None


class _Noted(Plan):
    """The plan of a kernel that is noted: it launches nothing."""

    def __init__(self) -> None:
        pass

    def launch(self, device: int, *arguments: Any) -> None:
        """Do nothing."""


_NOTED = _Noted()


def _plan_of(spec: KernelSpec, dimensions: tuple[Any, ...], x: Tensor, fast: Any = None) -> Plan | None:
    """Return the plan of a call of :func:`written`, and keep it; None, counted, if there is none."""
    call: Call | None = None if fast is None else fast(dimensions, x)
    noted: list[Asked] | None = getattr(_noting, "noted", None)
    if noted is not None:
        if call is None:
            noted.append((spec, dimensions))
        return _NOTED
    plan = (plan_for if call is None else tuned_plan_for)(spec, x.device, *dimensions)
    if call is not None and (plan is None or isinstance(plan, LibraryPlan)):
        plan = LibraryPlan(call, Config())
        counters(spec.name).add(plan)
    if plan is None:
        count_fallback(spec)
    elif x.get_device() >= 0:  # on the CPU the answer depends on the environment
        keep(_plans, (spec.name, x.get_device(), dimensions), plan)
    return plan


def asked(run: Callable[..., Any], *given: Any, target: Target | None = None) -> list[Asked]:
    """Return what a call cannot dispense with, nor its backward for inputs that want gradients, of :func:`written` or
    :func:`launch`.

    Args:
        run: returns a tensor or several.
        given: its arguments; tensors are replaced by their likes on meta.
        target: the GPU of the call, for :func:`target_of`.
    """
    likes = [_like(x) if isinstance(x, Tensor) else x for x in given]
    wanted = [x for x in likes if isinstance(x, Tensor) and x.requires_grad]
    noted = list[Asked]()
    before = getattr(_noting, "noted", None), getattr(_noting, "target", None)
    _noting.noted, _noting.target = noted, target
    try:
        # Hooks of the caller, as checkpoints have, see nothing of this.
        with torch.set_grad_enabled(bool(wanted)), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            made = run(*likes)
            results = [y for y in ([made] if isinstance(made, Tensor) else made) if y.requires_grad]
            if results:
                torch.autograd.grad(results, wanted, [torch.empty_like(y) for y in results], allow_unused=True)
        return noted
    finally:
        _noting.noted, _noting.target = before


def _same(x: Tensor) -> Tensor:
    return x


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x.detach(), device="meta").requires_grad_(x.requires_grad and torch.is_grad_enabled())


def have_plans(name: str, run: Callable[..., Any], *given: Any) -> bool:
    """Return whether all kernels have plans that a call and its backward cannot dispense with.

    Args:
        name: a name of ``run``, under which the answer is remembered with its arguments' shapes.
        run: the call, as of :func:`asked`.
        given: its arguments: tensors, the first on the device that is asked about, and what tells calls apart.
    """
    device, is_graded = given[0].device, torch.is_grad_enabled()
    key = (
        name, device, is_graded,
        *((x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in given),
    )  # fmt: skip
    known = _known.get(key)
    if known is None:
        wanted = dict.fromkeys(asked(run, *given, target=target_of(given[0])))
        plans = [plan_for(spec, device, *sizes) for spec, sizes in wanted]
        known = keep(_known, key, None not in plans)
    return known
