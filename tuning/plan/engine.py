"""Plans the engine of :mod:`tilekern.inference`: its steps run over arrays without memory, and without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tilekern.errors import InputError
from tilekern.inference.architectures import Architecture, architecture_of
from tilekern.inference.caches import PAGED, STATIC
from tilekern.inference.engine import CHUNK
from tilekern.inference.planning import DryRun
from tilekern.inference.rehearsal import TokenStep
from tilekern.inference.weights import INT8
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import Target
from tilekern.tuning.plan.configs import fields_of
from tilekern.tuning.plan.steps import Planned, Steps
from tilekern.tuning.sweep.plan import Named

# The dtypes of checkpoints, beside the one that a model runs in.
_STORED = ("float32", "bfloat16")


def plan_of_engine(model: Any, steps: Steps, target: Target) -> Planned:
    """Plan the problems that the engine asks for to run a model on a GPU.

    Args:
        model: a preset's name, the path of a config.json, a hub id, or a configuration of transformers or its
            dictionary.
        steps: what the engine does.
        target: the GPU.

    Raises:
        tilekern.tuning.plan.configs.UnknownModel: no such model.
        InputError: its config cannot be read, the engine does not run it, ``tp`` GPUs cannot share it, or a sequence is
            longer than the context.
    """
    name, fields = fields_of(model)
    try:
        architecture = architecture_of(fields)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    found = Trace(target)
    for dtype in steps.dtype:
        try:
            engine = DryRun(found, architecture, dtype, steps.tp, int8=steps.weight_dtype == INT8)
        except InputError as error:
            raise InputError(f"--tp {steps.tp}: {name}: {error}") from None
        for is_on in (False, True) if steps.invariant else (False,):
            with _invariant(is_on=is_on):
                _run(engine, architecture, steps)
    called = f"{name}-engine" if steps.weight_dtype is None else f"{name}-engine-{steps.weight_dtype}"
    called = called if steps.tp == 1 else f"{called}-tp{steps.tp}"
    notes, tokens = [], tuple(_tokens(architecture, steps))
    if steps.tp > 1 and tokens:
        notes.append(f"--tp {steps.tp}: the step of a token on several GPUs is not timed; the fastest in a row win")
        tokens = ()
    return Planned(
        called, tuple(found.problems), tuple(notes), launches=found.launches, invariant=frozenset(found.invariant),
        tokens=tokens,
    )  # fmt: skip


def problems_of_token(step: TokenStep, target: Target) -> tuple[dict[Named, int], list[Named]]:
    """Return how often a token launches each problem, and all problems that it may launch, whichever configs win."""
    found = Trace(target)
    with _invariant(is_on=False):
        DryRun(found, step.architecture, step.dtype, int8=step.int8).token(step.batch, step.context, cache=step.cache)
    return dict(found.launches), found.problems


@contextlib.contextmanager
def _invariant(*, is_on: bool) -> Iterator[None]:
    """Turn the invariant mode on or off, in which the engine has other launches."""
    before = dispatch.set_invariant(on=is_on)
    try:
        yield
    finally:
        dispatch.set_invariant(on=before)


def _run(engine: DryRun, architecture: Architecture, steps: Steps) -> None:
    """Run all that the steps describe.

    A cache has no room for more tokens than the model was made for, as with :func:`tilekern.inference.load`.
    """
    rooms = _rooms(architecture, steps)
    for batch, tokens in steps.batches():
        if tokens > max(rooms):
            raise InputError(
                f"--tokens: a sequence of {tokens} tokens does not fit a context of {max(rooms)}; pass --sequence, "
                "or a larger --context if the model was made for it"
            )
        engine.forward(batch, tokens)
    prompts = {*steps.batches(), *((batch, max(1, room - 1)) for batch in steps.decode for room in rooms)}
    for cache in _caches(steps):
        for chunk in dict.fromkeys((CHUNK, *steps.chunk)):
            for batch, tokens in sorted(prompts):
                engine.prompt(batch, tokens, chunk, cache=cache)
        for batch in steps.decode:
            for room in rooms:
                engine.token(batch, room, cache=cache)
    is_turned = (False, True) if architecture.kind == "gpt2" else (False,)
    for dtype in _STORED:
        for transposed in is_turned:
            engine.load(dtype, transposed=transposed)


def _tokens(architecture: Architecture, steps: Steps) -> Iterator[TokenStep]:
    """Yield the steps of a token; the first one that launches a problem decides which kernel it has."""
    for dtype in steps.dtype:
        for cache in _caches(steps):
            for batch in steps.decode:
                for room in _rooms(architecture, steps):
                    yield TokenStep(architecture, dtype, batch, room, cache, steps.weight_dtype == INT8)


def _rooms(architecture: Architecture, steps: Steps) -> Sequence[int]:
    return [*dict.fromkeys(min(context, architecture.positions) for context in steps.context)]


def _caches(steps: Steps) -> Sequence[str]:
    return (STATIC, PAGED) if steps.paged else (STATIC,)
