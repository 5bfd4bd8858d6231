"""The interpreter of PTX, held to torch and to what a GPU forbids; then kernels of CuTe DSL in it, held to float64."""

import functools
import importlib
import math
import re
import tempfile

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ptx import PtxError, run
from spec_samples import draws_of, inputs_of

from tilekern.kernels import spec_named
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.spec import DTYPES, ITEM_BYTES, Config, cdiv
from tilekern.spec.targets import resolve
from tilekern.tuning.verify.check import arguments_of, compare, expected_results, make_outputs

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

INFINITY, NAN = math.inf, math.nan


# Pieces of PTX.


def module(body, arguments, threads=64, shared=256):
    """A kernel around some instructions: %r0 is the thread, %r1 its number in the grid; parameters are p0, p1, ..."""
    kinds = []
    for argument in arguments:
        scalar = "f32" if isinstance(argument, float) else "u32"
        kinds += ["u64", *["u32"] * (2 * argument.dim())] if isinstance(argument, torch.Tensor) else [scalar]
    parameters = ",\n".join(f".param .{kind} p{n}" for n, kind in enumerate(kinds))
    return f"""
        .version 8.8 .target sm_90 .address_size 64 // a comment
        .extern .shared .align 128 .b8 dynamic[];
        .visible .entry kernel({parameters})
        .reqntid {threads}, 1, 1
        {{
            .reg .pred %p<9>;
            .reg .b16 %rs<9>;
            .reg .b32 %r<40>, %f<20>;
            .reg .b64 %rd<20>;
            .shared .align 16 .b8 memory[{shared}];
            mov.u32 %r0, %tid.x;
            mov.u32 %r2, %ctaid.x;
            mad.lo.s32 %r1, %r2, {threads}, %r0;
            {body}
            ret;
        }}"""


def execute(body, *arguments, grid=1, cluster=1, shared_bytes=0, **options):
    run(module(body, arguments, **options), grid, arguments, cluster=cluster, shared_bytes=shared_bytes)


def results(body, *arguments, threads=64, grid=1, dtype=torch.int32, **options):
    """The value of %r9 in each thread, after some instructions; more arguments begin with p3."""
    out = torch.full((threads * grid,), -1, dtype=torch.int32)
    store = "ld.param.u64 %rd0, [p0]; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd0, %rd0, %rd1; st.global.b32 [%rd0], %r9;"
    execute(body + store, out, *arguments, threads=threads, grid=grid, **options)
    return out.view(dtype)


def fails(what, body, *arguments, **options):
    with pytest.raises(PtxError, match=what):
        results("mov.b32 %r9, 0;" + body, *arguments, **options)


def applied(opcode, *arguments, bits=32, result="%r9"):
    """An instruction's results for the numbers of each thread, given by their bits."""
    names = {16: "%rs", 32: "%r", 64: "%rd"}[bits]
    loads = ""
    for n in range(len(arguments)):
        loads += f"ld.param.u64 %rd9, [p{3 * n + 3}]; mul.wide.u32 %rd8, %r1, {bits // 8}; add.s64 %rd9, %rd9, %rd8;"
        loads += f"ld.global.b{bits} {names}{n + 3}, [%rd9];"
    operands = ", ".join(f"{names}{n + 3}" for n in range(len(arguments)))
    return results(f"{loads} {opcode} {result}, {operands}; {WIDENED.get(result, '')}", *arguments)


WIDENED = {"%rs0": "cvt.u32.u16 %r9, %rs0;", "%p0": "selp.b32 %r9, 1, 0, %p0;", "%rd2": "cvt.u32.u64 %r9, %rd2;"}
THREADS = torch.arange(64)
LANES = THREADS % 32


def numbers(seed):
    """Float32 of any bits, among them zeros, subnormals, infinities and quiet NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (64,), generator=generator, dtype=torch.int64).to(torch.int32)
    x = torch.where(bits.view(torch.float32).isnan(), NAN, bits.view(torch.float32))
    x[:10] = torch.tensor([0.0, -0.0, 1e-45, -1e-39, INFINITY, -INFINITY, NAN, 3.4e38, 1.00390625, -1.01171875])
    return x[torch.randperm(64, generator=generator)]


def same(actual, expected):
    """Whether numbers are the same bit by bit, or both NaN."""
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    return bool((expected.isnan() & actual.isnan() | (actual.view(bits) == expected.view(bits))).all())


def test_threads_that_a_branch_takes_apart_meet_again():
    body = """
        mov.b32 %r9, 1;
        setp.lt.u32 %p0, %r0, 5;
        @%p0 bra INNER;
        mov.b32 %r9, 2;
        bra JOIN;
    INNER:
        setp.eq.u32 %p1, %r0, 3;
        @!%p1 bra JOIN;
        mov.b32 %r9, 3;
    JOIN:
        shfl.sync.idx.b32 %r10, %r9, 3, 31, -1;
        shl.b32 %r9, %r9, 4;
        or.b32 %r9, %r9, %r10;
    """
    expected = torch.where(THREADS == 3, 3, torch.where(THREADS < 5, 1, 2)) * 16 + torch.where(THREADS < 32, 3, 2)
    assert results(body).equal(expected.int())


def test_each_thread_goes_round_a_loop_as_often_as_it_must():
    body = """
        mov.b32 %r9, 0;
        mov.b32 %r3, 0;
    LOOP:
        add.s32 %r9, %r9, %r3;
        add.s32 %r3, %r3, 1;
        setp.le.s32 %p0, %r3, %r0;
        @%p0 bra LOOP;
    """
    assert results(body).equal((THREADS * (THREADS + 1) // 2).int())


def test_threads_may_end_early():
    out = torch.full((64,), -1, dtype=torch.int32)
    body = """
        setp.gt.u32 %p0, %r0, 9;
        @%p0 ret;
        ld.param.u64 %rd0, [p0]; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd0, %rd0, %rd1;
        st.global.b32 [%rd0], %r0;
    """
    execute(body, out)
    assert out.equal(torch.where(THREADS > 9, -1, THREADS).int())


# Each thread stores its number in shared memory and reads that of the thread across the block.
EXCHANGE = """
    shl.b32 %r3, %r0, 2;
    mov.b32 %r4, memory;
    add.s32 %r5, %r4, %r3;
    st.shared.b32 [%r5], %r0;
    bar.sync 0;
    sub.s32 %r6, %r4, %r3;
    ld.shared.b32 %r9, [%r6+252];
"""


def test_a_block_exchanges_through_shared_memory():
    assert results(EXCHANGE, grid=2).equal((63 - THREADS).repeat(2).int())


SHUFFLES = {
    "bfly.b32 %r9, %r0, 5, 31, -1": THREADS ^ 5,
    "bfly.b32 %r9, %r0, 4, 6175, -1": THREADS ^ 4,
    "idx.b32 %r9, %r0, 7, 31, -1": THREADS - LANES + 7,
    "idx.b32 %r9, %r0, 3, 6175, -1": THREADS - THREADS % 8 + 3,
    "up.b32 %r9, %r0, 3, 0, -1": torch.where(LANES >= 3, THREADS - 3, THREADS),
    "up.b32 %r9, %r0, 3, 6144, -1": torch.where(THREADS % 8 >= 3, THREADS - 3, THREADS),
    "down.b32 %r9, %r0, 3, 31, -1": torch.where(LANES < 29, THREADS + 3, THREADS),
    "down.b32 %r9, %r0, 3, 6175, -1": torch.where(THREADS % 8 < 5, THREADS + 3, THREADS),
    "down.b32 %r8|%p0, %r0, 3, 31, -1; selp.b32 %r9, 1, 0, %p0": (LANES < 29).long(),
}


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_lanes_of_a_warp_shuffle(shuffle):
    """6175 and 6144 are groups of 8 lanes."""
    assert results(f"shfl.sync.{shuffle};").equal(SHUFFLES[shuffle].int())


# Each thread stores its number into the next block, and reads what the block before has stored.
ARRIVE = "barrier.cluster.arrive; barrier.cluster.wait;"
SEND = """
    shl.b32 %r3, %r0, 2;
    mov.b32 %r4, memory;
    add.s32 %r5, %r4, %r3;
    mov.u32 %r6, %cluster_ctarank;
    mov.u32 %r7, %cluster_nctarank;
    add.s32 %r8, %r6, 1;
    rem.u32 %r8, %r8, %r7;
    mapa.shared::cluster.u32 %r10, %r5, %r8;
    st.shared::cluster.b32 [%r10], %r1;
