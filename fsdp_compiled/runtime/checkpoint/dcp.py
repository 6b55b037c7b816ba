"""The state in the form that `torch.distributed.checkpoint` wants: each rank's chunks of whole tensors.

    dcp.save({"app": sharded}, checkpoint_id=folder)        any planner and storage of DCP's
    dcp.load({"app": sharded}, checkpoint_id=folder)        on any number of ranks

    {"model": {name: tensor}, "optim": {"state": {parameter: {name: tensor}}, "param_groups": [...]}, "updates": ...}

A tensor of which a rank holds a part is a DTensor over a `LocalShardsWrapper`, whose rectangles are views of the
shards. DCP copies out of them and into them; `async_save` copies out of a deep copy that its stager makes. In torch
2.11 to 2.14 this relies on ``torch.distributed.tensor._shards_wrapper`` and ``_dtensor_spec``, as torchrec does.

Owners of whole parameters keep whole tensors, each on its owner alone:

    {"optim": {"state": {"layers.0.up.weight": {"momentum_buffer": tensor}}, ...}, "optim_stepped": 1}

DCP reads into the tensors that it is given, but before a first step an owner has none. Then there are zeros of the form
that a step would make, and ``optim_stepped`` is 0. It is saved too, and says that the zeros are no state. Only an
optimizer whose state is tensors of the parameter's shape (Muon) has a form that is known beforehand; others are
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_compiled.distributed.mesh import Mesh, Work
from fsdp_compiled.plan.leaf import contiguous_stride
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Entry, by_name, place_of, split_state_name, wrapped
from fsdp_compiled.runtime.checkpoint.chunks import tensors as every_tensor
from fsdp_compiled.runtime.checkpoint.contents import Trained, numbers_of, optimizer_values, options
from fsdp_compiled.runtime.checkpoint.loading import load_given
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.matching import match, refusal
from fsdp_compiled.runtime.checkpoint.owned_state import STEPPED, forms_of, is_filled, of_owners
from fsdp_compiled.runtime.checkpoint.values import encode
from fsdp_compiled.runtime.param_step_counts import names_of
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


def state_dict(trained: Trained, mesh: Mesh, make_ranks: Callable[[], DeviceMesh | None]) -> Work[StateDict]:
    """This rank's chunks, as views, and small values that are the same on all ranks, as copies. For `lockstep`."""
    plan, state, rules, ranks = trained.plan, trained.state, trained.rules, make_ranks()
    chunks = by_name(trained.chunks(place_of(mesh)))
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for key, entry in every_tensor(plan, rules, state.optimizer).items():
        of = split_state_name(key)
        cut = plan.placement.state if of else plan.placement.parameter
        if (tensor := _tensor(entry, chunks.get(key), cut, ranks)) is None:
            continue
        if of is None:
            model[key.removeprefix("model.")] = tensor
        else:
            optimizer.setdefault(of[0], {})[of[1]] = tensor
    model |= dict(state.buffers)
    for rule in rules:
        for names, numbers in numbers_of(state, plan, rule):
            dtypes = {name: state.optimizer[f"{rule.key}.{name}"].dtype for name in numbers}
            for parameter in names:
                own = {name: torch.tensor(number, dtype=dtypes[name]) for name, number in numbers.items()}
                optimizer.setdefault(parameter, {}).update(own)
    found = StateDict(model=model, updates=state.step.clone())
    if trained.optimizer is not None:
        groups = [
            {"params": [parameter._sharded_name for parameter in group["params"]], **kept}
            for group, kept in zip(trained.optimizer.param_groups, options(trained.optimizer), strict=True)
        ]
        found["optim"] = {"state": optimizer, "param_groups": groups}
    if trained.updates:
        owned = yield from of_owners(trained)
        optimizer |= owned.pop("state")
        found |= owned
    if state.scale:
        found["loss_scale"] = {name: tensor.clone() for name, tensor in state.scale.items()}
    return found


