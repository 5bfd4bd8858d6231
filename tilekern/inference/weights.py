"""A checkpoint's weights on the GPU, laid out once: products' weights [out, in], those of q, k and v in one matrix.

Layout: :class:`Weights` names what the decoder reads, whatever the checkpoint calls it. Each of a checkpoint's tensors
is used once, and a tensor that is missing or has no use is an error, so that no model runs with half of its weights.

Weights of products may be int8 with a scale for each row, quantised on the GPU from the checkpoint's own numbers,
tensor by tensor. These stay in the model's dtype: experts, whose kernels read no int8; routers, whose choices a small
error can change; and a head that is the embedding, whose rows are looked up too. A head of its own is quantised, since
each token reads all of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilekern.arrays import Array
from tilekern.errors import InputError
from tilekern.inference.architectures import Architecture
from tilekern.inference.host_tensors import HostTensor
from tilekern.inference.launches import Launches

DTYPES = ("bfloat16", "float16", "float32")
INT8 = "int8"
# Kernels index with 32 bits.
_MOST_ELEMENTS = (1 << 31) - 1
# What checkpoints hold beside weights: masks of attention and frequencies of rotations, which are computed.
_COMPUTED = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$|^(transformer\.)?h\.\d+\.attn\.mask$")


@dataclass
class Product:
    """The weight [out, in] of a product, its bias [out], if it has one, and the scale [out] of an int8 weight."""

    weight: Array
    bias: Array | None = None
    scale: Array | None = None


@dataclass
class Norm:
    """The weight and the bias of a norm."""

    weight: Array
    bias: Array | None = None


@dataclass
class Layer:
    """The weights of a decoder layer; ``gate`` only of a gated MLP, the heads' norms only of models that have them.

    A router's weight is [experts, width]. Its experts have ``up`` [experts, 2 * inner, width], the gate's rows before
    the others, and ``down`` [experts, width, inner].
    """

    attention_norm: Norm
    projections: Product
    heads_norm: tuple[Array, Array] | None
    output: Product
    mlp_norm: Norm
    gate: Product | None
    up: Product
    down: Product
    router: Array | None = None


@dataclass
class Weights:
    """All weights of a model; ``positions`` only of learned ones."""

    embedding: Array
    positions: Array | None
    layers: list[Layer]
    norm: Norm
    head: Product


@dataclass(frozen=True)
class Source:
    """The tensors of one array: one below the other, or each ``transposed`` first."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        if self.transposed:
            return self.shapes[0][::-1]
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])


def stored_by(architecture: Architecture, *, start: str = "", transposed: bool = False) -> dict[str, Source]:
    """Return where each array of a model comes from, by the names that :func:`load` gives them.

    Args:
        architecture: the model.
        start: of GPT-2: how its tensors' names begin, ``transformer.`` in minGPT's checkpoints and in some others.
        transposed: of GPT-2: whether the weights of products are [in, out], as Hugging Face stores them; minGPT's are
            [out, in], as all of Llama's and Qwen3's.
    """
    if architecture.kind == "gpt2":
        return dict(_gpt2(architecture, start, transposed=transposed))
    return dict(_llama(architecture))


def sources_of(architecture: Architecture, tensors: Mapping[str, HostTensor]) -> dict[str, Source]:
    """Return where each array of a model comes from in a checkpoint.

    Raises:
        InputError: a tensor is missing, has another shape, or has no use.
    """
    # Before the sources of so many layers are listed.
    if architecture.layers > len(tensors):
        raise InputError(f"the checkpoint has {len(tensors)} tensors, too few for {architecture.layers} layers")
    wanted = stored_by(architecture, **form_of(architecture, tensors))
    used = {name for source in wanted.values() for name in source.names}
    unknown = sorted(name for name in tensors if name not in used and not _COMPUTED.search(name))
    # A head that is tied may be stored all the same.
    unknown = [name for name in unknown if not (architecture.tied and name == "lm_head.weight")]
    if missing := sorted(used - tensors.keys()):
        raise InputError(f"the checkpoint lacks {_listed(missing)}, which a {architecture.kind} model has")
    if unknown:
        raise InputError(f"the checkpoint has {_listed(unknown)}, for which a {architecture.kind} model has no use")
    for source in wanted.values():
        for name, shape in zip(source.names, source.shapes, strict=True):
            if tensors[name].shape != shape:
                raise InputError(f"{name} has the shape {list(tensors[name].shape)}; config.json says {list(shape)}")
            if tensors[name].dtype not in DTYPES:
                raise InputError(f"{name} is {tensors[name].dtype}; the engine reads {', '.join(DTYPES)}")
    return wanted


