"""Tells at the first miss of a step what else that step will miss, so that all of it is compiled at once.

A miss happens inside the model's forward. The outermost call of a model on the stack has the model and what it was
given; a trace of that step on meta tensors (:mod:`tilekern.patch.stepping`) lists its problems. So a job whose cache
has all it needs is never traced, and pays nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import InputError, TilekernError
from tilekern.ops.adamw import AdamW
from tilekern.patch.stepping import Batch, Call, core_of, step_as_it_is
from tilekern.runtime import dispatch
from tilekern.runtime.defaults import AHEAD
from tilekern.runtime.recorder import Trace, tracing
from tilekern.runtime.settings import check_settings
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.targets import Target, resolve

# Steps of one model that are traced; a trace takes a second for each thousand calls of its ops.
_MOST_STEPS = 8
_CALL = torch.nn.Module._call_impl.__code__
_traced: weakref.WeakKeyDictionary[torch.nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Prepared:
    """The outcome of :func:`prepare`.

    Attributes:
        problems: how many problems the step asks for.
        compiled: how many defaults were compiled here.
        missing: kernel and problem of those that have no record yet: they could not be compiled, or another process is
            still at it.
    """

    problems: int
    compiled: int
    missing: tuple[tuple[str, Problem], ...]


def prepare(model: torch.nn.Module, batch: Mapping[str, Any] | None = None, *, gpu: str = "auto") -> Prepared:
    """Compile all that a training step of a model would miss, on all cores, and wait until it is in the cache::

        tilekern.prepare(model, batch)  # before the first step; ``batch`` is what ``model(**batch)`` gets

    The first step does the same by itself, and waits for less: nothing here is needed by a job. It is for a host whose
    cache a job will read, and for a job that must not wait later. Nothing is measured; :func:`tilekern.tune` does.

    Args:
        model: the model, patched as for the job, on any device.
        batch: the arguments of its forward by name, with tensors on any device, ``labels`` among them for a training
            step. None is one sequence of 2048 tokens.
        gpu: the GPU of the job: ``auto`` (the one here), a name, an arch, a key or figures.

    Returns:
        What was asked for, compiled and left.

    Raises:
        InputError: there is no such GPU, the model has no configuration, or its step cannot be traced.
        ToolchainMissing: no compiler is installed.
    """
    check_settings()
    target = dispatch.here() if gpu == "auto" else resolve(gpu)
    if target is None:
        raise InputError("prepare: this machine has no CUDA GPU; name one, for example gpu='H200'")
    require_toolkit()
    core = core_of(model)
    step = Batch(1, 2048) if batch is None else Call(kwargs=batch).on_meta()
    asked = _problems_of(core, step, target)
    begun = dispatch.compile_ahead(asked, target)
    AHEAD.finish()
    left = dispatch.missing(asked, target)
    compiled = sum(coming.is_whole for coming in begun)
    return Prepared(len(asked), compiled, tuple((spec.name, problem) for spec, problem in left))


def foresee(target: Target) -> list[tuple[KernelSpec, Problem]] | None:
    """Return what the step of the model asks for in whose forward this is called; None if that is not known.

    A step of a model is traced once for the shapes that it is given.
    """
    found = _running()
    if found is None:
        return None
    model, call = found
    if _is_split(model):
        return None
    traced = _traced.setdefault(model, set())
    shapes = (call.has_gradient, model.training, *map(_shape, tree_leaves((call.args, dict(call.kwargs)))))
    if shapes in traced or len(traced) >= _MOST_STEPS:
        return None
    traced.add(shapes)
    asked: list[tuple[KernelSpec, Problem]] = []

    def trace() -> None:
        # What cannot be traced is compiled when it is called.
        with dispatch.looking_nothing_up(), contextlib.suppress(TilekernError):
            asked.extend(_problems_of(model, call.on_meta(), target))

    # In a thread of its own: the call on this one's stack, its modes and its gradient state are the job's.
    thread = threading.Thread(target=trace, name="tilekern trace", daemon=True)
    AHEAD.get_ready()
    try:
        thread.start()
    except RuntimeError:  # the process may have no more threads
        return None
    thread.join()
    return asked


def _problems_of(model: torch.nn.Module, step: Batch | Call, target: Target) -> list[tuple[KernelSpec, Problem]]:
    with tracing(Trace(target)) as found:
        step_as_it_is(model, step, adamw=AdamW.is_in_use())
    return [(found.specs[kernel], problem) for kernel, problem in found.asked]


def _running() -> tuple[torch.nn.Module, Call] | None:
    """Return the outermost model with a configuration whose forward is on the stack, and its call."""
    outermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and _has_config(frame.f_locals["self"]):
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return None
    values = outermost.f_locals
    model = values["self"]
    has_gradient = (model.training or torch.is_grad_enabled()) and any(x.requires_grad for x in model.parameters())
    return model, Call(values["args"], values["kwargs"], has_gradient)


def _is_split(model: torch.nn.Module) -> bool:
    """Return whether ranks share tensors for computing, as in tensor parallelism; FSDP computes with whole ones."""
    is_sharded = any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
    return not is_sharded and any(hasattr(x, "placements") for x in model.parameters())


def _has_config(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "to_dict")


def _shape(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return *leaf.shape, leaf.dtype
    return type(leaf).__name__
