"""Trains a model under one condition that users meet, patched and as it is, and compares both.

``python conditions.py NAME [small|wide]`` is one process of ``test_conditions_on_gpu.py``: the last line it prints is
``OK``, ``SKIP`` (the model as it is fails too) or ``FAIL``, with what was seen. ``small`` is a Qwen3 of two layers, 512
wide; ``wide`` has the widths of Qwen3-8B, for which records are shipped.
"""

from __future__ import annotations

import copy
import functools
import io
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

STEPS = 3
# Of the loss, and of the norm of each gradient: both are bfloat16's, whose sums are taken in other orders.
LOSS, GRADIENT = 2e-2, 3e-2
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


@dataclass(frozen=True)
class Condition:
    """One condition: the process's environment, how many GPUs it needs, and the function that runs it."""

    run: Callable[[], str]
    environment: dict[str, str] = field(default_factory=dict)
    gpus: int = 1


CONDITIONS: dict[str, Condition] = {}
SIZE = "small"


def condition(environment: dict[str, str] | None = None, gpus: int = 1) -> Callable[[Callable[[], str]], None]:
    def known(run: Callable[[], str]) -> None:
        CONDITIONS[run.__name__] = Condition(run, environment or {}, gpus)

    return known


def make(*, patched: bool, dtype: str = "bfloat16", device: str = "cuda:0", **sizes: Any) -> Any:
    """The model, always with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**((WIDE if SIZE == "wide" else SMALL) | sizes), use_cache=False)
    config._attn_implementation = "tilekern" if patched else "sdpa"
    torch.manual_seed(0)
    # Drawing the wide model's numbers takes the host a quarter of a minute.
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).train()


def batch(device: Any = "cuda:0", rows: int | None = None, tokens: int | None = None, seed: int = 1) -> Any:
    """Ids [rows, tokens] of the size's usual shape, or of another."""
    import torch

    usual, vocabulary = ((1, 4096), 151936) if SIZE == "wide" else ((2, 256), 2048)
    shape = (rows or usual[0], tokens or usual[1])
    with torch.device("cpu"):
        ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    return ids.to(device)


