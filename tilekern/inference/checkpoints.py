"""Checkpoints: the tensors and the config of a model, from a folder, a file or the Hugging Face hub.

A folder has ``model.safetensors``, or ``model.safetensors.index.json`` and its shards, or a state dict of
``torch.save``, as minGPT and nanoGPT write it. Files are mapped, not copied.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from tilekern.errors import InputError
from tilekern.inference.host_tensors import HostTensor, MappedFile
from tilekern.inference.hub import HUB_ID, cache_folder, cached_snapshot, download
from tilekern.inference.json_files import read_json
from tilekern.inference.safetensors_files import read_safetensors

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_OF_TORCH = ("pytorch_model.bin", "model.pt", "ckpt.pt")
_SHARD = re.compile(r"[\w.-]+\.safetensors")
# The files of the weights, each with the names of the tensors to take from it, or None for all.
_Weights = dict[Path, set[str] | None]


class Checkpoint(contextlib.AbstractContextManager["Checkpoint"]):
    """The config and tensors of a model, until it is closed.

    Attributes:
        folder: the folder of its files.
        config: the contents of ``config.json``; empty if the folder has none.
        tensors: the tensors by name, file by file in the order of the files' names; those of a safetensors file in the
            order of their bytes, those of a state dict in its own order.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], tensors: Mapping[str, HostTensor], files: contextlib.ExitStack
    ) -> None:
        self.folder, self.config, self.tensors = folder, config, tensors
        self._files = files

    def close(self) -> None:
        """Unmap the files. The tensors' data can no longer be read; views of it keep the memory until they are gone."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(where: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint.

    Args:
        where: a folder, a file of safetensors or of ``torch.save``, or a hub id such as ``Qwen/Qwen3-0.6B``, which is
            looked up in the local cache and downloaded if huggingface_hub is installed and may go online.

    Raises:
        InputError: there is no checkpoint, or a file of it is wrong.
    """
    folder, weights = _located(where)
    config = read_json(folder / "config.json") if os.path.lexists(folder / "config.json") else {}
    with contextlib.ExitStack() as files:
        tensors: dict[str, HostTensor] = {}
        for path, names in weights.items():
            file = files.enter_context(contextlib.closing(MappedFile(path)))
            tensors |= _chosen(path, _read(file), names)
        return Checkpoint(folder, config, tensors, files.pop_all())


def _read(file: MappedFile) -> dict[str, HostTensor]:
    if file.path.suffix == ".safetensors":
        return read_safetensors(file)
    from tilekern.inference.torch_files import read_torch_file  # which loads what reads pickles

    return read_torch_file(file)


def folder_of(where: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint's files, downloaded if need be; takes and raises what open_checkpoint does."""
    return _located(where)[0]


def _chosen(path: Path, tensors: dict[str, HostTensor], names: set[str] | None) -> dict[str, HostTensor]:
    """Return the tensors that the index places in a file; it alone says which of them count."""
    if names is None:
        return tensors
    if missing := names - tensors.keys():
        raise InputError(f"{path} has no tensor {min(missing)!r:.100}, which {_INDEX} places there")
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _located(where: str | os.PathLike[str]) -> tuple[Path, _Weights]:
    path = Path(where)  # an empty name would be the current folder
    if os.path.isfile(where):
        return path.parent, {path: None}
    if os.path.isdir(where):
        return path, _weights(path)
    if not isinstance(where, str) or not HUB_ID.fullmatch(where):
        raise InputError(
            f"{where or repr(where)} is neither a folder nor a file; pass one, or a hub id such as Qwen/Qwen3-0.6B"
        )
    folder = cached_snapshot(where)
    reason = f"is neither a folder nor in the Hugging Face cache {cache_folder()}"
    if folder is not None:
        try:
            return folder, _weights(folder)
        except InputError as error:
            reason = f"is not whole in the Hugging Face cache ({error})"
    folder = download(where, reason)
    return folder, _weights(folder)


def _weights(folder: Path) -> _Weights:
    """Return the files of a folder's weights, in the order in which transformers looks for them.

    Raises:
        InputError: it has none, or not all that its index names.
    """
    for name in (_WHOLE, _INDEX, *_OF_TORCH):
        if os.path.isfile(folder / name):
            return _shards(folder / name) if name == _INDEX else {folder / name: None}
    raise InputError(f"{folder} has no weights; they must be {_WHOLE}, {_INDEX} or {' or '.join(_OF_TORCH)}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _shards(path: Path) -> _Weights:
    try:
        places = msgspec.convert(read_json(path), _Index).weight_map
    except msgspec.ValidationError as error:
        raise InputError(f"{path} must map tensors to files in weight_map: {error}") from None
    shards: dict[str, set[str]] = {}
    for tensor, name in places.items():
        if not _SHARD.fullmatch(name):
            raise InputError(
                f"{path} places tensor {tensor!r:.100} in {name!r:.100}, which is not a .safetensors file of its folder"
            )
        shards.setdefault(name, set()).add(tensor)
    missing = [name for name in sorted(shards) if not os.path.isfile(path.parent / name)]
    if missing:
        raise InputError(f"{path} names files that are missing, {len(missing)} in all: {missing[0]:.100}")
    return {path.parent / name: shards[name] for name in sorted(shards)}
