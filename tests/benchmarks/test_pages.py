"""The result pages are a pure function of the results, and those that are checked in are what it makes."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from benchmarks.environment import RESULTS
from benchmarks.pages import PAGES, charts, files_of, maintainers, models, ops, platform
from benchmarks.pages.charts import Panel
from benchmarks.pages.readme import with_training
from benchmarks.results import Results, Row, read_folder
from benchmarks.sources import digests
from tilekern.errors import InputError

RUN = {
    "date": "2026-08-01T12:00:00+00:00",
    "gpu": "H200",
    "driver": "580.1",
    "toolkit": "none (cuda-tile 1.7.0)",
    "torch": "2.11.0",
    "commit": "abc123def",
    "notes": [],
}
NOT_RECORDED = "digest not recorded (commit abc123d)"


def results(benchmark, *found, file="", **run):
    """Results of (case, provider, metric, value, unit)."""
    rows = [Row(benchmark, case, who, metric, value, unit) for case, who, metric, value, unit in found]
    return Results(RUN | run, rows, file)


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def test_the_pages_are_those_that_the_results_make():
    made = files_of(read_folder(RESULTS))
    there = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.*")}
    again = "; run python -m benchmarks report"
    assert there == set(made), f"files are missing or left over{again}"
    changed = [name for name, text in made.items() if (PAGES / name).read_text() != text]
    assert not changed, f"not what the JSON files and today's source make{again}"


def trained(case, *speeds, benchmark="train", **run):
    """A run from (trainer, tokens per second, GiB, lag of the first step)."""
    rows = []
    for who, speed, peak, lag in speeds:
        rows += [(case, who, "tokens_per_s", speed, "tok/s"), (case, who, "peak_gib", peak, "GiB")]
        rows.append((case, who, "first_step_lag_s", lag, "s"))
    return results(benchmark, *rows, **run)


PEERS = (("tilekern", 1250, 11.2, 0.4), ("hf-sdpa 5.17.0", 900, 16, 0.2), ("liger-triton 0.8.5", 1000, 12, 5))


def test_a_whole_model_has_a_line_a_table_of_its_trainers_and_a_plot():
    files = models.page([trained("llama-3-8b 4096 tokens", *PEERS, file="h200/train.json")])
    text = files[models.NAME]
    figures = "1,250 | - | 1,000 (liger-triton 0.8.5) | 1.25 x | - | - | 11.2, 12.0 | 0.40, 5.00"
    assert line_of(text, "llama-3-8b") == f"| llama-3-8b | 4096 | {figures} | {NOT_RECORDED} |"
    data = "[train.json](../../benchmarks/results/h200/train.json)"
    assert f"| 4096 | hf-sdpa 5.17.0 | 900 | - | - | 16.0 | 0.20 | - | {data} |" in text
    assert "![Training llama-3-8b](plots/h200-llama-3-8b.svg)" in text
    assert "hf-sdpa 5.17.0: 900" in files["h200-llama-3-8b.svg"]
    assert "### Two layers only" not in text


def test_8_bits_are_compared_with_peers_of_any_dtype_and_bfloat16_with_its_own():
    fp8 = (("tilekern-fp8", 1800, 11, 0.4), ("torchao-fp8-rowwise 0.18.0", 1200, 12, 20))
    captured = ("tilekern-graphs-adamw", 1300, 11.2, 0.4)
    steps = trained("m 1 tokens", *PEERS, *fp8, captured), trained("m 2 tokens", *PEERS)
    text = models.page(steps)[models.NAME]
    assert line_of(text, "m | 1").startswith(
        "| m | 1 | 1,250 | 1,300 | 1,000 (liger-triton 0.8.5) | 1.30 x | 1,800 | 1.50 x | 11.2, 12.0 |"
    )
    said = "1.27 x in bfloat16 (2 steps, at worst 1.25 x), 1.50 x in 8-bit floats (1 steps, at worst 1.50 x)"
    assert f"Median speed-up: {said}." in text


def test_8_bits_stay_with_their_run_where_a_newer_one_has_none():
    older = trained("m 1 tokens", *PEERS, ("tilekern-fp8", 900, 11, 0.4), date="2026-09-01", file="h/older.json")
    newer = trained("m 1 tokens", ("tilekern", 7, 1, 1), ("hf 5", 5, 1, 1), date="2026-10-01", file="h/newer.json")
    oldest = trained("m 1 tokens", ("tilekern", 6, 1, 1), ("hf 5", 6, 1, 1), date="2026-08-01", file="h/oldest.json")
    text = models.page([newer, older, oldest])[models.NAME]
    assert line_of(text, "m | 1").startswith("| m | 1 | 7 | - | 5 (hf 5) | 1.40 x | 900 | 0.90 x |")
    assert "| 1 | tilekern-fp8 | 900 |" in text
    assert "older.json" in text
    assert "oldest.json" not in text


def test_a_trainer_without_room_is_listed_so():
    note = "m 4096 tokens: hf-flex is out of memory, so longer ones were not tried"
    text = models.page([trained("m 4096 tokens", *PEERS, notes=[note])])[models.NAME]
    assert line_of(text, "4096 | hf-flex") == "| 4096 | hf-flex | out of memory | - | - | - | - | - | train |"


def test_models_of_two_layers_stand_apart_and_are_called_so():
    case = "qwen3-8b 2 x 4096 tokens, 2 layers, FSDP2 on 2 GPUs"
    run = trained(case, *PEERS, benchmark="parallel", gpu="H100")
    losses = [Row("parallel", case, "tilekern", metric, 11.87246, "nat") for metric in ("loss", "loss_on_one")]
    run.rows.extend(losses)
    files = models.page([run])
    head, _, few = files[models.NAME].partition("### Two layers only, on H100")
    assert "No whole model has been measured on this GPU." in head
    assert "they do not say how fast the whole model trains" in few
    assert "| qwen3-8b 2 x 4096 tokens, FSDP2 on 2 GPUs | 1,250 |" in few
    assert "| 11.8725, 11.8725 |" in few
    assert list(files) == [models.NAME]


def test_the_newest_run_of_a_step_counts_and_one_that_compares_nothing_does_not():
    newest = trained("m 1 tokens", ("tilekern", 7, 1, 1), ("hf 5", 1, 1, 1), date="2026-09-01")
    alone = trained("m 1 tokens", ("tilekern", 9, 1, 0.25), date="2026-10-01", notes=["A cold machine."])
    peers_alone = trained("m 1 tokens", ("hf 5", 9, 1, 1), date="2026-11-01")
    everything = [newest, trained("m 1 tokens", *PEERS), alone, peers_alone]
    assert line_of(models.page(everything)[models.NAME], "m |").startswith("| m | 1 | 7 | - | 1 (hf 5) | 7.00 x |")
    text = platform.page(everything)[platform.NAME]
    assert f"| m 1 tokens | H200 | none (cuda-tile 1.7.0) | 0.25 | A cold machine. | {NOT_RECORDED} | train |" in text


def swept(*providers, case="dyt 1024 tokens", **run):
    rows = [(case, who, "forward_backward", value, "us") for who, value in providers]
    rows += [(case, who, "extra_peak", 2 * value, "MiB") for who, value in providers]
    return results("kernels_sweep", *rows, model="llama-3-8b", **run)


def test_an_op_has_a_line_a_table_over_tokens_and_a_plot():
    many = ("tilekern", 10), ("liger-triton 0.8.5", 25), ("torch 2.11", 40), ("copy", 5)
    longer = swept(*((who, 2 * value) for who, value in many), case="dyt 2048 tokens")
    run = Results(longer.run, [*longer.rows, *swept(*many).rows])
    files = ops.page([run])
    text = files[ops.NAME]
    size = "2048 tokens of llama-3-8b"
    assert line_of(text, "[dyt](#dyt-on-h200)") == (
        f"| [dyt](#dyt-on-h200) | {size} | 20 | 50 (liger-triton 0.8.5) | 2.50 x | {NOT_RECORDED} |"
    )
    short, long = (line for line in text.splitlines() if line.startswith(("| 1024", "| 2048")))
    assert short.startswith("| 1024 tokens of llama-3-8b | 10 | 25 (liger-triton 0.8.5) | 2.50 x | 20, 50 | - |")
    assert long.startswith(f"| {size} |")
    assert "stroke" in files["h200-dyt.svg"]


def test_an_op_at_fixed_sizes_alone_has_bars():
    rows = [("qk 8x16", who, "forward_backward", value, "us") for who, value in (("tilekern", 2), ("torch 2", 4))]
    share = ("qk 8x16", "tilekern", "forward_backward_share_of_copy", 0.875, "1")
    files = ops.page([results("kernels", *rows, share)])
    assert "| 8x16 | 2 | 4 (torch 2) | 2.00 x | -, - | 88% |" in files[ops.NAME]
    assert "torch 2: 4" in files["h200-qk.svg"]


def test_an_op_says_who_was_left_out_and_who_waits():
    notes = [
        "dyt 1024x8: quack 0.6 left out: ImportError: no",
        "dyt 1024x8 forward: torch 2.11 waits for the GPU; its time holds the host's work",
        "rope 1024x8: tilegym 1.5 left out: AssertionError: wrong",
    ]
    text = ops.page([swept(("tilekern", 10), ("torch 2.11", 40), notes=notes)])[ops.NAME]
    assert "- quack was left out: ImportError: no\n" in text
    assert "- The host waits for the GPU in torch: the time includes the host's work.\n" in text
    assert "tilegym" not in text


def test_a_row_says_the_digest_of_what_it_measured_and_when_it_is_stale():
    run = swept(("tilekern", 10), ("torch 2.11", 40))
    fresh, old = digests(["dyt_forward"]), {"dyt_forward": "0" * 12}

    def measured(sources):
        rows = [dataclasses.replace(row, sources=sources) if row.provider == "tilekern" else row for row in run.rows]
        return line_of(ops.page([Results(run.run, rows)])[ops.NAME], "1024 tokens")

    assert measured(fresh).endswith(f"| `{fresh['dyt_forward'][:8]}` |")
    assert measured(old).endswith("| `00000000`, **stale**: dyt_forward changed |")


def test_the_platform_has_each_figure_by_its_name():
    everything = [
        results("startup", ("import tilekern", "tilekern", "import", 2.5, "ms")),
        results("host", ("rms_norm 16x4096", "tilekern", "lookup", 1.1, "us")),
        results("races", ("all problems", "tilekern", "share_near_best", 0.99, "1"), ("a", "b", "within", 1, "1")),
        results("cache_scale", ("usual mix", "tilekern", "verify_rate", 510.0, "MB/s"), gpu="none"),
    ]
    text = platform.page(everything)[platform.NAME]
    assert "| `import tilekern`, without torch | import tilekern | H200 | ms | 2.5 | commit abc123d | startup |" in text
    assert f"| lookup of a known problem | rms_norm 16x4096 | H200 | us | 1.1 | {NOT_RECORDED} | host |" in text
    assert "| choices within 1 % of the best | all problems | H200 | - | 0.99 |" in text
    assert "| rate of `cache_tools verify` on one core | usual mix | - | MB/s | 510 | commit abc123d |" in text
    assert "within |" not in text


def test_misses_that_share_an_explanation_stand_together_and_others_say_that_it_is_missing():
    missed = results("startup", ("import tilekern", "tilekern", "import", 61, "ms"), notes=["x, and not measured"])
    text = maintainers.page([missed])[maintainers.NAME]
    assert "## H200: 0 of 1 figures meet their targets" in text
    assert "| import tilekern, without torch | ≤ 50 ms | 0 of 1 |" in text
    assert "| import tilekern | ≤ 50 ms | 61 ms | - | commit abc123d | startup |\n\nNot explained yet.\n" in text
    assert "Not measured here: rms_norm: forward;" in text
    assert "1 file of 1 commit." in text
    assert "| 2026-08-01T12:00:00+00:00 | H200 | 580.1 | none (cuda-tile 1.7.0) | 2.11.0 | abc123d | 1 | 1 |" in text


def test_what_needs_no_gpu_is_judged_apart_and_missed_by_no_gpu():
    scale = results(
        "cache_scale",
        ("usual", "tilekern", "verify_rate", 510.0, "MB/s"),
        ("few", "tilekern", "lookup", 0.4, "ms"),
        gpu="none",
    )
    gpu, none = maintainers.page([swept(("tilekern", 1)), scale])[maintainers.NAME].split("## No GPU: 1 of 2 figures")
    none = none.partition("\n## ")[0]
    assert "| cache_tools verify on one core | ≥ 500 MB/s | 1 of 1 |" in none
    assert "| lookup in a fresh process | few | ≤ 0.3 ms | 0.4 ms |" in none
    assert "Not measured here: cache_tools ls with a filter, whole process; lookup of files" in none
    assert "verify" not in gpu


@pytest.mark.parametrize("draw", [charts.bars, charts.lines])
def test_a_chart_is_svg_with_all_providers_and_marks_only_the_figures(draw):
    panel = Panel("time", "us", ["1024", "2048 <a>"], {"torch 2": [4.0, 8.0], "tilekern": [1.0, None]})
    text = draw("rms & norm", [panel, dataclasses.replace(panel, unit="MiB")])
    root = ET.fromstring(text)
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rms & norm", "time, us", "time, MiB", "1024", "2048 <a>", "torch 2", "tilekern"} <= set(texts)
    marks = "circle" if draw is charts.lines else "rect"
    shapes = len(list(root.iter(f"{{http://www.w3.org/2000/svg}}{marks}")))
    assert shapes == 2 * 3 if draw is charts.lines else shapes == 2 * 3 + 2 + 1
    assert draw("rms & norm", [panel, dataclasses.replace(panel, unit="MiB")]) == text


def test_a_chart_of_nothing_and_of_zeros_is_drawn():
    for series in ({}, {"tilekern": [None]}, {"tilekern": [0.0]}):
        ET.fromstring(charts.lines("a", [Panel("b", "us", ["1"], series)]))


PLACE = (
    "<!-- training: `python -m benchmarks report --readme README.md` writes headline and table -->",
    "<!-- training ends -->",
)


def of_qwen3(*speeds, notes=(), model="qwen3-8b", date=RUN["date"]):
    """A run of training from (case, provider, tokens per second, GiB)."""
    rows = [(case, who, "tokens_per_s", speed, "tok/s") for case, who, speed, _ in speeds]
    rows += [(case, who, "peak_gib", peak, "GiB") for case, who, _, peak in speeds]
    return results("train", *rows, notes=list(notes), model=model, date=date)


def test_the_readme_s_headline_and_table_have_the_fastest_of_each_family_and_says_what_ran_out_of_memory():
    run = of_qwen3(
        ("m 2048 tokens", "tilekern", 1234.4, 61.04), ("m 2048 tokens", "tilekern-nondeterministic", 9999, 61),
        ("m 2048 tokens", "liger-a 1.0", 900, 62), ("m 2048 tokens", "liger-b 1.0", 950, 63),
        ("m 2048 tokens", "hf-sdpa 5.0", 800, 70), ("m 2048 tokens", "torch.compile-layers 2.0", 999, 71),
        ("m 4096 tokens", "tilekern", 1000, 80), ("m 4096 tokens", "liger-a 1.0", 1001, 81),
        notes=["m 4096 tokens: hf-sdpa is out of memory, so longer ones were not tried"],
    )  # fmt: skip
    text = with_training(f"before\n{PLACE[0]}\nold\n{PLACE[1]}\nafter\n", [swept(("tilekern", 1)), run])
    headline = (
        "tilekern is fastest at 2048 tokens of a step. Its speed there: **1.54 x Hugging Face** in 0.87 x of its "
        "memory, **1.30 x Liger** in 0.97 x of its memory, **1.24 x torch.compile by layer** in 0.86 x of its memory."
    )
    lines = [
        "| tokens of a step | tilekern | Hugging Face 5.0 | Liger 1.0 | torch.compile by layer 2.0 |",
        "| --- | --- | --- | --- | --- |",
        "| 2048 | 1,234 tokens/s, 61.0 GiB | 800 tokens/s, 70.0 GiB | 950 tokens/s, 63.0 GiB "
        "| 999 tokens/s, 71.0 GiB |",
        "| 4096 | 1,000 tokens/s, 80.0 GiB | out of memory | 1,001 tokens/s, 81.0 GiB | - |",
    ]
    table = "\n".join(lines)
    assert text == f"before\n{PLACE[0]}\n\n{headline}\n\n{table}\n\n{PLACE[1]}\nafter\n"
    assert with_training(text, [run]) == text
    newer = "2027-01-01T12:00:00+00:00"
    short = [("m 1 tokens", who, 1, 1) for who in ("tilekern", "liger", "hf", "torch.compile")]
    assert with_training(text, [run, of_qwen3(*short, date=newer)]) == text, "the table is of the run of most steps"
    other = of_qwen3(*short, model="m", date=newer)
    assert with_training(text, [run, other]) == text, "the table is of one model"


def test_the_readme_has_8_bits_beside_them_where_they_ran():
    case = "m 4096 tokens"
    run = of_qwen3(
        (case, "tilekern", 1000, 80), (case, "hf-sdpa 5.0", 500, 90), (case, "liger-a 1.0", 800, 81),
        (case, "torch.compile-layers 2.0", 900, 88), (case, "tilekern-fp8", 1350, 76),
        (case, "torchao-fp8-rowwise 0.18", 1080, 95),
    )  # fmt: skip
    text = with_training(f"{PLACE[0]}\n{PLACE[1]}", [run])
    said = (
        "By [8-bit floats](docs/fp8.md), at 4096 tokens: **1.50 x torch.compile in bfloat16** in 0.86 x of its memory, "
        "**1.25 x torchao's** in 0.80 x of its memory."
    )
    assert said in text
    assert "| torch.compile by layer 2.0 | 8 bits by tilekern | 8 bits by torchao 0.18 |" in text
    assert "| 900 tokens/s, 88.0 GiB | 1,350 tokens/s, 76.0 GiB | 1,080 tokens/s, 95.0 GiB |" in text


def test_a_table_without_a_place_or_a_run_is_refused():
    run = of_qwen3(("m 1 tokens", "tilekern", 1, 1), ("m 1 tokens", "liger", 1, 1), ("m 1 tokens", "hf", 1, 1))
    with pytest.raises(InputError, match="training ends --> is missing"):
        with_training(PLACE[0], [run])
    with pytest.raises(
        InputError, match=r"no results of train qwen3-8b have tilekern, Hugging Face, Liger, torch\.compile by"
    ):
        with_training("\n".join(PLACE), [swept(("tilekern", 1))])
