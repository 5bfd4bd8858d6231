"""Options of the tuner: lists of numbers, dtypes, what ``--help`` names, and what is printed beside a number."""

import json

import pytest
import torch
from tuning_samples import SMALL

from tilekern.compile import cute_compiler
from tilekern.errors import InputError
from tilekern.runtime.switches import EXTRAS, OPS
from tilekern.spec import Problem
from tilekern.spec.targets import KNOWN, resolve
from tilekern.tuning import cli
from tilekern.tuning.commands import preflight as preflight_command
from tilekern.tuning.options import counts
from tilekern.tuning.pipeline import Result
from tilekern.tuning.plan.choosing import plan_of_problem
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.plan.steps import Steps, as_tuple, dtype_named
from tilekern.tuning.preflight import EXACT, MISSING, NEAREST, Need, Preflight
from tilekern.tuning.sweep import folder as sweeps
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.terminal import _details, progress_bars, sizes_of


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2048", [2048]), ("2048,8192", [2048, 8192]), ("2,48", [2, 48]), ("64,128", [64, 128]), ("64,512", [64, 512]),
        ("128,256,512", [128, 256, 512]), ("2, 48", [2, 48]), ("16, 384", [16, 384]), ("100,200", [100, 200]),
        (" 8 ,16 ", [8, 16]), ("0", [0]),
    ],
)  # fmt: skip
def test_lists_of_numbers_are_taken(text, numbers):
    assert counts(text, "--tokens", "2048,8192") == numbers


@pytest.mark.parametrize(
    ("text", "one"), [("2,048", 2048), ("4,096", 4096), ("8,192", 8192), ("16,384", 16384), ("1,048,576", 1048576)]
)
@pytest.mark.parametrize("option", ["--tokens", "--sequence"])
def test_one_number_with_commas_at_its_thousands_is_asked_back(option, text, one):
    with pytest.raises(InputError, match=f"{option} '{text}': did you mean {one}\\?"):
        counts(text, option, "2048,8192")
    assert cli.main(["qwen3-0.6b", "--gpu", "B200", option, text, "--dry-run"]) == 2


@pytest.mark.parametrize("text", ["048", "2,048,8192", "8192,08", "1.5", "-1", "2_048", "², 4", "x", "2048;8192"])
def test_other_values_than_lists_of_numbers_are_refused(text):
    with pytest.raises(InputError, match="--tokens"):
        counts(text, "--tokens", "2048,8192")


@pytest.mark.parametrize(
    ("given", "name"),
    [("bf16", "bfloat16"), ("BF16", "bfloat16"), (" fp16", "float16"), ("half", "float16"), ("fp32", "float32"),
     ("float32", "float32"), (torch.bfloat16, "bfloat16"), ("torch.float16", "float16")],
)  # fmt: skip
def test_short_names_of_dtypes_are_understood(given, name):
    assert dtype_named(given) == name
    assert Steps(dtype=as_tuple(given)).dtype == [name]


def test_others_are_refused_with_those_that_are_known():
    with pytest.raises(InputError, match="unknown dtype 'int8'; known: bfloat16, float16, float32, and bf16, fp16"):
        Steps(dtype=["int8"])
    for wrong in ("2048", 2048.0, True):
        with pytest.raises(InputError, match="a token count is a whole number"):
            Steps(tokens=[wrong])


def test_a_problem_may_name_them_too():
    long, short = (
        plan_of_problem(f"rms_norm rows=64,columns=48,dtype={dtype}", resolve("H200")) for dtype in ("bfloat16", "bf16")
    )
    assert long.problems == short.problems


@pytest.mark.parametrize(
    ("words", "format"),
    [(["--fp8"], "rowwise"), (["--fp8", "--packed"], "rowwise"), (["--fp8", "blockwise"], "blockwise")],
)
def test_fp8_may_name_a_format(words, format, monkeypatch):
    found = []
    monkeypatch.setattr("tilekern.tuning.options.steps_of", lambda **given: found.append(given) or Steps([64]))
    cli.main(["preflight", "qwen3-0.6b", "--gpu", "H200", *words])
    assert [given["fp8"] for given in found] == [format]


@pytest.mark.parametrize("words", [["preflight", "qwen3-0.6b", "--fp8", "tensorwise"], ["--fp8", "Qwen/Qwen3-8B"]])
def test_a_word_after_fp8_that_is_not_a_format_is_refused_with_the_formats(words, capsys):
    assert cli.main([*words, "--gpu", "H200"]) == 2
    assert capsys.readouterr().err == (
        f"tilekern: --fp8 '{words[-1]}': unknown format; known: rowwise, blockwise, mxfp8; write --fp8 rowwise before "
        "the name of a model\n"
    )


