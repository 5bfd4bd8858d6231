"""A model that is compiled as a whole, and whose graph is broken before its mask is made: told positions count."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

import tilekern
from tilekern.runtime import dispatch

pytestmark = pytest.mark.slow
IDS = torch.randint(0, 97, (1, 21), generator=torch.Generator().manual_seed(1))
PACKED = torch.cat([torch.arange(8), torch.arange(13)])[None]


def loss_of(attention, compiled, **positions):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    return float(model(input_ids=IDS, labels=IDS, **positions).loss.detach())


@pytest.mark.share(2)
@pytest.mark.parametrize(("positions", "launches", "fallbacks"), [({}, 1, 0), ({"position_ids": PACKED}, 0, 1)])
def test_a_broken_graph_asks_the_frames_that_run_as_python(monkeypatch, positions, launches, fallbacks):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    monkeypatch.setattr(dispatch._state, "counters", {})
    make = modeling_qwen3.create_causal_mask

    def behind_a_break(*arguments, **options):
        torch._dynamo.graph_break()
        return make(*arguments, **options)

    wanted = loss_of("sdpa", False, **positions)
    monkeypatch.setattr(modeling_qwen3, "create_causal_mask", behind_a_break)
    tilekern.apply(rms_norm=True, swiglu=False, rope=False, model_type="qwen3")
    try:
        assert loss_of("tilekern", True, **positions) == pytest.approx(wanted, rel=1e-4)
    finally:
        tilekern.reset()
    counted = dispatch.stats()["attention_forward"]
    assert (counted["launches"], counted["fallbacks"]) == (launches, fallbacks)