def form_of(architecture: Architecture, tensors: Mapping[str, HostTensor]) -> dict[str, Any]:
    """Return how a checkpoint stores a model, as :func:`stored_by` takes it."""
    start = "transformer." if "transformer.wte.weight" in tensors else ""
    joined = tensors.get(f"{start}h.0.attn.c_attn.weight")
    is_turned = joined is not None and joined.shape == (architecture.width, 3 * architecture.width)
    return {"start": start, "transposed": is_turned}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _gpt2(of: Architecture, start: str, *, transposed: bool) -> Iterator[tuple[str, Source]]:
    """Yield the arrays of GPT-2."""
    width, attended = of.width, of.heads * of.head_dim

    def product(key: str, name: str, columns: int, inner: int) -> Iterator[tuple[str, Source]]:
        shape = (inner, columns) if transposed else (columns, inner)
        yield f"{key}.weight", Source((f"{start}{name}.weight",), (shape,), transposed)
        yield f"{key}.bias", Source((f"{start}{name}.bias",), ((columns,),))

    def norm(key: str, name: str) -> Iterator[tuple[str, Source]]:
        for part in ("weight", "bias"):
            yield f"{key}.{part}", Source((f"{start}{name}.{part}",), ((width,),))

    yield "embedding", Source((f"{start}wte.weight",), ((of.vocabulary, width),))
    yield "positions", Source((f"{start}wpe.weight",), ((of.positions, width),))
    for number in range(of.layers):
        here, there = f"layers.{number}", f"h.{number}"
        yield from norm(f"{here}.attention_norm", f"{there}.ln_1")
        yield from product(f"{here}.projections", f"{there}.attn.c_attn", 3 * attended, width)
        yield from product(f"{here}.output", f"{there}.attn.c_proj", width, attended)
        yield from norm(f"{here}.mlp_norm", f"{there}.ln_2")
        yield from product(f"{here}.up", f"{there}.mlp.c_fc", of.inner, width)
        yield from product(f"{here}.down", f"{there}.mlp.c_proj", width, of.inner)
    yield from norm("norm", "ln_f")
    if not of.tied:
        yield "head", Source(("lm_head.weight",), ((of.head_rows, width),))


def _llama(of: Architecture) -> Iterator[tuple[str, Source]]:
    """Yield the arrays of Llama and Qwen3."""
    width, columns = of.width, (of.heads * of.head_dim, of.kv_heads * of.head_dim)

    def product(key: str, name: str, outs: Iterable[tuple[str, int]], inner: int, biased: bool) -> Any:
        outs = tuple(outs)
        names = tuple(f"{name}.{part}" for part, _ in outs)
        yield f"{key}.weight", Source(tuple(f"{x}.weight" for x in names), tuple((n, inner) for _, n in outs))
        if biased:
            yield f"{key}.bias", Source(tuple(f"{x}.bias" for x in names), tuple((n,) for _, n in outs))

    yield "embedding", Source(("model.embed_tokens.weight",), ((of.vocabulary, width),))
    for number in range(of.layers):
        here, there = f"layers.{number}", f"model.layers.{number}"
        heads = zip(("q_proj", "k_proj", "v_proj"), (columns[0], columns[1], columns[1]), strict=True)
        yield f"{here}.attention_norm.weight", Source((f"{there}.input_layernorm.weight",), ((width,),))
        yield from product(f"{here}.projections", f"{there}.self_attn", heads, width, of.biased[0])
        if of.heads_normed:
            for head in ("q", "k"):
                yield f"{here}.{head}_norm", Source((f"{there}.self_attn.{head}_norm.weight",), ((of.head_dim,),))
        yield from product(f"{here}.output", f"{there}.self_attn", [("o_proj", width)], columns[0], of.biased[1])
        yield f"{here}.mlp_norm.weight", Source((f"{there}.post_attention_layernorm.weight",), ((width,),))
        if of.experts is not None:
            count = of.experts.number
            each = [f"{there}.mlp.experts.{expert}" for expert in range(count)]
            both = tuple(f"{expert}.{part}_proj.weight" for expert in each for part in ("gate", "up"))
            yield f"{here}.router", Source((f"{there}.mlp.gate.weight",), ((count, width),))
            yield f"{here}.up.weight", Source(both, ((of.inner, width),) * len(both))
            down = tuple(f"{expert}.down_proj.weight" for expert in each)
            yield f"{here}.down.weight", Source(down, ((width, of.inner),) * count)
            continue
        for key, part in (("gate", "gate_proj"), ("up", "up_proj")):
            yield from product(f"{here}.{key}", f"{there}.mlp", [(part, of.inner)], width, of.biased[2])
        yield from product(f"{here}.down", f"{there}.mlp", [("down_proj", width)], of.inner, of.biased[2])
    yield "norm.weight", Source(("model.norm.weight",), ((width,),))
    if not of.tied:
        yield "head", Source(("lm_head.weight",), ((of.head_rows, width),))


