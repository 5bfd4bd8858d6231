"""Measure a part of a job: whole sequences and generated tokens, by the engine and by its peers."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.inference import BENCHMARK, ENGINES, INT8, Job, full_name
from benchmarks.inference_models import architecture_named, engine_of, hf_of, mingpt_of, random_tensors
from benchmarks.jobs import Found
from benchmarks.latency import Entrant, calls_of, percentile, race, rows_of
from benchmarks.providers import OURS, one_line
from benchmarks.results import Row
from tilekern.arrays import device as gpu_numbered
from tilekern.inference.choice import numbers
from tilekern.inference.engine import Engine
from tilekern.runtime.driver import Stream

# The largest distance of logits to those of torch in the same dtype, as a share of their norm: both round differently.
# A wrong result is about 1.4 away.
MOST_DISTANCE = {OURS: 0.1, INT8: 0.3}
# Calls of a peer before it is captured in a graph, in which it allocates and compiles.
BEFORE_CAPTURE = 3
# Tokens by `generate`, and steps of a graph whose time on the GPU is taken.
GENERATED, STEPS = 64, 32
# Sequences and tokens of the logits that are compared before tokens are timed.
COMPARED = (2, 32)


class Models:
    """The models of a job, made when they are asked for; their weights are the same."""

    def __init__(self, job: Job) -> None:
        self.job, self.of = job, architecture_named(job.model)
        self.tensors = random_tensors(self.of, job.dtype)
        self._engines: dict[str, Callable[[int | None], Engine]] = {}

    @functools.cached_property
    def stream(self) -> Stream:
        """The engines' stream."""
        return gpu_numbered(0).stream()

    def engine(self, way: str, context: int | None = None) -> Engine:
        """Return the engine with a context."""
        if way not in self._engines:
            self._engines[way] = engine_of(self.of, self.tensors, self.job.dtype, self.stream, int8=way == INT8)
        return self._engines[way](context)

    @functools.cached_property
    def hf(self) -> Any:
        """Transformers' model with SDPA."""
        return hf_of(self.job.model, self.of, self.tensors, self.job.device)

    @functools.cached_property
    def sdpa(self) -> Any:
        """Torch's model with SDPA, which returns logits: our minGPT for GPT-2, else transformers'."""
        if self.of.kind == "gpt2":
            return mingpt_of(self.of, self.tensors, self.job.device, "sdpa")
        return lambda ids: self.hf(input_ids=ids, use_cache=False).logits

    @functools.cached_property
    def eager(self) -> Any:
        """GPT-2 with minGPT's own attention."""
        if self.of.kind != "gpt2":
            raise ValueError("minGPT is GPT-2")
        return mingpt_of(self.of, self.tensors, self.job.device, "eager")


def forward(job: Job) -> Iterator[Found]:
    """Time the logits of whole sequences."""
    models = Models(job)
    warm_clocks(job.device)
    for batch, tokens in job.sizes:
        case = f"{job.label} forward, {batch} x {tokens}"
        if tokens > models.of.positions:
            yield f"{case}: left out, the model has {models.of.positions} positions"
            continue
        ids = drawn(models.of.vocabulary, batch, tokens)
        entrants: dict[str, Entrant] = {}
        wanted: Any = None
        for way in job.ways:
            who = full_name(way)
            try:
                if way in ENGINES:
                    whole = models.engine(way).captured_forward(batch, tokens)
                    whole.ids.write(ids_of(ids))
                    whole.graph.launch(models.stream)
                    wanted = models.sdpa(_tensor(ids, job.device)) if wanted is None else wanted
                    yield compared(case, way, as_tensor(whole.logits), wanted)
                    entrants[who] = Entrant.on_stream(_launching(whole, models.stream), models.stream)
                else:
                    entrants[who] = Entrant.of_torch(_peer(way, models, ids), job.device)
            except Exception as error:  # noqa: BLE001 (the others are measured)
                yield f"{case}: {who} left out: {one_line(error)}"
        wanted = None
        for who, times in race(entrants, job.samples, job.seconds).items():
            yield from rows_of(BENCHMARK, case, who, "forward_ms", times)
            rate = 1000 * batch * tokens / percentile(times, 50)
            yield Row(BENCHMARK, case, who, "tokens_per_s", round(rate, 1), "tok/s")
        entrants.clear()


def _launching(whole: Any, stream: Stream) -> Callable[[], None]:
    """Return the launch of a graph, which keeps what the graph uses."""
    return lambda: whole.graph.launch(stream)


