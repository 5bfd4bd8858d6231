"""The matrix of versions: its cells, its rows and its page."""

import json
import tomllib

import matrix
import pytest

CELLS = matrix.read_cells()
ROW = {"result": "passed", "reason": "", "parts": {"import": "passed"}, "date": "2026-01-02", "commit": "0123abcd"}


def test_the_lowest_cell_has_the_lowest_versions_that_the_project_allows():
    project = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text())["project"]
    torch, transformers, *_ = project["optional-dependencies"]["torch"]
    lowest = CELLS[0]
    assert project["requires-python"] == f">={lowest.python}"
    assert torch == f"torch>={lowest.torch.removesuffix('.0')}"
    assert transformers.startswith(f"transformers>={lowest.transformers.removesuffix('.0.0')},")
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_the_page_has_the_table_of_the_results():
    rows = {row["name"]: row for row in json.loads(matrix.RESULTS.read_text())}
    assert rows.keys() <= {cell.name for cell in CELLS}
    assert matrix.table(CELLS, rows) in matrix.PAGE.read_text()


def test_a_row_takes_the_place_of_its_cell_s_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "versions.md")
    matrix.PAGE.write_text("before\n\n| Python | old |\n|---|\n\nafter\n")
    first, second = CELLS[:2]
    matrix.write(CELLS, ROW | {"name": second.name})
    matrix.write(CELLS, ROW | {"name": first.name, "result": "failed", "reason": "trace: a | b"})
    matrix.write(CELLS[:2], ROW | {"name": second.name, "date": "2026-01-03"})
    rows = json.loads(matrix.RESULTS.read_text())
    assert [(row["name"], row["date"]) for row in rows] == [(first.name, "2026-01-02"), (second.name, "2026-01-03")]
    page = matrix.PAGE.read_text()
    assert page.startswith("before\n\n| Python | torch |")
    assert page.endswith(" |\n\nafter\n")
    assert "| failed: trace: a \\| b | passed |" in page


def test_a_python_that_is_not_here_makes_its_cell_unavailable(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(matrix.UnavailableError, match=r"no interpreter python3\.99"):
        matrix.interpreter("3.99")


def test_counts_are_those_of_the_last_line():
    assert matrix.counts("2 failed, 7 passed, 28 deselected in 9.7s") == "2 failed, 7 passed"
    assert matrix.counts("no tests ran in 0.01s") == "no tests ran in 0.01s"
