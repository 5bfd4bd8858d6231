"""Plans a model: transformers makes it on meta tensors, it is patched, and its steps run in a trace."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from tilekern.errors import InputError, TilekernWarning
from tilekern.kernels.attention.forward import SPEC as FORWARD
from tilekern.kernels.cache_rows import SPEC as CACHE_ROWS
from tilekern.kernels.decode_attention import SPEC as DECODING
from tilekern.ops.invariance import invariant
from tilekern.patch import attention, experts, fp8, registry
from tilekern.patch.patcher import applied, codes
from tilekern.patch.stepping import (
    Batch,
    Call,
    core_of,
    decode,
    model_of,
    on_copy,
    one_line,
    score,
    step,
    step_as_it_is,
)
from tilekern.patch.table import ops_in
from tilekern.runtime.dispatch import is_invariant
from tilekern.runtime.recorder import Trace, products_cast, tracing
from tilekern.runtime.switches import ATTENTION, ATTENTIONS, EXPERTS, LORA
from tilekern.spec import bucket, cdiv
from tilekern.spec.targets import Target
from tilekern.tuning.plan.alike import thin_out
from tilekern.tuning.plan.beside import with_those_beside
from tilekern.tuning.plan.configs import config_of, fields_of
from tilekern.tuning.plan.sharding import give_own_forwards, share_of
from tilekern.tuning.plan.steps import ADAMW, Planned, Steps

# Fewer keys than these are only in the caches of prompts of a few words.
_SHORTEST = 16
# Tokens of a page of transformers' continuous batching, by default.
_PAGE = 256


def known_ops() -> list[str]:
    """Return the ops of a model's step: those that are patched, attention and the optimizer."""
    return [*registry.known_ops(), ATTENTION, ADAMW]


def plan_of_model(model: Any, steps: Steps, target: Target) -> Planned:
    """Plan the problems that training steps of a model ask for on a GPU.

    Args:
        model: a preset's name, the path of a config.json, a hub id, a configuration of transformers or its dictionary,
            which are made into a model and patched; or a model, which is stepped as it is: of ``steps`` the lengths
            count, and whether they are packed or padded.
        steps: what is traced.
        target: the GPU.

    Raises:
        InputError: the model or an op is not known, its step cannot be traced, or it asks for nothing.
    """
    ops = [op for op in known_ops() if op != EXPERTS] if steps.ops is None else list(steps.ops)
    ops += [EXPERTS] * (steps.experts and EXPERTS not in ops)
    for op in ops:
        if op not in known_ops():
            raise InputError(f"unknown op {op!r}; known: {', '.join(known_ops())}; others are planned by --problem")
    for name in steps.attention:
        if name not in ATTENTIONS:
            raise InputError(f"unknown attention {name!r}; known: {', '.join(ATTENTIONS)}")
    found = Trace(target)
    with _quiet():
        if hasattr(model, "named_modules"):
            core = core_of(model)
            name = core.config.name_or_path or type(core).__name__
            with _noted_warnings() as notes, tracing(found):
                for mode in _modes(core, steps, found):
                    with mode():
                        for batch in _batches(steps):
                            step_as_it_is(core, batch)
                        for run in _forwards(steps):
                            on_copy(core, run)
        else:
            name, fields = fields_of(model)
            config = config_of(fields, name)
            with _noted_warnings() as said, tracing(found):
                notes = _trace_config(config, name, steps, ops, found)
            notes += said
            name = name if steps.tp == 1 else f"{name}-tp{steps.tp}"
    notes += [
        f"{name}: calls of a step run torch's operations, for which nothing is planned" for name in found.fallbacks
    ]
    if names := ", ".join(dict.fromkeys(kernel for kernel, _ in found.dispensable)):
        notes.append(f"{names}: where no record was measured, torch's own operations run, and nothing is compiled")
    _note_padding(found, steps)
    _note_pages(found, steps)
    _note_rows(found, steps)
    if steps.invariant:
        with invariant():
            _note_attention(found, steps)
            _note_pages(found, steps)
    if not found.problems:
        asked = "" if steps.ops is None else f" of --ops {','.join(ops)}"
        raise InputError("; ".join([f"a step of {name} asks for no kernel{asked}", *notes]))
    named = frozenset(found.invariant)
    plan = Planned(name, tuple(found.problems), tuple(dict.fromkeys(notes)), launches=found.launches, invariant=named)
    return with_those_beside(plan) if steps.invariant else plan


def _trace_config(config: Any, name: str, steps: Steps, ops: Collection[str], found: Trace) -> list[str]:
    """Step a model in each dtype, and as each kind of rank; return notes for people."""
    notes: dict[str, None] = {}
    attending = steps.attention if ATTENTION in ops else (None,)
    for dtype in steps.dtype:
        for share, is_split in _shares(config, name, steps.tp):
            for kind in attending:
                for line in _trace(share, name, dtype, kind, steps, ops, found, is_split=is_split):
                    notes.setdefault(line)
    return [*_without_patch(config, ops, found), *_not_read(config), *notes]


