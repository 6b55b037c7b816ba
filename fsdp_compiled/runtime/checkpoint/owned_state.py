"""Moves the state that optimizers of whole parameters keep on owners to rank 0 and back, for ``state_dict()``.

An owner keeps a parameter's state whole, in the form of the optimizer's own code, and the dictionary holds just that.
Forms are sent as JSON, and tensors one at a time. Loaded state is compared with what the class keeps after one step on
a small parameter, since another optimizer's state would be taken for none. Counters that the code keeps in groups are
loaded too; counters in attributes are in no ``state_dict``, and are refused.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.optim.optimizer_copy import attributes_of, copy_of, plain_options, step_of
from fsdp_compiled.optim.param_groups import options_of
from fsdp_compiled.optim.state_containers import all_leaves
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.runtime.checkpoint.contents import OWNED, Trained
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.values import decode, encode
from fsdp_compiled.runtime.whole_update import WholeUpdate

States = dict[str, Any]  # by the parameter's name
SIZES = (2, 3, 4, 5, 6, 7)  # of the small parameter


@dataclass(frozen=True)
class _Kept:
    """What the class keeps after one step; which of it are tensors of the parameter's shape, with their dtypes; and
    what the class writes in its group."""

    names: frozenset[str]
    shaped: Mapping[str, torch.dtype]
    written: frozenset[str]


def from_owners(trained: Trained, mesh: Mesh) -> Work[States]:
    """The owners' states, on the CPU of rank 0; nothing on the other ranks."""
    if not trained.updates:
        return {}
    own: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    for update in trained.updates:
        update.of_all_ranks()  # raises for state that belongs to no parameter
        kept_by(update)
        for name, kept in update.of_parameters().items():
            tensors: dict[str, torch.Tensor] = {}
            own[name] = encode(kept, name, tensors), tensors
    said = yield Exchange("what owners keep", {name: (tree, _kinds(tensors)) for name, (tree, tensors) in own.items()})
    found: States = {}
    for name, (tree, kinds) in {name: form for one in said for name, form in one.items()}.items():
        tensors = own[name][1] if name in own else _empty(kinds)
        if trained.plan.owners:
            yield name
            _broadcast(tensors, mesh, mesh.groups["shard"], trained.plan.owners[name])
        if mesh.rank == 0:
            found[name] = decode(tree, tensors)
    return found


def given_to_owners(
    states: Mapping[str, Any], trained: Trained, manifest: Manifest, tensors: dict[str, torch.Tensor]
) -> None:
    """Adds values of ``states``, by parameter, and their tensors. Raises ``ValueError`` for what does not fit."""
    others: list[dict[str, Any]] = []
    for update in trained.updates:
        update.of_all_ranks()
        written: set[str] = set()
        for name, kept in kept_by(update).items():
            written |= kept.written
            if states.get(name):
                _check(name, states[name], kept, update.leaves[name], update.name)
                manifest.values[OWNED + name] = {"same": encode(dict(states[name]), OWNED + name, tensors)}
        others.append({"written": sorted(written), "attributes": {}})
    if others:
        manifest.values["owners"] = {"same": others}


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {label: (tuple(tensor.shape), tensor.dtype) for label, tensor in tensors.items()}


