"""Replacement for a causal language model's forward that computes the loss without logits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tilekern import ops
from tilekern.ops.registration import scalar
from tilekern.patch import context_parallel, parallel, patterns
from tilekern.patch.digests import Table, definition_of
from tilekern.patch.guards import (
    FSDP,
    ZERO,
    constant_in_graphs,
    count_own,
    forward_of,
    has_global_hooks,
    has_hooks,
    hooks_are_of,
    is_from,
    is_plain,
    is_wrapped_to_compile,
)
from tilekern.patch.rewriting import rewritten
from tilekern.patch.skipped_logits import SKIPPED
from tilekern.patch.tied_head import TiedHead, tied_head
from tilekern.runtime.dispatch import meta_stands_for
from tilekern.warning import warn_once

Function = Callable[..., Any]
# Hugging Face's loss, which this module computes.
_LOSS = Table("heads", {"ForCausalLMLoss + fixed_cross_entropy": True})


def fused_linear_cross_entropy(original: Function, **functions: Function) -> Function:
    """Replace the ``forward`` of a ``ForCausalLM`` that makes logits by one linear layer and passes them to HF's loss.

    Without logits the loss is the same as Hugging Face's: the labels are shifted by one (or taken from
    ``shift_labels``, which context parallelism needs), and the sum is divided by ``num_items_in_batch`` or by the
    number of labels that count. The output's ``logits`` are :data:`tilekern.patch.skipped_logits.SKIPPED`, whose errors
    tell how to get them.

    The forward gets an additional argument ``skip_logits``, as in Liger:

    - True skips logits, in evaluation too, and raises ``ValueError`` without labels.
    - False makes logits.
    - None, the default, skips logits if the model trains and labels are given, unless ``logits_to_keep`` asks for some.

    In all other cases the original statements run, for example for a head with an adapter or with hooks that expect its
    logits. If tensor parallelism has split the head's vocabulary over ranks, each rank computes the loss of its part
    (:func:`tilekern.ops.sharded_linear_log_probs`). ``functions`` replace, by name, other functions that the forward
    calls.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy

    known = _LOSS.get(definition_of(ForCausalLMLoss), definition_of(fixed_cross_entropy))
    if not known:
        warn_once("transformers' ForCausalLMLoss is another one than tilekern knows, so it runs as it is")

    def serves(model: Any, head: Any, labels: Any, logits_to_keep: Any, skip_logits: bool | None) -> bool:
        if skip_logits and labels is None:
            raise ValueError("skip_logits=True needs labels: without logits there is nothing but their loss")
        if skip_logits is None:
            whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
            if not whole or not model.training:
                return False
        elif not skip_logits:
            return False
        if labels is None:
            return False
        reason = unserved(model, head, ForCausalLMLoss if known else None)
        if reason:
            count_own("fused_linear_cross_entropy", reason)
        if reason and skip_logits:
            _say(f"{type(model).__name__} makes logits in spite of skip_logits=True: {reason}")
        return not reason

    variables = {
        patterns.SERVES: serves, patterns.LOSS: _loss, patterns.SKIPPED: SKIPPED, patterns.CACHED: _cached,
        patterns.TIED: tied_head,
    }  # fmt: skip
    return rewritten(original, patterns.head_and_loss, variables | functions)


def _cached(model: Any, asked: bool | None, cache: Any, labels: Any, skip_logits: bool | None) -> bool | None:
    """Return ``asked``, whether to make a cache; False where a model trains on labels and nobody asks or gives one.

    Without a cache transformers reads values of positions, which there are none of on meta outside of a trace.
    """
    is_left_out = asked is None and cache is None and labels is not None and model.training and skip_logits is not False
    return False if is_left_out and not (labels.is_meta and meta_stands_for() is None) else asked


