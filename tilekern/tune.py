"""``tilekern.tune(model)``, and the entry point of ``python -m tilekern.tune``; the code is in ``tilekern.tuning``.

Importing a submodule sets it as an attribute of its package and would replace a function of the same name. So
``tilekern.tune`` is always this module, and calling the module calls :func:`tune`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilekern.errors import needing
from tilekern.warning import command_line

if TYPE_CHECKING:
    from tilekern.tuning.pipeline import Result, Tell


@needing("tilekern.tune")
def tune(
    model: Any, tokens: int | Sequence[int] | Mapping[str, Any] | None = None, *, gpu: str = "auto",
    budget_s: float | None = None,
    sequence: int | Sequence[int] = (), dtype: Any = ("bfloat16",), ops: str | Sequence[str] | None = None,
    attention: str | Sequence[str] = ("tilekern",), tp: int = 1, packed: bool = False, padded: bool = False,
    checkpointing: bool = False, optimizer: str = "adamw", experts: bool = False, fp8: bool | str = False,
    decode: int | Sequence[int] | None = None, context: int | Sequence[int] = 4096, chunk: int | Sequence[int] = (),
    paged: bool = False, invariant: bool = False, engine: bool = False, weight_dtype: str | None = None,
    strategy: str = "race", executor: str = "local", jobs: int | None = None, gpus: int | None = None,
    timeout_s: float = 60.0, cache_dir: str | Path | None = None,
    sweep: str | Path | None = None, tell: Tell | None = None,
) -> Result | None:  # fmt: skip
    """Tune the kernels that a model's training steps ask for, and fill the cache::

        result = tilekern.tune(model, tokens=8192, budget_s=600)
        for winner in result.winners:
            print(winner.kernel, winner.problem.key, winner.record.provenance, winner.time_us)

    In a job, before its first step, with what ``model(**batch)`` gets: ``tilekern.tune(model, batch, budget_s=60)``.
    The job's next calls look their kernels up again. In a job of several ranks every rank calls it; rank 0 tunes on the
    GPUs that it sees, and all ranks run what it found (:func:`tilekern.agree`). The others wait within the timeout of
    the process group, so give a budget below that.

    Winners are ``measured`` if the GPU is here, else ``predicted``. A run that was stopped, or whose budget was spent,
    continues when it is called again. Call it from a script below ``if __name__ == "__main__":``, since measuring runs
    in other processes.

    Args:
        model: a preset's name, the path of a config.json, a hub id, or a configuration of transformers or its
            dictionary, whose model is patched; a model, whose step is traced as it is; or a traced plan
            (:func:`tilekern.trace`) or its file, to which the arguments from ``tokens`` to ``experts`` do not apply,
            except ``gpu`` and ``budget_s``.
        tokens: tokens of a step, batch times sequence; by default 2048 and 8192, for an engine none. This,
            ``sequence``, ``dtype``, ``ops`` and ``attention`` take one value or several. Or, for a model, a job's own
            batch: the arguments of its forward by name, with tensors on any device; the other arguments up to
            ``experts`` then do not apply, except ``gpu`` and ``budget_s``.
        gpu: the GPU to tune for: ``auto`` (the one here), a name, an arch, a key, or figures
            (:func:`tilekern.spec.targets.resolve`).
        budget_s: wall seconds, planning included, after which no more work is started. The problems that gain most per
            second come first; problems not reached are in ``result.left_out``. None for no limit.
        sequence: tokens of a sequence; by default a step is one sequence.
        dtype: the dtypes to train in, by name or as torch's own.
        ops: the ops to patch; None is all but experts.
        attention: the names of ``attn_implementation``.
        tp: the tensor-parallel degree.
        packed: whether sequences are packed into a batch of one.
        padded: whether sequences are padded to one length, with a mask.
        checkpointing: whether activations are recomputed in the backward.
        optimizer: ``adamw`` or ``none``.
        experts: whether tilekern runs layers of experts.
        fp8: the format of 8-bit floats of linear layers and experts, as ``apply(fp8=...)`` has it; or False.
        decode: how many sequences generation decodes at once, one number or several; by default none, for an engine 1.
        context: tokens of a decoded sequence, the new one included.
        chunk: tokens of a prompt that are computed at once, where prompts are computed in chunks too.
        paged: whether tokens are decoded by transformers' ``generate_batch`` too.
        invariant: whether to plan ``tilekern.invariant()`` too, and to find kernels that give a row the same bits at
            all sizes of the plan.
        engine: whether to plan what the engine of :mod:`tilekern.inference` launches, by the config of ``model``, in
            place of training steps. The arguments from ``ops`` to ``experts`` and ``paged`` then do not apply.
        weight_dtype: ``int8`` for an engine with int8 weights; by default they are in ``dtype``.
        strategy: how candidates are timed: ``race`` or ``exhaustive``.
        executor: where to compile and measure: ``local``, ``ray`` or ``ray://HOST:PORT``.
        jobs: compile workers; None is one for each core.
        gpus: the most GPUs to measure on; None is all identical ones.
        timeout_s: wall seconds that one compile may take.
        cache_dir: the cache to fill; None is the user's.
        sweep: the sweep folder; None is one in the cache.
        tell: called with the current stage (``compile``, ``measure``, ``publish``), its finished parts and all parts.

    Returns:
        The winners by problem, the problems that the budget left out and what serves them, and the time spent; None on
        the ranks that do not tune.

    Raises:
        InputError: an argument is unknown, a step cannot be traced, or no problem has a winner.
        RanksDiffer: the ranks of the job could not agree.
        ToolchainMissing: no compiler is installed.
        tilekern.cache.CacheError: the cache cannot be written.
    """
    from tilekern.cache import Store, user_root
    from tilekern.runtime import dispatch
    from tilekern.runtime.provisional import of_several_ranks
    from tilekern.runtime.recorder import Trace
    from tilekern.runtime.settings import check_settings
    from tilekern.spec.targets import resolve
    from tilekern.tuning.pipeline import Options, Pipeline
    from tilekern.tuning.plan.choosing import plan_of_anything
    from tilekern.tuning.plan.steps import as_tuple, steps_of

    check_settings()
    options = Options(
        strategy=strategy, executor=executor, jobs=jobs, gpus=gpus, timeout_s=timeout_s,
        budget_s=budget_s,
    )  # fmt: skip
    is_batch = isinstance(tokens, Mapping)
    steps = steps_of(
        tokens=None if is_batch else as_tuple(tokens), call=tokens if is_batch else None, sequence=as_tuple(sequence),
        dtype=as_tuple(dtype), ops=as_tuple(ops), attention=as_tuple(attention), tp=tp, packed=packed, padded=padded,
        checkpointing=checkpointing, optimizer=optimizer, experts=experts, fp8=fp8, decode=as_tuple(decode),
        context=as_tuple(context), chunk=as_tuple(chunk), paged=paged, invariant=invariant, engine=engine,
        weight_dtype=weight_dtype,
    )  # fmt: skip
    target = model.target if isinstance(model, Trace) and gpu == "auto" else resolve(gpu)
    store = Store(cache_dir or user_root())

    def run() -> Result:
        planned = plan_of_anything(model, steps, target, store.root)
        result = Pipeline.of(planned, target, store, options, tell, folder=None if sweep is None else Path(sweep)).run()
        dispatch.forget()
        return result

    return _by_one_rank(run) if of_several_ranks() else run()


def _by_one_rank(run: Callable[[], Result]) -> Result | None:
    """Tune on rank 0 while the others wait to agree with it; they do not wait for a rank that failed."""
    import torch.distributed as dist

    from tilekern.patch.comparing import agree

    try:
        return run() if dist.get_rank() == 0 else None
    finally:
        agree()


class _CallableModule(ModuleType):
    """A module that can be called like the function of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result | None:
        return tune(*args, **kwargs)


@command_line("python -m tilekern.tune")
def main() -> int:
    """Run the tuner's command line and return the exit code."""
    from tilekern.tuning.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = _CallableModule
# Shown by help() and inspect.signature().
__wrapped__ = tune
