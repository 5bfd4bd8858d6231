"""Repositories of Hugging Face's `kernels`, made by `repository` and loaded by that library."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import kernels
import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, KernelLocks, Metadata
from ship_samples import make_pack
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, activations
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

import tilekern
from tilekern.cache import default_layers, places
from tilekern.cache_tools.__main__ import main
from tilekern.integrations import hub_layers as layers
from tilekern.runtime import dispatch

REPO = "acme/tilekern"
BUILD = Path("build", "torch-cpu")
IDS = torch.randint(0, 331, (2, 7), generator=torch.Generator().manual_seed(1))
CONFIG = Qwen3Config(
    hidden_size=80, num_attention_heads=5, num_key_value_heads=1, head_dim=16, intermediate_size=208, vocab_size=331,
    num_hidden_layers=1, max_position_embeddings=64, attn_implementation="eager",
)  # fmt: skip
RELU = Qwen3Config(hidden_size=80, intermediate_size=208, hidden_act="relu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository of two records, and a cache of the hub with it."""
    folder = tmp_path_factory.mktemp("made")
    pack = make_pack(folder)
    made = ["repository", f"{folder}/out", "--repo-id", REPO, "--pack", str(pack), "--hub-cache", f"{folder}/hub"]
    assert main(made) == 0
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Isolate the kernels that a test loads and looks up."""
    monkeypatch.setattr(places, "_added", {})
    monkeypatch.setattr(kernels.importer, "_loaded_kernels", {})
    monkeypatch.setattr(kernels.layer.layer, "_CACHED_LAYER", {})
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")


@pytest.fixture
def kernelized(made):
    """Return a function that makes modules of some classes run layers of the repository, named by class."""
    classes = {}

    def run(model, names, mode=Mode.TRAINING):
        for cls, name in names.items():
            replace_kernel_forward_from_hub(cls, name)
            classes[cls] = name
        repos = {name: {"cpu": LocalLayerRepository(made / "out", layer_name=name)} for name in names.values()}
        with use_kernel_mapping(repos):
            return kernelize(model, mode=mode, device="cpu", use_fallback=False)

    yield run
    for cls in classes:
        del cls.kernel_layer_name, cls.kernel_condition


def launches():
    return {kernel: counts["launches"] for kernel, counts in tilekern.stats().items() if counts["launches"]}


def launched(before):
    return {kernel for kernel, n in launches().items() if n != before.get(kernel, 0)}


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def tensors(result):
    return result if isinstance(result, tuple) else [result]


def close(results, references):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(results, references, strict=True))


@pytest.mark.processes
@pytest.mark.nightly
def test_a_job_without_tilekern_runs_the_repository_s(made):
    """In a new process, offline, by version out of the hub's cache; the build for the CPU has no packs."""
    code = """
import sys, torch, kernels
assert "tilekern" not in sys.modules
kernel = kernels.get_kernel("acme/tilekern", version=1)
import tilekern
x, weight = torch.randn(3, 80), torch.rand(80)
expected = torch.nn.functional.rms_norm(x, (80,), weight, 1e-6)
assert torch.allclose(kernel.ops.rms_norm(x, weight, 1e-6), expected, atol=1e-5)
assert kernel.apply is tilekern.apply and kernel.layers.RMSNorm and kernel.report
assert kernel.stats()["rms_norm_forward"]["launches"] == 1
from tilekern.spec.source import _notes, NOTES
assert len(_notes(NOTES)) > 20
print(tilekern.__file__)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TILEKERN_", "PYTHONPATH"))}
    env |= {"KERNELS_CACHE": f"{made}/hub", "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    env |= {"TILEKERN_INTERPRET": "1", "TILEKERN_CACHE_DIR": f"{made}/cache"}
    # Without the paths of an installation that can be edited, among which is this tree's.
    ran = subprocess.run([sys.executable, "-c", code], cwd=made, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    commit = json.loads((made / "out" / "kernels.lock").read_text())[0]["lock"]["commit"]
    path = made / "hub" / "kernels--acme--tilekern" / "snapshots" / commit / BUILD / "tilekern" / "__init__.py"
    assert Path(ran.stdout.strip()) == path
    assert not list(path.parents[1].rglob("*.pack"))


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("door", ["get_local_kernel", "get_kernel", "load_kernel"])
def test_every_way_to_load_gives_the_layers(made, door, monkeypatch):
    if door == "get_local_kernel":
        kernel = kernels.get_local_kernel(made / "out")
    elif door == "get_kernel":
        monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={made / 'out'}")
        kernel = kernels.get_kernel(REPO, version=1)
    else:
        monkeypatch.setattr(kernels.resolver, "CACHE_DIR", str(made / "hub"))
        kernel = kernels.load_kernel(REPO, lockfile=made / "out" / "kernels.lock")
    # The tilekern of this process has the version of the copy, so it serves.
    assert kernel.layers is layers
    assert kernel.apply is tilekern.apply
    (loaded,) = kernels.get_loaded_kernels()
    assert (str(loaded.metadata.name), loaded.metadata.version) == ("tilekern", 1)
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        kernel.aply  # noqa: B018


def test_the_packs_of_the_repository_are_layers_of_a_lookup(made):
    from kernels.importer import _import_from_path

    before = [layer.name for layer in default_layers()]
    _import_from_path(made / "out" / "build" / "torch-cuda", {})
    (name,) = {layer.name for layer in default_layers()} - set(before)
    assert name == "acme/tilekern:0-kernels"
    (layer,) = (layer for layer in default_layers() if layer.name == name)
    assert layer.targets() == ["sm_100-b200-148", "sm_90-h200-132"]
    assert layer.origin == "package"


@pytest.mark.slow
def test_another_tilekern_in_the_process_is_refused(made, monkeypatch):
    own = re.escape(tilekern.__version__)
    monkeypatch.setattr(tilekern, "__version__", "0.0.9")
    with pytest.raises(ImportError, match=rf"tilekern 0\.0\.9 is imported already.* has {own}"):
        kernels.get_local_kernel(made / "out")


def test_the_metadata_of_a_repository_is_right(made):
    root = made / "out"
    cuda, cpu = (
        Metadata.read_from_file(root / "build" / name / "metadata.json") for name in ("torch-cuda", "torch-cpu")
    )
    assert (cuda.backend.archs, cpu.backend.archs) == (["10.0", "9.0"], None)
    assert cuda.id != cpu.id
    (lock,) = KernelLocks.from_json((root / "kernels.lock").read_text()).items()
    assert lock[0].repo_id == REPO
    for name, metadata in (("torch-cuda", cuda), ("torch-cpu", cpu)):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, root / "build" / name))
    assert "tune.py" not in {path.name for path in root.rglob("*")}


def test_a_changed_file_is_noticed(made, cli, tmp_path):
    pack = made / "kernels.pack"
    document = cli.json("repository", tmp_path / "out", "--repo-id", REPO, "--pack", pack)
    lock = (made / "out" / "kernels.lock").read_text()
    assert (tmp_path / "out" / "kernels.lock").read_text() == lock
    assert document["commit"] in lock
    build = tmp_path / "out" / BUILD
    with open(build / "tilekern" / "layers.py", "a") as file:
        file.write("\n")
    metadata = Metadata.read_from_file(build / "metadata.json")
    with pytest.raises(DigestValidationError):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, build))
    other = make_pack(tmp_path, b"other" * 100)
    assert cli.json("repository", tmp_path / "o", "--repo-id", REPO, "--pack", other)["commit"] not in lock


def test_a_kernelized_model_trains_to_the_same_numbers(kernelized, interpreted):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    expected = step(model)
    before = launches()
    kernelized(model, {Qwen3RMSNorm: "RMSNorm", Qwen3MLP: "GatedMLP"})
    assert close(step(model), expected)
    assert {"rms_norm_forward", "rms_norm_backward", "swiglu_forward"} <= launched(before)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kernelized_model_compiles_whole(kernelized, interpreted):
    torch.manual_seed(0)
    model = nn.Sequential(Qwen3RMSNorm(80), Qwen3MLP(CONFIG))
    x = torch.randn(3, 80)
    expected = model(x)
    kernelized(model, {Qwen3RMSNorm: "RMSNorm", Qwen3MLP: "GatedMLP"}, Mode.INFERENCE | Mode.TORCH_COMPILE)
    assert close([torch.compile(model, fullgraph=True, backend="eager")(x)], [expected])


def rotation(*sizes):
    """Return a module with the function's arguments, as transformers makes it if `kernels` is installed."""
    turns = torch.rand(*sizes, 8)
    angles = torch.cat((turns, turns), -1)
    q, k = torch.randn(2, 5, 7, 16), torch.randn(2, 1, 7, 16)
    module = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(apply_rotary_pos_emb)
    return module, [q, k, angles.cos(), angles.sin()]


