"""tilekern as loaded by Hugging Face's library `kernels`, with `get_kernel` etc.

`python -m tilekern.cache_tools repository` writes this file as the ``__init__.py`` of each build, beside a copy of
tilekern that includes packs. ``layers`` contains the layers for `kernelize`; ``ops``, ``apply`` and all other names are
tilekern's.

Torch registers tilekern's ops by name, so a process can have only one tilekern. If tilekern is imported already in the
version of the copy, it is used and also reads the copy's packs; otherwise the copy is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).parent
_OWN = _HERE / "tilekern"


def _load() -> ModuleType:
    """Return the process's tilekern.

    Raises:
        ImportError: another version of it is imported already, or a package that it needs is not installed.
    """
    own: dict[str, Any] = json.loads((_HERE / "tilekern.json").read_text(encoding="utf-8"))
    imported = sys.modules.get("tilekern")
    if imported is not None and imported.__version__ != own["version"]:
        raise ImportError(
            f"tilekern {imported.__version__} is imported already, {_HERE} has {own['version']}, and a process has one "
            f"of them; install tilekern {own['version']}, or none"
        )
    module = imported or _import_own()
    try:
        importlib.import_module("tilekern.integrations.hub_layers")
    except ModuleNotFoundError as error:
        needed = " ".join(f"'{need}'" for need in own["needs"])
        raise ImportError(f"tilekern cannot be imported: {error}; pip install {needed}") from error
    if Path(str(module.__file__)).parent != _OWN:
        importlib.import_module("tilekern.cache.places").add_packs(_OWN / "prebuilt", own["name"])
        importlib.import_module("tilekern.runtime.dispatch").forget()
    return module


def _import_own() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tilekern", _OWN / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tilekern"] = module
    spec.loader.exec_module(module)
    return module


_tilekern = _load()
layers: ModuleType = importlib.import_module("tilekern.integrations.hub_layers")
ops: ModuleType = importlib.import_module("tilekern.ops")


def __getattr__(name: str) -> Any:
    return getattr(_tilekern, name)
