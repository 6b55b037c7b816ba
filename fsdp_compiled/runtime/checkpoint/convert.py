"""Converts a checkpoint from one layout into another, on one process, one tensor at a time.

    this package's    folder/step-N, or a folder of those: the newest
    "dcp"             torch.distributed.checkpoint's, as FSDP2 writes model and optimizer
    "hf"              Hugging Face's: weights alone

What a layout has no place for is left out and reported. Only this package's has random states, loss scale and extras.

DCP's files are not trusted. The metadata, a pickle, is read with only the few classes that it needs; what it refers to
is read with ``weights_only``. Nothing else is run.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_compiled.distributed.mesh import Mesh, lockstep
from fsdp_compiled.runtime.checkpoint import data_file, hugging_face, loading
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import manifest as manifests
from fsdp_compiled.runtime.checkpoint.chunks import Entry, Piece, split_state_name, whole_chunk
from fsdp_compiled.runtime.checkpoint.contents import optimizer_values, plain
from fsdp_compiled.runtime.checkpoint.data_file import Layout, lay_out, memory_of, unread
from fsdp_compiled.runtime.checkpoint.manifest import DataFile, Manifest
from fsdp_compiled.runtime.checkpoint.owned_state import STEPPED
from fsdp_compiled.runtime.checkpoint.values import decode, tensor_names

METADATA = ".metadata"  # of DCP
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
KEPT = ("buffer", "optimizer", "scalars", "updates")  # kinds of values that other layouts have a place for
To = Literal["ours", "dcp", "hf"]
ALONE = Mesh(torch.device("cpu"))


class Contents(NamedTuple):
    """What any layout has of a run: its manifest, as this package writes it; the tensors of it, not read yet, by name;
    and what the checkpoint has beside."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    left_out: list[str]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Of a layout that does not say which tensors are buffers, these too."""
        return {name.removeprefix("model."): one for name, one in self.tensors.items() if name.startswith("model.")}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        names = [name for name in self.manifest.values if name.startswith("buffer ")]
        return {name.removeprefix("buffer "): self.tensors[self.manifest.first(name)["$tensor"]] for name in names}


def convert(source: Path, target: Path, to: To) -> Contents:
    """Writes what ``source`` holds to ``target``, which must not exist. Raises ``ValueError`` by name."""
    if target.exists():
        raise ValueError(f"{target} exists. Convert to a new folder, or remove it.")
    contents = read(source)
    if to != "ours" and not contents.parameters:
        raise ValueError(f"{source} holds no parameters.")
    try:
        with folders.aside(target) as place:
            {"ours": _write_ours, "dcp": _write_dcp, "hf": _write_hf}[to](place, contents)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}.") from error
    return contents


def read(source: Path) -> Contents:
    """Reads the checkpoint there, in whichever layout it is."""
    if (source / METADATA).is_file():
        return _from_dcp(source)
    if (source / manifests.NAME).is_file():
        return _from_ours(source)
    if steps := folders.steps(source):
        return _from_ours(folders.path_of(source, steps[-1]))
    if hugging_face.is_there(source):
        tensors = {f"model.{key}": one for key, one in hugging_face.tensors_of(source).items()}
        return Contents(_manifest(), tensors, [])
    raise ValueError(
        f"{source} is no checkpoint: it has neither {manifests.NAME} nor step-N folders, nor {METADATA}, nor "
        "model.safetensors or its index."
    )


def _manifest(step: int = 0) -> Manifest:
    return Manifest(step, 1, {}, {"updates": {"same": step}}, {}, {}, {})


def _from_ours(folder: Path) -> Contents:
    manifest = manifests.read(folder)
    loading.check_headers(folder, manifest, manifest.files)
    values = {name: {"same": manifest.first(name)} for name in manifest.values if name.partition(" ")[0] in KEPT}
    own = {*tensor_names(list(values.values()))}

    def whole(name: str) -> torch.Tensor:
        wanted = whole_chunk(name, torch.empty(manifest.tensors[name].shape, device="meta"))
        pairs, _ = lockstep(ALONE, "what is read", loading.read(folder, manifest, ALONE, [wanted], [], rest=False))
        return pairs[0][1]

    tensors = {
        name: unread(entry.shape, entry.dtype, partial(whole, name))
        for name, entry in manifest.tensors.items()
        if name.startswith(("model.", "optimizer.state.")) or name in own
    }
    return Contents(replace(manifest, values=values), tensors, [name for name in manifest.values if name not in values])


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint needs")


