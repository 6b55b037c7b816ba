"""The plan and the programs for a module's current parameters.

The units are the modules that the user marked with `fully_shard`. Their flat shards exist already, and the plan
describes them. A plan is valid as long as the module has these parameters and trains the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.model_tensors import is_wrapped, made_of, named_parameters, opened
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.plan.buckets import name_of
from fsdp_compiled.plan.hardware import machine_of
from fsdp_compiled.plan.plan import Buffer, Plan, Slot, Unit
from fsdp_compiled.plan.rows import side_by_side
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.fsdp import merged_units
from fsdp_compiled.runtime.fsdp.extended_parameter import Extended
from fsdp_compiled.runtime.fsdp.merged_units import Row
from fsdp_compiled.runtime.fsdp.module_state import state_of, traced
from fsdp_compiled.runtime.fsdp.parameter_group import Entry, FlatShard, ParameterGroup
from fsdp_compiled.runtime.module_buffers import ModuleBuffers
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.programs.program_maker import ProgramMaker
from fsdp_compiled.runtime.rng import LoopRandom


@dataclass
class Lent:
    """The tensors that programs read besides the batch. The dictionaries stay the same objects while the programs live.

    ``plain``: parameters outside of flat shards, as forward computes with them; ``opened``: what these are made of.
    """

    shards: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    rank: torch.Tensor  # int64[1], along the shard axis
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    opened: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # that programs write to
    drawn: torch.Tensor | None = None  # the start of random numbers, where ranks along tp compare it
    _known: dict[str, Any] = field(default_factory=dict)  # what programs assume about each of the plain ones

    def take(self, plain: Mapping[str, torch.Tensor]) -> None:
        """Makes programs read these from now on. Raises ``ValueError`` where programs may assume something else."""
        for name, tensor in plain.items():
            now = made_of(tensor)
            if self._known.setdefault(name, now) != now:
                raise ValueError(
                    f"What {name} is made of has changed: it is {now}, and programs were made for {self._known[name]}. "
                    "Keep the class, the shapes and what __tensor_flatten__ says of it, and let numbers that change be "
                    "tensors of it."
                )
            self.plain[name] = tensor
            self.opened.update(opened(name, tensor))

    def take_again(self) -> None:
        """Looks up again which tensors the parameters of wrapper classes are made of."""
        self.take({name: tensor for name, tensor in self.plain.items() if is_wrapped(tensor)})

    def drop(self, names: Iterable[str]) -> None:
        """Removes these parameters."""
        for name in names:
            for key, _ in opened(name, self.plain.pop(name)):
                del self.opened[key]

    def holders(self, compiled: Compiled) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """For each kind of program input but the batch, the dictionary that holds the tensors."""
        return {"shard": self.shards, "buffer": self.buffers, "plain": self.opened,
                "constant": compiled.constants(self), "rank": {"": self.rank},
                "drawn": {"": self.drawn} if self.drawn is not None else {}}  # fmt: skip


@dataclass(eq=False)
class ModulePlan:
    """``rows``: rows of flat shards, by the buffer's key; ``entries``: by the parameter's name; ``gathers``: a digest
    of the collectives that gather everything; ``trained``: the model's class, how much is trained, and a digest, which
    ranks compare."""

    plan: Plan
    mesh: Mesh
    groups: tuple[ParameterGroup, ...]
    programs: Programs
    lent: Lent
    rows: Mapping[str, Row]
    entries: Mapping[str, Entry]
    gathers: str
    trained: str
    random: LoopRandom | None  # only where there is a tp axis
    extended: Mapping[str, Extended] = field(default_factory=dict)  # by each of the parameter's names

    def drawing(self, compiled: Compiled) -> AbstractContextManager[None]:
        """The context for running a program, which sets the random state if the program draws random numbers."""
        if self.random is None or not compiled.random:
            return nullcontext()
        return self.random.drawing(compiled.shared, compiled.parts)

    @property
    def current(self) -> bool:
        """Whether the parameters still lie in these flat shards."""
        return all(row.current for row in self.rows.values())

    @property
    def waits(self) -> bool:
        """Whether gradients of its parameters are held back for a later backward."""
        return any(row.waits for row in self.rows.values()) or any(one.waits for one in self.extended.values())

    @cached_property
    def flats(self) -> dict[str, FlatShard]:
        """The flat shard of each parameter, by the parameter's name."""
        flats = {entry: flat for row in self.rows.values() for flat in row.flats for entry in flat.entries}
        return {name: flats[entry] for name, entry in self.entries.items()}

    @cached_property
    def group_of(self) -> dict[Entry, ParameterGroup]:
        return {entry: group for group in self.groups for entry in group.entries}

    @property
    def apart(self) -> list[tuple[str, Extended]]:
        """The parameters that lie in no flat shard, each with one of its names."""
        return [(self.names[one.entry], one) for one in dict.fromkeys(self.extended.values())]

    @cached_property
    def names(self) -> dict[Entry, str]:
        names = {entry: name for name, entry in self.entries.items()}
        return names | {one.entry: name for name, one in reversed([*self.extended.items()])}


