"""tied_embedding: the rows of a table by the ids of tokens, where a model's head multiplies by the same table.

Autograd would make a gradient as large as the table of the tokens' rows and zeros, and add it to the head's. The head's
gradient is there first, since the backward begins with the loss: here the tokens' rows are added to it in place. That
spares the memory of one table, and to write it, to read it, and to read and write the head's: 1 to 3 % of a step of
models below 2 billion parameters. The numbers are autograd's, bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tied_embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of a table by ids, and the table itself for the head; the table gets one gradient of both.

    The head's gradient is changed in place: nothing else may keep it, so only a loss takes the second result.

    Args:
        ids: [...], the tokens; int32 or int64.
        weight: [vocabulary, columns].
        padding_idx: the row that gets no gradient of tokens, as in ``torch.nn.Embedding``.

    Returns:
        [..., columns], and [vocabulary, columns] in the memory of ``weight``.
    """
    rows, table = _TiedEmbedding.apply(ids, weight, padding_idx)
    return rows, table


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.vocabulary, ctx.padding_idx = len(weight), padding_idx
        ctx.set_materialize_grads(False)
        return torch.nn.functional.embedding(ids, weight, padding_idx), weight.detach()

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor | None, of_table: Tensor | None) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if of_rows is None or of_table is None:
            return None, of_table if of_rows is None else _spread(of_rows, ids, ctx.vocabulary, ctx.padding_idx), None
        if torch.is_grad_enabled():  # Second derivatives need both as they were.
            return None, of_table + _spread(of_rows, ids, ctx.vocabulary, ctx.padding_idx), None
        return None, _with_rows(of_table, of_rows, ids.reshape(-1).long(), ctx.padding_idx), None


def _spread(of_rows: Tensor, ids: Tensor, vocabulary: int, padding_idx: int | None) -> Tensor:
    """Return the sums of the rows with each id, [vocabulary, columns]."""
    padding = -1 if padding_idx is None else padding_idx
    return torch.ops.aten.embedding_dense_backward(of_rows, ids, vocabulary, padding, False)


def _with_rows(of_table: Tensor, of_rows: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    """Add the rows [tokens, columns] with each id [tokens] to the table's gradient in place; return it."""
    tokens = len(ids)
    if 2 * tokens > len(of_table):
        return of_table.add_(_spread(of_rows, ids, len(of_table), padding_idx))
    # Any one of the tokens with an id stands for it; which of them is written last does not matter.
    places = torch.arange(tokens, dtype=torch.int64, device=ids.device)
    known = torch.empty(len(of_table), dtype=torch.int64, device=ids.device).index_copy_(0, ids, places)
    first = known.index_select(0, ids)
    sums = _spread(of_rows, first, tokens, None).index_select(0, first)
    if padding_idx is not None:
        sums.masked_fill_((ids == padding_idx)[:, None], 0)
    # Tokens of one id write the same numbers to the same row.
    return of_table.index_copy_(0, ids, sums.add_(of_table.index_select(0, ids)))
