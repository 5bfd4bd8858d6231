"""fp8_linear: a linear layer whose three products are of 8-bit floats (e4m3), with a scale for each row.

With x [tokens, in], weight [out, in] and dy [tokens, out], where ``q`` rounds a matrix to e4m3 with a scale for each
row, and ``t`` turns such a matrix (:mod:`tilekern.kernels.fp8`):

    forward          y = q(x) @ q(weight)^T + bias
    input gradient   dx = q(dy) @ t(q(weight))^T
    weight gradient  dweight = t(q(dy)) @ t(q(x))^T

Each of the three is rounded once; a turned matrix has the numbers of the other, at one scale. Of the forward only
``q(x)`` stays, half of what a linear layer keeps, or nothing where another op keeps ``x`` (:mod:`tilekern.ops.kept`).
Weights are rounded anew in both directions: 8-bit copies would take a byte for each parameter between them. All sums
have a fixed order, so a step gives the same bits again.

Layers that share ``x`` (q, k and v; gate and up) round it once. As one function they also turn it once, and add up its
gradients inside of products.

It is written by hand and not declared, as it is a sequence of three kernels. If it is traced or in the invariant mode,
torch's linear layer runs.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilekern.kernels.fp8.product import SPEC as PRODUCT
from tilekern.kernels.fp8.product import scaled_product
from tilekern.kernels.fp8.rows import SPEC as ROWS
from tilekern.kernels.fp8.scales import scaled_rows, turned_rows
from tilekern.kernels.fp8.turned import SPEC as TURNED
from tilekern.kernels.fp8.turned import pitch_of
from tilekern.kernels.matmul.product import MOST_ELEMENTS
from tilekern.kernels.skinny.tiles import MOST_ROWS
from tilekern.ops import cublaslt
from tilekern.ops.foreseen import Call, have_plans, launch, target_of, written
from tilekern.ops.kept import is_kept
from tilekern.ops.linear import product
from tilekern.ops.registration import (
    applied,
    as_products,
    as_rows,
    check_devices,
    differentiable_once,
    is_eager,
    needs_gradient,
    shaped,
    uncast,
)
from tilekern.ops.rounded_weight import RoundedWeight
from tilekern.runtime.dispatch import count_fallback, is_invariant
from tilekern.spec import KernelSpec, cdiv

E4M3 = torch.float8_e4m3fn
# Why products run in the dtype of x on a GPU: by torch's operations, rounding would take longer than they save.
UNSERVED = "kernels of 8-bit floats that no cache holds"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Layer = tuple[Tensor, Tensor | None]
# A matrix [rows, columns] of e4m3, and its scales [rows].
Rounded = tuple[Tensor, Tensor]
# Memory that later launches of a call write again, by shape and dtype.
Room = dict[tuple[tuple[int, ...], torch.dtype], Tensor]
# Of rows of x, of the layers' weights, and of their biases.
Gradients = tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]
# A thread's last input: a reference, when it was read, and its rounded numbers.
_last = threading.local()


class Needs(NamedTuple):
    """Which gradients are wanted of layers that share their input: of that, and of each one's weight and bias."""

    rows: bool
    weights: Sequence[bool]
    biases: Sequence[bool]


