"""The kernel of CuTe DSL for attention's dk and dv: what it serves, its grid, and its machine code.

Its numbers are compared by the tuner and by tests/gpu, since no interpreter runs it.
"""

import pytest
from spec_samples import sized

from tilekern.compile.cubin import code_of, parameter_bytes
from tilekern.compile.cute_compiler import compiler, passed_bytes
from tilekern.compile.toolchain import compile_candidate
from tilekern.errors import CompileFailed
from tilekern.kernels.attention.kept import DKDV
from tilekern.kernels.attention.kept_cute import shared_bytes
from tilekern.spec import ALIGNED
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

H200 = resolve("H200")
# Each sums 16 terms: columns for S and dP, queries for dk and dv. Heads of 64 and 128 have S before the loop too, heads
# of 256 the sums of the last step behind it.
PRODUCTS = {64: 3 * 4 + 2 * 4, 128: 3 * 8 + 2 * 4, 256: 2 * 16 + 2 * 2 * 2}
# Boxes of 64 columns: 32 rows of q and dout, for heads of 64 without k and v, which are in registers.
BOXES = {64: 2 * 2, 128: 2 * 4 + 2 * 4, 256: 2 * 4 + 2 * 1}
SIZES = {"batch": 1, "queries": 8192, "keys": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}


def problem_of(dtype="bfloat16", sizes=None, **flags):
    return sized(DKDV, dtype, **SIZES | (sizes or {})).but(**{"causal": True} | flags)


def of_heads(head_dim, **flags):
    return problem_of(sizes={"head_dim": head_dim}, **flags)


def configs(problem, target=H200):
    return [config for config in DKDV.space.candidates(problem, target) if config["implementation"] == "cute"]


@pytest.mark.parametrize(
    ("problem", "stages"),
    [
        *((problem_of(causal=causal, apart=apart), [3, 4]) for causal in (False, True) for apart in (False, True)),
        (problem_of("float16"), [3, 4]),
        (problem_of(capped=True), [3, 4]),
        (problem_of(sizes={"queries": 1, "keys": 70, "batch": 3, "heads": 3, "kv_heads": 3}), [3, 4]),
        (of_heads(64), [4, 6]),
        (of_heads(256), [5, 6]),
        (of_heads(256, capped=True), [5, 6]),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_what_it_serves(problem, stages):
    assert [config["stages"] for config in configs(problem)] == stages


@pytest.mark.parametrize(
    "problem",
    [
        problem_of("float32"),
        problem_of(packed=True),
        of_heads(96),
        of_heads(512),
        problem_of(sizes={"kv_heads": 5}),
    ],
    ids=lambda problem: problem.key,
)
def test_what_is_left_to_cutile(problem):
    assert configs(problem) == []
    assert list(DKDV.space.candidates(problem, H200))


def test_only_hopper_has_its_matrix_units():
    able = {target.name for target in KNOWN if configs(problem_of(), target)}
    assert {"H100 80GB HBM3", "H200"} <= able
    assert not able & {"A100", "B200", "RTX5090", INTERPRETED.name}
    assert all(resolve(name).has_wgmma for name in able)


@pytest.mark.parametrize(
    ("head_dim", "keys", "batch", "apart", "blocks"),
    [(128, 1, 1, False, 8), (128, 129, 2, False, 32), (64, 8192, 1, True, 2048), (256, 129, 1, False, 24)],
)
def test_a_block_for_some_keys_of_each_head_of_dk(head_dim, keys, batch, apart, blocks):
    problem = problem_of(sizes={"keys": keys, "batch": batch, "head_dim": head_dim}, apart=apart)
    kernel = DKDV.device(problem, configs(problem)[0])
    assert kernel.grid(problem, H200.sm_count) == blocks
    assert (kernel.block, kernel.cluster, kernel.cooperative) == (384, 1, False)


@pytest.mark.parametrize(("head_dim", "stages"), [(64, 6), (128, 4), (256, 6)])
def test_the_stages_fit_the_shared_memory(head_dim, stages):
    assert shared_bytes(head_dim, stages) + 1024 <= H200.shared_bytes
    assert max(config["stages"] for config in configs(of_heads(head_dim))) == stages


@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
def test_a_thread_has_8_neighbours_of_each_32_queries():
    """The matrix units give thread c of 4 columns 2 c and 2 c + 1 of each 8."""
    from tilekern.kernels.cute.attention_keys import AttentionKeys

    query_in = {AttentionKeys.line(None, query): query for query in range(64)}
    assert sorted(query_in) == list(range(64))
    for c in range(4):
        columns = [8 * group + 2 * c + i for group in range(8) for i in range(2)]
        assert [query_in[x] for x in columns] == [32 * half + 8 * c + n for half in range(2) for n in range(8)]


@pytest.mark.share(4)
@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "flags"),
    [
        (128, "bfloat16", {}),
        (128, "bfloat16", {"apart": True}),
        (128, "float16", {"causal": False}),
        (128, "bfloat16", {"capped": True}),
        (64, "bfloat16", {}),
        (64, "float16", {"causal": False, "apart": True}),
        (256, "bfloat16", {}),
        (256, "bfloat16", {"capped": True, "apart": True}),
        (256, "float16", {"causal": False}),
    ],
)
def test_registers_hold_the_sums_and_the_left_operands(head_dim, dtype, flags):
    """A spill, or products that the compiler runs one by one, would cost a third of the speed."""
    problem = problem_of(dtype, sizes={"head_dim": head_dim}, **flags)
    for config in configs(problem):
        kernel = DKDV.device(problem, config)
        made = compile_candidate(DKDV, problem, config, H200, ALIGNED)
        assert made.resources().stack_bytes == 0
        assert made.resources().registers == 168, "of 384 threads, which share 65536"
        assert parameter_bytes(made.cubin, made.symbol) == passed_bytes(kernel)
        assert made.launch == {
            "block": [384, 1, 1], "cluster": 1, "cooperative": False,
            "shared_bytes": shared_bytes(head_dim, config["stages"]),
        }  # fmt: skip
        counts = read_machine_code(code_of(made.cubin, made.symbol), H200.capability).whole
        assert (counts.products, counts.local_accesses) == (PRODUCTS[head_dim], 0)
        assert counts.bulk_loads == BOXES[head_dim]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
def test_another_architecture_is_refused():
    problem = problem_of()
    with pytest.raises(CompileFailed):
        compile_candidate(DKDV, problem, configs(problem)[0], resolve("B200"), ALIGNED)
