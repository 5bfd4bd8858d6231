"""One form of a model's training step, captured: a CUDA graph of its forward and one of its backward.

A graph reads and writes the same memory in each replay. Its inputs are copied into that memory before; its results are
copied out of it, but for gradients of parameters: ``grad`` is that memory itself. All graphs of a model have one pool
of memory, where each forward may write over what earlier steps left: over gradients too, so those that are still needed
then get memory of their own first. So a captured step needs no more memory than an eager one. While graphs are made,
the parameters are exchanged for stand-ins in the same memory, so that no hook of theirs runs then, and gradients reach
the parameters through autograd in each step.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from tilekern.compile.garbage import search_put_off
from tilekern.ops import packing

_TORCH = str(Path(torch.__file__).parent)
CAPTURE_FAILED = "its capture failed"
_PLAIN = (type(None), bool, int, float, str)
# torch's words where its debug mode finds a wait, and its number of the mode that raises
_WAITS, _RAISES = "called a synchronizing CUDA operation", 2
_one_rehearsal = threading.Lock()


class Refused(Exception):  # noqa: N818
    """A step cannot be captured; its text says why, in a few words."""


class Recording(Protocol):
    """Work on a GPU that is recorded once and replayed."""

    def record(self, run: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
        """Record what ``run`` does, and return its results, which each replay fills again."""

    def replay(self) -> None:
        """Do it again."""


class Pool:
    """The memory that graphs share, and the stream that they are captured on.

    The memory ends with the last of them. torch refuses to capture into what is left of it, such as a workspace of
    cuBLAS, so the next graph begins another one.

    cuBLAS has a workspace for each stream, in the pool that saw it first, and torch 2.12 frees it with any graph of the
    stream. So graphs of two pools have two streams: those of one would compute in what was the other's memory.
    """

    def __init__(self, device: torch.device) -> None:
        spare = _spare.setdefault(device, [])
        # cuBLAS keeps workspaces of streams that are used no more, so they are used again.
        self.stream: Any = spare.pop() if spare else torch.cuda.Stream(device)
        weakref.finalize(self, spare.append, self.stream)
        self._name: Any = None
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def name(self) -> Any:
        """Return what torch calls the memory of the graphs that live."""
        if not self._graphs:
            self._name = torch.cuda.graph_pool_handle()
        return self._name

    def add(self, graph: Graph) -> None:
        """Note a graph that was captured."""
        self._graphs.add(graph)


# By devices: the streams of pools that are gone.
_spare: dict[torch.device, list[Any]] = {}


class Graph:
    """A recording in a CUDA graph."""

    def __init__(self, pool: Pool) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, run: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
        """Capture; other threads may go on meanwhile, as the one that pins a data loader's memory does."""
        stream, pool = self._pool.stream, self._pool.name()
        device = stream.device
        random_state = torch.cuda.get_rng_state(device)
        mode = "thread_local"
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=mode):
                results = run()
        except BaseException:
            self._give_up(device, pool, random_state)
            raise
        self._pool.add(self)
        return results

    def _give_up(self, device: torch.device, pool: Any, random_state: Tensor) -> None:
        """Take torch's allocator and generator out of a capture that CUDA has ended early: torch leaves both in it."""
        with contextlib.suppress(RuntimeError):  # the capture was ended as it should
            torch._C._cuda_endAllocateToPool(device.index, pool)
        try:
            torch.rand(1, device=device)
        except RuntimeError:
            anew = torch.Generator(device)
            torch.cuda.default_generators[device.index].graphsafe_set_state(anew.graphsafe_get_state())
        torch.cuda.set_rng_state(random_state, device)

    def replay(self) -> None:
        """Queue the graph on the current stream."""
        self._graph.replay()


class _Inside(threading.local):
    now = False


_inside = _Inside()


