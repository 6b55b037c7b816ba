"""Checkpoints of `torch.distributed.checkpoint` on disk, as FSDP2 writes them: read without trust, and written.

    .metadata        a pickle: which tensor is cut into which chunks, and where each is
    __0_0.distcp     chunks end to end, each as torch.save writes it

The metadata is unpickled with the few classes that it needs, and each chunk with ``weights_only``: nothing else is
run. Relies on ``torch.distributed.checkpoint.filesystem._StorageInfo``, in torch 2.11 to 2.14.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_compiled.torch_private.names import find

NAME = ".metadata"
StorageInfo = find("torch.distributed.checkpoint.filesystem._StorageInfo")
FILE = 4 << 30  # bytes: a file is closed when it has as many
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint needs")


class Reader:
    """One checkpoint, a tensor at a time. Raises ``ValueError`` with the file for what is damaged or foreign."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / NAME
        try:
            with path.open("rb") as file:
                self.metadata: Metadata = _Careful(file).load()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
        except Exception as error:
            raise ValueError(f"{path} is not DCP's metadata, or is damaged: {error}.") from error
        if not isinstance(self.metadata, Metadata) or not isinstance(self.metadata.storage_data, dict):
            raise ValueError(f"{path} is not the metadata of files that DCP wrote.")
        self.entries = self.metadata.state_dict_metadata

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor, put together from its chunks."""
        entry = self.entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        there = torch.zeros(entry.size, dtype=torch.bool)
        for chunk in entry.chunks:
            value = self._load(MetadataIndex(key, chunk.offsets))
            if not isinstance(value, torch.Tensor) or value.shape != chunk.sizes:
                raise ValueError(f"{self._folder}: a chunk of {key} is not the tensor that {NAME} says.")
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            whole[place] = value
            there[place] = True
        if not bool(there.all()):
            raise ValueError(f"{self._folder}: elements of {key} are in no chunk.")
        return whole

    def value(self, key: str) -> Any:
        """Something that is no tensor: a number, a string, a list."""
        return self._load(MetadataIndex(key))

    def _load(self, index: MetadataIndex) -> Any:
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise ValueError(f"{self._folder / NAME} does not say where {index.fqn} is.")
        path = self._folder / info.relative_path
        if Path(info.relative_path).is_absolute() or ".." in Path(info.relative_path).parts:
            raise ValueError(f"{self._folder / NAME} names a file in another folder: {info.relative_path}.")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{path}: {index.fqn} was written by an extension ({info.transform_descriptors}).")
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}. It holds {index.fqn}.") from error
        except Exception as error:
            raise ValueError(f"{path} is damaged, or holds no plain data at {index.fqn}: {error}") from error


def write(folder: Path, items: Iterable[tuple[tuple[str, ...], Any]]) -> None:
    """Writes tensors and plain values by path, ``("optim", "state", "0.weight", "exp_avg")``, each when it comes."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    number, file, name = 0, None, ""
    try:
        for path, value in items:
            key = ".".join(map(str, path))
            paths[key] = path
            if file is None or file.tell() > FILE:
                if file is not None:
                    _close(file)
                name, number = f"__0_{number}.distcp", number + 1
                file = (folder / name).open("xb")
            start = file.tell()
            torch.save(value, file)
            if isinstance(value, torch.Tensor):
                begin = torch.Size([0] * value.dim())
                chunks = [ChunkStorageMetadata(begin, value.shape)]
                described[key] = TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.shape, chunks)
                index = MetadataIndex(key, begin, 0)
            else:
                described[key] = BytesStorageMetadata()
                index = MetadataIndex(key)
            places[index] = StorageInfo(name, start, file.tell() - start)
    finally:
        if file is not None:
            _close(file)
    meta = Metadata(described, paths, places, StorageMeta(), "1.0.0")
    with (folder / NAME).open("xb") as file:
        pickle.dump(meta, file)
        _close(file)


def _close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def by_group(entries: Mapping[str, Any], prefix: str) -> dict[str, dict[str, str]]:
    """The keys of ``param_groups``: by what follows it (a number, or a parameter's name), by option."""
    found: dict[str, dict[str, str]] = {}
    for key in entries:
        if key.startswith(f"{prefix}param_groups."):
            owner, option = key.removeprefix(f"{prefix}param_groups.").rsplit(".", 1)
            found.setdefault(owner, {})[option] = key
    return found
