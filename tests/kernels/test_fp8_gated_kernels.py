"""fp8_gated_forward and fp8_gated_backward by the interpreter beside float64, and their machine code."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, configs, launched, one_of_each_code, resources_of, seen_as

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.fp8.gated import reference_backward, reference_forward
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.verify.canaries import bits

FORWARD, BACKWARD = map(spec_named, ("fp8_gated_forward", "fp8_gated_backward"))
ACTIVATIONS = [{"gelu": False, "tanh": False}, {"gelu": True, "tanh": False}, {"gelu": True, "tanh": True}]
# What the formulas in float32 may be off by, in parts of the result or of what is multiplied by up or dy.
NEAR = 4e-6


def problem_of(spec, rows, columns, dtype="bfloat16", **flags):
    return spec.problem(rows=rows, columns=columns, dtype=dtype, **(ACTIVATIONS[0] | flags))


def matrices(data, rows, columns, dtype, count):
    """Draw matrices whose rows differ in size."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    made = []
    for _ in range(count):
        x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
            -3, 4, (rows, 1), generator=generator
        )
        made.append(x.to(getattr(torch, dtype)))
    return made


def assert_rounded(numbers, scale, exact, terms):
    """Each row has the least scale, and each number is as near as rounding leaves it, but for the formula's own error.

    ``terms``: the sizes of what the formula adds up.
    """
    noise = NEAR * terms
    peaks, scale = exact.abs().amax(1), scale.double()
    least = 2.0 ** torch.ceil(torch.log2((peaks / 448).clamp_min(2.0**-126)))
    is_clear = ((peaks / 448 / least - 1).abs() > 1e-5) & ((2 * peaks / 448 / least - 1).abs() > 1e-5)
    assert torch.equal(scale[is_clear], least[is_clear])
    wanted = exact / scale[:, None]
    # Half of the last of 4 bits, of subnormal numbers 2^-10.
    half = 2.0 ** (torch.floor(torch.log2(wanted.abs().clamp_min(2.0**-6))) - 4)
    assert ((numbers.double() - wanted).abs() <= half * (1 + 1e-6) + noise / scale[:, None]).all()


@examples(60)
@given(data=st.data())
def test_a_gate_is_rounded_once_at_its_least_scale(data):
    columns = data.draw(st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 1025, 2100])), label="columns")
    rows = data.draw(st.integers(1, 4), label="rows")
    dtype, flags = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(ACTIVATIONS))
    view = data.draw(st.sampled_from(VIEWS), label="view")
    gate, up = (seen_as(x, view) for x in matrices(data, rows, columns, dtype, 2))
    problem = problem_of(FORWARD, rows, columns, dtype, **flags)
    config = data.draw(st.sampled_from(configs(FORWARD, FORWARD.bucketed(problem))), label="config")
    persistent = config["schedule"] == "persistent"
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
    made = launched(FORWARD, problem, config, {"gate": gate, "up": up}, blocks)
    exact = reference_forward(gate, up, **flags)["y"]
    assert_rounded(made["y"], made["y_scale"], exact, (gate.double() * up.double()).abs())


@examples(60)
@given(data=st.data())
def test_its_gradients_are_those_of_float64_and_its_result_has_the_forwards_bits(data):
    columns = data.draw(st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 1025])), label="columns")
    rows = data.draw(st.integers(1, 4), label="rows")
    dtype, flags = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(ACTIVATIONS))
    view = data.draw(st.sampled_from(VIEWS), label="view")
    dy, gate, up = (seen_as(x, view) for x in matrices(data, rows, columns, dtype, 3))
    problem = problem_of(BACKWARD, rows, columns, dtype, **flags)
    config = data.draw(st.sampled_from(configs(BACKWARD, BACKWARD.bucketed(problem))), label="config")
    made = launched(BACKWARD, problem, config, {"dy": dy, "gate": gate, "up": up})
    exact = reference_backward(dy, gate, up, **flags)
    slope, wide, other = dy.double().abs(), gate.double().abs(), up.double().abs()
    terms = {"dgate": slope * other * (1 + wide), "dup": slope * wide, "y": wide * other}
    for name, sizes in terms.items():
        assert_rounded(made[name], made[f"{name}_scale"], exact[name], sizes)
    forward = problem_of(FORWARD, rows, columns, dtype, **flags)
    for config in one_of_each_code(FORWARD, forward):
        before = launched(FORWARD, forward, config, {"gate": gate, "up": up})
        assert torch.equal(bits(before["y"]), bits(made["y"]))
        assert torch.equal(before["y_scale"], made["y_scale"])


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_row_with_nan_or_infinity_is_nan_and_others_are_not(odd):
    dy, gate, up = (torch.randn(5, 70).bfloat16() for _ in range(3))
    up[2, 7] = odd
    gate[3] = 0.0
    problem = problem_of(BACKWARD, 5, 70)
    for config in one_of_each_code(BACKWARD, problem):
        made = launched(BACKWARD, problem, config, {"dy": dy, "gate": gate, "up": up})
        for name in ("dgate", "y"):
            assert made[f"{name}_scale"][2].isnan()
            assert made[name][2].float().isnan().all()
        others = [0, 1, 3, 4]
        for name in ("dgate", "dup", "y"):
            assert made[name][others].float().isfinite().all()
        assert made["y_scale"][3] == 2.0**-126
        assert not made["y"][3].float().any()
        assert made["dup_scale"][2].isfinite()


needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("columns", [3072, 12288, 18944])
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
@pytest.mark.share(6)
def test_defaults_spill_nothing_and_load_by_vectors(spec, arch, columns):
    target = resolve(arch)
    for flags in ACTIVATIONS:
        problem = problem_of(spec, 8192, columns, **flags)
        config = spec.default(problem, target)
        made = compile_candidate(spec, problem, config, target, ALIGNED)
        code = read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole
        assert resources_of(spec, problem, made, target).stack_bytes == code.local_accesses == 0
        assert code.load_bytes >= 8 * code.global_loads
        if config["held"]:
            threads, arrays = 32 * (config["num_worker_warps"] or 4), 2 if spec is FORWARD else 3
            width = config["tile_n"] * -(-columns // config["tile_n"])
            assert code.load_bytes == 2 * arrays * width // threads, "a row that is held is read once"
    generic = compile_candidate(spec, problem, spec.generic(problem), target, GENERIC)
    assert resources_of(spec, problem, generic, target).stack_bytes == 0
