"""Runs one of the layers of a model that are alike; the others hand on their input.

A model has dozens of layers and few kinds of them. A layer that is made and called as one before it asks for nothing
new. A layer's index does not count: in transformers it finds the layer's cache, and whatever else depends on it is
decided when the layer is made, and shows in its other attributes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable
from types import MethodType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilekern.runtime.dispatch import is_invariant
from tilekern.runtime.recorder import Trace
from tilekern.tuning.plan.sharding import OwnForward

# A layer's place among the others, which does not make it another kind.
_PLACE = re.compile(r"(?:.*_)?(?:idx|id|index)")
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def thin_out(model: torch.nn.Module, trace: Trace) -> None:
    """Make each list of layers in a meta model run its distinct layers only, counted as all of their kind."""
    for parent in _outermost(model):
        seen: dict[Hashable, dict[Hashable, Any]] = {}
        kinds = [_kind(layer) for layer in parent]
        for place, (layer, kind) in enumerate(zip(parent, kinds, strict=True)):
            parent[place] = _Once(layer, seen.setdefault(kind, {}), trace, kinds.count(kind))


def _outermost(module: torch.nn.Module) -> list[torch.nn.ModuleList]:
    found = []
    for child in module.children():
        found += [child] if isinstance(child, torch.nn.ModuleList) else _outermost(child)
    return found


class _Once(torch.nn.Module):
    """Stands in a list for a layer.

    ``seen`` maps calls to their results, and is shared by the ``times`` layers of one kind.
    """

    def __init__(self, layer: torch.nn.Module, seen: dict[Hashable, Any], trace: Trace, times: int) -> None:
        super().__init__()
        self.layer, self.seen, self.trace, self.times = layer, seen, trace, times

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        has_hooks = any(module._forward_hooks for module in self.layer.modules())
        modes = torch.is_grad_enabled(), is_invariant(), self.training, has_hooks
        call = (modes, str(tree), tuple(map(_form, leaves)))
        given = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if given is not None and call in self.seen:
            found, shape = self.seen[call][:2]
            if torch.is_grad_enabled():
                _give_gradients(self.layer)
            place = [_form(leaf) for leaf in found].index(_form(given))
            leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
            return tree_unflatten([*leaves[:place], given, *leaves[place + 1 :]], shape)
        with self.trace.repeated(self.times):
            result = self.layer(*args, **kwargs)
        found, shape = tree_flatten(result)
        self._repeat_backward(leaves, found)
        if given is not None and any(_form(leaf) == _form(given) for leaf in found):
            # What was given stays alive, so that nothing else has its id.
            self.seen[call] = found, shape, leaves
        return result

    def _repeat_backward(self, given: list[Any], results: list[Any]) -> None:
        """Count what the layer's backward asks for, or computes again, as of all layers of its kind too."""
        stack = contextlib.ExitStack()
        for node in _nodes(given, results):
            node.register_prehook(lambda _: stack.enter_context(self.trace.repeated(self.times)))
            node.register_hook(lambda *_: stack.close())


def _give_gradients(layer: torch.nn.Module) -> None:
    """Give a layer that does not run the gradients that an optimizer's step counts."""
    for parameter in layer.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)


def _nodes(given: list[Any], results: list[Any]) -> list[Node]:
    """Return the nodes of the graph between tensors and results of them, without those of parameters."""
    seen = {leaf.grad_fn for leaf in given if isinstance(leaf, torch.Tensor)}
    waiting = [leaf.grad_fn for leaf in results if isinstance(leaf, torch.Tensor)]
    found = []
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node.next_functions:
            seen.add(node)
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if isinstance(value, _PLAIN) else id(value)


def _kind(module: torch.nn.Module) -> Hashable:
    """Return a key that is equal for modules which compute the same, parameter values aside."""
    own = {
        name: value for name, value in vars(module).items() if name not in _OF_MODULES and not _PLACE.fullmatch(name)
    }
    parts = {name: _kind(child) for name, child in module.named_children()}
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (
        type(module),
        tuple((name, _form(x)) for name, x in tensors),
        tuple((name, _trait(value)) for name, value in own.items()),
        tuple(parts.items()),
        len(module._forward_hooks) + len(module._forward_pre_hooks),
    )


def _trait(value: Any) -> Hashable:
    if isinstance(value, OwnForward):
        return OwnForward, _trait(value.forward)
    if isinstance(value, MethodType):
        return id(value.__func__)
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_trait, value))
    return _form(value)
