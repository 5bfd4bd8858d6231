"""One way to register an op with torch: opaque to torch.compile, with its fake and its gradient."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tilekern.kernels.families.placeholders import TYPES

# Kept alive for as long as the process: torch drops a library's registrations with the object.
_LIBRARY = torch.library.Library("tilekern", "DEF")
_TYPES = {getattr(torch, dtype): name for dtype, name in TYPES.items()}
# How many dispatch modes are on (FakeTensorMode, make_fx, selective checkpoints), and the innermost of functorch's
# transforms or None: each a call of 40 ns.
modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
# Of what kernels divide by and multiply by in float32, each of which must stay finite.
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


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd has to know of an op on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse a tensor on another device than the first: a kernel would take its address as it is.

    Where a plan was found before, nobody comes here: the tensors' ``get_device()``, cheaper than ``device``, stand in
    the key that the plan is kept by.
    """
    first = next(iter(tensors.values()))
    assert first is not None
    device = first.device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, and must be on {device} as {next(iter(tensors))} is")


def check_tensors(op: str, *whole: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors on several devices, or not of a floating dtype (of an integer one: those named ``whole``)."""
    check_devices(op, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None:
            check_dtype(op, name, tensor, whole=name in whole)


def check_dtype(op: str, name: str, x: torch.Tensor, *, whole: bool = False) -> None:
    """Refuse a tensor that is not of a floating dtype, or, where it holds ``whole`` numbers, of an integer one."""
    dtype = x.dtype
    is_right = (
        not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) if whole else dtype.is_floating_point
    )
    if not is_right:
        raise ValueError(f"{op}: {name} must be of {'an integer' if whole else 'a floating'} dtype, got {dtype}")


def check_softcap(op: str, softcap: float | None) -> None:
    """Refuse a cap that kernels cannot divide by."""
    if softcap is not None and not _LEAST <= softcap <= _MOST:
        raise ValueError(
            f"{op}: softcap must be positive and finite ({_LEAST:g} to {_MOST:g}), or None for no cap, got {softcap}"
        )


def check_temperature(op: str, temperature: float) -> None:
    """Refuse a temperature that kernels cannot divide by."""
    if not _LEAST <= temperature <= _MOST:
        raise ValueError(f"{op}: temperature must be positive and finite ({_LEAST:g} to {_MOST:g}), got {temperature}")


def check_share(op: str, name: str, share: float) -> None:
    """Refuse a number that is not from 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"{op}: {name} must be from 0 to 1, got {share}")


def check_head(op: str, **given: torch.Tensor) -> None:
    """Refuse rows [..., hidden] and the weight [vocabulary, hidden] of a head that do not go together."""
    (rows, hidden), (head, weight) = given.items()
    if not hidden.dim() or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: {rows} must be [..., hidden] and {head} [vocabulary, hidden], "
            f"got {list(hidden.shape)} and {list(weight.shape)}"
        )


def check_ids(op: str, name: str, ids: torch.Tensor, **given: torch.Tensor) -> None:
    """Refuse whole numbers that are not one for each row of a tensor, or not of an integer dtype."""
    ((rows, values),) = given.items()
    if not values.dim() or ids.shape != values.shape[:-1]:
        raise ValueError(
            f"{op}: {name} must be {list(values.shape[:-1])} as the rows of {rows} are, got {list(ids.shape)}"
        )
    check_dtype(op, name, ids, whole=True)


def is_autocast(kind: str) -> bool:
    """Whether autocast is on for a type of device; torch raises where it is asked that of ``meta``."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def keeps_graph() -> bool:
    """Whether the backward that runs was told to keep its graph, so that another may read what is saved."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def uncast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """No autocast for a type of device: torch's operations in a kernel's place give the dtypes that it gives."""
    return torch.autocast(kind, enabled=False) if is_autocast(kind) else contextlib.nullcontext()


def is_traced(x: torch.Tensor) -> bool:
    """Whether somebody watches or transforms the operations on ``x``, to whom a launch would say nothing."""
    return torch.compiler.is_compiling() or transforms() is not None or (modes() > 0 and not x.is_meta)


def is_transformed() -> bool:
    """Whether one of functorch's transforms is on: torch's operations have its rules, and a registered op has none."""
    return not torch.compiler.is_compiling() and transforms() is not None


def is_eager(*tensors: torch.Tensor) -> bool:
    """Whether tensors of one dtype are worked on as they are: not traced, and not cast by autocast."""
    if is_traced(tensors[0]) or is_autocast(tensors[0].device.type):
        return False
    return len({tensor.dtype for tensor in tensors}) == 1


def differentiable_once(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """The backward of an autograd function, whose results refuse to be differentiated.

    torch's ``once_differentiable`` takes them for constants where no slope needs a gradient, as behind a sum, though
    what was saved may: a part of their gradient would be missing in silence.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *slopes: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch._C._is_any_autocast_enabled():
            # Of whoever calls the backward: what the forward ran in is what its plans and its products are for.
            with uncast(next(x.device.type for x in slopes if x is not None)):
                return once(ctx, *slopes)
        return once(ctx, *slopes)

    def once(ctx: Any, *slopes: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *slopes)
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, *slopes)
        return first_order(found, *saved, *slopes)

    return refusing


