import math

import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, interpret, one_of_each_code, sized

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import read_machine_code

SPEC = spec_named("llama4_rope")
directions = pytest.mark.parametrize("inverse", [False, True])


@directions
def test_the_angles_of_a_single_batch_entry_are_shared(inverse):
    problem = sized(SPEC, batch=3).but(inverse=inverse)
    inputs = inputs_of(SPEC, problem)
    shared = inputs["angles"][:1]
    for config in configs(SPEC, problem)[:6]:
        for angles in (shared, shared.expand(3, -1, -1)):
            check = interpret(SPEC, problem, config, {**inputs, "angles": angles})
            assert check.passed, (config, check.reason)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(40, 8, 128), (5, 3, 92), (1, 1, 2), (3, 8, 80)], ids=str)
@directions
def test_sizes_of_models(inverse, heads, kv_heads, head_dim):
    sizes = {"tokens": 3, "batch": 2, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    problem = SPEC.problem(**sizes, inverse=inverse, dtype="bfloat16", angle_dtype="float32")
    inputs = inputs_of(SPEC, problem)
    assert_right(SPEC, problem, one_of_each_code(SPEC, problem), inputs)


def test_the_reference_is_the_product_of_complex_numbers_and_its_inverse_undoes_it():
    inputs = inputs_of(SPEC, sized(SPEC))
    turned = SPEC.reference(**inputs, inverse=False)
    freqs_cis = torch.view_as_complex(inputs["angles"].double().unflatten(-1, (-1, 2))).unsqueeze(2)
    for name in ("q", "k"):
        numbers = torch.view_as_complex(inputs[name].double().unflatten(-1, (-1, 2)))
        torch.testing.assert_close(turned[f"{name}_out"], torch.view_as_real(numbers * freqs_cis).flatten(-2))
    back = SPEC.reference(turned["q_out"], turned["k_out"], inputs["angles"], inverse=True)
    torch.testing.assert_close(back["q_out"], inputs["q"].double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(back["k_out"], inputs["k"].double(), rtol=1e-6, atol=1e-6)


def test_a_number_that_is_not_finite_stays_in_its_pair():
    problem = sized(SPEC)
    inputs = inputs_of(SPEC, problem)
    for place, value in ((0, math.nan), (3, math.inf), (6, -math.inf)):
        inputs["q"][..., place] = value
    assert_right(SPEC, problem, configs(SPEC, problem)[:6], inputs)


def test_bytes_counted_by_hand():
    sizes = {"tokens": 4, "batch": 2, "heads": 3, "kv_heads": 1, "head_dim": 10, "inverse": False}
    problem = SPEC.problem(**sizes, dtype="bfloat16", angle_dtype="float32")
    assert SPEC.bytes_moved(problem) == 2 * 320 * 2 + 4 * 10 * 4
    assert SPEC.flops(problem) == 3 * 320


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
def test_pairs_are_rotated_in_the_threads_that_load_them(gpu):
    """q and k go in and out in vectors of 16 bytes; the angles alone go through shared memory."""
    sizes = {"tokens": 4096, "batch": 1, "heads": 40, "kv_heads": 8, "head_dim": 128, "inverse": False}
    problem, target = SPEC.problem(**sizes, dtype="bfloat16", angle_dtype="float32"), resolve(gpu)
    made = compile_candidate(SPEC, problem, SPEC.default(problem, target), target, ALIGNED)
    whole = read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole
    assert whole.store_bytes == 16 * whole.global_stores > 0
    assert whole.load_bytes >= whole.store_bytes
    assert whole.global_loads <= whole.global_stores + 2
    assert whole.shared_accesses < 2 * whole.global_stores
