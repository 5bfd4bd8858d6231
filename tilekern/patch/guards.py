"""Check that modules and tensors are ordinary, so that a fused op computes the same as calling the modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as modules

from tilekern.errors import InputError
from tilekern.patch.table import Norm
from tilekern.runtime.dispatch import count_fallback

Linear = torch.nn.Linear
Function = TypeVar("Function", bound=Callable[..., object])
TENSORS = (torch.Tensor, torch.nn.Parameter)
_LINEAR = Linear.__module__
# Where ms-swift writes the forward that it gives each factor of an adapter, and the attribute with the factor's own. It
# moves the input to the weight's device first.
_MOVES, _MOVED = "swift.tuners.peft", "forward_origin"
# The module of the functions that replace forwards.
_REPLACEMENTS = "tilekern.patch.replacements"

SUBCLASS = "a subclass of Tensor"
COMPILED = "torch.compile"
# Where hooks are from that gather a module's weights and free them again: FSDP2's, and DeepSpeed's at ZeRO-3.
FSDP, ZERO = "torch.distributed.fsdp.", "deepspeed."
SHAPES = "shapes or dtypes that the op does not take"


def require_module(asker: str, model: object) -> None:
    """Raise unless a model is a torch.nn.Module; ``asker`` is the function that was given it.

    Raises:
        InputError: it is something else, such as a model's name.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{asker} takes a model, a torch.nn.Module, got {type(model).__name__}")


def constant_in_graphs(function: Function) -> Function:
    """Mark a function whose result is constant in a graph that torch.compile traces.

    ``torch.compiler.assume_constant_result`` sets the same attribute but imports ``torch._dynamo``, which adds 0.9 s to
    each ``import tilekern.patch`` (3 s without bytecode).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def count_own(kernel: str, reason: str, by_modules: bool = False) -> None:
    """Count a call that runs the model's own code in spite of a patch; in torch.compile, once for each traced graph.

    Args:
        kernel: the name of the kernel that would have run.
        reason: a few words.
        by_modules: whether modules, which are judged themselves, compute all but a sum of two terms.
    """
    count_fallback(kernel, reason, by_modules=by_modules)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Return whether no tensor is of a subclass (DTensor and the like)."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes longer than the checks)
        if type(tensor) not in TENSORS:
            return False
    return True


def is_sharded(x: torch.Tensor) -> bool:
    """Return whether a parameter is a share of one, or several in a row: by FSDP, tensor parallelism or ZeRO-3."""
    return hasattr(x, "placements") or hasattr(x, "ds_id") or type(x).__name__ == "FlatParameter"


def is_gathered(model: torch.nn.Module) -> bool:
    """Return whether FSDP shards parameters of a model, which are whole in the middle of a step."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__name__ in _FSDP for kind in kinds)


_FSDP = ("FSDPModule", "FullyShardedDataParallel")


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile has compiled a module on its own, in place or as another one around it."""
    return "_compiled_call_impl" in vars(module) or is_wrapped_to_compile(module)


def is_wrapped_to_compile(module: torch.nn.Module) -> bool:
    """Return whether a module is what ``torch.compile(module)`` returns."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__ == "torch._dynamo.eval_frame"


def has_hooks(module: Any) -> bool:
    """Return whether calling a module runs more than its forward; a function can only have global hooks."""
    try:
        own = module.__dict__
        return bool(
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
            or modules._global_forward_hooks or modules._global_forward_pre_hooks
            or modules._global_backward_hooks or modules._global_backward_pre_hooks
        )  # fmt: skip
    except (AttributeError, KeyError):
        return has_global_hooks()


def hooks_are_of(module: Any, *homes: str) -> bool:
    """Return whether the hooks around a module's forward, if any, are all of packages whose names begin so."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return all(str(getattr(hook, "__module__", "")).startswith(homes) for hook in hooks)


def has_global_hooks() -> bool:
    """Return whether a global hook makes calling any module run more than its forward."""
    return bool(
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


def is_from(function: Any, *homes: str) -> bool:
    """Return whether a function's code was written in one of the modules that ``homes`` names.

    Its globals decide: ``functools.wraps`` gives a wrapper the ``__module__`` of the wrapped function.
    """
    try:
        return function.__globals__["__name__"] in homes
    except (AttributeError, KeyError):
        return False


def forward_of(module: torch.nn.Module) -> Any:
    """Return the function of a module's own forward, else of its class's; None if its own is no method of it."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    return getattr(own, "__func__", None) if getattr(own, "__self__", None) is module else None


