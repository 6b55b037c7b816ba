"""Turns a model's parameters into this rank's shards, one unit at a time.

A rank never holds more than the model it was given plus one unit's buffer. For a model on the meta device, it holds its
shards plus one unit. Rank 0's values are broadcast, so all ranks agree whatever their seeds were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Mesh, RankError, Work, broadcast
from fsdp_compiled.optim.optimizer_copy import all_leaves
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.leaf import Leaf, contiguous_stride, dense_stride
from fsdp_compiled.plan.plan import Buffer, Plan
from fsdp_compiled.plan.units import unit_of
from fsdp_compiled.runtime.managed_model import ManagedModel
from fsdp_compiled.runtime.materialize import Holder, Initializer, Order, held, materialize, materialize_buffers
from fsdp_compiled.runtime.parameters.shard_layout import Layout, ShardPlace, places_of
from fsdp_compiled.runtime.parameters.sharded_parameter import replace
from fsdp_compiled.runtime.state import to_state_device
from fsdp_compiled.runtime.tensor_parallel.parts import laid_part, local_part, part_of, tensor_parallel

HALF = (
    "The model is half taken over: a part of its parameters may be in shards or filled already. Build it and its "
    "optimizer again before the next compile_sharded."
)
Shards = dict[str, torch.Tensor]
Stages = Work[Shards]  # names each collective before it runs, as `lockstep` expects


Named = Sequence[tuple[str, nn.Parameter]]


def parameters_of(model: nn.Module) -> Named:
    """The parameters in registration order, tied ones under each of their names."""
    return list(named_parameters(model, remove_duplicate=False))


def read_leaves(named: Named, optimizer: Optimizer | None, units: Iterable[str]) -> list[Leaf]:
    """The model's parameters in registration order, tied ones once, with their optimizer group and unit."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    groups, units = _groups(parameters, optimizer), frozenset(units)
    block_of = cache(lambda path: unit_of([path], units))  # of a module's own parameters
    found = []
    for key, parameter in parameters.items():
        called, part, tp = names[key], parameter, None
        if isinstance(parameter, DTensor):
            part, tp = local_part(parameter), tensor_parallel(called[0], parameter)
        shape, stride = tuple(part.shape), part.stride()
        if tp is not None and tp.uneven:
            shape, stride = tp.part_shape, contiguous_stride(tp.part_shape)
        else:
            stride = dense_stride(shape, stride)
        block = unit_of(called, units) if len(called) > 1 else block_of(called[0].rpartition(".")[0])
        found.append(
            Leaf(tuple(called), shape, stride, part.dtype, parameter.requires_grad, groups.get(key), block, tp=tp)
        )
    return found


def _groups(known: Mapping[int, nn.Parameter], optimizer: Optimizer | None) -> dict[int, int]:
    """The group of each parameter. ``known``: the model's, by identity."""
    if optimizer is None:
        return {}
    found: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"The optimizer holds a parameter that is not the model's: group {index}, position {position}, "
                    f"shape {list(parameter.shape)}. Build it over this very model: "
                    f"{type(optimizer).__name__}(model.parameters(), ...)."
                )
            if id(parameter) in found:
                raise ValueError(
                    f"The optimizer holds a parameter of shape {list(parameter.shape)} twice, in groups "
                    f"{found[id(parameter)]} and {index}, and would update it twice a step. Give it once: "
                    "dict.fromkeys(parameters), where modules have weights in common."
                )
            found[id(parameter)] = index
    if not any(parameter.requires_grad and key in found for key, parameter in known.items()):
        raise ValueError("The optimizer holds no parameter of the model that requires a gradient.")
    return found


@contextmanager
def half_taken(mesh: Mesh) -> Iterator[None]:
    """Adds to an error that is raised inside what became of the model."""
    try:
        yield
    except RankError as error:
        raise RankError(f"{error}\n{HALF}") from None
    except BaseException as error:
        error.add_note(f"This was on rank {mesh.rank}, inside compile_sharded. {HALF}")
        raise


