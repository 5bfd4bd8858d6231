"""Device code that the cross-entropy kernels share: the loss by one pass over a row of logits, and a row's gradient.

With x a row of logits after the optional soft cap ``cap * tanh(x / cap)`` (Gemma 2, arXiv:2408.00118), w the class
weights (1 without), W their sum, V the number of classes, e the label smoothing (Szegedy et al., arXiv:1512.00567), z
the weight of the z-loss (PaLM, arXiv:2204.02311), y the target and ``lse = log sum_c exp(x_c)``:
``loss = (1 - e) w_y (lse - x_y) + e / V (W lse - sum_c w_c x_c) + z lse^2``;
``dloss / dx_c = a exp(x_c - lse) - (1 - e) w_y [c = y] - e / V w_c`` with ``a = (1 - e) w_y + e / V W + 2 z lse``.
``options`` are the kernels' arguments besides logits and rows: the class weights and their sum, ``smoothing``,
``z_loss``, ``softcap``, ``columns``, ``weighted``, ``smoothed``, ``capped`` and ``tma``.
"""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.families.vocabulary import each_part

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
INFINITY = float("inf")
NAN = float("nan")
# The first running maximum: finite, so that no difference of two maxima is infinity less infinity.
LOWEST = -3.4028234663852886e38


def exponential(x):
    """Return exp(x) by the hardware's base-2 exponential; x is a difference already, so large logits stay exact."""
    return ct.exp2(x * LOG2_E, flush_to_zero=True)


