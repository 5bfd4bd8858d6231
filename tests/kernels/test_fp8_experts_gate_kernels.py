"""fp8_experts_gate and its backward by the interpreter beside float64, and their machine code."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, inputs_of, launched, one_of_each_code, resources_of

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.verify.check import expected_results

FORWARD, BACKWARD = map(spec_named, ("fp8_experts_gate", "fp8_experts_gate_backward"))
both = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
SCALES = {FORWARD: {"y": "scale"}, BACKWARD: {"dpre": "dpre_scale", "y": "y_scale"}}
GPT_OSS = {"interleaved": True, "biased": True}


def problem_of(spec, rows, columns, dtype="bfloat16", **flags):
    known = {"tanh": False, "interleaved": False, "biased": False, "dtype": dtype} | flags
    weights = {"weight_dtype": "float32"} if spec is BACKWARD else {}
    return spec.problem(rows=rows, columns=columns, **known, **weights)


def assert_rounded(numbers, scale, exact):
    """Each row has the least scale but where the formula's own error decides, and is rounded once."""
    peaks, scale = exact.abs().amax(1), scale.double()
    least = 2.0 ** torch.ceil(torch.log2((peaks / 448).clamp_min(2.0**-126)))
    is_clear = ((peaks / 448 / least - 1).abs() > 1e-4) & ((2 * peaks / 448 / least - 1).abs() > 1e-4)
    assert torch.equal(scale[is_clear], least[is_clear])
    error = (numbers.double() * scale[:, None] - exact).abs()
    assert (error <= 2.0**-4 * 1.0001 * exact.abs() + (2.0**-10 + 1e-4) * scale[:, None]).all()


@both
@examples(40)
@given(data=st.data())
def test_results_are_rounded_once_at_their_rows_least_scale(spec, data):
    columns = data.draw(st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 1025, 2100])), label="columns")
    rows, dtype = data.draw(st.integers(1, 6), label="rows"), data.draw(st.sampled_from(DTYPES), label="dtype")
    flags = {name: data.draw(st.booleans(), label=name) for name in ("tanh", "interleaved", "biased")}
    problem = problem_of(spec, rows, columns, dtype, **flags)
    config = data.draw(st.sampled_from(configs(spec, spec.bucketed(problem))), label="config")
    persistent = config["schedule"] == "persistent"
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
    inputs = inputs_of(spec, problem, data.draw(st.integers(0, 9), label="seed"))
    made, exact = launched(spec, problem, config, inputs, blocks), expected_results(spec, problem, inputs)
    for name, of in SCALES[spec].items():
        assert_rounded(made[name], made[of], exact[name])
    if spec is BACKWARD:
        torch.testing.assert_close(made["dweights"].double(), exact["dweights"], rtol=1e-4, atol=1e-4)
    if "wide" in exact:
        near = {"rtol": 1e-2, "atol": 1e-2} if dtype != "float32" else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(made["wide"].double(), exact["wide"], **near)


@both
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_nan_and_others_are_not(spec, odd):
    problem = problem_of(spec, 6, 70)
    inputs = inputs_of(spec, problem)
    inputs["experts"] = torch.tensor([0, 1, 2, 0, 1, inputs["total"]], dtype=torch.int32)
    inputs["pre"][2, 75], inputs["pre"][5, 3], inputs["pre"][3] = odd, odd, 0.0
    inputs |= {"limit": math.inf, "shift": 0.0}
    for config in one_of_each_code(spec, problem):
        made = launched(spec, problem, config, inputs)
        assert made["y"].float().isnan().all(1).tolist() == [n == 2 for n in range(6)]
        assert made["y"].float().isfinite().all(1).tolist() == [n != 2 for n in range(6)]
        # Zeros, and a row without an expert.
        for row in (3, 5):
            assert made[SCALES[spec]["y"]][row] == 2.0**-126
            assert not made["y"][row].float().any()


needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


@needs_compiler
@both
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("columns", "flags"), [(768, {}), (2880, GPT_OSS), (14336, {})], ids=["768", "2880", "14336"])
@pytest.mark.share(6)
def test_defaults_spill_nothing_and_load_by_vectors(spec, arch, columns, flags):
    target, problem = resolve(arch), problem_of(spec, 32768, columns, **flags)
    made = compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED)
    code = read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole
    assert resources_of(spec, problem, made, target).stack_bytes == code.local_accesses == 0
    assert code.load_bytes >= 6 * code.global_loads
    generic = compile_candidate(spec, problem, spec.generic(problem), target, GENERIC)
    assert resources_of(spec, problem, generic, target).stack_bytes == 0
