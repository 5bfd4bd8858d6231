"""Plans of models: real configurations of transformers, stepped on meta tensors."""

import copy
import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import tilekern
from tilekern.errors import InputError
from tilekern.kernels.adamw import WIDTHS, flat_shape
from tilekern.ops.adamw import MOST_TOGETHER
from tilekern.ops.linear_layers import linear
from tilekern.patch.stepping import model_of
from tilekern.runtime.recorder import Trace, tracing
from tilekern.spec import bucket
from tilekern.spec.targets import resolve
from tilekern.tuning.plan import models
from tilekern.tuning.plan.configs import config_named, config_of
from tilekern.tuning.plan.models import known_ops, plan_of_model
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.plan.steps import Steps

H200, B200 = resolve("H200"), resolve("B200")
# Parameters of the published weights; Gemma 3's, Qwen3.5's and Llama 4's without those that look at images, and without
# heads that predict several tokens.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-vl-7b": 8_292_166_656,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "llama-4-scout": 107_769_861_120,
    "mistral-7b": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "smollm3-3b": 3_075_098_624,
    "glm-4-9b": 9_400_279_040,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mingpt-nano": 4_958_736,
    "mingpt-tile-small": 6_698_496,
    "mingpt-micro": 13_790_208,
    "mingpt-tile-medium": 14_186_752,
    "mingpt-mini": 22_164_864,
    "mingpt-tile-large": 32_312_320,
}
# The rows of its embeddings are enough for a launch of the optimizer.
SMALL = {
    "model_type": "qwen3", "hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 1 << 16,
}  # fmt: skip
LLAMA = {"model_type": "llama", **{name: value for name, value in SMALL.items() if name != "model_type"}}
BART = SMALL | {"model_type": "bart"}
NOT_PATCHED = (
    "rms_norm, layer_norm, swiglu, mlp, qk_norm_rope, rope, fused_add_rms_norm, fused_linear_cross_entropy have no "
    "patch"
)


@pytest.fixture(autouse=True)
def unpatched():
    yield
    if tilekern.get_patched_ops():
        # A model of another test's may wait to be collected, with its patches.
        gc.collect()
    assert tilekern.get_patched_ops() == {}, "a plan leaves nothing patched"


def planned(model, tokens=(64,), target=H200, **more):
    return plan_of_model(model, Steps(tokens, **more), target)


def by_kernel(plan):
    found = {}
    for kernel, problem in plan.problems:
        found.setdefault(kernel, []).append(problem)
    return found


def sizes(problems, *names):
    return {tuple(problem[name] for name in names) for problem in problems}


def test_the_presets_are_the_published_models():
    models_of = {name: model_of(config_named(name)[1], "bfloat16", None) for name in PRESETS}
    assert {name: model.num_parameters() for name, model in models_of.items()} == PUBLISHED


def test_qwen3_8b_asks_for_what_its_step_launches_and_what_other_winners_would():
    plan = planned("qwen3-8b", [4096])
    assert plan.notes == ()
    counts = Counter(kernel for kernel, _ in plan.problems)
    assert counts.pop("column_sum") > 2, "for the grids of other configs, too"
    assert counts == {
        "rms_norm_forward": 1, "rms_norm_backward": 1, "qk_norm_rope_forward": 1, "qk_norm_rope_backward": 1,
        "fused_add_rms_norm_forward": 1, "fused_add_rms_norm_backward": 1,
        "swiglu_forward": 1, "swiglu_backward_remake": 1,
        "attention_forward": 1, "attention_backward": 1, "attention_delta": 1, "attention_dkdv": 1, "attention_dq": 1,
        "attention_dkdv_kept": 2, "attention_dq_kept": 1, "attention_sums": 1,
        "fused_linear_cross_entropy": 1, "cross_entropy_fused": 1, "matmul": 4, "scale": 2, "adamw": 3,
        "labels": 1,
    }  # fmt: skip
    found = by_kernel(plan)
    assert sizes(found["rms_norm_forward"], "rows", "columns") == {(4096, 4096)}
    assert sizes(found["column_sum"], "columns") == {(4096,), (256,)}
    assert sizes(found["column_sum"], "rows") <= {(256,), (512,), (1024,)}, "one to four blocks on each of 132 SMs"
    assert sizes(found["swiglu_forward"], "rows", "columns") == {(4096, 12288)}
    assert sizes(found["attention_forward"], "queries", "heads", "kv_heads", "head_dim") == {(4096, 32, 8, 128)}
    assert sizes(found["attention_backward"], "deterministic") == {(True,)}
    assert sizes(found["scale"], "rows") == {(4096,), (bucket(151936),)}


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.share(8)
def test_the_optimizer_has_each_size_that_it_launches_for_once_whatever_the_tokens(model):
    """Smaller parameters, nearly all of mingpt's, go together without a kernel; text alone is planned."""
    made = model_of(config_named(model)[1], "bfloat16", None)
    learnt = [x.numel() for name, x in made.named_parameters() if "visual" not in name and "vision" not in name]
    shapes = {flat_shape(elements) for elements in learnt if elements > MOST_TOGETHER}
    found = by_kernel(planned(model, [1, 64])).get("adamw", [])
    assert sizes(found, "rows", "columns") == {(bucket(rows), columns) for rows, columns in shapes}
    assert len(found) == len(set(found))
    assert all(columns in WIDTHS and columns > 1 for _, columns in shapes), "a narrow row has no aligned variant"


