"""Moves whole tensors to and from shards, one at a time: weights of any origin, and state dictionaries on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Exchange, Mesh, Work, broadcast, gather_parts, gather_shards
from fsdp_compiled.optim.rule import Rule, StateTensor, rule_for
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Buffer
from fsdp_compiled.runtime.checkpoint import owned_state
from fsdp_compiled.runtime.checkpoint.chunks import Entry, per_element, place_of
from fsdp_compiled.runtime.checkpoint.chunks import tensors as every_tensor
from fsdp_compiled.runtime.checkpoint.contents import Trained, numbers_of, options
from fsdp_compiled.runtime.checkpoint.data_file import unread
from fsdp_compiled.runtime.checkpoint.dcp import values_of_states
from fsdp_compiled.runtime.checkpoint.loading import load_given
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.matching import (
    FITS,
    Match,
    match,
    match_optimizer,
    refusal,
    report,
    taken_over,
    unlike,
    want,
)
from fsdp_compiled.runtime.managed_model import holding
from fsdp_compiled.runtime.param_step_counts import names_of
from fsdp_compiled.runtime.tensor_parallel.parts import whole_value


class Keys(NamedTuple):
    """For each key of ``model.state_dict()``: the first name of its parameter, or the name of its buffer."""

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
    if hasattr(model, "config"):  # its library writes tied weights once, and ties them when it loads
        first = {name: key for key, name in reversed(found.parameters.items())}
        found = Keys({key: name for name, key in reversed(first.items())}, found.buffers)
    return found


def renamed(model: Any, there: Collection[str], keys: Keys) -> Callable[[str], str]:
    """Gives a key of the model its name there: a head's file loads into its bare model, and the other way round."""
    base = getattr(model, "base_model_prefix", "")
    if not base or any(key in there for key in keys.parameters):
        return lambda key: key
    if any(f"{base}.{key}" in there for key in keys.parameters):
        return lambda key: f"{base}.{key}"
    return lambda key: key.removeprefix(f"{base}.")


def of_rank_0(given: Any, mesh: Mesh) -> Work[dict[str, torch.Tensor]]:
    """Rank 0's tensors, by key, not read yet. To read one is a work of all ranks, in which rank 0 broadcasts it."""
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if mesh.rank == 0:
        if not isinstance(given, Mapping):
            raise ValueError(f"state_dict is a {type(given).__name__}; expected a dictionary, on rank 0.")
        for key, value in given.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{key} is a {type(value).__name__}; expected a tensor.")
            kinds[key] = tuple(value.shape), value.dtype
    kinds = (yield Exchange("what rank 0 is given", kinds))[0]

    def read(key: str) -> Work[torch.Tensor]:
        shape, dtype = kinds[key]
        empty = torch.empty(shape, dtype=dtype, device=mesh.device)
        value = (
            given[key].detach().to(mesh.device).resolve_conj().resolve_neg().contiguous() if mesh.rank == 0 else empty
        )
        sent = value.view(-1).view(torch.uint8)
        yield key
        broadcast(sent, mesh)
        return value

    return {key: unread(shape, dtype, partial(read, key)) for key, (shape, dtype) in kinds.items()}


def load_weights(
    there: Mapping[str, torch.Tensor],
    what: str,
    strict: bool,
    model: nn.Module,
    trained: Trained,
    mesh: Mesh,
    together: bool = False,
) -> Work[Callable[[], None]]:
    """Reads weights for this rank's shards and buffers aside; returns a function that writes them. For `lockstep`.

    ``together``: reading a tensor is a work of all ranks.
    """
    keys = keys_of(model, trained)
    slots = [slot for buffer in trained.plan.buffers for slot in buffer.slots]
    kinds = {slot.name: (slot.leaf.whole_shape, slot.leaf.dtype) for slot in slots}
    kinds |= {name: (tuple(one.shape), one.dtype) for name, one in trained.state.buffers.items()}
    names = {name: slot.name for slot in slots for name in slot.leaf.names}
    names |= {name: name for name in keys.buffers.values()} | keys.buffers | keys.parameters
    prefix = renamed(model, there, keys)
    of_key = {prefix(key): name for key, name in names.items()}
    several: dict[str, list[str]] = {}  # by name, the keys there: a tied parameter may have more than one
    for key in sorted(there):
        several.setdefault(of_key.get(key, key), []).append(key)

    def alike(name: str, found: list[str]) -> Work[torch.Tensor]:
        first: torch.Tensor | None = None
        for key in found:
            value = there[key].read()
            value = ((yield from value) if together else value).to(kinds[name][1])
            if first is not None and not torch.allclose(first, value, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"{what} differ in {found[0]} and {key}, which are one parameter here, so nothing was loaded. "
                    "Build the model without the tie, or remove the one that is not meant."
                )
            first = value
        assert first is not None
        return first

    given = {key: Entry(tuple(one.shape), one.dtype) for key, one in there.items()}
    tensors, entries = {}, {}
    for name, found in several.items():
        odd = [key for key in found if name in kinds and unlike(given[key], *kinds[name], cast=True)]
        entries[f"model.{name}"] = one = given[[*odd, *found][0]]
        several_times = unread(one.shape, one.dtype, partial(alike, name, found))
        tensors[f"model.{name}"] = several_times if found[1:] else there[found[0]]
    manifest = Manifest(0, 1, entries, {}, {}, {}, {})
    fits = match(manifest, trained, place_of(mesh), [*keys.buffers.values()])
    if (wrong := fits.differences) and strict:
        raise ValueError(refusal(f"{what} are of another model", wrong, "Build that model." if together else FITS))
    write = yield from load_given(manifest, tensors, fits, trained, mesh, together)

    def write_them() -> None:
        write()
        if mesh.rank == 0:
            report(f"{what}, which are of another model", wrong)

    return write_them


