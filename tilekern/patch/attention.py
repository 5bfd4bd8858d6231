"""``attn_implementation="tilekern"``: the attention kernels behind transformers' own door for attention functions.

Their backward gives the same bits in every run. ``"tilekern_nondeterministic"`` lets the tuner choose among those
that do not, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilekern import implementation
from tilekern.errors import InputError
from tilekern.kernels.attention.forward import SPEC
from tilekern.ops.attention import Call, attention, formula, shown
from tilekern.ops.registration import is_autocast
from tilekern.patch.masking import mask, says_packing_alone
from tilekern.patch.plain import SUBCLASS
from tilekern.runtime.dispatch import count_fallback

# Further arguments that change the numbers, by which some models ask for what neither the kernels nor SDPA compute:
# chosen keys, sinks of each query, the paged cache of continuous batching.
UNSERVED = ("indices", "block_indices", "sinks", "cache")


def attend(
    deterministic: bool, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An attention function as transformers calls it.

    A call that runs no kernel counts among the ``fallbacks`` of ``attention_forward``, unless it was compiled.

    Args:
        deterministic: whether gradients must be the same, bit for bit, in every run.
        module: the attention layer; its ``is_causal`` holds where the argument is None.
        query: [batch, heads, queries, head_dim]. Under autocast query, key and value are cast as SDPA's are.
        key, value: [batch, kv_heads, keys, head_dim].
        attention_mask: None, what :func:`mask` made, or a user's of four dimensions. With packed sequences both hold.
        dropout: of the probabilities.
        scaling: of the scores; None is ``head_dim ** -0.5``.
        sliding_window: how many keys a query sees, itself included; None for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        is_causal: whether a query sees no later key.
        s_aux: [heads], a logit for each head that takes part in the softmax and has no value (attention sinks).
        kwargs: ``cu_seq_lens_q`` and the like, as flash attention takes them, for packed sequences; ``max_length_q``
            as a number, or as the tensor that transformers' ``prepare_fa_kwargs_from_position_ids`` gives.
            ``position_bias``, which is added to the scores, goes to SDPA.

    Returns:
        [batch, queries, heads, head_dim], and None for the probabilities.

    Raises:
        InputError: dropout, a position bias or an additive mask comes together with a soft cap or sinks, which SDPA
            cannot compute; packed sequences in a batch of several or with a cache; one of :data:`UNSERVED` is given.
    """
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise InputError(f'attn_implementation="tilekern" does not compute what {name} asks for; use "eager"')
    bias = kwargs.get("position_bias")
    starts = kwargs.get("cu_seq_lens_q")
    packed = starts is not None and query.shape[0] == 1 and query.shape[2] == key.shape[2]
    if starts is not None and not packed and attention_mask is None:
        raise InputError('attn_implementation="tilekern" takes cu_seq_lens_q for a batch of one without a cache only')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and attention_mask is None and 1 < query.shape[2] < key.shape[2]:
        # transformers leaves the mask out only where the queries stand at the first keys: the rest is room of a cache.
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
        if bias is not None:
            bias = kwargs["position_bias"] = bias[..., : query.shape[2]]
    if packed and says_packing_alone(attention_mask):
        attention_mask = None
    masked = attention_mask is not None
    decoding = not torch.is_grad_enabled() and query.shape[2] != key.shape[2]
    special = softcap is not None or s_aux is not None
    if dropout or masked or bias is not None or _is_foreign(query) or (decoding and not special):
        if packed or sliding_window is not None:
            # What None leaves to the kernels, others have to be told.
            attention_mask = _told(attention_mask, query, key, causal, sliding_window, starts if packed else None)
        if special:
            _check_special(query, attention_mask, dropout, bias)
        if not torch.compiler.is_compiling():
            count_fallback(SPEC, _why(dropout, masked, bias, query))
        if special:
            return _special(query, key, value, attention_mask, scaling, softcap, s_aux), None
        return _sdpa()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    query, key, value = _autocast(query, key, value)
    longest = kwargs.get("max_length_q") if packed else None
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, scale=scaling,
        window=sliding_window, softcap=softcap, sinks=s_aux, cu_seqlens=starts if packed else None,
        max_seqlen=int(longest) if isinstance(longest, torch.Tensor) else longest, deterministic=deterministic,
    )  # fmt: skip
    return out, None


def _why(dropout: float, masked: bool, bias: torch.Tensor | None, query: torch.Tensor) -> str:
    """Why a call runs no kernel."""
    if dropout:
        return "dropout"
    if masked:
        return "a mask, as of padding"
    if bias is not None:
        return "a position bias"
    return SUBCLASS if _is_foreign(query) else "decoding with a cache"


def _told(
    attention_mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool, window: int | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The mask, within each sequence; where there is none, of causality and the window too."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        return shown(queries, keys, query.device, causal, window, starts)[None, None]
    if starts is None:
        return attention_mask
    seen = shown(queries, keys, query.device, False, None, starts)
    if attention_mask.dtype == torch.bool:
        return attention_mask & seen
    return attention_mask.masked_fill(~seen, torch.finfo(attention_mask.dtype).min)


def _check_special(query: torch.Tensor, attention_mask: Any, dropout: float, bias: torch.Tensor | None) -> None:
    boolean = isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool
    if dropout or not boolean or bias is not None or _is_foreign(query):
        raise InputError(
            'attn_implementation="tilekern" computes a soft cap and sinks on plain tensors, without dropout and with a '
            'boolean mask or none, and adds no position_bias to them; use "eager" for others'
        )


def _special(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, scaling: float | None,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """A soft cap or sinks with a mask such as :func:`mask` makes of padding: SDPA knows neither, so torch's steps."""
    query, key, value = (x.transpose(1, 2) for x in _autocast(query, key, value))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    call = Call(False, scale, None, softcap, key.shape[1], deterministic=True)
    return formula(query, key, value, sinks, attention_mask[..., : key.shape[1]], call)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors as autocast hands them to SDPA: norms in float32 leave queries wider than values."""
    kind = tensors[0].device.type
    if not is_autocast(kind) or any(x.dtype == torch.float64 for x in tensors):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _is_foreign(query: torch.Tensor) -> bool:
    """Whether it is another tensor than a plain one (DTensor and the like), for which the kernels are not made."""
    return type(query) is not torch.Tensor


def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def register() -> None:
    """Make the names known to transformers with this code itself, which costs a call less than the names alone."""
    implementation.register(attend, mask)
