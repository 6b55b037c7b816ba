"""Whole state dictionaries on rank 0, one buffer at a time: PyTorch's own formats, to and from shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh, broadcast
from fsdp_compiled.optim.rule import Rule, StateTensor, rule_for
from fsdp_compiled.plan.plan import Buffer
from fsdp_compiled.runtime.checkpoint import owned_state
from fsdp_compiled.runtime.checkpoint.contents import Trained, options
from fsdp_compiled.runtime.checkpoint.hugging_face import keys_of
from fsdp_compiled.runtime.checkpoint.matching import refusal
from fsdp_compiled.runtime.checkpoint.owned_state import Loaded
from fsdp_compiled.runtime.full_state_dict import collected
from fsdp_compiled.runtime.param_step_counts import Names, Numbers, names_of, of_group, parted
from fsdp_compiled.runtime.shard_model import write_slot
from fsdp_compiled.runtime.tensor_parallel.parts import part_of

Staged = list[tuple[torch.Tensor, torch.Tensor]]  # where to, and the values
Stages = Work[Staged]


def write(staged: Staged) -> None:
    """Puts the values in their places; the tensors stay where they are."""
    with torch.no_grad():
        for to, values in staged:
            to.copy_(values)


def load_weights(given: Mapping[str, Any], model: nn.Module, trained: Trained, mesh: Mesh) -> Stages:
    """The shards of rank 0's ``model.state_dict()``, read aside; in stages, for `lockstep`."""
    plan, state = trained.plan, trained.state
    keys = keys_of(model, trained)
    by_name: dict[str, torch.Tensor] = {}
    if mesh.rank == 0:
        wanted = _shapes(keys.parameters, trained)
        wanted |= {key: tuple(state.buffers[name].shape) for key, name in keys.buffers.items()}
        tied = {name for buffer in plan.buffers for slot in buffer.slots for name in slot.leaf.names}
        _check(given, wanted, tied)
        by_name = {name: given[key] for key, name in keys.parameters.items()}
    yield "the weights"
    staged: Staged = []
    for buffer in plan.buffers:
        own = yield from _spread(buffer, by_name, buffer.dtype, trained, mesh, plan.placement.parameter)
        staged.append((state.parameters[buffer.key], own))
    for key, name in keys.buffers.items():
        value = given[key].to(state.buffers[name]) if mesh.rank == 0 else torch.empty_like(state.buffers[name])
        value = value.contiguous().clone()
        yield key
        broadcast(value, mesh)
        staged.append((state.buffers[name], value))
    return staged


def _shapes(parameters: Mapping[str, str], trained: Trained) -> dict[str, tuple[int, ...]]:
    shapes = {slot.name: slot.leaf.whole_shape for buffer in trained.plan.buffers for slot in buffer.slots}
    return {key: shapes[name] for key, name in parameters.items()}


def _check(given: Any, wanted: Mapping[str, tuple[int, ...]], tied: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"state_dict is a {type(given).__name__}; expected a dictionary, on rank 0.")
    wrong = [f"{key} is missing" for key in wanted if not isinstance(given.get(key), torch.Tensor)]
    wrong += [f"{key} is not in the model" for key in given if key not in wanted and key not in tied]
    wrong += [
        f"{key} has shape {list(given[key].shape)}, not {list(shape)}"
        for key, shape in wanted.items()
        if isinstance(given.get(key), torch.Tensor) and tuple(given[key].shape) != tuple(shape)
    ]
    if wrong:
        raise ValueError(refusal("The weights are of another model", wrong, "Build that model."))


def _spread(
    buffer: Buffer, values: Mapping[str, torch.Tensor], dtype: torch.dtype, trained: Trained, mesh: Mesh, cut: bool
) -> Work[torch.Tensor]:
    """This rank's slice (``cut``), or all, of a buffer of rank 0's values, which are whole, by parameter's name.

    What is cut along the tp axis is sent a part at a time.
    """
    plan = trained.plan
    found: list[torch.Tensor] = []
    for index in range(plan.tp if buffer.split else 1):
        flat = torch.zeros(buffer.numel, dtype=dtype, device=plan.device)
        if mesh.rank == 0:
            for slot in buffer.slots:
                write_slot(flat, slot, part_of(values[slot.name].detach(), slot.leaf, plan.tp, index))
        yield f"{buffer.key}, part {index}"
        broadcast(flat, mesh)
        if not buffer.split or index == mesh.tp_rank:
            found.append(plan.own(flat, mesh.shard_rank, cut).clone())
    return found[0]


