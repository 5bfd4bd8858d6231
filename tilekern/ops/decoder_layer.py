"""decoder_layer: a layer of a decoder with norms before its halves, or around them, as one function of autograd.

The launches are those of the ops it is made of, with the same bits in the forward. Between ops the host makes views and
nodes of autograd and calls modules, which takes as long as the launches: steps of small models wait for that. In the
backward the gradients of a norm and of the sum before it are one launch, as in ``fused_add_rms_norm``; of the first
norm too, where two ops would launch twice and add, unless attention has a norm behind it. Products may have adapters,
as in ``lora_linear``. What is frozen has no gradient, and what only that would read is not kept.

It is written by hand and not declared, as it is a sequence of other ops' launches. Where it does not serve a call its
parts run as ops of their own, so there is nothing to register and no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.ops import (  # noqa: F401 (declared)
    attention,
    fused_add_rms_norm,
    fused_rms_norm_add,
    fused_rms_norm_add_rms_norm,
    gated_mlp,
    qk_norm_rope,
    rms_norm,
    rope,
)  # fmt: skip
from tilekern.ops.gated_mlp import UNREAD, kept, launched, launched_backward
from tilekern.ops.gated_mlp import plans_of as plans_of_mlp
from tilekern.ops.lora_linear import (
    Adapter,
    adapters_of,
    are_served,
    cast_factors,
    factor_gradients,
    flat,
    low_gradient,
    products,
    rows_gradient,
)
from tilekern.ops.operation import FUNCTIONS
from tilekern.ops.packing import check_starts
from tilekern.ops.packing import longest as longest_of
from tilekern.ops.projections import gradient
from tilekern.ops.registration import (
    applied,
    check_softcap,
    differentiable_once,
    needs_gradient,
    product_dtype,
    shaped,
)
from tilekern.runtime.dispatch import is_invariant, keep, memo


class Weights(NamedTuple):
    """The parameters of a layer, of one dtype.

    Attributes:
        norm, mlp_norm: [hidden], of the norms before attention and MLP.
        q, k, v: [heads of it * head_dim, hidden].
        q_bias, k_bias, v_bias: [heads of it * head_dim], or None.
        q_norm, k_norm: [head_dim], of the norms of heads; None without these.
        out: [hidden, heads * head_dim].
        out_norm, down_norm: [hidden], of the norms behind attention and MLP; None without these.
        gate, up: [intermediate, hidden].
        down: [hidden, intermediate].
    """

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_norm: Tensor | None
    mlp_norm: Tensor
    down_norm: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor


class Numbers(NamedTuple):
    """The numbers of a layer: as of the norms and of :func:`tilekern.ops.attention`, which is causal.

    Attributes:
        eps: those of the norm before attention, of heads, of the norms around the first sum, and behind the MLP.
        offset: added to the weights of all norms.
        cast: whether norms are rounded before their weights.
        activation: of the MLP: ``silu``, ``gelu`` or ``gelu_tanh``.
    """

    head_dim: int
    eps: tuple[float, float, float, float]
    scale: float | None = None
    window: int | None = None
    deterministic: bool = True
    softcap: float | None = None
    offset: float = 0.0
    cast: bool = True
    activation: str = "silu"


class _Norms(NamedTuple):
    """The ops of norms of one kind, and the arguments that follow eps.

    ``norm`` and ``add``, of a sum's norm, take ``options``, ``turn``, of heads, takes ``of_turn``, and the ops of norms
    before a sum take ``behind``.
    """

    norm: dict[str, Any]
    add: dict[str, Any]
    turn: dict[str, Any]
    options: tuple[Any, ...]
    of_turn: tuple[Any, ...]
    behind: tuple[Any, ...]


class _Plans(NamedTuple):
    """The ops of a layer's norms, and the plans of a layer's ops.

    ``turn`` is of ``qk_norm_rope`` or ``rope``, ``add_norm`` of the first sum and its norms, ``mlp`` has one of each
    direction, ``last`` is of the norm behind the MLP and its sum; empty without one.
    """

    norms: _Norms
    norm: Any
    turn: Any
    add_norm: Any
    mlp: Any
    last: Any


_NORM_ADD_NORM, _NORM_ADD, _TURN, _ATTENTION = (
    FUNCTIONS[name] for name in ("rms_norm_add_rms_norm", "rms_norm_add", "rope", "attention")
)
# Per kind of call; False if a kernel is missing, whose op says so when it is called.
_plans: dict[Any, _Plans | bool] = memo()
# Bytes; torch's allocations are aligned to more, and kernels are compiled for it.
_ALIGNED = 16
# Of the weights, those that autocast leaves as they are.
_NORMS = ("norm", "q_norm", "k_norm", "out_norm", "mlp_norm", "down_norm")
# Of the inputs of an op: all need a gradient.
_ALL = (True,) * 4
_COUNT = len(Weights._fields)


def decoder_layer(
    x: Tensor, cos: Tensor, sin: Tensor, weights: Weights, numbers: Numbers, starts: Tensor | None = None,
    longest: int | None = None, adapters: Sequence[Adapter | None] = (),
) -> Tensor | None:  # fmt: skip
    """Return the output of a layer, or None if its ops are to run one by one.

    They are, if nothing up to the attention needs a gradient, in a trace, in the invariant mode, for weights of another
    dtype than ``x``, for factors of adapters of one that autocast does not cast, or where a kernel is missing. With
    norms behind its halves, which round to autocast's dtype, they are under autocast over float32.

    Under autocast over float32 the sums, norms and their gradients are of float32, and all else of autocast's dtype, as
    in the ops one by one. Each matrix is cast once, in both directions, and the products of weights' gradients are not
    rounded to that dtype.

    Args:
        x: [batch, tokens, hidden], contiguous.
        cos, sin: [1 or batch, tokens, head_dim], with the second half repeating the first, of the dtype of ``x``.
        weights, numbers: the parameters of the layer, and its numbers.
        starts, longest: ``cu_seqlens`` and ``max_seqlen`` of :func:`tilekern.ops.attention`.
        adapters: of q, k, v, out, gate, up and down, None for one without; or empty.

    Returns:
        [batch, tokens, hidden].
    """
    dtype = product_dtype(x, cos, sin, *weights)
    is_behind = weights.out_norm is not None or weights.down_norm is not None
    if dtype is None or (is_behind and dtype != x.dtype) or x.is_meta or is_invariant():
        return None
    if not torch.is_grad_enabled() or not x.is_contiguous() or cos.requires_grad or sin.requires_grad:
        return None
    check_softcap("attention", numbers.softcap)
    kinds, factors = flat(adapters) if adapters else ((), ())
    # What kernels read and no launch of the layer has made. A backward could not run by parts any more.
    of_norms = weights.norm, weights.q_norm, weights.k_norm, weights.out_norm, weights.mlp_norm, weights.down_norm
    read = x, cos, sin, starts, *of_norms
    # Else the parts keep nothing of the attention.
    learns = needs_gradient(x, *weights[:9], *factors[:6]) and (not adapters or are_served(x, adapters))
    if not learns or any(a is not None and a.data_ptr() % _ALIGNED for a in read):
        return None
    if numbers.offset and weights.q_norm is not None:
        # Whose op reads each angle once.
        cos, sin = (angles.narrow(-1, 0, numbers.head_dim // 2) for angles in (cos, sin))
    plans = _plans_of(x, cos, sin, weights, numbers, dtype)
    if not plans:
        return None
    if starts is not None:
        check_starts("attention", starts, x.shape[1], longest)
        longest = longest_of(starts, x.shape[1]) if longest is None else longest
    try:
        made: Tensor = _apply(x, *weights, *factors, cos, sin, starts, (plans, numbers, longest, kinds, dtype))
        return made
    except (NoVariant, _UnservedError):
        return None


class _UnservedError(Exception):
    """Attention has no plan for the call."""


def _plans_of(x: Tensor, cos: Tensor, sin: Tensor, weights: Weights, numbers: Numbers, dtype: torch.dtype) -> Any:
    key = (
        x.shape, x.dtype, dtype, x.get_device(), cos.shape, cos.get_device(), sin.shape, sin.get_device(),
        numbers.head_dim, numbers.offset, numbers.cast, numbers.activation,
        *(None if weight is None else (weight.shape, weight.get_device()) for weight in weights),
    )  # fmt: skip
    try:
        return _plans[key]
    except KeyError:
        found = _find(x, cos, sin, weights, numbers, dtype)
        return keep(_plans, key, found) if x.is_cuda else found


def _find(x: Tensor, cos: Tensor, sin: Tensor, weights: Weights, numbers: Numbers, dtype: torch.dtype) -> _Plans | bool:
    batch, tokens, hidden = x.shape
    heads = [(weight.shape[0] // numbers.head_dim, numbers.head_dim) for weight in (weights.q, weights.k)]
    q, k = (x.new_empty((batch, tokens, *own), dtype=dtype) for own in heads)
    norms, eps = _norms_of(numbers), numbers.eps
    norm = norms.norm["plans_of"](weights.out_norm is not None, x, weights.norm, eps[0], *norms.options)
    if weights.out_norm is None:
        add_norm = norms.add["plans_of"](True, x, x, weights.mlp_norm, eps[2], *norms.options)
    else:
        add_norm = _NORM_ADD_NORM["plans_of"](True, x, x, weights.out_norm, weights.mlp_norm, eps[2], *norms.behind)
    mlp = plans_of_mlp(x.view(-1, hidden), *weights[-3:], numbers.activation, dtype)
    last: Any = ()
    if weights.down_norm is not None:
        last = _NORM_ADD["plans_of"](True, x, x, weights.down_norm, eps[3], *norms.behind)
    if weights.q_norm is None or weights.k_norm is None:
        turn = _TURN["plans_of"](True, q.transpose(1, 2), k.transpose(1, 2), cos, sin, False)
    else:
        of_heads = weights.q_norm, weights.k_norm, cos, sin, eps[1], *norms.of_turn
        turn = norms.turn["plans_of"](True, q, k, *of_heads)
    found = _Plans(norms, norm, turn, add_norm, mlp, last)
    return False if None in found else found


def _norms_of(numbers: Numbers) -> _Norms:
    options = () if numbers.cast and not numbers.offset else (numbers.offset, numbers.cast)
    kind = "_offset" if options else ""
    turn, of_turn = ("qk_norm_rope_general", (numbers.offset, False, False)) if numbers.offset else ("qk_norm_rope", ())
    norm, add, heads = (FUNCTIONS[name] for name in (f"rms_norm{kind}", f"fused_add_rms_norm{kind}", turn))
    return _Norms(norm, add, heads, options, of_turn, (numbers.offset, numbers.cast))


def _of_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int | None, numbers: Numbers
) -> tuple[Any, ...]:
    """Return the arguments of attention's launch."""
    return (
        q, k, v, None, starts, None, True, numbers.scale, numbers.window, numbers.softcap, longest, None,
        numbers.deterministic,
    )  # fmt: skip


