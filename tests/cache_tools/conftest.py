import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))
from cache_samples import B200, PROBLEM, put, toolkit

from tilekern.cache_tools.__main__ import main


@pytest.fixture
def root(tmp_path):
    """The cache that `cli` works on; it is not there yet."""
    return tmp_path / "cache"


@pytest.fixture
def cache(root):
    """Three records: two on the H200 (one of them predicted), one on the B200."""
    put(root, b"one" * 100)
    put(root, b"two" * 100, problem={**PROBLEM, "rows": 1024}, provenance="predicted", measurement=None)
    put(root, b"three" * 100, target=B200, toolkit=toolkit("13.5.0"), kernel="swiglu", created="2020-01-01T00:00:00Z")
    return root


@pytest.fixture
def cli(root, capsys, monkeypatch):
    """Run a command on the cache, 120 columns wide: its exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments, root=root):
        code = main([*arguments, "--cache-dir", str(root)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def as_json(cli):
    def run(*arguments, code=0, **options):
        found, out, err = cli(*arguments, "--json", **options)
        assert (found, err) == (code, "")
        return json.loads(out)

    return run
