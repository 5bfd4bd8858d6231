"""Snapshots of the Hugging Face hub: in its local cache, or downloaded to it with huggingface_hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tilekern.errors import InputError

# The form of a repository's id, ``ORG/NAME`` or ``NAME``.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = ("1", "ON", "YES", "TRUE")


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache, by the variables that it reads."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))))


def cached_snapshot(hub_id: str) -> Path | None:
    """Return the folder of a repository's main branch in the cache; None if it was not downloaded."""
    repository = cache_folder() / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and os.path.isdir(folder) else None


def download(hub_id: str, reason: str) -> Path:
    """Download a repository's JSON and safetensors files to the cache; return the snapshot's folder.

    Args:
        hub_id: the repository.
        reason: why the cache does not serve, for the message.

    Raises:
        InputError: huggingface_hub is not installed, is told to stay offline, or fails.
    """
    advice = f"download it with `hf download {hub_id}`, or pass a folder"
    if (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE:
        raise InputError(f"{hub_id} {reason}, and HF_HUB_OFFLINE is set; {advice}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(f"{hub_id} {reason}, and huggingface_hub is not installed; {advice}") from None
    try:
        folder = snapshot_download(
            hub_id, cache_dir=cache_folder(), allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"]
        )
    except Exception as error:  # noqa: BLE001 (the hub client raises many kinds; all mean that it is out of reach)
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{hub_id} {reason}, and the hub did not give it ({said}); {advice}") from None
    return Path(folder)