"""
RECEIVE = "ld.shared.b32 %r9, [%r5];"


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_a_cluster_exchanges_through_its_blocks_shared_memory(cluster):
    sent = torch.arange(64 * 8).view(-1, cluster, 64)
    expected = sent.roll(1, dims=1).reshape(-1).int()
    assert results(ARRIVE + SEND + ARRIVE + RECEIVE, grid=8, cluster=cluster).equal(expected)


def test_a_cluster_does_not_wait_for_threads_that_have_ended():
    out = torch.full((128,), -1, dtype=torch.int32)
    own = "ld.param.u64 %rd0, [p0]; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd0, %rd0, %rd1;"
    some = "setp.gt.u32 %p0, %r0, 31; @%p0 ret;"
    execute(some + ARRIVE + SEND + ARRIVE + RECEIVE + own + "st.global.b32 [%rd0], %r9;", out, grid=2, cluster=2)
    assert out.view(2, 64)[:, :32].equal(torch.stack([64 + THREADS[:32], THREADS[:32]]).int())
    assert out.view(2, 64)[:, 32:].eq(-1).all()


def test_only_ordered_accesses_of_a_cluster_are_allowed():
    fails("may not have begun", SEND + ARRIVE + RECEIVE, grid=2, cluster=2)
    fails("nobody has written|race", ARRIVE + SEND + RECEIVE, grid=2, cluster=2)
    fails("race", ARRIVE + SEND + "bar.sync 0;" + RECEIVE, grid=2, cluster=2)
    fails("ends while another", ARRIVE + SEND, grid=2, cluster=2)
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
    fails("race", ARRIVE + SEND + relaxed + RECEIVE, grid=2, cluster=2)
    fails("before it has arrived", "barrier.cluster.wait;" + SEND, grid=2, cluster=2)
    beyond = SEND.replace("rem.u32 %r8, %r8, %r7;", "")
    fails("outside of shared memory", ARRIVE + beyond, grid=2, cluster=2)
    fails("needs shared::cluster", ARRIVE + SEND.replace("st.shared::cluster", "st.shared"), grid=2, cluster=2)
    no_access = beyond.replace("st.shared::cluster.b32 [%r10], %r1;", "")
    assert results("mov.b32 %r9, 0;" + ARRIVE + no_access, grid=2, cluster=2).eq(0).all()


def test_instructions_depend_on_predicates():
    body = """
        and.b32 %r3, %r0, 1;
        setp.eq.b32 %p0, %r3, 0;
        mov.b32 %r9, 7;
        @%p0 mov.b32 %r9, 8;
        @!%p0 add.s32 %r9, %r9, 2;
        setp.lt.and.u32 %p1, %r0, 4, %p0;
        @%p1 mov.b32 %r9, 1;
        not.pred %p2, %p0;
        or.pred %p2, %p2, %p1;
        selp.b32 %r10, 16, 32, %p2;
        or.b32 %r9, %r9, %r10;
    """
    even, low = THREADS % 2 == 0, THREADS < 4
    first = torch.where(even & low, 1, torch.where(even, 8, 9))
    assert results(body).equal((first | torch.where(~even | low, 16, 32)).int())


COMPARISONS = {
    "eq": torch.eq, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "neu": torch.ne,
    "ne": lambda x, y: (x != y) & ~(x.isnan() | y.isnan()),
    "equ": lambda x, y: (x == y) | x.isnan() | y.isnan(),
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~(x.isnan() | y.isnan()),
    "nan": lambda x, y: x.isnan() | y.isnan(),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARISONS)
def test_floats_compare_as_ptx_says_of_nan(name):
    x, y = numbers(0), numbers(1)
    y = torch.where(THREADS % 4 == 0, x, y)
    assert applied(f"setp.{name}.f32", x, y, result="%p0").equal(COMPARISONS[name](x, y).int())


FLOATS = {
    "add.f32": torch.add,
    "sub.rn.f32": torch.sub,
    "mul.f32": torch.mul,
    "div.rn.f32": torch.div,
    "max.f32": torch.fmax,
    "min.f32": torch.fmin,
    "max.NaN.f32": torch.maximum,
    "min.NaN.f32": torch.minimum,
}
FUNCTIONS = {
    "sqrt.rn.f32": torch.sqrt, "rcp.rn.f32": torch.reciprocal, "rsqrt.approx.f32": torch.rsqrt,
    "ex2.approx.f32": torch.exp2, "lg2.approx.f32": torch.log2, "tanh.approx.f32": torch.tanh,
    "neg.f32": torch.neg, "abs.f32": torch.abs,
}  # fmt: skip


@pytest.mark.parametrize("opcode", FLOATS)
def test_floats_have_torchs_bits(opcode):
    x, y = numbers(2), numbers(3)
    # Torch does not say which of two zeros is the larger.
    y = torch.where((x == 0) & (y == 0), x, y)
    assert same(applied(opcode, x, y).view(torch.float32), FLOATS[opcode](x, y))


@pytest.mark.parametrize("opcode", FUNCTIONS)
def test_functions_are_exact(opcode):
    x = numbers(4)
    assert same(applied(opcode, x).view(torch.float32), FUNCTIONS[opcode](x.double()).float())


def test_a_fused_product_is_not_rounded():
    x, y = numbers(5).where(THREADS % 3 != 0, 1 + 2.0**-12), numbers(6).where(THREADS % 3 != 0, 1 + 2.0**-12)
    z = numbers(7).where(THREADS % 3 != 0, -1.0)
    assert same(applied("fma.rn.f32", x, y, z).view(torch.float32), (x.double() * y + z).float())


def test_the_extremes_of_two_zeros_have_the_right_sign():
    x, y = torch.tensor([0.0, -0.0]).repeat(32), torch.tensor([0.0, 0.0, -0.0, -0.0]).repeat(16)
    for opcode, negative in {"max": x.signbit() & y.signbit(), "min": x.signbit() | y.signbit()}.items():
        assert applied(f"{opcode}.f32", x, y).view(torch.float32).signbit().equal(negative)


def test_subnormals_are_flushed_before_and_after():
    x = torch.tensor([1e-39, -1e-39, 2.0**-126, 1.0]).repeat(16)
    doubled = applied("add.ftz.f32", x, x).view(torch.float32)
    halved = applied("mul.ftz.f32", x, torch.full((64,), 0.5)).view(torch.float32)
    assert same(doubled[:4].contiguous(), torch.tensor([0.0, -0.0, 2.0**-125, 2.0]))
    assert same(halved[:4].contiguous(), torch.tensor([0.0, -0.0, 0.0, 0.5]))
    assert same(applied("ex2.approx.ftz.f32", torch.full((64,), -127.5)).view(torch.float32), torch.zeros(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(8))
def test_conversions_round_as_torch_does(dtype, seed):
    """All of them, and those where a tie is: the random bits of float32 and the middles between narrow numbers."""
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    x, other = numbers(seed), numbers(seed + 100)
    if seed % 2:
        below = torch.randint(-(2**15), 2**15 - 1, (64,), generator=torch.Generator().manual_seed(seed)).short()
        x = ((below.view(dtype).double() + (below + 1).view(dtype).double()) / 2).float()
    rounded = applied(f"cvt.rn.{name}.f32", x, result="%rs0").short().view(dtype)
    assert same(rounded, x.to(dtype))
    pairs = applied(f"cvt.rn.{name}x2.f32", x, other).view(dtype).view(64, 2)
    assert same(pairs, torch.stack([other, x], 1).to(dtype))
    assert same(applied(f"cvt.f32.{name}", rounded, bits=16).view(torch.float32), rounded.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "max", "min"])
def test_narrow_arithmetic_has_torchs_bits(dtype, opcode):
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(64, 2, generator=generator).to(dtype) for _ in range(2)]
    function = FLOATS[f"{opcode}.rn.f32" if opcode == "sub" else f"{opcode}.f32"]
    packed = applied(f"{opcode}.{name}x2", *[pair.flatten().view(torch.int32) for pair in pairs])
    assert same(packed.view(dtype).view(64, 2), function(*pairs))
    x, y = (pair[:, 0].contiguous() for pair in pairs)
    assert same(applied(f"{opcode}.{name}", x, y, bits=16, result="%rs0").short().view(dtype), function(x, y))


def test_mixed_and_packed_arithmetic_of_blackwell():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 2, generator=generator) for _ in range(2))
    body = """
        ld.param.u64 %rd2, [p3]; ld.param.u64 %rd3, [p8];
        mul.wide.u32 %rd4, %r0, 8; add.s64 %rd2, %rd2, %rd4; add.s64 %rd3, %rd3, %rd4;
        ld.global.b64 %rd5, [%rd2]; ld.global.v2.b32 {%r3, %r4}, [%rd3];
        mov.b64 %rd6, {%r3, %r4};
        fma.rn.f32x2 %rd7, %rd5, %rd6, %rd6;
        mov.b64 {_, %r5}, %rd7;
        cvt.rn.bf16x2.f32 %r6, %r3, %r4;
        mov.b32 {%rs0, %rs1}, %r6;
        fma.rn.f32.bf16 %r7, %rs0, %rs1, %r5;
        add.rn.f32.bf16 %r8, %rs1, %r7;
        max.f32 %r9, %r8, %r3, %r4;
    """
    last = (x[:, 1].double() * y[:, 1] + y[:, 1]).float()
    low, high = y[:, 1].bfloat16(), y[:, 0].bfloat16()
    total = high.float() + (low.double() * high.double() + last).float()
    assert same(results(body, x, y, dtype=torch.float32), torch.maximum(total, y.amax(1)))


def wrapped(value, signed=True):
    value %= 2**32
    return value - 2**32 if signed and value >= 2**31 else value


def unsigned(value):
    return wrapped(value, signed=False)


INTEGERS = {
    "add.s32": lambda x, y: x + y,
    "sub.u32": lambda x, y: x - y,
    "mul.lo.s32": lambda x, y: x * y,
    "mul.hi.s32": lambda x, y: (x * y) >> 32,
    "mul.hi.u32": lambda x, y: (unsigned(x) * unsigned(y)) >> 32,
    "div.s32": lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
    "rem.s32": lambda x, y: math.copysign(1, x) * (abs(x) % abs(y)),
    "div.u32": lambda x, y: unsigned(x) // unsigned(y),
    "min.s32": min,
    "max.u32": lambda x, y: max(unsigned(x), unsigned(y)),
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "xor.b32": lambda x, y: x ^ y,
    "shl.b32": lambda x, y: x << unsigned(y) if unsigned(y) < 32 else 0,
    "shr.s32": lambda x, y: x >> min(unsigned(y), 31),
    "shr.u32": lambda x, y: unsigned(x) >> unsigned(y) if unsigned(y) < 32 else 0,
}


@pytest.mark.parametrize("opcode", INTEGERS)
def test_integers_wrap_and_shift(opcode):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-(2**31), 2**31, (64,), generator=generator).int() for _ in range(2))
    y[:48] = y[:48] % 40 + 1
    expected = [wrapped(int(INTEGERS[opcode](*pair))) for pair in zip(x.tolist(), y.tolist(), strict=True)]
    assert applied(opcode, x, y).tolist() == expected


def test_wide_products_and_conversions_keep_the_sign():
    x = torch.tensor([-3, 2**31 - 1, -(2**31), 5] * 16, dtype=torch.int32)
    high = "shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r9, %rd2;"
    load = "ld.param.u64 %rd9, [p3]; mul.wide.u32 %rd8, %r0, 4; add.s64 %rd9, %rd9, %rd8; ld.global.b32 %r3, [%rd9];"
    product = (x.long() ** 2) >> 32
    assert results(f"{load} mul.wide.s32 %rd2, %r3, %r3; {high}", x).equal(product.int())
    assert results(f"{load} cvt.s64.s32 %rd2, %r3; {high}", x).equal((x >> 31).int())
    assert results(f"{load} cvt.u64.u32 %rd2, %r3; {high}", x).equal(torch.zeros(64).int())
    assert results("ld.param.s32 %rd2, [p3]; shr.s64 %rd2, %rd2, 1; cvt.u32.u64 %r9, %rd2;", -6).eq(-3).all()


def test_conversions_between_integers_and_floats():
    x = torch.tensor([2.5, 3.5, -2.5, 3e9, -3e9, NAN, INFINITY, -0.75] * 8)
    expected = {"rni": [2, 4, -2], "rzi": [2, 3, -2], "rmi": [2, 3, -3], "rpi": [3, 4, -2]}
    for rounding, first in expected.items():
        last = -1 if rounding in ("rni", "rmi") else 0
        whole = [*first, 2**31 - 1, -(2**31), 0, 2**31 - 1, last]
        assert applied(f"cvt.{rounding}.s32.f32", x)[:8].tolist() == whole
    big = torch.tensor([2**24 + 1, 2**24 + 3, -(2**31), 7] * 16, dtype=torch.int32)
    assert same(applied("cvt.rn.f32.s32", big).view(torch.float32), big.float())


@pytest.mark.parametrize(("kind", "count"), [("b16", 4), ("b32", 2), ("b32", 4), ("b64", 2), ("f32", 4)])
def test_vectors_are_loaded_and_stored(kind, count):
    size, register = int(kind[1:]) // 8 * count, {"b16": "%rs", "b64": "%rd1"}.get(kind, "%r1")
    names = ", ".join(f"{register}{n}" for n in range(count))
    x = torch.randint(0, 255, (64 * size,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    out = torch.zeros_like(x)
    body = f"""
        ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p3];
        mul.wide.u32 %rd3, %r0, {size}; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
        ld.global.v{count}.{kind} {{{names}}}, [%rd1];
        st.global.v{count}.{kind} [%rd2], {{{names}}};
    """
    execute(body, x, out)
    assert out.equal(x)


def test_arguments_are_the_parameters_of_a_cubin():
    x = torch.zeros(3, 8)[:, :4]
    values = [results(f"ld.param.b32 %r9, [p{n}];", x, 1.5, -7)[0].item() for n in (4, 5, 6, 7, 9)]
    assert values == [3, 4, 8, 1, -7]
    assert results("ld.param.b32 %r9, [p8];", x, 1.5, -7, dtype=torch.float32).eq(1.5).all()
    with pytest.raises(PtxError, match="has 3 parameters"):
        run(module("", [x[0]]), 1, [x])
    with pytest.raises(PtxError, match="type f32"):
        run(module("", [1.5]), 1, [1])


# What a GPU does not allow.

OWN = "ld.param.u64 %rd2, [p3]; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd2, %rd3;"


@pytest.mark.parametrize("address", ["[%rd2+4]", "[%rd2+-4]", "[%rd3]"])
@pytest.mark.parametrize("access", ["ld.global.b32 %r9, {}", "st.global.b32 {}, %r0"])
def test_accesses_outside_of_tensors_fail(address, access):
    """One element behind the end, one before the begin, and near 0."""
    fails("outside of all tensors", f"{OWN} {access.format(address)};", torch.zeros(256)[64:128])


def test_accesses_between_rows_fail():
    x = torch.zeros(2, 64)[:, :32]
    fails("outside of all tensors' elements", OWN + "ld.global.b32 %r9, [%rd2];", x)
    assert results(OWN + "ld.global.b32 %r9, [%rd2];", x, threads=32).eq(0).all()


@pytest.mark.parametrize("access", ["ld.global.v2.b32 {%r9, %r8}, [%rd2]", "st.global.v2.b32 [%rd2], {%r0, %r0}"])
def test_misaligned_accesses_fail(access):
    fails("not aligned to 8 bytes", f"{OWN} {access};", torch.zeros(128))


def test_misaligned_shared_accesses_fail():
    fails("not aligned to 8 bytes", EXCHANGE.replace("st.shared.b32 [%r5], %r0", "st.shared.v2.b32 [%r5], {%r0, %r0}"))


def test_elements_belong_to_one_block():
    fails("another block has stored", "ld.param.u64 %rd2, [p3]; st.global.b32 [%rd2], 1;", torch.zeros(1), grid=2)
    body = "ld.param.u64 %rd2, [p3]; ld.global.b32 %r3, [%rd2]; st.global.b32 [%rd2], 1;"
    fails("another block stores", body, torch.zeros(1), grid=2)


def test_threads_must_agree_on_what_they_store():
    fails("different values", "ld.param.u64 %rd2, [p3]; st.global.b32 [%rd2], %r0;", torch.zeros(1))
    fails("different values", "mov.b32 %r3, memory; st.shared.b32 [%r3], %r0;", threads=32)


UNKNOWN = [
    "atom.global.add.u32 %r9, [%rd0], 1", "add.rz.f32 %r9, %r0, %r0", "ld.local.b32 %r9, [%r0]", "mov.u32 %r9, %clock",
    "bar.sync 1", "shfl.sync.bfly.b64 %r9, %r0, 1, 31, -1", "add.f32 %rs0, %r0, %r0", "max.f32 %r9, %r0",
    "ld.global.b64 %r9, [%rd0]", "cvt.rz.bf16.f32 %rs0, %r0", "bra NOWHERE", "fence.proxy.async", "st.global.b32 x, 1",
]  # fmt: skip


@pytest.mark.parametrize("instruction", UNKNOWN)
def test_unknown_instructions_are_named(instruction):
    with pytest.raises(PtxError, match=re.escape(instruction)):
        results(f"{instruction};")


def test_unknown_declarations_are_named():
    fails("unknown directive: .local", ".local .align 8 .b8 depot[16];")
    fails("unknown declaration of shared memory", ".shared .align 16 .b8 unsized[];")
    fails("the label AGAIN stands twice", "AGAIN: mov.b32 %r8, 0; AGAIN:")
    with pytest.raises(PtxError, match="reqntid"):
        run(module("", []).replace(".reqntid 64, 1, 1", ""), 1, [])
    with pytest.raises(PtxError, match=r"exactly one \.entry"):
        run(module("", []) * 2, 1, [])


def test_deadlocks_are_named():
    some = "setp.lt.u32 %p0, %r0, 32;"
    fails("deadlock: 32 threads wait at @%p0 bar.sync 0; 32 have ended", f"{some} @%p0 bar.sync 0;")
    fails("deadlock", f"{some} @%p0 ret; {EXCHANGE}")
    fails("deadlock", f"{some} @%p0 bra LATE; bar.sync 0; LATE: {ARRIVE}")


def test_what_nobody_has_written_is_not_read():
    fails("a register is read that was not written", "add.s32 %r9, %r8, 1;")
    fails("a register is read that was not written", "setp.lt.u32 %p0, %r0, 9; @%p0 mov.b32 %r8, 0; mov.b32 %r9, %r8;")
    fails("shared memory that nobody has written is read", EXCHANGE.replace("[%r6+252]", "[%r4+128]"), threads=32)
    fails("outside of shared memory", EXCHANGE.replace("[%r6+252]", "[%r6+256]"))
    fails("outside of shared memory", "mov.b32 %r3, 0; st.shared.b32 [%r3], %r3;", threads=32)


def test_races_of_warps_are_found():
    fails("race", EXCHANGE.replace("bar.sync 0;", "st.shared.b32 [%r5], %r0; bar.sync 0; st.shared.b32 [%r5], %r0;"))
    fails("race", EXCHANGE + "st.shared.b32 [%r5], %r0;")
    fails("race", "mov.b32 %r3, memory; st.shared.b32 [%r3], 1;")
    fails("race|nobody has written", EXCHANGE.replace("bar.sync 0;", ""))
    # Lanes of one warp are in step, and reads are no races.
    within = EXCHANGE.replace("bar.sync 0;", "").replace("252", "124")
    assert results(within, threads=32).equal((31 - THREADS[:32]).int())
    assert results(EXCHANGE + "ld.shared.b32 %r9, [%r4+8];").eq(2).all()


def test_a_shuffle_needs_the_lanes_that_it_names():
    some = "setp.lt.u32 %p0, %r0, 8; mov.b32 %r9, 0;"
    fails("threads that a shuffle names", f"{some} @%p0 shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1;")
    fails("a lane that is not there", "shfl.sync.bfly.b32 %r9, %r0, 16, 31, -1;", threads=16)
    alone = results(f"{some} @%p0 shfl.sync.bfly.b32 %r9, %r0, 1, 31, 255;", threads=32)
    assert alone[:8].equal((THREADS[:8] ^ 1).int())


# Memory that the launch sizes, mbarriers and bulk copies.

IN_DYNAMIC = EXCHANGE.replace("memory", "dynamic")


def test_memory_that_the_launch_sizes_is_behind_the_rest():
    begin = results("mov.b32 %r9, dynamic;", shared=200) - results("mov.b32 %r9, memory;", shared=200)
    assert begin.eq(256).all()
    assert results(IN_DYNAMIC, shared_bytes=256).equal((63 - THREADS).int())


@pytest.mark.parametrize("shared_bytes", [0, 252])
def test_memory_that_the_launch_sizes_has_an_end(shared_bytes):
    fails("outside of shared memory", IN_DYNAMIC, shared_bytes=shared_bytes)


def test_names_belong_to_their_braces():
    body = """
        mov.b32 %r9, 1;
        {{ .reg .b32 own; mov.b32 own, 2; bra OUT; mov.b32 %r9, 9; OUT: add.s32 %r9, %r9, own; }}
        {{ .reg .b64 own; {} bra OUT; mov.b32 %r9, 9; OUT: cvt.u32.u64 %r8, own; }}
        add.s32 %r9, %r9, %r8;
    """
    assert results(body.format("mov.b64 own, 4;")).eq(7).all()
    fails("a register is read that was not written", body.format(""))


# Thread 0 makes an mbarrier and lets 32 numbers be copied; a thread reads the number of its lane.
MAKE = """
    mov.b32 %r4, memory;
    setp.ne.b32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared.b64 [%r4], 1;
    @!%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
