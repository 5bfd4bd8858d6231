"""Plans the engine of :mod:`tilekern.inference`: its steps run over arrays without memory, and without torch."""

from __future__ import annotations

from tilekern.errors import InputError
from tilekern.inference.architectures import Architecture, architecture_of
from tilekern.inference.caches import PAGED, STATIC
from tilekern.inference.engine import CHUNK
from tilekern.inference.planning import DryRun
from tilekern.runtime.recorder import Trace
from tilekern.runtime.rows import has_rows
from tilekern.spec.targets import Target
from tilekern.tuning.plan.configs import fields_named
from tilekern.tuning.plan.steps import Planned, Steps

# The dtypes of checkpoints, beside the one that a model runs in.
_STORED = ("float32", "bfloat16")


def plan_of_engine(model: str, steps: Steps, target: Target) -> Planned:
    """Plan the problems that the engine asks for to run a model on a GPU.

    Args:
        model: a preset's name, the path of a config.json, or a hub id.
        steps: what the engine does.
        target: the GPU.

    Raises:
        tilekern.tuning.plan.configs.UnknownModel: no such model.
        InputError: its config cannot be read, the engine does not run it, or a sequence is longer than the context.
    """
    name, fields = fields_named(model)
    try:
        architecture = architecture_of(fields)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    found = Trace(target)
    for dtype in steps.dtype:
        _run(DryRun(found, architecture, dtype), architecture, steps)
    named = frozenset(named for named in found.problems if has_rows(*named)) if steps.invariant else frozenset()
    return Planned(f"{name}-engine", tuple(found.problems), launches=found.launches, invariant=named)


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
