"""A row of several sequences, told by ``position_ids`` alone, in every family that takes attention "tilekern"."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from models_page import PAGE
from packaging.version import Version
from tiny_families import EXPERTS, LATENT, SIZES, make
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern
from tilekern.errors import InputError, TilekernWarning
from tilekern.patch import masking, registry
from tilekern.patch.families import FAMILIES

MODELS = Path(transformers.__file__).parent / "models"
NEWEST = Version(transformers.__version__) >= Version("5.24")
# They have a class for each attention, compute it by themselves, or have none.
WITHOUT = {"bloom", "falcon", "falcon_mamba", "gpt_neo", "mamba", "mpt", "xglm", *([] if NEWEST else ["gptj"])}
REFUSED = {"deepseek_v32", "glm_moe_dsa"}
# Some of their layers are no attention, and run over a row as one sequence.
RECURRENT = {
    "bailing_hybrid", "bamba", "falcon_h1", "jamba", "kimi_linear", "lara_mini", "lfm2_moe", "lfm3", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "zaya",
}  # fmt: skip
# One of each way in which positions reach a mask, or do not; the others are slow together.
QUICK = {"afmoe", "gemma3", "gpt_bigcode", "gpt_oss", "granitemoehybrid", "llama4", "opt", "qwen2_5_vl", "qwen2_moe"}
ROW = torch.tensor([[3, 5, 7, 9, 11, 13, 15]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
TOLD = ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ROW)})
DEEPSEEK_V4 = {
    "hidden_size": 32, "moe_intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
    "q_lora_rank": 12, "num_experts_per_tok": 2, "n_routed_experts": 4, "sliding_window": 4, "o_groups": 2,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "o_lora_rank": 8,
    "mlp_layer_types": ["hash_moe", "hash_moe"], "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
    "num_nextn_predict_layers": 0, "qk_rope_head_dim": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def known():
    tilekern.apply(**dict.fromkeys(registry.known_ops(), False))


def slow_but_for(quick, name):
    return pytest.param(name, marks=() if name in quick else pytest.mark.slow)


def served(family):
    model = make(family)[0].eval()
    model.set_attn_implementation("tilekern")
    return model


@pytest.mark.parametrize(
    "family",
    [slow_but_for(QUICK, name) for name in sorted(FAMILIES.keys() - WITHOUT - REFUSED - RECURRENT)],
)
@pytest.mark.share(10)
@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_packed_sequences_are_as_each_by_itself(family):
    model = served(family)
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=part, use_cache=False).logits for part in ROW.split((3, 4), 1)], 1)
        for told in TOLD:
            found = model(input_ids=ROW, position_ids=PLACES, **told).logits
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4, told


@pytest.mark.parametrize("family", [slow_but_for({"lfm2_moe"}, name) for name in sorted(RECURRENT)])
def test_layers_that_mix_sequences_are_said_once(family):
    model = served(family)
    said = f"{model.config.model_type}: position_ids begin again within a row, and only its attention keeps"
    with warnings.catch_warnings(record=True) as warned, torch.no_grad():
        warnings.simplefilter("always")
        for told in TOLD:
            model(input_ids=ROW, position_ids=PLACES, **told)
    assert len([x for x in warned if x.category is TilekernWarning and said in str(x.message)]) == 1


@pytest.mark.skipif(not NEWEST, reason="DeepSeek V4 is in transformers since 5.24")
def test_a_model_that_adds_keys_by_itself_is_refused():
    config = AutoConfig.for_model("deepseek_v4", **SIZES | DEEPSEEK_V4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tilekern")
    line = 'attn_implementation="tilekern": DeepseekV4Model adds compressed keys, and a bias for them, .*; use "eager"'
    for ids in (ROW, ROW[:, :1]):
        with pytest.raises(InputError, match=line):
            model(input_ids=ids)
    with pytest.raises(InputError, match=line):
        tilekern.apply_to_model(model, forms="any")
    model.set_attn_implementation("eager")
    assert not torch.isnan(model(input_ids=ROW).logits).all()


def test_a_model_with_an_indexer_is_refused():
    config = AutoConfig.for_model("deepseek_v32", **SIZES | EXPERTS | LATENT | {"index_topk": 4, "index_head_dim": 8})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tilekern")
    with pytest.raises(InputError, match="of DeepseekV32Attention does not compute what indices asks for"):
        model(input_ids=ROW)
    with pytest.raises(InputError, match="DeepseekV32Model has an indexer choose the keys of each query"):
        tilekern.apply_to_model(model)
    model.set_attn_implementation("eager")
    assert tilekern.apply_to_model(model)


@pytest.mark.skipif(not NEWEST, reason="the page tells of the newest transformers")
def test_the_page_names_the_families_that_are_refused():
    text = PAGE.read_text(encoding="utf-8").partition("## Attention")[2]
    refused = [line for line in text.splitlines() if line.startswith("|") and "refused: " in line]
    named = {name for line in refused for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    patterns = [masking._ADDED_KEYS, *map(masking._hands, masking._ASKED)]
    sources = {path.parent.name: path.read_text(encoding="utf-8") for path in MODELS.glob("*/modeling_*.py")}
    assert named == {name for name, source in sources.items() if any(re.search(x, source) for x in patterns)}
