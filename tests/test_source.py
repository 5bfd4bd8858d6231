"""The digest of a whole kernel module, which records of schemas 1 and 2 carry: blind to words, not to code."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from source_samples import forget, interpreter

from tilekern.kernels import all_specs
from tilekern.source import digests as source
from tilekern.source import whole_modules
from tilekern.source.digests import digest_of_module, digests_of, note_digests

ROOT = Path(__file__).parents[1]
CODE = '''"""A kernel."""

import math

from sample_kernels.shared import factor


def kernel(x):
    """Double x."""
    # a reason
    y = x * factor(2)  # twice

    return math.floor(y)
'''
SHARED = "def factor(n):\n    return n\n"
ALONE = "def alone():\n    return 1\n"


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Writes a package of kernels and digests one of its modules."""
    package = tmp_path / "sample_kernels"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(code=CODE, shared=SHARED, alone=ALONE, module="kernel"):
        for name, text in (("__init__", ""), ("kernel", code), ("shared", shared), ("alone", alone)):
            (package / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        forget()
        return digest_of_module(f"sample_kernels.{module}")

    yield digest
    forget()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A kernel."""', '"""A much better\n\ntext."""'),
        ('    """Double x."""\n', ""),
        ("    # a reason\n", ""),
        ("    # a reason\n", "# another\n  # one, of two lines\n"),
        ("\n\n    return", "\n    return"),
        ("import math\n", "import math\n\n\n\n"),
        ("math.floor(y)\n", "math.floor(y)   \n\n"),
        ("\n", "\r\n"),
    ],
    ids=["docstring", "no docstring", "no comment", "comment", "no blank line", "blank lines", "spaces", "line ends"],
)
def test_words_and_blanks_do_not_count(digest, old, new):
    assert old in CODE
    assert digest(CODE.replace(old, new)) == digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("factor(2)", "factor(3)"),
        ("def kernel(x):", "def kernel(x, z):"),
        ("math.floor", "math.ceil"),
        ("    return", "    y = y\n    return"),
        ("import math\n", "import math\nimport os\n"),
    ],
)
def test_code_counts(digest, old, new):
    assert old in CODE
    assert digest(CODE.replace(old, new)) != digest()


def test_text_that_is_a_value_counts(digest):
    code = 'NAME = "one"\n'
    assert digest(code) != digest(code.replace("one", "two"))
    long = 'NAME = """\n# one\n"""\n'
    assert digest(long) != digest(long.replace("one", "two")), "a line inside a string is no comment"


def test_siblings_that_are_imported_count_and_others_do_not(digest):
    before = digest()
    assert digest(shared=SHARED.replace("return n", "return n + 0")) != before
    assert digest(shared="# the same\n" + SHARED) == before
    assert digest(alone=ALONE.replace("1", "2")) == before


def test_siblings_of_siblings_and_cycles_count(digest):
    shared = "import sample_kernels.alone\nimport sample_kernels.kernel\n" + SHARED
    before = digest(shared=shared)
    assert digest(shared=shared, alone=ALONE.replace("1", "2")) != before


def test_a_sibling_that_is_imported_from_the_package_counts(digest):
    code = CODE.replace("from sample_kernels.shared import factor", "from sample_kernels import shared")
    assert digest(code, shared=SHARED.replace("return n", "return n + 0")) != digest(code)


def test_the_module_is_not_run(digest):
    digest("raise SystemExit('was run')\n")
    assert "sample_kernels.kernel" not in sys.modules


@pytest.mark.parametrize(
    ("name", "said"),
    [("sample_kernels.nowhere", "nowhere"), ("no_such_package.kernel", "no_such_package"), ("sys", "sys")],
)
def test_a_module_without_source_is_named(digest, name, said):
    digest()
    with pytest.raises(ModuleNotFoundError, match=said):
        digest_of_module(name)


def test_noted_digests_hold_for_the_files_that_they_were_made_from_alone(digest, tmp_path, monkeypatch):
    before = digest()
    notes = tmp_path / "digests.json"
    note_digests(["sample_kernels.kernel", "sample_kernels.alone"], notes)
    monkeypatch.setattr(source, "NOTES", notes)
    monkeypatch.setattr(whole_modules, "digest_of_closure", lambda name: f"{name} is worked out")
    assert digest() == before
    assert digest(module="alone") != before
    assert digest(module="shared") == "sample_kernels.shared is worked out"
    assert digest(shared="# the same\n" + SHARED) == "sample_kernels.kernel is worked out"
    assert digest(alone="# the same\n" + ALONE) == before
    assert digest(code=CODE + "\n") == "sample_kernels.kernel is worked out"


@pytest.mark.slow
@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
@pytest.mark.nightly
def test_every_python_finds_the_same_digests(python):
    """A cache that was filled under one Python serves under another."""
    specs = sorted((spec.module, name) for name, spec in all_specs().items())
    code = (
        "from tilekern.source.digests import digests_of\n"
        f"for names in {specs!r}: print(*(getattr(digests_of(*names), d) for d in ('source', 'space', 'whole')))"
    )
    path = interpreter(python)
    if path is None:
        pytest.skip(f"{python} is not installed")
    found = subprocess.run([path, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    here = [digests_of(*names) for names in specs]
    assert found.stdout.splitlines() == [f"{one.source} {one.space} {one.whole}" for one in here]
