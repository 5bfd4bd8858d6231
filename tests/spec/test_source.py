"""The digest of a kernel's source covers code, wherever it is, and no words."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tilekern.kernels import all_specs
from tilekern.spec import python_of, source
from tilekern.spec.source import files_of, note_digests, source_digest

ROOT = Path(__file__).parents[2]
CODE = '''"""A kernel."""

import math

from sample_kernels.shared import factor


def kernel(x):
    """Double x."""
    # a reason
    y = x * factor(2)  # twice

    return math.floor(y)
'''
FILES = {
    "__init__": "",
    "kernel": CODE,
    "shared": "def factor(n):\n    return n\n",
    "alone": "def alone():\n    return 1\n",
}


def forget():
    for kept in (source_digest, source._find, source._hash_of, source._notes, source._parsed):
        kept.cache_clear()


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Write a package of kernels, and return the digest of one of its modules."""
    package = tmp_path / "sample_kernels"
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(module="kernel", **files):
        shutil.rmtree(package, ignore_errors=True)
        for name, text in (FILES | files).items():
            path = package.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        forget()
        return source_digest(f"sample_kernels.{module}")

    yield digest
    forget()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A kernel."""', '"""A much better\n\ntext."""'),
        ('    """Double x."""\n', ""),
        ("    # a reason\n", "# another\n  # one, of two lines\n"),
        ("\n\n    return", "\n    return"),
        ("import math\n", "import math\n\n\n\n"),
        ("math.floor(y)\n", "math.floor(y)   \n\n"),
        ("\n", "\r\n"),
    ],
    ids=["docstring", "no docstring", "comment", "no blank line", "blank lines", "spaces", "line ends"],
)
def test_words_and_blanks_do_not_count(digest, old, new):
    assert old in CODE
    assert digest(kernel=CODE.replace(old, new)) == digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("factor(2)", "factor(3)"),
        ("def kernel(x):", "def kernel(x, z):"),
        ("math.floor", "math.ceil"),
        ("    return", "    y = y\n    return"),
        ("import math\n", "import cmath as math\n"),
        ("import math\n", "from math import floor as factor\n"),
        ("import factor", "import factor_of as factor"),
    ],
)
def test_code_counts(digest, old, new):
    assert old in CODE
    assert digest(kernel=CODE.replace(old, new)) != digest()


def test_text_that_is_a_value_counts(digest):
    for code in ('NAME = "one"\n', 'NAME = """\n# one\n"""\n'):
        assert digest(kernel=code) != digest(kernel=code.replace("one", "two"))


IMPORTS = {
    "from sample_kernels.shared import factor": "factor",
    "from sample_kernels import shared": "shared.factor",
    "from .shared import factor": "factor",
    "from . import shared": "shared.factor",
    "import sample_kernels.shared": "sample_kernels.shared.factor",
}


@pytest.mark.parametrize("line", IMPORTS)
@pytest.mark.parametrize("inside", [False, True], ids=["at the top", "inside a function"])
def test_a_module_that_is_imported_counts(digest, line, inside):
    code = f"def kernel(x):\n    {line}\n    return x\n" if inside else f"{line}\ndef kernel(x):\n    return x\n"
    before = digest(kernel=code)
    assert digest(kernel=code, shared=FILES["shared"].replace("return n", "return n + 0")) != before
    assert digest(kernel=code, shared="# the same\n" + FILES["shared"]) == before
    assert digest(kernel=code, alone=FILES["alone"].replace("1", "2")) == before


def test_a_kernel_that_is_named_by_a_text_counts(digest):
    code = 'KERNEL = "sample_kernels.shared:factor"\n'
    before = digest(kernel=code)
    assert digest(kernel=code, shared=FILES["shared"].replace("return n", "return n + 0")) != before


