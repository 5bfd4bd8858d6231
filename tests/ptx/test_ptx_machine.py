"""The interpreter of PTX, held to torch and to what a GPU forbids."""

import math
import re

import pytest
import torch
from ptx_machine import PtxError, run

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


def applied(opcode, *arguments):
    """An instruction's results for the numbers of each thread, given by their bits."""
    loads = ""
    for n in range(len(arguments)):
        loads += f"ld.param.u64 %rd9, [p{3 * n + 3}]; mul.wide.u32 %rd8, %r1, 4; add.s64 %rd9, %rd9, %rd8;"
        loads += f"ld.global.b32 %r{n + 3}, [%rd9];"
    operands = ", ".join(f"%r{n + 3}" for n in range(len(arguments)))
    return results(f"{loads} {opcode} %r9, {operands};", *arguments)


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
    """Return whether numbers are equal bit by bit, or both NaN."""
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    return bool((expected.isnan() & actual.isnan() | (actual.view(bits) == expected.view(bits))).all())


# Whole programs: what each leaves in %r9, or in the memory that it stores to.

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
IN_DYNAMIC = EXCHANGE.replace("memory", "dynamic")
# Lanes of one warp are in step, and reads are no races.
WITHIN_A_WARP = EXCHANGE.replace("bar.sync 0;", "").replace("252", "124")
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
BEYOND = SEND.replace("rem.u32 %r8, %r8, %r7;", "")
PARTED = """
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
LOOP = """
    mov.b32 %r9, 0;
    mov.b32 %r3, 0;
LOOP:
    add.s32 %r9, %r9, %r3;
    add.s32 %r3, %r3, 1;
    setp.le.s32 %p0, %r3, %r0;
    @%p0 bra LOOP;
