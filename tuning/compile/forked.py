"""Loaded once by the server that compile workers are forked from, so that a worker starts with all it needs.

cuda-tile's front end imports torch where it can, which takes seconds, and compiling needs none of it.
"""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]
# By some of these cuda-tile and CuTe DSL make other code, which they read when they are imported.
for name in list(os.environ):
    if name.startswith(("CUDA_TILE_", "EXPERIMENTAL_CUDA_TILE_", "CUTE_DSL_")):
        del os.environ[name]

from tilekern.compile import cute_compiler, frontend  # noqa: E402
from tilekern.kernels import own_specs  # noqa: E402
from tilekern.tuning.compile import stage as compiling  # noqa: E402, F401 (holds what a worker runs)

frontend.preload()
cute_compiler.preload()
own_specs()
