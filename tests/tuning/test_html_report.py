"""The rows of a report, their dumps, and the page's text; a browser is not needed here."""

import csv
import dataclasses
import errno
import gzip
import io
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_samples import COPY_US, CRASH, FAILURE, GPU, LARGE, RIGHT, WRONG, measured, planned
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.spec import Config
from tilekern.tuning import cli
from tilekern.tuning.publishing import winners
from tilekern.tuning.report import Report, Row, as_csv, as_html, as_json, report_of, write_report
from tilekern.tuning.report.columns import frontier, problems_of
from tilekern.tuning.report.rows import LEFT_OUT, STATUSES
from tilekern.tuning.sweep.folder import Sweep

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("data") / "qwen3-8b-h200.json.gz"
TOOLKIT = {"key": "none"}


@pytest.fixture
def sweep(compiled_sweep: Sweep, tmp_path: Path) -> Sweep:
    return measured(compiled_sweep, tmp_path / "sweep")


@pytest.fixture(scope="module")
def unchanged(compiled_sweep: Sweep, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return measured(compiled_sweep, tmp_path_factory.mktemp("report") / "sweep")


@pytest.fixture(scope="module")
def report(unchanged: Sweep) -> Report:
    return report_of(unchanged)


def of_small(report: Report) -> list[Row]:
    return [row for row in report.rows if row.problem == SMALL[1]]


def test_every_candidate_has_a_row_with_its_state(report: Report, unchanged: Sweep):
    rows = of_small(report)
    assert [row.number for row in rows] == list(range(len(unchanged.candidates(*SMALL))))
    assert [(row.config, row.variant) for row in rows] == [(c.config, c.variant) for c in unchanged.candidates(*SMALL)]
    said = {row.number: (row.status, row.reason) for row in rows if row.number in range(8)}
    assert said == {
        0: ("timed", None),
        1: ("timed", None),
        2: ("wrong", WRONG["reason"]),
        3: ("quarantined", CRASH),
        4: ("failed", FAILURE),
        5: ("compiled", None),
        6: ("checked", None),
        7: ("duplicate", None),
    }
    assert rows[7].same_as == 1
    assert (rows[2].relative_error, rows[2].elementwise_error) == (float("inf"), 0.9)
    assert rows[-1].variant == "generic"
    assert {row.problem for row in report.rows} == {SMALL[1], LARGE[1]}


def test_who_was_left_out_of_a_race_says_so(sweep: Sweep):
    item = sweep.candidates(*SMALL)[6]
    race = {"race": "2", "kernel": SMALL[0], "problem": SMALL[1].key, "gpu": {}, "strategy": "race"}
    sweep.note("races", race | {"untimed": {item.key: None}})
    rows = of_small(report_of(sweep))
    assert (rows[6].status, rows[6].reason) == ("checked", LEFT_OUT)
    assert rows[5].reason is None


def test_times_and_what_they_are_worth(report: Report):
    default, winner, *others = of_small(report)
    assert (default.default, winner.winner) == (True, True)
    assert not any(row.default or row.winner for row in others)
    assert (winner.time_us, winner.measured_us, winner.spread_us, winner.samples) == (5.0, 5.0, 0.1, 85)
    assert (winner.share_of_roofline, winner.gain_over_default) == (COPY_US / 5.0, 2.0)
    assert (default.share_of_roofline, default.gain_over_default) == (COPY_US / 10.0, 1.0)
    moved = 4 * 256 * 128 + 2 * 128  # a float32 matrix is read, its bfloat16 sums are written
    assert winner.gigabytes_per_s == pytest.approx(moved / 5.0 / 1e3, abs=1e-3)
    assert winner.teraflops == pytest.approx(256 * 128 / 5.0 / 1e6, abs=1e-3)
    untimed = [row for row in others if row.status != "timed"]
    assert all(row.time_us is row.measured_us is row.gain_over_default is row.provenance is None for row in untimed)
    assert all(row.predicted_us > 0 for row in others if row.status == "wrong")


def test_the_winners_figures_are_those_of_the_records(report: Report, unchanged: Sweep):
    rows = {(row.kernel, row.problem): row for row in report.rows if row.winner}
    published = [winner for winner, _ in winners(unchanged, TOOLKIT)]
    assert len(rows) == len(published) == 2
    for winner in published:
        row = rows[winner.kernel, winner.problem]
        assert row.config == Config(winner.record.config)
        assert row.provenance == winner.record.provenance == "measured"
        assert row.time_us == winner.time_us
        assert row.share_of_roofline == pytest.approx(winner.share, abs=1e-4)
        assert row.gain_over_default == pytest.approx(winner.gain, abs=1e-4)


def test_what_the_compiler_made_is_told(report: Report, unchanged: Sweep):
    facts = unchanged.compiled()
    for row, item in zip(of_small(report), unchanged.candidates(*SMALL), strict=True):
        if row.status != "failed":
            found = facts[item.artifact]["resources"]
            assert {name: getattr(row, name) for name in found if hasattr(row, name)} == found
            assert row.resident_blocks >= 1


def test_a_timing_of_an_earlier_race_is_marked(sweep: Sweep):
    items = sweep.candidates(*SMALL)
    line = {"candidate": items[1].key, "check": RIGHT, "timing": {"median_us": 5.0, "samples": 85}}
    sweep.note("measured", line | {"race": "second"})
    sweep.note("races", {"race": "second", "kernel": SMALL[0], "problem": SMALL[1].key, "gpu": GPU, "strategy": "race",
                         "untimed": {}})  # fmt: skip
    default, winner, *others = of_small(report_of(sweep))
    assert (default.earlier_race, winner.earlier_race) == (True, False)
    assert {row.earlier_race for row in others if row.measured_us is None} == {None}


@pytest.mark.slow
def test_a_sweep_without_measurements_never_says_measured(compiled_sweep: Sweep, tmp_path: Path):
    report = report_of(planned(compiled_sweep, tmp_path / "sweep"))
    assert not report.is_measured
    assert {row.provenance for row in report.rows if row.variant == "aligned"} == {"predicted"}
    for row in report.rows:
        assert row.measured_us is row.spread_us is row.samples is None
        assert row.time_us == row.predicted_us
    assert sum(row.winner for row in report.rows) == 2
    page = as_html(report)
    assert "Nothing was measured: all times are predicted" in page
    drawn = data_of(page)["text"]
    assert "predicted" in drawn
    assert not re.search(r"measured(?!_us)", drawn)


def test_a_plan_without_compiled_candidates_has_a_report(h200, tmp_path: Path):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [SMALL])
    report = report_of(sweep)
    assert {row.status for row in report.rows} == {"planned"}
    assert all(row.time_us is None for row in report.rows)
    assert "no winner" in as_html(report)
    assert report.date == ""


