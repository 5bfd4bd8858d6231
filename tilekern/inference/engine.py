"""The engine: a model on a GPU, which computes logits and generates tokens, without torch.

A prompt is taken in chunks, and each token after it by a CUDA graph that holds the whole step, the choice of the next
token included: the host launches it before it reads the tokens of the step before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tilekern.arrays import Array, ArrayPlan, empty, plan
from tilekern.errors import InputError
from tilekern.inference import parallel
from tilekern.inference import weights as layout
from tilekern.inference.architectures import Architecture
from tilekern.inference.caches import KINDS, STATIC, Cache, Pool, keys_of_whole, new_cache
from tilekern.inference.choice import Choice, numbers
from tilekern.inference.launches import Queued
from tilekern.inference.sampling import Sampling
from tilekern.inference.steps import Model, Step, Tokens, add_next, angles_of, chunks_of, new_logits
from tilekern.runtime.driver import Fetched, Graph, Stream
from tilekern.runtime.joint import each_of

# Tokens of a prompt that are taken at once.
CHUNK = 2048
# Each has its own activations and cache on the GPU.
_KEPT_FORWARDS = 8


def check_cache(cache: str, cache_bytes: int | None) -> None:
    """Refuse a kind of cache that is unknown, and a bound of one that has none."""
    if cache not in KINDS:
        raise InputError(f"cache must be one of {', '.join(KINDS)}, got {cache!r:.40}")
    if cache == STATIC and cache_bytes is not None:
        raise InputError("cache_bytes is the size of a paged cache; pass cache='paged' too, or leave it out")


class Engine:
    """A model on a GPU; :func:`tilekern.inference.load` returns it.

    Attributes:
        architecture: the model's sizes.
        gpus: the numbers of the GPUs.
        dtype: of activations, caches and the weights that are not int8.
        weight_dtype: ``int8`` if the weights of products are, otherwise ``dtype``.
        context: the most tokens of a sequence.
        cache: ``static`` or ``paged``.
        stream: the stream on which all of its work is queued, of several GPUs a joint one; results are those of the
            first.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: layout.Weights,
        dtype: str,
        stream: Stream,
        context: int | None = None,
        *,
        cache: str = STATIC,
        cache_bytes: int | None = None,
    ) -> None:
        """Make an engine of weights that are on the GPU; see :func:`tilekern.inference.load`."""
        check_cache(cache, cache_bytes)
        most = architecture.positions
        context = min(most, 4096) if context is None else context
        if type(context) is not int or not 1 <= context <= most:
            raise InputError(f"context must be from 1 to {most}, for which the model was made, got {context!r:.40}")
        self.architecture, self.dtype, self.context, self.stream = architecture, dtype, context, stream
        self.gpus = tuple(one.device.number for one in each_of(stream))
        self.cache = cache
        angles = empty((context, architecture.head_dim // 2 * 2), dtype, stream)
        angles.write(angles_of(architecture, context, dtype))
        elements = layout.scratch_elements(weights)
        scratch = empty((elements,), dtype, stream) if elements else None
        self.weight_dtype = layout.INT8 if elements else dtype
        self._model = Model(parallel.part_of(architecture, len(self.gpus)), weights, dtype, angles, scratch)
        self._pool = None if cache_bytes is None else Pool.of_bytes(Queued(stream), self._model, cache_bytes)
        self._forwards: dict[tuple[int, int], Forward] = {}
        self._generation: Generation | None = None

    def forward(self, ids: Sequence[Sequence[int]]) -> Array:
        """Return the logits of all tokens of sequences of one length, in the engine's dtype.

        Args:
            ids: [batch, tokens].

        Returns:
            [batch * tokens, vocabulary], valid until the next call with as many sequences and tokens.

        Raises:
            InputError: sequences differ in length, are empty or longer than the context, or an id is none.
            CacheMiss: no record serves one of the kernels, and none may be compiled.
        """
        self._check(ids)
        if len({len(sequence) for sequence in ids}) > 1:
            raise InputError("forward takes sequences of one length; generate takes others too")
        step = self.captured_forward(len(ids), len(ids[0]))
        step.ids.write(numbers([one for sequence in ids for one in sequence], "int64"))
        step.graph.launch(self.stream)
        return step.logits

    def captured_forward(self, batch: int, tokens: int) -> Forward:
        """Return the graph of :meth:`forward` for sizes, with its ids and logits; those used last are kept."""
        found = self._forwards.pop((batch, tokens), None)
        while len(self._forwards) >= _KEPT_FORWARDS:
            del self._forwards[next(iter(self._forwards))]
        self._forwards[batch, tokens] = found = found or Forward(self._model, self.stream, batch, tokens)
        return found

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None, *, ignores_ends: bool = False, chunk: int = CHUNK,
    ) -> Iterator[list[int | None]]:  # fmt: skip
        """Yield the next token of each prompt, again and again; None for a sequence that has ended.

        The sampling of a sequence alone decides its draws, whoever shares the batch. With equal kernels, records of the
        invariant mode, logits are those of :meth:`forward` bit by bit.

        Args:
            prompts: ids of each, at least one; they may differ in length.
            new_tokens: how many tokens to choose at most.
            sampling: how tokens are drawn, of all or of each; by default the likeliest is taken.
            ignores_ends: whether to go on behind the ids that end a text.
            chunk: tokens of a prompt that are taken at once.

        Raises:
            InputError: a prompt is empty, an id is none, or prompt and new tokens are longer than the context; or, when
                the next token is asked for, the pages of ``cache_bytes`` do not suffice for it.
            CacheMiss: no record serves one of the kernels, and none may be compiled.
        """
        self._check(prompts)
        for name, count in (("new_tokens", new_tokens), ("chunk", chunk)):
            if type(count) is not int or count < 1:
                raise InputError(f"{name} must be a whole number from 1 on, got {count!r:.40}")
        longest = max(map(len, prompts))
        if longest + new_tokens - 1 > self.context:
            raise InputError(
                f"a prompt of {longest} tokens and {new_tokens} new ones do not fit a context of {self.context}; "
                "load with a larger context"
            )
        ways = list(sampling) if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
        if len(ways) != len(prompts):
            raise InputError(f"there are {len(prompts)} prompts and {len(ways)} ways of sampling")
        ends = frozenset() if ignores_ends else self.architecture.ends
        return self._generated([list(prompt) for prompt in prompts], new_tokens, ways, ends, chunk)

    def _generated(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampling], ends: frozenset[int],
        chunk: int,
    ) -> Iterator[list[int | None]]:  # fmt: skip
        # Nobody else has it meanwhile: a call that begins before this one ends makes its own.
        running, self._generation = self._generation, None
        lengths = [len(prompt) + new_tokens - 1 for prompt in prompts]
        if running is None or not running.cache.fits(lengths):
            running = None  # so that its cache goes before another comes
            running = self.generation(lengths)
        try:
            running.begin(prompts, ways, chunk)
            has_ended = [False] * len(prompts)
            coming: Sequence[Fetched] | None = running.choice.fetch()
            for left in range(new_tokens - 1, -1, -1):
                assert coming is not None
                last, coming = coming, None
                # The next step is queued before this one's tokens are here, so that the GPU waits for no host.
                with contextlib.suppress(InputError):
                    coming = running.stepped(has_ended) if left else None
                tokens = [token for ids in last for token in memoryview(ids.result()).cast("q")]
                chosen = [None if is_over else token for token, is_over in zip(tokens, has_ended, strict=True)]
                yield chosen
                has_ended = [token is None or token in ends for token in chosen]
                if all(has_ended):
                    return
                if left and coming is None:
                    coming = running.stepped(has_ended)  # sequences that have ended just now leave their pages
        finally:
            running.cache.end()
            self._generation = running

    def generation(self, lengths: Sequence[int]) -> Generation:
        """Return what generates a batch of sequences that grow to these lengths.

        Raises:
            InputError: the lengths need more pages than kernels index.
            DriverError: the GPU has too little memory.
        """
        cache = new_cache(Queued(self.stream), self._model, self.cache, self.context, lengths, self._pool)
        return Generation(self._model, self.stream, len(lengths), cache)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that are empty or too long, and ids outside of the vocabulary."""
        if not prompts or not all(isinstance(prompt, Sequence) and prompt for prompt in prompts):
            raise InputError("prompts must be lists of ids, at least one, and each with a token")
        if (longest := max(map(len, prompts))) > self.context:
            raise InputError(f"a prompt has {longest} tokens, and the context is {self.context}")
        vocabulary = self.architecture.vocabulary
        for prompt in prompts:
            if wrong := [one for one in prompt if type(one) is not int or not 0 <= one < vocabulary]:
                raise InputError(f"ids are whole numbers from 0 to {vocabulary - 1}, got {wrong[0]!r:.40}")


class Forward:
    """The logits of whole sequences as a graph.

    Attributes:
        ids: int64 [batch, tokens], what the graph reads.
        logits: [batch * tokens, vocabulary], what it writes.
        graph: the graph.
    """

    def __init__(self, model: Model, stream: Stream, batch: int, tokens: int) -> None:
        queue = Queued(stream)
        given, cache = Tokens.new(queue, batch, tokens), keys_of_whole(queue, model, batch, tokens)
        given.place(0)
        self.ids, self.logits = given.ids, new_logits(queue, batch * tokens, model)
        self._used = given, cache

        def step() -> None:
            Step(Queued(stream), model, *self._used, 0, all_logits=True, to=self.logits)

        self.graph = stream.capture(step)


class Generation:
    """The cache of a batch, and the graphs of a step.

    Attributes:
        cache: the keys and values of its sequences.
        choice: the tokens that were chosen last, and how.
    """

    def __init__(self, model: Model, stream: Stream, batch: int, cache: Cache) -> None:
        self.cache, self.choice = cache, Choice(batch, Queued(stream))
        self._model, self._stream = model, stream
        positions, places, lengths = (empty((batch,), dtype, stream) for dtype in ("int64", "int32", "int32"))
        self._positions, self._places, self._lengths = positions, places, lengths
        counters = empty((batch * model.architecture.kv_heads,), "int32", stream)
        counters.write(bytes(4 * counters.shape[0]))
        columns = (batch, 1)
        self._tokens = Tokens(
            self.choice.ids.view(columns), positions.view(columns), places.view(columns), lengths, counters
        )
        self._graphs: dict[bool, Graph] = {}
        self._is_greedy = True

    def begin(self, prompts: Sequence[Sequence[int]], ways: Sequence[Sampling], chunk: int) -> None:
        """Take the prompts into the cache, and choose the first tokens.

        Raises:
            InputError: the cache has too few pages; nothing has run.
        """
        counts = [len(prompt) for prompt in prompts]
        # Until more steps than the cache has room for, or until a sequence ends, a step needs nothing of the host.
        self._before, self._steps, self._room = counts, 0, self.cache.hold(counts)
        self._has_ended = [False] * len(prompts)
        self._is_greedy = all(way.temperature == 0 for way in ways)
        self.choice.write(ways)
        now, first = Queued(self._stream), 0
        logits = new_logits(now, len(prompts), self._model)
        for length, some in groupby(prompts, len):
            together = list(some)
            self._take(together, first, length, chunk, logits)
            first += len(together)
        self.place(counts)
        self.choice.add(now, logits, self._positions, greedy=self._is_greedy)

    def place(self, counts: Sequence[int]) -> None:
        """Have the next token of each sequence follow so many tokens."""
        self._positions.write(numbers(counts, "int64"))
        self._places.write(numbers(counts, "int32"))
        self._lengths.write(numbers([count + 1 for count in counts], "int32"))

    def _take(
        self, prompts: Sequence[Sequence[int]], first: int, length: int, chunk: int, logits: Array
    ) -> None:  # fmt: skip
        """Take prompts of one length, the sequences from ``first`` on, and write the logits of their last tokens."""
        now, batch = Queued(self._stream), len(prompts)
        for before, count in chunks_of(length, chunk):
            tokens = Tokens.new(now, batch, count)
            tokens.ids.write(numbers([one for prompt in prompts for one in prompt[before : before + count]], "int64"))
            tokens.place(before)
            is_last = before + count == length
            to = logits.view((batch, logits.shape[1]), logits.strides, first * logits.strides[0]) if is_last else None
            keys = self.cache.of(first, batch, before + count)
            Step(now, self._model, tokens, keys, before, to=to, has_logits=is_last)

    def stepped(self, has_ended: list[bool]) -> Sequence[Fetched]:
        """Queue the next step: the last tokens go into the cache, and the next ones are chosen. Return these.

        Args:
            has_ended: of each sequence, whether it is known to have ended; what it computes means nothing.

        Raises:
            InputError: the cache has too few pages; nothing has run.
        """
        steps = self._steps + 1
        if steps > self._room or has_ended != self._has_ended:
            self._hold(has_ended, steps)
        self._steps = steps
        if self._is_greedy not in self._graphs:
            self._graphs[self._is_greedy] = self.capture(greedy=self._is_greedy)
        self._graphs[self._is_greedy].launch(self._stream)
        return self.choice.fetch()

    def _hold(self, has_ended: list[bool], steps: int) -> None:
        """Have room for the keys of ``steps`` steps; leave sequences that have ended out of it, which see no key."""
        counts = [0 if is_over else before + steps for is_over, before in zip(has_ended, self._before, strict=True)]
        self._room = steps + self.cache.hold(counts)
        for number, (is_over, was_over) in enumerate(zip(has_ended, self._has_ended, strict=True)):
            if is_over and not was_over:
                for to, value in ((self._positions, -1), (self._places, -1), (self._lengths, 0)):
                    to.view((1,), offset=number).write(numbers([value], to.dtype))
        self._has_ended = has_ended

    def capture(self, *, greedy: bool, find: Callable[..., ArrayPlan] = plan) -> Graph:
        """Return the graph of a step, which the generation must outlive.

        Args:
            greedy: whether all sequences take the likeliest token.
            find: returns the plans of its launches, as :func:`tilekern.arrays.plan` does.

        Raises:
            CacheMiss: no record serves one of the kernels, and none may be compiled.
        """
        queue = Queued(self._stream, find)
        step = functools.partial(
            add_next, queue, self._model, self._tokens, self.cache.keys, self.choice, greedy=greedy
        )  # fmt: skip
        return self._stream.capture(step)
