"""Helpers that kernels of the tests import from a sibling module, as kernels of the library do."""

import cuda.tile as ct
from cuda.tile import maximum

LIMIT = 0.0


def rectify(tile):
    return maximum(tile, LIMIT)


@ct.function
def doubled(tile):
    return plus(tile, tile)


def plus(a, b):
    return a + b
