"""Weights in the layout of Hugging Face: safetensors files under the names of ``model.state_dict()``.

    folder/config.json                             where the model has one
           model.safetensors                       or, where that is too large,
           model-00001-of-00002.safetensors  ...   with
           model.safetensors.index.json            which tensor is in which

`export` writes such a folder and `read_weights` reads it. No rank ever holds more than its own: to export, rank 0 makes
the files, with room for everything, and each rank writes its own elements where they belong.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import loading
from fsdp_compiled.runtime.checkpoint.contents import Trained
from fsdp_compiled.runtime.checkpoint.data_file import DTYPES, Item, Layout, header_of, lay_out, memory_of, refuse_pairs
from fsdp_compiled.runtime.checkpoint.loading import Staged
from fsdp_compiled.runtime.checkpoint.manifest import DataFile, Entry, Manifest, Piece
from fsdp_compiled.runtime.checkpoint.matching import refusal
from fsdp_compiled.runtime.checkpoint.stretches import Holders, Place, Stretch, held, parts_of, tensors
from fsdp_compiled.runtime.managed_model import holding

LARGEST = 5 << 30  # bytes of a file
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH = {text: dtype for dtype, text in DTYPES.items()}


def is_there(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def rows_of(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Keys by file, in their order: as many as ``largest`` bytes hold, and one where it alone is larger."""
    rows: list[list[str]] = [[]]
    total = 0
    for key, size in sizes.items():
        if rows[-1] and total + size > largest:
            rows.append([])
            total = 0
        rows[-1].append(key)
        total += size
    return rows


def names_of(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The files for tensors of so many bytes each, and which keys are in them."""
    rows = rows_of(sizes, LARGEST)
    if len(rows) == 1:
        return {SINGLE: rows[0]}
    return {f"model-{n:05d}-of-{len(rows):05d}.safetensors": row for n, row in enumerate(rows, 1)}


def write_index(folder: Path, sizes: Mapping[str, int]) -> None:
    """Where there are several files."""
    files = names_of(sizes)
    if len(files) > 1:
        weight_map = {key: name for name, row in files.items() for key in row}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """What is in the folder's safetensors files, by key. Raises ``ValueError`` where there are none, or bad ones."""
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
        found = Manifest(0, 1, {}, {}, {}, {}, {"id": str(folder)})
        for name in names:
            _read_header(folder / name, found)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {type(error).__name__}: {error}.") from error
    return found


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


def _read_header(path: Path, found: Manifest) -> None:
    size = path.stat().st_size
    header, first = header_of(path)
    found.files[path.name] = DataFile(path.name, size, None)
    spans = []
    for key, described in header.items():
        try:
            entry, begin, end = _entry(described)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: {key} is {described!r}. The file is damaged, or of a dtype that is not known here."
            ) from error
        if entry.numel:
            entry.pieces.append(Piece(0, entry.numel, path.name, first + begin))
        found.tensors[key] = entry
        spans.append((begin, end, key))
    position = 0
    for begin, end, key in sorted(spans):  # end to end, as the format has it
        if begin != position:
            raise ValueError(
                f"{path}: {key} begins at byte {begin}, and what is before it ends at {position}: damaged."
            )
        position = end
    if first + position != size:
        raise ValueError(f"{path} has {size} bytes, and its tensors end at {first + position}: damaged.")


def _entry(described: Any) -> tuple[Entry, int, int]:
    """What a header says of one tensor, without pieces, and where its bytes begin and end."""
    dtype, shape, (begin, end) = TORCH[described["dtype"]], described["shape"], described["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("not in whole numbers")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError("not as many bytes as elements")
    return Entry(tuple(shape), dtype, tuple(range(len(shape)))), begin, end


@dataclass(frozen=True)
class Keys:
    """By key of ``model.state_dict()``, which parameter it is, by first name, or which buffer."""

    parameters: dict[str, str]
    buffers: dict[str, str]


def keys_of(model: nn.Module, trained: Trained) -> Keys:
    """Raises ``ValueError`` for a state_dict whose values are not the model's own tensors."""
    instead: dict[int, torch.Tensor] = {}
    named: dict[int, tuple[bool, str]] = {}
    for old in model.parameters():
        new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="meta"), old.requires_grad)
        instead[id(old)] = new
        named[id(new)] = (True, old._sharded_name)
    named |= {id(buffer): (False, name) for name, buffer in trained.state.buffers.items()}
    found = Keys({}, {})
    with holding(model, instead):
        for key, value in model.state_dict(keep_vars=True).items():
            if id(value) not in named:
                raise ValueError(
                    f"{key} of the model's state_dict() is none of its parameters and buffers: a hook makes it, or it "
                    "is extra state. Use sharded.full_state_dict()."
                )
            is_parameter, name = named[id(value)]
            (found.parameters if is_parameter else found.buffers)[key] = name
    if hasattr(model, "config"):  # whose library writes tied weights once, and ties them when it loads
        first = {name: key for key, name in reversed(found.parameters.items())}
        found = Keys({key: name for name, key in reversed(first.items())}, found.buffers)
    return found