def _peer(way: str, models: Models, ids: Sequence[Sequence[int]]) -> Callable[[], Any]:
    """Return the call of a peer on ids; of ``torch-graph`` and ``torch-compiled`` the replay of a graph."""
    import torch

    device, given = models.job.device, _tensor(ids, models.job.device)
    model = models.eager if way == "mingpt" else models.sdpa
    if way == "torch-compiled":
        torch._dynamo.reset()
        model = torch.compile(model, dynamic=False)
    return captured(lambda: model(given), device) if way.startswith("torch-") else lambda: model(given)


def captured(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the replay of a call as torch captures it in a graph; on the CPU the call."""
    import torch

    if device == "cpu":
        call()
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(BEFORE_CAPTURE):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay(used: Any = call) -> Any:  # noqa: ARG001 (a graph does not keep what it reads)
        graph.replay()
        return out

    return replay


@dataclass(frozen=True)
class Case:
    """Generated tokens of a batch.

    Attributes:
        models: the models.
        way: how they run.
        batch: the number of sequences.
        prompt: their tokens before the first generated one.
        context: the most tokens of each.
    """

    models: Models
    way: str
    batch: int
    prompt: int
    context: int

    @property
    def name(self) -> str:
        """Return its name in the results."""
        return f"{self.models.job.label} decode, batch {self.batch}, context {self.context}"

    @property
    def who(self) -> str:
        """Return the provider's name in the results."""
        return full_name(self.way)

    def check(self) -> None:
        """Refuse a case that the model, or the context, has no room for."""
        if self.context > self.models.of.positions:
            raise ValueError(f"the model has {self.models.of.positions} positions")
        if self.prompt < 1:
            raise ValueError(f"a context must have more than {self.context - self.prompt} tokens")

    def prompts(self) -> list[list[int]]:
        """Return the ids of the prompts."""
        return drawn(self.models.of.vocabulary, self.batch, self.prompt)

    def generated(self, started: float, times: Sequence[float]) -> Iterator[Row]:
        """Yield the rows of tokens of each sequence that came at these times of the host."""
        apart = [1000 * (last - first) for first, last in itertools.pairwise(times)]
        yield from rows_of(BENCHMARK, self.name, self.who, "token_ms", apart)
        first_s, rate = times[0] - started, self.batch * len(apart) / (times[-1] - times[0])
        yield Row(BENCHMARK, self.name, self.who, "tokens_per_s", round(rate, 2), "tok/s")
        yield Row(BENCHMARK, self.name, self.who, "first_token_ms", round(1000 * first_s, 3), "ms")
        rate = self.batch * self.prompt / first_s
        yield Row(BENCHMARK, self.name, self.who, "prompt_tokens_per_s", round(rate, 1), "tok/s")

    def stepped(self, step: Entrant) -> Iterator[Row]:
        """Yield the rows of steps on the GPU, which advance."""
        taken = race({self.who: step}, STEPS, self.models.job.seconds)[self.who]
        yield from rows_of(BENCHMARK, self.name, self.who, "step_ms", taken)


def decode(job: Job) -> Iterator[Found]:
    """Time generated tokens: as ``generate`` yields them by the host's clock, and steps of a graph on the GPU."""
    models = Models(job)
    warm_clocks(job.device)
    rows_by = {OURS: _by_engine, INT8: _by_engine, "torch-graph": _by_torch, "hf-compiled": _by_hf}
    for way in job.ways:
        if way in ENGINES:
            try:
                yield _agrees(models, way)
            except Exception as error:  # noqa: BLE001 (the others are measured)
                yield f"{job.label} decode: {way} left out: {one_line(error)}"
                continue
        for context in job.contexts:
            for batch in job.batches:
                case = Case(models, way, batch, context - GENERATED - calls_of(STEPS), context)
                try:
                    case.check()
                    yield from rows_by[way](case)
                except Exception as error:  # noqa: BLE001 (another batch may be possible)
                    yield f"{case.name}: {case.who} left out: {one_line(error)}"
                _free(job.device)


def _agrees(models: Models, way: str) -> Row:
    """Compare the engine's logits with torch's."""
    batch, tokens = COMPARED
    ids = drawn(models.of.vocabulary, batch, tokens)
    logits = models.engine(way, tokens).forward(ids)
    case = f"{models.job.label} forward, {batch} x {tokens}"
    return compared(case, way, as_tensor(logits), models.sdpa(_tensor(ids, models.job.device)))


def _by_engine(case: Case) -> Iterator[Row]:
    """Time the engine's ``generate``, and the steps of its graph behind it."""
    engine, ids = case.models.engine(case.way, case.context), case.prompts()
    # Kernels are looked up, and the step is captured.
    for _ in engine.generate(ids, 3, ignores_ends=True):
        pass
    started = time.perf_counter()
    tokens = engine.generate(ids, GENERATED, ignores_ends=True)
    yield from case.generated(started, [time.perf_counter() for _ in tokens])
    running = engine._generation
    assert running is not None, "the engine keeps its last cache and its graph"
    has_ended = [False] * case.batch
    yield from case.stepped(Entrant.on_stream(lambda: running.stepped(has_ended), engine.stream))


def _by_torch(case: Case) -> Iterator[Row]:
    """Time steps with a static cache and SDPA in a graph, at the places where the engine's steps are timed."""
    from benchmarks.mingpt import Decoding

    if case.models.of.kind != "gpt2":
        raise ValueError("its step in a graph is written for GPT-2 alone")
    device = case.models.job.device
    decoding = Decoding(case.models.sdpa, case.batch, case.context)
    step = captured(decoding.step, device)
    decoding.position.fill_(case.prompt + GENERATED)
    yield from case.stepped(Entrant.of_torch(step, device))


def _by_hf(case: Case) -> Iterator[Row]:
    """Time transformers' ``generate`` with its static cache, which it compiles; the first call does not count."""
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    model, device = case.models.hf, case.models.job.device
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    torch._dynamo.reset()
    vars(model).pop("_compiled_call", None)
    ids, times = _tensor(case.prompts(), device), []

    def note(ids: Any, scores: Any, **more: Any) -> Any:  # noqa: ARG001 (what transformers gives)
        # `generate` itself looks at each step whether sequences have ended, and so waits for the GPU.
        _wait(device)
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    for _ in range(2):
        times.clear()
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=GENERATED, do_sample=False, use_cache=True,
            cache_implementation="static", stopping_criteria=StoppingCriteriaList([note]),
        )  # fmt: skip
        assert len(times) == GENERATED, f"generate ended after {len(times)} tokens"
    yield from case.generated(started, times)


