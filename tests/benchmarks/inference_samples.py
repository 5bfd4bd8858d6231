"""A run of the engine's benchmark that nobody measured, for the tests of its page: its form is a real one's."""

from benchmarks.inference import BENCHMARK, INT8, SMALL, sizes_of
from benchmarks.inference_kernels import REPLAYS, Launch
from benchmarks.inference_kernels import rows_of as rows_of_kernels
from benchmarks.latency import rows_of
from benchmarks.results import Results, Row

RUN = {
    "date": "2026-08-01T12:00:00+00:00", "gpu": "H200", "driver": "580.1", "toolkit": "none (cuda-tile 1.7.0)",
    "torch": "2.11.0", "commit": "abc123def4567890", "dtype": "bfloat16",
    "notes": ["gpt2 <decode>, batch 64: hf-compiled left out: RuntimeError: no"],
}  # fmt: skip
FACTORS = {
    "tilekern": 1.0, "torch 2.11.0": 9.0, "torch-graph 2.11.0": 1.4, "mingpt 2.11.0": 14.0, "torch-compiled 2.11.0": 1.2
}  # fmt: skip


def times(median_ms):
    """Some times around a median, with a few long ones."""
    return [
        median_ms * (1 + 0.02 * ((7 * number) % 11 - 5) + (0.9 if number % 97 == 96 else 0)) for number in range(200)
    ]


def forwards(case, median_ms, tokens):
    for who, factor in FACTORS.items():
        yield from rows_of(BENCHMARK, case, who, "forward_ms", times(factor * median_ms))
        yield Row(BENCHMARK, case, who, "tokens_per_s", 1000 * tokens / (factor * median_ms), "tok/s")


def decoded(model, batch, context, median_ms):
    case = f"{model} decode, batch {batch}, context {context}"
    for who, metric, factor in (
        ("tilekern", "token_ms", 1.1), ("tilekern", "step_ms", 1.0), (INT8, "token_ms", 0.7), (INT8, "step_ms", 0.6),
        ("torch-graph 2.11.0", "step_ms", 2.7), ("hf-compiled 5.17.0", "token_ms", 6.0),
    ):  # fmt: skip
        yield from rows_of(BENCHMARK, case, who, metric, times(factor * median_ms))
        if metric == "token_ms":
            yield Row(BENCHMARK, case, who, "tokens_per_s", 1000 * batch / (factor * median_ms), "tok/s")
            yield Row(BENCHMARK, case, who, "first_token_ms", 40 * median_ms, "ms")


def traced(graph, layers, rows):
    kinds = [
        Launch("append_to_cache", f"tokens {rows}, batch 1, heads 12, kv_heads 12, head_dim 64, pairs 32"),
        Launch("matmul", f"rows {rows}, inner 768, columns 2304, biased, b_transposed"),
        Launch("matmul", f"rows {rows}, inner 768, columns 768, biased, b_transposed"),
        Launch("matmul", f"rows {rows}, inner 768, columns 3072, biased, gelu_tanh, b_transposed"),
        Launch("fused_add_layer_norm_forward", f"rows {rows}, columns 768"),
        Launch("attention_forward", f"batch 8, queries {rows // 8}, keys {rows // 8}, heads 12, kv_heads 12, causal"),
    ]
    launches = [Launch("embedding", f"rows {rows}, columns 768, positioned"), *kinds * layers]
    events, now = [], 0.0
    for _ in range(REPLAYS):
        for number in range(len(launches)):
            took = 2.0 + number % len(kinds)
            events.append({"cat": "kernel", "ts": now, "dur": took})
            now += took + 0.5
    return rows_of_kernels(graph, "tilekern", launches, events)


def sample():
    """The run."""
    rows = [row for model in ("gpt2", *SMALL, "qwen3-8b") for row in sizes_of(model)]
    rows += forwards("gpt2 forward, 8 x 128", 0.6, 1024)
    rows += forwards("mingpt-tile-medium forward, 8 x 128", 0.2, 1024)
    for number, model in enumerate(SMALL):
        rows += forwards(f"{model} forward, 4 x 64", 0.04 + 0.012 * number, 256)
    for number, batch in enumerate((1, 64)):
        rows += decoded("gpt2", batch, 512, 0.17 * (1 + number))
        rows += decoded("qwen3-8b", batch, 4096, 3.8 * (1 + number))
    for case, first in (("gpt2 start, first logits", 0.06), ("gpt2 start, first token", 0.09)):
        steps = {"interpreter": 0.02, "import": 0.05, "gpu": 0.11, "load": 0.16, "first": first}
        rows += [Row(BENCHMARK, case, "tilekern", f"{name}_s", value, "s", 0.001) for name, value in steps.items()]
        rows.append(Row(BENCHMARK, case, "tilekern", "without_load_s", sum(steps.values()) - 0.16, "s", 0.002))
    rows.append(Row(BENCHMARK, "gpt2 start, import alone", "torch 2.11.0", "import_s", 2.4, "s", 0.1))
    for name, value in (("tilekern", 3.7), ("dependencies", 4.0), ("artifacts", 1.2), ("all", 8.9), ("packs", 28)):
        rows.append(Row(BENCHMARK, "gpt2 installed", "tilekern", f"{name}_mb", value, "MB"))
    rows += traced("gpt2 forward, 8 x 128", 12, 1024)
    rows += traced("gpt2 decode, batch 1, context 512", 12, 8)
    rows += traced("mingpt-tile-medium forward, 8 x 128", 6, 1024)
    return Results(RUN, rows)
