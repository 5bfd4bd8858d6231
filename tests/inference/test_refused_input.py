"""Wrong checkpoints, configs, prompts and machines: one line each, and the GPU's memory is free again."""

import gc
import json
import math
import shutil
import tomllib

import pytest
import torch
from emulated import read
from environments import ROOT, BarePython, stub_of_the_driver
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_models import OF_GPT2, OF_LLAMA, VOCABULARY, ids_of, save

from tilekern.errors import DriverError, InputError
from tilekern.inference import Sampling, load
from tilekern.inference.architectures import Architecture, architecture_of
from tilekern.inference.host_tensors import HostTensor
from tilekern.inference.steps import angles_of
from tilekern.inference.weights import config_of_state_dict, sources_of

GPT2, LLAMA, QWEN3 = ({"model_type": kind} | sizes for kind, sizes in
                      (("gpt2", OF_GPT2), ("llama", OF_LLAMA), ("qwen3", OF_LLAMA)))  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of GPT-2 and of Llama."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("gpt2", "llama")}
    for name, folder in found.items():
        save(name, folder)
    return found


@pytest.fixture
def copy(folders, tmp_path):
    """Return a function that copies a checkpoint with some changes of its config and its tensors."""

    def copied(name, config=None, **tensors):
        whole = json.loads((folders[name] / "config.json").read_text()) | (config or {})
        (tmp_path / "config.json").write_text(json.dumps(whole))
        kept = load_file(folders[name] / "model.safetensors") | tensors
        save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, tmp_path / "model.safetensors")
        return tmp_path

    return copied


def refusal(call, *arguments, error=InputError, **options):
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NAME = "model.layers.1.mlp.up_proj.weight"
TENSORS = {
    "lacks model.layers.1.mlp.up_proj.weight, which a llama model has": {NAME: None},
    "has more, no.use, for which a llama model has no use": {"more": torch.ones(2), "no.use": torch.ones(2)},
    "up_proj.weight has the shape [48, 80]; config.json says [80, 48]": {NAME: torch.ones(48, 80)},
    "up_proj.weight has the shape [3840]; config.json says": {NAME: torch.ones(80 * 48)},
    "up_proj.weight has the shape []; config.json says": {NAME: torch.tensor(1.0)},
    "up_proj.weight is int8; the engine reads bfloat16, float16, float32": {NAME: torch.ones(80, 48, dtype=torch.int8)},
    "up_proj.weight is float64; the engine reads": {NAME: torch.ones(80, 48, dtype=torch.float64)},
}


@pytest.mark.parametrize("message", TENSORS)
def test_tensors_that_are_not_the_model_s(gpu, copy, message):
    assert message in refusal(load, copy("llama", **TENSORS[message]))


def test_of_many_missing_tensors_some_are_named(gpu, copy):
    folder = copy("llama", {"num_hidden_layers": 3})
    assert "lacks model.layers.2.input_layernorm.weight, " in (text := refusal(load, folder))
    assert "and 6 more, which" in text
    assert "has 21 tensors, too few for 2147483647 layers" in refusal(
        load, copy("llama", {"num_hidden_layers": 2**31 - 1})
    )


