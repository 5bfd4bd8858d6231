"""The choice of tests that a pull request runs."""

import subprocess
from pathlib import Path

import pytest
from rooms import FOLDERS, HEIGHT, ROOMS, changed_since, is_reached, reached

TESTS = Path(__file__).parent
DOORS = ROOMS[-1]


@pytest.mark.parametrize(
    ("paths", "rooms"),
    [
        ([], set()),
        (["SECURITY.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/bug.yml"], set()),
        (["README.md", "docs/tuning.md", "benchmarks/cli.py", "tilekern/prebuilt/a.pack"], set()),
        (["tilekern/patch/loss.py"], {"patch", "integrations", "fp8", "tuning", "cache_tools", *DOORS}),
        (["tuning/measure/stage.py", "tests/ops/contract.py"], {"tuning", "ops", *DOORS}),
        (["tests/stress/faults.c"], {"cache"}),
        (["tilekern/run.py"], {"run"}),
        (["tilekern/errors.py"], set(HEIGHT)),
        (["docs/a.md", "pyproject.toml"], None),
        (["tests/conftest.py"], None),
        (["tilekern/__init__.py"], None),
    ],
)
def test_a_change_reaches_its_room_and_those_above(paths, rooms):
    assert reached(paths) == rooms


def test_a_folder_of_tests_runs_when_its_room_is_reached_or_it_has_none():
    folders = [path.name for path in TESTS.iterdir() if any(path.glob("test_*.py"))]
    of_no_room = {FOLDERS.get(folder, folder) for folder in folders} - set(HEIGHT)
    assert of_no_room == {"benchmarks", "doors", "examples_run", "gpu", "prebuilt"}
    assert [is_reached(folder, {"cache"}) for folder in ("stress", "ops", "doors")] == [True, False, True]
    assert is_reached("ops", None)


@pytest.mark.processes
def test_new_files_are_changes(tmp_path):
    def git(*arguments):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("kept", "edited", "ignored", "new"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("ignored")
    git("add", "kept", "edited", ".gitignore")
    git("commit", "-q", "-m", "all")
    (tmp_path / "edited").write_text("text")
    assert changed_since("HEAD", tmp_path) == ["edited", "new"]
