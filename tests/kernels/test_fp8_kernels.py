"""fp8_rows, fp8_turned and fp8_matmul by the interpreter beside float64, and their machine code."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import FP8_PRODUCTS, made_of, needs_compiler
from spec_samples import VIEWS, configs, launched, one_of_each_code, seen_as

from tilekern.kernels import spec_named
from tilekern.spec import DTYPES, GENERIC
from tilekern.tuning.compile.machine_code import OPCODES
from tilekern.tuning.verify.canaries import bits

ROWS, TURNED, PRODUCT = map(spec_named, ("fp8_rows", "fp8_turned", "fp8_matmul"))
SIDES = st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 256, 1025]))
E4M3 = torch.float8_e4m3fn
# All finite numbers of e4m3, in order: 7 steps of 2^-9, then 8 a power of two from 2^-6 to 2^8, where the last is NaN.
POSITIVE = [n / 512 for n in range(8)] + [2.0**p * (1 + n / 8) for p in range(-6, 9) for n in range(8)][:-1]
GRID = torch.tensor([-x for x in reversed(POSITIVE[1:])] + POSITIVE, dtype=torch.float64)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def normal(data, rows, columns, dtype="bfloat16"):
    """Draw a matrix, some of whose rows have outliers, and whose rows differ in size."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
    if data.draw(st.booleans(), label="outliers"):
        x[::2, columns // 2] *= 1e4
    return x.to(getattr(torch, dtype))


def rounded(x, config=None, blocks=None):
    """Run fp8_rows."""
    problem = ROWS.problem(rows=x.shape[0], columns=x.shape[1], dtype=name_of(x.dtype))
    found = launched(ROWS, problem, config or ROWS.generic(problem), {"x": x}, blocks)
    return found["y"], found["scale"]


def turned(x, scale, config=None, dtype="bfloat16", blocks=None):
    """Run fp8_turned."""
    is_rounded = x.dtype == E4M3
    dtype = dtype if is_rounded else name_of(x.dtype)
    problem = TURNED.problem(rows=x.shape[0], columns=x.shape[1], rounded=is_rounded, dtype=dtype)
    found = launched(TURNED, problem, config or TURNED.generic(problem), {"x": x, "scale": scale}, blocks)
    assert found["y"].shape[1] % 16 == 0
    assert not found["y"][:, x.shape[0] :].float().nan_to_num().any()
    return found["y"][:, : x.shape[0]], found["common"]


def least_scales(x):
    """Return the least powers of two, at least 2^-126, by which the largest magnitude of a row is 448 or less."""
    peaks = x.double().abs().amax(1).tolist()
    return [next(2.0**p for p in range(-126, 129) if peak <= 448 * 2.0**p) for peak in peaks]


def assert_nearest(y, quotient):
    """Each number is on the grid, and no other is nearer; of two that are as near, the one with an even mantissa."""
    y = y.double()
    place = torch.searchsorted(GRID, quotient.contiguous()).clamp(1, len(GRID) - 1)
    low, high = GRID[place - 1], GRID[place]
    below, above = quotient - low, high - quotient
    # Zero's index is even, and each power of two has 8 numbers.
    is_even = ((place - 1) - len(POSITIVE) + 1) % 2 == 0
    assert torch.equal(y, torch.where((below < above) | (below == above) & is_even, low, high))


@examples(60)
@given(data=st.data())
def test_each_number_is_the_nearest_of_x_over_the_least_scale(data):
    columns = data.draw(SIDES, label="columns")
    rows = data.draw(st.integers(1, 5 if columns > 300 else 20), label="rows")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = seen_as(normal(data, rows, columns, dtype).nan_to_num(posinf=6e4), data.draw(st.sampled_from(VIEWS)))
    problem = ROWS.bucketed(ROWS.problem(rows=rows, columns=columns, dtype=dtype))
    config = data.draw(st.sampled_from(configs(ROWS, problem)), label="config")
    persistent = config["schedule"] == "persistent"
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
    y, scale = rounded(x, config, blocks)
    assert scale.tolist() == least_scales(x)
    assert_nearest(y, x.double() / scale.double()[:, None])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_extremes_have_scales_of_their_own(dtype):
    dtype = getattr(torch, dtype)
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.randn(9, 70).to(dtype)
    x[0], x[1], x[2], x[3], x[4] = 0.0, largest, least, least / 64, -448.0
    x[5, 69], x[6, 0], x[7, 5] = math.nan, math.inf, -math.inf
    x[8] = 449.0 if dtype == torch.float32 else 450.0
    problem = ROWS.problem(rows=9, columns=70, dtype=name_of(dtype))
    for config in one_of_each_code(ROWS, problem):
        y, scale = rounded(x, config)
        assert scale[:4].tolist() == [2.0**-126, 2.0**120, 2.0**-126, 2.0**-126]
        assert (scale[4].item(), scale[8].item()) == (1, 2)
        assert scale[5:8].isnan().all()
        assert y[5:8].float().isnan().all()
        finite = [0, 1, 2, 3, 4, 8]
        assert_nearest(y[finite], x[finite].double() / scale[finite].double()[:, None])


def moved(y, scale):
    """Return numbers at the largest scale in float64, before they are rounded."""
    return (y.double() * (scale.double() / scale.double().max())[:, None]).t()


@examples(50)
@given(data=st.data())
def test_a_turned_matrix_has_the_forward_s_numbers(data):
    columns, rows = data.draw(SIDES, label="columns"), data.draw(st.integers(1, 150), label="rows")
    dtype = data.draw(st.sampled_from(["bfloat16", "float32"]), label="dtype")
    x = normal(data, rows, columns, dtype)
    numbers, scale = rounded(x)
    view = data.draw(st.sampled_from(VIEWS), label="view")
    results = []
    for given_x, is_rounded in ((numbers, True), (x, False)):
        problem = TURNED.problem(rows=rows, columns=columns, rounded=is_rounded, dtype=dtype)
        config = data.draw(st.sampled_from(configs(TURNED, TURNED.bucketed(problem))), label="config")
        persistent = config["schedule"] == "persistent"
        blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
        y, common = turned(seen_as(given_x, view), scale, config, dtype, blocks)
        assert torch.equal(common, scale.max().expand(columns))
        exact = moved(numbers, scale)
        assert_nearest(y, exact)
        is_normal = exact.abs() >= 2.0**-6
        assert torch.equal(y.double()[is_normal], exact[is_normal])
        results.append(bits(y))
    assert torch.equal(*results)


@pytest.mark.parametrize("is_rounded", [True, False])
def test_a_row_of_nan_makes_all_of_a_turned_matrix_nan(is_rounded):
    """A scale for all rows can't be told from the others' once one is NaN, and a loss of NaN must not look finite."""
    x = torch.randn(70, 40, dtype=torch.bfloat16)
    x[3, 3] = math.inf
    numbers, scale = rounded(x)
    y, common = turned(numbers if is_rounded else x, scale)
    assert y.float().isnan().all()
    assert common.isnan().all()


def operands(data, m, n, k, dtype):
    """Return e4m3 operands of a product with their scales."""
    (a, a_scale), (b, b_scale) = rounded(normal(data, m, k, dtype)), rounded(normal(data, n, k, dtype))
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}