@pytest.mark.parametrize("command", [[], ["preflight"]])
def test_help_names_presets_gpus_and_ops(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert not [name for name in (*PRESETS, *(target.name for target in KNOWN), *OPS, *EXTRAS) if name not in text]
    assert "--op," in text


def test_flags_have_their_names_in_tables():
    problem = Problem({"rows": 8, "causal": True, "packed": False, "dtype": "bfloat16"})
    assert sizes_of(problem) == "8 causal bfloat16"


def test_reasons_stand_beside_what_failed(h200):
    compile = {
        "distinct": 9,
        "compiled": 9,
        "failed": 2,
        "open": 0,
        "tileiras_share": 0.5,
        "reasons": {"exceeded 60 s": 2},
    }
    measure = {"timed": 5, "wrong": 1, "quarantined": 1, "seconds": 1.0, "reasons": {"y: too far": 1, "it hung": 1}}
    done = Result("a model", h200, {}, {"compile": 2.0, "measure": 3.0}, compile=compile, measure=measure)
    assert "2 failed: exceeded 60 s, 50 %" in _details(done, "compile")
    assert _details(done, "measure").endswith("1 wrong, 1 in quarantine: 1 x y: too far; 1 x it hung)")
    done.compile |= {"failed": 0, "reasons": {}}
    assert "0 failed, 50 %" in _details(done, "compile")
    done.compile |= {"failed": 5, "reasons": {str(number): 1 for number in range(5)}}
    assert "5 failed: 1 x 0; 1 x 1; 1 x 2; 2 other reasons, 50 %" in _details(done, "compile")


def test_preflight_counts_each_problem_once(h200):
    def need(state, provenance):
        return Need("rope", SMALL[1], state, provenance, None, None, False)

    needs = (need(EXACT, "measured"), need(EXACT, "predicted"), need(NEAREST, "measured"), need(MISSING, None))
    found = Preflight("a model", h200, "served", needs, is_here=False)
    assert sum(found.counts().values()) == len(needs)
    assert found.provenances() == {"measured": 2, "predicted": 1, "default": 0}
    said = preflight_command._told(found)[0]
    assert said.endswith("4 problems: 2 exact (1 measured, 1 predicted), 1 nearest (1 measured), 1 missing")
    assert json.loads(json.dumps(found.as_json()))["counts"] == found.counts()


def test_bars_have_the_time_that_is_left(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bars(quiet=False) as tell:
        tell("publish", 0, 0)
        assert capsys.readouterr().err == ""
        for done in (1, 2, 3):
            for stage in ("compile", "measure"):
                tell(stage, done, 4)
    said = capsys.readouterr().err
    assert all(part in said for part in ("compile", "measure", "3/4", "so far, about"))
    assert "publish" not in said


@pytest.mark.parametrize(("before", "shown"), [([], ""), ([("compile", 3, 4)], "compile 3/4")])
def test_a_stage_that_fails_at_its_start_leaves_no_bar(capsys, monkeypatch, before, shown):
    monkeypatch.setenv("COLUMNS", "120")

    def run():
        with progress_bars(quiet=False) as tell:
            for stage in before:
                tell(*stage)
            tell("measure", 0, 0)
            raise InputError("no GPU")

    with pytest.raises(InputError):
        run()
    said = capsys.readouterr().err
    assert "measure" not in said
    assert said.count("\n") == len(before)
    assert all(part in said for part in shown.split())


@pytest.mark.parametrize("ended", [True, False])
def test_cute_that_is_installed_later_does_not_open_a_finished_sweep(tmp_path, monkeypatch, h200, ended):
    problem = (
        "rms_norm_forward",
        Problem({"rows": 64, "columns": 1024, "dtype": "bfloat16", "weight_dtype": "bfloat16"}),
    )
    monkeypatch.setattr(cute_compiler, "compiler", lambda: None)
    sweep = sweeps.Sweep(tmp_path)
    sweep.begin(h200, "a model", [problem])
    with sweep.running("compile"):
        pass
    if not ended:
        lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines if not x["ended"]))
    before = sweeps.Sweep(tmp_path, foreign=True).candidates(*problem)
    monkeypatch.setattr(cute_compiler, "compiler", lambda: "a compiler")
    after = sweeps.Sweep(tmp_path, foreign=True).candidates(*problem)
    assert (after == before) == ended
    assert len(sweeps.Sweep(tmp_path).candidates(*problem)) > len(before), "a run compiles what it can"
    assert len(candidates(*problem, h200)) > len(before)
