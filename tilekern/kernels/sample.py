"""Choose a token from each row of logits: the largest one, or a draw after temperature, top-k, top-p and min-p.

With x a row, ``w_c = exp((x_c - max x) / temperature)`` as a whole number of 2^-43rds. In the order of transformers'
processors, tokens are kept:

- top-k: with x of at least the k-th largest x;
- top-p: if those with a larger x have less than ``top_p`` of the mass of the tokens kept so far;
- min-p: with w of at least ``min_p``.

Equal x are kept or dropped together. Tokens are taken lane by lane: ``LANES`` lanes, token c in lane ``c % LANES``. A
draw is the first one at which the running sum of kept w exceeds ``u`` times their total; ``u`` in [0, 1) is two words
of Philox 4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405) whose key is the row's seed and whose counter is its
position.

All after the product ``(max x - x_c) / temperature`` is arithmetic of whole numbers, the exponential too, so a draw
depends on no config, grid, order of sums or GPU, and torch's operations give the same one. A sum inverted takes one
random number a row where Gumbel's maximum takes one for each token, and logarithms of them.

Nothing is sorted. Counts (top-k) and masses (top-p) of the tokens at and above three trial values cut the values that
a threshold may have: one lies half way in the order of float32, the others in that of numbers, near the top, where
thresholds are. A pass over the row gives all three; the row stays in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy import tiles as shared
from tilekern.kernels.families import vocabulary as family
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, each_step, grid_of, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, KernelSpec, Problem, Space, Value, cdiv, name_of
from tilekern.spec.targets import Target

# A key is a float32 as a whole number of the same order. These are of infinity, of every NaN, and below all others.
_INFINITY, _NAN, _LEAST = 0x7F800000, 0x7FFFFFFF, -(1 << 31)
_MASK = 0xFFFFFFFF
# Exponents are in 2^-25ths; above 63 a weight is 0. Rates are kept in bounds, so that no product is NaN.
_BITS = 25
_LOG2_E, _FARTHEST = 1.4426950408889634 * 2.0**_BITS, 63 * 2.0**_BITS
_SLOWEST, _FASTEST = 1e-30, 1e38
# 2^-f = 1 - f (C1 - f (C2 - ...)) for f in [0, 1), to 1e-7: the coefficients in 2^-31sts, 2^-32nds and so on.
_C1, _C2, _C3, _C4, _C5 = 1488514807, 1031565859, 475000690, 158154408, 32466642
# The weight of the largest logit; the sum of so many of them is at most 2^62.
_ONE = 1 << 43
MOST_TOKENS = 1 << 19
_HALF = (1 << 31) - 1
# A pass adds up the weights of each lane, and the drawn lane's tokens are read at once. In the order of the vocabulary,
# each step of the pass would end with a sum over all threads, which is also minutes of compiling.
LANES = 512
# The kinds of passes of a draw, in their order: searches for thresholds, and sums of the weights kept so far.
_TOP_K, _SUM, _TOP_P, _LAST = 0, 1, 2, 3


def power(exponent):
    """Return 2^-exponent in 2^-43rds, for a nonnegative exponent in 2^-25ths; int64 of torch or of cuda.tile."""
    f = (exponent & ((1 << _BITS) - 1)) << (31 - _BITS)
    # Each product leaves 31 bits, which the compiler cannot know: it multiplies 32 bits by 32 bits with the mask.
    p = (_C4 - ((f * _C5) >> 32)) & _HALF
    p = (_C3 - ((f * p) >> 32)) & _HALF
    p = (_C2 - ((f * p) >> 32)) & _HALF
    p = (_C1 - ((f * p) >> 32)) & _HALF
    p = ((1 << 30) - ((f * p) >> 32)) & _HALF
    return (p << 13) >> (exponent >> _BITS)


def uniform(seed, position):
    """Return the first two words of Philox 4x32-10, for the int64 of a seed and a position of torch or of cuda.tile."""
    key_0, key_1 = seed & _MASK, (seed >> 32) & _MASK
    c_0, c_1 = position & _MASK, (position >> 32) & _MASK
    c_2, c_3 = c_0 ^ c_0, c_0 ^ c_0
    for _ in range(10):
        left, right = c_0 * 0xD2511F53, c_2 * 0xCD9E8D57
        c_0, c_2 = ((right >> 32) & _MASK) ^ c_1 ^ key_0, ((left >> 32) & _MASK) ^ c_3 ^ key_1
        c_1, c_3 = right & _MASK, left & _MASK
        key_0, key_1 = (key_0 + 0x9E3779B9) & _MASK, (key_1 + 0xBB67AE85) & _MASK
    return c_0, c_1


def share(total, high, low):
    """Return ``total * (high * 2^31 + low) / 2^62``, rounded down, for a total of 62 bits and two words of 31 bits."""
    upper, lower = total >> 31, total & _HALF
    return high * upper + ((high * lower + low * upper + ((low * lower) >> 31)) >> 31)


def _keys(x):
    """Return the keys of float32 numbers that are not NaN; those of 0 and -0 are the same."""
    bits = ct.bitcast(x, ct.int32)
    return ct.where(bits < 0, _LEAST - bits, bits)


def _value(key):
    """Return the float32 number of a key, for a key or a tile of them."""
    return ct.bitcast(ct.where(key < 0, _LEAST - key, key), ct.float32)


def _over(step, sums, logits, row, form, arguments):
    """Return sums over a row: ``step(sums, n, tiles, *arguments)`` adds some tiles.

    All loads have their bounds checked, and the compiler does not know their number: a rest of a row with code of its
    own, or steps that it unrolls, are minutes of compiling.
    """
    tile_n, unroll, tma = form
    for n in range(ct.cdiv(logits.shape[1], tile_n * unroll)):
        tiles = ()
        for i in ct.static_iter(range(unroll)):
            tiles = tiles + (shared.load_logits(logits, row, n * unroll + i, tile_n, True, tma),)
        sums = step(sums, n, tiles, *arguments)
    return sums


def _top_step(best, n, tiles):
    """Keep each lane's largest key, and its first place."""
    keys, places = best
    unroll, tile_n = ct.static_eval(len(tiles)), ct.static_eval(tiles[0].shape[1])
    for i in ct.static_iter(range(unroll)):
        key = ct.where(ct.isnan(tiles[i]), _NAN, _keys(tiles[i]))
        places = ct.where(key > keys, shared.columns_of(n * unroll + i, tile_n), places)
        keys = ct.maximum(keys, key)
    return keys, places


