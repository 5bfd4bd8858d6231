"""Tables as people see them: as wide as the terminal, with numbers in the order of numbers."""

import os
import re
import sys

import pytest
from cache_samples import B200, put, toolkit
from command_line import PREBUILT, ROOT
from terminal import printed_in_a_terminal

from tilekern.cache import Store, install_pack, note_wanted
from tilekern.cache_tools.shared.printing import natural, print_table

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("tables")]

HEADINGS = ["sm_90-h200-132, tileiras-13.4.92-cuda_tile-1.7.0", "sm_100-b200-148, tileiras-13.4.92-cuda_tile-1.7.0"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with a model's prebuilt packs: kernels of all sizes, keys of 153 characters, two GPUs."""
    root = tmp_path_factory.mktemp("filled")
    for gpu in ("h200", "b200"):
        install_pack(PREBUILT / f"qwen3-8b-{gpu}.pack", Store(root))
    return root


@pytest.fixture
def printed(cli, monkeypatch):
    """Return what a command prints outside a terminal, with or without ``COLUMNS``."""

    def run(*arguments, columns=None):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        return cli.said(*arguments)

    return run


def in_a_terminal(columns, *arguments):
    """Return what a command prints in a terminal of that width."""
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return printed_in_a_terminal([sys.executable, "-m", "tilekern.cache_tools", *arguments], columns, cwd=ROOT, env=env)


def widest(text):
    return max(map(len, text.splitlines()))


def test_ls_fits_the_terminal_and_120_columns_in_a_pipe(printed, filled):
    ls = ("ls", "--cache-dir", str(filled))
    assert widest(in_a_terminal(80, *ls)) <= 80
    assert widest(printed(*ls)) <= 120
    assert widest(printed(*ls, columns="80")) <= 80
    assert 120 < widest(printed(*ls, columns="200")) <= 200


@pytest.mark.parametrize("columns", ["80", "200"])
def test_ls_says_each_record_with_its_whole_key_and_each_gpu_and_toolkit_once(printed, filled, columns):
    text = printed("ls", "--cache-dir", str(filled), columns=columns)
    assert [line for line in text.splitlines() if "tileiras" in line] == HEADINGS
    joined = re.sub(r",\n  ", ",", text)
    entries = list(Store(filled).entries())
    assert len(entries) > 200
    for entry in entries:
        assert len(re.findall(rf"[ \n]{re.escape(entry.address.problem_key)}[ \n]", joined)) >= 1
    assert len(re.findall(r"\b(?:default|predicted|measured)\b", text)) == len(entries)


def test_a_key_that_does_not_fit_is_printed_below_its_row(printed, filled):
    text = printed("ls", "--kernel", "attention_delta", "--gpu", "H200", "--cache-dir", filled, columns="80")
    lines = text.splitlines()
    assert lines[1].split() == ["KERNEL", "PROVENANCE", "TIME", "GAIN", "SIZE", "AGE"]
    assert lines[2].startswith("attention_delta  measured ")
    assert lines[3] == "  batch=1,queries=2048,heads=32,head_dim=128,dtype=bfloat16"


def test_ls_sorts_numbers_as_numbers(printed, filled):
    text = printed("ls", "--kernel", "swiglu_forward", "--cache-dir", filled)
    targets = re.findall("^sm_[0-9]+", text, re.M)
    assert targets == ["sm_90", "sm_100"]
    rows = [list(map(int, re.findall("rows=([0-9]+)", part))) for part in text.split("sm_100")]
    assert rows == [sorted(part) for part in rows]
    assert {2048, 16384} <= set(rows[0]) & set(rows[1])
    parts = [["rows=8192", "rows=512"], ["cuda_tile-1.10.0", "cuda_tile-1.9.0"], ["rows=64,columns=8", "rows=64"]]
    assert [sorted(texts, key=natural) for texts in parts] == [texts[::-1] for texts in parts]


def test_ls_shows_the_gain_that_tune_showed(root, cli):
    put(root, b"one")
    put(
        root,
        b"two",
        kernel="rope",
        measurement=None,
        provenance="predicted",
        prediction={"time_us": 40.0, "default_us": 50.0},
    )
    put(root, b"three", kernel="scale", measurement=None, provenance="predicted", prediction={"time_us": 40.0})
    rows = [re.split(r"\s{2,}", line.strip()) for line in cli("ls")[1].splitlines()[2:]]
    gains = {row[0]: row[4] for row in rows}
    assert gains == {"rms_norm": "3.28x", "rope": "~1.25x", "scale": "-"}
    found = {record["kernel"]: (record["gain"], record["predicted_gain"]) for record in cli.json("ls")["records"]}
    assert found == {"rms_norm": (pytest.approx(124 / 37.8), None), "rope": (None, 1.25), "scale": (None, None)}


def test_ls_and_show_say_what_the_invariant_kernel_costs(root, cli):
    put(root, b"one", measurement={"median_us": 40.0, "invariant": {"config": {}, "bits": "ab", "median_us": 42.0}})
    put(root, b"two", kernel="rope", measurement={"median_us": 40.0})
    head, *rows = [re.split(r"\s{2,}", line.strip()) for line in cli("ls")[1].splitlines()[1:]]
    place = head.index("SAME")
    assert {row[0]: row[place] for row in rows} == {"rms_norm": "1.05x", "rope": "-"}
    found = {record["kernel"]: record["invariant"] for record in cli.json("ls")["records"]}
    assert found == {"rms_norm": {"bits": "ab", "time_us": 42.0, "price": pytest.approx(1.05)}, "rope": None}
    [key] = {record["problem_key"] for record in cli.json("ls")["records"]}
    assert "tilekern.invariant(): 42.0 us, 1.05 times the winner's time" in cli("show", "rms_norm", key)[1]
    assert "tilekern.invariant()" not in cli("show", "rope", key)[1]


@pytest.mark.parametrize("columns", ["80"])
def test_the_other_lists_fit_too(printed, filled, tmp_path, columns):
    long = next(entry.record for entry in Store(filled).entries() if entry.record.kernel == "attention_backward")
    for rows in (8192, 512):
        note_wanted(tmp_path, "attention_backward", {**long.problem, "queries": rows}, B200, "not in any cache " * 9)
    put(tmp_path, b"x", target=B200, toolkit=toolkit("13.5.0"))
    for command in (
        ["wanted", "--cache-dir", str(tmp_path)],
        ["diff", str(tmp_path), filled],
        ["prune", "--cache-dir", str(filled), "--max-size", "1M", "--dry-run"],
    ):
        text = printed(*command, columns=columns)
        paths = {str(filled), str(tmp_path)}
        assert all(len(line) <= int(columns) or paths & set(line.split()) for line in text.splitlines()), text
        if command[0] != "prune":
            assert re.search("queries=[0-9]+", text)
    wanted = printed("wanted", "--cache-dir", str(tmp_path), columns=columns)
    assert re.findall("queries=([0-9]+)", wanted) == ["512", "8192"]


def test_a_text_without_commas_or_blanks_is_left_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_table(("A", "B"), [("x", "y" * 30), ("z", "k=1," * 9 + "l=2")], below=("B",))
    text = capsys.readouterr().out
    assert text.splitlines() == ["A", "x", f"  {'y' * 30}", "z", *["  k=1,k=1,k=1,k=1,"] * 2, "  k=1,l=2"]