def unserved(model: Any, head: Any, loss: Any, is_gathered: bool = False) -> str:
    """Return why a model's own head and loss run; empty if the fused loss runs. ``loss`` is the one tilekern knows.

    ``is_gathered`` says that the head's parameters are plain tensors whenever the model runs, as FSDP makes them.
    """
    if model.loss_function is not loss:
        return "its loss is not the one of transformers that tilekern knows"
    head = _called_for(head)
    reason = _other_than_linear(head)
    if reason or is_gathered or head._forward_pre_hooks or _is_shared(head):
        return reason
    odd = [type(x).__name__ for x in (head.weight, head.bias) if x is not None and not is_plain(x)]
    return f"its head's parameters are of the type {odd[0]}" if odd else ""


def _called_for(head: Any) -> Any:
    """Return the layer that a call of a head runs: in PEFT's ``modules_to_save``, the active adapter's layer.

    For a head that torch.compile compiled on its own, as for accelerate's regions, return the original layer.
    """
    kind = type(head)
    if is_wrapped_to_compile(head) and not has_hooks(head):
        return _called_for(head._orig_mod)
    wraps = (kind.__module__, kind.__name__) == ("peft.utils.other", "ModulesToSaveWrapper")
    if not wraps or has_hooks(head) or "forward" in vars(head):
        return head
    adapters = head.active_adapters
    trained = not head.disable_adapters and bool(adapters) and all(name in head.modules_to_save for name in adapters)
    return head.modules_to_save[adapters[0]] if trained else head.original_module


@constant_in_graphs
def _say(message: str) -> None:
    """Warn once; in a graph, while it is traced."""
    warn_once(message)


def _other_than_linear(head: Any) -> str:
    """Return why calling a head is more than a linear layer with hooks that gather it; empty if it is not."""
    kind = type(head)
    if not isinstance(head, torch.nn.Linear):
        return f"its head is {kind.__name__} of {kind.__module__}"
    if not is_from(forward_of(head), torch.nn.Linear.__module__) and not _is_shared(head):
        return f"its head is {kind.__name__} with a forward of its own"
    if has_global_hooks() or head._backward_hooks or head._backward_pre_hooks or not hooks_are_of(head, FSDP, ZERO):
        return "its head has hooks"
    if has_hooks(head) and torch.compiler.is_compiling():
        reason = "hooks gather its head, which torch.compile cannot have around another function"
        _say(f"the fused loss does not run: {reason}; compile the layers and not the whole model")
        return reason
    return ""


def _is_shared(head: Any) -> bool:
    """Return whether tensor parallelism has split a head's vocabulary over the ranks."""
    return not torch.compiler.is_compiling() and not has_hooks(head) and parallel.part_of_head(head) is not None


def _wide() -> bool:
    """Return whether the gradient of the head's weight is accumulated in float32 (``TILEKERN_WIDE_SUMS=1``)."""
    return os.environ.get("TILEKERN_WIDE_SUMS", "0") not in ("", "0")


def _loss(
    head: Any, hidden: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None, factor: float = 1.0, divisor: float = 1.0, softcap: float | None = None,
    tied: TiedHead | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute Hugging Face's ``ForCausalLMLoss`` of ``head(hidden) * factor / divisor``, capped."""
    head = _called_for(head)
    if shift_labels is None:
        if torch.nn.functional.scaled_dot_product_attention is not context_parallel.SDPA:
            context_parallel.refuse_labels()
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    tokens, given = hidden.shape[:-1].numel(), shift_labels.numel()
    if given != tokens:
        raise ValueError(f"there must be a label for each of {tokens} tokens, got {given}")
    target = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
    scale = factor / divisor

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        part = parallel.part_of_head(head)
        weight, bias = (head.weight, head.bias) if part is None else (part.weight, part.bias)
        if tied is not None and part is None:
            weight = tied.table(weight)
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        options: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "wide_sums": _wide(), "bias": bias}
        if part is None:
            return ops.fused_linear_cross_entropy(hidden, weight, target, num_items=num_items_in_batch, **options)
        log_probs = ops.sharded_linear_log_probs(hidden, weight, target, part.first, part.group, **options)[0]
        counted = (target != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return -log_probs.sum() / scalar(counted, log_probs.dtype, log_probs.device)

    if not head._forward_pre_hooks:
        return compute(hidden)
    # The weight of a sharded head is complete only between the hooks around its forward.
    head.forward = compute
    try:
        return head(hidden)
    finally:
        del head.forward
