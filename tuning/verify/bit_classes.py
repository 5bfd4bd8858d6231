"""The bit class of a candidate: two candidates of a class give a row the same bits, whatever rows are around it.

Generation computes a token's row among 1 to 64 others, training among thousands. Where both run kernels of one class,
their probabilities are equal, and not only near.

The same few rows are given to each candidate of each bucket: spread over its largest number of rows, among its smallest
with gaps in memory between rows, and next to one another between rows of NaN. If their results have the same bits
everywhere, the digest of these is the class. Three kinds of results are judged:

- Each has a row for each row of the inputs, as of norms and products. A row may be told by several sizes (a sequence of
  the batch, and a token of it).
- Rows of experts: of grouped products, and the sums of each token's experts. The compared rows' experts are fixed;
  those of the others are spread evenly, or all the same one.
- Those of causal attention, whose row depends on the tokens before it. The rows are queries of one sequence that see
  as many keys as the least and the largest size of any bucket, and the class has a digest for each of those numbers
  that the problem reaches; where it reaches a whole bucket, another one of many numbers in it. Classes of two buckets
  agree if they have the same digests where both have one. So do those of rows in a batch, packed one after the other,
  and with a window that still shows all keys. The kernel of one new token is given the same queries and keys in caches,
  from the first key on or behind padding.

Sums in another order differ in the last bit of float32, and a result that is rounded to 16 bits shows that once in
thousands of elements. So the rows are made to tell. Terms of products cancel, and what is left is the rounding. Of
other sums, as in norms, rows are chosen whose results change with the least change of one element.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilekern.kernels import decode_attention as caches
from tilekern.kernels import spec_named
from tilekern.kernels.attention.problem import lengths
from tilekern.kernels.experts.route import routed
from tilekern.kernels.grouped.routing import SLOTS
from tilekern.runtime.rows import has_rows
from tilekern.spec import Config, KernelSpec, Problem, bucket, cdiv
from tilekern.spec.bits import is_of_a_layer
from tilekern.tuning.verify.adversarial import drawn
from tilekern.tuning.verify.axes import Axes, as_array, as_rows, index_of
from tilekern.tuning.verify.canaries import bits
from tilekern.tuning.verify.cases import Case
from tilekern.tuning.verify.telling import adds, cancelling, open_gate, telling

# The rows whose bits are compared, and the tokens of a sequence, which begins anew after them.
ROWS, _TOKENS = 8, 4096
_DIGITS = 16
_FILLER = 1.25
_OF_SEQUENCES = ("batch", "queries", "keys")
# Kernels whose rows have experts, by which rows are sorted.
_ROUTED = ("grouped_linear", "grouped_linear_tf32", "experts_combine")
# The kernel whose rows are the last queries of sequences in caches.
_IN_CACHES = "decode_attention"
# The kernel for few rows, whose rows are those of the product of many, and all whose rows are sums of ``inner`` terms.
_OF_FEW_ROWS = "skinny_linear"
_PRODUCTS = ("matmul", "matmul_tf32", _OF_FEW_ROWS, "skinny_linear_tf32")
# A window that the queries of a sequence have, whatever the problem's is.
_WINDOW = 200
# Numbers of keys in a bucket whose queries are judged together: a prime, so that a cache has one key head.
_MANY = 61


@dataclass(frozen=True)
class Placed:
    """Inputs in which some rows stand at some places.

    Attributes:
        case: the inputs; it has no right results.
        rows: the rows' numbers; of a sequence, what each sees (:mod:`tilekern.spec.bits`).
        places: for each result, the index of each row in it.
        sight: under which name numbered rows have their digest.
        bare: whether nothing but the rows is there to be looked at: launches are many, and need no canaries.
    """

    case: Case
    rows: Sequence[int | str]
    places: Mapping[str, Sequence[tuple[Any, ...]]]
    sight: str = ""
    bare: bool = False


def can_agree(spec: KernelSpec, config: Config) -> bool:
    """Return whether a config's sums can be those of the kernel that serves its class in training.

    A kernel for decoding adds up a query's weights across threads unless tiles are summed apart: one result in 200,000
    is another, which no number of rows shows for sure.
    """
    return spec.name != _IN_CACHES or bool(config.get("apart"))


def placements(spec: KernelSpec, problem: Problem, device: str) -> Iterator[list[Placed]]:
    """Yield lists of inputs that tell a candidate's class; none if the problem's results have no rows.

    Args:
        spec: the spec.
        problem: the problem; its sizes are the largest of its bucket.
        device: where arrays are made, as torch names it.
    """
    if not problem.get("deterministic", True) or not has_rows(spec.name, problem):
        return
    names = tuple(d.name for d in spec.dimensions if d.kind == "bucketed")
    if names == _OF_SEQUENCES:
        is_forward = spec.outputs(problem, 1).keys() == {"out", "lse"}
        if is_forward and problem["causal"] and problem["queries"] <= problem["keys"]:
            yield from _of_sequence(problem, device)
        return
    if spec.name == _IN_CACHES:
        yield from _of_caches(problem, device)
        return
    if spec.name in _ROUTED:
        yield from _Routed(spec, problem, device).placements()
        return
    arrays = Axes.of(spec, problem, device, names)
    if arrays is not None:
        yield from _Rows(spec, problem, device, arrays).placements()


def digests_of(results: Iterable[tuple[Placed, Mapping[str, Any]]]) -> dict[str, str]:
    """Return the digests of rows by what they see; of those that see nothing one for all, under ``placed.sight``.

    A digest is empty if a result is NaN: another row's, or not written, as by a kernel whose parts are added up later.

    Args:
        results: each of a list of placements, and the outputs of a launch on it by name.
    """
    held: dict[str, dict[int | str, bytes]] = {}
    wrong = set()
    for placed, outputs in results:
        for name in sorted(placed.places):
            whole = outputs[name].cpu() if placed.bare else outputs[name]
            for row, place in zip(placed.rows, placed.places[name], strict=True):
                found = whole[place].contiguous().cpu()
                values = bits(found).numpy().tobytes()
                # Results beside a query's sum, of which decoding has none, stand for themselves.
                sight = f"{row}{'' if name == 'out' else name}" if isinstance(row, str) else placed.sight
                of_sight = held.setdefault(sight, {})
                of_sight[row] = of_sight.get(row, b"") + values
                if found.isnan().any():
                    wrong.add(sight)
    digests = {
        sight: hashlib.sha256(b"".join(rows[row] for row in sorted(rows))).hexdigest()[:_DIGITS]
        for sight, rows in held.items()
    }
    return digests | dict.fromkeys(wrong, "")


class _Among(abc.ABC):
    """Rows of one problem, placed among others."""

    def __init__(self, spec: KernelSpec, problem: Problem, device: str) -> None:
        self._spec, self._problem, self._device = spec, problem, device
        self._names = tuple(d.name for d in spec.dimensions if d.kind == "bucketed")

    def placements(self) -> Iterator[list[Placed]]:
        rows, largest = range(ROWS), {name: self._problem[name] for name in self._names}
        smallest = {name: bucket(size) // 2 + 1 if size > 1 else 1 for name, size in largest.items()}
        yield list(self._spread("largest of the bucket", largest, rows))
        yield list(self._spread("smallest of the bucket", smallest, rows[::-1], padded=True))
        count = self._count(largest)
        if count > ROWS:
            first = (count - ROWS) // 3
            yield [self._placed("between NaN", largest, rows, range(first, first + ROWS), filler=math.nan)]

    def _spread(
        self, name: str, sizes: Mapping[str, int], rows: Sequence[int], *, padded: bool = False
    ) -> Iterator[Placed]:
        count = self._count(sizes)
        for first in range(0, ROWS, count):
            some = rows[first : first + count]
            places = [number * (count - 1) // max(1, len(some) - 1) for number in range(len(some))]
            yield self._placed(name, sizes, some, places, padded=padded)

    @abc.abstractmethod
    def _count(self, sizes: Mapping[str, int]) -> int:
        """Return how many rows have a place at some sizes."""

    @abc.abstractmethod
    def _placed(
        self, name: str, sizes: Mapping[str, int], rows: Sequence[int], places: Sequence[int], *,
        filler: float = _FILLER, padded: bool = False,
    ) -> Placed:  # fmt: skip
        """Return inputs of some sizes; between the rows are some of them times a number."""


class _Rows(_Among):
    """Rows that the axes of arrays count."""

    def __init__(self, spec: KernelSpec, problem: Problem, device: str, axes: Axes) -> None:
        super().__init__(spec, problem, device)
        self._axes = axes
        *others, last = axes.dimensions
        # The same for all buckets of a problem.
        self._given = drawn(spec, problem.but(**dict.fromkeys(others, 1), **{last: ROWS}), device)
        if spec.name == _OF_FEW_ROWS and is_of_a_layer(problem):
            self._given |= _as_product(problem, device)
        if spec.name in _PRODUCTS:
            self._given |= cancelling(self._given, problem["inner"], biased=problem["biased"])
        if problem.get("rounded"):
            self._given |= open_gate(self._given)

    def placements(self) -> Iterator[list[Placed]]:
        yield from super().placements()
        if self._spec.name not in _PRODUCTS and adds(self._spec, self._problem, self._axes, self._given):
            yield self._many()

    def _many(self) -> list[Placed]:
        """Return telling rows with nothing between them, as many at once as the problem has room for."""
        rows, shared = telling(self._spec, self._problem, self._axes, self._device)
        count = len(next(iter(rows.values())))
        sizes, left = {}, count
        for name in self._names:
            sizes[name] = min(self._problem[name], left)
            left = max(1, left // sizes[name])
        shape, at_once = tuple(sizes.values()), math.prod(sizes.values())
        found = []
        for first in range(0, count, at_once):
            some = torch.arange(first, first + at_once, device=self._device) % count
            made = shared | {array: as_array(x[some], shape, self._axes.inputs[array]) for array, x in rows.items()}
            judged = range(first, min(first + at_once, count))
            places = {
                result: [index_of(place, shape, axes) for place in range(len(judged))]
                for result, axes in self._axes.outputs.items()
            }
            found.append(Placed(Case("many", self._problem.but(**sizes), made, {}), judged, places, "+", bare=True))
        return found

    def _count(self, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes.values())

    def _placed(
        self, name: str, sizes: Mapping[str, int], rows: Sequence[int], places: Sequence[int], *,
        filler: float = _FILLER, padded: bool = False,
    ) -> Placed:  # fmt: skip
        shape = tuple(sizes.values())
        made: dict[str, Any] = dict(self._given)
        order = torch.arange(math.prod(shape), device=self._device) * 5 % ROWS
        for array, axes in self._axes.inputs.items():
            if axes:
                given = as_rows(self._given[array], axes)
                values = given[order]
                if given.is_floating_point():
                    values *= filler
                values[list(places)] = given[list(rows)]
                made[array] = as_array(values, shape, axes)
        found = {
            result: [index_of(place, shape, axes) for place in places] for result, axes in self._axes.outputs.items()
        }
        return Placed(Case(name, self._problem.but(**sizes), made, {}, padded=padded), rows, found)


def _as_product(problem: Problem, device: str) -> dict[str, Any]:
    """Draw the inputs of a product of few rows as those of the product of many."""
    spec = spec_named("matmul")
    flags = {d.name: d.name == "b_transposed" for d in spec.dimensions if d.kind == "flag"}
    alike = {name: problem[name] for name in ("inner", "columns", "biased", "dtype")}
    given = drawn(spec, spec.problem(**flags | alike, rows=ROWS), device)
    names = {"a": "x", "b": "weight", "bias": "bias"}
    return {names[name]: x for name, x in given.items() if name in names}


class _Routed(_Among):
    """Rows with experts: a slot of a token each of a grouped product, or whole tokens of the sums of their slots.

    Others share the rows' experts; in the smallest size of the bucket all have the same one.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, device: str) -> None:
        super().__init__(spec, problem, device)
        self._sums = "choices" in problem
        # Slots of a token; rows of a product that are not gathered are tokens with one slot.
        self._slots = problem["choices"] if self._sums else SLOTS if problem["gathered"] else 1
        [size] = self._names
        self._given = drawn(spec, problem.but(**{size: ROWS if self._sums else ROWS * self._slots}), device)
        if not self._sums:
            self._given |= cancelling(self._given, problem["inner"], biased=bool(problem.get("biased")))
        self._experts = self._given["total"] if self._sums else problem["experts"]
        # Slots without an expert have this number.
        self._kinds = self._experts + (self._sums or bool(problem.get("partial")))
        self._values = self._given["x"].view(ROWS, self._slots, -1) if self._sums else self._given["x"]
        numbers = torch.arange(ROWS, device=device)
        choices = torch.arange(self._slots, device=device)
        self._ids = (2 * numbers[:, None] + 3 * choices + 1) % (self._kinds if self._sums else self._experts)

    def _count(self, sizes: Mapping[str, int]) -> int:
        [count] = sizes.values()
        return count if self._sums else cdiv(count, self._slots)

    def _placed(
        self, name: str, sizes: Mapping[str, int], rows: Sequence[int], places: Sequence[int], *,
        filler: float = _FILLER, padded: bool = False,
    ) -> Placed:  # fmt: skip
        tokens, at, some = self._count(sizes), list(places), list(rows)
        others = torch.arange(tokens, device=self._device) * 5 % ROWS
        ids = torch.arange(tokens * self._slots, device=self._device).view(tokens, -1) * 7 % self._kinds
        if padded:
            ids = torch.full_like(ids, int(self._ids[0, 0]))

        def among(given: Any) -> Any:
            values = given[others] * filler
            values[at] = given[some]
            return values

        made, values = dict(self._given), among(self._values)
        if self._sums:
            ids[at] = self._ids[some]
            _, order, ranks, chosen = routed(ids, self._experts)
            made |= {"x": values.flatten(0, 1)[order.long()], "ranks": ranks.view_as(ids), "experts": chosen}
            made |= {"weights": among(self._given["weights"])} if self._problem["weighted"] else {}
            found = at
        else:
            # The last token of a size may have fewer slots.
            count = math.prod(sizes.values())
            slots = [
                min(place * self._slots + row % self._slots, count - 1) for row, place in zip(some, at, strict=True)
            ]
            flat = ids.flatten()[:count]
            flat[slots] = self._ids[some, 0]
            offsets, order, ranks, _ = routed(flat, self._experts)
            made["offsets"] = offsets
            made |= {"x": values, "order": order} if self._problem["gathered"] else {"x": values[order.long()]}
            found = ranks[slots].tolist()
        places_of = {result: [(place,) for place in found] for result in self._spec.outputs(self._problem, 1)}
        return Placed(Case(name, self._problem.but(**sizes), made, {}, padded=padded), rows, places_of)


