"""Plots are made from results files that run over token counts, and from no others."""

from __future__ import annotations

import pytest
from benchmark_samples import RUN

from benchmarks import plots
from benchmarks.__main__ import main
from benchmarks.results import Results, Row, write_results

OF_A_MODEL = RUN | {"model": "qwen3-8b"}


def train_results(lengths=(2048, 8192)):
    rows = []
    for tokens in lengths:
        for provider, factor in (("tilekern", 1.0), ("liger-triton 0.8.5", 1.2)):
            for metric, value in (("tokens_per_s", 1e4 / factor), ("peak_gib", 80.0), ("step_s", tokens * factor)):
                rows.append(Row("train", f"qwen3-8b {tokens} tokens", provider, metric, value, "x"))
    return Results(OF_A_MODEL, rows)


def sweep_results():
    rows = [
        Row("kernels_sweep", f"{op} {tokens} tokens", provider, metric, 2.0 * tokens, unit)
        for op in ("rms_norm", "attention")
        for tokens in (4096, 1024)
        for provider in ("tilekern", "torch 2.11.0", "copy")
        for metric, unit in (("forward_backward", "us"), ("forward_backward_rate", "TB/s"), ("extra_peak", "MiB"))
    ]
    return Results(OF_A_MODEL, rows)


def test_training_has_a_row_of_panels_with_a_line_for_each_provider():
    ((speed, memory, latency),) = plots.panels_of(train_results())
    assert [panel[0] for panel in (speed, memory, latency)] == ["throughput", "peak memory", "latency of a step"]
    assert latency[2]["tilekern"] == [(2048, 2048.0), (8192, 8192.0)]
    assert set(speed[2]) == {"tilekern", "liger-triton 0.8.5"}


def test_a_sweep_has_a_row_of_panels_for_each_op_in_rising_order_of_tokens():
    first, second = plots.panels_of(sweep_results())
    assert first[0][0].startswith("rms_norm: throughput")
    assert second[2] == (
        "attention: latency, forward and backward",
        "us",
        {who: [(1024, 2048.0), (4096, 8192.0)] for who in ("tilekern", "torch 2.11.0", "copy")},
    )


def test_one_length_and_other_benchmarks_have_no_plot(tmp_path):
    assert plots.panels_of(train_results((8192,))) == []
    path = tmp_path / "kernels.json"
    write_results(path, Results(OF_A_MODEL, [Row("kernels", "rms_norm 8x16", "tilekern", "forward", 1.0, "us")]))
    assert plots.draw(path) is None


@pytest.mark.slow
@pytest.mark.parametrize("results", [train_results(), sweep_results()], ids=["train", "sweep"])
@pytest.mark.nightly
def test_a_report_draws_the_same_file_each_time(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_results(tmp_path / "gpu" / "a.json", results)
    found = []
    for _ in range(2):
        assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "RESULTS.md")]) == 0
        found.append((tmp_path / "gpu" / "a.png").read_bytes())
    assert found[0] == found[1]
    assert found[0].startswith(b"\x89PNG")
    assert "a.png" in capsys.readouterr().out


def test_without_matplotlib_a_line_says_so(tmp_path, monkeypatch, capsys):
    def missing(path):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(plots, "draw", missing)
    write_results(tmp_path / "train.json", train_results())
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "RESULTS.md")]) == 0
    assert "pip install 'tilekern[bench]'" in capsys.readouterr().out
