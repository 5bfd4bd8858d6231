"""The engine beside transformers, by the interpreter: logits, greedy tokens, prompts in chunks, batches, sampling."""

import json
import shutil

import pytest
import torch
from conftest import read
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tilekern.inference import load

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "eos_token_id": 3, "bos_token_id": 1}
OF_LLAMA = SMALL | {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**SMALL, n_embd=48, n_layer=2, n_head=3, n_positions=64)),
    "llama": (LlamaForCausalLM, LlamaConfig(**OF_LLAMA, rope_parameters={
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**OF_LLAMA, tie_word_embeddings=True)),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **OF_LLAMA, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True)),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A model with large weights, so that its tokens differ, and the folder of its checkpoint."""
    kind, config = MODELS[request.param]
    torch.manual_seed(5)
    model = kind(config).eval()
    if request.param == "experts":
        model.set_experts_implementation("eager")  # the default has no float64
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.25) if weight.dim() > 1 else weight.normal_(1, 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def ids_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def test_logits_of_whole_sequences_are_those_of_transformers(gpu, saved):
    model, folder = saved
    ids = ids_of(11, 11)
    found = read(load(folder, dtype="float32").forward(ids)).double()
    with torch.no_grad():
        wanted = model.double()(input_ids=torch.tensor(ids), use_cache=False).logits.flatten(0, 1)
        model.float()
    assert (found - wanted).norm() < 2e-3 * wanted.norm()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("chunk", [4, 2048])
def test_greedy_tokens_are_those_of_transformers(gpu, saved, chunk):
    model, folder = saved
    engine, (prompt,) = load(folder, dtype="float32"), ids_of(10, seed=1)
    tokens = [token for (token,) in engine.generate([prompt], 6, ignores_ends=True, chunk=chunk)]
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(torch.tensor([prompt]), **asked)
    assert tokens == wanted[0, 10:].tolist()


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
