"""Kernels of CuTe DSL compile for all GPUs, and take their arguments as cuTile's launcher passes them."""

import importlib
from types import SimpleNamespace

import pytest
from spec_samples import SPECS, sized

from tilekern.compile import cute_compiler
from tilekern.compile.cubin import code_of, parameter_bytes, read_resources
from tilekern.compile.cute_compiler import compile_kernel, compiler, passed_bytes
from tilekern.compile.toolchain import assumptions, compile_candidate
from tilekern.errors import CompileFailed, ToolchainMissing
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, ITEM_BYTES, Config, CuteKernel
from tilekern.spec.source import files_of
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

needs_cute = pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
ABLE = [spec for spec in SPECS if spec.space.beside]
TURNS = [spec for spec in ABLE if any(d.name == "inverse" for d in spec.dimensions)]
HEADS = [spec for spec in ABLE if spec not in TURNS and any(d.name == "heads" for d in spec.dimensions)]
LOSSES = [spec for spec in ABLE if any(d.name == "vocabulary" for d in spec.dimensions)]
PAIRS = [spec for spec in ABLE if any(d.name == "graded" for d in spec.dimensions)]
SUMS = [spec for spec in ABLE if spec.name == "column_sum"]
ROWS = [spec for spec in ABLE if spec not in (*TURNS, *HEADS, *LOSSES, *PAIRS, *SUMS)]
RINGS = [spec for spec in ROWS if spec.follower]
# Columns of rows that are long enough for several blocks.
LONG = 65536
H200, A100 = resolve("H200"), next(target for target in KNOWN if target.arch == "sm_80")
# Of each architecture one GPU; some kernels are compiled for all of them, for each that is like an older one in turn.
GPUS = list({target.arch: target for target in KNOWN}.values())
LIKE_OTHERS = ("sm_86", "sm_89", "sm_103", "sm_121")
EVERYWHERE = (
    "rms_norm_backward", "fused_add_rms_norm_forward", "qk_norm_rope_backward",
    "cross_entropy_fused", "jsd", "column_sum", "rope", "qwen2vl_mrope",
)  # fmt: skip
COMPILED = [
    pytest.param(
        spec, target, id=f"{spec.name}-{target.arch}",
        marks=[pytest.mark.share(8)] if target.arch in LIKE_OTHERS else [],
    )
    for spec in ABLE
    for target in GPUS
    if spec.name in EVERYWHERE or target.arch in ("sm_90", "sm_100")
]  # fmt: skip


