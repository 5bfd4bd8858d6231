"""Which problems the engine asks for: its own steps, run over arrays without memory, tell a trace.

So a tuner plans what a model will launch with its sizes alone: without weights, a GPU or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilekern.arrays import Array
from tilekern.inference import weights as layout
from tilekern.inference.architectures import Architecture
from tilekern.inference.caches import STATIC, Cache, Pool, keys_of_whole, new_cache
from tilekern.inference.choice import Choice
from tilekern.inference.host_tensors import HostTensor
from tilekern.inference.parallel import load_parts, part_of
from tilekern.inference.steps import Model, Step, Tokens, add_next, chunks_of, new_logits
from tilekern.kernels import spec_named
from tilekern.kernels.skinny import split
from tilekern.runtime.driver import Memory
from tilekern.runtime.recorder import Trace
from tilekern.spec import KernelSpec, Problem


class DryRun:
    """An engine that computes nothing: each method adds to a trace what the engine launches for it, once.

    Problems are those that the default configs lead to, and others would if they won: what follows them, and the parts
    of composites, which the engine does not run, but which their timing needs.
    """

    def __init__(
        self, found: Trace, architecture: Architecture, dtype: str, gpus: int = 1, *, int8: bool = False
    ) -> None:  # fmt: skip
        """Make it.

        Args:
            found: the trace, whose target's defaults and grids count.
            architecture: the model.
            dtype: of activations, caches and the weights that are not int8.
            gpus: how many GPUs share the model; the problems are those of one.
            int8: whether the weights of products are int8.

        Raises:
            InputError: the GPUs cannot share it evenly.
        """
        self._trace, self._to, self._whole, self._int8 = found, Problems(found), architecture, int8
        part = part_of(architecture, gpus)
        arrays = layout.unwritten(part, dtype, self._to, int8=int8)
        if architecture.tied:
            arrays["head"] = self._to.array((part.head_rows, part.width), dtype)
        weights = layout.assembled(part, arrays)
        # Its rows are read one by one, so that their number makes no problem.
        angles = self._to.array((architecture.positions, architecture.head_dim // 2 * 2), dtype)
        scratch = self._to.array((layout.scratch_elements(weights),), dtype) if int8 else None
        self._model = Model(part, weights, dtype, angles, scratch)

    def load(self, dtype: str, *, transposed: bool = False) -> None:
        """Load a checkpoint, which is part of no step: its launches are not counted.

        Args:
            dtype: of its tensors.
            transposed: whether the weights of products are [in, out], as in Hugging Face's checkpoints of GPT-2.
        """
        tensors = {
            name: HostTensor(name, dtype, shape, memoryview(b""))
            for source in layout.stored_by(self._whole, transposed=transposed).values()
            for name, shape in zip(source.names, source.shapes, strict=True)
        }
        with self._trace.repeated(0):
            gpus = [self._to] * self._model.architecture.gpus
            load_parts(self._whole, tensors, self._model.dtype, gpus, int8=self._int8)

    def forward(self, batch: int, tokens: int) -> None:
        """Compute the logits of all tokens of whole sequences."""
        keys = keys_of_whole(self._to, self._model, batch, tokens)
        Step(self._to, self._model, Tokens.new(self._to, batch, tokens), keys, 0, all_logits=True)

    def prompt(self, batch: int, tokens: int, chunk: int, *, cache: str = STATIC) -> None:
        """Take prompts of one length into a cache of a kind, up to the logits of their last tokens."""
        whole = self._cache(cache, batch, tokens)
        for before, count in chunks_of(tokens, chunk):
            given, keys = Tokens.new(self._to, batch, count), whole.of(0, batch, before + count)
            Step(self._to, self._model, given, keys, before, has_logits=before + count == tokens)

    def token(self, batch: int, context: int, *, cache: str = STATIC) -> None:
        """Compute the next token of each sequence, the likeliest and one drawn.

        Its cache of a kind has room for ``context`` tokens.
        """
        choice, lengths = Choice(batch, self._to), self._to.array((batch,), "int32")
        ids, positions, places = (self._to.array((batch, 1), dtype) for dtype in ("int64", "int64", "int32"))
        counters = self._to.array((batch * self._model.architecture.kv_heads,), "int32")
        tokens = Tokens(ids, positions, places, lengths, counters)
        keys = self._cache(cache, batch, context).keys
        add_next(self._to, self._model, tokens, keys, choice, greedy=True)
        choice.add(self._to, new_logits(self._to, batch, self._model), positions, greedy=False)

    def _cache(self, kind: str, batch: int, room: int) -> Cache:
        # The number of pages makes no problem.
        return new_cache(self._to, self._model, kind, room, [room] * batch, Pool(self._to, self._model, 1))


class Problems:
    """Launches that only leave their problems in a trace, and arrays without memory."""

    def __init__(self, found: Trace) -> None:
        self._trace = found

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array whose views can be made."""
        return Array(_NOWHERE, shape, dtype)

    def launch(self, kernel: str, sizes: Mapping[str, Any], **arguments: Any) -> int:
        """Note the problem; return the blocks of the default config."""
        spec = spec_named(kernel)
        problem = spec.problem(**spec.with_flags_off(sizes))
        self._trace.note(spec, problem)
        self._trace.count(spec, problem, self._trace.times)
        _, blocks = self._trace.default(spec, problem)
        self._note_parts(spec, problem)
        self._note_followers(spec, problem)
        for argument in arguments.values():
            if callable(argument):
                argument(int(blocks))
        return int(blocks)

    def add_up(self, parts: Array) -> None:
        """Add nothing, as it is not a kernel's."""

    def gather(self, part: Array, to: Array) -> None:
        """Add nothing, as it is not a kernel's."""

    def _note_parts(self, spec: KernelSpec, problem: Problem) -> None:
        """Note the parts of composites; the engine's kernels have one kind, shares of a product and their sum.

        Asking the composite itself would need torch.
        """
        with self._trace.aside():
            for config in self._trace.composites(spec, problem):
                sizes = {**problem, "splits": config["splits"]}
                for part in split.SPECS:
                    self._trace.note(part, part.problem(**{d.name: sizes[d.name] for d in part.dimensions}))

    def _note_followers(self, spec: KernelSpec, problem: Problem) -> None:
        """Note what follows the kernel with the grid of any config."""
        if spec.follower is None:
            return
        follower = spec_named(spec.follower.kernel)
        with self._trace.aside():
            for count in sorted(self._trace.grids(spec, problem)):
                dimensions = spec.follower.dimensions(problem, count)
                if dimensions is not None:
                    self._trace.note(follower, follower.problem(**dimensions))


class _Nowhere(Memory):
    """Memory of any size, without contents."""

    def __init__(self) -> None:
        class Device:
            number = 0

        class OfNoDevice:
            device = Device()

        self.size_bytes, self.address, self.stream = 1 << 62, 0, OfNoDevice()  # type: ignore[assignment]

    def __del__(self) -> None:
        """Give nothing back."""

    def write(self, data: Any, first: int = 0, count: int | None = None) -> None:
        """Write nothing."""

    def read(self, *_: object) -> bytearray:
        """Return nothing."""
        return bytearray()


_NOWHERE = _Nowhere()
