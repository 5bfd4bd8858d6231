"""What is special to the cross-entropy kernels: long rows, gradients in place, ignored and wrong targets."""

import itertools
import math

import pytest
import torch
from spec_samples import assert_right, inputs_of, interpret, launched, one_of_each_code, sized

from tilekern.compile.cubin import read_resources
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.cross_entropy import separate as cross_entropy
from tilekern.kernels.cross_entropy.fused import FUSED
from tilekern.kernels.cross_entropy.problem import capped_logits
from tilekern.spec import GENERIC
from tilekern.spec.targets import INTERPRETED, resolve
from tilekern.tuning.verify.check import compare, expected_results, make_outputs

FORWARD, BACKWARD = cross_entropy.FORWARD, cross_entropy.BACKWARD
every_spec = pytest.mark.parametrize("spec", [FORWARD, BACKWARD, FUSED], ids=lambda spec: spec.name)
FLAGS = [
    dict(zip(("weighted", "smoothed", "capped"), flags, strict=True)) for flags in itertools.product((0, 1), repeat=3)
]
FLAGS = [{name: bool(value) for name, value in flags.items()} for flags in FLAGS]


def run(spec, problem, config, inputs, in_place=False):
    """The outputs of one config; with the gradient over a copy of the logits if asked."""
    if not in_place:
        return launched(spec, problem, config, inputs)
    blocks = spec.device(problem, config).grid(problem, INTERPRETED.sm_count)
    logits = inputs["logits"].clone()
    outputs = make_outputs(spec, problem, blocks, "cpu") | {"dlogits": logits}
    return launched(spec, problem, config, inputs | {"logits": logits}, blocks, outputs)


@every_spec
@pytest.mark.parametrize("flags", [FLAGS[0], FLAGS[-1]], ids=["plain", "all"])
@pytest.mark.parametrize("vocabulary", [8192, 20483])
def test_long_rows(spec, flags, vocabulary):
    """Rows of several steps, with and without whole tiles after the last step and a partial tile at the end."""
    problem = sized(spec, "bfloat16", rows=4, vocabulary=vocabulary).but(**flags)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, one_of_each_code(spec, problem), inputs)


@every_spec
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(k for k, v in flags.items() if v) or "plain")
@pytest.mark.parametrize("vocabulary", [1, 4099])
def test_every_combination_of_flags(spec, flags, vocabulary):
    problem = sized(spec, "float32", rows=5, vocabulary=vocabulary).but(**flags)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, (spec.default(problem, INTERPRETED), spec.generic(problem)), inputs)


