"""Who is measured: tilekern and its peers, each with a call for every op that it has.

All calls take ``rms_norm(x, weight, eps)``, ``swiglu(gate, up)`` and ``rope(q, k, cos, sin)``, and all are what a user
of the peer calls. Liger's Triton back end is its default; its cuTile and CuTe DSL ones are what
``LIGER_KERNEL_IMPL=cutile`` and ``=cutedsl`` put in the default's place, imported from their modules so that all three
fit in one process. Two of Liger's habits overwrite what they are given: swiglu's backward writes gradients over gate
and up, and rope (Triton and cuTile) turns q, k and their gradients in place. The benchmark restores all arguments
before each call, outside of the timed region. Liger's RMSNorm backward may write dx over dy (its default, which Qwen3
gets) or fills a new dx with zeros first; both are measured, the default as ``liger-triton-inplace``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import formulas
from benchmarks.environment import version_of
from tilekern.errors import InputError

Call = Callable[..., Any]
OURS = "tilekern"
# Peers round more often than tilekern does, as the formulas that they replace do.
PEER_SLACK = 4.0


@dataclass(frozen=True)
class Provider:
    """A maker of ops: its name with its version, and its calls by the op's name."""

    name: str
    calls: Mapping[str, Call]

    @property
    def slack(self) -> float:
        """How many times tilekern's tolerance its errors may be."""
        return 1.0 if self.name == OURS else PEER_SLACK


def _tilekern() -> Provider:
    from tilekern import ops

    # As the patch for Qwen3 calls it: the model stores the same angles twice.
    rope = functools.partial(ops.rope, twice=True)
    return Provider(OURS, {"rms_norm": ops.rms_norm, "swiglu": ops.swiglu, "rope": rope})


def _eager() -> Provider:
    calls: dict[str, Call] = {"rms_norm": formulas.rms_norm, "swiglu": formulas.swiglu, "rope": formulas.rope}
    return Provider(f"torch {version_of('torch')}", calls)


def _compiled() -> Provider:
    import torch

    calls = {name: torch.compile(call, dynamic=False) for name, call in _eager().calls.items()}
    return Provider(f"torch.compile {version_of('torch')}", calls)


def _liger_triton() -> Provider:
    return _liger("liger-triton", "liger_kernel.ops")


def _liger_triton_inplace() -> Provider:
    norm = _liger("liger-triton-inplace", "liger_kernel.ops", in_place=True)
    return Provider(norm.name, {"rms_norm": norm.calls["rms_norm"]})


def _liger_cutile() -> Provider:
    return _liger("liger-cutile", "liger_kernel.ops.cutile.ops")


def _liger_cutedsl() -> Provider:
    return _liger("liger-cutedsl", "liger_kernel.ops.cutedsl.ops")


def _liger(name: str, package: str, *, in_place: bool = False) -> Provider:
    ops = importlib.import_module(package)
    norm, silu, rope = ops.LigerRMSNormFunction.apply, ops.LigerSiLUMulFunction.apply, ops.LigerRopeFunction.apply

    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        return norm(x, weight, eps, 0.0, "llama", in_place)

    return Provider(f"{name} {version_of('liger-kernel')}", {"rms_norm": rms_norm, "swiglu": silu, "rope": rope})


def _quack() -> Provider:
    from quack.rmsnorm import rmsnorm

    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        return rmsnorm(x, weight, eps=eps)

    return Provider(f"quack {version_of('quack-kernels')}", {"rms_norm": rms_norm})


LOADERS: Mapping[str, Callable[[], Provider]] = {
    OURS: _tilekern,
    "torch": _eager,
    "torch.compile": _compiled,
    "liger-triton": _liger_triton,
    "liger-triton-inplace": _liger_triton_inplace,
    "liger-cutile": _liger_cutile,
    "liger-cutedsl": _liger_cutedsl,
    "quack": _quack,
}


def load(names: Sequence[str], notes: list[str]) -> list[Provider]:
    """The providers of these names; a peer that cannot be imported is left out and noted.

    Raises:
        InputError: no such provider.
    """
    found = []
    for name in names:
        if name not in LOADERS:
            raise InputError(f"unknown provider {name!r}; known: {', '.join(LOADERS)}")
        try:
            found.append(LOADERS[name]())
        except Exception as error:
            if name == OURS:
                raise
            notes.append(f"{name} left out: {one_line(error)}")
    return found


def one_line(error: BaseException) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
