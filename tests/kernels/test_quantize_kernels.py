"""quantize_rows and dequantize_rows: every number beside float64, and rows whose scale is not absmax / 127."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, configs, launched, one_of_each_code, resources_of, seen_as

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import resolve

QUANTIZE, DEQUANTIZE = spec_named("quantize_rows"), spec_named("dequantize_rows")
SIDES = st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 256, 2048, 2049, 4100]))


def quantized(x, config=None, blocks=None):
    rows, columns = x.shape
    problem = QUANTIZE.problem(rows=rows, columns=columns, dtype=str(x.dtype).removeprefix("torch."))
    found = launched(QUANTIZE, problem, config or QUANTIZE.generic(problem), {"x": x}, blocks)
    return found["y"], found["scale"]


@examples(80)
@given(data=st.data())
def test_numbers_are_nearest_multiples_of_the_scale_and_the_largest_is_127(data):
    columns = data.draw(SIDES, label="columns")
    rows = data.draw(st.integers(1, 5 if columns > 300 else 20), label="rows")
    dtype = getattr(torch, data.draw(st.sampled_from(DTYPES), label="dtype"))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    size = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), label="size")
    x = seen_as((torch.randn(rows, columns, generator=generator) * size).to(dtype), data.draw(st.sampled_from(VIEWS)))
    problem = QUANTIZE.bucketed(QUANTIZE.problem(rows=rows, columns=columns, dtype=str(dtype).removeprefix("torch.")))
    config = data.draw(st.sampled_from(configs(QUANTIZE, problem)), label="config")
    persistent = config["schedule"] == "persistent"
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
    y, scale = quantized(x, config, blocks)
    peak = x.double().abs().amax(1)
    assert torch.equal(scale, (peak / 127).float())
    quotient = x.double() / scale.double()[:, None]
    # In float32 a quotient has an error of 127 * 2^-24.
    assert (y - quotient).abs().max() <= 0.5 + 1e-5
    assert torch.equal(y.int().abs().amax(1), torch.full((rows,), 127))


def test_halves_become_even_and_minus_zero_becomes_zero():
    numbers = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, -0.0, 0.0, 0.49999997]
    y, scale = quantized(torch.tensor([numbers]))
    assert scale.item() == 1
    assert y[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126, -126, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_have_the_scale_1_and_those_that_are_not_finite_nan(dtype):
    x = torch.randn(6, 70).to(getattr(torch, dtype))
    x[0], x[1], x[2, 69], x[3, 0], x[4, 5] = 0.0, -0.0, math.nan, math.inf, -math.inf
    problem = QUANTIZE.problem(rows=6, columns=70, dtype=dtype)
    for config in one_of_each_code(QUANTIZE, problem):
        y, scale = quantized(x, config)
        assert scale[:2].tolist() == [1, 1]
        assert scale[2:5].isnan().all()
        assert not y[:5].any()
        assert torch.equal(scale[5], (x[5].double().abs().max() / 127).float())


def test_numbers_that_are_nearly_zero_stay_inside_127_steps():
    """2^-149 is the least float32: 190 of it over 127 round to one, and 60 over 127 to none."""
    least = 2.0**-149
    y, scale = quantized(torch.tensor([[190 * least, -190 * least], [60 * least, least]]))
    assert scale.tolist() == [least, 1]
    assert y.tolist() == [[127, -127], [0, 0]]


def test_the_largest_numbers_keep_their_sign():
    largest = torch.finfo(torch.float32).max
    y, scale = quantized(torch.tensor([[largest, -largest, largest / 3]]))
    assert y.tolist() == [[127, -127, 42]]
    assert scale.isfinite().all()


@examples(60)
@given(data=st.data())
def test_dequantized_numbers_are_rounded_once(data):
    columns, rows = data.draw(SIDES, label="columns"), data.draw(st.integers(1, 9), label="rows")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    x = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    scale = torch.rand(rows, generator=generator) * 1e-2
    scale[0] = data.draw(st.sampled_from([1.0, math.nan, 0.1]), label="scale")
    problem = DEQUANTIZE.bucketed(DEQUANTIZE.problem(rows=rows, columns=columns, dtype=dtype))
    config = data.draw(st.sampled_from(configs(DEQUANTIZE, problem)), label="config")
    found = launched(DEQUANTIZE, problem.but(rows=rows, columns=columns), config, {"x": x, "scale": scale})["y"]
    assert torch.equal(found.nan_to_num(7), (x.float() * scale[:, None]).to(found.dtype).nan_to_num(7))


def test_a_part_of_a_larger_matrix_is_written_alone():
    x, whole = torch.randn(5, 40), torch.full((9, 48), 7, dtype=torch.int8)
    problem = QUANTIZE.problem(rows=5, columns=40, dtype="float32")
    part, scale = whole[2:7, :40], torch.zeros(5)
    for config in one_of_each_code(QUANTIZE, problem):
        launched(QUANTIZE, problem, config, {"x": x}, outputs={"y": part, "scale": scale})
        assert torch.equal(part, quantized(x)[0])
    part.fill_(7)
    assert (whole == 7).all()


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("spec", [QUANTIZE, DEQUANTIZE], ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.share(6)
def test_any_dtype_compiles_and_spills_nothing(arch, spec, dtype):
    target, problem = resolve(arch), spec.problem(rows=4096, columns=12288, dtype=dtype)
    for config, variant in ((spec.default(problem, target), ALIGNED), (spec.generic(problem), GENERIC)):
        made = compile_candidate(spec, problem, config, target, variant)
        assert resources_of(spec, problem, made, target).stack_bytes == 0
