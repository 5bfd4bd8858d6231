"""A model that several GPUs share beside the same model on one: logits, tokens, memory, and what is refused."""

import gc
import json
import re
import threading

import pytest
import torch
from emulated import read, tensor_of
from safetensors.torch import load_file
from small_models import MODELS, OF_EXPERTS, OF_GPT2, OF_LLAMA, draw_weights, ids_of
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

from tilekern.errors import CannotRun, DriverError, ExtraMissing, InputError
from tilekern.inference import Sampling, load
from tilekern.inference.launches import of_gpu
from tilekern.runtime import driver, nccl

# The first vocabulary has rows of 16 bytes on each GPU, the other has not.
SHARED, WHOLE = {"vocab_size": 112}, {"vocab_size": 97}
GROUPED = OF_LLAMA | {"hidden_size": 32, "intermediate_size": 48}
SMALL = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, OF_GPT2 | WHOLE | {"n_embd": 32, "n_head": 2}),
    "gpt2, its own head": (
        GPT2LMHeadModel, GPT2Config, OF_GPT2 | SHARED | {"n_embd": 32, "n_head": 2, "tie_word_embeddings": False},
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED | SHARED | {"attention_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED | SHARED | {"tie_word_embeddings": True}),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, GROUPED | OF_EXPERTS | WHOLE),
}  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def folder(request, tmp_path_factory):
    kind, config, sizes = SMALL[request.param]
    torch.manual_seed(5)
    model = kind(config(**sizes)).eval()
    draw_weights(model, 0.25)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint of one layer, for four GPUs too."""
    torch.manual_seed(5)
    sizes = GROUPED | SHARED | {"num_hidden_layers": 1, "num_key_value_heads": 4, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    draw_weights(model, 0.25)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def tokens_of(engine, prompts, new, ways=None):
    steps = engine.generate(prompts, new, ways, ignores_ends=True, chunk=4)
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def test_logits_and_tokens_are_those_of_one_gpu(linked, folder):
    """Of few rows and of many, of one sequence and several, with prompts in chunks, likeliest tokens and draws."""
    one, two = (load(folder, dtype="float32", context=80, gpus=count) for count in (1, 2))
    assert two.gpus == (0, 1)
    for ids in (ids_of(7), ids_of(35, 35)):
        wanted, found = read(one.forward(ids)).double(), read(two.forward(ids)).double()
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    prompts, ways = ids_of(6, 3, 6, seed=1), [Sampling(), Sampling(temperature=1.0, seed=3), Sampling()]
    assert tokens_of(two, prompts, 5, ways) == tokens_of(one, prompts, 5, ways)
    assert tokens_of(two, prompts[:1], 5) == tokens_of(one, prompts[:1], 5)
    for x in (two._generation.choice.ids, two.forward(ids_of(7))):
        assert torch.equal(tensor_of(of_gpu(x, 0)), tensor_of(of_gpu(x, 1)))