def compared(case: str, way: str, logits: Any, wanted: Any) -> Row:
    """Return the distance of logits [rows, vocabulary] to those of torch.

    Raises:
        ArithmeticError: they are wrong.
    """
    wanted = wanted.flatten(0, 1).float()
    distance = float((logits.float() - wanted).norm() / wanted.norm())
    if not distance <= MOST_DISTANCE[way]:
        raise ArithmeticError(f"wrong: its logits are {distance:.3g} of their norm away from torch's")
    return Row(BENCHMARK, case, way, "logits_distance", round(distance, 6), "1")


class _Bits:
    """An array's elements of 16 bits as whole numbers: torch does not know how arrays spell bfloat16."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {"typestr": "<i2"}


def as_tensor(array: Any) -> Any:
    """Return an array's elements as a tensor of torch on the GPU, when its stream has come so far."""
    import torch

    array.memory.stream.synchronize()
    if array.dtype == "bfloat16":
        return torch.as_tensor(_Bits(array), device="cuda").view(torch.bfloat16)
    return torch.as_tensor(array, device="cuda")


def drawn(vocabulary: int, batch: int, tokens: int) -> list[list[int]]:
    """Draw the same random tokens for every provider."""
    import torch

    generator = torch.Generator().manual_seed(batch * tokens)
    ids: list[list[int]] = torch.randint(0, vocabulary, (batch, tokens), generator=generator).tolist()
    return ids


def ids_of(sequences: Sequence[Sequence[int]]) -> Any:
    """Return the numbers of sequences as the engine's arrays take them."""
    return numbers([one for sequence in sequences for one in sequence], "int64")


def warm_clocks(device: str) -> None:
    """Keep the GPU busy until its clocks have risen."""
    from tilekern.tuning.measure.timing import Stopwatch

    if device == "cuda":
        Stopwatch(0).warm_clocks()


def _tensor(ids: Sequence[Sequence[int]], device: str) -> Any:
    import torch

    return torch.tensor(ids, device=device)


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    """Give memory that nobody uses back to the driver, torch's and the engine's."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        gpu_numbered(0).trim()