def test_an_empty_plan_has_a_report(h200, tmp_path: Path):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [])
    csv_file, json_file, page = write_report(report_of(sweep), tmp_path)
    assert csv_file.read_text().count("\n") == 1
    assert json.loads(json_file.read_text())["rows"] == []
    assert "The plan names no problem." in page.read_text()


def test_csv_and_json_hold_the_same_rows(report: Report):
    found = json.loads(as_json(report), parse_constant=pytest.fail)
    assert (found["format"], found["model"], found["gpu"]) == (1, "Test-1B <b>", GPU)
    assert found["target"]["key"] == "sm_90-h200-132"
    assert found["date"].startswith("20")
    lines = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert len(found["rows"]) == len(lines) == len(report.rows)
    fields = [field.name for field in dataclasses.fields(Row)]
    for row, entry, line in zip(report.rows, found["rows"], lines, strict=True):
        assert list(entry) == list(line) == fields
        assert (entry["problem"], entry["config"]) == (dict(row.problem), dict(row.config))
        assert (line["problem"], line["config"]) == (row.problem.key, row.config.key)
        assert line["winner"] == str(int(row.winner))
        for name in ("time_us", "registers", "samples", "share_of_roofline"):
            assert entry[name] == getattr(row, name)
            assert line[name] == ("" if entry[name] is None else str(entry[name]))
    assert found["rows"][2]["relative_error"] is None
    assert lines[2]["relative_error"] == "inf"