def first_order(
    gradients: Sequence[torch.Tensor | None], *sources: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """A backward's results, made under ``no_grad``, which refuse to be differentiated with respect to ``sources``."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(None if x is None else _FirstOrder.apply(x, *sources) for x in gradients)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG004
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:  # noqa: ARG004
        raise RuntimeError("tilekern: trying to differentiate twice; the gradient of this op has no gradient")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., columns] as [rows, columns] with neighbouring columns and rows that do not overlap.

    A view where the strides allow it, else a contiguous copy, which costs less than narrow loads would.
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
    """A contiguous tensor of any shape as the launcher takes an array of another: its memory, and no tensor's views.

    cuda.tile takes whatever has the CUDA array interface. To make a view costs the host more than a microsecond, this
    a fifth of that, and the launcher reads it as fast as it does a tensor.
    """

    __slots__ = ("shape", "tensor")

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.tensor, self.shape = tensor, shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape and dtype of the array; strides are those of memory without gaps."""
        tensor = self.tensor
        return {"typestr": _TYPES[tensor.dtype], "shape": self.shape, "data": (tensor.data_ptr(), False), "version": 3}


def viewed(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor as rows, on the CPU in place of :class:`Rows`."""
    return x.view(shape)


# Rows of one value that are kept, by size, value, dtype and device. None is ever dropped, as a graph may read it.
_rows: dict[tuple[int, float, torch.dtype, torch.device], torch.Tensor] = {}
_MOST_ROWS = 256


def constant_row(x: torch.Tensor, value: float) -> torch.Tensor:
    """A row [columns] of one value in the dtype of ``x``, which nobody may write to; it is kept where it lasts."""
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return x.new_full(x.shape[-1:], value)
    key = (x.shape[-1], value, x.dtype, x.device)
    row = _rows.get(key)
    if row is None:
        with torch.inference_mode(False):
            row = torch.full(key[:1], value, dtype=x.dtype, device=x.device)
        if len(_rows) < _MOST_ROWS and _lasts(row):
            if row.is_cuda:
                torch.cuda.current_stream(row.device).synchronize()  # the next reader may be on another stream
            _rows[key] = row
    return row


def _lasts(x: torch.Tensor) -> bool:
    """Whether a new tensor means the same in later calls: no mode's, no transform's, no graph's and no pool's."""
    if type(x) is not torch.Tensor or transforms() is not None:
        return False
    if not x.is_cuda:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # of an allocator that has no pools
        return True
    address, device = x.data_ptr(), x.get_device()
    return any(
        part["device"] == device and 0 <= address - part["address"] < part["total_size"]
        for part in segments
        if tuple(part["segment_pool_id"]) == (0, 0)
    )


def scalar(number: torch.Tensor | float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor [] of a device.

    One that lies in the host's memory is filled in on the GPU: a copy of it waits for the stream, and ends a capture.
    """
    if isinstance(number, torch.Tensor):
        if type(number) is not torch.Tensor or not number.is_cpu or torch.compiler.is_compiling() or modes():
            return number.to(device=device, dtype=dtype).reshape(())
        number = number.item()
    return torch.full((), number, dtype=dtype, device=device)


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of a product of tensors of some dtypes."""
    return functools.reduce(torch.promote_types, dtypes)


def other(dtype: torch.dtype, than: torch.dtype) -> torch.dtype | None:
    """A dtype, or None where it is the second one."""
    return None if dtype == than else dtype


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself unless its last dimension is spread out or some elements share memory."""
    strides = x.stride()
    return x if strides[-1] == 1 and 0 not in strides else x.contiguous()


def fresh(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised contiguous tensor of the shape of another, and of its dtype where none is given."""
    if dtype is None and like.is_contiguous():
        return torch.empty_like(like)
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


def by_autograd(
    formula: Callable[..., Any], arguments: Sequence[Any], places: Sequence[int], slopes: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a formula's results with respect to the arguments at some places; None for one that is None.

    It works inside of a registered op too, where torch's dispatcher has left autograd behind.
    """
    given = list(arguments)
    for place in places:
        given[place] = None if given[place] is None else given[place].detach().requires_grad_()
    leaves = [given[place] for place in places if given[place] is not None]
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
        found = iter(torch.autograd.grad(formula(*given), leaves, slopes))
    return tuple(None if given[place] is None else next(found).contiguous() for place in places)


def shaped(y: torch.Tensor, *shape: int) -> torch.Tensor:
    """A product's rows, which nobody else has, in a result's shape: no view, so that autograd lets it be changed."""
    if y.dim() == len(shape):
        return y
    if forward_ad._current_level < 0:
        return y.resize_(shape)  # of as many elements: a third of what the operation below costs the host
    return torch.ops.aten._unsafe_view.default(y, shape)


def disjoint(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where expanded dimensions make elements share memory: no variant of a kernel takes such arrays.

    The launcher states of each array whether they may, and artifacts are compiled for arrays in which they do not.
    """
    return x.contiguous() if 0 in x.stride() and not x.is_contiguous() else x
