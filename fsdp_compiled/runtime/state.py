"""State: everything a step reads and writes, as one pytree of this rank's tensors; and how it starts.

Shards and optimizer state live on the device between steps, or in host memory under ``Policy.offload``, where a step
also has `Rooms` for what its forward keeps. Host memory is pinned, so that the device copies from and to it by itself.
A step returns before its copies back are done, so whoever reads that memory calls `wait_for_host_memory` first.

`Copies` are this rank's shards in the compute dtype, kept true to the shards:

    step         gathers read the copy; the update writes shard and copy together
    otherwise    shard.copy_(...), another State      -> the copy is made anew before the next step that reads it

They are a cache, and no part of a `State`. A write to a shard is noticed by the counter that PyTorch raises with every
in-place operator. Custom kernels, collectives and ``tensor.data`` do not raise it. After one of those, call
``torch.autograd.graph.increment_version(shard)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, is_
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.optim.rule import Rule, rule_for
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.param_step_counts import StepCounts
from fsdp_compiled.runtime.rng import DefaultState


def to_state_device(value: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The same values where the plan keeps shards: the tensor itself, if it is there already."""
    own = value.to(plan.state_device)
    return own.pin_memory() if plan.device.type == "cuda" and plan.state_device.type == "cpu" else own


def wait_for_host_memory(plan: Plan) -> None:
    """Waits until host memory holds what the device was told to write into it."""
    if plan.device.type == "cuda" and plan.state_device.type == "cpu":
        torch.cuda.synchronize(plan.device)


class Rooms(dict[str, torch.Tensor]):
    """Host memory for each value that a program keeps there, by name."""

    def __init__(self, program: Program) -> None:
        self.devices = {node.meta["val"].device for node in program.marked("restored")} - {torch.device("cpu")}
        for port, node in program.inputs.items():
            if port.kind == "room":
                self[port.key] = host_copies.make_room(node.meta["val"], pinned=bool(self.devices))

    def __del__(self) -> None:
        """Waits for the devices: copies that they were told to make go on after the host forgot the program."""
        for device in self.devices:
            with suppress(Exception):  # Python ends
                torch.cuda.synchronize(device)


class State:
    """Everything a step reads and writes, as one pytree of this rank's tensors.

    ``parameters``: flat shards by buffer key. ``buffers``: the model's own buffers by name. ``optimizer``: per-element
    state by ``"<buffer key>.<name>"`` and scalars by ``"group <g>.<name>"``. ``constants``: tensors that the model or
    loss closes over and updates. ``sums``: gradients of microbatches that no update has used yet, by buffer key, with
    their ``"(count)"`` and ``"(loss)"``; empty until `Sharded.accumulate` is called. ``random``: what random
    operators draw from, the state of a generator, uint8 on the CPU. In the State that a `Sharded` trains it is that of
    PyTorch's default generator: reading saves it, and writing into the tensor sets it. In any other State, such as a
    clone, it is a value: the same one gives the same numbers again, and no other generator moves.
    ``scale``: under ``Policy.loss_scale``, the ``"factor"`` that the loss is multiplied by, ``"good"`` (steps since it
    changed) and ``"overflows"`` (steps that were void); else empty. ``step``: how many updates were made, int64.
    ``step_counts``, no tensors: which parameters made them.
    """

    _fields = ("parameters", "buffers", "optimizer", "constants", "sums", "scale", "random", "step")

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
        sums: Mapping[str, torch.Tensor],
        scale: Mapping[str, torch.Tensor],
        random: torch.Tensor | DefaultState,
        step: torch.Tensor,
    ) -> None:
        self.step_counts = StepCounts()
        self._values: tuple[Any, ...] | None = (parameters, buffers, optimizer, constants, sums, scale, random, step)

    def _value(self, index: int) -> Any:
        if self._values is None:
            raise RuntimeError(
                "This State was consumed by apply(): its tensors were updated in place and belong to the State that "
                "apply returned. Use that one, or clone before: tree_map(torch.clone, state)."
            )
        return self._values[index]

    parameters = property(lambda self: self._value(0))
    buffers = property(lambda self: self._value(1))
    optimizer = property(lambda self: self._value(2))
    constants = property(lambda self: self._value(3))
    sums = property(lambda self: self._value(4))
    scale = property(lambda self: self._value(5))
    step = property(lambda self: self._value(7))

    @property
    def random(self) -> torch.Tensor:
        source = self.drawn_from
        return source.read() if isinstance(source, DefaultState) else source

    @property
    def drawn_from(self) -> torch.Tensor | DefaultState:
        """What ``random`` is the state of, or the state itself."""
        return self._value(6)

    @property
    def held(self) -> object:
        """An object that stays the same as long as the dictionaries do, also in the State that `consume` returns."""
        self._value(0)
        return self._values

    def consume(self) -> State:
        """A new State with the same tensors; this one may no longer be read."""
        self._value(0)
        new = State.__new__(State)
        new._values, self._values, new.step_counts = self._values, None, self.step_counts
        return new

    def _counted(self, step_counts: StepCounts) -> State:
        self.step_counts = step_counts
        return self

    def __repr__(self) -> str:
        if self._values is None:
            return "State(consumed)"
        return f"State({len(self.parameters)} shards, {len(self.optimizer)} optimizer tensors)"


