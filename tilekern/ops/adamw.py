"""AdamW: torch's optimizer, with one in-place launch of the kernel ``adamw`` per large parameter and step.

Parameters of at most :data:`MOST_TOGETHER` elements on a GPU are updated together, by one call of torch's own fused
step for each group, device, dtype and number of the step. That is no fallback and not counted as one. They ask for no
plan, so such sizes are neither tuned nor missing (a step on meta tensors sorts as one on a GPU does).

The kernel does not depend on shapes: memory without gaps is passed as rows, whatever the order of the dimensions
(channels last, transposed), if the gradient and the moments have the parameter's layout. Others are copied into the
parameter's layout for the step, and results are copied back; so is a parameter with gaps. DTensors (FSDP2, tensor
parallelism) are updated shard by shard. Tensors that no kernel serves (CPU, dtypes other than bfloat16, float16 and
float32, a cache miss) go through torch's own AdamW, which counts as a fallback.

It is written by hand and not declared: an optimizer's step is not a function with results and gradients.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from tilekern.kernels.adamw import SPEC, flat_shape
from tilekern.ops.registration import Rows, viewed
from tilekern.runtime.dispatch import Plan, count_fallback, plan_for

Tensors = tuple[Tensor, ...]
# Parameters, gradients, first and second moments.
Columns = list[list[Tensor]]
# A step moves 14 bytes for an element of 16 bits: with so many elements it takes a GPU of 4 TB/s 15 us, less than a
# launch takes the host. For the 310 parameters of Qwen3-0.6B, of which one is larger, launches took the host of an H200
# 7.1 ms, and torch's fused step 2.0 ms.
MOST_TOGETHER = 1 << 22
_TOGETHER_IN = {torch.bfloat16, torch.float16, torch.float32}
# Extents are int32 in the kernel; only an odd number of elements can come near this bound.
_MOST_ROWS = (1 << 31) - 1
_PLAIN = {Tensor, torch.nn.Parameter}
# A model has few different parameter sizes and needs each one's shape twice per step.
_rows_of = functools.lru_cache(maxsize=4096)(flat_shape)
# A step asks these of hundreds of tensors: `map` takes half the host time of a loop.
_grad, _layout, _dtype, _is_on_gpu = map(attrgetter, ("grad", "layout", "dtype", "is_cuda"))
_STRIDED = {torch.strided}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_OWN_WAY = "this optimizer has an implementation of its own; leave it out"
_REFUSED = {
    "amsgrad": "the kernel has no such variant; use torch.optim.AdamW",
    "capturable": "the host computes the bias corrections; leave it out, or use torch.optim.AdamW in CUDA graphs",
    "differentiable": "a kernel's step has no gradient; use torch.optim.AdamW",
    "foreach": _OWN_WAY,
    "fused": _OWN_WAY,
}
# Options of torch's implementations that are in state dicts but do not change the result of a step.
_IMPLEMENTATION = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


class AdamW(torch.optim.AdamW):
    """A drop-in for ``torch.optim.AdamW``: the same arguments and state dict, a step near the speed of a copy.

    A parameter of more than 2^22 elements is updated by a launch of tilekern's kernel. All smaller ones on a GPU are
    updated together, by torch's fused implementation, since a launch for each would take the host longer than the GPU.

    Each step computes in float32 and rounds the parameter and its moments once, to their dtypes, like torch's fused
    implementation. State dicts can be exchanged, fused ones included; ``step`` is a float32 tensor on the CPU.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch; tensors for ``lr`` and ``betas`` are on the CPU.
        amsgrad, foreach, capturable, differentiable, fused: only for torch's signature; none may be True.

    Raises:
        ValueError: an option is not supported, torch refuses a value, or ``lr`` or ``betas`` are tensors on a GPU,
            which the host would wait for at every step.
    """

    _living: ClassVar[weakref.WeakSet[AdamW]] = weakref.WeakSet()
    # A GradScaler then divides the gradients itself, and skips steps with infinite gradients.
    _step_supports_amp_scaling = False

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
    ) -> None:  # fmt: skip
        _check({"lr": lr, "betas": betas, "amsgrad": amsgrad, "foreach": foreach, "fused": fused})
        _check({"capturable": capturable, "differentiable": differentiable})
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self._living.add(self)

    @classmethod
    def steps(cls, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether such an optimizer of this process has one of some parameters."""
        groups = [group for optimizer in list(cls._living) for group in optimizer.param_groups]
        own = {id(param) for group in groups for param in group["params"]}
        return bool(own) and not own.isdisjoint(map(id, parameters))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, like torch.

        Raises:
            ValueError: as in the constructor.
        """
        if isinstance(param_group, dict):
            _check(param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _check({"amsgrad": group.get("amsgrad")})
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(_IMPLEMENTATION)
            group["lr"] = _on_host(group["lr"])
            group["betas"] = tuple(map(_on_host, group["betas"]))
            for param in group["params"]:
                if "step" in self.state.get(param, ()):
                    self.state[param]["step"] = _on_host(self.state[param]["step"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients again.

        Returns:
            The result of ``closure``, or None.

        Raises:
            RuntimeError: a gradient is sparse, a CUDA graph is being captured, or ``grad_scale`` or ``found_inf`` is
                set, which only torch's fused implementation reads.
            ValueError: a group has an option that is not supported, or a tensor on a GPU for ``lr`` or ``betas``.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AdamW.step cannot be captured in a CUDA graph, since the host computes its bias corrections; call it "
                "after the graph's replay, or use torch.optim.AdamW(..., capturable=True)"
            )
        for group in self.param_groups:
            _check(group)
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            raise RuntimeError("AdamW takes gradients that are unscaled: leave grad_scale and found_inf to GradScaler")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    @torch._disable_dynamo
    def _step_group(self, group: dict[str, Any]) -> None:
        whole, steps = self._graded(group)
        if not steps:
            return
        parts: Columns = whole if _are_plain(*whole[:2]) else [list(x) for x in zip(*map(_shards, *whole), strict=True)]
        counts = [count + 1 for count in map(Tensor.item, steps)]

        def step_each(places: list[int]) -> None:
            _step_each(group, [(counts[n], [x[n] for x in (*whole, steps)], [x[n] for x in parts]) for n in places])

        small = _which_are_small(parts)
        step_each([place for place, is_small in enumerate(small) if not is_small])
        for count, places, work in _calls(small, counts, parts):
            try:
                _step_together(group, count, *work)
            except RuntimeError:
                # Torch checks that the tensors are alike before it changes any.
                fit = list(map(_goes_together, *work))
                if all(fit):
                    raise
                step_each([place for place, fits in zip(places, fit, strict=True) if not fits])
                if any(fit):
                    _step_together(group, count, *_chosen(fit, *work))
        # This takes a third of the host time of adding 1 to each.
        numbers = {count: torch.tensor(count, dtype=torch.float32, device="cpu") for count in set(counts)}
        torch._foreach_copy_(steps, [numbers[count] for count in counts])
        # Autograd does not see these changes, and must refuse a backward through the changed tensors.
        for params, _, *moments in (whole,) if parts is whole else (whole, parts):
            for changed in (params, *moments):
                increment_version(changed)

    def _graded(self, group: dict[str, Any]) -> tuple[Columns, list[Tensor]]:
        """Return parameters with a gradient, the gradients and both moments, and the steps; states are created here."""
        params, grads = group["params"], list(map(_grad, group["params"]))
        graded = [grad is not None for grad in grads]
        if not all(graded):
            params, grads = _chosen(graded, params, grads)
        if not _STRIDED.issuperset(map(_layout, grads)):
            raise RuntimeError("AdamW takes no sparse gradients; use torch.optim.SparseAdam for such parameters")
        states = list(map(self.state.__getitem__, params))
        for param, state in () if all(states) else zip(params, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for name in _MOMENTS:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        steps, *moments = ([state[name] for state in states] for name in ("step", *_MOMENTS))
        return [params, grads, *moments], steps


def _check(options: dict[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if options.get(name):
            raise ValueError(f"AdamW: {name}=True is not served: {why}")
    for name, values in (("lr", (options.get("lr"),)), ("betas", options.get("betas", ()))):
        for value in values:
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise ValueError(
                    f"AdamW: {name} is a tensor on {value.device}, which the host would wait for at every step; "
                    "give a float or a tensor on the CPU"
                )


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _chosen(are_chosen: Sequence[bool], *columns: Iterable[Any]) -> list[list[Any]]:
    return [list(compress(column, are_chosen)) for column in columns]


def _are_plain(*columns: Iterable[Tensor]) -> bool:
    return all(_PLAIN.issuperset(map(type, column)) for column in columns)


def _shards(*tensors: Tensor) -> Sequence[Tensor]:
    """Return this process's shards of DTensors, the gradient resharded like the parameter; others stay as they are.

    Under tensor or context parallelism the gradient of an embedding may be a partial sum, or be sharded differently
    from its weight. Torch's own step would redistribute it at each operation.
    """
    try:
        place, grad_place, *places = [(x.device_mesh, x.placements) for x in tensors]
    except AttributeError:
        return tensors
    if places != [place, place] or grad_place[0] != place[0]:
        return tensors
    param, grad, *moments = tensors
    if grad_place != place:
        grad = grad.redistribute(*place)
    # For a parameter, `to_local` makes a view of this, which takes as long as all the rest.
    parts = [x._local_tensor for x in (param, grad, *moments)]
    # The result of a collective may still be in flight.
    return parts if _are_plain(parts) else [x.wait() if hasattr(x, "wait") else x for x in parts]


def _are_alike(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> bool:
    return (
        param.dtype == grad.dtype == exp_avg.dtype == exp_avg_sq.dtype
        and param.get_device() == grad.get_device() == exp_avg.get_device() == exp_avg_sq.get_device()
        and param.shape == grad.shape == exp_avg.shape == exp_avg_sq.shape
    )


def _goes_together(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> bool:
    """Return whether torch's fused step of many parameters takes this one: small, on a GPU, and as torch demands it.

    It demands one dtype, device, shape and strides of the four, and memory without gaps.
    """
    is_small = (param.is_cuda or param.is_meta) and 0 < param.numel() <= MOST_TOGETHER
    if not is_small or param.dtype not in _TOGETHER_IN or not _are_alike(param, grad, exp_avg, exp_avg_sq):
        return False
    if param.is_contiguous() and grad.is_contiguous() and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous():
        return True
    strides = param.stride()
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    is_one_layout = strides == grad.stride() == exp_avg.stride() == exp_avg_sq.stride()
    return is_one_layout and param.permute(order).is_contiguous()


def _which_are_small(parts: Columns) -> list[bool]:
    """Return which parameters go together; those on a GPU that are not alike are left to torch, which refuses them."""
    params = parts[0]
    if _are_plain(*parts[:2]) and all(map(_is_on_gpu, params)) and _TOGETHER_IN.issuperset(map(_dtype, params)):
        return [0 < elements <= MOST_TOGETHER for elements in map(Tensor.numel, params)]
    return [_are_plain(four) and _goes_together(*four) for four in zip(*parts, strict=True)]


def _calls(small: list[bool], counts: list[float], parts: Columns) -> Iterator[tuple[float, list[int], Columns]]:
    """Yield the calls of torch's fused step: the number of the step, the parameters' places, and their columns."""
    places, counts, *columns = _chosen(small, range(len(small)), counts, *parts)
    facts = (counts, list(map(Tensor.get_device, columns[0])), list(map(_dtype, columns[0])))
    if all(len(set(fact)) == 1 for fact in facts):
        yield counts[0], places, columns
        return
    calls: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for member, call in enumerate(zip(*facts, strict=True)):
        calls[call].append(member)
    for (count, *_), members in calls.items():
        its_places, *work = [[column[member] for member in members] for column in (places, *columns)]
        yield count, its_places, work


def _step_together(
    group: dict[str, Any], count: float, params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
) -> None:  # fmt: skip
    """Run torch's fused step number ``count`` for parameters of one device and dtype."""
    beta1, beta2 = map(float, group["betas"])
    # The step only reads its number, so that one is enough.
    step = torch.full((), count, dtype=torch.float32, device=params[0].device)
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], [step] * len(params), lr=float(group["lr"]), beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=group["maximize"],
        grad_scale=None, found_inf=None,
    )  # fmt: skip


