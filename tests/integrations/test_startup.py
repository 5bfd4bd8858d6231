"""Code that runs at the end of `import torch` or waits for another package's import."""

import ast
import importlib
import importlib.machinery
import importlib.metadata
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from environments import ROOT, installed, python_path

import tilekern_startup
from tilekern.errors import TilekernWarning
from tilekern.integrations import startup
from tilekern.patch import patcher
from tilekern.patch.families import FAMILIES
from tilekern.runtime.awaiting import Arrivals, is_being_imported
from tilekern.runtime.settings import CHOICES
from tilekern.runtime.switches import EXTRAS, OPS, switches_of, text_of


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


def test_two_may_wait_for_one_module(awaited):
    seen = []
    for _ in range(2):
        Arrivals(awaited.__eq__, seen.append).watch()
    module = importlib.import_module(awaited)
    assert seen == [awaited, awaited]
    assert module.__loader__.get_source(awaited) == "DONE = True\n"
    assert module.__spec__.loader is module.__loader__


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


def test_a_module_that_is_being_imported_is_awaited(awaited, tmp_path):
    seen = []
    waiting = Arrivals(awaited.__eq__, lambda name: seen.append((name, sys.modules[name].DONE)))
    other = Arrivals(awaited.__eq__, seen.append)
    package = importlib.import_module("a_package_awaited")
    package.begin = lambda: (waiting.watch(), other.watch())
    (tmp_path / "a_package_awaited" / "part.py").write_text(
        "import a_package_awaited, sys\n"
        "from tilekern.runtime.awaiting import is_being_imported\n"
        "a_package_awaited.begin()\n"
        "assert is_being_imported(sys.modules[__name__])\n"
        "DONE = True\n"
    )
    module = importlib.import_module(awaited)
    assert seen == [(awaited, True), awaited]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert not is_being_imported(module)


def test_a_module_whose_import_fails_does_not_arrive(awaited, tmp_path):
    waiting = Arrivals(awaited.__eq__, pytest.fail)
    importlib.import_module("a_package_awaited").begin = waiting.watch
    (tmp_path / "a_package_awaited" / "part.py").write_text(
        "import a_package_awaited\na_package_awaited.begin()\n1 / 0\n"
    )
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(awaited)


REGISTRY, MODELS = "liger_kernel.ops.backends.registry", "transformers.modeling_utils"


