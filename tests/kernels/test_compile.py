"""Ahead-of-time compilation of every spec, for GPUs that are not here."""

import dataclasses
import itertools

import pytest
from environments import without_kept_cubins
from spec_samples import compiled, config_of, each, id_of, resources_of, runs_on, sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.errors import CompileFailed
from tilekern.kernels import rms_norm_to, rotations_to, spec_named
from tilekern.kernels.adamw import WIDTHS
from tilekern.kernels.attention.problem import keys_apart
from tilekern.kernels.grouped.space import first_tile
from tilekern.kernels.matmul import product as matmul
from tilekern.kernels.skinny import linear as skinny
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import resolve

pytestmark = [pytest.mark.slow, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]
COMPILED = compiled()
every_spec = pytest.mark.parametrize("spec", COMPILED, ids=[spec.name for spec in COMPILED])
QWEN3 = {
    "rows": 8192, "columns": 1024, "tokens": 8192, "batch": 1, "heads": 16, "kv_heads": 8, "head_dim": 128, "pairs": 64,
    "vocabulary": 151936,
}  # fmt: skip
QWEN3_8B = QWEN3 | {"columns": 4096, "heads": 32}


@pytest.mark.parametrize("kernel", ["swiglu_forward", "rms_norm_backward", "attention_forward", "matmul"])
@pytest.mark.parametrize("arch", ["sm_103", "sm_120"])
@pytest.mark.share(8)
def test_other_generations_have_kernels_of_each_family(kernel, arch):
    spec = spec_named(kernel)
    judge(spec, spec.bucketed(sized(spec, "bfloat16", **QWEN3)), resolve(arch), ALIGNED)


def judge(spec, problem, target, variant, config=None):
    """Compile a candidate and return the resources that its cubin takes."""
    config = config or config_of(spec, problem, target, variant)
    made = compile_candidate(spec, problem, config, target, variant)
    return resources_of(spec, problem, made, target)


@pytest.mark.share(16)
@every_spec
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_default_config_spills_nothing_at_the_sizes_of_qwen3_8b(spec, arch):
    target = resolve(arch)
    if not runs_on(spec, target):
        pytest.skip(f"{arch} has no instructions for it")
    columns = 12288 if spec.name.startswith("swiglu") else 4096
    problem = spec.bucketed(sized(spec, "bfloat16", **QWEN3_8B | {"columns": columns}))
    assert judge(spec, problem, target, ALIGNED).stack_bytes == 0


BOTH = ("sm_90", "sm_100")


@each(rms_norm_to.SPECS)
@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("columns", [1024, 4096])
@pytest.mark.share(8)
def test_norms_of_float32_between_products_of_half_types_spill_nothing(spec, arch, columns):
    problem = sized(spec, "float32", rows=4096, columns=columns).but(product_dtype="bfloat16")
    assert judge(spec, problem, resolve(arch), ALIGNED).stack_bytes == 0
    judge(spec, problem, resolve(arch), GENERIC)


