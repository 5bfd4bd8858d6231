"""Run a decoder layer as one op, where calling its modules would do no more than that op does.

The modules are looked at in each call, since hooks, adapters, other forwards and weights may come and go at any time.
Where one does more, the layer's forward goes on with its parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from tilekern import ops
from tilekern.ops.decoder_layer import Numbers, Weights, decoder_layer
from tilekern.patch import context_parallel, layers, replacements
from tilekern.patch.guards import TENSORS, bare_weights, forward_of, has_hooks, is_from
from tilekern.patch.layers import given_of
from tilekern.patch.table import Norm
from tilekern.patch.told import ToldMask
from tilekern.runtime.switches import ATTENTIONS

Function = Callable[..., Any]
# Arguments of layers that change nothing where there is no cache and the mask says which sequences there are.
_UNREAD = frozenset(("position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PROJECTIONS, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
# A norm that is not there, as of ``given_of``.
_NONE: tuple[Any, float, float, str] = (None, 0.0, 0.0, "")
# Where transformers' decorator is written that takes arguments by former names.
_RENAMES = "transformers.utils.deprecation"
_STAND_INS = (replacements.__name__, layers.__name__)
is_compiling = torch.compiler.is_compiling


class Parts(NamedTuple):
    """What the forms of a layer and of its parts say.

    Attributes:
        attention, mlp: the names of their classes.
        heads: attributes of the attention with norms of the heads of q and k; empty if it has none.
        rotation: name of the function that rotates.
        window: the expression of the window of the attention; empty without one.
    """

    attention: str
    mlp: str
    heads: tuple[str, ...]
    rotation: str
    window: str


# A window of an attention by its expression.
WINDOWS: dict[str, Function] = {
    "": lambda layer: None,  # noqa: ARG005
    "self.sliding_window": lambda layer: layer.sliding_window,
    "getattr(self.config, 'sliding_window', None)": lambda layer: getattr(layer.config, "sliding_window", None),
}


def decoder(original: Function, norms: Collection[str], kinds: Mapping[str, Norm], parts: Parts) -> Function:
    """Replace the ``forward`` of a decoder layer by one op; where that does not serve, fuse its sums and norms.

    Args:
        original: the forward.
        norms: attributes that hold norms.
        kinds: form of each norm class, by class name.
        parts: the other parts.
    """
    names = inspect.unwrap(original).__globals__
    home, window_of, gate_of = names["__name__"], WINDOWS[parts.window], replacements.gates_by("act_fn")

    def is_written(module: Any, name: str) -> bool:
        """Return whether calling a module only runs the forward of a class, as written or as replaced here."""
        kind = type(module)
        if kind.__name__ != name or kind.__module__ != home or has_hooks(module):
            return False
        forward = forward_of(module) if "forward" in module.__dict__ else kind.forward
        while is_from(forward, _RENAMES):
            forward = getattr(forward, "__wrapped__", None)
        return is_from(forward, home, *_STAND_INS)

    def found(self: Any) -> tuple[Weights, Numbers] | None:
        """Return what the op needs of a layer; None if calling one of its modules would do more."""
        modules = self.__dict__["_modules"]
        attention, mlp = modules["self_attn"], modules["mlp"]
        deterministic = ATTENTIONS.get(attention.config._attn_implementation)
        if (
            deterministic is None or not is_written(attention, parts.attention) or not is_written(mlp, parts.mlp)
            or (attention.training and attention.attention_dropout) or not getattr(attention, "is_causal", True)
            or gate_of(mlp) is not ops.swiglu
        ):  # fmt: skip
            return None
        biases: list[torch.Tensor | None] = []
        projections = bare_weights(attention, _PROJECTIONS, biases)
        of_output, of_mlp = bare_weights(attention, ("o_proj",)), bare_weights(mlp, _MLP)
        if projections is None or of_output is None or of_mlp is None:
            return None
        first, second = (given_of(modules[name], home, kinds) for name in _NORMS)
        of_heads = [given_of(attention.__dict__["_modules"][name], home, kinds) for name in parts.heads] or [_NONE] * 2
        q, k = of_heads
        if first is None or second is None or q is None or k is None or q[1] != k[1]:
            return None
        given = (first[0], *projections, *biases, q[0], k[0], *of_output, second[0], *of_mlp)
        numbers = (attention.scaling, window_of(attention), deterministic)
        return Weights(*given), Numbers(attention.head_dim, (first[1], q[1], second[1]), *numbers)

    def whole(self: Any, x: Any, mask: Any, angles: Any, given: dict[str, Any]) -> torch.Tensor | None:
        if is_compiling() or not torch.is_grad_enabled() or type(x) not in TENSORS or not _is_alone(mask, x, given):
            return None
        is_changed = torch.nn.functional.scaled_dot_product_attention is not context_parallel.SDPA
        if is_changed or not is_from(names[parts.rotation], home, *_STAND_INS) or (made := found(self)) is None:
            return None
        (weights, numbers), (cos, sin) = made, angles
        starts, longest = (None, None) if mask is None or not len(mask.starts) else (mask.starts, mask.longest)
        fit = _fit(x, cos, sin, numbers.head_dim)
        return decoder_layer(x, cos, sin, weights, numbers, starts, longest) if fit else None

    return layers.fused_add_rms_norm(original, norms, kinds, whole)


def _is_alone(mask: Any, x: torch.Tensor, given: Mapping[str, Any]) -> bool:
    """Return whether a layer has no cache, a mask that tells of sequences at most, and nothing else to heed."""
    for name, value in given.items():
        if value is not None and value is not False and name not in _UNREAD:
            return False
    return mask is None or (type(mask) is ToldMask and mask.padding is None and mask.shape[3] == x.shape[1])


def _fit(x: torch.Tensor, cos: Any, sin: Any, size: int) -> bool:
    """Return whether angles are plain tensors that turn the heads of each token."""
    if type(cos) not in TENSORS or type(sin) not in TENSORS or x.dim() != 3:
        return False
    shape = cos.shape
    return shape == sin.shape and shape[-2:] == (x.shape[1], size) and len(shape) == 3 and shape[0] in (1, x.shape[0])
