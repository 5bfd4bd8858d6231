"""Finds a model's configuration by name: a preset, a config.json, or a hub id."""

from __future__ import annotations

import errno
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tilekern.errors import InputError
from tilekern.inference.hub import cache_folder, cached_snapshot
from tilekern.inference.json_files import read_json
from tilekern.tuning.plan.presets import PRESETS
from tilekern.warning import warn_once

# What no model has more of; a step of one with more would take forever to trace, and its kernels would not compile.
_MOST = {
    "num_hidden_layers": 1 << 12,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 24,
    "num_key_value_heads": 1 << 24,
    "head_dim": 1 << 24,
    "vocab_size": 1 << 24,
}

# Names the plan of all presets and of frequent sizes, where models are planned.
BASE = "base"
MODEL_IS = (
    "a preset such as qwen3-8b (--help lists them), the path of a config.json or of a folder with one, or a hub id "
    "such as Qwen/Qwen3-8B"
)


class UnknownModel(InputError):  # noqa: N818 (the name says the state)
    """An error for a word that names no model; ``word`` is that word."""

    def __init__(self, word: str) -> None:
        super().__init__(f"unknown model {word!r}: give {MODEL_IS}")
        self.word = word


def config_named(model: str) -> tuple[str, Any]:
    """Return a model's name for people, and its configuration, an object of transformers.

    Args:
        model: a preset (``qwen3-8b``), the path of a config.json or of a folder with one, or a hub id.

    Raises:
        UnknownModel: no such model.
        InputError: its config cannot be read or fetched, or transformers does not take it.
    """
    name, fields = fields_named(model)
    return name, config_of(fields, name)


def fields_named(model: str) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name for people, and the fields of its config.json; see :func:`config_named`.

    Raises:
        UnknownModel: no such model.
        InputError: its config cannot be read or fetched.
    """
    require_model_name(model)
    if model.lower() == BASE:
        raise InputError(f"{BASE} stands for many models, and has no config of its own; name one of them")
    if model.lower() in PRESETS:
        return model.lower(), PRESETS[model.lower()]
    path = path_named(model)
    if path is not None:
        return str(path), config_in(path)
    return model, _from_hub(model)


def fields_of(model: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name for people, and the fields of the config.json, of a model in any form but a module.

    Args:
        model: what :func:`fields_named` takes, or a configuration of transformers or its dictionary.

    Raises:
        UnknownModel: no such model.
        InputError: its config cannot be read or fetched, or ``model`` is something else.
    """
    if isinstance(model, str | Path):
        return fields_named(str(model))
    fields = model.to_dict() if hasattr(model, "to_dict") else model
    if not isinstance(fields, Mapping):
        raise InputError(
            "a model is a name, a path, a configuration of transformers or its dictionary, or a module; got "
            f"{model!r:.60}"
        )
    return getattr(model, "name_or_path", "") or str(fields.get("model_type", "the model")), fields


def require_model_name(word: str) -> None:
    """Refuse a word that cannot name a model, whatever the hub has.

    Raises:
        UnknownModel: it is not a preset, ``base``, the path of a config or a hub id.
        InputError: a folder on the way to it cannot be read.
    """
    is_hub_id = word.count("/") == 1 and not word.startswith((".", "/"))
    if word.lower() not in (*PRESETS, BASE) and not is_hub_id and path_named(word) is None:
        raise UnknownModel(word)


def path_named(model: str) -> Path | None:
    """Return the file that is named, or the config.json of a named folder; None if no file is meant.

    Raises:
        InputError: it cannot be looked at.
    """
    if not model:  # as of an unset variable of the shell; it would be the current folder
        return None
    try:
        path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
        return path if path.suffix == ".json" or path.exists() else None
    except OSError as error:
        raise InputError(f"cannot read {model}: {error.strerror}") from None


def config_in(path: Path) -> Mapping[str, Any]:
    """Return the fields of a config.json, or of another JSON file that is given in its place.

    Raises:
        InputError: the file is missing, cannot be read, or contains something else.
    """
    try:
        return read_json(path)
    except InputError as error:
        raise InputError(f"{error}; give the path of a model's config.json") from None


def _from_hub(model: str) -> Mapping[str, Any]:
    snapshot = cached_snapshot(model)
    if snapshot is not None and (snapshot / "config.json").is_file():
        return config_in(snapshot / "config.json")
    try:
        from huggingface_hub import constants
    except ImportError:
        raise InputError(
            f"{model} is not in the Hugging Face cache {cache_folder()}, and huggingface_hub is not installed; pass "
            "the path of its config.json, or a preset such as qwen3-8b"
        ) from None
    with tempfile.TemporaryDirectory() as spare:
        try:
            # The client would go on trying for half a minute where there is no hub.
            endpoint = urlsplit(constants.ENDPOINT)
            socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=5).close()
            path = _downloaded(model, spare)
        except Exception as error:  # noqa: BLE001 (the hub client raises many kinds; all mean that it is out of reach)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            raise InputError(
                f"cannot fetch {model} from the hub ({reason}); pass the path of its config.json, or a preset such as "
                "qwen3-8b"
            ) from None
        return config_in(path)


def _downloaded(model: str, spare: str) -> Path:
    """Download a model's config.json to the hub's cache, or to ``spare`` if that cannot be written."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        warn_once(
            f"cannot write the hub's cache, {error.filename}: {error.strerror}; config.json of {model} is not kept and "
            "is fetched again by the next run; HF_HOME names another folder"
        )
    return Path(hf_hub_download(model, "config.json", local_dir=spare))


def config_of(config: Mapping[str, Any], name: str) -> Any:
    """Make a configuration of transformers from the fields of a config.json; of a multimodal one, the text part.

    Raises:
        InputError: transformers does not know the model, or does not take a value; the message names ``name``.
    """
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{name}: model_type is missing; a model's config.json has it")
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{name}: transformers {transformers.__version__} does not know the model type {kind!r:.60}")
    try:
        found = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # noqa: BLE001 (each class refuses in its own way)
        raise InputError(
            f"{name}: transformers does not take this config: {' '.join(str(error).split())[:300]}"
        ) from None
    chosen = _decoder(found)
    chosen = chosen if type(chosen) in AutoModelForCausalLM._model_mapping else found
    _check_sizes(chosen, name)
    return chosen


def _decoder(config: Any) -> Any:
    """Return the configuration of the text part; of a model with several, the model's own."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def _check_sizes(config: Any, name: str) -> None:
    fields = config.to_dict()
    for size, most in _MOST.items():
        field = config.attribute_map.get(size, size)
        value = fields.get(field)
        if isinstance(value, int) and not 1 <= value <= most:
            raise InputError(f"{name}: {field} is {value}; expected a whole number from 1 to {most}")
