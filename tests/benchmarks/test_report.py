"""The report is a pure function of results: targets met and missed, peers beside them, and what each run ran on."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.environment import RESULTS
from benchmarks.goals import GOALS
from benchmarks.report import explanations, render, with_training
from benchmarks.results import Results, Row, read_folder
from tilekern.errors import InputError

RUN = {
    "date": "2026-08-01T12:00:00+00:00",
    "gpu": "H200",
    "driver": "580.1",
    "toolkit": "none (cuda-tile 1.7.0)",
    "torch": "2.11.0",
    "commit": "abc123",
    "notes": ["quack left out: ImportError: no"],
}


def kernels(ours_us, share, peer_us, case="rms_norm 8192x4096", metric="forward"):
    return Results(
        RUN,
        [
            Row("kernels", case, "tilekern", metric, ours_us, "us", 0.2),
            Row("kernels", case, "tilekern", f"{metric}_share_of_copy", share, "1"),
            Row("kernels", case, "liger-triton 0.8.5", metric, peer_us, "us", 0.1),
            Row("kernels", case, "copy", metric, ours_us * share, "us", 0.1),
        ],
    )


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def test_a_target_is_met_by_share_and_by_peer():
    assert "| yes | liger-triton 0.8.5 44 ± 0.1 us |" in line_of(render([kernels(40, 0.93, 44)]), "rms_norm forward")
    assert "| **no** |" in line_of(render([kernels(40, 0.89, 44)]), "rms_norm forward")
    assert "| **no** |" in line_of(render([kernels(40, 0.93, 38)]), "rms_norm forward")


def swept(ours, liger, torch, share, case="dyt 1024 tokens", peer_share=0.5):
    metric = "forward_backward"
    rows = [("tilekern", ours), *([("liger-triton 0.8.5", liger)] if liger else []), ("torch 2.11", torch)]
    figures = [Row("kernels_sweep", case, name, metric, value, "us", 0.1) for name, value in rows]
    shares = [("tilekern", share), ("liger-triton 0.8.5", peer_share)]
    figures += [Row("kernels_sweep", case, name, f"{metric}_share_of_copy", value, "1") for name, value in shares]
    figures += [Row("kernels_sweep", case, name, "extra_peak", 2 * value, "MiB") for name, value in rows]
    return Results(RUN | {"model": "llama-3-8b"}, figures)


def test_a_sweep_is_a_table_of_each_op_against_length():
    text = render([swept(10, 25, 40, 0.9)])
    assert "### Ops of llama-3-8b, forward and backward" in text
    assert "| 1024 | 40 ± 0.1 | 25 ± 0.1 | 10 ± 0.1 | 2.50 x Liger | 80, 50, 20 |" in text
    alone = render([swept(10, None, 40, 0.9)])
    assert "| 1024 | 40 ± 0.1 | - | 10 ± 0.1 | 4.00 x torch | 80, -, 20 |" in alone


def test_a_slow_peer_must_be_beaten_by_its_factor_at_every_length():
    assert "| ≥ 2 x | 2.50 x (10 ± 0.1 us) | yes |" in render([swept(10, 25, 40, 0.9)])
    assert "| ≥ 2 x | 1.90 x (10 ± 0.1 us) | **no** |" in render([swept(10, 19, 40, 0.9)])
    assert "≥ 2 x" not in render([swept(10, 19, 40, 0.9, peer_share=0.7)])
    heads = render([swept(10, 9, 40, 0.9, case="linear_log_probs 1024 tokens")])
    assert "| no slower than the best peer | 10 ± 0.1 us | **no** |" in heads


def test_ops_from_before_the_suite_are_judged_at_every_length():
    good, slow = (render([swept(10, 25, torch, 0.86, case="rms_norm 1024 tokens")]) for torch in (40, 9))
    assert "86.0% of a copy | yes |" in line_of(good, "rms_norm forward_backward")
    assert "86.0% of a copy | **no** |" in line_of(slow, "rms_norm forward_backward")
    head = render([swept(10, 9, 40, 0.9, case="fused_linear_cross_entropy 1024 tokens")])
    assert "| no slower than the best peer | 10 ± 0.1 us | **no** |" in head


def test_neighbours_are_judged_by_peers_alone():
    text = render([swept(10, 25, 40, 0.3, case="fused_neighborhood_attention 1024 tokens")])
    assert "| no slower than the best peer | 10 ± 0.1 us | yes |" in text
    assert "of a copy | **no** |" not in text


def test_a_divergence_of_the_targets_is_judged_by_the_best_peer_as_well():
    text = render([kernels(10, 0.9, 9, case="jsd 4096x128256", metric="forward_backward")])
    assert "| jsd forward_backward | jsd 4096x128256 | no slower than the best peer | 10 ± 0.2 us | **no** |" in text
    wide = render([kernels(10, 0.9, 9, case="jsd 2048x128256 float32", metric="forward_backward")])
    assert "no slower than the best peer" not in wide


def test_a_difference_within_the_spreads_is_no_slower():
    assert "| yes |" in line_of(render([kernels(40, 0.93, 39.8)]), "rms_norm forward")


def test_other_figures_have_no_target_but_are_shown():
    text = render([kernels(40, 0.5, 38, case="rms_norm 262144x128")])
    assert "0 of 0" in text
    assert "| rms_norm 262144x128 | forward | us | 40 ± 0.2 | 38 ± 0.1 | 20 ± 0.1 |" in text


def host(no_grad, bare, ours, liger, case="rms_norm 16x4096"):
    return Results(
        RUN,
        [
            Row("host", case, "ct.launch 1.7.0", "launch", bare, "us"),
            Row("host", case, "torch 2.11.0", "allocation", 1.5, "us"),
            Row("host", case, "tilekern", "lookup", 1.1, "us"),
            Row("host", case, "tilekern", "forward_no_grad", no_grad, "us"),
            Row("host", case, "tilekern", "forward", ours, "us"),
            Row("host", case, "liger-triton 0.8.5", "forward", liger, "us"),
        ],
    )


def test_host_time_is_judged_against_the_launch_and_against_liger():
    text = render([host(6, 5, 20, 50)])
    assert "1.20 x 5 us; the results' allocation 1.5 us | yes |" in line_of(text, "forward under no_grad")
    assert "0.40 of Liger's | yes |" in line_of(text, "forward with autograd")
    assert "| 1.1 us | yes |" in line_of(text, "lookup of a known problem")
    text = render([host(15, 5, 30, 50)])
    assert "| **no** |" in line_of(text, "forward under no_grad")
    assert "| **no** |" in line_of(text, "forward with autograd")


def test_host_time_of_batches_is_judged_against_that_of_rows():
    def line(batches):
        batched = host(batches, 5, 20, 50, "rms_norm 2x8x4096").rows
        return line_of(render([Results(RUN, [*host(7, 5, 20, 50).rows, *batched])]), "forward_no_grad above the launch")

    assert "| rms_norm 2x8x4096 | ≤ 1.3 x that of rows | 2.50 us, 1.25 x 2.00 us | yes |" in line(7.5)
    assert "| **no** |" in line(7.7)
    assert "above the launch" not in render([host(7, 5, 20, 50)])


def rows(benchmark, *found):
    return Results(
        RUN, [Row(benchmark, case, provider, metric, value, unit) for case, provider, metric, value, unit in found]
    )


def test_the_other_targets():
    text = render(
        [
            rows(
                "startup",
                ("qwen3-8b", "tilekern", "first_step_lag", 0.2, "s"),
                ("qwen3-8b", "liger-triton 0.8.5", "first_step_lag", 5.2, "s"),
                ("import tilekern", "tilekern", "import", 61, "ms"),
                ("cache_tools ls, 1000 records", "tilekern", "process", 0.3, "s"),
                ("python -c pass", "tilekern", "process", 0.9, "s"),
                ("kernels not loaded yet", "tilekern", "first_launch", 0.8, "ms"),
            ),
            rows("regret", ("all problems", "tilekern", "median_regret", 1.2, "1")),
            rows(
                "compile",
                ("m", "tilekern", "tileiras_share", 0.85, "1"),
                ("m", "tilekern", "distinct_candidates", 150, "1"),
            ),
        ]
    )
    assert "≤ 0.3 s over the second | 0.2 s | yes | liger-triton 0.8.5 5.2 s |" in line_of(text, "first step over")
    assert "| ≤ 50 ms | 61 ms | **no** |" in line_of(text, "import tilekern, without torch")
    assert "| ≤ 0.4 s | 0.3 s | yes |" in line_of(text, "python -m tilekern.cache_tools ls")
    assert "| ≤ 1.05 | 1.2 | **no** |" in line_of(text, "predicted winner's regret, median")
    assert "5 of 7 figures meet theirs" in text
    assert "Not measured here: rms_norm: forward;" in text


def test_training_is_judged_against_the_best_peer_at_each_length():
    def results(ours, memory):
        return rows(
            "train",
            ("qwen3-8b 2048 tokens", "tilekern", "tokens_per_s", ours, "tok/s"),
            ("qwen3-8b 2048 tokens", "hf 5.17.0", "tokens_per_s", 7500.0, "tok/s"),
            ("qwen3-8b 2048 tokens", "liger 0.8.5", "tokens_per_s", 8000.0, "tok/s"),
            ("qwen3-8b 2048 tokens", "tilekern", "peak_gib", memory, "GiB"),
            ("qwen3-8b 2048 tokens", "liger 0.8.5", "peak_gib", 61.0, "GiB"),
            ("qwen3-8b 2048 tokens", "tilekern", "first_step_lag_s", 0.45, "s"),
            ("qwen3-8b 32768 tokens", "tilekern", "tokens_per_s", 5000.0, "tok/s"),
        )

    good, bad = render([results(8800, 60)]), render([results(8790, 62)])
    assert "8800 tok/s | yes | liger 0.8.5 8000 tok/s; hf 5.17.0 7500 tok/s |" in line_of(good, "training, tokens")
    assert "| 60 GiB | yes | liger 0.8.5 61 GiB |" in line_of(good, "training, peak")
    assert "| ≤ 0.5 s | 0.45 s | yes |" in line_of(good, "training, first step")
    assert "| training, tokens a second | qwen3-8b 32768 tokens |" not in good, "there is no peer to judge it against"
    assert "| **no** |" in line_of(bad, "training, tokens")
    assert "| **no** |" in line_of(bad, "training, peak")


def of_families(model, ours, hf, liger, gib, lag=0.4):
    case = f"{model} 4096 tokens, 2 layers"
    return rows(
        "train_families",
        (case, "tilekern", "tokens_per_s", ours, "tok/s"),
        (case, "hf-sdpa-flash 5.17.0", "tokens_per_s", hf - 1, "tok/s"),
        (case, "hf-sdpa-cudnn 5.17.0", "tokens_per_s", hf, "tok/s"),
        (case, "liger-triton-cudnn 0.8.5", "tokens_per_s", liger, "tok/s"),
        (case, "tilekern", "peak_gib", gib, "GiB"),
        (case, "hf-sdpa-cudnn 5.17.0", "peak_gib", 16.0, "GiB"),
        (case, "tilekern", "first_step_lag_s", lag, "s"),
        (case, "hf-sdpa-flash 5.17.0", "first_step_lag_s", 0.15, "s"),
        (case, "hf-sdpa-cudnn 5.17.0", "first_step_lag_s", 0.25, "s"),
    )


def test_a_family_is_judged_by_its_own_targets_and_has_a_line_of_the_table():
    good, bad = (
        render([of_families("llama-3-8b", 1250, 1000, 900, 11.2)]),
        render([of_families("llama-3-8b", 1240, 1000, 900, 11.3, lag=0.5)]),
    )
    assert "| ≥ 1.25 x the best peer | 1250 tok/s, 1.25 x | yes |" in line_of(good, "training llama-3-8b, tokens")
    assert "| ≤ 11.2 GiB | 11.2 GiB | yes |" in line_of(good, "training llama-3-8b, peak")
    assert "| ≤ 0.3 s | 0.25 s (0.4 s) | yes |" in line_of(good, "training, first step")
    for start in ("training llama-3-8b, tokens", "training llama-3-8b, peak", "training, first step"):
        assert "| **no** |" in line_of(bad, start)
    table = good.partition("### Training of the families")[2]
    assert line_of(table, "llama-3-8b") == (
        "| llama-3-8b 4096 tokens, 2 layers | 1,250 tokens/s, 11.2 GiB | 1,000 tokens/s, 16.0 GiB (hf-sdpa-cudnn) "
        "| 900 tokens/s (liger-triton-cudnn) | - | 1.25 x | 0.4 | 0.25 |"
    )
    gemma = render([of_families("gemma-2-9b", 1690, 1000, 900, 11.2)])
    assert "| ≥ 1.70 x the best peer | 1690 tok/s, 1.69 x | **no** |" in line_of(gemma, "training gemma-2-9b")
    assert "peak memory | gemma" not in gemma


LOSS_AND_RATE = {"tokens_per_s": (1500, "tok/s"), "loss": (11.87246, "nat")}


def test_models_that_gpus_share_have_a_table_and_no_targets():
    alone, shared = "qwen3-8b 2 x 4096 tokens, 2 layers", "qwen3-8b 2 x 4096 tokens, 2 layers, FSDP2 on 2 GPUs"
    found = rows(
        "parallel",
        *((alone, "tilekern", metric, *figure) for metric, figure in LOSS_AND_RATE.items()),
        *((shared, "tilekern", metric, *figure) for metric, figure in LOSS_AND_RATE.items()),
        (shared, "tilekern", "peak_gib", 10.2, "GiB"),
        (shared, "hf-sdpa-flash 5.17.0", "tokens_per_s", 1000, "tok/s"),
        (shared, "liger-triton 0.8.5", "tokens_per_s", 800, "tok/s"),
        (shared, "tilekern", "loss_on_one", 11.87242, "nat"),
    )
    text = render([Results(RUN | {"gpu": "H100", "gpus": 2}, found.rows)])
    table = text.partition("### Models that 2 GPUs share")[2].partition("###")[0]
    assert line_of(table, shared) == (
        f"| {shared} | 1,500 tokens/s, 10.2 GiB | 1,000 tokens/s | 800 tokens/s | 1.50 x | 11.8725 | 11.8724 |"
    )
    assert line_of(table, alone) == f"| {alone} | 1,500 tokens/s | - | - | - | 11.8725 | - |"
    assert "Targets" not in text
    assert "Not measured here" not in text


def test_ops_bound_by_arithmetic_are_judged_by_their_rate():
    causal, linear = "attention 4x4096 32+32x128 causal", "linear 8192x4096x14336"
    head = "fused_linear_cross_entropy 8192x4096x128256"
    text = render(
        [
            rows(
                "kernels",
                (causal, "tilekern", "forward_rate", 590.0, "TFLOP/s"),
                (causal, "tilekern", "backward_rate", 360.0, "TFLOP/s"),
                (causal, "sdpa-flash 2.11.0", "backward_rate", 281.0, "TFLOP/s"),
                (linear, "tilekern", "forward_rate", 750.0, "TFLOP/s"),
                (linear, "torch 2.11.0", "forward_rate", 787.0, "TFLOP/s"),
                (head, "tilekern", "forward_backward", 35000.0, "us"),
                (head, "tilekern", "extra_peak", 720.0, "MiB"),
                ("cross_entropy 4096x128256", "tilekern", "forward_backward", 790.0, "us"),
            )
        ]
    )
    assert "| ≥ 584 TFLOP/s | 590 TFLOP/s | yes |" in line_of(text, "attention forward")
    assert "| ≥ 1.3 x sdpa-flash 2.11.0's | 360 TFLOP/s | **no** |" in line_of(text, "attention backward")
    assert "| ≥ 0.95 x torch 2.11.0's | 750 TFLOP/s | yes |" in line_of(text, "linear forward")
    assert "| ≤ 36000 us | 3.5e+04 us | yes |" in line_of(text, "fused_linear_cross_entropy forward_backward")
    assert "| ≤ 700 MiB | 720 MiB | **no** |" in line_of(text, "fused_linear_cross_entropy, memory")
    assert "| ≤ 800 us | 790 us | yes |" in line_of(text, "cross_entropy forward_backward")


def test_what_needs_no_gpu_is_judged_apart_and_missed_by_no_gpu():
    scale = rows(
        "cache_scale", ("usual", "tilekern", "verify_rate", 510.0, "MB/s"), ("few", "tilekern", "lookup", 0.4, "ms")
    )
    run = RUN | {"gpu": "none"}
    text = render([kernels(40, 0.93, 44), dataclasses.replace(scale, run=run)])
    gpu, none = text.split("## No GPU\n")
    assert "| ≥ 500 MB/s | 510 MB/s | yes |" in line_of(none, "cache_tools verify")
    assert "| ≤ 0.3 ms | 0.4 ms | **no** |" in line_of(none, "lookup in a fresh process")
    assert "Not measured here: cache_tools ls with a filter, whole process; lookup of files" in none
    assert "verify" not in gpu


def test_every_explanation_is_of_a_figure_that_has_a_target():
    judged = {
        (verdict.what, verdict.case)
        for results in read_folder(RESULTS)
        for goal in GOALS
        if goal.benchmark == results.benchmark
        for verdict in goal.judge(results)
    }
    found = explanations()
    assert len(found) > 20
    assert not found.keys() - judged
    assert all(text and "## " not in text for text in found.values())


def test_every_run_says_what_it_ran_on_and_what_was_left_out():
    other = dataclasses.replace(kernels(1, 1, 1), run=RUN | {"gpu": "B200", "commit": "def456"})
    text = render([kernels(40, 0.93, 44), other])
    assert "- quack left out: ImportError: no" in text
    for gpu, commit in (("H200", "abc123"), ("B200", "def456")):
        assert f"## {gpu}\n" in text
        assert (
            f"| kernels | 2026-08-01T12:00:00+00:00 | {gpu} | 580.1 | none (cuda-tile 1.7.0) | 2.11.0 | {commit} |"
            in text
        )
    assert render([kernels(40, 0.93, 44), other]) == text


def test_nothing_is_no_error():
    text = render([])
    assert text.startswith("# Results")
    assert len({goal.title for goal in GOALS}) == len(GOALS)


PLACE = (
    "<!-- training: `python -m benchmarks report --readme README.md` writes this table -->",
    "<!-- training ends -->",
)


def trained(*speeds, notes=(), model="qwen3-8b", date=RUN["date"]):
    """A run of training from (case, provider, tokens per second, GiB)."""
    rows = [Row("train", case, who, "tokens_per_s", speed, "tok/s") for case, who, speed, _ in speeds]
    rows += [Row("train", case, who, "peak_gib", peak, "GiB") for case, who, _, peak in speeds]
    return Results(RUN | {"notes": list(notes), "model": model, "date": date}, rows)


def test_the_readme_s_table_has_the_fastest_of_each_family_and_says_what_ran_out_of_memory():
    run = trained(
        ("m 2048 tokens", "tilekern", 1234.4, 61.04), ("m 2048 tokens", "tilekern-nondeterministic", 9999, 61),
        ("m 2048 tokens", "liger-a 1.0", 900, 62), ("m 2048 tokens", "liger-b 1.0", 950, 63),
        ("m 2048 tokens", "hf-sdpa 5.0", 800, 70), ("m 2048 tokens", "torch.compile-layers 2.0", 999, 71),
        ("m 4096 tokens", "tilekern", 1000, 80), ("m 4096 tokens", "liger-a 1.0", 1001, 81),
        notes=["m 4096 tokens: hf-sdpa is out of memory, so longer ones were not tried"],
    )  # fmt: skip
    text = with_training(f"before\n{PLACE[0]}\nold\n{PLACE[1]}\nafter\n", [kernels(40, 0.9, 44), run])
    lines = [
        "| tokens of a step | tilekern | Hugging Face 5.0 | Liger 1.0 | torch.compile by layer 2.0 |",
        "| --- | --- | --- | --- | --- |",
        "| 2048 | 1,234 tokens/s, 61.0 GiB | 800 tokens/s, 70.0 GiB | 950 tokens/s, 63.0 GiB "
        "| 999 tokens/s, 71.0 GiB |",
        "| 4096 | 1,000 tokens/s, 80.0 GiB | out of memory | 1,001 tokens/s, 81.0 GiB | - |",
    ]
    table = "\n".join(lines)
    assert text == f"before\n{PLACE[0]}\n\n{table}\n\n{PLACE[1]}\nafter\n"
    assert with_training(text, [run]) == text
    newer = "2027-01-01T12:00:00+00:00"
    other = trained(
        *(("m 1 tokens", who, 1, 1) for who in ("tilekern", "liger", "hf", "torch.compile")), model="m", date=newer
    )
    assert with_training(text, [run, other]) == text, "the table is of one model"


def test_a_table_without_a_place_or_a_run_is_refused():
    run = trained(("m 1 tokens", "tilekern", 1, 1), ("m 1 tokens", "liger", 1, 1), ("m 1 tokens", "hf", 1, 1))
    with pytest.raises(InputError, match="training ends --> is missing"):
        with_training(PLACE[0], [run])
    with pytest.raises(
        InputError, match=r"no results of train qwen3-8b have tilekern, Hugging Face, Liger, torch\.compile by"
    ):
        with_training("\n".join(PLACE), [kernels(40, 0.9, 44)])
