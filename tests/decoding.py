"""Decode with a model of transformers, as the tests of bits do here and on a GPU."""

import sys

import torch

from tilekern.kernels import spec_named
from tilekern.kernels.attention.problem import keys_apart
from tilekern.runtime import dispatch
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

# Families whose greedy tokens are compared with those of transformers' own code.
TEN = ("llama", "glm4", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "olmo2", "phi3")


@torch.no_grad()
def one_by_one(model, ids, cache=None):
    """The logits of tokens [batch, tokens] that are given one at a time, with a dynamic cache or the one given."""
    rows = []
    for place in range(ids.shape[1]):
        made = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        rows.append(made.logits)
    return torch.cat(rows, 1)


@torch.no_grad()
def first_to_differ(model, ids):
    """The attentions and MLPs that give a token other results one by one than at once, from the same inputs.

    By name, with the places of these tokens. What is given to them differs behind the first that is named.
    """
    names = {m: name for name, m in model.named_modules() if name.endswith((".self_attn", ".mlp"))}
    seen = {}

    def note(module, args, kwargs, result):
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        seen[names[module]] = given.clone(), (result[0] if isinstance(result, tuple) else result).clone()

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in names]
    try:
        model(input_ids=ids, use_cache=True)
        whole, cache, found = dict(seen), None, {}
        for place in range(ids.shape[1]):
            made = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            for name, (given, result) in seen.items():
                same_given, same_result = (
                    torch.equal(x[:, place], y[:, 0]) for x, y in zip(whole[name], (given, result), strict=True)
                )
                if same_given and not same_result:
                    found.setdefault(name, []).append(place)
    finally:
        for hook in hooks:
            hook.remove()
    return found


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


def let_kernels_of_the_class_decode(monkeypatch):
    """Let the interpreter run the kernels for few rows and for one token in the mode, as with records of the class.

    Training's products sum in the steps of the former, and its attention sums tiles of keys apart as the latter.
    """
    sizes = {"rows": 64, "inner": 64, "columns": 64, "b_transposed": True, "dtype": "bfloat16"}
    many = spec_named("matmul")
    problem = many.problem(**{d.name: sizes.get(d.name, False) for d in many.dimensions})
    steps = {"tile_k": many.default(problem, INTERPRETED)["tile_k"]}
    by_kernels = dispatch._by_kernels

    def apart(problem):
        return {"apart": True, "tile_n": keys_apart(problem)}

    def of_training(spec, problem, config):
        found = by_kernels(spec, problem, config)
        return found.but(**apart(problem)) if spec.name == "attention_forward" else found

    def tuned_plan_for(spec, device, *sizes):
        values = zip(spec.dimensions, sizes, strict=True)
        problem = spec.problem(**{d.name: str(x)[6:] if d.kind == "dtype" else x for d, x in values})
        same = steps if spec.name.startswith("skinny_") else {"splits": 0} | apart(problem)
        config = spec.default(problem, INTERPRETED).but(**same)
        way = spec.implement(problem, config)
        return dispatch._keep(spec, InterpretedPlan(way, config, way.grid(problem, INTERPRETED.sm_count)), problem)

    monkeypatch.setattr(dispatch, "_by_kernels", of_training)
    for module in ("decode_attention", "few_rows"):
        monkeypatch.setattr(sys.modules[f"tilekern.ops.{module}"], "tuned_plan_for", tuned_plan_for)
