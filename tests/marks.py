"""Marks of tests that some machines cannot run."""

import pytest

from tilekern.compile.toolchain import toolkit

needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
