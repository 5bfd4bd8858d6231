"""Heads turned by every config that CuTe DSL compiles, with angles of one batch entry and sections of any sizes."""

import pytest
import torch
from gpu_samples import compiled_plan

from tilekern.compile.cute_compiler import compiler
from tilekern.kernels import spec_named
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import arguments_of, compare, expected_results, make_outputs

SIZES = {"tokens": 1009, "batch": 2, "heads": 28, "kv_heads": 4, "head_dim": 128, "full": False, "dtype": "bfloat16"}
# Frequencies of time and of height: those of models, then such that end inside of a thread's vector, once or twice.
SECTIONS = ((16, 24), (64, 0), (0, 0), (10, 27), (12, 2), (1, 62))


def problem_of(spec, **more):
    values = SIZES | more
    return spec.problem(**{d.name: values[d.name] for d in spec.dimensions})


def with_any_sections(spec, problem):
    """Inputs of a problem with several sections where it has some; then with the angles of one batch entry alone."""
    drawn = spec.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    sections = SECTIONS if "time" in drawn else ()
    found = [drawn, *(drawn | {"time": time, "height": height} for time, height in sections)]
    return [*found, *(each | {name: each[name][..., :1, :, :] for name in ("cos", "sin")} for each in found)]


@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize("name", ["rope", "qwen2vl_mrope"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("angle_dtype", ["bfloat16", "float32"])
def test_every_config_of_cute_dsl_is_right(name, inverse, angle_dtype):
    spec, target = spec_named(name), here()
    problem = problem_of(spec, inverse=inverse, angle_dtype=angle_dtype)
    given = with_any_sections(spec, problem)
    expected = [expected_results(spec, problem, inputs) for inputs in given]
    for config in filter(is_cute, spec.space.candidates(spec.bucketed(problem), target)):
        plan, implementation = compiled_plan(spec, problem, config, target), spec.device(problem, config)
        for inputs, right in zip(given, expected, strict=True):
            outputs = make_outputs(spec, problem, plan.blocks, "cuda")
            plan.launch(0, *arguments_of(implementation, inputs, outputs))
            check = compare(spec, problem, outputs, right)
            assert check.passed, (config, inputs.get("time"), inputs.get("height"), check.reason)
