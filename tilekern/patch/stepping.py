"""Run a model's training step on meta tensors: forward, loss, backward and optimizer, with nothing computed.

Inside :func:`tilekern.trace`, it shows which problems a job of the model asks for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tilekern.errors import InputError
from tilekern.ops.adamw import AdamW
from tilekern.patch.bound_method import Bound
from tilekern.patch.guards import is_gathered, is_sharded
from tilekern.patch.padding import Padding, padding_of
from tilekern.patch.told import ToldMask
from tilekern.runtime.dispatch import is_invariant

_META = torch.device("meta")


@dataclass(frozen=True)
class Batch:
    """The inputs of a step: ``sequences`` of ``length`` tokens each.

    ``packed`` sequences follow one another in a batch of one, with ``cu_seq_lens_q`` etc., as transformers'
    ``DataCollatorWithFlattening`` makes them. With ``padded`` there is a mask that is more than causal; inside
    ``tilekern.invariant()`` it says where the padding is, as our own masks do then.
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
            found["attention_mask"] = _told_mask(*shape) if is_invariant() else _dense_mask(*shape)
        return found

    def backward(self, model: Any) -> None:
        """Run a forward and its backward."""
        loss = model(**self.inputs()).loss
        if loss is None:
            raise InputError("the model gives no loss for labels")
        loss.backward()


def _told_mask(sequences: int, length: int) -> torch.Tensor:
    """Return the mask of a batch whose first row begins with a token of padding."""
    runs = ((1, length), *[(0, length)] * (sequences - 1))
    return ToldMask.around(Padding(runs, length, _META), None, length, length)


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

        A padding mask that hides more than what stands behind the tokens becomes the dense mask that transformers makes
        of it.

        Raises:
            InputError: an argument is neither tensors nor plain values, such as a cache, which a step would change.
        """
        for leaf in tree_leaves((self.args, dict(self.kwargs))):
            if not isinstance(leaf, _PLAIN) or (isinstance(leaf, torch.Tensor) and type(leaf) not in _TENSORS):
                raise InputError(f"the model is given a {type(leaf).__name__}")
        kwargs = dict(self.kwargs)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta:
            padding = padding_of(mask)
            if padding is None or not padding.is_behind:
                kwargs["attention_mask"] = _dense_mask(*mask.shape)
        args, kwargs = tree_map(_without_values, (tuple(self.args), kwargs))
        return Call(args, kwargs, self.has_gradient)

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
    made = torch.empty(value.shape, dtype=value.dtype, device=_META, requires_grad=value.requires_grad)
    return torch.nn.Parameter(made, value.requires_grad) if type(value) is torch.nn.Parameter else made


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


class _Autocast:
    """``torch.is_autocast_enabled`` while a model runs on meta, where torch raises and older transformers ask.

    Traces of several threads share the replacement; the last one that ends takes it away.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._ask = threading.Lock(), 0, torch.is_autocast_enabled

    def _is_enabled(self, *device: str) -> bool:
        return device != (_META.type,) and self._ask(*device)

    @contextlib.contextmanager
    def off_on_meta(self) -> Iterator[None]:
        """Say inside the block, or the decorated function, that autocast is off on meta."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._ask, torch.is_autocast_enabled = torch.is_autocast_enabled, self._is_enabled
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    torch.is_autocast_enabled = self._ask


_AUTOCAST = _Autocast()


@_AUTOCAST.off_on_meta()
def step(model: Any, batch: Batch | Call, *, adamw: bool = True) -> None:
    """Take a training step of a model on meta, with or without the step of ``tilekern.AdamW``."""
    with torch.enable_grad():
        batch.backward(model)
    graded = [x for x in model.parameters() if x.grad is not None]
    if adamw and graded:
        AdamW(graded).step()
    model.zero_grad()


@_AUTOCAST.off_on_meta()
def score(model: Any, batch: Batch) -> None:
    """Run the forward of a batch of a model on meta up to the logits of all tokens, without labels or a gradient."""
    inputs = batch.inputs()
    del inputs["labels"]
    with torch.no_grad():
        model(**inputs)


@_AUTOCAST.off_on_meta()
def decode(model: Any, sequences: int, context: int, chunk: int | None = None) -> None:
    """Run a prompt of a model on meta, and one token after it of several sequences with such a prompt; no gradient.

    Args:
        model: the model.
        sequences: how many decode at once.
        context: tokens of a sequence, the new one included; at least 2.
        chunk: tokens of the prompt that are computed at once; None for all.
    """
    was_trained, cache = model.training, None
    model.eval()
    try:
        with torch.no_grad():
            prompt = torch.zeros((1, context - 1), dtype=torch.long, device=_META)
            for part in prompt.split(chunk or context, dim=1):
                # A cache of its own says that each chunk is another call, although it has the same shape.
                cache = model(input_ids=part, past_key_values=copy.copy(cache), use_cache=True).past_key_values
            assert cache is not None
            # Every kind of layer can be reordered, but not each repeated.
            cache.reorder_cache(prompt.new_zeros(sequences))
            model(input_ids=prompt.new_zeros((sequences, 1)), past_key_values=cache, use_cache=True)
    finally:
        model.train(was_trained)


def step_as_it_is(model: torch.nn.Module, batch: Batch | Call, *, adamw: bool = True) -> None:
    """Take a training step of a copy of a model on meta; the model may be on any device, patched or not.

    The model is not called. Wrappers (torch.compile, DistributedDataParallel) are ignored, and so are compiled layers.
    A model with sharded parameters (FSDP) is created again from its configuration.

    Raises:
        InputError: the model has no configuration, or its step cannot be taken on meta tensors.
    """
    on_copy(model, lambda one: step(one.train() if isinstance(batch, Batch) else one, batch, adamw=adamw))


def on_copy(model: torch.nn.Module, run: Callable[[torch.nn.Module], None]) -> None:
    """Run a function, such as :func:`decode`, on a copy of a model as :func:`step_as_it_is` does; raises as that."""
    core = core_of(model)
    try:
        with _nothing_compiled():
            is_whole = not is_gathered(core) and not any(map(is_sharded, core.parameters()))
            run(_copied(core) if is_whole else _made_again(core))
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


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model on meta.

    A forward may keep something in its module, and a hook may keep what it saw, as accelerate's do for the device to
    which a result goes back. So a step is never that of the job's own modules, and only hooks of transformers and PEFT
    run, which change what requires a gradient. All others do nothing, but are there, as patches avoid modules with
    hooks.
    """
    copies: dict[int, Any] = {id(x): _without_values(x) for x in model.parameters()}
    functions: list[tuple[FunctionType, FunctionType]] = []
    for module in model.modules():
        own = vars(module)
        for name in _HOOKS:
            copies[id(own[name])] = OrderedDict((key, _harmless(hook)) for key, hook in own[name].items())
        for name in _HOOKS_OF_STATES:
            copies[id(own[name])] = OrderedDict()
        if "_hf_hook" in own:
            copies[id(own["_hf_hook"])] = _NoHook()
        for value in own.values():
            _add_functions(value, copies, functions)
    with _WithoutValues():
        for value in {id(x): x for module in model.modules() for x in vars(module).values()}.values():
            if not isinstance(value, _COPIED) and not _can_copy(value, copies):
                copies[id(value)] = value
        copied = copy.deepcopy(model, copies)
        for function, made in functions:
            for cell, new in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # an empty cell
                    held = cell.cell_contents
                    new.cell_contents = copy.deepcopy(held, copies) if isinstance(held, _CALLABLE) else held
    return copied


