"""``attn_implementation="tilekern"``: the attention kernels, registered with transformers as an attention function.

By default the backward gives the same bits in every run. ``"tilekern_nondeterministic"`` also lets the tuner choose
nondeterministic kernels.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from tilekern.errors import InputError
from tilekern.kernels.attention.forward import SPEC
from tilekern.ops import kept, packing
from tilekern.ops.attention import Call, attention, formula, serves, shown
from tilekern.ops.decode_attention import by_tuned_kernels
from tilekern.ops.packing import can_read, is_capturing
from tilekern.ops.registration import autocast_dtype, is_autocast, is_traced
from tilekern.patch import context_parallel, fp8
from tilekern.patch.decoding import in_graph, keys_of
from tilekern.patch.guards import SUBCLASS, constant_in_graphs
from tilekern.patch.masking import lacks_sequences, mask, note_dropped_keys, says_packing_alone
from tilekern.patch.padding import Keys, Padding
from tilekern.patch.positions import are_given_in_graph, number_of_sequences
from tilekern.patch.told import ToldMask
from tilekern.runtime import implementation
from tilekern.runtime.dispatch import count_fallback, is_invariant
from tilekern.warning import warn_once

# Arguments that change the result and that neither the kernels nor SDPA support: chosen keys, sinks of each query, the
# paged cache as older releases of transformers hand it over.
UNSERVED = frozenset(("indices", "block_indices", "sinks", "cache"))
# Arguments that change the result, besides those of sequences; a layer hands on others too, which change nothing.
HEEDED = UNSERVED | {"softcap", "is_causal", "s_aux", "write_index", "position_bias"}
# Arguments of calls that context parallelism does not serve.
_NOT_SHARDED = ("write_index", "position_bias", "cu_seq_lens_q")
is_compiling = torch.compiler.is_compiling


def attend(
    deterministic: bool, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention, with the arguments that transformers passes.

    A call that runs no kernel counts among the ``fallbacks`` of ``attention_forward``, a compiled one when traced.

    Args:
        deterministic: whether gradients must be bitwise equal in every run.
        module: the attention layer; its ``is_causal`` applies if the argument is None.
        query: [batch, heads, queries, head_dim]. Under autocast, query, key and value are cast as for SDPA.
        key, value: [batch, kv_heads, keys, head_dim].
        attention_mask: None, the result of :func:`mask`, or a 4-dimensional mask of the user's. It combines with packed
            sequences.
        dropout: dropout of the probabilities.
        scaling: factor of the scores; None means ``head_dim ** -0.5``.
        sliding_window: number of keys that a query sees, itself included; None means all.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        is_causal: whether a query sees no later key.
        s_aux: [heads], one attention sink per head: a logit that takes part in the softmax and has no value.
        kwargs: ``cu_seq_lens_q`` etc. for packed sequences, as flash attention takes them. Without them, a mask marks
            the sequences given by ``position_ids``. ``max_length_q`` is ignored if it is a tensor. ``position_bias`` is
            added to the scores, by SDPA.

    Returns:
        [batch, queries, heads, head_dim], and None for the probabilities.

    Raises:
        InputError: one of these:

            - dropout, a position bias or an additive mask is combined with a soft cap or sinks, which SDPA cannot
              compute
            - packed sequences come in a batch of several rows or with a cache
            - an argument in :data:`UNSERVED` is given
            - there are keys that no mask describes
            - context parallelism is on, and this is no causal attention of a sequence to itself
    """
    _check_served(module, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_replaced = torch.nn.functional.scaled_dot_product_attention is not context_parallel.SDPA
    shards = context_parallel.shards_here() if is_replaced else None
    if shards is not None:
        way = (causal, scaling, sliding_window, softcap, s_aux, deterministic)
        return _sharded(shards, query, key, value, attention_mask, dropout, way, kwargs), None
    if kwargs.get("write_index") is not None:
        way = (causal, scaling, sliding_window, softcap, s_aux, deterministic)
        return _batched(module, query, key, value, attention_mask, dropout, way, kwargs), None
    if isinstance(attention_mask, ToldMask) and attention_mask.padding is not None:
        given = (dropout, scaling, sliding_window, softcap, causal, s_aux)
        return _with_padding(deterministic, module, query, key, value, attention_mask, *given, **kwargs)
    bias = kwargs.get("position_bias")
    starts, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    told = None if attention_mask is None or not isinstance(attention_mask, ToldMask) else attention_mask
    if told is not None and starts is None and len(told.starts):
        starts, longest = told.starts, told.longest
    queries, keys = query.shape[2], key.shape[2]
    packed = starts is not None and query.shape[0] == 1 and queries == keys
    if starts is not None and not packed and attention_mask is None:
        raise InputError('attn_implementation="tilekern" takes cu_seq_lens_q for a batch of one without a cache only')
    _check_keys(module, causal and attention_mask is None, told, queries, keys)
    if told is not None and queries < keys:
        # The remaining keys are unused room of a cache.
        key, value = (x[:, :, :queries] for x in (key, value))
        bias = kwargs["position_bias"] = None if bias is None else bias[..., :queries]
        keys = queries
    if told is not None or (packed and says_packing_alone(attention_mask)):
        attention_mask = None
    if causal and not packed and is_compiling() and lacks_sequences(attention_mask):
        attention_mask = _kept_apart(attention_mask, query, key, sliding_window, kwargs.get("position_ids"))
    masked = attention_mask is not None
    special = softcap is not None or s_aux is not None
    after_cache = queries != keys and not torch.is_grad_enabled()
    decoding = after_cache and not is_invariant()
    alone = after_cache and queries == 1 and (causal or sliding_window is None)
    shown = keys_of(attention_mask) if masked else None
    alone = alone and not (dropout or (masked and shown is None) or bias is not None or starts is not None)
    found = _decoded(query, key, value, shown, scaling, sliding_window, softcap, s_aux) if alone else None
    lengths = None if shown is None or shown.starts is not None else shown.lengths
    if found is None and lengths is not None and causal and _is_plain(query, dropout, bias) and is_invariant():
        options = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
        found = _of_lengths(lengths, query, key, value, options | {"deterministic": deterministic})
    if found is not None:
        return found, None
    if dropout or masked or bias is not None or type(query) is not torch.Tensor or (decoding and not special):
        if packed or sliding_window is not None:
            # The kernels take the window and the sequences as arguments; here the mask must contain them.
            attention_mask = _told(attention_mask, query, key, causal, sliding_window, starts if packed else None)
        why = _why(dropout, masked, bias, query)
        asked = (attention_mask, dropout, scaling, softcap, causal, s_aux)
        return _by_torch(why, masked, module, query, key, value, *asked, **kwargs)
    query, key, value = _autocast(query, key, value) if is_autocast(query) else (query, key, value)
    out = attention(
        *_tokens_first(query, key, value), causal=causal, scale=scaling, window=sliding_window, softcap=softcap,
        sinks=s_aux, cu_seqlens=starts if packed else None,
        max_seqlen=longest if packed and isinstance(longest, int) else None, deterministic=deterministic,
        lean=not is_compiling() and fp8.is_converted(module),
    )  # fmt: skip
    kept.tell_kept(out)
    return out, None


def _sharded(
    shards: context_parallel.Shards, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float, way: tuple[Any, ...], kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Compute the attention of sequences that ranks share: each computes all tokens of its heads."""
    causal, scale, window, softcap, sinks, deterministic = way
    unserved = {
        "attention that is not causal": not causal,
        "dropout": bool(dropout),
        "a cache, or keys of another sequence": query.shape[2] != key.shape[2],
        SUBCLASS: _is_foreign(query),
    } | {name: kwargs.get(name) is not None for name in _NOT_SHARDED}
    for what, is_asked in unserved.items():
        if is_asked:
            raise InputError(f'attn_implementation="tilekern" in context_parallel does not serve {what}; use "sdpa"')
    starts, longest = context_parallel.sequences_of(shards, attention_mask, query.shape[2])
    rows = _tokens_first(*_autocast(query, key, value))
    rows[1:] = [context_parallel.with_enough_heads(shards, query.shape[1], x) for x in rows[1:]]
    q, k, v = (context_parallel.to_heads(shards, x) for x in rows)
    out = attention(
        q, k, v, causal=True, scale=scale, window=window, softcap=softcap,
        sinks=None if sinks is None else sinks.chunk(shards.size)[shards.rank], cu_seqlens=starts,
        max_seqlen=None if starts is None else longest, deterministic=deterministic,
    )  # fmt: skip
    return context_parallel.to_tokens(shards, out)


def _by_torch(
    why: str, masked: bool, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, dropout: float, scale: float | None, softcap: float | None, causal: bool,
    sinks: torch.Tensor | None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute the attention by SDPA, or in torch's single operations, and count it."""
    special = softcap is not None or sinks is not None
    if special:
        _check_special(query, attention_mask, dropout, kwargs.get("position_bias"))
    _note_fallback(why, masked)
    if special:
        return _special(query, key, value, attention_mask, scale, softcap, sinks), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with _capturable():
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scale, is_causal=causal, **kwargs
        )
        return found


def _with_padding(
    deterministic: bool, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: ToldMask, dropout: float, scale: float | None, window: int | None, softcap: float | None, causal: bool,
    sinks: torch.Tensor | None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute the attention of each row's tokens by the kernels of training, else with a dense mask."""
    alone = causal and kwargs.get("cu_seq_lens_q") is None
    if alone and _is_plain(query, dropout, kwargs.get("position_bias")):
        assert mask.padding is not None
        found = _decoded_run(mask.padding, query, key, value, scale, window, softcap, sinks)
        if found is not None:
            return found, None
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "deterministic": deterministic}
        rows = _tokens_first(*_autocast(query, key, value))
        found = _of_runs(mask.padding, rows[0], rows[1], rows[2], options)
        if found is not None:
            return found, None
    way = (dropout, scale, window, softcap, causal, sinks)
    return attend(deterministic, module, query, key, value, mask.dense(), *way, **kwargs)


def _decoded_run(
    padding: Padding, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None,
    window: int | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """Compute the attention of one new token to a cache behind padding; None if no kernel does."""
    if query.shape[2] > 1 or padding.tokens == 1 or torch.is_grad_enabled():
        return None
    return _decoded(query, key, value, padding.keys, scale, window, softcap, sinks)


def _of_runs(
    padding: Padding, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor | None:
    """Compute causal attention, all [batch, tokens, heads, head_dim], within rows' runs; None if no kernel does.

    Keys are counted from the first token of a run, as in a row without padding, and so give the same bits.
    """
    (batch, queries, *sizes), tokens = query.shape, padding.tokens
    key, value = key[:, :tokens], value[:, :tokens]
    if queries == tokens:
        rows = [x.reshape(1, batch * tokens, *x.shape[2:]).index_select(1, padding.places) for x in (query, key, value)]
        options = options | {"cu_seqlens": padding.starts, "max_seqlen": padding.longest}
        if not serves(*rows, **options):
            return None
        whole = query.new_zeros(1, batch * tokens, *sizes)
        return whole.index_copy(1, padding.places, attention(*rows, **options)).view(batch, queries, *sizes)
    # Rows with as many keys share a launch.
    step = batch if len({first for first, _ in padding.runs}) == 1 else 1
    parts = []
    for row in range(0, batch, step):
        first = padding.runs[row][0]
        before, some = max(0, first - (tokens - queries)), slice(row, row + step)
        if before == queries:
            parts.append(torch.zeros_like(query[some]))
            continue
        given = query[some, before:], key[some, first:], value[some, first:]
        if not serves(*given, **options):
            return None
        out = attention(*given, **options)
        parts.append(torch.nn.functional.pad(out, (0, 0, 0, 0, before, 0)) if before else out)
    return parts[0] if step == batch else torch.cat(parts)


def _is_plain(query: torch.Tensor, dropout: float, bias: torch.Tensor | None) -> bool:
    return not (dropout or bias is not None or is_compiling() or _is_foreign(query))


def _of_lengths(
    lengths: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor | None:
    """Compute the attention of one token of each sequence to a static cache, whose lengths the GPU alone reads.

    Each sequence is one of the packed kernel, as that takes starts from the GPU; None if no kernel does.
    """
    rows = _tokens_first(*_autocast(query, key, value))
    ends = torch.nn.functional.pad(lengths[:, None], (1, 0))
    one = torch.arange(2, dtype=torch.int32, device=query.device)
    options = options | {"cu_seqlens": one, "max_seqlen": 1, "max_seqlen_k": key.shape[2]}
    parts = []
    for row, starts in enumerate(ends):
        given, more = [x[row : row + 1] for x in rows], {"cu_seqlens_k": starts, **options}
        if not serves(*given, **more):
            return None
        parts.append(attention(*given, **more))
    return torch.cat(parts)


def _batched(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float, way: tuple[Any, ...], kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Compute the attention of a step of transformers' continuous batching; ``way`` as :class:`paged.Way`."""
    from tilekern.patch import paged  # which imports torch.compile, as transformers' cache does

    if attention_mask is not None or dropout or kwargs.get("position_bias") is not None:
        raise InputError('attn_implementation="tilekern": continuous batching takes no mask, dropout or position bias')
    asked, longest = paged.Way(*way), kwargs.get("max_length_k")
    if asked.window is not None and (longest if isinstance(longest, int) else key.shape[2]) >= asked.window:
        note_dropped_keys()
    return paged.attend(module, query, key, value, asked, kwargs)


def _decoded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shown: Keys | None, scaling: float | None,
    window: int | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """Compute the attention of one new token to the keys that it is shown, or all; None if no kernel does."""
    if _is_foreign(query) or (is_traced(query) and shown is None):
        return None
    query, key, value = _autocast(query, key, value) if is_autocast(query) else (query, key, value)
    if not query.dtype == key.dtype == value.dtype or key.shape != value.shape:
        return None
    if shown is not None and is_traced(query):
        return in_graph(query[:, :, 0], key, value, shown, sinks, scaling, window, softcap)
    lengths, starts = (_all_keys(key), None) if shown is None else shown
    found = by_tuned_kernels(query[:, :, 0], key, value, lengths, starts, None, sinks, scaling, window, softcap)
    return None if found is None else found.unsqueeze(1)


def _all_keys(key: torch.Tensor) -> torch.Tensor:
    """Return the number of keys of each sequence whose cache has no unused room."""
    (batch, _, keys, _), device = key.shape, key.device
    # The layers of a step share the tensor, which must be filled on the stream that reads it and outlive the call.
    if is_capturing():
        return _lengths.__wrapped__(batch, keys, device, 0)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _lengths(batch, keys, device, stream)


@functools.lru_cache(maxsize=64)
def _lengths(batch: int, keys: int, device: torch.device, stream: int) -> torch.Tensor:  # noqa: ARG001
    with torch.inference_mode(False):
        return torch.full((batch,), keys, dtype=torch.int32, device=device)


def _check_served(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    if UNSERVED.isdisjoint(kwargs):
        return
    for name, value in kwargs.items():
        if name in UNSERVED and value is not None:
            kind = type(module).__name__
            raise InputError(
                f'attn_implementation="tilekern" of {kind} does not compute what {name} asks for; use "eager"'
            )


def _check_keys(module: torch.nn.Module, alone: bool, told: ToldMask | None, queries: int, keys: int) -> None:
    """Raise InputError for keys that the mask does not tell of, or, of causality ``alone``, of no cache's."""
    if (told is not None and told.shape[3] != keys) or (alone and 1 < queries < keys):
        raise InputError(
            f'attn_implementation="tilekern": {type(module).__name__} hands over {keys} keys for {queries} queries, '
            f"and its mask tells of {queries if told is None else told.shape[3]}; a layer that a checkpoint runs again "
            'needs use_cache=False, as it appends its keys to a cache twice; else use "eager"'
        )


def _kept_apart(
    attention_mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: int | None,
    ids: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """Return a mask that separates sequences in a whole-model graph, where values of positions cannot be read."""
    tokens = query.shape[2]
    if query.shape[0] != 1 or not 1 < tokens == key.shape[2] or not are_given_in_graph():
        return attention_mask
    if not isinstance(ids, torch.Tensor) or ids.shape[-1] != tokens:
        _note_unseen()
        return attention_mask
    number = number_of_sequences(ids)
    apart = number[:, None] == number
    if attention_mask is None:
        return (shown(tokens, tokens, query.device, True, window, None) & apart)[None, None]
    if attention_mask.dtype == torch.bool:
        return attention_mask & apart
    return attention_mask.masked_fill(~apart, torch.finfo(attention_mask.dtype).min)


@constant_in_graphs
def _note_unseen() -> None:
    warn_once(
        "attention: this model's layers do not hand on position_ids, so that a compiled one takes a row for one "
        "sequence; give cu_seq_lens_q and max_length_q where it holds several"
    )


@constant_in_graphs
def _note_fallback(reason: str, masked: bool) -> None:
    """Count a call that runs no kernel; a compiled call counts when it is traced."""
    count_fallback(SPEC, reason)
    if masked and not can_read():
        warn_once(
            "attention: a mask and position_ids cannot be looked at while a model is compiled or captured, so SDPA "
            "runs with a mask; leave out those that say nothing, or give cu_seq_lens_q and max_length_q"
        )


def _capturable() -> contextlib.AbstractContextManager[None]:
    """Disable SDPA's cuDNN backend in a capture that was not rehearsed: it allocates memory for new sizes."""
    if torch.compiler.is_compiling() or not is_capturing() or packing.is_rehearsed:
        return contextlib.nullcontext()
    backends = torch.nn.attention.SDPBackend
    return torch.nn.attention.sdpa_kernel([backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION, backends.MATH])


def _why(dropout: float, masked: bool, bias: torch.Tensor | None, query: torch.Tensor) -> str:
    """Return why a call runs no kernel."""
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
    """Return the mask restricted to each sequence; if there is none, build it from causality, window and sequences."""
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
    """Compute a soft cap or sinks with a boolean mask in torch's own steps, since SDPA supports neither."""
    query, key, value = (x.transpose(1, 2) for x in _autocast(query, key, value))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    call = Call(False, scale, None, softcap, key.shape[1], key.shape[1], deterministic=True)
    return formula(query, key, value, sinks, attention_mask[..., : key.shape[1]], call)


def _tokens_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors [batch, heads, tokens, head_dim] with tokens before heads.

    Rotations make them so, and transpose them for the model's code. What they made is taken again: each view is a node
    of autograd.
    """
    found = []
    for x in tensors:
        base = None if is_compiling() else x._base
        if base is not None and base.dim() == 4 and base.storage_offset() == x.storage_offset():
            (batch, heads, tokens, size), (rows, across, along, step) = x.shape, x.stride()
            if base.shape == (batch, tokens, heads, size) and base.stride() == (rows, along, across, step):
                found.append(base)
                continue
        found.append(x.transpose(1, 2))
    return found


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors as autocast does for SDPA: norms in float32 leave queries wider than values."""
    if not is_autocast(tensors[0]) or any(x.dtype == torch.float64 for x in tensors):
        return tensors
    dtype = autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) for x in tensors)


def _is_foreign(query: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass (DTensor and the like), which the kernels do not support."""
    return type(query) is not torch.Tensor


def register() -> None:
    """Register the functions themselves with transformers: calls are cheaper than with the names alone."""
    implementation.register(attend, mask)
