"""Every spec's default, out of the cache, against float64 on the GPU."""

import pytest
import torch
from gpu_samples import ROWS, cases, inputs_on_gpu, name_of, problem_of, run
from spec_samples import VIEWS, seen_as

every_case = pytest.mark.parametrize("case", cases(), ids=name_of)


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
    assert len(variants) == 1
    if view in ("offset", "reversed"):
        matrices = [x for x in seen.values() if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[-1] > 1]
        misaligned = any(x.data_ptr() % 16 or x.stride(-1) != 1 for x in matrices)
        assert variants == ["generic"] or not misaligned


def test_an_aligned_tensor_gets_the_aligned_cubin(variants):
    for kernel in ("rms_norm_forward", "rms_norm_backward", "swiglu_forward", "swiglu_backward", "rope"):
        case = next(case for case in cases() if case[0] == kernel)
        spec, problem = problem_of(case, 64)
        assert run(spec, problem, inputs_on_gpu(spec, problem)).passed
    assert set(variants) == {"aligned"}


def test_one_plan_serves_aligned_and_misaligned_tensors_in_turn(variants):
    case = next(case for case in cases() if case[0] == "rms_norm_forward")
    spec, problem = problem_of(case, 33)
    inputs = inputs_on_gpu(spec, problem)
    for view in ("contiguous", "offset", "contiguous", "reversed", "offset"):
        assert run(spec, problem, {**inputs, "x": seen_as(inputs["x"], view)}).passed
    assert variants[0] == "aligned"
    assert set(variants[1:]) == {"generic"}