"""
GUARDED = """
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
# Names belong to their braces.
SCOPED = """
    mov.b32 %r9, 1;
    {{ .reg .b32 own; mov.b32 own, 2; bra OUT; mov.b32 %r9, 9; OUT: add.s32 %r9, %r9, own; }}
    {{ .reg .b64 own; {} bra OUT; mov.b32 %r9, 9; OUT: cvt.u32.u64 %r8, own; }}
    add.s32 %r9, %r9, %r8;
"""
FEW = "setp.lt.u32 %p0, %r0, 8; mov.b32 %r9, 0;"
EVEN, LOW = THREADS % 2 == 0, THREADS < 4
ALONE = torch.where(EVEN & LOW, 1, torch.where(EVEN, 8, 9)) | torch.where(~EVEN | LOW, 16, 32)
PROGRAMS = {
    "threads that a branch takes apart meet again": (
        PARTED,
        torch.where(THREADS == 3, 3, torch.where(THREADS < 5, 1, 2)) * 16 + torch.where(THREADS < 32, 3, 2), {},
    ),
    "each thread goes round a loop as often as it must": (LOOP, THREADS * (THREADS + 1) // 2, {}),
    "instructions depend on predicates": (GUARDED, ALONE, {}),
    "names belong to their braces": (SCOPED.format("mov.b64 own, 4;"), torch.full((64,), 7), {}),
    "a block exchanges": (EXCHANGE, (63 - THREADS).repeat(2), {"grid": 2}),
    "a warp exchanges": (WITHIN_A_WARP, 31 - THREADS[:32], {"threads": 32}),
    "reads are no races": (EXCHANGE + "ld.shared.b32 %r9, [%r4+8];", torch.full((64,), 2), {}),
    "memory that the launch sizes": (IN_DYNAMIC, 63 - THREADS, {"shared_bytes": 256}),
    "a block that is not there has an address": (
        "mov.b32 %r9, 0;" + ARRIVE + BEYOND.replace("st.shared::cluster.b32 [%r10], %r1;", ""),
        torch.zeros(128), {"grid": 2, "cluster": 2},
    ),
    **{
        f"clusters of {n} exchange": (
            ARRIVE + SEND + ARRIVE + RECEIVE, torch.arange(512).view(-1, n, 64).roll(1, dims=1).reshape(-1),
            {"grid": 8, "cluster": n},
        )
        for n in (1, 2, 4)
    },
    # 6175 and 6144 are groups of 8 lanes.
    **{
        shuffle: (f"shfl.sync.{shuffle};", expected, {})
        for shuffle, expected in {
            "bfly.b32 %r9, %r0, 5, 31, -1": THREADS ^ 5,
            "bfly.b32 %r9, %r0, 4, 6175, -1": THREADS ^ 4,
            "idx.b32 %r9, %r0, 7, 31, -1": THREADS - LANES + 7,
            "idx.b32 %r9, %r0, 3, 6175, -1": THREADS - THREADS % 8 + 3,
            "up.b32 %r9, %r0, 3, 0, -1": torch.where(LANES >= 3, THREADS - 3, THREADS),
            "up.b32 %r9, %r0, 3, 6144, -1": torch.where(THREADS % 8 >= 3, THREADS - 3, THREADS),
            "down.b32 %r9, %r0, 3, 31, -1": torch.where(LANES < 29, THREADS + 3, THREADS),
            "down.b32 %r9, %r0, 3, 6175, -1": torch.where(THREADS % 8 < 5, THREADS + 3, THREADS),
            "down.b32 %r8|%p0, %r0, 3, 31, -1; selp.b32 %r9, 1, 0, %p0": LANES < 29,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_their_results(name):
    body, expected, options = PROGRAMS[name]
    assert results(body, **options).equal(expected.int())


def test_a_shuffle_of_some_lanes():
    alone = results(f"{FEW} @%p0 shfl.sync.bfly.b32 %r9, %r0, 1, 31, 255;", threads=32)
    assert alone[:8].equal((THREADS[:8] ^ 1).int())


def test_dynamic_shared_memory_follows_static():
    begin = results("mov.b32 %r9, dynamic;", shared=200) - results("mov.b32 %r9, memory;", shared=200)
    assert begin.eq(256).all()


STORE_OWN = "ld.param.u64 %rd0, [p0]; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd0, %rd0, %rd1; st.global.b32 [%rd0], {};"


def test_threads_may_end_early_and_a_cluster_does_not_wait_for_them():
    out = torch.full((64,), -1, dtype=torch.int32)
    execute("setp.gt.u32 %p0, %r0, 9; @%p0 ret;" + STORE_OWN.format("%r0"), out)
    assert out.equal(torch.where(THREADS > 9, -1, THREADS).int())
    out = torch.full((128,), -1, dtype=torch.int32)
    some = "setp.gt.u32 %p0, %r0, 31; @%p0 ret;"
    execute(some + ARRIVE + SEND + ARRIVE + RECEIVE + STORE_OWN.format("%r9"), out, grid=2, cluster=2)
    assert out.view(2, 64)[:, :32].equal(torch.stack([64 + THREADS[:32], THREADS[:32]]).int())
    assert out.view(2, 64)[:, 32:].eq(-1).all()


# Arithmetic.

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


@pytest.mark.parametrize("opcode", FLOATS)
def test_floats_have_torchs_bits(opcode):
    x, y = numbers(2), numbers(3)
    # Torch does not say which of two zeros is the larger.
    y = torch.where((x == 0) & (y == 0), x, y)
    assert same(applied(opcode, x, y).view(torch.float32), FLOATS[opcode](x, y))


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


def test_arguments_are_the_parameters_of_a_cubin():
    x = torch.zeros(3, 8)[:, :4]
    values = [results(f"ld.param.b32 %r9, [p{n}];", x, 1.5, -7)[0].item() for n in (4, 5, 6, 7, 9)]
    assert values == [3, 4, 8, 1, -7]
    assert results("ld.param.b32 %r9, [p8];", x, 1.5, -7, dtype=torch.float32).eq(1.5).all()
    with pytest.raises(PtxError, match="has 3 parameters"):
        run(module("", [x[0]]), 1, [x])
    with pytest.raises(PtxError, match="type f32"):
        run(module("", [1.5]), 1, [1])


# Memory that the launch sizes, mbarriers and bulk copies.

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


def test_copied_bytes_are_there_when_the_phase_ends():
    x = numbers(0).view(torch.int32)
    assert results(MAKE + FETCH + wait(0) + READ, x).equal(x[LANES])
    assert results(MAKE + FETCH + wait(0) + READ + "bar.sync 0;" + NEXT + wait(1) + READ, x).equal(x[32 + LANES])
    assert results(MAKE + FETCH + wait(0) + READ, x, grid=2, cluster=2).equal(x[LANES].repeat(2))


TWICE = MAKE + FETCH.replace("add.s32 %r6, %r4, 128", "mov.b32 %r6, dynamic").replace("128", "256")


def test_a_copy_may_be_of_several_rows_of_one_tensor():
    rows = torch.zeros(2, 64)
    assert results(TWICE + wait(0) + "mov.b32 %r9, 5;", rows, shared_bytes=256).eq(5).all()
    with pytest.raises(PtxError, match="not elements of one tensor"):
        results("mov.b32 %r9, 0;" + TWICE, rows[:, :32], rows[:, 32:], shared_bytes=256)


EVERY_ARRIVES = "mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r4], 0;" + wait(0) + "mov.b32 %r9, 5;"


def test_threads_that_wait_let_others_arrive():
    late = f"@!%p0 bra LATE; {wait(0)} bra OUT; LATE: mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 0; OUT:"
    assert results(MAKE + late + "mov.b32 %r9, 5;").eq(5).all()
    assert results(MAKE.replace("[%r4], 1", "[%r4], 64") + EVERY_ARRIVES).eq(5).all()


# What a GPU does not allow.

OWN = "ld.param.u64 %rd2, [p3]; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd2, %rd3;"
FIRST = "ld.param.u64 %rd2, [p3];"
HALF = "setp.lt.u32 %p0, %r0, 32;"
MIDDLE = torch.zeros(256)[64:128]
PAIR = {"grid": 2, "cluster": 2}
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
OTHER = FETCH.replace("mapa", "xor.b32 %r5, %r5, 1; mapa")
MADE_LATE = "mov.b32 %r4, memory; setp.ne.b32 %p0, %r0, 0;"
COPIES = {
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
    "made_without_a_fence": (MAKE.replace("@!%p0 fence", "@%p0 fence") + FETCH, "no fence.mbarrier_init"),
    "made_without_a_barrier": (MAKE.replace("bar.sync 0;", "") + FETCH + wait(0), "an mbarrier's init by another"),
    "loaded": (MAKE + "ld.shared.b32 %r9, [%r4+4];", "an mbarrier is loaded or stored"),
    "state_read": (MAKE + FETCH + wait(0) + READ + "mov.b64 %rd4, %rd3;", "a register is read that was not written"),
    "parted_at_once": (
        "setp.ne.b32 %p0, %r0, 3; @%p0 bra.uni OUT; OUT:", "threads of a warp part at a branch that is uniform",
    ),
}  # fmt: skip


# A name, the error, a body, the tensor that it is given, and options.
FORBIDDEN = [
    # One element behind the end, one before the begin, near 0, and between rows.
    *(
        ("outside", "outside of all tensors", f"{OWN} {access.format(address)};", MIDDLE, {})
        for address in ("[%rd2+4]", "[%rd2+-4]", "[%rd3]")
        for access in ("ld.global.b32 %r9, {}", "st.global.b32 {}, %r0")
    ),
    ("between rows", "outside of all tensors' elements", OWN + "ld.global.b32 %r9, [%rd2];",
     torch.zeros(2, 64)[:, :32], {}),
    *(
        ("misaligned", "not aligned to 8 bytes", f"{OWN} {access};", torch.zeros(128), {})
        for access in ("ld.global.v2.b32 {%r9, %r8}, [%rd2]", "st.global.v2.b32 [%rd2], {%r0, %r0}")
    ),
    ("misaligned", "not aligned to 8 bytes",
     EXCHANGE.replace("st.shared.b32 [%r5], %r0", "st.shared.v2.b32 [%r5], {%r0, %r0}"), None, {}),
    ("stored twice", "another block has stored", FIRST + "st.global.b32 [%rd2], 1;", torch.zeros(1), {"grid": 2}),
    ("loaded and stored", "another block stores", FIRST + "ld.global.b32 %r3, [%rd2]; st.global.b32 [%rd2], 1;",
     torch.zeros(1), {"grid": 2}),
    ("threads disagree", "different values", FIRST + "st.global.b32 [%rd2], %r0;", torch.zeros(1), {}),
    ("threads disagree", "different values", "mov.b32 %r3, memory; st.shared.b32 [%r3], %r0;", None, {"threads": 32}),
    ("directive", "unknown directive: .local", ".local .align 8 .b8 depot[16];", None, {}),
    ("declaration", "unknown declaration of shared memory", ".shared .align 16 .b8 unsized[];", None, {}),
    ("label", "the label AGAIN stands twice", "AGAIN: mov.b32 %r8, 0; AGAIN:", None, {}),
    ("deadlock", "deadlock: 32 threads wait at @%p0 bar.sync 0; 32 have ended", f"{HALF} @%p0 bar.sync 0;", None, {}),
    ("deadlock", "deadlock", f"{HALF} @%p0 ret; {EXCHANGE}", None, {}),
    ("deadlock", "deadlock", f"{HALF} @%p0 bra LATE; bar.sync 0; LATE: {ARRIVE}", None, {}),
    ("deadlock", "deadlock: 64 threads wait at mbarrier.try_wait",
     MAKE.replace("[%r4], 1", "[%r4], 65") + EVERY_ARRIVES, None, {}),
    *(
        ("register", "a register is read that was not written", body, None, {})
        for body in (
            "add.s32 %r9, %r8, 1;", SCOPED.format(""),
            "setp.lt.u32 %p0, %r0, 9; @%p0 mov.b32 %r8, 0; mov.b32 %r9, %r8;",
        )
    ),
    ("nobody wrote", "shared memory that nobody has written", EXCHANGE.replace("[%r6+252]", "[%r4+128]"), None,
     {"threads": 32}),
    ("beyond shared", "outside of shared memory", EXCHANGE.replace("[%r6+252]", "[%r6+256]"), None, {}),
    ("beyond shared", "outside of shared memory", "mov.b32 %r3, 0; st.shared.b32 [%r3], %r3;", None, {"threads": 32}),
    *(("beyond dynamic", "outside of shared memory", IN_DYNAMIC, None, {"shared_bytes": n}) for n in (0, 252)),
    *(
        ("race", "race|nobody has written", body, None, {})
        for body in (
            EXCHANGE.replace("bar.sync 0;", "st.shared.b32 [%r5], %r0; bar.sync 0; st.shared.b32 [%r5], %r0;"),
            EXCHANGE + "st.shared.b32 [%r5], %r0;", "mov.b32 %r3, memory; st.shared.b32 [%r3], 1;",
            EXCHANGE.replace("bar.sync 0;", ""),
        )
    ),
    ("lanes", "threads that a shuffle names", f"{FEW} @%p0 shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1;", None, {}),
    ("lanes", "a lane that is not there", "shfl.sync.bfly.b32 %r9, %r0, 16, 31, -1;", None, {"threads": 16}),
    *(
        ("cluster", what, body, None, PAIR)
        for what, body in {
            "may not have begun": SEND + ARRIVE + RECEIVE,
            "nobody has written|race": ARRIVE + SEND + RECEIVE,
            "race for": ARRIVE + SEND + "bar.sync 0;" + RECEIVE,
            "ends while another": ARRIVE + SEND,
            "race": ARRIVE + SEND + RELAXED + RECEIVE,
            "before it has arrived": "barrier.cluster.wait;" + SEND,
            "outside of shared memory": ARRIVE + BEYOND,
            "needs shared::cluster": ARRIVE + SEND.replace("st.shared::cluster", "st.shared"),
        }.items()
    ),
    ("copy of parts", "not elements of one tensor", TWICE, torch.zeros(2, 64)[:, :32], {"shared_bytes": 256}),
    ("copy into another", "shared memory of another block", MAKE + ARRIVE + OTHER, torch.zeros(64), PAIR),
    *((name, what, body, torch.zeros(64), {}) for name, (body, what) in COPIES.items()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "body", "given", "options"), FORBIDDEN, ids=[line[0] for line in FORBIDDEN])
def test_what_a_gpu_does_not_allow_fails(name, what, body, given, options):
    with pytest.raises(PtxError, match=what):
        results("mov.b32 %r9, 0;" + body, *([] if given is None else [given]), **options)


UNKNOWN = [
    "atom.global.add.u32 %r9, [%rd0], 1", "add.rz.f32 %r9, %r0, %r0", "ld.local.b32 %r9, [%r0]", "mov.u32 %r9, %clock",
    "bar.sync 1", "shfl.sync.bfly.b64 %r9, %r0, 1, 31, -1", "add.f32 %rs0, %r0, %r0", "max.f32 %r9, %r0",
    "ld.global.b64 %r9, [%rd0]", "cvt.rz.bf16.f32 %rs0, %r0", "bra NOWHERE", "fence.proxy.async", "st.global.b32 x, 1",
]  # fmt: skip


@pytest.mark.parametrize("instruction", UNKNOWN)
def test_unknown_instructions_are_named(instruction):
    with pytest.raises(PtxError, match=re.escape(instruction)):
        results(f"{instruction};")


def test_a_module_has_one_kernel_that_says_its_threads():
    with pytest.raises(PtxError, match="reqntid"):
        run(module("", []).replace(".reqntid 64, 1, 1", ""), 1, [])
    with pytest.raises(PtxError, match=r"exactly one \.entry"):
        run(module("", []) * 2, 1, [])
