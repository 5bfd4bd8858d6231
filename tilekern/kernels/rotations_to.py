"""Rotations of q and k, with a norm of each head or without, whose results have the dtype of q and k.

Under autocast over float32 q and k were made by products of a half type, angles and weights of norms are of float32,
and attention reads q and k in the half type again. The kernels are those of ``rope``, ``qk_norm_rope`` and
``qk_norm_rope_backward``, which compute in float32 and round each result once, as they store it: a config has the bits
of a rotation in float32 and a cast, and of a cast and a gradient, without the launches and passes over memory of the
casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilekern.kernels import qk_norm_rope, qk_norm_rope_backward, rope
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.normed_rotations import arrays_of_gradients, default_of_gradients, results
from tilekern.kernels.families.rotations import (
    GRADIENTS,
    HEADS_FIRST,
    TOKENS_FIRST,
    angles_of,
    arrays_of,
    drawn_angles_twice,
    spec,
)
from tilekern.spec import KernelSpec

_GENERAL = {"cut": qk_norm_rope.cut, "sizes": qk_norm_rope.SIZES, "flags": qk_norm_rope.FLAGS}


def _to(turn: KernelSpec, function: Any, arrays: Arrays, **more: Any) -> KernelSpec:
    """Return the spec of a rotation with other dtypes of arrays."""
    direction = next((end for end in ("_forward", "_backward") if turn.name.endswith(end)), "")
    made = spec(
        function, f"{turn.summary}, in the dtype of q and k", arrays, turn.reference, space=turn.space,
        module=__name__, **more,
    )  # fmt: skip
    return replace(made, name=f"{turn.name.removesuffix(direction)}_to{direction}")


def _forward(turn: KernelSpec, function: Any, given: Arrays, **more: Any) -> KernelSpec:
    arrays = arrays_of(TOKENS_FIRST, given, "dtype", "dtype")
    return _to(turn, function, arrays, default=turn.default, flops=7, dependent=True, **more)


def _backward(turn: KernelSpec, function: Any, given: Arrays, **more: Any) -> KernelSpec:
    arrays = arrays_of_gradients(given, "dtype")
    default: Callable[..., Any] = lambda problem, target: default_of_gradients(arrays, problem)  # noqa: E731
    return _to(turn, function, arrays, default=default, results=results, flops=16, dependent=True, **more)


FORWARD = _forward(qk_norm_rope.SPEC, qk_norm_rope.qk_norm_rope_forward, qk_norm_rope.GIVEN, angles=drawn_angles_twice)
BACKWARD = _backward(
    qk_norm_rope_backward.SPEC, qk_norm_rope_backward.qk_norm_rope_backward, qk_norm_rope.GIVEN,
    angles=drawn_angles_twice, cute=True,
)  # fmt: skip
GENERAL_FORWARD = _forward(
    qk_norm_rope.GENERAL, qk_norm_rope.qk_norm_rope_general_forward, qk_norm_rope.GENERAL_GIVEN, **_GENERAL
)
GENERAL_BACKWARD = _backward(
    qk_norm_rope_backward.GENERAL, qk_norm_rope_backward.qk_norm_rope_general_backward, qk_norm_rope.GENERAL_GIVEN,
    **_GENERAL,
)  # fmt: skip
_ANGLES = angles_of("batch", "tokens", "head_dim/2")
ROPE = _to(
    rope.SPEC, rope.rope, arrays_of(HEADS_FIRST, _ANGLES, "dtype", "dtype"), default=rope.SPEC.default,
    generic=rope.SPEC.generic, flags=("full", "inverse"), unrolls_lone=True, flops=3,
)  # fmt: skip
# The backward calls this.
ROPE_INVERSE = replace(ROPE, arrays=arrays_of(HEADS_FIRST, _ANGLES, "dtype", "dtype", GRADIENTS))

SPECS = (FORWARD, BACKWARD, GENERAL_FORWARD, GENERAL_BACKWARD, ROPE)
