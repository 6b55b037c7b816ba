"""What a rank holds between steps and at the height of a step, in bytes: predicted from program and plan, not measured.

    forward            backward           update
          ____.....____                            activations, and what backward makes of them
     ____/             \\______                     gathered units, each until its last use
    |                         \\______.....____|    gradients, from reduction to update
    |==========================================|   parameters, optimizer state, buffers, batch

*Storage*: one piece of memory, as the allocator gives it. A view has its base's; an operator that writes in place gives
back what it wrote. The eager lowering drops each value after its last use, so a storage lives from the node that makes
it to the last use of the last value that is in it, and while a collective reads it, until that was waited for. Inputs
live all the time, since the caller holds them. What kernels and collectives need besides is in `kernel_workspace`; for
a gather that is on the wire while others compute, it is what gloo needs at most. Under ``lower="inductor"`` fused
intermediates never exist, and the peak is at most this one. Sizes that move (`Policy.dynamic`) are taken as they were
when the program was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.analysis.kernel_workspace import Backend, backend_of, in_kernel, keeps_input, on_wire
from fsdp_compiled.ir.nodes import as_traced, is_collective, is_view, is_wait, mutated, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import where
from fsdp_compiled.optim.rule import Rule, rule_for
from fsdp_compiled.plan.plan import Plan, human

aten = torch.ops.aten
GENERATOR = {"cpu": 5056, "cuda": 16}  # bytes of a generator's state
BAR = 60  # the longest bar of the timeline
BLOCK = {"cuda": 512}  # what an allocator rounds up to, where it rounds


@dataclass(frozen=True)
class Persistent:
    """Bytes that a rank holds between steps.

    ``copies``: of shards, in the compute dtype. ``sums``: of microbatches' gradients. ``other``: the generator's state,
    the step count, the rates, the loss's scale, the rank. ``host``: parameters and optimizer state under
    ``Policy.offload``, which the device does not hold.
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
        """On the device."""
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
    """Some of what is alive at one moment. ``where``: the unit or submodule that it belongs to."""

    kind: str
    where: str
    nbytes: int


