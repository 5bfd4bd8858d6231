"""``attn_implementation="tilekern"``: the attention kernels behind transformers' own door for attention functions.

Their backward gives the same bits in every run. ``"tilekern_nondeterministic"`` lets the tuner choose among those
that do not, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilekern.errors import InputError
from tilekern.ops.attention import attention

NAMES = {"tilekern": True, "tilekern_nondeterministic": False}


def attend(
    deterministic: bool, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An attention function as transformers calls it.

    Args:
        deterministic: whether gradients must be the same, bit for bit, in every run.
        module: the attention layer; its ``is_causal`` holds where the argument is None.
        query: [batch, heads, queries, head_dim].
        key, value: [batch, kv_heads, keys, head_dim].
        attention_mask: None, or what :func:`mask` made.
        dropout: of the probabilities.
        scaling: of the scores; None is ``head_dim ** -0.5``.
        sliding_window: how many keys a query sees, itself included; None for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        is_causal: whether a query sees no later key.
        s_aux: [heads], a logit for each head that takes part in the softmax and has no value (attention sinks).
        kwargs: ``cu_seq_lens_q`` and the like, as flash attention takes them, for packed sequences.

    Returns:
        [batch, queries, heads, head_dim], and None for the probabilities.

    Raises:
        InputError: a mask or dropout comes together with a soft cap or sinks, which SDPA cannot compute.
    """
    starts = kwargs.get("cu_seq_lens_q")
    packed = starts is not None and query.shape[0] == 1 and query.shape[2] == key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    decoding = not torch.is_grad_enabled() and query.shape[2] != key.shape[2]
    special = softcap is not None or s_aux is not None
    if dropout or (attention_mask is not None and not packed) or _is_foreign(query) or (decoding and not special):
        if special:
            raise InputError(
                'attn_implementation="tilekern" computes a soft cap and sinks without a mask and dropout only; '
                'use "eager" for batches with padding'
            )
        return _sdpa()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, scale=scaling,
        window=sliding_window, softcap=softcap, sinks=s_aux, cu_seqlens=starts if packed else None,
        max_seqlen=kwargs.get("max_length_q") if packed else None, deterministic=deterministic,
    )  # fmt: skip
    return out, None


def _is_foreign(query: torch.Tensor) -> bool:
    """Whether it is no plain tensor (DTensor and the like), for which the kernels are not made."""
    return type(query) is not torch.Tensor


def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def mask(*, local_size: int | None = None, config: Any = None, **given: Any) -> Any:
    """A mask as transformers asks for it: None wherever the kernels' own causality and window say all of it.

    Padding, sequences packed without ``cu_seq_lens``, blocks of images and the like give SDPA's boolean mask.
    """
    from transformers.masking_utils import sdpa_mask

    window = getattr(config, "sliding_window", None)
    own = local_size == window and getattr(config, "attention_chunk_size", None) is None
    return sdpa_mask(**given, local_size=None if own else local_size, config=config)


def register() -> None:
    """Make the names known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, deterministic in NAMES.items():
        AttentionInterface.register(name, functools.partial(attend, deterministic))
        AttentionMaskInterface.register(name, mask)
