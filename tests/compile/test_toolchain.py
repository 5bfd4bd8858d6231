"""Finding the tile compiler, what variants assume, and how a compiler's failures read."""

import dataclasses
import importlib.util
import inspect
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT
from marks import needs_compiler
from spec_samples import alike, compiled, draws_of, sized

from tilekern.compile import cute_compiler, cutile
from tilekern.compile.toolchain import assumptions, compile_candidate, require_toolkit, toolkit
from tilekern.errors import CompileFailed, CompileInterrupted, ToolchainMissing
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, GENERIC, ITEM_BYTES, ArrayParameter, name_of
from tilekern.spec.targets import resolve

H200 = resolve("H200")


@pytest.fixture
def fresh():
    """The toolkit is looked for once in a process; here anew before and after."""
    toolkit.cache_clear()
    yield
    toolkit.cache_clear()


def candidate():
    spec = spec_named("swiglu_forward")
    problem = spec.problem(rows=64, columns=64, dtype="bfloat16")
    return spec, problem, spec.generic(problem)


def compiler(folder: Path, script: str, monkeypatch) -> Path:
    """A compiler that is a shell script."""
    path = folder / "tileiras"
    version = 'if [ "$1" = --version ]; then echo "Cuda compilation tools, V13.4.92"; exit; fi'
    path.write_text(f"#!/bin/sh\n{version}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cutile, "_tileiras", lambda: path)
    return path


def test_a_missing_compiler_is_reported_with_its_install_command(fresh, monkeypatch):
    monkeypatch.setattr(cutile, "_tileiras", lambda: None)
    assert toolkit() is None
    for ask in (require_toolkit, lambda: compile_candidate(*candidate(), H200, GENERIC)):
        with pytest.raises(ToolchainMissing, match=r"pip install 'tilekern\[compile\]'"):
            ask()


@pytest.mark.processes
def test_a_machine_without_the_package_and_with_an_empty_path_has_no_compiler(tmp_path):
    """A `nvidia` package without a compiler stands before the real one."""
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "__init__.py").touch()
    code = "from tilekern.compile.toolchain import require_toolkit\nrequire_toolkit()"
    environment = {"PATH": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.strip().splitlines()[-1].startswith("tilekern.errors.ToolchainMissing: the tile compiler")


def test_a_compiler_on_the_path_serves_where_the_package_is_missing(fresh, tmp_path, monkeypatch):
    compiler(tmp_path, "", monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert toolkit().path == tmp_path / "tileiras"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("Cuda compilation tools, release 13.4, V13.4.92", "13.4.92"),
        ("tileiras 13.5.1", "13.5.1"),
        ("no number at all", "unknown"),
    ],
)
def test_the_version_is_read_from_what_the_compiler_says(fresh, tmp_path, monkeypatch, said, version):
    path = compiler(tmp_path, "", monkeypatch)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    found = toolkit()
    assert found.tileiras == version
    assert found.key == f"tileiras-{version}-cuda_tile-{found.cuda_tile}"
    assert found.describe() == {"key": found.key, "tileiras": version, "cuda_tile": found.cuda_tile}


@pytest.mark.parametrize("script", ["exit 1", "kill -9 $$"])
def test_a_compiler_without_a_version_is_not_used(fresh, tmp_path, monkeypatch, script):
    compiler(tmp_path, "", monkeypatch).write_text(f"#!/bin/sh\n{script}\n")
    assert toolkit() is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'error: no such op' >&2; echo more >&2; exit 3", "tileiras ended with exit code 3: error: no such op"),
        ("kill -SEGV $$", "tileiras ended with signal 11: no message"),
        ("exit 0", "tileiras ended with exit code 0: no message"),
        ("exec sleep 20", "tileiras exceeded 0.3 s"),
    ],
    ids=["rejects", "crashes", "writes nothing", "hangs"],
)
def test_a_compiler_failure_is_reported_in_one_line(fresh, tmp_path, monkeypatch, script, message):
    compiler(tmp_path, script, monkeypatch)
    with pytest.raises(CompileFailed) as caught:
        compile_candidate(*candidate(), H200, GENERIC, timeout_s=0.3)
    assert str(caught.value) == message


