"""The cross-entropy kernels: ignored and wrong targets, roundings, and large or infinite logits."""

import itertools
import math

import pytest
import torch
from spec_samples import assert_right, both_defaults, each, inputs_of, launched, one_of_each_code, sized

from tilekern.kernels.cross_entropy import separate as cross_entropy
from tilekern.kernels.cross_entropy.fused import FUSED
from tilekern.kernels.cross_entropy.problem import capped_logits
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.check import compare, expected_results

FORWARD, BACKWARD = cross_entropy.FORWARD, cross_entropy.BACKWARD
every_spec = each([FORWARD, BACKWARD, FUSED])
FLAGS = [
    dict(zip(("weighted", "smoothed", "capped"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=3)
]


def run(spec, problem, inputs):
    """Return the outputs of the default config."""
    return launched(spec, problem, spec.default(problem, INTERPRETED), inputs)


def with_lse(inputs, softcap=None):
    """Return the inputs with the log-sum-exp of their own logits, if the spec takes it."""
    wide = inputs["logits"].double() if softcap is None else capped_logits(inputs["logits"], softcap, True)
    return inputs | ({"lse": wide.logsumexp(1).float()} if "lse" in inputs else {})


@every_spec
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(k for k, v in flags.items() if v) or "plain")
@pytest.mark.parametrize("vocabulary", [1, 4099])
def test_every_combination_of_flags(spec, flags, vocabulary):
    problem = sized(spec, "float32", rows=5, vocabulary=vocabulary).but(**flags)
    assert_right(spec, problem, both_defaults(spec, problem), inputs_of(spec, problem))


def test_the_fused_kernel_is_the_other_two():
    problem = sized(FUSED, "float32", rows=8, vocabulary=83, flags=True)
    inputs = inputs_of(FUSED, problem)
    fused, forward = run(FUSED, problem, inputs), run(FORWARD, problem, inputs)
    backward = run(BACKWARD, problem, {**inputs, "lse": forward["lse"]})
    for name, other in {**forward, **backward}.items():
        torch.testing.assert_close(fused[name], other, rtol=1e-5, atol=1e-6)


@every_spec
@pytest.mark.parametrize("wrong", [-1, 83, 2**31 - 1, -(2**31)])
def test_a_target_that_is_not_a_class_makes_its_row_nan(spec, wrong):
    problem = sized(spec, "bfloat16", rows=5, vocabulary=83).but(weighted=True)
    inputs = inputs_of(spec, problem)
    expected = run(spec, problem, inputs)
    inputs["target"][1] = wrong
    outputs = run(spec, problem, inputs)
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
    assert_right(spec, problem, [spec.default(problem, INTERPRETED)], with_lse(inputs, 30.0))


@each([BACKWARD, FUSED])
def test_the_gradient_at_a_sure_target_is_rounded_once(spec):
    """It is 1 less a probability of 0.99; if that were rounded, little would remain."""
    problem = sized(spec, "bfloat16", rows=3, vocabulary=83)
    inputs = inputs_of(spec, problem) | {"z_loss": 0.0}
    inputs["logits"].scatter_(1, inputs["target"].long()[:, None], 12.0)
    assert_right(spec, problem, [spec.default(problem, INTERPRETED)], with_lse(inputs))


@every_spec
def test_large_logits_and_minus_infinity(spec):
    problem = sized(spec, "float32", rows=6, vocabulary=8193)
    inputs = inputs_of(spec, problem)
    inputs["logits"][:, 7:4000] = -math.inf
    inputs["logits"][1] = inputs["logits"][1] * 2000
    inputs["target"].fill_(3)
    inputs = with_lse(inputs)
    for config in one_of_each_code(spec, problem):
        outputs = launched(spec, problem, config, inputs)
        for name, reference in expected_results(spec, problem, inputs).items():
            torch.testing.assert_close(outputs[name].double(), reference, rtol=1e-3, atol=1e-6)


def test_a_wrong_softmax_does_not_pass_at_a_real_vocabulary():
    """The gradient at the targets is far larger than elsewhere, and must not hide other errors."""
    problem = sized(BACKWARD, "bfloat16", rows=3, vocabulary=32000)
    inputs = inputs_of(BACKWARD, problem)
    expected = expected_results(BACKWARD, problem, inputs)
    off = {"dlogits": expected["dlogits"].where(expected["dlogits"] < 0, expected["dlogits"] * 1.1)}
    assert compare(BACKWARD, problem, expected, expected).passed
    assert not compare(BACKWARD, problem, off, expected).passed
