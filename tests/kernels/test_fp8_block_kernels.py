"""fp8_blocks, fp8_weight_blocks and fp8_block_matmul by the interpreter beside float64, and their machine code."""

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

BLOCKS, WEIGHT, PRODUCT = map(spec_named, ("fp8_blocks", "fp8_weight_blocks", "fp8_block_matmul"))
SIDES = st.one_of(st.integers(1, 60), st.sampled_from([127, 128, 129, 255, 260]))
# Rounding to 4 significant bits is off by 2^-4 of a normal number at most, and by 2^-10 of the scale of others.
ROUNDING, LEAST = 2.0**-4, 2.0**-10


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def normal(data, rows, columns, dtype="bfloat16"):
    """Draw a matrix whose rows differ in size and some of whose elements are outliers."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
    if data.draw(st.booleans(), label="outliers"):
        x[::2, columns // 2] *= 1e4
    return x.to(getattr(torch, dtype)).nan_to_num(posinf=6e4, neginf=-6e4)


def grid_for(data, config):
    return data.draw(st.sampled_from([None, 1, 3]), label="blocks") if config["schedule"] == "persistent" else None


def blocked(x, config=None, *, both=True, blocks=None):
    """Run fp8_blocks."""
    problem = BLOCKS.problem(rows=x.shape[0], columns=x.shape[1], both=both, dtype=name_of(x.dtype))
    return launched(BLOCKS, problem, config or BLOCKS.generic(problem), {"x": x}, blocks)


def squared(x, config=None, *, turned=False, blocks=None):
    """Run fp8_weight_blocks."""
    problem = WEIGHT.problem(rows=x.shape[0], columns=x.shape[1], turned=turned, dtype=name_of(x.dtype))
    found = launched(WEIGHT, problem, config or WEIGHT.generic(problem), {"x": x}, blocks)
    return found["y"], found["scale"]


def least_scale(peak):
    """Return the least power of two, at least 2^-126, by which a magnitude is 448 or less."""
    return next(2.0**p for p in range(-126, 129) if peak <= 448 * 2.0**p)


def assert_rounded(numbers, scale, x):
    """All numbers are those of ``x`` in scales [rows, columns] but for one rounding."""
    wide = numbers.double() * scale
    assert ((wide - x.double()).abs() <= ROUNDING * x.double().abs() + LEAST * scale).all()


def assert_rows_of_blocks(numbers, scale, x):
    """Check numbers and scales [columns / 128, rows] of 1 x 128 blocks."""
    rows, columns = x.shape
    for n, block in enumerate(x.double().split(128, 1)):
        steps = scale[n, :rows].double()
        assert steps.tolist() == [least_scale(peak) for peak in block.abs().amax(1).tolist()]
        assert_rounded(numbers[:, 128 * n : 128 * (n + 1)], steps[:, None], block)
    assert scale.shape == (-(-columns // 128), 16 * -(-rows // 16))


@examples(40)
@given(data=st.data())
def test_each_128_numbers_of_a_row_or_a_column_have_the_least_scale(data):
    rows, columns = data.draw(SIDES, label="rows"), data.draw(SIDES, label="columns")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = seen_as(normal(data, rows, columns, dtype), data.draw(st.sampled_from(VIEWS)))
    both = data.draw(st.booleans(), label="both")
    problem = BLOCKS.bucketed(BLOCKS.problem(rows=rows, columns=columns, both=both, dtype=dtype))
    config = data.draw(st.sampled_from(configs(BLOCKS, problem)), label="config")
    found = blocked(x, config, both=both, blocks=grid_for(data, config))
    assert_rows_of_blocks(found["y"], found["scale"], x)
    if both:
        assert found["turned"].shape == (columns, 16 * -(-rows // 16))
        assert_rows_of_blocks(found["turned"][:, :rows], found["turned_scale"], x.t())
        assert not found["turned"][:, rows:].float().any()


@examples(30)
@given(data=st.data())
def test_a_turned_weight_has_the_same_numbers_and_scales(data):
    rows, columns = data.draw(SIDES, label="rows"), data.draw(SIDES, label="columns")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = seen_as(normal(data, rows, columns, dtype), data.draw(st.sampled_from(VIEWS)))
    found = []
    for turned in (False, True):
        problem = WEIGHT.bucketed(WEIGHT.problem(rows=rows, columns=columns, turned=turned, dtype=dtype))
        config = data.draw(st.sampled_from(configs(WEIGHT, problem)), label="config")
        found.append(squared(x, config, turned=turned, blocks=grid_for(data, config)))
    (y, scale), (turned_y, turned_scale) = found
    assert torch.equal(bits(turned_y[:, :rows]), bits(y).t())
    assert torch.equal(turned_scale, scale.t())
    assert not turned_y[:, rows:].float().any()
    for i, band in enumerate(x.double().split(128, 0)):
        for j, block in enumerate(band.split(128, 1)):
            assert scale[i, j] == least_scale(block.abs().max().item())
            assert_rounded(y[128 * i :, 128 * j :][:128, :128], scale[i, j].double(), block)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_blocks_nan_and_no_other(odd):
    x = torch.randn(140, 300, dtype=torch.bfloat16)
    x[130, 140] = odd
    found = blocked(x)
    wanted = torch.zeros_like(x, dtype=torch.bool)
    wanted[130, 128:256] = True
    assert torch.equal(found["y"].float().isnan(), wanted)
    assert found["scale"].isnan().nonzero().tolist() == [[1, 130]]
    wanted = torch.zeros_like(wanted).index_fill_(1, torch.tensor(140), True)
    wanted[:128] = False
    assert torch.equal(found["turned"][:, :140].float().isnan(), wanted.t())
    assert found["turned_scale"].isnan().nonzero().tolist() == [[1, 140]]
    y, scale = squared(x)
    assert scale.isnan().nonzero().tolist() == [[1, 1]]
    assert y.float().isnan().sum() == 12 * 128


def test_blocks_of_zeros_and_of_the_least_numbers_are_exact():
    x = torch.zeros(130, 260)
    x[3, :128], x[4, 130], x[5, 259] = 2.0**-126, 2.0**-135, torch.finfo(torch.float32).max
    for found in (blocked(x, config) for config in one_of_each_code(BLOCKS, problem_of(BLOCKS, x, both=True))):
        wide = found["y"].double() * found["scale"].double().t().repeat_interleave(128, 1)[:130, :260]
        assert torch.equal(wide[:5, :130], x[:5, :130].double())
        assert wide[5, 259] == 2.0**128
        assert not found["y"][6:].float().any()
        assert (found["scale"][:, 6:] == 2.0**-126).all()


def problem_of(spec, x, **flags):
    return spec.problem(rows=x.shape[0], columns=x.shape[1], dtype=name_of(x.dtype), **flags)


def test_an_outlier_of_1e4_costs_its_own_block_resolution_and_no_other():
    """Of the other blocks each number is as exact as without it, where a scale for the row would leave none."""
    x = torch.randn(130, 300) / 100
    before, squares = blocked(x), squared(x)
    x[129, 5] = 1e4
    after, squares_after = blocked(x), squared(x)
    y, turned = (bits(before[name]) != bits(after[name]) for name in ("y", "turned"))
    assert set(y.nonzero()[:, 0].tolist()) == {129}
    assert y.nonzero()[:, 1].max() < 128
    assert set(turned.nonzero()[:, 0].tolist()) == {5}
    assert turned.nonzero()[:, 1].min() >= 128
    changed = (bits(squares[0]) != bits(squares_after[0])).nonzero()
    assert changed[:, 0].min() >= 128
    assert changed[:, 1].max() < 128


def operands(data, m, n, k, over_rows):
    """Return e4m3 operands of a product with their scales, and both in float64."""
    x, w = normal(data, m, k, "float32"), normal(data, n, k, "float32")
    a = blocked(x, both=False)
    if over_rows:
        b = blocked(w, both=False)
        b, across = b["y"], b["scale"][:, :n]
        wide_b = across.double().t().repeat_interleave(128, 1)[:, :k] * b.double()
    else:
        b, across = squared(w)
        wide_b = across.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] * b.double()
    wide_a = a["scale"][:, :m].double().t().repeat_interleave(128, 1)[:, :k] * a["y"].double()
    return {"a": a["y"], "b": b, "a_scale": a["scale"][:, :m], "b_scale": across}, wide_a, wide_b


def problem_of_product(inputs, over_rows, dtype):
    (m, k), n = inputs["a"].shape, inputs["b"].shape[0]
    rows, inner = (k, m) if over_rows else (m, k)
    return PRODUCT.problem(
        rows=rows, inner=inner, columns=n, over_rows=over_rows, biased="bias" in inputs,
        accumulated="addend" in inputs, dtype=dtype,
    )  # fmt: skip


def multiplied(inputs, config=None, *, over_rows=False, dtype="bfloat16", blocks=None, outputs=None):
    """Run fp8_block_matmul."""
    problem = problem_of_product(inputs, over_rows, dtype)
    return launched(PRODUCT, problem, config or PRODUCT.generic(problem), inputs, blocks, outputs)["c"]


@examples(50)
@given(data=st.data())
def test_products_are_those_of_the_dequantised_operands(data):
    m, n, k = (data.draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 129, 260])), label=s) for s in "mnk")
    over_rows = data.draw(st.booleans(), label="over_rows")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    inputs, wide_a, wide_b = operands(data, m, n, k, over_rows)
    # Of float16 the results could be infinite.
    for name in ("a_scale", "b_scale"):
        inputs[name] = inputs[name] * 2.0**-16
    wide_a, wide_b = wide_a * 2.0**-16, wide_b * 2.0**-16
    views = st.sampled_from(["contiguous", "wide_rows", "offset"])
    inputs = {name: seen_as(x, data.draw(views, label=name)) for name, x in inputs.items()}
    wide, terms = wide_a @ wide_b.t(), wide_a.abs() @ wide_b.abs().t()
    if data.draw(st.booleans(), label="biased"):
        inputs["bias"] = torch.randn(n).to(getattr(torch, dtype))
        wide = wide + inputs["bias"].double()
    if data.draw(st.booleans(), label="accumulated"):
        inputs["addend"] = torch.randn(m, n).to(getattr(torch, dtype))
        wide = wide + inputs["addend"].double()
    problem = PRODUCT.bucketed(problem_of_product(inputs, over_rows, dtype))
    config = data.draw(st.sampled_from(configs(PRODUCT, problem)), label="config")
    blocks = None if PRODUCT.is_library(problem, config) else grid_for(data, config)
    # torch's product adds to its addend in place.
    copies = [{name: x.clone() for name, x in inputs.items()} for _ in range(2)]
    c, again = (multiplied(each, config, over_rows=over_rows, dtype=dtype, blocks=blocks) for each in copies)
    unit = torch.finfo(c.dtype).eps / 2
    smallest = torch.finfo(c.dtype).smallest_normal * 2 * unit
    assert ((c.double() - wide).abs() <= unit * 1.01 * wide.abs() + (k + 4) * 2.0**-24 * (terms + 4) + smallest).all()
    assert torch.equal(bits(c), bits(again))


def test_what_is_not_finite_reaches_its_row_and_no_other():
    x, w = torch.randn(9, 300), torch.randn(33, 300)
    x[2, 7], w[5, 1] = math.nan, math.inf
    a = blocked(x, both=False)
    (b, squares), of_rows = squared(w), blocked(w, both=False)
    c = multiplied({"a": a["y"], "b": b, "a_scale": a["scale"][:, :9], "b_scale": squares})
    # The square of the weight holds all of its rows.
    assert c.isnan().all()
    across = {"b": of_rows["y"], "b_scale": of_rows["scale"][:, :33]}
    c = multiplied({"a": a["y"], "a_scale": a["scale"][:, :9]} | across, over_rows=True)
    others = torch.ones_like(c, dtype=torch.bool)
    others[2], others[:, 5] = False, False
    assert torch.equal(c.isfinite(), others)


def test_a_result_may_be_added_to_in_place():
    x, w = torch.randn(70, 200), torch.randn(130, 200)
    a, (b, across) = blocked(x, both=False), squared(w)
    inputs = {
        "a": a["y"], "b": b, "a_scale": a["scale"][:, :70], "b_scale": across, "addend": torch.randn(70, 130),
    }  # fmt: skip
    apart = multiplied(inputs, dtype="float32")
    multiplied(inputs, dtype="float32", outputs={"c": inputs["addend"]})
    assert torch.equal(inputs["addend"], apart)


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
        assert code.whole.bulk_loads >= 3
    generic, *_ = made_of(PRODUCT, product_of(*flags), arch, GENERIC)
    assert generic.stack_bytes == 0


@needs_compiler
@pytest.mark.parametrize(("flags", "most"), [((), 1), (("over_rows",), 2)])
def test_a_step_on_hopper_scales_each_sum_by_one_multiplication_or_two(flags, most):
    """Sums that the tensor core adds to zeros need no addition of their own; five stages of operands are loaded."""
    resources, code, _ = made_of(PRODUCT, product_of(*flags), "sm_90")
    step = min((loop for loop in code.loops if loop.products), key=lambda loop: loop.instructions)
    assert step.products == 4
    assert step.float_operations <= 64 * most + 4
    assert resources.shared_bytes > 5 * 2 * 128 * 128


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.share(6)
def test_tiles_that_are_rounded_come_and_go_by_tma(arch, dtype):
    for spec, flag in ((BLOCKS, "both"), (WEIGHT, "turned")):
        for is_on in (False, True):
            problem = spec.problem(rows=8192, columns=4096, dtype=dtype, **{flag: is_on})
            resources, code, _ = made_of(spec, problem, arch)
            assert resources.stack_bytes == code.whole.local_accesses == 0
            assert code.whole.bulk_loads >= 1
            assert code.whole.bulk_stores >= 1
