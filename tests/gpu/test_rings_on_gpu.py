"""Sums over rows that come through a ring in shared memory, by every config, launched by both launchers."""

import pytest
import torch
from gpu_samples import compiled_plan

from tilekern.compile.cute_compiler import compiler
from tilekern.kernels import all_specs
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import arguments_of, compare, expected_results, make_outputs

SPECS = [spec for spec in all_specs().values() if spec.follower and len(spec.space.beside) > 1]
# Rows, columns, dtypes of rows and of weights: fewer rows than blocks, a ring's last round in part, tails.
SIZES = (
    (8192, 4096, "bfloat16", "bfloat16"), (100, 4096, "float16", "float32"), (1009, 2880, "bfloat16", "bfloat16"),
    (3001, 1000, "float32", "bfloat16"), (517, 8184, "bfloat16", "float32"),
)  # fmt: skip


@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("rows", "columns", "dtype", "weight_dtype"), SIZES)
def test_every_config_is_right_and_gives_the_same_bits_again(spec, rows, columns, dtype, weight_dtype):
    target, sizes = here(), {"rows": rows, "columns": columns, "dtype": dtype, "weight_dtype": weight_dtype}
    problem = spec.problem(**{d.name: sizes.get(d.name, False) for d in spec.dimensions})
    inputs = spec.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    expected = expected_results(spec, problem, inputs)
    rings = [c for c in spec.space.candidates(spec.bucketed(problem), target) if "stages" in c]
    for config in rings:
        plan, implementation = compiled_plan(spec, problem, config, target), spec.device(problem, config)
        found = []
        for _ in range(2):
            found.append(make_outputs(spec, problem, plan.blocks, "cuda"))
            plan.launch(0, *arguments_of(implementation, inputs, found[-1]))
            check = compare(spec, problem, found[-1], expected)
            assert check.passed, (config, check.reason)
        assert all(found[0][name].equal(found[1][name]) for name in found[0]), config