def halves(activation):
    class Halves(nn.Module):
        def forward(self, x):
            gate, up = x.chunk(2, dim=-1)
            return activation(gate) * up

    return Halves()


MODULES = {
    "RMSNorm": lambda: (Qwen3RMSNorm(80), [torch.randn(3, 80)]),
    "RMSNormZeroCentered": lambda: (GemmaRMSNorm(80), [torch.randn(3, 80)]),
    "LayerNorm": lambda: (nn.LayerNorm((5, 16)), [torch.randn(3, 5, 16)]),
    "GatedMLP": lambda: (Qwen3MLP(CONFIG), [torch.randn(3, 80)]),
    "GeLU": lambda: (nn.GELU(), [torch.randn(3, 34)]),
    "GeluTanh": lambda: (activations.NewGELUActivation(), [torch.randn(3, 34)]),
    "QuickGELU": lambda: (activations.QuickGELUActivation(), [torch.randn(3, 34)]),
    "SiLU": lambda: (nn.SiLU(), [torch.randn(3, 34)]),
    "SiluAndMul": lambda: (halves(nn.functional.silu), [torch.randn(3, 34)]),
    "GeluAndMul": lambda: (halves(nn.functional.gelu), [torch.randn(3, 34)]),
    "GeluTanhAndMul": lambda: (halves(nn.GELU("tanh")), [torch.randn(3, 34)]),
    "RotaryPosEmb": partial(rotation, 2, 7),
    "CrossEntropyLoss": lambda: (
        nn.CrossEntropyLoss(torch.rand(33), label_smoothing=0.1), [torch.randn(2, 33, 5), torch.randint(0, 33, (2, 5))]
    ),
}  # fmt: skip


# What the op of a layer would not compute.
OTHERS = {
    "GatedMLP": lambda: (Qwen3MLP(RELU), [torch.randn(3, 80)]),
    "RMSNorm": lambda: (Qwen3RMSNorm(80), [nn.Parameter(torch.randn(3, 80))]),
    "RotaryPosEmb": partial(rotation, 1, 1),
    "CrossEntropyLoss": lambda: (nn.CrossEntropyLoss(), [torch.randn(3, 33), torch.rand(3, 33)]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "make", "is_served"),
    [
        *((name, MODULES[name], True) for name in layers.__all__),
        *((name, make, False) for name, make in OTHERS.items()),
    ],
)
def test_a_layer_computes_the_same_as_its_module(name, make, is_served, kernelized, interpreted):
    torch.manual_seed(0)
    module, arguments = make()
    expected = tensors(module(*arguments))
    before = launches()
    kernelized(module, {type(module): name})
    results = tensors(module(*arguments))
    assert close(results, expected) if is_served else all(map(torch.equal, results, expected))
    assert bool(launched(before)) == is_served