def is_ordinary(activation: torch.nn.Module) -> bool:
    """Return whether calling an activation only runs the forward of its class, as written or as replaced here."""
    if has_hooks(activation):
        return False
    kind = type(activation)
    forward = forward_of(activation) if "forward" in activation.__dict__ else kind.forward
    return is_from(forward, kind.__module__, _REPLACEMENTS)


def parameter_of(module: torch.nn.Module, name: str) -> Any:
    """Return ``getattr(module, name)`` of a parameter, in a fifth of the time.

    Torch's lookup first fails to find it among the attributes, then looks in three dictionaries in Python.
    """
    own = module.__dict__
    parameters = own["_parameters"]
    # FSDP1 and weight_norm make a plain attribute of a parameter. Not by ``get``: DeepSpeed's dictionary gathers a
    # parameter when it is read.
    return parameters[name] if name in parameters and name not in own else getattr(module, name)


def weight_of(form: Norm, module: torch.nn.Module) -> Any:
    """Return the weight by which a norm of this form multiplies, or None."""
    scaled = form.scaled
    if scaled is not True and not (scaled and getattr(module, scaled, True)):
        return None
    own = module.__dict__
    parameters = own["_parameters"]
    # As parameter_of, whose call would take as long as the rest.
    return parameters["weight"] if "weight" in parameters and "weight" not in own else module.weight


def parameters_as_written(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return weight and bias of a linear layer whose call only runs its class's own forward; None for any other.

    Both are plain tensors. The caller knows what the class's own forward computes.
    """
    kind = type(layer)
    if "forward" in layer.__dict__ or has_hooks(layer) or not is_from(kind.forward, kind.__module__):
        return None
    weight, bias = parameter_of(layer, "weight"), parameter_of(layer, "bias")
    return (weight, bias) if type(weight) in TENSORS and (bias is None or type(bias) in TENSORS) else None


def linear_of(layer: Any, known: Collection[type] = ()) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight [out, in] and the bias of a linear layer of torch, of GPT-2 or of another known class.

    Return None for other layers, and if calling it runs more than its class's own forward.
    """
    kind = type(layer)
    transposed = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    found = parameters_as_written(layer) if transposed or kind is Linear or kind in known else None
    if found is None or not transposed:
        return found
    return found[0].t(), found[1]


def _only_moves(layer: torch.nn.Module) -> bool:
    """Return whether the own forward of a layer runs that of its class on its input, moved to its device."""
    moved = layer.__dict__.get(_MOVED)
    return (
        is_from(forward_of(layer), _MOVES)
        and getattr(moved, "__self__", None) is layer
        and getattr(moved, "__func__", None) is Linear.forward
    )


def bare_weights(
    module: torch.nn.Module, names: Iterable[str], biases: list[torch.Tensor | None] | None = None
) -> list[torch.Tensor] | None:
    """Return the weights of linear layers of a module if calling each of them is only ``x @ weight.T``.

    With ``biases``, to which each layer's bias or None is added, a call may be ``x @ weight.T + bias``.

    Return None if one does more, as with an adapter, hooks or a forward of its own, or its weight is of a subclass.
    """
    if has_global_hooks() or not is_from(Linear.forward, _LINEAR):
        return None
    layers, weights = module.__dict__["_modules"], []
    for name in names:
        layer = layers.get(name)
        if type(layer) is not Linear:
            return None
        own = layer.__dict__
        parameters = own["_parameters"]
        if (
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
            or ("forward" in own and not _only_moves(layer))
        ):  # fmt: skip
            return None
        # As parameter_of.
        bias = parameters["bias"] if "bias" in parameters and "bias" not in own else layer.bias
        if biases is not None and (bias is None or type(bias) in TENSORS):
            biases.append(bias)
        elif bias is not None:
            return None
        weight = parameters["weight"] if "weight" in parameters and "weight" not in own else layer.weight
        if type(weight) not in TENSORS:
            return None
        weights.append(weight)
    return weights
