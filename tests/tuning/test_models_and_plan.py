"""Presets against the published configs, tensor-parallel ranks, and the plan."""

import json
from pathlib import Path

import pytest

from tilekern.errors import InputError
from tilekern.targets import resolve
from tuning.families import Layers, Model
from tuning.models import PRESETS, find_model, of_shape, resolve_model, shape_of_config, sharded, sharded_model
from tuning.plan import known_ops, plan, steps

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


def test_a_rank_has_its_share_of_heads_columns_and_vocabulary():
    """Qwen3-8B: 32 heads, 8 key-value heads, 12288 columns, 151936 tokens."""
    shape = PRESETS["qwen3-8b"]
    assert sharded(shape, 1) == shape
    four = sharded(shape, 4)
    assert (four.heads, four.kv_heads, four.intermediate, four.vocabulary) == (8, 2, 3072, 37984)
    assert (four.hidden, four.head_dim, four.layers, four.qk_norm) == (4096, 128, 36, True)
    sixteen = sharded(shape, 16)
    assert (sixteen.heads, sixteen.kv_heads) == (2, 1)


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (3, "--tp 3: qwen3-8b has 8 key-value heads, which 3 ranks cannot share evenly"),
        (64, "qwen3-8b has 32 heads, which 64 ranks"),
        (0, "--tp 0: the tensor-parallel degree is a whole number from 1 on"),
    ],
)
def test_ranks_that_cannot_share_a_model(tp, words):
    with pytest.raises(InputError, match=words):
        sharded_model(find_model("qwen3-8b"), tp)
    odd = {**LLAMA, "vocab_size": 50257}
    with pytest.raises(InputError, match="50257 tokens in the vocabulary, which 2 ranks"):
        sharded(shape_of_config(odd, "odd"), 2)


def test_a_rank_s_plan_holds_its_share_and_the_loss_of_gathered_logits():
    target, model = resolve("B200"), find_model("qwen3-8b")
    found = plan(sharded_model(model, 4), [2048], ["bfloat16"], known_ops(), target)
    by_kernel = {kernel: [problem for name, problem in found if name == kernel] for kernel, _ in found}
    assert {p["columns"] for p in by_kernel["swiglu_forward"]} == {3072}
    assert {(p["heads"], p["kv_heads"]) for p in by_kernel["attention_forward"]} == {(8, 2)}
    assert {p["columns"] for p in by_kernel["add_rms_norm_forward"]} == {4096}
    assert {p["vocabulary"] for p in by_kernel["cross_entropy_forward"]} == {37984, 151936}
    assert {p["vocabulary"] for p in by_kernel["linear_cross_entropy"]} == {37984}


def test_a_step_of_several_sequences_has_the_same_tokens_in_a_batch():
    target, shape = resolve("B200"), PRESETS["qwen3-8b"]
    ops = ["attention", "rope", "qk_norm_rope", "swiglu", "cross_entropy"]
    for kernel, problem in plan(shape, [8192], ["bfloat16"], ops, target, [2048]):
        if "batch" in problem:
            assert (problem["batch"], problem.get("tokens", problem.get("queries"))) == (4, 2048), kernel
        elif "rows" in problem and kernel != "column_sum":
            assert problem["rows"] == 8192, kernel
    alone = plan(shape, [8192], ["bfloat16"], ops, target)
    assert alone == plan(shape, [8192], ["bfloat16"], ops, target, [8192])


def test_a_window_is_judged_by_the_sequence_and_not_by_the_step():
    shape = shape_of_config({**LLAMA, "sliding_window": 4096}, "windowed")
    for sequence, kinds in ((8192, {True, False}), (4096, {False})):
        found = plan(shape, [8192], ["bfloat16"], ["attention"], resolve("B200"), [sequence])
        assert {problem["windowed"] for kernel, problem in found if kernel == "attention_forward"} == kinds


@pytest.mark.parametrize(
    ("tokens", "sequences", "found"),
    [
        ([2048, 8192], [], [(2048, 2048), (8192, 8192)]),
        ([2048, 8192], [2048, 4096], [(2048, 2048), (8192, 2048), (8192, 4096)]),
    ],
)
def test_steps_are_made_of_whole_sequences(tokens, sequences, found):
    assert steps(tokens, sequences) == found


@pytest.mark.parametrize(
    ("tokens", "sequences", "words"),
    [
        ([2048, 8192], [4096], "--tokens 2048: no step of --tokens 2048,8192 is made of whole sequences"),
        ([4096], [4096, 3000], "--sequence 3000: no step"),
        ([4096], [0], "--sequence 0: a token count is from 1 to"),
    ],
)
def test_steps_and_sequences_that_do_not_go_together(tokens, sequences, words):
    with pytest.raises(InputError, match=words):
        steps(tokens, sequences)


def test_layers_of_experts_have_a_row_for_each_expert_of_a_token():
    shape = PRESETS["llama-3-8b"]
    experts = Layers(shape, only=frozenset({"swiglu"}), rows_per_token=8)
    dense = Layers(shape, without=frozenset({"swiglu"}))
    found = plan(
        Model("moe", (dense, experts)), [2048], ["bfloat16"], ["swiglu", "fused_add_rms_norm"], resolve("B200")
    )
    rows = {kernel: problem["rows"] for kernel, problem in found}
    assert rows["swiglu_forward"] == 16384
    assert rows["add_rms_norm_forward"] == 2048


def test_a_plan_of_a_model_is_that_of_its_shape_where_all_layers_are_alike():
    target, shape = resolve("H200"), PRESETS["qwen3-4b"]
    arguments = ([2048], ["bfloat16", "float16"], known_ops(), target)
    found = plan(of_shape(shape), *arguments)
    assert found == plan(shape, *arguments)
    assert {problem["dtype"] for _, problem in found} == {"bfloat16", "float16"}