@pytest.mark.parametrize("spec", [BACKWARD, FUSED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("vocabulary", [83, 8193])
def test_the_gradient_in_place_of_the_logits_is_the_same(spec, vocabulary):
    problem = sized(spec, "bfloat16", rows=6, vocabulary=vocabulary, flags=True)
    inputs = inputs_of(spec, problem)
    for config in one_of_each_code(spec, problem):
        apart, over = (run(spec, problem, config, inputs, in_place) for in_place in (False, True))
        assert all(torch.equal(apart[name], over[name]) for name in apart)


def test_the_fused_kernel_is_the_other_two():
    problem = sized(FUSED, "float32", rows=8, vocabulary=83, flags=True)
    inputs = inputs_of(FUSED, problem)
    fused = run(FUSED, problem, FUSED.default(problem, INTERPRETED), inputs)
    forward = run(FORWARD, problem, FORWARD.default(problem, INTERPRETED), inputs)
    backward = run(BACKWARD, problem, BACKWARD.default(problem, INTERPRETED), {**inputs, "lse": forward["lse"]})
    for name, other in {**forward, **backward}.items():
        torch.testing.assert_close(fused[name], other, rtol=1e-5, atol=1e-6)


@every_spec
def test_ignored_rows_are_zero_whatever_their_logits(spec):
    problem = sized(spec, "float32", rows=4, vocabulary=83, flags=True)
    inputs = inputs_of(spec, problem)
    inputs["target"][:] = -100
    inputs["logits"][:] = math.nan
    for config in (spec.default(problem, INTERPRETED), spec.generic(problem)):
        outputs = run(spec, problem, config, inputs)
        assert not any(bool(value.any()) for value in outputs.values())


@every_spec
@pytest.mark.parametrize("wrong", [-1, 83, 2**31 - 1, -(2**31)])
def test_a_target_that_is_no_class_makes_its_row_nan(spec, wrong):
    problem = sized(spec, "bfloat16", rows=5, vocabulary=83).but(weighted=True)
    inputs = inputs_of(spec, problem)
    expected = run(spec, problem, spec.default(problem, INTERPRETED), inputs)
    inputs["target"][1] = wrong
    outputs = run(spec, problem, spec.default(problem, INTERPRETED), inputs)
    others = [0, 2, 3, 4]
    for name, value in outputs.items():
        assert torch.equal(value[others], expected[name][others])
        assert name == "lse" or bool(value[1].isnan().all())


@every_spec
def test_logits_are_not_rounded_after_the_cap(spec):
    """Rounded to bfloat16, logits near a cap of 30 would move by up to 1/16, and their exponentials by 6 %."""
    problem = sized(spec, "bfloat16", rows=6, vocabulary=83).but(capped=True)
    inputs = inputs_of(spec, problem) | {"softcap": 30.0}
    inputs["logits"] *= 8
    if "lse" in inputs:
        inputs["lse"] = capped_logits(inputs["logits"], 30.0, True).logsumexp(1).float()
    check = interpret(spec, problem, spec.default(problem, INTERPRETED), inputs)
    assert check.passed, check.reason


@pytest.mark.parametrize("spec", [BACKWARD, FUSED], ids=lambda spec: spec.name)
def test_the_gradient_at_a_sure_target_is_rounded_once(spec):
    """It is 1 less a probability of 0.99, of which rounding would leave little."""
    problem = sized(spec, "bfloat16", rows=3, vocabulary=83)
    inputs = inputs_of(spec, problem) | {"z_loss": 0.0}
    inputs["logits"].scatter_(1, inputs["target"].long()[:, None], 12.0)
    if "lse" in inputs:
        inputs["lse"] = inputs["logits"].double().logsumexp(1).float()
    check = interpret(spec, problem, spec.default(problem, INTERPRETED), inputs)
    assert check.passed, check.reason


@every_spec
def test_large_logits_and_minus_infinity(spec):
    problem = sized(spec, "float32", rows=6, vocabulary=8193)
    inputs = inputs_of(spec, problem)
    inputs["logits"][:, 7:4000] = -math.inf
    inputs["logits"][1] = inputs["logits"][1] * 2000
    inputs["target"].fill_(3)
    if "lse" in inputs:
        inputs["lse"] = inputs["logits"].double().logsumexp(1).float()
    for config in one_of_each_code(spec, problem):
        outputs = run(spec, problem, config, inputs)
        for name, reference in expected_results(spec, problem, inputs).items():
            torch.testing.assert_close(outputs[name].double(), reference, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(k for k, v in flags.items() if v) or "plain")
def test_references_are_what_autograd_says(flags):
    problem = sized(FUSED, "float32", rows=7, vocabulary=30).but(**flags)
    inputs = inputs_of(FUSED, problem)
    logits = inputs.pop("logits").double().requires_grad_()
    scale = inputs.pop("scale")
    loss = FORWARD.reference(logits, **inputs, **flags)["loss"]
    (gradient,) = torch.autograd.grad((loss * scale).sum(), logits)
    got = FUSED.reference(logits.detach(), scale=scale, **inputs, **flags)
    torch.testing.assert_close(got["loss"], loss.detach())
    torch.testing.assert_close(got["dlogits"], gradient, rtol=1e-9, atol=1e-9)


def test_a_wrong_softmax_does_not_pass_at_a_real_vocabulary():
    """The gradient at the targets is far larger than elsewhere, and must not hide the rest."""
    problem = sized(BACKWARD, "bfloat16", rows=3, vocabulary=32000)
    inputs = inputs_of(BACKWARD, problem)
    expected = expected_results(BACKWARD, problem, inputs)
    off = {"dlogits": expected["dlogits"].where(expected["dlogits"] < 0, expected["dlogits"] * 1.1)}
    assert compare(BACKWARD, problem, expected, expected).passed
    assert not compare(BACKWARD, problem, off, expected).passed


@pytest.mark.parametrize("spec", [FORWARD, BACKWARD, FUSED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("gpu", ["A100-SXM4-80GB", "H200", "B200"])
def test_spaces_are_small_at_the_sizes_of_a_model(spec, gpu):
    problem = spec.problem(rows=4096, vocabulary=151936, dtype="bfloat16", weighted=False, smoothed=False, capped=False)
    assert 10 <= len(list(spec.space.candidates(problem, resolve(gpu)))) <= 60


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@every_spec
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_generic_config_spills_nothing_at_a_real_vocabulary(spec, arch):
    """The default config is compiled at one in ``test_compile.py``."""
    target = resolve(arch)
    problem = spec.bucketed(sized(spec, "bfloat16", rows=4096, vocabulary=128256))
    made = compile_candidate(spec, problem, spec.generic(problem), target, GENERIC)
    assert read_resources(made.cubin, made.symbol).stack_bytes == 0


def test_the_specs_are_found_by_name():
    for spec in (FORWARD, BACKWARD, FUSED):
        assert spec_named(spec.name) is spec