def _of_sequence(problem: Problem, device: str) -> Iterator[list[Placed]]:
    """Place one sequence: alone, as the last of the batch after NaN, and cut where its bucket begins."""
    batch, queries, keys = (problem[name] for name in _OF_SEQUENCES)
    given = _one_group(problem, problem["heads"], problem["kv_heads"], device)
    least = {size: bucket(size) // 2 + 1 if size > 1 else 1 for size in (queries, keys)}
    for name, entries, sizes in (
        ("alone", 1, (queries, keys)),
        ("last of the batch", batch, (queries, keys)),
        ("smallest of the bucket", batch // 2 + 1, (min(least[queries], least[keys]), least[keys])),
    ):
        # A query's number of keys is its place among the queries, which end with the keys.
        seen = [count for count in _ends(sizes[1]) if sizes[1] - sizes[0] < count]
        sights = _sights(problem, seen)
        if name == "alone":
            for size, many in _of_buckets(keys):
                if keys - queries < many[0]:
                    seen += many
                    sights += _sights(problem, [size], "+") * len(many)
        if seen:
            yield [_one_sequence(problem, given, name, entries, sizes, seen, sights)]


def _ends(keys: int) -> list[int]:
    """Return the least and the largest numbers of keys of each bucket, up to ``keys``."""
    buckets = [1 << power for power in range(bucket(keys).bit_length())]
    return [count for count in dict.fromkeys(end for size in buckets for end in (size // 2 + 1, size)) if count <= keys]


def _of_buckets(keys: int) -> list[tuple[int, list[int]]]:
    """Return each bucket of more numbers of keys than its ends, up to ``keys``, with some of them."""
    found, most = [], 8
    while most <= keys:
        least, count = most // 2 + 1, min(_MANY, most // 2)
        found.append((most, [least + (most - least) * place // (count - 1) for place in range(count)]))
        most *= 2
    return found


def _one_group(problem: Problem, heads: int, kv_heads: int, device: str) -> dict[str, Any]:
    """Draw a sequence of attention's forward, whose groups of query heads are all the same: their number is no size.

    They differ if the key heads' groups are not equally large.
    """
    spec = spec_named("attention_forward")
    groups = kv_heads if heads % kv_heads == 0 else 1
    flags = {d.name: problem.get(d.name, d.name == "causal") for d in spec.dimensions if d.kind == "flag"}
    sizes = {"batch": 1, "queries": _TOKENS, "keys": _TOKENS, "heads": heads // groups, "kv_heads": kv_heads // groups}
    alike = {name: problem[name] for name in ("head_dim", "dtype")}
    given = drawn(spec, spec.problem(**sizes, **alike, **flags), device)
    # Weights that differ by more than usual: their sums in another order differ three times as often.
    given["q"] = 4 * given["q"]
    wide = {name: given[name].tile(1, 1, groups, 1) for name in ("q", "k", "v")}
    return given | wide | ({"sink_logits": given["sink_logits"].tile(groups)} if flags["sinks"] else {})


def _one_sequence(
    problem: Problem, given: Mapping[str, Any], name: str, entries: int, sizes: tuple[int, int], seen: Sequence[int],
    sights: Sequence[str],
) -> Placed:  # fmt: skip
    """Return inputs whose last sequence begins as the given one; what stands before it is NaN."""
    queries, keys = sizes
    at = problem.but(batch=entries, queries=queries, keys=keys)
    made = dict(given) | {"most_queries": queries, "most_keys": keys, "window": _WINDOW}
    rows, firsts = entries, {"q": 0, "k": 0, "v": 0}
    if problem["packed"]:
        rows = 1
        for starts, arrays, size in (("query_starts", "q", queries), ("key_starts", "kv", keys)):
            total = sum(lengths(entries, size))
            firsts |= dict.fromkeys(arrays, total - size)
            ends = [(total - size) * number // max(1, entries - 1) for number in range(entries)]
            made[starts] = given[starts].new_tensor([*ends, total])
    for array, before in firsts.items():
        whole = given[array]
        first, count = (keys - queries, queries) if array == "q" else (0, keys)
        made[array] = whole.new_full((rows, before + count, *whole.shape[2:]), math.nan)
        tokens = torch.arange(first, first + count, device=whole.device) % _TOKENS
        made[array][-1, before:] = whole[0, tokens]
    places = [firsts["q"] + count - 1 - (keys - queries) for count in seen]
    heads, kv_heads = problem["heads"], problem["kv_heads"]
    # A group that differs from placement to placement.
    group = heads if heads % kv_heads else heads // kv_heads
    first = entries * group % heads
    some = slice(first, first + group)
    found: dict[str, Sequence[tuple[Any, ...]]] = {
        "out": [(rows - 1, place, some) for place in places],
        "lse": [(rows - 1, some, place) for place in places],
    }
    return Placed(Case(name, at, made, {}), sights, found)


def _sights(problem: Problem, seen: Iterable[int], mark: str = "") -> list[str]:
    return [f"{count}{mark}{'w' * (problem['windowed'] and count > _WINDOW)}" for count in seen]


def _of_caches(problem: Problem, device: str) -> Iterator[list[Placed]]:
    """Place the last queries of one sequence at several lengths, in the largest and in the smallest caches."""
    given = _one_group(problem, problem["group"], 1, device)
    least = {name: bucket(problem[name]) // 2 + 1 if problem[name] > 1 else 1 for name in ("kv_heads", "keys")}
    # The smallest ones hold the lengths in another order.
    for name, at, order in (
        ("largest of the bucket", problem, 1),
        ("smallest of the bucket", problem.but(**least), -1),
    ):
        known, seen = at.but(**caches.sizes(at)), _ends(at["keys"])[::order]
        some = (seen[begun : begun + known["batch"]] for begun in range(0, len(seen), known["batch"]))
        found = [_some_caches(known, given, name, counts, _sights(at, counts)) for counts in some]
        yield [replace(one, case=replace(one.case, problem=at)) for one in found]
    for size, seen in _of_buckets(problem["keys"]):
        at = problem.but(kv_heads=_MANY, keys=size)
        placed = _some_caches(at.but(**caches.sizes(at)), given, "many", seen, _sights(at, [size], "+") * len(seen))
        yield [replace(placed, case=replace(placed.case, problem=at))]


def _some_caches(
    at: Problem, given: Mapping[str, Any], name: str, seen: Sequence[int], sights: Sequence[str]
) -> Placed:
    """Return inputs with a cache of each length, the first ``batch``; the others are empty, all other keys are NaN."""
    batch, heads, room, q = at["batch"], at["heads"], at["keys"], given["q"]
    if at["paged"]:
        room = at["most_pages"] * at["page_size"]
    firsts = [room - count if at["padded"] else 0 for count in seen]
    made = dict(given) | {"window": _WINDOW, "q": q.new_full((batch, heads, *q.shape[2:]), math.nan)}
    keys = {"keys": given["k"], "values": given["v"]}
    made |= {array: whole.new_full((batch, heads, room, whole.shape[3]), math.nan) for array, whole in keys.items()}
    for row, (first, count) in enumerate(zip(firsts, seen, strict=True)):
        made["q"][row] = q[0, (count - 1) % _TOKENS]
        tokens = torch.arange(count, device=q.device) % _TOKENS
        for array, whole in keys.items():
            made[array][row, :, first : first + count] = whole[0, tokens, 0]

    def whole_numbers(values: list[int]) -> Any:
        return torch.tensor(values + [0] * (batch - len(values)), dtype=torch.int32, device=q.device)

    made["lengths"] = whole_numbers([first + count for first, count in zip(firsts, seen, strict=True)])
    made["starts"] = whole_numbers(firsts) if at["padded"] else q.new_zeros(1, dtype=torch.int32)
    made["table"] = q.new_zeros((1, 1), dtype=torch.int32)
    if at["paged"]:
        made["table"] = torch.arange(at["entries"], dtype=torch.int32, device=q.device).flip(0).view(batch, -1)
        for array in keys:
            paged = made[array].unflatten(2, (-1, at["page_size"])).permute(0, 2, 3, 1, 4).flatten(0, 1)
            made[array] = paged.flip(0).contiguous()
    if at["sinks"]:
        made["sink_logits"] = given["sink_logits"].expand(heads, -1).contiguous()
    else:
        made["sink_logits"] = given["sink_logits"].view(1, 1)
    places = [(row, row % heads) for row in range(len(seen))]
    return Placed(Case(name, at, made, {}), sights, {"out": places})
