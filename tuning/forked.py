"""Loaded once by the server that compile workers are forked from, so that a worker starts with all it needs.

cuda-tile's front end imports torch where it can, which takes seconds, and compiling needs none of it.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]

import cuda.tile._compile  # noqa: E402, F401

from tilekern.kernels import all_specs  # noqa: E402

all_specs()
