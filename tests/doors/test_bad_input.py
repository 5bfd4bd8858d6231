"""The command lines as people meet them: bad input is one line and leaves nothing behind; Ctrl-C loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from environments import environment
from interrupts import hear_interrupts
from marks import needs_compiler

import tilekern.tuning.cli
from tilekern.cache_tools.__main__ import main as cache_tools
from tilekern.compile import cutile
from tilekern.tuning.sweep.folder import Sweep
from tilekern.warning import command_line

pytestmark = pytest.mark.processes

SMALL = ("qwen3-0.6b", "--gpu", "B200", "--ops", "rope", "--tokens", "64")
# As few candidates as a problem has, and no model to load.
FEW = ("--gpu", "B200", "--problem", "swiglu rows=64,columns=48,dtype=bfloat16")
CONFIG = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "model_type": "qwen3"}


class Here:
    """Runs the command lines in this process, which has loaded torch; with a cache that does not exist yet."""

    def __init__(self, folder, monkeypatch, capfd):
        self.folder, self.cache, self._patch, self._capfd = folder, folder / "cache", monkeypatch, capfd
        for name in [name for name in os.environ if name.startswith("TILEKERN_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("TILEKERN_CACHE_DIR", str(self.cache))
        monkeypatch.chdir(folder)

    def tune(self, *arguments, **env):
        return self._run(tilekern.tuning.cli.main, arguments, env)

    def tools(self, *arguments, **env):
        return self._run(cache_tools, arguments, env)

    def _run(self, main, arguments, env):
        self._capfd.readouterr()
        with self._patch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            code = main([str(argument) for argument in arguments])
        out, errors = self._capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, errors)


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    return Here(tmp_path, monkeypatch, capfd)


def said(ran, code):
    """The one line of an error."""
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    text = ran.stderr.removesuffix("\n")
    assert text.count("\n") == 0, text
    return text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["qwen9-8b", "--gpu", "B200"], ["unknown command or model 'qwen9-8b'", "qwen3-8b", "config.json"]),
        (["two\nlines", "--gpu", "B200"], ["unknown command or model"]),
        (["prefligt", "qwen3-8b", "--gpu", "B200"], ["did you mean preflight?", "a model is a preset"]),
        (["", "--gpu", "B200"], ["unknown command or model ''"]),
        (["--gpu", "B200"], ["name a model"]),
        (["qwen3-8b", "--gpu", "B9000"], ["unknown GPU 'B9000'", "H200", "sm_100"]),
        (
            ["qwen3-8b", "--gpu", "B200", "--ops", "rope,conv"],
            ["unknown op 'conv'", "rms_norm, layer_norm, swiglu", "attention, adamw"],
        ),
        (["qwen3-8b", "--gpu", "B200", "--ops", ","], ["--op is empty"]),
        (["qwen3-8b", "--gpu", "B200", "--dtype", "int8"], ["unknown dtype 'int8'", "bfloat16, float16, float32"]),
        (["qwen3-8b", "--gpu", "B200", "--stages", "plan,cook"], ["unknown stage 'cook'", "plan, compile, measure"]),
        (["qwen3-8b", "--gpu", "B200", "--tokens", "many"], ["--tokens 'many'", "2048,8192"]),
        (["qwen3-8b", "--gpu", "B200", "--tokens", "2048,0"], ["--tokens 0", "from 1 to"]),
        (["qwen3-8b", "--gpu", "B200", "--tokens", "-5"], ["--tokens '-5'", "2048,8192"]),
        (["qwen3-8b", "--gpu", "B200", "--timeout", "nan"], ["'--timeout': nan is not a time in seconds"]),
        (["qwen3-8b", "--gpu", "B200", "--timeout", "inf"], ["'--timeout': inf is not in the range 1<=x<=86400"]),
        (["preflight", "qwen3-8b", "--gpu", "B200", "--timeout", "nan"], ["'--timeout': nan is not a time in seconds"]),
        (["serve", "--gpu", "B200", "--poll", "nan"], ["'--poll': nan is not a time in seconds"]),
        (["serve", "--gpu", "B200", "--poll", "1e300"], ["'--poll': 1e+300 is not in the range 0.1<=x<=86400"]),
        (["qwen3-8b", "--gpu", "B200", "--jobs", "0"], ["--jobs", "x>=1"]),
        (["qwen3-8b", "--gpu", "B200", "--jobs", "100000"], ["--jobs 100000 is too many", "at most 4 for each"]),
        (["qwen3-8b", "--gpu", "B200", "--jobs", "100000", "--dry-run"], ["--jobs 100000 is too many"]),
        (["serve", "--gpu", "B200", "--once", "--jobs", "100000"], ["--jobs 100000 is too many"]),
        (["qwen3-8b", "--gpu", "B200", "--timeout", "soon"], ["'--timeout': soon is not a time in seconds", "10m"]),
        (["qwen3-8b", "--gpu", "B200", "--colour"], ["--colour"]),
        (["qwen3-8b", "qwen3-9b", "--gpu", "B200"], ["qwen3-9b", "qwen3-8b"]),
        (["qwen3-8b", "--gpu", "B200", "--stages", "compile"], ["--sweep"]),
        (
            ["--stages", "measure", "--sweep", "nowhere"],
            ["nowhere holds no sweep: there is no such folder; give the folder of one", "--stages plan,compile"],
        ),
        (["status", ""], ["it must name a folder, and is empty"]),
        (["qwen3-8b", "--gpu", "B200", "--sign", ""], ["'--sign': it must name a file, and is empty"]),
        (["refresh", "--gpu", "B200", "--pack", ""], ["'--pack': it must name a file, and is empty"]),
        (["report", ""], ["it must name a folder, and is empty"]),
        (["refresh", "--gpu", "B200", "--pack", "nowhere.pack"], ["there is no pack nowhere.pack"]),
        (["missing/config.json", "--gpu", "B200"], ["missing/config.json is missing; give the path of a model's"]),
        (["gpt2", "--gpu", "B200", "--weight-dtype", "int8"], ["--weight-dtype int8", "pass --engine"]),
        (["gpt2", "--gpu", "B200", "--engine", "--weight-dtype", "fp8"], ["--weight-dtype 'fp8'", "int8"]),
        (["gemma-2-9b", "--gpu", "B200", "--engine"], ["gemma-2-9b: config.json: model_type is 'gemma2'", "llama"]),
    ],
    ids=lambda value: "-".join(value)[:40].replace("\n", "~") if isinstance(value, list) else None,
)
def test_unknown_arguments_of_the_tuner_are_named_with_the_known_ones(here, arguments, parts):
    text = said(here.tune(*arguments), 2)
    for part in parts:
        assert part in text
    assert not here.cache.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_machine_with_no_gpu_needs_the_target_s_name(here):
    assert "--gpu B200" in said(here.tune("qwen3-8b"), 2)
    assert not here.cache.exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ('"qwen3"', "must be a JSON object, got str"),
        ({"model_type": None}, "model_type is missing; a model's config.json has it"),
        ({"hidden_size": -64}, "hidden_size is -64; expected a whole number"),
        ({"hidden_size": 64.5}, "transformers does not take this config"),
        ({"num_key_value_heads": 3, "num_hidden_layers": 1}, "a training step cannot be traced on meta tensors"),
    ],
)
def test_a_bad_config_is_named_with_its_field(here, text, part):
    """Others are in tests/tuning/test_plan_of_models.py: each process here loads torch and transformers."""
    if isinstance(text, dict):
        text = json.dumps({k: v for k, v in (CONFIG | text).items() if v is not None})
    path = here.folder / "config.json"
    path.write_text(text)
    found = said(here.tune(path, "--gpu", "B200"), 2)
    assert str(path) in found
    assert part in found
    assert not here.cache.exists()


def test_a_file_that_is_not_text_is_not_a_config(here):
    path = here.folder / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path} is not valid JSON" in said(here.tune(here.folder, "--gpu", "B200"), 2)


@pytest.mark.parametrize("place", ["/dev/null/x", "file/x", "file"])
def test_a_cache_that_cannot_be_written_is_named_before_anything_is_compiled(here, place):
    (here.folder / "file").write_text("a file")
    started = time.monotonic()
    assert place in said(here.tune(*SMALL, "--cache-dir", place), 2)
    assert time.monotonic() - started < 20
    assert (here.folder / "file").read_text() == "a file"
    assert place in said(here.tune(*SMALL, TILEKERN_CACHE_DIR=place), 2)


@pytest.mark.parametrize("arguments", [SMALL, ("preflight", *SMALL[:3]), ("serve", "--once"), ("refresh",)], ids=str)
def test_an_empty_cache_dir_is_not_this_folder(here, arguments):
    assert "'--cache-dir': it must name a folder, and is empty" in said(here.tune(*arguments, "--cache-dir", ""), 2)


def test_a_sweep_folder_that_cannot_be_written_is_named(here):
    assert "/dev/null/x" in said(here.tune(*SMALL, "--sweep", "/dev/null/x"), 2)


def test_a_hub_id_with_no_hub_in_reach_fails_fast_and_says_what_to_pass(here):
    started = time.monotonic()
    # The reserved name resolves nowhere, whatever network this machine has.
    text = said(here.tune("Qwen/Qwen3-8B", "--gpu", "B200", HF_ENDPOINT="https://hub.invalid", HF_HOME="hub"), 2)
    assert time.monotonic() - started < 20
    for part in ("cannot fetch Qwen/Qwen3-8B from the hub", "config.json", "qwen3-8b"):
        assert part in text
    assert not here.cache.exists()


def test_a_missing_compiler_has_an_exit_code_of_its_own(here, monkeypatch):
    monkeypatch.setattr(cutile, "toolkit", lambda: None)
    monkeypatch.setitem(sys.modules, "elftools", None)
    assert "pip install 'tilekern[compile]'" in said(here.tune(*FEW, "--json"), 4)
    # The plan is complete and serves the next run; nothing else was written.
    files = sorted(str(path.relative_to(here.cache)) for path in here.cache.rglob("*") if path.is_file())
    assert files == [f"sweeps/sm_100-b200-148/{name}" for name in ("run.lock", "runs.jsonl", "sweep.json")]
    assert Sweep(here.cache / "sweeps/sm_100-b200-148").problems()


def test_a_sweep_folder_of_another_target_is_left_as_it_is(here):
    assert here.tune(*SMALL, "--stages", "plan", "--sweep", "sweep").returncode == 0
    before = (here.folder / "sweep" / "sweep.json").read_bytes()
    text = said(here.tune("qwen3-0.6b", "--gpu", "H200", "--sweep", "sweep"), 2)
    assert "sweep holds a sweep for B200, not H200" in text
    assert (here.folder / "sweep" / "sweep.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "part"), [("{", "cannot be read"), ('{"format": 99}', "is not a plan of this version of tilekern")]
)
def test_a_plan_that_cannot_be_read_is_named(here, text, part):
    (here.folder / "sweep").mkdir()
    (here.folder / "sweep" / "sweep.json").write_text(text)
    for arguments in (["--stages", "measure", "--sweep", "sweep"], [*SMALL, "--sweep", "sweep"]):
        assert part in said(here.tune(*arguments), 2)
    assert (here.folder / "sweep" / "sweep.json").read_text() == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_measuring_needs_a_gpu(here):
    assert here.tune(*SMALL, "--stages", "plan", "--sweep", "sweep").returncode == 0
    text = said(here.tune("--stages", "measure", "--sweep", "sweep", "--json"), 2)
    assert "the measure stage needs a GPU" in text
    assert not (here.folder / "sweep" / "results.pack").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["list"], "list"),
        (["ls", "--colour"], "--colour"),
        (["ls", "--provenance", "guessed"], "measured, predicted, default"),
        (["ls", "--cache-dir", "/dev/null"], "a cache is a folder"),
        (["show", "rope", "no-key"], "not a problem key"),
        (["show", "rope", "tokens=64"], "there is no cache"),
        (["clear", "--older-than", "soon"], "30d or 12h"),
        (["clear"], "--all"),
        (["clear", "--all", "--json"], "--yes"),
        (["pack", "cache.zip"], ".pack"),
        (["pack", "cache.pack"], "no record"),
        (["unpack", "none.pack"], "there is no pack none.pack"),
    ],
    ids=lambda value: "-".join(value)[:40].replace("/", "~") if isinstance(value, list) else None,
)
def test_the_cache_tools_say_what_is_wrong_in_one_line(here, arguments, part):
    assert part in said(here.tools(*arguments), 2)
    assert not here.cache.exists()
    assert not list(here.folder.iterdir())


def test_a_file_that_is_not_a_pack_puts_nothing_into_the_cache(here):
    (here.folder / "bad.pack").write_bytes(b"PK\x03\x04 not a pack")
    assert "bad.pack is not a pack" in said(here.tools("unpack", "bad.pack"), 2)
    assert not here.cache.exists()


@pytest.mark.parametrize(
    "words",
    [("tune", "--help"), ("tune", "--version"), ("cache_tools", "ls"), ("cache_tools", "stats")],
    ids=" ".join,
)
def test_a_closed_standard_output_is_no_error(here, words):
    """As that of a daemon; what was asked for is done, and nobody is told."""
    module, *arguments = words
    command = f"exec {sys.executable} -m tilekern.{module} {' '.join(arguments)} >&-"
    settings = environment(TILEKERN_CACHE_DIR=str(here.cache))
    ran = subprocess.run(
        ["sh", "-c", command], cwd=here.folder, env=settings, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


DOORS = (
    "cache_tools --help",
    "tune --help",
    "run --help",
    "generate --help",
    "patch --help",
    "doctor --json",
)


@pytest.mark.parametrize("words", DOORS)
def test_an_output_that_takes_nothing_is_one_line_and_a_closed_pipe_is_no_error(tmp_path, words):
    command = [sys.executable, "-m", *f"tilekern.{words}".split()]
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    line = "tilekern: input or output: No space left on device\n"
    for output, expected in ((full, (2, line)), (writer, (0, ""))):
        ran = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path,
            env=environment(TILEKERN_CACHE_DIR=str(tmp_path)),
        )  # fmt: skip
        os.close(output)
        assert (ran.returncode, ran.stderr) == expected


def test_ctrl_c_while_modules_are_loaded_is_one_line(capsys):
    @command_line("python -m tilekern.tune")
    def main():
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err == "tilekern: stopped\n"


def test_a_working_directory_that_is_gone_is_named(tmp_path):
    script = f"cd {tmp_path}; mkdir gone; cd gone; rmdir ../gone; {sys.executable} -P -m tilekern."
    for words, said in (
        ("cache_tools ls", "mine is relative to a working directory that has been removed; give an absolute path"),
        ("run x.py", "x.py cannot be run: No such file or directory; give the path of a script, or -m and a module's"),
    ):
        ran = subprocess.run(
            ["bash", "-c", script + words], capture_output=True, text=True, check=False,
            env=environment(TILEKERN_CACHE_DIR="mine"),
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr.startswith(f"tilekern: {said}")
        assert ran.stderr.count("\n") == 1


def first_line(path, process, timeout_s=300):
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= 1:
            return
        time.sleep(0.02)
    pytest.fail(f"no line in {path}: {process.poll()}")


@needs_compiler
@pytest.mark.nightly
def test_ctrl_c_keeps_what_was_finished_and_the_next_run_does_the_rest(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "tilekern.tune", *FEW, "--jobs", "1"],
        cwd=here.folder, env=environment(TILEKERN_CACHE_DIR=str(here.cache)), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=hear_interrupts,  # noqa: PLW1509 (one call, no lock)
    )  # fmt: skip
    sweep = Sweep(here.cache / "sweeps" / "sm_100-b200-148")
    first_line(sweep.folder / "compiled.jsonl", process)
    # As a terminal does: to the whole group, the compile workers included.
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "the next run goes on from there" in errors
    assert out == ""
    journal = (sweep.folder / "compiled.jsonl").read_text().splitlines()
    before = [json.loads(line)["key"] for line in journal]
    assert sweep.compiled().keys() == set(before)
    for line in sweep.compiled().values():
        assert sweep.cubin(line["sha256"])
    assert not (here.cache / "v1").exists()

    ran = here.tune(*FEW, "--json")
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome.keys() >= {"target", "toolkit", "problems", "seconds"}
    assert outcome["seconds"].keys() == {"plan", "compile"}
    fields = {"kernel", "problem", "config", "provenance", "candidates", "failed"}
    assert all(problem.keys() >= fields for problem in outcome["problems"])
    assert 0 < outcome["compile"]["compiled"] == outcome["compile"]["distinct"] - len(before)
    assert {problem["kernel"] for problem in outcome["problems"]} == {"swiglu_forward", "swiglu_backward"}
    assert all(problem["candidates"] > problem["failed"] for problem in outcome["problems"])
    assert here.tools("verify").returncode == 0