def test_sizes_are_at_their_buckets_and_each_problem_is_there_once():
    plan = planned(SMALL, [2000, 2048])
    assert len(plan.problems) == len(set(plan.problems))
    assert sizes(by_kernel(plan)["rms_norm_forward"], "rows", "columns") == {(2048, 96)}


def test_ops_that_are_not_named_are_not_patched():
    found = by_kernel(planned(SMALL, ops=["rope"]))
    assert found.keys() == {"rope"}
    assert sizes(found["rope"], "inverse", "heads", "kv_heads") == {(False, 4, 2), (True, 4, 2)}
    found = by_kernel(planned(SMALL, ops=["rms_norm", "swiglu"]))
    assert found.keys() == {
        "rms_norm_forward", "rms_norm_backward", "column_sum", "swiglu_forward", "swiglu_backward_remake",
    }  # fmt: skip
    assert sizes(found["rms_norm_forward"], "rows", "columns") == {(64, 96), (256, 16), (128, 16)}
    assert by_kernel(planned(SMALL, ops=["adamw"])).keys() == {"adamw"}
    assert {kernel.partition("_")[0] for kernel in by_kernel(planned(SMALL, ops=["attention"]))} == {"attention"}


def test_an_optimizer_can_be_left_out_and_checkpointing_asks_for_the_same():
    whole = planned(SMALL)
    assert set(whole.problems) == set(planned(SMALL, checkpointing=True).problems)
    without = planned(SMALL, optimizer="none")
    assert set(whole.problems) - set(without.problems) == {p for p in whole.problems if p[0] == "adamw"}


def test_experts_are_planned_in_a_dtype_whose_products_torch_does_not_describe():
    """As `cache_tools pack --model` asks for them."""
    found = plan_of_model("gpt-oss-20b", Steps([256], dtype=("float32",), experts=True), H200)
    assert {problem["dtype"] for kernel, problem in found.problems if kernel == "grouped_linear"} == {"float32"}


def test_dtypes_and_attention_implementations_are_all_planned():
    found = by_kernel(
        planned(SMALL, dtype=["bfloat16", "float16"], attention=["tilekern", "tilekern_nondeterministic"])
    )
    assert sizes(found["attention_backward"], "deterministic", "dtype") == {
        (kept, dtype) for kept in (True, False) for dtype in ("bfloat16", "float16")
    }
    assert sizes(found["cross_entropy_forward"], "dtype") == {("float16",)}, "whose loss goes by another way"