def _step_each(group: dict[str, Any], work: Iterable[tuple[float, list[Tensor], list[Tensor]]]) -> None:
    """Launch the kernel for each parameter; torch's own step serves those that no kernel serves.

    Args:
        group: their options.
        work: the number of the step; the parameter, gradient, moments and step; shards of the first four.
    """
    launches: list[tuple[Plan, float, list[Tensor]]] = []
    rest: list[list[Tensor]] = []
    for count, whole, part in work:
        is_plain = _are_plain(part)
        plan = _plan_of(*part) if is_plain else None
        if plan is not None:
            launches.append((plan, count, part))
        elif not is_plain or part[0].numel():
            rest.append(whole)
    if rest:
        _fall_back(group, rest)
    scalars = {count: scalars_of(group, count) for count in {count for _, count, _ in launches}}
    for plan, count, part in launches:
        _launch(plan, scalars[count], *part)


def _plan_of(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Plan | None:
    """Return the plan of a parameter; None if torch must do the work, or if there is nothing to do."""
    elements = param.numel()
    is_expanded = not param.is_contiguous() and 0 in param.stride()
    # If others differ from the parameter, torch reports the error.
    if not elements or is_expanded or not _are_alike(param, grad, exp_avg, exp_avg_sq):
        return None
    rows, columns = _rows_of(elements)
    return plan_for(SPEC, param.device, rows, columns, param.dtype) if rows <= _MOST_ROWS else None


def _launch(
    plan: Plan, scalars: tuple[float, ...], param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    shape, device = _rows_of(param.numel()), param.get_device()
    copies: Sequence[Tensors] = ()
    if not (param.is_contiguous() and grad.is_contiguous() and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous()):
        (param, grad, exp_avg, exp_avg_sq), copies = _in_order(shape, param, grad, exp_avg, exp_avg_sq)
    elif param.shape != shape:
        see: Any = Rows if param.is_cuda else viewed
        param, grad, exp_avg, exp_avg_sq = (
            see(param, shape),
            see(grad, shape),
            see(exp_avg, shape),
            see(exp_avg_sq, shape),
        )
    plan.launch(device, param, grad, exp_avg, exp_avg_sq, *scalars, param, exp_avg, exp_avg_sq)
    for copy, original in copies:
        original.copy_(copy)


def _in_order(shape: tuple[int, int], *tensors: Tensor) -> tuple[Tensors, Sequence[Tensors]]:
    """Return tensors as rows, in the memory order of the first one's dimensions: views, or copies.

    Also return the pairs (copy, original) that must be copied back. The gradient, the second tensor, is never in a
    pair.
    """
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    ordered = tuple(x.permute(order) for x in tensors)
    rows = tuple(x.reshape(shape) for x in ordered)
    copied = [n for n in (0, 2, 3) if rows[n].data_ptr() != tensors[n].data_ptr()]
    return rows, [(rows[n].view(ordered[n].shape), ordered[n]) for n in copied]


def scalars_of(group: dict[str, Any], step: float) -> tuple[float, ...]:
    """Return the kernel's scalars for a parameter group's options at step number ``step``; the first step is 1."""
    lr, beta1, beta2 = float(group["lr"]), *map(float, group["betas"])
    root = math.sqrt(1 - beta2**step)
    return (
        -1.0 if group["maximize"] else 1.0,
        1 - lr * group["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step) * root,
        group["eps"] * root,
    )


def _fall_back(group: dict[str, Any], rest: Sequence[Sequence[Tensor]]) -> None:
    """Run torch's own step for each (parameter, gradient, moments, step); it also counts the steps."""
    for _ in rest:
        count_fallback(SPEC)
    params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*rest, strict=True))
    beta1, beta2 = group["betas"]
    adamw(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, foreach=group["foreach"], fused=group["fused"],
        has_complex=any(map(torch.is_complex, params)), amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
    )  # fmt: skip
