"""The tests of families on the lowest release of transformers that tilekern supports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# The release, and packages of its time where it refuses the newest ones.
LOWEST = (
    "transformers==5.0.0",
    "huggingface_hub<2",
    "tokenizers<0.23",
    "kernels<0.11",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
)
FAMILIES = Path(__file__).with_name("test_model_families.py")
ROOT = FAMILIES.parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.nightly]


@pytest.fixture
def releases(tmp_path):
    """A folder with the lowest release, before what is installed."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", tmp_path]
    done = subprocess.run([*install, *LOWEST], check=False, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"pip cannot install {LOWEST[0]}: {done.stderr.strip().splitlines()[-1]}")
    return tmp_path


def test_patched_families_compute_what_they_do_on_the_lowest_release(releases):
    path = os.pathsep.join((str(releases), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rs", "-p", "no:cacheprovider", str(FAMILIES)]
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "an older transformers has fewer families" in done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 80
