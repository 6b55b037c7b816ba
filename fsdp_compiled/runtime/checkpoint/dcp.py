"""For `torch.distributed.checkpoint`: the state as it wants it, each rank's stretches as rectangles of whole tensors.

    dcp.save({"app": sharded}, checkpoint_id=folder)        any planner and storage of DCP's
    dcp.load({"app": sharded}, checkpoint_id=folder)        on any number of ranks

    {"model": {name: tensor}, "optim": {"state": {parameter: {name: tensor}}, "param_groups": [...]}, "updates": ...}

What a rank holds a part of is a DTensor over a `LocalShardsWrapper`, whose rectangles are views of the shards: DCP
copies out of them and into them, and `async_save` out of a deep copy that its stager makes. Relies, in torch 2.11 to
2.14, on ``torch.distributed.tensor._shards_wrapper`` and ``_dtensor_spec``, as torchrec does.

What owners of whole parameters keep is whole tensors, each on its owner alone:

    {"optim": {"state": {"layers.0.up.weight": {"momentum_buffer": tensor}}, ...}, "optim_stepped": 1}

DCP reads into what it is given, and before a first step nothing is kept: then there are zeros of the form that a step
would make, and ``optim_stepped`` is 0, which says, saved too, that they are none. Only an optimizer whose state is
tensors of the parameter's shape has a form that is known beforehand (Muon); others are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.plan.leaf import contiguous_stride
from fsdp_compiled.runtime.checkpoint.contents import Trained, options
from fsdp_compiled.runtime.checkpoint.matching import refusal, write_groups
from fsdp_compiled.runtime.checkpoint.owned_state import kept_by
from fsdp_compiled.runtime.checkpoint.stretches import (
    Entry,
    Stretch,
    held,
    parts_of,
    place_of,
    split_state_name,
    tensors,
    wrapped,
)
from fsdp_compiled.runtime.param_step_counts import Names, fresh, names_of, of_group, parted
from fsdp_compiled.runtime.whole_update import WholeUpdate
from fsdp_compiled.torch_private.dtensor import DTensorSpec, LocalShardsWrapper, TensorMeta


class StateDict(dict[str, Any]):
    """What `Sharded.state_dict` returns. It holds views of one rank's shards, so it is for DCP, not for a file.

    A deep copy holds copies in host memory, in the same rectangles.
    """

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "sharded.state_dict() holds views of this rank's shards, for torch.distributed.checkpoint: it cannot be "
            "pickled, nor given to another process. Use sharded.save(folder), dcp.save(...), dcp.async_save(...) with "
            "its thread, or sharded.full_state_dict()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDict:
        return StateDict({key: _staged(value, memo) for key, value in self.items()})


def _staged(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) is dict:
        return {key: _staged(one, memo) for key, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value, memo)
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    local = value.to_local()
    shards = [shard.detach().to("cpu", copy=True) for shard in local.local_shards()]
    offsets = [tuple(one) for one in local.local_offsets()]
    return DTensor(LocalShardsWrapper(shards, offsets), value._spec, requires_grad=False)


def device_mesh(mesh: Mesh) -> DeviceMesh | None:
    """All ranks in a row. Collective."""
    return init_device_mesh(mesh.device.type, (mesh.world,)) if mesh.world > 1 else None


def state_dict(trained: Trained, mesh: Mesh, ranks: DeviceMesh | None) -> StateDict:
    """What this rank holds, as views, and small things that are the same on all ranks, as copies."""
    plan, state, rules = trained.plan, trained.state, trained.rules
    own = {one.name: one for one in held(plan, rules, place_of(mesh), state.parameters, state.optimizer)}
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for key, entry in tensors(plan, rules, state.optimizer).items():
        of = split_state_name(key)
        cut = plan.placement.state if of else plan.placement.parameter
        if (tensor := _tensor(entry, own.get(key), cut, ranks)) is None:
            continue
        if of is None:
            model[key.removeprefix("model.")] = tensor
        else:
            optimizer.setdefault(of[0], {})[of[1]] = tensor
    model |= dict(state.buffers)
    for rule in rules:
        names, begin = names_of(plan, rule), fresh(rule)
        later = state.ages.left(rule, names)
        for parameter in names:
            for one in (one for one in rule.state if one.scalar):
                number = state.optimizer[f"{rule.key}.{one.name}"].clone()
                number = number.fill_(begin.get(one.name, number)) if parameter in later else number
                optimizer.setdefault(parameter, {})[one.name] = number
    found = StateDict(model=model, updates=state.step.clone())
    if trained.optimizer is not None:
        groups = [
            {"params": [parameter._sharded_name for parameter in group["params"]], **kept}
            for group, kept in zip(trained.optimizer.param_groups, options(trained.optimizer), strict=True)
        ]
        found["optim"] = {"state": optimizer, "param_groups": groups}
    if state.scale:
        found["loss_scale"] = {name: tensor.clone() for name, tensor in state.scale.items()}
    return found


def _tensor(entry: Entry, one: Stretch | None, cut: bool, ranks: DeviceMesh | None) -> torch.Tensor | None:
    """The tensor as DCP wants it; None where this rank holds nothing of it."""
    if entry.numel == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    if one is None or not (parts := parts_of(one)):
        return None
    if ranks is None or not (cut or one.cut):
        return parts[0][1]
    meta = TensorMeta(torch.Size(entry.shape), contiguous_stride(entry.shape), entry.dtype)
    return DTensor(wrapped(parts), DTensorSpec(ranks, (Shard(0),), tensor_meta=meta), requires_grad=False)


def load_state_dict(given: Mapping[str, Any], trained: Trained, mesh: Mesh) -> Work[Callable[[], None]]:
    """A function that writes what is given into the state; what DCP has already written there stays. For `lockstep`.

    Raises ``ValueError`` for what does not fit.
    """
    plan, state, rules = trained.plan, trained.state, trained.rules
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    wrong: list[str] = []
    place = place_of(mesh)
    for one in held(plan, rules, place, state.parameters, state.optimizer):
        source = _given(given, one.name)
        if one.cut is not None and not parts_of(one):
            continue  # the zeros that end a part
        if source is None:
            wrong.append(f"{one.name} is not given")
        else:
            copies += _copies(one, source, wrong)
    for name, tensor in state.buffers.items():
        source = given.get("model", {}).get(name)
        if not isinstance(source, torch.Tensor) or source.shape != tensor.shape:
            wrong.append(f"the buffer {name} is not given, or has another shape")
        else:
            copies.append((tensor, source))
    updated: dict[str, Names] = {}
    scalars = _scalars(given, trained, updated, wrong)
    groups = _groups(given, trained, wrong)
    owned = _owned(given, trained, wrong)
    if wrong:
        raise ValueError(
            refusal("What load_state_dict was given is of another model or optimizer", wrong, "Build what was saved.")
        )
    return partial(_write, given, trained, [*copies, *scalars], groups, updated, owned)
    yield  # no stage of its own


def _write(
    given: Mapping[str, Any],
    trained: Trained,
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    groups: Sequence[Mapping[str, Any]],
    updated: Mapping[str, Names],
    owned: Sequence[tuple[WholeUpdate, States]],
) -> None:
    state = trained.state
    for update, own in owned:
        update.go_on(own, {"written": [], "attributes": {}})
        update.show(state.optimizer)
    state.ages.loaded(updated)
    with torch.no_grad():
        for to, source in copies:
            if to.data_ptr() != source.data_ptr() or to.device != source.device:
                to.copy_(source)
        state.step.copy_(torch.as_tensor(given.get("updates", state.step)))
        for name, tensor in state.scale.items():
            if name in given.get("loss_scale", {}):
                tensor.copy_(torch.as_tensor(given["loss_scale"][name]))
        for total in state.sums.values():
            total.zero_()
    if trained.optimizer is not None:
        write_groups(trained.optimizer, groups)


def _given(given: Mapping[str, Any], name: str) -> Any:
    if (of := split_state_name(name)) is None:
        return given.get("model", {}).get(name.removeprefix("model."))
    return given.get("optim", {}).get("state", {}).get(of[0], {}).get(of[1])


def _copies(one: Stretch, source: Any, wrong: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if tuple(source.shape) != one.shape:
        wrong.append(f"{one.name} has shape {list(source.shape)}, not {list(one.shape)}")
        return []
    if not isinstance(source, DTensor):
        return [
            (view, source.detach()[tuple(slice(o, o + size) for o, size in zip(at, view.shape, strict=True))])
            for at, view in parts_of(one)
        ]
    local = source.to_local()
    here = dict(parts_of(one))
    if isinstance(local, LocalShardsWrapper):
        there = dict(zip(map(tuple, local.local_offsets()), local.local_shards(), strict=True))
        if {place: tensor.shape for place, tensor in here.items()} == {k: v.shape for k, v in there.items()}:
            return [(tensor, there[place]) for place, tensor in here.items()]
    wrong.append(f"{one.name} is cut in another way: give what state_dict() returned here, or whole tensors")
    return []


def _groups(given: Mapping[str, Any], trained: Trained, wrong: list[str]) -> Sequence[Mapping[str, Any]]:
    """What is given of the groups, if they are of the same parameters; their rates would go to others."""
    if trained.optimizer is None:
        return []
    groups = given.get("optim", {}).get("param_groups", [])
    here = [[parameter._sharded_name for parameter in group["params"]] for group in trained.optimizer.param_groups]
    there = [list(group.get("params", ())) for group in groups]
    if there != here:
        sizes = " and ".join(str([len(row) for row in rows]) for rows in (here, there))
        wrong.append(f"the optimizer's groups are of other parameters: they have {sizes} here and there, in this order")
    return groups


def _scalars(
    given: Mapping[str, Any], trained: Trained, updated: dict[str, Names], wrong: list[str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The numbers that each rule has once, and into ``updated``, who has made its steps: these must agree in them."""
    found = []
    states = given.get("optim", {}).get("state", {})
    for rule in trained.rules if trained.optimizer is not None else ():
        scalars = [entry.name for entry in rule.state if entry.scalar]
        given_of = {name: states.get(name, {}) for name in names_of(trained.plan, rule)}
        rows = {n: {key: float(own[key]) for key in scalars if own.get(key) is not None} for n, own in given_of.items()}
        updated[rule.key], numbers = of_group(rule, rows)
        differ = parted(numbers.values())
        for key in scalars if numbers else ():
            if (lacking := next((name for name, own in numbers.items() if key not in own), None)) is not None:
                wrong.append(f"the optimizer's {key} of {lacking} is not given")
            elif key in differ:
                wrong.append(f"the optimizer's {key} differs between parameters of group {rule.group}")
            else:
                value = given_of[next(iter(numbers))][key]
                found.append((trained.state.optimizer[f"{rule.key}.{key}"], torch.as_tensor(value)))
    return found


