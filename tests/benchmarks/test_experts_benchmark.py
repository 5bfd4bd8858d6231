"""The benchmark of layers of experts: tiny layers on the CPU, from the command line to the report."""

from __future__ import annotations

import functools
import io
import json
import sys
import warnings

import pytest
import torch
from benchmark_samples import RUN, Standing, answering

from benchmarks import experts, experts_cases
from benchmarks.__main__ import main
from benchmarks.experts_cases import BALANCED, FROZEN, KINDS, LORA, MAKERS, MODELS, ZIPF, cases, label, provider, routed
from benchmarks.kernels import check
from benchmarks.pages import maintainers, ops
from benchmarks.results import Results, Row, read_results
from tilekern.errors import InputError
from tilekern.tuning.plan.presets import PRESETS

SIZES = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48, "num_experts": 8, "num_local_experts": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The models of the table in small, by their names."""
    paths = {}
    for model in MODELS:
        paths[model] = tmp_path_factory.mktemp("models") / model
        paths[model].mkdir()
        config = PRESETS[model] | {name: size for name, size in SIZES.items() if name in PRESETS[model]}
        (paths[model] / "config.json").write_text(json.dumps(config))
    return {model: str(path) for model, path in paths.items()}


def in_place(monkeypatch, name, make):
    """A provider of this name that is known to make its layer so."""
    monkeypatch.setitem(MAKERS, name, experts_cases.Maker(make, "torch"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_providers_equal_the_loop_in_float64(model, kind, tiny):
    (case,) = cases(tiny[model], [24], [kind])
    tensors = case.tensors("cpu")
    expected = case.expected(tensors)
    names = ("tilekern", "tilekern-fp8", "transformers", "torch-grouped")
    for one in (provider(name, tiny[model]) for name in names):
        check(case, tensors, expected, one)
    case.products(tensors)
    assert len(tensors.inputs) == {FROZEN: 2, LORA: 6}.get(kind, 6 if model == "gpt-oss-20b" else 4)
    assert case.flops_of("backward") == case.flops_of("forward") * (1 if kind == FROZEN else 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.nightly
def test_compiled_layers_equal_it_too(model, tiny, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    (case,) = cases(tiny[model], [24], [BALANCED])
    tensors = case.tensors("cpu")
    expected = case.expected(tensors)
    for name in ("torch.compile", "torch.compile-grouped"):
        check(case, tensors, expected, provider(name, tiny[model]))


def test_layers_have_the_published_widths():
    oss, qwen = (experts_cases.experts_of(model) for model in MODELS)
    assert (oss.sizes, oss.choices) == ((32, 2880, 5760), 4)
    assert (qwen.sizes, qwen.choices) == ((128, 2048, 1536), 8)
    assert list(oss.shapes) == ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    with pytest.raises(InputError, match="llama-3-8b has no experts"):
        experts_cases.experts_of("llama-3-8b")


def test_routing_is_balanced_or_skewed_and_no_token_has_an_expert_twice():
    even, skewed = (routed(4096, 4, 32, is_skewed, "cpu") for is_skewed in (False, True))
    for ids in (even, skewed):
        assert (ids.sort(1).values.diff(dim=1) > 0).all()
    assert (even.flatten().bincount(minlength=32) == 512).all()
    counts = skewed.flatten().bincount(minlength=32)
    assert counts[0] > 5 * counts[-1] > 0


def test_the_command_measures_a_tiny_layer_on_the_cpu(tiny, tmp_path, monkeypatch, capsys):
    def in_place(job):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO("go\n"))
            experts.main(job.written(), str(tmp_path / "lines"))
        return map(json.loads, (tmp_path / "lines").read_text().splitlines())

    monkeypatch.setattr(experts, "_start", lambda job: Standing(job, in_place))
    arguments = ["--device", "cpu", "--models", tiny["gpt-oss-20b"], "--tokens", "24", "--samples", "2"]
    arguments += ["--kinds", "balanced,zipf", "--providers", "tilekern,transformers,liger-triton"]
    assert main(["experts", "--out", str(tmp_path), *arguments]) == 0
    results = read_results(tmp_path / "experts.json")
    assert results.cases() == [label("gpt-oss-20b", 24, BALANCED), label("gpt-oss-20b", 24, ZIPF)]
    for case in results.cases():
        who = {row.provider.split(" ")[0] for row in results.rows if row.case == case}
        assert who == {"tilekern", "transformers", "products"}
    assert any(note.startswith("liger-triton left out") for note in results.run["notes"])
    assert "gpt-oss-20b 24 tokens: tilekern, transformers" in capsys.readouterr().out


def lines_of(job):
    return [json.loads(json.dumps(line)) for line in experts.run(experts.Job.read(job.written()))]


def test_whoever_is_wrong_or_cannot_be_made_is_noted_and_the_others_go_on(tiny, monkeypatch):
    def wrong(layer):
        right = layer.run("grouped_mm")
        return lambda *given: 2 * right(*given)

    in_place(monkeypatch, "wrong", wrong)
    names = ("wrong", "liger-triton", "transformers")
    job = experts.Job(tiny["gpt-oss-20b"], 24, (BALANCED,), names, 2, 1.0, "cpu")
    lines = lines_of(job)
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    where = "gpt-oss-20b 24 tokens"
    assert notes[0].startswith(f"{where}: liger-triton left out: ")
    assert notes[1].startswith(f"{where}, balanced: wrong {torch.__version__} left out: AssertionError: wrong")
    rows = [Row(**line["row"]) for line in lines if line["kind"] == "row"]
    assert {row.provider.split(" ")[0] for row in rows} == {"transformers", "products"}
    assert any(line["kind"] == "case" for line in lines)


def test_liger_serves_no_layer_with_another_gate(tiny):
    with pytest.raises(InputError, match="another gate"):
        MAKERS["liger-triton"].make(experts_cases.experts_of(tiny["gpt-oss-20b"]))


def at(kind, who=""):
    return {"kind": "at", "case": label("gpt-oss-20b", 8, kind), "provider": who}


def row(kind, who, metric="forward_backward", value=1000.0, unit="us", model="gpt-oss-20b", tokens=8):
    return Row("experts", label(model, tokens, kind), who, metric, value, unit)


def done(kind, *rows):
    case = {"kind": "case", "case": label("gpt-oss-20b", 8, kind)}
    return [*({"kind": "row", "row": vars(one)} for one in rows), case]


def measured(names=("tilekern", "transformers")):
    kept = []
    effort = experts.Effort(2, 1.0)
    results = experts.measure(["gpt-oss-20b"], [8], (BALANCED, ZIPF), names, effort, kept.append, lambda _: None, "cpu")
    assert kept
    return results


def test_a_process_that_dies_at_a_provider_goes_on_without_it(monkeypatch):
    first = [at(BALANCED, "tilekern")]
    second = [at(BALANCED), *done(BALANCED, row(BALANCED, "transformers 5")), at(ZIPF), *done(ZIPF)]
    jobs = answering(monkeypatch, experts, ("ended with an illegal memory access", first), ("", second))
    results = measured()
    assert [job.providers for job in jobs] == [("tilekern", "transformers"), ("transformers",)]
    assert [job.kinds for job in jobs] == [(BALANCED, ZIPF)] * 2
    said = "gpt-oss-20b 8 tokens, balanced: tilekern left out: ended with an illegal memory access"
    assert experts.failures(results) == [said]
    assert [one.provider for one in results.rows] == ["transformers 5"]
    results.run["gpu"] = "H200"
    assert "| gpt-oss-20b 8 tokens, balanced | ended with an illegal memory access |" in ops.page([results])[ops.NAME]


def test_a_process_that_dies_in_a_race_goes_on_with_the_next_case(monkeypatch):
    first = [at(BALANCED, "tilekern"), at(BALANCED, "transformers"), at(BALANCED)]
    second = [at(ZIPF), *done(ZIPF, row(ZIPF, "tilekern"))]
    jobs = answering(monkeypatch, experts, ("not done after 90 s", first), ("", second))
    results = measured()
    assert [job.kinds for job in jobs] == [(BALANCED, ZIPF), (ZIPF,)]
    assert experts.failures(results) == [
        "gpt-oss-20b 8 tokens, balanced: tilekern, transformers left out: not done after 90 s"
    ]


def test_who_is_known_to_die_has_a_process_of_its_own_and_products_count_once(monkeypatch):
    beside = [row(BALANCED, "tilekern"), row(BALANCED, "products alone", value=900.0)]
    apart = [row(BALANCED, "odd 1"), row(BALANCED, "products alone", value=950.0)]
    monkeypatch.setitem(MAKERS, "odd", experts_cases.Maker(lambda _: None, "torch", apart=True))
    jobs = answering(monkeypatch, experts, *(("", [at(BALANCED), *done(BALANCED, *rows)]) for rows in (beside, apart)))
    results = measured(("odd", "tilekern"))
    assert [job.providers for job in jobs] == [("tilekern",), ("odd",)]
    assert [(one.provider, one.value) for one in results.rows] == [
        ("tilekern", 1000.0), ("products alone", 900.0), ("odd 1", 1000.0),
    ]  # fmt: skip


def test_where_nothing_is_left_that_is_an_error(monkeypatch):
    answering(monkeypatch, experts, ("ended with x", [at(BALANCED, "tilekern")]))
    with pytest.raises(InputError, match=r"nothing was measured.*tilekern left out: ended with x"):
        measured(("tilekern",))


def test_tilekern_s_failure_is_said_when_all_is_written(monkeypatch, tmp_path, capsys):
    lines = [at(BALANCED), *done(BALANCED, row(BALANCED, "transformers 5"))]
    answering(monkeypatch, experts, ("ended with y", [at(BALANCED, "tilekern")]), ("", lines))
    arguments = ["--models", "gpt-oss-20b", "--tokens", "8", "--kinds", "balanced", "--device", "cpu"]
    assert main(["experts", *arguments, "--providers", "tilekern,transformers", "--out", str(tmp_path)]) == 2
    assert "tilekern failed: gpt-oss-20b 8 tokens, balanced: tilekern left out: ended" in capsys.readouterr().err
    assert read_results(tmp_path / "experts.json").rows


def test_memory_that_is_kept_and_waits_are_counted(tiny, monkeypatch):
    allocated, modes = iter([1000, 1000 + 24 * 64 * 2 + (1 << 30)]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waiting(layer):
        run = layer.run("grouped_mm")

        def wrapped(*given):
            for text in ("called a synchronizing CUDA operation", "something else"):
                warnings.warn(text, stacklevel=1)
            return run(*given)

        return wrapped

    in_place(monkeypatch, "waiting", waiting)
    (case,) = cases(tiny["qwen3-30b-a3b"], [24], [BALANCED])
    tensors, one = case.tensors("cpu"), provider("waiting", tiny["qwen3-30b-a3b"])
    kept = experts.kept_row(case, tensors, provider("transformers", tiny["qwen3-30b-a3b"]))
    assert (kept.metric, kept.value, kept.unit) == ("kept_for_backward", 1.0, "GiB")
    assert experts.waits_row(case, tensors, one).value == 1
    assert modes == ["warn", "default"]


@pytest.mark.parametrize("model", MODELS)
def test_the_plan_is_what_the_layers_ask_for(model, tiny, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["experts", "--models", tiny[model], "--tokens", "24", "--plan", str(path), "--gpu", "H200"]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    planned = {problem["kernel"] for problem in json.loads(path.read_text())["problems"]}
    assert {"route_place", "experts_gate", "experts_gate_backward", "experts_combine", "grouped_linear"} <= planned


def figures():
    """Return figures of both models at both lengths that just meet each target."""
    rows = []
    for (model, tokens), took in {
        ("gpt-oss-20b", 4096): 5000, ("gpt-oss-20b", 8192): 9800,
        ("qwen3-30b-a3b", 4096): 3200, ("qwen3-30b-a3b", 8192): 4800,
    }.items():  # fmt: skip
        of = functools.partial(row, model=model, tokens=tokens)
        rows += [of(BALANCED, "tilekern", value=took), of(ZIPF, "tilekern", value=1.14 * took)]
        rows += [of(kind, who, value=v) for kind in (FROZEN, LORA) for who, v in (("tilekern", 1e3), ("a 1", 1.2e3))]
        rows += [of(BALANCED, "tilekern", "kept_for_backward", 0.45, "GiB"), of(BALANCED, "tilekern", "waits", 0, "1")]
    return rows


def targets(rows):
    return maintainers.page([Results(RUN, rows)])[maintainers.NAME]


def test_the_targets_are_those_of_the_table():
    assert "## H200: 21 of 21 figures meet their targets" in targets(figures())
    worse = [vars(one) | {"value": one.value * 1.01 + (one.unit == "1")} for one in figures() if one.provider != "a 1"]
    worse += [vars(one) for one in figures() if one.provider == "a 1"]
    # Zipf routing is as many times the balanced time as before.
    assert "## H200: 4 of 21 figures meet their targets" in targets([Row(**one) for one in worse])


def test_what_was_not_measured_is_listed_with_its_target():
    text = targets([Row("kernels", "a", "tilekern", "forward", 1.0, "us")])
    listed = next(line for line in text.splitlines() if line.startswith("Not measured here: "))
    wanted = {
        "layer of experts, gpt-oss-20b 8192 tokens": "≤ 9.8 ms",
        "layer of experts with Zipf routing": "≤ 1.15 x balanced",
        "layer of experts, lora": "≥ 1.2 x the best peer",
        "layer of experts, kept for the backward": "≤ 0.45 GiB",
        "training gpt-oss-20b, tokens a second": "≥ 2.20 x the best peer",
    }
    for title, target in wanted.items():
        assert f"{title} ({target})" in listed
