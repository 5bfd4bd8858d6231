"""Kernels of a user's module: the page's example from plan to launch, and records of it without the module."""

import json
import re
import shlex
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import simulated_gpu
import torch
from tuning_samples import H200, needs_compiler

from tilekern import kernels
from tilekern.cache import Store, note_wanted, read_wanted
from tilekern.cache_tools.__main__ import main as cache_tools
from tilekern.cache_tools.shared import installed
from tilekern.errors import InputError
from tilekern.kernels import all_specs, spec_named
from tilekern.runtime import dispatch
from tilekern.spec import source
from tilekern.spec.targets import resolve
from tilekern.tuning import cli, pipeline
from tilekern.tuning.executors import local
from tilekern.tuning.measure import process
from tilekern.tuning.serve.watched import PREDICTED, WatchedCache

PAGE = (Path(__file__).parents[2] / "docs" / "your-kernels.md").read_text()
MODULE, CHECK, TRACE = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = list(map(shlex.split, re.findall(r"^python -m .*$", PAGE, re.M)))
NAME, SIZES = "acme_relu_squared", {"rows": 64, "columns": 48, "dtype": "bfloat16"}
pytestmark = [needs_compiler, pytest.mark.processes]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the page's module, in which commands run; nothing of it is known before or after."""
    (tmp_path / "my_kernels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(kernels.VARIABLE, "")
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    forget()


def forget():
    """Forget the module, as a new process would not know it."""
    sys.modules.pop("my_kernels", None)
    for function in (kernels._specs_with, kernels._installed, source._find, source._parsed, source.source_digest,
                     installed.digest_today):  # fmt: skip
        function.cache_clear()
    dispatch.forget()


def run(arguments):
    """Run a command of the page in this process; its exit code."""
    python, module, name, *rest = arguments
    assert (python, module) == ("python", "-m")
    main = {"tilekern.tune": cli.main, "tilekern.cache_tools": cache_tools}[name]
    try:
        return main(rest)
    except SystemExit as end:
        return end.code


def test_the_commands_of_the_page_run_and_a_job_finds_the_record(here, capsys, monkeypatch):
    for command in COMMANDS:
        assert not run(command), (command, capsys.readouterr())
    said = capsys.readouterr().out
    assert "packed 2 records" in said
    assert "unpacked 2 records" in said
    assert "0 broken, 0 stale" in said
    spec = spec_named(NAME)
    assert {e.record.module for e in Store(here / "cache").entries()} == {"my_kernels"}
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(here / "another-cache"))
    for gpu in ("H200", "B200"):
        monkeypatch.setattr(dispatch, "here", lambda _device=None, gpu=gpu: resolve(gpu))
        dispatch.forget()
        plan = dispatch.plan_for(spec, torch.device("cuda", 0), 50, 48, torch.bfloat16)
        [record] = [r for (kernel, _), r in dispatch.resolved().items() if kernel == NAME]
        assert record.provenance == "predicted"
        assert dict(plan.config) == record.config
        assert plan.blocks > 0