FETCH = """
    {
        @%p0 bra OUT;
        ld.param.u64 %rd2, [p3];
        mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r4], 128;
        mov.u32 %r5, %cluster_ctarank;
        add.s32 %r6, %r4, 128;
        mapa.shared::cluster.u32 %r7, %r6, %r5;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd2+0], 128, [%r4];
    OUT:
    }
"""
NEXT = FETCH.replace("+0", "+128")
READ = "and.b32 %r8, %r0, 31; shl.b32 %r8, %r8, 2; add.s32 %r8, %r4, %r8; ld.shared.b32 %r9, [%r8+128];"


def wait(parity):
    return f"""
        {{
            .reg .pred P1;
        AGAIN:
            mbarrier.try_wait.parity.shared.b64 P1, [%r4], {parity}, 10000000;
            @P1 bra.uni DONE;
            bra.uni AGAIN;
        DONE:
        }}"""


def test_bytes_of_a_copy_have_come_when_its_phase_has_ended():
    x = numbers(0).view(torch.int32)
    assert results(MAKE + FETCH + wait(0) + READ, x).equal(x[LANES])
    assert results(MAKE + FETCH + wait(0) + READ + "bar.sync 0;" + NEXT + wait(1) + READ, x).equal(x[32 + LANES])


def test_threads_that_wait_let_others_arrive():
    late = f"@!%p0 bra LATE; {wait(0)} bra OUT; LATE: mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 0; OUT:"
    assert results(MAKE + late + "mov.b32 %r9, 5;").eq(5).all()
    every = "mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r4], 0;" + wait(0) + "mov.b32 %r9, 5;"
    assert results(MAKE.replace("[%r4], 1", "[%r4], 64") + every).eq(5).all()
    fails("deadlock: 64 threads wait at mbarrier.try_wait", MAKE.replace("[%r4], 1", "[%r4], 65") + every)