def problem_of(
    spec, columns=4096, dtype="bfloat16", rows=8192, heads=32, kv_heads=8, head_dim=128, vocabulary=32000
):  # fmt: skip
    heads = {"tokens": rows, "batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    problem = sized(spec, dtype, rows=rows, columns=columns, vocabulary=vocabulary, **heads)
    return problem.but(graded=True) if spec in PAIRS else problem


def configs(spec, problem, target=H200):
    return [config for config in spec.space.candidates(problem, target) if config.get("implementation") == "cute"]


def rings(spec, problem, target=H200):
    return [config for config in configs(spec, problem, target) if "stages" in config]


def made_of(spec, columns=4096, target=H200, **axes):
    """The first config that has some values of axes, and the kernel of it."""
    problem = problem_of(spec, columns)
    config = next(c for c in configs(spec, problem, target) if axes.items() <= c.items())
    return problem, config, spec.device(problem, config)


def test_kernels_over_rows_are_compiled_by_both():
    names = {spec.name.removesuffix("_forward").removesuffix("_backward") for spec in ROWS}
    assert {"rms_norm", "fused_add_rms_norm", "layer_norm", "softmax"} <= names


def test_so_are_gradients_of_heads():
    assert [spec.name for spec in HEADS] == ["qk_norm_rope_backward"]


def test_so_are_rotations():
    assert {spec.name for spec in TURNS} == {"rope", "qwen2vl_mrope"}


def test_so_is_the_loss_with_its_gradient():
    assert [spec.name for spec in LOSSES] == ["cross_entropy_fused"]


def test_so_are_losses_of_two_matrices():
    assert [spec.name for spec in PAIRS] == ["jsd", "tvd"]


def test_so_are_sums_down_columns():
    assert [spec.name for spec in SUMS] == ["column_sum"]


def vectors_of(kernel, config):
    """Vectors of 16 bytes that a thread has on their way at once: its parts of rows, or both halves of its heads."""
    if "unroll" in config:
        return 2 * config["unroll"]
    if "loads" in config:
        return config["loads"]
    if "warps" in config:
        return 2 * 2 * config["together"] * config["ahead"]
    if "together" in config:
        return 2 * config["together"] + 2
    if "rows" not in config:
        return -(-32000 // (8 * config["threads"] * config["cluster"]))
    matrices = [p for p in kernel.parameters if getattr(p, "ndim", 0) == 2 and p.role == "input"]
    return len(matrices) * -(-4096 // (8 * config["threads"]))


@pytest.mark.slow
@needs_cute
@pytest.mark.parametrize(("spec", "target"), COMPILED)
@pytest.mark.share(16)
def test_they_compile_for_each_gpu_with_the_parameters_that_are_passed(spec, target):
    axes = {"columns": LONG, "cluster": 1} if spec in PAIRS else {}
    problem, config, kernel = made_of(spec, target=target, **axes)
    made = compile_candidate(spec, problem, config, target, ALIGNED)
    assert parameter_bytes(made.cubin, made.symbol) == passed_bytes(kernel)
    assert read_resources(made.cubin, made.symbol).threads == kernel.block
    launch = {"block": [kernel.block, 1, 1], "cluster": kernel.cluster}
    assert made.launch == {**launch, "cooperative": False, "shared_bytes": 0}
    assert made.resources() == read_resources(made.cubin, made.symbol)
    assert made.compiler == compiler()
    assert made.assumptions == assumptions(kernel, ALIGNED)
    counts = read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole
    # What a thread holds of each array comes by loads of 16 bytes.
    vectors = vectors_of(kernel, config)
    assert counts.global_loads >= vectors
    assert counts.load_bytes >= 16 * vectors


@pytest.mark.slow
@needs_cute
@pytest.mark.parametrize(
    ("columns", "dtype", "axes"),
    [
        (1000, "float16", {"threads": 32, "rows": 4, "schedule": "persistent"}),
        (5120, "float32", {"rows": 1, "schedule": "block"}),
        (65536, "bfloat16", {"cluster": 8}),
        (16384, "bfloat16", {"cluster": 2, "schedule": "persistent"}),
        (64, "bfloat16", {"threads": 8, "rows": 16}),
    ],
)
def test_they_compile_with_tails_several_rows_and_clusters(columns, dtype, axes):
    spec = spec_named("softmax_forward")
    problem = problem_of(spec, columns, dtype)
    config = next(c for c in configs(spec, problem) if axes.items() <= c.items())
    made = compile_candidate(spec, problem, config, H200, ALIGNED)
    assert made.launch["cluster"] == config["cluster"]
    assert made.launch["block"] == [config["threads"] * config["rows"], 1, 1]


@pytest.mark.slow
@pytest.mark.share(8)
@needs_cute
@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("vocabulary", [32000, 128256, 151936])
def test_a_row_of_logits_stays_in_registers(spec, vocabulary):
    """A block with one row spills nothing; one that goes on spills addresses that it needs for each row, at most."""
    problem = problem_of(spec, vocabulary=vocabulary)
    tight = {(512, 8, 3), (512, 4, 2), (1024, 4, 1), (256, 2, 4), (512, 1, 2)}
    found = [c for c in configs(spec, problem) if (c["threads"], c["cluster"], c["occupancy"]) in tight]
    assert {config["schedule"] for config in found} == {"block", "persistent"}
    for config in found:
        made = compile_candidate(spec, problem, config, H200, ALIGNED)
        resources = read_resources(made.cubin, made.symbol)
        assert resources.registers * config["threads"] * config["occupancy"] <= H200.registers
        assert resources.stack_bytes <= (64 if config["schedule"] == "persistent" else 0), config
        assert made.launch["cluster"] == config["cluster"]


@pytest.mark.slow
@pytest.mark.share(8)
@needs_cute
@pytest.mark.parametrize("spec", PAIRS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("dtype", "graded"), [("bfloat16", True), ("float32", True), ("bfloat16", False)])
def test_steps_over_pairs_stay_in_registers(spec, dtype, graded):
    """A few addresses are spilled at most, which rows need more often than steps."""
    problem = problem_of(spec, 128256, dtype).but(graded=graded)
    tight = {(256, 8, 4), (256, 4, 4), (256, 4, 2), (512, 2, 8), (1024, 1, 2), (128, 8, 8)}
    found = [c for c in configs(spec, problem) if (c["threads"], c["cluster"], c["unroll"]) in tight]
    assert {config["schedule"] for config in found} == {"block", "persistent"}
    for config in found:
        made = compile_candidate(spec, problem, config, H200, ALIGNED)
        resources = read_resources(made.cubin, made.symbol)
        assert resources.registers * config["threads"] * config["occupancy"] <= H200.registers
        assert resources.stack_bytes <= 64, config
        assert made.launch["cluster"] == config["cluster"]


@pytest.mark.slow
@pytest.mark.share(8)
@needs_cute
@pytest.mark.parametrize("spec", SUMS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("rows", "columns"), [(512, 128), (1024, 4096), (1024, 28672)])
def test_sums_spill_nothing(spec, rows, columns):
    """Of each number of threads, cluster and loads one candidate."""
    problem = problem_of(spec, columns, rows=rows)
    for config in {(c["threads"], c["cluster"], c["loads"]): c for c in configs(spec, problem)}.values():
        made = compile_candidate(spec, problem, config, H200, ALIGNED)
        resources = read_resources(made.cubin, made.symbol)
        assert resources.stack_bytes == 0, config
        assert resources.registers * config["threads"] <= H200.registers
        assert made.launch["cluster"] == config["cluster"]


@pytest.mark.slow
@pytest.mark.share(8)
@needs_cute
@pytest.mark.parametrize("spec", TURNS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("is_inverse", [False, True])
def test_heads_that_are_turned_stay_in_registers(spec, is_inverse):
    """Also with angles that take the most registers; of those that take the fewest, each vector is loaded once."""
    full = {"full": True} if "full" in problem_of(spec) else {}
    heavy = problem_of(spec).but(**full, inverse=is_inverse, angle_dtype="float32")
    light = heavy.but(**dict.fromkeys(full, False), angle_dtype="bfloat16")
    # Where a section may end inside of a vector its angles behind the first are loaded by themselves as well.
    alone = 2 * 7 if spec.name == "qwen2vl_mrope" else 0
    for problem, axes in ((heavy, {"threads": 256, "together": 8}), (light, {"threads": 128, "occupancy": 1})):
        for config in (c for c in configs(spec, problem) if axes.items() <= c.items()):
            kernel, made = spec.device(problem, config), compile_candidate(spec, problem, config, H200, ALIGNED)
            resources = read_resources(made.cubin, made.symbol)
            assert resources.stack_bytes == 0, (problem, config)
            assert resources.registers * kernel.block <= H200.registers
            counts = read_machine_code(code_of(made.cubin, made.symbol), H200.capability).whole
            if problem is light:
                # In code for q and in code for k.
                assert counts.global_loads == 2 * (vectors_of(kernel, config) + alone), config


@needs_cute
def test_two_configs_compiled_one_after_the_other_are_each_its_own():
    """The DSL passes a cubin on in a file whose name does not say which config it is of."""
    spec = spec_named("rms_norm_forward")
    found = [made_of(spec, threads=threads, rows=1, schedule="block") for threads in (64, 256)]
    cubins = [compile_candidate(spec, problem, config, H200, ALIGNED) for problem, config, _ in [*found, found[0]]]
    assert [read_resources(made.cubin, made.symbol).threads for made in cubins] == [64, 256, 64]
    assert cubins[0].cubin == cubins[2].cubin


def test_rows_that_are_no_whole_vectors_are_left_to_cutile():
    spec = spec_named("rms_norm_forward")
    assert not configs(spec, problem_of(spec, 4100))
    assert configs(spec, problem_of(spec, 4100, "float32"))
    assert not configs(spec, problem_of(spec), INTERPRETED)


@pytest.mark.parametrize("spec", HEADS, ids=lambda spec: spec.name)
def test_heads_that_no_power_of_two_of_vectors_makes_are_left_to_cutile(spec):
    assert {config["together"] for config in configs(spec, problem_of(spec))} == {1, 2}
    for head_dim in (80, 96, 10, 8, 1024):
        assert not configs(spec, problem_of(spec, head_dim=head_dim)), head_dim
    assert configs(spec, problem_of(spec, dtype="float32", head_dim=8))
    assert {config["together"] for config in configs(spec, problem_of(spec, heads=12, kv_heads=4))} == {1}
    assert not configs(spec, problem_of(spec), INTERPRETED)


@pytest.mark.parametrize("spec", HEADS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (5, 3), (64, 1)])
def test_their_blocks_are_for_q_and_for_k_and_fill_the_gpu(spec, heads, kv_heads):
    problem = problem_of(spec, heads=heads, kv_heads=kv_heads)
    for config in configs(spec, problem):
        kernel = spec.device(problem, config)
        assert kernel.grid(problem.but(tokens=1), 132) >= 2
        assert kernel.grid(problem.but(tokens=3), 132) <= 3 * (heads + kv_heads)
        assert kernel.grid(problem.but(tokens=100_000), 132) == 132 * config["occupancy"]


@pytest.mark.parametrize("spec", TURNS, ids=lambda spec: spec.name)
def test_turned_heads_of_no_whole_vectors_are_left_to_cutile(spec):
    assert {config["together"] for config in configs(spec, problem_of(spec))} == {1, 2, 4, 8}
    for head_dim in (10, 8, 72):
        assert not configs(spec, problem_of(spec, head_dim=head_dim)), head_dim
    assert configs(spec, problem_of(spec, head_dim=80))
    assert configs(spec, problem_of(spec, dtype="float32", head_dim=8))
    assert {config["together"] for config in configs(spec, problem_of(spec, heads=14, kv_heads=2))} == {1, 2}
    # The threads of a block hold a head at least.
    long = problem_of(spec, dtype="float32", head_dim=1024)
    assert {config["threads"] for config in configs(spec, long)} == {128, 256, 512}
    assert not configs(spec, problem_of(spec), INTERPRETED)


@pytest.mark.parametrize("spec", TURNS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (5, 3, 64), (64, 1, 80), (12, 2, 256)])
def test_their_blocks_reach_all_heads_of_all_tokens_and_no_more(spec, heads, kv_heads, head_dim):
    problem = problem_of(spec, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    found = configs(spec, problem)
    assert 10 <= len(found) <= 32 or heads == 5
    for config in found:
        kernel = spec.device(problem, config)
        at_once = kernel.block // (head_dim // 16)
        constants = dict(kernel.constants)
        steps = [heads // constants["together"], kv_heads // constants["kv_together"]]
        assert heads == steps[0] * constants["together"]
        assert kv_heads == steps[1] * constants["kv_together"]
        for tokens in (1, 7, 100_000):
            blocks = kernel.grid(problem.but(tokens=tokens, batch=2), 132)
            assert blocks == sum(-(-2 * tokens * each // at_once) for each in steps)


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("columns", [64, 1000, 4096, 16384])
def test_their_grids_are_whole_clusters_that_reach_all_rows(spec, columns):
    problem = problem_of(spec, columns)
    for config in configs(spec, problem):
        if "stages" in config:
            continue
        kernel = spec.device(problem, config)
        for rows in (1, 7, 8192, 100_000):
            blocks = kernel.grid(problem.but(rows=rows), 132)
            steps = -(-rows // config["rows"])
            assert blocks % config["cluster"] == 0
            assert 1 <= blocks // config["cluster"] <= steps
            if config["schedule"] == "block":
                assert blocks == steps * config["cluster"]
        assert config["threads"] * config["cluster"] * 8 * 8 >= columns  # held in registers, eight vectors at most


@pytest.mark.parametrize("spec", RINGS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("target", [H200, resolve("B200"), resolve("sm_120")], ids=lambda target: target.arch)
def test_their_rings_fit_beside_one_another(spec, target):
    for columns, dtype in ((1024, "bfloat16"), (4096, "bfloat16"), (2880, "float16"), (4096, "float32")):
        problem = problem_of(spec, columns, dtype)
        for config in rings(spec, problem, target):
            kernel = spec.device(problem, config)
            read = [p for p in kernel.parameters if getattr(p, "ndim", 0) == 2 and p.role == "input"]
            stage = columns * sum(ITEM_BYTES[parameter.dtype] for parameter in read)
            assert kernel.shared_bytes == config["stages"] * stage
            assert config["occupancy"] * (kernel.shared_bytes + 3072) <= target.shared_bytes
            assert kernel.block == config["threads"] >= 64
            for rows in (1, 7, 8192):
                resident = config["occupancy"] * target.sm_count
                assert kernel.grid(problem.but(rows=rows), target.sm_count) == min(rows, resident)


@pytest.mark.parametrize("spec", RINGS, ids=lambda spec: spec.name)
def test_short_and_long_rows_and_older_gpus_have_no_ring(spec):
    assert rings(spec, problem_of(spec))
    assert not rings(spec, problem_of(spec), A100)
    assert not rings(spec, problem_of(spec, 128))
    assert not rings(spec, problem_of(spec, 32768))
    assert not rings(spec, problem_of(spec, 4097))


@pytest.mark.slow
@pytest.mark.share(8)
@needs_cute
@pytest.mark.parametrize("spec", RINGS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("target", [H200, resolve("B200")], ids=lambda target: target.arch)
def test_rings_are_copied_in_bulk_and_stay_in_registers(spec, target):
    """Of two blocks of 256 threads in place of one, an SM may have too few registers: some addresses spill."""
    problem = problem_of(spec)
    for config in rings(spec, problem, target):
        made = compile_candidate(spec, problem, config, target, ALIGNED)
        kernel = spec.device(problem, config)
        found, resources = read_resources(made.cubin, made.symbol), made.resources()
        assert made.launch["shared_bytes"] == kernel.shared_bytes == resources.shared_bytes - found.shared_bytes
        assert resources.registers * config["threads"] * config["occupancy"] <= target.registers
        assert resources.stack_bytes <= (64 if config["occupancy"] > 1 else 0), config
        counts = read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole
        # Each stage is filled once before the loop, and then in it.
        read = [p for p in kernel.parameters if getattr(p, "ndim", 0) == 2 and p.role == "input"]
        assert counts.bulk_loads == len(read) * (config["stages"] + 1)


@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("vocabulary", [32000, 50304, 128256, 262144])
def test_their_clusters_are_whole_and_hold_a_row(spec, vocabulary):
    problem = problem_of(spec, vocabulary=vocabulary)
    for config in configs(spec, problem):
        kernel = spec.device(problem, config)
        for rows in (1, 7, 8192, 100_000):
            clusters, rest = divmod(kernel.grid(problem.but(rows=rows), 132), config["cluster"])
            resident = 132 // config["cluster"] * config["occupancy"]
            assert (clusters, rest) == (rows if config["schedule"] == "block" else min(rows, resident), 0)
        vectors = config["threads"] * config["cluster"] * 20
        assert vectors * 8 >= vocabulary


@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.name)
def test_other_losses_are_left_to_cutile(spec):
    """Those with options, and of rows that are no whole vectors, or too short to keep a block busy."""
    plain = problem_of(spec)
    assert configs(spec, plain)
    for flag in ("weighted", "smoothed", "capped"):
        assert not configs(spec, plain.but(**{flag: True}))
    for vocabulary in (50257, 32004, 2048, 8):
        assert not configs(spec, problem_of(spec, vocabulary=vocabulary)), vocabulary
    assert configs(spec, problem_of(spec, dtype="float32", vocabulary=32004))
    assert not configs(spec, plain, INTERPRETED)


@pytest.mark.parametrize("spec", PAIRS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("columns", [16384, 32000, 128256])
def test_clusters_of_pairs_are_whole_and_leave_no_sm_idle(spec, columns):
    problem = problem_of(spec, columns)
    found = configs(spec, problem)
    assert 6 <= len(found) <= 30
    for config in found:
        kernel, cluster = spec.device(problem, config), config["cluster"]
        for rows in (1, 7, 8192, 100_000):
            clusters, rest = divmod(kernel.grid(problem.but(rows=rows), 132), cluster)
            resident = 132 // cluster * config["occupancy"]
            assert (clusters, rest) == (rows if config["schedule"] == "block" else min(rows, resident), 0)
        if config["schedule"] == "persistent":
            assert kernel.grid(problem.but(rows=100_000), 132) == 132 * config["occupancy"]


@pytest.mark.parametrize("spec", PAIRS, ids=lambda spec: spec.name)
def test_short_pairs_and_those_of_no_whole_vectors_are_left_to_cutile(spec):
    for columns in (50257, 32004, 8192, 4096, 8):
        assert not configs(spec, problem_of(spec, columns)), columns
    assert configs(spec, problem_of(spec, 32004, "float32"))
    assert configs(spec, problem_of(spec, 16384).but(graded=False))
    assert not configs(spec, problem_of(spec, LONG), INTERPRETED)


@pytest.mark.parametrize("spec", SUMS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("columns", [16, 100, 128, 2048, 4096, 14336, 28672])
@pytest.mark.parametrize("rows", [1, 132, 528, 100_000])
def test_their_grids_reach_all_columns(spec, columns, rows):
    problem = problem_of(spec, columns, rows=rows)
    found = configs(spec, problem)
    assert found
    for config in found:
        clusters, rest = divmod(spec.device(problem, config).grid(problem, 132), config["cluster"])
        assert rest == 0
        assert (clusters - 1) * config["width"] < columns <= clusters * config["width"]
        # A vector for each lane, and a thread for each column.
        assert config["width"] <= min(4 * 32, config["threads"])


@pytest.mark.parametrize("spec", SUMS, ids=lambda spec: spec.name)
def test_columns_that_are_no_whole_vectors_are_left_to_cutile(spec):
    """Those and so few that no block is full."""
    for dtype in ("bfloat16", "float32"):
        assert configs(spec, problem_of(spec, 132, dtype, rows=264))
        for columns in (12, 130, 4097):
            assert not configs(spec, problem_of(spec, columns, dtype, rows=264)), columns
    assert not configs(spec, problem_of(spec), INTERPRETED)


def test_no_clusters_before_sm_90():
    spec, loss, pairs = (spec_named(name) for name in ("softmax_forward", "cross_entropy_fused", "jsd"))
    problem, short = problem_of(spec, 65536), problem_of(loss)
    assert {config["cluster"] for config in configs(spec, problem)} == {2, 4, 8}
    assert {config["cluster"] for config in configs(spec, problem, A100)} <= {1}
    assert {config["cluster"] for config in configs(loss, short)} == {1, 2, 4}
    assert {config["cluster"] for config in configs(loss, short, A100)} == {1}
    assert {config["cluster"] for config in configs(pairs, problem_of(pairs, LONG))} == {1, 2, 4, 8}
    assert {config["cluster"] for config in configs(pairs, problem_of(pairs, LONG), A100)} == {1}
    sums = spec_named("column_sum")
    narrow = problem_of(sums, 128, rows=264)
    assert {config["cluster"] for config in configs(sums, narrow)} == {1, 2, 4}
    assert {config["cluster"] for config in configs(sums, narrow, A100)} == {1}
    assert {config["cluster"] for config in configs(sums, problem_of(sums))} == {1}


def test_the_class_of_each_kernel_is_there():
    named = {made_of(spec, LONG if spec in PAIRS else 4096)[2].kernel for spec in ABLE}
    named |= {made_of(spec, stages=6)[2].kernel for spec in RINGS[-1:]}
    for name in named:
        module, _, attribute = name.partition(":")
        assert module.startswith("tilekern.kernels.cute.")
        if compiler() is not None:
            assert isinstance(getattr(importlib.import_module(module), attribute), type)


def test_the_source_of_each_kernel_counts_in_the_digest_of_its_spec():
    for spec in ABLE:
        module, _, _ = made_of(spec, LONG if spec in PAIRS else 4096)[2].kernel.partition(":")
        assert module in files_of(spec.module), spec.name


def test_without_the_dsl_the_way_to_get_it_is_said(monkeypatch):
    monkeypatch.setattr(cute_compiler, "compiler", lambda: None)
    spec = spec_named("rms_norm_forward")
    with pytest.raises(ToolchainMissing, match=r"pip install 'tilekern\[cute\]'"):
        compile_kernel(made_of(spec)[2], H200)


@needs_cute
def test_a_word_that_formulas_do_not_have_yet_fails_the_candidate_and_is_named():
    spec = spec_named("poly_norm_backward")  # whose own loops are cuTile's
    problem = problem_of(spec)
    generic = spec.device(problem, spec.generic(problem))
    sizes = {
        "columns": 4096,
        "threads": 256,
        "rows": 1,
        "vector": 8,
        "persistent": True,
        "ahead": False,
        "occupancy": 1,
    }
    kernel = CuteKernel(
        generic.function, "tilekern.kernels.cute.rows:Rows", generic.parameters, tuple(sizes.items()), generic.grid, 256
    )
    with pytest.raises(CompileFailed, match=r"do not know ct\.\w+; add it to tilekern\.kernels\.cute\.words"):
        compile_kernel(kernel, H200)


@needs_cute
def test_a_cubin_with_other_parameters_than_are_passed_is_refused(monkeypatch):
    monkeypatch.setattr(cute_compiler, "parameter_bytes", lambda *_: [8])
    with pytest.raises(CompileFailed, match=r"Rows has parameters of \[8\] bytes, where the launcher passes \[8, 4"):
        compile_kernel(made_of(spec_named("rms_norm_forward"))[2], H200)


def test_the_record_s_launch_says_how_a_plan_launches():
    from tilekern.runtime.plans import ExtendedPlan, plan_of

    spec = spec_named("softmax_forward")
    problem, config, kernel = made_of(spec, 16384, cluster=2)
    launch = SimpleNamespace(block=(kernel.block, 1, 1), cluster=2, cooperative=False)
    plan = plan_of(SimpleNamespace(attributes=launch), kernel, config, problem, H200)
    assert isinstance(plan, ExtendedPlan)
    assert plan.blocks == kernel.grid(problem, 132)
    assert plan._options == {"block_in_cluster_count": (2,)}
    assert Config(plan.config) == config
