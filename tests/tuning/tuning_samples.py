"""A problem that the tests of the tuner share."""

from tilekern.kernels import spec_named
from tilekern.spec import Problem

# What the compile stage says of an artifact, but for its key.
COMPILED = {
    "status": "ok", "sha256": "0" * 64, "symbol": "kernel", "code_sha256": "1" * 64, "assumptions": {},
    "resources": {"registers": 32, "stack_bytes": 0, "shared_bytes": 0, "threads": 128, "code_bytes": 1024},
}  # fmt: skip
SMALL: tuple[str, Problem] = (
    "column_sum",
    spec_named("column_sum").problem(rows=256, columns=128, dtype="bfloat16"),
)
