"""The search for the longest sequence that fits: lengths that it tries, and its way from the command line to a file."""

import json
from dataclasses import replace

import pytest
import torch
from benchmark_samples import RUN

from benchmarks import longest
from benchmarks.__main__ import main
from benchmarks.longest import Search, rows_of, searches_of
from benchmarks.pages import longest as pages
from benchmarks.results import Results, read_results
from benchmarks.training import Job
from tilekern.errors import InputError

GIB = 1 << 30
SEARCH = Search(Job("tilekern", "qwen3-8b", 0, (), ()), 78.0, 8192, 1024, 1 << 20)


def found(search, peak):
    """The longest length, and all that were tried, where a length needs ``peak(length)`` bytes."""
    tried = {}
    while (length := search.following(tried)) is not None:
        assert length not in tried
        assert length % search.grid == 0
        assert search.grid <= length <= search.most
        tried[length] = peak(length) if peak(length) <= search.gib * GIB else None
    return max((length for length, bytes_ in tried.items() if bytes_ is not None), default=None), list(tried)


@pytest.mark.parametrize(
    ("base", "each", "tries"), [(61, 500_000, 6), (61, 170_000, 6), (61, 20_000, 6), (2, 3_000_000, 6), (77.9, 5e6, 6)]
)
def test_a_line_is_found_in_few_tries(base, each, tries):
    def peak(length):
        return int(base * GIB + each * length)

    best, tried = found(SEARCH, peak)
    exact = (78 - base) * GIB / each
    if exact < SEARCH.grid:
        assert best is None
    else:
        assert exact * (1 - 1 / 32) - SEARCH.grid <= best <= exact
    assert len(tried) <= tries


def test_a_curve_and_steps_are_found():
    def peak(length):
        return int(61 * GIB + 100_000 * length + 2 * length**2 + (GIB if length > 50_000 else 0))

    best, tried = found(SEARCH, peak)
    assert peak(best) <= 78 * GIB < peak(best + max(1024, best // 32 + 1024))
    assert len(tried) <= 9


def test_the_longest_that_may_be_tried_ends_the_search():
    search = Search(SEARCH.job, 78.0, 8192, 1024, 20_000)
    assert found(search, lambda _: 0)[0] == 19456


def lines(*tried):
    return [{"kind": "tried", "tokens": n, "fits": fits} | more for n, fits, more in tried]


def test_rows_have_the_longest_that_fitted_and_the_shortest_that_did_not():
    rows = rows_of(
        lines((8192, True, {"peak_bytes": 2 * GIB}), (65536, False, {}), (32768, True, {"peak_bytes": 70 * GIB})),
        SEARCH,
    )
    assert {row.metric: row.value for row in rows} == {"tokens": 32768, "peak_gib": 70, "too_long_tokens": 65536}
    assert {row.case for row in rows} == {"qwen3-8b, 78 GiB"}
    assert {row.metric: row.value for row in rows_of(lines((128, False, {})), SEARCH)} == {
        "tokens": 0, "too_long_tokens": 128,
    }  # fmt: skip
    assert not rows_of([{"kind": "begun"}], SEARCH)


def test_searches_of_models_caps_kinds_and_trainers():
    made = searches_of(SEARCH, ["a", "b"], [139, 78], ["", "attention", "full"], ["tilekern", "hf-sdpa-flash"])
    assert len(made) == 2 * 2 * 5
    assert made[1].job.provider == "hf-sdpa-flash"
    assert [search.job.checkpointing for search in made[:5]] == ["", "", "attention", "full", "full"]
    assert Search.read(made[7].written()) == made[7]
    job = Job("tilekern", "qwen3-8b", 2, (), (), checkpointing="attention", lora=8)
    assert Search(job, 139, 1, 1, 1).case == (
        "qwen3-8b, 2 layers, LoRA of rank 8, checkpointing, attention kept, 139 GiB"
    )


def test_the_page_has_a_line_for_each_model_and_memory():
    rows = []
    for gib, kind, fits in ((139, "", 40960), (139, "attention", 131072), (78, "full", 65536)):
        search = Search(replace(SEARCH.job, checkpointing=kind), gib, 1, 1, 1)
        rows += rows_of(lines((fits, True, {}), (fits + 1024, False, {})), search)
    (text,) = pages.page([Results(RUN, rows)]).values()
    (first, second) = (line for line in text.splitlines() if line.startswith("| qwen3-8b"))
    assert first.startswith("| qwen3-8b | 139 GiB | tilekern | 40,960 (41,984) | - | 131,072 (132,096) | - |")
    assert second.startswith("| qwen3-8b | 78 GiB | tilekern | - | 65,536 (66,560) | - | - |")
    assert "No run is recorded" in pages.page([])[pages.NAME]


class Leaky:
    """A training whose memory is what it is said to be."""

    device = "cpu"
    trainer = type("Trainer", (), {"attention": "tilekern"})

    def __init__(self, limit):
        self.limit = limit

    def free(self):
        pass

    def tokens(self, tokens, _):
        return tokens

    def step(self, tokens):
        if tokens > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return torch.tensor(1.0)


def test_a_step_that_does_not_fit_is_tried_shorter_and_other_errors_are_shown(monkeypatch):
    search = Search(Job("tilekern", "", 0, (), (), device="cpu"), 1.0, 64, 8, 512)
    monkeypatch.setattr(longest, "begin", lambda _: Leaky(200))
    tried = {line["tokens"]: line["fits"] for line in longest.run(search) if line["kind"] == "tried"}
    assert max(n for n, fits in tried.items() if fits) == 200
    assert min(n for n, fits in tried.items() if not fits) == 208
    monkeypatch.setattr(longest, "begin", lambda _: Leaky(100))
    assert [line for line in longest.run(search) if line["kind"] == "tried"] == lines((128, False, {}))

    class Broken(Leaky):
        def step(self, _):
            raise RuntimeError("something else")

    monkeypatch.setattr(longest, "begin", lambda _: Broken(0))
    with pytest.raises(RuntimeError, match="something else"):
        list(longest.run(search))


@pytest.mark.processes
@pytest.mark.nightly
def test_a_tiny_model_from_the_command_line(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["--device", "cpu", "--first", "8", "--grid", "8", "--most", "32", "--checkpoints", "none,attention"]
    assert main(["longest", str(folder), "--out", str(tmp_path), *arguments]) == 0
    results = read_results(tmp_path / "longest.json")
    assert results.cases() == ["tiny, 139 GiB", "tiny, checkpointing, attention kept, 139 GiB"]
    assert {row.value for row in results.rows} == {32}
    assert main(["longest", str(folder), "--out", str(tmp_path), *arguments, "--gib", "many"]) == 2
    assert "numbers of GiB are whole numbers" in capsys.readouterr().err


def test_nothing_measured_is_an_error(monkeypatch):
    class Ended:
        def __init__(self, *_):
            pass

        def wait_until_ready(self):
            pass

        def done(self):
            return "ended with exit code 1", []

        def end(self):
            pass

    monkeypatch.setattr(longest, "Process", Ended)
    with pytest.raises(InputError, match="ended early"):
        longest.measure([SEARCH], 1.0, lambda _: None, lambda _: None)