def test_computed_tensors_and_a_stored_tied_head_are_passed_over(gpu, copy):
    """Old checkpoints contain masks and the frequencies of rotations."""
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    load(copy("gpt2", **masks))
    load(copy("llama", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(copy("llama", {"tie_word_embeddings": True}))


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
CONFIGS = [
    ("model_type is 'mistral'; the engine runs gpt2, llama, qwen3 and qwen3_moe", LLAMA | {"model_type": "mistral"}),
    ("model_type is ['llama']", LLAMA | {"model_type": ["llama"]}),
    *(
        (f"{name} must be a whole number from 1 to 2^31 - 1, got {value!r:.40}", config | {name: value})
        for config, name in (
            (LLAMA, "hidden_size"), (LLAMA, "num_hidden_layers"), (LLAMA, "head_dim"), (QWEN3, "vocab_size"),
            (LLAMA, "num_key_value_heads"), (GPT2, "n_embd"), (GPT2, "n_head"), (GPT2, "n_inner"),
        )
        for value in (0, -3, 2**31, 10**400, "48", True, 48.0, math.nan, [], {})
    ),
    *((f"{name} must be a whole number from 1 to 2^31 - 1, got None", LLAMA | {name: None}) for name in (
        "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")),
    *(
        (f"{name} must be a number from 1.18e-38 to 3.4e+38, got {value!r:.40}", config | {name: value})
        for config, name in ((LLAMA, "rms_norm_eps"), (GPT2, "layer_norm_epsilon"))
        for value in (0, -1e-5, math.nan, math.inf, 1e-300, 1e300, 10**400, "1e-5", True)
    ),
    *(("rope_theta must be a number from 1 to 3.4e+38", LLAMA | {"rope_theta": value})
      for value in (0, 0.5, 1e-300, 1e300, 10**400, math.nan, "1e4")),
    ("tie_word_embeddings must be true or false, got 1", LLAMA | {"tie_word_embeddings": 1}),
    ("n_embd 48 must be a multiple of n_head 5", GPT2 | {"n_head": 5}),
    ("n_embd 48 must be a multiple of n_head 48, and more", GPT2 | {"n_head": 48}),
    ("4 heads must be a multiple of the 3 key heads", LLAMA | {"num_key_value_heads": 3}),
    ("head_dim must be even for a rotary embedding, got 15", LLAMA | {"head_dim": 15}),
    ("head_dim must be a whole number", LLAMA | {"head_dim": None, "num_attention_heads": 96}),
    ("activation_function is 'relu'; the engine runs models with 'gelu_new'", GPT2 | {"activation_function": "relu"}),
    ("scale_attn_by_inverse_layer_idx is True", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    ("hidden_act is 'gelu'", LLAMA | {"hidden_act": "gelu"}),
    ("mlp_bias is True", LLAMA | {"mlp_bias": True}),
    ("use_sliding_window is True", QWEN3 | {"use_sliding_window": True}),
    ("layer_types must all be 'full_attention', got ['full_attention', 'sliding_attention']",
     QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}),
    ("layer_types must all be", QWEN3 | {"layer_types": 7}),
    ("rope_type is 'yarn'; the engine runs default, linear", LLAMA | {"rope_parameters": {"rope_type": "yarn"}}),
    ("rope_type is 'dynamic'", LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("rope_parameters must be an object, got []", LLAMA | {"rope_parameters": []}),
    ("partial_rotary_factor is 0.5", LLAMA | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    ("factor must be a number from 1 to", LLAMA | {"rope_parameters": {"rope_type": "linear"}}),
    ("factor must be a number from 1 to", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}}),
    ("low_freq_factor 4.0 must be below high", LLAMA | {"rope_parameters": ROPE | {"low_freq_factor": 4}}),
    ("original_max_position_embeddings must be a whole number from 1", LLAMA | {
        "rope_parameters": ROPE | {"original_max_position_embeddings": 8192.5}}),
    ("eos_token_id must be an id or a list of ids, got 'end'", LLAMA | {"eos_token_id": "end"}),
    ("eos_token_id must be an id", LLAMA | {"eos_token_id": [1, True]}),
]  # fmt: skip


def test_fields_of_a_config():
    for message, config in CONFIGS:
        assert f"config.json: {message}" in refusal(architecture_of, config)
    for missing in ("n_embd", "n_head", "n_layer", "vocab_size"):
        config = {name: value for name, value in GPT2.items() if name != missing}
        assert f"config.json: {missing} must be a whole number" in refusal(architecture_of, config)


WORDS = ["llama3", "linear", "default", "silu", "gelu_new", "full_attention", "gpt2", "llama", "", "\ud800"]
EXTREMES = [0, 1, -1, 2**31 - 1, 10**400, 1e-300, 1e-45, 1e300, math.nan, math.inf, True, None, [], [-1], {}]
PLAIN = st.sampled_from(EXTREMES) | st.sampled_from(WORDS) | st.integers(1, 64) | st.floats()
ROPES = st.builds(
    lambda kind, changes: ROPE | {"rope_type": kind} | changes,
    st.sampled_from(["default", "linear", "llama3"]),
    st.dictionaries(st.sampled_from([*ROPE, "rope_theta", "type"]), PLAIN, max_size=2),
)
FIELDS = sorted({
    *GPT2, *LLAMA, "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "n_inner", "layer_types",
    "attention_bias", "rms_norm_eps", "layer_norm_epsilon", "mlp_bias", "hidden_act",
})  # fmt: skip
BY_NAME = {
    name: HostTensor(name, "float32", (4, 8), memoryview(b""))
    for name in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight", "x")
}


def refuse_tensors(config, tensors):
    """Read a config, and ask for a model's weights."""
    architecture = architecture_of(config())
    assert isinstance(architecture, Architecture)
    angles_of(architecture, 3, "float16")
    sources_of(architecture, tensors)


@examples(600)
@given(
    st.sampled_from([GPT2, LLAMA, QWEN3]),
    st.dictionaries(st.sampled_from(FIELDS), PLAIN | ROPES, max_size=2)
    | st.builds(lambda rope, theta: {"rope_parameters": rope, "rope_theta": theta}, ROPES, PLAIN),
    st.sets(st.sampled_from(sorted(BY_NAME))), PLAIN,
)  # fmt: skip
def test_any_config_is_an_architecture_or_refused_in_one_line(config, changes, names, heads):
    tensors = {name: BY_NAME[name] for name in names}
    # No set of these tensors is a model's.
    refusal(refuse_tensors, lambda: config | changes, tensors)
    refusal(refuse_tensors, lambda: config_of_state_dict(tensors, heads), tensors)


def test_state_dicts_that_are_not_mingpt_s(gpu, tmp_path):
    def load_of(heads=2, **tensors):
        torch.save(tensors, tmp_path / "model.pt")
        return refusal(load, tmp_path, heads=heads)

    two = {"transformer.wte.weight": torch.ones(5, 8), "transformer.wpe.weight": torch.ones(3, 8)}
    assert load_of(x=torch.ones(2)) == "the checkpoint has no config.json, and its tensors are not those of minGPT"
    assert "its tensors are not those of minGPT" in load_of(**two | {"transformer.wpe.weight": torch.tensor(1.0)})
    assert "its tensors do not tell the number of heads: give heads" in load_of(None, **two)
    for heads in (0, -1, True, "2", 2.0):
        assert f"heads must be a whole number from 1 on, got {heads!r}" in load_of(heads, **two)
    more = two | {"transformer.h.0.mlp.c_fc.bias": torch.tensor(1.0)}
    assert "transformer.h.0.mlp.c_fc.bias has the shape []; a bias has one size" in load_of(**more)
    more = two | {"transformer.h.0.mlp.c_fc.bias": torch.ones(32)}
    assert "lacks transformer.h.0.attn.c_attn.bias, transformer.h.0.attn.c_attn.weight" in load_of(**more)


def test_settings_of_loading(gpu, folders):
    for dtype in ("float64", "int8", "", None):
        assert f"dtype must be one of bfloat16, float16, float32, got {dtype!r}" in refusal(
            load, folders["llama"], dtype=dtype
        )
    for context in (0, -1, 301, 2.0, "8", True):
        assert f"context must be from 1 to 300, for which the model was made, got {context!r}" in refusal(
            load, folders["llama"], context=context
        )


def test_prompts(gpu, folders):
    engine = load(folders["llama"], context=8)
    for call in (engine.forward, lambda ids: engine.generate(ids, 1)):
        for prompts in ([], [[]], [[1], []], [1, 2], [None], [(5, 6), 7]):
            assert "prompts must be lists of ids, at least one, and each with a token" in refusal(call, prompts)
        for one in (-1, VOCABULARY, 1 << 70, True, 1.0, "1", None):
            assert f"ids are whole numbers from 0 to {VOCABULARY - 1}, got {one!r}" in refusal(call, [[1], [1, one]])
        assert "a prompt has 9 tokens, and the context is 8" in refusal(call, ids_of(9))
    assert "forward takes sequences of one length" in refusal(engine.forward, ids_of(2, 3))
    for name in ("new_tokens", "chunk"):
        for count in (0, -1, 1.0, True, "1", None):
            assert f"{name} must be a whole number from 1 on, got {count!r}" in refusal(
                engine.generate, [[1]], **({"new_tokens": 1} | {name: count})
            )
    assert "a prompt of 5 tokens and 5 new ones do not fit a context of 8" in refusal(engine.generate, ids_of(5), 5)
    assert "there are 2 prompts and 1 ways of sampling" in refusal(engine.generate, ids_of(1, 1), 1, [Sampling()])
    assert next(engine.generate([(5, 6)], 1))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "seed"])
