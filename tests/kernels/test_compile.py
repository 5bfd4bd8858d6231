"""Ahead-of-time compilation of every spec, for GPUs that are not here."""

from pathlib import Path

import pytest
from spec_samples import compiled, sized

from tilekern.cubin import read_resources
from tilekern.errors import CompileFailed
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, GENERIC
from tilekern.targets import resolve
from tilekern.toolchain import compile_candidate, toolkit

pytestmark = [pytest.mark.slow, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]
COMPILED = compiled()
every_spec = pytest.mark.parametrize("spec", COMPILED, ids=[spec.name for spec in COMPILED])
QWEN3 = {
    "rows": 8192,
    "columns": 1024,
    "tokens": 8192,
    "batch": 1,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "vocabulary": 151936,
}
QWEN3_8B = QWEN3 | {"columns": 4096, "heads": 32}
# The first has tails everywhere; the second is a head of the tiny test model.
ODD = {
    "rows": 64,
    "columns": 208,
    "tokens": 64,
    "batch": 2,
    "heads": 5,
    "kv_heads": 5,
    "head_dim": 80,
    "vocabulary": 1003,
}
TINY = {
    "rows": 64,
    "columns": 80,
    "tokens": 64,
    "batch": 2,
    "heads": 5,
    "kv_heads": 5,
    "head_dim": 16,
    "vocabulary": 80,
}


# Both variants on the GPUs of users by sizes with tails, and a real model's sizes where there is no TMA. Any sizes, in
# both variants on both, are those of test_time_to_compile.py.
CASES = [(ODD, "sm_90", ALIGNED), (ODD, "sm_100", GENERIC), (QWEN3, "sm_80", ALIGNED)]


def config_of(spec, problem, target, variant):
    default = spec.default(problem, target)
    return default if variant == ALIGNED and not spec.is_library(problem, default) else spec.generic(problem)


@every_spec
@pytest.mark.parametrize(("sizes", "arch", "variant"), CASES, ids=[f"{arch}-{variant}" for _, arch, variant in CASES])
def test_every_spec_compiles_for_every_target(spec, sizes, arch, variant):
    judge(spec, spec.bucketed(sized(spec, "bfloat16", **sizes)), resolve(arch), variant)


@pytest.mark.parametrize("kernel", ["swiglu_forward", "rms_norm_backward", "attention_forward", "matmul"])
@pytest.mark.parametrize("arch", ["sm_103", "sm_120"])
def test_other_generations_have_kernels_of_each_family(kernel, arch):
    spec = spec_named(kernel)
    judge(spec, spec.bucketed(sized(spec, "bfloat16", **QWEN3)), resolve(arch), ALIGNED)


def judge(spec, problem, target, variant):
    """What is so of every cubin; what it takes."""
    made = compile_candidate(spec, problem, config_of(spec, problem, target, variant), target, variant)
    resources = read_resources(made.cubin, made.symbol)
    assert resources.registers > 0
    assert 32 <= resources.threads <= 1024
    assert 0 <= resources.shared_bytes <= target.shared_bytes
    assert resources.code_bytes > 0
    assert made.symbol.startswith(spec.device(problem, spec.generic(problem)).function._pyfunc.__name__[:8])
    for folder in (Path(__file__).parents[2], Path.home()):
        assert str(folder).encode() not in made.cubin
    assert spec.module.rpartition(".")[2].encode() + b".py" not in made.cubin
    return resources


@every_spec
@pytest.mark.parametrize(("dtype", "variant"), [("float16", ALIGNED), ("float32", GENERIC)])
def test_other_dtypes_and_flags_compile(spec, variant, dtype):
    target = resolve("sm_100")
    problem = spec.bucketed(sized(spec, dtype, flags=True, **TINY))
    mixed = {d.name: "bfloat16" for d in spec.dimensions if d.kind == "dtype" and d.name != "dtype"}
    for case in {problem, problem.but(**mixed)}:
        assert compile_candidate(spec, case, config_of(spec, case, target, variant), target, variant).cubin


@every_spec
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_default_config_spills_nothing_at_the_sizes_of_qwen3_8b(spec, arch):
    target = resolve(arch)
    columns = 12288 if spec.name.startswith("swiglu") else 4096
    problem = spec.bucketed(sized(spec, "bfloat16", **QWEN3_8B | {"columns": columns}))
    assert judge(spec, problem, target, ALIGNED).stack_bytes == 0


@pytest.mark.parametrize("kernel", ["rms_norm_forward", "rms_norm_backward"])
@pytest.mark.parametrize("variant", [ALIGNED, GENERIC])
def test_rows_that_are_read_twice_compile(kernel, variant):
    spec, target = spec_named(kernel), resolve("sm_100")
    problem = sized(spec, "bfloat16", rows=64, columns=20000)
    config = config_of(spec, problem, target, variant)
    assert config["passes"] == 2
    assert compile_candidate(spec, problem, config, target, variant).cubin


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
    import dataclasses

    spec, target = spec_named("swiglu_forward"), dataclasses.replace(resolve("sm_90"), arch="sm_79")
    problem = sized(spec, "bfloat16", **QWEN3)
    with pytest.raises(CompileFailed) as caught:
        compile_candidate(spec, problem, spec.generic(problem), target, GENERIC)
    assert "\n" not in str(caught.value)


def test_the_time_limit_holds():
    spec, target = spec_named("swiglu_forward"), resolve("sm_90")
    problem = sized(spec, "bfloat16", **QWEN3)
    with pytest.raises(CompileFailed, match=r"tileiras exceeded 0\.01 s"):
        compile_candidate(spec, problem, spec.generic(problem), target, GENERIC, timeout_s=0.01)
