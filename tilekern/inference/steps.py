"""The decoder as launches: a step takes some tokens of each sequence to the logits of their successors.

The launches, and so the bits, are those of a patched transformers model: products round once, a gate's parts too, a
residual is added by the norm behind it. A step of one token has the kernels of decoding for its attention; one of
several tokens has training's attention, over the keys before them and their own. Products of float32 differ, which are
by TF32. Outside of the invariant mode some launches take the place of others, round as they do, and add up in
another order:

- a norm and the product behind it, for a token of few sequences, unless the model is wide;
- all between the attentions of two layers, for many rows of a narrow model;
- products of many rows that overlap the launch before, unless the model is wide; attention and norms that do have the
  bits of those that do not;
- attention for a token with few keys: the norms and rotation of its heads, its rows of the cache, and their attention.

For a product of more rows than the kernels of few rows take, an int8 weight is first multiplied by its scales and
rounded to the model's dtype. The others multiply sums by the scales, so the bits differ.

Layout: a residual stream [batch * tokens, width]. Keys and values lie as :mod:`tilekern.inference.caches` says.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilekern.arrays import Array
from tilekern.inference.architectures import Architecture
from tilekern.inference.caches import Keys
from tilekern.inference.choice import Choice, numbers
from tilekern.inference.launches import Launches
from tilekern.inference.weights import Layer, Norm, Product, Weights
from tilekern.kernels.decode_attention import part_of
from tilekern.kernels.skinny import held
from tilekern.kernels.skinny.tiles import MOST_ROWS
from tilekern.runtime.dispatch import is_invariant
from tilekern.spec import cdiv

# Rows of logits begin at a multiple of 16 bytes, whatever the vocabulary.
_UNIT = 8
# The widest model whose products of few rows hold their weights, which they read before their rows are there. A norm
# before them then belongs to them. Blocks that hold their weights whole take no longer with the norm than without, 3.0
# us for GPT-2's of 768; others read their rows twice, and take 56 us in place of 46 and a norm's 3 for Qwen3-8B's gate,
# and with 8 rows 86 (H200).
_MOST_HELD = 1024
# The widest models that have one launch for many rows between the attentions of two layers, or, where that cannot be,
# for a norm and the product behind it. A layer of 256 tokens takes 19 us in place of 23 if it is 128 wide, and 37 in
# place of 26 if it is 192 (H200).
_MOST_NARROW = 128
# The widest models whose kernels of many rows overlap: in wider ones a product takes far longer than its launch.
_MOST_EARLY = 1024
# The most keys, and key heads of all sequences, of which a token's attention is one launch. GPT-2's step of 12 heads of
# 512 keys is 7 % faster by it, with 96 heads 2 % slower, and Qwen3-8B's of 8 heads of 4096 keys 2.5 % (H200): the block
# that adds up the parts of many splits is alone.
_MOST_JOINT_KEYS, _MOST_JOINT_HEADS = 1024, 64


@dataclass(frozen=True)
class Model:
    """What all steps share.

    Attributes:
        architecture, weights: the model.
        dtype: of activations, caches and the weights that are not int8.
        angles: cosines and sines by position, [room, 2 * pairs]; of a model without rotation those of angle 0.
        scratch: room for the largest int8 weight of a layer in ``dtype``; None for a model without int8 weights.
    """

    architecture: Architecture
    weights: Weights
    dtype: str
    angles: Array
    scratch: Array | None = None


@dataclass(frozen=True)
class Tokens:
    """The new tokens of a step, on the GPU.

    Attributes:
        ids: int64 [batch, tokens].
        positions: int64 [batch, tokens], in their sequence.
        places: the same as int32: their rows in the cache.
        lengths: int32 [batch], the keys that a step of one token sees, its own included.
        counters: int32, a 0 for each key head of each sequence, with which the blocks of a step of one token count
            themselves, layer after layer.
    """

    ids: Array
    positions: Array
    places: Array
    lengths: Array | None = None
    counters: Array | None = None

    @classmethod
    def new(cls, launches: Launches, batch: int, tokens: int) -> Tokens:
        """Return arrays for a step of several tokens."""
        ids, positions, places = (launches.array((batch, tokens), dtype) for dtype in ("int64", "int64", "int32"))
        return cls(ids, positions, places)

    def place(self, before: int) -> None:
        """Write positions that follow ``before`` tokens of each sequence."""
        batch, tokens = self.ids.shape
        for to in (self.positions, self.places):
            to.write(numbers([*range(before, before + tokens)] * batch, to.dtype))


def angles_of(architecture: Architecture, room: int, dtype: str) -> bytes:
    """Return the numbers of :attr:`Model.angles`, in float32 arithmetic where transformers' is."""
    pairs = architecture.head_dim // 2
    if architecture.rotation is None:
        return rounded(array("f", [1.0] * pairs + [0.0] * pairs), dtype) * room
    numbers, frequencies = array("f"), architecture.rotation.frequencies(architecture.head_dim)
    for position in range(room):
        turned = array("f", [frequency * position for frequency in frequencies])
        numbers.extend(map(math.cos, turned))
        numbers.extend(map(math.sin, turned))
    return rounded(numbers, dtype)