MADE_LATE = "mov.b32 %r4, memory; setp.ne.b32 %p0, %r0, 0;"
BROKEN_COPIES = {
    "read_at_once": (MAKE + FETCH + READ, "has not seen the end"),
    "read_by_others": (MAKE + FETCH + f"@%p0 bra OUT; {wait(0)} OUT: bar.sync 0;" + READ, "has not seen the end"),
    "asked_once": (
        MAKE + FETCH + "mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0;" + READ, "has not seen the end",
    ),
    "stored_at_once": (MAKE + FETCH + READ.replace("ld.shared.b32 %r9, [%r8+128]", "st.shared.b32 [%r8+128], 0"),
                       "has not seen the end"),
    "last_phase": (MAKE + FETCH + wait(1) + READ, "has not seen the end"),
    "no_phase": (MAKE + FETCH + wait(2), "parity of a phase is 0 or 1"),
    "refilled_while_read": (MAKE + FETCH + wait(0) + READ + NEXT + wait(1), "no barrier is between an access and a"),
    "filled_twice": (MAKE.replace("], 1;", "], 2;") + FETCH + NEXT, "has not seen the end"),
    "stored_before": (
        MAKE.replace("bar.sync", "@!%p0 st.shared.b32 [%r4+252], 0; bar.sync") + FETCH, "without a fence.proxy.async",
    ),
    "onto_the_mbarrier": (MAKE + FETCH.replace("%r4, 128;", "%r4, 0;"), "a copy fills an mbarrier"),
    "onto_its_end": (MAKE + FETCH.replace("%r4, 128;", "%r4, 144;"), "outside of shared memory"),
    "onto_half_a_line": (MAKE + FETCH.replace("%r4, 128;", "%r4, 120;"), "not whole lines"),
    "of_half_a_line": (MAKE + FETCH.replace("+0", "+8"), "not whole lines"),
    "half_a_line": (MAKE + FETCH.replace("128, [", "120, ["), "not whole lines"),
    "beyond_the_tensor": (MAKE + FETCH.replace("+0", "+144"), "not elements of one tensor"),
    "source_stored_before": (
        MAKE + "ld.param.u64 %rd2, [p3]; @!%p0 st.global.b32 [%rd2], 0;" + FETCH, "a block stores is copied",
    ),
    "source_stored_meanwhile": (
        MAKE + FETCH + "@!%p0 st.global.b32 [%rd2], 0;" + wait(0), "a block stores is copied",
    ),
    "nobody_waits": (MAKE + FETCH, "a block ends with a copy for which no thread has waited"),
    "nothing_comes": (MAKE + wait(0), "deadlock: 64 threads wait at mbarrier.try_wait"),
    "too_little_comes": (MAKE + FETCH.replace("], 128;", "], 144;") + wait(0), "deadlock: 64 threads wait at mbarrier"),
    "too_much_comes": (MAKE + FETCH.replace("], 128;", "], 112;"), "more bytes are copied than the mbarrier expects"),
    "too_much_for_a_count": (MAKE + FETCH.replace("], 128;", "], 1048576;"), "more than it counts"),
    "next_phase_too_early": (MAKE + FETCH + NEXT, "more threads arrive"),
    "no_mbarrier": (MADE_LATE + FETCH, "no mbarrier that somebody has initialised"),
    "no_arrivals": (MAKE.replace("], 1;", "], 0;"), "cannot count 0 arrivals"),
    "made_off_its_alignment": (MAKE.replace("[%r4]", "[%r4+4]"), "not aligned to 8 bytes"),
    "made_twice": (MAKE + MAKE, "initialised twice"),
    "made_by_two": (MAKE.replace("@!%p0 mbarrier", "mbarrier"), "initialised twice"),
    "made_where_a_copy_is": (
        MAKE + FETCH + "@!%p0 mbarrier.init.shared.b64 [%r4+136], 1;", "twice, or where something else is",
    ),
    "made_without_a_fence": (MAKE.replace("@!%p0 fence", "@%p0 fence"), "no fence.mbarrier_init"),
    "made_without_a_barrier": (MAKE.replace("bar.sync 0;", "") + FETCH + wait(0), "an mbarrier's init by another"),
    "loaded": (MAKE + "ld.shared.b32 %r9, [%r4+4];", "an mbarrier is loaded or stored"),
    "state_read": (MAKE + FETCH + wait(0) + READ + "mov.b64 %rd4, %rd3;", "a register is read that was not written"),
    "parted_at_once": (
        "setp.ne.b32 %p0, %r0, 3; @%p0 bra.uni OUT; OUT:", "threads of a warp part at a branch that is uniform",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_COPIES)
def test_broken_copies_are_found(name):
    body, what = BROKEN_COPIES[name]
    fails(what, body + (FETCH if name == "made_without_a_fence" else ""), torch.zeros(64))


def test_a_copy_is_of_elements_of_one_tensor():
    rows = torch.zeros(2, 64)
    twice = MAKE + FETCH.replace("add.s32 %r6, %r4, 128", "mov.b32 %r6, dynamic").replace("128", "256")
    fails("not elements of one tensor", twice, rows[:, :32], shared_bytes=256)
    fails("not elements of one tensor", twice, rows[:, :32], rows[:, 32:], shared_bytes=256)
    assert results(twice + wait(0) + "mov.b32 %r9, 5;", rows, shared_bytes=256).eq(5).all()


def test_a_copy_fills_its_own_block():
    other = FETCH.replace("mapa", "xor.b32 %r5, %r5, 1; mapa")
    fails("shared memory of another block", MAKE + ARRIVE + other, torch.zeros(64), grid=2, cluster=2)
    x = numbers(0).view(torch.int32)
    assert results(MAKE + FETCH + wait(0) + READ, x, grid=2, cluster=2).equal(x[LANES].repeat(2))


# Kernels of CuTe DSL.

NAMES = [
    "rms_norm_forward", "rms_norm_backward", "layer_norm_forward", "layer_norm_backward", "softmax_forward",
    "softmax_backward", "fused_add_rms_norm_forward", "fused_add_rms_norm_backward",
    "fused_rms_norm_add_rms_norm_forward", "fused_rms_norm_add_rms_norm_backward",
]  # fmt: skip


def kernel_of(spec, problem, threads, rows=1, cluster=1, persistent=True, ahead=False):
    """The kernel of a config, whether the search space has it or not."""
    schedule = "persistent" if persistent else "block"
    return spec.implement(
        problem,
        Config(
            implementation="cute", schedule=schedule, threads=threads, rows=rows, cluster=cluster, ahead=ahead,
            occupancy=1,
        ),
    )  # fmt: skip


def ptx_of(kernel, arch="sm_90"):
    """What CuTe DSL makes of a kernel, as :func:`tilekern.compile.cute_compiler.compile_kernel` has it compiled."""
    parameters, constants = tuple(kernel.parameters), tuple(kernel.constants)
    return made_of(kernel.kernel, kernel.function, parameters, kernel.block, kernel.cluster, constants, arch)


@functools.lru_cache(maxsize=64)
def made_of(where, function, parameters, block, cluster, constants, arch):
    cute = pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed")
    module, _, name = where.partition(":")
    program = getattr(importlib.import_module(module), name)(
        function, parameters, capability=int(arch.removeprefix("sm_")), block=block, cluster=cluster, **dict(constants)
    )
    with tempfile.TemporaryDirectory() as folder:
        made = cute.compile(program, program.sample, options=f"--gpu-arch {arch} --keep-ptx --dump-dir {folder}")
        text = made.artifacts.PTX
    return text if isinstance(text, str) else text.decode()


def problem_of(spec, rows, columns, dtype, weight_dtype="float32", flag=True):
    values = {"rows": rows, "columns": columns, "dtype": dtype, "weight_dtype": weight_dtype}
    return spec.problem(**{d.name: values.get(d.name, flag) for d in spec.dimensions})


def with_gaps(x, gap):
    """A tensor with NaN between its rows, of whole 16 bytes; a weight and a number as they are."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or gap == 0:
        return x
    *leading, size = x.shape
    return x.new_full((*leading, size + gap * 16 // x.element_size()), NAN)[..., :size].copy_(x)


def launched(spec, problem, kernel, text, inputs, clusters=None, gap=0, seed=0):
    """The outputs of a kernel on some clusters, as many as its rows take or others, its rows apart."""
    clusters = clusters or kernel.grid(problem, 64) // kernel.cluster
    inputs = {name: with_gaps(x, gap) for name, x in inputs.items()}
    outputs = make_outputs(spec, problem, clusters, "cpu")
    outputs = {name: x if name == "partial" else with_gaps(x, gap) for name, x in outputs.items()}
    arguments = arguments_of(kernel, inputs, outputs)
    run(
        text, clusters * kernel.cluster, arguments, cluster=kernel.cluster, shared_bytes=kernel.shared_bytes, seed=seed
    )  # fmt: skip
    return outputs


def assert_right(spec, problem, kernel, clusters=None, inputs=None, arch="sm_90", gap=0):
    """Hold a kernel to the reference in float64."""
    inputs = inputs or inputs_of(spec, problem)
    outputs = launched(spec, problem, kernel, ptx_of(kernel, arch), inputs, clusters, gap)
    check = compare(spec, problem, outputs, expected_results(spec, problem, inputs))
    assert check.passed, check.reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_leave_threads_idle_are_right(name, ahead):
    spec = spec_named(name)
    problem = problem_of(spec, 7, 1000, "bfloat16")
    assert_right(spec, problem, kernel_of(spec, problem, threads=128, ahead=ahead), clusters=3, gap=1)


@pytest.mark.parametrize("name", NAMES)
def test_short_rows_are_right(name):
    """Four rows share a warp, and the last block has one; kernels with sums over rows have one row a block."""
    spec = spec_named(name)
    problem = problem_of(spec, 9, 64, "float16", "float16")
    rows = 1 if "backward" in name else 4
    assert_right(spec, problem, kernel_of(spec, problem, threads=8, rows=rows, persistent=rows == 1), gap=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("cluster", "threads"), [(2, 256), (4, 64)])
def test_rows_of_a_cluster_are_right(name, cluster, threads):
    spec = spec_named(name)
    problem = problem_of(spec, 5, 1992, "float32", "bfloat16", flag=False)
    assert_right(spec, problem, kernel_of(spec, problem, threads, cluster=cluster), clusters=2, gap=1)


@pytest.mark.parametrize("name", NAMES)
def test_candidates_of_the_search_space_are_right(name):
    spec = spec_named(name)
    random, target = draws_of(spec), resolve("H200")
    problem = problem_of(spec, random.randint(1, 9), random.choice([520, 1000]), random.choice(DTYPES))
    candidates = [config for config in spec.space.candidates(problem, target) if is_cute(config)]
    for config in random.sample(candidates, 2):
        kernel = spec.implement(problem, config)
        assert_right(spec, problem, kernel, kernel.grid(problem, 2) // kernel.cluster)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_without_a_row_read_nothing(name):
    spec = spec_named(name)
    problem = problem_of(spec, 3, 520, "bfloat16")
    assert_right(spec, problem, kernel_of(spec, problem, threads=64, ahead=True), clusters=5)


@st.composite
def launches(draw):
    """A spec, its problem, a kernel, a number of clusters and a GPU."""
    spec = spec_named(draw(st.sampled_from(NAMES)))
    is_backward = "backward" in spec.name
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    threads, cluster = draw(st.sampled_from([8, 16, 32, 64, 128, 256])), draw(st.sampled_from([1, 1, 2, 4]))
    rows = 1 if is_backward else draw(st.sampled_from([1, 2, 4]))
    persistent = is_backward or draw(st.booleans())
    most = threads * cluster * draw(st.integers(1, 3))
    columns = 16 // ITEM_BYTES[dtype] * draw(st.one_of(st.just(most), st.integers(1, most)))
    problem = problem_of(spec, draw(st.integers(1, 9)), columns, dtype, weight_dtype, draw(st.booleans()))
    steps = cdiv(problem["rows"], rows)
    # There are no clusters before Hopper.
    arch = draw(st.sampled_from(["sm_80", "sm_90", "sm_100"][cluster > 1 :]))
    kernel = kernel_of(spec, problem, threads, rows, cluster, persistent, persistent and draw(st.booleans()))
    return spec, problem, kernel, draw(st.integers(1, steps + 2)) if persistent else steps, None, arch


@examples(20)
@given(launches(), st.integers(0, 2))
def test_any_rows_are_right(launch, gap):
    assert_right(*launch, gap)


@pytest.mark.parametrize(
    "options", [{"threads": 128, "ahead": True}, {"threads": 32, "cluster": 2, "rows": 2}], ids=str
)
@pytest.mark.parametrize("level", [-1000.0, 0.0])
def test_softmax_of_numbers_that_are_not_finite_is_torchs(options, level):
    """Zeros beyond the end of a row must not be the maximum of a row of negative numbers."""
    spec = spec_named("softmax_forward")
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) + level
    x[1, 999], x[2, 0], x[3, 500], x[4] = INFINITY, NAN, -INFINITY, -INFINITY
    problem = problem_of(spec, 6, 1000, "float32")
    assert_right(spec, problem, kernel_of(spec, problem, **options), clusters=2, inputs={"x": x})


# Those of rows that come into a ring in shared memory.

RINGS = [
    "rms_norm_backward", "layer_norm_backward", "fused_add_rms_norm_backward", "fused_rms_norm_add_rms_norm_backward",
]  # fmt: skip


def kernel_of_ring(spec, problem, threads=64, stages=2, *, early=False):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"threads": threads, "stages": stages, "early": early, "occupancy": 1}
    return spec.implement(problem, Config(implementation="cute", schedule="persistent", **axes))


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize(
    ("columns", "dtype", "weight_dtype", "arch"),
    [(520, "bfloat16", "float32", "sm_90"), (264, "float32", "float16", "sm_100")],
)
def test_rows_of_a_ring_are_right(name, columns, dtype, weight_dtype, arch):
    """With blocks that have no row, rows for less than a round of the ring, one round, and several and a part."""
    spec = spec_named(name)
    for rows, blocks in [(2, 3), (6, 2), (11, 1)]:
        problem = problem_of(spec, rows, columns, dtype, weight_dtype)
        kernel = kernel_of_ring(spec, problem, stages=3, early=rows > 2)
        assert_right(spec, problem, kernel, blocks, arch=arch, gap=1)


@st.composite
def launches_of_rings(draw):
    """A spec, its problem, a kernel, a number of blocks and a GPU."""
    spec = spec_named(draw(st.sampled_from(RINGS)))
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    threads, stages = draw(st.sampled_from([64, 128, 256, 512])), draw(st.integers(1, 6))
    most = threads * draw(st.integers(1, 2))
    columns = 16 // ITEM_BYTES[dtype] * draw(st.one_of(st.just(most), st.integers(1, most)))
    problem = problem_of(spec, draw(st.integers(1, 12)), columns, dtype, weight_dtype, draw(st.booleans()))
    kernel = kernel_of_ring(spec, problem, threads, stages, early=draw(st.booleans()))
    return spec, problem, kernel, draw(st.integers(1, 4)), None, draw(st.sampled_from(["sm_90", "sm_100"]))


@examples(8)
@given(launches_of_rings(), st.integers(0, 2))
def test_any_rows_of_a_ring_are_right(launch, gap):
    assert_right(*launch, gap)


def test_sums_over_rows_of_a_ring_have_a_fixed_order():
    spec = spec_named("rms_norm_backward")
    problem = problem_of(spec, 11, 520, "bfloat16")
    kernel, inputs = kernel_of_ring(spec, problem, stages=3), inputs_of(spec, problem)
    one, other = (launched(spec, problem, kernel, ptx_of(kernel), inputs, 4, seed=seed) for seed in (0, 1))
    assert all(one[name].equal(other[name]) for name in one)


# Those of heads.

HEADS = spec_named("qk_norm_rope_backward")


def heads_of(tokens=5, batch=2, heads=8, kv_heads=4, head_dim=128, dtype="bfloat16", others=("bfloat16", "bfloat16")):
    sizes = {"tokens": tokens, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return HEADS.problem(**sizes, dtype=dtype, weight_dtype=others[0], angle_dtype=others[1])


def kernel_of_heads(problem, warps=4, together=1, ahead=1):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"warps": warps, "together": together, "ahead": ahead, "occupancy": 1}
    return HEADS.implement(problem, Config(implementation="cute", schedule="persistent", **axes))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "together", "ahead"),
    [(8, 4, 1, 1), (8, 4, 2, 3), (16, 8, 2, 1), (16, 8, 2, 2), (5, 3, 1, 1), (5, 3, 1, 2), (1, 1, 2, 1), (6, 6, 4, 2)],
)
def test_heads_are_right(heads, kv_heads, together, ahead):
    """Warps whose heads are of several tokens or fewer than they have room for, and some whose steps are cut short."""
    problem = heads_of(heads=heads, kv_heads=kv_heads)
    assert_right(HEADS, problem, kernel_of_heads(problem, 4, together, ahead), clusters=3, gap=1)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "others"),
    [
        ("bfloat16", 16, ("bfloat16", "float32")),
        ("bfloat16", 256, ("float32", "bfloat16")),
        ("float16", 512, ("float16", "float16")),
        ("float32", 8, ("float32", "float32")),
        ("float32", 128, ("bfloat16", "float16")),
    ],
)
def test_heads_of_any_dtypes_and_sizes_are_right(dtype, head_dim, others):
    problem = heads_of(3, 2, 4, 2, head_dim, dtype, others)
    assert_right(HEADS, problem, kernel_of_heads(problem, 2, 1, 2), clusters=2, gap=2)


def test_candidates_for_heads_are_right():
    random = draws_of(HEADS)
    heads = random.choice([{"heads": 16, "kv_heads": 8}, {"heads": 8, "kv_heads": 1}, {"heads": 5, "kv_heads": 3}])
    problem = heads_of(random.choice([5, 9]), dtype=random.choice(DTYPES), **heads)
    for config in random.sample([c for c in HEADS.space.candidates(problem, resolve("H200")) if is_cute(c)], 3):
        kernel = HEADS.implement(problem, config)
        assert_right(HEADS, problem, kernel, kernel.grid(problem, 2))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [2, 40])
def test_blocks_without_a_head_store_sums_of_zero(blocks):
    problem = heads_of(tokens=1, batch=1, heads=5, kv_heads=1)
    assert_right(HEADS, problem, kernel_of_heads(problem, ahead=2), clusters=blocks)
    problem, kernel = problem.but(tokens=0), kernel_of_heads(problem)
    inputs = {name: x[:, :0] if getattr(x, "ndim", 0) > 2 else x for name, x in inputs_of(HEADS, heads_of()).items()}
    assert not launched(HEADS, problem, kernel, ptx_of(kernel), inputs, blocks)["partial"].any()


@pytest.mark.parametrize("columns", [128, 64])
def test_heads_share_the_angles_of_one_batch_entry(columns):
    problem = heads_of(batch=3)
    inputs = inputs_of(HEADS, problem)
    inputs |= {name: inputs[name][:1, :, :columns].contiguous() for name in ("cos", "sin")}
    for name in ("cos", "sin"):
        inputs[name][..., 64:] = NAN
    assert_right(HEADS, problem, kernel_of_heads(problem, ahead=2), clusters=5, inputs=inputs)


def test_heads_may_be_parts_of_one_projection():
    """Tokens are further apart than their heads are, and batch entries and tokens change places."""
    problem = heads_of(tokens=3, batch=2)
    inputs = inputs_of(HEADS, problem)
    both = torch.randn(3, 2, 8 + 4 + 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16().transpose(0, 1)
    inputs |= {"q": both[:, :, :8], "k": both[:, :, 8:12]}
    assert_right(HEADS, problem, kernel_of_heads(problem, together=2), clusters=4, inputs=inputs)


def test_a_number_that_is_not_finite_stays_in_its_head():
    problem = heads_of(tokens=3, batch=1, heads=5, kv_heads=3)
    for x, y in (("q", "k"), ("dq_out", "dk_out")):
        inputs = inputs_of(HEADS, problem)
        inputs[x][0, 2, 4, 3], inputs[y][0, 0, 0, 127] = NAN, NAN
        assert_right(HEADS, problem, kernel_of_heads(problem, ahead=2), clusters=3, inputs=inputs)


@st.composite
def launches_of_heads(draw):
    """A problem, its kernel, a number of blocks and a GPU."""
    dtype, others = draw(st.sampled_from(DTYPES)), (draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES)))
    head_dim = 2 * (16 // ITEM_BYTES[dtype]) * draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    heads, kv_heads = draw(st.integers(1, 17)), draw(st.integers(1, 9))
    problem = heads_of(draw(st.integers(1, 5)), draw(st.integers(1, 3)), heads, kv_heads, head_dim, dtype, others)
    axes = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    return problem, kernel_of_heads(problem, *axes), draw(st.integers(2, 9)), draw(st.sampled_from(["sm_80", "sm_100"]))


@examples(6)
@given(launches_of_heads(), st.integers(0, 2))
def test_any_heads_are_right(launch, gap):
    problem, kernel, blocks, arch = launch
    assert_right(HEADS, problem, kernel, blocks, None, arch, gap)


def test_sums_over_heads_have_a_fixed_order():
    """No thread adds to what another has stored in global memory."""
    assert not re.search(r"\b(atom|red)\b", ptx_of(kernel_of_heads(heads_of())))


# Those of turned heads.

TURNS = spec_named("rope")
both_directions = pytest.mark.parametrize("is_inverse", [False, True], ids=["forward", "inverse"])


def turns_of(
    tokens=5, batch=2, heads=8, kv_heads=4, head_dim=128, dtype="bfloat16", angle_dtype="bfloat16", is_full=False,
    is_inverse=False,
):  # fmt: skip
    sizes = {"tokens": tokens, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return TURNS.problem(**sizes, full=is_full, inverse=is_inverse, dtype=dtype, angle_dtype=angle_dtype)


def kernel_of_turns(problem, threads=64, together=1, occupancy=1):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"threads": threads, "together": together, "occupancy": occupancy}
    return TURNS.implement(problem, Config(implementation="cute", schedule="block", **axes))


@pytest.mark.slow
@both_directions
@pytest.mark.parametrize("is_full", [False, True], ids=["half", "full"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "together", "threads"),
    [(8, 4, 1, 64), (8, 4, 2, 128), (16, 2, 8, 64), (5, 3, 1, 32), (1, 1, 1, 256), (6, 3, 2, 64), (12, 4, 4, 32)],
)
def test_turned_heads_are_right(heads, kv_heads, together, threads, is_full, is_inverse):
    """With last blocks that have too few heads, and with fewer heads of k together than of q."""
    problem = turns_of(heads=heads, kv_heads=kv_heads, is_full=is_full, is_inverse=is_inverse)
    assert_right(TURNS, problem, kernel_of_turns(problem, threads, together), gap=1)


@both_directions
@pytest.mark.parametrize(
    ("dtype", "head_dim", "angle_dtype", "threads"),
    [
        ("bfloat16", 16, "float32", 64),
        ("bfloat16", 80, "bfloat16", 64),
        ("float16", 96, "float32", 128),
        ("float16", 512, "float16", 64),
        ("float32", 8, "float32", 64),
        ("float32", 128, "bfloat16", 128),
    ],
)
def test_turned_heads_of_any_dtypes_and_sizes_are_right(dtype, head_dim, angle_dtype, threads, is_inverse):
    """Also where the threads of a block are no multiple of those of a head."""
    problem = turns_of(3, 2, 4, 2, head_dim, dtype, angle_dtype, head_dim % 32 == 0, is_inverse)
    assert_right(TURNS, problem, kernel_of_turns(problem, threads, 2), gap=2)


@pytest.mark.slow
def test_candidates_for_turned_heads_are_right():
    random = draws_of(TURNS)
    heads = random.choice([{"heads": 16, "kv_heads": 8}, {"heads": 8, "kv_heads": 1}, {"heads": 5, "kv_heads": 3}])
    problem = turns_of(random.choice([5, 9]), dtype=random.choice(DTYPES), is_full=random.random() < 0.5, **heads)
    for config in random.sample([c for c in TURNS.space.candidates(problem, resolve("H200")) if is_cute(c)], 3):
        assert_right(TURNS, problem, TURNS.implement(problem, config))


@pytest.mark.parametrize("columns", [128, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_turned_heads_share_the_angles_of_one_batch_entry(columns, batch):
    """Of angles that are stored twice the first ones alone are read."""
    problem = turns_of(batch=batch)
    inputs, kernel = inputs_of(TURNS, problem), kernel_of_turns(problem, 64, 2)
    inputs |= {name: inputs[name][:1] for name in ("cos", "sin")}
    stored = {name: torch.full((1, 5, columns), NAN).bfloat16() for name in ("cos", "sin")}
    for name, angles in stored.items():
        angles[..., :64] = inputs[name]
    found = launched(TURNS, problem, kernel, ptx_of(kernel), inputs | stored)
    check = compare(TURNS, problem, found, expected_results(TURNS, problem, inputs))
    assert check.passed, check.reason


@both_directions
def test_turned_heads_may_be_parts_of_one_projection(is_inverse):
    """Tokens are further apart than their heads are, and batch entries and tokens change places; results as well."""
    problem = turns_of(tokens=3, batch=2, is_inverse=is_inverse)
    kernel, inputs = kernel_of_turns(problem, 64, 2), inputs_of(TURNS, problem)
    both = torch.randn(3, 2, 8 + 4 + 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16().permute(1, 2, 0, 3)
    turned = torch.full_like(both, NAN)
    inputs |= {"q": both[:, :8], "k": both[:, 8:12]}
    outputs = {"q_out": turned[:, :8], "k_out": turned[:, 12:]}
    run(ptx_of(kernel), kernel.grid(problem, 64), arguments_of(kernel, inputs, outputs))
    check = compare(TURNS, problem, outputs, expected_results(TURNS, problem, inputs))
    assert check.passed, check.reason
    assert turned[:, 8:12].isnan().all()


def test_a_number_that_is_not_finite_stays_in_its_pair():
    problem = turns_of(tokens=3, batch=1, heads=5, kv_heads=3)
    inputs = inputs_of(TURNS, problem)
    inputs["q"][0, 4, 2, 3], inputs["k"][0, 0, 0, 127] = NAN, INFINITY
    kernel = kernel_of_turns(problem)
    found = launched(TURNS, problem, kernel, ptx_of(kernel), inputs)
    for name, place in (("q_out", (0, 4, 2, 3)), ("k_out", (0, 0, 0, 63))):
        *head, number = place
        assert not found[name][tuple(head)][[number, number + 64]].isfinite().any()
        assert (~found[name].isfinite()).sum() == 2


@st.composite
def launches_of_turns(draw):
    """A problem, its kernel and a GPU."""
    dtype, angle_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    threads = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32]))
    heads, kv_heads = draw(st.integers(1, 17)), draw(st.integers(1, 9))
    sizes = draw(st.integers(1, 5)), draw(st.integers(1, 3)), heads, kv_heads, 2 * threads * (16 // ITEM_BYTES[dtype])
    problem = turns_of(*sizes, dtype, angle_dtype, draw(st.booleans()), draw(st.booleans()))
    together = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))
    kernel = kernel_of_turns(problem, draw(st.sampled_from([32, 64, 128])), together, draw(st.integers(0, 1)))
    return problem, kernel, draw(st.sampled_from(["sm_80", "sm_100"]))


@pytest.mark.slow
@examples(12)
@given(launches_of_turns(), st.integers(0, 2))
def test_any_turned_heads_are_right(launch, gap):
    problem, kernel, arch = launch
    assert_right(TURNS, problem, kernel, None, None, arch, gap)


@pytest.mark.parametrize(("is_full", "angles"), [(False, 2), (True, 4)])
@pytest.mark.parametrize("together", [1, 4])
def test_a_thread_loads_the_angles_once_and_all_before_it_stores(together, is_full, angles):
    """In code for q and in code for k."""
    text = ptx_of(kernel_of_turns(turns_of(is_full=is_full), together=together))
    accesses = re.findall(r"(ld|st)\.global\.(\S+)", text)
    assert {kind for _, kind in accesses} == {"v4.b32"}
    one = ["ld"] * (2 * together + angles) + ["st"] * 2 * together
    assert [access for access, _ in accesses] == 2 * one


# Those of heads turned by the angles of three positions.

POSITIONS = spec_named("qwen2vl_mrope")


def turns_of_positions(*sizes, **more):
    """As :func:`turns_of`."""
    problem = turns_of(*sizes, **more)
    return POSITIONS.problem(**{d.name: problem[d.name] for d in POSITIONS.dimensions})


def kernel_of_positions(problem, threads=64, together=1, occupancy=1):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"threads": threads, "together": together, "occupancy": occupancy}
    return POSITIONS.implement(problem, Config(implementation="cute", schedule="block", **axes))


def assert_positions_right(problem, kernel, time, height, arch="sm_90", gap=0):
    """Hold a kernel to the reference, with NaN for each angle that is not its frequency's, and for their repetition."""
    inputs, half = inputs_of(POSITIONS, problem) | {"time": time, "height": height}, problem["head_dim"] // 2
    edges = (0, time, time + height, half)
    for name in ("cos", "sin"):
        chosen = torch.full_like(inputs[name], NAN)
        for position in range(3):
            part = slice(edges[position], edges[position + 1])
            chosen[position, ..., part] = inputs[name][position, ..., part]
        inputs[name] = chosen
    assert_right(POSITIONS, problem, kernel, None, inputs, arch, gap)


@both_directions
@pytest.mark.parametrize(
    ("time", "height"),
    [
        (16, 24), (64, 0), (0, 64), (0, 0),  # whole vectors
        (10, 27), (1, 62), (7, 1), (63, 1), (0, 1),  # ends inside of vectors
        (12, 2), (9, 5), (8, 5), (11, 0), (33, 6),  # two ends in a vector, or one at its start or its end
    ],
)  # fmt: skip
def test_any_sections_are_right(time, height, is_inverse):
    problem = turns_of_positions(3, is_inverse=is_inverse)
    assert_positions_right(problem, kernel_of_positions(problem, 64, 2), time, height, gap=1)


@both_directions
@pytest.mark.parametrize(
    ("heads", "kv_heads", "together", "threads"),
    [(8, 4, 1, 64), (16, 2, 8, 64), (5, 3, 1, 32), (1, 1, 1, 256), (6, 3, 2, 64), (12, 4, 4, 32)],
)
def test_heads_turned_by_positions_are_right(heads, kv_heads, together, threads, is_inverse):
    problem = turns_of_positions(heads=heads, kv_heads=kv_heads, is_inverse=is_inverse)
    assert_positions_right(problem, kernel_of_positions(problem, threads, together), 16, 24, gap=1)


@both_directions
@pytest.mark.parametrize(
    ("dtype", "head_dim", "angle_dtype", "threads"),
    [
        ("bfloat16", 16, "float32", 64),
        ("bfloat16", 80, "bfloat16", 64),
        ("float16", 96, "float32", 128),
        ("float32", 8, "float32", 64),
        ("float32", 128, "bfloat16", 128),
    ],
)
def test_heads_turned_by_positions_of_any_dtypes_and_sizes_are_right(dtype, head_dim, angle_dtype, threads, is_inverse):
    problem = turns_of_positions(3, 2, 4, 2, head_dim, dtype, angle_dtype, is_inverse=is_inverse)
    for time, height in ((head_dim // 4, head_dim // 8), (1, head_dim // 4)):
        assert_positions_right(problem, kernel_of_positions(problem, threads, 2), time, height, gap=2)


def test_candidates_for_heads_turned_by_positions_are_right():
    random = draws_of(POSITIONS)
    heads = random.choice([{"heads": 16, "kv_heads": 8}, {"heads": 8, "kv_heads": 1}, {"heads": 5, "kv_heads": 3}])
    problem = turns_of_positions(random.choice([5, 9]), dtype=random.choice(DTYPES), **heads)
    for config in random.sample([c for c in POSITIONS.space.candidates(problem, resolve("H200")) if is_cute(c)], 3):
        time = random.randint(0, 64)
        assert_positions_right(problem, POSITIONS.implement(problem, config), time, random.randint(0, 64 - time))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("time", [16, 10])
def test_heads_turned_by_positions_share_the_angles_of_one_batch_entry(time, batch):
    problem = turns_of_positions(batch=batch)
    inputs, kernel = inputs_of(POSITIONS, problem) | {"time": time}, kernel_of_positions(problem, 64, 2)
    inputs |= {name: inputs[name][:, :1] for name in ("cos", "sin")}
    assert_right(POSITIONS, problem, kernel, inputs=inputs)


@examples(12)
@given(launches_of_turns(), st.integers(0, 2), st.data())
def test_any_heads_turned_by_positions_are_right(launch, gap, data):
    problem, made, arch = launch
    constants, half = dict(made.constants), problem["head_dim"] // 2
    problem = POSITIONS.problem(**{d.name: problem[d.name] for d in POSITIONS.dimensions})
    kernel = kernel_of_positions(problem, made.block, constants["together"], constants["occupancy"])
    time = data.draw(st.integers(0, half))
    assert_positions_right(problem, kernel, time, data.draw(st.integers(0, half - time)), arch, gap)


@pytest.mark.parametrize("together", [1, 4])
def test_a_thread_loads_the_angles_of_its_position_as_vectors_behind_its_heads(together):
    """In code for q and in code for k; a vector in which a section ends is loaded again by elements."""
    text = ptx_of(kernel_of_positions(turns_of_positions(), together=together))
    accesses = re.findall(r"(ld|st)\.global\.(\S+)", text)
    elements = 2 * [("ld", "v4.b32"), *[("ld", "b16")] * 7]  # the first one is the vector's
    one = [("ld", "v4.b32")] * 2 * together + elements + [("st", "v4.b32")] * 2 * together
    assert accesses == 2 * one


# That of losses.

LOSS = spec_named("cross_entropy_fused")


def loss_of(rows=7, vocabulary=1000, dtype="bfloat16"):
    return LOSS.problem(rows=rows, vocabulary=vocabulary, dtype=dtype, weighted=False, smoothed=False, capped=False)


def kernel_of_losses(problem, threads=64, cluster=1, schedule="persistent"):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"threads": threads, "cluster": cluster, "occupancy": 1}
    return LOSS.implement(problem, Config(implementation="cute", schedule=schedule, **axes))


SHARES = [(32, 1), (64, 1), (256, 1), (32, 2), (64, 4), (256, 2), (128, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "cluster"), SHARES)
@pytest.mark.parametrize("schedule", ["persistent", "block"])
def test_losses_are_right(threads, cluster, schedule):
    """With threads that have no vector, with one or several of them, and with a last one that some do not have."""
    problem = loss_of()
    clusters = 2 if schedule == "persistent" else None
    assert_right(LOSS, problem, kernel_of_losses(problem, threads, cluster, schedule), clusters, gap=1)


@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [("float16", 512), ("float32", 1020), ("float32", 4), ("bfloat16", 8)]
)
def test_losses_of_any_dtype_are_right(dtype, vocabulary):
    problem = loss_of(5, vocabulary, dtype)
    assert_right(LOSS, problem, kernel_of_losses(problem, cluster=2), clusters=7, gap=2)


def test_candidates_for_losses_are_right():
    problem, random = loss_of(5, 8192, "float32"), draws_of(LOSS)
    for config in random.sample([c for c in LOSS.space.candidates(problem, resolve("H200")) if is_cute(c)], 2):
        kernel = LOSS.implement(problem, config)
        assert_right(LOSS, problem, kernel, kernel.grid(problem, 16) // kernel.cluster)


def with_losses(inputs, problem, kernel, clusters, in_place=False):
    """The outputs for some inputs, the gradient in the memory of the logits or in its own."""
    outputs = make_outputs(LOSS, problem, clusters, "cpu")
    outputs |= {"dlogits": inputs["logits"]} if in_place else {}
    run(ptx_of(kernel), clusters * kernel.cluster, arguments_of(kernel, inputs, outputs), cluster=kernel.cluster)
    return outputs


@pytest.mark.parametrize(("threads", "cluster"), SHARES)
@pytest.mark.parametrize("schedule", ["persistent", "block"])
def test_a_gradient_in_place_has_the_same_bits(threads, cluster, schedule):
    """No block reads what another one stores, whatever their order, not even the target's logit."""
    problem = loss_of()
    kernel, inputs = kernel_of_losses(problem, threads, cluster, schedule), inputs_of(LOSS, problem)
    clusters = 2 if schedule == "persistent" else 7
    expected = with_losses(inputs, problem, kernel, clusters)
    found = with_losses(inputs, problem, kernel, clusters, in_place=True)
    assert all(found[name].equal(x) for name, x in expected.items())


@pytest.mark.parametrize("cluster", [1, 2])
def test_ignored_rows_are_not_read(cluster):
    problem = loss_of(9)
    inputs = inputs_of(LOSS, problem)
    inputs["target"][[0, 2, 3, 8]] = -100
    ignored = inputs["target"] == -100
    inputs["logits"][ignored] = NAN
    found = with_losses(inputs, problem, kernel_of_losses(problem, cluster=cluster), 2)
    assert not any(x[ignored].any() for x in found.values())
    assert all(x[~ignored].isfinite().all() for x in found.values())


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("label", [-1, 1000, 1 << 30, -(1 << 31)])
def test_a_label_that_is_no_class_gives_nan(label, cluster):
    problem = loss_of(3)
    inputs = inputs_of(LOSS, problem)
    inputs["target"][:] = torch.tensor([7, label, 999])
    found = with_losses(inputs, problem, kernel_of_losses(problem, cluster=cluster), 2)
    for name in ("loss", "dlogits"):
        assert found[name][1].isnan().all()
        assert found[name][[0, 2]].isfinite().all()
    assert found["lse"].isfinite().all()


@pytest.mark.parametrize("level", [-3e38, -1000.0, 1000.0, 3e38])
def test_losses_of_large_logits_are_those_of_their_differences(level):
    """Nothing behind the end of a row is its maximum; a class that cannot be adds nothing."""
    problem = loss_of(4, dtype="float32")
    inputs = inputs_of(LOSS, problem) | {"z_loss": 0.0}
    inputs["target"][:] = torch.tensor([0, 999, 500, 3])
    inputs["logits"][:] = level
    inputs["logits"][:, 10:20] = -INFINITY
    found = with_losses(inputs, problem, kernel_of_losses(problem, 64, 4), 2)
    torch.testing.assert_close(found["loss"], torch.full((4,), math.log(990)))
    expected = torch.full((4, 1000), 1 / 990)
    expected[:, 10:20] = 0
    expected[range(4), inputs["target"]] -= 1
    torch.testing.assert_close(found["dlogits"], expected * inputs["scale"][:, None])


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_logit_that_is_not_finite_makes_its_row_nan(value):
    problem = loss_of(3, dtype="float32")
    inputs = inputs_of(LOSS, problem)
    inputs["logits"][1, 777] = value
    inputs["target"][:] = torch.tensor([777, 5, 777])
    found = with_losses(inputs, problem, kernel_of_losses(problem, 64, 2), 2)
    assert found["loss"].isnan().tolist() == [False, True, False]
    assert found["dlogits"].isnan().all(1).tolist() == [False, True, False]


@st.composite
def launches_of_losses(draw):
    """A problem, its kernel, a number of clusters and a GPU."""
    dtype, cluster = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 1, 2, 4]))
    vocabulary = 16 // ITEM_BYTES[dtype] * draw(st.integers(1, 400))
    problem = loss_of(draw(st.integers(1, 9)), vocabulary, dtype)
    schedule = draw(st.sampled_from(["persistent", "block"]))
    kernel = kernel_of_losses(problem, draw(st.sampled_from([32, 64, 128, 256])), cluster, schedule)
    clusters = draw(st.integers(1, 9)) if schedule == "persistent" else problem["rows"]
    return problem, kernel, clusters, draw(st.sampled_from(["sm_80", "sm_90", "sm_100"][cluster > 1 :]))