States = dict[str, dict[str, torch.Tensor]]  # by parameter's name, and by the name of what is kept
STEPPED = "optim_stepped"
CURE = "Call save and load."


def of_owners(trained: Trained) -> Work[dict[str, Any]]:
    """What goes into the dictionary: of this rank's parameters what is kept, the tensors themselves; ``STEPPED``."""
    found: States = {}
    fresh: States = {}
    for update in trained.updates:
        forms = _forms(update)
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


def _owned(given: Mapping[str, Any], trained: Trained, wrong: list[str]) -> list[tuple[WholeUpdate, States]]:
    """What is given of each optimizer's state that is kept on owners."""
    states = given.get("optim", {}).get("state", {})
    stepped = bool(given.get(STEPPED, True))
    put: list[tuple[WholeUpdate, States]] = []
    for update in trained.updates:
        forms, now = _forms(update), update.of_parameters()
        put.append((update, {}))
        for name in update.owned:
            its = states.get(name, {})
            if not stepped and not _is_filled(its):
                continue
            for key, dtype in forms[name].items():
                value = its.get(key)
                if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                    wrong.append(f"optimizer.state.{name}.{key} is not given as a whole tensor")
                elif value.shape != update.leaves[name].shape:
                    wrong.append(f"optimizer.state.{name}.{key} has shape {list(value.shape)}")
                else:
                    own = value is now.get(name, {}).get(key)  # which DCP has written into
                    put[-1][1].setdefault(name, {})[key] = value if own else value.detach().to(dtype, copy=True)
    return put


def _is_filled(its: Mapping[str, Any]) -> bool:
    """Whether something was read into these zeros: FSDP2 saves state alone, which does not say that it is some."""
    return any(
        not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.any() for value in its.values()
    )


def _forms(update: WholeUpdate) -> dict[str, dict[str, torch.dtype]]:
    """Of each parameter, what is kept after a step. Raises ``ValueError`` where that is not known beforehand."""
    update.of_all_ranks()  # raises for state that belongs to no parameter
    found = {}
    for name, kept in kept_by(update).items():
        if kept.written or kept.names != kept.shaped.keys():
            update.refuse(
                "state_dict",
                f"it keeps more than tensors of the shape of {name}, and DCP reads only into what is there. {CURE}",
            )
        found[name] = dict(kept.shaped)
    return found