def rounded(numbers: array[float], dtype: str) -> bytes:
    """Return finite float32 numbers as bytes of a dtype, rounded to nearest even."""
    if dtype == "float32":
        return numbers.tobytes()
    if dtype == "float16":
        return struct.pack(f"<{len(numbers)}e", *numbers)
    # All words at once, as digits of one number. None is carried into the next, since finite ones end below infinity.
    size = 4 * len(numbers)
    words, ones = (int.from_bytes(text, "little") for text in (numbers.tobytes(), b"\1\0\0\0" * len(numbers)))
    words += 0x7FFF * ones + (words >> 16 & ones)
    return array("H", words.to_bytes(size, "little"))[1::2].tobytes()


def new_logits(launches: Launches, rows: int, model: Model) -> Array:
    """Return an array [rows, vocabulary]."""
    columns = model.architecture.vocabulary
    room = cdiv(columns, _UNIT) * _UNIT
    return launches.array((rows, room), model.dtype).view((rows, columns), (room, 1))


@dataclass(frozen=True)
class Awaited:
    """Rows for a product that reads its weights before they are there, and that may compute their norm.

    Attributes:
        kernel: the product's.
        shape: of the rows.
        sizes, arguments: what the kernel is given beside those of any product.
    """

    kernel: str
    shape: tuple[int, ...]
    sizes: dict[str, Any]
    arguments: dict[str, Any]