def _top(logits, row, form):
    """Return the largest key of a row, NaN above all, and its first place."""
    tile_n = ct.static_eval(form[0])
    none = (ct.full((1, tile_n), _LEAST, ct.int32), ct.zeros((1, tile_n), ct.int32))
    keys, places = _over(_top_step, none, logits, row, form, ())
    top = ct.max(keys)
    return top, ct.min(ct.where(keys == top, places, _NAN))


@ct.kernel
def greedy(logits, ids, tile_n: ConstInt, unroll: ConstInt, persistent: ConstBool, tma: ConstBool):
    """One row a block, or resident blocks that loop; logits [rows, columns], ids [rows]."""
    each_step(_greedy_row, logits.shape[0], persistent, (logits, ids, (tile_n, unroll, tma)))


def _greedy_row(row, logits, ids, form):
    _, place = _top(logits, row, form)
    ct.store(ids, (row,), ct.reshape(place, (1,)).astype(ct.int64))


def _kept_weights(x, known):
    """Return the weights of kept tokens, 0 elsewhere; ``known`` are the top, the rate, and the least key and weight."""
    top, rate, floor, least = known
    weight = power(ct.minimum((top - x) * rate, _FARTHEST).astype(ct.int32).astype(ct.int64))
    return ct.where((_keys(x) >= floor) & (weight >= least), weight, 0)


def _above_step(sums, n, tiles, marks, weighed, known):
    """Add up the tokens whose keys are at least each mark, or their weights."""
    for i in ct.static_iter(range(len(tiles))):
        key, amount = _keys(tiles[i]), ct.where(weighed, _kept_weights(tiles[i], known), 1)
        found = ()
        for j in ct.static_iter(range(3)):
            found = found + (sums[j] + ct.where(key >= marks[j], amount, 0),)
        sums = found
    return sums


def _marks(low, high, unit):
    """Return three trial values above ``low`` and up to ``high``, in their order; all in units, as int64."""
    least, most = _value((low << unit).astype(ct.int32)), _value((high << unit).astype(ct.int32))
    middle = least * 0.5 + most * 0.5
    a = _keys(middle).astype(ct.int64) >> unit
    b = _keys(middle * 0.5 + most * 0.5).astype(ct.int64) >> unit
    a, b = ct.minimum(ct.maximum(a, low + 1), high), ct.minimum(ct.maximum(b, low + 1), high)
    c = high - ((high - low) >> 1)
    return ct.minimum(a, c), ct.maximum(a, ct.minimum(b, c)), ct.maximum(b, c)


