import math

import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, interpret, one_of_each_code, resources_of, sized

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import read_machine_code

SPEC, ROPE = spec_named("qwen2vl_mrope"), spec_named("rope")
directions = pytest.mark.parametrize("inverse", [False, True])


def sections(half):
    """Numbers of frequencies of time and of height: none, all, and what lies between."""
    return [(0, 0), (half, 0), (0, half), (half // 4, half // 2), (0, 1), (half // 2, half - half // 2)]


@directions
@pytest.mark.parametrize("head_dim", [2, 12, 16])
def test_any_sections(inverse, head_dim):
    problem = sized(SPEC, head_dim=head_dim).but(inverse=inverse)
    inputs = inputs_of(SPEC, problem)
    for time, height in sections(head_dim // 2):
        assert_right(SPEC, problem, configs(SPEC, problem)[:4], inputs | {"time": time, "height": height})


@directions
def test_the_angles_of_a_single_batch_entry_are_shared(inverse):
    problem = sized(SPEC, batch=3).but(inverse=inverse)
    inputs = inputs_of(SPEC, problem)
    shared = {name: inputs[name][:, :1] for name in ("cos", "sin")}
    for config in configs(SPEC, problem)[:6]:
        for angles in (shared, {name: x.expand(-1, 3, -1, -1) for name, x in shared.items()}):
            check = interpret(SPEC, problem, config, {**inputs, **angles})
            assert check.passed, (config, check.reason)


def test_only_the_angle_of_its_position_counts_for_a_frequency():
    problem = sized(SPEC)
    inputs = inputs_of(SPEC, problem)
    edges = (0, inputs["time"], inputs["time"] + inputs["height"], problem["head_dim"] // 2)
    for name in ("cos", "sin"):
        chosen = torch.full_like(inputs[name], torch.nan)
        for position in range(3):
            part = slice(edges[position], edges[position + 1])
            chosen[position, ..., part] = inputs[name][position, ..., part]
        inputs[name] = chosen
    for config in configs(SPEC, problem)[:6]:
        check = interpret(SPEC, problem, config, inputs)
        assert check.passed, (config, check.reason)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (5, 3, 92), (1, 1, 2), (3, 8, 80)], ids=str)
@directions
def test_sizes_of_models(inverse, heads, kv_heads, head_dim):
    sizes = {"tokens": 3, "batch": 2, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    problem = SPEC.problem(**sizes, inverse=inverse, dtype="bfloat16", angle_dtype="float32")
    assert_right(SPEC, problem, one_of_each_code(SPEC, problem), inputs_of(SPEC, problem))


@directions
def test_the_reference_of_one_section_is_that_of_rope(inverse):
    inputs = inputs_of(SPEC, sized(SPEC))
    half = inputs["q"].shape[-1] // 2
    for position, (time, height) in enumerate(((half, 0), (0, half), (0, 0))):
        found = SPEC.reference(**inputs | {"time": time, "height": height}, inverse=inverse)
        angles = {name: inputs[name][position, ..., :half] for name in ("cos", "sin")}
        right = ROPE.reference(inputs["q"], inputs["k"], **angles, inverse=inverse)
        assert all(torch.equal(found[name], right[name]) for name in right)


def test_a_number_that_is_not_finite_stays_in_its_pair():
    problem = sized(SPEC)
    inputs = inputs_of(SPEC, problem)
    for place, value in ((0, math.nan), (3, math.inf), (6, -math.inf)):
        inputs["q"][..., place] = value
    assert_right(SPEC, problem, configs(SPEC, problem)[:6], inputs)


@directions
def test_the_bytes_are_those_of_rope(inverse):
    for angle_dtype in ("bfloat16", "float32"):
        problem = sized(SPEC, "bfloat16").but(inverse=inverse, angle_dtype=angle_dtype)
        alike = sized(ROPE, "bfloat16").but(inverse=inverse, angle_dtype=angle_dtype, full=False)
        assert SPEC.bytes_moved(problem) == ROPE.bytes_moved(alike)
        assert SPEC.flops(problem) == ROPE.flops(alike)


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@directions
@pytest.mark.share(4)
def test_heads_are_read_and_written_in_vectors_and_angles_once_for_q_and_k(gpu, inverse):
    sizes = {"tokens": 8192, "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "inverse": inverse}
    problem, target = SPEC.problem(**sizes, dtype="bfloat16", angle_dtype="bfloat16"), resolve(gpu)
    made = compile_candidate(SPEC, problem, SPEC.default(problem, target), target, ALIGNED)
    assert resources_of(SPEC, problem, made, target).stack_bytes == 0
    whole = read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole
    angles = whole.global_loads - whole.global_stores
    assert whole.store_bytes == 8 * whole.global_stores > 0
    assert whole.load_bytes == whole.store_bytes + 2 * angles
    assert angles < whole.global_stores
