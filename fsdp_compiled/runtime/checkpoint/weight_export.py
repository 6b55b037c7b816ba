"""Writes a model's weights in the layout of Hugging Face (`weight_files`), from shards.

No rank ever holds more than its own: rank 0 makes the files, with room for everything, and each rank writes its
stretches where they belong.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import weight_files
from fsdp_compiled.runtime.checkpoint.data_file import Item, Layout, lay_out, refuse_pairs
from fsdp_compiled.runtime.checkpoint.dcp import parts_of
from fsdp_compiled.runtime.checkpoint.manifest import Entry
from fsdp_compiled.runtime.checkpoint.memory import memory_of
from fsdp_compiled.runtime.checkpoint.stretches import Holders, Place, held, tensors
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.checkpoint.weight_keys import Keys, keys_of


@dataclass(frozen=True)
class Plan:
    """What is in which file. ``sizes``: in bytes, by key; ``places``: the file and where in it the tensor begins."""

    sizes: dict[str, int]
    layouts: dict[str, Layout]
    places: dict[str, tuple[str, int]]


def plan(keys: Keys, whole: Mapping[str, Entry], buffers: Mapping[str, torch.Tensor]) -> Plan:
    """Files in the order of the state_dict, each as large as allowed."""
    items = [
        _item(key, whole[f"model.{name}"].shape, whole[f"model.{name}"].dtype) for key, name in keys.parameters.items()
    ]
    items += [_item(key, buffers[name].shape, buffers[name].dtype) for key, name in keys.buffers.items()]
    of = {item.key: item for item in items}
    sizes = {item.key: item.nbytes for item in items}
    layouts = {
        name: lay_out([of[key] for key in row], {"format": "pt"}) for name, row in weight_files.names_of(sizes).items()
    }
    places = {key: (name, offset) for name, layout in layouts.items() for key, offset in layout.offsets.items()}
    return Plan(sizes, layouts, places)


def _item(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Item:
    refuse_pairs(key, dtype)
    return Item(key, dtype, tuple(shape), torch.Size(shape).numel() * dtype.itemsize)


def export(folder: Path, model: nn.Module, trained: Trained, mesh: Mesh) -> Work[None]:
    """Writes the model's weights; in stages, for `lockstep`. The folder is there whole, or not at all."""
    aside: Path | None = None
    done = False
    try:
        keys = keys_of(model, trained)
        state = trained.state
        whole = tensors(trained.plan, (), {})
        files = plan(keys, whole, state.buffers)
        if mesh.rank == 0:
            aside = _begin(folder, files)
        own = Place(mesh.shard_rank, mesh.tp_rank)
        said = yield Exchange("the files", (aside, own))
        place = said[0][0]
        holders = Holders(mesh.rank, [one for _, one in said])
        of: dict[str, list[str]] = {}
        for key, name in keys.parameters.items():
            of.setdefault(f"model.{name}", []).append(key)
        opened = {name: os.open(place / name, os.O_WRONLY) for name in files.layouts}
        try:
            for one in held(trained.plan, (), own, state.parameters, {}, holders):
                for key in of.get(one.name, ()):
                    file, offset = files.places[key]
                    for offsets, view in parts_of(whole[one.name], one):
                        _write(opened[file], offset, whole[one.name].shape, offsets, view.detach().cpu())
            for key, name in keys.buffers.items() if mesh.rank == 0 else ():
                file, offset = files.places[key]
                _write_all(opened[file], memory_of(state.buffers[name].detach().cpu().contiguous()), offset)
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        yield "the weights"
        if aside is not None:
            _write_descriptions(aside, model, files)
            folders.sync(aside)
            with suppress(FileNotFoundError):
                folder.rmdir()  # an empty one
            os.rename(aside, folder)
            folders.sync(folder.parent)
        done = True
        yield "the folder"
    except OSError as error:
        raise ValueError(f"The weights cannot be written to {folder}: {error.strerror or error}.") from error
    finally:
        if aside is not None and not done:
            shutil.rmtree(aside, ignore_errors=True)


def _begin(folder: Path, files: Plan) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty. Export to a new folder, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    aside.mkdir()
    try:
        for name, layout in files.layouts.items():
            with (aside / name).open("wb") as file:
                file.write(layout.header)
                file.truncate(layout.size)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _write(descriptor: int, offset: int, shape: tuple[int, ...], offsets: tuple[int, ...], view: torch.Tensor) -> None:
    """Puts a rectangle of a tensor where it belongs in a file, in as few runs as its rows allow."""
    dims = len(shape)
    run = dims  # dims from here on are whole, so that they and the one before lie end to end
    while run > 0 and view.shape[run - 1] == shape[run - 1]:
        run -= 1
    lead = max(run - 1, 0)
    strides = [int(torch.Size(shape[dim + 1 :]).numel()) for dim in range(dims)]
    start = sum(place * stride for place, stride in zip(offsets, strides))
    for index in itertools.product(*(range(size) for size in view.shape[:lead])):
        place = start + sum(one * stride for one, stride in zip(index, strides))
        row = view[index].contiguous()
        _write_all(descriptor, memory_of(row), offset + place * row.itemsize)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[: 64 << 20], offset)
        data, offset = data[count:], offset + count


def _write_descriptions(aside: Path, model: Any, files: Plan) -> None:
    """The index, and what the model says of itself."""
    weight_files.write_index(aside, files.sizes)
    for name in ("config", "generation_config"):
        described: Any = getattr(model, name, None)
        if callable(getattr(described, "save_pretrained", None)):
            described = copy.deepcopy(described)
            if name == "config":
                described.architectures = [type(model).__name__]
            described.save_pretrained(str(aside))