def test_autocast_over_float32_is_planned_as_a_trainer_casts():
    found = by_kernel(planned(SMALL, dtype=["float32"], autocast=True, optimizer="none"))
    assert sizes(found["attention_backward"], "dtype") == sizes(found["swiglu_forward"], "dtype") == {("bfloat16",)}
    assert sizes(found["fused_add_rms_norm_backward"], "dtype", "weight_dtype") == {("float32", "float32")}
    for norm in ("rms_norm", "fused_add_rms_norm"):
        names = ("dtype", "weight_dtype", "product_dtype")
        assert sizes(found[f"{norm}_to_forward"], *names) == {("float32", "float32", "bfloat16")}
        # Of evaluation.
        assert sizes(found[f"{norm}_forward"], "dtype") == {("float32",)}
    names = ("dtype", "weight_dtype", "angle_dtype")
    for kernel in ("qk_norm_rope_to_forward", "qk_norm_rope_to_backward", "qk_norm_rope_forward"):
        assert sizes(found[kernel], *names) == {("bfloat16", "float32", "float32")}
    # Of the loss, whose products are cast.
    assert sizes(found["fused_linear_cross_entropy"], "dtype") == {("bfloat16",)}
    with pytest.raises(InputError, match="float32"):
        Steps([64], dtype=["bfloat16"], autocast=True)


def test_norms_around_halves_are_planned_as_a_trainer_casts():
    """Those behind products round to the half type, as transformers' do."""
    found = by_kernel(planned(SMALL | {"model_type": "gemma3_text"}, dtype=["float32"], autocast=True))
    names = ("dtype", "weight_dtype", "product_dtype")
    for norm in ("rms_norm", "fused_add_rms_norm"):
        assert sizes(found[f"{norm}_offset_to_forward"], *names) == {("float32", "float32", "bfloat16")}
    behind, last = ("bfloat16", "float32"), ("float32", "float32")
    for direction in ("forward", "backward"):
        assert sizes(found[f"rms_norm_offset_{direction}"], "dtype", "weight_dtype") == {behind, last}


def test_layers_are_planned_as_one_op():
    """Whose first norm's gradient is a launch with that of the sum before it."""
    launches = Counter()
    for (kernel, _), count in planned(SMALL, optimizer="none").launches.items():
        launches[kernel] += count
    assert launches["fused_add_rms_norm_backward"] == 2 * SMALL["num_hidden_layers"]
    assert launches["rms_norm_backward"] == 1


def test_under_hooks_ops_run_one_by_one():
    usual, found = (by_kernel(planned(SMALL, optimizer="none", hooks=hooks)) for hooks in (False, True))
    assert {"swiglu_backward", "rope"} <= set(found) - set(usual)
    assert not set(usual) - set(found)
    # Of the norms of q and k.
    heads = {("bfloat16", SMALL["head_dim"])}
    assert heads == sizes(found["rms_norm_forward"], "dtype", "columns") - sizes(
        usual["rms_norm_forward"], "dtype", "columns"
    )


def test_a_step_of_several_sequences_has_the_same_tokens_in_a_batch():
    for kernel, problem in planned(SMALL, [8192], sequence=[2048]).problems:
        if "batch" in problem:
            assert (problem["batch"], problem.get("tokens", problem.get("queries"))) == (4, 2048), kernel
        elif kernel in ("swiglu_forward", "rms_norm_forward", "fused_add_rms_norm_backward"):
            assert problem["rows"] == 8192, kernel
    assert planned(SMALL, [8192]).problems == planned(SMALL, [8192], sequence=[8192]).problems


def test_linear_layers_are_planned_where_rows_are_to_have_the_same_bits():
    """The forward of each: q, o, k and v, gate and up, down, and the head, where the loss is not ours."""
    outside, inside = (
        plan_of_model(SMALL, Steps(tokens=(64,), invariant=on, ops=("rms_norm", "swiglu", "qk_norm_rope")), H200)
        for on in (False, True)
    )
    assert "matmul" not in {name for name, _ in outside.problems}
    products = [problem for name, problem in inside.problems if name == "matmul"]
    assert {(p["rows"], p["inner"], p["columns"], p["b_transposed"]) for p in products} == {
        (64, 96, 64, True), (64, 96, 32, True), (64, 64, 96, True), (64, 96, 224, True), (64, 224, 96, True),
        (64, 96, SMALL["vocab_size"], True),
    }  # fmt: skip
    assert torch.nn.functional.linear is not linear


SERVED = ("rms_norm", "swiglu", "qk_norm_rope", "fused_add_rms_norm", "attention")
TRAINS = Steps(tokens=(64,), ops=SERVED)


def decoded(found):
    """What is planned for rows of 3 sequences alone, by the name of the kernel."""
    return {name: dict(problem) for name, problem in found.problems if problem.get("rows", problem.get("batch")) == 4}


