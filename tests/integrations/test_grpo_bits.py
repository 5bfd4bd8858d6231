"""In the invariant mode TRL's GRPO computes the log-probabilities of its sampler: 0 differing bits, not a tolerance."""

import pytest
import torch
from grpo_training import saved, train

import tilekern
from tilekern.integrations import trl as door
from tilekern.runtime import dispatch

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
HERE = {"use_cpu": True}


@pytest.fixture
def invariant(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    door.register()
    tilekern.apply(invariant=True)
    yield
    tilekern.reset()
    door.unregister()
    door._served.clear()
    door._left.clear()
    dispatch.forget()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "autocast"])
def test_the_first_update_has_the_sampler_s_bits_and_all_repeat(invariant, dtype, tmp_path):
    """Prompts have padding on the left; float32 weights train in an autocast region, which is TRL's default."""
    from transformers import Qwen3Config

    folder, autocast = saved(tmp_path, Qwen3Config(**SIZES), dtype), dtype == torch.float32
    before = tilekern.stats()["matmul"]["fallbacks"]
    first, again = (train(folder, 2, bf16=autocast, **HERE) for _ in range(2))
    assert first.differing[0] == {"old": 0, "ref": 0, "sampler": 0}
    assert min(first.tokens) > 0
    assert min(first.differing[1].values()) > 0, "the second update is of other weights"
    assert first.losses == again.losses
    assert all(map(torch.equal, first.parameters, again.parameters))
    assert not dispatch.varying()
    assert not door.calls()["left"]
    assert tilekern.stats()["matmul"]["fallbacks"] == before
