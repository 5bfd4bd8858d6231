"""Helpers of all ops: registration with torch, checks of arguments, autograd, autocast, memory of arrays."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilekern.kernels.families.placeholders import TYPES, placeholder
from tilekern.runtime.dispatch import Plan, meta_stands_for, plan_for
from tilekern.runtime.driver import enter_context

# Kept for the life of the process: torch drops a library's registrations with the object.
# Tensors that no class of their own computes with.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_LIBRARY = torch.library.Library("tilekern", "DEF")
_TYPES = {getattr(torch, dtype): name for dtype, name in TYPES.items()}
# The number of active dispatch modes (FakeTensorMode, make_fx, selective checkpoints), and functorch's innermost
# transform or None; each call takes 40 ns.
modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_is_any_autocast = torch._C._is_any_autocast_enabled
# Bounds of factors: kernels multiply and divide by them in float32, and both must stay finite.
_LEAST, _MOST = 1e-30, 1e30


def register(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``tilekern::<signature>`` and return the callable op.

    Args:
        signature: torch's schema language, for example ``rms_norm(Tensor x, Tensor weight, float eps) -> Tensor``.
        run: the op on real tensors of any device.
        fake: shapes and dtypes of the results, for tracing.
    """
    name = signature.partition("(")[0]
    _LIBRARY.define(signature, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilekern::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.tilekern, name).default


def register_gradient(op: Any, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Give an op its gradient: ``save(ctx, inputs, output)`` in the forward, ``backward(ctx, *gradients)``."""
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)


def refuse_gradient(op: Any) -> None:
    """Let differentiating the results of an op raise: they are gradients, and torch would take them for constants."""
    torch.library.register_autograd(op, _refuse, lib=_LIBRARY)


def refuse_graded(op: Any, refuse: Callable[[], None]) -> None:
    """Let calls of an op without a gradient raise by ``refuse()`` where autograd would have to record them."""

    def run(*given: Any) -> Any:
        if needs_gradient(*(x for x in given if isinstance(x, Tensor))):
            refuse()
        with torch._C._AutoDispatchBelowAutograd():
            return op(*given)

    _LIBRARY.impl(op.name().partition("::")[2], run, "Autograd")


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError("tilekern: trying to differentiate twice; the gradient of this op has no gradient")


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd must record an op on these tensors."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110 (a generator takes longer than the checks)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor is on another device than the first: a kernel would use its address anyway.

    Calls with a known plan skip this: the key of the plan has each tensor's ``get_device()``.
    """
    first = next(iter(tensors.values()))
    assert first is not None
    device = first.device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, and must be on {device} as {next(iter(tensors))} is")


def check_tensors(op: str, *whole: str, **tensors: Tensor | None) -> None:
    """Raise ValueError for tensors on several devices, or of a dtype that is not floating (integer if in ``whole``)."""
    check_devices(op, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None:
            check_dtype(op, name, tensor, whole=name in whole)


def check_dtype(op: str, name: str, x: Tensor, *, whole: bool = False) -> None:
    """Raise ValueError if a tensor is not of a floating dtype, or, for ``whole`` numbers, of an integer dtype."""
    dtype = x.dtype
    is_right = (
        not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) if whole else dtype.is_floating_point
    )
    if not is_right:
        raise ValueError(f"{op}: {name} must be of {'an integer' if whole else 'a floating'} dtype, got {dtype}")


def check_vectors(op: str, size: int, **vectors: Tensor | None) -> None:
    """Raise ValueError for a vector that does not have the given size."""
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (size,):
            raise ValueError(f"{op}: {name} must have the shape [{size}], got {list(vector.shape)}")


def check_softcap(op: str, softcap: float | None) -> None:
    """Raise ValueError for a soft cap that is not positive and finite in float32."""
    if softcap is not None and not _LEAST <= softcap <= _MOST:
        raise ValueError(
            f"{op}: softcap must be positive and finite ({_LEAST:g} to {_MOST:g}), or None for no cap, got {softcap}"
        )


def check_temperature(op: str, temperature: float) -> None:
    """Raise ValueError for a temperature that is not positive and finite in float32."""
    if not _LEAST <= temperature <= _MOST:
        raise ValueError(f"{op}: temperature must be positive and finite ({_LEAST:g} to {_MOST:g}), got {temperature}")


def check_share(op: str, name: str, share: float) -> None:
    """Raise ValueError for a number outside [0, 1]."""
    if not 0 <= share <= 1:
        raise ValueError(f"{op}: {name} must be from 0 to 1, got {share}")


def check_head(op: str, **given: Tensor) -> None:
    """Raise ValueError unless rows are [..., hidden] and the weight of the head is [vocabulary, hidden]."""
    (rows, hidden), (head, weight) = given.items()
    if not hidden.dim() or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: {rows} must be [..., hidden] and {head} [vocabulary, hidden], "
            f"got {list(hidden.shape)} and {list(weight.shape)}"
        )


