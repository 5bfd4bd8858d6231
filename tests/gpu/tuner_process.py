"""What a tuner is started with that is a process of its own."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clean_environment(*first: Path) -> dict[str, str]:
    """The environment without tilekern's settings; imports come from these folders first, or from this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TILEKERN_")}
    path = [*map(str, first or (ROOT,)), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}
