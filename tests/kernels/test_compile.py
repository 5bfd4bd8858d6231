"""Ahead-of-time compilation of every spec, for GPUs that are not here."""

import pytest
from environments import without_kept_cubins
from spec_samples import compiled, config_of, resources_of, sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.errors import CompileFailed
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import resolve

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
    "pairs": 64,
    "vocabulary": 151936,
}
QWEN3_8B = QWEN3 | {"columns": 4096, "heads": 32}


@pytest.mark.parametrize("kernel", ["swiglu_forward", "rms_norm_backward", "attention_forward", "matmul"])
@pytest.mark.parametrize("arch", ["sm_103", "sm_120"])
@pytest.mark.share(8)
def test_other_generations_have_kernels_of_each_family(kernel, arch):
    spec = spec_named(kernel)
    judge(spec, spec.bucketed(sized(spec, "bfloat16", **QWEN3)), resolve(arch), ALIGNED)


def judge(spec, problem, target, variant):
    """What the cubin takes."""
    made = compile_candidate(spec, problem, config_of(spec, problem, target, variant), target, variant)
    return resources_of(spec, problem, made, target)


@pytest.mark.share(8)
@every_spec
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_default_config_spills_nothing_at_the_sizes_of_qwen3_8b(spec, arch):
    target = resolve(arch)
    columns = 12288 if spec.name.startswith("swiglu") else 4096
    problem = spec.bucketed(sized(spec, "bfloat16", **QWEN3_8B | {"columns": columns}))
    assert judge(spec, problem, target, ALIGNED).stack_bytes == 0


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
    """The compiler itself, which keeps nothing that it made."""
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
    import dataclasses

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
