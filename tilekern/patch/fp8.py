"""Train a model's layers with products of 8-bit floats: which layers, what they become, and back.

A layer keeps its parameters, names and dtype, so optimizers, checkpoints and FSDP see the model of before. A linear
layer gets another class. A module of experts that runs tilekern's op (:mod:`tilekern.patch.experts`) keeps its class,
which is its model's, and gets an attribute, which the op's door reads. A layer that stays as it is, is one of these:

- the head, embeddings and routers: their results decide between tokens and experts
- layers outside of the decoder's repeated layers, as those of a vision tower
- sides of fewer than 128, or that are no multiples of 16, which 8-bit products take
- adapters of PEFT, and layers of other classes than torch's, as those of 4 bits
- layers with a forward of their own, as accelerate's hooks give them
- experts, unless a caller chooses them: their 8-bit products were slower than those of bfloat16
- experts that run transformers' code, and all experts in other formats than ``rowwise``
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from tilekern.errors import InputError
from tilekern.kernels.fp8.grouped import SPEC as EXPERTS_PRODUCT
from tilekern.kernels.fp8.mx_scales import HAS_MX
from tilekern.kernels.fp8.space import HAS_FP8
from tilekern.ops import fp8_layer_products
from tilekern.ops.fp8_block_linear import fp8_block_linear, fp8_block_linears
from tilekern.ops.fp8_gated_mlp import fp8_gated_mlp
from tilekern.ops.fp8_linear import fp8_linear, fp8_linears, why_not
from tilekern.ops.layer_products import Products
from tilekern.ops.mxfp8_linear import mxfp8_linear, mxfp8_linears
from tilekern.ops.registration import is_autocast, needs_gradient
from tilekern.ops.rounded_weight import RoundedWeight
from tilekern.patch import experts, guards
from tilekern.patch.exchanging import exchange
from tilekern.patch.guards import COMPILED, SUBCLASS, TENSORS, count_own, has_hooks, parameter_of
from tilekern.runtime.switches import BLOCKWISE, FP8_FORMATS, MXFP8, ROWWISE
from tilekern.spec.targets import HAS

# Functions of a shard that FSDP2 calls before and after it gathers (tilekern.patch.gathering).
BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
# What :func:`stand_in` changes.
CHOICE = "transformers.modeling_utils.PreTrainedModel.post_init"
_LEAST, _UNIT = 128, 16
_OTHERS = ("gate", "router", "score", "classifier")
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class Linear(torch.nn.Linear):
    """A linear layer of torch whose products are of 8-bit floats, in the forward and in both gradients.

    Attributes:
        fp8: the format.
        kernel: the kernel by whose name calls of torch's layer are counted.
        products: those of a decoder layer that is one op.
        result, results: the op of one layer, and of several that share their input.
    """

    fp8: ClassVar[str] = ROWWISE
    kernel: ClassVar[str] = "fp8_matmul"
    products: ClassVar[Products] = fp8_layer_products.ROWWISE
    result: ClassVar[Callable[..., torch.Tensor]] = staticmethod(fp8_linear)
    results: ClassVar[Callable[..., tuple[torch.Tensor, ...]]] = staticmethod(fp8_linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight^T + bias`` [..., out_features] of ``x`` [..., in_features]."""
        # A hook's forward may hold this method of a layer that was restored since.
        is_on = isinstance(self, Linear)
        if torch.compiler.is_compiling():
            if is_on:
                count_own(self.kernel, COMPILED)
            return torch.nn.functional.linear(x, self.weight, self.bias)
        weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
        if not is_on:
            return torch.nn.functional.linear(x, weight, bias)
        if type(weight) not in self.products.tensors or not _are_plain(x, bias):
            count_own(self.kernel, SUBCLASS)
            return torch.nn.functional.linear(x, weight, bias)
        return (self.result if _are_alike(x, weight) else torch.nn.functional.linear)(x, weight, bias)

    def extra_repr(self) -> str:
        """Return torch's text and the format."""
        return f"{super().extra_repr()}, fp8={self.fp8}"

    # As when a model is moved or loaded, which may give the weight a new shard.

    def _apply(self, *given: Any, **options: Any) -> Linear:
        with _gathered_so_on(self):
            super()._apply(*given, **options)
        return self

    def _load_from_state_dict(self, *given: Any, **options: Any) -> None:
        with _gathered_so_on(self):
            super()._load_from_state_dict(*given, **options)


class BlockwiseLinear(Linear):
    """A linear layer of torch whose products are of 8-bit floats with scales of blocks."""

    fp8 = BLOCKWISE
    kernel = "fp8_block_matmul"
    products = fp8_layer_products.BLOCKWISE
    result = staticmethod(fp8_block_linear)
    results = staticmethod(fp8_block_linears)


