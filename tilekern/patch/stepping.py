"""Run a model's training step on meta tensors: forward, loss, backward and optimizer, with nothing computed.

Inside :func:`tilekern.trace`, it shows which problems a job of the model asks for.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tilekern.errors import InputError
from tilekern.ops.adamw import AdamW
from tilekern.patch.guards import is_sharded

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
            found["attention_mask"] = _dense_mask(*shape)
        return found

    def trained_in(self) -> bool:
        """Return True: the model is put into training mode."""
        return True

    def backward(self, model: Any) -> None:
        """Run a forward and its backward."""
        loss = model(**self.inputs()).loss
        if loss is None:
            raise InputError("the model gives no loss for labels")
        loss.backward()


def _dense_mask(sequences: int, length: int) -> torch.Tensor:
    return torch.ones((sequences, 1, length, length), dtype=torch.bool, device=_META)


@dataclass(frozen=True)
class Call:
    """The step of a job's own call: what its model is given.

    Attributes:
        args, kwargs: the arguments of the model's forward, with tensors on any device.
        has_gradient: whether a backward follows.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    has_gradient: bool = True

    def on_meta(self) -> Call:
        """Return the same with tensors on meta.

        A padding mask with zeros becomes the dense mask that transformers makes of it.

        Raises:
            InputError: an argument is neither tensors nor plain values, such as a cache, which a step would change.
        """
        for leaf in tree_leaves((self.args, dict(self.kwargs))):
            if not isinstance(leaf, _PLAIN) or (isinstance(leaf, torch.Tensor) and type(leaf) not in _TENSORS):
                raise InputError(f"the model is given a {type(leaf).__name__}")
        kwargs = dict(self.kwargs)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta and not bool(mask.all()):
            kwargs["attention_mask"] = _dense_mask(*mask.shape)
        args, kwargs = tree_map(_without_values, (tuple(self.args), kwargs))
        return Call(args, kwargs, self.has_gradient)

    def trained_in(self) -> bool:
        """Return False: the model stays in its mode."""
        return False

    def backward(self, model: Any) -> None:
        """Run the forward, and the backward of the loss, or of all results if the job computes the loss itself."""
        with torch.set_grad_enabled(self.has_gradient):
            result = model(*self.args, **self.kwargs)
        if not self.has_gradient:
            return
        loss = getattr(result, "loss", None)
        leaves = tree_leaves(dict(result) if isinstance(result, Mapping) else result) if loss is None else [loss]
        slopes = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.backward(slopes, [torch.empty_like(x) for x in slopes])


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


def _without_values(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, device=_META).requires_grad_(value.requires_grad)


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


def step(model: Any, batch: Batch | Call, *, adamw: bool = True) -> None:
    """Take a training step of a model on meta, with or without the step of ``tilekern.AdamW``."""
    with torch.enable_grad():
        batch.backward(model)
    graded = [x for x in model.parameters() if x.grad is not None]
    if adamw and graded:
        AdamW(graded).step()
    model.zero_grad()


def step_as_it_is(model: torch.nn.Module, batch: Batch | Call, *, adamw: bool = True) -> None:
    """Take a training step of a model on any device, patched or not, with meta tensors instead of its own.

    The model is not changed. Wrappers (torch.compile, DistributedDataParallel) are ignored, and so are compiled layers.
    A model with sharded parameters (FSDP) is created again from its configuration.

    Raises:
        InputError: the model has no configuration, or its step cannot be taken on meta tensors.
    """
    core = core_of(model)
    try:
        with _nothing_compiled():
            if any(map(is_sharded, core.parameters())):
                step(_made_again(core), batch, adamw=adamw)
            else:
                _step_in_place(core, batch, adamw)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(core).__name__} cannot be stepped on meta tensors: {one_line(error)}; run its step inside "
            "tilekern.trace() yourself"
        ) from error


def _nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """Have compiled modules run as Python; without torch's compiler, whose import takes a second, there are none."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def core_of(model: torch.nn.Module) -> Any:
    """Return the outermost module that has a configuration, as transformers' and PEFT's models have.

    Raises:
        InputError: no module has one.
    """
    whole = getattr(model, "_orig_mod", model)
    for module in whole.modules():
        if has_config(module):
            return getattr(module, "_orig_mod", module)
    raise InputError(
        f"{type(whole).__name__} has no configuration, so what its step is given is not known; run the step inside "
        "tilekern.trace()"
    )


def has_config(module: torch.nn.Module) -> bool:
    """Return whether a module has a configuration, as transformers' and PEFT's models have."""
    return hasattr(getattr(module, "config", None), "to_dict")


def one_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    said = str(error).strip().splitlines()
    return (said or [type(error).__name__])[0][:200]


def _step_in_place(model: torch.nn.Module, batch: Batch | Call, adamw: bool) -> None:
    whole = _Step(model, adamw)
    named = (*whole.named_parameters(), *whole.named_buffers())
    tensors = {name: torch.empty(x.shape, dtype=x.dtype, device=_META) for name, x in named}
    for name, x in whole.named_parameters():
        tensors[name].requires_grad_(x.requires_grad)
    with _training(model) if batch.trained_in() else contextlib.nullcontext():
        torch.func.functional_call(whole, tensors, (batch,))


class _Step(torch.nn.Module):
    """A step as one call: its backward, which may run a forward again, then has the same parameters."""

    def __init__(self, model: torch.nn.Module, adamw: bool) -> None:
        super().__init__()
        self.model, self.adamw = model, adamw

    def forward(self, batch: Batch | Call) -> None:
        step(self.model, batch, adamw=self.adamw)


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