def _shares(config: Any, name: str, tp: int) -> Iterator[tuple[Any, bool]]:
    """Yield a rank's share of a model, and whether transformers splits it.

    transformers gathers the logits before its loss, and wraps the forward of each layer that it splits. Another split,
    such as Megatron's, has plain layers, and computes the loss on its share of the vocabulary.
    """
    if tp == 1:
        yield config, False
    else:
        yield share_of(config, tp, name, vocabulary=True), False
        yield share_of(config, tp, name, vocabulary=False), True


def _trace(
    config: Any, name: str, dtype: str, kind: str | None, steps: Steps, ops: Collection[str], found: Trace, *,
    is_split: bool,
) -> list[str]:  # fmt: skip
    """Step a model with an attention implementation, or with transformers' own if that fails; return the reasons."""
    try:
        attention.register()
        try:
            model = model_of(config, dtype, kind)
        except Exception as error:
            if kind is None:
                raise
            raise _Unattended(f"its classes take no attn_implementation={kind!r}") from error
        _step(model, steps, ops, found, is_split=is_split)
    except (_Unattended, InputError) as error:
        if kind is None:
            raise
        rest = _trace(config, name, dtype, None, steps, ops, found, is_split=is_split)
        return [f"{ATTENTION} is left out: {error}", *rest]
    except Exception as error:
        raise InputError(
            f"{name}: a training step cannot be traced on meta tensors: {one_line(error)}; run your own inside "
            'tilekern.trace("plan.json"), and give that file as --plan'
        ) from error
    return []


class _Unattended(Exception):  # noqa: N818
    """The model cannot be made with an attention implementation."""


def _step(model: Any, steps: Steps, ops: Collection[str], found: Trace, *, is_split: bool) -> None:
    if steps.checkpointing:
        model.gradient_checkpointing_enable()
    patched = [op for op in ops if op in registry.known_ops()]
    with applied(model, patched), experts.chosen(model, EXPERTS in ops), fp8.converted(model, str(steps.fp8)):
        found.patches |= codes()
        if is_split:
            give_own_forwards(model)
        # Logits of all layers are one problem of the routers' loss.
        if not (EXPERTS in ops and getattr(model.config.get_text_config(), "output_router_logits", False)):
            thin_out(model, found)
        for mode in _modes(model, steps, found):
            with mode(), _cast(steps, found):
                for batch in _batches(steps):
                    step(model, batch, adamw=ADAMW in ops and steps.optimizer == ADAMW)
                for run in _forwards(steps):
                    run(model)
                if steps.autocast:
                    # Evaluation has no gradient, so that ops run one by one; their norms are of float32.
                    with found.aside():
                        _score(model, steps)