def check_ids(op: str, name: str, ids: Tensor, **given: Tensor) -> None:
    """Raise ValueError unless there is one number per row of a tensor, of an integer dtype."""
    ((rows, values),) = given.items()
    if not values.dim() or ids.shape != values.shape[:-1]:
        raise ValueError(
            f"{op}: {name} must be {list(values.shape[:-1])} as the rows of {rows} are, got {list(ids.shape)}"
        )
    check_dtype(op, name, ids, whole=True)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for a tensor's type of device."""
    # Reading the type takes five times as long as asking for all types at once.
    return _is_any_autocast() and _is_autocast(x.device.type)


def _is_autocast(kind: str) -> bool:
    """Return the same for a type of device; torch raises if asked about ``meta``."""
    if kind == "meta":
        return (stood_for := meta_stands_for()) is not None and torch.is_autocast_enabled(stood_for)
    return torch.is_autocast_enabled(kind)


def autocast_dtype(kind: str) -> torch.dtype:
    """Return the dtype that autocast, which is on, casts to for a type of device."""
    return torch.get_autocast_dtype(meta_stands_for() or kind if kind == "meta" else kind)


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph, so that another one may read the saved tensors."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def cast_as_products(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast the inputs of matrix products as autocast would, if it is on; it does not cast float64."""
    first = tensors[0]
    assert first is not None
    if not is_autocast(first) or any(x is not None and x.dtype == torch.float64 for x in tensors):
        return tensors
    dtype = autocast_dtype(first.device.type)
    return tuple(None if x is None else x.to(dtype) for x in tensors)


def cast_together(dtype: torch.dtype, tensors: Iterable[Any], into: Mapping[int, Tensor] = MappingProxyType({})) -> Any:
    """Return tensors in a dtype; None stays None, and plain ones of another dtype are cast by one launch.

    ``into``: memory for some of the latter by their places in ``tensors``.
    """
    found = list(tensors)
    wide = {place: x for place, x in enumerate(found) if x is not None and x.dtype != dtype}
    if not all(type(x) in PLAIN for x in wide.values()):
        # DTensors have no operation for that.
        return [x if x is None else x.to(dtype) for x in found]
    if wide:
        made = {place: into[place] if place in into else torch.empty_like(x, dtype=dtype) for place, x in wide.items()}
        torch._foreach_copy_(list(made.values()), list(wide.values()))
        for place, x in made.items():
            found[place] = x
    return found


def plans_of_both(
    graded: bool, device: torch.device, forward: tuple[Any, ...], backward: tuple[Any, ...]
) -> tuple[Plan, Plan | None] | None:
    """Return the plans of the forward and, if there is a gradient, of the backward; each is found by (spec, *sizes).

    Return None if one of them is missing, so that torch must do the work.
    """
    first = plan_for(forward[0], device, *forward[1:])
    second = plan_for(backward[0], device, *backward[1:]) if graded and first is not None else None
    return None if first is None or (graded and second is None) else (first, second)


def uncast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, so that torch's operations give the same dtypes as the kernel."""
    if not _is_autocast(kind):
        return contextlib.nullcontext()
    return torch.autocast(meta_stands_for() or kind if kind == "meta" else kind, enabled=False)


def is_traced(x: Tensor) -> bool:
    """Return whether operations on ``x`` are traced or transformed, so that a launch would not be seen."""
    return torch.compiler.is_compiling() or transforms() is not None or (modes() > 0 and not x.is_meta)


def is_transformed() -> bool:
    """Return whether a functorch transform is on: torch's operations have rules for it, registered ops do not."""
    return not torch.compiler.is_compiling() and transforms() is not None