@pytest.mark.slow
@examples(8)
@given(launches_of_losses(), st.integers(0, 2))
def test_any_losses_are_right(launch, gap):
    problem, kernel, clusters, arch = launch
    assert_right(LOSS, problem, kernel, clusters, None, arch, gap)


def test_a_row_of_logits_is_read_once_in_vectors_and_written_once():
    """In each of two branches the gradient: of rows that are ignored and of others; and the target's logit alone."""
    problem = loss_of(5, 4096)
    text = ptx_of(kernel_of_losses(problem, 256, 2, "block"))
    assert text.count("ld.global.v4.b32") == 1
    assert text.count("st.global.v4.b32") == 2
    assert text.count("ld.global.b16") == 1
    assert "ld.global.nc" not in text
    assert not re.search(r"\b(atom|red)\b", text)


# Those of losses of two matrices.

JSD, TVD = spec_named("jsd"), spec_named("tvd")
PAIRS = [JSD, TVD]
each_pair = pytest.mark.parametrize("spec", PAIRS, ids=lambda spec: spec.name)


def pairs_of(spec, rows=7, columns=1000, dtype="bfloat16", graded=True, pure=False):
    values = {"rows": rows, "columns": columns, "dtype": dtype, "graded": graded, "pure": pure}
    return spec.problem(**{d.name: values[d.name] for d in spec.dimensions})