def test_the_compiler_sees_where_programs_lie_and_nothing_that_others_have_set(fresh, tmp_path, monkeypatch):
    """Some variables would make it use parts of another CUDA toolkit."""
    compiler(tmp_path, 'env > "$3"', monkeypatch)
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "LLVM_OVERRIDE_PRODUCER", "PTXAS_OPTIONS", "LD_PRELOAD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    seen = dict(line.split("=", 1) for line in compile_candidate(*candidate(), H200, GENERIC).cubin.decode().split())
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["LD_LIBRARY_PATH"] == "/opt/lib"
    # What a shell sets by itself comes besides.
    assert seen.keys() - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "LD_LIBRARY_PATH", "TMPDIR"}


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("kill -KILL $$", CompileInterrupted),
        ("kill -BUS $$", CompileInterrupted),
        ("kill -SEGV $$", CompileFailed),
        ("echo 'fatal: No space left on device' >&2; exit 1", CompileInterrupted),
        ("echo 'terminate called: std::bad_alloc' >&2; exit 1", CompileInterrupted),
        ("echo 'error: no such op' >&2; exit 3", CompileFailed),
    ],
)
def test_passing_conditions_are_not_taken_for_rejected_candidates(fresh, tmp_path, monkeypatch, script, kind):
    compiler(tmp_path, script, monkeypatch)
    with pytest.raises(CompileFailed) as caught:
        compile_candidate(*candidate(), H200, GENERIC)
    assert type(caught.value) is kind


@needs_compiler
def test_a_variable_of_cuda_tile_s_own_tests_compiles_nothing(monkeypatch):
    monkeypatch.setattr("cuda.tile._debug.CUDA_TILE_TESTING_DISABLE_TOKEN_ORDER", True)
    cutile._lowered.cache_clear()
    with pytest.raises(CompileInterrupted, match=r"CUDA_TILE_TESTING_DISABLE_TOKEN_ORDER is set, .*; unset it"):
        compile_candidate(*candidate(), H200, GENERIC)


@pytest.mark.skipif(cute_compiler.compiler() is None, reason="CuTe DSL is not installed")
@pytest.mark.slow
def test_variables_for_users_cute_kernels_are_hidden_while_tilekern_compiles(monkeypatch):
    """With line numbers a cubin is twice as large, and has paths of the machine that compiled it."""
    cute_compiler.CuteDsl().preload()
    dsl = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setattr(dsl, "envar", cute_compiler._read_anew(dsl))
    assert dsl.envar.lineinfo
    with cute_compiler._as_if_nothing_were_set():
        hidden = dsl.envar.lineinfo, os.environ.get("CUTE_DSL_LINEINFO")
    assert hidden == (False, None)
    assert dsl.envar.lineinfo
    assert os.environ["CUTE_DSL_LINEINFO"] == "1"


@pytest.mark.parametrize("spec", compiled(), ids=lambda spec: spec.name)
def test_the_generic_variant_assumes_dtypes_and_ranks_alone(spec):
    problem = alike(spec, 64, "bfloat16")
    implementation = spec.device(problem, spec.generic(problem))
    plain, strong = assumptions(implementation, GENERIC), assumptions(implementation, ALIGNED)
    assert len(plain) == len(strong) == len(implementation.parameters) + len(implementation.constants)
    for parameter, generic, aligned in zip(implementation.parameters, plain, strong, strict=False):
        assert generic["dtype"] == aligned["dtype"] == parameter.dtype
        if isinstance(parameter, ArrayParameter):
            assert generic["ndim"] == aligned["ndim"] == parameter.ndim
            assert (generic["base_bytes"], generic["stride_elements"], generic["extent_elements"]) == (1, 1, 1)
            assert not generic["last_stride_one"]
            assert aligned["last_stride_one"]
            stride_bytes = aligned["stride_elements"] * ITEM_BYTES[parameter.dtype]
            known = (aligned["base_bytes"], stride_bytes)
            assert known == ((16, 16) if parameter.aligned else (1, ITEM_BYTES[parameter.dtype]))