def test_the_documentation_names_every_field_and_status():
    text = (ROOT / "docs" / "tuning-report.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert named == [*(field.name for field in dataclasses.fields(Row)), *STATUSES]


class _Tags(HTMLParser):
    """The tags of a page and the text of each script."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.data = ""
        self._at = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._at = dict(attrs).get("id") or tag

    def handle_data(self, data):
        if self._at == "report-data":
            self.data += data


def data_of(page: str) -> dict:
    text = _Tags(page).data
    return {"text": text, "item": json.loads(text)}


def test_the_page_loads_nothing_and_escapes_what_a_sweep_says(report: Report):
    page = as_html(report)
    tags = _Tags(page).tags
    assert not [(tag, found) for tag, found in tags if {"src", "href"} & set(found)]
    assert not [tag for tag, _ in tags if tag in ("link", "iframe", "img", "object", "b")]
    [policy] = [found["content"] for tag, found in tags if found.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "Tuning of Test-1B &lt;b&gt; on H200" in page
    assert "out of registers" in json.dumps(data_of(page)["item"])
    for fact in ("NVIDIA H200", GPU["driver"], report.toolkits[0], "sm_90, 132 SMs", "UTC"):
        assert fact in page


def recorded() -> list[Row]:
    rows = json.loads(gzip.decompress(RECORDED.read_bytes()))["rows"]
    return [
        Row(row["kernel"], SMALL[1], at, Config(row["config"]), "aligned", False, False, False, "timed",
            provenance="measured", time_us=row["median_us"], registers=row["resources"]["registers"])
        for at, row in enumerate(rows)
    ]  # fmt: skip


def test_nothing_beats_the_frontier_of_registers_and_time():
    rows = recorded()
    chosen = frontier([*rows, dataclasses.replace(rows[0], time_us=None), dataclasses.replace(rows[0], registers=None)])
    assert len(chosen) >= 3

    def beats(row: Row, other: Row) -> bool:
        better = (row.registers < other.registers, row.time_us < other.time_us)
        return row.registers <= other.registers and row.time_us <= other.time_us and any(better)

    assert not [(row, other) for row in rows for other in chosen if beats(row, other)]
    for row in rows:
        reached = [other for other in chosen if other.registers <= row.registers and other.time_us <= row.time_us]
        assert reached, row


def test_problems_come_in_the_order_of_the_plan_and_the_fastest_first(report: Report):
    small, large = problems_of(report.rows)
    assert (small[0].problem, large[0].problem) == (SMALL[1], LARGE[1])
    assert small[0].winner
    times = [row.time_us for row in small if row.time_us is not None]
    assert times == sorted(times)
    assert all(row.time_us is None for row in small[len(times) :])


def fail_with(number: int) -> None:
    raise OSError(number, os.strerror(number))


def run(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_writes_all_three_and_the_same_sweep_gives_the_same_files(sweep: Sweep, tmp_path: Path, capsys):
    assert run(sweep.folder) == 0
    printed = [Path(path) for path in capsys.readouterr().out.split()]
    assert printed == [sweep.folder / f"report.{form}" for form in ("csv", "json", "html")]
    assert printed[0].read_text() == as_csv(report_of(sweep))
    assert printed[1].read_text() == as_json(report_of(sweep))
    (tmp_path / "again").mkdir()
    again = write_report(report_of(Sweep(sweep.folder)), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in printed]


def test_the_command_writes_the_forms_that_are_asked_for(sweep: Sweep, tmp_path: Path):
    assert run(sweep.folder, "--csv", tmp_path / "rows.csv") == 0
    assert (tmp_path / "rows.csv").read_text() == as_csv(report_of(sweep))
    assert not list(sweep.folder.glob("report.*"))


def test_a_form_goes_to_standard_output_where_the_file_is_a_dash(sweep: Sweep, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.json"
    assert run(sweep.folder, "--csv", "-", "--json", page) == 0
    said = capsys.readouterr()
    assert said.out == as_csv(report_of(sweep))
    assert said.err == f"{page}\n"
    assert not (tmp_path / "-").exists()
    assert run(sweep.folder, "--csv", "-", "--json", "-") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "standard output takes one form" in said.err


def test_a_report_that_finds_no_place_leaves_the_one_that_was_there(sweep: Sweep, tmp_path: Path, monkeypatch, capsys):
    page = tmp_path / "rows.csv"
    page.write_text("an earlier report")
    monkeypatch.setattr("os.replace", lambda *_, **__: fail_with(errno.ENOSPC))
    assert run(sweep.folder, "--csv", page) == 2
    assert capsys.readouterr().err == f"tilekern: cannot write {page}: {os.strerror(errno.ENOSPC)}\n"
    assert page.read_text() == "an earlier report"
    assert list(tmp_path.glob(".*")) == []


def test_a_report_goes_through_a_link(sweep: Sweep, tmp_path: Path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "rows.csv")
    assert run(sweep.folder, "--csv", tmp_path / "link.csv") == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "rows.csv").read_text() == as_csv(report_of(sweep))


def test_a_report_goes_into_a_pipe(sweep: Sweep, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(pipe.read_text)
        assert run(sweep.folder, "--csv", pipe) == 0
        assert found.result(30) == as_csv(report_of(sweep))
    assert pipe.is_fifo()


def test_without_bokeh_the_extra_is_named_and_the_rest_is_written(sweep: Sweep, monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setitem(sys.modules, "bokeh", None)  # importing it fails, as where it is not installed
    assert run(sweep.folder) == 2
    assert "pip install 'tilekern[report]'" in capsys.readouterr().err
    assert sorted(path.name for path in sweep.folder.glob("report.*")) == ["report.csv", "report.json"]
    assert run(sweep.folder, "--csv", tmp_path / "a.csv", "--json", tmp_path / "a.json") == 0


def test_bad_input_is_one_line(sweep: Sweep, tmp_path: Path, capsys):
    assert run(tmp_path / "nothing") == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert run(sweep.folder, "--csv", tmp_path / "no" / "a.csv") == 2
    error = capsys.readouterr().err
    assert "cannot write" in error
    assert error.count("\n") == 1
    with pytest.raises(InputError, match="cannot write"):
        write_report(report_of(sweep), tmp_path / "no")
