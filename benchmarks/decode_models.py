"""Generate with a whole model of random weights: one token, a prompt, ``generate``; and count logits that differ."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tilekern
from benchmarks.decode_ops import BENCHMARK, INVARIANT, has_experts, inside, mode_of
from benchmarks.environment import version_of
from benchmarks.jobs import Found
from benchmarks.kernels import copy
from benchmarks.models import make_model
from benchmarks.providers import OURS, one_line
from benchmarks.results import Row
from benchmarks.trainers import trainer_named
from tilekern.ops import linear_layers
from tilekern.patch.graphs import graphs_of
from tilekern.patch.stepping import auto_class
from tilekern.tuning.measure.timing import Timing

# Steps before the timed ones: kernels are looked up, torch.compile compiles, records its graph and replays it.
WARM_UP = 4
# Steps between two waits for the GPU.
STEPS = 4
GENERATED = 3  # timed calls of generate, after one that warms up
COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 20}
# Of the comparison of logits: a model's layers, tokens of a sequence, the last ones that batches decode, and those of a
# chunk.
LAYERS, LONGEST, DECODED, CHUNK = 4, 1024, 64, 300
# Sequences of the training step that the others are compared with.
TRAINED = 4


@dataclass(frozen=True)
class Way:
    """A way to generate.

    Attributes:
        patched: whether tilekern's patches and attention run.
        invariant: whether they run inside ``tilekern.invariant()``.
        by: transformers' dynamic cache as it is; its static cache and :func:`tilekern.graphed`; or its static cache and
            torch.compile, as ``generate`` compiles a step.
    """

    patched: bool = False
    invariant: bool = False
    by: Literal["dynamic", "graph", "compiled"] = "dynamic"

    def mode(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of all calls: that of the mode, or of ``generate`` for linear layers of few rows."""
        if self.invariant:
            return inside()
        return linear_layers.exchanged() if self.patched else contextlib.nullcontext()


WAYS: Mapping[str, Way] = {
    OURS: Way(patched=True),
    f"{OURS}-graph": Way(patched=True, by="graph"),
    INVARIANT: Way(patched=True, invariant=True),
    f"{INVARIANT}-graph": Way(patched=True, invariant=True, by="graph"),
    "hf": Way(),
    "hf-compiled": Way(by="compiled"),
    f"{OURS}-compiled": Way(patched=True, by="compiled"),
}


def full_name(name: str) -> str:
    """Return the name of a way in the results."""
    return name if WAYS[name].patched else f"{name} {version_of('transformers')}"


def patch(name: str, config: Any) -> None:
    """Patch transformers if a way wants it, before the model is made."""
    if WAYS[name].patched:
        trainer_named(OURS).patch(config)


def made(name: str, config: Any, layers: int, device: str) -> Any:
    """Make the model of a way, for generation; unpatched with SDPA if transformers has it for the model."""
    has_sdpa = auto_class(config)._model_mapping[type(config)]._supports_sdpa
    attention = OURS if WAYS[name].patched else "sdpa" if has_sdpa else "eager"
    return make_model(config, layers, attention, device).eval()


class Decoder:
    """Sequences of equal prompts and their next token, which each step replaces."""

    def __init__(self, model: Any, way: Way, batch: int, start: int, room: int) -> None:
        import torch

        self._model = model
        ids = _drawn(model, 1, start)
        self.ids = _drawn(model, batch, 1)
        self._call = model
        if way.by == "dynamic":
            self.cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
            self.cache.batch_repeat_interleave(batch)
        else:
            self.cache = _static(model, ids, batch, room)
        _with_graphs(model, way)
        if way.by == "compiled":
            from transformers import CompileConfig

            torch._dynamo.reset()
            vars(model).pop("_compiled_call", None)
            self._call = model.get_compiled_call(CompileConfig())

    def step(self) -> None:
        """Choose the likeliest next token of each sequence."""
        logits = self._call(input_ids=self.ids, past_key_values=self.cache, use_cache=True).logits
        self.ids.copy_(logits[:, -1:].argmax(-1))

    def warm_up(self) -> None:
        """Take the first steps, in which kernels are looked up, and graphs are made if the way says so."""
        for _ in range(WARM_UP):
            self.step()

    def bytes_read(self) -> int:
        """Return the bytes that a step must read: all weights but the rows of unused tokens, and the cache."""
        head, table = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        unread = 0 if head is not None and head.weight is table.weight else table.weight.nbytes
        weights = sum(x.nbytes for x in self._model.parameters()) - unread
        return weights + sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values))


