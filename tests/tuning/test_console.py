"""Tables of the tuner as people see them: as wide as the terminal or COLUMNS says, with everything in them."""

import re
import sys

import pytest
from environments import environment
from terminal import printed_in_a_terminal

from tilekern.kernels import spec_named
from tilekern.runtime.records import record_of
from tilekern.spec.targets import resolve
from tilekern.tuning import cli
from tilekern.tuning.commands import refresh
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.refreshing import Change
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.terminal import sizes_of, table_console, table_for

pytestmark = pytest.mark.processes

TOOLS = {"key": "tileiras-13.4.92-cuda_tile-1.7.0", "tileiras": "13.4.92", "cuda_tile": "1.7.0"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return the problems of a model, and a dry run of their plan."""
    sweep, target = Sweep(tmp_path_factory.mktemp("sweep")), resolve("B200")
    problems = plan_of_model("qwen3-0.6b", Steps([512], ops=["rope", "swiglu", "attention"]), target).problems
    sweep.begin(target, "test", problems)
    return problems, ["--gpu", "B200", "--plan", str(sweep.folder / "sweep.json"), "--dry-run"]


@pytest.fixture
def in_a_pipe(plan, tmp_path, monkeypatch, capfd):
    """Return the tables that a dry run prints into a pipe, with COLUMNS or without."""

    def run(columns=None):
        monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(plan[1]) == 0
        return tables(capfd.readouterr().out)

    return run


def tables(text):
    """Return the lines of the tables; other lines hold paths and commands, and are never broken."""
    return [line for line in text.splitlines() if line[:1] in "┏┃┡│├└"]


def cells(lines):
    """Return the text of the first two columns of a table."""
    return " ".join(" ".join(re.split("[│┃]", line)[1:3]) for line in lines if line[0] in "│┃").split()


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_pipe_is_as_wide_as_columns_says(plan, in_a_pipe, columns):
    lines = in_a_pipe(columns)
    widest = max(map(len, lines))
    assert widest <= columns
    assert widest > {80: 70, 120: 110, 200: 160}[columns]
    found = " ".join(cells(lines))
    for kernel, problem in plan[0]:
        assert kernel in found
        if columns != 80:
            assert sizes_of(problem) in found
    assert "…" not in "".join(lines)


def test_a_pipe_without_columns_has_160(in_a_pipe):
    assert max(map(len, in_a_pipe())) == 160


@pytest.mark.parametrize(("term", "env"), [("xterm-256color", {}), ("dumb", {"COLUMNS": "90"})])
@pytest.mark.share(2)
def test_a_terminal_has_its_own_width_unless_columns_says_another(plan, tmp_path, term, env):
    away = ("TILEKERN_", "COLUMNS", "LINES")
    settings = environment(without=away, TILEKERN_CACHE_DIR=str(tmp_path), TERM=term, **env)
    text = printed_in_a_terminal([sys.executable, "-m", "tilekern.tune", *plan[1]], 100, env=settings)
    assert max(map(len, tables(re.sub("\x1b\\[[0-9;]*m", "", text)))) == int(env.get("COLUMNS", 100))


def shown(columns, monkeypatch, capsys, table):
    monkeypatch.setenv("COLUMNS", str(columns))
    console = table_console()
    console.print(table(console))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    return lines


def test_what_belongs_together_is_stacked_where_it_is_narrow(monkeypatch, capsys):
    rows = [["swiglu_backward_remake", "512 3072 bfloat16", "17.5", "33 %"]]
    groups = [["kernel", "problem"], ["time, us", "of a copy"]]

    def table(console):
        return table_for(console, "title", groups, rows, ["time, us", "of a copy"], ["all", "1 problem", "17.5", ""])

    narrow = [line.split("│")[1:3] for line in shown(80, monkeypatch, capsys, table) if line.startswith("│")]
    assert narrow == [
        [" swiglu_backward_remake ", "      17.5 "],
        [" 512 3072 bfloat16      ", "      33 % "],
        [" all                    ", "      17.5 "],
        [" 1 problem              ", "           "],
    ]
    wide = [line.split("│")[1:-1] for line in shown(200, monkeypatch, capsys, table) if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in wide] == [*rows, ["all", "1 problem", "17.5", ""]]


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_table_of_a_refresh_fits(columns, monkeypatch, capsys):
    spec, h200 = spec_named("swiglu_backward_remake"), resolve("H200")
    problem = spec.problem(rows=8192, columns=12288, dtype="bfloat16")
    record = record_of(
        spec, problem, spec.default(problem, h200), h200, TOOLS, {}, "measured", measurement={"median_us": 100.125}
    )
    changes = [Change(record, record, 99.75, ""), Change(record, None, None, "its check failed")]
    outcome = refresh.Outcome(h200, TOOLS["key"], "580.159", changes=changes)
    lines = shown(columns, monkeypatch, capsys, lambda console: refresh._table(outcome, console))
    body = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    text = " ".join("".join(row[at].strip() for row in body) for at in range(len(body[0])))
    for word in (spec.name, "12288", "the same", "none", "100.1", "99.8", "check", "0.0 %"):
        assert word in text, text
