"""Facts read from a cubin's ELF sections."""

import shutil
import subprocess

import pytest
from marks import needs_compiler

from tilekern.compile.cubin import Resources, code_of, read_resources
from tilekern.compile.toolchain import compile_candidate
from tilekern.kernels import spec_named
from tilekern.spec import GENERIC
from tilekern.spec.targets import resolve

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def made():
    spec = spec_named("swiglu_forward")
    problem = spec.problem(rows=64, columns=64, dtype="bfloat16")
    return compile_candidate(spec, problem, spec.generic(problem), resolve("sm_90"), GENERIC)


def test_a_kernel_that_is_not_there_is_named(made):
    with pytest.raises(ValueError, match="holds no kernel nowhere"):
        read_resources(made.cubin, "nowhere")


@pytest.mark.parametrize("content", [b"", b"not an ELF file" * 10])
def test_bytes_that_are_not_a_cubin_are_refused(content):
    from elftools.common.exceptions import ELFError

    with pytest.raises(ELFError):
        read_resources(content, "kernel")


def test_resources_are_those_of_one_kernel(made):
    found = read_resources(made.cubin, made.symbol)
    assert 16 <= found.registers <= 255
    assert found.threads % 32 == 0
    assert len(code_of(made.cubin, made.symbol)) == found.code_bytes
    assert found == Resources(**found.as_dict())


@pytest.mark.nightly
def test_a_tile_that_registers_cannot_hold_shows_as_stack(made):
    spec = spec_named("rms_norm_forward")
    problem = spec.problem(rows=64, columns=8192, dtype="float32", weight_dtype="float32")
    config = spec.generic(problem).but(passes=1, tile_n=8192, occupancy=8, num_worker_warps=4)
    spilling = compile_candidate(spec, problem, config, resolve("sm_90"), GENERIC)
    assert read_resources(spilling.cubin, spilling.symbol).stack_bytes > 0
    assert read_resources(made.cubin, made.symbol).stack_bytes == 0


def test_cuobjdump_says_the_same(made, tmp_path):
    import importlib.util
    from pathlib import Path

    package = importlib.util.find_spec("nvidia")
    roots = package.submodule_search_locations if package else []
    tool = next((p for root in roots for p in Path(root).glob("cu*/bin/cuobjdump")), shutil.which("cuobjdump"))
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(made.cubin)
    said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    line = next(line for line in said.splitlines() if "REG:" in line)
    values = {name: int(value) for name, _, value in (part.partition(":") for part in line.split()) if value.isdigit()}
    found = read_resources(made.cubin, made.symbol)
    assert values["REG"] == found.registers
    assert values["STACK"] == found.stack_bytes
    # The system's own shared memory, which cuobjdump counts in, is 1 KiB of a block on sm_90.
    assert values["SHARED"] in (found.shared_bytes, found.shared_bytes + 1024)