@dataclass(frozen=True)
class Moment:
    """While one node runs: the bytes alive on this rank, its arguments, results and scratch among them."""

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
        """The timeline: a line for each row of nodes of one unit and phase, as high as the highest of them."""
        if self.unknown:
            return "\n".join(self.lines())
        highest = self.peak
        lines = [*self.lines(), "", "alive at the peak:", f"  {human(self.persistent.total):>10}  state"]
        lines += [f"  {human(part.nbytes):>10}  {part.kind} {part.where}".rstrip() for part in self.parts]
        lines += ["", f"{'':<10}{'':<28}{'bytes alive':>12}"]
        for _, row in groupby(self.timeline, key=lambda moment: (moment.phase, moment.where)):
            top = max(row, key=lambda moment: moment.nbytes)
            bar = "#" * round(BAR * top.nbytes / highest.nbytes)
            ending = f"  <- peak ({top.node})" if top is highest else ""
            lines.append(f"{top.phase:<10}{top.where:<28}{human(top.nbytes):>12}  {bar}{ending}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__  # what a prompt shows


def unpredicted(reason: str) -> Memory:
    """What there is to say where a prediction fails."""
    return Memory(Persistent(), 0, (), (), reason)


def persistent(
    plan: Plan,
    rules: Sequence[Rule] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    program: Program | None = None,
) -> Persistent:
    """What a rank holds between steps: of the model's buffers and of tensors closed over, fake or real, of the sums
    that the program adds to, and of what the plan and the optimizer's rules ask for."""
    scalars = [entry.dtype for rule in rules for entry in rule.state if entry.scalar]
    optimizer = sum(dtype.itemsize for dtype in scalars if dtype is not None)
    elementwise = 0
    for buffer in plan.buffers:
        if buffer.updated and rules:
            assert buffer.group is not None
            size = buffer.numel // plan.shard if plan.placement.state else buffer.numel
            entries = [entry for entry in rule_for(rules, buffer.group, buffer.variant).state if not entry.scalar]
            elementwise += size * sum((entry.dtype or buffer.dtype).itemsize for entry in entries)
    rates = len({(rule.group, name) for rule in rules for name in rule.hypers})
    scale = plan.policy.initial_scale(torch.device("meta"))
    inputs = program.inputs if program is not None else {}
    away = plan.policy.offload
    return Persistent(
        parameters=0 if away else plan.persistent_bytes,
        copies=plan.copy_bytes,
        optimizer=optimizer if away else optimizer + elementwise,
        buffers=sum(_distinct((buffers or {}).values())),
        constants=sum(_distinct((constants or {}).values())),
        sums=sum(node.meta["val"].nbytes for port, node in inputs.items() if port.kind == "sum"),
        other=GENERATOR[plan.device.type] + 8 + 8 + 8 * rates + sum(_distinct(scale.values())),
        host=plan.persistent_bytes + elementwise if away else 0,
    )


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Bytes of each storage behind these tensors, once."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage.nbytes()


@dataclass
class _Storage:
    nbytes: int
    kind: str
    where: str
    holders: int = 0  # values and collectives that keep it alive


@dataclass
class _Flight:
    """A collective between its start and the last wait for its results."""

    results: set[int]
    kept: list[_Storage] = field(default_factory=list)


def predict(program: Program, plan: Plan, held: Persistent, backend: Backend | None = None) -> Memory:
    """One run of the program under the eager lowering; ``backend``: who carries the collectives, by default as `join`
    chooses for the plan's device."""
    run = _Run(program, plan, held.total, backend or backend_of(plan.device))
    timeline = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            timeline.append(run.step(node))
    return Memory(held, run.batch, tuple(timeline), run.parts())


class _Run:
    """The program's values while it runs, by the storages that they are in."""

    def __init__(self, program: Program, plan: Plan, base: int, backend: Backend) -> None:
        self.block = BLOCK.get(plan.device.type, 1)
        self.backend = backend
        self.values: dict[fx.Node, list[_Storage]] = {}
        self.given: set[int] = set()
        self.flights: list[_Flight] = []
        self.alive: dict[int, _Storage] = {}
        self.gradients = _flattened(program)
        self.last_uses = _last_uses(program.graph)
        self.shards = {node for port, node in program.inputs.items() if port.kind == "shard"}
        self.shards.update(program.marked("fetch"))
        self.batch = 0
        for port, node in program.inputs.items():
            storage = _Storage(self._rounded(_extent(as_traced(node.meta["val"]))), port.kind, port.key, holders=1)
            self.values[node] = [storage]
            if port.kind == "batch":
                self.batch += storage.nbytes
            elif port.kind == "call":
                base += storage.nbytes  # made for this run
        self.live = base + self.batch
        self.highest = -1
        self.peak: list[Part] = []

    def step(self, node: fx.Node) -> Moment:
        """Runs one node: makes its results, notes the height, drops what is not used again."""
        made = self._results(node)
        self.values[node] = made
        for storage in made:
            self._hold(storage)
        if is_collective(node):
            self._start(node)
        workspace = self._rounded(in_kernel(node))
        height = self.live + workspace
        if height > self.highest:
            self.highest = height
            self.peak = _summed([*self.alive.values(), _Storage(workspace, "kernel", where(node))])
        if is_wait(node):
            self._finish(made)
        for value in self.last_uses.get(node, ()):
            for storage in self.values.pop(value):
                self._drop(storage)
        return Moment(node.name, node.meta["phase"], where(node), height)

    def parts(self) -> tuple[Part, ...]:
        batch = [Part("batch", "", self.batch)] if self.batch else []
        return (*self.peak, *batch)

    def _results(self, node: fx.Node) -> list[_Storage]:
        """The storages of the node's results: its arguments' own, or new ones."""
        target: Any = node.target
        if target is operator.getitem:
            source, index = node.args
            return [self.values[source][index]]  # type: ignore[index]
        if is_wait(node) or target is aten._unsafe_view.default or _views(node):
            (base,) = self.values[node.all_input_nodes[0]]
            return [base] * len(pytree.tree_leaves(node.meta["val"]))
        if targets := mutated(node):
            own = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
            return [self.values[source][0] for source, _ in zip(targets, own, strict=False)]
        kind, place = self._kind(node), where(node)
        value = as_traced(node.meta["val"])
        leaves = list(value) if isinstance(value, tuple | list) else [value]
        return [_Storage(self._rounded(_extent(leaf)), kind, place) for leaf in leaves]

    def _kind(self, node: fx.Node) -> str:
        role = role_of(node)
        if role == "gather" or (role == "cast" and self.shards.intersection(node.all_input_nodes)):
            return "gathered"
        if role == "fetch":
            return "fetched"
        if role in ("flatten", "reduce", "combine", "cast", "sum") or node in self.gradients:
            return "gradients"
        return {"forward": "activations", "backward": "backward", "update": "update"}[node.meta["phase"]]

    def _hold(self, storage: _Storage) -> None:
        if storage.holders == 0:
            self.alive[id(storage)] = storage
            self.live += storage.nbytes
        storage.holders += 1

    def _drop(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            del self.alive[id(storage)]
            self.live -= storage.nbytes

    def _start(self, node: fx.Node) -> None:
        """The collective keeps what it needs besides its results until it was waited for."""
        sources = node.all_input_nodes if keeps_input(node, self.backend) else []
        kept = [storage for source in sources for storage in self.values[source]]
        workspace = _Storage(self._rounded(on_wire(node, self.backend)), "wire", where(node))
        flight = _Flight({id(storage) for storage in self.values[node]}, [*kept, workspace])
        for storage in flight.kept:
            self._hold(storage)
        self.flights.append(flight)

    def _finish(self, waited: list[_Storage]) -> None:
        for flight in list(self.flights):
            flight.results -= {id(storage) for storage in waited}
            if not flight.results:
                self.flights.remove(flight)
                for storage in flight.kept:
                    self._drop(storage)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.block) * self.block


def _views(node: fx.Node) -> bool:
    """Whether the node's result is in its argument's storage; ``reshape`` copies where it cannot view."""
    if node.target is aten.reshape.default:
        source, result = as_traced((node.args[0].meta["val"], node.meta["val"]))  # type: ignore[union-attr]
        try:
            source.view(result.shape)
        except (RuntimeError, ValueError):
            return False
    return is_view(node)


def _extent(value: Any) -> int:
    """Bytes from the first to the last element."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (reach + 1) * value.dtype.itemsize


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that the generated code drops after it, as fx writes ``x = None``; inputs are never freed."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in (*node.all_input_nodes, *([node] if not node.users else [])):
            if value not in seen:
                seen.add(value)
                if value.op == "call_function":
                    found.setdefault(node, []).append(value)
    return found


def _flattened(program: Program) -> set[fx.Node]:
    """The gradients by parameter that `reduce` lays end to end, down to the nodes that made them."""
    found: set[fx.Node] = set()
    stack = [node for node in program.marked("flatten") if node.target is aten.cat.default or is_view(node)]
    while stack:
        node = stack.pop()
        for source in node.all_input_nodes:
            if source not in found and source.op == "call_function":
                found.add(source)
                if is_view(source) or source.target is operator.getitem or source.target is aten._unsafe_view.default:
                    stack.append(source)
    return found


def _summed(storages: Iterable[_Storage]) -> list[Part]:
    sizes: dict[tuple[str, str], int] = {}
    for storage in storages:
        key = (storage.kind, storage.where)
        sizes[key] = sizes.get(key, 0) + storage.nbytes
    parts = (Part(kind, place, nbytes) for (kind, place), nbytes in sizes.items() if nbytes)
    return sorted(parts, key=lambda part: -part.nbytes)
