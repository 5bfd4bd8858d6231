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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilekern.compile.toolchain import require_toolkit, toolkit
from tilekern.errors import InputError
from tilekern.ops.adamw import AdamW
from tilekern.patch.guards import has_global_hooks, is_gathered
from tilekern.patch.stepping import Batch, Call, core_of, has_config, step_as_it_is
from tilekern.runtime import dispatch
from tilekern.runtime.defaults import AHEAD
from tilekern.runtime.dispatch import Foreseen
from tilekern.runtime.recorder import Trace, products_cast, tracing
from tilekern.runtime.settings import check_settings
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.targets import Target, resolve

# Steps of one model that are traced; a trace takes a second for each thousand calls of its ops.
_MOST_STEPS = 8
_T = TypeVar("_T")
_CALL = torch.nn.Module._call_impl.__code__
_traced: weakref.WeakKeyDictionary[torch.nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Prepared:
    """The outcome of :func:`prepare`.

    Attributes:
        problems: how many problems the step asks for, without those of kernels that run only if a record was measured.
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
    asked = _traced_step(core, step, target, _autocast_of(core)).problems
    begun = dispatch.compile_ahead(asked, target)
    AHEAD.finish()
    left = dispatch.missing(asked, target)
    compiled = sum(coming.is_whole for coming in begun)
    return Prepared(len(asked), compiled, tuple((spec.name, problem) for spec, problem in left))


def foresee(target: Target) -> Foreseen | None:
    """Return what the step of the model asks for in whose forward this is called; None if that is not known.

    A step of a model is traced once for the shapes that it is given.
    """
    found = _running()
    if found is None:
        return None
    model, call = found
    if _is_split(model) or has_global_hooks():
        return None
    traced = _traced.setdefault(model, set())
    shapes = (call.has_gradient, model.training, *map(_shape, tree_leaves((call.args, dict(call.kwargs)))))
    if shapes in traced or len(traced) >= _MOST_STEPS:
        return None
    traced.add(shapes)
    casts, counts = _autocast_of(model), toolkit() is None
    if not counts:
        AHEAD.get_ready()
    asked = _apart(lambda: _traced_step(model, call.on_meta(), target, casts, counts=counts))
    if asked is None or not asked.problems:
        return None

    def cost_s(kernels: Collection[str]) -> float | None:
        # SDPA moves as little as attention's kernels.
        names = [name for name in kernels if not name.startswith("attention")]
        own = _apart(lambda: _traced_step(model, call.on_meta(), target, casts, lacking=names, counts=True))
        return None if own is None else max(0.0, (own.bytes - asked.bytes) / (1e9 * target.copy_gbs))

    return Foreseen(type(core_of(model)).__name__, asked.problems, cost_s)


def _apart(trace: Callable[[], _T]) -> _T | None:
    """Run a trace in a thread of its own; return None if the step cannot be traced.

    The call on this thread's stack, its modes and its gradient state are the job's.
    """
    found: list[_T] = []

    def run() -> None:
        # What cannot be traced is compiled when it is called.
        with dispatch.looking_nothing_up(), contextlib.suppress(Exception):
            found.append(trace())

    thread = threading.Thread(target=run, name="tilekern trace", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process may have no more threads
        return None
    thread.join()
    return found[0] if found else None


class _Step(NamedTuple):
    """A traced step: what it cannot do without, and the bytes that it moves on the GPU if they were counted."""

    problems: list[tuple[KernelSpec, Problem]]
    bytes: float


def _autocast_of(model: torch.nn.Module) -> torch.autocast:
    """Return the autocast that is in force for a model's device."""
    kind = next((x.device.type for x in model.parameters() if not x.is_meta), "cuda")
    is_on = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=is_on)


def _traced_step(
    model: torch.nn.Module, step: Batch | Call, target: Target, casts: torch.autocast, *,
    lacking: Collection[str] = (), counts: bool = False,
) -> _Step:  # fmt: skip
    """Trace a step of a model under an autocast.

    The model's own ops run in place of the kernels named in ``lacking``.
    """
    trace = Trace(target, lacking=lacking)
    trace.stands_for = casts.device
    counting = _Traffic() if counts else contextlib.nullcontext()
    with tracing(trace) as found, counting as traffic, products_cast(casts.device), casts:
        step_as_it_is(model, step, adamw=AdamW.steps(model.parameters()))
    launched = (found.specs[kernel].bytes_moved(problem) * n for (kernel, problem), n in found.launches.items())
    others = set(found.dispensable)  # whose defaults no call would run
    problems = [(found.specs[named[0]], named[1]) for named in found.asked if named not in others]
    return _Step(problems, traffic.bytes + sum(launched) if traffic is not None else 0.0)


class _Traffic(TorchDispatchMode):
    """Counts the bytes that torch's own operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in _NO_TRAFFIC:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
        return result


_aten = torch.ops.aten
_NO_TRAFFIC = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten._unsafe_view, _aten.resize_)


def _running() -> tuple[torch.nn.Module, Call] | None:
    """Return the outermost model with a configuration whose forward is on the stack, and its call."""
    outermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and has_config(frame.f_locals["self"]):
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
    return not is_gathered(model) and any(hasattr(x, "placements") for x in model.parameters())


def _shape(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return *leaf.shape, leaf.dtype
    return type(leaf).__name__