def capped_and_slope(x, softcap):
    """Return ``softcap * tanh(x / softcap)`` and its slope ``1 - tanh^2``; neither cancels at saturation."""
    decay = exponential(ct.abs(x) * (-2.0 / softcap))
    inverse = ct.truediv(1.0, 1.0 + decay, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    size = softcap * (1.0 - decay) * inverse
    return ct.where(x < 0.0, -size, size), 4.0 * decay * inverse * inverse


def columns_of(c, tile_n):
    """Return the columns of tile ``c`` of a row."""
    return c * tile_n + ct.reshape(ct.arange(tile_n, dtype=ct.int32), (1, tile_n))


def load_logits(logits, row, c, tile_n, bounded, tma):
    """Load tile ``c`` of a row in float32; minus infinity beyond the edge adds nothing to a sum of exponentials."""
    padding = ct.static_eval(ct.PaddingMode.NEG_INF if bounded else ct.PaddingMode.UNDETERMINED)
    tile = ct.load(logits, (row, c), (1, tile_n), padding_mode=padding, check_bounds=bounded, allow_tma=tma)
    return tile.astype(ct.float32)


def load_weights(weight, c, tile_n, bounded):
    """Load tile ``c`` of the class weights; zeros beyond the edge."""
    padding = ct.static_eval(ct.PaddingMode.ZERO if bounded else ct.PaddingMode.UNDETERMINED)
    return ct.load(weight, (0, c), (1, tile_n), padding_mode=padding, check_bounds=bounded, allow_tma=False)


def _scan_step(sums, first, count, partial, logits, row, tile_n, options):
    """Add ``count`` tiles, the last of them partial or not, to each lane's running maximum and sums.

    Each lane of a tile keeps its own maximum, so that no thread waits for another before the row's end; several tiles
    at once share the exponential that rescales the lane's sum.
    """
    weight, _, _, _, softcap, columns, weighted, smoothed, capped, tma = options
    mass, peak, pull = sums
    tiles = ()
    for i in ct.static_iter(range(count)):
        bounded = ct.static_eval(partial and i == count - 1)
        tile = load_logits(logits, row, first + i, tile_n, bounded, tma)
        if capped:
            tile, _ = capped_and_slope(tile, softcap)
        if smoothed:
            share = tile
            if weighted:
                share = share * load_weights(weight, first + i, tile_n, bounded)
            if bounded:
                share = ct.where(columns_of(first + i, tile_n) < columns, share, 0.0)
            pull = pull + share
        if capped and bounded:
            tile = ct.where(columns_of(first + i, tile_n) < columns, tile, -INFINITY)
        tiles = tiles + (tile,)
    top = peak
    for i in ct.static_iter(range(count)):
        top = ct.maximum(top, tiles[i])
    mass = mass * exponential(peak - top)
    for i in ct.static_iter(range(count)):
        mass = mass + exponential(tiles[i] - top)
    return mass, top, pull


def scan_row(logits, row, tile_n, unroll, options):
    """Read a row once; return its maximum, the sum of ``exp(x - maximum)``, and the (weighted) sum of x if smoothed.

    All three have the shape (1, 1).
    """
    columns, zeros = ct.static_eval(options[5]), ct.zeros((1, tile_n), ct.float32)
    none, whole = (zeros, ct.full((1, tile_n), LOWEST, ct.float32), zeros), ct.static_eval(columns // (tile_n * unroll))
    mass, peak, pull = each_part(_scan_step, none, whole, columns, tile_n, unroll, (logits, row, tile_n, options))
    top = ct.max(peak, axis=1, keepdims=True)
    total = ct.sum(mass * exponential(peak - top), axis=1, keepdims=True)
    return top, total, ct.sum(pull, axis=1, keepdims=True)


def target_logit(logits, row, label, softcap, capped):
    """Return the target's logit after the cap, (1, 1); NaN if the target is not a class."""
    value = ct.gather(logits, (ct.full((1, 1), row, ct.int32), ct.full((1, 1), label, ct.int32)), padding_value=NAN)
    value = value.astype(ct.float32)
    if capped:
        value, _ = capped_and_slope(value, softcap)
    return value


def target_weight(weight, label, weighted):
    """Return the target's class weight, (1, 1)."""
    if weighted:
        place = ct.full((1, 1), label, ct.int32)
        return ct.gather(weight, (ct.zeros((1, 1), ct.int32), place))
    return ct.full((1, 1), 1.0, ct.float32)


def store_row(array, row, value):
    """Store a value of the shape (1, 1) as the element ``row`` of a vector."""
    ct.store(array, (row,), ct.reshape(value, (1,)))


def _row_loss(top, total, pull, target_x, share, options):
    """Return the row's loss and lse; the loss uses differences to the maximum, so it is exact near zero."""
    _, weight_sum, smoothing, z_loss, _, columns, weighted, smoothed, _, _ = options
    log_total = ct.log2(total) * LN_2
    lse = top + log_total
    loss = share * (log_total - (target_x - top))
    if smoothed:
        classes = ct.full((1, 1), columns, ct.float32)
        if weighted:
            classes = ct.reshape(ct.load(weight_sum, (0,), (1,)), (1, 1))
        even = (classes * lse - pull) / columns
        loss = (1.0 - smoothing) * loss + smoothing * even
    return loss + z_loss * lse * lse, lse


def store_loss(logits, loss, lse, row, label, tile_n, unroll, options):
    """Store the loss and the lse of a row.

    Returns:
        The target's logit and weight, the row's maximum, the sum of ``exp(x - maximum)``, and the lse.
    """
    weight, _, _, _, softcap, _, weighted, _, capped, _ = options
    target_x, share = target_logit(logits, row, label, softcap, capped), target_weight(weight, label, weighted)
    top, total, pull = scan_row(logits, row, tile_n, unroll, options)
    row_of_loss, row_of_lse = _row_loss(top, total, pull, target_x, share, options)
    store_row(loss, row, row_of_loss)
    store_row(lse, row, row_of_lse)
    return target_x, share, top, total, row_of_lse


def gradient_factors(scale, share, lse, options):
    """Return a row gradient's factor of the softmax, and those subtracted at the target and of every class weight."""
    _, weight_sum, smoothing, z_loss, _, columns, weighted, smoothed, _, _ = options
    at_target = share
    spread = ct.zeros((1, 1), ct.float32)
    of_softmax = share + 2.0 * z_loss * lse
    if smoothed:
        classes = ct.full((1, 1), columns, ct.float32)
        if weighted:
            classes = ct.reshape(ct.load(weight_sum, (0,), (1,)), (1, 1))
        spread = spread + smoothing / columns
        at_target = (1.0 - smoothing) * share
        of_softmax = at_target + spread * classes + 2.0 * z_loss * lse
    return scale * of_softmax, scale * at_target, scale * spread


def store_gradient(logits, dlogits, row, c, label, shift, factors, tile_n, bounded, options):
    """Store a tile's gradient: ``of_softmax * exp(x - shift)``, less the target's and the smoothing's shares.

    It depends only on the tile's own elements, so ``dlogits`` may be the memory of ``logits``. Tiles are wide, since
    the compiler puts a barrier between two stores to one array.
    """
    weight, _, _, _, softcap, _, weighted, smoothed, capped, tma = options
    of_softmax, at_target, spread = factors
    tile = load_logits(logits, row, c, tile_n, bounded, tma)
    slope = ct.full((1, tile_n), 1.0, ct.float32)
    if capped:
        tile, slope = capped_and_slope(tile, softcap)
    gradient = of_softmax * exponential(tile - shift)
    gradient = ct.where(columns_of(c, tile_n) == label, gradient - at_target, gradient)
    if smoothed:
        taken = spread
        if weighted:
            taken = spread * load_weights(weight, c, tile_n, bounded)
        gradient = gradient - taken
    if capped:
        gradient = gradient * slope
    ct.store(dlogits, (row, c), gradient.astype(dlogits.dtype), check_bounds=bounded, allow_tma=tma)


def store_zeros(dlogits, row, c, tile_n, bounded):
    """Store zeros as the gradient of a tile."""
    ct.store(dlogits, (row, c), ct.zeros((1, tile_n), dlogits.dtype), check_bounds=bounded, allow_tma=False)
