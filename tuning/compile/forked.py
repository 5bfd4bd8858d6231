"""Preload, in the server that compile workers are forked from, what the tuner's workers need beside a job's."""

from tilekern.compile.toolchain import backends
from tilekern.runtime.workers import forked  # noqa: F401 (first, since it hides torch)
from tilekern.tuning.compile import stage as compiling  # noqa: F401 (holds what a worker runs)

for backend in backends():
    backend.preload()
