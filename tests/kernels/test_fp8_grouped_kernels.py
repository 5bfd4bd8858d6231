"""The products of experts of e4m3 rows, and what turns them, by the interpreter beside float64; their machine code."""

import itertools
import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import FP8_PRODUCTS, made_of, needs_compiler
from spec_samples import configs, launched

from tilekern.kernels import spec_named
from tilekern.kernels.fp8.grouped_turned import SIDE, blocks_of, turned_groups, turned_weights
from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.spec import DTYPES, GENERIC
from tilekern.spec.targets import KNOWN, resolve
from tilekern.tuning.compile.machine_code import OPCODES
from tilekern.tuning.verify.canaries import bits

TURNED, WEIGHTS, PRODUCT, GRADIENT = map(
    spec_named,
    ("fp8_grouped_turned", "fp8_expert_weights_turned", "fp8_grouped_matmul", "fp8_grouped_weight_gradient"),
)
SIDES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 260]))
COUNTS = st.lists(st.sampled_from([0, 0, 1, 3, 63, 64, 65, 127, 128, 130]), min_size=1, max_size=5)


def offsets_of(counts):
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def normal(data, *shape, dtype=torch.float32):
    """Draw a matrix whose rows differ in size."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    x = torch.randn(shape, generator=generator)
    return (x * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=generator)).to(dtype)


def drawn_counts(data):
    """Draw the rows of each expert, at least one in all, and of nobody."""
    counts = data.draw(COUNTS, label="counts")
    nobody = data.draw(st.sampled_from([0, 1, 70]), label="nobody")
    if not sum(counts) + nobody:
        counts[-1] = 1
    return counts, nobody


def grid_for(data, config):
    return data.draw(st.sampled_from([None, 1, 3]), label="blocks") if config["schedule"] == "persistent" else None


def config_for(data, spec, problem):
    tiles = [config for config in configs(spec, spec.bucketed(problem)) if not spec.is_library(problem, config)]
    return data.draw(st.sampled_from(tiles), label="config")


def run(data, spec, problem, inputs):
    """Run a drawn config on a drawn grid."""
    config = config_for(data, spec, problem)
    return launched(spec, problem, config, inputs, grid_for(data, config))


def rounded(x):
    """Return e4m3 numbers, scales and both as one in float64, of a matrix or of experts' weights."""
    numbers, scale = scaled_rows(x.reshape(-1, x.shape[-1]))
    numbers, scale = numbers.view(x.shape), scale.view(x.shape[:-1])
    return numbers, scale, numbers.double() * scale.double()[..., None]


def assert_turned(y, common, rows, scale):
    """A block holds its rows at the largest of their scales, rounded only where they are small; then zeros."""
    assert common == scale.max()
    wide = y.double() * common.double()
    exact = rows.double() * scale.double()[:, None]
    is_normal = exact.abs() >= 2.0**-6 * common
    assert torch.equal(wide[:, : len(rows)].t()[is_normal], exact[is_normal])
    assert ((wide[:, : len(rows)].t() - exact).abs() <= 2.0**-10 * common).logical_or(is_normal).all()
    assert not wide[:, len(rows) :].any()