def multiplied(inputs, config=None, *, over_rows=False, dtype="bfloat16", blocks=None, outputs=None):
    """Run fp8_matmul."""
    (m, k), n = inputs["a"].shape, inputs["b"].shape[0]
    rows, inner = (k, m) if over_rows else (m, k)
    problem = PRODUCT.problem(
        rows=rows, inner=inner, columns=n, over_rows=over_rows, biased="bias" in inputs,
        accumulated="addend" in inputs, dtype=dtype,
    )  # fmt: skip
    found = launched(PRODUCT, problem, config or PRODUCT.generic(problem), inputs, blocks, outputs)
    return found["c"]


@examples(50)
@given(data=st.data())
def test_products_are_those_of_the_dequantised_operands(data):
    m, n, k = (data.draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 129, 260])), label=s) for s in "mnk")
    over_rows = data.draw(st.booleans(), label="over_rows")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    inputs = operands(data, m, n, k, "float32")
    views = st.sampled_from(["contiguous", "wide_rows", "offset"])
    inputs |= {name: seen_as(inputs[name], data.draw(views, label=name)) for name in "ab"}
    # Of float16 the results could be infinite.
    inputs |= {name: inputs[name] * 2.0**-14 for name in ("a_scale", "b_scale")}
    wide = (inputs["a"].double() * inputs["a_scale"].double()[:, None]) @ (
        inputs["b"].double() * inputs["b_scale"].double()[:, None]
    ).t()
    terms = (inputs["a"].double() * inputs["a_scale"].double()[:, None]).abs() @ (
        inputs["b"].double() * inputs["b_scale"].double()[:, None]
    ).abs().t()
    if data.draw(st.booleans(), label="biased"):
        inputs["bias"] = torch.randn(n).to(getattr(torch, dtype))
        wide = wide + inputs["bias"].double()
    if data.draw(st.booleans(), label="accumulated"):
        inputs["addend"] = torch.randn(m, n).to(getattr(torch, dtype))
        wide = wide + inputs["addend"].double()
    rows, inner = (k, m) if over_rows else (m, k)
    problem = PRODUCT.bucketed(
        PRODUCT.problem(
            rows=rows, inner=inner, columns=n, over_rows=over_rows, biased="bias" in inputs,
            accumulated="addend" in inputs, dtype=dtype,
        )
    )  # fmt: skip
    tiles = [config for config in configs(PRODUCT, problem) if not PRODUCT.is_library(problem, config)]
    config = data.draw(st.sampled_from(tiles), label="config")
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if config["schedule"] == "persistent" else None
    c = multiplied(inputs, config, over_rows=over_rows, dtype=dtype, blocks=blocks)
    unit = torch.finfo(c.dtype).eps / 2
    smallest = torch.finfo(c.dtype).smallest_normal * 2 * unit
    assert ((c.double() - wide).abs() <= unit * 1.01 * wide.abs() + (k + 4) * 2.0**-24 * (terms + 4) + smallest).all()
    again = multiplied(inputs, config, over_rows=over_rows, dtype=dtype, blocks=blocks)
    assert torch.equal(bits(c), bits(again))