@pytest.mark.parametrize("own", [False, True])
def test_generation_is_planned_for_some_sequences_after_a_context(own):
    """Besides the training step: a prompt of one sequence, and a token of three."""
    model = (
        AutoModelForCausalLM.from_config(config_of(SMALL, "small"), attn_implementation="tilekern") if own else SMALL
    )
    with_decode = replace(TRAINS, decode=(3,), context=(100,))
    if own:
        tilekern.apply_to_model(model, fused_linear_cross_entropy=False)
    trained, found = (plan_of_model(model, steps, H200) for steps in (TRAINS, with_decode))
    assert set(trained.problems) < set(found.problems)
    prompts = [p for name, p in found.problems if name == "attention_forward" and p["queries"] == 128]
    assert [(p["batch"], p["keys"]) for p in prompts] == [(1, 128)]
    attended = [p for name, p in found.problems if name == "decode_attention"]
    assert [(p["kv_heads"], p["keys"], p["group"], p["padded"]) for p in attended] == [
        (8, 128, 2, False), (8, 128, 2, True),
    ]  # fmt: skip
    copied = [p for name, p in found.problems if name == "cache_rows"]
    assert [(p["rows"], p["kv_heads"]) for p in copied] == [(4, 2)]
    token = decoded(found)
    assert {"rms_norm_forward", "qk_norm_rope_forward", "fused_add_rms_norm_forward", "skinny_linear"} <= set(token)
    assert token["qk_norm_rope_forward"]["tokens"] == 1


def test_generation_is_planned_where_layers_keep_a_state_and_no_keys():
    config = AutoConfig.for_model("qwen3_next", **FAMILIES["qwen3_next"])
    found = plan_of_model(config, replace(TRAINS, decode=(3,), context=(100,)), H200)
    token = decoded(found)
    assert token["skinny_linear"]["rows"] == token["cache_rows"]["rows"] == 4
    assert "decode_attention" in {name for name, _ in found.problems}


def test_continuous_batching_packs_prompts_and_reads_pages():
    found = plan_of_model(SMALL, replace(TRAINS, decode=(3,), context=(600,), paged=True), H200).problems
    decoded = [p for name, p in found if name == "decode_attention"]
    assert [(p["paged"], p["padded"], p["page_size"], p["keys"], p["kv_heads"]) for p in decoded] == [
        (False, False, 1, 1024, 8), (False, True, 1, 1024, 8), (True, False, 256, 1024, 8),
    ]  # fmt: skip
    prompts = [p for name, p in found if name == "attention_forward" and p["queries"] == 1024]
    assert {p["packed"] for p in prompts} == {False, True}


def test_packed_sequences_stand_in_a_batch_of_one():
    found = by_kernel(planned(SMALL, [8192], sequence=[2048], packed=True))
    assert sizes(found["attention_forward"], "packed", "batch", "queries") == {(True, 4, 2048)}
    assert sizes(found["attention_delta"], "batch", "queries") == {(1, 8192)}
    assert sizes(found["qk_norm_rope_forward"], "batch", "tokens") == {(1, 8192)}


def test_padded_sequences_attend_through_sdpa_which_is_said():
    plan = planned(SMALL, padded=True)
    assert "attention_forward" not in by_kernel(plan)
    assert plan.notes == ("attention_forward: calls of a step run torch's operations, for which nothing is planned",)
    both = planned(SMALL, padded=True, packed=True)
    assert "attention_forward" in by_kernel(both)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama"])
def test_a_llama_is_planned_whole(name):
    plan = planned(name if name in PRESETS else LLAMA)
    assert plan.notes == ()
    assert by_kernel(plan).keys() >= {
        "rms_norm_backward", "swiglu_backward_remake", "rope", "fused_add_rms_norm_backward", "attention_backward",
        "fused_linear_cross_entropy", "adamw",
    }  # fmt: skip
    assert by_kernel(planned(LLAMA, ops=["rope"])).keys() == {"rope"}
    with pytest.raises(InputError, match="a step of llama asks for no kernel of --ops qk_norm_rope"):
        planned(LLAMA, ops=["qk_norm_rope"])


