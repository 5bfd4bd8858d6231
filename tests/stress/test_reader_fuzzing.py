"""Every reader of a format is given what random changes and a coverage-guided fuzzer make of sound files."""

import importlib.util
import re
import subprocess
import sys

import pytest
from examples import profile, stressed
from test_cache_faults import ENVIRONMENT, HERE, judged, said

FUZZER = HERE / "reader_fuzzer.py"
OF_THE_CACHE = ("record", "key", "pack", "wanted", "misses", "signature", "roots", "pulled")
OF_CHECKPOINTS = ("safetensors", "index", "torch_file", "state_dict", "config")
READERS = (*OF_THE_CACHE, *OF_CHECKPOINTS)


def test_all_readers_of_the_fuzzer_are_run():
    for readers in (OF_THE_CACHE, OF_CHECKPOINTS):
        assert f"for read in ({', '.join(readers)})" in FUZZER.read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: it has no wheel here"
)
@pytest.mark.stress
@pytest.mark.nightly
@pytest.mark.parametrize("reader", READERS)
def test_a_fuzzed_reader_raises_nothing_of_its_own(tmp_path, reader):
    command = [sys.executable, FUZZER, reader, str(stressed(30, 2)), tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(re.findall(r"Done (\d+) runs", done.stderr)[0]) > 100, done.stderr[-3000:]


@pytest.mark.stress
def test_random_mutations_are_misses_or_errors_and_load_nothing_that_was_changed(tmp_path):
    number = 40_000 if profile == "thorough" else 500
    counts = judged(said(ENVIRONMENT, HERE / "mutations.py", tmp_path, 0, number))
    assert min(counts[f"{kind}: miss"] for kind in ("record", "blob", "pack")) > number / 20
    assert counts["unpacking: refused"] > number / 200
