"""Whole state dictionaries on rank 0, one buffer at a time: PyTorch's own formats, to and from shards."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.distributed.mesh import Mesh, broadcast, exchange, gather_shards
from fsdp_compiled.optim.rule import Rule, StateTensor, rule_for
from fsdp_compiled.plan.plan import Buffer
from fsdp_compiled.runtime.checkpoint.contents import options
from fsdp_compiled.runtime.checkpoint.huggingface import keys_of
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.shard_model import read_slot, write_slot

Staged = list[tuple[torch.Tensor, torch.Tensor]]  # where to, and the values
Stages = Generator[str, None, Staged]


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
        flat = torch.zeros(buffer.numel, dtype=buffer.dtype, device=plan.device)
        if mesh.rank == 0:
            for slot in buffer.slots:
                write_slot(flat, slot, by_name[slot.name].detach())
        yield buffer.key
        staged.append((state.parameters[buffer.key], _own(flat, mesh, plan.placement.parameter, plan.shard)))
    for key, name in keys.buffers.items():
        value = given[key].to(state.buffers[name]) if mesh.rank == 0 else torch.empty_like(state.buffers[name])
        value = value.contiguous().clone()
        yield key
        broadcast(value, mesh)
        staged.append((state.buffers[name], value))
    return staged


def _shapes(parameters: Mapping[str, str], trained: Trained) -> dict[str, tuple[int, ...]]:
    shapes = {slot.name: slot.leaf.shape for buffer in trained.plan.buffers for slot in buffer.slots}
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
        raise ValueError("\n  ".join(["The weights are of another model, so nothing was loaded:", *wrong[:20]]))


def _own(flat: torch.Tensor, mesh: Mesh, cut: bool, shard: int) -> torch.Tensor:
    """This rank's slice of rank 0's buffer."""
    broadcast(flat, mesh)
    size = flat.numel() // shard if cut else flat.numel()
    start = mesh.shard_rank * size if cut else 0
    return flat[start : start + size].clone()


def optimizer_state_dict(trained: Trained, mesh: Mesh) -> Generator[str, None, dict[str, Any]]:
    """``optimizer.state_dict()`` as torch.optim has it, on rank 0 and on the CPU; empty elsewhere."""
    optimizer = trained.optimizer
    assert optimizer is not None
    indices = _indices(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for buffer, rule, entry in _entries(trained):
        if entry.container is not None:
            raise ValueError(
                f"{rule.name} keeps {entry.container} in a container of its own, which is not put together here. Use "
                "sharded.save and sharded.load."
            )
        if entry.scalar:
            if entry.place == "parameter" and mesh.rank == 0:
                value = trained.state.optimizer[f"{rule.key}.{entry.name}"].detach().cpu()
                for slot in buffer.slots:
                    kept = _number(value) if entry.number else value.clone().to(entry.dtype)
                    state.setdefault(indices[slot.name], {})[entry.name] = kept
            continue
        own = trained.state.optimizer[f"{buffer.key}.{entry.name}"].to(trained.plan.device)
        yield f"{entry.name} of {buffer.key}"
        full = gather_shards(own, mesh) if trained.plan.placement.state else own
        if mesh.rank == 0:
            for slot in buffer.slots:
                state.setdefault(indices[slot.name], {})[entry.name] = read_slot(full, slot).detach().cpu().clone()
        del own, full
    if mesh.rank != 0:
        return {}
    groups = [
        {**kept, "params": [indices[parameter._sharded_name] for parameter in group["params"]]}
        for group, kept in zip(optimizer.param_groups, options(optimizer), strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _number(value: torch.Tensor) -> int | float:
    number = value.item()
    return int(number) if float(number).is_integer() else number


def _indices(optimizer: Optimizer) -> dict[str, int]:
    """By a parameter's name, its number in torch's state dictionary: counted through the groups."""
    names = [parameter._sharded_name for group in optimizer.param_groups for parameter in group["params"]]
    return {name: index for index, name in enumerate(names)}


def _entries(trained: Trained) -> Iterator[tuple[Buffer, Rule, StateTensor]]:
    for buffer in trained.plan.buffers:
        if buffer.updated:
            assert buffer.group is not None
            rule = rule_for(trained.rules, buffer.group, buffer.variant)
            for entry in rule.state:
                yield buffer, rule, entry


def load_optimizer(
    given: Mapping[str, Any], trained: Trained, mesh: Mesh
) -> Generator[str, None, tuple[Staged, list[dict[str, Any]]]]:
    """The shards of rank 0's ``optimizer.state_dict()``, read aside, and its groups; in stages, for `lockstep`."""
    plan, optimizer = trained.plan, trained.optimizer
    assert optimizer is not None
    indices = _indices(optimizer)
    numbers: dict[str, float] = {}
    groups: list[dict[str, Any]] = []
    if mesh.rank == 0:
        groups = _check_groups(given, optimizer)
        numbers = _numbers(given, trained, indices)
    yield "the optimizer's groups and numbers"
    numbers, groups = exchange((numbers, groups), mesh)[0]
    staged: Staged = []
    for buffer, rule, entry in _entries(trained):
        if entry.scalar:
            key = f"{rule.key}.{entry.name}"
            if key in numbers:
                to = trained.state.optimizer[key]
                staged.append((to, torch.full_like(to, numbers[key])))
            continue
        to = trained.state.optimizer[f"{buffer.key}.{entry.name}"]
        flat = torch.zeros(buffer.numel, dtype=to.dtype, device=plan.device)
        if mesh.rank == 0:
            for slot in buffer.slots:
                kept = given["state"].get(indices[slot.name], {}).get(entry.name)
                value = torch.full(slot.leaf.shape, entry.initial) if kept is None else kept
                if tuple(value.shape) != slot.leaf.shape:
                    raise ValueError(f"{entry.name} of {slot.name} has shape {list(value.shape)}.")
                write_slot(flat, slot, value.detach())
        yield f"{entry.name} of {buffer.key}"
        staged.append((to, _own(flat, mesh, plan.placement.state, plan.shard)))
    return staged, groups