def optimizer_state_dict(trained: Trained, mesh: Mesh) -> Work[dict[str, Any]]:
    """``optimizer.state_dict()`` as torch.optim has it, on rank 0 and on the CPU; empty elsewhere."""
    optimizer = trained.optimizer
    assert optimizer is not None
    _refuse_containers(trained.rules)
    indices = _indices(optimizer)
    state: dict[Any, Any] = {}
    for buffer, entry in _per_element(trained):
        own = trained.state.optimizer[f"{buffer.key}.{entry.name}"].to(trained.plan.device)
        what = f"{entry.name} of {buffer.key}"
        values = yield from collected(own, buffer, trained.plan.placement.state, what, mesh)
        for name, value in values.items():
            state.setdefault(indices[name], {})[entry.name] = value
        del own
    owned = yield from owned_state.from_owners(trained, mesh)
    if mesh.rank != 0:
        return {}
    state |= {indices[name]: kept for name, kept in owned.items()}
    groups = options(optimizer)
    for rule in trained.rules:
        for entry in (entry for entry in rule.state if entry.scalar):
            value = trained.state.optimizer[f"{rule.key}.{entry.name}"].detach().cpu()
            if entry.place == "parameter":
                begin = torch.full_like(value, entry.initial)
                later = trained.state.ages.left(rule, names_of(trained.plan, rule))
                for name in names_of(trained.plan, rule):
                    number = begin if name in later else value
                    state.setdefault(indices[name], {})[entry.name] = _scalar(number, entry)
            elif entry.place in ("group", "state"):
                (groups[rule.group] if entry.place == "group" else state)[entry.name] = _scalar(value, entry)
    for rule in (rule for rule in trained.rules if any(entry.place == "ours" for entry in rule.state)):
        for name in names_of(trained.plan, rule):
            if name not in trained.state.ages.updated.get(rule.key, ()):  # its code begins where there is no state
                state.pop(indices[name], None)
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        kept["params"] = [indices[parameter._sharded_name] for parameter in group["params"]]
    ordered = dict(sorted(state.items(), key=lambda item: (isinstance(item[0], str), item[0])))
    return {"state": ordered, "param_groups": groups}


def _scalar(value: torch.Tensor, entry: StateTensor) -> Any:
    """What the optimizer's code keeps: a Python number, or a tensor of one."""
    if not entry.number:
        return value.clone().to(entry.dtype)
    number = value.item()
    return int(number) if float(number).is_integer() else number


def _indices(optimizer: Optimizer) -> dict[str, int]:
    """By a parameter's name, its number in torch's state dictionary: counted through the groups."""
    names = [parameter._sharded_name for group in optimizer.param_groups for parameter in group["params"]]
    return {name: index for index, name in enumerate(names)}


def _refuse_containers(rules: Sequence[Rule]) -> None:
    for rule in rules:
        for entry in rule.state:
            if entry.container is not None:
                raise ValueError(
                    f"{rule.name} keeps {entry.container} in a container of its own, which is not put together here. "
                    "Use sharded.save and sharded.load."
                )


def _per_element(trained: Trained) -> Iterator[tuple[Buffer, StateTensor]]:
    for buffer in trained.plan.buffers:
        if buffer.updated:
            assert buffer.group is not None
            for entry in rule_for(trained.rules, buffer.group).state:
                if not entry.scalar:
                    yield buffer, entry


