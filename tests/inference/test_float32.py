"""float32, whose products are by TF32: logits and tokens beside float64's, with their roundings."""

import pytest
import torch
from emulated import read
from small_models import ids_of
from transformers import Qwen3MoeForCausalLM

from tilekern.inference import load
from tilekern.runtime import dispatch

# Operands have 10 bits of mantissa, so each term of a product is off by up to 2^-10; layers add up several products.
ERROR = 4e-3


def logits_of(model, ids):
    with torch.no_grad():
        found = model.double()(input_ids=torch.tensor(ids), use_cache=False).logits.flatten(0, 1)
        model.float()
    return found


@pytest.mark.parametrize("lengths", [(11, 11), (40, 40)], ids=["few rows", "many rows"])
def test_logits_have_the_roundings_of_tf32_and_no_others(rounding_gpu, saved, lengths):
    """80 rows are more than the kernels of few rows take. Another expert may be chosen that is nearly as good."""
    model, folder = saved
    ids = ids_of(*lengths)
    wanted = logits_of(model, ids)
    found = read(load(folder, dtype="float32").forward(ids)).double()
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    judged = errors.quantile(0.5 if isinstance(model, Qwen3MoeForCausalLM) else 1.0)
    assert 1e-4 < judged < ERROR


@pytest.mark.parametrize("chunk", [32, 2048])
def test_greedy_tokens_are_the_likeliest_of_float64_but_for_near_ties(rounding_gpu, saved, chunk):
    model, folder = saved
    engine, prompts = load(folder, dtype="float32", context=80), ids_of(70, 9, seed=1)
    found = zip(*engine.generate(prompts, 6, ignores_ends=True, chunk=chunk), strict=True)
    for prompt, tokens in zip(prompts, found, strict=True):
        rows = logits_of(model, [[*prompt, *tokens[:-1]]])[len(prompt) - 1 :]
        missed = rows.amax(1) - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (missed < 2 * ERROR * rows.std(1)).all()


def test_all_products_are_by_tf32(rounding_gpu, saved, monkeypatch):
    """Others have no kernel of matrix units, and by default none at all without torch."""
    asked, interpreted = set(), dispatch.array_plan_for

    def plan(spec, *others):
        asked.add(spec.name)
        return interpreted(spec, *others)

    monkeypatch.setattr(dispatch, "array_plan_for", plan)
    for dtype in (None, "int8"):
        engine = load(saved[1], dtype="float32", weight_dtype=dtype)
        engine.forward(ids_of(70))
        next(engine.generate(ids_of(3), 1))
    of_products = {name for name in asked if name.startswith(("matmul", "skinny", "grouped"))}
    assert {"matmul_tf32", "skinny_linear_tf32", "skinny_linear_int8_tf32"} <= of_products
    assert all(name.endswith("_tf32") for name in of_products)