def test_parts_without_a_patch_are_not_planned_and_are_named():
    plan = planned(BART)
    assert {kernel.partition("_")[0] for kernel in by_kernel(plan)} == {"attention", "adamw"}
    assert plan.notes == (f"bart: attention and adamw only; {NOT_PATCHED}",)
    assert planned(BART, ops=["attention"]).notes == ()
    with pytest.raises(InputError, match="asks for no kernel of --ops rope; bart: nothing only; rope has no patch"):
        planned(BART, ops=["rope"])


@pytest.mark.parametrize(
    ("family", "served", "lacking"),
    [
        ("cohere", "layer_norm and swiglu and rope", "fused_add_rms_norm has no patch"),
        ("nemotron", "layer_norm and mlp and rope", "fused_add_rms_norm has no patch"),
        ("olmo", "layer_norm and swiglu and rope", "fused_add_rms_norm has no patch"),
        ("gpt2", "layer_norm and mlp", "qk_norm_rope, rope, fused_add_rms_norm have no patch"),
        ("opt", "layer_norm and mlp", "qk_norm_rope, rope, fused_add_rms_norm have no patch"),
    ],
)
def test_the_ops_that_are_named_are_those_that_a_model_runs(family, served, lacking):
    """Kernels that several ops launch (``column_sum``), or that are called otherwise (``llama4_rope``), name none."""
    attends = "" if family == "gpt2" else "attention and "
    plan = planned(AutoConfig.for_model(family, num_hidden_layers=1, num_key_value_heads=8))
    said = f"{family}: {served} and fused_linear_cross_entropy and {attends}adamw only; {lacking}"
    assert plan.notes[0] == said


def test_the_text_of_a_model_that_sees_is_planned_and_the_rest_named():
    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 256}
    plan = planned(AutoConfig.for_model("qwen2_5_vl", text_config=text), ops=["rms_norm"])
    assert [note for note in plan.notes if "alone" in note] == [
        "qwen2_5_vl: its text alone is planned, not vision; for these run a step of your own inside "
        'tilekern.trace("plan.json", real=True), and give that file as --plan'
    ]
    assert {dict(problem)["columns"] for problem in by_kernel(plan)["rms_norm_forward"]} == {256}


def test_a_part_of_a_plan_names_its_missing_records():
    plan = planned(AutoConfig.for_model("cohere", num_hidden_layers=1), ops=["rope", "fused_add_rms_norm"])
    assert plan.notes == ("cohere: rope only; fused_add_rms_norm has no patch",)
    assert by_kernel(plan).keys() == {"llama4_rope"}


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gemma2", {
            "rms_norm_offset_forward", "rms_norm_offset_backward", "fused_rms_norm_add_forward",
            "fused_rms_norm_add_rms_norm_forward", "fused_rms_norm_add_rms_norm_backward",
        }),
        ("olmo2", {
            "rms_norm_offset_forward", "rms_norm_offset_backward", "fused_rms_norm_add_forward",
        }),
    ],
)  # fmt: skip
def test_norms_and_sums_that_are_one_kernel_are_planned(family, kernels):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    found = by_kernel(planned(config))
    assert {kernel for kernel in found if "norm" in kernel} == kernels
    assert sizes(found["fused_rms_norm_add_forward"], "rows", "columns") == {(64, config.hidden_size)}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2}, "BloomModel computes its attention by"),
        (
            {
                "model_type": "gpt_neo",
                "hidden_size": 64,
                "num_heads": 4,
                "num_layers": 2,
                "vocab_size": 1 << 17,
                "attention_types": [[["global", "local"], 1]],
            },
            "its classes take no attn_implementation='tilekern'",
        ),
        (
            {
                "model_type": "t5",
                "d_model": 64,
                "d_kv": 16,
                "num_heads": 4,
                "num_layers": 2,
                "vocab_size": 1 << 17,
                "decoder_start_token_id": 0,
            },
            "attention_forward: calls of a step run torch's operations",
        ),
    ],
)
def test_attention_that_is_not_served_is_left_out_with_the_reason(config, reason):
    plan = planned(config)
    assert any(reason in note for note in plan.notes), plan.notes
    assert "adamw" in by_kernel(plan)
    assert not any(kernel.startswith("attention") for kernel in by_kernel(plan))


