"""Rows that tell: their results show the last bit of their sums, which another order of the sum changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilekern.spec import KernelSpec, Problem
from tilekern.tuning.verify.adversarial import drawn
from tilekern.tuning.verify.axes import Axes, as_array, as_rows
from tilekern.tuning.verify.check import expected_results

# Of so many rows, or of those that have so many elements together, those are chosen that tell the most; and how many
# are.
_POOL, _POOLED, _TELLING = 4096, 1 << 26, 128
# The element of a row that is changed to find them.
_CHANGED = 5
# Added to one of thousands of numbers near 1, this changes their sum of squares, or of exponentials, as a whole.
# Results that are rounded on the way often hide a change by 1.
_MUCH = 64.0
# Powers of two by which numbers differ in size: squares of 16-bit numbers of one size have so few bits that float32
# adds up those of a head exactly, in any order.
_SIZES = 8
# A power of two whose sigmoid, and its kin by tanh, is 1 in float32.
_OPEN = 32.0


def cancelling(given: Mapping[str, Any], inner: int, *, biased: bool) -> dict[str, Any]:
    """Return the factors of a product whose second half of terms is the negative of the first half.

    With a bias this is so for half of the columns, whose bias is 0: the others show where it is added. The first term
    is 1 times 0, for :func:`open_gate`.
    """
    half, made = inner // 2, {}
    for array, sign in (("a", 1), ("x", 1), ("b", -1), ("weight", -1)):
        if array in given:
            made[array] = whole = given[array].clone()
            along = whole if whole.shape[-1] == inner else whole.mT
            changed = along.shape[-2] // 2 if biased and sign < 0 else along.shape[-2]
            along[..., 0] = float(sign > 0)
            along[..., :changed, half : 2 * half] = sign * along[..., :changed, :half]
    if biased:
        made["bias"] = given["bias"].clone()
        made["bias"][..., : made["bias"].shape[-1] // 2] = 0
    return made


def open_gate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a gate whose result is the product with ``weight``: its factor is of exactly :data:`_OPEN`.

    The activations of so large a number are that number.
    """
    weight = torch.zeros_like(given["weight"])
    weight[:, 0] = _OPEN
    return {"weight": weight, "up": given["weight"] / _OPEN}


def adds(spec: KernelSpec, problem: Problem, axes: Axes, given: Mapping[str, Any]) -> bool:
    """Return whether a result depends on two elements of a row that are not beside one another.

    Args:
        spec, problem: the kernel.
        axes: those that count its rows.
        given: inputs with some rows along the last of the problem's row sizes.
    """
    count = max(as_rows(given[array], held).shape[0] for array, held in axes.inputs.items() if held)
    at, shape = _of_rows(problem, axes, count)
    right = expected_results(spec, at, dict(given))
    for array, held in axes.inputs.items():
        rows = as_rows(given[array], held) if held else None
        if rows is None or not rows.is_floating_point() or rows[0].numel() == 1:
            continue
        reached = []
        for element in (0, _CHANGED):
            flat = rows.reshape(count, -1).clone()
            flat[:, element % flat.shape[1]] += _MUCH
            found = expected_results(spec, at, {**given, array: as_array(flat.view_as(rows), shape, held)})
            reached.append({name: x != found[name] for name, x in right.items()})
        if any(bool((x & reached[1][name]).any()) for name, x in reached[0].items()):
            return True
    return False


def _of_rows(problem: Problem, axes: Axes, count: int) -> tuple[Problem, tuple[int, ...]]:
    """Return the problem of some rows along the last of its row sizes, and these sizes."""
    *others, last = axes.dimensions
    return problem.but(**dict.fromkeys(others, 1), **{last: count}), (*(1 for _ in others), count)


def telling(spec: KernelSpec, problem: Problem, axes: Axes, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return rows [rows, ...] by array in which the least change of an element shows in the others' results.

    Such a result is next to where it is rounded up, or down, and another order of the sum moves it across, in a tenth
    to a half of these rows. A drawn row has 128 mantissas of 16-bit numbers, and shows the last bit of float32 once in
    500. Where an array has several heads, all have the numbers of the one that tells: a kernel may add up those of
    another place in another order.

    Args:
        spec, problem: the kernel; its sums are of a row's elements (:func:`adds`).
        axes: those that count its rows.
        device: where arrays are made, as torch names it.

    Returns:
        The rows, and the inputs that all rows share.
    """
    by_rows = {array: held for array, held in axes.inputs.items() if held}
    few = drawn(spec, _of_rows(problem, axes, 1)[0], device)
    elements = max(few[array].numel() for array in by_rows)
    pool = max(_TELLING, min(_POOL, _POOLED // elements))
    at, shape = _of_rows(problem, axes, pool)
    given = drawn(spec, at, device)
    dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in spec.outputs(at, 1).items()}
    rows = {array: as_rows(given[array], held).contiguous() for array, held in by_rows.items()}
    summed = [x for x in rows.values() if x.is_floating_point() and x[0].numel() > 1]
    for x in summed:
        x.mul_(0.5 ** (torch.arange(x.shape[-1], device=device) * 5 % _SIZES))
        _first(x)[:] = 0

    def results() -> dict[str, Any]:
        made = given | {array: as_array(x, shape, by_rows[array]) for array, x in rows.items()}
        return {
            name: as_rows(x.to(dtypes[name]), held).reshape(pool, -1)
            for name, x in expected_results(spec, at, made).items()
            if (held := axes.outputs.get(name))
        }

    headed = [x for x in summed if x.dim() > 2]
    tuned, chosen = headed or summed[:1], []
    for x in tuned:
        changed = _first(x)
        # Halve the numbers between 0, which changes nothing, and 1, as the whole numbers that have their bits.
        right, code = results(), {2: torch.int16, 4: torch.int32}[changed.element_size()]
        least, most = (torch.full_like(changed, value).view(code) for value in (0, 1))
        for _ in range(8 * changed.element_size() - 2):
            middle = least + (most - least) // 2
            changed.copy_(middle.view(changed.dtype))
            shown = torch.zeros(pool, dtype=torch.bool, device=device)
            for name, found in results().items():
                differ = found != right[name]
                differ[:, _CHANGED % differ.shape[1]] = False
                shown |= differ.any(-1)
            least, most = torch.where(shown, least, middle), torch.where(shown, middle, most)
        changed.copy_(least.view(changed.dtype))
        chosen.append(most.argsort()[: _TELLING // len(tuned)])
    for x in headed:
        x.copy_(x[:, :1].clone().expand_as(x))
    shared = {name: value for name, value in given.items() if name not in by_rows}
    return {array: x[torch.cat(chosen)] for array, x in rows.items()}, shared


def _first(x: Any) -> Any:
    """Return the element of each row that is changed: of an array with heads, one of the first head."""
    head = x.flatten(1) if x.dim() < 3 else x[:, 0].flatten(1)
    return head[:, _CHANGED % head.shape[1]]
