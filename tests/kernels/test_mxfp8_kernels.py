"""mxfp8_blocks and mxfp8_matmul by the interpreter beside float64, and their machine code for Blackwell."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import FP8_PRODUCTS, made_of, needs_compiler
from spec_samples import VIEWS, configs, launched, one_of_each_code, seen_as

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import OPCODES
from tilekern.tuning.verify.canaries import bits

BLOCKS, PRODUCT = map(spec_named, ("mxfp8_blocks", "mxfp8_matmul"))
SIDES = st.one_of(st.integers(1, 60), st.sampled_from([31, 33, 127, 128, 129, 260]))
# Rounding to 4 significant bits is off by 2^-4 of a normal number at most, and by 2^-10 of the scale of others.
ROUNDING, LEAST = 2.0**-4, 2.0**-10


def normal(data, rows, columns, dtype="bfloat16"):
    """Draw a matrix whose rows differ in size and some of whose elements are outliers."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
    if data.draw(st.booleans(), label="outliers"):
        x[::2, columns // 2] *= 1e4
    return x.to(getattr(torch, dtype)).nan_to_num(posinf=6e4, neginf=-6e4)


def problem_of(x, *flags):
    rows, columns = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    return BLOCKS.problem(rows=rows, columns=columns, both="both" in flags, turned="turned" in flags, dtype=dtype)


def blocked(x, *flags, config=None, blocks=None):
    """Run mxfp8_blocks."""
    problem = problem_of(x, *flags)
    return launched(BLOCKS, problem, config or BLOCKS.generic(problem), {"x": x}, blocks)


def scales_of(stored, rows, columns):
    """Return the scales [rows, columns / 32] of 512 bytes for each 128 x 128 numbers, by their places one by one."""
    found = torch.empty(rows, -(-columns // 32), dtype=torch.float64)
    for row in range(rows):
        for n in range(found.shape[1]):
            block = stored[row // 128, n // 4].view(torch.uint8)
            exponent = block[row % 32, 4 * (row % 128 // 32) + n % 4].item()
            found[row, n] = math.nan if exponent == 255 else 2.0 ** (exponent - 127)
    return found


def assert_rounded(numbers, stored, x):
    """All numbers are those of ``x`` but for one rounding, at the least scales that keep them inside 448."""
    scales = scales_of(stored, *x.shape)
    for n, group in enumerate(x.double().split(32, 1)):
        step = scales[:, n]
        peak = group.abs().amax(1)
        assert (peak <= 448 * step).all()
        assert ((peak > 224 * step) | (step == 2.0**-126)).all()
        wide = numbers[:, 32 * n : 32 * (n + 1)].double() * step[:, None]
        assert ((wide - group).abs() <= ROUNDING * group.abs() + LEAST * step[:, None]).all()


@examples(30)
@given(data=st.data())
def test_each_32_numbers_of_a_row_or_a_column_have_the_least_scale(data):
    rows, columns = data.draw(SIDES, label="rows"), data.draw(SIDES, label="columns")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = seen_as(normal(data, rows, columns, dtype), data.draw(st.sampled_from(VIEWS)))
    flags = data.draw(st.sampled_from([(), ("turned",), ("both",), ("both", "turned")]), label="flags")
    problem = BLOCKS.bucketed(problem_of(x, *flags))
    config = data.draw(st.sampled_from(configs(BLOCKS, problem)), label="config")
    blocks = data.draw(st.sampled_from([None, 1, 3])) if config["schedule"] == "persistent" else None
    found = blocked(x, *flags, config=config, blocks=blocks)
    if "y" in found:
        assert_rounded(found["y"], found["scale"], x)
    if "turned" in found:
        assert_rounded(found["turned"][:, :rows], found["turned_scale"], x.t())
        assert not found["turned"][:, rows:].float().any()
    assert set(found) == {
        *(("y", "scale") if "both" in flags or "turned" not in flags else ()),
        *(("turned", "turned_scale") if flags else ()),
    }


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_group_nan_and_no_other(odd):
    x = torch.randn(140, 70, dtype=torch.bfloat16)
    x[130, 40] = odd
    for config in one_of_each_code(BLOCKS, problem_of(x, "both")):
        found = blocked(x, "both", config=config)
        wanted = torch.zeros_like(x, dtype=torch.bool)
        wanted[130, 32:64] = True
        assert torch.equal(found["y"].float().isnan(), wanted)
        assert scales_of(found["scale"], 140, 70).isnan().nonzero().tolist() == [[130, 1]]
        wanted = torch.zeros_like(x, dtype=torch.bool)
        wanted[128:, 40] = True
        assert torch.equal(found["turned"][:, :140].float().isnan(), wanted.t())
        assert scales_of(found["turned_scale"], 70, 140).isnan().nonzero().tolist() == [[40, 4]]


def multiplied(inputs, config=None, *, over_rows=False, dtype="bfloat16", blocks=None, outputs=None):
    """Run mxfp8_matmul."""
    problem = problem_of_product(inputs, over_rows, dtype)
    return launched(PRODUCT, problem, config or PRODUCT.generic(problem), inputs, blocks, outputs)["c"]


def problem_of_product(inputs, over_rows, dtype):
    (m, k), n = inputs["a"].shape, inputs["b"].shape[0]
    rows, inner = (k, m) if over_rows else (m, k)
    return PRODUCT.problem(
        rows=rows, inner=inner, columns=n, over_rows=over_rows, biased="bias" in inputs,
        accumulated="addend" in inputs, dtype=dtype,
    )  # fmt: skip


def operands(x, w):
    a, b = blocked(x), blocked(w)
    return {"a": a["y"], "b": b["y"], "a_scale": a["scale"], "b_scale": b["scale"]}


@examples(30)
@given(data=st.data())
def test_products_are_those_of_the_dequantised_operands(data):
    m, n, k = (data.draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 129, 260])), label=s) for s in "mnk")
    over_rows = data.draw(st.booleans(), label="over_rows")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    # Of float16 the results could be infinite.
    inputs = operands(normal(data, m, k, "float32") * 2.0**-14, normal(data, n, k, "float32") * 2.0**-14)
    wide_a, wide_b = (
        inputs[name].double() * scales_of(inputs[f"{name}_scale"], rows, k).repeat_interleave(32, 1)[:, :k]
        for name, rows in (("a", m), ("b", n))
    )
    wide, terms = wide_a @ wide_b.t(), wide_a.abs() @ wide_b.abs().t()
    views = st.sampled_from(["contiguous", "wide_rows", "offset"])
    inputs |= {name: seen_as(inputs[name], data.draw(views, label=name)) for name in "ab"}
    if data.draw(st.booleans(), label="biased"):
        inputs["bias"] = torch.randn(n).to(getattr(torch, dtype))
        wide = wide + inputs["bias"].double()
    if data.draw(st.booleans(), label="accumulated"):
        inputs["addend"] = torch.randn(m, n).to(getattr(torch, dtype))
        wide = wide + inputs["addend"].double()
    problem = PRODUCT.bucketed(problem_of_product(inputs, over_rows, dtype))
    config = data.draw(st.sampled_from(configs(PRODUCT, problem)), label="config")
    persistent = config["schedule"] == "persistent" and not PRODUCT.is_library(problem, config)
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
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
    c = multiplied(operands(x, w))
    others = torch.ones_like(c, dtype=torch.bool)
    others[2], others[:, 5] = False, False
    assert torch.equal(c.isfinite(), others)


def test_hopper_which_has_no_such_products_is_refused():
    problem = PRODUCT.problem(
        rows=64, inner=64, columns=64, over_rows=False, biased=False, accumulated=False, dtype="bfloat16"
    )
    for spec, asked in ((PRODUCT, problem), (BLOCKS, problem_of(torch.zeros(64, 64)))):
        assert not list(spec.space.candidates(asked, resolve("H200")))
        with pytest.raises(InputError, match="MXFP8 needs a GPU of sm_100 or newer; H200 is sm_90"):
            spec.default(asked, resolve("H200"))


# Opcodes of products of e4m3 with scales of e8m0. On sm_100, UTCQMMA has the opcode of half types.


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_120"])
@pytest.mark.parametrize("flags", [(), ("over_rows",), ("biased", "accumulated")], ids="-".join)
@pytest.mark.share(6)
def test_a_step_is_products_alone(arch, flags):
    """Scales go to the tensor core as TMA brings them: nothing between multiplies, adds, or loads by threads."""
    named = {name: name in flags for name in ("over_rows", "biased", "accumulated")}
    for rows in (8192, 512):
        problem = PRODUCT.problem(rows=rows, inner=4096, columns=6144, dtype="bfloat16", **named)
        resources, code, opcodes = made_of(PRODUCT, problem, arch)
        assert resources.stack_bytes == code.whole.local_accesses == 0
        names = {OPCODES["products"][opcode] for opcode in opcodes if opcode in OPCODES["products"]}
        assert names == {FP8_PRODUCTS[arch]}
        step = min((loop for loop in code.loops if loop.products), key=lambda loop: loop.instructions)
        assert step.float_operations == step.global_loads == 0
        assert code.whole.bulk_loads >= 4


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
@pytest.mark.parametrize("flags", [(), ("turned",), ("both",)], ids="-".join)
def test_tiles_that_are_rounded_come_and_go_by_tma(arch, flags):
    problem = BLOCKS.problem(
        rows=8192, columns=4096, both="both" in flags, turned="turned" in flags, dtype="bfloat16"
    )  # fmt: skip
    for variant in (ALIGNED, GENERIC):
        resources, code, _ = made_of(BLOCKS, problem, arch, variant)
        assert resources.stack_bytes == code.whole.local_accesses == 0
        if variant == ALIGNED:
            assert code.whole.bulk_loads >= 1
            assert code.whole.bulk_stores >= 1
