"""What a rank holds between steps and at the peak of a step, in bytes: predicted from program and plan, not measured.

    forward            backward           update
          ____.....____                            activations, and what backward makes of them
     ____/             \\______                     gathered units, each until its last use
    |                         \\______.....____|    gradients, from reduction to update
    |==========================================|   parameters, optimizer state, buffers, batch

What is held between steps follows from the plan; the peak of a step follows from its program (`peak_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import NamedTuple

import torch

from fsdp_compiled.ir.program import Program
from fsdp_compiled.optim.rule import Rule, rule_for
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import Repeat, fold, human, repeats

GENERATOR = {"cpu": 5056, "cuda": 16}  # bytes of a generator's state
BAR = 60  # the longest bar of the timeline


@dataclass(frozen=True)
class Persistent:
    """Bytes that a rank holds between steps.

    ``copies``: of shards, in the compute dtype. ``sums``: of microbatches' gradients. ``other``: the generator's state,
    the step count, the rates, the loss's scale, the rank. ``host``: parameters and optimizer state under
    ``Policy.offload``, and rooms for saved values, which the device does not hold.
    """

    parameters: int = 0
    copies: int = 0
    optimizer: int = 0
    buffers: int = 0
    constants: int = 0
    sums: int = 0
    other: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return sum(getattr(self, entry.name) for entry in fields(self) if entry.name != "host")

    def __str__(self) -> str:
        held = (
            (getattr(self, entry.name), entry.name) for entry in fields(self) if entry.name not in ("other", "host")
        )
        parts = [f"{name} {human(size)}" for size, name in held if size]
        parts += [f"and {human(self.host)} in host memory"] * bool(self.host)
        return f"{human(self.total)} a rank between steps: " + ", ".join(parts)


@dataclass(frozen=True)
class Part:
    """Some of the bytes alive at one moment. ``where``: the unit or submodule that they belong to."""

    kind: str
    where: str
    nbytes: int


class Storage(NamedTuple):
    """A piece of memory that a run takes besides what is persistent. It is alive while the nodes ``begin`` to
    ``end - 1`` of `Memory.timeline` run. ``node``: the node that made it, or that takes it while it runs."""

    node: str
    kind: str
    where: str
    nbytes: int
    begin: int
    end: int


class Moment(NamedTuple):
    """The bytes alive on this rank while one node runs, with its arguments, results and workspaces."""

    node: str
    phase: str
    where: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.phase} of {self.where} ({self.node})"


@dataclass(frozen=True)
class Memory:
    """A rank's memory over one run of a program."""

    persistent: Persistent
    batch: int
    timeline: tuple[Moment, ...]  # in the order the nodes run
    parts: tuple[Part, ...]  # what is alive at the peak besides what is persistent, largest first
    unknown: str = ""  # why there is no prediction, where there is none
    storages: tuple[Storage, ...] = ()  # without empty ones; of kernels' workspaces only the peak's

    @property
    def peak(self) -> Moment:
        """The first node at which the most bytes are alive; raises ``ValueError`` where that is not predicted."""
        if self.unknown:
            raise ValueError(f"This program's memory is not predicted: {self.unknown}. The program runs all the same.")
        nothing = Moment("nothing runs", "forward", "(loss)", self.persistent.total + self.batch)
        return max(self.timeline, key=lambda moment: moment.nbytes, default=nothing)

    def at_peak(self) -> dict[str, int]:
        """Bytes alive at the peak, by kind."""
        found = {"state": self.persistent.total}
        for part in self.parts:
            found[part.kind] = found.get(part.kind, 0) + part.nbytes
        return found

    def lines(self) -> tuple[str, ...]:
        """Two lines for people: what is held between steps, and the peak."""
        if self.unknown:
            return f"memory: not predicted: {self.unknown}", "peak: not predicted"
        kinds = ", ".join(f"{kind} {human(size)}" for kind, size in self.at_peak().items() if size)
        return f"memory: {self.persistent}", f"peak: {human(self.peak.nbytes)} a rank at {self.peak}: {kinds}"

    def text(self) -> str:
        """The timeline: a line for each row of nodes of one unit and phase, with the height of the highest. If units
        come one after the other in the same way, one stands for all, with its first and its last height."""
        if self.unknown:
            return "\n".join(self.lines())
        highest = self.peak
        lines = [*self.lines(), "", "alive at the peak:", f"  {human(self.persistent.total):>10}  state"]
        lines += fold(f"  {human(part.nbytes):>10}  {part.kind} {part.where}".rstrip() for part in self.parts)
        lines += ["", f"{'':<10}{'':<28}{'bytes alive':>12}"]
        grouped = groupby(self.timeline, key=lambda moment: (moment.phase, moment.where))
        rows = [max(row, key=lambda moment: moment.nbytes) for _, row in grouped]
        place = 0
        for part in repeats([f"{top.phase:<10}{top.where}" for top in rows]):
            label, times = ([part], 1) if isinstance(part, str) else (list(part.text()), part.times)
            lines += label[: len(label) > 1]  # how often, where several repeat together
            size = len(part.lines) if isinstance(part, Repeat) else 1
            for one, name in enumerate(label[-size:]):
                tops = rows[place + one : place + times * size : size]
                top = max(tops, key=lambda moment: moment.nbytes)
                sizes = dict.fromkeys(human(moment.nbytes) for moment in (tops[0], tops[-1]))
                ending = f"  <- peak ({top.node})" if top is highest else ""
                bar = "#" * round(BAR * top.nbytes / highest.nbytes)
                lines.append(f"{name:<38}{'..'.join(sizes):>12}  {bar}{ending}")
            place += times * size
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__  # what a prompt shows