@pytest.fixture
def finders(monkeypatch):
    """Those of this process, without variables of tilekern's and transformers' models."""
    for name in ("LIGER_KERNEL_IMPL", "TILEKERN_APPLY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, MODELS, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return sys.meta_path


@pytest.mark.parametrize(
    ("name", "value", "awaited"),
    [
        *(("LIGER_KERNEL_IMPL", value, None) for value in ("", "cutile")), ("LIGER_KERNEL_IMPL", "tilekern", REGISTRY),
        ("LIGER_KERNEL_BACKEND_ROPE", "tilekern", REGISTRY), *(("TILEKERN_APPLY", value, None) for value in ("", "0")),
        *(("TILEKERN_APPLY", value, MODELS) for value in ("1", "-rope")),
    ],
)  # fmt: skip
def test_it_waits_for_what_a_variable_is_about(monkeypatch, finders, name, value, awaited):
    monkeypatch.setenv(name, value)
    others = len(finders)
    startup.begin()
    assert len(finders) == others + bool(awaited)
    assert not awaited or finders[0]._awaits(awaited)


WRONG = [
    *(("TILEKERN_APPLY", said) for said in (
        "yes", "rmsnorm", "rms_norm,-rope", "rope,", "-", "1,-rope,rope", "rope alone"
    )),
    *((name, value) for name in CHOICES for value in ("foo", " ", "Compile")),
    *(("TILEKERN_LOOKUP_AGAIN_S", value) for value in ("soon", "-1", "inf", "nan")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_a_variable_may_not_say_ends_what_makes_models_and_not_the_import_of_torch(
    monkeypatch, finders, capsys, name, value
):
    monkeypatch.setenv("TILEKERN_APPLY", "1")
    monkeypatch.setenv(name, value)
    with pytest.warns(TilekernWarning, match=f"{name}.*; this process ends where transformers makes models"):
        startup.begin()
    with pytest.raises(SystemExit) as ended:
        finders[0]._arrived(MODELS)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilekern: {name}")
    if name == "TILEKERN_APPLY":
        assert "-OP for all but" in line or "keep one of the two" in line
    else:
        assert repr(value) in line


@pytest.mark.parametrize(
    ("variable", "said", "module"),
    [
        ("TILEKERN_APPLY", "1", "tilekern.patch.patcher"),
        ("LIGER_KERNEL_IMPL", "tilekern", "tilekern.integrations.liger"),
    ],
)
def test_a_broken_dependency_is_one_line_and_models_run_their_own_ops(monkeypatch, finders, variable, said, module):
    monkeypatch.setenv(variable, said)
    startup.begin()
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    with pytest.warns(TilekernWarning) as warned:
        finders[0]._arrived("the module that it waits for")
    (message,) = (str(one.message) for one in warned)
    assert message.startswith(f"{variable} asks for tilekern, which cannot be loaded (ModuleNotFoundError: ")


def test_an_error_of_tilekern_itself_is_not_called_a_broken_dependency(monkeypatch, finders):
    """An error of apply itself is the program's to see."""

    def fail(**options):
        raise ImportError("of the program")

    monkeypatch.setenv("TILEKERN_APPLY", "1")
    startup.begin()
    monkeypatch.setitem(sys.modules, "tilekern.patch.patcher", SimpleNamespace(apply_first=fail))
    with pytest.raises(ImportError, match="of the program"):
        finders[0]._arrived(MODELS)


@pytest.mark.parametrize("gone", ["tilekern", "tilekern.integrations.startup", "tilekern.runtime.implementation"])
def test_torch_is_imported_where_the_package_is_gone_or_there_in_part(monkeypatch, gone):
    """The entry point is a file outside of the package."""
    # tilekern registers its names at once where transformers can make models already.
    importlib.import_module("transformers.modeling_utils")
    for name in [name for name in sys.modules if name == "tilekern" or name.startswith("tilekern.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, gone, None)
    with pytest.warns(RuntimeWarning, match=f"tilekern is installed and cannot be used .*{gone}.*; install it again"):
        tilekern_startup.begin()


def test_a_filter_that_makes_errors_of_warnings_ends_no_import_of_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tilekern.integrations.startup", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilekern_startup.begin()
    assert capsys.readouterr().err.startswith("tilekern: tilekern is installed and cannot be used (")


def test_the_entry_point_needs_the_standard_library_alone():
    imports = [
        node for node in ast.walk(ast.parse(Path(tilekern_startup.__file__).read_text())) if hasattr(node, "names")
    ]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    assert names <= sys.stdlib_module_names
    (inner,) = (node for node in imports if isinstance(node, ast.ImportFrom))
    assert inner.module == "tilekern.integrations.startup"


def test_texts_choose_ops():
    alone = {op: op in ("rms_norm", "swiglu") for op in (*OPS, *EXTRAS)}
    assert switches_of("1") == switches_of("1,rope") == {}
    assert switches_of("rms_norm, swiglu") == switches_of("swiglu,rms_norm,swiglu") == alone
    assert switches_of(" -rope,-swiglu") == {"rope": False, "swiglu": False}
    assert switches_of("experts") == {op: op == "experts" for op in (*OPS, *EXTRAS)}
    assert switches_of("1,experts, adamw ,-rope") == {"rope": False, "experts": True, "adamw": True}
    for switches in ({}, alone, {"rope": False}, {"experts": True}, {"rope": False, "attention": True}):
        default = {op: op in OPS for op in (*OPS, *EXTRAS)}
        assert default | switches_of(text_of(switches)) == default | switches


def test_the_values_of_variables_are_those_that_their_readers_know():
    from typing import get_args

    from tilekern.cache.trust.policy import POLICIES
    from tilekern.runtime.dispatch import MissPolicy

    assert CHOICES["TILEKERN_ON_MISS"] == get_args(MissPolicy)
    assert set(CHOICES["TILEKERN_TRUST"]) == set(POLICIES)
    documented = (ROOT / "docs" / "reference.md").read_text()
    assert not [name for name in CHOICES if f"| `{name}` |" not in documented]


CODE = """
import transformers.models.qwen3.modeling_qwen3
import tilekern
print(*tilekern.get_patched_ops())
tilekern.reset()
tilekern.apply(swiglu=False)
import transformers.models.llama.modeling_llama
print(*tilekern.get_patched_ops())
"""


def test_the_variable_has_families_patched_once_transformers_can_make_models(monkeypatch, unpatched):
    importlib.import_module(FAMILIES["qwen3"].module)
    monkeypatch.setenv("TILEKERN_APPLY", "-rope")
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not patcher._arrivals])
    startup.begin()
    sys.meta_path[0]._arrived(MODELS)
    ops = patcher.get_patched_ops()
    assert "rope" not in ops
    assert ops.keys() >= {*FAMILIES["qwen3"].ops} - {"rope"}


@pytest.mark.processes
@pytest.mark.nightly
def test_the_variable_has_a_family_patched_when_it_is_imported(tmp_path):
    """Torch is first imported by the code of the models here, and looks for entry points in the midst of that."""
    env = os.environ | {"PYTHONPATH": python_path(installed(tmp_path), ROOT), "TILEKERN_APPLY": "-rope"}
    ran = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    served = FAMILIES["qwen3"].ops
    assert first.split() == [op for op in served if op != "rope"]
    assert second.split() == [op for op in served if op != "swiglu"]


GONE = """
import sys
class Gone:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "tilekern":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone)
import torch
print(torch.__version__)
"""


@pytest.mark.processes
@pytest.mark.nightly
def test_torch_is_imported_where_metadata_is_all_that_is_left(tmp_path):
    env = os.environ | {"PYTHONPATH": python_path(installed(tmp_path), ROOT), "TILEKERN_APPLY": "1"}
    command = [sys.executable, "-W", "error:tilekern is installed:RuntimeWarning", "-c", GONE]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == torch.__version__
    assert "tilekern is installed and cannot be used (ModuleNotFoundError: No module named 'tilekern" in ran.stderr


def test_the_entry_point_of_torch_names_it():
    """Torch refuses to be imported where an entry point of this group fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {"tilekern": "tilekern_startup:begin"}
    assert importlib.metadata.EntryPoint("tilekern", "tilekern_startup:begin", "torch.backends").load()


@pytest.mark.processes
def test_it_adds_a_few_milliseconds_to_the_import_of_torch():
    """Measure processor time, with the modules loaded that torch has loaded by then."""
    code = (
        "import __future__, importlib, sys, time, typing, warnings\n"
        "known, now = set(sys.modules), time.process_time()\n"
        "import tilekern_startup; tilekern_startup.begin(); print(time.process_time() - now)\n"
        "print(*(set(sys.modules) - known))"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(5)]
    seconds, modules = zip(*(ran.stdout.splitlines() for ran in runs), strict=True)
    names = (
        "_startup", "", ".integrations", ".integrations.startup", ".integrations.names", ".runtime", ".runtime.awaiting"
    )  # fmt: skip
    assert set(modules[0].split()) == {f"tilekern{name}" for name in names}
    assert min(map(float, seconds)) < 0.005
