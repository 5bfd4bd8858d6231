"""Shared parts of the search spaces of configs that CuTe DSL compiles."""

from __future__ import annotations

from tilekern.spec import ITEM_BYTES, Config, Constraint, Problem
from tilekern.spec.targets import INTERPRETED

_VECTOR_BYTES, WARP = 16, 32
# The most registers of a thread.
MOST_REGISTERS = 255
NOT_INTERPRETED = Constraint(
    "the interpreter runs cuTile's kernels alone", lambda problem, config, target: target != INTERPRETED
)
CLUSTERS_NEED_HOPPER = Constraint(
    "clusters need sm_90 or newer",
    lambda problem, config, target: config["cluster"] == 1 or target.has_clusters,
)


def is_cute(config: Config) -> bool:
    """Tell whether CuTe DSL compiles a config."""
    return config.get("implementation") == "cute"


def vector_of(problem: Problem) -> int:
    """Count the elements of a vector of 16 bytes."""
    return _VECTOR_BYTES // ITEM_BYTES[problem["dtype"]]