def is_eager(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether tensors have one dtype and are neither traced nor cast by autocast.

    Trainers train models of half types under autocast to their own dtype, which casts nothing.
    """
    return product_dtype(x, *others) == x.dtype


def product_dtype(x: Tensor, *others: Tensor | None) -> torch.dtype | None:
    """Return the dtype of products of some tensors, that of autocast if it casts float32.

    It is None if they are traced, of several dtypes, or of a half type that autocast casts to another one, since
    gradients of that type are no results of products.
    """
    if is_traced(x):
        return None
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype != dtype:
            return None
    if dtype == torch.float64 or not is_autocast(x):
        return dtype
    cast = autocast_dtype(x.device.type)
    return cast if dtype in (cast, torch.float32) else None


def as_products(call: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Return what a function of the inputs of matrix products makes of them, each cast once as autocast casts."""
    first = tensors[0]
    assert first is not None
    if not is_autocast(first) or is_traced(first):
        return call(*tensors)
    cast = cast_as_products(*tensors)
    if all(x is y for x, y in zip(tensors, cast, strict=True)):
        return call(*tensors)
    with uncast(first.device.type):
        return call(*cast)


class _Thread(threading.local):
    """This thread; has_context: whether a GPU's context is current in it.

    Autograd's threads begin without one. A launch leaves none behind, and cuBLAS, as the first of torch in a backward
    of ours, would warn that it has to make one.
    """

    has_context = False

    def enter(self, slopes: tuple[Tensor | None, ...]) -> None:
        """Make the context of the tensors' device current."""
        for x in slopes:
            if x is not None and x.is_cuda:
                enter_context(x.get_device())
                self.has_context = True


_thread = _Thread()


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the ``apply`` of an autograd function whose callers have found no functorch transform to be on.

    torch's own looks for transforms and for tensors that one has left behind, which takes a third of a call.
    """
    bare, whole = super(torch.autograd.Function, function).apply, function.apply

    def apply(*given: Any) -> Any:
        try:
            return bare(*given)
        except NotImplementedError:  # a tensor that a transform has left behind has no memory
            return whole(*given)
        except RuntimeError:
            # Torch's operations keep tensors of inference mode only if a gradient reads them; ours keep them anyway.
            copies = [x.clone() if isinstance(x, Tensor) and _is_of_inference(x) else x for x in given]
            if all(x is y for x, y in zip(given, copies, strict=True)):
                raise
            return bare(*copies)

    return apply


def _is_of_inference(x: Tensor) -> bool:
    """Return whether a tensor is of inference mode, and no parameter, which torch refuses too."""
    return x.is_inference() and not x.requires_grad


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Wrap the backward of an autograd function so that differentiating its results raises.

    torch's ``once_differentiable`` treats the results as constants if no incoming gradient needs a gradient, as after a
    sum, even if saved tensors do: part of the gradient would silently be missing.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        if not _thread.has_context:
            _thread.enter(slopes)
        try:
            if _is_any_autocast():
                # Autocast of the caller of the backward: plans and products are those of the forward's dtypes.
                with uncast(next(x.device.type for x in slopes if x is not None)):
                    return once(ctx, *slopes)
            # Here, as one more call takes part of a microsecond.
            return once(ctx, *slopes) if torch.is_grad_enabled() else backward(ctx, *slopes)
        except RuntimeError as error:  # batched tensors have no memory
            if not any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in slopes):
                raise
            raise RuntimeError(
                "tilekern: a kernel computes one gradient at a time; pass is_grads_batched=False (vectorize=False)"
            ) from error

    def once(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *slopes)
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, *slopes)
        return first_order(found, *saved, *slopes)

    return refusing


def first_order(gradients: Sequence[Tensor | None], *sources: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return gradients, made under ``no_grad``, that raise if differentiated with respect to ``sources``."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(None if x is None else _FirstOrder.apply(x, *sources) for x in gradients)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:  # noqa: ARG004
        return gradient.view_as(gradient)

    backward = staticmethod(_refuse)


def run_product(plan: Plan, shape: tuple[int, ...], *inputs: Any) -> Tensor:
    """Run a product and return its result [shape], in the dtype of its first input."""
    like = inputs[0]
    c: Tensor
    (c,) = plan.run(like.get_device(), inputs, lambda: (torch.empty(shape, dtype=like.dtype, device=like.device),))
    return c


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` [..., columns] as [rows, columns] with adjacent columns and rows that do not overlap.

    This is a view if the strides allow it, else a contiguous copy, which costs less than narrow loads.
    """
    if x.is_contiguous():
        return x if x.dim() == 2 else x.view(-1, x.shape[-1])
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    stride, step = rows.stride()
    if (step != 1 and columns != 1) or (stride < columns and rows.shape[0] > 1):
        return rows.contiguous()
    return rows


class Rows:
    """A contiguous tensor presented to the launcher as an array of another shape, without a view.

    cuda.tile takes any object with the CUDA array interface. A view costs the host more than a microsecond, this a
    fifth of that, and the launcher reads it as fast as a tensor.
    """

    __slots__ = ("__cuda_array_interface__", "tensor")

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        # Made once, as a launch may read and write the array.
        self.__cuda_array_interface__ = {
            "typestr": _TYPES[tensor.dtype], "shape": shape, "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip


def viewed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view; stands in for :class:`Rows` on the CPU."""
    return x.view(shape)


# Constant rows by size, value, dtype and device. They are never dropped, as a CUDA graph may read them.
_rows: dict[tuple[int, float, torch.dtype, torch.device], Tensor] = {}
_MOST_ROWS = 256


def constant_row(x: Tensor, value: float) -> Tensor:
    """Return a read-only row [columns] of one value in the dtype of ``x``; it is cached if it outlives this call."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return x.new_full(x.shape[-1:], value)
    return constant(x.shape[-1], value, x.dtype, x.device)


def constant(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a read-only vector of one value; it is cached if it outlives this call, which must not be traced."""
    key = (size, value, dtype, device)
    row = _rows.get(key)
    if row is None:
        with torch.inference_mode(False):
            row = torch.full(key[:1], value, dtype=dtype, device=device)
        if len(_rows) < _MOST_ROWS and _lasts(row):
            if row.is_cuda:
                torch.cuda.current_stream(row.device).synchronize()  # the next reader may be on another stream
            _rows[key] = row
    return row


def _lasts(x: Tensor) -> bool:
    """Return whether a new tensor is valid in later calls: not part of a mode, transform, graph or memory pool."""
    if type(x) is not Tensor or transforms() is not None:
        return False
    if not x.is_cuda:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # the allocator has no pools
        return True
    address, device = x.data_ptr(), x.get_device()
    return any(
        part["device"] == device and 0 <= address - part["address"] < part["total_size"]
        for part in segments
        if tuple(part["segment_pool_id"]) == (0, 0)
    )


def scalar(number: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor [] on a device.

    A number in host memory is filled in on the GPU: copying it would wait for the stream and end a capture.
    """
    if isinstance(number, Tensor):
        if type(number) is not Tensor or not number.is_cpu or is_traced(number):
            return number.to(device=device, dtype=dtype).reshape(())
        number = number.item()
    return torch.full((), number, dtype=dtype, device=device)


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of a product of tensors of some dtypes."""
    return functools.reduce(torch.promote_types, dtypes)


def other(dtype: torch.dtype, than: torch.dtype) -> torch.dtype | None:
    """Return a dtype, or None if it equals the second one."""
    return None if dtype == than else dtype


def readable(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if its last dimension is strided or elements share memory."""
    strides = x.stride()
    return x if strides[-1] == 1 and 0 not in strides else x.contiguous()


def fresh(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised contiguous tensor of the shape of another, and of its dtype if none is given."""
    if dtype is None and like.is_contiguous():
        return torch.empty_like(like)
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


def by_autograd(
    formula: Callable[..., Any], arguments: Sequence[Any], places: Sequence[int], slopes: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a formula with respect to the arguments at some positions; None for arguments of None.

    This also works inside a registered op, where torch's dispatcher has disabled autograd.
    """
    given = list(arguments)
    for place in places:
        given[place] = None if given[place] is None else given[place].detach().requires_grad_()
    leaves = [given[place] for place in places if given[place] is not None]
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
        found = iter(torch.autograd.grad(formula(*given), leaves, slopes))
    return tuple(None if given[place] is None else next(found).contiguous() for place in places)


def shaped(y: Tensor, *shape: int) -> Tensor:
    """Return the rows of a product in a result's shape, not as a view, so that autograd allows in-place changes."""
    if y.dim() == len(shape):
        return y
    if forward_ad._current_level < 0:
        return y.resize_(shape)  # a third of the host time of the operation below
    return torch.ops.aten._unsafe_view.default(y, shape)


def whole_numbers(x: Tensor | None, ndim: int, device: torch.device) -> Any:
    """Return an array of int32 for a kernel, or the placeholder of one that a call does not have."""
    if x is None:
        return placeholder(ndim, torch.int32, device)
    return disjoint(x if x.dtype == torch.int32 else x.to(torch.int32))


def disjoint(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if expanded dimensions make elements share memory: no variant of a kernel allows that."""
    return x.contiguous() if 0 in x.stride() and not x.is_contiguous() else x
