"""Updates this rank's shards with the own step of an element-wise optimizer that is not traced, after the program.

    program     forward, backward, reduce, unscale, clip -> gradients of this rank's shards
    then        param_groups[g]["params"] = shards, state from the tensors of `State`; type(optimizer).step(optimizer)

A shard stands for all parameters in it, since each element is updated from its own gradient and state alone. Code that
would treat elements differently raises an error that names it, in every step (`optim.element_wise`). State has the same
form as that of a traced update, so code that saves, loads, clones and shows it treats both alike. For parameters
without a gradient, shard and state are restored. A step that overflowed does not run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.program import Port
from fsdp_compiled.optim.element_wise import ShardParameter
from fsdp_compiled.optim.hyperparameters import with_numbers
from fsdp_compiled.optim.optimizer_copy import MISSING, Refused, plain_options
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.optim.step import Part, step_on_shards
from fsdp_compiled.optim.ways import noted_by
from fsdp_compiled.plan.plan import Buffer, Plan

BEGINS = {"first", "undamped"}  # scalars by which traced rules tell that no step was made
Named = Mapping[str, torch.Tensor]


class ShardUpdate:
    """Runs one optimizer's step on the groups of these rules. ``first``: the number of its first group among those of
    all optimizers."""

    def __init__(self, optimizer: Optimizer, rules: Sequence[Rule], first: int, plan: Plan, mesh: Mesh) -> None:
        self._optimizer, self._first, self._plan, self._mesh = optimizer, first, plan, mesh
        self._shards: dict[str, ShardParameter] = {}  # by buffer's key: the same objects at every step
        self._groups = {rule.group for rule in rules}
        self._buffers = [buffer for buffer in plan.buffers if buffer.updated and buffer.group in self._groups]
        entries = [entry.name for rule in rules for entry in rule.state if entry.place == "optimizer"]
        self._attributes = {name: vars(optimizer).get(name, MISSING) for name in entries}

    def check(self, rules: Sequence[Rule]) -> None:
        """Raises ``ValueError`` if somebody set state in the optimizer. Its code still reads all other attributes."""
        for name, value in self._attributes.items():
            if (now := vars(self._optimizer).get(name, MISSING)) is not value and now != value:
                key = next(f"{rule.key}.{name}" for rule in self._own(rules))
                kind = type(self._optimizer).__name__
                raise ValueError(
                    f"optimizer.{name} was set after compile_sharded, where nothing reads it: it is state of {kind}, "
                    f"and lives in sharded.state.optimizer[{key!r}]. Write it there, and put this back."
                )

    def run(
        self, rules: Sequence[Rule], values: Mapping[str, float], state: Named, shards: Named,
        outputs: Mapping[Port, torch.Tensor], idle: Collection[str],
    ) -> None:  # fmt: skip
        """Makes one step on the gradients among the program's outputs. ``values``: the groups' numbers, by
        ``"<group>.<name>"``."""
        own = list(self._own(rules))
        kept = list(self._of_idle(own, state, shards, idle))
        parts = [self._part(rule, values, state, shards, outputs, idle) for rule in own]
        begun = [part for part in parts if part.begins and any(shard.grad is not None for shard, _ in part.parameters)]
        try:
            step_on_shards(self._optimizer, parts)
        except Refused as error:
            raise RuntimeError(
                f"{type(self._optimizer).__name__} runs as it is, on this rank's shards, and now {error}: what lies "
                "in a shard would be updated wrongly. Nothing in its first steps told. Use one whose update of an "
                "element is a function of its own gradient and state alone, such as AdamW."
            ) from error
        finally:
            for shard in self._shards.values():
                shard.grad = None
        for target, before in kept:
            target.copy_(before)
        for part in begun:
            for name in BEGINS & part.scalars.keys():
                part.scalars[name].zero_()
        torch.autograd.graph.increment_version([shards[buffer.key] for buffer in self._buffers])

    def _own(self, rules: Sequence[Rule]) -> Iterator[Rule]:
        return (rule for rule in rules if rule.group in self._groups)

    def _part(
        self, rule: Rule, values: Mapping[str, float], state: Named, shards: Named,
        outputs: Mapping[Port, torch.Tensor], idle: Collection[str],
    ) -> Part:  # fmt: skip
        group = self._optimizer.param_groups[rule.group - self._first]
        prefix = f"{rule.group}."
        options: Mapping[str, Any] = with_numbers(
            group, {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        )
        scalars = {entry.name: state[f"{rule.key}.{entry.name}"] for entry in rule.state if entry.scalar}
        each = [entry.name for entry in rule.state if not entry.scalar]
        parameters = []
        for buffer in self._buffers:
            if buffer.group == rule.group:
                shard = self._shard(buffer, shards[buffer.key])
                gradient = outputs.get(Port("out", "update", buffer.key))
                reached = not all(slot.name in idle for slot in buffer.slots)
                shard.grad = gradient if gradient is not None and reached else None
                parameters.append((shard, {name: state[f"{buffer.key}.{name}"] for name in each}))
        begins = any(bool(scalars[name]) for name in BEGINS & scalars.keys())
        assert rule.kept is not None
        return Part(rule.kept, plain_options(options), scalars, parameters, begins)

    def _shard(self, buffer: Buffer, values: torch.Tensor) -> ShardParameter:
        if buffer.key not in self._shards:
            shard = self._shards[buffer.key] = ShardParameter(values.detach())
            groups = self._optimizer.param_groups
            shard.noted = lambda name: name in noted_by(p for group in groups for p in group["params"])
        shard = self._shards[buffer.key]
        if shard.data_ptr() != values.data_ptr():
            shard.data = values.detach()
        return shard

    def _of_idle(
        self, rules: Sequence[Rule], state: Named, shards: Named, idle: Collection[str]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields what has to be restored after the step: each part, and a copy of its values."""
        each = {rule.group: [entry.name for entry in rule.state if not entry.scalar] for rule in rules}
        for buffer in self._buffers:
            slots = [slot for slot in buffer.slots if slot.name in idle]
            for slot in slots if len(slots) < len(buffer.slots) else ():
                own = self._plan.part(buffer, slot, self._mesh.shard_rank, self._plan.placement.state)
                for values in (
                    shards[buffer.key],
                    *(state[f"{buffer.key}.{name}"] for name in each[buffer.group or 0]),
                ):
                    part = own.of(values.detach())
                    yield part, part.clone()
