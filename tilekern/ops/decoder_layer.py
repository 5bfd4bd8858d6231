"""decoder_layer: a layer of a decoder with norms before its halves, or around them, as one function of autograd.

The launches are those of the ops it is made of, with the same bits in the forward. Between ops the host makes views and
nodes of autograd and calls modules, which takes as long as the launches: steps of small models wait for that. In the
backward the gradients of a norm and of the sum before it are one launch, as in ``fused_add_rms_norm``; of the first
norm too, where two ops would launch twice and add, unless attention has a norm behind it. Products are those of
:mod:`tilekern.ops.layer_products`: torch's, with adapters, or of 8-bit floats. What is frozen has no gradient, and what
only that would read is not kept.

It is written by hand and not declared, as it is a sequence of other ops' launches. Where it does not serve a call its
parts run as ops of their own, so there is nothing to register and no formula.
"""

from __future__ import annotations

import itertools
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
from tilekern.ops.gated_mlp import UNREAD
from tilekern.ops.layer_products import TORCH, Products, Wanted
from tilekern.ops.lora_linear import Adapter, Kind, adapters_of, draws, flat
from tilekern.ops.operation import FUNCTIONS
from tilekern.ops.packing import check_starts
from tilekern.ops.packing import longest as longest_of
from tilekern.ops.registration import (
    applied,
    cast_together,
    check_softcap,
    differentiable_once,
    is_autocast,
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

    ``norm`` and ``add``, of a sum's norm, take ``options``, and ``norm`` then ``to``, the dtype of products if that is
    another one. ``turn``, of heads, takes ``of_turn`` if they have norms, and the ops of norms before a sum take
    ``behind``.
    """

    norm: dict[str, Any]
    add: dict[str, Any]
    turn: dict[str, Any]
    options: tuple[Any, ...]
    to: tuple[torch.dtype, ...]
    of_turn: tuple[Any, ...]
    behind: tuple[Any, ...]


class _Plans(NamedTuple):
    """The ops of a layer's norms, and the plans of a layer's ops.

    ``turn`` is of ``qk_norm_rope`` or ``rope``, ``add_norm`` of the first sum and its norms, ``mlp`` of the products'
    MLP, ``last`` of the norm behind the MLP and its sum. Under autocast over float32 ``out_norm`` is of the norm behind
    attention, ``add_norm`` of the sum and the norm of it, and ``last`` of a norm alone. Those of norms that a layer
    lacks are empty.
    """

    norms: _Norms
    norm: Any
    turn: Any
    out_norm: Any
    add_norm: Any
    mlp: Any
    last: Any


_NORM_ADD_NORM, _NORM_ADD, _NORM, _ATTENTION = (
    FUNCTIONS[name] for name in ("rms_norm_add_rms_norm", "rms_norm_add", "rms_norm_offset", "attention")
)
# Per kind of call; False if a kernel is missing, whose op says so when it is called.
_plans: dict[Any, _Plans | bool] = memo()
# Bytes; torch's allocations are aligned to more, and kernels are compiled for it.
_ALIGNED = 16
# Of the weights, those that autocast leaves as they are.
_NORMS = ("norm", "q_norm", "k_norm", "out_norm", "mlp_norm", "down_norm")
# Of the inputs of an op: all need a gradient.
_ALL: tuple[bool, ...] = (True,) * 4
_COUNT = len(Weights._fields)
# Of the factors of adapters, those ``a`` whose layers share rows: q, k and v; gate and up.
_SHARING = slice(0, 6, 2), slice(8, 12, 2)


def decoder_layer(
    x: Tensor, cos: Tensor, sin: Tensor, weights: Weights, numbers: Numbers, starts: Tensor | None = None,
    longest: int | None = None, adapters: Sequence[Adapter | None] = (), products: Products = TORCH,
) -> Tensor | None:  # fmt: skip
    """Return the output of a layer, or None if its ops are to run one by one.

    They are, if nothing up to the attention needs a gradient, where torch traces, in the invariant mode, for weights of
    another dtype than ``x``, if ``products`` do not serve the call, or where a kernel is missing. So they are under
    autocast over float32 for norms behind halves that round before their weights, which widen them.

    Under autocast over float32 the sums, norms and their gradients are of float32, and all else of autocast's dtype, as
    in the ops one by one; norms and rotations read what products made, and write what products and attention read,
    without launches that cast. All matrices are cast by one launch, for both directions, and the products of weights'
    gradients are not rounded to that dtype.

    Args:
        x: [batch, tokens, hidden], contiguous.
        cos, sin: [1 or batch, tokens, head_dim], with the second half repeating the first, of the dtype of ``x``.
        weights, numbers: the parameters of the layer, and its numbers.
        starts, longest: ``cu_seqlens`` and ``max_seqlen`` of :func:`tilekern.ops.attention`.
        adapters: of q, k, v, out, gate, up and down, None for one without; or empty.
        products: how the layer multiplies.

    Returns:
        [batch, tokens, hidden].
    """
    dtype = product_dtype(x, cos, sin, *weights)
    is_behind = weights.out_norm is not None or weights.down_norm is not None
    if dtype is None or (is_behind and numbers.cast and dtype != x.dtype) or is_invariant():
        return None
    if not torch.is_grad_enabled() or not x.is_contiguous() or cos.requires_grad or sin.requires_grad:
        return None
    check_softcap("attention", numbers.softcap)
    kinds, factors = flat(adapters) if adapters else ((), ())
    # What kernels read and no launch of the layer has made. A backward could not run by parts any more.
    of_norms = weights.norm, weights.q_norm, weights.k_norm, weights.out_norm, weights.mlp_norm, weights.down_norm
    read = x, cos, sin, starts, *of_norms
    # Else the parts keep nothing of the attention.
    learns = needs_gradient(x, *weights[:9], *factors[:6]) and products.serve(x, dtype, factors)
    if not learns or any(a is not None and a.data_ptr() % _ALIGNED for a in read):
        return None
    if numbers.offset and weights.q_norm is not None:
        # Whose op reads each angle once.
        cos, sin = (angles.narrow(-1, 0, numbers.head_dim // 2) for angles in (cos, sin))
    plans = _plans_of(x, cos, sin, weights, numbers, dtype, products)
    if starts is not None:
        check_starts("attention", starts, x.shape[1], longest)
        longest = longest_of(starts, x.shape[1]) if longest is None else longest
    # Before anything is drawn, which the parts would draw again.
    if not plans or (draws(adapters) and not _attends(x, weights, numbers, dtype, starts, longest)):
        return None
    try:
        made: Tensor = _apply(
            x, *weights, *factors, cos, sin, starts, (plans, numbers, longest, kinds, dtype, products)
        )
        return made
    except (NoVariant, _UnservedError):
        return None


class _UnservedError(Exception):
    """Attention has no plan for the call."""


def _plans_of(
    x: Tensor, cos: Tensor, sin: Tensor, weights: Weights, numbers: Numbers, dtype: torch.dtype, products: Products
) -> Any:
    key = (
        products, products.key_of(x, weights), x.shape, x.dtype, dtype, x.get_device(), cos.shape, cos.get_device(),
        sin.shape, sin.get_device(), numbers.head_dim, numbers.offset, numbers.cast, numbers.activation,
        *(None if weight is None else (weight.shape, weight.get_device()) for weight in weights),
    )  # fmt: skip
    try:
        return _plans[key]
    except KeyError:
        found = _find(x, cos, sin, weights, numbers, dtype, products)
        return keep(_plans, key, found) if x.is_cuda else found


def _find(
    x: Tensor, cos: Tensor, sin: Tensor, weights: Weights, numbers: Numbers, dtype: torch.dtype, products: Products
) -> _Plans | bool:
    batch, tokens, _ = x.shape
    heads = [(weight.shape[0] // numbers.head_dim, numbers.head_dim) for weight in (weights.q, weights.k)]
    q, k = (x.new_empty((batch, tokens, *own), dtype=dtype) for own in heads)
    norms, eps = _norms_of(numbers, weights.q_norm is not None, x.dtype, dtype), numbers.eps
    is_joined = weights.out_norm is not None and not norms.to
    norm = norms.norm["plans_of"](is_joined, x, weights.norm, eps[0], *norms.options, *norms.to)
    made, out_norm, last = x.new_empty((), dtype=dtype).expand(x.shape), (), ()
    if is_joined:
        add_norm = _NORM_ADD_NORM["plans_of"](True, x, x, weights.out_norm, weights.mlp_norm, eps[2], *norms.behind)
    else:
        add_norm = norms.add["plans_of"](True, x, made, weights.mlp_norm, eps[2], *norms.options)
        if weights.out_norm is not None:
            out_norm = _NORM["plans_of"](True, made, weights.out_norm, eps[2], *norms.behind)
    mlp = products.plans_of(x, weights, numbers.activation, dtype)
    if weights.down_norm is not None:
        own = weights.down_norm, eps[3], *norms.behind
        last = _NORM["plans_of"](True, made, *own) if norms.to else _NORM_ADD["plans_of"](True, x, x, *own)
    if weights.q_norm is None or weights.k_norm is None:
        turn = norms.turn["plans_of"](True, q.transpose(1, 2), k.transpose(1, 2), cos, sin, False)
    else:
        of_heads = weights.q_norm, weights.k_norm, cos, sin, eps[1], *norms.of_turn
        turn = norms.turn["plans_of"](True, q, k, *of_heads)
    found = _Plans(norms, norm, turn, out_norm, add_norm, mlp, last)
    return False if None in found else found


def _norms_of(numbers: Numbers, of_heads: bool, wide: torch.dtype, dtype: torch.dtype) -> _Norms:
    options = () if numbers.cast and not numbers.offset else (numbers.offset, numbers.cast)
    to = () if dtype == wide else (dtype,)
    suffix = "_to" if to else ""
    kind = ("_offset" if options else "") + suffix
    turn, of_turn = ("qk_norm_rope_general", (numbers.offset, False, False)) if numbers.offset else ("qk_norm_rope", ())
    turn = (turn if of_heads else "rope") + suffix
    norm, add, heads = (FUNCTIONS[name] for name in (f"rms_norm{kind}", f"fused_add_rms_norm{kind}", turn))
    return _Norms(norm, add, heads, options, to, of_turn, (numbers.offset, numbers.cast))


def _attends(
    x: Tensor, weights: Weights, numbers: Numbers, dtype: torch.dtype, starts: Tensor | None, longest: int | None
) -> bool:
    """Return whether there are plans of a layer's attention."""
    heads = [(weight.shape[0] // numbers.head_dim, numbers.head_dim) for weight in (weights.q, weights.k)]
    q, k = (x.new_empty((), dtype=dtype).expand(*x.shape[:2], *own) for own in heads)
    return _ATTENTION["plans_of"](True, *_of_attention(q, k, k, starts, longest, numbers)) is not None


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
    launch = plans.norms.turn["launch"]
    if weights.q_norm is not None:
        of_heads = weights.q_norm, weights.k_norm, *angles, eps, *plans.norms.of_turn
        return launch(plans.turn, q, k, *of_heads)
    turned = launch(plans.turn, q.transpose(1, 2), k.transpose(1, 2), *angles, False)
    return tuple(x.transpose(1, 2) for x in turned)


def _turned_backward(
    plans: _Plans, wants: Sequence[bool], slopes: tuple[Tensor, Tensor], inputs: tuple[Any, Any], weights: Weights,
    angles: tuple[Tensor, Tensor], eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of what :func:`_turned` read: q, k, and the weights of their norms if ``wants`` says so."""
    launch = plans.norms.turn["launch_backward"]
    if weights.q_norm is None:
        turned = launch(plans.turn, _ALL, *(x.transpose(1, 2) for x in slopes), *angles, False)
        return *(x.transpose(1, 2) for x in turned), None, None
    of_heads = weights.q_norm, weights.k_norm, *angles, eps, *plans.norms.of_turn
    made: tuple[Any, ...] = launch(plans.turn, (True, True, *wants), *slopes, *inputs, *of_heads)
    return made


def _summed(plans: _Plans, x: Tensor, y: Tensor, weights: Weights, eps: float) -> Any:
    """Return the sum of x and what attention adds, normalised if it has a norm, and the norm of the sum."""
    norms = plans.norms
    if weights.out_norm is not None and not norms.to:
        both = weights.out_norm, weights.mlp_norm, eps, *norms.behind
        return _NORM_ADD_NORM["launch"](plans.add_norm, x, y, *both)
    if weights.out_norm is not None:
        y = _NORM["launch"](plans.out_norm, y, weights.out_norm, eps, *norms.behind)
    return norms.add["launch"](plans.add_norm, x, y, weights.mlp_norm, eps, *norms.options)


def _summed_backward(
    plans: _Plans, wants: Any, dtotal: Tensor, dy: Tensor, total: Tensor, y: Tensor, weights: Weights, eps: float
) -> tuple[Any, ...]:
    """Return the gradients of what :func:`_summed` read: x, y, and the weights of the norms of y and of the sum.

    Those of weights that are not wanted may be None.
    """
    norms, slopes = plans.norms, (dtotal, dy, total)
    if weights.out_norm is not None and not norms.to:
        both = weights.out_norm, weights.mlp_norm, eps, *norms.behind
        needs = True, True, wants.out_norm, wants.mlp_norm
        made: tuple[Any, ...] = _NORM_ADD_NORM["launch_backward"](plans.add_norm, needs, *slopes, y, *both)
        return made
    own = weights.mlp_norm, eps, *norms.options
    dx, dmlp_norm = norms.add["launch_backward"](plans.add_norm, (True, True, wants.mlp_norm), *slopes, *own)
    if weights.out_norm is None:
        return dx, dx, None, dmlp_norm
    before = y, weights.out_norm, eps, *norms.behind
    dy, dout_norm = _NORM["launch_backward"](plans.out_norm, (True, wants.out_norm), dx.to(y.dtype), *before)
    return dx, dy, dout_norm, dmlp_norm


def _cast(
    x: Tensor, weights: Weights, factors: Sequence[Any], kinds: Sequence[Kind], dtype: torch.dtype
) -> tuple[Weights, Sequence[Any]]:  # fmt: skip
    """Return weights with matrices and biases of a dtype, and factors, which are of it if autocast is on for ``x``.

    Casts of the factors ``a`` of layers that share what these read are below each other, as products read them: the
    first is that of all, and the others are None. With a dropout each adapter reads its own.
    """
    if x.dtype == dtype and not (factors and is_autocast(x)):
        return weights, factors
    wide = {name: weight for name, weight in zip(Weights._fields, weights, strict=True) if name not in _NORMS}
    into: dict[int, Tensor] = {}
    given, whole = (*wide.values(), *factors), {}
    for group in () if not factors or any(kind and kind[2] for kind in kinds) else _SHARING:
        places = [n for n in range(len(wide), len(given))[group] if given[n] is not None]
        if len(places) > 1 and all(given[n].dtype != dtype for n in places):
            ranks = [given[n].shape[0] for n in places]
            joined = whole[places[0]] = given[places[0]].new_empty((sum(ranks), x.shape[-1]), dtype=dtype)
            into |= zip(places, joined.split_with_sizes(ranks), strict=True)
    made = cast_together(dtype, given, into)
    for place in into:
        made[place] = whole.get(place)
    return weights._replace(**dict(zip(wide, made, strict=False))), made[len(wide) :]


def _sorted(needs: Sequence[bool], factors: Sequence[Any]) -> tuple[bool, Any, Wanted, Wanted, Wanted]:
    """Return autograd's flags: of x, by the names of weights, and of the layers up to attention, behind it, and MLP."""
    is_wide = any(factor is not None and factor.dtype == torch.float32 for factor in factors)
    factors_dtype = torch.float32 if is_wide else None
    of_x, of_factors = needs[0], needs[1 + _COUNT : -4]
    wants: Any = Weights(*needs[1 : 1 + _COUNT])
    first = Wanted(of_x or wants.norm, wants[1:4], wants[4:7], of_factors[:6], factors_dtype)
    second = Wanted(True, (wants.out,), (False,), of_factors[6:8], factors_dtype)
    return of_x, wants, first, second, Wanted(True, wants[-3:], (), of_factors[8:], factors_dtype)


class _DecoderLayer(torch.autograd.Function):
    """Of x, the weights in the order of :class:`Weights`, adapters' factors, angles, starts and a call's plans.

    All behind the products of q, k and v has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        cos, sin, starts, call = given[-4:]
        plans, numbers, longest, kinds, dtype, products = call
        ctx.wanted = _sorted(ctx.needs_input_grad, given[_COUNT:-4])
        *_, first, second, third = ctx.wanted
        weights, factors = _cast(x, Weights(*given[:_COUNT]), given[_COUNT:-4], kinds, dtype)
        adapters = adapters_of(kinds, factors) if kinds else ()
        (batch, tokens, hidden), size = x.shape, numbers.head_dim
        norms, eps = plans.norms, numbers.eps
        rows = norms.norm["launch"](plans.norm, x, weights.norm, eps[0], *norms.options, *norms.to).view(-1, hidden)
        made, kept_first = products.linears(first, rows, weights[1:4], weights[4:7], adapters[:3])
        count = rows.shape[0]
        del rows
        q, k, v = (y.view(batch, tokens, -1, size) for y in made)
        turned: Any = _turned(plans, q, k, weights, (cos, sin), eps[1])
        # Of their norms; without these nothing reads them any more.
        before = (q, k) if weights.q_norm is not None else (None, None)
        del q, k, made
        of_attention = _of_attention(turned[0], turned[1], v, starts, longest, numbers)
        attend = _ATTENTION["plans_of"](True, *of_attention)
        if attend is None:
            raise _UnservedError
        out, lse = _ATTENTION["launch"](attend, *of_attention)
        if products.is_lean and weights.q_norm is not None:
            turned = None, None  # the backward makes them again
        del of_attention
        # Of rows, which takes the host less than a product of three dimensions.
        (made,), kept_second = products.linears(
            second, out.view(count, -1), (weights.out,), (None,), adapters[3:4], is_kept=True
        )
        made = shaped(made, batch, tokens, hidden)
        total, mlp_rows = _summed(plans, x, made, weights, eps[2])
        mlp_rows = mlp_rows.view(-1, hidden)
        y, kept_third = products.mlp(plans.mlp, third, mlp_rows, weights[-3:], adapters[4:], numbers.activation)
        del mlp_rows
        # Only the gradients of the norms behind halves read what these make.
        added = None if weights.out_norm is None else made, None if weights.down_norm is None else y
        ctx.save_for_backward(
            UNREAD, x if first.rows else None, *before, *turned, v, out, lse, total, *added, cos, sin, starts,
            *products.kept(weights), *factors, *kept_first, *kept_second, *kept_third,
        )  # fmt: skip
        ends = itertools.accumulate(map(len, (weights, factors, kept_first, kept_second)))
        ctx.call, ctx.shape, ctx.ends = (attend, *call), x.shape, tuple(ends)
        if weights.down_norm is not None:
            own = weights.down_norm, eps[3], *norms.behind
            if not norms.to:
                last: Tensor = _NORM_ADD["launch"](plans.last, total, y, *own)
                return last
            y = _NORM["launch"](plans.last, y, *own)
        y = shaped(y, *x.shape)
        return y.add_(total) if dtype == x.dtype else total + y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        attend, plans, numbers, longest, kinds, dtype, products = ctx.call
        _, x, q, k, turned_q, turned_k, v, out, lse, total, made, y, cos, sin, starts, *saved = ctx.saved_tensors
        # What a later part does not read is freed while that runs.
        ctx.maybe_clear_saved_tensors()
        a, b, c, d = ctx.ends
        weights, adapters = Weights(*saved[:a]), adapters_of(kinds, saved[a:b]) if kinds else ()
        kept_first, kept_second, kept_third = saved[b:c], saved[c:d], saved[d:]
        del saved
        of_x, wants, first, second, third = ctx.wanted
        hidden, wide, norms, eps = ctx.shape[2], total.dtype, plans.norms, numbers.eps
        if not dy.is_contiguous() or dy.data_ptr() % _ALIGNED:
            dy = dy.clone(memory_format=torch.contiguous_format)
        slope, ddown_norm = dy, None
        if weights.down_norm is not None:
            norm, needs = (_NORM, _ALL[:1]) if norms.to else (_NORM_ADD, _ALL[:2])
            slope, ddown_norm = norm["launch_backward"](
                plans.last, (*needs, wants.down_norm), dy.to(y.dtype), y, weights.down_norm, eps[3], *norms.behind
            )
        drows, dgate, dup, ddown, *dmlp = products.mlp_backward(
            plans.mlp, third, slope.view(-1, hidden).to(dtype), kept_third, weights[-3:], adapters[4:], wide,
            numbers.activation,
        )  # fmt: skip
        del kept_third, y, slope
        dtotal, dmade, dout_norm, dmlp_norm = _summed_backward(
            plans, wants, dy, shaped(drows, *ctx.shape), total, made, weights, eps[2]
        )
        del dy, drows, total, made
        slope = dmade.view(-1, hidden).to(dtype)
        count, out_rows = slope.shape[0], out.view(slope.shape[0], -1)
        dout, (dout_weight,), _, dlast = products.linears_backward(
            second, (slope,), kept_second, (weights.out,), adapters[3:4], wide, dtype, out_rows
        )
        dout = dout.view(out.shape)
        if turned_q is None:
            turned_q, turned_k = _turned(plans, q, k, weights, (cos, sin), eps[1])
        given = _of_attention(turned_q, turned_k, v, starts, longest, numbers)
        dq, dk, dv, _ = _ATTENTION["launch_backward"](attend, _ALL, dout, *given[:3], out, lse, *given[3:])
        del dout, out, out_rows, kept_second, lse, turned_q, turned_k, v, given, slope, dmade
        dq, dk, *of_norms = _turned_backward(plans, wants[7:9], (dq, dk), (q, k), weights, (cos, sin), eps[1])
        slopes = [s.reshape(count, -1) for s in (dq, dk, dv)]
        del q, k, dq, dk, dv
        drows, of_weights, of_biases, dfirst = products.linears_backward(
            first, slopes, kept_first, weights[1:4], adapters[:3], wide, wide
        )
        dx = dnorm = None
        if x is not None:
            drows, of_norm = drows.view(ctx.shape), (x, weights.norm, eps[0], *norms.options)
            if weights.out_norm is None or norms.to:
                needs = (*_ALL[:2], wants.norm)
                dx, dnorm = norms.add["launch_backward"](plans.add_norm, needs, dtotal, drows, *of_norm)
            else:
                # As its parts: of a sum and its norm alone such a layer has no plan, so that jobs would miss a record.
                dx, dnorm = norms.norm["launch_backward"](plans.norm, (True, wants.norm), drows, *of_norm)
                dx.add_(dtotal)
        # In the order of the weights.
        before = dnorm, *of_weights, *of_biases, *of_norms
        behind = dout_weight, dout_norm, dmlp_norm, ddown_norm, dgate, dup, ddown
        return dx if of_x else None, *before, *behind, *dfirst, *dlast, *dmlp, None, None, None, None


_apply = applied(_DecoderLayer)
