"""The names of ``attn_implementation`` that transformers knows after ``import tilekern`` alone."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from environments import environment
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen3Config

from tilekern.integrations import names
from tilekern.patch import attention
from tilekern.runtime.dispatch import counters
from tilekern.runtime.switches import ATTENTIONS

SIZES = {
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
    "vocab_size": 31, "num_hidden_layers": 1,
}  # fmt: skip
ALONE = f"""
import sys
import tilekern
assert "torch" not in sys.modules
from transformers import AutoModelForCausalLM, Qwen3Config
model = AutoModelForCausalLM.from_config(Qwen3Config(**{SIZES}), attn_implementation="tilekern")
assert "tilekern.patch.attention" not in sys.modules, "its code comes with its first call"
import torch
assert model(input_ids=torch.arange(6)[None]).logits.isfinite().all()
print(tilekern.stats()["attention_forward"]["launches"], tilekern.get_patched_ops())
"""
IDS = torch.arange(6).view(1, 6)


@pytest.fixture
def by_name(monkeypatch):
    """The names as ``import tilekern`` leaves them, with no code behind them yet."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in ATTENTIONS:
            interface._global_mapping.pop(name, None)
    names.register_later()
    yield
    attention.register()


def made(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), attn_implementation=name)


@pytest.mark.slow
@pytest.mark.nightly
def test_after_import_tilekern_alone_a_model_can_be_made(tmp_path):
    env = environment(TILEKERN_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "1 {}\n"), done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.share(4)
def test_what_is_behind_a_name_is_called_and_compiled_in_one_graph(name, is_compiled):
    torch._dynamo.reset()
    model, before = made(name), counters("attention_forward").launches
    wanted = made("sdpa")(input_ids=IDS).logits
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    torch.testing.assert_close(run(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert counters("attention_forward").launches == before + 1


def test_a_transformers_without_these_doors_is_imported_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(ImportError, match="AttentionInterface"):
        attention.register()
    names.register_later()