def _empty(kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {label: torch.empty(shape, dtype=dtype) for label, (shape, dtype) in kinds.items()}


def _broadcast(tensors: Mapping[str, torch.Tensor], mesh: Mesh, group: str | None, source: int) -> None:
    """Broadcasts tensors on the host, in place, whatever their dtypes."""
    among = dist.distributed_c10d._resolve_process_group(group) if group is not None else None
    for tensor in tensors.values():
        if tensor.numel():
            sent = tensor.contiguous().view(-1).view(torch.uint8).to(mesh.device)
            dist.broadcast(sent, group=among, group_src=source)
            tensor.copy_(sent.cpu().view(tensor.dtype).view(tensor.shape))


def kept_by(update: WholeUpdate) -> dict[str, _Kept]:
    """What the update's class keeps for each parameter. Raises ``ValueError`` if no ``state_dict`` holds all of it."""
    kind = type(update.optimizer)
    if (kind.state_dict, kind.load_state_dict) != (Optimizer.state_dict, Optimizer.load_state_dict):
        raise ValueError(f"{kind.__name__} has a state_dict of its own: call save and load.")
    found: dict[str, _Kept] = {}
    alike: dict[Any, _Kept] = {}
    for index, (group, names) in enumerate(zip(update.groups, update.names_of_groups, strict=True)):
        for name in (name for name in names if name in update.leaves):
            leaf = update.leaves[name]
            key = index, len(leaf.shape), leaf.dtype
            if key not in alike:
                alike[key] = _after_a_step(update.optimizer, group, leaf)
            found[name] = alike[key]
    return found


def from_tensors(
    manifest: Manifest, firsts: Mapping[str, str], there: Mapping[str, Collection[str]], updates: Sequence[WholeUpdate]
) -> list[str]:
    """For a checkpoint of another format, whose state is tensors of the parameter's shape: turns these into values, as
    owners save them. Returns what does not fit, in words, once for each class.

    ``firsts``: by parameter, its name in the checkpoint; ``there``: by such a name, the state that is kept for it.
    """
    wrong: list[str] = []
    for update in updates:
        problems: list[str] = []
        for name, kept in kept_by(update).items():
            if (first := firsts.get(name)) is None or not there.get(first):  # the parameter has made no step
                continue
            found = {label: f"optimizer.state.{first}.{label}" for label in kept.names}
            shape = update.leaves[name].shape
            entries = {label: manifest.tensors.get(key) for label, key in found.items()}
            if kept.written or kept.names != kept.shaped.keys():
                problems.append("keeps more than tensors of a parameter's shape, which other formats do not have")
            elif set(there[first]) != kept.names:
                problems.append(f"keeps {sorted(kept.names)} of {name}, the checkpoint has {sorted(there[first])}")
            elif odd := [k for k, e in entries.items() if e is None or (e.shape, e.dtype) != (shape, kept.shaped[k])]:
                problems.append(f"keeps {odd[0]} of {name} in another shape or dtype than the checkpoint")
            else:
                manifest.values[OWNED + first] = {"same": {label: {"$tensor": key} for label, key in found.items()}}
        wrong += [f"{update.name} {problem}" for problem in problems[:1]]
    return wrong


def _after_a_step(optimizer: Optimizer, group: Mapping[str, Any], leaf: Leaf) -> _Kept:
    kind = type(optimizer)
    shape = SIZES[: len(leaf.shape)]
    small = nn.Parameter(torch.linspace(0.1, 1, math.prod(shape)).view(shape).to(leaf.dtype))
    small.grad = small.detach().clone()
    options = copy.deepcopy(plain_options(options_of(group)))
    copied = copy_of(optimizer, [{**options, "params": [small]}], defaultdict(dict))
    before = {key: repr(value) for key, value in attributes_of(copied).items()}
    known = {key: repr(value) for key, value in options.items()}
    with torch.no_grad():
        step_of(kind)(copied)
    if odd := [key for key, value in attributes_of(copied).items() if before.get(key) != repr(value)]:
        raise ValueError(
            f"{kind.__name__} counts in its attribute {odd[0]!r}, which is in no state_dict: call save and load."
        )
    leaves = all_leaves(copied.state.get(small, {}))
    tensors = {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    shaped = {key: value.dtype for key, value in tensors.items() if shape and value.shape == small.shape}
    now = options_of(copied.param_groups[0])
    written = {key for key, value in now.items() if known.get(key) != repr(value)}
    return _Kept(frozenset(map(str, copied.state.get(small, {}))), shaped, frozenset(written))


def _check(name: str, given: Any, kept: _Kept, leaf: Leaf, kind: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"The state of {name} is a {type(given).__name__}; expected a dictionary.")
    if missing := sorted(kept.names - set(map(str, given))):
        raise ValueError(f"The state of {name} has no {missing[0]!r}, which {kind} keeps: it is another optimizer's.")
    for label, value in all_leaves(dict(given)).items():
        if label in kept.shaped and tuple(value.shape) != leaf.shape:
            raise ValueError(f"{label} of {name} has shape {list(value.shape)}, not {list(leaf.shape)}.")