def load_given_weights(
    given: Mapping[str, Any], model: nn.Module, trained: Trained, mesh: Mesh
) -> Work[Callable[[], None]]:
    """Like `load_weights`, for rank 0's ``model.state_dict()``."""
    there = yield from of_rank_0(given, mesh)
    return (yield from load_weights(there, "The weights given", True, model, trained, mesh, together=True))


def collected(own: torch.Tensor, buffer: Buffer, cut: bool, what: str, mesh: Mesh) -> Work[dict[str, torch.Tensor]]:
    """``[numel / shard]`` on each rank (all of it if not ``cut``) -> copies on rank 0's CPU, by parameter name.

    Other ranks get an empty dictionary. Runs in stages, as `lockstep` expects, each named by ``what``.
    """
    if cut:
        yield what
    full = gather_shards(own, mesh) if cut else own
    if buffer.split:
        yield f"{what}, over tp"
    parts = gather_parts(full, mesh) if buffer.split else [full]
    if mesh.rank != 0:
        return {}
    return {
        slot.name: whole_value([slot.of(part) for part in parts], slot.leaf).detach().cpu().clone()
        for slot in buffer.slots
    }


def full_state_dict(model: nn.Module, trained: Trained, mesh: Mesh) -> Work[dict[str, Any]]:
    """The ordinary ``model.state_dict()``, on rank 0 and on the CPU; an empty dictionary elsewhere.

    Runs in stages, for `lockstep`: if one rank fails, for example in a hook of the model on rank 0, every rank raises
    an error. Nothing is changed.
    """
    plan, whole = trained.plan, dict[str, torch.Tensor]()
    for buffer in plan.buffers:
        own = trained.state.parameters[buffer.key].to(plan.device)
        found = yield from collected(own, buffer, plan.placement.parameter, buffer.key, mesh)
        for slot in buffer.slots if found else ():
            whole |= dict.fromkeys(slot.leaf.names, found[slot.name])
        del own
    if mesh.rank != 0:
        return {}
    instead: dict[int, torch.Tensor] = {
        id(old): nn.Parameter(whole[name], old.requires_grad) for name, old in named_parameters(model)
    }
    instead |= {id(old): trained.state.buffers[name].detach().cpu().clone() for name, old in model.named_buffers()}
    with holding(model, instead):
        return model.state_dict()


def optimizer_state_dict(trained: Trained, mesh: Mesh) -> Work[dict[str, Any]]:
    """``optimizer.state_dict()`` as torch.optim has it, on rank 0 and on the CPU; empty elsewhere."""
    optimizer = trained.optimizer
    assert optimizer is not None
    _refuse_containers(trained.rules)
    indices = _indices(optimizer)
    state: dict[Any, Any] = {}
    for buffer in trained.plan.buffers:
        for key in per_element(buffer, trained.rules):
            own = trained.state.optimizer[f"{buffer.key}.{key}"].to(trained.plan.device)
            what = f"{key} of {buffer.key}"
            values = yield from collected(own, buffer, trained.plan.placement.state, what, mesh)
            for name, value in values.items():
                state.setdefault(indices[name], {})[key] = value
            del own
    owned = yield from owned_state.from_owners(trained, mesh)
    if mesh.rank != 0:
        return {}
    state |= {indices[name]: kept for name, kept in owned.items()}
    groups = options(optimizer)
    for rule in trained.rules:
        scalars = [entry for entry in rule.state if entry.scalar]
        for names, numbers in numbers_of(trained.state, trained.plan, rule):
            for entry in scalars:
                if entry.place in ("group", "state"):
                    holder = groups[rule.group] if entry.place == "group" else state
                    holder[entry.name] = _scalar(numbers[entry.name], entry)
                for name in names if entry.place == "parameter" else ():  # each name gets a tensor of its own
                    state.setdefault(indices[name], {})[entry.name] = _scalar(numbers[entry.name], entry)
        for name in names_of(trained.plan, rule) if any(entry.place == "ours" for entry in scalars) else ():
            # Its code begins where there is no state.
            if name not in trained.state.step_counts.updated.get(rule.key, ()):
                state.pop(indices[name], None)
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        kept["params"] = [indices[parameter._sharded_name] for parameter in group["params"]]
    ordered = dict(sorted(state.items(), key=lambda item: (isinstance(item[0], str), item[0])))
    return {"state": ordered, "param_groups": groups}