def kernel_of_pairs(spec, problem, threads=64, cluster=1, unroll=2, schedule="persistent"):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"threads": threads, "cluster": cluster, "unroll": unroll, "occupancy": 1}
    return spec.implement(problem, Config(implementation="cute", schedule=schedule, **axes))


@pytest.mark.slow
@each_pair
@pytest.mark.parametrize(
    ("threads", "cluster", "unroll"), [(32, 1, 2), (64, 1, 1), (32, 2, 2), (256, 1, 8), (64, 4, 2)]
)
@pytest.mark.parametrize("schedule", ["persistent", "block"])
def test_losses_of_pairs_are_right(spec, threads, cluster, unroll, schedule):
    """With whole steps and a rest, with one of both alone, and with threads that have no vector."""
    problem = pairs_of(spec)
    clusters = 2 if schedule == "persistent" else None
    kernel = kernel_of_pairs(spec, problem, threads, cluster, unroll, schedule)
    assert_right(spec, problem, kernel, clusters, gap=1)


@pytest.mark.slow
@each_pair
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize(
    ("dtype", "columns"), [("float16", 512), ("float32", 1020), ("float32", 4), ("float32", 2048), ("bfloat16", 2056)]
)
def test_losses_of_pairs_of_any_dtype_are_right(spec, dtype, columns, graded):
    problem = pairs_of(spec, 5, columns, dtype, graded)
    assert_right(spec, problem, kernel_of_pairs(spec, problem, cluster=2), clusters=7, gap=2)