def test_ways_of_sampling(name):
    kind = "whole number" if name in ("top_k", "seed") else "number"
    wrong = [math.nan, math.inf, -math.inf, "1", None, True, 10**400, -(10**400)]
    wrong += [1.0, 1 << 63, -(1 << 63) - 1] if kind == "whole number" else [-0.1, 1e39]
    wrong += {"top_k": [-1, 1 << 31], "top_p": [1.01], "min_p": [2]}.get(name, [])
    for value in wrong:
        assert f"{name} must be a {kind} from " in refusal(Sampling, **{name: value})
    Sampling(**{name: 1})


def test_a_load_that_fails_gives_its_memory_back(gpu, folders, copy, monkeypatch):
    """The GPU is full at the first of the weights, or later; a tensor is wrong. The next load is whole."""
    plenty, ids = 1 << 32, ids_of(3)
    monkeypatch.setenv("STUB_MEMORY", str(plenty))

    def left():
        gc.collect()  # the test's own frames keep what an error refers to
        return gpu.free_bytes()

    before = left()
    gc.freeze()  # late in a run each collection would look through what other tests left for seconds
    engine = load(folders["llama"], dtype="float32")
    taken = before - left()
    wanted = read(engine.forward(ids))
    del engine
    assert left() == before
    for share in (0, 0.3, 0.6, 0.9):
        monkeypatch.setenv("STUB_MEMORY", str(plenty - before + int(share * taken)))
        text = refusal(load, folders["llama"], dtype="float32", error=DriverError)
        assert "cuMemAlloc_v2 failed with error 2 (CUDA_ERROR_OUT_OF_MEMORY)" in text
        monkeypatch.setenv("STUB_MEMORY", str(plenty))
        assert left() == before
    refusal(load, copy("llama", **{NAME: None}))
    assert left() == before
    assert torch.equal(read(load(folders["llama"], dtype="float32").forward(ids)), wanted)


