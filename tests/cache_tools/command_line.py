"""Running the commands as a process, and what a refusal looks like."""

import subprocess
import sys
from pathlib import Path

KEY = "rows=8192,columns=4096,dtype=bfloat16"
ROOT = Path(__file__).parents[2]


def process(*arguments, **options):
    command = [sys.executable, "-m", "tilekern.cache_tools", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, **options)


def refused(outcome, *words):
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("tilekern: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words)
