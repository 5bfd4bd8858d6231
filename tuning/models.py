"""Models as the tuner sees them: the sizes that kernels depend on, from a preset, a config.json or the hub."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tilekern.errors import InputError
from tilekern.spec import ModelShape


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
# Model types that normalise q and k head by head before the rotation.
_QK_NORM_TYPES = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "olmo2"})
_LARGEST = 1 << 24


def resolve_model(model: str) -> ModelShape:
    """The model that a person names.

    Args:
        model: a preset (``qwen3-8b``), the path of a config.json or of a folder with one, or a hub id.

    Raises:
        InputError: no such model, or its config lacks a field or has a value that no model can have.
    """
    if model.lower() in PRESETS:
        return PRESETS[model.lower()]
    try:
        path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
        named = path.suffix == ".json" or path.exists()
    except OSError as error:
        raise InputError(f"cannot read {model}: {error.strerror}") from None
    if named:
        return shape_of_config(_read(path), str(path))
    if model.count("/") == 1 and not model.startswith((".", "/")):
        return shape_of_config(_read(_from_hub(model)), model)
    raise InputError(
        f"unknown model {model!r}: give a preset ({', '.join(PRESETS)}), the path of a config.json or of a folder "
        "with one, or a hub id such as Qwen/Qwen3-8B"
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a model's config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object; a model's config.json is one")
    return found


def _from_hub(model: str) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    kept = try_to_load_from_cache(model, "config.json")
    if isinstance(kept, str):
        return Path(kept)
    try:
        # The client would go on trying for half a minute where there is no hub.
        endpoint = urlsplit(constants.ENDPOINT)
        socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=5).close()
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # noqa: BLE001 (the hub client raises many kinds; all mean that it is out of reach)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise InputError(
            f"cannot fetch {model} from the hub ({reason}); pass the path of its config.json or a preset "
            f"({', '.join(PRESETS)})"
        ) from None


def _is_windowed(config: Mapping[str, Any]) -> bool:
    """Whether a config has a sliding window that is in use; some families carry one that is switched off."""
    return config.get("sliding_window") is not None and config.get("use_sliding_window", True) is True


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes in a Hugging Face config; the text part of a multimodal one.

    Raises:
        InputError: a field is missing or has a value that no model can have; the message names it.
    """
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]

    def size(field: str, fallback: int | None = None) -> int:
        value = config.get(field, fallback)
        if value is None:
            value = fallback
        if value is None:
            raise InputError(f"{name}: the config lacks {field!r}; a decoder's config.json has it")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise InputError(f"{name}: {field} is {value!r}; expected a whole number from 1 to {_LARGEST}")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", hidden // heads if hidden % heads == 0 else None)
    if heads % kv_heads:
        raise InputError(f"{name}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise InputError(f"{name}: head_dim is {head_dim}; rotary embedding needs an even one")
    model_type = config.get("model_type", "unknown")
    return ModelShape(
        name=name,
        model_type=str(model_type),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=size("num_hidden_layers", 1),
        vocabulary=size("vocab_size", 1),
        qk_norm=model_type in _QK_NORM_TYPES,
        sliding_window=size("sliding_window") if _is_windowed(config) else None,
    )
