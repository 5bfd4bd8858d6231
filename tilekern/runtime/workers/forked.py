"""Preload modules in the server that compile workers are forked from, so that a worker starts with them.

cuda-tile's front end imports torch if it is installed, which takes seconds; compiling does not need it.
"""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]

from tilekern.compile.toolchain import backends  # noqa: E402

# Compilers read these variables when they are imported, and some change the code that they make.
for name in list(os.environ):
    if name.startswith(tuple(prefix for backend in backends() for prefix in backend.variables)):
        del os.environ[name]

from tilekern.kernels import own_specs  # noqa: E402

own_specs()
for backend in backends():
    if not backend.is_optional:
        backend.preload()