def load_optimizer(
    given: Mapping[str, Any], trained: Trained, mesh: Mesh
) -> Work[tuple[Staged, list[dict[str, Any]], dict[str, Names], list[Loaded]]]:
    """The shards of rank 0's ``optimizer.state_dict()``, read aside, its groups, by rules' keys who has made their
    steps, and what is for owners; in stages, for `lockstep`."""
    plan, optimizer = trained.plan, trained.optimizer
    assert optimizer is not None
    indices = _indices(optimizer)
    numbers: dict[str, float] = {}
    updated: dict[str, Names] = {}
    groups: list[dict[str, Any]] = []
    if mesh.rank == 0:
        groups = _check_groups(given, optimizer)
        numbers, updated = _numbers(given, trained, indices)
    numbers, updated, groups = (yield Exchange("the optimizer's groups and numbers", (numbers, updated, groups)))[0]
    scalars = {key: trained.state.optimizer[key] for key in numbers}
    staged: Staged = [(to, torch.full_like(to, numbers[key])) for key, to in scalars.items()]
    for buffer, entry in _per_element(trained):
        to = trained.state.optimizer[f"{buffer.key}.{entry.name}"]
        values = {}
        for slot in buffer.slots if mesh.rank == 0 else ():
            kept = given["state"].get(indices[slot.name], {}).get(entry.name)
            value = values[slot.name] = torch.full(slot.leaf.whole_shape, entry.initial) if kept is None else kept
            if tuple(value.shape) != slot.leaf.whole_shape:
                raise ValueError(f"{entry.name} of {slot.name} has shape {list(value.shape)}.")
        own = yield from _spread(buffer, values, to.dtype, trained, mesh, plan.placement.state)
        staged.append((to, own))
    names = [name for update in trained.updates for name in update.leaves]
    kept = {name: given["state"].get(indices[name]) for name in names} if mesh.rank == 0 else {}
    owned = yield from owned_state.to_owners(kept, trained, mesh)
    return staged, groups, updated, owned


def _check_groups(given: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """What groups say, without their parameters."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise ValueError("state_dict is not of torch.optim's form: expected state and param_groups, on rank 0.")
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in given["param_groups"]]
    if here != there:
        raise ValueError(f"The optimizer's groups have {here} parameters here, and {there} in what is to be loaded.")
    return [{name: value for name, value in group.items() if name != "params"} for group in given["param_groups"]]


def _numbers(
    given: Mapping[str, Any], trained: Trained, indices: Mapping[str, int]
) -> tuple[dict[str, float], dict[str, Names]]:
    """The numbers that each rule has once, and who has made its steps: these must agree in them. As at the start where
    none is given."""
    _refuse_containers(trained.rules)
    found: dict[str, float] = {}
    updated: dict[str, Names] = {}
    for rule in trained.rules:
        rows = {name: given["state"].get(indices[name], {}) for name in names_of(trained.plan, rule)}
        rows = {name: {key: value for key, value in own.items() if value is not None} for name, own in rows.items()}
        updated[rule.key], numbers = of_group(rule, {name: _own_numbers(rule, own) for name, own in rows.items()})
        begun = any(rows[name] for name in numbers)
        differ = parted(numbers.values())
        for entry in (entry for entry in rule.state if entry.scalar):
            if entry.place == "parameter":
                if entry.name in differ:
                    raise ValueError(
                        f"{entry.name} differs between the parameters of group {rule.group}: "
                        f"{' and '.join(map(str, differ[entry.name][:2]))}. Put parameters of different age into "
                        "groups of their own."
                    )
                value = next((own[entry.name] for own in numbers.values() if entry.name in own), entry.initial)
            elif entry.place == "group":
                if (value := given["param_groups"][rule.group].get(entry.name)) is None:
                    raise ValueError(f"param_groups[{rule.group}] has no {entry.name!r}, in which {rule.name} counts.")
            elif entry.place == "state":
                value = given["state"].get(entry.name, entry.initial)
            elif entry.place == "ours":  # whether the first step is still to come
                value = 0.0 if begun else 1.0
            else:  # an attribute, which is in no state_dict
                continue
            found[f"{rule.key}.{entry.name}"] = float(value)
    known = {entry.name for rule in trained.rules for entry in rule.state}
    owned = {indices[name] for update in trained.updates for name in update.leaves}
    for index, kept in given["state"].items():
        if index not in owned and isinstance(kept, Mapping) and (odd := sorted(set(kept) - known)):
            raise ValueError(f"The state of parameter {index} has {odd[0]!r}, which this optimizer does not keep.")
    return found, updated


def _own_numbers(rule: Rule, own: Mapping[str, Any]) -> Numbers:
    """Of a parameter's state; where it counts nothing, whether the first step is still to come follows from whether
    there is any. State alone may be what the constructor made."""
    counted = [entry.name for entry in rule.numbers if entry.place == "parameter"]
    if not counted:
        return {entry.name: float(not own) for entry in rule.numbers}
    return {key: float(own[key]) for key in counted if key in own}
