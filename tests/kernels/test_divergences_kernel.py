"""Divergences of rows: any beta, probabilities of 0, slopes that are not finite, and elements beyond a row's end."""

import math

import pytest
import torch
from divergence import divergence
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, each, launched, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.spec import DTYPES
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.adversarial import one_hot_rows

JSD, TVD = spec_named("jsd"), spec_named("tvd")
HEADS, HEADS_BACKWARD = spec_named("logits_jsd_forward"), spec_named("logits_jsd_backward")
KL, KL_ELEMENTS = spec_named("kl_div_forward"), spec_named("kl_div_elements_forward")
KL_ALL = [KL, KL_ELEMENTS, spec_named("kl_div_backward"), spec_named("kl_div_elements_backward")]
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
betas = pytest.mark.parametrize("beta", BETAS)
forms = pytest.mark.parametrize("log_target", [False, True])


def ways(spec, problem):
    return one_of_each(spec, problem, "schedule", "passes", "tile_n", "unroll")


def of_beta(spec, beta, dtype="float32", columns=83, rows=5, **flags):
    """Return a problem, and inputs with a beta; those of the heads' backward do not come from its forward."""
    flags = {"graded": True, "pure": beta in (0, 1)} | flags
    problem = sized(spec, dtype, rows=rows, columns=columns, vocabulary=columns)
    problem = problem.but(**{name: value for name, value in flags.items() if name in problem})
    return problem, plain_inputs(spec, problem) | {"beta": beta}


def with_sums(problem, inputs):
    """Return inputs of the heads' backward, with the sums of the forward's reference."""
    known = HEADS.reference(**inputs, pure=problem["pure"])
    return inputs | {name: known[name].float() for name in ("student_total", "teacher_total", "pull")}


def check(spec, problem, inputs, most=None):
    assert_right(spec, problem, ways(spec, problem)[:most], inputs)
    if spec is HEADS:
        assert_right(HEADS_BACKWARD, problem, ways(HEADS_BACKWARD, problem), with_sums(problem, inputs))


@each([JSD, HEADS, HEADS_BACKWARD])
@examples(25)
@given(data=st.data())
def test_any_beta_is_right(spec, data):
    beta, dtype = data.draw(st.sampled_from(BETAS), label="beta"), data.draw(st.sampled_from(DTYPES), label="dtype")
    columns, graded = data.draw(st.integers(2, 3000), label="columns"), data.draw(st.booleans(), label="graded")
    forward = HEADS if spec is HEADS_BACKWARD else spec
    problem, inputs = of_beta(forward, beta, dtype, columns, graded=graded)
    config = data.draw(st.sampled_from(configs(spec, problem)), label="config")
    assert_right(spec, problem, [config], inputs if spec is forward else with_sums(problem, inputs))


@each([JSD, HEADS])
@betas
def test_probabilities_of_0_make_no_nan(spec, beta):
    """In one input, in the other, in both, and probabilities that are 0 only in float32."""
    problem, inputs = of_beta(spec, beta, columns=83 if spec is JSD else 700)
    one, other = (inputs[name] for name in list(inputs)[:2])
    # At an end a 0 in one input alone is an infinite divergence.
    one[0, 3::5] = -math.inf if beta != 0 else -5.0
    other[1, 4::7] = -math.inf if beta != 1 else -5.0
    one[2, 5::3] = other[2, 5::3] = -math.inf
    one[3, 6], other[3, 6] = -200.0, -300.0
    flags = {name: problem[name] for name in ("graded", "pure") if name in problem}
    assert all(x.isfinite().all() for x in spec.reference(**inputs, **flags).values())
    check(spec, problem, inputs, most=3)


@pytest.mark.parametrize("slope", [math.inf, -math.inf, math.nan])
def test_a_slope_that_is_not_finite_makes_its_row_nan(slope):
    problem, inputs = of_beta(HEADS, 0.5)
    inputs["slope"][2] = slope
    assert HEADS.reference(**inputs, pure=False)["loss"].isnan().nonzero().tolist() == [[2]]
    assert bool(HEADS_BACKWARD.reference(**with_sums(problem, inputs), pure=False)["gradient"][2].isnan().all())
    check(HEADS, problem, inputs)


@pytest.mark.parametrize("columns", [1025, 5000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_elements_beyond_a_row_add_no_rounding_to_a_small_loss(dtype, columns):
    problem, inputs = of_beta(JSD, 0.1, dtype, columns, graded=False)
    # Like a student close to its teacher.
    other = inputs["input"].float() + 0.3 * torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    inputs["target"] = other.log_softmax(-1).to(inputs["input"].dtype)
    assert_right(JSD, problem, configs(JSD, problem)[:4], inputs)


def test_equal_heads_have_no_divergence_and_no_gradient():
    problem, inputs = of_beta(HEADS, 0.5, columns=300)
    inputs["teacher"] = inputs["student"].clone()
    for config in ways(HEADS, problem):
        sums = launched(HEADS, problem, config, inputs)
        assert float(sums.pop("loss").abs().max()) < 1e-9
        for other in ways(HEADS_BACKWARD, problem):
            assert float(launched(HEADS_BACKWARD, problem, other, inputs | sums)["gradient"].abs().max()) < 1e-9


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 4e-3), ("float32", 1e-4)])
def test_a_likely_column_leaves_no_more_than_its_rounding(dtype, most):
    """There the sum of g nearly cancels g.

    A likely column's gradient is the difference of its probability from 1, here 1e-3; a rounding of 1 is 6e-5 of that.
    """
    problem, inputs = of_beta(HEADS, 0.5, dtype, 300)
    inputs["student"][:, 7] = inputs["student"].amax() + 12
    sums = launched(HEADS, problem, HEADS.default(problem, INTERPRETED), inputs)
    del sums["loss"]
    found = launched(HEADS_BACKWARD, problem, HEADS_BACKWARD.default(problem, INTERPRETED), inputs | sums)["gradient"]
    wanted = HEADS_BACKWARD.reference(**with_sums(problem, inputs), pure=False)["gradient"]
    assert (found.double() - wanted).norm() / wanted.norm() < most