def _modes(model: Any, steps: Steps, found: Trace) -> list[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return the modes in which steps run: as usual, under ``hooks``, and ``invariant`` steps in that mode."""
    hooked = functools.partial(_hooked, model, found)
    return [contextlib.nullcontext, *[hooked] * steps.hooks, *[invariant] * steps.invariant]


@contextlib.contextmanager
def _hooked(model: Any, found: Trace) -> Iterator[None]:
    """Put a hook that does nothing on each module with weights, as accelerate does for a ``device_map``.

    Launches do not count, as a job has hooks or has none.
    """
    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [module.register_forward_hook(lambda *_: None) for module in owners]
    try:
        with found.aside():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _cast(steps: Steps, found: Trace) -> Iterator[None]:
    """Cast as the autocast of steps does."""
    if not steps.autocast:
        yield
        return
    # Any machine has a CPU's autocast, and a GPU's casts the same.
    found.stands_for = "cpu"
    with products_cast("cpu"), torch.autocast("cpu", torch.bfloat16):
        yield


def _forwards(steps: Steps) -> Iterator[Callable[[Any], None]]:
    """Yield the runs of a model beside its training steps: generation, and in the invariant mode logits alone.

    A trainer computes the probabilities of tokens from their logits, or from the loss that a patch computes without.
    """
    for sequences, context, chunk in itertools.product(steps.decode, steps.context, (None, *steps.chunk)):
        yield functools.partial(decode, sequences=sequences, context=context, chunk=chunk)
    if is_invariant():
        yield functools.partial(_score, steps=steps)


def _score(model: Any, steps: Steps) -> None:
    for batch in _batches(steps):
        if isinstance(batch, Batch):
            score(model, batch)


def _note_attention(found: Trace, steps: Steps) -> None:
    """Note the attention that generation asks for inside the invariant mode beside what was traced.

    A cache grows from the prompt's length to the context. Prompts of several sequences are padded in front, so that
    they run packed attention. Where no kernel for decoding has the bits of training's, each of their tokens runs that
    one row at a time, and so it does after a static cache, as a sequence that is packed alone.
    """
    padded = [count for count in steps.decode if count > 1]
    for kernel, problem in list(found.invariant) if steps.decode else ():
        if kernel != FORWARD.name or problem["packed"] or not problem["causal"]:
            continue
        if problem["queries"] == problem["keys"] > 1 and padded:
            found.note(FORWARD, problem.but(batch=min(padded), packed=True))
        if problem["queries"] == 1:
            found.note(FORWARD, problem.but(batch=1, packed=True))
            lengths = (problem["keys"] >> power for power in range(problem["keys"].bit_length()))
            for keys in (length for length in lengths if length >= min(_SHORTEST, problem["keys"])):
                for batch in {problem["batch"], 1} if padded else {problem["batch"]}:
                    found.note(FORWARD, problem.but(batch=batch, keys=keys))


def _note_padding(found: Trace, steps: Steps) -> None:
    """Note the attention of tokens behind padding: prompts of several sequences are padded in front to one length."""
    prompts = [problem for kernel, problem in found.asked if kernel == FORWARD.name]
    several = {bucket(count * problem["kv_heads"]) for problem in prompts for count in steps.decode if count > 1}
    for kernel, problem in list(found.asked):
        if kernel == DECODING.name and problem["kv_heads"] in several:
            found.note(DECODING, problem.but(padded=True))


def _note_rows(found: Trace, steps: Steps) -> None:
    """Note the copies of new tokens to static caches: the cache that is traced grows by torch's operations."""
    for kernel, problem in list(found.asked):
        if kernel == FORWARD.name and problem["causal"] and problem["queries"] == problem["keys"] > 1:
            same = {name: problem[name] for name in ("kv_heads", "head_dim", "dtype")}
            for count in steps.decode:
                found.note(CACHE_ROWS, CACHE_ROWS.problem(rows=count, **same))


def _note_pages(found: Trace, steps: Steps) -> None:
    """Note the attention of continuous batching: prompts that are packed, and tokens to keys in pages.

    A sequence has room for a page more than it needs, and for an even number of pages, as transformers gives it.
    """
    for kernel, problem in list(found.asked) if steps.paged else ():
        if kernel == FORWARD.name and problem["causal"] and problem["queries"] == problem["keys"] > 1:
            found.note(FORWARD, problem.but(packed=True))
        is_dense = kernel == DECODING.name and not any(problem[flag] for flag in ("padded", "paged", "windowed"))
        for context in (some for some in steps.context if is_dense and bucket(some) == problem["keys"]):
            pages = cdiv(context, _PAGE) + 1
            found.note(DECODING, problem.but(keys=(pages + pages % 2) * _PAGE, page_size=_PAGE, paged=True))


def _batches(steps: Steps) -> list[Batch | Call]:
    if steps.call is not None:
        return [Call(kwargs=steps.call).on_meta()]
    kinds = [{"packed": True}] * steps.packed + [{"padded": True}] * steps.padded or [{}]
    if steps.padded and is_invariant():
        kinds.append({})  # padding behind the tokens needs no mask
    return [Batch(*sizes, **kind) for sizes in steps.batches() for kind in kinds]


def _without_patch(config: Any, ops: Iterable[str], found: Trace) -> list[str]:
    """Note the ops of a model that no patch knows; few families have norms of q and k to fuse."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    known = {patch.op for patch in (*registry.patches_for(module), *registry.registered()) if patch.module == module}
    if "rope" in known:
        known.add("qk_norm_rope")
    # A family has norms of one of these kinds, and MLPs of one of those.
    for kinds in ({"rms_norm", "layer_norm"}, {"swiglu", "mlp"}):
        known |= kinds if kinds & known else set()
    asked = {op for texts in found.askers.values() for text in texts for op in ops_in(text)}
    # Experts may have transformers' door, and adapters are of no family.
    known |= {EXPERTS} & asked | {LORA}
    missing = [op for op in ops if op in registry.known_ops() and op not in known]
    if not missing:
        return []
    served = [op for op in ops if op in asked and op not in missing]
    has = "has" if len(missing) == 1 else "have"
    return [f"{config.model_type}: {' and '.join(served) or 'nothing'} only; {', '.join(missing)} {has} no patch"]


def _not_read(config: Any) -> list[str]:
    """Note the parts of a model, such as a vision encoder, that a step on tokens does not run."""
    text = config.get_text_config()
    parts = {name.removesuffix("_config"): getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    senses = [name for name, part in parts.items() if part is not None and part is not text]
    if text is config or not senses:
        return []
    return [
        f"{config.model_type}: its text alone is planned, not {' and '.join(senses)}; for these run a step of your own "
        'inside tilekern.trace("plan.json", real=True), and give that file as --plan'
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging advice on training."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _noted_warnings() -> Iterator[list[str]]:
    """Hide warnings; the yielded list has those of tilekern at the end."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield said
    said += dict.fromkeys(str(w.message) for w in found if issubclass(w.category, TilekernWarning))