# Families whose layers or heads differ, each with what makes it small.
FAMILIES = {
    "deepseek_v3": {
        "num_hidden_layers": 5, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2,
    },
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 32},
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 32},
    "gpt2": {"n_layer": 3},
    "gpt_oss": {"num_hidden_layers": 4, "sliding_window": 32, "num_local_experts": 4},
    "mixtral": {"num_hidden_layers": 3},
    "olmo2": {"num_hidden_layers": 3},
    "qwen2_moe": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "num_experts": 4},
    "qwen3": {"num_hidden_layers": 4},
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 16},
    "qwen3_next": {"num_hidden_layers": 4, "num_experts": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.share(4)
def test_one_layer_of_each_kind_asks_for_what_all_of_them_do(family, monkeypatch):
    check_one_of_each_kind(AutoConfig.for_model(family, **FAMILIES[family]), monkeypatch)


@pytest.mark.parametrize(
    "steps",
    [{"fp8": "rowwise"}, {"fp8": "blockwise"}, {"fp8": "rowwise", "checkpointing": True}, {"checkpointing": True}],
    ids=str,
)
def test_so_it_does_in_a_backward_that_asks_for_kernels_of_its_own(steps, monkeypatch):
    """A backward by 8-bit floats looks its kernels up itself, and one of checkpoints computes a layer again."""
    check_one_of_each_kind(AutoConfig.for_model("qwen3", **FAMILIES["qwen3"]), monkeypatch, **steps)


@pytest.mark.parametrize(
    ("steps", "kernels"),
    [({"fp8": "rowwise"}, {"fp8_matmul"}), ({"fp8": "blockwise"}, set()), ({"decode": (1,)}, {"skinny_linear"})],
    ids=str,
)
def test_kernels_that_run_only_where_they_were_measured_are_said(steps, kernels):
    says = ": where no record was measured, torch's own operations run, and nothing is compiled"
    notes = planned(AutoConfig.for_model("qwen3", **FAMILIES["qwen3"]), **steps).notes
    names = {name for note in notes if note.endswith(says) for name in note.removesuffix(says).split(", ")}
    assert kernels <= names
    assert bool(kernels) == bool(names)


def check_one_of_each_kind(config, monkeypatch, **steps):
    thinned = planned(config, **steps)
    whole = []
    monkeypatch.setattr(models, "thin_out", lambda *given: whole.append(given))
    found = planned(config, **steps)
    assert found == thinned
    assert found.launches == thinned.launches
    assert whole


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gemma2", {"windowed": {True, False}, "capped": {True}, "sinks": {False}}),
        ("gpt_oss", {"windowed": {True, False}, "capped": {False}, "sinks": {True}}),
        ("qwen3_moe", {"windowed": {False}, "capped": {False}, "sinks": {False}}),
    ],
)
def test_each_kind_of_attention_that_a_model_has_is_planned(family, flags):
    found = by_kernel(planned(AutoConfig.for_model(family, **FAMILIES[family])))["attention_forward"]
    for flag, values in flags.items():
        assert {problem[flag] for problem in found} == values, flag


def test_a_window_is_judged_by_the_sequence_and_not_by_the_step():
    config = AutoConfig.for_model(
        "mistral", **{k: v for k, v in LLAMA.items() if k != "model_type"}, sliding_window=4096
    )
    for sequence, kinds in ((8192, {True}), (4096, {False})):
        found = by_kernel(planned(config, [8192], sequence=[sequence]))["attention_forward"]
        assert {problem["windowed"] for problem in found} == kinds


def test_heads_of_two_sizes_take_torchs_attention_and_one_latent_size_is_planned():
    """DeepSeek-V3 has 192 channels in q and k and 128 in v, GLM-4.7-Flash 256 in each."""
    plan = planned(AutoConfig.for_model("deepseek_v3", **FAMILIES["deepseek_v3"]))
    assert "attention_forward" not in by_kernel(plan)
    assert any(note.startswith("attention_forward: calls of a step run torch's") for note in plan.notes)
    latent = AutoConfig.for_model("glm4_moe_lite", num_hidden_layers=3, n_routed_experts=4)
    channels = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    assert channels == latent.v_head_dim
    assert sizes(by_kernel(planned(latent))["attention_forward"], "head_dim") == {(channels,)}


def test_the_decoder_of_a_multimodal_model_is_planned():
    whole = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model"}}
    assert planned(whole).problems == planned(LLAMA).problems