def take_over(
    model: nn.Module,
    optimizer: Optimizer | None,
    rules: Sequence[Rule],
    plan: Plan,
    mesh: Mesh,
    init: Initializer | None,
) -> Work[tuple[ManagedModel, Shards, Shards, Shards]]:
    """Moves every parameter into shards and leaves a live view in its place; in stages, for `lockstep`.

    Returns the taken model, the shards by buffer key, the module buffers by name, and the shards of optimizer state
    that the optimizer already had, by ``"<buffer key>.<name>"`` (per element) or ``"group <g>.<name>"`` (scalars).
    """
    holders = _holders(model)
    originals = {name: held(places[0]) for name, places in holders.items()}
    meta = any(parameter.is_meta for parameter in originals.values())  # else none has to be filled
    order: Order = {}
    if meta:
        order = {module: (index, path) for index, (path, module) in enumerate(model.named_modules())}
    resumed = optimizer is not None and bool(optimizer.state)
    layout = Layout(plan, mesh)
    shards = layout.shards
    existing_state = read_scalars(optimizer)
    blocks = {block: index for index, block in enumerate(plan.blocks)}
    # The parts of one block follow each other, so that the values drawn for a meta model do not depend on where it is
    # cut. The exception is modules tied across the cut: they are filled with the first of them.
    for unit in sorted(plan.units, key=lambda unit: blocks[unit.members[0]]):
        if meta and plan.tp > 1:  # fill the whole unit in the model's order: draws do not depend on the cut
            own = {holder for buffer in unit.buffers for slot in buffer.slots for holder in holders[slot.name]}
            materialize(own, order, plan.device, init)
        for buffer in unit.buffers:
            owners = [holders[slot.name] for slot in buffer.slots]
            if meta:
                materialize([holder for owner in owners for holder in owner], order, plan.device, init)
            parameters = [held(owner[0]) for owner in owners]
            flat = torch.zeros(buffer.numel, dtype=buffer.dtype, device=plan.device)
            values: list[torch.Tensor] = []
            for slot, parameter in zip(buffer.slots, parameters, strict=True):
                if slot.leaf.split and not isinstance(parameter, DTensor):  # filled above as a whole, to be cut
                    value = parameter.detach()
                    yield f"{slot.name}, whole"
                    broadcast(value, mesh)
                    value = part_of(value, slot.leaf, mesh.tp, mesh.tp_rank)
                else:
                    value = laid_part(parameter, slot.leaf) if slot.leaf.tp is not None else parameter
                values.append(value)
            with torch.no_grad():
                torch._foreach_copy_([slot.of(flat) for slot in buffer.slots], values)
            del values
            yield buffer.key
            broadcast(flat, mesh, parts=buffer.split)
            shards[buffer.key] = _own_slice(flat, plan, mesh)
            del flat
            if resumed and optimizer is not None:
                existing_state |= yield from _shard_existing_state(optimizer, rules, buffer, parameters, plan, mesh)
            del parameters
            for place, owner in zip(places_of(layout, buffer), owners, strict=True):
                _replace(originals[place.name], owner, place, optimizer)
    materialize_buffers(model, plan.device, init)
    buffers = yield from _take_buffers(model, plan.device, mesh)
    return ManagedModel(model, optimizer, layout), shards, buffers, existing_state


