import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))


@pytest.fixture
def cli(capsys):
    """Run commands of ``cache_tools`` and look at what they print."""
    from ship_samples import Commands

    return Commands(capsys)
