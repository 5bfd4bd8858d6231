"""``tilekern.graphed``: a model whose steps are replayed from CUDA graphs, once a form of them was seen.

A step of a small model takes the host longer than the GPU. A replay takes the host one call, whatever the model's size.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilekern.errors import InputError
from tilekern.ops.packing import LastReads, is_capturing
from tilekern.ops.registration import modes, transforms
from tilekern.patch import padding
from tilekern.patch.captured import CAPTURE_FAILED, Call, CapturedStep, Refused, Room, exchanged, inside, is_inside
from tilekern.patch.context_parallel import SDPA, shards_here
from tilekern.patch.guards import has_global_hooks, is_sharded, require_module
from tilekern.patch.positions import look
from tilekern.patch.token_graphs import Token, TokenStep
from tilekern.runtime import dispatch
from tilekern.runtime.switches import ATTENTIONS
from tilekern.warning import warn_once

_Step = TypeVar("_Step")
# Steps of a form that run eagerly before it is captured: they look up kernels and fill torch's own caches.
EAGER_STEPS = 2
# Forms that are remembered until they are captured.
_MOST_SEEN = 1024
# Changes of a model that are followed; capturing anew takes as long as some steps.
_MOST_LOSSES = 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Dictionaries of modules: their parts, and the factors of PEFT's adapters.
_PARTS = ("_modules", "_parameters", "_buffers", "scaling")
# The modules of hooks that a replay need not call, since their work is in the graph: embeddings that require a gradient
# for PEFT, and hidden states that become results.
_HARMLESS = {"transformers.modeling_utils", "transformers.utils.output_capturing"}
# Attributes of modules that change what their forward computes, beside parts, parameters and buffers.
_SWITCHES = ("training", "forward", "gradient_checkpointing", "p", "_disable_adapters", "_active_adapter")


def graphed(model: torch.nn.Module, *, lengths: Iterable[int] | None = None, most: int = 8) -> torch.nn.Module:
    """Let a model replay its training steps from CUDA graphs.

    A call in training mode with gradients is captured, forward and backward, when its form comes for the third time:
    the shapes and dtypes of its tensors, and its other arguments. Calls of other forms run as they are, and so does
    evaluation. In generation a step of one token after a static cache is captured likewise, for each cache. Losses,
    gradients and logits are bit by bit those of the eager step. Optimizer, clipping and
    everything else between two calls stays outside of the graphs, and so do hooks of parameters.

    A call runs as it is, counted with its reason, if one of these holds:

    - positions neither count up from 0 in each row nor show the sequences packed in one row, for attention "tilekern"
    - it comes before the backward of the last captured call
    - something in the step waits for the GPU, changes buffers, or draws random numbers of the host or in a checkpoint
    - the forward changes attributes of modules, parameters or arguments, as counters and caches do
    - a module has hooks, or a parameter is sharded
    - the model is on several GPUs, torch.compile runs it, or the allocator is not torch's own

    :func:`tilekern.report` shows the counts. A model that changed (its mode, its parts, its parameters' places, the
    patches in force) is captured anew.

    Args:
        model: a model on one CUDA GPU; patched or not, wrapped by PEFT or not. It is changed in place.
        lengths: lengths to which batches [rows, tokens] with labels are padded at their right, so that few forms come;
            for causal models whose loss leaves padding out. None pads nothing.
        most: the most forms that are captured; those of one model share their memory.

    Returns:
        The model.

    Raises:
        InputError: ``model`` is not a module, ``lengths`` has no positive numbers, or ``most`` is not positive.
    """
    require_module("graphed", model)
    known = sorted(set(lengths)) if lengths is not None else []
    if (lengths is not None and not known) or any(type(x) is not int or x < 1 for x in known):
        raise InputError(f"graphed: lengths must be positive numbers of tokens, got {lengths}")
    if type(most) is not int or most < 1:
        raise InputError(f"graphed: most must be a positive number, got {most!r}")
    _put_place(type(model))
    _give(model, Graphs(model, known, most))
    return model


def ungraphed(model: torch.nn.Module) -> None:
    """Let a model and the models inside it run eagerly again, and drop their graphs."""
    for module in model.modules():
        vars(module).pop(_NAME, None)


def graphs_of(model: torch.nn.Module) -> dict[str, Graphs]:
    """Return the graphs of a model and of the models inside it, by their paths."""
    return {name: found for name, module in model.named_modules() if (found := graphs_of_instance(module)) is not None}


class Graphs:
    """The captured steps of one model.

    Attributes:
        replays: steps that were replayed.
        first: calls of steps that ran eagerly because their form was new.
        reasons: why other calls of steps ran eagerly, and how often.
        cache: the static cache of the last generation, for the next one; a training step frees its memory.
    """

    cache: Any = None

    def __init__(self, model: torch.nn.Module, lengths: Sequence[int] = (), most: int = 8) -> None:
        self._model, self._lengths, self._most = weakref.ref(model), lengths, most
        parameters = inspect.signature(model.forward).parameters
        self._names = list(parameters)
        self._takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        self._steps: dict[Any, CapturedStep] = {}
        self._tokens: weakref.WeakKeyDictionary[Any, dict[Any, TokenStep]] = weakref.WeakKeyDictionary()  # by caches
        self._plans: object = None
        self._losses = 0  # how often captured steps were lost to a change
        self._seen: Counter[Any] = Counter()
        self._refused: dict[Any, str] = {}
        self._missed: dict[Any, str] = {}  # what a replay would miss, by forms
        self._watched: Any = None  # the form whose last eager call before its capture comes now
        self._facts: _Facts | None = None
        self._room: Room | None = None
        self.replays = self.first = 0
        self.reasons: Counter[str] = Counter()

    @property
    def captured(self) -> int:
        """The number of forms that are captured."""
        return len(self._steps) + sum(map(len, self._tokens.values()))

    def __str__(self) -> str:
        """Return the counts in a line."""
        counts = [("a new form", self.first), *self.reasons.most_common()]
        eager = [f"{number} x {reason}" for reason, number in counts if number]
        said = f"{self.captured} form{'s' * (self.captured != 1)} captured, {self.replays} replays"
        return f"{said}; eager: {', '.join(eager)}" if eager else said

    def of(self, module: torch.nn.Module) -> Graphs:
        """Return graphs of a module around this model, for the same lengths and number of forms."""
        return Graphs(module, self._lengths, self._most)

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return whether these are the graphs of a module, and not of the one that it is a copy or a replica of."""
        return self._model() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a model has no graphs."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        model = self._model()
        assert model is not None  # the module that is called
        if is_inside() or is_traced() or model.training != torch.is_grad_enabled():
            return model._call_impl(*args, **kwargs)
        if not model.training:
            return self._decode(model, args, kwargs)
        self.cache = None
        with inside():
            try:
                found = self._step(model, {**dict(zip(self._names, args, strict=False)), **kwargs})
                self.first += found is None
            except Refused as error:
                self.reasons[str(error)] += 1
                found = None
            if found is None:
                return self._eager(model, args, kwargs)
            step, call = found
            self.replays += 1
            return step(call)

    def _decode(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a model that generates: a step of one token after a static cache is replayed."""
        token = step = None
        with inside():
            try:
                token = Token.of({**dict(zip(self._names, args, strict=False)), **kwargs})
                step = None if token is None else self._token_step(model, token)
                self.first += token is not None and step is None
            except Refused as error:
                self.reasons[str(error)] += 1
            if token is None or step is None:
                return self._eager(model, args, kwargs)
            self.replays += 1
            return step(token)

    def _token_step(self, model: torch.nn.Module, token: Token) -> TokenStep | None:
        """Return the captured step of one token, captured now if it is time; None while its form is new.

        Raises:
            Refused: this call runs as it is.
        """
        room = self._room_of(model)
        steps = self._tokens.setdefault(token.cache, {})
        key = token.key, _settings(room.device.type)
        if key not in steps:
            if self._is_new(key):
                return None
            steps[key] = self._captured(lambda: TokenStep(model, token, room), model, key)
        return steps[key]

    def _eager(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model as it is; the last such call of a new form shows whether a replay would miss something."""
        key, self._watched = self._watched, None
        if key is None:
            return model._call_impl(*args, **kwargs)
        before = _State(model, (*args, *kwargs.values()))
        try:
            result = model._call_impl(*args, **kwargs)
        except BaseException:
            self._seen[key] -= 1
            raise
        if reason := before.change():
            self._missed[key] = str(self._said(model, reason))
        return result

    def _step(self, model: torch.nn.Module, arguments: dict[str, Any]) -> tuple[CapturedStep, Call] | None:
        """Return the captured step of a call, captured now if it is time; None while its form is new.

        Raises:
            Refused: this call runs as it is.
        """
        room = self._room_of(model)
        if self._facts is not None and not self._facts.is_trained:
            raise self._said(model, "no parameter requires a gradient")
        arguments = _without_what_says_nothing(_with_plain_numbers(arguments, room.device))
        arguments = self._with_starts(model, self._padded(arguments))
        if "labels" in arguments and (self._takes_any or "use_cache" in self._names):
            # A model that trains makes no cache of keys and values unless it is asked for one.
            arguments = {"use_cache": False, **arguments}
        call = Call.of(arguments)
        for name, x in call.tensors.items():
            if x.device != room.device:
                raise Refused(f"the argument {name} on {x.device}")
        is_behind = _pads_behind(model, arguments)
        key = call.key, _settings(room.device.type), is_behind
        step = self._steps.get(key)
        if step is None and self._is_new(key):
            return None
        if room.is_taken:
            raise Refused("it came before the backward of the last captured call")
        if step is None:
            with exchanged(padding, "is_behind_in_graph", is_behind):
                step = self._steps[key] = self._captured(lambda: CapturedStep(model, call, room), model, key)
        return step, call

    def _room_of(self, model: torch.nn.Module) -> Room:
        """Return the memory of the model's graphs, without any if the model or its plans have changed."""
        plans = _plans.setdefault("now", object())
        if self._facts is None or plans is not self._plans or not self._facts.hold():
            self._facts, self._plans = _Facts(model), plans
            self._losses += bool(self._steps)
            self._steps.clear()
            self._tokens.clear()
            self._refused.clear()
            self._room = None if self._facts.device is None else Room(self._facts.device)
        if self._losses > _MOST_LOSSES:
            raise self._said(model, "it changes too often, as if its parameters moved in each step")
        if self._facts.refusal or self._room is None:
            raise self._said(model, self._facts.refusal)
        return self._room

    def _is_new(self, key: Any) -> bool:
        """Return whether a form still has to run eagerly.

        Raises:
            Refused: it is not captured.
        """
        for refused in (self._missed, self._refused):
            if key in refused:
                raise Refused(refused[key])
        if self._seen[key] < EAGER_STEPS:
            if len(self._seen) > _MOST_SEEN:
                self._seen.clear()
            self._seen[key] += 1
            self._watched = key if self._seen[key] == EAGER_STEPS else None
            return True
        if self.captured >= self._most:
            raise Refused(f"more than {self._most} forms; lengths= pads batches to few")
        return False

    def _captured(self, capture: Callable[[], _Step], model: torch.nn.Module, key: Any) -> _Step:
        assert self._facts is not None
        try:
            return capture()
        except Refused as error:
            reason = self._refused[key] = str(error)
            if reason.startswith(CAPTURE_FAILED):
                self._facts.refusal = reason  # the allocator may still think that the capture goes on
            raise self._said(model, reason) from None

    def _said(self, model: torch.nn.Module, reason: str) -> Refused:
        warn_once(f"graphed: {type(model).__name__} runs eagerly: {reason}")
        return Refused(reason)

    def _padded(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with their tokens padded to the next of the lengths.

        No token sees a later one, so those of padding change nothing but their own results, and labels of -100 leave
        these out of the loss. A mask that hides tokens at the right alone says no more than that, and goes. In a packed
        row padding is one more sequence.
        """
        ids, labels, positions = (arguments.get(name) for name in ("input_ids", "labels", "position_ids"))
        if not self._lengths or ids is None or labels is None or ids.dim() != 2 or labels.shape != ids.shape:
            return arguments
        tokens = ids.shape[1]
        place = bisect_left(self._lengths, tokens)
        if place == len(self._lengths):
            raise Refused(f"more tokens than {self._lengths[-1]}, the longest of lengths=")
        mask, room = arguments.get("attention_mask"), self._lengths[place] - tokens
        left_out, by_rows = {"attention_mask"}, ["input_ids", "labels"]
        if positions is not None and ids.shape[0] == 1 and positions.shape == ids.shape:
            left_out |= _STARTS  # they are found again, with that of the new sequence
            alike = ((name, arguments.get(name)) for name in ("position_ids", "seq_idx"))
            by_rows += [name for name, x in alike if isinstance(x, Tensor) and x.shape == ids.shape]
        arguments = {name: x for name, x in arguments.items() if name not in left_out}
        unknown = [
            name for name, x in arguments.items() if isinstance(x, Tensor) and x.dim() > 0 and name not in by_rows
        ]
        if unknown and room:
            raise Refused(f"lengths= cannot pad {unknown[0]}")
        if mask is not None and not _hides_padding_alone(mask, labels):
            raise Refused("a mask that hides more than padding at the right")
        return arguments | {name: _FURTHER[name](arguments[name], room) for name in by_rows if room}

    def _with_starts(self, model: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with the starts of the sequences that positions show, which no graph can look for.

        Further sequences, without tokens, make their number a round one.

        Raises:
            Refused: positions are odd, or nothing passes the starts on to tilekern's attention.
        """
        positions = arguments.get("position_ids")
        if positions is None or arguments.get("cu_seq_lens_q") is not None:
            return arguments
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        is_row = isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[0] == 1
        is_served = attention in ATTENTIONS and self._takes_any and "attention_mask" not in arguments
        found = look(positions) if is_row and is_served else None
        if found is None:
            raise Refused("positions that do not count up from 0 in each row")
        count = max(_FEWEST_SEQUENCES, 1 << (len(found.starts) - 2).bit_length())
        starts = torch.nn.functional.pad(found.starts, (0, count + 1 - len(found.starts)), value=positions.shape[1])
        lengths = dict.fromkeys(("max_length_q", "max_length_k"), found.longest)
        return {**arguments, **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts), **lengths}


def _pads_behind(model: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether the mask hides only padding behind the tokens, so that attention "tilekern" needs none."""
    mask, attention = (
        arguments.get("attention_mask"),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    )
    if attention not in ATTENTIONS or not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    found = padding.padding_of(mask)
    return found is not None and found.is_behind


# Rows [rows, tokens] with some tokens more, which are a sequence of their own in a packed row.
_FURTHER: dict[str, Callable[[Tensor, int], Tensor]] = {
    "input_ids": lambda x, room: torch.nn.functional.pad(x, (0, room)),
    "labels": lambda x, room: torch.nn.functional.pad(x, (0, room), value=-100),
    "position_ids": lambda x, room: torch.cat([x, torch.arange(room, dtype=x.dtype, device=x.device)[None]], 1),
    "seq_idx": lambda x, room: torch.cat([x, (x[:, -1:] + 1).expand(1, room)], 1),
}


def _with_plain_numbers(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return arguments with the batch's number of labels as a tensor: it differs in each step."""
    count = arguments.get("num_items_in_batch")
    if type(count) in (int, float):
        dtype = torch.int64 if type(count) is int else torch.float32
        arguments = {**arguments, "num_items_in_batch": torch.full((), count, dtype=dtype, device=device)}
    elif isinstance(count, Tensor) and count.is_cpu and device.type != "cpu":
        arguments = {**arguments, "num_items_in_batch": torch.full((), count.item(), dtype=count.dtype, device=device)}
    return arguments


# Whether positions count up.
_counted = LastReads[bool]()


def _without_what_says_nothing(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without a mask of ones and positions that count up, which a model takes for granted."""
    said = {name: x for name, x in arguments.items() if x is not None or name not in _SAY_NOTHING}
    for name in _SAY_NOTHING:
        x = said.get(name)
        if isinstance(x, Tensor) and x.dim() == 2 and (_is_whole if name == "attention_mask" else _counts_up)(x):
            del said[name]
    return said


def _is_whole(mask: Tensor) -> bool:
    found = padding.padding_of(mask)  # as :func:`_pads_behind` asks for it, so that one wait serves both
    return found is not None and found.is_none


def _counts_up(x: Tensor) -> bool:
    return _counted.of(
        x, lambda: bool((x == torch.arange(x.shape[1], dtype=torch.int64, device=x.device)).all().item())
    )


def _hides_padding_alone(mask: Tensor, labels: Tensor) -> bool:
    """Return whether a mask [rows, tokens] hides tokens at the right of rows alone, none with a label."""
    if mask.shape != labels.shape:
        return False
    shown = mask.bool()
    return bool(((shown[:, :-1] | ~shown[:, 1:]).all() & (shown | (labels == -100)).all()).item())


_SAY_NOTHING = ("attention_mask", "position_ids")
_STARTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
# Numbers of packed sequences are rounded up to a power of two, and at least to this, so that few forms come.
_FEWEST_SEQUENCES = 8


class _State:
    """What a call of a model can change beside making its result, and a replay would not: Python's side of a model."""

    def __init__(self, model: torch.nn.Module, arguments: Iterable[Any]) -> None:
        self._model, self._arguments = model, [x for x in arguments if isinstance(x, Tensor)]
        self._alive: list[Any] = []  # so that no new object gets the address of an old one
        self._before = self._now()

    def change(self) -> str:
        """Return what has changed, as a reason to run eagerly; empty if nothing has."""
        now = self._now()
        return next((reason for reason in self._before | now if self._before.get(reason) != now.get(reason)), "")

    def _now(self) -> dict[str, Any]:
        numpy: Any = sys.modules.get("numpy")
        drawn = None if numpy is None else numpy.random.get_state()
        found: dict[str, Any] = {
            "random numbers of Python or numpy": (random.getstate(), drawn and (drawn[1].tobytes(), drawn[2])),
            "its parameters change in the forward": [self._mark(x) for x in self._model.parameters()],
            "its buffers change in training": [self._mark(x) for x in self._model.buffers()],
            "its arguments change in the forward": [self._mark(x) for x in self._arguments],
        }
        for number, module in enumerate(self._model.modules()):
            for name, value in vars(module).items():
                if name not in _PARTS:
                    reason = f"its forward changes {name} of {type(module).__name__}"
                    found.setdefault(reason, {})[number] = self._mark(value)
        return found

    def _mark(self, value: Any, depth: int = 2) -> Any:
        """Return what tells a value from another, and from itself after a change."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self._alive.append(value)
        if isinstance(value, Tensor):
            return id(value), None if value.is_inference() else value._version
        if isinstance(value, torch.Generator):
            return bytes(value.get_state().tolist())
        if isinstance(value, (list, tuple, set, dict)) and depth:
            members = chain.from_iterable(value.items()) if isinstance(value, dict) else value
            return id(value), [self._mark(x, depth - 1) for x in members]
        return id(value)


class _Facts:
    """What graphs of a model rest on beside a call's arguments: its modules, parameters, hooks and patches.

    They are looked at in each call, so nothing here loops in Python.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self._own = list(map(vars, self._modules))
        configs = {id(own["config"]): own["config"] for own in self._own if hasattr(own.get("config"), "__dict__")}
        self._parts = [own[name] for own in self._own for name in _PARTS if isinstance(own.get(name), dict)]
        self._parts += map(vars, configs.values())
        self._hooks = [own[name] for own in self._own for name in _HOOKS]
        self._switches = [(itemgetter(name), [own for own in self._own if name in own]) for name in _SWITCHES]
        self._kinds = list({type(module) for module in self._modules})
        self._parameters = list(model.parameters())
        self._numbers, self._objects = self._count(), [*self._look(), _END]
        devices = {x.device for x in self._parameters} | {x.device for x in model.buffers()}
        self.device = next(iter(devices)) if len(devices) == 1 else None
        self.refusal = self._refusal()
        self.is_trained = any(x.requires_grad for x in self._parameters)

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        try:
            return self._numbers == self._count() and all(map(is_, self._objects, chain(self._look(), [_END])))
        except KeyError:  # an attribute that is gone
            return False

    def _count(self) -> list[int]:
        """Return addresses of parameters and numbers of attributes and hooks."""
        numbers = chain(map(Tensor.data_ptr, self._parameters), map(len, self._own), map(len, self._hooks))
        return [*numbers, *map(_IS_TRAINED, self._parameters)]

    def _look(self) -> Iterator[Any]:
        """Return classes and their forwards, parts of modules, hooks, and switches."""
        switches = (map(get, owners) for get, owners in self._switches)
        forwards = [kind.forward for kind in self._kinds]
        values = chain.from_iterable(map(dict.values, chain(self._parts, filter(None, self._hooks))))
        return chain(forwards, map(type, self._modules), values, *switches)

    def _refusal(self) -> str:
        """Return why no step of the model can be captured; empty if some may."""
        hooked = next((module for module in self._modules if any(map(_is_missed, _hooks_of(module)))), None)
        wrapper = next((module for module in self._modules if isinstance(module, _WRAPPERS)), None)
        reasons = {
            f"{type(wrapper).__name__} works beside its module's forward: give the model inside it": bool(wrapper),
            "its parameters are on several devices": self.device is None,
            f"it is on the device {self.device}": self.device is not None and self.device.type not in DEVICES,
            "its parameters are sharded": any(map(is_sharded, self._parameters)),
            "the allocator keeps no memory for graphs": self.device is not None and not _has_pools(self.device),
            "hooks on all modules": has_global_hooks(),
            f"hooks on {type(hooked).__name__}": hooked is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


# Modules whose own Python prepares each step, and whose replicas of others do.
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    return chain.from_iterable(vars(module)[name].values() for name in _HOOKS)


def _is_missed(hook: Any) -> bool:
    """Return whether a hook must run in each step, so that replays would miss it."""
    return getattr(hook, "__module__", "") not in _HARMLESS


def _has_pools(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.cuda.get_allocator_backend() == "native" and not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")


_IS_TRAINED, _END = attrgetter("requires_grad"), object()
# Devices whose work can be recorded.
DEVICES = ("cuda",)


def is_traced() -> bool:
    """Return whether something sees what a replay would hide.

    That is torch.compile, a capture of the caller's, a transform, a mode, hooks on saved tensors, or context
    parallelism.
    """
    if torch.nn.functional.scaled_dot_product_attention is not SDPA and shards_here() is not None:
        return True
    if torch.compiler.is_compiling() or is_capturing() or transforms() is not None or modes():
        return True
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


# Of torch's attention.
_BACK_ENDS = (
    torch._C._get_cudnn_sdp_enabled, torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
)  # fmt: skip


def _settings(kind: str) -> tuple[Any, ...]:
    """Return the process's settings that a captured step keeps as they were."""
    return (
        torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        *(is_enabled() for is_enabled in _BACK_ENDS),
    )  # fmt: skip


# The attribute that holds a model's graphs.
_NAME = "_tilekern_graphs"
# Emptied by dispatch when plans change; what graphs launch is of the plans of their time.
_plans: dict[str, object] = dispatch.memo()
# The models that have graphs.
_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def _give(model: torch.nn.Module, made: Graphs) -> Graphs:
    vars(model)[_NAME] = made
    _models.add(model)
    return made


def graphs_of_instance(module: torch.nn.Module) -> Graphs | None:
    """Return the graphs of a model itself, not of one inside it; None if it has none yet."""
    found = vars(module).get(_NAME)
    return found if isinstance(found, Graphs) and found.is_of(module) else None


class _Place:
    """Stands where torch keeps a module's compiled call, and finds the graphs of an instance.

    A module that is compiled in place has that call in its own dictionary, which comes first.
    """

    def __get__(self, module: torch.nn.Module | None, kind: type) -> Graphs | None:
        if module is None:
            return None
        found = graphs_of_instance(module)
        may_step = module.training or not torch.is_grad_enabled()
        if found is None and may_step and not is_inside() and any(x in _everywhere for x in kind.__mro__):
            inner = next(iter(graphs_of(module).values()), None)
            found = _give(module, Graphs(module) if inner is None else inner.of(module))
        return found


# Classes whose models have graphs without being asked: of :func:`stand_in`.
_everywhere: set[type] = set()
# The classes of models outside of which there is no other, by the modules that have them.
_KINDS = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}


def has_graphs(model: torch.nn.Module) -> bool:
    """Return whether a model's steps are replayed, because of :func:`graphed` or :func:`stand_in`."""
    return graphs_of_instance(model) is not None or any(kind in _everywhere for kind in type(model).__mro__)


def _put_place(kind: type) -> None:
    if not any(isinstance(vars(base).get("_compiled_call_impl"), _Place) for base in kind.__mro__):
        kind._compiled_call_impl = _Place()  # type: ignore[attr-defined]


def awaits(module: str) -> bool:
    """Return whether :func:`stand_in` is in force and a module brings a class that it is for."""
    return module in _KINDS and bool(_everywhere)


def stand_in(is_on: bool) -> None:
    """Let all models of transformers and PEFT have graphs as from :func:`graphed`, or no longer make any."""
    if not is_on:
        _everywhere.clear()
        return
    import transformers.modeling_utils  # noqa: F401

    for home, name in _KINDS.items():
        if home in sys.modules:
            kind = getattr(sys.modules[home], name)
            _put_place(kind)
            _everywhere.add(kind)


def put_back() -> None:
    """Undo :func:`stand_in` and :func:`graphed` for all models."""
    stand_in(False)
    for model in list(_models):
        ungraphed(model)


def places() -> list[str]:
    """Return the attributes that :func:`stand_in` has changed, if it is in force."""
    return sorted(f"{kind.__module__}.{kind.__qualname__}._compiled_call_impl" for kind in _everywhere)
