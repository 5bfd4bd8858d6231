"""No command prints control characters, whatever is in the files that it reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cache_samples import B200, PROBLEM, changed, make, put, sealed

from tilekern.cache_tools.__main__ import main
from tilekern.warning import printable, tell, warn

COMMAND = Path(sys.executable).with_name("tilekern-cache")
EVIL = "\x1b[2J\x1b]0;owned\x07\r\x08\x9b31m\u202e"


@pytest.fixture
def evil(tmp_path):
    """A cache of evil names, reasons and contents."""
    root = tmp_path / f"cache {EVIL}"
    put(root, b"one")
    put(root, b"two", target={**B200, "name": EVIL}, created_by=EVIL, measurement={"median_us": 3.0, EVIL: EVIL},
        check={EVIL: [EVIL]}, runners_up=[{EVIL: EVIL}], kernel="swiglu")  # fmt: skip
    folder = (root / make()[0].address.path).parent
    (folder / f"rows=1{EVIL}\nforged.json").write_text(sealed(make()[0].to_json()))
    (folder / "rows=2.json").write_text(changed(make()[0], created=EVIL))
    (folder / "rows=3.json").write_text("{" + EVIL)
    os.makedirs(os.fsencode(root) + b"/v1/blobs/\xff\x1b[2J")
    wanted = {"schema": 1, "kernel": "rope", "problem": {"rows": 1}, "target": {"name": EVIL, "key": "k"}}
    (root / "v1/wanted").mkdir()
    (root / "v1/wanted" / ("0" * 64 + ".json")).write_text(
        json.dumps(wanted | {"reason": EVIL, "created": "2026-01-01T00:00:00Z"})
    )
    (root / f"v1/{EVIL}.bad").write_text("")
    return root


@pytest.mark.parametrize(
    "command",
    [
        ["ls"], ["ls", "--layers"], ["stats"], ["verify"], ["wanted"], ["why", "swiglu_forward", "rows=1,columns=2"],
        ["show", "swiglu", ",".join(f"{name}={value}" for name, value in PROBLEM.items())],
        ["show", "rms_norm", ",".join(f"{name}={value}" for name, value in PROBLEM.items())],
        ["diff", "CACHE", "CACHE"], ["prune", "--max-size", "0", "--dry-run"], ["clear", "--all", "--yes"],
        ["pack", "CACHE.pack"], ["unpack", EVIL], ["verify", EVIL], ["show", EVIL, EVIL], ["ls", "--gpu", EVIL],
        ["pull", f"file:///{EVIL}"], ["revoke", EVIL, "--key", EVIL, "--out", EVIL], [EVIL], ["ls", f"--{EVIL}"],
    ],
)  # fmt: skip
def test_no_command_prints_what_a_terminal_would_obey(evil, capsys, monkeypatch, command):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(evil))
    monkeypatch.setenv("COLUMNS", "100")
    main([word.replace("CACHE", str(evil)) for word in command])
    said = capsys.readouterr()
    assert said.out + said.err
    for line in (said.out + said.err).split("\n"):
        assert line.isprintable(), line
        assert not line.startswith("forged")


def test_what_is_printable_stays_as_it_is(capfd):
    for text in ("", "rows=8192, µs é 漢字", "a\\x1b"):
        assert printable(text) == text
    assert printable("a\tb\n\x1b\x7f\x9b\u202e\udcff") == r"a\tb\n\x1b\x7f\x9b\u202e\udcff"
    tell("one\n", "two", err=True)
    tell("three")
    assert capfd.readouterr() == ("three\n", "one\\n\ntwo\n")


def test_warnings_are_printable():
    with pytest.warns(RuntimeWarning, match=r"^a \\x1b\[2J b$"):
        warn("a \x1b[2J\n b")


@pytest.mark.processes
@pytest.mark.skipif(not COMMAND.exists(), reason="tilekern is not installed here")
def test_the_installed_command_runs_nothing_of_the_folder_that_it_is_run_in(tmp_path):
    """`python -m` does, which docs/trust.md says."""
    for name in ("cache_tools", "click", "msgspec", "tilekern"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [COMMAND, "stats", "--cache-dir", "cache"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "there is no cache at cache yet\n", done.stderr
    assert not (tmp_path / "ran").exists()
    subprocess.run([sys.executable, "-m", "tilekern.cache_tools"], cwd=tmp_path, env=environment, check=False)
    assert (tmp_path / "ran").exists()
