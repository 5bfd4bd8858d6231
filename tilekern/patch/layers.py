"""What stands in for the forwards of a decoder's layer and of its attention, so that ops that meet there can be fused.

Where a fused op would not compute the same (a norm of another class, a norm's forward or a rotation that somebody
replaced, hooks on a norm or on all modules, DTensor and other subclasses of Tensor, terms of two dtypes), the steps are
taken one by one, by the modules and functions that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from tilekern import ops
from tilekern.patch import replacements
from tilekern.patch.plain import has_hooks, is_bare_linear, is_from, is_plain

Function = Callable[..., Any]


def fused_add_rms_norm(original: Function) -> Function:
    """For ``forward`` of a decoder layer: the sum after the attention and ``post_attention_layernorm`` as one op."""
    own = getattr(original, "__wrapped__", original)
    home = own.__globals__["__name__"]

    @wraps(own)
    def run(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            return own(self, hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **(_LAYER_DEFAULTS | kwargs))
        norm = self.post_attention_layernorm
        alike = hidden_states.dtype == attended.dtype and hidden_states.shape == attended.shape
        if alike and is_plain(hidden_states, attended) and _is_ordinary(norm, home):
            hidden_states, normed = ops.fused_add_rms_norm(hidden_states, attended, norm.weight, norm.variance_epsilon)
        else:
            hidden_states = hidden_states + attended
            normed = norm(hidden_states)
        return hidden_states + self.mlp(normed)

    return run if own is original else _checkpointed(run)


_LAYER_DEFAULTS = {
    "attention_mask": None,
    "position_ids": None,
    "past_key_values": None,
    "use_cache": False,
    "position_embeddings": None,
}


def _checkpointed(run: Function) -> Function:
    """``run`` inside the wrapper that transformers from 5.23 on puts around a layer's forward, for checkpoints.

    That wrapper works for a class whose ``forward`` it is. Where one module has it as a method of its own, the
    checkpoint is made here, as the wrapper makes it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    @wraps(run)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mine = getattr(vars(self).get("forward"), "__func__", None) is wrapper
        if mine and self.gradient_checkpointing and self.training and type(self).forward is not wrapper:
            kwargs |= {"use_cache": False, "past_key_values": None}
            return self._gradient_checkpointing_func(partial(run, self, **kwargs), *args)
        return run(self, *args, **kwargs)

    made: Any = type("Layer", (GradientCheckpointingLayer,), {"forward": forward})
    wrapper: Function = made.forward
    return wrapper


def qk_norm_rope(original: Function) -> Function:
    """For ``forward`` of an attention with ``q_norm`` and ``k_norm``: both norms and the rotation as one op.

    cos and sin [1 or batch, tokens, head_dim] hold each angle twice.
    """
    names = original.__globals__
    # transformers' own or tilekern's stand-in, as the patch's digests say; with the kernels package it is no function.
    rotation = names["apply_rotary_pos_emb"]
    # Until 5.3 the cache took the position and the angles.
    takes_position = "cache_position" in original.__code__.co_varnames

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        position = {"cache_position": kwargs.pop("cache_position", None)} if takes_position else {}
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        cos, sin = position_embeddings
        query, key, value = (x.view(heads) for x in _projected(self, hidden_states))
        value = value.transpose(1, 2)
        query, key = _turned(self, query, key, cos, sin, names, rotation)
        if past_key_values is not None:
            more = ({"sin": sin, "cos": cos, **position},) if takes_position else ()
            key, value = past_key_values.update(key, value, self.layer_idx, *more)
        attended, weights = _interface(self, names)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attended.reshape(*input_shape, -1).contiguous()), weights

    return forward


def _projected(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What q_proj, k_proj and v_proj make of the hidden states."""
    layers = (self.q_proj, self.k_proj, self.v_proj)
    if is_plain(hidden_states) and all(map(is_bare_linear, layers)):
        return ops.projections(hidden_states, *(layer.weight for layer in layers))
    return tuple(layer(hidden_states) for layer in layers)


def _turned(
    self: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, names: dict[str, Any], known: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [batch, tokens, heads, head_dim] normalised and rotated, as [batch, heads, tokens, head_dim].

    ``known`` is a rotation that the fused op equals; the one in ``names`` now may be another.
    """
    one, other, home, rotate = self.q_norm, self.k_norm, names["__name__"], names["apply_rotary_pos_emb"]
    ordinary = rotate is known or is_from(rotate, home, replacements.__name__)
    ordinary = ordinary and _is_ordinary(one, home) and _is_ordinary(other, home)
    if ordinary and _fits(q, k, cos, sin) and _alike(one, other):
        q, k = ops.qk_norm_rope(q, k, one.weight, other.weight, cos, sin, one.variance_epsilon)
        return q.transpose(1, 2), k.transpose(1, 2)
    rotated: tuple[torch.Tensor, torch.Tensor] = rotate(one(q).transpose(1, 2), other(k).transpose(1, 2), cos, sin)
    return rotated


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the arguments are plain tensors of one dtype with an angle for each token and position in a head."""
    if not is_plain(q, k, cos, sin) or q.dtype != k.dtype or q.dim() != 4 or cos.dim() != 3:
        return False
    batch, tokens, _, size = q.shape
    return cos.shape[0] in (1, batch) and cos.shape[1:] == (tokens, size) and cos.dtype == sin.dtype


def _alike(one: Any, other: Any) -> bool:
    return one.variance_epsilon == other.variance_epsilon and one.weight.dtype == other.weight.dtype


def _interface(self: Any, names: dict[str, Any]) -> Function:
    """The attention function that the model's configuration names."""
    kind, eager = self.config._attn_implementation, names["eager_attention_forward"]
    known = names["ALL_ATTENTION_FUNCTIONS"]
    if hasattr(known, "get_interface"):
        found: Function = known.get_interface(kind, eager)
        return found
    return eager if kind == "eager" else known[kind]


def _is_ordinary(norm: Any, home: str) -> bool:
    """Whether calling a norm computes what its class in the module ``home`` was written to do and nothing else.

    Its forward, the class's or one of its own, must be that class's code or tilekern's stand-in for it: output
    capturing leaves the class's with an instance, and either may be replaced at any time.
    """
    kind = type(norm)
    if kind.__module__ != home or has_hooks(norm) or not is_plain(norm.weight):
        return False
    own = norm.__dict__.get("forward")
    return is_from(kind.forward if own is None else getattr(own, "__func__", None), home, replacements.__name__)
