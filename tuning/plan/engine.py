"""Plans the engine of :mod:`tilekern.inference`: its steps run over arrays without memory, and without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tilekern.errors import InputError
from tilekern.inference.architectures import Architecture, architecture_of
from tilekern.inference.caches import PAGED, STATIC
from tilekern.inference.engine import CHUNK
from tilekern.inference.planning import DryRun
from tilekern.inference.weights import INT8
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import Target
from tilekern.tuning.plan.configs import fields_of
from tilekern.tuning.plan.steps import Planned, Steps

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
    return Planned(called, tuple(found.problems), launches=found.launches, invariant=frozenset(found.invariant))


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
    rooms = dict.fromkeys(min(context, architecture.positions) for context in steps.context)
    for batch, tokens in steps.batches():
        if tokens > max(rooms):
            raise InputError(
                f"--tokens: a sequence of {tokens} tokens does not fit a context of {max(rooms)}; pass --sequence, "
                "or a larger --context if the model was made for it"
            )
        engine.forward(batch, tokens)
    prompts = {*steps.batches(), *((batch, max(1, room - 1)) for batch in steps.decode for room in rooms)}
    for cache in (STATIC, PAGED) if steps.paged else (STATIC,):
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
