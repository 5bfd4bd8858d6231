"""Ahead-of-time compilation of every spec, for GPUs that are not here."""

from pathlib import Path

import pytest
from examples import scaled
from spec_samples import compiled, draws_of, gpus_of, sized

from tilekern.cubin import read_resources
from tilekern.errors import CompileFailed
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, GENERIC
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
    "pairs": 64,
    "vocabulary": 151936,
}
QWEN3_8B = QWEN3 | {"columns": 4096, "heads": 32}
FEW = {"rows": 64, "tokens": 64, "batch": 2, "heads": 5, "kv_heads": 5}
# With tails everywhere, and of the tiny test model.
SMALL = [
    FEW | {"columns": 208, "head_dim": 80, "vocabulary": 1003},
    FEW | {"columns": 80, "head_dim": 16, "vocabulary": 80},
]


def config_of(spec, problem, target, variant):
    default = spec.default(problem, target)
    return default if variant == ALIGNED and not spec.is_library(problem, default) else spec.generic(problem)


def drawn(spec, random):
    """A small problem of any dtypes and flags."""
    kinds = {"dtype": DTYPES, "flag": (False, True)}
    found = sized(spec, **random.choice(SMALL))
    return found.but(**{d.name: random.choice(kinds[d.kind]) for d in spec.dimensions if d.kind in kinds})


# The default is compiled for both GPUs of users below, at the sizes of a real model; here the generic config for one of
# them or either for an older one, which is drawn, as are dtypes and flags here and, at any sizes, in
# test_time_to_compile.py.
@every_spec
def test_any_dtypes_and_flags_compile_with_tails_and_without_tma(spec):
    random = draws_of(spec)
    for _ in range(scaled(1)):
        arch, variant = random.choice([("sm_80", ALIGNED), ("sm_80", GENERIC), (gpus_of(spec)[0], GENERIC)])
        judge(spec, spec.bucketed(drawn(spec, random)), resolve(arch), variant)


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


@pytest.fixture
def compiler(monkeypatch):
    """The compiler itself, which keeps nothing that it made."""
    monkeypatch.setenv("CUBINS", "")


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
