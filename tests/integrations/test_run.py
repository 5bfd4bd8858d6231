"""``python -m tilekern.run``: what a program finds under it, what is patched, and how programs end."""

import os
import re
import subprocess
import sys

import pytest
from environments import ROOT, python_path
from transformers.models.qwen3 import modeling_qwen3

import tilekern
from tilekern.patch import patcher
from tilekern.patch.families import FAMILIES
from tilekern.run import main
from tilekern.runtime.switches import OPS

SERVED = list(FAMILIES["qwen3"].ops)
FACTS = """
import sys, tilekern
patched = [op for op, places in tilekern.get_patched_ops().items() if ".qwen3." in str(places)]
facts = [__name__, __file__, [*sys.argv], sys.path[0], patched]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, unpatched):
    """An empty folder that is the current one; what programs change of this process is put back."""
    tmp_path = tmp_path.resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TILEKERN_APPLY", "0")
    # Other tests may have imported other families, which take a second.
    monkeypatch.setattr(patcher, "imported", lambda: [modeling_qwen3.__name__])
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "a_trainer"]:
        del sys.modules[name]


def script(folder, code):
    (folder / "elsewhere" / "train.py").write_text(code)
    return os.path.join("elsewhere", "train.py")


def told(arguments, monkeypatch):
    """The facts of a program that ends by itself, which it leaves in a module."""
    monkeypatch.setattr(tilekern, "facts", None, raising=False)
    assert main(arguments) == 0
    return tilekern.facts


def test_a_script_finds_what_it_finds_under_python(folder, monkeypatch):
    path = script(folder, FACTS + "tilekern.facts = facts\n")
    arguments = ["--no-rope", "--no-rms_norm", path, "--lr", "1", "--no-swiglu", "-m", "--", "x"]
    name, file, argv, first, ops = told(arguments, monkeypatch)
    assert (name, file) == ("__main__", str(folder / path))
    assert argv == [str(folder / path), "--lr", "1", "--no-swiglu", "-m", "--", "x"]
    assert first == str(folder / "elsewhere")
    assert ops == [op for op in SERVED if op not in ("rope", "rms_norm")]
    assert os.environ["TILEKERN_APPLY"] == "-rms_norm,-rope"


def test_a_script_that_is_linked_finds_its_neighbours(folder, monkeypatch):
    (folder / "link.py").symlink_to(script(folder, FACTS + "tilekern.facts = facts\n"))
    name, file, argv, first, ops = told(["link.py"], monkeypatch)
    link = str(folder / "link.py")
    assert (name, file, argv, first) == ("__main__", link, [link], str(folder / "elsewhere"))
    assert ops == SERVED
    assert os.environ["TILEKERN_APPLY"] == "1"


@pytest.mark.parametrize(("module", "file"), [("a_trainer", "__main__.py"), ("a_trainer.part", "part.py")])
def test_a_module_finds_what_it_finds_under_python(folder, monkeypatch, module, file):
    (folder / "a_trainer").mkdir()
    (folder / "a_trainer" / "__init__.py").write_text("")
    (folder / "a_trainer" / file).write_text(FACTS + "tilekern.facts = [*facts, __package__]\n")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    path = str(folder / "a_trainer" / file)
    name, found, argv, first, ops, package = told(["-m", module, "-x", "--forms", "1"], monkeypatch)
    assert (name, found, package) == ("__main__", path, "a_trainer")
    assert argv == [path, "-x", "--forms", "1"]
    assert first == str(folder)
    assert ops == SERVED


def test_the_choices_of_a_program_that_calls_apply_itself_win(unpatched):
    tilekern.apply(rope=False)
    places = tilekern.get_patched_ops()
    patcher.apply_first(swiglu=False)
    assert tilekern.get_patched_ops() == places


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "SCRIPT|MODULE"),
        (["--no-conv", "train.py"], "--no-conv"),
        (["--forms", "all", "train.py"], "tested"),
        (["missing.py"], "missing.py cannot be run: No such file or directory; give the path of a script"),
        (["elsewhere"], "elsewhere cannot be run: can't find '__main__' module"),
        (["-m", "a_trainer_that_is_missing"], "No module named a_trainer_that_is_missing"),
        (["-m", "a_trainer_that_is_missing.part"], "No module named 'a_trainer_that_is_missing'"),
        (["-m", "json.missing"], "No module named json.missing"),
        (["-m", "json"], "'json' is a package and cannot be directly executed"),
        (["-m", ""], "cannot be run"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_said_in_one_line(folder, capsys, arguments, said):
    assert main(arguments) == 2
    out, errors = capsys.readouterr()
    (line,) = errors.splitlines()
    assert line.startswith("tilekern: ")
    assert said in line
    assert not out


def test_help_names_every_op(capsys):
    assert main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    assert not [op for op in OPS if f"--no-{op.replace('_', '-')}" not in words]


@pytest.mark.parametrize(("code", "end"), [("raise SystemExit(7)", 7), ("import sys; sys.exit('no')", "no")])
def test_a_program_s_exit_code_is_its_own(folder, code, end):
    with pytest.raises(SystemExit) as ended:
        main([script(folder, code)])
    assert ended.value.code == end


@pytest.mark.parametrize(
    ("code", "numbers"),
    [("def f():\n    open('missing')\nf()", [3, 2]), ("import missing_too", [1]), ("x = (", [1])],
    ids=["OSError", "ImportError", "SyntaxError"],
)
def test_a_program_s_traceback_begins_in_the_program(folder, capsys, code, numbers):
    """Errors of the kinds that say that there is no program are among them."""
    path = folder / script(folder, code)
    with pytest.raises((OSError, ImportError, SyntaxError)) as raised:
        main([str(path)])
    error = raised.value
    # The first frame is that of this function.
    sys.excepthook(type(error), error, error.__traceback__.tb_next)
    text = capsys.readouterr().err
    assert re.findall(r'File "(.*)", line (\d+)', text) == [(str(path), str(number)) for number in numbers]
    assert text.splitlines()[-1].startswith(type(error).__name__)


PROGRAM = """
import os, sys
print("torch" in sys.modules, "transformers" in sys.modules)
from transformers import Qwen3Config, Qwen3ForCausalLM
import tilekern
print(*tilekern.get_patched_ops(), os.environ["TILEKERN_APPLY"])
raise ValueError("its own")
"""


@pytest.mark.processes
@pytest.mark.nightly
def test_in_a_process_of_its_own_nothing_is_imported_in_advance(folder):
    path = script(folder, PROGRAM)
    env = os.environ | {"PYTHONPATH": python_path(ROOT)}
    command = [sys.executable, "-m", "tilekern.run", "--no-rope", path]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    early, patched = ran.stdout.splitlines()
    assert early == "False False"
    assert patched.split() == [*(op for op in SERVED if op != "rope"), "-rope"]
    first, second, *_, last = ran.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second == f'  File "{folder / path}", line 7, in <module>'
    assert last == "ValueError: its own"