@each(rotations_to.SPECS)
@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.share(8)
def test_rotations_in_the_dtype_of_products_spill_nothing(spec, arch, head_dim):
    sizes = {"batch": 1, "tokens": 4096, "heads": 16, "kv_heads": 8, "head_dim": head_dim, "pairs": head_dim // 2}
    dtypes = {d.name: "float32" for d in spec.dimensions if d.kind == "dtype"} | {"dtype": "bfloat16"}
    problem = sized(spec, "bfloat16", **sizes).but(**dtypes)
    assert judge(spec, problem, resolve(arch), ALIGNED).stack_bytes == 0
    judge(spec, problem, resolve(arch), GENERIC)


HEADS = {"batch": 4, "queries": 4096, "keys": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
CACHE = {"kv_heads": 8, "keys": 4096, "page_size": 1, "group": 4, "head_dim": 128}
LONG = HEADS | {"batch": 1, "queries": 8192, "keys": 8192}
PRODUCTS = [("b_transposed",), (), ("a_transposed",)]
EPILOGUES = [(), ("biased", "gelu_tanh", "silu"), ("accumulated",)]


def _attention(kernel, arch, most, sizes, **changes):
    spec = spec_named(kernel)
    flags = {"causal": True} | {name: value for name, value in changes.items() if value is True}
    heads = {name: value for name, value in changes.items() if value is not True}
    return arch, spec, sized(spec, "bfloat16", **sizes | heads).but(**flags), most, {}


def _product(arch, product, epilogue, **changes):
    spec = spec_named("matmul")
    return arch, spec, spec.problem(**matmul.sizes(8192, 4096, 12288, "bfloat16", (*product, *epilogue))), 0, changes


def _few_rows(arch, rows, columns, *on):
    spec = spec_named("skinny_linear")
    return arch, spec, spec.problem(**skinny.sizes(rows, 4096, columns, "bfloat16", on)), 0, {}


def _joined(arch, kv_heads, splits):
    spec = spec_named("decode_join")
    sizes = {"kv_heads": kv_heads, "splits": splits, "group": 4, "head_dim": 128}
    return arch, spec, spec.problem(**sizes, dtype="bfloat16"), 0, {}


# Architecture, spec, problem, bytes that the default config may spill, and changes of that config.
SPILLS = [
    # A slot or two beside the loop costs nothing; a spilled accumulator takes hundreds of bytes. Each head on both GPUs
    # of users, each flag on one of them.
    *(_attention("attention_forward", arch, 16, HEADS, head_dim=n) for n in (64, 128, 256) for arch in BOTH),
    *(
        _attention("attention_forward", arch, 16, HEADS, **{flag: True})
        for arch, flag in zip(itertools.cycle(BOTH), ("windowed", "capped", "sinks", "packed"), strict=False)
    ),
    *(
        _attention(f"attention_{name}", arch, 0, LONG, **changes)
        for name in ("dkdv", "dkdv_apart", "dq")
        for arch, changes in [
            ("sm_90", {"head_dim": 64}), ("sm_90", {"head_dim": 256}), *((arch, {"packed": True}) for arch in BOTH),
        ]
    ),
    # Each epilogue on each GPU, with each product on each GPU and each epilogue with each product once.
    *(
        _product(arch, PRODUCTS[(a + e) % 3], epilogue, **changes)
        for a, arch in enumerate(("sm_80", "sm_90", "sm_100", "sm_120"))
        for e, epilogue in enumerate(EPILOGUES)
        for changes in ({}, {"sums_begin": "addend"})[: 1 + ("accumulated" in epilogue)]
    ),
    *(_few_rows(arch, 64, 12288, "gated", "silu") for arch in BOTH),
    _few_rows("sm_90", 1, 1024, "biased", "gelu_tanh"),
    _few_rows("sm_100", 1, 4096, "accumulated"),
    *(_joined(arch, kv_heads, splits) for arch in BOTH for kv_heads in (8, 64) for splits in (16, 256)),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "spec", "problem", "most", "changes"), SPILLS, ids=id_of)
@pytest.mark.share(16)
def test_defaults_of_real_sizes_spill_next_to_nothing(arch, spec, problem, most, changes):
    target = resolve(arch)
    config = spec.default(problem, target).but(**changes)
    assert judge(spec, problem, target, ALIGNED, config).stack_bytes <= most


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize(
    ("kernel", "sizes", "on", "changes"),
    [
        ("attention_forward", HEADS, {"causal": True}, {}),
        ("decode_attention", CACHE, {}, {"splits": 0}),
        ("decode_attention", CACHE, {}, {"splits": 1}),
        ("decode_attention", CACHE, {}, {"splits": 0, "schedule": "tile"}),
        ("decode_attention", CACHE, {}, {"splits": 0, "schedule": "tile", "occupancy": 3}),
    ],
)
@pytest.mark.share(6)
def test_tiles_that_are_summed_apart_spill_nothing(kernel, sizes, on, changes, arch):
    spec, target = spec_named(kernel), resolve(arch)
    problem = sized(spec, "bfloat16", **sizes).but(**on)
    config = spec.default(problem, target).but(apart=True, tile_n=keys_apart(problem), **changes)
    assert config in spec.space.candidates(problem, target)
    # A block for each tile of decoding spills four numbers on sm_90 since its launch overlaps, and is faster for it; so
    # do three on an SM, where an edge crosses the tile.
    spilled = 16 if changes.get("splits") == 0 and arch == "sm_90" else 0
    assert judge(spec, problem, target, ALIGNED, config).stack_bytes <= spilled


QWEN3_EXPERTS = {"rows": 65536, "inner": 2048, "columns": 1536, "experts": 128}
GPT_OSS_EXPERTS = {"rows": 32768, "inner": 2880, "columns": 5760, "experts": 32}


@pytest.mark.parametrize(
    ("arch", "kernel", "sizes", "on"),
    [
        ("sm_100", "grouped_linear", QWEN3_EXPERTS, ("inner_first", "gathered", "partial")),
        ("sm_90", "grouped_linear", GPT_OSS_EXPERTS, ("gathered", "biased", "partial")),
        ("sm_90", "grouped_weight_gradient", QWEN3_EXPERTS, ()),
    ],
)
@pytest.mark.share(3)
def test_first_tiles_of_large_layers_spill_nothing(arch, kernel, sizes, on):
    spec, target = spec_named(kernel), resolve(arch)
    problem = sized(spec, "bfloat16", **sizes).but(**dict.fromkeys(on, True))
    assert judge(spec, problem, target, ALIGNED, first_tile(problem, target)).stack_bytes == 0


@pytest.mark.parametrize("kernel", ["cross_entropy_forward", "cross_entropy_backward", "cross_entropy_fused"])
@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.share(3)
def test_generic_configs_spill_nothing_at_a_real_vocabulary(kernel, arch):
    spec = spec_named(kernel)
    problem = spec.bucketed(sized(spec, "bfloat16", rows=4096, vocabulary=128256))
    assert judge(spec, problem, resolve(arch), GENERIC).stack_bytes == 0


def test_the_generic_float32_product_compiles():
    """It runs if a record's winner is a tile and an argument is not aligned; float32's winner is the library."""
    spec = spec_named("matmul")
    problem = spec.problem(**matmul.sizes(8192, 4096, 12288, "float32", ("b_transposed",)))
    judge(spec, problem, resolve("sm_90"), GENERIC)


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "arch"), [("float32", "sm_90"), ("bfloat16", "sm_100")])
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_step_of_any_width_spills_nothing_and_exchanges_nothing_between_threads(dtype, arch, columns):
    spec, target = spec_named("adamw"), resolve(arch)
    problem = spec.problem(rows=4096, columns=columns, dtype=dtype)
    for variant, config in ((ALIGNED, spec.default(problem, target)), (GENERIC, spec.generic(problem))):
        resources = judge(spec, problem, target, variant, config)
        assert resources.stack_bytes == 0
        assert resources.shared_bytes == 0 or variant == GENERIC


