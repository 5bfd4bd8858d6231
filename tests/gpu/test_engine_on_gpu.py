"""The engine without torch on a GPU, beside transformers: logits, greedy tokens, batches, draws, and its graph."""

import dataclasses

import engine_models
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tilekern.errors import InputError
from tilekern.inference import Sampling, load
from tilekern.runtime import dispatch

VOCABULARY, NEW = 5003, 64
OF_LLAMA = engine_models.OF_LLAMA | {"vocab_size": VOCABULARY}
MODELS = {
    # So narrow that whole sequences have one launch between two attentions.
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=6, n_head=4, n_positions=512)),
    "llama": (LlamaForCausalLM, LlamaConfig(**OF_LLAMA)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**OF_LLAMA, tie_word_embeddings=True)),
}
# Relative errors of logits to those of float64; products of float32 are by TF32, with the mantissa of float16.
ERRORS = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 5e-3}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return engine_models.save(*MODELS[request.param], folder).cuda(), folder


@pytest.fixture(autouse=True)
def compiled():
    dispatch.set_miss_policy("compile")
    yield
    dispatch.set_miss_policy(None)


def ids_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def page_bytes(folder):
    of = load(folder, dtype="float32").architecture
    return 2 * of.layers * 256 * of.kv_heads * of.head_dim * 4


def logits_of(engine, ids):
    logits = torch.from_dlpack(engine.forward(ids)).clone()
    torch.cuda.synchronize()  # the next forward of this size writes there
    return logits


@pytest.mark.parametrize("dtype", ERRORS)
def test_logits_are_near_those_of_float64(saved, dtype):
    model, folder = saved
    ids = ids_of(100, 100)
    found = logits_of(load(folder, dtype=dtype), ids).double()
    with torch.no_grad():
        wanted = model.double()(input_ids=torch.tensor(ids, device="cuda"), use_cache=False).logits.flatten(0, 1)
        model.float()
    assert (found - wanted).norm() < ERRORS[dtype] * wanted.norm()


def test_greedy_tokens_are_those_of_transformers(saved):
    model, folder = saved
    (prompt,) = ids_of(70, seed=1)
    engine = load(folder, dtype="float32")
    tokens = [token for (token,) in engine.generate([prompt], NEW, ignores_ends=True)]
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(torch.tensor([prompt], device="cuda"), **asked)[0, 70:].tolist()
    same = next((at for at, (one, other) in enumerate(zip(tokens, wanted, strict=True)) if one != other), NEW)
    if same < NEW:  # a tie: TF32 has 10 bits
        row = logits_of(engine, [prompt + wanted[:same]])[-1]
        assert (row[wanted[same]] - row[tokens[same]]).abs() < 1e-2 * row.std()


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tokens_of_a_wide_model_are_among_the_likeliest(tmp_path, rows):
    """Its norms are launches of their own. Of logits that are nearly equal, bfloat16 may exchange two."""
    config = Qwen3Config(**OF_LLAMA | {"hidden_size": 2048, "intermediate_size": 3072, "num_hidden_layers": 2})
    model = engine_models.save(Qwen3ForCausalLM, config, tmp_path).cuda()
    prompts = ids_of(*[70] * rows, seed=5)
    events = load(tmp_path, dtype="bfloat16").generate(prompts, NEW, ignores_ends=True)
    tokens = [[*prompt, *new] for prompt, new in zip(prompts, zip(*events, strict=True), strict=True)]
    with torch.no_grad():
        logits = model.double()(input_ids=torch.tensor(tokens, device="cuda"), use_cache=False).logits[:, 69:-1]
    chosen = logits.gather(2, torch.tensor(tokens, device="cuda")[:, 70:, None])[..., 0]
    assert (chosen > logits.amax(2) - 0.2 * logits.std(2)).all()


def test_a_paged_cache_has_the_tokens_of_the_static_one(saved):
    """Prompts around the end of a page, in chunks; the second call takes the pages that the first gave back."""
    _, folder = saved
    prompts, found = ids_of(250, 256, 3, 400, 400, seed=3), {}
    # Of 256 tokens: 2 + 2 + 1 + 2 + 2.
    for cache, more in (("static", {}), ("paged", {"cache_bytes": 9 * page_bytes(folder)})):
        engine = load(folder, dtype="float32", cache=cache, **more)
        found[cache] = [
            list(zip(*engine.generate(some, NEW, ignores_ends=True, chunk=200), strict=True))
            for some in (prompts, prompts[::-1])
        ]
    for one, other in zip(*found.values(), strict=True):
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(one, other, strict=True)]
        # Kernels of other configs may round differently, and a token that differs changes all that follow.
        assert min(same) >= NEW // 8, same
    with pytest.raises(InputError, match="the cache has 9 pages of 256 tokens"):
        list(engine.generate(ids_of(*[300] * 5), 1))
    assert list(zip(*engine.generate(prompts, NEW, ignores_ends=True, chunk=200), strict=True)) == found["paged"][0]


def test_a_sequence_that_ends_leaves_the_others_their_tokens(saved):
    _, folder = saved
    prompts = ids_of(70, 5, 300, seed=4)
    for cache in ("static", "paged"):
        engine = load(folder, dtype="float32", cache=cache)
        whole = list(zip(*engine.generate(prompts, NEW, ignores_ends=True), strict=True))
        over = whole[0][9]
        engine.architecture = dataclasses.replace(engine.architecture, ends=frozenset({over}))
        found = list(zip(*engine.generate(prompts, NEW), strict=True))
        for tokens, all_of_them in zip(found, whole, strict=True):
            kept = all_of_them.index(over) + 1 if over in all_of_them else NEW
            assert list(tokens) == [*all_of_them[:kept], *[None] * (len(tokens) - kept)][: len(tokens)]


def test_a_sequence_has_its_tokens_whoever_shares_the_batch(saved):
    _, folder = saved
    engine, prompts = load(folder), ids_of(70, 5, 1, seed=2)
    ways = [Sampling(), Sampling(temperature=1.0, top_k=50, seed=7), Sampling(temperature=0.7, top_p=0.9, seed=8)]
    together = list(zip(*engine.generate(prompts, NEW, ways, ignores_ends=True), strict=True))
    for _ in range(2):
        again = list(zip(*engine.generate(prompts, NEW, ways, ignores_ends=True), strict=True))
        assert again == together
    alone = [
        [token for (token,) in engine.generate([one], NEW, way, ignores_ends=True)]
        for one, way in zip(prompts, ways, strict=True)
    ]
    same = [sum(a == b for a, b in zip(one, other, strict=True)) for one, other in zip(together, alone, strict=True)]
    # Kernels of other numbers of rows may round differently, and a token that differs changes all that follow.
    assert min(same) >= NEW // 8, same
