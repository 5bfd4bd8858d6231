"""A problem that the tests of the tuner share."""

from tilekern.kernels import spec_named
from tilekern.spec import Problem

SMALL: tuple[str, Problem] = (
    "column_sum",
    spec_named("column_sum").problem(rows=256, columns=128, dtype="bfloat16"),
)