def renamed(model: Any, there: Collection[str], keys: Keys) -> Callable[[str], str]:
    """How a key of the model is called there: a head's file loads into its bare model, and the other way round."""
    base = getattr(model, "base_model_prefix", "")
    if not base or any(key in there for key in keys.parameters):
        return lambda key: key
    if any(f"{base}.{key}" in there for key in keys.parameters):
        return lambda key: f"{base}.{key}"
    return lambda key: key.removeprefix(f"{base}.")


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
    layouts = {name: lay_out([of[key] for key in row], {"format": "pt"}) for name, row in names_of(sizes).items()}
    places = {key: (name, offset) for name, layout in layouts.items() for key, offset in layout.offsets.items()}
    return Plan(sizes, layouts, places)


def _item(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Item:
    refuse_pairs(key, dtype)
    return Item(key, dtype, tuple(shape))


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
                    for offsets, view in parts_of(one):
                        _write(opened[file], offset, one.shape, offsets, view.detach().cpu())
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
    write_index(aside, files.sizes)
    for name in ("config", "generation_config"):
        described: Any = getattr(model, name, None)
        if callable(getattr(described, "save_pretrained", None)):
            described = copy.deepcopy(described)
            if name == "config":
                described.architectures = [type(model).__name__]
            described.save_pretrained(str(aside))


def read_weights(
    folder: Path, strict: bool, model: nn.Module, trained: Trained, mesh: Mesh
) -> Work[tuple[Staged, list[tuple[torch.Tensor, str]], list[str]]]:
    """Weights for this rank's shards and buffers, read aside, and what did not fit; in stages, for `lockstep`."""
    manifest = read_manifest(folder)
    yield "which files"
    keys = keys_of(model, trained)
    wrong: list[str] = []
    places: dict[str, list[str]] = {}  # of a tied parameter there may be several
    buffers: list[tuple[torch.Tensor, str]] = []
    prefix = renamed(model, manifest.tensors, keys)
    used: set[str] = set()
    whole = tensors(trained.plan, (), {})
    slots = [slot for buffer in trained.plan.buffers for slot in buffer.slots]
    names = {slot.name: {slot.name, *slot.leaf.names} for slot in slots}
    for key, name in keys.parameters.items():
        names[name].add(key)
    for name, known in names.items():
        there = [key for key in map(prefix, sorted(known)) if key in manifest.tensors]
        used |= set(there)
        if not there:
            wrong.append(f"{name} is not there")
        elif odd := [key for key in there if manifest.tensors[key].shape != whole[f"model.{name}"].shape]:
            shape = list(manifest.tensors[odd[0]].shape)
            wrong.append(f"{name} has shape {list(whole[f'model.{name}'].shape)} here, and {shape} there")
        elif odd := [key for key in there if _loses(manifest.tensors[key].dtype, whole[f"model.{name}"].dtype)]:
            wrong.append(f"{name} is {whole[f'model.{name}'].dtype} here, and {manifest.tensors[odd[0]].dtype} there")
        else:
            places[f"model.{name}"] = there
    for key, name in keys.buffers.items():
        used.add(prefix(key))
        entry = manifest.tensors.get(prefix(key))
        if entry is None or entry.shape != tuple(trained.state.buffers[name].shape):
            wrong.append(f"the buffer {name} is not there, or has another shape")
        else:
            buffers.append((trained.state.buffers[name], prefix(key)))
    wrong += [f"{key} is not in the model" for key in sorted(manifest.tensors.keys() - used)]
    if wrong and strict:
        raise ValueError(refusal(f"The weights in {folder} are of another model", wrong))
    wanted = [
        replace(one, name=key)
        for one in held(trained.plan, (), Place(mesh.shard_rank, mesh.tp_rank), trained.state.parameters, {})
        for key in places.get(one.name, ())
    ]
    trees = [{"$tensor": key} for _, key in buffers]
    staged = yield from loading.read(folder, manifest, mesh, wanted, trees)
    return Staged(_once(staged.pairs, folder), staged.tensors), buffers, wrong


def _loses(there: torch.dtype, here: torch.dtype) -> bool:
    """Whether a cast would make another kind of number of it: of whole ones, which scales may belong to, or complex."""
    return (there.is_floating_point, there.is_complex) != (here.is_floating_point, here.is_complex)


def _once(pairs: Sequence[tuple[Stretch, torch.Tensor]], folder: Path) -> list[tuple[Stretch, torch.Tensor]]:
    """Each place with one tensor. Raises ``ValueError`` where a tied parameter's are not equal."""
    found: list[tuple[Stretch, torch.Tensor]] = []
    for one, values in pairs:
        if not found or found[-1][0].values is not one.values:
            found.append((one, values))
        elif not torch.equal(found[-1][1], values):
            raise ValueError(
                f"{found[-1][0].name} and {one.name} are one parameter here, and differ in {folder}, so nothing "
                "was loaded. Build the model without the tie, or remove the one that is not meant."
            )
    return found
