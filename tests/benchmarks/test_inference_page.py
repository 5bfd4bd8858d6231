"""The page of the engine's benchmark: its figures, what it loads, and how it looks in a real browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import time

import pytest
from benchmark_samples import is_one_line
from inference_samples import sample
from real_browser import NEEDS_BROWSER, opened

from benchmarks import cli
from benchmarks.__main__ import main
from benchmarks.goals import GOALS
from benchmarks.inference import BENCHMARK
from benchmarks.inference_page import as_html
from benchmarks.results import Results, Row, write_results


@pytest.fixture(scope="module")
def page():
    return as_html(sample())


def text_of(page):
    """What a reader sees, without the plots."""
    seen = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", seen)).split())


def items_of(page):
    [data] = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def columns_of(item, name):
    """All columns of a name in a plot's data."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            if value.get("name") == "ColumnDataSource":
                entries = dict(value["attributes"]["data"]["entries"])
                found.extend([entries[name]] if name in entries else [])
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                walk(one)

    walk(item)
    return found


def test_every_case_has_its_plot_and_each_plot_its_place(page):
    captions = [re.sub(r"<[^>]*>", " ", one).strip() for one in re.findall(r"<figcaption>(.*?)</figcaption>", page)]
    assert len(captions) == len(items_of(page)) == 8 + 3 + 8 + 2 + 3
    assert captions[0] == "gpt2 forward, 8 x 128"
    assert "qwen3-8b decode, batch 64, context 4096: a step on the GPU" in captions
    assert [item["target_id"] for item in items_of(page)] == re.findall(r'<div id="(plot-\d+)">', page)


def test_a_plot_has_the_figures_of_its_distribution(page):
    results, item = sample(), items_of(page)[0]
    for end in ("", "_min", "_p95", "_p99", "_max", "_samples"):
        rows = results.figures("gpt2 forward, 8 x 128", f"forward_ms{end}")
        assert columns_of(item, f"ms{end}") == [[row.value for row in rows]]
    assert columns_of(item, "name") == [
        ["tilekern  0.6", "torch  5.4", "torch-graph  0.84", "mingpt  8.4", "torch-compiled  0.72"]
    ]


def test_tables_have_targets_kernels_with_sizes_and_layers(page):
    text = text_of(page)
    assert "missed engine, tile-medium's logits mingpt-tile-medium forward, 8 x 128 ≤ 0.15 ms 0.2 ± 0.012 ms" in text
    assert "met engine, a token by int8 weights qwen3-8b decode, batch 1, context 4096" in text
    products = "matmul rows 1024, inner 768, columns 2304, biased, b_transposed 12 4.00 48.0 14.7%"
    assert f"gpt2 forward, 8 x 128, tilekern {products}" in text
    assert "qwen3-8b 36 4,096 32 8 128 12,288 151,936 40,960 8,190,735,360" in text
    assert {goal.title for goal in GOALS if goal.benchmark == BENCHMARK} == {
        verdict.what for goal in GOALS if goal.benchmark == BENCHMARK for verdict in goal.judge(sample())
    }


def test_the_page_loads_nothing_and_escapes_what_results_say(page):
    assert "gpt2 &lt;decode&gt;, batch 64: hf-compiled left out" in page
    assert "<decode>" not in page
    assert not re.findall(
        r"<(?:link|iframe|img|object)\b|<[^>]* src=", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    )
    assert "content=\"default-src 'none'" in page


def of_one_case():
    """The sample's rows of one case, but for a provider."""
    whole = sample()
    rows = [row for row in whole.rows if row.case == "gpt2 forward, 8 x 128" and row.provider != "mingpt 2.11.0"]
    return dataclasses.replace(whole, rows=rows)


def test_the_same_results_make_the_same_page():
    assert as_html(of_one_case()) == as_html(of_one_case())


def test_a_run_of_one_part_has_only_its_sections():
    text = text_of(as_html(of_one_case()))
    assert "Logits of whole sequences" in text
    for absent in ("Generated tokens", "A fresh process", "What each kernel takes", "Layers and sizes"):
        assert absent not in text


def test_the_command_writes_the_page_beside_the_results(tmp_path, capsys):
    write_results(tmp_path / "inference.json", of_one_case())
    assert main(["charts", str(tmp_path / "inference.json")]) == 0
    assert (tmp_path / "inference.html").read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    other = Results(sample().run, [Row("decode", "a case", "tilekern", "token_ms", 1.0, "ms")])
    write_results(tmp_path / "decode.json", other)
    is_one_line(capsys, ["charts", str(tmp_path / "decode.json")], "these are of `decode`")
    is_one_line(
        capsys, ["charts", str(tmp_path / "inference.json"), "--out", str(tmp_path / "no" / "x.html")], "cannot write"
    )


def test_charts_without_bokeh(monkeypatch, tmp_path, capsys):
    write_results(tmp_path / "inference.json", of_one_case())
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    is_one_line(capsys, ["charts", str(tmp_path / "inference.json")], "pip install 'tilekern[report]'")


# Whether each plot has painted something, and the colour of its labels.
PAINTED = """
return Bokeh.documents.map((shown) => {
  const view = Bokeh.index.find_one(shown.roots()[0])
  const {width, height} = view.canvas_view.primary.canvas
  const pixels = view.canvas_view.primary.ctx.getImageData(0, 0, width, height).data
  return [pixels.some((value) => value > 0), view.model.left[0].major_label_text_color]
})
"""


@pytest.mark.processes
@pytest.mark.nightly
@NEEDS_BROWSER
def test_the_page_in_a_browser(page, tmp_path):
    """On light and dark ground, and on a phone, where it is not wider than the window."""
    path = tmp_path / "page.html"
    path.write_text(page)
    seen = {}
    for scheme, width in (("light", 1400), ("dark", 390)):
        with opened(
            tmp_path / scheme, "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"
        ) as browser:
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(path.as_uri())
            browser.set_script_timeout(60)
            idle = "return Bokeh.documents.length == arguments[0] && Bokeh.documents.every((one) => one.is_idle)"
            for _ in range(600):
                if browser.execute_script(idle, len(items_of(page))):
                    break
                time.sleep(0.1)
            plots = browser.execute_script(PAINTED)
            assert all(is_painted for is_painted, _ in plots)
            seen[scheme] = {colour for _, colour in plots}
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            assert not [line for line in browser.get_log("browser") if line["level"] in ("WARNING", "SEVERE")]
    assert (len(seen["light"]), len(seen["dark"])) == (1, 1)
    assert seen["light"] != seen["dark"]
