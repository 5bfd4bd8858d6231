"""50 steps of TRL's GRPO on a GPU in the invariant mode: each first update has its sampler's bits, and all repeat."""

import subprocess
import sys

import pytest
import torch
from gpu_processes import clean_environment
from gpu_training import CONFIG
from grpo_training import saved, train
from transformers import Qwen3Config

import tilekern
from tilekern.integrations import trl as door
from tilekern.runtime import dispatch

STEPS = 50
OPTIONS = {
    "prompts": [" ".join(f"w{word}" for word in range(number, 3 * number + 1)) for number in (1, 2, 5, 11, 16, 23)],
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 32, "learning_rate": 1e-4,
}  # fmt: skip


@pytest.fixture
def invariant():
    door.register()
    tilekern.apply(invariant=True)
    yield
    tilekern.reset()
    door.unregister()
    dispatch.forget()


def tune_what_was_missed(cache):
    command = [sys.executable, "-m", "tilekern.tune", "--plan", "wanted", "--invariant", "--cache-dir", str(cache)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    dispatch.forget()


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "autocast"])
def test_fifty_steps_have_the_sampler_s_bits_and_repeat(invariant, dtype, tmp_path, monkeypatch):
    """With kernels that are tuned for what two steps missed, as docs/same-bits.md says."""
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    dispatch.forget()
    sizes = {name: value for name, value in CONFIG.items() if name != "model_type"}
    folder = saved(tmp_path / "model", Qwen3Config(**sizes, eos_token_id=1, pad_token_id=0, bos_token_id=None), dtype)
    options = OPTIONS | {"bf16": dtype == torch.float32}
    train(folder, 2, **options)
    tune_what_was_missed(tmp_path / "cache")
    first, again = (train(folder, STEPS, **options) for _ in range(2))
    assert [found["old"] for found in first.differing[::2]] == [0] * (STEPS // 2)
    assert [found["sampler"] for found in first.differing[::2]] == [0] * (STEPS // 2)
    assert first.differing[0]["ref"] == 0
    assert min(first.tokens) > 0
    assert min(found["sampler"] for found in first.differing[1::2]) > 0, "the second update is of other weights"
    assert first.losses == again.losses
    assert all(map(torch.equal, first.parameters, again.parameters))