def _with_graphs(model: Any, way: Way) -> None:
    if way.by == "graph" and model.device.type == "cuda":
        tilekern.graphed(model)


def _static(model: Any, ids: Any, batch: int, room: int) -> Any:
    """Return a static cache of a prompt, repeated for each sequence of the batch."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=room)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for layer in cache.layers:
        layer.batch_size = batch
        for name in ("keys", "values"):
            repeated = getattr(layer, name).repeat_interleave(batch, 0)
            setattr(layer, name, repeated)
            torch._dynamo.mark_static_address(repeated)
    return cache


def steps(
    name: str, model: Any, label: str, batches: Sequence[int], context: int, samples: int, clock: Any
) -> Iterator[Found]:  # fmt: skip
    """Time steps of one token per sequence that end at a context; compare with reading weights and cache once."""
    import torch

    way, who, device = WAYS[name], full_name(name), model.device.type
    rate = _copied_per_us(clock, device)
    for batch in batches:
        case, decoder = f"{label} decode, batch {batch}, context {context}", None
        try:
            with way.mode():
                decoder = Decoder(model, way, batch, context - WARM_UP - STEPS * samples, context)
                decoder.warm_up()
                timing = Timing.of([_timed_us(decoder.step, STEPS, device) for _ in range(samples)])
            yield _row(case, who, "token_ms", timing.median_us / 1000, "ms", timing.spread_us / 1000)
            yield _row(case, who, "tokens_per_s", 1e6 * batch / timing.median_us, "tok/s")
            if not has_experts(model.config):
                limit_us = decoder.bytes_read() / rate
                yield _row(case, who, "limit_ms", limit_us / 1000, "ms")
                yield _row(case, who, "share_of_limit", limit_us / timing.median_us, "1")
        except Exception as error:  # noqa: BLE001 (a way that cannot be compiled or captured; the next batch may be)
            yield f"{case}: {who} left out: {one_line(error)}"
        del decoder
        if device == "cuda":
            torch.cuda.empty_cache()
    yield from _without_replay(model, who)


def _copied_per_us(clock: Any, device: str) -> float:
    """Return the bytes that a copy reads and writes in a microsecond."""
    moved = COPY_BYTES[device]
    return float(moved / clock.run({"copy": copy(moved, device)}, 20, 1.0)["copy"].median_us)


def _timed_us(run: Callable[[], Any], times: int, device: str) -> float:
    """Return the microseconds of a call, of some back to back between two waits for the GPU."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(times):
        run()
    _wait(device)
    return 1e6 * (time.perf_counter() - started) / times


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def generated(
    name: str, model: Any, label: str, batches: Sequence[int], prompt: int, new: int, samples: int
) -> Iterator[Found]:  # fmt: skip
    """Time transformers' own ``generate``, greedy, with the cache of the way; the first call shows what it compiles."""
    import torch
    from transformers import GenerationConfig

    way, who, device = WAYS[name], full_name(name), model.device.type
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    static = {} if way.by == "dynamic" else {"cache_implementation": "static"}
    _with_graphs(model, way)
    for batch in batches:
        case = f"{label} generate, batch {batch}, {prompt} + {new} tokens"
        torch._dynamo.reset()
        vars(model).pop("_compiled_call", None)
        ids = _drawn(model, batch, prompt)

        def call(ids: Any = ids) -> None:
            found = model.generate(ids, max_new_tokens=new, do_sample=False, use_cache=True, **static)
            assert found.shape[1] == prompt + new, f"generate ended after {found.shape[1] - prompt} tokens"

        try:
            with way.mode():
                first_us = _timed_us(call, 1, device)
                timing = Timing.of([_timed_us(call, 1, device) for _ in range(min(samples, GENERATED))])
            rate = 1e6 * batch * new / timing.median_us
            yield _row(case, who, "tokens_per_s", rate, "tok/s", rate * timing.spread_us / timing.median_us)
            yield _row(case, who, "first_call_s", first_us / 1e6, "s")
        except Exception as error:  # noqa: BLE001 (as above)
            yield f"{case}: {who} left out: {one_line(error)}"
    yield from _without_replay(model, who)


