"""Tests of Liger-Kernel's back end; those that need Liger itself, and so Triton, are skipped where one is missing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