def load(
    architecture: Architecture, tensors: Mapping[str, HostTensor], dtype: str, launches: Launches, *, int8: bool = False
) -> Weights:
    """Copy a checkpoint's tensors to arrays of ``launches``, in ``dtype``; as int8 those of :func:`is_quantized`.

    Raises:
        InputError: a tensor is missing, has no use, or has another shape or dtype.
        DriverError: the GPU has no memory left for them.
    """
    arrays: dict[str, Array] = {}
    for key, source in sources_of(architecture, tensors).items():
        if int8 and is_quantized(architecture, key):
            arrays[key], arrays[f"{key}.scale"] = put_quantized(source, tensors, launches)
        else:
            arrays[key] = put(source, tensors, dtype, launches)
    return assembled(architecture, arrays)


def unwritten(architecture: Architecture, dtype: str, launches: Launches, *, int8: bool = False) -> dict[str, Array]:
    """Return arrays for all weights of a model by the names of :func:`stored_by`, and for the scales of int8 ones.

    Args:
        architecture: the model, or one GPU's part of it.
        dtype: of the weights that are not int8.
        launches: where the arrays come from.
        int8: whether the weights of products are int8.
    """
    arrays: dict[str, Array] = {}
    for key, source in stored_by(architecture).items():
        is_int8 = int8 and is_quantized(architecture, key)
        arrays[key] = launches.array(source.shape, INT8 if is_int8 else dtype)
        if is_int8:
            arrays[f"{key}.scale"] = launches.array(source.shape[:1], "float32")
    return arrays


def is_quantized(architecture: Architecture, key: str) -> bool:
    """Tell whether an array, by the name of :func:`sources_of`, is int8 in a model with int8 weights."""
    parts = ["projections", "output"] if architecture.experts else ["projections", "output", "gate", "up", "down"]
    return key == "head" or key.endswith(tuple(f".{part}.weight" for part in parts))


def put(source: Source, tensors: Mapping[str, HostTensor], dtype: str, launches: Launches) -> Array:
    """Return an array with a source's tensors."""
    array, row = launches.array(source.shape, dtype), 0
    for name, shape in zip(source.names, source.shapes, strict=True):
        tensor = tensors[name]
        part = array
        if len(source.names) > 1:
            part = array.view(shape, offset=row * (array.strides[0]))
            row += shape[0]
        if tensor.dtype == dtype and not source.transposed:
            part.write(tensor.data)
        else:
            _lay_out(_staged(tensor, launches), part, source.transposed, launches)
    return array


def put_quantized(source: Source, tensors: Mapping[str, HostTensor], launches: Launches) -> tuple[Array, Array]:
    """Return an int8 matrix of a source's tensors, and the scale of each row."""
    rows, columns = source.shape
    array, scale, row = launches.array((rows, columns), INT8), launches.array((rows,), "float32"), 0
    for name in source.names:
        given = _staged(tensors[name], launches)
        if source.transposed:
            turned = launches.array(given.shape[::-1], given.dtype)
            _lay_out(given, turned, True, launches)
            given = turned
        count = given.shape[0]
        launches.launch(
            "quantize_rows", {"rows": count, "columns": columns, "dtype": given.dtype}, x=given,
            y=array.view((count, columns), offset=row * columns), scale=scale.view((count,), offset=row),
        )  # fmt: skip
        row += count
    return array, scale


def _staged(tensor: HostTensor, launches: Launches) -> Array:
    """Return a tensor on the GPU as the checkpoint has it.

    Its memory returns to the pool, which gives it out again for later work of the stream.
    """
    array = launches.array(tensor.shape, tensor.dtype)
    array.write(tensor.data)
    return array


