"""Files that nest too deeply for Python's parser are damaged like others: an error in one line, or passed over."""

import shutil
from pathlib import Path

import pytest

from tilekern.errors import InputError
from tuning import quarantine
from tuning.models import find_model
from tuning.planned import PlanFile
from tuning.refreshing import Refresh
from tuning.service.history import History

DEEP = "[" * 100_000
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("name", "read", "said"),
    [
        ("config.json", lambda path: find_model(str(path)), "is not a readable JSON file"),
        ("sweep.json", lambda path: PlanFile(path.parent).read(), "cannot be read"),
        ("refresh.json", lambda path: Refresh(path.parent).current, "cannot be read"),
    ],
)
def test_what_is_needed_is_named(tmp_path, name, read, said):
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_line_of_the_history_and_a_file_of_the_quarantine_are_passed_over(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "cache")
    history = tmp_path / "cache" / "service" / "history.jsonl"
    (folder,) = (tmp_path / "cache" / "quarantine").iterdir()
    before = History(history).last(10), list(quarantine._read(folder))
    with history.open("a") as file:
        file.write(f"{DEEP}\n")
    (folder / f"{'0' * 64}.json").write_text(DEEP)
    assert all(before)
    assert (History(history).last(10), list(quarantine._read(folder))) == before