def _check_groups(given: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """What groups say, without their parameters."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise ValueError("state_dict is not of torch.optim's form: expected state and param_groups, on rank 0.")
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in given["param_groups"]]
    if here != there:
        raise ValueError(f"The optimizer's groups have {here} parameters here, and {there} in what is to be loaded.")
    return [{name: value for name, value in group.items() if name != "params"} for group in given["param_groups"]]


def _numbers(given: Mapping[str, Any], trained: Trained, indices: Mapping[str, int]) -> dict[str, float]:
    """The numbers that each group has once, which its parameters must agree in."""
    found: dict[str, float] = {}
    known: set[str] = set()
    for buffer, rule, entry in _entries(trained):
        known.add(entry.name)
        if entry.container is not None:
            raise ValueError(f"{rule.name} keeps {entry.container} in a container of its own. Use sharded.load.")
        for slot in buffer.slots if entry.scalar and entry.place == "parameter" else ():
            value = given["state"].get(indices[slot.name], {}).get(entry.name)
            key = f"{rule.key}.{entry.name}"
            if value is not None and found.setdefault(key, float(value)) != float(value):
                raise ValueError(
                    f"{entry.name} differs between the parameters of group {rule.group}: {found[key]} and "
                    f"{float(value)}. Put parameters of different age into groups of their own."
                )
            if value is not None and f"{rule.key}.first" in trained.state.optimizer:
                found[f"{rule.key}.first"] = 0.0
    for index, kept in given["state"].items():
        if odd := sorted(set(kept) - known):
            raise ValueError(f"The state of parameter {index} has {odd[0]!r}, which this optimizer does not keep.")
    return found