def _place_of(masses, rank, logits, row, known, height):
    """Return the first token, lane by lane, whose running sum of kept weights exceeds ``rank``."""
    ends = ct.cumsum(masses, axis=0)
    lane = ct.sum(ct.where(ends <= rank, 1, 0))
    before = ct.max(ct.where(ends <= rank, ends, 0))
    places = lane + LANES * ct.arange(height, dtype=ct.int32)
    x = ct.gather(logits, (row, places), padding_value=-shared.INFINITY).astype(ct.float32)
    ends_of_tokens = before + ct.cumsum(_kept_weights(x, known), axis=0)
    return lane + LANES * ct.sum(ct.where(ends_of_tokens <= rank, 1, 0))


def _of_row(array, row):
    """Return the number of a row, from an array that has one for each row or one for all."""
    return ct.load(array, (ct.minimum(row, array.shape[0] - 1),), ())


def _drawn(row, top, logits, temperature, top_k, top_p, min_p, seed, positions, height, form):
    """Return the token of a row whose largest key is ``top``.

    One loop does all passes, as code for each kind of them takes minutes to compile.
    """
    tile_n = ct.static_eval(form[0])
    # Keys of half types are multiples of a power of two.
    unit = ct.static_eval({ct.bfloat16: 16, ct.float16: 13}.get(logits.dtype, 0))
    largest, zero = _value(top), ct.zeros((), ct.int64)
    rate = ct.minimum(ct.maximum(ct.truediv(_LOG2_E, temperature), _SLOWEST), _FASTEST)
    least = (ct.minimum(ct.maximum(_of_row(min_p, row), 0.0), 1.0) * _ONE).astype(ct.int64)
    p, need = _of_row(top_p, row), _of_row(top_k, row).astype(ct.int64)
    after_top_k = ct.where(p < 1.0, _SUM, _LAST)
    stage = ct.where((need > 0) & (need < logits.shape[1]), _TOP_K, after_top_k)
    floor = ct.full((), -_INFINITY, ct.int32)
    # At least ``need`` is at and above ``low``, and less above ``high``.
    low, high = (floor >> unit).astype(ct.int64), (top >> unit).astype(ct.int64)
    masses = ct.zeros((1, tile_n), ct.int64)
    while stage <= _LAST:
        first, second, last = _marks(low, high, unit)
        searches = (stage == _TOP_K) | (stage == _TOP_P)
        marks = (
            ct.where(searches, (first << unit).astype(ct.int32), floor),
            (second << unit).astype(ct.int32),
            (last << unit).astype(ct.int32),
        )
        known = (largest, rate, floor, ct.where(stage == _LAST, least, zero))
        sums = (ct.zeros((1, tile_n), ct.int64), ct.zeros((1, tile_n), ct.int64), ct.zeros((1, tile_n), ct.int64))
        sums = _over(_above_step, sums, logits, row, form, (marks, stage > _TOP_K, known))
        masses = sums[0]
        x, y, z = ct.sum(sums[0]), ct.sum(sums[1]), ct.sum(sums[2])
        if searches:
            at = ct.where(z >= need, last, ct.where(y >= need, second, ct.where(x >= need, first, low)))
            roof = ct.where(z >= need, high, ct.where(y >= need, last - 1, ct.where(x >= need, second - 1, first - 1)))
            is_found = (x == need) | (y == need) | (z == need) | (at >= roof)
            low, high = at, roof
            floor = ct.where(is_found, (low << unit).astype(ct.int32), floor)
            stage = ct.where(is_found, ct.where(stage == _TOP_K, after_top_k, _LAST), stage)
        elif stage == _SUM:
            need = ct.maximum(share(x, (ct.maximum(p, 0.0) * 2.0**31).astype(ct.int64), zero), 1)
            # No logit that is farther from the top has a weight.
            low = (ct.maximum(floor, _keys(largest - 46 * 2.0**_BITS / rate)) >> unit).astype(ct.int64)
            high = (top >> unit).astype(ct.int64)
            floor = (low << unit).astype(ct.int32)
            stage = ct.where(low < high, _TOP_P, _LAST)
        else:
            stage = stage + 1
    known = (largest, rate, floor, least)
    lanes = ct.static_eval(min(LANES, tile_n))
    masses = ct.sum(ct.reshape(masses, (tile_n // lanes, lanes)), axis=0)
    high, low = uniform(_of_row(seed, row), _of_row(positions, row))
    rank = share(ct.sum(masses), high >> 1, low >> 1)
    return _place_of(masses, rank, logits, row, known, height)


def _sample_row(row, logits, temperature, top_k, top_p, min_p, seed, positions, ids, height, form):
    top, place = _top(logits, row, form)
    heat = _of_row(temperature, row)
    if (heat > 0.0) & (top < _INFINITY) & (top > -_INFINITY):
        place = _drawn(row, top, logits, heat, top_k, top_p, min_p, seed, positions, height, form)
    ct.store(ids, (row,), ct.reshape(place, (1,)).astype(ct.int64))


@ct.kernel
def sample(
    logits, temperature, top_k, top_p, min_p, seed, positions, ids, height: ConstInt, tile_n: ConstInt,
    unroll: ConstInt, persistent: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; logits [rows, columns], positions and ids [rows].

    The others have a number for each row, or one for all.
    """
    form = (tile_n, unroll, tma)
    arguments = (logits, temperature, top_k, top_p, min_p, seed, positions, ids, height, form)
    each_step(_sample_row, logits.shape[0], persistent, arguments)


def _keys_in_torch(logits: Any) -> Any:
    """Return keys as int64, for logits of any dtype."""
    import torch

    x = logits.float()
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, _LEAST - bits, bits).masked_fill(x.isnan(), _NAN)


def _first_of_top(keys: Any) -> Any:
    """Return the first place of each row's largest key; of equal ones torch's argmax may return any on a GPU."""
    import torch

    places = torch.arange(keys.shape[1], device=keys.device)
    return places.where(keys == keys.amax(1, keepdim=True), keys.shape[1]).amin(1)


def greedy_by_torch(logits: Any) -> Any:
    """Return what the kernel ``greedy`` does, for logits [rows, vocabulary]."""
    return _first_of_top(_keys_in_torch(logits))


def sample_by_torch(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, positions: Any
) -> Any:  # fmt: skip
    """Return what the kernel ``sample`` does, by torch's operations: the same ids, for up to ``MOST_TOKENS`` tokens."""
    import torch

    keys = _keys_in_torch(logits)
    places, vocabulary = _first_of_top(keys), keys.shape[1]
    numbers = (temperature, top_k, top_p, min_p, seed)
    temperature, top_k, top_p, min_p, seed = (x.expand(len(keys))[:, None] for x in numbers)
    top = keys.amax(1, keepdim=True)
    is_drawn = (temperature > 0) & (top.abs() < _INFINITY)
    x = logits.float().where(is_drawn, 0)
    # A quotient of a number and a tensor is a product with its inverse in torch.
    rate = (torch.full_like(temperature, _LOG2_E) / temperature).clamp(_SLOWEST, _FASTEST).where(is_drawn, 1)
    weights = power(((x.amax(1, keepdim=True) - x) * rate).clamp(max=_FARTHEST).long())
    order = keys.sort(1, descending=True)
    kth = order.values.gather(1, (top_k.long() - 1).clamp(0, vocabulary - 1))
    floor = kth.where(top_k > 0, _LEAST)
    masses = weights.where(keys >= floor, 0)
    wanted = share(masses.sum(1, keepdim=True), (top_p.clamp(0, 1) * 2.0**31).nan_to_num(0).long(), 0).clamp(min=1)
    last = (masses.gather(1, order.indices).cumsum(1) < wanted).sum(1, keepdim=True).clamp(max=vocabulary - 1)
    floor = floor.maximum(order.values.gather(1, last)).where(top_p < 1, floor)
    least = (min_p.nan_to_num(0).clamp(0, 1) * _ONE).long()
    kept = weights.where((keys >= floor) & (weights >= least), 0)
    height = cdiv(vocabulary, LANES)
    ends = torch.nn.functional.pad(kept, (0, height * LANES - vocabulary)).unflatten(1, (height, LANES)).mT
    ends = ends.flatten(1).cumsum(1)
    high, low = uniform(seed, positions[:, None])
    rank = (ends <= share(ends[:, -1:], high >> 1, low >> 1)).sum(1)
    return (rank // height + rank % height * LANES).where(is_drawn[:, 0], places)


def reference_greedy(logits: Any) -> dict[str, Any]:
    """Return the first place of each row's maximum."""
    return {"ids": greedy_by_torch(logits).double()}


def reference_sample(**given: Any) -> dict[str, Any]:
    """Return the same ids by sorting."""
    return {"ids": sample_by_torch(**given).double()}


def _shapes(vocabulary: int, warps: int) -> list[tuple[int, int]]:
    """Return pairs of tile_n and unroll: 8 or 16 neighbours a thread, and up to 32 elements a step."""
    threads = 32 * (warps or 4)
    pairs = ((16, 1), (8, 2), (16, 2), (8, 1))
    found = [(n * threads, unroll) for n, unroll in pairs if n * threads * unroll <= vocabulary]
    return found or [(min(8 * threads, power_of_two(vocabulary)), 1)]


def _axes(problem: Problem) -> dict[str, list[Value]]:
    shapes = [shape for warps in (0, 8) for shape in _shapes(problem["vocabulary"], warps)]
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({tile_n for tile_n, _ in shapes}),
        "unroll": sorted({unroll for _, unroll in shapes}),
        "num_worker_warps": [0, 8],
        "occupancy": [1, 2],
        "tma": [True, False],
    }


_STEPS_MATCH = Constraint(
    "a step gives each thread 8 to 32 elements in one or two tiles; rows that are shorter take one tile",
    lambda problem, config, target: (
        (config["tile_n"], config["unroll"]) in _shapes(problem["vocabulary"], config["num_worker_warps"])
    ),
)


def _config(schedule: str, tile_n: int, unroll: int, warps: int) -> Config:
    return Config(schedule=schedule, tile_n=tile_n, unroll=unroll, num_worker_warps=warps, occupancy=1, tma=False)


def _default(problem: Problem, target: Target) -> Config:
    """Return a block for each row, of many threads: a batch of decoding has fewer rows than the GPU has SMs."""
    return _config("block", *_shapes(problem["vocabulary"], 8)[0], 8)


def _generic(problem: Problem) -> Config:
    """Return a block of 4 warps, with the tiles of the dtype that make the least code (tileiras 13.4)."""
    tile_n = 2048 if problem["dtype"] == "float32" else 1024
    return _config("persistent", min(tile_n, power_of_two(problem["vocabulary"])), 1, 0)


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    """Return the number of tokens in a lane, rounded up to a tile's size."""
    return {"height": power_of_two(cdiv(problem["vocabulary"], LANES))}


def _mixed(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Return peaked logits, and the parameters of a mixed batch."""
    import torch

    logits = 4 * torch.randn((problem["rows"], problem["vocabulary"]), generator=generator, device=device)
    rows = torch.arange(problem["rows"], device=device)

    def cycled(*values: float) -> Any:
        return torch.tensor(values, device=device)[rows % len(values)]

    return {
        "logits": logits.to(getattr(torch, problem["dtype"])),
        "temperature": cycled(1.0, 0.7, 1.5, 0.8, 0.0),
        "top_k": cycled(50, 0, 20, 50, 1 << 20, 1).to(torch.int32),
        "top_p": cycled(0.95, 0.9, 1.0),
        "min_p": cycled(0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0),
        "seed": rows * 0x1E3779B97F4A7C15 + 1,
        "positions": rows * 37 + 4000,
    }


_LOGITS, _IDS = Array("logits", "dtype", family.LOGITS), Array("ids", "int64", family.ROWS, "output")


def _spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], given: Any, flops: int
) -> KernelSpec:  # fmt: skip
    return spec(
        name_of(function),
        summary,
        (Dimension("rows", "bucketed"), Dimension("vocabulary", "exact"), Dimension("dtype", "dtype")),
        arrays,
        reference,
        function=function,
        constants=_constants,
        grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
        space=Space(_axes, (_STEPS_MATCH, TMA_NEEDS_HOPPER)),
        default=_default,
        generic=_generic,
        given=given,
        arrays=arrays,
        flops=lambda problem: flops * problem["rows"] * problem["vocabulary"],
    )


GREEDY = _spec(
    greedy,
    "the first place of the maximum of each row of logits",
    (_LOGITS, _IDS),
    reference_greedy,
    lambda problem, generator, device: {"logits": _mixed(problem, generator, device)["logits"]},
    1,
)
SAMPLE = _spec(
    sample,
    "a token drawn from each row of logits, after temperature, top-k, top-p and min-p",
    (
        _LOGITS,
        *family.of_rows("temperature"),
        Array("top_k", "int32", family.ROWS),
        *family.of_rows("top_p", "min_p"),
        *(Array(name, "int64", family.ROWS) for name in ("seed", "positions")),
        _IDS,
    ),
    reference_sample,
    _mixed,
    200,
)
SPECS = (GREEDY, SAMPLE)