def make(
    module: nn.Module,
    function: Callable[..., Any],
    groups: Sequence[ParameterGroup],
    policy: Policy,
    plain: Mapping[str, torch.Tensor],
    calls: Calls,
) -> ModulePlan:
    """A plan for these parameters, with no programs yet. ``function``: calls the model, in the trace.

    Raises ``ValueError`` for parameters on the meta device.
    """
    mesh = groups[0].mesh
    rows: dict[str, Row] = {}
    units = units_of(module, groups, rows)
    state = state_of(module)
    notes = (state.merging,) if state is not None and state.merging else ()
    # As far ahead as FSDP2. The best choice depends on the batch, whose lengths may differ between ranks, but the order
    # of collectives must be the same on all ranks.
    ahead = 1 if policy.prefetch == "auto" and policy.limit != 1 else policy.prefetch
    policy = replace(policy, prefetch=ahead)
    machine = machine_of(mesh.device, policy.network, mesh.tp)
    plan = Plan(tuple(units), policy, mesh.device, mesh.shard, mesh.replicate, machine, notes, tp=mesh.tp)
    buffers = ModuleBuffers(module, mesh.device)
    random = LoopRandom(mesh.device, mesh.rank) if mesh.tp > 1 else None
    lent = Lent({key: row.tensor for key, row in rows.items()}, buffers.tensors(),
                torch.tensor([mesh.shard_rank], device=mesh.device),
                drawn=random.drawn if random is not None else None)  # fmt: skip
    lent.take(plain)
    known = {id(one.entry.parameter): one for group in groups for one in group.extended}
    extended = {
        name: known[id(one)] for name, one in named_parameters(module, remove_duplicate=False) if id(one) in known
    }
    entries = {
        slot.name: entry
        for buffer in plan.buffers
        for slot, entry in zip(buffer.slots, rows[buffer.key].entries, strict=True)
    }
    said, note = _trained(plan, {**plain, **{name: one.entry.parameter for name, one in extended.items()}})
    maker = ProgramMaker(
        module, traced, None, plan, mesh, calls, random.bound if random is not None else None, called=function,
        plain=lent.plain,
    )  # fmt: skip
    programs = Programs(maker, (), note)
    gathers = _digest([[(buffer.key, buffer.numel) for buffer in plan.buffers], *extended])
    return ModulePlan(
        plan, mesh, tuple(groups), programs, lent, rows, entries, gathers, f"{type(module).__name__}, {said}", random,
        extended,
    )  # fmt: skip


def _trained(plan: Plan, plain: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """The count of trained parameters, with a digest of all a plan depends on; and a note for labels, empty if all are.

    Ranks compare the digest: where ranks train different parameters, the collectives may match and the sums be wrong.
    """
    leaves = [slot.leaf for buffer in plan.buffers for slot in buffer.slots]
    slots = {leaf.names[0]: (leaf.trainable, leaf.shape, leaf.shard_dim) for leaf in leaves}
    slots |= {name: (one.requires_grad, tuple(one.shape), 0) for name, one in plain.items()}
    count = sum(trained for trained, *_ in slots.values())
    units = [
        (unit.reshard, [(buffer.key, buffer.division, buffer.hooked) for buffer in unit.buffers]) for unit in plan.units
    ]
    names = [name for name, (trained, *_) in slots.items() if trained]
    said = f"{count} of {len(slots)} trained"
    if onto := sorted({*plan.neighbours.values()}):
        said += f", resharded onto {' and '.join(map(str, onto))} ranks"
    note = "" if count == len(slots) else f", {said} ({_digest(names)})"
    return f"{said} ({_digest([slots, units, plan.policy])})", note


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def units_of(module: nn.Module, groups: Sequence[ParameterGroup], rows: dict[str, Row]) -> Iterator[Unit]:
    """The units, in the order of the groups. Fills ``rows``, by the buffer's key."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters(module, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    paths = {id(one): path for path, one in module.named_modules()}
    places = {
        group: next((paths[id(one)] for one in group.modules if id(one) in paths), f"unit {number}") or "root"
        for number, group in enumerate(groups)
    }
    for run, together in merged_units.rows(groups):
        unit = name_of([places[group] for group in run])
        buffers = []
        for index, row in enumerate(together):
            key = unit if len(together) == 1 else f"{unit}#{index}"
            own = [_buffer(flat, places[group], names) for group, flat in zip(run, row.flats, strict=True)]
            together_as = side_by_side(unit, key, own, run[0].mesh.shard)
            hooked = run[0].all_reduce_hook is not None
            together_as = replace(together_as, division=run[0].division, hooked=hooked)
            buffers.append(replace(together_as, precision=run[0].precision))
            rows[key] = row
        yield Unit(unit, tuple(buffers), run[0].reshard_after_forward)


def _buffer(flat: FlatShard, path: str, names: Mapping[int, list[str]]) -> Buffer:
    """The flat shard's buffer, with the names that its parameters have in this model."""
    if flat.tensor.is_meta:
        raise ValueError(
            f"The parameters of {path} are on the meta device. Give them memory and values before the "
            "first call: model.to_empty(device=...), then reset_parameters() or load_state_dict()."
        )
    slots = []
    for place, (entry, slot) in enumerate(zip(flat.entries, flat.buffer.slots, strict=True)):
        own = tuple(names.get(id(entry.parameter), [f"({path}, {place}, outside)"]))
        leaf = replace(slot.leaf, names=own, block=path, trainable=entry.parameter.requires_grad)
        slots.append(Slot(leaf, slot.offset))
    trainable = any(slot.leaf.trainable for slot in slots)
    return replace(flat.buffer, slots=tuple(slots), trainable=trainable)