def _tensor(entry: Entry, chunks: list[Chunk] | None, cut: bool, ranks: DeviceMesh | None) -> torch.Tensor | None:
    """The tensor as DCP wants it; None where this rank holds nothing of it."""
    if entry.numel == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    if chunks is None:
        return None
    if ranks is None or (not cut and chunks[0].values.shape == entry.shape):
        return chunks[0].values
    meta = TensorMeta(torch.Size(entry.shape), contiguous_stride(entry.shape), entry.dtype)
    return DTensor(wrapped(chunks), DTensorSpec(ranks, (Shard(0),), tensor_meta=meta), requires_grad=False)


def load_state_dict(given: Mapping[str, Any], trained: Trained, mesh: Mesh) -> Work[Callable[[], None]]:
    """Returns a function that writes what is given into the state; what DCP has written there stays. For `lockstep`.

    Raises ``ValueError`` for what does not fit.
    """
    wrong: list[str] = []
    manifest, tensors = _described(given, trained, mesh, wrong)
    found = match(manifest, trained, place_of(mesh))
    if wrong := [*wrong, *found.differences]:
        raise ValueError(
            refusal("What load_state_dict was given is of another model or optimizer", wrong, "Build what was saved.")
        )
    return (yield from load_given(manifest, tensors, found, trained, mesh))


def _described(
    given: Mapping[str, Any], trained: Trained, mesh: Mesh, wrong: list[str]
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """What is given, in the form of a checkpoint, for `match`; and its tensors by name."""
    plan, state, rules = trained.plan, trained.state, trained.rules
    tensors = {f"model.{name}": one for name, one in given.get("model", {}).items() if isinstance(one, torch.Tensor)}
    entries = every_tensor(plan, rules, state.optimizer)  # used for a tensor that this rank has nothing of
    values: dict[str, Any] = {"updates": {"same": int(given.get("updates", state.step))}}
    if scale := given.get("loss_scale"):
        values["scale"] = {"same": encode({name: float(number) for name, number in scale.items()}, "", {})}
    optim = given.get("optim", {})
    states = {name: dict(kept) for name, kept in optim.get("state", {}).items()}
    for update in trained.updates:
        for name in (name for name in forms_of(update) if name in update.owned):
            its = states.setdefault(name, {})
            if not given.get(STEPPED, True) and not is_filled(its):
                its.clear()
            elif not its or any(isinstance(value, DTensor) for value in its.values()):
                wrong.append(f"the optimizer's state of {name} is not given as whole tensors")
            its |= {key: value.detach().clone() for key, value in its.items() if isinstance(value, torch.Tensor)}
    more, kept = values_of_states(states, optim.get("param_groups", ()), trained, wrong)
    tensors |= kept
    if trained.optimizer is not None and "optim" in given:
        values |= more
    for name in {one.name for one in trained.chunks(place_of(mesh))} - {*tensors}:
        entries.pop(name)
    of_model = {*entries, *(f"model.{name}" for name in state.buffers)}
    entries |= {key: _entry(one) for key, one in tensors.items() if key in kept or key in of_model}
    return Manifest(0, 1, entries, values, {}, {}, {}), tensors


def values_of_states(
    states: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], trained: Trained, wrong: list[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An optimizer's state by parameter, and groups with parameters' names, as values of a checkpoint; and the state's
    tensors by name."""
    numbers: dict[str, dict[str, float]] = {}
    found: dict[str, torch.Tensor] = {}
    grouped = {name for group in groups for name in group.get("params", ())}
    for rule in trained.rules:
        scalars = {entry.name for entry in rule.state if entry.scalar}
        for parameter in (name for name in names_of(trained.plan, rule) if name in grouped):
            its = {name: value for name, value in states.get(parameter, {}).items() if value is not None}
            numbers[parameter] = {name: float(its.pop(name)) for name in scalars if name in its}
            for name, value in its.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer.state.{parameter}.{name}"] = value
                else:
                    wrong.append(f"the optimizer's {name} of {parameter} is a {type(value).__name__}, and no tensor")
    return optimizer_values(numbers, groups), found


def _entry(value: torch.Tensor) -> Entry:
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, LocalShardsWrapper):  # its own dtype says nothing
        local = local.local_shards()[0]
    return Entry(tuple(value.shape), local.dtype)
