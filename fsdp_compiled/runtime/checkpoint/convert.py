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
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_compiled.distributed.lockstep import lockstep
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import data_file, hugging_face, loading
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import manifest as manifests
from fsdp_compiled.runtime.checkpoint.chunks import Entry, Piece, split_state_name, whole_chunk
from fsdp_compiled.runtime.checkpoint.data_file import Item, Layout, lay_out, memory_of
from fsdp_compiled.runtime.checkpoint.dcp import STEPPED
from fsdp_compiled.runtime.checkpoint.manifest import DataFile, Manifest
from fsdp_compiled.runtime.checkpoint.values import decode, encode
from fsdp_compiled.runtime.checkpoint.whole import Lazy

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
To = Literal["ours", "dcp", "hf"]
ALONE = Mesh(torch.device("cpu"))


@dataclass
class Contents:
    """What every layout has of a run. ``numbers``: by parameter, state that is one number, such as the step count."""

    parameters: dict[str, Lazy] = field(default_factory=dict)
    buffers: dict[str, Lazy] = field(default_factory=dict)
    state: dict[str, dict[str, Lazy]] = field(default_factory=dict)  # by parameter and name
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)  # parameters, options
    aliases: dict[str, str] = field(default_factory=dict)
    kind: str | None = None  # the optimizer's class
    step: int = 0
    left_out: list[str] = field(default_factory=list)


def convert(source: Path, target: Path, to: To) -> Contents:
    """Writes what ``source`` holds to ``target``, which must not exist. Raises ``ValueError`` by name."""
    if target.exists():
        raise ValueError(f"{target} exists. Convert to a new folder, or remove it.")
    contents = read(source)
    if to != "ours" and not contents.parameters:
        raise ValueError(f"{source} holds no parameters.")
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        aside.mkdir(parents=True)
        place = aside
        if to == "ours":
            place = folders.path_of(aside, contents.step)
            place.mkdir()
            _write_ours(place, contents)
        elif to == "dcp":
            _write_dcp(aside, contents)
        else:
            _write_hf(aside, contents)
        folders.sync(place)
        folders.sync(aside)
        aside.rename(target)
        folders.sync(target.parent)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
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
        return Contents(parameters=hugging_face.tensors_of(source))
    raise ValueError(
        f"{source} is no checkpoint: it has neither {manifests.NAME} nor step-N folders, nor {METADATA}, nor "
        "model.safetensors or its index."
    )