def plain(model: Any, number: int) -> Any:
    """One forward and backward."""
    ids = batch(next(model.parameters()).device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


@dataclass(frozen=True)
class Run:
    losses: list[float]
    gradients: dict[str, float]


def run(step: Step, model: Any, steps: int = STEPS) -> Run:
    """The losses of some steps, and the norms of the last one's gradients."""
    import torch

    losses = []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        losses.append(float(step(model, number)))
    torch.cuda.synchronize()
    grads = {name: p.grad.float().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    return Run(losses, grads)


def alike(mine: Run, theirs: Run) -> str:
    """Refuse two runs that differ by more than rounding."""
    pairs = list(zip(mine.losses, theirs.losses, strict=True))
    assert all(abs(a - b) < LOSS * max(1.0, abs(b)) for a, b in pairs), f"losses {mine.losses}, {theirs.losses}"
    names = set(mine.gradients) ^ set(theirs.gradients)
    assert not names, f"gradients of {sorted(names)[:4]} are there on one side alone"
    far = {
        name: (mine.gradients[name], norm)
        for name, norm in theirs.gradients.items()
        if not abs(mine.gradients[name] - norm) <= GRADIENT * norm + 1e-4
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


def except_for(*names: str) -> Callable[[], None]:
    """A check that lets calls of some kernels fall back."""
    return functools.partial(served, *names)


# Sums of two dtypes are added by torch, in front of the norm's kernel.
UNDER_AUTOCAST = except_for("fused_add_rms_norm_forward")
# accelerate's hooks around each module must run, so that nothing is fused across modules.
UNDER_HOOKS = except_for("fused_add_rms_norm_forward", "fused_linear_cross_entropy", "qk_norm_rope_forward")


class FailsAsItIs(Exception):  # noqa: N818 (the name says the state)
    """The model as it is fails under the condition."""


def attention_fell_back() -> None:
    """Refuse a run in which anything but attention fell back, which leaves padded batches to SDPA."""
    import tilekern

    fallbacks = {name: each["fallbacks"] for name, each in tilekern.stats().items() if each["fallbacks"]}
    assert set(fallbacks) == {"attention_forward"}, f"calls fell back: {fallbacks}"


def both(
    step: Step = plain, prepare: Callable[[Any], Any] = lambda model: model, *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext, check: Callable[[], None] = served, **options: Any,
) -> str:  # fmt: skip
    """Run a model as it is and patched, and compare."""
    import tilekern

    try:
        with around():
            theirs = run(step, prepare(make(patched=False, **options)))
    except Exception as error:
        raise FailsAsItIs(f"{type(error).__name__} {str(error)[:160]}") from error
    tilekern.apply()
    with around():
        mine = run(step, prepare(make(patched=True, **options)))
    said = alike(mine, theirs)
    check()
    return said


# Allocators and the process's environment.


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ALL_OPTIONS = "garbage_collection_threshold:0.6,max_split_size_mb:64,roundup_power2_divisions:4"
# What is nothing but another environment.
ENVIRONMENTS = {
    "as_usual": {},
    "expandable_segments": EXPANDABLE,
    "malloc_async": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "no_caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "allocator_with_all_options": {"PYTORCH_CUDA_ALLOC_CONF": ALL_OPTIONS},
    "launch_blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
    "eager_loading": {"CUDA_MODULE_LOADING": "EAGER"},
    "nvml_based_check": {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    "one_connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}
CONDITIONS |= {name: Condition(both, environment) for name, environment in ENVIRONMENTS.items()}


@condition(EXPANDABLE)
def expandable_segments_checkpointed() -> str:
    return both(prepare=checkpointed(reentrant=False))


@condition({"CUDA_VISIBLE_DEVICES": "1"}, gpus=2)
def only_the_second_gpu_is_visible() -> str:
    return both()


@condition()
def mem_pool() -> str:
    import torch

    def step(model: Any, number: int) -> Any:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            return plain(model, number)

    return both(step)


@condition()
def out_of_memory_and_on() -> str:
    """What a step that ran out of memory leaves behind does not disturb the next one."""
    import torch

    import tilekern

    theirs = run(plain, make(patched=False))
    tilekern.apply()
    model = make(patched=True)
    first = run(plain, model)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        ids = batch(rows=64, tokens=4096)
        model(input_ids=ids, labels=ids).loss.backward()
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
def default_dtype(name: str) -> Any:
    import torch

    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@condition()
def default_dtype_bfloat16() -> str:
    return both(around=lambda: default_dtype("bfloat16"))


@condition()
def default_dtype_float64() -> str:
    return both(around=lambda: default_dtype("float64"))


@condition()
def default_device_cuda() -> str:
    import torch

    torch.set_default_device("cuda")
    return both()


@condition()
def default_device_context() -> str:
    import torch

    return both(around=lambda: torch.device("cuda:0"))


@condition()
def default_device_meta_in_steps() -> str:
    """A default device that has nothing to do with the model, as scripts leave one behind that made it on meta."""
    import torch

    def step(model: Any, number: int) -> Any:
        with torch.device("meta"):
            return plain(model, number)

    return both(step)


@condition()
def inference_mode_before() -> str:
    """The first calls are an evaluation in inference mode; training follows."""
    import torch

    def prepare(model: Any) -> Any:
        with torch.inference_mode():
            ids = batch()
            model(input_ids=ids, labels=ids)
            model.eval()(input_ids=ids, labels=ids)
        return model.train()

    return both(prepare=prepare)


@condition({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
def deterministic_algorithms() -> str:
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return both()


@condition()
def switches_of_precision() -> str:
    import torch

    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = True
    return both()


@condition()
def warnings_are_errors() -> str:
    import warnings

    import torch

    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="tilekern")
        return both()


@condition()
def cudnn_is_off() -> str:
    import torch

    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    return both()


@condition()
def float16() -> str:
    return both(dtype="float16")


@condition()
def float32_with_tf32() -> str:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    return both(dtype="float32")


def autocast(dtype: str, scaled: bool = False, inside: bool = False) -> Step:
    """A step under autocast; ``scaled`` by a GradScaler, with the backward ``inside`` too."""

    def step(model: Any, number: int) -> Any:
        import torch

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


@condition()
def autocast_bfloat16() -> str:
    return both(autocast("bfloat16"), check=UNDER_AUTOCAST, dtype="float32")


@condition()
def autocast_float16_scaled() -> str:
    return both(autocast("float16", scaled=True), check=UNDER_AUTOCAST, dtype="float32")


@condition()
def backward_in_autocast() -> str:
    return both(autocast("bfloat16", inside=True), check=UNDER_AUTOCAST, dtype="float32")


# Threads, streams and processes.


@condition()
def side_stream() -> str:
    import torch

    def step(model: Any, number: int) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = plain(model, number)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    return both(step)


def in_thread(work: Callable[[], Any]) -> Any:
    """What a function gives that a new thread runs."""
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


@condition()
def each_step_in_a_new_thread() -> str:
    return both(lambda model, number: in_thread(lambda: plain(model, number)))


@condition(EXPANDABLE)
def backward_in_a_new_thread() -> str:
    def step(model: Any, number: int) -> Any:
        ids = batch()
        loss = model(input_ids=ids, labels=ids).loss
        in_thread(loss.backward)
        return loss.detach()

    return both(step)


@condition()
def no_threads_of_autograd() -> str:
    import torch

    def step(model: Any, number: int) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return plain(model, number)

    return both(step)


@condition()
def workers_of_a_data_loader() -> str:
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, number: int) -> Any:
            return batch("cpu", 1, 256, number)[0]

    def step(model: Any, number: int) -> Any:
        for ids in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, pin_memory=True):
            loss = model(input_ids=ids.cuda(non_blocking=True), labels=ids.cuda(non_blocking=True)).loss
            loss.backward()
        return loss.detach()

    return both(step)


# What is put around a model.


def checkpointed(*, reentrant: bool) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    return prepare


@condition()
def checkpoints_reentrant() -> str:
    return both(prepare=checkpointed(reentrant=True))


@condition()
def checkpoints_nonreentrant() -> str:
    return both(prepare=checkpointed(reentrant=False))


@condition()
def saved_tensors_on_the_cpu() -> str:
    import torch

    return both(around=lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


@condition()
def padded() -> str:
    def step(model: Any, number: int) -> Any:
        import torch

        ids = batch(rows=2)
        mask = torch.ones_like(ids)
        mask[0, 200:] = 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        return loss.detach()

    return both(step, check=except_for("attention_forward"))


@condition()
def packed_by_position_ids() -> str:
    def step(model: Any, number: int) -> Any:
        import torch

        ids = batch(rows=1, tokens=300)
        positions = torch.cat([torch.arange(100), torch.arange(200)])[None].cuda()
        loss = model(input_ids=ids, position_ids=positions, labels=ids).loss
        loss.backward()
        return loss.detach()

    return both(step)


@condition()
def odd_lengths() -> str:
    def step(model: Any, number: int) -> Any:
        ids = batch(rows=1, tokens=97 + 31 * number)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return both(step)


@condition()
def items_of_a_batch_as_trainer_counts_them() -> str:
    """``num_items_in_batch`` as a number, on the CPU and on the GPU."""

    def step(model: Any, number: int) -> Any:
        import torch

        ids = batch()
        items = [ids.numel(), torch.tensor(ids.numel()), torch.tensor(ids.numel(), device="cuda")][number]
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=items).loss
        loss.backward()
        return loss.detach()

    return both(step)


@condition()
def adapters() -> str:
    import peft
    import torch

    def prepare(model: Any) -> Any:
        torch.manual_seed(3)
        where = ["q_proj", "v_proj", "up_proj", "down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=where, init_lora_weights=False))

    return both(prepare=prepare)


@condition()
def copies_and_pickles() -> str:
    import torch

    import tilekern

    tilekern.apply()
    model = make(patched=True)
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    first = run(plain, model)
    alike(run(plain, copy.deepcopy(model)), first)
    return alike(run(plain, torch.load(memory, weights_only=False)), first)


@condition()
def profiled() -> str:
    from torch.profiler import ProfilerActivity, profile

    def step(model: Any, number: int) -> Any:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            return plain(model, number)

    return both(step)


@condition()
def anomalies_are_looked_for() -> str:
    import torch

    return both(around=lambda: torch.autograd.detect_anomaly(check_nan=True))


@condition()
def generates() -> str:
    import torch

    import tilekern

    ids = batch(rows=2, tokens=17)
    options = {"max_new_tokens": 24, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        theirs = make(patched=False, dtype="float32").eval().generate(ids, **options)
        tilekern.apply()
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
    import torch
    from transformers import Trainer, TrainingArguments

    import tilekern

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> dict[str, Any]:
            ids = batch("cpu", 1, 256, number)[0]
            return {"input_ids": ids, "labels": ids}

    def train(patched: bool) -> Run:
        arguments = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
            logging_steps=1, report_to=[], bf16=True, save_strategy="no", disable_tqdm=True, seed=0,
            gradient_checkpointing=True, torch_empty_cache_steps=2,
        )  # fmt: skip
        trained = Trainer(make(patched=patched), arguments, train_dataset=Data())
        trained.train()
        log = trained.state.log_history
        return Run([line["loss"] for line in log if "loss" in line], {"norm": log[0]["grad_norm"]})

    theirs = train(patched=False)
    tilekern.apply()
    said = alike(train(patched=True), theirs)
    served()
    return said


# torch.compile and CUDA graphs.


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Layers compiled one by one."""

    def prepare(model: Any) -> Any:
        for layer in model.model.layers:
            layer.compile(**options)
        return model

    return prepare


@condition()
def layers_compiled() -> str:
    return both(prepare=compiled())


@condition()
def layers_compiled_to_reduce_overhead() -> str:
    return both(marked, prepare=compiled(mode="reduce-overhead"))


@condition()
def layers_compiled_without_autotune() -> str:
    return both(prepare=compiled(mode="max-autotune-no-cudagraphs"))


@condition()
def layers_compiled_for_any_length() -> str:
    return both(prepare=compiled(dynamic=True))


def marked(model: Any, number: int) -> Any:
    """A step that says to graphs of torch.compile that it begins, and reads its gradients before the next one."""
    import torch

    torch.compiler.cudagraph_mark_step_begin()
    return plain(model, number)


def whole(**options: Any) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        model.compile(**options)
        return model

    return prepare


@condition()
def whole_compiled() -> str:
    return both(prepare=whole())


@condition()
def whole_compiled_to_reduce_overhead() -> str:
    return both(marked, prepare=whole(mode="reduce-overhead"))


def captured(model: Any, ids: Any, **arguments: Any) -> tuple[Any, Any]:
    """A graph of a forward and backward, and its loss."""
    import torch

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
    import torch

    import tilekern

    others = batch(seed=7)

    def step(model: Any) -> Run:
        static = batch()
        graph, loss = captured(model, static, **arguments)
        between()
        static.copy_(others)
        graph.replay()
        torch.cuda.synchronize()
        grads = {name: p.grad.float().norm().item() for name, p in model.named_parameters()}
        return Run([float(loss)], grads)

    def eager(model: Any, number: int) -> Any:
        loss = model(input_ids=others, labels=others, **arguments).loss
        loss.backward()
        return loss.detach()

    theirs = run(eager, make(patched=False), 1)
    try:
        step(make(patched=False))
    except Exception as error:
        raise FailsAsItIs(f"{type(error).__name__} {str(error)[:160]}") from error
    tilekern.apply()
    said = alike(step(make(patched=True)), theirs)
    served()
    return said


@condition()
def whole_step_captured() -> str:
    return replayed()


@condition(EXPANDABLE)
def whole_step_captured_in_expandable_segments() -> str:
    return replayed()


@condition()
def replayed_after_plans_were_dropped() -> str:
    """What a graph launches stays loaded, whatever the process looks up anew."""
    import gc

    import torch

    import tilekern

    def drop() -> None:
        tilekern.clear_autotune_cache()
        gc.collect()
        torch.cuda.empty_cache()

    return replayed(drop)


@condition()
def step_captured_with_items_of_a_batch() -> str:
    return replayed(num_items_in_batch=512)


@condition()
def layers_graphed() -> str:
    import torch

    def prepare(model: Any) -> Any:
        width = model.config.hidden_size
        sample = torch.randn(*batch().shape, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for layer in model.model.layers:
            layer.mlp = torch.cuda.make_graphed_callables(layer.mlp, (sample,))
        return model

    return both(prepare=prepare)


# Several GPUs.


@condition(gpus=2)
def second_gpu_while_the_first_is_current() -> str:
    return both(device="cuda:1")


@condition(gpus=2)
def second_gpu_after_the_first_was_used() -> str:
    import torch

    torch.randn(1000, 1000, device="cuda:0").sum().item()
    return both(device="cuda:1")


@condition(gpus=2)
def second_gpu_stepped_by_our_optimizer() -> str:
    import torch

    import tilekern

    torch.randn(1000, 1000, device="cuda:0").sum().item()

    def train(patched: bool) -> Run:
        model = make(patched=patched, device="cuda:1")
        optimizer = (tilekern.AdamW if patched else torch.optim.AdamW)(model.parameters(), lr=1e-3)

        def step(model: Any, number: int) -> Any:
            loss = plain(model, number)
            optimizer.step()
            return loss

        return run(step, model)

    theirs = train(patched=False)
    tilekern.apply()
    said = alike(train(patched=True), theirs)
    served()
    return said


@condition(gpus=2)
def layers_on_two_gpus() -> str:
    import accelerate

    places = {
        "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "model.rotary_emb": 0,
        "lm_head": 1,
    }  # fmt: skip

    def step(model: Any, number: int) -> Any:
        ids = batch()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def prepare(model: Any) -> Any:
        return accelerate.dispatch_model(model, places)

    return both(step, prepare, check=UNDER_HOOKS, device="cpu")


@condition(gpus=2)
def two_models_in_two_threads() -> str:
    import tilekern

    theirs = [run(plain, make(patched=False, device=f"cuda:{number}"), 20) for number in (0, 1)]
    tilekern.apply()
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


@condition(gpus=2)
def replicas_of_data_parallel() -> str:
    import torch

    def step(model: Any, number: int) -> Any:
        ids = batch(rows=4)
        loss = model(input_ids=ids, labels=ids).loss.mean()
        loss.backward()
        return loss.detach()

    return both(step, prepare=lambda model: torch.nn.DataParallel(model, [0, 1]))


def main() -> None:
    global SIZE
    name, SIZE = sys.argv[1], (sys.argv[2:] or ["small"])[0]
    try:
        said = f"OK {CONDITIONS[name].run()}"
    except FailsAsItIs as error:
        said = f"SKIP the model as it is fails too: {error}"
    except Exception as error:  # noqa: BLE001 (the test says it)
        place = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        said = f"FAIL {type(error).__name__} {error} @ {place.filename}:{place.lineno}"
    sys.stdout.write(" ".join(said.split())[:1000] + "\n")


if __name__ == "__main__":
    main()