class Step:
    """One step's launches, added to ``launches`` as it is made.

    Attributes:
        logits: [batch * tokens, vocabulary] if ``all_logits``, else [batch, vocabulary] of the last tokens.
    """

    logits: Array

    def __init__(
        self, launches: Launches, model: Model, tokens: Tokens, cache: Keys | None, before: int | None = None, *,
        all_logits: bool = False, has_logits: bool = True, to: Array | None = None,
    ) -> None:  # fmt: skip
        """Add the launches of a step.

        Args:
            launches: where they go.
            model: the model.
            tokens: the new tokens.
            cache: where their keys and values go behind those before them; None for whole sequences of a model that
                :func:`tilekern.inference.caches.keys_of_whole` keeps none of.
            before: the number of keys before the first new token, the same for all sequences; None for a step of one
                token that reads ``tokens.lengths``.
            all_logits: whether all tokens have logits.
            has_logits: whether any token has; those of a prompt's first chunks have none.
            to: where the logits go; None for a new array.
        """
        self._to, self._model, self._cache, self._before = launches, model, cache, before
        self._tokens, (self._batch, self._count) = tokens, tokens.ids.shape
        self._rows = self._batch * self._count
        of = model.architecture
        self._heads = of.heads, of.kv_heads, of.head_dim
        if cache is not None and not (self._is_joint() and of.rotation is None):
            self._angles = self._gathered(model.angles, tokens.positions)
        x, layers = self._gathered(model.weights.embedding, tokens.ids, model.weights.positions), model.weights.layers
        added: Array | None = None
        joined: Array | None = None
        for number, (layer, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            if joined is None:
                x, y = self._normed(x, added, layer.attention_norm, layer.projections)
                joined = self._product(y, layer.projections)
            attended = self._attended(number, layer, joined)
            if self._is_one_launch(layer, attended):
                x, joined = self._ended(x, attended, layer, following)
                continue
            joined, attended = None, self._joined(self._behind(attended, layer.output))
            x, y = self._normed(x, attended, layer.mlp_norm, self._only_product(layer))
            if layer.router is not None:
                added = self._joined(self._by_experts(layer, y))
            else:
                added = self._joined(self._behind(self._inner(layer, y), layer.down))
        if not has_logits:
            return
        if joined is not None:  # the last layer's launch has the final norm, too
            y = joined if all_logits else self._last(joined)
        else:
            if not all_logits:
                x, added = self._last(x), None if added is None else self._last(added)
            # Each of its many blocks computes the norm again, which is as much as a launch for a row alone.
            _, y = self._normed(x, added, model.weights.norm, model.weights.head if x.shape[0] == 1 else None)
        self.logits = new_logits(launches, y.shape[0], model) if to is None else to
        self._head(y, self.logits)

    def _new(self, *shape: int, dtype: str | None = None) -> Array:
        return self._to.array(shape, dtype or self._model.dtype)

    def _joined(self, x: Array) -> Array:
        """Return a product of all inner numbers, of which each GPU has computed some."""
        self._to.add_up(x)
        return x

    def _head(self, x: Array | Awaited, to: Array) -> None:
        """Add the product with the head, of which each GPU has some rows, or all."""
        head = self._model.weights.head
        rows, columns, all_columns = x.shape[0], head.weight.shape[0], self._model.architecture.vocabulary
        if columns == all_columns:
            self._product(x, head, to=to)
            return
        part, gpus = self._product(x, head), all_columns // columns
        if rows == 1:  # the parts lie side by side
            self._to.gather(part, to)
            return
        parts = self._new(gpus * rows, columns)
        self._to.gather(part, parts)
        dtype = self._model.dtype
        sizes = {"rows": rows, "columns": columns, "transposed": False, "x_dtype": dtype, "dtype": dtype}
        for number in range(gpus):
            self._to.launch(
                "lay_out", sizes, x=parts.view((rows, columns), offset=number * rows * columns),
                y=to.view((rows, columns), to.strides, number * columns),
            )  # fmt: skip

    def _gathered(self, table: Array, ids: Array, positions: Array | None = None) -> Array:
        """Return rows of a table, [rows, columns], with those of learned positions added."""
        columns, dtype = table.shape[1], table.dtype
        out = self._new(self._rows, columns, dtype=dtype)
        sizes = {"rows": self._rows, "columns": columns, "positioned": positions is not None, "dtype": dtype}
        learned = {}
        if positions is not None:
            learned = {"positions": _flat(self._tokens.places), "position_weight": positions}
        self._to.launch("embedding", sizes, ids=_flat(ids), weight=table, out=out, **learned)
        return out

    def _last(self, x: Array) -> Array:
        """Return the rows of the last tokens."""
        width, count = x.shape[1], self._count
        return x.view((self._batch, width), (count * width, 1), (count - 1) * width)

    def _normed(
        self, x: Array, added: Array | None, norm: Norm, product: Product | None
    ) -> tuple[Array, Array | Awaited]:
        """Return the residual stream with what is added, and its norm.

        Where one launch computes the norm and ``product``, the one product that takes it, nothing is launched yet.
        """
        of, dtype = self._model.architecture, self._model.dtype
        rows, columns = x.shape
        if product is not None and self._is_held(rows, product):
            sizes = {"inner": columns, "normed": True, "layer": norm.bias is not None, "dtype": dtype}
            return self._unnormed("skinny_held_linear", sizes, x, added, norm)
        if product is not None and self._is_narrow(rows, product):
            sizes = {"width": columns, "layer": norm.bias is not None, "dtype": dtype}
            return self._unnormed("narrow_linear", sizes, x, added, norm)
        sizes = {"rows": rows, "columns": columns, "dtype": dtype, "weight_dtype": dtype}
        y, weights = self._new(rows, columns), {"weight": norm.weight, "eps": of.eps}
        if norm.bias is not None:
            weights["bias"] = norm.bias
        if added is None:
            self._to.launch(f"{of.norm}_norm_forward", sizes, x=x, y=y, **weights)
            return x, y
        total, kernel = self._new(rows, columns), f"fused_add_{of.norm}_norm_forward"
        self._to.launch(self._early(kernel, rows), sizes, residual=x, x=added, total=total, y=y, **weights)
        return total, y

    def _is_held(self, rows: int, product: Product) -> bool:
        """Return whether a product holds its weights, and is one launch with the norm before it, if it is behind one.

        It does for a token of few sequences. The invariant mode has the launches of more rows.
        """
        is_few = self._before is None and rows <= held.MOST_ROWS and self._model.architecture.width <= _MOST_HELD
        return self._is_merged(product) and is_few and product.weight.shape[1] <= held.most_held(rows)

    def _is_narrow(self, rows: int, product: Product) -> bool:
        """Return whether a product of many rows is one launch with a norm before it."""
        return self._is_merged(product) and rows > MOST_ROWS and self._model.architecture.width <= _MOST_NARROW

    def _is_early(self, rows: int) -> bool:
        """Return whether kernels of many rows overlap the ends of those before them, for models of some width."""
        return self._is_merged() and rows > MOST_ROWS and self._model.architecture.width <= _MOST_EARLY

    def _early(self, kernel: str, rows: int) -> str:
        """Return the name of a kernel, or of its copy that overlaps, in place of it."""
        return f"early_{kernel}" if self._is_early(rows) else kernel

    def _is_merged(self, *products: Product) -> bool:
        """Return whether there are kernels of products with what is around them, outside of the invariant mode."""
        is_served = self._model.dtype != "float32" and not is_invariant()
        return is_served and all(product.scale is None for product in products)

    def _is_one_launch(self, layer: Layer, attended: Array) -> bool:
        """Return whether all between the attention of many rows and the next layer's is one launch, with whole sums."""
        of, (rows, inner) = self._model.architecture, attended.shape
        if layer.router is not None or of.gpus > 1 or max(of.width, inner) > _MOST_NARROW:
            return False
        gate = [] if layer.gate is None else [layer.gate]
        return rows > MOST_ROWS and self._is_merged(layer.projections, layer.output, layer.up, layer.down, *gate)

    def _ended(self, residual: Array, x: Array, layer: Layer, following: Layer | None) -> tuple[Array, Array]:
        """Return the residual stream behind a layer, and q, k and v of the following one; the final norm of the last.

        Args:
            residual: the stream before attention.
            x: what attention leaves.
            layer, following: the layers.
        """
        of, (rows, width), dtype = self._model.architecture, residual.shape, self._model.dtype
        y, norm, gate = self._new(rows, width), layer.mlp_norm, layer.gate
        next_norm = self._model.weights.norm if following is None else following.attention_norm
        projections = layer.projections if following is None else following.projections
        columns = projections.weight.shape[0]
        sizes = {
            "rows": rows, "attended": x.shape[1], "hidden": layer.up.weight.shape[0], "width": width,
            "columns": columns, "layer": norm.bias is not None, "gated": gate is not None,
            "biased": layer.up.bias is not None, "out_biased": layer.output.bias is not None, "dtype": dtype,
        }  # fmt: skip
        given = {
            "out_bias": layer.output.bias, "norm_bias": norm.bias, "up_bias": layer.up.bias,
            "down_bias": layer.down.bias, "gate": None if gate is None else gate.weight,
            "next_norm_bias": next_norm.bias,
        }  # fmt: skip
        if following is None:
            z = given["normed"] = self._new(rows, width)
            sizes["ended"] = True
        else:
            z = given["following"] = self._new(rows, columns)
            given |= {"next_weight": projections.weight, "next_bias": projections.bias}
            sizes |= {"followed": True, "next_biased": projections.bias is not None}
        self._to.launch(
            "narrow_block", sizes, residual=residual, x=x, out_weight=layer.output.weight, norm_weight=norm.weight,
            eps=of.eps, up=layer.up.weight, down=layer.down.weight, next_norm_weight=next_norm.weight, y=y,
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
        return y, z

    def _only_product(self, layer: Layer) -> Product | None:
        """Return the product that alone takes an MLP's rows; None if several do, as a gate's with many rows."""
        is_shared = layer.router is not None or (layer.gate is not None and self._rows > MOST_ROWS)
        return None if is_shared else layer.up

    def _behind(self, x: Array, product: Product) -> Array:
        """Return the product that ends attention or an MLP, without its sum over GPUs."""
        if not self._is_held(x.shape[0], product):
            return self._product(x, product)
        sizes = {"inner": x.shape[1], "normed": False, "dtype": self._model.dtype}
        return self._product(Awaited("skinny_held_linear", x.shape, sizes, {"x": x}), product)

    def _unnormed(
        self, kernel: str, sizes: dict[str, Any], x: Array, added: Array | None, norm: Norm
    ) -> tuple[Array, Awaited]:
        """Return the residual stream that the product behind a norm will write, and what its kernel needs."""
        given: dict[str, Any] = {"x": x, "norm_weight": norm.weight, "eps": self._model.architecture.eps}
        if norm.bias is not None:
            given["norm_bias"] = norm.bias
        total = x
        if added is not None:
            total = self._new(*x.shape)
            given |= {"residual": x, "x": added, "total": total}
        return total, Awaited(kernel, x.shape, sizes | {"added": added is not None}, given)

    def _product(self, x: Array | Awaited, product: Product, *, gelu: bool = False, to: Array | None = None) -> Array:
        """Return ``x @ weight^T + bias``, of few rows by the kernel of decoding."""
        (rows, inner), columns = x.shape, product.weight.shape[0]
        out = self._new(rows, columns) if to is None else to
        sizes: dict[str, Any] = {
            "rows": rows, "columns": columns, "biased": product.bias is not None, "gelu_tanh": gelu,
        }  # fmt: skip
        if isinstance(x, Array):
            sizes["inner"] = inner
        bias = {} if product.bias is None else {"bias": product.bias}
        if rows <= MOST_ROWS or isinstance(x, Awaited):
            kernel, scale = _of_few_rows(product.scale)
            self._multiply(kernel, sizes, x=x, weight=product.weight, y=out, **scale, **bias)
            return out
        if product.scale is not None:
            self._dequantized_product(x, product, gelu, out)
        elif self._is_early(rows):
            self._multiply("early_linear", sizes, x=x, weight=product.weight, y=out, **bias)
        else:
            self._multiply("matmul", sizes | {"b_transposed": True}, a=x, b=product.weight, c=out, **bias)
        return out

    def _multiply(self, kernel: str, sizes: dict[str, Any], **arguments: Any) -> None:
        """Add a launch of products in the model's dtype, of float32 by TF32; or of rows to await, by their kernel."""
        dtype, x = self._model.dtype, arguments.get("x")
        if isinstance(x, Awaited):
            arguments |= x.arguments
            self._to.launch(x.kernel, sizes | x.sizes, **arguments)
        elif dtype == "float32":
            self._to.launch(f"{kernel}_tf32", sizes, **arguments)
        else:
            self._to.launch(kernel, sizes | {"dtype": dtype}, **arguments)

    def _dequantized_product(self, x: Array, product: Product, gelu: bool, to: Array) -> None:
        """Add a product with an int8 weight, of which the scratch holds all rows in the model's dtype, or some."""
        scratch, (rows, inner), dtype = self._model.scratch, product.weight.shape, self._model.dtype
        assert scratch is not None
        assert product.scale is not None
        most = scratch.shape[0] // inner
        # Columns of the result then begin at multiples of 16 bytes.
        most = rows if most >= rows else most // _UNIT * _UNIT
        for first in range(0, rows, most):
            count = min(most, rows - first)
            weight = scratch.view((count, inner))
            self._to.launch(
                "dequantize_rows", {"rows": count, "columns": inner, "dtype": dtype},
                x=product.weight.view((count, inner), offset=first * inner),
                scale=product.scale.view((count,), offset=first), y=weight,
            )  # fmt: skip
            bias = None if product.bias is None else product.bias.view((count,), offset=first)
            self._product(x, Product(weight, bias), gelu=gelu, to=to.view((x.shape[0], count), to.strides, first))

    def _by_experts(self, layer: Layer, x: Array | Awaited) -> Array:
        """Return the weighted sum of each token's experts: its slots, one for each, are sorted by expert."""
        from tilekern.kernels.experts import route  # which models without experts do not load

        of, experts, dtype = self._model.architecture, self._model.architecture.experts, self._model.dtype
        assert experts is not None
        assert layer.router is not None
        rows, number, choices = x.shape[0], experts.number, experts.choices
        slots = rows * choices
        logits = self._product(x, Product(layer.router))
        ids, weights = self._new(rows, choices, dtype="int64"), self._new(rows, choices)
        sizes: dict[str, Any] = {
            "tokens": rows, "choices": choices, "experts": number, "normalized": experts.normalized, "dtype": dtype,
            "weight_dtype": dtype,
        }  # fmt: skip
        self._to.launch(
            "router_softmax_forward", sizes, logits=logits, choices=choices, scale=1.0, ids=ids, weights=weights
        )
        counts = self._new(route.parts(slots), route.width_of(number), dtype="int32")
        offsets, order, ranks, chosen = (self._new(size, dtype="int32") for size in (number, slots, slots, slots))
        sizes = {"rows": slots, "experts": number, "wide": True}
        self._to.launch("route_count", sizes, ids=_flat(ids), experts=number, counts=counts)
        self._to.launch(
            "route_place", sizes, ids=_flat(ids), counts=counts, experts=number, offsets=offsets, order=order,
            ranks=ranks, chosen=chosen,
        )  # fmt: skip
        both, inner, out = self._new(slots, 2 * of.inner), self._new(slots, of.inner), self._new(slots, of.width)
        sizes = {"rows": slots, "experts": number}
        self._multiply(
            "grouped_linear", sizes | {"inner": of.width, "columns": 2 * of.inner, "gathered": True}, x=x,
            weight=layer.up.weight, offsets=offsets, order=order, slots=choices, y=both,
        )  # fmt: skip
        self._to.launch(
            "experts_gate", {"rows": slots, "columns": of.inner, "dtype": dtype}, pre=both, experts=chosen,
            total=number, alpha=1.0, limit=math.inf, shift=0.0, y=inner,
        )  # fmt: skip
        self._multiply(
            "grouped_linear", sizes | {"inner": of.inner, "columns": of.width}, x=inner, weight=layer.down.weight,
            offsets=offsets, y=out,
        )  # fmt: skip
        y = self._new(rows, of.width)
        sizes = {
            "tokens": rows, "choices": choices, "columns": of.width, "dtype": dtype, "weight_dtype": dtype,
            "weighted": True,
        }  # fmt: skip
        self._to.launch(
            "experts_combine", sizes, x=out, ranks=ranks.view((rows, choices)), experts=chosen, weights=weights,
            total=number, y=y,
        )  # fmt: skip
        return y

    def _inner(self, layer: Layer, x: Array | Awaited) -> Array:
        """Return what an MLP computes before its last product."""
        if layer.gate is None:
            return self._product(x, layer.up, gelu=True)
        (rows, width), columns, dtype = x.shape, layer.gate.weight.shape[0], self._model.dtype
        out = self._new(rows, columns)
        if rows <= MOST_ROWS:
            sizes: dict[str, Any] = {
                "rows": rows, "inner": width, "columns": columns, "gated": True, "rounded": True, "silu": True,
            }  # fmt: skip
            kernel, scale = _of_few_rows(layer.gate.scale)
            up_scale = {} if layer.up.scale is None else {"up_scale": layer.up.scale}
            weights = {"weight": layer.gate.weight, "up": layer.up.weight}
            self._multiply(kernel, sizes, x=x, y=out, **weights, **scale, **up_scale)
            return out
        gate, up = self._product(x, layer.gate), self._product(x, layer.up)
        self._to.launch("swiglu_forward", {"rows": rows, "columns": columns, "dtype": dtype}, gate=gate, up=up, y=out)
        return out

    def _attended(self, number: int, layer: Layer, joined: Array) -> Array:
        """Return the attention of the new tokens, [rows, heads * head_dim], after their keys are in the cache.

        Args:
            number: the layer's.
            layer: the layer.
            joined: q, k and v of the new tokens, side by side.
        """
        heads, kv_heads, head_dim = self._heads
        width = joined.shape[1]
        out = self._new(self._rows, heads * head_dim)
        if self._is_joint():
            assert self._cache is not None
            self._of_one_at_once(number, layer, self._cache, joined, out)
            return out

        def part(first: int, count: int) -> Array:
            strides = self._count * width, width, head_dim, 1
            return joined.view((self._batch, self._count, count, head_dim), strides, first * head_dim)

        q, k, v = part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)
        if self._cache is None:
            self._of_several(q, k, v, out)
            return out
        q = self._appended(number, layer, self._cache, q, k, v)
        if self._before is None:
            self._of_one(number, self._cache, q, out)
        else:
            self._of_several(q, *self._cache.read(self._to, number), out)
        return out

    def _is_joint(self) -> bool:
        """Return whether attention, from the projections on, is one launch: that of a token with few keys.

        The invariant mode has several, whose bits are those of more tokens.
        """
        _, kv_heads, head_dim = self._heads
        if self._cache is None or self._before is not None or head_dim % 2 or is_invariant():
            return False
        return self._cache.sizes["keys"] <= _MOST_JOINT_KEYS and self._batch * kv_heads <= _MOST_JOINT_HEADS

    def _of_one_at_once(self, number: int, layer: Layer, cache: Keys, joined: Array, out: Array) -> None:
        """Add attention of one token a sequence as one launch, which also writes its keys and values."""
        (heads, kv_heads, head_dim), dtype, of = self._heads, self._model.dtype, self._model.architecture
        group, width, arrays = heads // kv_heads, joined.shape[1], cache.of_layer(number)

        def part(first: int, count: int) -> Array:
            """Return heads by the key head that they read, ``count`` of each."""
            strides = width, count * head_dim, head_dim, 1
            return joined.view((self._batch, kv_heads, count, head_dim), strides, first * head_dim)

        sizes: dict[str, Any] = {
            "kv_heads": self._batch * kv_heads, **cache.sizes, "group": group, "head_dim": head_dim, "dtype": dtype,
            "normed": layer.heads_norm is not None, "turned": of.rotation is not None,
        }  # fmt: skip
        given: dict[str, Any] = {}
        if layer.heads_norm is not None:
            given |= zip(("q_weight", "k_weight"), layer.heads_norm, strict=True)
        if of.rotation is not None:
            given |= zip(("cos", "sin"), self._cos_and_sin(), strict=True)
        self._to.launch(
            "token_attention", sizes, q=part(0, group), k=part(heads, 1), v=part(heads + kv_heads, 1),
            positions=self._tokens.places, counters=self._tokens.counters, eps=of.eps, scale=head_dim**-0.5,
            new_keys=arrays["keys"], new_values=arrays["values"],
            out=out.view((self._batch, kv_heads, group, head_dim)),
            parts=lambda blocks: self._new(blocks, group, part_of(head_dim), dtype="float32"), **arrays, **given,
        )  # fmt: skip

    def _cos_and_sin(self) -> list[Array]:
        """Return the cosines and the sines of the tokens' angles, [batch, tokens, pairs]."""
        pairs = self._heads[2] // 2
        shape, strides = (self._batch, self._count, pairs), (self._count * 2 * pairs, 2 * pairs, 1)
        return [self._angles.view(shape, strides, offset) for offset in (0, pairs)]

    def _appended(self, number: int, layer: Layer, cache: Keys, q: Array, k: Array, v: Array) -> Array:
        """Return q, normalised and turned; write keys and values into the cache."""
        (heads, kv_heads, head_dim), dtype = self._heads, self._model.dtype
        pairs = head_dim // 2
        turned = self._new(self._batch, self._count, heads, head_dim)
        cos, sin = self._cos_and_sin()
        sizes: dict[str, Any] = {
            "tokens": self._count, "batch": self._batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
            "pairs": pairs, "normed": layer.heads_norm is not None, "paged": cache.sizes["paged"], "dtype": dtype,
            "weight_dtype": dtype, "angle_dtype": dtype,
        }  # fmt: skip
        norms: Mapping[str, Any] = {}
        if layer.heads_norm is not None:
            norms = dict(zip(("q_weight", "k_weight"), layer.heads_norm, strict=True))
        self._to.launch(
            "append_to_cache", sizes, q=q, k=k, v=v, cos=cos, sin=sin, positions=self._tokens.places,
            eps=self._model.architecture.eps, offset=0.0, q_out=turned, **cache.of_layer(number), **norms,
        )  # fmt: skip
        return turned

    def _of_one(self, number: int, cache: Keys, q: Array, out: Array) -> None:
        """Add attention of one token a sequence, whose blocks' parts are joined if there are several."""
        (heads, kv_heads, head_dim), dtype = self._heads, self._model.dtype
        group, pairs = heads // kv_heads, self._batch * kv_heads
        shape = self._batch, kv_heads, group, head_dim
        sizes: dict[str, Any] = {
            "kv_heads": pairs, **cache.sizes, "group": group, "head_dim": head_dim, "dtype": dtype,
        }  # fmt: skip
        parts: list[Array] = []

        def room_of(blocks: int) -> Array:
            parts.append(self._new(blocks, group, part_of(head_dim), dtype="float32"))
            return parts[0]

        blocks = self._to.launch(
            "decode_attention", sizes, q=q.view(shape), lengths=self._tokens.lengths, scale=head_dim**-0.5,
            out=out.view(shape), parts=room_of, **cache.of_layer(number),
        )  # fmt: skip
        if blocks > pairs:
            splits = blocks // pairs
            sizes = {"kv_heads": pairs, "splits": splits, "group": group, "head_dim": head_dim, "dtype": dtype}
            to = out.view((pairs, group, head_dim))
            self._to.launch("decode_join", sizes, parts=parts[0], splits=splits, out=to)

    def _of_several(self, q: Array, k: Array, v: Array, out: Array) -> None:
        """Add causal attention of several tokens to the keys before them and their own."""
        (heads, kv_heads, head_dim), dtype = self._heads, self._model.dtype
        assert self._before is not None
        sizes: dict[str, Any] = {
            "batch": self._batch, "queries": self._count, "keys": self._before + self._count, "heads": heads,
            "kv_heads": kv_heads, "head_dim": head_dim, "causal": True, "dtype": dtype,
        }  # fmt: skip
        self._to.launch(
            self._early("attention_forward", self._rows), sizes, q=q, k=k, v=v, most_queries=self._count,
            scale=head_dim**-0.5,
            out=out.view((self._batch, self._count, heads, head_dim)),
            lse=self._new(self._batch, heads, self._count, dtype="float32"),
        )  # fmt: skip


def chunks_of(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield each chunk of a prompt: the number of tokens before it, and its own."""
    for before in range(0, length, chunk):
        yield before, min(chunk, length - before)


def add_next(
    launches: Launches, model: Model, tokens: Tokens, cache: Keys, choice: Choice, *, greedy: bool
) -> None:  # fmt: skip
    """Add a step of one token of each sequence; positions advance, and the next tokens are chosen."""
    step, positions = Step(launches, model, tokens, cache), _flat(tokens.positions)
    launches.launch(
        "advance", {"rows": positions.shape[0]}, positions=positions, new_positions=positions,
        places=_flat(tokens.places), lengths=tokens.lengths,
    )  # fmt: skip
    choice.add(launches, step.logits, positions, greedy=greedy)


def _of_few_rows(scale: Array | None) -> tuple[str, dict[str, Array]]:
    """Return the kernel of a product of few rows, and its argument for the scale of an int8 weight."""
    return ("skinny_linear", {}) if scale is None else ("skinny_linear_int8", {"scale": scale})


def _flat(x: Array) -> Array:
    return x.view((math.prod(x.shape),))