@examples(50)
@given(data=st.data())
def test_each_expert_s_rows_begin_a_block_of_their_own(data):
    counts, nobody = drawn_counts(data)
    offsets, rows, columns = offsets_of(counts), sum(counts) + nobody, data.draw(SIDES, label="columns")
    slots = data.draw(st.sampled_from([0, 1, 3]), label="slots")
    tokens = -(-rows // slots) if slots else rows
    numbers, scale, _ = rounded(normal(data, tokens, columns))
    inputs = {"x": numbers, "scale": scale, "offsets": offsets}
    if slots:
        inputs |= {"order": torch.randperm(rows).int(), "slots": slots}
        places = inputs["order"].long() // slots
        numbers, scale = numbers[places], scale[places]
    problem = TURNED.problem(rows=rows, columns=columns, experts=len(counts), gathered=bool(slots))
    found = run(data, TURNED, problem, inputs)
    assert found["y"].shape == (blocks_of(rows, len(counts)), columns, SIDE)
    left = set(range(len(found["y"])))
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        for n, first in enumerate(range(begin, end, SIDE)):
            block, own = begin // SIDE + expert + n, slice(first, min(first + SIDE, end))
            assert_turned(found["y"][block], found["common"][block], numbers[own], scale[own])
            left.remove(block)
    assert found["common"][list(left)].isnan().all()  # unwritten


def least_scale(peak):
    """Return the least power of two, at least 2^-126, by which a magnitude is 448 or less."""
    return next(2.0**p for p in range(-126, 129) if peak <= 448 * 2.0**p)


@examples(30)
@given(data=st.data())
def test_a_turned_weight_has_the_forward_s_numbers(data):
    """At the least scale of 128 x 128; numbers are those of its rows, but where they are small."""
    experts, rows, columns = data.draw(st.integers(1, 3)), data.draw(SIDES), data.draw(SIDES)
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = normal(data, experts, rows, columns, dtype=getattr(torch, dtype))
    _, steps, wide = rounded(x)
    problem = WEIGHTS.problem(experts=experts, rows=rows, columns=columns, dtype=dtype)
    found = run(data, WEIGHTS, problem, {"x": x})
    down = -(-rows // SIDE)
    for block, (y, scales) in enumerate(zip(found["y"], found["scale"], strict=True)):
        own = slice(block % down * SIDE, block % down * SIDE + SIDE)
        given_to, numbers = x[block // down][own].double(), wide[block // down][own]
        for j, scale in enumerate(scales.double()):
            square, few = given_to[:, j * SIDE :][:, :SIDE], numbers[:, j * SIDE :][:, :SIDE]
            assert scale == least_scale(square.abs().max().item())
            turned = y[j * SIDE :][:SIDE].double().t() * scale
            # e4m3's normal numbers begin at 2^-6, in both scales.
            least = 2.0**-6 * torch.maximum(scale, steps[block // down][own].double()[:, None])
            is_normal = square.abs() >= least
            assert torch.equal(turned[: len(square)][is_normal], few[is_normal])
            assert ((turned[: len(square)] - square).abs() <= 2.0**-4 * square.abs() + 2.0**-10 * scale).all()
            assert not turned[len(square) :].any()


def test_a_row_of_nan_makes_its_block_nan_and_no_other():
    numbers, scale, _ = rounded(torch.randn(300, 20).index_fill_(0, torch.tensor(140), math.nan))
    offsets = offsets_of([139, 161])
    problem = TURNED.problem(rows=300, columns=20, experts=2, gathered=False)
    inputs = {"x": numbers, "scale": scale, "offsets": offsets}
    for config in (TURNED.default(problem, resolve("H200")), TURNED.generic(problem)):
        found = launched(TURNED, problem, config, inputs)
        # Blocks 0 and 1 of the first expert, the second of which ends next to the row; 2 and 3 of the other.
        assert found["common"].isnan().tolist() == [False, False, True, False]
        assert [bool(y.float().isnan().any()) for y in found["y"]] == [False, False, True, False]
    x = torch.randn(2, 200, 140)
    x[1, 5, 3] = math.inf
    problem = WEIGHTS.problem(experts=2, rows=200, columns=140, dtype="float32")
    found = launched(WEIGHTS, problem, WEIGHTS.generic(problem), {"x": x})
    assert found["scale"].isnan().nonzero().tolist() == [[2, 0]]
    assert found["y"].float().isnan().flatten(1).sum(1).tolist() == [0, 0, SIDE * SIDE, 0]


def weight_of(x, turned):
    """Return a weight [experts, columns, inner] as the product reads it."""
    if not turned:
        numbers, scale, wide = rounded(x)
        return numbers, scale, wide
    y, scale = turned_weights(x.transpose(1, 2).contiguous())
    columns, down = x.shape[1], -(-x.shape[2] // SIDE)
    squares = scale.double().repeat_interleave(SIDE, 1)[:, :columns, None]
    blocks = (y.double() * squares).view(len(x), down, columns, SIDE)
    return y, scale, blocks.transpose(1, 2).reshape(len(x), columns, -1)[..., : x.shape[2]]


def assert_near(c, wide, terms, inner):
    unit = torch.finfo(c.dtype).eps / 2
    smallest = torch.finfo(c.dtype).smallest_normal * 2 * unit
    error = (c.double() - wide).abs()
    assert (error <= unit * 1.01 * wide.abs() + (inner + 4) * 2.0**-24 * (terms + 4) + smallest).all()


@examples(50)
@given(data=st.data())
def test_each_row_is_multiplied_by_its_expert_s_weight(data):
    counts, nobody = drawn_counts(data)
    offsets, rows = offsets_of(counts), sum(counts) + nobody
    inner, columns = data.draw(SIDES, label="inner"), data.draw(SIDES, label="columns")
    turned, dtype = data.draw(st.booleans(), label="turned"), data.draw(st.sampled_from(DTYPES), label="dtype")
    a, a_scale, wide_a = rounded(normal(data, rows, inner) / 64)
    b, b_scale, wide_b = weight_of(normal(data, len(counts), columns, inner) / 64, turned)
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": offsets}
    problem = PRODUCT.problem(
        rows=rows, inner=inner, columns=columns, experts=len(counts), turned=turned, dtype=dtype
    )  # fmt: skip
    config = config_for(data, PRODUCT, problem)
    blocks = grid_for(data, config)
    c, again = (launched(PRODUCT, problem, config, inputs, blocks)["c"] for _ in range(2))
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        own, weight = wide_a[begin:end], wide_b[expert].t()
        assert_near(c[begin:end], own @ weight, own.abs() @ weight.abs(), inner)
    assert c[offsets[-1] :].isnan().all()  # unwritten
    assert torch.equal(bits(c), bits(again))


@examples(40)
@given(data=st.data())
def test_a_weight_s_gradient_sums_the_rows_of_its_expert(data):
    counts, nobody = drawn_counts(data)
    offsets, rows = offsets_of(counts), sum(counts) + nobody
    inner, columns = data.draw(SIDES, label="inner"), data.draw(SIDES, label="columns")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    (a, a_scale, wide_a), (b, b_scale, wide_b) = (rounded(normal(data, rows, n) / 64) for n in (inner, columns))
    # At one scale, so that turning rounds nothing and the sums are those of the rows.
    a_scale, b_scale = a_scale.fill_(2.0**-8), b_scale.fill_(2.0**-8)
    wide_a, wide_b = a.double() * 2.0**-8, b.double() * 2.0**-8
    inputs = {"offsets": offsets}
    for name, x, scale in (("a", a, a_scale), ("b", b, b_scale)):
        inputs[name], inputs[f"{name}_scale"] = turned_groups(x, scale, offsets)
    problem = GRADIENT.problem(rows=rows, inner=inner, columns=columns, experts=len(counts), dtype=dtype)
    config = config_for(data, GRADIENT, problem)
    blocks = grid_for(data, config)
    c, again = (launched(GRADIENT, problem, config, inputs, blocks)["c"] for _ in range(2))
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        left, right = wide_a[begin:end].t(), wide_b[begin:end]
        assert_near(c[expert], left @ right, left.abs() @ right.abs(), rows)
        assert end > begin or not c[expert].any()
    assert torch.equal(bits(c), bits(again))


def test_a_row_of_nan_reaches_its_own_result_and_its_expert_s_gradient_alone():
    counts = [5, 0, 66, 3]
    offsets, rows = offsets_of(counts), sum(counts)
    begins = [0, *offsets.tolist()]
    weight = torch.randn(4, 24, 40)
    for group, (begin, end) in enumerate(itertools.pairwise(begins)):
        x = torch.randn(rows, 40)
        x[begin:end] = math.nan
        a, a_scale, _ = rounded(x)
        for turned in (False, True):
            b, b_scale, _ = weight_of(weight, turned)
            problem = PRODUCT.problem(rows=rows, inner=40, columns=24, experts=4, turned=turned, dtype="float32")
            inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": offsets}
            c = launched(PRODUCT, problem, PRODUCT.generic(problem), inputs)["c"]
            assert torch.equal(c.isnan().all(1), x.isnan().all(1))
            assert torch.equal(c.isfinite().all(1), x.isfinite().all(1))
        y, common = turned_groups(a, a_scale, offsets)
        problem = GRADIENT.problem(rows=rows, inner=40, columns=40, experts=4, dtype="float32")
        inputs = {"a": y, "b": y, "a_scale": common, "b_scale": common, "offsets": offsets}
        c = launched(GRADIENT, problem, GRADIENT.generic(problem), inputs)["c"]
        assert c.isnan().flatten(1).all(1).tolist() == [n == group and end > begin for n in range(4)]
        assert c.isfinite().flatten(1).all(1).tolist() == [n != group or end == begin for n in range(4)]


SIZES = [(65536, 2048, 1536, 128), (32768, 2880, 5760, 32), (64, 64, 64, 256)]


@pytest.mark.parametrize("target", [t for t in KNOWN if t.has_fp8], ids=lambda target: target.key)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_spaces_are_small_and_hold_hopper_s_library_once(target, sizes):
    rows, inner, columns, experts = sizes
    known = {"rows": rows, "inner": inner, "columns": columns, "experts": experts, "dtype": "bfloat16"}
    for spec, problem in (
        (PRODUCT, PRODUCT.problem(turned=False, **known)),
        (PRODUCT, PRODUCT.problem(turned=True, **known)),
        (GRADIENT, GRADIENT.problem(**known)),
    ):
        found = list(spec.space.candidates(problem, target))
        assert 2 <= len(found) <= 48
        is_library_s = spec is PRODUCT and not problem["turned"] and target.has_wgmma
        assert sum(spec.is_library(problem, config) for config in found) == is_library_s
        assert spec.default(problem, target) in found


QWEN3, GPT_OSS = SIZES[:2]


def product_of(spec, sizes, **flags):
    rows, inner, columns, experts = sizes
    return spec.problem(rows=rows, inner=inner, columns=columns, experts=experts, dtype="bfloat16", **flags)


PROBLEMS = [
    *(pytest.param(PRODUCT, {"turned": turned}, id=f"turned {turned}") for turned in (False, True)),
    pytest.param(GRADIENT, {}, id="gradient"),
]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("spec", "flags"), PROBLEMS)
@pytest.mark.share(6)
def test_products_multiply_8_bit_floats_and_spill_nothing(arch, spec, flags):
    for sizes in (QWEN3, GPT_OSS, (512, 2048, 1536, 128)):
        resources, code, opcodes = made_of(spec, product_of(spec, sizes, **flags), arch)
        assert resources.stack_bytes == code.whole.local_accesses == 0
        names = {OPCODES["products"][opcode] for opcode in opcodes if opcode in OPCODES["products"]}
        assert names == {FP8_PRODUCTS[arch]}
        assert code.whole.bulk_loads >= 2
    generic, *_ = made_of(spec, product_of(spec, QWEN3, **flags), arch, GENERIC)
    assert generic.stack_bytes == 0


@needs_compiler
@pytest.mark.parametrize(("spec", "flags"), PROBLEMS)
def test_a_step_on_hopper_scales_each_sum_by_one_multiplication(spec, flags):
    """Four stages of operands are loaded or more, and a step adds each sum once, scaled or not."""
    resources, code, _ = made_of(spec, product_of(spec, QWEN3, **flags), "sm_90")
    step = min((loop for loop in code.loops if loop.products), key=lambda loop: loop.instructions)
    assert step.products == 4
    assert step.float_operations <= 64 + 4
    assert resources.shared_bytes > 4 * 2 * 128 * 128


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.share(6)
def test_turned_blocks_go_by_tma_and_spill_nothing(arch):
    problems = [
        *((TURNED, TURNED.problem(rows=65536, columns=2048, experts=128, gathered=on)) for on in (False, True)),
        (WEIGHTS, WEIGHTS.problem(experts=32, rows=5760, columns=2880, dtype="bfloat16")),
        (WEIGHTS, WEIGHTS.problem(experts=32, rows=5760, columns=2880, dtype="float32")),
    ]
    for spec, problem in problems:
        resources, code, _ = made_of(spec, problem, arch)
        assert resources.stack_bytes == code.whole.local_accesses == 0
        assert code.whole.bulk_stores >= 1