def _without_replay(model: Any, who: str) -> Iterator[str]:
    """Say why steps of a model with graphs ran eagerly, if some did for another reason than being new."""
    for graphs in graphs_of(model).values():
        if graphs.reasons:
            yield f"{who}: {graphs}"


def prefills(name: str, model: Any, label: str, tokens: int, samples: int) -> Iterator[Found]:
    """Time a prompt; tilekern's two modes take turns."""
    ids, device = _drawn(model, 1, tokens), model.device.type
    ways = {name: WAYS[name]} | ({INVARIANT: WAYS[INVARIANT]} if name == OURS else {})
    times: dict[str, list[float]] = {one: [] for one in ways}
    for turn in range(1 + samples):
        for one, way in ways.items():
            with way.mode():
                us = _timed_us(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), 1, device)
            if turn:
                times[one].append(us)
    for one, taken in times.items():
        timing = Timing.of(taken)
        yield _row(
            f"{label} prompt of {tokens} tokens", full_name(one), "prompt_ms", timing.median_us / 1000, "ms",
            timing.spread_us / 1000,
        )  # fmt: skip


def bits(model: Any, label: str, batches: Sequence[int], context: int) -> Iterator[Found]:
    """Count logits that differ from the training forward's in a prompt, in chunks and one by one, in both modes."""
    import torch

    sequences = max(TRAINED, *batches)
    ids = _drawn(model, sequences, context)
    last, chunk = min(DECODED, context - 1), min(CHUNK, -(-context // 3))
    for who in (INVARIANT, OURS):
        with mode_of(who):
            whole = _trained(model, ids[:TRAINED])[:1]
            ends = torch.cat([_trained(model, some)[:, -last:] for some in ids.split(TRAINED)])
            alone: dict[str, Callable[[Any, Any], Any]] = {
                "a training step of one sequence": _trained,
                "a prompt": functools.partial(_given, length=context),
                f"a prompt in chunks of {chunk}": functools.partial(_given, length=chunk),
                "one by one from the first token": functools.partial(_given, length=1),
            }
            for what, logits_of in alone.items():
                yield from _differing(f"{label} logits, {what}", who, logits_of(model, ids[:1]), whole)
            for batch in batches:
                caches = [in_chunks(model, one, context)[1] for one in ids[:batch, :-last].split(1)]
                found = in_chunks(model, ids[:batch, -last:], 1, _joined(caches))[0]
                yield from _differing(f"{label} logits, one by one, batch {batch}", who, found, ends[:batch])


def _trained(model: Any, ids: Any) -> Any:
    """Return the logits of a training forward."""
    import torch

    model.train()
    with torch.enable_grad():
        logits = model(input_ids=ids, use_cache=False).logits.detach()
    model.eval()
    return logits


def _given(model: Any, ids: Any, length: int) -> Any:
    return in_chunks(model, ids, length)[0]


def in_chunks(model: Any, ids: Any, length: int, cache: Any = None) -> tuple[Any, Any]:
    """Give a model tokens [batch, tokens], some at a time; return all logits, and the cache."""
    import torch

    parts = []
    for some in ids.split(length, 1):
        made = model(input_ids=some, past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        parts.append(made.logits)
    return torch.cat(parts, 1), cache


def _joined(caches: Sequence[Any]) -> Any:
    """Return the first of some dynamic caches with the sequences of all."""
    import torch

    for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("keys", "values"):
            setattr(layer, name, torch.cat([getattr(one, name) for one in (layer, *others)]))
    return caches[0]


def _differing(case: str, who: str, found: Any, wanted: Any) -> Iterator[Row]:
    yield _row(case, who, "differing_logits", int((found != wanted).sum()), "1")
    yield _row(case, who, "logits", found.numel(), "1")


def _drawn(model: Any, batch: int, tokens: int) -> Any:
    """Draw the same random tokens for every provider."""
    import torch

    generator = torch.Generator(device=model.device).manual_seed(batch * tokens)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (batch, tokens), device=model.device, generator=generator)


def _row(case: str, who: str, metric: str, value: float, unit: str, spread: float = 0.0) -> Row:
    return Row(BENCHMARK, case, who, metric, round(value, 4), unit, round(spread, 4))
