"""A model that two GPUs share by NCCL beside the same model on one GPU: logits, greedy tokens, draws, a second load."""

import engine_models
import pytest
import torch
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

from tilekern.errors import CannotRun, ExtraMissing
from tilekern.inference import Sampling, load
from tilekern.inference.launches import of_gpu
from tilekern.runtime import dispatch, nccl

NEW = 48
OF_LLAMA = engine_models.OF_LLAMA | {"vocab_size": 4096}
OF_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
# GPT-2's vocabulary cannot be shared, and the tied head of Qwen3 can.
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=5003, n_embd=256, n_layer=4, n_head=4, n_positions=512)),
    "llama": (LlamaForCausalLM, LlamaConfig(**OF_LLAMA)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**OF_LLAMA, tie_word_embeddings=True)),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**OF_LLAMA, **OF_EXPERTS)),
}
ERRORS = {"float32": 4e-3, "bfloat16": 4e-2, "float16": 8e-3}


def has_nccl():
    try:
        nccl.library()
    except (CannotRun, ExtraMissing):
        return False
    return True


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="there are not two GPUs"),
    pytest.mark.skipif(not has_nccl(), reason="NCCL is not installed"),
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    engine_models.save(*MODELS[request.param], path)
    return path


@pytest.fixture(autouse=True)
def compiled():
    dispatch.set_miss_policy("compile")
    yield
    dispatch.set_miss_policy(None)


def ids_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 4096, (length,), generator=generator).tolist() for length in lengths]


def logits_of(engine, ids):
    logits = engine.forward(ids)
    engine.stream.synchronize()
    return torch.from_dlpack(logits).float().clone()


def tokens_of(engine, prompts, ways=None):
    steps = engine.generate(prompts, NEW, ways, ignores_ends=True, chunk=32)
    return [list(tokens) for tokens in zip(*steps, strict=True)]


@pytest.mark.parametrize("dtype", ERRORS)
def test_logits_are_near_those_of_one_gpu_and_the_same_on_both(folder, dtype):
    """Of more rows than the kernels of few rows take, and of fewer; replayed too."""
    one, two = (load(folder, dtype=dtype, gpus=count) for count in (1, 2))
    for ids in (ids_of(100, 100), ids_of(9)):
        wanted = logits_of(one, ids)
        for _ in range(3):
            found = logits_of(two, ids)
            assert (found - wanted).norm() < ERRORS[dtype] * wanted.norm()
        logits = two.forward(ids)
        two.stream.synchronize()
        first, second = (torch.from_dlpack(of_gpu(logits, at)).cpu() for at in (0, 1))
        assert torch.equal(first, second)


def test_greedy_tokens_are_those_of_one_gpu(folder):
    """Those that differ are nearly as likely."""
    one, two = (load(folder, dtype="float32", gpus=count) for count in (1, 2))
    prompts = ids_of(70, 5, 70, seed=1)
    for wanted, found, prompt in zip(tokens_of(one, prompts), tokens_of(two, prompts), prompts, strict=True):
        same = next((at for at, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]), NEW)
        if same < NEW:
            row = logits_of(one, [prompt + wanted[:same]])[-1]
            assert (row[wanted[same]] - row[found[same]]).abs() < 1e-2 * row.std()
    first, second = (of_gpu(two._generation.choice.ids, at).read() for at in (0, 1))
    assert first == second


def test_a_batch_draws_the_same_again_and_the_gpus_stay_together(folder):
    engine, prompts = load(folder, gpus=[1, 0]), ids_of(70, 5, 1, seed=2)
    ways = [Sampling(), Sampling(temperature=1.0, top_k=50, seed=7), Sampling(temperature=0.7, top_p=0.9, seed=8)]
    together = tokens_of(engine, prompts, ways)
    for _ in range(2):
        assert tokens_of(engine, prompts, ways) == together
    engine.forward(ids_of(30))
    first, second = (of_gpu(engine._generation.choice.ids, at).read() for at in (0, 1))
    assert first == second
    assert tokens_of(engine, prompts, ways) == together


def test_int8_weights_and_a_second_engine_after_the_first(folder):
    (prompt,) = ids_of(40, seed=3)
    for _ in range(2):
        engine = load(folder, weight_dtype="int8", gpus=2)
        wanted = logits_of(load(folder, weight_dtype="int8"), [prompt])
        found = logits_of(engine, [prompt])
        assert (found - wanted).norm() < ERRORS["bfloat16"] * wanted.norm()
        assert len(tokens_of(engine, [prompt])[0]) == NEW
        del engine
