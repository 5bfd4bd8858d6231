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
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from tilekern.kernels.adamw import SPEC, flat_shape
from tilekern.ops.registration import Rows, viewed
from tilekern.runtime.dispatch import Plan, count_fallback, plan_for

Tensors = tuple[Tensor, ...]
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
        together: defaultdict[tuple[torch.device, torch.dtype, float], list[Tensors]] = defaultdict(list)
        launches: list[tuple[Plan, float, Tensors]] = []
        steps: list[Tensor] = []
        counts: list[float] = []
        written: list[Tensor] = []
        rest: list[Tensors] = []
        for param, state in self._graded(group):
            tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
            parts = tensors if _PLAIN.issuperset(map(type, tensors)) else _shards(tensors)
            is_small = parts is not None and _goes_together(*parts)
            plan = None if parts is None or is_small else _plan_of(*parts)
            if parts is None or (plan is None and not is_small and parts[0].numel()):
                rest.append((*tensors, state["step"]))
                continue
            count = state["step"].item() + 1
            steps.append(state["step"])
            counts.append(count)
            if is_small:
                together[parts[0].device, parts[0].dtype, count].append(parts)
            elif plan is not None:
                launches.append((plan, count, parts))
            written += tensors[0], tensors[2], tensors[3]
            if parts is not tensors:
                written += parts[0], parts[2], parts[3]
        if rest:
            _fall_back(group, rest)
        scalars = {count: scalars_of(group, count) for count in set(counts)}
        for plan, count, parts in launches:
            _launch(plan, scalars[count], *parts)
        for (_, _, count), work in together.items():
            _step_together(group, count, work)
        if steps:
            # This takes a third of the host time of adding 1 to each.
            numbers = {count: torch.tensor(count, dtype=torch.float32, device="cpu") for count in scalars}
            torch._foreach_copy_(steps, [numbers[count] for count in counts])
            # Autograd does not see these changes, and must refuse a backward through the changed tensors.
            increment_version(written)

    def _graded(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the parameters that have a gradient, with their states, which are created here."""
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError("AdamW takes no sparse gradients; use torch.optim.SparseAdam for such parameters")
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for name in _MOMENTS:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            yield param, state


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


def _shards(tensors: Tensors) -> Tensors | None:
    """Return this process's shards of DTensors, the gradient resharded like the parameter; None for other tensors.

    Under tensor or context parallelism the gradient of an embedding may be a partial sum, or be sharded differently
    from its weight. Torch's own step would redistribute it at each operation.
    """
    if not all(hasattr(x, "to_local") for x in tensors):
        return None
    param, grad, *moments = tensors
    if any(x.placements != param.placements for x in moments) or any(
        x.device_mesh != param.device_mesh for x in tensors
    ):
        return None
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    # The result of a collective may still be in flight.
    parts = tuple(x.wait() if hasattr(x, "wait") else x for x in (x.to_local() for x in (param, grad, *moments)))
    return parts if _PLAIN.issuperset(map(type, parts)) else None


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


def _step_together(group: dict[str, Any], count: float, work: Sequence[Tensors]) -> None:
    """Run torch's fused step number ``count`` for parameters of one device and dtype, each with its tensors."""
    params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*work, strict=True))
    beta1, beta2 = map(float, group["betas"])
    # The step only reads its number, so that one is enough.
    step = torch.full((), count, dtype=torch.float32, device=params[0].device)
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], [step] * len(params), lr=float(group["lr"]), beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=group["maximize"],
        grad_scale=None, found_inf=None,
    )  # fmt: skip


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


def _fall_back(group: dict[str, Any], rest: Sequence[tuple[Tensor, ...]]) -> None:
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