def test_a_row_with_the_scale_nan_makes_its_results_nan_and_no_others():
    x, weight = torch.randn(9, 40), torch.randn(33, 40)
    x[2, 7], weight[5, 1] = math.nan, math.inf
    (a, a_scale), (b, b_scale) = rounded(x), rounded(weight)
    c = multiplied({"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale})
    assert c[2].isnan().all()
    assert c[:, 5].isnan().all()
    others = c[[i for i in range(9) if i != 2]][:, [j for j in range(33) if j != 5]]
    assert others.isfinite().all()


def test_a_result_may_be_added_to_in_place():
    x, weight = torch.randn(70, 40), torch.randn(130, 40)
    (a, a_scale), (b, b_scale) = rounded(x), rounded(weight)
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "addend": torch.randn(70, 130)}
    apart = multiplied(inputs, dtype="float32")
    c = inputs["addend"]
    multiplied(inputs, dtype="float32", outputs={"c": c})
    assert torch.equal(c, apart)


def product_of(*flags, rows=8192, dtype="bfloat16"):
    named = {name: name in flags for name in ("over_rows", "biased", "accumulated")}
    return PRODUCT.problem(rows=rows, inner=4096, columns=6144, dtype=dtype, **named)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("flags", [(), ("over_rows",), ("biased", "accumulated")], ids="-".join)
@pytest.mark.share(6)
def test_products_multiply_8_bit_floats_and_spill_nothing(arch, flags):
    for rows in (8192, 512):
        resources, code, opcodes = made_of(PRODUCT, product_of(*flags, rows=rows), arch)
        assert resources.stack_bytes == code.whole.local_accesses == 0
        names = {OPCODES["products"][opcode] for opcode in opcodes if opcode in OPCODES["products"]}
        assert names == {FP8_PRODUCTS[arch]}
        assert code.whole.bulk_loads >= 2
    generic, *_ = made_of(PRODUCT, product_of(*flags), arch, GENERIC)
    assert generic.stack_bytes == 0


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("columns", "loads"), [(4096, 4), (12288, 6), (16384, 8)])
@pytest.mark.share(6)
def test_rows_that_are_held_are_loaded_once_by_vectors(arch, columns, loads):
    problem = ROWS.problem(rows=8192, columns=columns, dtype="bfloat16")
    resources, code, _ = made_of(ROWS, problem, arch)
    assert resources.stack_bytes == code.whole.local_accesses == 0
    # A thread of 128 or 256 loads a share of the row.
    assert (code.whole.global_loads, code.whole.load_bytes) == (loads, 16 * loads)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("is_rounded", [True, False])
def test_turned_tiles_come_and_go_by_tma(arch, is_rounded):
    problem = TURNED.problem(rows=8192, columns=4096, rounded=is_rounded, dtype="bfloat16")
    resources, code, _ = made_of(TURNED, problem, arch)
    assert resources.stack_bytes == code.whole.local_accesses == 0
    assert code.whole.bulk_loads >= 1
    assert code.whole.bulk_stores >= 1
