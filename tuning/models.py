"""Models as the tuner sees them: the sizes that kernels depend on, from a preset, a config.json or the hub."""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tilekern.errors import InputError
from tilekern.spec import ModelShape
from tilekern.warning import warn_once
from tuning.families import Layers, Model, model_of_config


def _qwen3(size: str, hidden: int, intermediate: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(f"qwen3-{size}", "qwen3", hidden, intermediate, heads, 8, 128, layers, 151936, qk_norm=True)


# The published config.json of each Qwen/Qwen3-* dense model, and of meta-llama/Meta-Llama-3-8B.
PRESETS = {
    shape.name: shape
    for shape in (
        _qwen3("0.6b", 1024, 3072, 28, 16),
        _qwen3("1.7b", 2048, 6144, 28, 16),
        _qwen3("4b", 2560, 9728, 36, 32),
        _qwen3("8b", 4096, 12288, 36, 32),
        _qwen3("14b", 5120, 17408, 40, 40),
        _qwen3("32b", 5120, 25600, 64, 64),
        ModelShape("llama-3-8b", "llama", 4096, 14336, 32, 8, 128, 32, 128256, qk_norm=False),
    )
}


MODEL_IS = (
    f"a preset ({', '.join(PRESETS)}), the path of a config.json or of a folder with one, or a hub id such as "
    "Qwen/Qwen3-8B"
)


class UnknownModel(InputError):  # noqa: N818 (the name says the state)
    """A word that names no model; ``word`` is it."""

    def __init__(self, word: str) -> None:
        super().__init__(f"unknown model {word!r}: give {MODEL_IS}")
        self.word = word


def resolve_model(model: str) -> ModelShape:
    """The sizes of the commonest layers of the model that a person names; raises as ``find_model``."""
    return find_model(model).shape


def find_model(model: str) -> Model:
    """The model that a person names, with all its kinds of layers.

    Args:
        model: a preset (``qwen3-8b``), the path of a config.json or of a folder with one, or a hub id.

    Raises:
        UnknownModel: no such model.
        InputError: its config cannot be read or fetched, lacks a field or has a value that no model can have.
    """
    require_model_name(model)
    if model.lower() in PRESETS:
        return of_shape(PRESETS[model.lower()])
    if path := _config_at(model):
        return model_of_config(_read(path), str(path))
    return model_of_config(_from_hub(model), model)


def require_model_name(word: str) -> None:
    """Refuse a word that can name no model, whatever the hub has.

    Raises:
        UnknownModel: it is no preset, no path of a config and no hub id.
        InputError: a folder on the way to it cannot be read.
    """
    is_hub_id = word.count("/") == 1 and not word.startswith((".", "/"))
    if word.lower() not in PRESETS and not is_hub_id and _config_at(word) is None:
        raise UnknownModel(word)


def _config_at(model: str) -> Path | None:
    """The config.json that a path leads to, or would; None where it is none of one."""
    try:
        path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
        return path if path.suffix == ".json" or path.exists() else None
    except OSError as error:
        raise InputError(f"cannot read {model}: {error.strerror}") from None


def of_shape(shape: ModelShape) -> Model:
    """A model whose layers are all alike."""
    return Model(shape.name, (Layers(shape),))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a model's config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object; a model's config.json is one")
    return found


def _from_hub(model: str) -> Mapping[str, Any]:
    from huggingface_hub import constants, try_to_load_from_cache

    kept = try_to_load_from_cache(model, "config.json")
    if isinstance(kept, str):
        return _read(Path(kept))
    with tempfile.TemporaryDirectory() as spare:
        try:
            # The client would go on trying for half a minute where there is no hub.
            endpoint = urlsplit(constants.ENDPOINT)
            socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=5).close()
            path = _downloaded(model, spare)
        except Exception as error:  # noqa: BLE001 (the hub client raises many kinds; all mean that it is out of reach)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            raise InputError(
                f"cannot fetch {model} from the hub ({reason}); pass the path of its config.json or a preset "
                f"({', '.join(PRESETS)})"
            ) from None
        return _read(path)


def _downloaded(model: str, spare: str) -> Path:
    """The config.json of the hub's model, in the hub's cache; in the folder ``spare`` where that cannot be written."""
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


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes of the commonest layers in a Hugging Face config; the text part of a multimodal one.

    Raises:
        InputError: a field is missing or has a value that no model can have; the message names it.
    """
    return model_of_config(config, name).shape


def sharded(shape: ModelShape, tp: int) -> ModelShape:
    """What one of ``tp`` ranks has of a model, split as by the tensor-parallel plans of transformers and of Megatron.

    Heads, the MLP's columns and the vocabulary are divided; hidden states are whole on each rank. Where there are
    fewer key-value heads than ranks, several ranks hold the same one.

    Raises:
        InputError: the ranks cannot divide one of these evenly; the message names it.
    """
    if tp == 1:
        return shape
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise _undivided(shape, "key-value heads", shape.kv_heads, tp)
    return dataclasses.replace(
        shape,
        name=f"{shape.name}-tp{tp}",
        heads=_share(shape, "heads", shape.heads, tp),
        kv_heads=max(1, shape.kv_heads // tp),
        intermediate=_share(shape, "columns of the MLP", shape.intermediate, tp),
        vocabulary=_share(shape, "tokens in the vocabulary", shape.vocabulary, tp),
    )


def sharded_model(model: Model, tp: int) -> Model:
    """What one of ``tp`` ranks has of each kind of layers.

    transformers gathers the logits before a loss of its own, Megatron takes the loss of a rank's share: both are there.

    Raises:
        InputError: ``tp`` is no number of ranks, or does not divide the model.
    """
    if tp < 1:
        raise InputError(f"--tp {tp}: the tensor-parallel degree is a whole number from 1 on")
    if tp == 1:
        return model
    layers = [dataclasses.replace(kind, shape=sharded(kind.shape, tp)) for kind in model.layers]
    whole = dataclasses.replace(layers[0].shape, vocabulary=model.shape.vocabulary)
    layers.append(Layers(whole, only=frozenset({"cross_entropy"})))
    return Model(f"{model.name}-tp{tp}", tuple(layers), model.left_out)


def _share(shape: ModelShape, what: str, count: int, tp: int) -> int:
    if count % tp:
        raise _undivided(shape, what, count, tp)
    return count // tp


def _undivided(shape: ModelShape, what: str, count: int, tp: int) -> InputError:
    return InputError(f"--tp {tp}: {shape.name} has {count} {what}, which {tp} ranks cannot share evenly")