def test_a_call_without_memory_for_its_cache_hinders_no_other(gpu, folders, monkeypatch):
    monkeypatch.setenv("STUB_MEMORY", str(1 << 32))
    engine, ids = load(folders["llama"], dtype="float32", context=8), ids_of(3, 3)
    wanted = list(engine.generate(ids[:1], 3))
    gc.collect()
    monkeypatch.setenv("STUB_MEMORY", str((1 << 32) - gpu.free_bytes()))
    text = refusal(lambda: list(engine.generate(ids * 8, 3)), error=DriverError)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in text
    monkeypatch.setenv("STUB_MEMORY", str(1 << 32))
    assert list(engine.generate(ids[:1], 3)) == wanted


# A checkpoint whose weights must be rounded, so that loading needs a kernel, on the stub of the driver.
LOADING = """
import sys
from tilekern.errors import TilekernError
from tilekern.inference import load
from tilekern.runtime.driver import device

for dtype in ("bfloat16", "float32"):
    try:
        engine = load(sys.argv[1], dtype=dtype)
        engine.forward([[1]])
    except TilekernError as error:
        print(f"{type(error).__name__}: {error}")
"""
MACHINES = {
    "no record": ({}, "CacheMiss: no cache holds"),
    "an old driver": ({"STUB_CUDA": "12080"}, "CannotRun: the driver serves CUDA 12.8, and kernels need CUDA 13.0"),
    "no GPU": (
        {"STUB_GPUS": "0"},
        "DriverError: the CUDA driver's cuInit failed with error 100 (CUDA_ERROR_NO_DEVICE)",
    ),
    "no driver": (None, "CannotRun: the CUDA driver is missing (libcuda.so.1: "),
    "a full GPU": ({"STUB_MEMORY": "20000"}, "DriverError: the CUDA driver's cuMemAlloc_v2 failed with error 2"),
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return BarePython(tmp_path_factory.mktemp("bare"), project["dependencies"])


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed, which compiles the driver's stub")
@pytest.mark.parametrize("machine", MACHINES)
def test_machines_that_cannot_run_say_why_in_one_line(bare, folders, tmp_path, machine):
    """Without torch, and with an empty cache."""
    variables, line = MACHINES[machine]
    stub = {} if variables is None else stub_of_the_driver(tmp_path) | variables
    done = bare.run("-c", LOADING, folders["llama"], TILEKERN_CACHE_DIR=str(tmp_path / "cache"), **stub)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [text.startswith(line) for text in lines] == [True, True], lines
