"""Reads weights in the layout of Hugging Face (`weight_files`) into shards: each rank its own part of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fsdp_compiled.distributed.lockstep import Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import loading, weight_files
from fsdp_compiled.runtime.checkpoint.loading import Staged, Wanted
from fsdp_compiled.runtime.checkpoint.stretches import Place, held, tensors
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.checkpoint.weight_keys import keys_of, renamed


def read(
    folder: Path, strict: bool, model: nn.Module, trained: Trained, mesh: Mesh
) -> Work[tuple[Staged, list[tuple[torch.Tensor, str]], list[str]]]:
    """Weights for this rank's shards and buffers, read aside, and what did not fit; in stages, for `lockstep`."""
    manifest = weight_files.read_manifest(folder)
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
        raise ValueError(
            "\n  ".join([f"The weights in {folder} are of another model, so nothing was loaded:", *wrong[:20]])
            + "\nBuild that model, or pass strict=False, which loads what fits."
        )
    wanted = [
        Wanted(key, one.start, one.stop, whole[one.name].order, one.values, one.cut)
        for one in held(trained.plan, (), Place(mesh.shard_rank, mesh.tp_rank), trained.state.parameters, {})
        for key in places.get(one.name, ())
    ]
    trees = [{"$tensor": key} for _, key in buffers]
    staged = yield from loading.read(folder, manifest, mesh, wanted, trees)
    return Staged(_once(staged.pairs, folder), staged.tensors), buffers, wrong


def _loses(there: torch.dtype, here: torch.dtype) -> bool:
    """Whether a cast would make another kind of number of it: of whole ones, which scales may belong to, or complex."""
    return (there.is_floating_point, there.is_complex) != (here.is_floating_point, here.is_complex)


def _once(pairs: Sequence[tuple[Wanted, torch.Tensor]], folder: Path) -> list[tuple[Wanted, torch.Tensor]]:
    """Each place with one tensor. Raises ``ValueError`` where a tied parameter's are not equal."""
    found: list[tuple[Wanted, torch.Tensor]] = []
    for one, values in pairs:
        if not found or found[-1][0].into is not one.into:
            found.append((one, values))
        elif not torch.equal(found[-1][1], values):
            raise ValueError(
                f"{found[-1][0].tensor} and {one.tensor} are one parameter here, and differ in {folder}, so nothing "
                "was loaded. Build the model without the tie, or remove the one that is not meant."
            )
    return found
