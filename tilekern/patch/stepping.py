"""Run a model's training step on meta tensors: forward, loss, backward and optimizer, with nothing computed.

Inside :func:`tilekern.trace`, it shows which problems a job of the model asks for.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilekern.errors import InputError
from tilekern.ops.adamw import AdamW

_META = torch.device("meta")


@dataclass(frozen=True)
class Batch:
    """The inputs of a step: ``sequences`` of ``length`` tokens each.

    ``packed`` sequences follow one another in a batch of one, with ``cu_seq_lens_q`` etc., as transformers'
    ``DataCollatorWithFlattening`` makes them. With ``padded`` there is a mask that is more than causal.
    """

    sequences: int
    length: int
    packed: bool = False
    padded: bool = False

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a language model's forward, on meta."""
        shape = (1, self.sequences * self.length) if self.packed else (self.sequences, self.length)
        ids = torch.zeros(shape, dtype=torch.long, device=_META)
        found: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
        if self.packed:
            starts = torch.zeros(self.sequences + 1, dtype=torch.int32, device=_META)
            found |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "position_ids": ids}
            found |= {"max_length_q": self.length, "max_length_k": self.length}
        if self.padded:
            # transformers makes such a mask if the given one is not all ones; its values do not matter.
            mask = torch.ones((shape[0], 1, shape[1], shape[1]), dtype=torch.bool, device=_META)
            found["attention_mask"] = mask
        return found


def model_of(config: Any, dtype: str, attention: str | None) -> Any:
    """Return a causal language model, or another model with such a configuration, on meta and in training mode.

    Args:
        config: the configuration, which is not changed.
        dtype: dtype of the parameters.
        attention: transformers' name of the attention implementation; None means its own choice.

    Raises:
        InputError: transformers has no model that is trained on tokens with such a configuration.
    """
    named = {} if attention is None else {"attn_implementation": attention}
    with _META:
        return auto_class(config).from_config(copy.deepcopy(config), dtype=getattr(torch, dtype), **named).train()


def auto_class(config: Any) -> Any:
    """Return transformers' class that makes the language model of a configuration.

    Raises:
        InputError: transformers has no model that is trained on tokens with such a configuration.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise InputError(f"{type(config).__name__}: transformers has no language model with such a configuration")


def step(model: Any, batch: Batch, *, adamw: bool = True) -> None:
    """Take a training step of a model on meta, with or without the step of ``tilekern.AdamW``."""
    with torch.enable_grad():
        loss = model(**batch.inputs()).loss
        if loss is None:
            raise InputError("the model gives no loss for labels")
        loss.backward()
    if adamw:
        AdamW([x for x in model.parameters() if x.grad is not None]).step()
    model.zero_grad()


def step_as_it_is(model: torch.nn.Module, batch: Batch) -> None:
    """Take a training step of a model on any device, patched or not, with meta tensors instead of its own.

    The model is not changed. Wrappers (torch.compile, DistributedDataParallel) are ignored. A model with sharded
    parameters (FSDP) is created again from its configuration.

    Raises:
        InputError: the model has no configuration, or its step cannot be taken on meta tensors.
    """
    core = core_of(model)
    try:
        if any(hasattr(x, "placements") or type(x).__name__ == "FlatParameter" for x in core.parameters()):
            step(_made_again(core), batch)
        else:
            _step_in_place(core, batch)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(core).__name__} cannot be stepped on meta tensors: {one_line(error)}; run its step inside "
            "tilekern.trace() yourself"
        ) from error


def core_of(model: torch.nn.Module) -> Any:
    """Return the outermost module that has a configuration, as transformers' and PEFT's models have.

    Raises:
        InputError: no module has one.
    """
    whole = getattr(model, "_orig_mod", model)
    for module in whole.modules():
        if hasattr(getattr(module, "config", None), "to_dict"):
            return getattr(module, "_orig_mod", module)
    raise InputError(
        f"{type(whole).__name__} has no configuration, so what its step is given is not known; run the step inside "
        "tilekern.trace()"
    )


def one_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    said = str(error).strip().splitlines()
    return (said or [type(error).__name__])[0][:200]


def _step_in_place(model: torch.nn.Module, batch: Batch) -> None:
    whole = _Step(model)
    named = (*whole.named_parameters(), *whole.named_buffers())
    tensors = {name: torch.empty(x.shape, dtype=x.dtype, device=_META) for name, x in named}
    for name, x in whole.named_parameters():
        tensors[name].requires_grad_(x.requires_grad)
    with _training(model):
        torch.func.functional_call(whole, tensors, (batch,))


class _Step(torch.nn.Module):
    """A step as one call: its backward, which may run a forward again, then has the same parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> None:
        step(self.model, batch)


def _made_again(model: Any) -> Any:
    """Return a new model from the configuration, which runs the patches of the model's classes."""
    from tilekern.patch.bound_method import Bound

    if any(isinstance(own, Bound) for module in model.modules() for own in vars(module).values()):
        raise InputError(
            f"{type(model).__name__} was patched by itself and then sharded; call this before it is sharded"
        )
    dtype = next(x.dtype for x in model.parameters() if x.is_floating_point())
    return model_of(model.config, str(dtype).removeprefix("torch."), model.config._attn_implementation)


@contextlib.contextmanager
def _training(model: torch.nn.Module) -> Iterator[None]:
    """Put the model and all its modules into training mode for a while."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
