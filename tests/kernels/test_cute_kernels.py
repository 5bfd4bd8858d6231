"""Kernels of CuTe DSL: the problems left to cuTile, grids, cubins for all GPUs, and the launcher's arguments."""

import importlib
from types import SimpleNamespace

import pytest
from spec_samples import SPECS, each, id_of, sized

from tilekern.compile import cute_compiler
from tilekern.compile.cubin import code_of, parameter_bytes, read_resources
from tilekern.compile.cute_compiler import compile_kernel, compiler, passed_bytes
from tilekern.compile.toolchain import assumptions, compile_candidate
from tilekern.errors import CompileFailed, ToolchainMissing
from tilekern.kernels import rms_norm_to, spec_named
from tilekern.spec import ALIGNED, ITEM_BYTES, Config, CuteKernel
from tilekern.spec.source import files_of
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

needs_cute = pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")
ABLE = [
    spec for spec in SPECS
    if any("cute" in space.axes(sized(spec)).get("implementation", ()) for space in spec.space.beside)
    and not spec.name.startswith("attention")  # matrix products: test_attention_keys_kernel.py
]  # fmt: skip


def with_dimension(name):
    return [spec for spec in ABLE if any(d.name == name for d in spec.dimensions)]


HEADS = with_dimension("heads")
LOSSES = with_dimension("vocabulary")
SUMS = [spec for spec in ABLE if spec.name == "column_sum"]
ROWS = [spec for spec in ABLE if spec not in (*HEADS, *LOSSES, *SUMS)]
RINGS = [spec for spec in ROWS if spec.follower]
# Columns of rows that are long enough for several blocks.
LONG = 65536
H200, B200, A100 = (resolve(name) for name in ("H200", "B200", "A100"))
# Of each architecture one GPU; some kernels are compiled for all of them, for each that is like an older one in turn.
GPUS = list({target.arch: target for target in KNOWN}.values())
LIKE_OTHERS = ("sm_86", "sm_89", "sm_103", "sm_121")
EVERYWHERE = (
    "rms_norm_backward", "fused_add_rms_norm_forward", "qk_norm_rope_backward",
    "cross_entropy_fused", "column_sum",
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


def problem_of(spec, columns=4096, dtype="bfloat16", rows=8192, **sizes):
    sizes = {"vocabulary": 32000, "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128} | sizes
    return sized(spec, dtype, rows=rows, tokens=rows, columns=columns, **sizes)


def configs(spec, problem, target=H200):
    return [config for config in spec.space.candidates(problem, target) if config.get("implementation") == "cute"]


def rings(spec, problem, target=H200):
    return [config for config in configs(spec, problem, target) if "stages" in config]


def values_of(axis, spec, problem, target=H200):
    return {config[axis] for config in configs(spec, problem, target)}


# With the 128 threads of their first config these hold more than their registers; a race leaves that config behind.
WIDER = {name: {"threads": 256} for name in ("fused_add_layer_norm_backward", "fused_rms_norm_add_rms_norm_backward")}


def made_of(spec, columns=None, target=H200, **axes):
    """The first config that has some values of axes, and the kernel of it."""
    problem = problem_of(spec, columns or 4096)
    config = next(c for c in configs(spec, problem, target) if axes.items() <= c.items())
    return problem, config, spec.device(problem, config)


def matrices_read(kernel):
    return [p for p in kernel.parameters if getattr(p, "ndim", 0) == 2 and p.role == "input"]


def test_kernels_that_are_compiled_by_both():
    names = {spec.name.removesuffix("_forward").removesuffix("_backward") for spec in ROWS}
    assert {"rms_norm", "fused_add_rms_norm", "layer_norm", "softmax"} <= names
    others = [[spec.name for spec in specs] for specs in (HEADS, LOSSES, SUMS)]
    assert others == [["qk_norm_rope_backward", "qk_norm_rope_to_backward"], ["cross_entropy_fused"], ["column_sum"]]


# What is left to cuTile: vectors that are not whole, rows too short to keep a block busy, options.
LEFT, TAKEN = (
    {
        "rms_norm_forward": ({"columns": 4100},),
        "qk_norm_rope_backward": tuple({"head_dim": n} for n in (80, 96, 10, 8, 1024)),
        "cross_entropy_fused": tuple({"vocabulary": n} for n in (50257, 32004, 2048, 8)),
        "column_sum": tuple(
            {"columns": n, "rows": 264, "dtype": dtype} for n in (12, 130, 4097) for dtype in ("bfloat16", "float32")
        ),
    },
    {
        "rms_norm_forward": ({}, {"columns": 4100, "dtype": "float32"}),
        "qk_norm_rope_backward": ({}, {"dtype": "float32", "head_dim": 8}),
        "cross_entropy_fused": ({}, {"dtype": "float32", "vocabulary": 32004}),
        "column_sum": tuple({"columns": 132, "rows": 264, "dtype": dtype} for dtype in ("bfloat16", "float32")),
    },
)


@pytest.mark.parametrize("name", LEFT)
def test_unaligned_or_short_rows_are_left_to_cutile(name):
    spec = spec_named(name)
    for sizes in LEFT[name]:
        assert not configs(spec, problem_of(spec, **sizes)), sizes
    for sizes in TAKEN[name]:
        assert configs(spec, problem_of(spec, **sizes)), sizes
        assert not configs(spec, problem_of(spec, **sizes), INTERPRETED), sizes


def test_losses_with_options_are_left_to_cutile():
    for spec in LOSSES:
        for flag in ("weighted", "smoothed", "capped"):
            assert not configs(spec, problem_of(spec).but(**{flag: True}))


@each(HEADS)
def test_heads_that_threads_take_together_are_all_of_a_token(spec):
    assert values_of("together", spec, problem_of(spec)) == {1, 2}
    assert values_of("together", spec, problem_of(spec, heads=12, kv_heads=4)) == {1}


def test_no_clusters_before_sm_90():
    softmax, loss, sums = map(spec_named, ("softmax_forward", "cross_entropy_fused", "column_sum"))
    for spec, problem, clusters in (
        (softmax, problem_of(softmax, LONG), {2, 4, 8}), (loss, problem_of(loss), {1, 2, 4}),
        (sums, problem_of(sums, 128, rows=264), {1, 2, 4}),
        (sums, problem_of(sums), {1}),
    ):  # fmt: skip
        assert values_of("cluster", spec, problem) == clusters
        assert values_of("cluster", spec, problem, A100) <= {1}


# Grids.


def assert_resident(kernel, problem, config):
    """Clusters are whole: one for each row, or as many as are resident, of which the others leave no SM idle."""
    for rows in (1, 7, 8192, 100_000):
        clusters, rest = divmod(kernel.grid(problem.but(rows=rows), 132), config["cluster"])
        resident = 132 // config["cluster"] * config["occupancy"]
        assert (clusters, rest) == (rows if config["schedule"] == "block" else min(rows, resident), 0)


@each(LOSSES)
@pytest.mark.parametrize("vocabulary", [32000, 50304, 128256, 262144])
def test_clusters_of_losses_are_whole_and_hold_a_row(spec, vocabulary):
    problem = problem_of(spec, vocabulary=vocabulary)
    for config in configs(spec, problem):
        assert_resident(spec.device(problem, config), problem, config)
        assert config["threads"] * config["cluster"] * 20 * 8 >= vocabulary


@each(HEADS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (5, 3), (64, 1)])
def test_blocks_are_for_q_and_for_k_and_fill_the_gpu(spec, heads, kv_heads):
    problem = problem_of(spec, heads=heads, kv_heads=kv_heads)
    for config in configs(spec, problem):
        kernel = spec.device(problem, config)
        assert kernel.grid(problem.but(tokens=1), 132) >= 2
        assert kernel.grid(problem.but(tokens=3), 132) <= 3 * (heads + kv_heads)
        assert kernel.grid(problem.but(tokens=100_000), 132) == 132 * config["occupancy"]


@each(ROWS)
@pytest.mark.parametrize("columns", [64, 1000, 4096, 16384])
def test_grids_are_whole_clusters_that_reach_all_rows(spec, columns):
    problem = problem_of(spec, columns)
    for config in (config for config in configs(spec, problem) if "stages" not in config):
        kernel = spec.device(problem, config)
        for rows in (1, 7, 8192, 100_000):
            clusters, rest = divmod(kernel.grid(problem.but(rows=rows), 132), config["cluster"])
            steps = -(-rows // config["rows"])
            assert rest == 0
            assert 1 <= clusters <= steps
            assert clusters == steps or config["schedule"] == "persistent"
        assert config["threads"] * config["cluster"] * 8 * 8 >= columns  # held in registers, eight vectors at most


@each(SUMS)
@pytest.mark.parametrize("columns", [16, 100, 128, 2048, 4096, 14336, 28672])
@pytest.mark.parametrize("rows", [1, 132, 528, 100_000])
def test_grids_reach_all_columns(spec, columns, rows):
    problem = problem_of(spec, columns, rows=rows)
    found = configs(spec, problem)
    assert found
    for config in found:
        clusters, rest = divmod(spec.device(problem, config).grid(problem, 132), config["cluster"])
        assert rest == 0
        assert (clusters - 1) * config["width"] < columns <= clusters * config["width"]
        # A vector for each lane, and a thread for each column.
        assert config["width"] <= min(4 * 32, config["threads"])


@each(RINGS)
@pytest.mark.parametrize("target", [H200, B200, resolve("sm_120")], ids=lambda target: target.arch)
def test_rings_fit_beside_one_another(spec, target):
    for columns, dtype in ((1024, "bfloat16"), (4096, "bfloat16"), (2880, "float16"), (4096, "float32")):
        problem = problem_of(spec, columns, dtype)
        for config in rings(spec, problem, target):
            kernel = spec.device(problem, config)
            stage = columns * sum(ITEM_BYTES[parameter.dtype] for parameter in matrices_read(kernel))
            assert kernel.shared_bytes == config["stages"] * stage
            assert config["occupancy"] * (kernel.shared_bytes + 3072) <= target.shared_bytes
            assert kernel.block == config["threads"] >= 64
            for rows in (1, 7, 8192):
                resident = config["occupancy"] * target.sm_count
                assert kernel.grid(problem.but(rows=rows), target.sm_count) == min(rows, resident)


@each(RINGS)
def test_short_and_long_rows_and_older_gpus_have_no_ring(spec):
    assert rings(spec, problem_of(spec))
    assert not rings(spec, problem_of(spec), A100)
    for columns in (128, 32768, 4097):
        assert not rings(spec, problem_of(spec, columns))


# Cubins.


def compiled(spec, problem, config, target=H200):
    """A cubin, and what it takes, which an SM must have for as many blocks as the config says."""
    made = compile_candidate(spec, problem, config, target, ALIGNED)
    resources, kernel = read_resources(made.cubin, made.symbol), spec.device(problem, config)
    assert resources.registers * kernel.block * max(1, config.get("occupancy", 1)) <= target.registers
    assert made.launch["cluster"] == kernel.cluster
    return made, resources


def counts_of(made, target=H200):
    return read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole


def vectors_of(kernel, config):
    """Vectors of 16 bytes that a thread has on their way at once: its parts of rows, or both halves of its heads."""
    if "loads" in config:
        return config["loads"]
    if "warps" in config:
        return 2 * 2 * config["together"] * config["ahead"]
    if "rows" not in config:
        return -(-32000 // (8 * config["threads"] * config["cluster"]))
    return len(matrices_read(kernel)) * -(-4096 // (8 * config["threads"]))


@pytest.mark.slow
@needs_cute
@each(rms_norm_to.SPECS)
@pytest.mark.parametrize("target", [H200, B200], ids=["H200", "B200"])
def test_norms_of_float32_between_products_of_half_types_compile(spec, target):
    problem = problem_of(spec, dtype="float32").but(product_dtype="bfloat16")
    made = compile_candidate(spec, problem, configs(spec, problem, target)[0], target, ALIGNED)
    assert made.resources().stack_bytes <= 64


@pytest.mark.slow
@needs_cute
@pytest.mark.parametrize("target", [H200, B200], ids=["H200", "B200"])
def test_rotations_in_the_dtype_of_products_compile(target):
    spec = spec_named("qk_norm_rope_to_backward")
    problem = problem_of(spec).but(weight_dtype="float32", angle_dtype="float32")
    made = compile_candidate(spec, problem, configs(spec, problem, target)[0], target, ALIGNED)
    assert made.resources().stack_bytes <= 64


@pytest.mark.slow
@needs_cute
@pytest.mark.parametrize(("spec", "target"), COMPILED)
@pytest.mark.share(32)
def test_they_compile_for_each_gpu_with_the_parameters_that_are_passed(spec, target):
    problem, config, kernel = made_of(spec, target=target, **WIDER.get(spec.name, {}))
    made = compile_candidate(spec, problem, config, target, ALIGNED)
    assert parameter_bytes(made.cubin, made.symbol) == passed_bytes(kernel)
    assert read_resources(made.cubin, made.symbol).threads == kernel.block
    launch = {"block": [kernel.block, 1, 1], "cluster": kernel.cluster}
    assert made.launch == {**launch, "cooperative": False, "shared_bytes": 0}
    assert made.resources() == read_resources(made.cubin, made.symbol)
    assert made.resources().stack_bytes <= 64
    assert made.compiler == compiler()
    assert made.assumptions == assumptions(kernel, ALIGNED)
    # What a thread holds of each array comes by loads of 16 bytes.
    counts, vectors = counts_of(made, target), vectors_of(kernel, config)
    assert counts.global_loads >= vectors
    assert counts.load_bytes >= 16 * vectors


@pytest.mark.slow
@needs_cute
@pytest.mark.parametrize(
    ("columns", "dtype", "axes"),
    [
        (1000, "float16", {"threads": 32, "rows": 4, "schedule": "persistent"}),
        (65536, "bfloat16", {"cluster": 8}),
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


# The configs that take the most registers, by the values of some axes; of sums one candidate for each of their values.
TIGHT_LOSSES = {(512, 8, 3), (512, 4, 2), (1024, 4, 1), (256, 2, 4), (512, 1, 2)}
HEAVY = [
    *((spec, {"vocabulary": n}) for spec in LOSSES for n in (32000, 128256, 151936)),
    *(
        (spec, {"columns": columns, "rows": rows})
        for spec in SUMS
        for rows, columns in ((512, 128), (1024, 4096), (1024, 28672))
    ),
]


@pytest.mark.slow
@pytest.mark.nightly
@needs_cute
@pytest.mark.parametrize(("spec", "sizes"), HEAVY, ids=id_of)
def test_what_threads_hold_stays_in_registers(spec, sizes):
    """A block with one row of logits, and sums, spill nothing; others addresses that each row needs, at most."""
    problem, last = problem_of(spec, **sizes), "occupancy" if spec in LOSSES else "loads"
    found = {}
    for config in configs(spec, problem):
        found.setdefault((config["threads"], config["cluster"], config[last]), []).append(config)
    if spec in SUMS:
        found = [alike[-1] for alike in found.values()]
    else:
        found = [config for key in TIGHT_LOSSES & found.keys() for config in found[key]]
        assert {config["schedule"] for config in found} == {"block", "persistent"}
    for config in found:
        may_spill = spec in LOSSES and config["schedule"] == "persistent"
        assert compiled(spec, problem, config)[1].stack_bytes <= 64 * may_spill, config


@pytest.mark.slow
@pytest.mark.share(8)
@needs_cute
@each(RINGS)
@pytest.mark.parametrize("target", [H200, B200], ids=lambda target: target.arch)
def test_rings_are_copied_in_bulk_and_stay_in_registers(spec, target):
    """Of two blocks of 256 threads in place of one, an SM may have too few registers: some addresses spill."""
    problem = problem_of(spec)
    for config in rings(spec, problem, target):
        made, found = compiled(spec, problem, config, target)
        kernel, resources = spec.device(problem, config), made.resources()
        assert made.launch["shared_bytes"] == kernel.shared_bytes == resources.shared_bytes - found.shared_bytes
        assert resources.stack_bytes <= (64 if config["occupancy"] > 1 else 0), config
        # Each stage is filled once before the loop, and then in it.
        assert counts_of(made, target).bulk_loads == len(matrices_read(kernel)) * (config["stages"] + 1)


@needs_cute
def test_two_configs_compiled_one_after_the_other_are_each_its_own():
    """The DSL passes a cubin on in a file whose name does not say which config it is of."""
    spec = spec_named("rms_norm_forward")
    found = [made_of(spec, threads=threads, rows=1, schedule="block") for threads in (64, 256)]
    cubins = [compile_candidate(spec, problem, config, H200, ALIGNED) for problem, config, _ in found]
    assert [read_resources(made.cubin, made.symbol).threads for made in cubins] == [64, 256]


def test_each_kernel_s_class_exists():
    named = {made_of(spec)[2].kernel for spec in ABLE} | {made_of(spec, stages=6)[2].kernel for spec in RINGS[-1:]}
    for name in named:
        module, _, attribute = name.partition(":")
        assert module.startswith("tilekern.kernels.cute.")
        if compiler() is not None:
            assert isinstance(getattr(importlib.import_module(module), attribute), type)


def test_the_source_of_each_kernel_counts_in_the_digest_of_its_spec():
    for spec in ABLE:
        module, _, _ = made_of(spec)[2].kernel.partition(":")
        assert module in files_of(spec.module), spec.name


def test_a_missing_dsl_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(cute_compiler, "compiler", lambda: None)
    with pytest.raises(ToolchainMissing, match=r"pip install 'tilekern\[cute\]'"):
        compile_kernel(made_of(spec_named("rms_norm_forward"))[2], H200)


@needs_cute
def test_an_unknown_function_of_ct_fails_the_candidate_by_name():
    spec = spec_named("poly_norm_backward")  # whose own loops are cuTile's
    problem = problem_of(spec)
    generic = spec.device(problem, spec.generic(problem))
    sizes = {"columns": 4096, "threads": 256, "rows": 1, "vector": 8, "persistent": True, "ahead": False}
    constants = (*sizes.items(), ("occupancy", 1))
    kernel = CuteKernel(
        generic.function, generic.parameters, constants, generic.grid, "tilekern.kernels.cute.rows:Rows", 256
    )
    with pytest.raises(CompileFailed, match=r"do not know ct\.\w+; add it to tilekern\.kernels\.cute\.words"):
        compile_kernel(kernel, H200)


@needs_cute
def test_a_cubin_with_other_parameters_than_are_passed_is_refused(monkeypatch):
    monkeypatch.setattr(cute_compiler, "parameter_bytes", lambda *_: [8])
    with pytest.raises(CompileFailed, match=r"Rows has parameters of \[8\] bytes, where the launcher passes \[8, 4"):
        compile_kernel(made_of(spec_named("rms_norm_forward"))[2], H200)


def test_a_plan_launches_as_its_record_says():
    from tilekern.runtime.plans import ExtendedPlan, plan_of

    problem, config, kernel = made_of(spec_named("softmax_forward"), 16384, cluster=2)
    launch = SimpleNamespace(block=(kernel.block, 1, 1), cluster=2, cooperative=False)
    plan = plan_of(SimpleNamespace(attributes=launch), kernel, config, problem, H200)
    assert isinstance(plan, ExtendedPlan)
    assert plan.blocks == kernel.grid(problem, 132)
    assert plan._options == {"block_in_cluster_count": (2,)}
    assert Config(plan.config) == config
