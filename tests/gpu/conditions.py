"""Trains a model under one condition that users meet, patched and as it is, and compares both.

``python conditions.py NAME [small|wide|captured]`` is one process of ``test_conditions_on_gpu.py``: the last line it
prints is ``OK``, ``SKIP`` (the model as it is fails too) or ``FAIL``, with what was seen. ``small`` is a Qwen3 of two
layers, 512 wide; ``wide`` has the widths of Qwen3-8B, for which records are shipped; ``captured`` is small, and its
steps are replayed from CUDA graphs once they can be.
"""

from __future__ import annotations

import copy
import gc
import io
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_processes import counts_of_graphs
from gpu_tolerances import OF_GRADIENT_NORMS, OF_LOSSES
from torch.profiler import ProfilerActivity, profile

STEPS = 3
SMALL = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
WIDE = SMALL | {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip

Step = Callable[[Any, int], Any]
Prepare = Callable[[Any], Any]
Around = Callable[[], AbstractContextManager[Any]]
SIZE = "small"


@dataclass(frozen=True)
class Condition:
    """One condition: the function that runs it, the process's environment, and how many GPUs it needs."""

    run: Callable[[], str]
    environment: dict[str, str] = field(default_factory=dict)
    gpus: int = 1


CONDITIONS: dict[str, Condition] = {}


def condition(environment: dict[str, str] | None = None, gpus: int = 1) -> Callable[[Callable[[], str]], None]:
    def known(run: Callable[[], str]) -> None:
        CONDITIONS[run.__name__] = Condition(run, environment or {}, gpus)

    return known


# A model and its steps.


def make(*, patched: bool, dtype: str = "bfloat16", device: str = "cuda:0") -> Any:
    """The model, always with the same weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**(WIDE if SIZE == "wide" else SMALL), use_cache=False)
    config._attn_implementation = "tilekern" if patched else "sdpa"
    torch.manual_seed(0)
    # Drawing the wide model's numbers takes the host a quarter of a minute.
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).train()


def batch(device: Any = "cuda:0", rows: int | None = None, tokens: int | None = None, seed: int = 1) -> Any:
    """Ids [rows, tokens] of the size's usual shape, or of another."""
    usual, vocabulary = ((1, 4096), 151936) if SIZE == "wide" else ((2, 256), 2048)
    shape = (rows or usual[0], tokens or usual[1])
    with torch.device("cpu"):
        ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    return ids.to(device)


class Batches(torch.utils.data.Dataset):
    """Rows of 256 ids, each with what ``as_item`` makes of it."""

    def __init__(self, length: int, as_item: Callable[[Any], Any] = lambda ids: ids) -> None:
        self._length, self._as_item = length, as_item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self._as_item(batch("cpu", 1, 256, number)[0])


def learn(model: Any, ids: Any, **more: Any) -> Any:
    """One forward and backward."""
    loss = model(**{"input_ids": ids, "labels": ids, **more}).loss.mean()
    loss.backward()
    return loss.detach()


def plain(model: Any, number: int) -> Any:
    return learn(model, batch(next(model.parameters()).device))


def within(around: Around) -> Step:
    """A step inside a context that is made anew for each."""

    def step(model: Any, number: int) -> Any:
        with around():
            return plain(model, number)

    return step


@dataclass(frozen=True)
class Run:
    losses: list[float]
    gradients: dict[str, float]


def run(step: Step, model: Any, steps: int = STEPS) -> Run:
    """The losses of some steps, and the norms of the last one's gradients."""
    losses, steps = [], steps + 3 * (SIZE == "captured")
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        losses.append(float(step(model, number)))
    torch.cuda.synchronize()
    return Run(losses, norms_of(model))


def norms_of(model: Any) -> dict[str, float]:
    return {name: p.grad.float().norm().item() for name, p in model.named_parameters() if p.grad is not None}


def alike(mine: Run, theirs: Run) -> str:
    """Refuse two runs that differ by more than rounding."""
    pairs = list(zip(mine.losses, theirs.losses, strict=True))
    assert all(abs(a - b) < OF_LOSSES * max(1.0, abs(b)) for a, b in pairs), f"losses {mine.losses}, {theirs.losses}"
    names = set(mine.gradients) ^ set(theirs.gradients)
    assert not names, f"gradients of {sorted(names)[:4]} are there on one side alone"
    far = {
        name: (mine.gradients[name], norm)
        for name, norm in theirs.gradients.items()
        if not abs(mine.gradients[name] - norm) <= OF_GRADIENT_NORMS * norm + 1e-4
    }
    assert not far, f"{len(far)} of {len(theirs.gradients)} gradients differ: {list(far.items())[:2]}"
    return f"losses {mine.losses[:2]}, {theirs.losses[:2]}"


def served(*may_fall_back: str) -> None:
    """Refuse a run in which other calls than these fell back, or attention's kernel was not launched.

    Its figures would be torch's.
    """
    import tilekern

    counted = tilekern.stats()
    fallbacks = {name: each["fallbacks"] for name, each in counted.items() if each["fallbacks"]}
    assert set(fallbacks) <= set(may_fall_back), f"calls fell back: {fallbacks}"
    launches = {name: each["launches"] for name, each in counted.items()}
    assert launches.get("attention_forward") or "attention_forward" in fallbacks, f"attention did not run: {launches}"


# accelerate's hooks around each module must run, so that nothing is fused across modules.
UNDER_HOOKS = partial(served, "fused_add_rms_norm_forward", "fused_linear_cross_entropy", "qk_norm_rope_forward")
# Attention leaves padded batches to SDPA.
PADDED = partial(served, "attention_forward")


class FailsAsItIs(Exception):  # noqa: N818 (the name says the state)
    """The model as it is fails under the condition."""


@contextmanager
def as_it_is() -> Iterator[None]:
    """Say of an error inside that it is not of the patches."""
    try:
        yield
    except Exception as error:
        raise FailsAsItIs(f"{type(error).__name__} {str(error)[:160]}") from error


def patch() -> None:
    import tilekern

    tilekern.apply(graphs=SIZE == "captured")


def both(
    step: Step = plain, prepare: Prepare = lambda model: model, *, around: Around = nullcontext,
    check: Callable[[], None] = served, **options: Any,
) -> str:  # fmt: skip
    """Run a model as it is and patched, and compare."""
    with as_it_is(), around():
        theirs = run(step, prepare(make(patched=False, **options)))
    patch()
    with around():
        mine = run(step, prepare(make(patched=True, **options)))
    said = alike(mine, theirs)
    check()
    return said


def either(train: Callable[[bool], Run]) -> str:
    """Train as it is and patched, and compare."""
    theirs = train(False)
    patch()
    said = alike(train(True), theirs)
    served()
    return said


def known(name: str, step: Step = plain, environment: dict[str, str] | None = None, gpus: int = 1, **how: Any) -> None:
    """Note a condition that is nothing but a step, or how :func:`both` runs it."""
    CONDITIONS[name] = Condition(partial(both, step, **how), environment or {}, gpus)


# Allocators and the process's environment.


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ALL_OPTIONS = "garbage_collection_threshold:0.6,max_split_size_mb:64,roundup_power2_divisions:4"
known("as_usual")
known("expandable_segments", environment=EXPANDABLE)
known("malloc_async", environment={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
known("no_caching", environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
known("allocator_with_all_options", environment={"PYTORCH_CUDA_ALLOC_CONF": ALL_OPTIONS})
known("launch_blocking", environment={"CUDA_LAUNCH_BLOCKING": "1"})
known("eager_loading", environment={"CUDA_MODULE_LOADING": "EAGER"})
known("nvml_based_check", environment={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
known("one_connection", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
known("only_the_second_gpu_is_visible", environment={"CUDA_VISIBLE_DEVICES": "1"}, gpus=2)
known("mem_pool", within(lambda: torch.cuda.use_mem_pool(torch.cuda.MemPool())))


@condition()
def out_of_memory_and_on() -> str:
    """A step that ran out of memory leaves nothing behind that disturbs the next one."""
    theirs = run(plain, make(patched=False))
    patch()
    model = make(patched=True)
    first = run(plain, model)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        learn(model, batch(rows=64, tokens=4096))
    except torch.OutOfMemoryError as error:
        said = str(error)[:40]
    else:
        raise AssertionError("the large step fitted")
    torch.cuda.set_per_process_memory_fraction(1.0)
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return f"{alike(first, theirs)}, {alike(run(plain, model), theirs)} after {said}"


# What the user has set in torch.


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def evaluated_before(model: Any) -> Any:
    """The first calls are an evaluation in inference mode; training follows."""
    with torch.inference_mode():
        ids = batch()
        model(input_ids=ids, labels=ids)
        model.eval()(input_ids=ids, labels=ids)
    return model.train()


known("default_dtype_bfloat16", around=partial(default_dtype, "bfloat16"))
known("default_dtype_float64", around=partial(default_dtype, "float64"))
known("default_device_context", around=partial(torch.device, "cuda:0"))
# One that has nothing to do with the model, as scripts leave behind that made it on meta.
known("default_device_meta_in_steps", within(partial(torch.device, "meta")))
known("inference_mode_before", prepare=evaluated_before)
known("float16", dtype="float16")


@condition()
def default_device_cuda() -> str:
    torch.set_default_device("cuda")
    return both()


@condition({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
def deterministic_algorithms() -> str:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return both()


@condition()
def switches_of_precision() -> str:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = True
    return both()


@condition()
def float32_with_tf32() -> str:
    torch.backends.cuda.matmul.allow_tf32 = True
    return both(dtype="float32")


@condition()
def warnings_are_errors() -> str:
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="tilekern")
        return both()


@condition()
def cudnn_is_off() -> str:
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    return both()


def autocast(dtype: str, scaled: bool = False, inside: bool = False) -> Step:
    """A step under autocast; ``scaled`` by a GradScaler, with the backward ``inside`` too."""

    def step(model: Any, number: int) -> Any:
        scaler, ids = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled), batch()
        with torch.autocast("cuda", getattr(torch, dtype)):
            loss = model(input_ids=ids, labels=ids).loss
            if inside:
                scaler.scale(loss).backward()
        if not inside:
            scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad /= 1024.0 if scaled else 1.0
        return loss.detach()

    return step


known("autocast_bfloat16", autocast("bfloat16"), dtype="float32")
known("autocast_float16_scaled", autocast("float16", scaled=True), dtype="float32")
known("backward_in_autocast", autocast("bfloat16", inside=True), dtype="float32")


# Threads, streams and processes.


def on_a_side_stream(model: Any, number: int) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = plain(model, number)
    torch.cuda.current_stream().wait_stream(stream)
    return loss


def in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in a new thread."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def backward_in_thread(model: Any, number: int) -> Any:
    ids = batch()
    loss = model(input_ids=ids, labels=ids).loss
    in_thread(loss.backward)
    return loss.detach()


def loaded_by_workers(model: Any, number: int) -> Any:
    for ids in torch.utils.data.DataLoader(Batches(4), batch_size=2, num_workers=2, pin_memory=True):
        on_gpu = ids.cuda(non_blocking=True)
        loss = learn(model, on_gpu, labels=ids.cuda(non_blocking=True))
    return loss


known("side_stream", on_a_side_stream)
known("each_step_in_a_new_thread", lambda model, number: in_thread(partial(plain, model, number)))
known("backward_in_a_new_thread", backward_in_thread, EXPANDABLE)
known("no_threads_of_autograd", within(partial(torch.autograd.set_multithreading_enabled, False)))
known("workers_of_a_data_loader", loaded_by_workers)


# What is put around a model, and how it is called.


def checkpointed(model: Any, *, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def padded(model: Any, number: int) -> Any:
    ids = batch(rows=2)
    mask = torch.ones_like(ids)
    mask[0, 200:] = 0
    return learn(model, ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def packed(model: Any, number: int) -> Any:
    positions = torch.cat([torch.arange(100), torch.arange(200)])[None].cuda()
    return learn(model, batch(rows=1, tokens=300), position_ids=positions)


def with_items(model: Any, number: int) -> Any:
    """``num_items_in_batch`` as a number, on the CPU and on the GPU."""
    ids = batch()
    items = [ids.numel(), torch.tensor(ids.numel()), torch.tensor(ids.numel(), device="cuda")][number % 3]
    return learn(model, ids, num_items_in_batch=items)


def with_adapters(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    where = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=where, init_lora_weights=False))


NONREENTRANT = partial(checkpointed, reentrant=False)
PROFILE = partial(profile, activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
known("expandable_segments_checkpointed", environment=EXPANDABLE, prepare=NONREENTRANT)
known("checkpoints_reentrant", prepare=partial(checkpointed, reentrant=True))
known("checkpoints_nonreentrant", prepare=NONREENTRANT)
known("saved_tensors_on_the_cpu", around=partial(torch.autograd.graph.save_on_cpu, pin_memory=True))
known("padded", padded, check=PADDED)
known("packed_by_position_ids", packed)
known("odd_lengths", lambda model, number: learn(model, batch(rows=1, tokens=97 + 31 * number)))
known("items_of_a_batch_as_trainer_counts_them", with_items)
known("adapters", prepare=with_adapters)
known("profiled", within(PROFILE))
known("anomalies_are_looked_for", around=partial(torch.autograd.detect_anomaly, check_nan=True))


@condition()
def copies_and_pickles() -> str:
    patch()
    model = make(patched=True)
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    first = run(plain, model)
    alike(run(plain, copy.deepcopy(model)), first)
    return alike(run(plain, torch.load(memory, weights_only=False)), first)


@condition()
def generates() -> str:
    ids = batch(rows=2, tokens=17)
    options = {"max_new_tokens": 24, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        theirs = make(patched=False, dtype="float32").eval().generate(ids, **options)
        patch()
        model = make(patched=True, dtype="float32").eval()
        shares = [
            (theirs == model.generate(ids, **options, **more)).float().mean().item()
            for more in ({}, {"cache_implementation": "static"})
        ]
    assert min(shares) > 0.97, shares
    return str(shares)


# On two GPUs Trainer takes DataParallel, whose checkpoints torch recomputes with another attention, patched or not.
@condition({"CUDA_VISIBLE_DEVICES": "0"})
def trainer() -> str:
    from transformers import Trainer, TrainingArguments

    def train(patched: bool) -> Run:
        arguments = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
            logging_steps=1, report_to=[], bf16=True, save_strategy="no", disable_tqdm=True, seed=0,
            gradient_checkpointing=True, torch_empty_cache_steps=2,
        )  # fmt: skip
        data = Batches(32, lambda ids: {"input_ids": ids, "labels": ids})
        trained = Trainer(make(patched=patched), arguments, train_dataset=data)
        trained.train()
        log = trained.state.log_history
        return Run([line["loss"] for line in log if "loss" in line], {"norm": log[0]["grad_norm"]})

    return either(train)


# torch.compile and CUDA graphs.


def marked(model: Any, number: int) -> Any:
    """A step that says to graphs of torch.compile that it begins, and reads its gradients before the next one."""
    torch.compiler.cudagraph_mark_step_begin()
    return plain(model, number)


def compiled(*, whole: bool = False, **options: Any) -> Prepare:
    """The model compiled, or its layers one by one."""

    def prepare(model: Any) -> Any:
        for module in [model] if whole else model.model.layers:
            module.compile(**options)
        return model

    return prepare


REDUCED = "reduce-overhead"
known("layers_compiled", prepare=compiled())
known("layers_compiled_to_reduce_overhead", marked, prepare=compiled(mode=REDUCED))
known("layers_compiled_with_autotune", prepare=compiled(mode="max-autotune-no-cudagraphs"))
known("layers_compiled_for_any_length", prepare=compiled(dynamic=True))
known("whole_compiled", prepare=compiled(whole=True))
known("whole_compiled_to_reduce_overhead", marked, prepare=compiled(whole=True, mode=REDUCED))


def captured(model: Any, ids: Any, **arguments: Any) -> tuple[Any, Any]:
    """A graph of a forward and backward, and its loss."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(input_ids=ids, labels=ids, **arguments).loss.backward()
            model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(input_ids=ids, labels=ids, **arguments).loss
        loss.backward()
    return graph, loss


def replayed(between: Callable[[], object] = lambda: None, **arguments: Any) -> str:
    """A captured step, replayed with other ids, against the eager step of the model as it is."""
    others = batch(seed=7)

    def step(model: Any) -> Run:
        static = batch()
        graph, loss = captured(model, static, **arguments)
        between()
        static.copy_(others)
        graph.replay()
        torch.cuda.synchronize()
        return Run([float(loss)], norms_of(model))

    theirs = run(lambda model, _: learn(model, others, **arguments), make(patched=False), 1)
    with as_it_is():
        step(make(patched=False))
    patch()
    said = alike(step(make(patched=True)), theirs)
    served()
    return said


def drop_plans() -> None:
    """The kernels of a graph stay loaded when the process looks its plans up again."""
    import tilekern

    tilekern.clear_autotune_cache()
    gc.collect()
    torch.cuda.empty_cache()


def with_graphed_mlps(model: Any) -> Any:
    width = model.config.hidden_size
    sample = torch.randn(*batch().shape, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for layer in model.model.layers:
        layer.mlp = torch.cuda.make_graphed_callables(layer.mlp, (sample,))
    return model


CONDITIONS |= {
    "whole_step_captured": Condition(replayed),
    "whole_step_captured_in_expandable_segments": Condition(replayed, EXPANDABLE),
    "replayed_after_plans_were_dropped": Condition(partial(replayed, drop_plans)),
    "step_captured_with_items_of_a_batch": Condition(partial(replayed, num_items_in_batch=512)),
}
known("layers_graphed", prepare=with_graphed_mlps)


# Several GPUs.


def learn_four_rows(model: Any, _: int) -> Any:
    return learn(model, batch(rows=4))


def use_the_first_gpu() -> None:
    torch.randn(1000, 1000, device="cuda:0").sum().item()


known("second_gpu_while_the_first_is_current", device="cuda:1", gpus=2)
known("replicas_of_data_parallel", learn_four_rows, prepare=partial(torch.nn.DataParallel, device_ids=[0, 1]), gpus=2)


@condition(gpus=2)
def second_gpu_after_the_first_was_used() -> str:
    use_the_first_gpu()
    return both(device="cuda:1")


@condition(gpus=2)
def second_gpu_stepped_by_our_optimizer() -> str:
    import tilekern

    use_the_first_gpu()

    def train(patched: bool) -> Run:
        model = make(patched=patched, device="cuda:1")
        # With a small eps the sign of the smallest gradients, which are rounding, would decide.
        optimizer = (tilekern.AdamW if patched else torch.optim.AdamW)(model.parameters(), lr=1e-2, eps=0.1)

        def step(model: Any, number: int) -> Any:
            loss = plain(model, number)
            optimizer.step()
            return loss

        return run(step, model)

    return either(train)


@condition(gpus=2)
def layers_on_two_gpus() -> str:
    import accelerate

    places = {
        "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "model.rotary_emb": 0,
        "lm_head": 1,
    }  # fmt: skip
    spread = partial(accelerate.dispatch_model, device_map=places)
    return both(lambda model, _: learn(model, batch()), spread, check=UNDER_HOOKS, device="cpu")


@condition(gpus=2)
def two_models_in_two_threads() -> str:
    theirs = [run(plain, make(patched=False, device=f"cuda:{number}"), 20) for number in (0, 1)]
    patch()
    models = [make(patched=True, device=f"cuda:{number}") for number in (0, 1)]
    results: list[Any] = [None, None]

    def train(number: int) -> None:
        results[number] = run(plain, models[number], 20)

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results, "a thread ended with an error"
    said = " ".join(alike(mine, one) for mine, one in zip(results, theirs, strict=True))
    served()
    return said


def main() -> None:
    global SIZE
    name, SIZE = sys.argv[1], (sys.argv[2:] or ["small"])[0]
    try:
        said = f"OK {CONDITIONS[name].run()}"
        said += f" graphs: {counts_of_graphs()}" if SIZE == "captured" else ""
    except FailsAsItIs as error:
        said = f"SKIP the model as it is fails too: {error}"
    except Exception as error:  # noqa: BLE001 (the test says it)
        place = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        said = f"FAIL {type(error).__name__} {error} @ {place.filename}:{place.lineno}"
    sys.stdout.write(" ".join(said.split())[:1000] + "\n")


if __name__ == "__main__":
    main()