@betas
def test_losses_and_gradients_of_heads_are_those_of_torch_s_kl_div(beta):
    problem, inputs = of_beta(HEADS, beta, columns=61)
    student = inputs["student"].double().requires_grad_()
    logs = [(x * inputs["scale"]).log_softmax(-1) for x in (student, inputs["teacher"].double())]
    loss = divergence(*logs, beta) * inputs["slope"].double()
    torch.testing.assert_close(HEADS.reference(**inputs, pure=problem["pure"])["loss"], loss.detach())
    found = HEADS_BACKWARD.reference(**with_sums(problem, inputs), pure=problem["pure"])["gradient"]
    torch.testing.assert_close(found, torch.autograd.grad(loss.sum(), student)[0], rtol=1e-6, atol=1e-7)


# Log-probabilities and probabilities as inputs.


@each([JSD, *KL_ALL])
@forms
@pytest.mark.parametrize("columns", [83, 128256])
def test_drawn_inputs_are_probabilities_or_logarithms_of_them(spec, log_target, columns, monkeypatch):
    """In a long row with one large number the exponential would not fit float32."""
    problem = sized(spec, rows=3, columns=columns if spec is JSD else min(columns, 20000), flags=log_target)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **rest: one_hot_rows(0, randn(*size, **rest)))
    inputs = plain_inputs(spec, problem)
    if spec is JSD:
        for name in ("input", "target"):
            torch.testing.assert_close(inputs[name].exp().sum(-1), torch.ones(3))
    else:
        assert bool((-inputs["target"] if log_target else inputs["target"]).ge(0).all())
    assert_right(spec, problem, configs(spec, problem)[:2], inputs)


@each([KL, KL_ELEMENTS])
@forms
def test_infinite_logarithms_and_probabilities_of_0_equal_torch(spec, log_target):
    least = -math.inf if log_target else 0.0
    logs = torch.tensor([[-math.inf, -1.0, 0.0], [-1.0, -1.0, -2.0], [-math.inf, -2.0, -1.0]])
    targets = torch.tensor([[least, 0.5, 0.5], [least, 0.5, 0.5], [0.5, least, 0.5]])
    if log_target:
        targets[1, 0] = -200.0  # exp gives 0
    problem = sized(spec, rows=3, columns=3).but(log_target=log_target)
    assert_right(spec, problem, configs(spec, problem), {"input": logs, "target": targets})


def test_numbers_that_are_not_probabilities_equal_torch_too():
    """Logarithms of 0 leave only the entropies."""
    tiny = torch.finfo(torch.float32).tiny
    numbers = torch.cat([
        torch.linspace(0, 1, 4001), torch.logspace(-38, 6, 4001), 1 + torch.linspace(-1e-3, 1e-3, 101),
        torch.tensor([0.0, -0.0, tiny, tiny / 8, 1.0, math.inf, -1.0, -tiny, -math.inf, math.nan]),
    ])[None]  # fmt: skip
    problem = sized(KL_ELEMENTS, rows=1, columns=numbers.shape[1]).but(log_target=False)
    inputs = {"input": torch.zeros_like(numbers), "target": numbers}
    made = launched(KL_ELEMENTS, problem, KL_ELEMENTS.default(problem, INTERPRETED), inputs)
    expected = torch.xlogy(numbers.double(), numbers.double()) - numbers * 0
    assert torch.equal(made["loss"].isnan(), expected.isnan())
    torch.testing.assert_close(made["loss"].double(), expected, rtol=3e-7, atol=1.5e-7, equal_nan=True)


@forms
@pytest.mark.parametrize("columns", [83, 1500, 20000])
def test_elements_beyond_the_end_of_a_row_add_nothing(log_target, columns):
    """Zeros there would add exp(0) * 0, or 0 * log(0)."""
    problem = sized(KL, rows=3, columns=columns).but(log_target=log_target)
    assert_right(KL, problem, ways(KL, problem), plain_inputs(KL, problem), most=1e-6)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("columns", [83, 5000])
def test_equal_elements_have_no_distance_and_nan_spreads(graded, columns):
    problem = sized(TVD, rows=3, columns=columns).but(graded=graded)
    inputs = plain_inputs(TVD, problem)
    inputs["p"][0] = inputs["q"][0]
    inputs["p"][1, -1] = math.nan
    assert_right(TVD, problem, ways(TVD, problem), inputs)
