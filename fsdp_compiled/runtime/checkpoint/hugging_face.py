"""Weights in the layout of Hugging Face: safetensors files under the names of ``model.state_dict()``.

    folder/config.json                             where the model has one
           model.safetensors                       or, where that is too large,
           model-00001-of-00002.safetensors  ...   with
           model.safetensors.index.json            which tensor is in which

`export` writes such a folder and `tensors_of` reads it. No rank ever holds more than its own elements: rank 0 makes the
files at their full size, and each rank writes its own elements where they belong.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fsdp_compiled.distributed.mesh import Exchange, Mesh, Work
from fsdp_compiled.plan.leaf import contiguous_stride
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Holders, held, place_of
from fsdp_compiled.runtime.checkpoint.chunks import tensors as every_tensor
from fsdp_compiled.runtime.checkpoint.contents import Trained
from fsdp_compiled.runtime.checkpoint.data_file import DTYPES, Layout, lay_out, memory_of, packed, resolved, unread
from fsdp_compiled.runtime.checkpoint.whole import keys_of, load_weights

LARGEST = 5 << 30  # bytes of a file
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH = {text: dtype for dtype, text in DTYPES.items()}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the folder's safetensors files, by key, not read yet. Raises ``ValueError`` if there are none, or
    bad ones."""
    found: dict[str, torch.Tensor] = {}
    try:
        if (folder / INDEX).is_file():
            names = _indexed(folder / INDEX)
        elif (folder / SINGLE).is_file():
            names = [SINGLE]
        else:
            there = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
            raise ValueError(
                f"{folder} has neither model.safetensors nor {INDEX}"
                + (f"; {there} is a pickle, which is not read: save it with safe_serialization=True." if there else ".")
            )
        for name in names:
            file = safe_open(folder / name, framework="pt")
            for key in file.keys():  # noqa: SIM118, it is no dictionary
                one = file.get_slice(key)
                if one.get_dtype() not in TORCH:
                    raise ValueError(f"{folder / name}: {key} is {one.get_dtype()}, a dtype that is not known here.")
                found[key] = unread(one.get_shape(), TORCH[one.get_dtype()], partial(file.get_tensor, key))
    except SafetensorError as error:
        raise ValueError(f"{folder / name} is no safetensors file, or damaged: {error}.") from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {type(error).__name__}: {error}.") from error
    return found


def is_there(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def files_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
    """The files of these tensors, in their order, each as large as allowed."""
    for key, one in tensors.items():
        if one.dtype == torch.complex128:  # other readers would take it for twice as many numbers
            raise ValueError(
                f"{key} is {one.dtype}, which safetensors files have no word for, so another reader would not know it. "
                "Keep it as torch.view_as_real(...), of two real numbers; save(folder) writes it."
            )
    rows = packed(tensors, LARGEST)
    several = [f"model-{n:05d}-of-{len(rows):05d}.safetensors" for n in range(1, len(rows) + 1)]
    names = several if len(rows) > 1 else [SINGLE]
    return {name: lay_out(row, {"format": "pt"}) for name, row in zip(names, rows, strict=True)}


def write_index(folder: Path, layouts: Mapping[str, Layout]) -> None:
    """Writes the index, if there are several files."""
    if len(layouts) > 1:
        weight_map = {key: name for name, layout in layouts.items() for key in layout.offsets}
        total = sum(layout.size - len(layout.header) for layout in layouts.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _indexed(path: Path) -> list[str]:
    """The files that the index names."""
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no index of weights, or damaged ({type(error).__name__}: {error}).") from error
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{path} names {name!r}, which is no file of its folder.")
    return names


def export(folder: Path, model: nn.Module, trained: Trained, mesh: Mesh) -> Work[None]:
    """Writes the model's weights; in stages, for `lockstep`. The folder is there whole, or not at all."""
    try:
        keys, state = keys_of(model, trained), trained.state
        whole = every_tensor(trained.plan, (), {})
        shapes = {key: whole[f"model.{name}"] for key, name in keys.parameters.items()}
        tensors = {key: torch.empty(one.shape, dtype=one.dtype, device="meta") for key, one in shapes.items()}
        files = files_of(tensors | {key: state.buffers[name] for key, name in keys.buffers.items()})
        places = {key: (name, offset) for name, layout in files.items() for key, offset in layout.offsets.items()}
        if mesh.rank == 0 and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists and is not empty. Export to a new folder, or remove it.")
        with folders.aside(folder) if mesh.rank == 0 else nullcontext() as aside:
            if aside is not None:
                for name, layout in files.items():
                    with (aside / name).open("wb") as file:
                        file.write(layout.header)
                        file.truncate(layout.size)
            own = place_of(mesh)
            said = yield Exchange("the files", (aside, own))
            holders = Holders(mesh.rank, [one for _, one in said])
            of: dict[str, list[str]] = {}
            for key, name in keys.parameters.items():
                of.setdefault(f"model.{name}", []).append(key)
            place: Path = said[0][0]
            opened = {name: os.open(place / name, os.O_WRONLY) for name in files}
            try:
                for one in held(trained.plan, (), own, state.parameters, {}, holders):
                    for key in of.get(one.name, ()):
                        name, offset = places[key]
                        _write(opened[name], offset, one)
                for key, name in keys.buffers.items() if aside is not None else ():
                    file_name, offset = places[key]
                    _write_all(opened[file_name], memory_of(resolved(state.buffers[name])), offset)
                for descriptor in opened.values():
                    os.fsync(descriptor)
            finally:
                for descriptor in opened.values():
                    os.close(descriptor)
            yield "the weights"
            if aside is not None:
                write_index(aside, files)
                _describe(aside, model)
        yield "the folder"
    except OSError as error:
        raise ValueError(f"The weights cannot be written to {folder}: {error.strerror or error}.") from error


def _write(descriptor: int, offset: int, one: Chunk) -> None:
    """Writes a chunk of a tensor to its place in a file, in as few runs as its rows allow."""
    view, shape, dims = one.values.detach().cpu(), one.shape, len(one.shape)
    run = dims  # dims from here on are whole, so they and the one before are contiguous
    while run > 0 and view.shape[run - 1] == shape[run - 1]:
        run -= 1
    strides = contiguous_stride(shape)
    start = sum(place * stride for place, stride in zip(one.offsets, strides))
    for index in itertools.product(*(range(size) for size in view.shape[: max(run - 1, 0)])):
        place = start + sum(at * stride for at, stride in zip(index, strides))
        row = view[index].contiguous()
        _write_all(descriptor, memory_of(row), offset + place * row.itemsize)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[: 64 << 20], offset)
        data, offset = data[count:], offset + count


def _describe(aside: Path, model: Any) -> None:
    """Writes the model's own description."""
    for name in ("config", "generation_config"):
        described: Any = getattr(model, name, None)
        if callable(getattr(described, "save_pretrained", None)):
            described = copy.deepcopy(described)
            if name == "config":
                described.architectures = [type(model).__name__]
            described.save_pretrained(str(aside))


def read_weights(
    folder: Path, strict: bool, model: nn.Module, trained: Trained, mesh: Mesh
) -> Work[Callable[[], None]]:
    """Like `load_weights`, for the folder's files."""
    there = tensors_of(folder)
    yield "which files"
    return (yield from load_weights(there, f"The weights in {folder}", strict, model, trained, mesh))