pytree.register_pytree_node(
    State,
    lambda state: ([getattr(state, name) for name in State._fields], state.step_counts.value),
    lambda values, step_counts: State(*values)._counted(StepCounts.of_value(step_counts)),
    serialized_type_name="fsdp_compiled.State",
)


def optimizer_state(
    plan: Plan, rules: Sequence[Rule], existing_state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The optimizer's state at the start: what it brought along, or initial values."""
    found: dict[str, torch.Tensor] = {}
    for rule in rules:
        for entry in rule.state:
            if entry.scalar:
                key = f"{rule.key}.{entry.name}"
                begin = existing_state.get(f"group {rule.group}.{entry.name}") if entry.place == "parameter" else None
                own = [one.key for one in plan.buffers if one.group == rule.group]
                if entry.name == "undamped" and any(f"{key}.momentum_buffer" in existing_state for key in own):
                    begin = torch.zeros((), dtype=entry.dtype, device=plan.device)
                found[key] = (
                    begin.to(plan.device, entry.dtype, copy=True)
                    if begin is not None
                    else torch.full((), entry.initial, dtype=entry.dtype, device=plan.device)
                )
    for buffer in plan.buffers:
        if buffer.updated:
            assert buffer.group is not None
            size = buffer.numel // plan.shard if plan.placement.state else buffer.numel
            for entry in rule_for(rules, buffer.group).state:
                if not entry.scalar:
                    key = f"{buffer.key}.{entry.name}"
                    dtype = entry.dtype or buffer.dtype
                    start = torch.full((size,), entry.initial, dtype=dtype, device=plan.state_device)
                    found[key] = (
                        existing_state[key].to(dtype) if key in existing_state else to_state_device(start, plan)
                    )
    return found


version = attrgetter("_version")


class Copies:
    """``tensors``: by buffer key. They keep their addresses. Their values are valid only after `follow`."""

    def __init__(self, plan: Plan) -> None:
        self.tensors = {
            buffer.key: torch.empty(plan.shard_numel(buffer), dtype=plan.compute_dtype(buffer), device=plan.device)
            for buffer in plan.buffers
            if plan.copied(buffer)
        }
        self._of: list[torch.Tensor] = []  # the shards that they are copies of
        self._versions: list[int] = []

    def follow(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Updates the copies that do not match these shards."""
        now = [shards[key] for key in self.tensors]
        if list(map(version, now)) != self._versions or not all(map(is_, now, self._of)):
            known = {id(shard): number for shard, number in zip(self._of, self._versions, strict=False)}
            for shard, copy in zip(now, self.tensors.values(), strict=True):
                if known.get(id(shard)) != shard._version:
                    copy.copy_(shard)
        self._of, self._versions = now, []  # unknown until the step returns: a failed one may leave anything

    def step_returned(self) -> None:
        """The step is over: it wrote shards and copies together, or neither."""
        self._versions = list(map(version, self._of))
