"""The benchmark of 8-bit floats: tiny models on the CPU, from the command line to the page, and its figures by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
from benchmark_samples import is_one_line, rows

from benchmarks import fp8, fp8_curves
from benchmarks.__main__ import main
from benchmarks.fp8_curves import (
    FP8_OTHER_ORDER,
    OTHER_ORDER,
    Sizes,
    compared,
    configs,
    distance,
    distances,
    smoothed,
)
from benchmarks.fp8_errors import COLUMNS, TORCH, Operands, cosine, errors_of, flushed, operands_of, relative
from benchmarks.fp8_gradients import OTHER_BATCH, Cosines, group_of, of_first_steps
from benchmarks.goals import GOALS
from benchmarks.models import make_model
from benchmarks.pages import fp8 as pages
from benchmarks.providers import FP8, OURS
from benchmarks.results import Results, read_results
from tilekern.kernels.fp8.scales import scaled_rows, turned_rows

SMALL = Sizes(hidden=128, layers=2, sequences=2, length=64)
pytestmark = pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")


def config_of(tmp_path):
    """The path of a model with a layer's seven products."""
    fields = {
        "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
    }  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_errors_and_gradients_from_the_command_line_to_the_page(tmp_path, capsys):
    command = ["fp8", config_of(tmp_path), "--parts", "errors,gradients", "--tokens", "96", "--layers", "2"]
    assert main([*command, "--first-steps", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "least_cosine_to_bf16" in capsys.readouterr().out
    run = read_results(tmp_path / "fp8.json")
    layers = [case for case in run.cases() if case.startswith("errors tiny 96 tokens, 2 layers: layers.")]
    assert len(layers) == 14
    for case in layers:
        figures = {name: run.row(case, FP8, f"{name}_error").value for name in ("x", "weight", "dy", "y", "dx")}
        assert all(0.02 < error < 0.05 for error in figures.values()), (case, figures)
        assert run.row(case, TORCH, "y_error").value < 0.005
        assert run.row(case, FP8, "dweight_cosine").value > 0.995
    first, second = (f"gradients tiny 96 tokens, 2 layers, step {step}" for step in (1, 2))
    assert run.row(first, FP8, "least_cosine_to_bf16").value != run.row(second, FP8, "least_cosine_to_bf16").value
    assert 0.9 < run.row(first, FP8, "least_cosine_to_bf16").value < run.row(first, TORCH, "least_cosine_to_fp32").value
    assert any(note.startswith(f"{first}: the least cosines to bfloat16 are model.") for note in run.run["notes"])
    assert run.run["calls"]["fp8_matmul"]["fallbacks"] > 0
    run.run["gpu"] = "H200"
    page = pages.page([run])[pages.NAME]
    assert "| tiny 96 tokens, 2 layers, step 1, layers.1 |" in page
    assert "| tiny 96 tokens, 2 layers: layers.0.mlp.down_proj |" in page
    goal = next(goal for goal in GOALS if goal.title == "8-bit floats, gradients beside bfloat16's")
    assert [verdict.case for verdict in goal.judge(run)] == [first, second]


def test_a_hundred_steps_of_a_small_model_stay_within_what_the_order_of_batches_changes(monkeypatch):
    sizes = replace(SMALL, layers=1)
    only = {"qwen3": configs(sizes)["qwen3"]}
    monkeypatch.setattr(fp8, "configs", lambda _: only)
    kept = []
    job = fp8.Job(steps=100, sizes=sizes, device="cpu")
    run = fp8.measure(job, ["curves"], lambda results: kept.append(len(results.rows)), lambda _: None)
    case = "curves qwen3, 100 steps"
    points = run.run["curves"][case]
    assert list(points) == [OURS, OTHER_ORDER, FP8, FP8_OTHER_ORDER]
    assert all(len(some) == 50 for some in points.values())
    assert points[OURS][-1] < 0.75 * points[OURS][0]
    assert points[FP8] != points[OURS]
    of_orders = [run.row(case, who, "distance").value for who in (FP8, FP8_OTHER_ORDER)]
    ours, other = distances(run, case)
    assert 0 < ours == sum(of_orders) / 2 < other
    assert other > distance(points[OTHER_ORDER], points[FP8_OTHER_ORDER]) == pytest.approx(of_orders[1], abs=1e-4)
    assert run.row(case, FP8, "held_out_loss").value == pytest.approx(run.row(case, OURS, "held_out_loss").value, 0.01)
    assert f"{case}: 8-bit floats in 7 layers: q_proj, k_proj, v_proj, o_proj, gate_proj" in str(run.run["notes"])
    assert run.row("errors qwen3 after 100 steps: worst of all layers", FP8, "dy_flushed").value < 0.02
    least = {
        who: run.row("gradients qwen3 after 100 steps", who, "least_cosine_to_bf16").value for who in (FP8, OTHER_BATCH)
    }
    assert least[OTHER_BATCH] < 0.9 < least[FP8]
    assert kept == sorted(set(kept))
    run.run["gpu"] = "H200"
    files = pages.page([run])
    assert "| qwen3, 100 steps |" in files[pages.NAME]
    texts = [one.text for one in ET.fromstring(files["h200-fp8-qwen3-100-steps.svg"]).iter() if one.text]
    assert {"bfloat16", "bfloat16, other order", "8-bit floats", "8-bit floats, other order", "distance, nat"} <= set(
        texts
    )
    goal = next(goal for goal in GOALS if goal.title == "8-bit floats, loss beside bfloat16's")
    assert [verdict.met for verdict in goal.judge(run)] == [True]


def test_gpt_oss_runs_8_bit_floats_in_attention_and_its_experts_stay():
    with fp8_curves.patched():
        curve, model = fp8_curves.train(configs(SMALL)["gpt-oss"], FP8, 2, SMALL, "cpu")
        linear = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
        assert curve.converted == [f"model.layers.{n}.{name}" for n in range(2) for name in linear]
        assert [name for name, _ in operands_of(make_model(configs(SMALL)["gpt-oss"], device="cpu", attention=OURS),
                                               torch.arange(64)[None])] == [
            f"model.layers.{n}.{name}" for n in range(2) for name in linear
        ]  # fmt: skip
    assert all(torch.isfinite(x).all() for x in model.parameters())


def test_the_same_order_has_the_same_losses_and_another_order_the_same_weights():
    with fp8_curves.patched():
        config = configs(SMALL)["llama"]
        one, again, other = (fp8_curves.train(config, who, 2, SMALL, "cpu")[0] for who in (OURS, OURS, OTHER_ORDER))
    assert one.losses == again.losses
    assert one.held_out == again.held_out
    assert other.losses != one.losses
    weights = [make_model(config, device="cpu", attention="sdpa").lm_head.weight for _ in range(2)]
    assert torch.equal(*weights)


def test_held_out_text_is_not_trained_with():
    trained, held = fp8_curves.text(256, "cpu")
    seen = {bytes(row.tolist()) for row in trained}
    assert len(held) == -(-(len(trained) + len(held)) // 10)
    assert sum(bytes(row.tolist()) in seen for row in held) == 0
    (batch,) = [batch for batch, _ in zip(fp8_curves._batches(trained, 4, 1), range(1), strict=False)]
    assert batch.shape == (4, 256)


def test_errors_are_those_of_the_products_numbers():
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in ((96, 128), (144, 128), (96, 144)))
    dy[3] *= 2**-20
    found = errors_of(Operands(x, weight, dy))
    numbers, scale = scaled_rows(x)
    other, step = scaled_rows(weight)
    y = (numbers.double() * scale[:, None]) @ (other.double() * step[:, None]).t()
    exact = x.double() @ weight.double().t()
    assert found[FP8]["y_error"] == pytest.approx(float((y - exact).norm() / exact.norm()), rel=0.01)
    assert found[FP8]["x_error"] == pytest.approx(relative(numbers.float() * scale[:, None], x), rel=1e-5)
    assert found[FP8]["x_flushed"] == 0
    # The row that is 2^20 times smaller than others is lost when it is turned, and no part of the gradient.
    turned, _ = turned_rows(*scaled_rows(dy))
    assert found[FP8]["dy_flushed"] == pytest.approx(1 / 96, abs=1e-3)
    assert found[FP8]["dy_flushed"] == pytest.approx(flushed(dy, turned))
    assert found[FP8]["dweight_error"] == pytest.approx(found[COLUMNS]["dweight_error"], rel=0.05)
    assert set(found[TORCH]) == {"y_error", "dx_error", "dweight_error"}


def test_figures_of_nothing_are_finite():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative(zero, zero) == 0
    assert cosine(zero, zero) == 1
    assert cosine(zero, one) == 0
    assert cosine(-one, one) == pytest.approx(-1)
    assert flushed(torch.zeros(2, 3), torch.zeros(3, 2)) == 0


def test_a_run_with_one_order_of_8_bit_floats_is_judged_by_that():
    run = rows("fp8", ("m", FP8, "distance", 0.02, "nat"), ("m", OTHER_ORDER, "distance", 0.01, "nat"))
    assert distances(run, "m") == (0.02, 0.01)
    goal = next(goal for goal in GOALS if goal.title == "8-bit floats, loss beside bfloat16's")
    assert [(verdict.met, verdict.figure) for verdict in goal.judge(run)] == [(False, "0.0200 nat, 0.0100 nat")]
    assert distances(run, "other") is None


def test_curves_are_smoothed_and_compared_over_their_last_quarter():
    losses = [float(n) for n in range(96 * 2)]
    assert smoothed(losses)[:2] == [1.5, 5.5]
    assert len(smoothed(losses)) == 48
    assert smoothed([3.0, 1.0]) == [3.0, 1.0]
    assert compared(list(range(8))) == [6, 7]
    assert distance([9, 9, 1, 1], [0, 0, 0, 3]) == 2


def test_gradients_step_along_bfloat16_and_leave_the_model_unconverted(tmp_path):
    model = make_model(configs(SMALL)["qwen3"], device="cpu")
    before = model.lm_head.weight.detach().clone()
    found = list(of_first_steps(model, 256, 64, 2))
    assert not torch.equal(model.lm_head.weight, before)
    assert {type(layer).__module__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)} == {
        "torch.nn.modules.linear"
    }
    assert set(found[0].fp8_to_bf16) == {name for name, _ in model.named_parameters()}
    assert min(found[0].bf16_to_fp32.values()) > max(min(found[0].fp8_to_fp32.values()), 0.99)


def test_the_least_cosine_of_each_layer_has_a_row():
    names = {"model.layers.0.a.weight": 0.5, "model.layers.0.b.weight": 0.9, "model.embed_tokens.weight": 1.0}
    made = list(fp8.gradient_rows("gradients m, step 1", Cosines(names, dict.fromkeys(names, 0.25), names, names)))
    found = {(row.case, row.metric): row.value for row in made if row.provider == FP8}
    assert found["gradients m, step 1", "least_cosine_to_bf16"] == 0.5
    assert found["gradients m, step 1", "far_from_bf16"] == 2
    assert found["gradients m, step 1: layers.0", "least_cosine_to_fp32"] == 0.5
    assert found["gradients m, step 1: embed_tokens", "least_cosine_to_bf16"] == 1
    assert group_of("lm_head.weight") == "lm_head"
    others = {(row.case, row.metric): row.value for row in made if row.provider == OTHER_BATCH}
    assert others["gradients m, step 1", "median_cosine_to_bf16"] == 0.25


def test_the_plan_has_the_kernels_of_8_bit_floats_at_the_small_models_sizes(tmp_path):
    path = tmp_path / "plan.json"
    command = ["fp8", config_of(tmp_path), "--tokens", "128", "--layers", "1", "--hidden", "128", "--gpu", "H200"]
    assert main([*command, "--plan", str(path)]) == 0
    asked = json.loads(path.read_text())["problems"]
    found = {str(problem) for problem in asked if "fp8" in str(problem)}
    assert any("1024" in text for text in found)
    assert {"fp8_rows", "fp8_turned", "fp8_matmul"} <= {word for text in map(str, asked) for word in text.split("'")}


def test_sizes_that_do_not_fit_are_one_line(tmp_path, capsys):
    is_one_line(capsys, ["fp8", "--hidden", "200", "--device", "cpu", "--out", str(tmp_path)], "a multiple of 128")
    is_one_line(capsys, ["fp8", "--parts", "tears"], "unknown part 'tears'")
    is_one_line(capsys, ["fp8", "--device", "cpu"], "say with --out where they go")


def test_without_a_run_the_page_says_how_to_make_one():
    assert "`python -m benchmarks fp8` on a GPU" in pages.page([])[pages.NAME]
    other = Results({"gpu": "H200", "notes": []})
    assert "## H200" not in pages.page([other])[pages.NAME]