@pytest.mark.slow
@each_pair
def test_candidates_for_pairs_are_right(spec):
    problem, random = pairs_of(spec, 5, 16400, "float32"), draws_of(spec)
    for config in random.sample([c for c in spec.space.candidates(problem, resolve("H200")) if is_cute(c)], 2):
        kernel = spec.implement(problem, config)
        assert_right(spec, problem, kernel, kernel.grid(problem, 16) // kernel.cluster)


@pytest.mark.slow
@each_pair
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
def test_pairs_of_rows_that_do_not_count_are_not_read(spec, cluster, graded):
    problem = pairs_of(spec, 9, graded=graded)
    inputs = inputs_of(spec, problem)
    inputs["slope"][[0, 2, 3, 8]] = 0
    ignored, (first, second) = inputs["slope"] == 0, list(inputs)[:2]
    inputs[first][ignored], inputs[second][ignored] = NAN, INFINITY
    assert_right(spec, problem, kernel_of_pairs(spec, problem, cluster=cluster), 2, inputs)


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_slope_that_is_not_finite_makes_its_row_nan_and_no_other(cluster):
    """It takes its turn in the exchange."""
    problem = pairs_of(TVD, 5)
    inputs = inputs_of(TVD, problem)
    inputs["slope"][:] = torch.tensor([1.0, NAN, 2.0, 0.0, 3.0])
    kernel = kernel_of_pairs(TVD, problem, cluster=cluster)
    found = launched(TVD, problem, kernel, ptx_of(kernel), inputs, 1)
    assert found["loss"].isnan().tolist() == [False, True, False, False, False]
    assert found["gradient"].isnan().all(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_divergences_of_impossible_classes_are_finite(beta, dtype):
    """Of the input, of the target, of both, and those that only float32 takes for 0."""
    problem = pairs_of(JSD, 4, 1032, dtype, pure=beta in (0, 1))
    inputs = inputs_of(JSD, problem) | {"beta": beta}
    # One of both alone is an infinite divergence of the other at an end.
    inputs["input"][0, 3] = -INFINITY if beta != 0 else -5.0
    inputs["target"][1, 4] = -INFINITY if beta != 1 else -5.0
    inputs["input"][2, 5] = inputs["target"][2, 5] = -INFINITY
    inputs["input"][3, 1031], inputs["target"][3, 1031] = -200.0, -300.0
    assert all(x.isfinite().all() for x in expected_results(JSD, problem, inputs).values())
    assert_right(JSD, problem, kernel_of_pairs(JSD, problem, cluster=2), 2, inputs)


@each_pair
def test_a_pair_that_is_not_a_number_stays_in_its_row(spec):
    problem = pairs_of(spec, 3, 1032)
    first, second = list(inputs_of(spec, problem))[:2]
    for name in (first, second):
        inputs = inputs_of(spec, problem)
        inputs[name][1, 777] = NAN
        kernel = kernel_of_pairs(spec, problem)
        found = launched(spec, problem, kernel, ptx_of(kernel), inputs, 2)
        assert found["loss"].isnan().tolist() == [False, True, False]
        assert found["gradient"].isnan().sum(1).tolist() == [0, 1, 0]


def test_equal_elements_have_no_distance_and_no_gradient():
    problem = pairs_of(TVD, 3, dtype="float32")
    inputs = inputs_of(TVD, problem)
    inputs["p"][:] = inputs["q"]
    kernel = kernel_of_pairs(TVD, problem, cluster=2)
    assert not any(x.any() for x in launched(TVD, problem, kernel, ptx_of(kernel), inputs, 2).values())


@each_pair
@pytest.mark.parametrize(("threads", "cluster"), [(64, 1), (64, 4)])
def test_pairs_have_the_same_bits_whatever_cluster_takes_a_row(spec, threads, cluster):
    problem = pairs_of(spec, 6)
    inputs = inputs_of(spec, problem)
    kernels = {n: kernel_of_pairs(spec, problem, threads, cluster, schedule="persistent") for n in (1, 4)}
    kernels[6] = kernel_of_pairs(spec, problem, threads, cluster, schedule="block")
    found = [launched(spec, problem, kernel, ptx_of(kernel), inputs, n) for n, kernel in kernels.items()]
    assert all(x.equal(found[0][name]) for other in found[1:] for name, x in other.items())


@st.composite
def launches_of_pairs(draw):
    """A spec, its problem, a kernel, a number of clusters and a GPU."""
    spec, dtype = draw(st.sampled_from(PAIRS)), draw(st.sampled_from(DTYPES))
    cluster, threads = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([32, 64, 128, 256]))
    columns = 16 // ITEM_BYTES[dtype] * draw(st.integers(4, 400))
    problem = pairs_of(spec, draw(st.integers(1, 9)), columns, dtype, draw(st.booleans()))
    schedule = draw(st.sampled_from(["persistent", "block"]))
    kernel = kernel_of_pairs(spec, problem, threads, cluster, draw(st.sampled_from([1, 2, 4])), schedule)
    clusters = draw(st.integers(1, 9)) if schedule == "persistent" else problem["rows"]
    return spec, problem, kernel, clusters, None, draw(st.sampled_from(["sm_80", "sm_90", "sm_100"][cluster > 1 :]))


@pytest.mark.slow
@examples(8)
@given(launches_of_pairs(), st.integers(0, 2))
def test_any_pairs_are_right(launch, gap):
    assert_right(*launch, gap)


@each_pair
@pytest.mark.parametrize("graded", [False, True])
def test_all_loads_of_a_step_come_before_its_arithmetic(spec, graded):
    """Of a row of whole steps, which one loop takes."""
    problem = pairs_of(spec, 5, 8 * 64 * 4 * 3, graded=graded)
    text = ptx_of(kernel_of_pairs(spec, problem, 64, 1, 4, "block"))
    before, _, _ = text.partition("cvt.f32.bf16")
    assert before.count("ld.global.v4.b32") == text.count("ld.global.v4.b32") == 8
    assert ("st.global.v4.b32" in text) == graded
    assert not re.search(r"\b(atom|red)\b", text)


# That of sums down columns.

SUM = spec_named("column_sum")


def kernel_of_sums(problem, threads=128, width=32, cluster=1, loads=4):
    """The kernel of a config, whether the search space has it or not."""
    axes = {"threads": threads, "width": width, "cluster": cluster, "loads": loads}
    return SUM.implement(problem, Config(implementation="cute", schedule="block", **axes))


def assert_sums_are_right(problem, kernel, arch="sm_90", gap=0):
    """Hold a kernel to the reference on as many clusters as its columns take."""
    assert_right(SUM, problem, kernel, kernel.grid(problem, 132) // kernel.cluster, None, arch, gap)


@pytest.mark.parametrize(("threads", "width"), [(128, 16), (128, 128), (256, 32), (512, 64), (1024, 16)])
@pytest.mark.parametrize(("cluster", "loads"), [(1, 1), (1, 8), (2, 4), (4, 2)])
def test_sums_are_right(threads, width, cluster, loads):
    """With threads that have no row, one or several of them; the last block has fewer columns than others."""
    problem = problem_of(SUM, 133, 180, "bfloat16")
    assert_sums_are_right(problem, kernel_of_sums(problem, threads, width, cluster, loads), gap=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 20), (65, 64), (300, 4)])
