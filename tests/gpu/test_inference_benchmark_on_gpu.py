"""The benchmark of the engine on a GPU: each part of the smallest model gives its figures, and leaves nothing out."""

import pytest

from benchmarks import inference, inference_parts
from benchmarks.inference import INT8, Job
from benchmarks.results import Row
from tilekern.runtime import dispatch

MODEL = "mingpt-nano"


@pytest.fixture(autouse=True)
def compiled():
    dispatch.set_miss_policy("compile")
    yield
    dispatch.set_miss_policy(None)


def rows_of(part, *ways, dtype="bfloat16"):
    job = Job(MODEL, part, ways, ("2x64",), (2,), (256,), dtype, samples=16, seconds=0.5)
    found = list(inference.run(job))
    assert not [note for note in found if isinstance(note, str) and "left out" in note]
    rows = [x for x in found if isinstance(x, Row)]
    return {(x.provider.split(" ")[0], x.case.removeprefix(f"{MODEL} "), x.metric): x.value for x in rows}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_whole_sequences(dtype):
    ways = "tilekern", INT8, "torch", "torch-graph", "mingpt"
    rows = rows_of("forward", *ways, dtype=dtype)
    assert all(0 < rows[way, "forward, 2 x 64", "forward_ms"] < 100 for way in ways)
    # A graph waits for nobody.
    assert rows["torch-graph", "forward, 2 x 64", "forward_ms"] < rows["torch", "forward, 2 x 64", "forward_ms"]


def test_generated_tokens():
    rows = rows_of("decode", "tilekern", "torch-graph")
    case = "decode, batch 2, context 256"
    assert rows["tilekern", case, "token_ms_samples"] == inference_parts.GENERATED - 1
    assert all(0 < rows[way, case, "step_ms"] < 100 for way in ("tilekern", "torch-graph"))


def test_kernels_take_what_the_graph_takes():
    rows = rows_of("kernels", "tilekern")
    for case in ("forward, 2 x 64", "decode, batch 2, context 256"):
        whole = rows["tilekern", f"{case}, kernel all kernels", "step_us"]
        assert 0 < whole < 10_000
        parts = [value for (_, name, metric), value in rows.items() if name.startswith(case) and metric == "step_us"]
        assert sum(parts) == pytest.approx(2 * whole, rel=0.01)


def test_a_fresh_process():
    rows = rows_of("start", "tilekern")
    for what in ("logits", "token"):
        assert 0 < rows["tilekern", f"start, first {what}", "without_load_s"] < 30
    assert rows["tilekern", "installed", "artifacts_mb"] > 0