def _lay_out(given: Array, to: Array, transposed: bool, launches: Launches) -> None:
    """Add the rounding, and transposing, of an array into another."""
    rows, columns = given.shape if len(given.shape) == 2 else (1, given.shape[0])
    if rows * columns > _MOST_ELEMENTS:
        raise InputError(f"a weight of {rows} x {columns} numbers is too large to be laid out; store it as {to.dtype}")
    sizes = {
        "rows": rows, "columns": columns, "transposed": transposed, "x_dtype": given.dtype, "dtype": to.dtype
    }  # fmt: skip
    ends = (columns, rows) if transposed else (rows, columns)
    launches.launch("lay_out", sizes, x=given.view((rows, columns)), y=to.view(ends))


def assembled(architecture: Architecture, arrays: Mapping[str, Array]) -> Weights:
    """Return the weights of arrays by the names of :func:`sources_of`."""

    def product(key: str) -> Product:
        name = f"{key}.weight"
        return Product(arrays[name], arrays.get(f"{key}.bias"), arrays.get(f"{name}.scale"))

    def norm(key: str) -> Norm:
        return Norm(arrays[f"{key}.weight"], arrays.get(f"{key}.bias"))

    def product_of_experts(key: str) -> Product:
        found, experts = product(key), architecture.experts
        if experts is None:
            return found
        rows, inner = found.weight.shape
        return Product(found.weight.view((experts.number, rows // experts.number, inner)))

    def layer(key: str) -> Layer:
        heads = (arrays[f"{key}.q_norm"], arrays[f"{key}.k_norm"]) if architecture.heads_normed else None
        return Layer(
            attention_norm=norm(f"{key}.attention_norm"), projections=product(f"{key}.projections"), heads_norm=heads,
            output=product(f"{key}.output"), mlp_norm=norm(f"{key}.mlp_norm"),
            gate=product(f"{key}.gate") if f"{key}.gate.weight" in arrays else None,
            up=product_of_experts(f"{key}.up"), down=product_of_experts(f"{key}.down"),
            router=arrays.get(f"{key}.router"),
        )  # fmt: skip

    return Weights(
        embedding=arrays["embedding"], positions=arrays.get("positions"),
        layers=[layer(f"layers.{number}") for number in range(architecture.layers)], norm=norm("norm"),
        head=Product(arrays["head" if "head" in arrays else "embedding"], scale=arrays.get("head.scale")),
    )  # fmt: skip


def scratch_elements(weights: Weights) -> int:
    """Return the elements of the largest int8 weight of a layer; 0 if there are none."""
    products = [
        x for layer in weights.layers for x in (layer.projections, layer.output, layer.gate, layer.up, layer.down)
    ]
    return max(math.prod(x.weight.shape) if x is not None and x.scale is not None else 0 for x in products)


def config_of_state_dict(tensors: Mapping[str, HostTensor], heads: int | None) -> dict[str, Any]:
    """Return the config of a state dict of minGPT's, whose sizes are those of its tensors.

    Raises:
        InputError: it is of another model, or the number of heads is not given.
    """
    embedding, positions = (tensors.get(f"transformer.{name}.weight") for name in ("wte", "wpe"))
    if embedding is None or positions is None or len(embedding.shape) != 2 or len(positions.shape) != 2:
        raise InputError("the checkpoint has no config.json, and its tensors are not those of minGPT")
    if heads is None:
        raise InputError(
            "the checkpoint has no config.json, and its tensors do not tell the number of heads: give heads"
        )
    if type(heads) is not int or heads < 1:
        raise InputError(f"heads must be a whole number from 1 on, got {heads!r:.40}")
    layers = {match[1] for name in tensors if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    inner = tensors.get("transformer.h.0.mlp.c_fc.bias")
    if inner is not None and len(inner.shape) != 1:
        raise InputError(f"{inner.name} has the shape {list(inner.shape)}; a bias has one size")
    return {
        "model_type": "gpt2", "n_embd": embedding.shape[1], "n_head": heads, "n_layer": len(layers),
        "n_inner": None if inner is None else inner.shape[0], "vocab_size": embedding.shape[0],
        "n_positions": positions.shape[0], "tie_word_embeddings": "lm_head.weight" not in tensors,
    }  # fmt: skip
