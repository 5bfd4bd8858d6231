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
SIZES = {"batch": 1, "queries": 8192, "keys": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}


def problem_of(dtype="bfloat16", sizes=None, **flags):
    return sized(DKDV, dtype, **SIZES | (sizes or {})).but(**{"causal": True} | flags)


def configs(problem, target=H200):
    return [config for config in DKDV.space.candidates(problem, target) if config["implementation"] == "cute"]


@pytest.mark.parametrize(
    "problem",
    [
        *(problem_of(causal=causal, apart=apart) for causal in (False, True) for apart in (False, True)),
        problem_of("float16"),
        problem_of(sizes={"queries": 1, "keys": 70, "batch": 3, "heads": 3, "kv_heads": 3}),
    ],
    ids=lambda problem: problem.key,
)
def test_what_it_serves(problem):
    assert [config["stages"] for config in configs(problem)] == [3, 4]


@pytest.mark.parametrize(
    "problem",
    [
        problem_of("float32"),
        problem_of(capped=True),
        problem_of(packed=True),
        problem_of(sizes={"head_dim": 64}),
        problem_of(sizes={"head_dim": 256}),
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
    ("keys", "batch", "apart", "blocks"), [(1, 1, False, 8), (129, 2, False, 32), (8192, 1, True, 2048)]
)
def test_a_block_for_each_128_keys_of_each_head_of_dk(keys, batch, apart, blocks):
    problem = problem_of(sizes={"keys": keys, "batch": batch}, apart=apart)
    kernel = DKDV.device(problem, configs(problem)[0])
    assert kernel.grid(problem, H200.sm_count) == blocks
    assert (kernel.block, kernel.cluster, kernel.cooperative) == (384, 1, False)


def test_stages_that_exceed_the_shared_memory_are_left_out():
    assert shared_bytes(4) < H200.shared_bytes <= shared_bytes(5)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("bfloat16", {}), ("bfloat16", {"apart": True}), ("float16", {"causal": False})],
    ids=["causal", "apart", "full"],
)
def test_registers_hold_the_sums_and_the_left_operands(dtype, flags):
    """A spill, or products that the compiler runs one by one, would cost a third of the speed."""
    problem = problem_of(dtype, **flags)
    for config in configs(problem):
        kernel = DKDV.device(problem, config)
        made = compile_candidate(DKDV, problem, config, H200, ALIGNED)
        assert made.resources().stack_bytes == 0
        assert made.resources().registers == 168, "of 384 threads, which share 65536"
        assert parameter_bytes(made.cubin, made.symbol) == passed_bytes(kernel)
        assert made.launch == {
            "block": [384, 1, 1], "cluster": 1, "cooperative": False, "shared_bytes": shared_bytes(config["stages"]),
        }  # fmt: skip
        counts = read_machine_code(code_of(made.cubin, made.symbol), H200.capability).whole
        # 8 of each of S and dP, 4 of each of dk and dv: each sums 16 terms.
        assert (counts.products, counts.local_accesses) == (24, 0)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
def test_another_architecture_is_refused():
    problem = problem_of()
    with pytest.raises(CompileFailed):
        compile_candidate(DKDV, problem, configs(problem)[0], resolve("B200"), ALIGNED)
