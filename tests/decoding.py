"""Decode with a model of transformers, as the tests of bits do here and on a GPU."""

import torch

# Families whose greedy tokens are compared with those of transformers' own code.
TEN = ("llama", "glm4", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "olmo2", "phi3")


@torch.no_grad()
def one_by_one(model, ids):
    """The logits of tokens [batch, tokens] that are given one at a time, with a dynamic cache."""
    cache, rows = None, []
    for place in range(ids.shape[1]):
        made = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        rows.append(made.logits)
    return torch.cat(rows, 1)


@torch.no_grad()
def greedy(model, ids, tokens):
    """The most likely tokens behind a prompt [batch, tokens], and the logits that chose them."""
    # The routers' loss belongs to training; transformers 5.0.0 fails at its mask with a cache.
    model.eval().config.output_router_logits = False
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)
