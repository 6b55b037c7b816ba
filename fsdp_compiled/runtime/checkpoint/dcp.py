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

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.leaf import contiguous_stride
from fsdp_compiled.runtime.checkpoint.chunks import (
    Chunk,
    Entry,
    held,
    place_of,
    split_state_name,
    wrapped,
)
from fsdp_compiled.runtime.checkpoint.chunks import tensors as every_tensor
from fsdp_compiled.runtime.checkpoint.contents import Trained, numbers_of, options, plain
from fsdp_compiled.runtime.checkpoint.loading import chosen_values, prepare_values, write
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.matching import match, refusal
from fsdp_compiled.runtime.checkpoint.owned_state import kept_by
from fsdp_compiled.runtime.checkpoint.values import encode
from fsdp_compiled.runtime.param_step_counts import names_of
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


def state_dict(trained: Trained, mesh: Mesh, ranks: DeviceMesh | None) -> StateDict:
    """This rank's chunks, as views, and small values that are the same on all ranks, as copies."""
    plan, state, rules = trained.plan, trained.state, trained.rules
    chunks = held_by_name(trained, rules, mesh)
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
    if state.scale:
        found["loss_scale"] = {name: tensor.clone() for name, tensor in state.scale.items()}
    return found


def held_by_name(trained: Trained, rules: Sequence[Rule], mesh: Mesh) -> dict[str, list[Chunk]]:
    """The chunks that this rank holds, by tensor."""
    found: dict[str, list[Chunk]] = {}
    for one in held(trained.plan, rules, place_of(mesh), trained.state.parameters, trained.state.optimizer):
        found.setdefault(one.name, []).append(one)
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
    manifest, values = _described(given, trained, mesh, wrong)
    found = match(manifest, trained, place_of(mesh))
    copies = [(one.values, _source(one, values[one.name], wrong)) for one in found.wanted if one.name in values]
    wrong += found.differences
    if wrong:
        raise ValueError(
            refusal("What load_state_dict was given is of another model or optimizer", wrong, "Build what was saved.")
        )
    chosen = chosen_values(manifest, found, {}, mesh.rank, [])
    write_values = prepare_values(chosen, values, found, trained, "")

    def write_them() -> None:
        write([(to, source) for to, source in copies if to.data_ptr() != source.data_ptr()])
        write_values()

    return write_them
    yield  # no stage of its own


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
        for name in (name for name in _forms(update) if name in update.owned):
            its = states.setdefault(name, {})
            if not given.get(STEPPED, True) and not _is_filled(its):
                its.clear()
            elif not its or any(isinstance(value, DTensor) for value in its.values()):
                wrong.append(f"the optimizer's state of {name} is not given as whole tensors")
            its |= {key: value.detach().clone() for key, value in its.items() if isinstance(value, torch.Tensor)}
    more, kept = optimizer_values(states, optim.get("param_groups", ()), trained, wrong)
    tensors |= kept
    if trained.optimizer is not None and "optim" in given:
        values |= more
    for name in held_by_name(trained, rules, mesh).keys() - tensors.keys():
        entries.pop(name)
    of_model = {*entries, *(f"model.{name}" for name in state.buffers)}
    entries |= {key: _entry(one) for key, one in tensors.items() if key in kept or key in of_model}
    return Manifest(0, 1, entries, values, {}, {}, {}), tensors


def optimizer_values(
    states: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], trained: Trained, wrong: list[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An optimizer's state by parameter, and groups with parameters' names, as values of a checkpoint; and the state's
    tensors by name."""
    records: list[dict[str, Any]] = []
    found: dict[str, torch.Tensor] = {}
    told = [{name: encode(plain(value), name, {}) for name, value in group.items()} for group in groups]
    names = [group.pop("params", []) for group in told]
    grouped = {name for row in names for name in row}
    for rule in trained.rules:
        scalars = {entry.name for entry in rule.state if entry.scalar}
        for parameter in (name for name in names_of(trained.plan, rule) if name in grouped):
            its = {name: value for name, value in states.get(parameter, {}).items() if value is not None}
            numbers = {name: float(its.pop(name)) for name in scalars if name in its}
            records.append({"parameters": [parameter], "scalars": encode(numbers, "", {})})
            for name, value in its.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer.state.{parameter}.{name}"] = value
                else:
                    wrong.append(f"the optimizer's {name} of {parameter} is a {type(value).__name__}, and no tensor")
    values = {"optimizer": {"class": None, "groups": told, "parameters": names}, "scalars": records}
    return {name: {"same": value} for name, value in values.items()}, found


def _entry(value: torch.Tensor) -> Entry:
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, LocalShardsWrapper):  # its own dtype says nothing
        local = local.local_shards()[0]
    return Entry(tuple(value.shape), local.dtype)


def _source(one: Chunk, given: Any, wrong: list[str]) -> torch.Tensor:
    """The chunk's values, taken from what is given."""
    if not isinstance(given, DTensor):
        return one.of(given.detach())
    local = given.to_local()
    if isinstance(local, LocalShardsWrapper):
        for offsets, shard in zip(local.local_offsets(), local.local_shards(), strict=True):
            if (tuple(offsets), shard.shape) == (one.offsets, one.values.shape):
                return shard
    wrong.append(f"{one.name} is cut in another way: give what state_dict() returned here, or whole tensors")
    return one.values


States = dict[str, dict[str, torch.Tensor]]  # by the parameter's name, then by the state's
STEPPED = "optim_stepped"
CURE = "Call save and load."


def of_owners(trained: Trained) -> Work[dict[str, Any]]:
    """Owners' part of the dictionary: the state of this rank's parameters, the tensors themselves; ``STEPPED``."""
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


def _is_filled(its: Mapping[str, Any]) -> bool:
    """Whether something was read into these zeros. FSDP2 saves the state alone, without a mark that it is real."""
    return any(
        not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.any() for value in its.values()
    )


def _forms(update: WholeUpdate) -> dict[str, dict[str, torch.dtype]]:
    """What is kept for each parameter after a step. Raises ``ValueError`` where that is not known beforehand."""
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