@pytest.mark.parametrize("kernel", ["rms_norm_forward", "rms_norm_backward"])
@pytest.mark.parametrize("variant", [ALIGNED, GENERIC])
@pytest.mark.share(4)
def test_rows_that_are_read_twice_compile(kernel, variant):
    spec, target = spec_named(kernel), resolve("sm_100")
    problem = sized(spec, "bfloat16", rows=64, columns=20000)
    config = config_of(spec, problem, target, variant)
    assert config["passes"] == 2
    assert compile_candidate(spec, problem, config, target, variant).cubin


@pytest.fixture
def compiler(monkeypatch):
    """Use the compiler itself, without kept cubins."""
    monkeypatch.setenv("PATH", without_kept_cubins())


@pytest.mark.usefixtures("compiler")
def test_the_same_candidate_compiles_to_the_same_bytes():
    spec, target = spec_named("swiglu_forward"), resolve("sm_90")
    problem = sized(spec, "bfloat16", **QWEN3)
    made = [compile_candidate(spec, problem, spec.generic(problem), target, GENERIC) for _ in range(2)]
    assert made[0].cubin == made[1].cubin
    assert made[0].symbol == made[1].symbol


def test_a_config_that_cannot_be_lowered_fails_in_one_line():
    spec, target = spec_named("swiglu_forward"), resolve("sm_90")
    problem = sized(spec, "bfloat16", **QWEN3)
    with pytest.raises(CompileFailed, match=r"[Pp]ower") as caught:
        compile_candidate(spec, problem, spec.generic(problem).but(tile_n=1000), target, GENERIC)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_the_compiler_does_not_know_fails_in_one_line():
    spec, target = spec_named("swiglu_forward"), dataclasses.replace(resolve("sm_90"), arch="sm_79")
    problem = sized(spec, "bfloat16", **QWEN3)
    with pytest.raises(CompileFailed) as caught:
        compile_candidate(spec, problem, spec.generic(problem), target, GENERIC)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("compiler")
def test_the_time_limit_holds():
    spec, target = spec_named("swiglu_forward"), resolve("sm_90")
    problem = sized(spec, "bfloat16", **QWEN3)
    with pytest.raises(CompileFailed, match=r"tileiras exceeded 0\.01 s"):
        compile_candidate(spec, problem, spec.generic(problem), target, GENERIC, timeout_s=0.01)
