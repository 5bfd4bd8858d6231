"""Presets against the published configs, configs of any model, and the plan."""

import json
from pathlib import Path

import pytest

from tilekern.errors import InputError
from tilekern.targets import resolve
from tuning.models import PRESETS, resolve_model, shape_of_config
from tuning.plan import plan

# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, vocab_size of
# the config.json that Qwen or Meta publishes with each model.
PUBLISHED = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128, 151936),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128, 151936),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128256),
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


def test_the_presets_are_the_published_models():
    found = {
        name: (s.hidden, s.intermediate, s.layers, s.heads, s.kv_heads, s.head_dim, s.vocabulary)
        for name, s in PRESETS.items()
    }
    assert found == PUBLISHED
    assert all(shape.qk_norm == (shape.model_type == "qwen3") for shape in PRESETS.values())


def test_a_preset_equals_the_shape_that_transformers_config_gives(tmp_path: Path):
    from transformers import Qwen3Config

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = PUBLISHED["qwen3-8b"]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
    )
    config.save_pretrained(tmp_path)
    shape = resolve_model(str(tmp_path))
    preset = PRESETS["qwen3-8b"]
    assert {**vars(shape), "name": ""} == {**vars(preset), "name": ""}


def test_head_dim_follows_from_the_hidden_size_and_text_configs_are_found():
    assert shape_of_config(LLAMA, "llama").head_dim == 128
    assert shape_of_config({"text_config": LLAMA}, "multimodal") == shape_of_config(LLAMA, "multimodal")
    assert not shape_of_config(LLAMA, "llama").qk_norm


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": -4}, "hidden_size is -4"),
        ({"intermediate_size": "big"}, "intermediate_size is 'big'"),
        ({"num_key_value_heads": 5}, "no multiple of num_key_value_heads 5"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
    ],
)
def test_a_config_that_no_model_can_have_is_named(change, words):
    with pytest.raises(InputError, match=words):
        shape_of_config({**LLAMA, **change}, "config")


def test_a_file_that_is_no_json_object(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps([1]))
    with pytest.raises(InputError, match="holds no JSON object"):
        resolve_model(str(path))


def test_the_plan_holds_each_problem_once_at_its_bucket():
    target = resolve("B200")
    found = plan(PRESETS["qwen3-8b"], [2000, 2048], ["bfloat16"], ["rms_norm", "swiglu", "rope"], target)
    assert len(found) == len(set(found))
    kernels = [kernel for kernel, _ in found]
    assert set(kernels) == {
        "rms_norm_forward",
        "rms_norm_backward",
        "column_sum",
        "swiglu_forward",
        "swiglu_backward",
        "swiglu_backward_remake",
        "rope",
    }
    norms = [p for kernel, p in found if kernel == "rms_norm_forward"]
    assert {(p["rows"], p["columns"]) for p in norms} == {(2048, 4096), (65536, 128), (16384, 128)}


@pytest.mark.parametrize(
    ("tokens", "dtypes", "ops", "words"),
    [
        ([0], ["bfloat16"], ["rope"], "from 1 to"),
        ([1 << 40], ["bfloat16"], ["rope"], "from 1 to"),
        ([1], ["int8"], ["rope"], "unknown dtype 'int8'"),
        ([1], ["bfloat16"], ["conv"], "unknown op 'conv'"),
    ],
)
def test_a_plan_of_something_unknown(tokens, dtypes, ops, words):
    with pytest.raises(InputError, match=words):
        plan(PRESETS["qwen3-0.6b"], tokens, dtypes, ops, resolve("B200"))
