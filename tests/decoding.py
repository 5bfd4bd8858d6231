"""Decode with a model of transformers, as the tests of bits do here and on a GPU."""

import torch


@torch.no_grad()
def one_by_one(model, ids):
    """The logits of tokens [batch, tokens] that are given one at a time, with a dynamic cache."""
    cache, rows = None, []
    for place in range(ids.shape[1]):
        made = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        rows.append(made.logits)
    return torch.cat(rows, 1)