def _turned(plans: _Plans, q: Tensor, k: Tensor, weights: Weights, angles: tuple[Tensor, Tensor], eps: float) -> Any:
    """Return q and k [batch, tokens, heads, head_dim] with their heads normalised, if they have norms, and rotated."""
    if weights.q_norm is not None:
        of_heads = weights.q_norm, weights.k_norm, *angles, eps, *plans.norms.of_turn
        return plans.norms.turn["launch"](plans.turn, q, k, *of_heads)
    return tuple(
        x.transpose(1, 2) for x in _TURN["launch"](plans.turn, q.transpose(1, 2), k.transpose(1, 2), *angles, False)
    )


def _turned_backward(
    plans: _Plans, wants: Sequence[bool], slopes: tuple[Tensor, Tensor], inputs: tuple[Any, Any], weights: Weights,
    angles: tuple[Tensor, Tensor], eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of what :func:`_turned` read: q, k, and the weights of their norms if ``wants`` says so."""
    # Of the dtype that was turned, which the angles widen.
    slopes = slopes[0].to(angles[0].dtype), slopes[1].to(angles[0].dtype)
    if weights.q_norm is None:
        turned = _TURN["launch_backward"](plans.turn, _ALL, *(x.transpose(1, 2) for x in slopes), *angles, False)
        return *(x.transpose(1, 2) for x in turned), None, None
    of_heads = weights.q_norm, weights.k_norm, *angles, eps, *plans.norms.of_turn
    made: tuple[Any, ...] = plans.norms.turn["launch_backward"](
        plans.turn, (True, True, *wants), *slopes, *inputs, *of_heads
    )
    return made


def _summed(plans: _Plans, x: Tensor, y: Tensor, weights: Weights, eps: float) -> Any:
    """Return the sum of x and what attention adds, normalised if it has a norm, and the norm of the sum."""
    if weights.out_norm is None:
        return plans.norms.add["launch"](plans.add_norm, x, y, weights.mlp_norm, eps, *plans.norms.options)
    both = weights.out_norm, weights.mlp_norm, eps, *plans.norms.behind
    return _NORM_ADD_NORM["launch"](plans.add_norm, x, y, *both)


def _summed_backward(
    plans: _Plans, wants: Any, dtotal: Tensor, dy: Tensor, total: Tensor, y: Tensor, weights: Weights, eps: float
) -> tuple[Any, ...]:
    """Return the gradients of what :func:`_summed` read: x, y, and the weights of the norms of y and of the sum.

    Those of weights that are not wanted may be None.
    """
    slopes = dtotal, dy, total
    if weights.out_norm is None:
        own = weights.mlp_norm, eps, *plans.norms.options
        dx, dmlp_norm = plans.norms.add["launch_backward"](plans.add_norm, (True, True, wants.mlp_norm), *slopes, *own)
        return dx, dx, None, dmlp_norm
    both = weights.out_norm, weights.mlp_norm, eps, *plans.norms.behind
    needs = True, True, wants.out_norm, wants.mlp_norm
    made: tuple[Any, ...] = _NORM_ADD_NORM["launch_backward"](plans.add_norm, needs, *slopes, y, *both)
    return made


def _cast(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return weights with matrices and biases of a dtype."""
    if weights.q.dtype == dtype:
        return weights
    wide = {name: weight for name, weight in zip(Weights._fields, weights, strict=True) if name not in _NORMS}
    given = {name: weight for name, weight in wide.items() if weight is not None}
    made = {name: torch.empty_like(weight, dtype=dtype) for name, weight in given.items()}
    torch._foreach_copy_(list(made.values()), list(given.values()))
    return weights._replace(**made)


def _sorted(needs: Sequence[bool]) -> tuple[bool, Any, Sequence[bool]]:
    """Return autograd's flags: of x, by the names of weights, and of factors."""
    return needs[0], Weights(*needs[1 : 1 + _COUNT]), needs[1 + _COUNT : -4]


class _DecoderLayer(torch.autograd.Function):
    """Of x, the weights in the order of :class:`Weights`, adapters' factors, angles, starts and a call's plans.

    All behind the products of q, k and v has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        cos, sin, starts, call = given[-4:]
        plans, numbers, longest, kinds, dtype = call
        weights, (of_x, wants, of_factors) = _cast(Weights(*given[:_COUNT]), dtype), _sorted(ctx.needs_input_grad)
        factors = cast_factors(dtype, given[_COUNT:-4]) if kinds else ()
        adapters = adapters_of(kinds, factors) if kinds else ()
        (batch, tokens, hidden), size = x.shape, numbers.head_dim
        norms, eps = plans.norms, numbers.eps
        rows = norms.norm["launch"](plans.norm, x, weights.norm, eps[0], *norms.options).view(-1, hidden).to(dtype)
        made, low = products(rows, weights[1:4], weights[4:7], adapters[:3])
        count, rows = rows.shape[0], rows if any(wants[1:4]) or any(of_factors[:6:2]) else None
        q, k, v = (y.view(batch, tokens, -1, size) for y in made)
        turned = [heads.to(dtype) for heads in _turned(plans, q, k, weights, (cos, sin), eps[1])]
        of_attention = _of_attention(turned[0], turned[1], v, starts, longest, numbers)
        attend = _ATTENTION["plans_of"](True, *of_attention)
        if attend is None:
            raise _UnservedError
        out, lse = _ATTENTION["launch"](attend, *of_attention)
        # Of rows, which takes the host less than a product of three dimensions.
        (made,), low_out = products(out.view(count, -1), (weights.out,), (None,), adapters[3:4])
        made = shaped(made, batch, tokens, hidden)
        total, mlp_rows = _summed(plans, x, made.to(x.dtype), weights, eps[2])
        mlp_rows = mlp_rows.view(-1, hidden).to(dtype)
        y, gate, up, active, lows = launched(plans.mlp[0], mlp_rows, weights[-3:], adapters[4:])
        # Of q and k as they were, and of what halves make, only the gradients of their norms read.
        before = (q, k) if weights.q_norm is not None else (None, None)
        is_read = numbers.activation != "silu" and (wants.down or (of_factors and of_factors[12]))
        added = (
            None if weights.out_norm is None else made, None if weights.down_norm is None else y,
            active if is_read else None,
        )  # fmt: skip
        ctx.save_for_backward(
            UNREAD, x if of_x or wants.norm else None, rows,
            low if any(of_factors[1:6:2]) else None, low_out if of_factors and of_factors[7] else None,
            *before, *turned, v, out, lse, total, *kept(wants[-3:-1], of_factors[8:], mlp_rows, lows), gate, up, *added,
            *weights, *factors, cos, sin, starts,
        )  # fmt: skip
        ctx.call, ctx.shape = (attend, *call), x.shape
        if weights.down_norm is not None:
            last: Tensor = _NORM_ADD["launch"](plans.last, total, y, weights.down_norm, eps[3], *norms.behind)
            return last
        y = shaped(y, *x.shape)
        return y.add_(total) if dtype == x.dtype else total + y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, x, rows, low, low_out, q, k, turned_q, turned_k, v, out, lse, total, *saved = ctx.saved_tensors
        mlp_rows, low_mlp, low_down, gate, up, made, y, active, *parameters = saved
        # What a later part does not read is freed while that runs.
        ctx.maybe_clear_saved_tensors()
        del saved
        weights, factors, (cos, sin, starts) = Weights(*parameters[:_COUNT]), parameters[_COUNT:-3], parameters[-3:]
        attend, plans, numbers, longest, kinds, dtype = ctx.call
        of_x, wants, of_factors = _sorted(ctx.needs_input_grad)
        adapters = adapters_of(kinds, factors) if kinds else ()
        hidden, wide, norms, eps = ctx.shape[2], total.dtype, plans.norms, numbers.eps
        if not dy.is_contiguous() or dy.data_ptr() % _ALIGNED:
            dy = dy.clone(memory_format=torch.contiguous_format)
        slope, ddown_norm = dy, None
        if weights.down_norm is not None:
            slope, ddown_norm = _NORM_ADD["launch_backward"](
                plans.last, (True, True, wants.down_norm), dy, y, weights.down_norm, eps[3], *norms.behind
            )
        drows, dgate, dup, ddown, *dmlp = launched_backward(
            plans.mlp[1], (True, *wants[-3:], *of_factors[8:]), slope.view(-1, hidden).to(dtype), mlp_rows, gate, up,
            weights[-3:], adapters[4:], (low_mlp, low_down), wide, active, numbers.activation,
        )  # fmt: skip
        del gate, up, mlp_rows, y, active, slope
        dtotal, dmade, dout_norm, dmlp_norm = _summed_backward(
            plans, wants, dy, shaped(drows, *ctx.shape), total, made, weights, eps[2]
        )
        del dy, drows, total, made
        slope = dmade.view(-1, hidden).to(dtype)
        count, out_rows = slope.shape[0], out.view(slope.shape[0], -1)
        dout_weight = gradient(slope.t(), out_rows, wide) if wants.out else None
        dout, dlow = rows_gradient((slope,), (weights.out,), adapters[3:4])
        dlast = factor_gradients(of_factors[6:8], (slope,), out_rows, low_out, dlow, adapters[3:4]) if kinds else ()
        dout = dout.view(out.shape)
        given = _of_attention(turned_q, turned_k, v, starts, longest, numbers)
        dq, dk, dv, _ = _ATTENTION["launch_backward"](attend, _ALL, dout, *given[:3], out, lse, *given[3:])
        del dout, out, out_rows, lse, turned_q, turned_k, v, given, slope, dmade
        dq, dk, *of_norms = _turned_backward(plans, wants[7:9], (dq, dk), (q, k), weights, (cos, sin), eps[1])
        slopes = [s.reshape(count, -1) for s in (dq, dk, dv)]
        del q, k, dq, dk, dv
        of_weights = [gradient(s.t(), rows, wide) if want else None for s, want in zip(slopes, wants[1:4], strict=True)]
        of_biases = [s.sum(0, dtype=wide) if want else None for s, want in zip(slopes, wants[4:7], strict=True)]
        dx = dnorm = dlow = None
        if x is not None:
            drows, dlow = rows_gradient(slopes, weights[1:4], adapters[:3], wide)
            drows, of_norm = drows.view(ctx.shape), (x, weights.norm, eps[0], *norms.options)
            if weights.out_norm is None:
                needs = True, True, wants.norm
                dx, dnorm = norms.add["launch_backward"](plans.add_norm, needs, dtotal, drows, *of_norm)
            else:
                # As its parts: of a sum and its norm alone such a layer has no plan, so that jobs would miss a record.
                dx, dnorm = norms.norm["launch_backward"](plans.norm, (True, wants.norm), drows, *of_norm)
                dx.add_(dtotal)
        elif any(of_factors[:6:2]):
            dlow = low_gradient(slopes, adapters[:3])
        dfirst = factor_gradients(of_factors[:6], slopes, rows, low, dlow, adapters[:3]) if kinds else ()
        # In the order of the weights.
        first = dnorm, *of_weights, *of_biases, *of_norms
        second = dout_weight, dout_norm, dmlp_norm, ddown_norm, dgate, dup, ddown
        return dx if of_x else None, *first, *second, *dfirst, *dlast, *dmlp, None, None, None, None


_apply = applied(_DecoderLayer)
