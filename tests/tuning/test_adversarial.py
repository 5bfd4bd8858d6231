"""Adversarial inputs: what is drawn is changed, what is derived follows, whatever the spec."""

import math

import pytest
import torch
from spec_samples import NAMES, SPECS, sized

from tilekern.kernels import spec_named
from tilekern.tuning.verify import adversarial
from tilekern.tuning.verify.adversarial import (
    changed_names,
    drawn,
    drawn_and_counted,
    placed,
    reached,
    results_in,
    scaled,
)
from tilekern.tuning.verify.check import expected_results

every_spec = pytest.mark.parametrize("spec", SPECS, ids=NAMES)
# They take and give whole numbers alone, which nothing draws and nothing rounds.
OF_NUMBERS = [
    spec for spec in SPECS if spec.name not in ("advance", "greedy_join", "labels", "route_count", "route_place")
]
every_spec_of_numbers = pytest.mark.parametrize("spec", OF_NUMBERS, ids=lambda spec: spec.name)


def arrays(inputs):
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


@every_spec_of_numbers
def test_every_spec_draws_its_inputs_where_they_can_be_changed(spec):
    problem = sized(spec, "bfloat16")
    plain, zeros = (drawn(spec, problem, "cpu", change) for change in (None, lambda _, values: values * 0))
    assert drawn_and_counted(spec, problem, "cpu")[1] > 0
    moved = {name for name, value in arrays(plain).items() if not torch.equal(value, zeros[name])}
    largest = max(arrays(plain).values(), key=torch.numel)
    assert any(plain[name].shape == largest.shape for name in moved)
    assert all(torch.equal(value, drawn(spec, problem, "cpu")[name]) for name, value in arrays(plain).items())


def test_what_is_derived_follows_the_draws():
    spec = spec_named("cross_entropy_backward")
    problem = sized(spec)
    large = drawn(spec, problem, "cpu", scaled(6))
    assert large["logits"].max() > 100
    torch.testing.assert_close(large["lse"], large["logits"].logsumexp(1))


def test_zeros_come_in_all_combinations_of_rows():
    x, y, z = (adversarial.zeros(number, torch.ones(8, 3)) for number in range(3))
    combinations = torch.stack([x, y, z])[..., 0]
    assert {tuple(column) for column in combinations.t().tolist()} == {
        (a, b, c) for a in (0.0, 1.0) for b in (0.0, 1.0) for c in (0.0, 1.0)
    }


@pytest.mark.parametrize("shape", [(5, 83), (2, 3, 4, 10), (7,), (3, 1)])
def test_one_hot_rows_have_one_element_each_and_a_mean_square_of_1(shape):
    rows = adversarial.one_hot_rows(1, torch.randn(shape)).reshape(-1, shape[-1])
    assert (rows.count_nonzero(1) == 1).all()
    torch.testing.assert_close(rows.square().mean(1), torch.ones(len(rows)))


def test_a_mark_is_placed_in_one_draw_alone():
    change = placed(1, math.inf)
    given = torch.zeros(3, 4)
    assert torch.equal(change(0, given), given)
    assert change(1, given).view(-1).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, math.inf, 0, 0, 0]
    assert not given.any()


def test_a_nan_reaches_the_inputs_that_are_made_of_it():
    spec = spec_named("attention_dq")
    problem = sized(spec).but(causal=True)
    plain = drawn(spec, problem, "cpu")
    poisoned = drawn(spec, problem, "cpu", placed(0, math.nan))
    assert changed_names(plain, poisoned) == ["q", "lse", "delta"]
    assert poisoned["lse"].isnan().sum() == 1


@every_spec_of_numbers
def test_every_reference_can_be_computed_in_float32(spec):
    problem = sized(spec, "float32")
    inputs = drawn(spec, problem, "cpu")
    wide, narrow = expected_results(spec, problem, inputs), results_in(torch.float32, spec, problem, inputs)
    for name, reference in wide.items():
        assert reference.dtype == torch.float64
        assert narrow[name].dtype == torch.float32
        # What a kernel leaves as it was is NaN in its reference.
        assert torch.equal(narrow[name].isnan(), reference.isnan())
        error = (narrow[name].double() - reference).nan_to_num().norm() / (reference.nan_to_num().norm() + 1e-30)
        assert error < 1e-5
    # Half of a slope is as exact in float32, and a copied row, and a token's number; to quantise is float32's own work.
    # A short sum of products of 4-bit mantissas is exact.
    exact = (
        "tvd_elements_backward", "gather_rows", "cache_rows", "lay_out", "embedding", "greedy", "greedy_parts",
        "sample", "quantize_rows", "fp8_rows", "fp8_turned", "fp8_matmul",
        "fp8_blocks", "fp8_weight_blocks", "fp8_block_matmul", "mxfp8_blocks", "mxfp8_matmul",
        "fp8_grouped_turned", "fp8_expert_weights_turned", "fp8_grouped_matmul", "fp8_grouped_weight_gradient",
    )  # fmt: skip
    if spec.name not in exact:
        assert any(not torch.equal(narrow[name].double(), reference) for name, reference in wide.items())


def test_no_value_is_rounded_on_the_way_to_a_result_in_another_dtype():
    spec = spec_named("rms_norm_forward")
    problem = sized(spec, "bfloat16")
    inputs = drawn(spec, problem, "cpu")
    x = inputs["x"].double()
    unrounded = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * inputs["weight"].double()
    torch.testing.assert_close(results_in(torch.float64, spec, problem, inputs)["y"], unrounded, rtol=1e-14, atol=0)
    assert not torch.equal(expected_results(spec, problem, inputs)["y"], unrounded)


def test_results_that_depend_on_a_draw_are_found():
    spec = spec_named("rms_norm_forward")
    problem = sized(spec, "bfloat16")
    plain, other = (drawn(spec, problem, "cpu", change) for change in (None, placed(0, adversarial.PROBE)))
    found = reached(*(results_in(torch.float64, spec, problem, inputs) for inputs in (plain, other)))["y"]
    touched = (plain["x"] != other["x"]).any(1)
    assert touched.sum() == 1
    assert found[touched].all()
    assert not found[~touched].any()