def unpredicted(reason: str) -> Memory:
    """The memory to show if a prediction fails."""
    return Memory(Persistent(), 0, (), (), reason)


def _travelling(plan: Plan) -> int:
    """Bytes of exchanges between sites that are on their way: of each part this site's change, and that of all."""
    every, overlap = plan.policy.sync_every, plan.policy.exchange.overlap
    if every is None or not overlap:
        return 0
    parts = [(step, sum(plan.shard_numel(one) * one.dtype.itemsize for one in part)) for step, part in plan.exchanged]
    return max(sum(2 * size for step, size in parts if (now - step) % every < overlap) for now in range(every))


def persistent(
    plan: Plan,
    rules: Sequence[Rule] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    program: Program | None = None,
) -> Persistent:
    """What a rank holds between steps: the model's buffers and tensors closed over, fake or real; the sums that the
    program adds to; and what the plan and the optimizer's rules ask for."""
    scalars = [entry.dtype for rule in rules for entry in rule.state if entry.scalar]
    optimizer = sum(dtype.itemsize for dtype in scalars if dtype is not None)
    elementwise = 0
    for buffer in plan.buffers:
        if buffer.updated and rules:
            assert buffer.group is not None
            size = buffer.numel // plan.shard if plan.placement.state else buffer.numel
            entries = [entry for entry in rule_for(rules, buffer.group).state if not entry.scalar]
            elementwise += size * sum((entry.dtype or buffer.dtype).itemsize for entry in entries)
            if plan.policy.sync_every is not None:  # the anchor, and the outer momentum
                kept = 2 if plan.policy.exchange.momentum else 1
                elementwise += kept * plan.shard_numel(buffer) * buffer.dtype.itemsize
    hypers = len({(rule.group, name) for rule in rules for name in rule.hypers})
    scale = plan.policy.initial_scale(torch.device("meta"))
    inputs = program.inputs if program is not None else {}
    away = plan.policy.offload
    rooms = sum(node.meta["val"].nbytes for port, node in inputs.items() if port.kind == "room")
    return Persistent(
        parameters=0 if away else plan.persistent_bytes,
        copies=plan.copy_bytes,
        optimizer=optimizer if away else optimizer + elementwise,
        buffers=sum(_distinct((buffers or {}).values())),
        constants=sum(_distinct((constants or {}).values())),
        sums=sum(node.meta["val"].nbytes for port, node in inputs.items() if port.kind == "sum"),
        other=_travelling(plan) + GENERATOR[plan.device.type] + 8 + 8 + 8 * hypers + sum(_distinct(scale.values())),
        host=rooms + (plan.persistent_bytes + elementwise if away else 0),
    )


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """The bytes of each storage behind these tensors, once each."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage.nbytes()