class Format(NamedTuple):
    """How layers that share their input run in a format of 8-bit floats.

    Attributes:
        op: the name of the op, for errors.
        product: the kernel by whose name calls of torch's layer are counted.
        forward: :class:`Needs`, x, the layers' weights, and their biases -> the rows of their results, and what
            gradients read beside weights. ``reads_again=True``: this may be x itself.
        backward: :class:`Needs`, the results' gradients (None for a result that nothing read), what the forward
            returned, weights, and the dtype of x -> the gradients: of rows of x, of weights, and of biases.
    """

    op: str
    product: KernelSpec
    forward: Callable[..., tuple[list[Tensor], tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]

    def graded(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results of layers, of weight and bias of each, with gradients."""
        made: tuple[Tensor, ...] = _apply(self, x, *parameters)
        return made

    def plain(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results of layers without gradients."""
        weights, biases = parameters[::2], parameters[1::2]
        made, _ = self.forward(Needs(False, (False,) * len(weights), ()), x, weights, biases)
        return tuple(shaped(y, *x.shape[:-1], y.shape[1]) for y in made)

    def run(self, graded: bool) -> Callable[..., tuple[Tensor, ...]]:
        """Return what computes a call, with or without gradients."""
        return self.graded if graded else self.plain


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight^T + bias``, with products of 8-bit floats in the forward and in both gradients.

    Up to 64 rows without a gradient, as in decoding, run in the dtype of ``x``: rounding the weight would take longer
    than the product.

    Args:
        x: [..., in_features]; bfloat16, float16 or float32, any strides.
        weight: [out_features, in_features], of the dtype of ``x``. Under autocast both are cast, as a linear layer's.
            A :class:`~tilekern.ops.rounded_weight.RoundedWeight` is read as it is.
        bias: [out_features], of the dtype of ``x``, or None.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    return fp8_linears(x, [(weight, bias)])[0]


def fp8_linears(x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """Return the result of :func:`fp8_linear` for each of some layers, weight and bias, that share ``x``."""
    return linears(ROWWISE, x, layers)


def linears(how: Format, x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """Return the results of layers that share ``x`` in a format, or of torch's layers where those run.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    for weight, bias in layers:
        _check(how.op, x, weight, bias)
    parameters = (part for layer in layers for part in layer)
    made: tuple[Tensor, ...] = as_products(functools.partial(_run, how), x, *parameters)
    return made


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"{op}: x must be [..., in_features] and weight [out_features, in_features], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    check_devices(op, x=x, weight=weight, bias=bias)


def _run(how: Format, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
    if not is_eager(x, *parameters):
        if not torch.compiler.is_compiling():
            count_fallback(how.product, "a transform or a mode of torch, as vmap or selective checkpoints")
        return tuple(torch.nn.functional.linear(x, *layer) for layer in layers_of(parameters))
    graded = needs_gradient(x, *parameters)
    run = how.run(graded)
    why = why_not(x, graded, parameters[::2]) or why_no_plans(how.op, run, x, *parameters)
    if why:
        count_fallback(how.product, why)
        is_torchs = graded or any(type(weight) is RoundedWeight for weight in parameters[::2])
        multiply = torch.nn.functional.linear if is_torchs else product
        return tuple(multiply(x, *layer) for layer in layers_of(parameters))
    return run(x, *parameters)


def why_never(x: Tensor) -> str:
    """Return why no call on ``x`` runs products of 8-bit floats, whatever the sizes; empty if calls do."""
    if is_invariant():
        return "the invariant mode, whose bits are those of bfloat16"
    if x.dtype not in _DTYPES:
        return "a dtype that is not bfloat16, float16 or float32"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else ""


def why_not(x: Tensor, graded: bool, weights: Sequence[Any]) -> str:
    """Return why torch's layers, with these weights, compute a call; empty if products of 8-bit floats do."""
    if why := why_never(x):
        return why
    rows = x.numel() // max(1, x.shape[-1])
    if not graded and rows <= MOST_ROWS:
        return "few rows without a gradient"
    if max(x.numel(), *(max(weight.numel(), rows * weight.shape[0]) for weight in weights)) > MOST_ELEMENTS:
        return "a matrix of more than 2^31 elements"
    return "" if x.numel() and all(weight.numel() for weight in weights) else "an empty matrix"


def why_no_plans(op: str, run: Callable[..., Any], x: Tensor, *given: Any) -> str:
    """Return that a kernel which ``run(x, *given)`` or its backward asks for on a GPU has no plan; empty if all have.

    On the CPU, torch's operations show what kernels would compute; a weight of 8-bit numbers has no others.
    """
    if not x.is_cuda or any(type(each) is RoundedWeight for each in given) or have_plans(op, run, x, *given):
        return ""
    return UNSERVED


def layers_of(parameters: Sequence[Any]) -> list[Layer]:
    """Return weight and bias of each layer, of all in one sequence."""
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def vectors(x: Tensor, *sizes: int) -> Sequence[Tensor]:
    """Return vectors of float32 in one piece of memory: a view takes the host less time than memory of its own."""
    whole = _whole(sizes)
    made = torch.empty(sum(whole), dtype=torch.float32, device=x.device).split_with_sizes(whole)
    return made if whole == sizes else [vector[:size] for vector, size in zip(made, sizes, strict=True)]


@functools.lru_cache(1024)
def _whole(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes of vectors that begin at whole 256 bytes, as :mod:`tilekern.ops.cublaslt` takes them."""
    return tuple(cdiv(size, 64) * 64 for size in sizes)


def memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, room: Room | None = None) -> Tensor:
    """Return memory for an array, that of one before if there is room of this kind."""
    made = None if room is None else room.get((shape, dtype))
    if made is None:
        # This takes half the time of new_empty.
        made = torch.empty_strided(shape, _strides(shape), dtype=dtype, device=device)
        if room is not None:
            room[shape, dtype] = made
    return made


@functools.lru_cache(1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def narrowed(x: Tensor, columns: int) -> Tensor:
    """Return the first columns of a matrix."""
    return x if x.shape[1] == columns else x[:, :columns]


def rounded(x: Tensor, scale: Tensor | None = None, room: Room | None = None) -> Rounded:
    """Return the e4m3 numbers of a matrix [rows, columns], and its rows' scales [rows], in the memory that is given."""
    (rows, columns), device = x.shape, x.device
    numbers = memory((rows, columns), E4M3, device, room)
    scale = memory((rows,), torch.float32, device, room) if scale is None else scale
    return (numbers, scale) if launch(ROWS, (rows, columns, x.dtype), x, numbers, scale) else scaled_rows(x)


def rounded_input(x: Tensor, scale: Tensor | None = None) -> Rounded:
    """Return :func:`rounded` of a layer's input [..., columns], once for all layers that get the same tensor.

    The numbers are held as long as the tensor lives, on the same stream and unwritten, until a thread's next input.
    """
    moment = _moment(x)
    held: tuple[Any, Any, Rounded] | None = getattr(_last, "held", None)
    if held is not None and moment is not None and held[0]() is x and held[1] == moment:
        return held[2]
    made = rounded(as_rows(x), scale)
    _last.held = None if moment is None else (weakref.ref(x, _forget), moment, made)
    return made


def _forget(tensor: Any) -> None:
    held = getattr(_last, "held", None)
    if held is not None and held[0] is tensor:
        _last.held = None


def _moment(x: Tensor) -> tuple[int, int, bool] | None:
    """Return when and where a tensor is read; None if a later write could not be told.

    Parameters, buffers and inputs of graphs live on and are written to, by fused optimizers, collectives and captured
    graphs without a new version. What an op of this step made is read by the layers behind it and gone.
    """
    if x.is_inference() or x.grad_fn is None:
        return None
    if not x.is_cuda:
        return x._version, 0, False
    return x._version, torch._C._cuda_getCurrentRawStream(x.get_device()), torch.cuda.is_current_stream_capturing()


def turned(
    x: Tensor, scale: Tensor, dtype: torch.dtype, common: Tensor | None = None, room: Room | None = None
) -> Rounded:
    """Return the transpose of a matrix, at the largest of its rows' scales.

    Args:
        x: [rows, columns]; e4m3 numbers, or numbers of ``dtype`` that are rounded to these scales first.
        scale: [rows].
        dtype: that of the matrix before it was rounded.
        common: memory for the scales [columns].
        room: memory for the numbers.
    """
    (rows, columns), device = x.shape, x.device
    pitch = pitch_of(rows)
    y = memory((columns, pitch), E4M3, device, room)
    common = memory((columns,), torch.float32, device, room) if common is None else common
    if not launch(TURNED, (rows, columns, x.dtype == E4M3, dtype), x, scale, y, common):
        return turned_rows(x, scale)
    return y if pitch == rows else narrowed(y, rows), common


def multiplied(
    a: Rounded, b: Rounded, dtype: torch.dtype, bias: Tensor | None = None, addend: Tensor | None = None, *,
    over_rows: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a @ b^T + bias + addend`` [a's rows, b's rows] of rounded matrices, in a dtype.

    The result may have the memory of ``addend``. ``over_rows``: the sums are over tokens, as a weight's gradient.
    """
    (left, down), (right, across) = a, b
    c = launched(PRODUCT, left, right, down, across, dtype, bias, addend, over_rows=over_rows, fast=_fast)
    return _by_torch(left, right, down, across, bias, addend, dtype) if c is None else c


def _fast(dimensions: tuple[Any, ...], a: Tensor) -> Call | None:
    """Return the library's product where ``scaled_product`` is one call of it: it won 162 of 172 races on an H200."""
    rows, inner, columns, over_rows, biased, accumulated, dtype = dimensions
    fits = dtype == torch.bfloat16 and not (columns % 16 or (rows if over_rows else inner) % 16)
    is_fast = fits and (target := target_of(a)) is not None and target.has_scaled_products
    return functools.partial(_by_library, biased, accumulated) if is_fast else None


def _by_library(
    biased: bool, accumulated: bool, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *more: Tensor
) -> tuple[Tensor]:
    bias, addend = more[0] if biased else None, more[-1] if accumulated else None
    c = cublaslt.scaled_product(a, b, a_scale, b_scale, bias, addend) if a.is_cuda else None
    return (_by_torch(a, b, a_scale, b_scale, bias, addend, torch.bfloat16) if c is None else c,)


def _by_torch(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, addend: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    with uncast(a.device.type):  # torch's operations may be products of float32
        c = scaled_product(a, b, a_scale, b_scale, bias, dtype)
    return c if addend is None else addend.add_(c)


def launched(
    spec: KernelSpec, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None,
    addend: Tensor | None, *, over_rows: bool, fast: Any = None,
) -> Tensor | None:  # fmt: skip
    """Return a format's product, computed by its kernel or library; None, counted, if torch must compute it.

    ``fast`` is as in :func:`tilekern.ops.foreseen.written`.
    """
    (m, k), columns = a.shape, b.shape[0]
    rows, inner = (k, m) if over_rows else (m, k)
    given: tuple[Tensor, ...] = a, b, a_scale, b_scale
    if bias is not None:
        given = *given, bias.contiguous()
    if addend is not None:
        given = *given, addend

    def allocate() -> tuple[Tensor]:
        return (memory((m, columns), dtype, a.device) if addend is None else addend,)

    dimensions = rows, inner, columns, over_rows, bias is not None, addend is not None, dtype
    made = written(spec, dimensions, given, allocate, fast)
    return None if made is None else made[0]


def rounded_weight(weight: Tensor, scale: Tensor, room: Room | None = None) -> Rounded:
    """Return the e4m3 numbers and scales of a weight, which may have been rounded before; else in some memory."""
    return (weight.numbers, weight.scale) if type(weight) is RoundedWeight else rounded(as_rows(weight), scale, room)


def kept_weight(weight: Any) -> Tensor:
    """Return what :func:`turned` reads of a weight."""
    numbers: Tensor = weight.numbers if type(weight) is RoundedWeight else weight
    return numbers


def kept_input(x: Tensor, numbers: Rounded) -> tuple[Tensor, ...]:
    """Return what a layer keeps of its input: its e4m3 numbers and scales, or itself where that takes no memory."""
    return (x,) if is_kept(x) else numbers


def read_again(kept: Sequence[Tensor]) -> Rounded:
    """Return the e4m3 numbers and scales of an input, of what :func:`kept_input` returned."""
    return rounded(as_rows(kept[0])) if len(kept) == 1 else (kept[0], kept[1])


def gradients(
    needs: Needs, given: Sequence[Tensor | None],
    of_layer: Callable[[int, Tensor, Tensor | None, bool], tuple[Tensor | None, Tensor | None]],
) -> Gradients:  # fmt: skip
    """Return what a :class:`Format`'s backward returns.

    ``of_layer`` takes the number of a layer, the rows of its result's gradient, the gradient of x from layers before
    it, and whether its weight's is wanted. It returns the gradient of x with this layer's part, and the weight's.
    """
    dx, dweights, dbiases = None, list[Tensor | None](), list[Tensor | None]()
    for n, (slope, of_weight, of_bias) in enumerate(zip(given, needs.weights, needs.biases, strict=True)):
        dweight = dbias = None
        if slope is not None:
            dy = as_rows(slope)
            if needs.rows or of_weight:
                dx, dweight = of_layer(n, dy, dx, of_weight)
            dbias = dy.sum(0) if of_bias else None
        dweights.append(dweight)
        dbiases.append(dbias)
    return dx, dweights, dbiases


def _forward(
    needs: Needs, x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None], *, reads_again: bool = False
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    rows, dtype, made, scales, room = x.numel() // x.shape[-1], x.dtype, [], [], Room()
    scale, *of_weights = vectors(x, rows, *[weight.shape[0] for weight in weights])
    numbers = rounded_input(x, scale)
    for weight, bias, scale in zip(weights, biases, of_weights, strict=True):
        of_weight = rounded_weight(weight, scale, room)
        scales.append(of_weight[1])
        made.append(multiplied(numbers, of_weight, dtype, bias))
    kept = (x,) if reads_again else kept_input(x, numbers)
    return made, (*(scales if needs.rows else ()), *(kept if any(needs.weights) else ()))


def _backward(
    needs: Needs, given: Sequence[Tensor | None], kept: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype
) -> Gradients:
    (of_x, *_), across = needs, None
    # Of gradients, weights and turned gradients; a layer's are read before the next layer's are written.
    rooms = Room(), Room(), Room()

    def of_layer(n: int, dy: Tensor, dx: Tensor | None, of_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        nonlocal across
        slopes, dweight = rounded(dy, None, rooms[0]), None
        if of_x:
            weight = turned(as_rows(weights[n]), kept[n], dtype, None, rooms[1])
            dx = multiplied(slopes, weight, dtype, addend=dx)
        if of_weight:
            across = across or turned(*read_again(kept[len(given) if of_x else 0 :]), dtype)
            dweight = multiplied(turned(*slopes, dtype, None, rooms[2]), across, dtype, over_rows=True)
        return dx, dweight

    return gradients(needs, given, of_layer)


class _Linears(torch.autograd.Function):
    """Of a format, x, then weight and bias of each layer."""

    @staticmethod
    def forward(ctx: Any, how: Format, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        _, of_x, *of_parameters = ctx.needs_input_grad
        ctx.call, ctx.shape = (how, x.dtype, Needs(of_x, of_parameters[::2], of_parameters[1::2])), x.shape
        weights = parameters[::2]
        made, kept = how.forward(ctx.call[2], x, weights, parameters[1::2])
        ctx.save_for_backward(*kept, *(kept_weight(weight) if of_x else None for weight in weights))
        ctx.set_materialize_grads(False)
        return tuple(shaped(y, *x.shape[:-1], y.shape[1]) for y in made)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, (how, dtype, needs) = ctx.saved_tensors, ctx.call
        kept, weights = saved[: -len(given)], saved[-len(given) :]
        dx, *found = how.backward(needs, given, kept, weights, dtype)
        return None, None if dx is None else shaped(dx, *ctx.shape), *itertools.chain(*zip(*found, strict=True))


_apply = applied(_Linears)
ROWWISE = Format("fp8_linear", PRODUCT, _forward, _backward)
