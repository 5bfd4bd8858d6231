"""The engine beside transformers, by the interpreter: logits, and greedy tokens."""

import json
import shutil

import pytest
import torch
from emulated import read
from small_models import VARIANTS, ids_of, save

from tilekern.inference import load

# Tokens of a prompt that are taken at once, and new ones.
LONG = pytest.param(2048, 256, marks=pytest.mark.nightly)


def test_logits_of_whole_sequences_are_those_of_transformers(gpu, saved):
    model, folder = saved
    ids = ids_of(11, 11)
    found = read(load(folder, dtype="float32").forward(ids)).double()
    with torch.no_grad():
        wanted = model.double()(input_ids=torch.tensor(ids), use_cache=False).logits.flatten(0, 1)
        model.float()
    assert (found - wanted).norm() < 2e-3 * wanted.norm()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_models(gpu, tmp_path, name):
    """Tied heads and heads of their own, groups of heads, odd heads, rotations, biases."""
    model = save(name, tmp_path)
    engine, (ids,) = load(tmp_path, dtype="float32"), ids_of(9)
    with torch.no_grad():
        wanted = model.double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    found = read(engine.forward([ids])).double()
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert next(engine.generate([ids], 1)) == [wanted[-1].argmax()]


@pytest.mark.parametrize(("chunk", "new_tokens"), [(4, 24), LONG])
def test_greedy_tokens_are_those_of_transformers(gpu, saved, chunk, new_tokens):
    model, folder = saved
    engine, (prompt,) = load(folder, dtype="float32", context=9 + new_tokens), ids_of(10, seed=1)
    tokens = [token for (token,) in engine.generate([prompt], new_tokens, ignores_ends=True, chunk=chunk)]
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 10:].tolist()
    assert len(set(tokens)) > 5, "so few different tokens tell little"
    if tokens != wanted:
        first = next(number for number, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1])
        with torch.no_grad():
            last = model.double()(torch.tensor([prompt + tokens[:first]])).logits[0, -1]
            model.float()
        margin = (last[wanted[first]] - last[tokens[first]]) / last.abs().max()
        pytest.fail(f"token {first} is {tokens[first]}, and {wanted[first]} is likelier by {margin:.1e} of the logits")


def test_a_text_ends_by_the_ids_of_both_configs(gpu, saved, tmp_path):
    _, folder = saved
    prompts = ids_of(10, 7, seed=2)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    whole = list(zip(*load(folder, dtype="float32").generate(prompts, 8, ignores_ends=True), strict=True))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [whole[0][2], whole[1][4]]}))
    ends = {whole[0][2], whole[1][4], 3}
    found = list(zip(*load(tmp_path, dtype="float32").generate(prompts, 8), strict=True))
    for tokens, all_of_them in zip(found, whole, strict=True):
        last = next(at for at, token in enumerate(all_of_them) if token in ends)
        assert list(tokens) == [*all_of_them[: last + 1], *[None] * (len(tokens) - last - 1)]
    assert len(found[0]) <= 5