def is_inside() -> bool:
    """Return whether this thread is inside a call of a model with graphs: models inside it are part of them."""
    return _inside.now


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Be inside such a call."""
    before, _inside.now = _inside.now, True
    try:
        yield
    finally:
        _inside.now = before


class Room:
    """The memory of the graphs of one model, which one step at a time may use.

    Attributes:
        places: the addresses of gradients of parameters that graphs make.
        lock: held while a thread fills inputs, replays and takes the results of a graph that generates.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.places: set[int] = set()
        self.lock = threading.Lock()
        self._pool: Pool | None = None
        self._waiting: weakref.ref[_Turn] | None = None

    def recording(self) -> Recording:
        """Return a new, empty recording."""
        if self._pool is None:
            self._pool = Pool(self.device)
        return Graph(self._pool)

    @property
    def is_taken(self) -> bool:
        """Whether a step's backward is still to come, for which the memory must stay as it is."""
        turn = None if self._waiting is None else self._waiting()
        return turn is not None and not turn.is_over

    def turn(self) -> _Turn:
        """Begin a step."""
        turn = _Turn()
        self._waiting = weakref.ref(turn)
        return turn


class _Turn:
    """One step, from its forward to its backward; it ends with the last reference to its loss as well."""

    is_over = False


class Call(NamedTuple):
    """The arguments of a call of a model: tensors, whose values are copied into graphs, and plain values by name."""

    tensors: dict[str, Tensor]
    constants: dict[str, Any]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Call:
        """Tell tensors from plain values.

        Raises:
            Refused: an argument is neither.
        """
        found = cls({}, {})
        for name, value in arguments.items():
            if type(value) is Tensor:
                found.tensors[name] = value
            elif isinstance(value, _PLAIN):
                found.constants[name] = value
            else:
                raise Refused(f"the argument {name} of the type {type(value).__name__}")
        return found

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls share that the same graphs serve."""
        told = {name: (x.shape, x.dtype, x.requires_grad) for name, x in self.tensors.items()}
        return frozenset(told.items()), frozenset(self.constants.items())


class CapturedStep:
    """The graphs of one form of a model's step.

    Args:
        model: the model; the call runs its hooks and its forward.
        call: a call of the form.
        room: the memory of the model's graphs.

    Raises:
        Refused: the step cannot be captured.
    """

    def __init__(self, model: torch.nn.Module, call: Call, room: Room) -> None:
        self._call, self._room = call, room
        self._model = weakref.ref(model)
        self._inputs = {name: _room_for(x) for name, x in call.tensors.items()}
        named = {name: x for name, x in model.named_parameters() if x.requires_grad}
        self._names, self.parameters = tuple(named), tuple(named.values())
        # A Parameter of its own, since a model's code and patches may ask for that class.
        self._stand_ins = {name: torch.nn.Parameter(x.detach()) for name, x in named.items()}
        self._slopes: list[Tensor] = []
        self._graded: list[Tensor] = []
        self._leaves: list[Any] = []
        self._is_random = self._rehearse(model)
        self._forward, self._backward = room.recording(), room.recording()
        self._record(model)

    def __call__(self, call: Call) -> Any:
        """Return what the model returns for a call of this form."""
        turn, graded = self._room.turn(), [x for x in call.tensors.values() if x.requires_grad]
        for name, given in call.tensors.items():
            self._inputs[name].detach().copy_(given.detach())
        made = iter(_Replay.apply(self, turn, *self.parameters, *graded))
        leaves = [
            (next(made) if leaf.requires_grad else leaf.clone()) if isinstance(leaf, Tensor) else leaf
            for leaf in self._leaves
        ]
        return pytree.tree_unflatten(leaves, self._form)

    def replay(self) -> list[Tensor]:
        """Run the forward; return the results with a gradient, in memory of their own."""
        self._set_aside()
        self._forward.replay()
        return [x.detach().clone() for x in self._graded]

    def replay_backward(
        self, turn: _Turn, slopes: Sequence[Tensor | None], *, is_kept: bool = False
    ) -> list[Tensor | None]:
        """Run the backward for the gradients of the results; return those of parameters and inputs.

        Those of parameters lie in the memory of the graph, unless the caller keeps them outside of ``grad``.
        """
        if turn.is_over:
            raise RuntimeError(
                "tilekern: the backward of a captured step runs once, and its memory is the next step's then; add up "
                "what you differentiate, or leave this model out of graphs"
            )
        turn.is_over = True
        if any((slope is not None) != (number in self._roots) for number, slope in enumerate(slopes)):
            return self._run_again(slopes)
        for mine, number in zip(self._slopes, self._roots, strict=True):
            mine.copy_(slopes[number])
        self._backward.replay()
        count = len(self._names)
        # New objects in the same memory: autograd makes them ``grad`` without a copy.
        return [
            None if x is None else x.detach() if number < count and not is_kept else x.clone()
            for number, x in enumerate(self._gradients)
        ]

    def _set_aside(self) -> None:
        """Give gradients that are still needed memory of their own, before the forward writes over them."""
        places = self._room.places
        kept = [x for x in self.parameters if x.grad is not None and x.grad.data_ptr() in places]
        if kept:
            held = [x.grad for x in kept]
            copies = [torch.empty_like(x) for x in held]
            torch._foreach_copy_(copies, held)
            for grad, copied in zip(held, copies, strict=True):
                grad.data = copied  # who took it from ``grad`` keeps its values

    def _run_again(self, slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of other results than the loss: the step runs once more, without graphs."""
        model = self._model()
        if model is None or self._is_random:
            raise RuntimeError(
                "tilekern: a captured step that draws random numbers has a gradient for its loss alone; leave the "
                "model out of graphs to use its other results"
            )
        self._forget_gradients()
        with inside(), torch.enable_grad():
            result = _on_stand_ins(model, self._stand_ins, lambda one: one(**self._call.constants, **self._inputs))
            graded = [x for x in _leaves_of(result)[0] if isinstance(x, Tensor) and x.requires_grad]
            pairs = [(x, slope) for x, slope in zip(graded, slopes, strict=True) if slope is not None]
            roots, given = [x for x, _ in pairs], [slope for _, slope in pairs]
            _on_stand_ins(model, self._stand_ins, lambda _: torch.autograd.backward(roots, given))
        found = [x.grad for x in (*self._stand_ins.values(), *self._inputs.values()) if x.requires_grad]
        self._forget_gradients()
        return found

    def _rehearse(self, model: torch.nn.Module) -> bool:
        """Run the step as a capture would see it; return whether it draws random numbers.

        Raises:
            Refused: it waits for the GPU, changes buffers, or cannot run so.
        """
        before = _random_state(self._room.device)
        buffers = [(name, x, x.detach().clone()) for name, x in model.named_buffers()]
        versions = [x._version for _, x, _ in buffers if not x.is_inference()]
        try:
            with as_captured(), _waiting_refused(self._room.device), torch.enable_grad():
                self._run_forward(model)
                self._slopes = self._ones()
                self._run_backward(model)
            after = _random_state(self._room.device)
        except Exception as error:  # noqa: BLE001
            raise Refused(why(error)) from None
        finally:
            torch.set_rng_state(before[0])
            if self._room.device.type == "cuda":
                torch.cuda.set_rng_state(before[1], self._room.device)
            self._forget_gradients()
            self._graded, self._leaves = [], []
        if versions != [x._version for _, x, _ in buffers if not x.is_inference()]:
            with torch.no_grad():
                for _, x, value in buffers:
                    x.copy_(value)
            raise Refused("its buffers change in training")
        if not torch.equal(before[0], after[0]) and self._room.device.type != "cpu":
            raise Refused("random numbers of the host, as of layers that are left out by chance")
        is_random = not all(map(torch.equal, before, after))
        if is_random and any(getattr(x, "gradient_checkpointing", False) for x in model.modules()):
            raise Refused("random numbers, as of dropout, with gradient checkpointing")
        return is_random

    def _record(self, model: torch.nn.Module) -> None:
        if self._room.device.type == "cuda":
            gc.collect()  # cycles of earlier steps may hold the GPU's memory
        with as_captured(), search_put_off(), torch.enable_grad():  # a capture may not free the tensors of cycles
            try:
                self._forward.record(lambda: self._run_forward(model))
                # Outside of both graphs: each step writes here what its backward begins with.
                self._slopes = self._ones()
                gradients = self._backward.record(lambda: self._as_parameters(self._run_backward(model)))
            except Exception as error:  # noqa: BLE001
                raise Refused(f"{CAPTURE_FAILED}: {why(error)}") from None
            self._forget_gradients()
        graphs = self._forward, self._backward
        self._gradients = [None if x is None else _lent(x, graphs) for x in gradients]
        self._room.places.update(x.data_ptr() for x in self._gradients[: len(self._names)] if x is not None)
        self._graded = [_lent(x, graphs) for x in self._graded]
        self._leaves = [_untaped(x, graphs) for x in self._leaves]

    def _run_forward(self, model: torch.nn.Module) -> list[Tensor | None]:
        torch.clear_autocast_cache()
        result = _on_stand_ins(model, self._stand_ins, lambda one: one(**self._call.constants, **self._inputs))
        torch.clear_autocast_cache()
        self._leaves, self._form = _leaves_of(result)
        self._graded = [x for x in self._leaves if isinstance(x, Tensor) and x.requires_grad]
        loss = result.get("loss") if isinstance(result, dict) else None
        self._roots = [number for number, x in enumerate(self._graded) if loss is None or x is loss]
        if not self._roots:
            raise Refused("no result has a gradient")
        return list(self._graded)

    def _ones(self) -> list[Tensor]:
        return [torch.ones_like(self._graded[number]) for number in self._roots]

    def _run_backward(self, model: torch.nn.Module) -> list[Tensor | None]:
        """Return the gradients of the parameters, then those of inputs that require one."""
        self._forget_gradients()
        roots = [self._graded[number] for number in self._roots]
        with torch.autocast(self._room.device.type, enabled=False):
            # Checkpoints run parts of the forward again.
            _on_stand_ins(model, self._stand_ins, lambda _: torch.autograd.backward(roots, self._slopes))
        return [x.grad for x in (*self._stand_ins.values(), *self._inputs.values()) if x.requires_grad]

    def _forget_gradients(self) -> None:
        for x in (*self._stand_ins.values(), *self._inputs.values()):
            x.grad = None

    def _as_parameters(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return gradients with those of parameters in the strides of these, as autograd makes no others ``grad``."""
        for number, x in enumerate(self._stand_ins.values()):
            made = gradients[number]
            if made is not None and made.stride() != x.stride():
                gradients[number] = torch.empty_like(x).copy_(made)
        return gradients


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: CapturedStep, turn: _Turn, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.turn = step, turn
        ctx.set_materialize_grads(False)
        return tuple(step.replay())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.step.replay_backward(ctx.turn, slopes, is_kept=_is_of_grad(ctx))


def _is_of_grad(node: Any) -> bool:
    """Return whether torch.autograd.grad runs a node for gradients of leaves, of which torch's engine does not tell."""
    for leaf, _ in node.next_functions:
        try:
            if leaf is not None and torch._C._will_engine_execute_node(leaf):
                return False
        except RuntimeError:
            return True
    return False


class _Whole(torch.nn.Module):
    """A model as part of another, whose call runs any function: its parameters are exchanged meanwhile."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[torch.nn.Module], Any]) -> Any:
        return run(self.model)


def _on_stand_ins(model: torch.nn.Module, stand_ins: dict[str, Tensor], run: Callable[..., Any]) -> Any:
    named = {f"model.{name}": x for name, x in stand_ins.items()}
    return torch.func.functional_call(_Whole(model), named, (run,))


def _room_for(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x).requires_grad_(x.requires_grad)


def _leaves_of(result: Any) -> tuple[list[Any], Any]:
    from tilekern.patch.skipped_logits import SkippedLogits

    leaves, form = pytree.tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, SkippedLogits, *_PLAIN)):
            raise Refused(f"a result of the type {type(leaf).__name__}")
    return leaves, form


def _untaped(leaf: Any, graphs: tuple[Recording, ...]) -> Any:
    """Return a result without what its gradient needs, which is in the graph of the backward."""
    return _lent(leaf, graphs).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class _Loan:
    """Memory of graphs' pool, which lasts as long as its graphs, and these as long as a tensor has this memory."""

    def __init__(self, storage: torch.UntypedStorage, graphs: tuple[Recording, ...]) -> None:
        self._graphs = graphs
        shape, place = (storage.nbytes(),), (storage.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": place, "version": 3}


def _lent(x: Tensor, graphs: tuple[Recording, ...]) -> Tensor:
    """Return a tensor that reads what graphs write, in memory that is free for other graphs of their pool."""
    if not x.is_cuda or not x.numel():
        return x.detach()
    held = torch.as_tensor(_Loan(x.untyped_storage(), graphs), dtype=torch.uint8, device=x.device)
    lent = torch.empty(0, dtype=x.dtype, device=x.device)
    return lent.set_(held.untyped_storage(), x.storage_offset(), x.shape, x.stride())


@contextlib.contextmanager
def exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module's variable another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Let code that asks see a capture, and let nothing read values that the caller has checked.

    The caller has refused positions of several sequences, and masks of ones are not given. torch's checkpoints keep the
    state of random numbers, which cannot be read in a capture; with random numbers they are refused.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged(torch.cuda, "is_current_stream_capturing", lambda: True))
        stack.enter_context(exchanged(torch.utils.checkpoint, "get_device_states", lambda *_: ([], [])))
        # What has been rehearsed allocates nothing in a capture.
        stack.enter_context(exchanged(packing, "is_rehearsed", True))
        masks: Any = sys.modules.get("transformers.masking_utils")
        if hasattr(masks, "find_packed_sequence_indices"):
            stack.enter_context(exchanged(masks, "find_packed_sequence_indices", lambda *_, **__: None))
        yield


@contextlib.contextmanager
def _waiting_refused(device: torch.device) -> Iterator[None]:
    """Let each operation of this thread that waits for the GPU raise; the backward runs in this thread too.

    torch's mode holds for all threads. So it warns, and the warnings of others are treated as the mode before asks.
    """
    if device.type != "cuda":
        yield
        return
    me, is_over = threading.get_ident(), False

    def show(message: Warning | str, *more: Any, **named: Any) -> None:
        if _WAITS in str(message) and not is_over:
            if threading.get_ident() == me or before == _RAISES:
                raise RuntimeError(str(message))
            if not before:
                return
        shown(message, *more, **named)

    with _one_rehearsal, warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        before, shown = torch.cuda.get_sync_debug_mode(), warnings.showwarning
        warnings.filterwarnings("ignore", message=".*prototype")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.filterwarnings("always", message=_WAITS)
        warnings.showwarning = show
        try:
            yield
        finally:
            is_over = True
            torch.cuda.set_sync_debug_mode(before)


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    on_gpu = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *on_gpu


def why(error: Exception) -> str:
    """Return in a line why a rehearsal failed: where code waits for the GPU, or the error."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if _WAITS not in said:
        return said[:200]
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(_TORCH)]
    at = next((x for x in reversed(frames) if x.filename not in (__file__, warnings.__file__)), None)
    return (
        "its backward waits for the GPU" if at is None else f"{at.filename}:{at.lineno} waits for the GPU ({at.line})"
    )
