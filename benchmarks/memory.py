"""Foretell the memory of a training step: its peak, what runs at the peak, and what layers keep for the backward.

The step runs on meta tensors, as the tuner's plans do, so no GPU is needed. Each tensor counts from its allocation to
its end, in torch's allocator's units of 512 bytes. Composite kernels run their default config.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.models import make_model
from benchmarks.train import GIB
from tilekern.ops.adamw import AdamW
from tilekern.patch import attention, fp8, registry
from tilekern.patch.patcher import applied
from tilekern.patch.stepping import Batch, step
from tilekern.runtime.recorder import Trace, tracing
from tilekern.runtime.switches import FP8_FORMATS
from tilekern.spec.targets import resolve
from tilekern.tuning.plan.configs import config_named

PLAIN = "bf16"
FORMATS = (PLAIN, *FP8_FORMATS)
# torch's allocator gives whole units of this many bytes.
_UNIT = 512
_BACKWARD = " backward"
# The ops that are named as the highest.
_NAMED = 5


class Kept(NamedTuple):
    """What the tensors of one kind are: the op that made them, and their dtype."""

    op: str
    dtype: str


@dataclass
class Memory:
    """The memory of a step, in bytes.

    Attributes:
        tokens, layers: those of the step.
        standing: parameters and the optimizer's states, which live before the step.
        peaks: the most that lives while an op allocates, by op, in the order of their first allocations.
        kept: what the forward leaves for the backward.
    """

    tokens: int
    layers: int
    standing: int = 0
    peaks: Counter[str] = field(default_factory=Counter)
    kept: Counter[Kept] = field(default_factory=Counter)

    @property
    def peak(self) -> int:
        """Return the most that lives at once."""
        return max(self.peaks.values())

    def of_a_token(self, kind: Kept) -> float:
        """Return the bytes of a kind that each layer keeps for each token."""
        return self.kept[kind] / self.tokens / self.layers

    def lines(self) -> Iterator[str]:
        """Yield the memory as text."""
        (first, _), *_ = highest = self.peaks.most_common(_NAMED)
        yield f"peak {self.peak / GIB:.2f} GiB, at {first}; before the step {self.standing / GIB:.2f} GiB"
        yield "highest while it allocates, GiB: " + ", ".join(f"{op} {most / GIB:.2f}" for op, most in highest)
        yield "kept for the backward, bytes of a token and layer:"
        for kind, size in self.kept.most_common():
            if self.of_a_token(kind) >= 1:
                yield f"{self.of_a_token(kind):9.0f}  {kind.op}, {kind.dtype} ({size / GIB:.2f} GiB)"


class _Meter(TorchDispatchMode):
    """Counts the memory of tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[Kept, int]] = {}
        self.now, self.peaks = 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.see(x)
        return results

    def see(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size, op = -(-storage.nbytes() // _UNIT) * _UNIT, _running()
        self.live[key] = Kept(op, str(x.dtype).removeprefix("torch.")), size
        self.now += size
        self.peaks[op] = max(self.peaks[op], self.now)
        weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self.now -= self.live.pop(key)[1]


def _running() -> str:
    """Return the op that allocates, or the file of the model or of torch's layers; ``autograd`` if there is none."""
    frame: FrameType | None = sys._getframe(2)
    op = layer = ""
    is_backward = False
    while frame is not None:
        room, file = _room_of(frame.f_code.co_filename)
        if room == "ops":
            op = file
            is_backward |= frame.f_code.co_name == "backward"
        elif room == "layers":
            layer = layer or file
        elif room == "patch" and op:
            break
        frame = frame.f_back
    return (op or layer or "autograd") + _BACKWARD * is_backward


@functools.cache
def _room_of(filename: str) -> tuple[str, str]:
    """Return of which part a source file is: ``ops``, ``patch`` or ``layers``, or of none; and its name."""
    path = Path(filename)
    if path.stem in ("registration", "module"):  # which call all others
        return "", path.stem
    rooms = {"ops": ("tilekern", "ops"), "patch": ("tilekern", "patch"), "layers": ("nn", "modules")}
    pairs = tuple(zip(path.parts, path.parts[1:], strict=False))
    found = next((room for room, pair in rooms.items() if pair in pairs), "")
    return found or ("layers" if "transformers" in path.parts else ""), path.stem


@dataclass(frozen=True, kw_only=True)
class _Step(Batch):
    """A step whose memory is measured, with that of the optimizer."""

    found: Memory

    def backward(self, model: Any) -> None:
        """Run a forward and its backward, and step the optimizer."""
        parameters = list(model.parameters())
        with _Meter() as meter:
            for x in parameters:
                meter.see(x)
                x.grad = torch.empty_like(x)
            optimizer = AdamW(parameters)
            optimizer.step()  # which makes its states
            optimizer.zero_grad(set_to_none=True)
            self.found.standing, before = meter.now, set(meter.live)
            meter.peaks.clear()
            loss = model(**self.inputs()).loss
            for key in meter.live.keys() - before:
                kind, size = meter.live[key]
                self.found.kept[kind] += size
            loss.backward()
            optimizer.step()
            self.found.peaks = meter.peaks


def foretell(model: str, tokens: int, format: str = "", *, layers: int = 0, gpu: str = "H200") -> Memory:
    """Foretell the memory of a step of a model in bfloat16, with tilekern's patches, attention and AdamW.

    Args:
        model: a preset, the path of a config.json or of a folder with one, or a hub id.
        tokens: those of the one sequence.
        format: the format of 8-bit floats; empty for none.
        layers: the model's layers; 0 means all.
        gpu: the GPU whose default configs run.

    Raises:
        InputError: the model, the format or the GPU is unknown.
    """
    attention.register()
    made = make_model(config_named(model)[1], layers, "tilekern", "meta")
    found = Memory(tokens, made.config.get_text_config().num_hidden_layers)
    with tracing(Trace(resolve(gpu))), applied(made, registry.known_ops()), fp8.converted(made, format):
        step(made, _Step(sequences=1, length=tokens, found=found), adamw=False)
    return found
