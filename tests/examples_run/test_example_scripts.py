"""The scripts of ``examples/``: the commands of their docstrings, with sizes that the interpreter takes in seconds.

``generate_without_torch.py`` needs a GPU, for which ``tests/inference/test_generate.py`` has a stand-in.
"""

import ast
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from environments import ROOT, environment
from grpo_training import saved, tokenizer
from marks import needs_compiler
from warm_python import warm_python

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
WORDS = 29
SIZES = {
    "vocab_size": WORDS + 3, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = ("fused_add_rms_norm", "qk_norm_rope", "attention", "rms_norm", "swiglu")
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def processes(test):
    """Mark a test that runs a script; one worker has all of them, since they fork from one process."""
    return pytest.mark.processes(pytest.mark.xdist_group("example scripts")(test))


def commands_of(script):
    """The commands of a script's docstring."""
    lines = ast.get_docstring(ast.parse(script.read_text())).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("    ") and "examples/" in line]


@every_script
def test_a_script_is_short_and_its_commands_have_its_options(script):
    source = script.read_text()
    assert len(source.splitlines()) <= 80
    commands = commands_of(script)
    assert commands
    for command in commands:
        assert f"examples/{script.name}" in command
        options = [word for word in command[command.index(f"examples/{script.name}") :] if word.startswith("--")]
        assert all(f'add_argument("{option}"' in source for option in options), command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model with a tokenizer."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("model")
    tokenizer(WORDS).save_pretrained(folder)
    return saved(folder, Qwen3Config(**SIZES))


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    home = {"TILEKERN_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    with warm_python(environment(**settings, **home)) as env:
        yield env


def run(env, folder, name, *options, interpreted=True):
    """Run the first command of an example, with options behind it; what it prints."""
    command = [word.replace("examples/", f"{ROOT}/examples/") for word in commands_of(ROOT / "examples" / name)[0]]
    command = [*command[: command.index(f"{ROOT}/examples/{name}") + 1], *map(str, options)]
    ran = subprocess.run(
        ["bash", "-c", shlex.join(command)], cwd=folder, env=env | {"TILEKERN_INTERPRET": str(int(interpreted))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def served(printed, *more):
    """Whether a report says that all layers and ``more`` ran, and nothing fell back."""
    lines = re.findall(r"^(\w+): patched; no call fell back, [1-9]\d* launch", printed, re.M)
    return {*LAYERS, *more} <= {*lines} and "calls fell back" not in printed


def trained(folder, model):
    """Whether the stored weights are others than those of the model."""
    from safetensors.torch import load_file

    now, before = (load_file(Path(where) / "model.safetensors") for where in (folder, model))
    return any(not torch.equal(now[name], weight) for name, weight in before.items())


@processes
def test_trainer(env, tmp_path, model):
    (tmp_path / "book.txt").write_text(" ".join(f"w{number % WORDS}" for number in range(50)))
    options = ("--tokens", 12, "--steps", 2, "--batch", 2, "--lr", 1e-2, "--output", "out")
    printed = run(env, tmp_path, "trainer.py", "--model", model, "--text", "book.txt", *options)
    assert served(printed, "fused_linear_cross_entropy")
    assert re.search(r"^adamw: [1-9]\d* launches, 0 calls ran the model's own code$", printed, re.M)
    assert trained(tmp_path / "out", model)


@processes
def test_lora(env, tmp_path, model):
    options = ("--tokens", 12, "--steps", 16, "--batch", 2, "--rank", 2, "--lr", 3e-2)
    printed = run(env, tmp_path, "lora.py", "--config", Path(model) / "config.json", *options)
    assert served(printed, "fused_linear_cross_entropy")
    assert re.search(r"^lora: patched; no call fell back$", printed, re.M)
    first, *_, last = (float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.M))
    assert last < first - 0.03
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def test_own_kernel_by_the_interpreter(monkeypatch, unpatched):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    script = runpy.run_path(str(ROOT / "examples" / "own_kernel.py"))
    x = torch.tensor([[float("nan"), -1e30, -2.0, 0.0, 3.0]])
    wanted = script["reference"](x)["y"].float()
    torch.testing.assert_close(script["quick_gelu"](x), wanted, equal_nan=True)
    assert wanted[0, 4].item() == pytest.approx(3 / (1 + math.exp(-1.702 * 3)))


@processes
@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
def test_own_kernel(env, tmp_path):
    """Its commands import torch by themselves; tests/tuning/test_users_kernels.py has them in every run."""
    options = ("--rows", 64, "--columns", 48, "--pack", "own.pack")
    printed = run(env, tmp_path, "own_kernel.py", *options, interpreted=False)
    assert "the interpreter agrees with the reference: 1 launch" in printed
    assert "predicted" in printed
    assert "packed 1 record into own.pack" in printed
    assert "0 broken, 0 stale" in printed


@processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sft(env, tmp_path, model):
    options = ("--tokens", 16, "--batch", 2, "--steps", 2, "--lr", 1e-2, "--output", "out")
    printed = run(env, tmp_path, "sft.py", "--model", model, *options)
    assert served(printed)
    assert "TRL's losses: {'served': 2, 'left': {}}" in printed
    assert trained(tmp_path / "out", model)


@processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_grpo(env, tmp_path, model):
    options = ("--group", 2, "--batch", 2, "--new", 3, "--steps", 1, "--output", "out")
    printed = run(env, tmp_path, "grpo.py", "--model", model, *options)
    assert served(printed)
    assert "TRL's log-probabilities: {'served': 1, 'left': {}}" in printed
    assert re.search(r"^products of the mode: [1-9]\d* launches, 0 by torch$", printed, re.M)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@processes
@pytest.mark.slow
@pytest.mark.nightly
def test_fsdp2(env, tmp_path, model):
    """Each process imports torch and transformers by itself, which takes long."""
    options = ("--tokens", 12, "--steps", 2, "--lr", 1e-2, "--output", "out")
    printed = run(env, tmp_path, "fsdp2.py", "--model", model, *options)
    assert served(printed, "fused_linear_cross_entropy")
    assert trained(tmp_path / "out", model)
