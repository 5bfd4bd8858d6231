"""Every spec's default, out of the cache, against float64 on the GPU."""

import pytest
import torch
from gpu_samples import ROWS, cases, inputs_on_gpu, name_of, plan_of, problem_of, run, run_library
from spec_samples import VIEWS, seen_as

from tilekern.kernels import all_specs
from tilekern.spec import ArrayParameter
from tilekern.spec.targets import here

CASES = cases()
every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
LIBRARIES = (
    "attention_forward", "attention_backward", "matmul", "fused_linear_cross_entropy", "grouped_linear",
    "grouped_weight_gradient",
)  # fmt: skip


def test_every_spec_has_a_case():
    assert {kernel for kernel, _ in CASES} == set(all_specs())


@every_case
@pytest.mark.parametrize("rows", ROWS)
def test_odd_row_counts(case, rows):
    spec, problem = problem_of(case, rows)
    check = run(spec, problem, inputs_on_gpu(spec, problem))
    assert check.passed, check.reason


@every_case
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_of_any_layout(case, view, variants):
    """The launcher looks at the real pointers and strides: what is not aligned never meets the aligned cubin."""
    spec, problem = problem_of(case, 61)
    inputs = inputs_on_gpu(spec, problem)
    seen = {name: seen_as(x, view) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    check = run(spec, problem, seen)
    assert check.passed, check.reason
    config = plan_of(spec, problem).config
    if spec.is_library(problem, config):
        return
    assert len(variants) == 1
    if view in ("offset", "reversed"):
        parameters = spec.device(problem, config).parameters
        aligned = [p.name for p in parameters if isinstance(p, ArrayParameter) and p.aligned]
        matrices = [seen[name] for name in aligned if name in seen and seen[name].dim() > 1]
        matrices = [x for x in matrices if x.shape[-1] > 1]
        misaligned = any(x.data_ptr() % 16 or x.stride(-1) != 1 for x in matrices)
        assert variants == ["generic"] or not misaligned


def test_an_aligned_tensor_gets_the_aligned_cubin(variants):
    """Try kernels of 16-bit training; the first case of each has sizes that 16 divides."""
    for kernel in all_specs():
        case = next(case for case in CASES if case[0] == kernel)
        spec, problem = problem_of(case, 64)
        assert run(spec, problem, inputs_on_gpu(spec, problem)).passed
        assert set(variants) <= {"aligned"}, kernel


def test_one_plan_serves_aligned_and_misaligned_tensors_in_turn(variants):
    case = next(case for case in CASES if case[0] == "rms_norm_forward")
    spec, problem = problem_of(case, 33)
    inputs = inputs_on_gpu(spec, problem)
    for view in ("contiguous", "offset", "contiguous", "reversed", "offset"):
        assert run(spec, problem, {**inputs, "x": seen_as(inputs["x"], view)}).passed
    assert variants[0] == "aligned"
    assert set(variants[1:]) == {"generic"}


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in LIBRARIES], ids=name_of)
@pytest.mark.parametrize("rows", [61, 1009])
def test_every_config_that_a_library_runs(case, rows):
    """cuBLAS, cuDNN, and sequences of kernels and products: hardly a default has them, but a tuned cache may."""
    spec, problem = problem_of(case, rows)
    inputs = inputs_on_gpu(spec, problem)
    for config in spec.space.candidates(problem, here()):
        if spec.is_library(problem, config):
            check = run_library(spec, problem, spec.implement(problem, config), inputs)
            assert check.passed, (config, check.reason)
