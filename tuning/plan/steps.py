"""Describes the steps of a model that are traced: lengths, dtypes and other choices of a training job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tilekern.errors import InputError
from tilekern.inference.rehearsal import TokenStep
from tilekern.inference.weights import INT8
from tilekern.runtime.switches import format_of
from tilekern.spec import DTYPES
from tilekern.tuning.sweep.plan import Named

MOST_TOKENS = 1 << 24
ADAMW, NONE = OPTIMIZERS = ("adamw", "none")
TOKENS, CONTEXT = (2048, 8192), (4096,)
# The engine generates, and computes logits of whole sequences only where they are asked for.
OF_ENGINE: Mapping[str, Sequence[int]] = {"tokens": (), "decode": (1,)}
# What describes the steps of a model that only transformers runs.
_OF_MODELS = (
    "ops", "attention", "packed", "padded", "checkpointing", "experts", "optimizer", "fp8", "autocast", "hooks", "call",
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """The problems of a plan, each once, with a name and notes for people.

    ``models`` are the plans of single models, if there are several. ``launches`` counts the launches of a step, as far
    as known. ``invariant`` are the problems that need a kernel of one bit class. ``tokens`` are the engine's steps in
    which the kernels of a token are chosen.
    """

    name: str
    problems: tuple[Named, ...]
    notes: tuple[str, ...] = ()
    models: tuple[Planned, ...] = ()
    launches: Mapping[Named, int] = field(default_factory=dict)
    invariant: frozenset[Named] = frozenset()
    tokens: tuple[TokenStep, ...] = ()


@dataclass(frozen=True)
class Steps:
    """The steps of a training job, each of which is traced.

    Attributes: those that are not here are arguments of :func:`tilekern.tune`.
        autocast: weights are float32, and autocast casts their products to bfloat16, as a trainer's ``bf16=True``.
        hooks: each step is traced once more with a hook on each module with weights, so that ops run one by one, as in
            ``torch.compile`` too.
        call: the arguments of the forward of a job's own step, by name; the lengths are then those of its tensors.
        paged: tokens are decoded from pages too: those of transformers' continuous batching, or of the engine.
        invariant: the steps run once more inside ``tilekern.invariant()``, where linear layers are kernels' problems
            too; what they ask for there needs a kernel of one bit class.
        engine: the steps are those of :mod:`tilekern.inference`, which neither trains nor needs torch: logits of whole
            sequences, prompts of ``context`` - 1 tokens and of the sequences' lengths, and tokens of ``decode``
            sequences at once.

    Raises:
        InputError: a value is not known or out of range, or steps and sequences do not go together.
    """

    tokens: Sequence[int] = TOKENS
    sequence: Sequence[int] = ()
    dtype: Sequence[str] = ("bfloat16",)
    ops: Sequence[str] | None = None
    attention: Sequence[str] = ("tilekern",)
    tp: int = 1
    packed: bool = False
    padded: bool = False
    checkpointing: bool = False
    optimizer: str = ADAMW
    experts: bool = False
    autocast: bool = False
    hooks: bool = False
    fp8: bool | str = ""
    call: Mapping[str, Any] | None = None
    decode: Sequence[int] = ()
    context: Sequence[int] = CONTEXT
    chunk: Sequence[int] = ()
    paged: bool = False
    invariant: bool = False
    engine: bool = False
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", list(dict.fromkeys(map(dtype_named, self.dtype))))
        object.__setattr__(self, "fp8", format_of(self.fp8, "steps"))
        if self.autocast and self.dtype != ["float32"]:
            raise InputError("--autocast casts products of float32 weights; leave out --dtype, or pass --dtype float32")
        for name in ("tokens", "sequence", "decode", "context", "chunk"):
            if odd := [count for count in getattr(self, name) if not isinstance(count, int) or isinstance(count, bool)]:
                raise InputError(f"--{name} {odd[0]!r}: a token count is a whole number")
        defaults = {field.name: field.default for field in fields(self)}
        if self.engine and (wrong := [name for name in _OF_MODELS if getattr(self, name) != defaults[name]]):
            option = {"ops": "--op", "call": "a batch"}.get(wrong[0], f"--{wrong[0]}")
            raise InputError(f"{option} describes a step of transformers' model; leave it out with --engine")
        self._check_weights()
        if not isinstance(self.tp, int) or self.tp < 1:
            raise InputError(f"--tp {self.tp!r}: the tensor-parallel degree is a whole number from 1 on")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"unknown optimizer {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        self.batches()
        for name, least in (("decode", 1), ("context", 2), ("chunk", 1)):
            for count in getattr(self, name):
                if not least <= count <= MOST_TOKENS:
                    raise InputError(f"--{name} {count}: a count is from {least} to {MOST_TOKENS}")

    def _check_weights(self) -> None:
        if self.weight_dtype is None:
            return
        if self.weight_dtype != INT8:
            raise InputError(
                f"--weight-dtype {self.weight_dtype!r:.40}: expected {INT8}; leave it out for weights in --dtype"
            )
        if not self.engine:
            raise InputError(f"--weight-dtype {INT8} describes the engine's weights; pass --engine too")
        if self.invariant:
            raise InputError(
                "--invariant promises nothing for int8 weights, whose products of few rows and of many round "
                "differently; leave out one of --invariant and --weight-dtype"
            )

    def batches(self) -> list[tuple[int, int]]:
        """Return batch size and sequence length of each step: each token count with each length that divides it.

        Raises:
            InputError: a count is out of range, or goes together with none of the others.
        """
        if self.sequence and not self.tokens:
            raise InputError(f"--sequence {_listed(self.sequence)}: pass --tokens too, the batch times the sequence")
        for option, counts in (("--tokens", self.tokens), ("--sequence", self.sequence)):
            for count in counts:
                if not 1 <= count <= MOST_TOKENS:
                    raise InputError(f"{option} {count}: a token count is from 1 to {MOST_TOKENS}")
        if not self.sequence:
            return [(1, count) for count in dict.fromkeys(self.tokens)]
        pairs = [(count, length) for count in self.tokens for length in self.sequence if count % length == 0]
        for place, option, counts in ((0, "--tokens", self.tokens), (1, "--sequence", self.sequence)):
            for count in counts:
                if count not in {pair[place] for pair in pairs}:
                    raise InputError(
                        f"{option} {count}: no step of --tokens {_listed(self.tokens)} is made of whole sequences of "
                        f"--sequence {_listed(self.sequence)} with it; tokens are the batch times the sequence"
                    )
        return [(count // length, length) for count, length in dict.fromkeys(pairs)]


def steps_of(**given: Any) -> Steps:
    """Return the steps that some fields describe; None for the default, which can depend on ``engine``.

    Raises:
        InputError: as :class:`Steps`.
    """
    defaults: dict[str, Any] = dict(OF_ENGINE) if given.get("engine") else {}
    if given.get("autocast"):
        defaults["dtype"] = ("float32",)
    return Steps(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def as_tuple(given: Any) -> tuple[Any, ...] | None:
    """Return one value or several as a tuple; None for None."""
    if given is None:
        return None
    is_several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if is_several else (given,)


def dtype_named(dtype: Any) -> str:
    """Return the name of a dtype, given as a name, a short name (bf16, fp16, fp32) or torch's own.

    Raises:
        InputError: it is none of these.
    """
    name = str(dtype).removeprefix("torch.").strip().lower()
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise InputError(f"unknown dtype {str(dtype)!r}; known: {', '.join(DTYPES)}, and {', '.join(_SHORT)}")
    return name


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _listed(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))
