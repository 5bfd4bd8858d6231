"""The kernel of CuTe DSL for attention's forward: what it serves, its grid, and its machine code.

Its numbers are compared by the tuner and by tests/gpu, since no interpreter runs it.
"""

import pytest
from spec_samples import sized

from tilekern.compile.cubin import code_of, parameter_bytes
from tilekern.compile.cute_compiler import compiler, passed_bytes
from tilekern.compile.toolchain import compile_candidate
from tilekern.errors import CompileFailed
from tilekern.kernels.attention.forward import SPEC
from tilekern.kernels.attention.forward_cute import shared_bytes, stages_of
from tilekern.spec import ALIGNED
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

H200 = resolve("H200")
SIZES = {"batch": 1, "queries": 8192, "keys": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}


def problem_of(dtype="bfloat16", sizes=None, **flags):
    return sized(SPEC, dtype, **SIZES | (sizes or {})).but(**{"causal": True} | flags)


def configs(problem, target=H200):
    return [config for config in SPEC.space.candidates(problem, target) if config["implementation"] == "cute"]


@pytest.mark.parametrize(
    "problem",
    [
        *(problem_of(causal=causal, sinks=sinks) for causal in (False, True) for sinks in (False, True)),
        problem_of("float16"),
        problem_of(sizes={"queries": 512, "keys": 70, "batch": 3, "heads": 3, "kv_heads": 3}),
        *(problem_of(sizes={"head_dim": depth}) for depth in (64, 256)),
        *(problem_of(**{flag: True}) for flag in ("capped", "windowed", "packed")),
    ],
    ids=lambda problem: problem.key,
)
def test_what_it_serves(problem):
    assert configs(problem)
    assert SPEC.default(problem, H200)["implementation"] == "tile"


@pytest.mark.parametrize(
    "problem",
    [
        problem_of("float32"),
        problem_of(sizes={"head_dim": 96}),
        problem_of(sizes={"head_dim": 512}),
        problem_of(sizes={"kv_heads": 5}),
        problem_of(sizes={"queries": 256}),
    ],
    ids=lambda problem: problem.key,
)
def test_what_is_left_to_cutile(problem):
    assert configs(problem) == []
    assert list(SPEC.space.candidates(problem, H200))


def test_only_hopper_has_its_matrix_units():
    able = {target.name for target in KNOWN if configs(problem_of(), target)}
    assert {"H100 80GB HBM3", "H200"} <= able
    assert not able & {"A100", "B200", "RTX5090", INTERPRETED.name}
    assert all(resolve(name).has_wgmma for name in able)


@pytest.mark.parametrize(("queries", "batch"), [(1, 1), (129, 2), (8192, 1)])
def test_a_block_for_each_multiprocessor_unless_there_are_fewer_tiles(queries, batch):
    problem = problem_of(sizes={"queries": queries, "batch": batch})
    for config in configs(problem_of()):
        kernel = SPEC.device(problem, config)
        tiles = -(-queries // config["tile_m"]) * batch * 32
        assert kernel.grid(problem, H200.sm_count) == min(tiles, H200.sm_count)
        assert (kernel.block, kernel.cluster, kernel.cooperative) == (2 * config["tile_m"] + 128, 1, False)


def test_packed_sequences_may_have_a_block_for_each_item():
    problem = problem_of(sizes={"batch": 4, "queries": 2730, "keys": 2730}, packed=True)
    blocks = {
        (config["schedule"], config["tile_m"]): SPEC.device(problem, config).grid(problem, H200.sm_count)
        for config in configs(problem)
    }
    assert blocks == {("block", 192): 4 * 32 * 15, ("persistent", 192): H200.sm_count}


def test_the_stages_fill_the_shared_memory():
    problem, found = problem_of(), set()
    for config in configs(problem):
        stages = stages_of(problem, config)
        found.add((config["tile_m"], config["tile_n"], stages))
        assert shared_bytes(problem, config, stages) + 1024 <= H200.shared_bytes
        # The wait of a warp for a slot would pass while another warp waits for the round before.
        assert stages != 5 or not config["ahead"]
    assert found == {(128, 128, 6), (128, 176, 4), (192, 128, 5), (192, 80, 8)}


@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("flag", ["causal", "windowed", "packed"])
def test_every_candidate_fits_the_shared_memory(depth, flag):
    problem = problem_of(sizes={"head_dim": depth}, **{flag: True})
    assert 2 <= len(configs(problem)) <= 4
    for config in configs(problem):
        assert shared_bytes(problem, config, stages_of(problem, config)) + 1024 <= H200.shared_bytes


@pytest.mark.share(4)
@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize(
    ("depth", "dtype", "flags"),
    [
        (128, "bfloat16", {}),
        (128, "float16", {"causal": False}),
        (128, "bfloat16", {"sinks": True}),
        (128, "bfloat16", {"windowed": True, "capped": True, "causal": False}),
        (128, "bfloat16", {"capped": True}),
        (128, "bfloat16", {"packed": True, "windowed": True}),
        (64, "bfloat16", {"sinks": True}),
        (64, "bfloat16", {"sinks": True, "windowed": True}),
        (64, "float16", {"packed": True, "causal": False}),
        (256, "bfloat16", {"windowed": True, "capped": True}),
        (256, "bfloat16", {"packed": True, "windowed": True, "capped": True}),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given),
)
def test_registers_hold_the_sums_and_the_left_operands(depth, dtype, flags):
    """A spill, or products that the compiler runs one by one, would cost a third of the speed."""
    problem = problem_of(dtype, {"head_dim": depth}, **flags)
    for config in configs(problem):
        kernel = SPEC.device(problem, config)
        made = compile_candidate(SPEC, problem, config, H200, ALIGNED)
        assert made.resources().stack_bytes == 0
        # Of 384 or 512 threads, which share 65536.
        assert made.resources().registers == {128: 168, 192: 128}[config["tile_m"]]
        assert parameter_bytes(made.cubin, made.symbol) == passed_bytes(kernel)
        assert made.launch == {
            "block": [kernel.block, 1, 1], "cluster": 1, "cooperative": False,
            "shared_bytes": shared_bytes(problem, config, stages_of(problem, config)),
        }  # fmt: skip
        counts = read_machine_code(code_of(made.cubin, made.symbol), H200.capability).whole
        # Each sums 16 terms. The first scores and the last values are beside the loop with ``ahead``.
        once = (depth + config["tile_n"]) // 16
        assert (counts.products, counts.local_accesses) == (once * (1 + config["ahead"]), 0)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
def test_another_architecture_is_refused():
    problem = problem_of()
    with pytest.raises(CompileFailed):
        compile_candidate(SPEC, problem, configs(problem)[0], resolve("B200"), ALIGNED)
