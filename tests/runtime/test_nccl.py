"""Which library of NCCL is taken, and what is said of one that is missing, too old or broken."""

import ctypes
import importlib.util
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from tilekern.errors import CannotRun, ExtraMissing
from tilekern.runtime import nccl
from tilekern.runtime.nccl import library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed, which compiles the library")
FUNCTIONS = [name for name in nccl._TAKES if name != "ncclGetVersion"]


@pytest.fixture(autouse=True)
def fresh():
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Build a library as the wheel has it, and return its file; nothing else is found."""
    folder = tmp_path / "nvidia" / "nccl"
    (folder / "lib").mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia.nccl" else None)
    monkeypatch.setattr(nccl, "_NAME", "libnccl-of-a-test.so.2")

    def build(version, functions=FUNCTIONS):
        source, file = tmp_path / "nccl.c", folder / "lib" / "libnccl-of-a-test.so.2"
        others = "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions)
        source.write_text(f"int ncclGetVersion(int *found) {{ *found = {version}; return 0; }}\n{others}")
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", file, source], check=True)
        return file

    return build


@pytest.mark.parametrize("version", [21304, 22809, 30001])
def test_the_wheel_s_library_is_taken(wheel, version):
    file = wheel(version)
    found = library()
    assert found._name == str(file)
    assert found.ncclAllReduce.argtypes[2] is ctypes.c_size_t


@pytest.mark.parametrize(("version", "shown"), [(2708, "2.7"), (21210, "2.12")])
def test_a_version_that_is_too_old_is_named(wheel, version, shown):
    wheel(version)
    with pytest.raises(
        CannotRun, match=rf"^NCCL {shown} is too old, and 2\.13 is needed; pip install 'tilekern\[nccl\]'$"
    ):
        library()


def test_a_library_without_a_function_is_too_old(wheel):
    wheel(21304, FUNCTIONS[:-1])
    with pytest.raises(CannotRun, match=r"^NCCL is too old: it has no ncclGetLastError; pip install"):
        library()


def test_a_file_that_is_not_a_library_is_named(wheel):
    file = wheel(22809)
    file.write_text("text")
    with pytest.raises(CannotRun, match=rf"^NCCL cannot be loaded: {file}: "):
        library()


@pytest.mark.parametrize("error", [None, ModuleNotFoundError("No module named 'nvidia'")], ids=["no nccl", "no nvidia"])
def test_without_a_library_the_extra_is_named(monkeypatch, error):
    def find(name):
        if error is not None:
            raise error

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(nccl, "_NAME", "libnccl-of-nobody.so.2")
    with pytest.raises(ExtraMissing, match=r"^more than one GPU needs NCCL, .*: pip install 'tilekern\[nccl\]'$"):
        library()
