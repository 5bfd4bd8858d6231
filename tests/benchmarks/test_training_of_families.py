"""The families' training benchmark: tiny models of each family on the CPU, and the models that are measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from benchmark_samples import Standing

import tilekern
from benchmarks import families, train, trainers
from benchmarks.families import FAMILIES
from benchmarks.models import layers_of, make_model
from benchmarks.training import Job, begin, prepare, run
from tilekern.tuning.plan.configs import config_named
from tilekern.tuning.plan.presets import PRESETS

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160,
    "num_hidden_layers": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@pytest.fixture(autouse=True)
def as_it_was():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    tilekern.reset()


def tiny(family, folder):
    """The family with its model's config.json in small."""
    config = dict(PRESETS[family.model])
    text = config.get("text_config", config)
    text = text | SIZES | {name: size for name, size in ({"head_dim": 16} | EXPERTS).items() if name in text}
    if "sliding_window" in text:
        text["sliding_window"] = text["sliding_window"] and 8
    if "text_config" in config:
        text["rope_parameters"] = MROPE
        vision = {"model_type": "qwen2_5_vl", "depth": 3, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
        config |= {"text_config": text, "vision_config": vision}
    else:
        config = text
    (folder / family.model).mkdir()
    path = folder / family.model / "config.json"
    path.write_text(json.dumps(config))
    return dataclasses.replace(family, model=str(path), tokens=32, sequence=family.sequence and 16)


def loss_of(family, provider):
    job = Job(provider, family.model, family.layers, (family.tokens,), (1,), 1, "cpu", sequence=family.sequence)
    prepare(job)
    lines = {line["kind"]: line for line in run(job)}
    return lines["length"]["loss"], lines["begun"]["patched"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.share(4)
def test_each_family_has_the_same_loss_by_tilekern_as_unpatched(name, tmp_path):
    family = tiny(FAMILIES[name], tmp_path)
    unpatched = next(one for one in family.providers if one.startswith("hf-"))
    wanted, _ = loss_of(family, unpatched)
    found, patched = loss_of(family, "tilekern")
    assert found == pytest.approx(wanted, rel=0.01)
    assert "fused_linear_cross_entropy" in patched


def in_place(job):
    """Yield what the job's process would print, but run the job in this process."""
    prepare(job)
    yield from run(job)
    tilekern.reset()


@pytest.mark.slow
def test_all_models_go_into_one_file_by_those_of_their_providers_that_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_start", lambda job: Standing(job, in_place))
    chosen = [tiny(FAMILIES[name], tmp_path) for name in ("gemma-2-9b", "gpt2")]
    said, kept = [], []
    named = ["hf-eager", "hf-flash", "tilekern"]
    results = families.measure(chosen, named, 2, lambda *now: kept.append(now), said.append, device="cpu")
    assert results.benchmark == "train_families"
    assert results.cases() == ["gemma-2-9b 32 tokens, 2 layers", "gpt2 2 x 16 tokens"]
    assert len(said) == len(kept) == 3
    of_gemma, of_gpt2 = (
        {row.provider.split(" ")[0] for row in results.rows if row.case == case} for case in results.cases()
    )
    assert (of_gemma, of_gpt2) == ({"tilekern", "hf-eager"}, {"tilekern"})
    assert results.row("gpt2 2 x 16 tokens", "tilekern", "first_step_lag_s") is not None
    assert "hf-flash left out: flash-attn is not installed" in results.run["notes"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_model_has_the_published_widths_and_few_layers(name):
    family, config = FAMILIES[name], config_named(name)[1]
    model = make_model(config, family.layers, device="meta", attention="eager")
    text = config.get_text_config()
    assert len(layers_of(model)) == (family.layers or text.num_hidden_layers)
    assert model.get_input_embeddings().weight.shape == (text.vocab_size, text.hidden_size)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == text.tie_word_embeddings
    assert config_named(name)[1].get_text_config().num_hidden_layers == text.num_hidden_layers, (
        "the preset is as it was"
    )


def test_layers_are_compiled_one_by_one(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__))
    for name in ("llama-3-8b", "gpt2"):
        family = tiny(FAMILIES[name], tmp_path)
        begin(Job("torch.compile-layers", family.model, 2, (16,), (1,), device="cpu"))
    assert compiled == ["LlamaDecoderLayer"] * 2 + ["GPT2Block"] * 2


def test_every_provider_of_a_family_is_known_and_tilekern_is_the_first():
    for family in FAMILIES.values():
        assert family.providers[0] == "tilekern"
        assert set(family.providers) <= set(trainers.TRAINERS)
