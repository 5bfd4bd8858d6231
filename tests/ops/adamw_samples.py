"""Parameters, gradients and training for the tests of tilekern.AdamW."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilekern.runtime.dispatch import counters

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL = "adamw"


def parameters(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def twins(params, dtype=None):
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def give_gradients(step, *groups):
    """The same gradients to the parameters of each list, in their dtypes and where they are."""
    for number, same in enumerate(zip(*groups, strict=True)):
        generator = torch.Generator().manual_seed(1000 * step + number)
        grad = torch.randn(same[0].shape, generator=generator).to(same[0].dtype)
        for p in same:
            p.grad = grad.to(p, copy=True)


def train(steps, *pairs, first=0):
    """Give the same gradients to every (optimizer, parameters) and let it step."""
    for number in range(first, first + steps):
        give_gradients(number, *(params for _, params in pairs))
        for optimizer, _ in pairs:
            optimizer.step()


def error(params, exact):
    """The norm of the error of all parameters together."""
    pairs = zip(params, exact, strict=True)
    return math.sqrt(sum(float((p.detach().double() - q.detach()).square().sum()) for p, q in pairs))


def launches():
    return counters(KERNEL).launches


class FusedCalls(TorchDispatchMode):
    """Notes the dtype, the numbers of elements and the count of each call of torch's fused step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._fused_adamw_:
            params, *_, steps = args
            assert len({id(step) for step in steps}) == 1
            self.seen.append((params[0].dtype, [p.numel() for p in params], float(steps[0])))
        return func(*args, **(kwargs or {}))