class Mxfp8Linear(Linear):
    """A linear layer of torch whose products are of MXFP8, for GPUs of sm_100 and newer."""

    fp8 = MXFP8
    kernel = "mxfp8_matmul"
    products = fp8_layer_products.MXFP8
    result = staticmethod(mxfp8_linear)
    results = staticmethod(mxfp8_linears)


_CLASSES = {kind.fp8: kind for kind in (Linear, BlockwiseLinear, Mxfp8Linear)}
KERNELS = (*(kind.kernel for kind in _CLASSES.values()), EXPERTS_PRODUCT.name)


@contextlib.contextmanager
def _gathered_so_on(layer: torch.nn.Module) -> Iterator[None]:
    """Put the functions that FSDP2 finds on a weight's shard on the shard that the weight has in the end."""
    shard = getattr(layer._parameters.get("weight"), "_local_tensor", None)
    functions = {} if shard is None else {name: vars(shard)[name] for name in (BEFORE, AFTER) if name in vars(shard)}
    yield
    if functions:
        vars(layer.weight._local_tensor).update(functions)


def _are_plain(*given: Any) -> bool:
    return all(x is None or type(x) in TENSORS for x in given)


def _are_alike(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether dtypes are one or autocast makes them one; others are torch's error."""
    return x.dtype == weight.dtype or is_autocast(x)


def projected(layers: Sequence[Any], x: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the results of layers that share ``x`` if all are of one format and calling them does no more."""
    kind: Any = type(layers[0])
    if kind not in _CLASSES.values():
        return None
    parameters = _parameters_of(layers, x, kind)
    return None if parameters is None else kind.results(x, parameters)


def _parameters_of(layers: Sequence[Any], x: Any, kind: type[Linear]) -> list[tuple[Any, Any]] | None:
    """Return weights and biases of layers of a format whose calls on ``x`` are the op and no more; else None."""
    if torch.compiler.is_compiling() or not all(type(layer) is kind for layer in layers):
        return None
    parameters = [(parameter_of(layer, "weight"), parameter_of(layer, "bias")) for layer in layers]
    tensors = kind.products.tensors
    are_plain = _are_plain(x, *(bias for _, bias in parameters)) and all(type(w) in tensors for w, _ in parameters)
    if not are_plain or any("forward" in layer.__dict__ or has_hooks(layer) for layer in layers):
        return None
    return parameters if all(_are_alike(x, weight) for weight, _ in parameters) else None


def products_of(layers: Sequence[Any]) -> Products | None:
    """Return the products of a decoder layer if its linear layers are of one format and calling them does no more."""
    kind = type(layers[0])
    if kind not in _CLASSES.values() or not all(type(layer) is kind for layer in layers):
        return None
    are_more = any("forward" in layer.__dict__ or has_hooks(layer) for layer in layers)
    return None if are_more else kind.products


def is_converted(attention: torch.nn.Module) -> bool:
    """Return whether the queries of an attention are made by 8-bit floats, alone or below an adapter."""
    # Not by attributes: one that a module has not takes it a microsecond.
    layer = attention._modules.get("q_proj")
    return isinstance(layer, Linear) or (layer is not None and isinstance(layer._modules.get("base_layer"), Linear))


def gated_mlp(layers: Sequence[Any], activation: str, x: torch.Tensor) -> torch.Tensor | None:
    """Return the result of an MLP if all its layers are ``rowwise``, without biases, and calling them does no more.

    Args:
        layers: those that make gate and up, or the one that makes both side by side; and the last.
        activation: as of :func:`tilekern.ops.fp8_gated_mlp.fp8_gated_mlp`.
        x: [..., in_features].
    """
    parameters = _parameters_of(layers, x, Linear)
    if parameters is None or any(bias is not None for _, bias in parameters):
        return None
    *first, down = (weight for weight, _ in parameters)
    if len(first) == 1:
        if why_not(x, needs_gradient(x, *first, down), (*first, down)):
            return None  # one product makes both
        first = list(first[0].chunk(2))
    return fp8_gated_mlp(x, first[0], first[1], down, activation)


def convert(
    model: torch.nn.Module, chosen: Callable[[str, Any], bool] | None = None, *, format: str = ROWWISE
) -> list[str]:  # fmt: skip
    """Have layers of a model's decoder run products of 8-bit floats from now on.

    Call it at any time, before or after DDP, FSDP or ``torch.compile`` have the model, which compiles such layers as
    ordinary ones; but before ``fully_shard`` of single linear layers. Parameters stay the same objects, in their dtype.

    Args:
        model: a model of transformers, alone or inside PEFT's, or any module with numbered layers.
        chosen: ``(name, layer) -> bool``, asked about each linear layer and each module of experts that can be
            converted; None takes all linear layers, and no experts, which are slower so (docs/fp8.md).
        format: ``rowwise``, a scale for each row of a matrix; ``blockwise``, one for each 128 numbers of a row, and for
            each 128 x 128 of a weight; or ``mxfp8``, one for each 32 numbers. Layers of another format change to it.
            Experts have ``rowwise`` alone, if they run tilekern's op (``apply(experts=True)``).

    Returns:
        The names of the layers that run so now, in the model's order.

    Raises:
        InputError: an argument is wrong, there is no such layer, or the GPU is older than sm_90, for ``mxfp8`` sm_100;
            or a layer of another format has got another class since, or its weight is gathered in 8 bits.
    """
    if format not in FP8_FORMATS:
        raise InputError(f"convert: format must be one of {', '.join(map(repr, FP8_FORMATS))}, got {format!r:.40}")
    guards.require_module("convert", model)
    if chosen is not None and not callable(chosen):
        raise InputError(f"convert: chosen is a function of a layer's name and the layer, got {chosen!r:.40}")
    takes = chosen or (lambda _, layer: _is_linear(layer))
    found = [(name, layer) for name, layer in _served(model, format) if takes(name, layer)]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no linear layer for 8-bit floats: those of repeated layers, of torch's class, "
            f"with sides of {_LEAST} or more that are multiples of {_UNIT}"
        )
    for device in {next(layer.parameters()).device for _, layer in found}:
        _check(device, format)
    changing = [(name, layer) for name, layer in found if _format_of(layer) != format]
    for name, layer in changing:
        _check_own(name, layer)
    for _, layer in changing:
        _give(layer, format)
    return [name for name, _ in found]


def restore(model: torch.nn.Module) -> list[str]:
    """Have the layers of :func:`convert` run as before; return their names.

    Raises:
        InputError: ``model`` is not a module, or a layer has got another class since, as ``fully_shard`` of a single
            layer and parametrizations do, or its weight is gathered in 8 bits.
    """
    guards.require_module("restore", model)
    found = converted_layers(model)
    for name, layer in found:
        _check_own(name, layer)
    for _, layer in found:
        _give(layer, "")
    return [name for name, _ in found]


def _is_linear(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Linear)


def _format_of(layer: torch.nn.Module) -> str:
    """Return the format of a layer; empty if it has none."""
    return layer.fp8 if isinstance(layer, Linear) else vars(layer).get(experts.FORMAT, "")


def _give(layer: Any, format: str) -> None:
    """Have a layer run products of a format, or of none if it is empty."""
    if _is_linear(layer):
        layer.__class__ = _CLASSES[format] if format else torch.nn.Linear
    elif format:
        setattr(layer, experts.FORMAT, format)
    else:
        delattr(layer, experts.FORMAT)


def _why_no_experts(module: torch.nn.Module, format: str, shards: bool) -> str:
    """Return why a module of experts does not run a format; empty if it may."""
    if format != ROWWISE:
        return f"experts have the format {ROWWISE!r} alone"
    return experts.reason_of(module, shards)


def _check_own(name: str, layer: torch.nn.Module) -> None:
    """Refuse to change the class of a converted layer that others rely on."""
    if not isinstance(layer, Linear):
        return
    if is_gathered(layer):
        raise InputError(f"the weight of {name} is gathered in 8 bits; to train in its dtype, shard the model anew")
    if type(layer) not in _CLASSES.values():
        raise InputError(f"{name} is a {type(layer).__name__} now; restore the model before that is done")


def is_gathered(layer: torch.nn.Module) -> bool:
    """Return whether :func:`tilekern.fp8.gather` serves the weight of a layer."""
    weight = parameter_of(layer, "weight")
    return type(weight) is RoundedWeight or hasattr(getattr(weight, "_local_tensor", None), BEFORE)


def converted_layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the layers of a model that run products of 8-bit floats, with their names."""
    return [(name, layer) for name, layer in model.named_modules() if _format_of(layer)]


def judged(model: torch.nn.Module, shards: bool = False) -> list[tuple[str, torch.nn.Module, str]]:
    """Return the linear layers and experts of a model and why each runs no 8-bit floats; none if nobody asked for any.

    ``shards`` says that FSDP shards parts of the model.
    """
    on = {id(layer): _format_of(layer) for _, layer in converted_layers(model)}
    if not on and not format_on():
        return []
    fit, unasked = {id(layer) for _, layer in _layers_of(model)}, "not converted" if on else _EARLIER
    format = ROWWISE if ROWWISE in on.values() else next(iter(on.values()), format_on())

    def why(layer: torch.nn.Module) -> str:
        if _is_linear(layer):
            return "" if id(layer) in on else unasked if id(layer) in fit else _UNFIT
        own = _why_no_experts(layer, format, shards) if id(layer) in fit else _UNFIT
        return own or ("" if id(layer) in on else _SLOWER)

    layers = [(name, layer) for name, layer in model.named_modules() if _is_linear(layer) or _are_experts(layer)]
    return [(name, layer, why(layer)) for name, layer in layers]


def named(layer: torch.nn.Module) -> str:
    """Return the name of a layer's class, and the format if it is of 8-bit floats."""
    format, kind = _format_of(layer), "Linear" if isinstance(layer, Linear) else type(layer).__name__
    return f"{kind}, {format}" if format else kind


_UNFIT = (
    "stays in its dtype: a head, a router, an adapter, outside of the decoder's layers, of other sizes, or with a "
    "forward of its own"
)
_SLOWER = (
    "stays in its dtype: 8-bit products of experts were slower; tilekern.fp8.convert(model, chosen) converts those "
    "that it chooses"
)
_EARLIER = (
    "the model was made before tilekern.apply(fp8=...), was restored, or is quantised by transformers; "
    "tilekern.fp8.convert(model) converts it"
)


def _check(device: torch.device, format: str = ROWWISE) -> None:
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    needed, feature = (HAS_MX, "blackwell") if format == MXFP8 else (HAS_FP8, "fp8")
    if 10 * major + minor not in HAS[feature]:
        raise InputError(f"{needed.reason}; {torch.cuda.get_device_name(device)} is sm_{major}{minor}")


def _layers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers to convert, and those that are converted; of experts those that an op may serve."""
    # DDP and others have the model inside.
    owner: Any = next((module for module in model.modules() if hasattr(module, "get_decoder")), None)
    head = getattr(owner, "get_output_embeddings", lambda: None)()
    decoder = getattr(owner, "get_decoder", lambda: None)() or model
    inside = {id(module) for module in decoder.modules()}
    for name, layer in model.named_modules():
        *path, last = name.split(".")
        sides = _sides_of(layer)
        if not sides or layer is head or id(layer) not in inside:
            continue
        if not any(part.isdigit() for part in path) or last in _OTHERS or not set(_ADAPTERS).isdisjoint(path):
            continue
        if "forward" in layer.__dict__:
            continue
        if min(sides) >= _LEAST and not any(side % _UNIT for side in sides):
            yield name, layer


def _are_experts(module: torch.nn.Module) -> bool:
    """Return whether a module is of transformers' experts, whose code calls an implementation."""
    return hasattr(type(module), "_apply_gate")


def _sides_of(layer: Any) -> tuple[int, ...]:
    """Return the sides of the weights of a layer that may have a format; none if it may not."""
    if type(layer) is torch.nn.Linear or isinstance(layer, Linear):
        return layer.in_features, layer.out_features
    weights = experts.weights_of(layer)[:2] if _are_experts(layer) else ()
    shapes = [weight.shape for weight in weights if isinstance(weight, torch.Tensor) and weight.dim() == 3]
    return tuple(side for shape in shapes for side in shape[1:]) if len(shapes) == 2 else ()


def _served(model: torch.nn.Module, format: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers that may run a format."""
    shards = guards.is_gathered(model)
    for name, layer in _layers_of(model):
        if _is_linear(layer) or not _why_no_experts(layer, format, shards):
            yield name, layer


@contextlib.contextmanager
def converted(model: torch.nn.Module, format: str) -> Iterator[None]:
    """Convert a model for a while, unless the format is empty."""
    before = {id(layer): _format_of(layer) for _, layer in converted_layers(model)}
    if format:
        convert(model, format=format)
    try:
        yield
    finally:
        for _, layer in converted_layers(model):
            if _format_of(layer) != before.get(id(layer), ""):
                _give(layer, before.get(id(layer), ""))


def format_on() -> str:
    """Return the format of :func:`stand_in` that is in force; empty if there is none."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return "" if kind is None else getattr(vars(kind)["post_init"], "tilekern_format", "")


def stand_in(format: str) -> None:
    """Convert models of transformers when they are made from now on; undo this if the format is empty."""
    if format == format_on():
        return
    from transformers import PreTrainedModel

    make = functools.partial(_converting, format=format)
    # Out with another format first.
    exchange(PreTrainedModel, "post_init", make, is_on=False)
    exchange(PreTrainedModel, "post_init", make, is_on=bool(format))


def _converting(original: Callable[..., Any], format: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_init(self: Any) -> Any:
        made = original(self)
        # Quantisers of transformers replace layers of torch's own class alone, and run after this.
        is_quantised = getattr(self.config, "quantization_config", None) is not None
        fit = set() if is_quantised else {id(layer) for _, layer in _served(self, format)}
        # An inner model is made first, and may be another's encoder or vision tower.
        for _, layer in converted_layers(self):
            if id(layer) not in fit:
                _give(layer, "")
        if fit:
            convert(self, format=format)
        return made

    post_init.tilekern_format = format  # type: ignore[attr-defined]
    return post_init
