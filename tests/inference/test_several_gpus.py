"""A model that several GPUs share beside the same model on one: logits, tokens, memory, and what is refused."""

import gc
import json
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from emulated import Recorded, read, tensor_of
from small_models import OF_EXPERTS, OF_GPT2, OF_LLAMA, draw_weights, ids_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tilekern.errors import CannotRun, DriverError, ExtraMissing, InputError
from tilekern.generate import main
from tilekern.inference import Sampling, load
from tilekern.inference.launches import of_gpu
from tilekern.inference.planning import DryRun
from tilekern.runtime import dispatch, driver, nccl
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import INTERPRETED

LIBRARY = nccl.library
# The first vocabulary has rows of 16 bytes on each GPU, the other has not.
SHARED, WHOLE = {"vocab_size": 112}, {"vocab_size": 97}
GROUPED = OF_LLAMA | {"hidden_size": 32, "intermediate_size": 48}
SMALL = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, OF_GPT2 | WHOLE | {"n_embd": 32, "n_head": 2}),
    "gpt2, its own head": (
        GPT2LMHeadModel, GPT2Config, OF_GPT2 | SHARED | {"n_embd": 32, "n_head": 2, "tie_word_embeddings": False},
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED | SHARED | {"attention_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED | SHARED | {"tie_word_embeddings": True}),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, GROUPED | OF_EXPERTS | WHOLE),
}  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def folder(request, tmp_path_factory):
    kind, config, sizes = SMALL[request.param]
    torch.manual_seed(5)
    model = kind(config(**sizes)).eval()
    draw_weights(model, 0.25)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint of one layer, for four GPUs too."""
    torch.manual_seed(5)
    sizes = GROUPED | SHARED | {"num_hidden_layers": 1, "num_key_value_heads": 4, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    draw_weights(model, 0.25)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def tokens_of(engine, prompts, new, ways=None):
    steps = engine.generate(prompts, new, ways, ignores_ends=True, chunk=4)
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def test_logits_and_tokens_are_those_of_one_gpu(linked, folder):
    """Of few rows and of many, of one sequence and several, with prompts in chunks, likeliest tokens and draws."""
    one, two = (load(folder, dtype="float32", context=80, gpus=count) for count in (1, 2))
    assert two.gpus == (0, 1)
    for ids in (ids_of(7), ids_of(35, 35)):
        wanted, found = read(one.forward(ids)).double(), read(two.forward(ids)).double()
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    prompts, ways = ids_of(6, 3, 6, seed=1), [Sampling(), Sampling(temperature=1.0, seed=3), Sampling()]
    assert tokens_of(two, prompts, 5, ways) == tokens_of(one, prompts, 5, ways)
    assert tokens_of(two, prompts[:1], 5) == tokens_of(one, prompts[:1], 5)
    for x in (two._generation.choice.ids, two.forward(ids_of(7))):
        assert torch.equal(tensor_of(of_gpu(x, 0)), tensor_of(of_gpu(x, 1)))


def test_int8_weights_are_those_of_one_gpu(linked, folder):
    """Scales too, so they are those of whole rows; the tokens are then the same."""
    one, two = (load(folder, dtype="float32", weight_dtype="int8", gpus=count) for count in (1, 2))
    for wanted, found in zip(one._model.weights.layers, two._model.weights.layers, strict=True):
        parts = [of_gpu(found.output.weight, number) for number in (0, 1)]
        assert torch.equal(torch.cat([tensor_of(part) for part in parts], 1), tensor_of(wanted.output.weight))
        for number in (0, 1):
            assert torch.equal(tensor_of(of_gpu(found.output.scale, number)), tensor_of(wanted.output.scale))
    prompts = ids_of(6, 3, seed=1)
    assert tokens_of(two, prompts, 3) == tokens_of(one, prompts, 3)


def test_four_gpus_and_gpus_by_their_numbers(linked, llama):
    (prompt,) = ids_of(6)
    wanted = tokens_of(load(llama, dtype="float32"), [prompt], 4)
    of = {(0, 1, 2, 3): {"gpus": 4}, (5, 2): {"gpus": [5, 2]}, (3, 4): {"device": 3, "gpus": 2}}
    for numbers, options in of.items():
        engine = load(llama, dtype="float32", **options)
        assert engine.gpus == numbers
        assert linked.devices == list(numbers)
        assert tokens_of(engine, [prompt], 4) == wanted
    assert load(llama, dtype="float32", gpus=[2]).gpus == (2,)


def test_a_gpu_has_its_part_of_each_product_and_no_more(linked, llama, capfd):
    engine = load(llama, dtype="float32", gpus=4, context=8)
    (layer,), head = engine._model.weights.layers, engine._model.weights.head
    shapes = [x.weight.shape for x in (layer.projections, layer.output, layer.gate, layer.up, layer.down, head)]
    assert shapes == [(48, 32), (32, 16), (12, 32), (12, 32), (32, 12), (24, 32)]
    # The embedding is whole, with 12288 bytes, as the head would be; of the projections there are 6144, not 24576.
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"alloc"' in line]
    sizes = [sorted(line["bytes"] for line in lines if line["device"] == number) for number in range(4)]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert [size for size in sizes[0] if size > 4096] == [6144, 12288]


def test_calls_that_gpus_wait_for_are_not_the_main_thread_s(linked, llama):
    """Ctrl-C interrupts it between any two calls."""
    engine = load(llama, dtype="float32", gpus=2)
    tokens_of(engine, ids_of(6), 3)
    assert linked.calls.count("ncclGroupEnd") > 4
    assert threading.main_thread() not in linked.threads


@pytest.fixture
def freed(linked):
    """Fails if communicators or memory of a GPU are left behind."""
    first = settled_bytes()
    gc.freeze()  # late in a run the next collection would look through what other tests left for seconds
    yield
    assert settled_bytes() == first
    assert not linked.alive


def settled_bytes():
    """Return the first GPU's free bytes when the threads are gone which served engines: a late one still holds one."""
    gc.collect()
    if threads_of_engines():
        wait_until(lambda: not threads_of_engines())
        gc.collect()
    return driver.device(0).free_bytes()


def threads_of_engines():
    return [each for each in threading.enumerate() if each.name.startswith(("tilekern-nccl", "tilekern-graphs"))]


def test_memory_and_communicators_end_with_the_engine_and_its_graphs(linked, freed, llama):
    engine = load(llama, dtype="float32", gpus=2)
    tokens_of(engine, ids_of(6), 3)
    graph, circle = engine.captured_forward(1, 3).graph, [engine]
    circle.append(circle)
    del engine, circle
    gc.collect()
    assert len(linked.alive) == 2, "NCCL waits for graphs to end"
    del graph
    assert not linked.alive
    assert linked.calls.count("ncclCommDestroy") == 2


def test_communicators_that_end_before_their_graphs_wait_for_the_last_one(linked):
    """As garbage in a circle may."""
    communicators = nccl.Communicators([0, 1])
    communicators.begin_graph()
    communicators.begin_graph()
    communicators.__del__()
    communicators.end_graph()
    assert "ncclCommDestroy" not in linked.calls
    communicators.end_graph()
    assert not linked.alive
    del communicators
    assert linked.calls.count("ncclCommDestroy") == 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gpus": 3}, InputError, "3 GPUs cannot share 4 key heads and an inner size of 48 evenly; the number of GPUs "
                                  "must be 1 or 2 or 4"),
        ({"gpus": [1, 1]}, InputError, "each GPU can take one part of a model, and these are named: 1, 1"),
        ({"gpus": 0}, InputError, "gpus must be a whole number from 1 on, or a list of GPUs' numbers, got 0"),
        ({"gpus": "01"}, InputError, "gpus must be a whole number from 1 on, or a list of GPUs' numbers, got '01'"),
        ({"gpus": [0, 1], "device": 1}, InputError, "gpus lists the GPUs, so device must be left out, got 1"),
        ({"device": "cuda:1"}, InputError, "device must be a GPU or its number, got 'cuda:1'"),
        ({"device": None}, InputError, "device must be a GPU or its number, got None"),
        ({"gpus": [0, 8]}, CannotRun, "there is no GPU 8: the driver gives 8, counted from 0"),
        ({"device": 7, "gpus": 2}, CannotRun, "there is no GPU 8: the driver gives 8, counted from 0"),
    ],
    ids=str,
)  # fmt: skip
def test_gpus_that_cannot_share_a_model_are_refused(linked, freed, llama, options, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        load(llama, dtype="float32", **options)
    assert not linked.calls


def test_gpus_of_two_kinds_are_refused(linked, llama, monkeypatch):
    monkeypatch.setattr(driver.device(1), "target", replace(driver.device(0).target, sm_count=78))
    with pytest.raises(InputError, match=r"the GPUs must be of one kind, and there are <GPU 0: .*> and <GPU 1: .*>$"):
        load(llama, dtype="float32", gpus=2)
    assert not linked.calls


def test_without_nccl_one_line_says_what_to_install(linked, freed, llama, monkeypatch):
    monkeypatch.setattr(nccl, "library", LIBRARY)
    monkeypatch.setattr(nccl, "_files", lambda: iter(["libnccl.of-nobody.so.2"]))
    LIBRARY.cache_clear()
    with pytest.raises(ExtraMissing, match=r"^more than one GPU needs NCCL, .* pip install 'tilekern\[nccl\]'$"):
        load(llama, dtype="float32", gpus=2)
    assert load(llama, dtype="float32", gpus=1).gpus == (0,)


@pytest.mark.parametrize("name", ["ncclCommInitAll", "ncclAllReduce", "ncclGroupEnd"])
def test_what_fails_in_nccl_while_a_model_is_loaded_is_one_line(linked, freed, llama, name):
    linked.fails[name] = 3
    text = f"NCCL's {name} failed with error 3: internal error: what happened; NCCL_DEBUG=WARN tells more"
    if name == "ncclAllReduce":
        linked.fails["ncclGroupEnd"] = 3
    with pytest.raises(CannotRun, match=f"^{text}$"):
        load(llama, dtype="float32", gpus=2)
    wait_until(lambda: not linked.alive)


@pytest.mark.parametrize("size", [20000, 60000])
def test_a_gpu_with_too_little_memory_leaves_nothing_behind(linked, freed, llama, monkeypatch, size):
    taken = (1 << 32) - driver.device(0).free_bytes()
    monkeypatch.setenv("STUB_MEMORY", str(taken + size))
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        load(llama, dtype="float32", gpus=2)
    monkeypatch.delenv("STUB_MEMORY")


def test_after_a_failure_gpus_that_wait_are_released_and_the_engine_says_what_to_do(linked, freed, llama):
    engine = load(llama, dtype="float32", gpus=2)
    linked.fails["ncclGroupEnd"] = 1
    with pytest.raises(CannotRun, match=r"^NCCL's ncclGroupEnd failed with error 1: internal error"):
        engine.forward(ids_of(5))
    wait_until(lambda: not linked.alive)
    assert linked.calls.count("ncclCommAbort") == 2
    with pytest.raises(CannotRun, match=r"^the GPUs no longer work together, .*; load the model again$"):
        engine.forward(ids_of(4))


def test_a_graph_that_one_gpu_does_not_take_ends_what_the_other_waits_in(linked, llama, monkeypatch):
    engine = load(llama, dtype="float32", gpus=2)
    engine.forward(ids_of(5))
    launch, second = Recorded.launch, engine.stream.each[1]

    def refuse(graph, stream):
        if stream is second:
            raise DriverError("cuGraphLaunch failed")

    monkeypatch.setattr(Recorded, "launch", refuse)
    with pytest.raises(DriverError, match=r"^cuGraphLaunch failed$"):
        engine.forward(ids_of(5))
    wait_until(lambda: not linked.alive)
    monkeypatch.setattr(Recorded, "launch", launch)
    with pytest.raises(CannotRun, match=r"load the model again"):
        engine.forward(ids_of(5))


def wait_until(is_so):
    """Another thread aborts communicators."""
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_gpus_do_not_run_different_kernels(linked, llama, monkeypatch):
    interpreted = dispatch.array_plan_for

    def plan(spec, device, target, problem):
        found = interpreted(spec, device, target, problem)
        if device and spec.name == "rms_norm_forward":
            found.config = next(c for c in spec.space.candidates(problem, INTERPRETED) if c != found.config)
        return found

    monkeypatch.setattr(dispatch, "array_plan_for", plan)
    with pytest.raises(CannotRun, match=r"^rms_norm_forward: its record changed while the GPUs looked it up; "):
        load(llama, dtype="float32", gpus=2).forward(ids_of(5))


def test_a_dry_run_of_a_part_finds_what_a_gpu_asks_for(linked, folder, monkeypatch):
    interpreted, asked = dispatch.array_plan_for, {0: set(), 1: set()}

    def plan(spec, device, target, problem):
        asked[device].add((spec.name, spec.bucketed(problem)))
        return interpreted(spec, device, target, problem)

    monkeypatch.setattr(dispatch, "array_plan_for", plan)
    engine = load(folder, dtype="float32", gpus=2)
    engine.forward([[1] * 5] * 2)
    tokens_of(engine, [[1] * 5] * 2, 2)
    assert asked[0] == asked[1]
    found = Trace(INTERPRETED)
    dry = DryRun(found, engine.architecture, "float32", gpus=2)
    dry.load("float32", transposed=engine.architecture.kind == "gpt2")
    dry.forward(2, 5)
    dry.prompt(2, 5, 4)
    dry.token(2, engine.context)
    planned = {named for named in found.asked if named[0] != "sample"}
    assert without_joins(planned) == without_joins(asked[0])


def without_joins(problems):
    """A join is that of the config which runs."""
    return {named for named in problems if named[0] != "decode_join"}


def test_the_command_line_takes_a_number_of_gpus_or_their_numbers(linked, llama, capsys):
    for given, numbers in (("2", [0, 1]), ("3,1", [3, 1])):
        options = ("--ids", "5,6,7", "--new", "3", "--dtype", "float32", "--json", "--gpus", given)
        assert main([str(llama), *options]) == 0
        assert json.loads(capsys.readouterr().out)["gpus"] == numbers
    assert main([str(llama), "--ids", "5", "--gpus", "two"]) == 2
    said = capsys.readouterr().err
    assert said == "tilekern: --gpus must be a number of GPUs, or their numbers with commas between, got 'two'\n"
