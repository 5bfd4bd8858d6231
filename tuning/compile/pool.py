"""The tuner's compile workers: a job's (:mod:`tilekern.runtime.workers`), with all compilers loaded."""

from __future__ import annotations

import functools

from tilekern.runtime.workers import pool
from tilekern.runtime.workers.server import Server

SERVER = Server("tilekern.tuning.compile.forked")
start_server = SERVER.start
compile_in_order = functools.partial(pool.compile_in_order, SERVER)
