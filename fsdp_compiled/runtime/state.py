"""State: everything a step reads and writes, as one pytree of this rank's tensors; and how it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.optim.rule import Rule, StateTensor, rule_for
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.host_memory import to_state_device
from fsdp_compiled.runtime.param_step_counts import StepCounts
from fsdp_compiled.runtime.rng import DefaultState


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
        """The same object as long as the dictionaries are the same, in the State that `consume` returns too."""
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
    """The state that the optimizer starts from, or brought along."""
    found: dict[str, torch.Tensor] = {}
    for rule in rules:
        for entry in rule.state:
            if entry.scalar:
                key = f"{rule.key}.{entry.name}"
                begin = _existing_number(existing_state, rule, entry, plan)
                own = [one.key for one in plan.buffers if one.group == rule.group]
                if entry.name == "undamped" and any(f"{key}.momentum_buffer" in existing_state for key in own):
                    begin = torch.zeros((), dtype=entry.dtype, device=plan.device)
                found[key] = (
                    begin.clone()
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


def _existing_number(
    existing_state: Mapping[str, torch.Tensor], rule: Rule, entry: StateTensor, plan: Plan
) -> torch.Tensor | None:
    """A number that the optimizer brought along; all rules of a group start from the same."""
    found = existing_state.get(f"group {rule.group}.{entry.name}") if entry.place == "parameter" else None
    return found.to(plan.device, entry.dtype) if found is not None else None
