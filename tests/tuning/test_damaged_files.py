"""Files that nest too deeply for Python's parser are damaged like others: an error in one line, or passed over."""

import json
import shutil
from pathlib import Path

import pytest

from tilekern.errors import InputError
from tilekern.tuning.plan.configs import config_named
from tilekern.tuning.refreshing import Refresh
from tilekern.tuning.serve.history import Failures
from tilekern.tuning.sweep import quarantine
from tilekern.tuning.sweep.plan import PlanFile

DEEP = "[" * 100_000
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("name", "read", "said"),
    [
        ("config.json", lambda path: config_named(str(path)), "is not valid JSON"),
        ("sweep.json", lambda path: PlanFile(path.parent).read(), "cannot be read"),
        ("refresh.json", lambda path: Refresh(path.parent).current, "cannot be read"),
    ],
)
def test_what_is_needed_is_named(tmp_path, name, read, said):
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_of_the_quarantine_is_passed_over(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "cache")
    (folder,) = (tmp_path / "cache" / "quarantine").iterdir()
    before = list(quarantine._read(folder))
    (folder / f"{'0' * 64}.json").write_text(DEEP)
    assert before
    assert list(quarantine._read(folder)) == before


@pytest.mark.parametrize(
    "damage", [{"again_at": "soon"}, {"again_at": None}, {"tries": []}, {"tries": 1.5}, {"reason": 7}]
)
def test_a_failure_of_another_form_is_passed_over(tmp_path, damage):
    failures, state = Failures(tmp_path / "failed.jsonl"), {"source": "a"}
    failures.note("item", "the disk is full", state, passing=True)
    line = json.loads((tmp_path / "failed.jsonl").read_text())
    (tmp_path / "failed.jsonl").write_text(json.dumps(line | damage) + "\n")
    assert failures.why("item", state) is None
    failures.note("item", "it is full again", state, passing=True)
    assert failures.why("item", state) == "it is full again"


@pytest.mark.parametrize("kernel", [{}, [], None, 7])
def test_a_plan_of_no_kernel_at_all_is_of_another_version(tmp_path, kernel):
    plan = {"format": 1, "target": {"key": "k", "name": "n"}, "model": "m"}
    (tmp_path / "sweep.json").write_text(json.dumps(plan | {"problems": [{"kernel": kernel, "problem": {"rows": 1}}]}))
    with pytest.raises(InputError, match="that this version of tilekern does not have"):
        PlanFile(tmp_path).problems()
