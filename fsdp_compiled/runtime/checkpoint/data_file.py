"""One file of tensors: safetensors, written and read in blocks of 4 MiB, each with its checksum.

    length of the header, 8 bytes | header, JSON | tensor | tensor | ...
    |---------- block 0 ----------|---------- block 1 ----------|- block 2 -|      a checksum each, in the manifest

Checksums cover all bytes of the file, header included, so no bit of it can change unseen. They are XXH3 of 64 bits,
which runs at several GB/s: it takes less time than the disk, while zlib's crc32 takes more.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The values in host memory, contiguous; of a lazy conjugate or negative, the numbers that it stands for."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, writable; they keep the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"no bytes of a tensor on {tensor.device} with strides {tensor.stride()}")
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


BLOCK = 4 << 20  # bytes
ALIGNMENT = 64  # bytes, a cache line: where the first tensor may start
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


class Corrupt(ValueError):
    """A file of a checkpoint is not what was written."""


def unread(shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Any]) -> torch.Tensor:
    """Stands for a tensor that is read only when it is needed: on the meta device, with what reads it as ``read``.

    ``read()`` is the tensor, or a work that returns it.
    """
    found = torch.empty(tuple(shape), dtype=dtype, device="meta")
    found.read = read
    return found


@dataclass(frozen=True)
class Layout:
    """Where everything is in a file: offsets and size in bytes, from its beginning."""

    header: bytes
    offsets: dict[str, int]
    size: int


def packed(tensors: Mapping[str, torch.Tensor], largest: int) -> list[dict[str, torch.Tensor]]:
    """Tensors by file, in order. A file holds at most ``largest`` bytes, or one tensor that alone is larger."""
    files: list[dict[str, torch.Tensor]] = [{}]
    total = 0
    for key, tensor in tensors.items():
        if files[-1] and total + tensor.nbytes > largest:
            files.append({})
            total = 0
        files[-1][key] = tensor
        total += tensor.nbytes
    return files


def stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in the file: a complex of two float64 becomes two float64, and the manifest says so."""
    return ("F64", (*shape, 2)) if dtype == torch.complex128 else (DTYPES[dtype], shape)


def check_dtype(key: str, dtype: torch.dtype) -> None:
    """Raises ``ValueError`` for what safetensors cannot hold."""
    if dtype not in DTYPES and dtype != torch.complex128:
        raise ValueError(
            f"{key} is {dtype}, which safetensors files cannot hold. Keep it in another dtype, such as its bytes: "
            "tensor.view(torch.uint8)."
        )


def lay_out(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file of these tensors, whose values are not read.

    First come tensors that end where a cache line ends, then the widest elements, so that each is aligned.

    A copy to where lines begin takes two thirds of the time. Raises ``ValueError`` for what safetensors cannot hold.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    position = 0
    for key, one in sorted(
        tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT > 0, -item[1].itemsize, item[1].nbytes == 0)
    ):
        check_dtype(key, one.dtype)
        offsets[key] = position
        dtype, shape = stored(one.dtype, tuple(one.shape))
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + one.nbytes]}
        position += one.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {key: offset + len(header) for key, offset in offsets.items()}, position + len(header))


def write(path: Path, parts: Iterable[memoryview], progress: Callable[[], None] = lambda: None) -> list[str]:
    """Writes these bytes, end to end, to a new file and syncs it; returns the checksums of its blocks.

    Nothing is copied, and no more than one part is held. ``progress`` is called after each block.
    """
    checksums = []
    digest, size = xxhash.xxh3_64(), 0  # of the block that is being written
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        for part in parts:
            while part:
                rest, part = part[: BLOCK - size], part[BLOCK - size :]
                digest.update(rest)
                size += len(rest)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                if size == BLOCK:
                    checksums.append(digest.hexdigest())
                    digest, size = xxhash.xxh3_64(), 0
                    progress()
        if size:
            checksums.append(digest.hexdigest())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksums


def header_of(path: Path) -> dict[str, tuple[str, list[int], int, int]]:
    """What a safetensors file's header says of the tensors that have elements: by key, dtype, shape, and the first byte
    in the file and the one behind the last. Raises `Corrupt`."""
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"it would be {length} bytes long, of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            key: (one["dtype"], one["shape"], 8 + length + start, 8 + length + stop)
            for key, one in header.items()
            for start, stop in [one["data_offsets"]]
            if start < stop
        }
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Corrupt(f"{path} is no safetensors file, or damaged: its header says {error}.") from error


class Request(NamedTuple):
    """A request for bytes ``[start, stop)`` of the file, to be put end to end into ``into``."""

    start: int
    stop: int
    into: memoryview


class Reader:
    """Reads a file whose size and checksums are known, and verifies what it reads, block by block."""

    def __init__(self, path: Path, size: int, checksums: Sequence[str], holds: Callable[[int, int], str]) -> None:
        """``holds``: says what is between two offsets, for messages."""
        self._path, self._size, self._checksums, self._holds = path, size, checksums, holds
        self.verified: set[int] = set()

    def read(self, requests: Iterable[Request], blocks: Sequence[int] = ()) -> None:
        """Fills the requests, and also verifies these blocks. Raises `Corrupt`, with the file and its tensors."""
        some = sorted((one for one in requests if one.start < one.stop), key=lambda one: one.start)
        if not some and not blocks:
            return
        try:
            descriptor = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise Corrupt(f"{self._path} cannot be read: {error.strerror}. {self._lost(0, self._size)}") from error
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor).st_size
            if found != self._size:
                raise Corrupt(
                    f"{self._path} has {found} bytes instead of {self._size}: it was cut or written over. "
                    f"{self._lost(min(found, self._size), self._size)}"
                )
            memory = memory_of(torch.empty(min(BLOCK, self._size), dtype=torch.uint8))
            held, now = memory, -1  # the block that was read last
            for request in some:
                for block in range(request.start // BLOCK, -(-request.stop // BLOCK)):
                    start = block * BLOCK
                    if block != now:
                        held, now = self._verified(file, block, memory), block
                    begin, end = max(start, request.start), min(start + len(held), request.stop)
                    request.into[begin - request.start : end - request.start] = held[begin - start : end - start]
            for block in blocks:
                self._verified(file, block, memory)

    def _verified(self, file: FileIO, block: int, memory: memoryview) -> memoryview:
        """Reads the block into this memory and verifies it."""
        start = block * BLOCK
        held = memory[: min(BLOCK, self._size - start)]
        self._fill(file, start, held)
        if xxhash.xxh3_64_hexdigest(held) != self._checksums[block]:
            raise Corrupt(
                f"{self._path}: bytes {start} to {start + len(held)} are not what was written (checksum). "
                f"{self._lost(start, start + len(held))}"
            )
        self.verified.add(block)
        return held

    def _fill(self, file: FileIO, start: int, into: memoryview) -> None:
        file.seek(start)
        while into:
            count = file.readinto(into)
            if not count:
                raise Corrupt(f"{self._path} ends too early. {self._lost(start, self._size)}")
            into = into[count:]

    def _lost(self, start: int, stop: int) -> str:
        return f"It holds {self._holds(start, stop)}. Load an older checkpoint: load(folder, step=...)."
