"""The divergence of two heads as a composite: over any chunks, by whoever multiplies, of heads of different widths."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import inputs_of

from tilekern.kernels import spec_named
from tilekern.kernels.composites import head
from tilekern.kernels.composites.fused_linear_jsd import Options
from tilekern.kernels.composites.head import split
from tilekern.runtime.dispatch import counters, plan_for
from tilekern.spec import DTYPES, Config
from tilekern.spec.targets import INTERPRETED, resolve
from tilekern.tuning.plan.given import plan_of_problem
from tilekern.tuning.verify.check import compare, expected_results

SPEC, H200 = spec_named("fused_linear_jsd"), resolve("H200")
WAYS = ("cublas", "tuned")


def problem_of(rows=10, vocabulary=83, hidden=24, teacher_hidden=40, dtype="float32"):
    return SPEC.problem(
        rows=rows, hidden=hidden, teacher_hidden=teacher_hidden, vocabulary=vocabulary, dtype=dtype
    )  # fmt: skip


def run(config, problem, inputs):
    call = SPEC.implement(problem, config)
    results = call.bound(plan_for)(*(inputs[name] for name in call.inputs))
    return dict(zip(SPEC.outputs(problem, 1), results, strict=True))


@pytest.mark.parametrize("way", WAYS)
@examples(20)
@given(data=st.data())
def test_loss_and_gradients_over_chunks_match_float64(way, data):
    rows, chunk = data.draw(st.integers(1, 30), label="rows"), data.draw(st.integers(1, 40), label="chunk")
    vocabulary = data.draw(st.one_of(st.integers(2, 150), st.sampled_from([127, 128, 129])), label="vocabulary")
    widths = (data.draw(st.integers(16, 60), label=name) for name in ("hidden", "teacher_hidden"))
    problem = problem_of(rows, vocabulary, *widths, data.draw(st.sampled_from(DTYPES), label="dtype"))
    inputs = inputs_of(SPEC, problem, seed=data.draw(st.integers(0, 3), label="seed"))
    outputs = run(Config(chunk=chunk, parts=data.draw(st.integers(1, 4), label="parts"), products=way), problem, inputs)
    check = compare(SPEC, problem, outputs, expected_results(SPEC, problem, inputs))
    # Each chunk rounds the weight's gradient once more.
    few = len(split(rows, chunk)) <= 3
    assert check.passed or (not few and check.relative_error < 2e-2), check.reason


def test_an_infinite_slope_makes_nan_of_its_row_and_of_the_whole_weight_s_gradient():
    """As the reference has it: the sign of infinity times a derivative near 0 would be that of a rounding error."""
    problem = problem_of()
    inputs = inputs_of(SPEC, problem)
    inputs["slope"][7] = math.inf
    made = run(Config(chunk=4, parts=1, products="cublas"), problem, inputs)
    for found in (made, expected_results(SPEC, problem, inputs)):
        assert found["dhidden"].isnan().any(-1).nonzero().tolist() == [[7]]
        assert bool(found["dweight"].isnan().all())
        assert found["loss"].isnan().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("hidden_gradient", [True, False])
@pytest.mark.parametrize("weight_gradient", [True, False])
def test_only_what_is_wanted_is_multiplied(hidden_gradient, weight_gradient):
    problem = problem_of()
    wanted = Options(hidden_gradient=hidden_gradient, weight_gradient=weight_gradient)
    inputs, before = inputs_of(SPEC, problem), counters("matmul").launches
    outputs = run(Config(chunk=4, parts=1, products="tuned"), problem, inputs | {"options": wanted})
    assert counters("matmul").launches - before == 3 * (2 + hidden_gradient + weight_gradient)
    assert (outputs["dhidden"] is None, outputs["dweight"] is None) == (not hidden_gradient, not weight_gradient)
    assert compare(SPEC, problem, outputs, {"loss": expected_results(SPEC, problem, inputs)["loss"]}).passed


def test_wide_sums_lose_nothing_over_many_chunks():
    problem = problem_of(60, dtype="bfloat16")
    inputs = inputs_of(SPEC, problem)
    expected, errors = expected_results(SPEC, problem, inputs)["dweight"], {}
    for wide in (False, True):
        options = {"options": Options(wide_sums=wide)}
        found = run(Config(chunk=2, parts=1, products="cublas"), problem, inputs | options)["dweight"]
        assert found.dtype == (torch.float32 if wide else torch.bfloat16)
        errors[wide] = float((found.double() - expected).norm() / expected.norm())
    assert errors[True] < 4e-3 < errors[False]


@examples(20)
@given(data=st.data())
@pytest.mark.nightly
def test_wide_logits_are_rounded_nowhere(data):
    rows, chunk = data.draw(st.integers(1, 300), label="rows"), data.draw(st.integers(1, 600), label="chunk")
    dtype = data.draw(st.sampled_from(["bfloat16", "float16"]), label="dtype")
    problem = problem_of(rows, data.draw(st.integers(2, 150), label="vocabulary"), dtype=dtype)
    inputs = inputs_of(SPEC, problem) | {"options": Options(wide_logits=True)}
    config = Config(chunk=chunk, parts=data.draw(st.integers(1, 4), label="parts"), products="cublas")
    check = compare(SPEC, problem, run(config, problem, inputs), expected_results(SPEC, problem, inputs))
    assert check.passed, check.reason


def test_a_student_that_is_almost_its_teacher_has_a_gradient_by_wide_logits():
    """16 bits of a logit leave little of a difference of two that are alike."""
    problem = problem_of(200, 1000, dtype="bfloat16", hidden=40)
    inputs, errors = inputs_of(SPEC, problem), {}
    for name in ("input", "weight"):
        inputs[f"teacher_{name}"] = inputs[f"student_{name}"] * (
            1 + 0.02 * torch.randn(inputs[f"student_{name}"].shape)
        )
        inputs[f"teacher_{name}"] = inputs[f"teacher_{name}"].bfloat16()
    exact = SPEC.reference(**inputs | {"options": Options(wide_logits=True)})["dhidden"]
    for wide in (False, True):
        options = {"options": Options(wide_logits=wide)}
        found = run(Config(chunk=128, parts=1, products="cublas"), problem, inputs | options)["dhidden"]
        errors[wide] = float((found.double() - exact).norm() / exact.norm())
    assert errors[True] < 4e-3
    assert errors[False] > 10 * errors[True]


def test_the_default_holds_the_logits_of_both_heads_in_700_mib():
    problem = problem_of(4096, 128256, 4096, 4096, "bfloat16")
    default = SPEC.default(problem, INTERPRETED)
    assert (default["chunk"], default["parts"]) == (2048, 4)
    assert (2048 + 512) * 128256 * 2 <= 700 << 20
    assert "700 MiB" in SPEC.space.violated(problem, default.but(parts=2), INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.share(3)
def test_the_teacher_s_logits_are_held_for_a_part_of_a_chunk_alone(parts, monkeypatch):
    problem = problem_of(1000, 40)
    inputs, held = inputs_of(SPEC, problem), []
    room = head.room_for_logits
    monkeypatch.setattr(head, "room_for_logits", lambda rows, *rest: held.append(rows) or room(rows, *rest))
    outputs = run(Config(chunk=512, parts=parts, products="cublas"), problem, inputs)
    assert held == [512, {1: 512, 2: 256, 3: 256}[parts]]
    assert compare(SPEC, problem, outputs, expected_results(SPEC, problem, inputs)).passed


@pytest.mark.slow
@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.nightly
def test_wide_logits_take_no_more_memory(graded, monkeypatch):
    problem = problem_of(4096, 40, dtype="bfloat16")
    options = Options(wide_logits=True, hidden_gradient=graded, weight_gradient=graded)
    inputs, held = inputs_of(SPEC, problem) | {"options": options}, []
    room = head.room_for_logits
    monkeypatch.setattr(head, "room_for_logits", lambda *given: held.append(room(*given)) or held[-1])
    run(Config(chunk=2048, parts=4, products="cublas"), problem, inputs)
    wide, gradient = [(256, torch.float32)] * 2, [(1024, torch.bfloat16)]
    assert [(len(x), x.dtype) for x in held] == wide + gradient * graded
    assert sum(len(x) * x.element_size() for x in held) <= (2048 + 512) * 2


@examples(15)
@given(
    st.integers(1, 20000), st.sampled_from([83, 32000, 128256, 262144, 1_000_000]), st.sampled_from(DTYPES),
)  # fmt: skip
def test_any_problem_has_a_config_that_fits(rows, vocabulary, dtype):
    problem = SPEC.bucketed(problem_of(rows, vocabulary, 64, 64, dtype))
    for target in (INTERPRETED, H200):
        assert SPEC.space.violated(problem, SPEC.default(problem, target), target) is None


def test_the_parts_are_planned_with_the_op():
    text = "fused_linear_jsd rows=4096,hidden=4096,teacher_hidden=2048,vocabulary=128256,dtype=bfloat16"
    names = {name for name, _ in plan_of_problem(text, H200).problems}
    assert names == {"fused_linear_jsd", "logits_jsd_forward", "logits_jsd_backward", "matmul", "scale"}


def test_the_reference_s_gradients_are_what_autograd_says_of_its_losses():
    inputs = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in inputs_of(SPEC, problem_of()).items()}
    student = [inputs[name].requires_grad_() for name in ("student_input", "student_weight")]
    x, y = (inputs[f"{name}_input"] @ inputs[f"{name}_weight"].t() for name in ("student", "teacher"))
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    middle = ((p.exp() + q.exp()) / 2).log()
    terms = (p.exp() * (p - middle) + q.exp() * (q - middle)) / 2
    expected = torch.autograd.grad((inputs["slope"] * terms.sum(-1)).sum(), student)
    with torch.no_grad():
        found = SPEC.reference(**inputs)
    for name, gradient in zip(("dhidden", "dweight"), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9)
