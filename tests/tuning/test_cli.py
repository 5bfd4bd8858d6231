"""Decisions of the tuner's command line that need no compiler."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import RecordedExecutor
from tuning_samples import SMALL

import tilekern
from tilekern.compile import toolchain
from tilekern.spec.targets import resolve
from tilekern.tuning import cli, commands, pipeline
from tilekern.tuning.commands import COMMANDS, command_named, refresh, tune
from tilekern.tuning.compile.stage import compile_all
from tilekern.tuning.measure.stage import MeasureSummary
from tilekern.tuning.sweep.folder import Sweep

# The head sizes of DeepSeek-V3.
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.processes
def test_a_sweep_in_which_nothing_compiled_is_an_error(monkeypatch, tmp_path: Path, capsys, h200, first_configs):
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(h200, "test", [SMALL], first_configs)
    compile_all(sweep, jobs=2, timeout_s=0.001)
    monkeypatch.setattr("tilekern.tuning.compile.stage.wanted", lambda *_: iter(()))
    code = cli.main(["--stages", "compile,measure", "--sweep", str(sweep.folder), "--cache-dir", str(tmp_path / "c")])
    assert code == 2
    said = capsys.readouterr().err
    assert f"no candidate compiled and passed its check; of {SMALL[0]} {SMALL[1].key}: " in said
    assert re.search("(did not compile|could not be compiled now): tileiras exceeded 0.001 s", said)
    assert f"tune status {sweep.folder} has the others" in said


def test_a_sweep_without_compiled_candidates_says_what_to_run(monkeypatch, tmp_path: Path, capsys, h200):
    monkeypatch.setattr(pipeline, "here", lambda: h200)
    monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_: RecordedExecutor())
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(h200, "test", [SMALL])
    assert cli.main(["--stages", "measure", "--sweep", str(sweep.folder), "--cache-dir", str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert f"nothing of it is compiled; run --stages compile,measure --sweep {sweep.folder}" in said
    assert not (sweep.folder / "compiled.jsonl").exists()


def test_a_sweep_that_plans_nothing_has_no_winner(tmp_path: Path, capsys, h200):
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(h200, "test", [])
    assert cli.main(["--stages", "compile,measure", "--sweep", str(sweep.folder), "--cache-dir", str(tmp_path)]) == 2
    assert f"{sweep.folder} plans no problem" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.processes
def test_an_output_that_cannot_be_written_is_one_line(compiled_sweep: Sweep):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "tilekern.tune", "status", str(compiled_sweep.folder), "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (2, "tilekern: input or output: No space left on device\n")


@pytest.mark.processes
def test_a_closed_pipe_is_not_an_error(compiled_sweep: Sweep):
    command = f"{sys.executable} -m tilekern.tune status {compiled_sweep.folder} --json | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in found.stderr
    assert "Exception" not in found.stderr


def test_a_problem_that_has_no_winner_is_named_with_the_reason(compiled_sweep: Sweep, tmp_path: Path, capsys, h200):
    other = SMALL[1].but(columns=256)
    shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(h200, "test", [SMALL, (SMALL[0], other)])
    toolkit = next(iter(sweep.compiled().values()))["toolkit"]
    failed = {"status": "failed", "reason": "tileiras crashed", "toolkit": toolkit}
    keys = {item.artifact for item in sweep.candidates(SMALL[0], other)} - sweep.compiled().keys()
    sweep.note("compiled", *({"key": key, "kernel": SMALL[0], **failed} for key in keys))
    command = ["--sweep", str(sweep.folder), "--cache-dir", str(tmp_path / "cache"), "--json"]
    for stages in ("compile", "compile,measure"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["--stages", stages, *command])
        assert ended.value.code == 3
        outcome = json.loads(capsys.readouterr().out)
        assert [found["problem"]["columns"] for found in outcome["problems"]] == [SMALL[1]["columns"]]
        [note] = [note for note in outcome["notes"] if note.startswith("no winner: ")]
        assert note.startswith(f"no winner: {SMALL[0]} {other.key}: ")
        assert note.endswith("did not compile: tileiras crashed")


def test_where_no_compiler_is_the_table_names_the_one_that_compiled(compiled_sweep, tmp_path, monkeypatch, capsys):
    used = toolchain.toolkit().key
    monkeypatch.setattr(toolchain, "toolkit", lambda: None)
    command = ["--stages", "compile", "--sweep", str(compiled_sweep.folder), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main(command) == 0
    assert f"test on H200 (sm_90), {used}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("timeout", ["0", "-1", "0.001", "x"])
def test_a_timeout_below_a_second_is_refused(timeout: str, capsys):
    assert cli.main(["qwen3-8b", "--gpu", "B200", "--timeout", timeout]) == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "3"], "--tp 3: qwen3-8b has 8 key-value heads, which 3 ranks cannot share evenly"),
        (["--tp", "0"], "x>=1"),
        (["--sequence", "3000"], "--tokens 2048: no step of --tokens 2048,8192 is made of whole sequences"),
        (["--sequence", "long"], "--sequence 'long': expected whole numbers with commas between, such as 2048,4096"),
        (["--sequence", ""], "--sequence is empty"),
        (["--strategy", "luck"], "unknown strategy 'luck'"),
        (["--gpus", "0"], "x>=1"),
    ],
)
def test_an_option_that_cannot_be_is_named(arguments, words, tmp_path: Path, capsys):
    assert cli.main(["qwen3-8b", "--gpu", "B200", "--cache-dir", str(tmp_path / "cache"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_model_in_which_an_op_has_nothing_to_tune(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    arguments = [str(tmp_path), "--gpu", "B200", "--ops", "attention", "--sweep", str(tmp_path / "sweep")]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert "asks for no kernel of --ops attention; attention_forward: calls of a step run torch's operations" in said
    assert not (tmp_path / "sweep").exists()


def test_ray_that_is_not_installed_is_named_with_its_extra(compiled_sweep: Sweep, monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    arguments = ["--stages", "measure", "--sweep", str(compiled_sweep.folder), "--cache-dir", str(tmp_path)]
    for executor in ("ray", "ray://head:10001"):
        assert cli.main([*arguments, "--executor", executor]) == 2
        assert f"--executor {executor} needs Ray: pip install 'tilekern[cluster]'" in capsys.readouterr().err


def test_the_measure_stage_is_given_the_strategy_and_the_gpus(compiled_sweep: Sweep, monkeypatch, tmp_path, capsys):
    asked = {}

    class Executor(contextlib.nullcontext):
        def __init__(self, cache: Path, most: int | None = None) -> None:
            super().__init__(self)
            asked.update(cache=cache, most=most)

    def measure_all(sweep, executor, keep_winners, strategy, progress, **_):
        asked.update(strategy=strategy)
        return MeasureSummary(0, 0, 0, 0.0)

    monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", Executor)
    monkeypatch.setattr("tilekern.tuning.pipeline.measure_all", measure_all)
    arguments = ["--stages", "measure", "--sweep", str(compiled_sweep.folder), "--cache-dir", str(tmp_path), "--json"]
    assert cli.main([*arguments, "--strategy", "exhaustive", "--gpus", "3"]) == 0
    assert asked == {"cache": compiled_sweep.cache, "most": 3, "strategy": "exhaustive"}
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes == [f"not measured: {SMALL[0]} {SMALL[1].key}: no candidate was timed"]


@pytest.mark.processes
def test_a_run_that_compiles_and_measures_does_both_at_once(compiled_sweep: Sweep, h200, monkeypatch, tmp_path, capsys):
    folder = Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep"))
    first = next(iter(compiled_sweep.compiled().values()))["sha256"]
    (folder / "artifacts" / first).unlink()
    monkeypatch.setattr("tilekern.tuning.pipeline.here", lambda: h200)
    monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_: RecordedExecutor())
    arguments = ["--stages", "compile,measure", "--sweep", str(folder), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main([*arguments, "--jobs", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compile"]["compiled"] >= 1
    assert [problem["provenance"] for problem in found["problems"]] == ["measured"]
    assert 0 < found["seconds"]["measure"] < found["measure"]["seconds"]
    assert found["seconds"].keys() == {"compile", "measure"}
    (folder / "artifacts" / first).unlink()
    assert cli.main([*arguments, "--jobs", "1"]) == 0
    said = capsys.readouterr()
    assert " s beyond it (" in said.out
    assert all(stage in said.err for stage in ("compile", "measure"))


def test_the_help_groups_all_options(capsys):
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    places = [said.index(heading) for heading in ("What to tune:", "How:", "Where, and what is printed:")]
    assert places == sorted(places)
    for parameter in tune.command.params:
        assert all(option in said for option in parameter.opts if option.startswith("-"))


def test_the_help_names_each_command_with_a_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "python -m tilekern.tune COMMAND [OPTIONS]" in said
    section = said.partition("Commands")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in section] == list(COMMANDS)
    for name, line in zip(COMMANDS, section, strict=True):
        assert line.endswith(f"  {command_named(name).short_help}")
        assert len(line) <= 80
    modules = {path.stem for path in Path(commands.__file__).parent.glob("*.py")} - {"__init__"}
    assert modules == {"tune", *COMMANDS}


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_every_command_has_h_and_version(name, capsys):
    given = [name] if name else []
    assert cli.main([*given, "-h"]) == 0
    brief = capsys.readouterr().out
    assert brief.startswith(f"Usage: {' '.join(['python -m tilekern.tune', *given])} [OPTIONS]")
    assert cli.main([*given, "--help"]) == 0
    assert capsys.readouterr().out == brief
    assert cli.main([*given, "--version"]) == 0
    assert capsys.readouterr().out == f"tilekern {tilekern.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["prefligt", "qwen3-8b", "--gpu", "B200", "--fix"], "did you mean preflight?"),
        (["statsu", "sweep"], "did you mean status?"),
        (["refesh", "--pack", "some.pack"], "did you mean refresh?"),
        (["--gpu", "B200", "servr"], "did you mean serve?"),
        (["qwen3-8", "--gpu", "B200"], "did you mean qwen3-8b?"),
        (["something", "--gpu", "B200"], "'something'. Commands are preflight"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_an_unknown_word_is_told_the_commands_and_the_models(arguments, nearest, capsys):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "unknown command or model '" in err
    assert nearest in err
    for part in (*COMMANDS, "a preset such as qwen3-8b", "config.json", "Qwen/Qwen3-8B"):
        assert part in err


def test_a_command_after_options_is_told_to_come_first(capsys):
    assert cli.main(["--gpu", "B200", "status"]) == 2
    assert "status is a command, which stands before its options" in capsys.readouterr().err


def test_what_is_named_like_a_command_but_is_a_path_is_a_model(tmp_path, monkeypatch, capsys):
    """In a folder of that name with a config.json: as ./status, and where it resembles a command alone."""
    for name in ("status", "statuses"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    for word, config in (("./status", "status/config.json"), ("statuses", "statuses/config.json")):
        assert cli.main([word, "--gpu", "B200"]) == 2
        assert f"{config} must be a JSON object, got list" in capsys.readouterr().err


def test_a_command_that_takes_a_model_names_no_commands(capsys):
    assert cli.main(["preflight", "qwen9-8b", "--gpu", "B200"]) == 2
    err = capsys.readouterr().err
    assert "unknown model 'qwen9-8b': give a preset" in err
    assert "refresh" not in err


@pytest.mark.parametrize("name", ["long" * 55, "with [bold]brackets[/bold] :bug: and spaces"], ids=["long", "odd"])
def test_what_holds_a_path_or_a_command_is_one_line(name, tmp_path, capsys):
    """In a pipe it is neither wrapped nor read as markup."""
    folder = tmp_path / name
    given = ["qwen3-8b", "--gpu", "H200", "--ops", "rope", "--tokens", "64", "--cache-dir", str(tmp_path / "cache")]
    assert cli.main([*given, "--stages", "plan", "--sweep", str(folder)]) == 0
    [line] = capsys.readouterr().out.splitlines()[1:]
    assert f"are planned in {folder}; go on with --stages compile,measure --sweep {shlex.quote(str(folder))}" in line
    refresh._print(refresh.Outcome(resolve("H200"), None, None, notes=[f"no H200 here: carry {folder} to one"]))
    assert capsys.readouterr().out == f"no H200 here: carry {folder} to one\n"
