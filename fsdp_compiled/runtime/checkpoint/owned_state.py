"""The state that optimizers of whole parameters keep on owners: to rank 0 and back, and in DCP's form (`dcp`).

An owner keeps a parameter's state whole, in the form of the optimizer's own code, and the dictionary on rank 0 holds
just that; it is sent one parameter at a time. Loaded state is compared with what the class keeps after one step on a
small parameter, since another optimizer's state would be taken for none. Counters that the code keeps in groups are
loaded too; counters in attributes are in no ``state_dict``, and are refused.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compiled.distributed.mesh import Exchange, Mesh, Work
from fsdp_compiled.optim.hyperparameters import options_of
from fsdp_compiled.optim.optimizer_copy import all_leaves, attributes_of, copy_of, plain_options, step_of
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.runtime.checkpoint.contents import OWNED, Trained
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.values import decode, encode
from fsdp_compiled.runtime.whole_update import WholeUpdate

States = dict[str, Any]  # by the parameter's name
STEPPED = "optim_stepped"
CURE = "Call save and load."
SIZES = (2, 3, 4, 5, 6, 7)  # of the small parameter


@dataclass(frozen=True)
class _Kept:
    """What the class keeps after one step; which of it are tensors of the parameter's shape, with their dtypes; and
    what the class writes in its group."""

    names: frozenset[str]
    shaped: Mapping[str, torch.dtype]
    written: frozenset[str]

    @property
    def is_plain(self) -> bool:
        """Whether all of it are tensors of the parameter's shape."""
        return not self.written and self.names == self.shaped.keys()


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
    said = yield Exchange("what owners keep", list(own))
    found: States = {}
    for name in dict.fromkeys(name for one in said for name in one):
        form = [own.get(name)]
        if owners := trained.plan.owners:
            yield name
            group = dist.distributed_c10d._resolve_process_group(mesh.groups["shard"])
            dist.broadcast_object_list(form, group=group, group_src=owners[name], device=mesh.device)
        if mesh.rank == 0 and form[0] is not None:
            found[name] = decode(*form[0])
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


def from_tensors(manifest: Manifest, firsts: Mapping[str, str], updates: Sequence[WholeUpdate]) -> list[str]:
    """For a checkpoint of another format, whose state is tensors of the parameter's shape: turns these into values, as
    owners save them. Returns what does not fit, in words, once for each class.

    ``firsts``: by parameter, its name in the checkpoint.
    """
    wrong: list[str] = []
    for update in updates:
        problems: list[str] = []
        for name, kept in kept_by(update).items():
            first = firsts.get(name, "")
            if not (there := manifest.states.get(first)):  # the parameter has made no step
                continue
            found = {label: f"optimizer.state.{first}.{label}" for label in kept.names}
            shape = update.leaves[name].shape
            entries = {label: manifest.tensors.get(key) for label, key in found.items()}
            if not kept.is_plain:
                problems.append("keeps more than tensors of a parameter's shape, which other formats do not have")
            elif there != kept.names:
                problems.append(f"keeps {sorted(kept.names)} of {name}, the checkpoint has {sorted(there)}")
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


def of_owners(trained: Trained) -> Work[dict[str, Any]]:
    """Owners' part of the dictionary: the state of this rank's parameters, the tensors themselves; ``STEPPED``."""
    found: States = {}
    fresh: States = {}
    for update in trained.updates:
        forms = forms_of(update)
        for name, kept in update.of_parameters().items():
            if {key: getattr(value, "dtype", None) for key, value in kept.items()} != forms[name] or any(
                value.shape != update.leaves[name].shape for value in kept.values()
            ):
                update.refuse(
                    "state_dict", f"what it keeps of {name} has another form than after its first step. {CURE}"
                )
            found[name] = kept
        for name in (name for name in update.owned if name not in found):
            fresh[name] = {
                key: torch.zeros(update.leaves[name].shape, dtype=dtype, device=trained.plan.device)
                for key, dtype in forms[name].items()
            }
    said = yield Exchange("which parameters have state", (bool(found), min(fresh, default=None)))
    stepped = any(some for some, _ in said)
    without = [name for _, name in said if name is not None]
    if stepped and without:
        raise ValueError(f"state_dict where {min(without)} has no state of an optimizer, and others have. {CURE}")
    return {"state": found or fresh, STEPPED: torch.tensor(int(stepped))}


def is_filled(its: Mapping[str, Any]) -> bool:
    """Whether something was read into these zeros. FSDP2 saves the state alone, without a mark that it is real."""
    return any(
        not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.any() for value in its.values()
    )


def forms_of(update: WholeUpdate) -> dict[str, dict[str, torch.dtype]]:
    """What is kept for each parameter after a step. Raises ``ValueError`` where that is not known beforehand."""
    update.of_all_ranks()  # raises for state that belongs to no parameter
    found = {}
    for name, kept in kept_by(update).items():
        if not kept.is_plain:
            update.refuse(
                "state_dict",
                f"it keeps more than tensors of the shape of {name}, and DCP reads only into what is there. {CURE}",
            )
        found[name] = dict(kept.shaped)
    return found