def _holders(model: nn.Module) -> dict[str, list[Holder]]:
    """Every place in the model that holds a parameter, by the parameter's first name."""
    first: dict[int, str] = {}
    found: dict[str, list[Holder]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = first.setdefault(id(parameter), f"{path}.{name}" if path else name)
            found.setdefault(key, []).append((module, name))
    return found


def _own_slice(flat: torch.Tensor, plan: Plan, mesh: Mesh) -> torch.Tensor:
    own = plan.own(flat, mesh.shard_rank, plan.placement.parameter)
    return to_state_device(flat if len(own) == len(flat) else own.clone(), plan)


def _replace(original: nn.Parameter, holders: Sequence[Holder], place: ShardPlace, optimizer: Optimizer | None) -> None:
    """Makes the user's own parameter show the values that moved into shards, in every module that holds it."""
    new = replace(original, place)
    for module, name in holders:
        module._parameters[name] = new
    if new is not original:
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"] = [new if parameter is original else parameter for parameter in group["params"]]


def _shard_existing_state(
    optimizer: Optimizer, rules: Sequence[Rule], buffer: Buffer, parameters: Sequence[nn.Parameter], plan: Plan,
    mesh: Mesh,
) -> Stages:  # fmt: skip
    """Shards the per-element state that an optimizer brings along, such as Adagrad's sums or a resumed run's moments.
    Parameters without state get the rule's initial value."""
    begins = {one.name: one.initial for rule in rules if rule.group == buffer.group for one in rule.state}
    own = zip(buffer.slots, parameters, strict=True)
    states = {slot: all_leaves(optimizer.state.get(parameter, {})) for slot, parameter in own}
    names = {
        name
        for slot, state in states.items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == slot.leaf.whole_shape and not value.is_meta
        # For a parameter of one number, the rules say which of its state is per element.
        if value.dim() or name != "step"
    }
    found = {}
    for name in sorted(names):
        dtype = next(value.dtype for state in states.values() if isinstance(value := state.get(name), torch.Tensor))
        flat = torch.full((buffer.numel,), begins.get(name, 0.0), dtype=dtype, device=plan.device)
        for slot, state in states.items():
            if isinstance(value := state.get(name), torch.Tensor) and value.shape == slot.leaf.whole_shape:
                slot.of(flat).copy_(laid_part(value, slot.leaf))
        yield f"the optimizer's {name} of {buffer.key}, {dtype}"
        broadcast(flat, mesh, parts=buffer.split)
        found[f"{buffer.key}.{name}"] = _own_slice(flat, plan, mesh)
    return found


def read_scalars(optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """State that is one number, such as the step count, by ``"group <g>.<name>"``.

    There is one for each group: raises ``ValueError`` where it is not the same for all parameters of a group.
    """
    found: dict[str, torch.Tensor] = {}
    if optimizer is None or not optimizer.state:
        return found
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            for name, value in all_leaves(optimizer.state.get(parameter, {})).items():
                scalar = value if isinstance(value, torch.Tensor) else torch.tensor(value or 0.0)
                if scalar.shape == (1,) != tuple(parameter.shape):
                    scalar = scalar.reshape(())
                if parameter.dim() == 0 and name != "step":
                    if not any(other.dim() for other in group["params"]):
                        found.setdefault(f"group {index}.{name}", scalar)
                    continue
                if scalar.dim() == 0 and not scalar.is_meta:
                    key = f"group {index}.{name}"
                    if name == "step" and key in found and scalar == 0:  # made by the constructor, as Adagrad's is
                        continue
                    if name == "step" and key in found and found[key] == 0:
                        found[key] = scalar
                    if key in found and not torch.equal(found[key].double(), scalar.double()):
                        raise ValueError(
                            f"The optimizer's state {name!r} differs between parameters of group {index}: "
                            f"{found[key].item()} and {scalar.item()}. Put parameters of different age into groups "
                            "of their own."
                        )
                    found[key] = scalar
    return found


def _take_buffers(model: nn.Module, device: torch.device, mesh: Mesh) -> Stages:
    """The module buffers, on the device, with rank 0's values; they stay on the model as well."""
    moved: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._buffers.items():
            if tensor is None:
                continue
            if id(tensor) not in moved:
                own = tensor.detach().to(device)
                own = own.clone() if own.is_contiguous() is False else own
                yield f"buffer {path}.{name}: {own.dtype}{list(own.shape)}"
                broadcast(own, mesh)
                own.__dict__.update(vars(tensor))  # attributes that the model set on it
                moved[id(tensor)] = own
                moved[id(own)] = own
            module._buffers[name] = moved[id(tensor)]
            found[f"{path}.{name}" if path else name] = moved[id(tensor)]
    return found