def _lazy(folder: Path, manifest: Manifest, name: str) -> Lazy:
    """A tensor from files with a manifest, verified if there are checksums."""
    entry = manifest.tensors[name]

    def whole() -> torch.Tensor:
        wanted = whole_chunk(name, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        pairs, _ = lockstep(ALONE, "what is read", loading.read(folder, manifest, ALONE, [wanted], [], rest=False))
        return pairs[0][1]

    return Lazy(entry.shape, entry.dtype, whole)


def _from_ours(folder: Path) -> Contents:
    manifest = manifests.read(folder)
    loading.check_headers(folder, manifest, manifest.files)
    found = Contents(aliases=dict(manifest.aliases), step=manifest.step)
    for name in manifest.tensors:
        if name.startswith("model."):
            found.parameters[name.removeprefix("model.")] = _lazy(folder, manifest, name)
        elif (of := split_state_name(name)) is not None:
            found.state.setdefault(of[0], {})[of[1]] = _lazy(folder, manifest, name)
    for name, value in manifest.values.items():
        tree = value["same"] if "same" in value else value["by_rank"][0]
        kind, _, rest = name.partition(" ")
        if kind == "buffer":
            found.buffers[rest] = _lazy(folder, manifest, tree["$tensor"])
        elif kind == "optimizer":
            found.kind = tree["class"]
            options = [{key: decode(one, {}) for key, one in group.items()} for group in tree["groups"]]
            found.groups = list(zip(tree["parameters"], options, strict=True))
        elif kind == "scalars":
            for record in tree:
                numbers = {key: decode(one, {}) for key, one in record["scalars"].items()}
                found.numbers |= dict.fromkeys(record["parameters"], numbers)
        elif kind != "updates":
            found.left_out.append(name)
    return found


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
    entries = reader.entries
    lazy = {
        key: Lazy(tuple(entry.size), entry.properties.dtype, partial(reader.read, key))
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    mark = next((key for key in entries if ".param_groups." in f".{key}"), None)
    prefix = mark[: f".{mark}".index(".param_groups.")] if mark is not None else None
    found = Contents()
    rest = dict(lazy)
    if prefix is not None:
        begin = f"{prefix}state."
        states = {key: key.removeprefix(begin).rsplit(".", 1) for key in lazy if key.startswith(begin)}
        # State that is one number, of a parameter that is none, is kept once: a step count, a product of rates.
        whole = {parameter for key, (parameter, _) in states.items() if lazy[key].shape}
        once = {
            "step",
            *(name for key, (parameter, name) in states.items() if parameter in whole and not lazy[key].shape),
        }
        for key, one in lazy.items():
            if key in states:
                del rest[key]
                parameter, name = states[key]
                if one.shape == () and name in once:
                    found.numbers.setdefault(parameter, {})[name] = one.read().item()
                else:
                    found.state.setdefault(parameter, {})[name] = one
        _dcp_groups(reader, prefix, found)
    stepped = [rest.pop(key) for key in [*rest] if f".{key}".endswith(f".{STEPPED}")]
    if stepped and not stepped[0].read().item():  # owners' state is only zeros, made for DCP to read into
        for parameter in [name for name in found.state if not found.numbers.get(name)]:
            found.numbers[parameter] = {}
            del found.state[parameter]
    weights = _model_prefix(rest, found)
    for key, one in rest.items():
        name = key.removeprefix(weights)
        if not key.startswith(weights):
            found.left_out.append(key)
        else:  # a buffer or a parameter: DCP does not say, and a load takes it as either
            found.parameters[name] = one
    _tie(found)
    steps = {int(numbers["step"]) for numbers in found.numbers.values() if "step" in numbers}
    found.step = max(steps, default=0)
    return found


def _tie(found: Contents) -> None:
    """Notes other names of tied parameters: DCP has values under each name, but the optimizer's state under one."""
    trained: dict[tuple[Any, ...], str] = {}
    for state in (True, False):
        for name, one in found.parameters.items():
            if (name in found.state or name in found.numbers) is state:
                kind = one.shape, one.dtype
                if state:
                    trained[(*kind, _digest(one))] = name
                elif any(kind == known[:2] for known in trained) and (*kind, _digest(one)) in trained:
                    found.aliases[name] = trained[(*kind, _digest(one))]


def _digest(one: Lazy) -> str:
    return xxhash.xxh3_128_hexdigest(memory_of(one.read().contiguous()))


def _model_prefix(rest: Mapping[str, Lazy], found: Contents) -> str:
    """The prefix of the parameters' names."""
    for parameter in (*found.state, *found.numbers):
        for key in rest:
            if key == parameter or key.endswith(f".{parameter}"):
                return key[: len(key) - len(parameter)]
    for prefix in ("app.model.", "model.", "app."):
        if rest and all(key.startswith(prefix) for key in rest):
            return prefix
    return ""


def _dcp_groups(reader: _Files, prefix: str, found: Contents) -> None:
    """The saved groups; or, if options were written for each parameter, groups of parameters with equal options."""
    begin = f"{prefix}param_groups."
    groups: dict[str, dict[str, Any]] = {}  # by number, or by parameter's name
    for key in (key for key in reader.entries if key.startswith(begin)):
        owner, option = key.removeprefix(begin).rsplit(".", 1)
        value = reader.read(key)
        groups.setdefault(owner, {})[option] = value.item() if isinstance(value, torch.Tensor) else value
    flat: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for owner, options in groups.items():
        if "params" in options:
            found.groups.append((options.pop("params"), options))
        else:
            flat.setdefault(repr(sorted(options.items())), ([], options))[0].append(owner)
    if not found.groups:
        found.groups = list(flat.values())


def _dcp_items(contents: Contents) -> Iterator[tuple[tuple[str, ...], Any]]:
    """By DCP's paths, for FSDP2's ``{"model": ..., "optim": ...}``; options in both forms that PyTorch has."""
    for name, one in {**contents.parameters, **contents.buffers}.items():
        yield ("model", name), one
    for other, first in contents.aliases.items():
        yield ("model", other), contents.parameters[first]
    for parameter in dict.fromkeys([*contents.state, *contents.numbers]):
        for name, number in contents.numbers.get(parameter, {}).items():
            yield ("optim", "state", parameter, name), _number(number)
        for name, one in contents.state.get(parameter, {}).items():
            yield ("optim", "state", parameter, name), one
    for index, (parameters, options) in enumerate(contents.groups):
        for name, value in options.items():
            yield ("optim", "param_groups", str(index), name), value
            for parameter in parameters:
                yield ("optim", "param_groups", parameter, name), value
        yield ("optim", "param_groups", str(index), "params"), parameters


class _WhenItIsItsTurn(DefaultSavePlanner):
    """Reads a tensor only when it is written; until then, a tensor on the meta device stands for it."""

    def __init__(self, lazy: Mapping[str, Lazy]) -> None:
        super().__init__()
        self._lazy = lazy

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._lazy[index.fqn].read() if index.fqn in self._lazy else super().lookup_object(index)


def _write_dcp(folder: Path, contents: Contents) -> None:
    state: dict[str, Any] = {}
    lazy: dict[str, Lazy] = {}
    for path, value in _dcp_items(contents):
        place = state
        for name in path[:-1]:
            place = place.setdefault(name, {})
        if isinstance(value, Lazy):
            lazy[".".join(path)] = value
            value = torch.empty(value.shape, dtype=value.dtype, device="meta")
        place[path[-1]] = value
    writer, planner = FileSystemWriter(folder), _WhenItIsItsTurn(lazy)
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
    layouts = hugging_face.files_of(Item(key, one.dtype, one.shape) for key, one in tensors.items())
    for name, layout in layouts.items():
        _write_file(folder / name, layout, tensors)
    hugging_face.write_index(folder, layouts)
    contents.left_out += ["optimizer"] * bool(contents.state)


def _write_file(path: Path, layout: Layout, tensors: Mapping[str, Lazy]) -> DataFile:
    """Writes one file, one tensor at a time; returns what the manifest says of it."""
    some = sorted((offset, key) for key, offset in layout.offsets.items() if 0 not in tensors[key].shape)
    parts = (memory_of(tensors[key].read().contiguous()) for _, key in some)
    return DataFile(path.name, layout.size, data_file.write(path, itertools.chain([memoryview(layout.header)], parts)))


def _write_ours(folder: Path, contents: Contents) -> None:
    tensors = {f"model.{name}": one for name, one in contents.parameters.items()}
    for parameter, states in contents.state.items():
        tensors |= {f"optimizer.state.{parameter}.{name}": one for name, one in states.items()}
    tensors |= {f"buffer {name}": one for name, one in contents.buffers.items()}
    values: dict[str, Any] = {f"buffer {name}": {"same": {"$tensor": f"buffer {name}"}} for name in contents.buffers}
    values["updates"] = {"same": contents.step}
    if contents.groups or contents.state:
        every = dict.fromkeys([*contents.state, *contents.numbers])
        numbers = {name: encode(contents.numbers.get(name, {}), "", {}) for name in every}
        values["scalars"] = {"same": [{"parameters": [name], "scalars": own} for name, own in numbers.items()]}
        options = [{name: encode(value, name, {}) for name, value in group.items()} for _, group in contents.groups]
        names = [parameters for parameters, _ in contents.groups]
        values["optimizer"] = {"same": {"class": contents.kind, "groups": options, "parameters": names}}
    made = Manifest(contents.step, 1, {}, values, contents.aliases, {}, {"id": folder.parent.name})
    name = "shard-00000-of-00001.safetensors"
    layout = lay_out(Item(key, one.dtype, one.shape) for key, one in tensors.items())
    made.files[name] = _write_file(folder / name, layout, tensors)
    for key, one in tensors.items():
        pieces = [Piece((0,) * len(one.shape), one.shape, name, layout.offsets[key])] if 0 not in one.shape else []
        made.tensors[key] = Entry(one.shape, one.dtype, pieces)
    data_file.write(folder / manifests.NAME, [memoryview(manifests.to_bytes(made))])