@pytest.mark.parametrize(("columns", "extent"), [(64, 16), (80, 16), (72, 1), (100, 1), (1, 1)])
def test_only_an_extent_that_the_launcher_states_is_assumed(columns, extent):
    spec = spec_named("swiglu_forward")
    problem = spec.problem(rows=64, columns=columns, dtype="float32")
    for assumed in assumptions(spec.device(problem, spec.generic(problem)), ALIGNED)[:3]:
        assert assumed["extent_elements"] == extent


@needs_compiler
def test_a_toolkit_names_its_versions():
    found = require_toolkit()
    assert found.path.is_file()
    assert found.tileiras[0].isdigit()
    assert found.cuda_tile.startswith("1.")
    assert dataclasses.asdict(found)["path"] == found.path


HINTS = ({"occupancy": 1}, {"occupancy": 4, "num_worker_warps": 8}, {"occupancy": 1})


def one_now_and_others_slow(specs):
    """Return one spec, and a quarter of the others as slow ones: it depends on cuda-tile, hardly on a kernel."""
    first, *others = sorted(specs, key=lambda spec: spec.name != "swiglu_forward")
    return [first, *(pytest.param(spec, marks=pytest.mark.slow) for spec in others[::4])]


@needs_compiler
@pytest.mark.parametrize("spec", one_now_and_others_slow(compiled()), ids=lambda spec: spec.name)
def test_the_front_end_gives_the_bytecode_of_cuda_tile_s_public_function(spec):
    """The steps behind ``export_kernel`` are private to cuda-tile; lowered code is kept and used for all hints."""
    import io

    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

    problem = sized(spec, "bfloat16", rows=64, columns=64, heads=8, kv_heads=8, head_dim=64, pairs=32)
    implementation = spec.device(problem, spec.generic(problem))
    constraints = tuple(cutile.constraint(assumed) for assumed in assumptions(implementation, ALIGNED))
    # What is kept is the code of a function, whichever it is: one shows that hints find their way into it.
    for hints in HINTS if spec.name == "swiglu_forward" else [draws_of(spec).choice(HINTS)]:
        kernel = ct.kernel(implementation.function._pyfunc, **hints)
        signature = KernelSignature(list(constraints), CallingConvention.cutile_python_v1())
        signature = signature.with_mangled_symbol(kernel._pyfunc.__name__)
        expected = io.BytesIO()
        options = {"gpu_code": "sm_100", "output_format": "tileir_bytecode", "bytecode_version": "13.4"}
        export_kernel(kernel, [signature], expected, **options)
        lowered = cutile.lower(implementation.function, constraints, hints, "sm_100", "13.4")
        assert lowered.symbol == signature.symbol
        assert lowered.bytecode == expected.getvalue()


def test_the_digest_of_bytecode_is_that_of_code_and_of_no_place(tmp_path):
    """The same kernel in another file and on other lines is lowered to bytecode of the same digest."""
    spec = spec_named("scale")
    problem = spec.problem(rows=64, columns=64, dtype="bfloat16")
    implementation = spec.device(problem, spec.generic(problem))
    text = Path(inspect.getfile(implementation.function._pyfunc)).read_text(encoding="utf-8")
    path = tmp_path / "moved.py"

    def digest(text):
        path.write_text(text, encoding="utf-8")
        found = importlib.util.spec_from_file_location("moved", path)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        function = getattr(module, name_of(implementation.function))
        moved = dataclasses.replace(implementation, function=function)
        return cutile.CuTile().lowered_digest(moved, resolve("B200"), GENERIC)

    here = cutile.CuTile().lowered_digest(implementation, resolve("B200"), GENERIC)
    assert digest("# A line.\n" + text) == here
    assert digest(text.replace(" * by\n", " * by * 1.5\n")) != here