def _scalar(number: Any, entry: StateTensor) -> Any:
    """The number in the form of the optimizer's code: a Python number, or a tensor of one number."""
    if not entry.number:
        return torch.tensor(number, dtype=entry.dtype)
    return int(number) if float(number).is_integer() else number


def _indices(optimizer: Optimizer) -> dict[str, int]:
    """By parameter's name, its number in torch's state dictionary, counted through the groups."""
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


def load_optimizer(given: Mapping[str, Any], trained: Trained, mesh: Mesh) -> Work[Callable[[], None]]:
    """Reads the shards of rank 0's ``optimizer.state_dict()`` aside; returns a function that writes all of it. In
    stages, for `lockstep`."""
    made: Manifest | None = None
    tensors: dict[str, torch.Tensor] = {}
    if mesh.rank == 0:
        made = _described(given, trained, tensors)
    manifest: Manifest = (yield Exchange("the optimizer's groups and numbers", made))[0]
    found, places = Match(), {name: name for name in manifest.tensors if name.startswith("model.")}
    match_optimizer(manifest, trained, places, found)
    want(trained, place_of(mesh), places, found)
    if found.differences:
        raise ValueError(refusal("The optimizer's state is of another one", found.differences, "Build that optimizer."))
    there = yield from of_rank_0(tensors, mesh)
    return (yield from load_given(manifest, there, found, trained, mesh, together=True))


def _described(given: Any, trained: Trained, tensors: dict[str, torch.Tensor]) -> Manifest:
    """``optimizer.state_dict()`` in the form of a checkpoint; adds its tensors, by name, to ``tensors``."""
    optimizer = trained.optimizer
    assert optimizer is not None
    _refuse_containers(trained.rules)
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise ValueError("state_dict is not of torch.optim's form: expected state and param_groups, on rank 0.")
    names = [[parameter._sharded_name for parameter in group["params"]] for group in optimizer.param_groups]
    here, there = [[len(group) for group in groups] for groups in (names, [g["params"] for g in given["param_groups"]])]
    if here != there:
        raise ValueError(f"The optimizer's groups have {here} parameters here, and {there} in what is to be loaded.")
    states = {name: given["state"].get(index) or {} for name, index in _indices(optimizer).items()}
    wrong: list[str] = []
    manifest = Manifest(0, 1, every_tensor(trained.plan, (), {}), {}, {}, {}, {})
    owned_state.given_to_owners(states, trained, manifest, tensors)
    written = {name for one in manifest.values.get("owners", {}).get("same", ()) for name in one["written"]}
    groups = [
        {"params": own} | {name: loaded[name] for name in (*taken_over(group), *written) if name in loaded}
        for own, group, loaded in zip(names, optimizer.param_groups, given["param_groups"], strict=True)
    ]
    traced = {
        slot.name: _completed(states[slot.name], given, rule_for(trained.rules, buffer.group), slot.leaf, trained)
        for buffer in trained.plan.buffers
        if buffer.updated and not rule_for(trained.rules, buffer.group).whole
        for slot in buffer.slots
    }
    values, kept = values_of_states(traced, groups, trained, wrong)
    if wrong:
        raise ValueError(refusal("The optimizer's state is of another one", wrong, "Build that optimizer."))
    manifest.values |= values
    manifest.tensors |= {key: Entry(tuple(one.shape), one.dtype) for key, one in kept.items()}
    tensors |= kept
    return manifest


def _completed(kept: Mapping[str, Any], given: Any, rule: Rule, leaf: Leaf, trained: Trained) -> dict[str, Any]:
    """A parameter's state, as at the start if none is given; with what the code counts in other places."""
    own = {name: value for name, value in kept.items() if value is not None}
    counted = [entry for entry in rule.numbers if entry.place == "parameter"]
    # State alone may be what the constructor made.
    begun = any(own.get(one.name, one.initial) != one.initial for one in counted) if counted else bool(own)
    for entry in rule.state:
        if not entry.scalar:
            dtype = entry.dtype or leaf.dtype
            value = own.get(entry.name, torch.tensor(entry.initial).expand(leaf.whole_shape))
            own[entry.name] = value.to(dtype) if isinstance(value, torch.Tensor) else value
        elif entry.place == "parameter":
            own.setdefault(entry.name, entry.initial)
        elif entry.place == "group":
            if (number := given["param_groups"][rule.group].get(entry.name)) is None:
                raise ValueError(f"param_groups[{rule.group}] has no {entry.name!r}, in which {rule.name} counts.")
            own[entry.name] = number
        elif entry.place == "state":
            own[entry.name] = given["state"].get(entry.name, entry.initial)
        elif entry.place == "ours":  # whether the first step is still to come
            own[entry.name] = float(not begun)
        else:  # an attribute, which is in no state_dict
            own[entry.name] = trained.state.optimizer[f"{rule.key}.{entry.name}"]
    return own
