"""The command line in one call, as a process, and what a refusal looks like."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema

from tilekern.cache_tools.cli import app, main

KEY = "rows=8192,columns=4096,dtype=bfloat16"
ROOT = Path(__file__).parents[2]
PREBUILT = ROOT / "tilekern" / "prebuilt"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "cache-json").glob("*.json")}
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}


def process(*arguments, **options):
    command = [sys.executable, "-m", "tilekern.cache_tools", *map(str, arguments)]
    usual = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, check=False, **usual | options)


def is_refusal(code, out, err, *words):
    """Return whether a command ended with one line on standard error that has these words."""
    assert (code, out) == (2, "")
    assert err.startswith("tilekern: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


class Commands:
    """The command line in this process, on the cache of ``TILEKERN_CACHE_DIR`` or the one that ``root`` names."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments, root=None):
        """Run a command: its exit code, standard output and standard error."""
        place = () if root is None else ("--cache-dir", root)
        code = main([str(argument) for argument in (*arguments, *place)])
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    def said(self, *arguments, code=0, root=None):
        """Run a command that must end with this code: what it prints."""
        found, out, err = self(*arguments, root=root)
        assert found == code, err
        return err if code == 2 else out

    def json(self, *arguments, code=0, root=None, may_warn=False):
        """Run a command that must end with this code and no complaint: its document, which is as its schema says."""
        found, out, err = self(*arguments, "--json", root=root)
        assert found == code, err
        assert may_warn or not err
        document = json.loads(out)
        VALIDATORS[app.commands[arguments[0]].name].validate(document)
        return document

    def refused(self, *arguments, says=(), root=None):
        is_refusal(*self(*arguments, root=root), *([says] if isinstance(says, str) else says))
