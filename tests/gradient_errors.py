"""How near the gradients of a model's training are to float64, and how much nearness chance may take away."""

import math


def relative_error(found, references, names):
    """||found - reference|| / ||reference|| over the named parameters of all models or batches."""
    pairs = [(own[name], exact[name]) for own, exact in zip(found, references, strict=True) for name in names]
    wrong = sum(float((own - exact).square().sum()) for own, exact in pairs)
    return math.sqrt(wrong / sum(float(exact.square().sum()) for _, exact in pairs))


def bound(count):
    """By how much the error over ``count`` values may exceed the other's: a tenth, and twice what chance does.

    A norm of n independent errors has a relative standard deviation of 1 / sqrt(2 n), and the ratio of two such norms
    one of 1 / sqrt(n): nothing for a matrix, an eighth for 64 values of the norms of heads, 3 % for 1024 of them.
    """
    return 1.1 * (1 + 2 / math.sqrt(count))
