"""A model's embedding and head that are one table: in training the table gets one gradient of both."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch

from tilekern.ops.registration import is_transformed
from tilekern.ops.tied_embedding import tied_embedding
from tilekern.patch.digests import Table, definition_of
from tilekern.patch.guards import has_hooks, is_compiled, is_plain

# Embeddings whose rows are multiplied by ``embed_scale``.
_SCALED = Table("embeddings", {"Gemma3TextScaledWordEmbedding": True})


class TiedHead(contextlib.AbstractContextManager["TiedHead"]):
    """The run of a model without its head; its embedding's first call is :func:`tilekern.ops.tied_embedding`."""

    def __init__(self, embedding: Any) -> None:
        """Make the context of an embedding; hooks around it run as before."""
        self._embedding, self._thread = embedding, threading.get_ident()
        self._of: tuple[torch.Tensor | None, torch.Tensor | None] = None, None

    def __enter__(self) -> TiedHead:
        self._embedding.forward = self._rows
        return self

    def __exit__(self, *_: object) -> None:
        vars(self._embedding).pop("forward", None)

    def table(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a head's weight as the loss takes it: as it is, if the embedding had another or was not called."""
        of, table = self._of
        return weight if table is None or of is not weight else table

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        embedding = self._embedding
        # Another thread has a loss of its own, and a second call may have one.
        if self._of[1] is not None or self._thread != threading.get_ident():
            return type(embedding).forward(embedding, ids)
        rows, table = tied_embedding(ids, embedding.weight, embedding.padding_idx)
        self._of = embedding.weight, table
        return rows if type(embedding) is torch.nn.Embedding else rows * embedding.embed_scale.to(rows.dtype)


def tied_head(model: Any, head: Any, labels: Any, skip_logits: bool | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a model's run without its head; it yields None where table and head are not one tensor.

    Nor does it serve what will make logits, graphs of torch.compile, heads with hooks, shared parameters, and tables
    whose gradient is not the sum of rows.
    """
    if (
        torch.compiler.is_compiling() or labels is None or skip_logits is False
        or not model.training or not torch.is_grad_enabled() or is_transformed()
    ):  # fmt: skip
        return contextlib.nullcontext()
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return contextlib.nullcontext()
    is_served = _is_tied(embedding, head) and _is_called_eagerly(model, embedding)
    return TiedHead(embedding) if is_served else contextlib.nullcontext()


def _is_tied(embedding: Any, head: Any) -> bool:
    weight = getattr(head, "weight", None)
    if weight is None or getattr(embedding, "weight", None) is not weight or not isinstance(weight, torch.Tensor):
        return False
    if not isinstance(embedding, torch.nn.Embedding) or "forward" in vars(embedding) or has_hooks(head):
        return False
    if not weight.requires_grad or not is_plain(weight) or weight.is_meta or not weight.is_contiguous():
        return False
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return False
    kind: Any = type(embedding)
    return _sums_rows(kind)


def _is_called_eagerly(module: Any, embedding: Any) -> bool:
    """Return whether an embedding is in a module, outside of lists, and nothing around it is compiled.

    A graph of torch.compile would end at the forward that a step puts in place.
    """
    for child in module.children():
        if child is embedding:
            return not is_compiled(child)
        if not isinstance(child, torch.nn.ModuleList) and _is_called_eagerly(child, embedding):
            return not is_compiled(child)
    return False


@functools.cache
def _sums_rows(kind: Any) -> bool:
    """Return whether a class of embeddings is torch's, but for a factor of its rows."""
    if kind is torch.nn.Embedding:
        return True
    try:
        return bool(_SCALED.get(definition_of(kind.forward)))
    except ValueError:
        return False