def test_records_of_a_missing_module_stay_and_are_reported(here, default_configs, capsys, monkeypatch):
    assert run(COMMANDS[0]) == 0
    forget()
    (here / "my_kernels.py").unlink()
    monkeypatch.setenv(kernels.VARIABLE, "")
    capsys.readouterr()
    for command in (f"show {NAME} rows=64,columns=48,dtype=bfloat16", "ls", "verify", "prune --stale --yes", "stats"):
        assert not run(["python", "-m", "tilekern.cache_tools", *command.split()]), capsys.readouterr()
    assert "not installed" in capsys.readouterr().out
    assert cli.main(["refresh", "--gpu", "H200"]) == 0
    told = capsys.readouterr().out
    assert f"left out: {NAME}, of another version of tilekern or of your own (--specs MODULE)" in told
    assert cli.main(["refresh", "--same-code", "--json"]) == 0
    [place] = json.loads(capsys.readouterr().out)["places"]
    assert [left["reason"] for left in place["stale"]] == ["it is of the module my_kernels; pass --specs my_kernels"]
    assert len(list(Store(here / "cache").entries())) == 1
    assert cli.main(["--stages", "compile", "--sweep", str(here / "cache" / "sweeps" / H200.key)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"names a problem of {NAME} that this version of tilekern does not have" in line
    assert "a kernel of your own needs --specs MODULE" in line


def test_it_runs_in_the_interpreter_as_the_page_says(here, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    exec(compile(CHECK, "your-kernels.md", "exec"), {})
    assert dispatch.stats()[NAME]["launches"] > 0


def test_its_candidates_are_verified_and_timed(here, default_configs, monkeypatch):
    """The real worker does it, on a GPU that the interpreter simulates."""
    monkeypatch.setattr(process, "serve", simulated_gpu.serve)
    monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
    monkeypatch.setattr(local, "devices", lambda: ["0"])
    gpu = {"gpu": "a simulated one", "driver": "0", "torch": "0"}
    monkeypatch.setattr(local.LocalExecutor, "describe_gpu", lambda *_: gpu)
    monkeypatch.setattr(pipeline, "here", lambda: H200)
    assert run(COMMANDS[0]) == 0
    [record] = (entry.record for entry in Store(here / "cache").entries())
    assert (record.kernel, record.provenance, record.check["passed"]) == (NAME, "measured", True)
    assert len(record.check["cases"]) > 3


def test_a_traced_step_is_tuned(here, default_configs):
    names = {}
    exec(compile(TRACE, "your-kernels.md", "exec"), names)
    assert {entry.record.kernel for entry in Store(here / "cache").entries()} == {NAME}
    assert json.loads((here / "plan.json").read_text())["problems"][0]["kernel"] == NAME
    forget()
    assert cli.main(["--plan", "plan.json", "--gpu", "H200", "--dry-run", "--specs", "my_kernels"]) == 0


def test_a_wanted_problem_waits_for_its_module(here):
    assert note_wanted(here / "cache", NAME, SIZES, H200.describe(), "miss")
    cache = WatchedCache(here / "cache", H200, "toolkit", PREDICTED)
    assert [(item.state, item.why) for item in cache.queue()] == [
        ("unknown", f"no kernel {NAME} here; if it is your own, pass --specs MODULE")
    ]
    kernels.add_specs("my_kernels")
    assert [item.state for item in cache.queue()] == ["waiting"]
    assert len(read_wanted(here / "cache")) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such", "the module my_kernels, which has specs of your own, cannot be imported: ModuleNotFound"),
        ("x = 1", "the module my_kernels has no specs; list its KernelSpecs in a tuple SPECS"),
        (
            "import dataclasses\nfrom tilekern.kernels.swiglu import SPECS as ours\n"
            "SPECS = [dataclasses.replace(ours[0], module=__name__)]",
            "two specs are named swiglu_forward, in tilekern.kernels.swiglu and my_kernels; rename one",
        ),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_used_is_one_line(here, capsys, text, message):
    (here / "my_kernels.py").write_text(text)
    assert cli.main(["--specs", "my_kernels", "--gpu", "H200", "--problem", "scale rows=1", "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert NAME not in all_specs()


def test_an_unknown_kernel_names_the_option(here, capsys):
    assert cli.main(["--gpu", "H200", "--problem", f"{NAME} rows=1", "--dry-run"]) == 2
    assert "A kernel of your own needs --specs MODULE" in capsys.readouterr().err
    with pytest.raises(InputError, match="a kernel of your own needs --specs MODULE or TILEKERN_SPECS"):
        spec_named(NAME)


def test_an_entry_point_is_enough(here, monkeypatch):
    info = here / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tilekern.specs]\nacme = my_kernels\n")
    forget()
    assert spec_named(NAME).module == "my_kernels"


def test_the_digest_covers_modules_beside_it(here):
    (here / "my_kernels.py").write_text("import my_helpers, json\n" + MODULE)
    (here / "my_helpers.py").write_text("import my_others\n")
    (here / "my_others.py").write_text("")
    found = source.files_of("my_kernels")
    assert {"my_kernels", "my_helpers", "my_others", "tilekern.kernels.families.elements"} <= set(found)
    assert "json" not in found