def test_a_package_counts_where_names_are_taken_of_it(digest):
    code = "from sample_kernels import factor\n"
    one, other = (f"factor = {number}\n" for number in (1, 2))
    assert digest(kernel=code, __init__=one) != digest(kernel=code, __init__=other)
    code = "from sample_kernels import shared\n"
    assert digest(kernel=code, __init__=one) == digest(kernel=code, __init__=other)


def test_modules_that_import_each_other_count(digest):
    shared = "import sample_kernels.alone\nimport sample_kernels.kernel\n" + FILES["shared"]
    assert digest(shared=shared, alone=FILES["alone"].replace("1", "2")) != digest(shared=shared)


def test_a_file_may_be_moved(digest):
    moved = CODE.replace("sample_kernels.shared", "sample_kernels.common.factors")
    before = digest()
    assert digest(kernel=moved, **{"common.__init__": "", "common.factors": FILES["shared"]}) == before
    assert digest(renamed=CODE, module="renamed") == before


def test_the_module_is_not_run(digest):
    digest(kernel="raise SystemExit('was run')\n")
    assert "sample_kernels.kernel" not in sys.modules


@pytest.mark.parametrize("name", ["sample_kernels.nowhere", "no_such_package.kernel", "sys"])
def test_a_module_without_source_is_named(digest, name):
    digest()
    with pytest.raises(ModuleNotFoundError, match=name):
        source_digest(name)


def test_noted_digests_hold_while_their_files_are_the_same(digest, tmp_path, monkeypatch):
    before = digest()
    note_digests(["sample_kernels.kernel", "sample_kernels.alone"], tmp_path / "digests.json")
    monkeypatch.setattr(source, "NOTES", tmp_path / "digests.json")
    monkeypatch.setattr(source, "_digest", lambda _: "parsed")
    assert digest() == before
    assert digest("shared") == "parsed"
    assert digest(shared="# the same\n" + FILES["shared"]) == "parsed"
    assert digest(alone="# the same\n" + FILES["alone"]) == before
    assert digest(kernel=CODE + "\n") == "parsed"


def test_a_checkout_keeps_its_digests_as_python_keeps_bytecode(tmp_path, monkeypatch):
    kept = tmp_path / "__pycache__" / "source.json"
    monkeypatch.setattr(source, "_KEPT", kept)
    monkeypatch.setattr(source, "NOTES", tmp_path / "none")
    names = ["tilekern.kernels.rms_norm", "tilekern.kernels.swiglu"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    made = [*map(source_digest, names)]
    assert not kept.exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    forget()
    assert [*map(source_digest, names)] == made
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(source, "files_of", None)
        assert [*map(source_digest, names)] == made
    assert [path.name for path in kept.parent.iterdir()] == ["source.json"]
    kept.write_text("{", encoding="utf-8")
    forget()
    assert [*map(source_digest, names)] == made
    assert kept.read_text(encoding="utf-8").count("digest") == 2
    forget()


def test_the_digest_of_a_spec_covers_all_that_it_is_made_of():
    """Nothing that decides what a spec compiles to, or what it may choose from, is outside of the files."""
    for spec in all_specs().values():
        files = files_of(spec.module)
        fields = (spec.implement, spec.default, spec.generic, *(made.holds for made in spec.space.constraints))
        for field in fields:
            function = python_of(getattr(field, "func", field))
            assert function.__module__ in files, (spec.name, function)


def interpreter(python):
    """Return the path of another Python: on PATH, or one of pyenv's, whose shims may lead nowhere."""
    for path in (*Path.home().glob(f".pyenv/versions/*/bin/{python}"), shutil.which(python)):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["python3.12", "python3.13", "python3.14"])
def test_every_python_finds_the_same_digests(python):
    """A cache that was filled under one Python serves under another."""
    path = interpreter(python)
    if path is None:
        pytest.skip(f"{python} is not installed")
    modules = sorted({spec.module for spec in all_specs().values()})
    code = f"from tilekern.spec.source import source_digest\nfor name in {modules!r}: print(source_digest(name))"
    found = subprocess.run([path, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [source_digest(name) for name in modules]