class _Whole(DefaultLoadPlanner):
    """Reads what has this key, in one piece."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Files(FileSystemReader):
    """One checkpoint, read one key at a time. Raises ``ValueError`` with the file for what is damaged or foreign."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / METADATA
        try:
            with path.open("rb") as file:
                found = _Careful(file).load()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
        except Exception as error:
            raise ValueError(f"{path} is not DCP's metadata, or is damaged: {error}.") from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError(f"{path} is not the metadata of files that DCP wrote.")
        for one in found.storage_data.values():
            if Path(one.relative_path).name != one.relative_path:
                raise ValueError(f"{path} names {one.relative_path!r}, which is no file of its folder.")
        self.metadata, self.entries = found, found.state_dict_metadata
        self.set_up_storage_reader(found, True)

    def read(self, key: str) -> Any:
        """A whole tensor, or a value that is not a tensor: a number, a string, a list."""
        entry = self.entries[key]
        state: dict[str, Any] = {key: None}
        if isinstance(entry, TensorStorageMetadata):
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise ValueError(f"{self.path}: elements of {key} are in no chunk, or in two.")
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = _Whole(flatten_state_dict=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        try:
            self.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            raise ValueError(f"{self.path}: {key} is damaged, or no plain data: {error}") from error
        return planner.state_dict[key]


def _from_dcp(folder: Path) -> Contents:
    reader = _Files(folder)
    rest = {  # by DCP's key
        key: unread(entry.size, entry.properties.dtype, partial(reader.read, key))
        for key, entry in reader.entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state: dict[str, dict[str, torch.Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    mark = next((key for key in reader.entries if ".param_groups." in f".{key}"), None)
    if mark is not None:
        prefix = mark[: f".{mark}".index(".param_groups.")]
        begin = f"{prefix}state."
        states = {key: key.removeprefix(begin).rsplit(".", 1) for key in rest if key.startswith(begin)}
        # State that is one number, of a parameter that is none, is kept once: a step count, a product of rates.
        whole = {parameter for key, (parameter, _) in states.items() if rest[key].dim()}
        once = {name for key, (parameter, name) in states.items() if parameter in whole and not rest[key].dim()}
        for key, (parameter, name) in states.items():
            one = rest.pop(key)
            if one.dim() == 0 and name in {"step", *once}:
                numbers.setdefault(parameter, {})[name] = one.read().item()
            else:
                state.setdefault(parameter, {})[name] = one
        groups = _dcp_groups(reader, f"{prefix}param_groups.")
    stepped = [rest.pop(key) for key in [*rest] if f".{key}".endswith(f".{STEPPED}")]
    if stepped and not stepped[0].read().item():  # owners' state is only zeros, made for DCP to read into
        for parameter in [name for name in state if not numbers.get(name)]:
            numbers[parameter] = {}
            del state[parameter]
    trained = dict.fromkeys([*state, *numbers])
    begin = _model_prefix(rest, trained)
    # A buffer or a parameter: DCP does not say, and a load takes it as either.
    parameters = {key.removeprefix(begin): one for key, one in rest.items() if key.startswith(begin)}
    steps = {int(own["step"]) for own in numbers.values() if "step" in own}
    manifest = _manifest(max(steps, default=0))
    manifest.aliases.update(_ties(parameters, trained))
    if groups or state:
        manifest.values |= optimizer_values({name: numbers.get(name, {}) for name in trained}, groups)
    tensors = {f"model.{name}": one for name, one in parameters.items()}
    tensors |= {f"optimizer.state.{name}.{key}": one for name, kept in state.items() for key, one in kept.items()}
    return Contents(manifest, tensors, [key for key in rest if not key.startswith(begin)])


def _ties(parameters: Mapping[str, torch.Tensor], trained: Collection[str]) -> dict[str, str]:
    """Other names of tied parameters: DCP has values under each name, but the optimizer's state under one."""
    kinds = {name: (one.shape, one.dtype) for name, one in parameters.items()}
    first, other = ({kinds[name] for name in parameters if (name in trained) is state} for state in (True, False))
    found = {name: (kind, _digest(parameters[name])) for name, kind in kinds.items() if kind in first & other}
    firsts = {known: name for name, known in found.items() if name in trained}
    return {name: firsts[known] for name, known in found.items() if name not in trained and known in firsts}


def _digest(one: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(memory_of(one.read().contiguous()))


def _model_prefix(rest: Collection[str], trained: Collection[str]) -> str:
    """The prefix of the parameters' names."""
    for parameter in trained:
        for key in rest:
            if key == parameter or key.endswith(f".{parameter}"):
                return key[: len(key) - len(parameter)]
    for prefix in ("app.model.", "model.", "app."):
        if rest and all(key.startswith(prefix) for key in rest):
            return prefix
    return ""


def _dcp_groups(reader: _Files, begin: str) -> list[dict[str, Any]]:
    """The saved groups; or, if options were written for each parameter, groups of parameters with equal options."""
    groups: dict[str, dict[str, Any]] = {}  # by number, or by parameter's name
    for key in (key for key in reader.entries if key.startswith(begin)):
        owner, option = key.removeprefix(begin).rsplit(".", 1)
        groups.setdefault(owner, {})[option] = plain(reader.read(key))
    if found := [options for options in groups.values() if "params" in options]:
        return found
    flat: dict[str, dict[str, Any]] = {}
    for owner, options in groups.items():
        flat.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(owner)
    return list(flat.values())


def _dcp_items(contents: Contents) -> Iterator[tuple[tuple[str, ...], Any]]:
    """By DCP's paths, for FSDP2's ``{"model": ..., "optim": ...}``; options in both forms that PyTorch has."""
    parameters, manifest = contents.parameters, contents.manifest
    for name, one in {**parameters, **contents.buffers}.items():
        yield ("model", name), one
    for other, first in manifest.aliases.items():
        yield ("model", other), parameters[first]
    if "optimizer" not in manifest.values:
        return
    for parameter, numbers in manifest.records.items():
        for name, number in numbers.items():
            yield ("optim", "state", parameter, name), _number(decode(number, {}))
    for key, one in contents.tensors.items():
        if (of := split_state_name(key)) is not None:
            yield ("optim", "state", *of), one
    saved = manifest.first("optimizer")
    for index, (names, options) in enumerate(zip(saved["parameters"], saved["groups"], strict=True)):
        for name, value in options.items():
            for owner in (str(index), *names):
                yield ("optim", "param_groups", owner, name), decode(value, contents.tensors)
        yield ("optim", "param_groups", str(index), "params"), names


class _WhenItIsItsTurn(DefaultSavePlanner):
    """Reads a tensor only when it is written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return found.read() if isinstance(found, torch.Tensor) and found.is_meta else found


def _write_dcp(folder: Path, contents: Contents) -> None:
    state: dict[str, Any] = {}
    for path, value in _dcp_items(contents):
        place = state
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    writer, planner = FileSystemWriter(folder), _WhenItIsItsTurn()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(state, writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def _number(value: Any) -> torch.Tensor:
    """The number as torch.optim keeps it, with all of its bits."""
    single = torch.tensor(float(value))
    return single if single.item() == value else torch.tensor(float(value), dtype=torch.float64)


def _write_hf(folder: Path, contents: Contents) -> None:
    tensors = {**contents.parameters, **contents.buffers}
    layouts = hugging_face.files_of(tensors)
    for name, layout in layouts.items():
        _write_file(folder / name, layout, tensors)
    hugging_face.write_index(folder, layouts)
    contents.left_out.extend(["optimizer"] * any(map(split_state_name, contents.tensors)))


def _write_file(path: Path, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> DataFile:
    """Writes one file, one tensor at a time; returns what the manifest says of it."""
    some = sorted((offset, key) for key, offset in layout.offsets.items() if tensors[key].numel())
    parts = (memory_of(tensors[key].read().contiguous()) for _, key in some)
    return DataFile(path.name, layout.size, data_file.write(path, itertools.chain([memoryview(layout.header)], parts)))


def _write_ours(folder: Path, contents: Contents) -> None:
    place = folders.path_of(folder, contents.manifest.step)
    place.mkdir()
    made = replace(contents.manifest, world=1, rows=(0,), tensors={}, files={}, written_by={"id": folder.name})
    name, layout = "shard-00000-of-00001.safetensors", lay_out(contents.tensors)
    made.files[name] = _write_file(place / name, layout, contents.tensors)
    for key, one in contents.tensors.items():
        shape = tuple(one.shape)
        pieces = [Piece((0,) * len(shape), shape, name, layout.offsets[key])] if one.numel() else []
        made.tensors[key] = Entry(shape, one.dtype, pieces)
    data_file.write(place / manifests.NAME, [memoryview(manifests.to_bytes(made))])
    folders.sync(place)
