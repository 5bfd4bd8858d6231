"""JSON files of a checkpoint, read with a limit on their size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from tilekern.errors import InputError

# The format of safetensors allows its header no more; tokenizer.json of the largest vocabularies has a third of it.
LARGEST_JSON_BYTES = 100_000_000


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InputError: the file is missing, is larger than 100 MB, cannot be read, or contains something else.
    """
    if not os.path.isfile(path):
        raise InputError(f"{path} is not a file" if os.path.exists(path) else f"{path} is missing")
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_JSON_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > LARGEST_JSON_BYTES:
        raise InputError(f"{path} is larger than {LARGEST_JSON_BYTES} bytes, so it is not JSON of a checkpoint")
    return parse_object(data, str(path))


def parse_object(
    data: bytes, what: str, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """Return the JSON object in ``data``; ``pairs_hook`` is json's ``object_pairs_hook``.

    Raises:
        InputError: it is not JSON in UTF-8, or not an object; the message begins with ``what``.
    """
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise InputError(f"{what} must be a JSON object, got {type(document).__name__}")
    return document