def test_an_mlp_without_a_gate_is_planned_with_its_sums():
    plan = planned(AutoConfig.for_model("gpt2", **FAMILIES["gpt2"]))
    found = by_kernel(plan)
    for kernel in ("activation_forward", "activation_backward_remake", "column_sum"):
        assert (3072,) in sizes(found[kernel], "columns"), kernel
    assert not [note for note in plan.notes if "swiglu" in note]


def test_a_step_that_reads_values_is_refused_with_what_to_do():
    config = AutoConfig.for_model("jetmoe", hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16,
                                  intermediate_size=64, vocab_size=128)  # fmt: skip
    words = r"jetmoe: a training step cannot be traced on meta tensors: .*; run your own inside tilekern.trace"
    with pytest.raises(InputError, match=words):
        planned(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": ["qwen3"]}, "model_type is missing"),
        ({"model_type": "qwen99"}, "does not know the model type 'qwen99'"),
        ({"hidden_size": -64}, "hidden_size is -64; expected a whole number from 1 to 16777216"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; expected"),
        ({"num_hidden_layers": 1 << 13}, "num_hidden_layers is 8192; expected a whole number from 1 to 4096"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected"),
        ({"intermediate_size": "big"}, "transformers does not take this config: .*intermediate_size"),
        ({"hidden_size": 64.5}, "transformers does not take this config: .*hidden_size"),
        ({"num_key_value_heads": 3}, "a training step cannot be traced on meta tensors"),
        ({"head_dim": 15}, "transformers does not take this config: .*head_dim"),
    ],
)
def test_a_config_that_no_model_can_have_is_named(changes, words):
    config = {name: value for name, value in (SMALL | changes).items() if value is not None}
    with pytest.raises(InputError, match=r"^the model: |^qwen3: |^qwen99: |^\['qwen3'\]: ") as refused:
        planned(config)
    assert refused.match(words)


def test_gpt2_counts_its_heads_by_another_name():
    with pytest.raises(InputError, match="n_head is 0; expected a whole number"):
        config_of({"model_type": "gpt2", "n_head": 0}, "gpt2")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"ops": ["conv"]},
            "unknown op 'conv'; known: rms_norm, layer_norm, swiglu, .*, attention, adamw; others are planned by",
        ),
        ({"attention": ["flash"]}, "unknown attention 'flash'; known: tilekern, tilekern_nondeterministic"),
    ],
)
def test_what_a_step_does_not_have_is_named(more, words):
    with pytest.raises(InputError, match=words):
        planned(SMALL, **more)


def test_a_rank_has_its_share_of_heads_columns_and_vocabulary():
    """Qwen3-8B: 32 heads, 8 key-value heads, 12288 columns, 151936 tokens."""
    plan = planned("qwen3-8b", [2048], B200, tp=4)
    assert plan.name == "qwen3-8b-tp4"
    found = by_kernel(plan)
    assert sizes(found["swiglu_forward"], "columns") == {(3072,)}
    assert sizes(found["attention_forward"], "heads", "kv_heads", "head_dim") == {(8, 2, 128)}
    assert sizes(found["fused_add_rms_norm_forward"], "columns") == {(4096,)}
    assert sizes(found["fused_linear_cross_entropy"], "vocabulary") == {(37984,)}
    assert sizes(by_kernel(planned("qwen3-8b", tp=16))["attention_forward"], "heads", "kv_heads") == {(2, 1)}


def test_layers_that_transformers_has_split_run_op_by_op():
    """A forward of its own around q_norm keeps it from being fused, and one around a linear layer the MLP."""
    found = by_kernel(planned(SMALL, tp=2))
    assert "swiglu_backward" in found
    assert sizes(found["rope"], "heads", "kv_heads") == {(2, 1)}
    assert (128, 16) in sizes(found["rms_norm_forward"], "rows", "columns")
    assert {"swiglu_backward_remake", "qk_norm_rope_forward"} <= found.keys(), "of a split with plain layers"


