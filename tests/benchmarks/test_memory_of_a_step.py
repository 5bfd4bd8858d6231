"""The memory of a step as it is foretold: what layers keep, to the byte, and a peak beside what a GPU measured."""

import functools

import pytest
from benchmark_samples import is_one_line

from benchmarks.__main__ import main
from benchmarks.environment import RESULTS
from benchmarks.memory import Kept, foretell
from benchmarks.providers import OURS
from benchmarks.results import read_results
from benchmarks.train import GIB

TOKENS = 4096
foretold = functools.cache(foretell)
# Of Qwen3-8B, in bytes of a token: a number of bfloat16 for each column, and float32 for each head or row.
GATE_AND_UP, QKV, SUMS, RESULT = 2 * 2 * 12288, 2 * (4096 + 2 * 1024), 2 * 2 * 4096, 2 * 4096 + 4 * 32
BF16 = GATE_AND_UP + QKV + SUMS + RESULT + 2 * 2 * 4096 + 2 * (4096 + 1024)
# Scales of the rows of attention's result and of the gate's lie in one memory with those of weights.
ROUNDED = 2 * (4096 + 4) + 2 * 4
FP8 = GATE_AND_UP + QKV + SUMS + RESULT + ROUNDED
# The scales of a layer's weights, which are kept too: a float32 for each row.
SCALES = 4 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)


def kept_by_a_layer(format):
    """Bytes that one more layer keeps for the backward."""
    more, fewer = (foretold("qwen3-8b", TOKENS, format, layers=layers).kept for layers in (3, 2))
    return sum(more[kind] - fewer[kind] for kind in more if kind.op != "fused_linear_cross_entropy")


@pytest.mark.slow
def test_a_layer_keeps_for_each_token_what_the_page_says():
    assert (BF16, FP8) == (112768, 94352)
    assert kept_by_a_layer("") == TOKENS * BF16
    # In place of their inputs; queries and keys once.
    assert kept_by_a_layer("rowwise") == TOKENS * FP8 + SCALES


def test_kinds_are_named_by_the_ops_that_keep_them():
    """A whole layer is one op."""
    plain, found = (foretold("qwen3-8b", TOKENS, format, layers=3) for format in ("", "rowwise"))
    # Beside the statistics of attention's rows.
    assert plain.of_a_token(Kept("decoder_layer", "bfloat16")) == BF16 - 4 * 32
    # Beside these and the scales of rows.
    assert found.of_a_token(Kept("decoder_layer", "bfloat16")) == FP8 - 4 * 32 - ROUNDED
    assert found.of_a_token(Kept("decoder_layer", "float8_e4m3fn")) == 2 * 4096


@pytest.mark.slow
def test_the_peak_of_bfloat16_is_what_a_gpu_measured():
    results = read_results(RESULTS / "sm_90-h200-132" / "train.json")
    (measured,) = (
        row.value for row in results.rows
        if (row.provider, row.metric, row.case) == (OURS, "peak_gib", "qwen3-8b 8192 tokens")
    )  # fmt: skip
    assert foretold("qwen3-8b", 8192).peak / GIB == pytest.approx(measured, rel=3e-3)


@pytest.mark.slow
def test_8_bit_floats_take_5_percent_less_at_8192_tokens():
    plain, found = (foretold("qwen3-8b", 8192, format) for format in ("", "rowwise"))
    assert found.peak < 0.95 * plain.peak
    assert found.standing == plain.standing


def test_the_command_prints_peaks_and_what_is_kept(capsys):
    assert main(["memory", "qwen3-8b", "--tokens", "512", "--layers", "1", "--formats", "bf16,rowwise"]) == 0
    first, *_, second = (line for line in capsys.readouterr().out.splitlines() if not line.startswith(" "))
    assert first.startswith("qwen3-8b, 512 tokens, bf16, H200: peak ")
    assert second.startswith("qwen3-8b, 512 tokens, rowwise, H200: peak ")
    is_one_line(capsys, ["memory", "--formats", "int8"], "int8")
    is_one_line(capsys, ["memory", "--layers", "37"], "36 layers")
