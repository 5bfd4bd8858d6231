"""Every spec's kernels, run on the CPU, against the spec's reference in float64."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import (
    NAMES,
    SPECS,
    VIEWS,
    assert_right,
    compiled,
    configs,
    inputs_of,
    interpret,
    one_of_each,
    one_of_each_code,
    problems,
    seen_as,
    sized,
)

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.spec import DTYPES, LibraryCall
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.check import launch_arguments

every_spec = pytest.mark.parametrize("spec", SPECS, ids=NAMES)


@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("spec", compiled(), ids=lambda spec: spec.name)
def test_every_config_gives_its_device_function_what_that_takes(spec, flags):
    """Which the implementation of a config checks as it is made."""
    problem = sized(spec, flags=flags)
    made = [spec.implement(problem, config) for config in configs(spec, problem)]
    assert any(not isinstance(way, LibraryCall) for way in made)


@every_spec
@examples(30)
@given(data=st.data())
def test_any_config_is_right_on_any_problem_and_any_strides(spec, data):
    problem = data.draw(problems(spec), label="problem")
    found = configs(spec, problem)
    # The default and the generic config, of which a miss takes one, in half of the draws.
    config = data.draw(st.one_of(st.sampled_from(found[:2]), st.sampled_from(found)), label="config")
    inputs = inputs_of(spec, problem, seed=data.draw(st.integers(0, 3), label="seed"))
    arrays = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    views = data.draw(st.fixed_dictionaries({name: st.sampled_from(VIEWS) for name in arrays}), label="views")
    for name, view in views.items():
        inputs[name] = seen_as(inputs[name], view)
    check = interpret(spec, problem, config, inputs)
    assert check.passed, check.reason


@every_spec
@pytest.mark.parametrize(("blocks", "dtype"), [(1, "bfloat16"), (3, "float32"), (200, "bfloat16")])
def test_every_function_is_right_on_any_grid(spec, blocks, dtype):
    """A generic variant runs on the aligned one's grid, which knows nothing of the generic config.

    That holds for the generic config, and for any config with a persistent schedule.
    """
    problem = sized(spec, dtype)
    inputs = inputs_of(spec, problem)
    persistent = {}
    for config in configs(spec, problem):
        if config.get("schedule") == "persistent" and not spec.is_library(problem, config):
            persistent.setdefault(spec.device(problem, config).function, config)
    assert_right(spec, problem, {spec.generic(problem), *persistent.values()}, inputs, blocks)


@every_spec
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_config_of_one_odd_problem_is_right(spec, dtype):
    problem = sized(spec, dtype, rows=5, columns=83, tokens=3, heads=3, kv_heads=2)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, one_of_each_code(spec, problem), inputs)


@pytest.mark.parametrize(("kernel", "rows", "columns"), [("column_sum", 300, 1030), ("scale", 3, 5121)])
def test_many_chunks(kernel, rows, columns):
    """By a config of each tile; resident blocks are a single one, which takes all rows one after the other."""
    spec = spec_named(kernel)
    problem = sized(spec, "bfloat16", rows=rows, columns=columns)
    inputs = inputs_of(spec, problem)
    for config in one_of_each(spec, problem, "tile_n"):
        check = interpret(spec, problem, config, inputs, 1 if config["schedule"] == "persistent" else None)
        assert check.passed, (config, check.reason)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_rope_shares_the_angles_of_a_single_batch_entry(full, inverse):
    spec = spec_named("rope")
    problem = sized(spec, batch=3).but(full=full, inverse=inverse)
    inputs = inputs_of(spec, problem)
    shared = {name: inputs[name][:1] for name in ("cos", "sin")}
    for config in configs(spec, problem)[:6]:
        assert interpret(spec, problem, config, {**inputs, **shared}).passed
        expanded = {name: value.expand(3, -1, -1) for name, value in shared.items()}
        assert interpret(spec, problem, config, {**inputs, **expanded}).passed


def test_rope_reads_only_the_first_half_of_angles_that_are_stored_twice():
    spec = spec_named("rope")
    problem = sized(spec)
    inputs = inputs_of(spec, problem)
    for name in ("cos", "sin"):
        poison = torch.full_like(inputs[name], torch.nan)
        twice = torch.cat((inputs[name], poison), -1)
        inputs[name] = twice[..., : inputs[name].shape[-1]]
        assert inputs[name].stride(1) == twice.shape[-1]
    assert interpret(spec, problem, spec.default(problem, None), inputs).passed


def test_rope_rounds_nothing_but_its_results():
    """Products that nearly cancel: what is left of them would be lost if they were rounded."""
    spec = spec_named("rope")
    problem = sized(spec, "bfloat16").but(full=True)
    inputs = inputs_of(spec, problem)
    half = problem["head_dim"] // 2
    for name in ("q", "k"):
        inputs[name][..., half:] = inputs[name][..., :half]
    inputs["cos"].fill_(1)
    inputs["sin"][..., :half], inputs["sin"][..., half:] = 1 - 2**-8, 2**-8 - 1
    check = interpret(spec, problem, spec.default(problem, INTERPRETED), inputs)
    assert check.passed, check.reason


def test_rope_of_more_heads_than_are_written_out():
    spec = spec_named("rope")
    problem = sized(spec, "bfloat16", tokens=2, batch=1, heads=33, kv_heads=9, head_dim=128)
    inputs, seen = inputs_of(spec, problem), one_of_each_code(spec, problem)
    assert {dict(spec.device(problem, config).constants)["unrolled"] for config in seen} == {False, True}
    assert_right(spec, problem, seen, inputs)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_scale_in_place_by_factors_that_leave_or_clear_everything(factor):
    spec = spec_named("scale")
    problem = sized(spec)
    inputs = inputs_of(spec, problem) | {"factor": torch.tensor([factor])}
    implementation = spec.device(problem, spec.default(problem, INTERPRETED))
    expected, given = inputs["x"] * factor, launch_arguments(implementation, inputs, {"y": inputs["x"]})
    interpreter.launch(implementation.function, (4,), given)
    assert torch.equal(inputs["x"], expected)


def test_rope_backward_undoes_the_forward():
    spec = spec_named("rope")
    forward = sized(spec).but(full=False, inverse=False)
    inputs = inputs_of(spec, forward)
    turned = spec.reference(**inputs, inverse=False)
    back = spec.reference(q=turned["q_out"], k=turned["k_out"], cos=inputs["cos"], sin=inputs["sin"], inverse=True)
    torch.testing.assert_close(back["q_out"], inputs["q"].double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(back["k_out"], inputs["k"].double(), rtol=1e-6, atol=1e-6)
