"""How often each implementation of a kernel won, and by how much."""

import json

from tilekern.spec import Config, Problem
from tilekern.tuning.report import as_json
from tilekern.tuning.report.implementations import Standing, standings
from tilekern.tuning.report.page import _implementations
from tilekern.tuning.report.rows import Report, Row


def row(number, time_us, *, kernel="softmax_forward", rows=64, status="timed", earlier=False, **config):
    return Row(
        kernel, Problem(rows=rows), number, Config(config), "aligned", False, number == 0, False, status,
        measured_us=time_us, earlier_race=earlier,
    )  # fmt: skip


RACES = [
    [row(0, 10.0, occupancy=1), row(1, 9.0, occupancy=2), row(2, 8.0, implementation="cute")],
    [row(0, 30.0, rows=128, occupancy=1), row(1, 20.0, rows=128, implementation="cute")],
    [row(0, 30.0, rows=256, occupancy=1), row(1, 33.0, rows=256, implementation="cute")],
    [row(0, 5.0, kernel="linear", implementation="tile"), row(1, 4.0, kernel="linear", implementation="cublas")],
]


def test_each_implementation_has_its_wins_and_the_median_of_its_leads():
    assert standings(RACES) == [
        Standing("softmax_forward", "CuTe DSL", 3, 2, (9 / 8 + 30 / 20) / 2),
        Standing("softmax_forward", "cuTile", 3, 1, 33 / 30),
        Standing("linear", "cublas", 1, 1, 5 / 4),
        Standing("linear", "cuTile", 1, 0, None),
    ]


def test_only_what_raced_together_counts():
    alone = [row(0, 10.0, occupancy=1), row(1, None, status="failed", implementation="cute")]
    before = [row(0, 10.0, occupancy=1), row(1, 5.0, earlier=True, implementation="cute")]
    wrong = [row(0, 10.0, occupancy=1), row(1, 5.0, status="wrong", implementation="cute")]
    assert standings([alone, before, wrong]) == []
    assert _implementations([alone]) == ""


def test_page_and_json_have_them():
    page = _implementations(RACES)
    assert "<tr><td>softmax_forward</td><td>CuTe DSL</td><td>2 of 3</td><td>1.312 x</td></tr>" in page
    assert "<tr><td>linear</td><td>cuTile</td><td>0 of 1</td><td></td></tr>" in page
    report = Report("a model", {"name": "H200"}, {}, (), "", tuple(one for race in RACES for one in race))
    found = json.loads(as_json(report))["implementations"]
    assert found[0] == {
        "kernel": "softmax_forward", "implementation": "CuTe DSL", "raced": 3, "won": 2, "ahead": 1.3125,
    }  # fmt: skip
