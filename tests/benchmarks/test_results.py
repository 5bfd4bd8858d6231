"""The one form of results: written, read back, and refused where it is not kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmark_samples import RUN

from benchmarks.results import Results, Row, print_table, read_folder, read_results, shown, write_results
from tilekern.errors import InputError

ROW = Row("kernels", "rms_norm 8x16", "tilekern", "forward", 12.5, "us", 0.25)


def document(**changes):
    row = {name: getattr(ROW, name) for name in ("benchmark", "case", "provider", "metric", "value", "unit", "spread")}
    return {"run": dict(RUN), "rows": [row | changes]}


def test_what_is_written_reads_back(tmp_path):
    ours = replace(ROW, sources={"rms_norm_forward": "0123456789ab"})
    results = Results(RUN, [ours, Row("kernels", "rms_norm 8x16", "quack 0.6.5", "forward", 13, "us")])
    write_results(tmp_path / "deep" / "kernels.json", results)
    assert read_results(tmp_path / "deep" / "kernels.json") == results
    (read,) = read_folder(tmp_path)
    assert read == results
    assert read.file == "deep/kernels.json"
    assert set(json.loads((tmp_path / "deep" / "kernels.json").read_text())) == {"run", "rows"}


def test_a_row_is_found_with_and_without_the_providers_version():
    results = Results(RUN, [Row("kernels", "a", "liger-triton 0.8.5", "forward", 1, "us")])
    assert results.row("a", "liger-triton", "forward") is results.row("a", "liger-triton 0.8.5", "forward") is not None
    assert results.row("a", "liger", "forward") is None


@pytest.mark.parametrize(
    "change",
    [
        {"value": float("nan")},
        {"value": "12"},
        {"value": True},
        {"spread": None},
        {"unit": ""},
        {"case": 3},
        {"more": 1},
        {"sources": ["rms_norm_forward"]},
        {"sources": {"rms_norm_forward": 1}},
    ],
)
def test_a_row_out_of_form_is_refused(tmp_path, change):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document(**change)))
    with pytest.raises(InputError, match="row 0"):
        read_results(path)


@pytest.mark.parametrize("field", ["date", "gpu", "driver", "toolkit", "torch", "commit"])
def test_a_run_must_say_what_it_ran_on(tmp_path, field):
    found = document()
    del found["run"][field]
    (tmp_path / "bad.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match=field):
        read_results(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": {}}', '{"run": [], "rows": []}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InputError):
        read_results(tmp_path / "bad.json")


def test_nothing_out_of_form_is_written(tmp_path):
    with pytest.raises(InputError):
        write_results(tmp_path / "x.json", Results(RUN, [Row("kernels", "a", "b", "c", float("inf"), "us")]))
    assert not (tmp_path / "x.json").exists()


def test_a_table_shows_every_provider(capsys):
    print_table("kernels", [ROW, Row("kernels", "rms_norm 8x16", "quack 0.6.5", "forward", 13, "us")])
    said = capsys.readouterr().out
    assert "12.5 ± 0.25" in said
    assert "quack 0.6.5" in said
    assert shown(None) == "-"
