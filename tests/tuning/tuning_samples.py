"""Shared by the tests of the tuner: a GPU, a mark, and problems."""

import pytest

from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.spec import Problem
from tilekern.spec.targets import resolve

H200 = resolve("H200")
needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")

# What the compile stage says of an artifact, but for its key.
COMPILED = {
    "status": "ok", "sha256": "0" * 64, "symbol": "kernel", "code_sha256": "1" * 64, "assumptions": {},
    "resources": {"registers": 32, "stack_bytes": 0, "shared_bytes": 0, "threads": 128, "code_bytes": 1024},
}  # fmt: skip
SMALL: tuple[str, Problem] = (
    "column_sum",
    spec_named("column_sum").problem(rows=256, columns=128, dtype="bfloat16"),
)
# Of the same columns and of others, which take other kernels.
THREE = [(SMALL[0], SMALL[1].but(rows=rows)) for rows in (256, 512, 1024)]
WIDE = (SMALL[0], SMALL[1].but(columns=4096))