@pytest.mark.parametrize(
    ("config", "tp", "words"),
    [
        ("qwen3-8b", 3, "--tp 3: qwen3-8b has 8 key-value heads, which 3 ranks cannot share evenly"),
        ("qwen3-8b", 64, "qwen3-8b has 32 heads, which 64 ranks"),
        (SMALL | {"vocab_size": 333}, 2, "qwen3 has 333 tokens in the vocabulary, which 2 ranks"),
        ({"model_type": "gpt2", "n_layer": 2}, 2, "gpt2 cannot be divided by its configuration, which has no head_dim"),
    ],
)
def test_ranks_that_cannot_share_a_model(config, tp, words):
    with pytest.raises(InputError, match=words):
        planned(config, tp=tp)


def test_a_model_that_exists_is_stepped_as_it_is():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL), dtype=torch.float32)
    assert by_kernel(planned(model)).keys() == {"adamw"}
    tilekern.apply_to_model(model, rope=False, qk_norm_rope=False)
    try:
        found = by_kernel(planned(model))
        assert sizes(found["rms_norm_forward"], "dtype") == {("float32",)}
        assert "rope" not in found
        assert "attention_forward" not in found, "it was made with SDPA"
        assert planned(torch.compile(model)).problems == planned(model).problems
    finally:
        tilekern.reset()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match="Qwen3ForCausalLM cannot be stepped on meta tensors"):
        planned(model)


def test_a_configuration_has_the_plan_of_the_model_that_a_job_makes_of_it_and_patches():
    tilekern.apply()
    try:
        job = AutoModelForCausalLM.from_config(
            Qwen3Config(**SMALL), dtype=torch.bfloat16, attn_implementation="tilekern"
        )
        patched = planned(job)
    finally:
        tilekern.reset()
    assert set(planned(SMALL).problems) == set(patched.problems)


def test_what_was_patched_before_stays_patched():
    tilekern.apply(rope=False)
    try:
        before = tilekern.get_patched_ops()
        planned(SMALL)
        assert tilekern.get_patched_ops() == before
    finally:
        tilekern.reset()


def test_the_ways_to_name_a_model_give_the_same_plan(tmp_path: Path):
    Path(tmp_path, "config.json").write_text(json.dumps(SMALL))
    expected = planned(SMALL).problems
    for model in (str(tmp_path), tmp_path / "config.json", Qwen3Config(**SMALL), copy.deepcopy(SMALL)):
        assert planned(model).problems == expected


@pytest.mark.parametrize("given", [7, None, ["qwen3-8b"]])
def test_what_is_no_model_is_named(given):
    with pytest.raises(
        InputError, match="a model is a name, a path, a configuration of transformers or its dictionary"
    ):
        planned(given)


def test_known_ops_are_those_of_the_patches_with_attention_and_the_optimizer():
    assert known_ops()[-2:] == ["attention", "adamw"]
    assert {"rms_norm", "swiglu", "rope"} <= set(known_ops())


def test_a_plan_does_not_disturb_a_trace_that_runs():
    with tracing(Trace(H200)), pytest.raises(InputError, match="a trace runs already"):
        planned(SMALL)


MOE = SMALL | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}  # fmt: skip


def test_experts_are_planned_where_the_job_asks_for_them():
    """24 tokens of 3 experts each are 72 rows, in the bucket of 128; every kernel of the layer is there."""
    plan = by_kernel(planned(MOE, [24], experts=True))
    kernels = {"route_count", "route_place", "gather_rows", "experts_gate", "experts_gate_backward", "experts_combine"}
    assert kernels <= plan.keys()
    assert {problem["rows"] for problem in plan["grouped_linear"]} == {128}
    assert sizes(plan["grouped_weight_gradient"], "experts") == {(6,)}
    (router,) = plan["router_softmax_forward"]
    assert (router["tokens"], router["choices"], router["experts"], router["normalized"]) == (32, 3, 6, True)
    assert plan["router_softmax_backward"] == [router]
    assert "router_losses_forward" not in plan
    without = by_kernel(planned(MOE, [24]))
    assert not [kernel for kernel in without if kernel.startswith(("experts", "grouped", "route"))]
    assert by_kernel(planned(MOE, [24])) == without, "what was chosen for a plan is put back"


def test_the_auxiliary_loss_is_planned_for_the_logits_of_all_layers():
    plan = by_kernel(planned(MOE | {"num_hidden_layers": 5, "output_router_logits": True}, [24], experts=True))
    for kernel in ("router_losses_forward", "router_losses_backward"):
        assert {problem["rows"] for problem in plan[kernel]} == {128}, "5 times 24 in their bucket"