def test_sums_of_any_dtype_and_size_are_right(dtype, rows, columns):
    problem = problem_of(SUM, rows, columns, dtype)
    assert_sums_are_right(problem, kernel_of_sums(problem, width=16, cluster=2), gap=2)


def test_candidates_for_sums_are_right():
    random, target = draws_of(SUM), resolve("H200")
    problem = problem_of(SUM, random.randint(100, 300), random.choice([128, 260]), random.choice(DTYPES))
    for config in random.sample([c for c in SUM.space.candidates(problem, target) if is_cute(c)], 2):
        assert_sums_are_right(problem, SUM.implement(problem, config))


@st.composite
def launches_of_sums(draw):
    """A problem, its kernel and a GPU."""
    cluster = draw(st.sampled_from([1, 1, 2, 4]))
    problem = problem_of(SUM, draw(st.integers(1, 300)), 4 * draw(st.integers(1, 80)), draw(st.sampled_from(DTYPES)))
    threads, width = draw(st.sampled_from([128, 256, 512])), draw(st.sampled_from([16, 32, 64, 128]))
    kernel = kernel_of_sums(problem, threads, width, cluster, draw(st.sampled_from([1, 2, 4, 8])))
    return problem, kernel, draw(st.sampled_from(["sm_80", "sm_90", "sm_100"][cluster > 1 :]))


@pytest.mark.slow
@examples(8)
@given(launches_of_sums(), st.integers(0, 2))
def test_any_sums_are_right(launch, gap):
    assert_sums_are_right(*launch, gap)


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_number_that_is_not_finite_stays_in_its_column(cluster):
    problem = problem_of(SUM, 70, 96, "float32")
    kernel, inputs = kernel_of_sums(problem, cluster=cluster), inputs_of(SUM, problem)
    inputs["x"][69, 41], inputs["x"][3, 7] = INFINITY, NAN
    found = launched(SUM, problem, kernel, ptx_of(kernel), inputs, 3)["y"]
    assert found[41] == INFINITY
    assert (~found.isfinite()).nonzero().flatten().tolist() == [7, 41]


@pytest.mark.parametrize("cluster", [1, 4])
def test_sums_have_a_fixed_order_and_the_same_bits_in_each_column(cluster):
    """Columns of equal numbers, which lie in different lanes, vectors and blocks, have equal sums."""
    problem = problem_of(SUM, 264, 128, "float32")
    kernel, inputs = kernel_of_sums(problem, 256, 32, cluster), inputs_of(SUM, problem)
    inputs["x"][:] = inputs["x"][:, :1]
    text = ptx_of(kernel)
    assert not re.search(r"\b(atom|red)\b", text)
    found, again = (launched(SUM, problem, kernel, text, inputs, 4)["y"] for _ in range(2))
    assert found.equal(found[0].expand(128))
    assert found.equal(again)


def test_a_matrix_is_read_in_vectors_which_are_on_their_way_at_once():
    text = ptx_of(kernel_of_sums(problem_of(SUM, 264, 4096, "bfloat16"), 256, 32, loads=8))
    lines = [line for line in text.splitlines() if re.search(r"ld\.global|add(\.rn)?\.f32", line)]
    assert "ld.global.nc" not in text
    assert [("ld.global.v4" in line) for line in lines[:9]] == [True] * 8 + [False]


DEPENDENT = [name for name in NAMES if name.startswith("fused")]


def dependent_kernel(name):
    """A small kernel of a spec whose launch overlaps its predecessor's end."""
    if name == HEADS.name:
        return kernel_of_heads(heads_of())
    spec = spec_named(name)
    problem = problem_of(spec, 9, 64, "float32")
    return kernel_of_sums(problem) if spec == SUM else kernel_of(spec, problem, 16)


@pytest.mark.parametrize("name", [*DEPENDENT, HEADS.name, SUM.name])
def test_a_dependent_kernel_waits_before_it_touches_memory(name):
    kernel = dependent_kernel(name)
    assert kernel.dependent
    before, _, after = ptx_of(kernel).partition("griddepcontrol.wait")
    assert "ld.global" not in before
    assert "ld.global" in after


# Kernels that somebody has broken: the interpreter finds it.

BARRIERS = {1: ["bar.sync"], 2: ["barrier.cluster.arrive", "barrier.cluster.wait"]}


def fails_once(change, what, gap=0, **options):
    """Hold a kernel whose text is changed to the error that it must give; the whole one is right."""
    spec = spec_named("rms_norm_forward")
    problem = problem_of(spec, 4, 1000, "bfloat16")
    kernel, inputs = kernel_of(spec, problem, **options), inputs_of(spec, problem)
    assert_right(spec, problem, kernel, clusters=1, gap=gap)
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(spec, problem, kernel, change(text), inputs, 1, gap)


def without_last(text, cluster):
    """A text without its last barrier."""
    lines = text.splitlines()
    last = [max(n for n, line in enumerate(lines) if word in line) for word in BARRIERS[cluster]]
    return "\n".join(line for n, line in enumerate(lines) if n not in last)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_without_its_barrier_fails(cluster):
    fails_once(lambda text: without_last(text, cluster), r"race|nobody has written", threads=64, cluster=cluster)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_that_keeps_all_sums_in_one_place_fails(cluster):
    """The turn changes with each row: a fast warp may be at the next one."""
    fails_once(lambda text: re.sub(r"xor.b32.*;", "", text), "race", threads=64, cluster=cluster)


BROKEN_RINGS = {
    "does_not_wait": (
        lambda text: re.sub(r"@P1 bra.uni DONE;\s+bra.uni\s+LAB_WAIT;", "", text),
        "has not seen the end",
    ),
    "waits_for_one_phase": (lambda text: re.sub(r"xor.b32[^;]*%r\d+;", "", text), "has not seen the end|deadlock"),
    "has_no_fence": (lambda text: text.replace("fence.mbarrier_init", "// fence"), "no fence.mbarrier_init"),
    "makes_barriers_too_late": (lambda text: text.replace("bar.sync", "// bar.sync", 1), "init by another thread"),
    "forgets_the_number_of_rows": (
        lambda text: re.sub(r"(or\.pred\s+%p\d+, )(%p\d+), %p\d+", r"\1\2, \2", text),
        "elements of one tensor|outside of all",
    ),
}


@pytest.mark.parametrize("name", BROKEN_RINGS)
def test_a_broken_ring_fails(name):
    change, what = BROKEN_RINGS[name]
    spec = spec_named("rms_norm_backward")
    problem = problem_of(spec, 5, 520, "bfloat16")
    kernel, inputs = kernel_of_ring(spec, problem), inputs_of(spec, problem)
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(spec, problem, kernel, change(text), inputs, 1, gap=1)


def test_a_ring_of_one_warp_is_refused():
    """Its sums need no barrier, so that none is between reads of a stage and the copy that fills it again."""
    spec = spec_named("rms_norm_backward")
    kernel = kernel_of_ring(spec, problem_of(spec, 5, 256, "bfloat16"), threads=32)
    with pytest.raises(AssertionError, match="a single warp meet at no barrier"):
        ptx_of(kernel)


def fails_on_heads(change, what):
    problem = heads_of(heads=5, kv_heads=3)
    kernel, inputs = kernel_of_heads(problem), inputs_of(HEADS, problem)
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(HEADS, problem, kernel, change(text), inputs, 3)


def test_a_kernel_over_heads_without_its_barrier_fails():
    fails_on_heads(lambda text: text.replace("bar.sync", "// bar.sync"), r"race|nobody has written")


def test_a_kernel_over_heads_that_forgets_their_number_fails():
    fails_on_heads(lambda text: re.sub(r"setp.lt.s32", "setp.ne.s32", text), "outside of all tensors")


def test_a_kernel_that_turns_heads_and_forgets_their_number_fails():
    problem = turns_of(tokens=3, batch=1, heads=5, kv_heads=3)
    kernel, inputs = kernel_of_turns(problem), inputs_of(TURNS, problem)
    text = ptx_of(kernel)
    # The first one tells blocks of q from those of k.
    found = re.findall(r"setp\.ge\.s32.*", text)[1:]
    assert len(found) == 2
    changed = functools.reduce(lambda one, line: one.replace(line, line.replace("ge.s32", "ne.s32")), found, text)
    with pytest.raises(PtxError, match="outside of all tensors"):
        launched(TURNS, problem, kernel, changed, inputs)


def fails_on_losses(change, what, cluster):
    problem = loss_of(5, 1000)
    kernel, inputs = kernel_of_losses(problem, 64, cluster), inputs_of(LOSS, problem)
    inputs["target"][:] = torch.tensor([1, -100, 2, 3, 4])
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(LOSS, problem, kernel, change(text), inputs, 1)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_losses_without_its_barrier_fails(cluster):
    fails_on_losses(lambda text: without_last(text, cluster), r"race|nobody has written", cluster)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_losses_that_keeps_all_sums_in_one_place_fails(cluster):
    fails_on_losses(lambda text: re.sub(r"xor.b32.*;", "", text), "race", cluster)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_losses_in_which_an_ignored_row_takes_a_turn_fails(cluster):
    """It has no exchange: a fast warp would store for the next row where a slow one still reads of the last."""
    fails_on_losses(
        lambda text: re.sub(r"selp.b32(\s+%r\d+), 1, 0, %p\d+;(\s+xor)", r"mov.b32\1, 1;\2", text), "race", cluster
    )


def fails_on_pairs(change, what, cluster):
    problem = pairs_of(JSD, 5)
    kernel, inputs = kernel_of_pairs(JSD, problem, 64, cluster), inputs_of(JSD, problem)
    inputs["slope"][1] = 0
    assert_right(JSD, problem, kernel, 1, inputs)
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(JSD, problem, kernel, change(text), inputs, 1)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_pairs_without_its_barrier_fails(cluster):
    fails_on_pairs(lambda text: without_last(text, cluster), r"race|nobody has written", cluster)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_pairs_that_keeps_all_sums_in_one_place_fails(cluster):
    fails_on_pairs(lambda text: re.sub(r"xor.b32.*;", "", text), "race", cluster)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_pairs_in_which_a_row_that_does_not_count_takes_a_turn_fails(cluster):
    """It has no exchange: a fast warp would store for the next row where the first one still reads of the last."""
    fails_on_pairs(
        lambda text: re.sub(r"selp.b32(\s+%r\d+), 1, 0, %p\d+;(\s+xor)", r"mov.b32\1, 1;\2", text), "race", cluster
    )


def fails_on_sums(change, what, cluster):
    problem = problem_of(SUM, 70, 100, "bfloat16")
    kernel, inputs = kernel_of_sums(problem, cluster=cluster, loads=2), inputs_of(SUM, problem)
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(SUM, problem, kernel, change(text), inputs, 4, gap=1)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_sums_without_its_barrier_fails(cluster):
    fails_on_sums(lambda text: without_last(text, cluster), r"race|nobody has written", cluster)


@pytest.mark.parametrize("cluster", BARRIERS)
def test_a_kernel_of_sums_that_forgets_the_end_of_the_columns_fails(cluster):
    fails_on_sums(lambda text: re.sub(r", (99|100);", ", 999;", text), "outside of all tensors", cluster)


def test_a_kernel_that_forgets_the_end_of_a_row_fails():
    """Thread 125 would read the gap behind column 1000."""
    fails_once(lambda text: text.replace(", 124;", ", 999;"), "outside of all tensors", gap=1, threads=128)