class _WithoutValues(TorchFunctionMode):
    """Copies tensors to meta, however deep in an object they lie."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _without_values(args[0]) if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _add_functions(value: Any, copies: dict[int, Any], found: list[tuple[FunctionType, FunctionType]]) -> None:
    """Make a function anew that holds modules or methods of the model, with cells that are still empty.

    Python copies a function as itself, so that a forward that wraps another would call the other's own module.
    """
    if not isinstance(value, FunctionType) or value.__closure__ is None or id(value) in copies:
        return
    cells = tuple(CellType() for _ in value.__closure__)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    copies[id(value)] = made
    found.append((value, made))
    for cell in value.__closure__:
        with contextlib.suppress(ValueError):
            _add_functions(cell.cell_contents, copies, found)


def _can_copy(value: Any, copies: Mapping[int, Any]) -> bool:
    """Return whether Python can copy an object; locks, generators and groups of ranks are the job's own."""
    try:
        copy.deepcopy(value, dict(copies))
    except Exception:  # noqa: BLE001 (any class may raise anything)
        return False
    return True


_CALLABLE = (torch.nn.Module, MethodType, FunctionType, functools.partial, Bound)
# What is copied in one go: it may hold modules.
_COPIED = (*_CALLABLE, dict, list, tuple, set, torch.Tensor, *_PLAIN)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_STATES = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_STATELESS = ("transformers", "peft")


def _harmless(hook: Any) -> Any:
    home = getattr(hook, "__globals__", {}).get("__name__", "")
    return hook if home.split(".")[0] in _STATELESS else _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """Be a hook."""


class _NoHook:
    """A hook of accelerate that leaves everything as it is."""

    no_grad = False

    def pre_forward(self, _: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, _: Any, output: Any) -> Any:
        return output


def _made_again(model: Any) -> Any:
    """Return a new model from the configuration, which runs the patches of the model's classes."""
    if any(isinstance(own, Bound) for module in model.modules() for own in vars(module).values()):
        raise InputError(
            f"{type(model).__name__} was patched by itself and then sharded; call this before it is sharded"
        )
    dtype = next(x.dtype for x in model.parameters() if x.is_floating_point())
    return model_of(model.config, str(dtype).removeprefix("torch."), model.config._attn_implementation)
