"""A process that generates loads what it needs and no more; angles are rounded as torch rounds them."""

import subprocess
import sys
import threading
from array import array

import pytest
import torch
from environments import environment
from small_models import save

from tilekern.errors import CannotRun, InputError
from tilekern.inference import checkpoints, load, loading
from tilekern.inference.architectures import architecture_of
from tilekern.inference.launches import MODULES, spec_of
from tilekern.inference.planning import DryRun
from tilekern.inference.steps import rounded
from tilekern.kernels import spec_named
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import resolve
from tilekern.tuning.plan.presets import PRESETS

SERVED = [name for name, config in PRESETS.items() if config["model_type"] in ("gpt2", "llama", "qwen3", "qwen3_moe")]
# Modules of no use to GPT-2: other kernels, and readers of other files.
NEEDLESS = (
    "torch", "numpy", "click", "pickletools", "tilekern.inference.torch_files", "tilekern.kernels.composites",
    "tilekern.kernels.experts", "tilekern.kernels.jsd", "tilekern.patch", "tilekern.tuning",
)  # fmt: skip
OF_GPT2 = (
    "advance", "append_to_cache", "attention_forward", "decode_attention", "embedding", "fused_add_layer_norm_forward",
    "greedy_join", "greedy_parts", "lay_out", "layer_norm_forward", "matmul", "skinny_linear", "token_attention",
)  # fmt: skip


def planned(name, **how):
    """The kernels that the engine asks for to run a preset."""
    found = Trace(resolve("H200"))
    dry = DryRun(found, architecture_of(PRESETS[name]), "bfloat16", **how)
    dry.load("float32")
    for tokens in (16, 128):
        dry.forward(1, tokens)
    dry.token(1, 512)
    return {kernel for kernel, _ in found.asked}


@pytest.mark.parametrize("name", SERVED)
def test_presets_are_planned_by_kernels_whose_modules_are_known(name):
    kernels = planned(name) | planned(name, int8=True)
    assert {"embedding", "token_attention", "skinny_linear_int8", "dequantize_rows"} <= kernels
    assert kernels <= MODULES.keys()


def test_the_modules_hold_the_specs_of_the_registry():
    assert [spec_of(name) for name in MODULES] == [spec_named(name) for name in MODULES]
    assert spec_of("softmax_forward") is spec_named("softmax_forward")


@pytest.mark.processes
def test_what_gpt2_has_no_use_for_is_not_loaded():
    code = (
        "import sys; import tilekern.inference; from tilekern.inference.launches import spec_of\n"
        f"for name in {OF_GPT2}: spec_of(name)\n"
        f"print(*(name for name in {NEEDLESS} if name in sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("\n", "")


@pytest.mark.processes
def test_the_import_leaves_what_takes_long_to_the_time_in_which_the_gpu_gets_ready():
    code = "import sys; from tilekern.inference import Sampling, load; print('cuda.tile' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("False\n", "")


def test_the_gpu_gets_ready_while_a_checkpoint_is_opened(tmp_path, monkeypatch):
    """What is wrong with either is said, and the other has ended by then."""
    opened, ended = threading.Event(), []

    def device(number):
        assert opened.wait(60), "the checkpoint waits for the GPU"
        ended.append(number)
        raise CannotRun("there is no GPU")

    monkeypatch.setattr(loading, "device_numbered", device)
    whole = checkpoints.open_checkpoint
    monkeypatch.setattr(checkpoints, "open_checkpoint", lambda where: opened.set() or whole(where))
    with pytest.raises(InputError, match="nowhere is neither"):
        load(tmp_path / "nowhere")
    assert ended == [0]
    save("gpt2", tmp_path)
    with pytest.raises(CannotRun, match="there is no GPU"):
        load(tmp_path)
    assert ended == [0, 0]


def test_numbers_round_to_nearest_even_as_in_torch():
    torch.manual_seed(0)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (5000,), dtype=torch.int64).to(torch.int32)
    odd = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0, -0x80000000, 1, 0x7F7F7FFF, -0x00808001, 0x8000]
    numbers = torch.cat([words, torch.tensor(odd, dtype=torch.int32)]).view(torch.float32)
    numbers = numbers[numbers.isfinite() & numbers.bfloat16().isfinite()]
    found = rounded(array("f", numbers.numpy().tobytes()), "bfloat16")
    assert found == numbers.bfloat16().view(torch.int16).numpy().tobytes()
    assert rounded(array("f"), "bfloat16") == b""
