"""Look inside the wrappers that transformers' tensor and expert parallelism puts around forwards.

A wrapper is a function that the module has as its own attribute, around its former forward. Inside the wrappers of
experts the weights are plain tensors, this rank's parts; the parameters outside are DTensors.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilekern.ops.dtensors import is_dtensor
from tilekern.patch import guards as plain

_HOME = "transformers.distributed."
# Wrapper of modules that every rank has completely: it sums the gradients of their parameters over the ranks.
_SUMMED = "ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"
# Variables of that wrapper: the hook that sums, and the parameters that have it.
_HOOK, _HOOKED = "_all_reduce_grad", "is_already_hooked"
_SPLIT = "TensorParallelLayer.install_forward.<locals>.tp_forward"


class Part(NamedTuple):
    """This rank's rows of a head.

    Attributes:
        weight: [part, hidden].
        bias: [part] or None.
        first: the id of the first row.
        group: the process group of the ranks that have the others.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    first: int
    group: Any


def around(module: torch.nn.Module) -> FunctionType | None:
    """Return the function that transformers has put around a module's forward; None if there is none."""
    own = module.__dict__.get("forward")
    is_its = isinstance(own, FunctionType) and own.__globals__.get("__name__", "").startswith(_HOME)
    return own if is_its else None


def inside(module: torch.nn.Module) -> Any:
    """Return the method inside transformers' wrapper around a module's forward; None if it cannot be found."""
    outer = around(module)
    return None if outer is None else variables_of(outer).get("original_forward")


def forward_of(module: torch.nn.Module) -> Any:
    """Return :func:`tilekern.patch.guards.forward_of`, or the forward inside the wrapper that sums gradients."""
    outer = around(module)
    if outer is None or outer.__qualname__ != _SUMMED or torch.compiler.is_compiling():
        return plain.forward_of(module)
    # Another release may implement it differently; then it is not recognised.
    is_known = {_HOOK, _HOOKED} <= variables_of(outer).keys()
    return getattr(inside(module), "__func__", None) if is_known else None


def see_to_sums(*modules: torch.nn.Module) -> None:
    """Sum the gradients of modules' parameters over the ranks, although their wrapped forwards are not called.

    The wrapper's first call puts a hook on each parameter, which stays; this function does the same.
    """
    for module in modules:
        outer = around(module)
        if outer is None or not torch.is_grad_enabled():
            continue
        variables = variables_of(outer)
        hooked = variables[_HOOKED]
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and hooked.get(name) is not parameter:
                parameter.register_post_accumulate_grad_hook(variables[_HOOK])
                hooked[name] = parameter


def part_of_head(head: Any) -> Part | None:
    """Return this rank's part of a linear layer with sharded, gathered outputs; None for any other head."""
    outer = around(head)
    if outer is None or outer.__qualname__ != _SPLIT:
        return None
    style = variables_of(outer)["self"]
    usual = (
        type(style).__name__ == "ColwiseParallel" and style.output_layouts.is_replicate() and style.use_local_output
        and plain.is_from(getattr(inside(head), "__func__", None), torch.nn.Linear.__module__)
        and not getattr(head, "_hf_quantized_needs_local_tp", False)
    )  # fmt: skip
    tensors = [x for x in (head.weight, head.bias) if x is not None]
    by_rows = all(is_dtensor(x) and len(x.placements) == 1 and x.placements[0].is_shard(0) for x in tensors)
    if not usual or not by_rows:
        return None
    weight, bias, mesh = head.weight, head.bias, head.weight.device_mesh
    # DTensors are cut as torch.chunk cuts.
    first = min(len(weight), mesh.get_local_rank() * -(-len(weight) // mesh.size()))
    return Part(weight.to_local(), None if bias is None else bias.to_local(), first, mesh.get_group())


def variables_of(function: FunctionType) -> dict[str, Any]:
    """Return a function's closure variables by name."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
