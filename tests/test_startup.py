"""What runs at the end of `import torch`, and what waits for another package's import."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tilekern import startup
from tilekern.awaiting import Arrivals

ROOT = Path(__file__).parents[1]


@pytest.fixture
def awaited(tmp_path, monkeypatch):
    """The name of a module that can be imported, and has not been."""
    (tmp_path / "a_package_awaited").mkdir()
    (tmp_path / "a_package_awaited" / "__init__.py").write_text("")
    (tmp_path / "a_package_awaited" / "part.py").write_text("DONE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "a_package_awaited.part"
    sys.meta_path[:] = finders
    for name in ("a_package_awaited.part", "a_package_awaited"):
        sys.modules.pop(name, None)


def test_what_waits_for_a_module_is_told_after_it(awaited):
    seen = []
    waiting = Arrivals(awaited.__eq__, lambda name: seen.append((name, sys.modules[name].DONE)))
    waiting.watch()
    waiting.watch()
    importlib.import_module("a_package_awaited")
    assert not seen
    module = importlib.import_module(awaited)
    assert seen == [(awaited, True)]
    assert module.__spec__.loader is module.__loader__
    assert module.__loader__.get_source(awaited) == "DONE = True\n"


def test_errors_of_what_waits_are_those_of_the_import(awaited):
    def fail(name):
        raise RuntimeError(f"not {name}")

    Arrivals(awaited.__eq__, fail).watch()
    with pytest.raises(RuntimeError, match=f"not {awaited}"):
        importlib.import_module(awaited)


def test_a_module_that_is_not_there_stays_so(awaited):
    Arrivals(lambda name: name.startswith("a_package_awaited."), pytest.fail).watch()
    with pytest.raises(ModuleNotFoundError, match="a_package_awaited"):
        importlib.import_module("a_package_awaited.nothing")


@pytest.mark.parametrize(
    ("variables", "waits"),
    [({}, False), ({"LIGER_KERNEL_IMPL": "cutile"}, False), ({"LIGER_KERNEL_IMPL": "tilekern"}, True),
     ({"LIGER_KERNEL_BACKEND_ROPE": "tilekern"}, True)],
)  # fmt: skip
def test_it_waits_for_liger_where_a_variable_asks_for_it(monkeypatch, variables, waits):
    monkeypatch.delenv("LIGER_KERNEL_IMPL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "meta_path", before := list(sys.meta_path))
    others = len(before)
    startup.begin()
    assert len(sys.meta_path) == others + waits
    assert [finder._awaits("liger_kernel.ops.backends.registry") for finder in sys.meta_path[:waits]] == [True] * waits


def test_the_entry_point_of_torch_names_it():
    """Torch refuses to be imported where an entry point of this group fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {"tilekern": "tilekern.startup:begin"}


@pytest.mark.processes
def test_it_adds_a_few_milliseconds_to_the_import_of_torch():
    """Of the processor's time. What torch has loaded by then is loaded before."""
    code = (
        "import __future__, importlib, sys, time, typing\n"
        "known, now = set(sys.modules), time.process_time()\n"
        "import tilekern.startup; tilekern.startup.begin(); print(time.process_time() - now)\n"
        "print(*(set(sys.modules) - known))"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(5)]
    seconds, modules = zip(*(ran.stdout.splitlines() for ran in runs), strict=True)
    assert set(modules[0].split()) == {"tilekern", "tilekern.startup"}
    assert min(map(float, seconds)) < 0.005
