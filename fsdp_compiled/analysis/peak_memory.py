"""Peak memory of a step: the bytes alive while each node of a program runs.

*Storage*: one piece of memory, as the allocator gives it. A view is in its base's storage; an operator that writes in
place returns what it wrote. The eager lowering drops each value after its last use. So a storage lives from the node
that makes it to the last use of the last value in it; and if a collective reads it, until that was waited for. Inputs
live all the time, since the caller holds them. `kernel_workspace` has what kernels and collectives need besides; for a
gather that is on the wire while others compute, that is what gloo needs at most. Sizes that move (`Policy.dynamic`) are
those of the trace.

Under ``lower="inductor"`` this is an estimate: fused intermediates never exist, but a piece holds what it reads until
it ends. Measured peaks were up to a few percent above it.

`Headroom` says where a value may be alive for longer without raising that peak:

    bytes alive     3  5  9  7  6  8  4        the peak is 9
    left            6  4  0  2  3  1  5
    2 bytes that are needed at the last node may be there from the node after the one that leaves 1

What is taken is subtracted from what is left, so several things that are moved, one after the other, do not raise the
peak together either.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.analysis.kernel_workspace import Backend, Workspaces, backend_of, keeps_input, on_wire
from fsdp_compiled.analysis.memory import Memory, Moment, Part, Persistent, Storage
from fsdp_compiled.ir.nodes import as_traced, is_collective, is_view, is_wait, mutated, role_of, writes
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import where
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
BLOCK = {"cuda": 512}  # what an allocator rounds up to, if it rounds


@dataclass(slots=True)
class _Storage:
    nbytes: int
    kind: str
    where: str
    node: str = ""  # the node that made it
    holders: int = 0  # values and collectives that keep it alive
    begin: int = 0  # the moments from which and until which it is
    end: float = inf


@dataclass
class _Flight:
    """A collective between its start and the last wait for its results."""

    results: set[int]
    kept: list[_Storage] = field(default_factory=list)


def predict(program: Program, plan: Plan, held: Persistent, backend: Backend | None = None) -> Memory:
    """Predicts one run of the program under the eager lowering. ``backend``: who carries the collectives; by default
    the one that `connect` chooses for the plan's device."""
    run = _Run(program, plan, held.total, backend or backend_of(plan.device))
    timeline = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            timeline.append(run.step(node))
    return Memory(held, run.batch, tuple(timeline), run.parts(), storages=tuple(run.storages()))


class _Run:
    """The program's values while it runs, by the storages that they are in."""

    def __init__(self, program: Program, plan: Plan, base: int, backend: Backend) -> None:
        self.block = BLOCK.get(plan.device.type, 1)
        self.backend = backend
        self.in_kernel = Workspaces()
        self.extents: dict[int, list[int]] = {}  # of results, by identity: equal blocks have the same
        self.operators: dict[int, _Operator] = {}  # by identity
        self.values: dict[fx.Node, list[_Storage]] = {}
        self.given: set[int] = set()
        self.flights: list[_Flight] = []
        self.held: list[_Storage] = []  # in the order in which they came to be alive
        flattened, fetched = _marked(program.graph)
        self.gradients = _flattened(flattened)
        self.last_uses = _last_uses(program.graph)
        self.shards = {node for port, node in program.inputs.items() if port.kind == "shard"}
        self.shards.update(fetched)
        self.batch = 0
        for port, node in program.inputs.items():
            storage = _Storage(self._rounded(_extent(as_traced(node.meta["val"]))), port.kind, port.key, holders=1)
            self.values[node] = [storage]
            if port.kind == "batch":
                self.batch += storage.nbytes
            elif port.kind == "call":
                base += storage.nbytes  # made for this run
        self.live = base + self.batch
        self.moments = 0
        self.highest = -1
        self.peak = 0  # which moment is the first of those
        self.kernel = _Storage(0, "kernel", "")  # what the running kernel takes besides

    def step(self, node: fx.Node) -> Moment:
        """Runs one node: makes its results, notes the height, drops what is not used again."""
        place = where(node)
        if (does := self.operators.get(id(node.target))) is None:
            does = self.operators[id(node.target)] = _read(node)
        made = self._results(node, does.gives, place)
        self.values[node] = made
        for storage in made:
            self._hold(storage)
        if does.sends:
            self._start(node)
        workspace = self._rounded(self.in_kernel(node))
        height = self.live + workspace
        if height > self.highest:
            self.highest, self.peak = height, self.moments
            self.kernel = _Storage(workspace, "kernel", place, node.name, 1, self.moments, self.moments + 1)
        self.moments += 1
        if does.waits:
            self._finish(made)
        for value in self.last_uses.get(node, ()):
            for storage in self.values.pop(value):
                self._drop(storage)
        return Moment(node.name, node.meta["phase"], place, height)

    def parts(self) -> tuple[Part, ...]:
        batch = [Part("batch", "", self.batch)] if self.batch else []
        alive = [storage for storage in self.held if storage.begin <= self.peak < storage.end]
        return (*_summed([*alive, self.kernel]), *batch)

    def storages(self) -> Iterator[Storage]:
        for one in (*self.held, self.kernel):
            if one.nbytes:
                yield Storage(one.node, one.kind, one.where, one.nbytes, one.begin, int(min(one.end, self.moments)))

    def _results(self, node: fx.Node, gives: str, place: str) -> list[_Storage]:
        """The storages of the node's results: its arguments' own, or new ones."""
        if gives == "a part":
            source, index = node.args
            return [self.values[source][index]]  # type: ignore[index]
        if gives == "its argument" or (gives == "either" and _is_view(node)):
            (base,) = self.values[node.all_input_nodes[0]]
            return [base] * len(_leaves(node.meta["val"]))
        if gives == "what it writes" and (targets := mutated(node)):
            own = [leaf for leaf in _leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
            return [self.values[source][0] for source, _ in zip(targets, own, strict=False)]
        kind = self._kind(node)
        value = node.meta["val"]
        if (sizes := self.extents.get(id(value))) is None:
            counted = as_traced(value)
            leaves = list(counted) if isinstance(counted, tuple | list) else [counted]
            sizes = self.extents[id(value)] = [self._rounded(_extent(leaf)) for leaf in leaves]
        return [_Storage(size, kind, place, node.name) for size in sizes]

    def _kind(self, node: fx.Node) -> str:
        role = role_of(node)
        if role in ("gather", "unpack", "kept") or (
            role in ("cast", "pack") and self.shards.intersection(node.all_input_nodes)
        ):
            return "gathered"
        if role in ("fetch", "restore"):
            return "fetched"
        if role in ("flatten", "reduce", "combine", "cast", "pack", "sum") or node in self.gradients:
            return "gradients"
        return {"forward": "activations", "backward": "backward", "update": "update"}[node.meta["phase"]]

    def _hold(self, storage: _Storage) -> None:
        if storage.holders == 0:
            storage.begin = self.moments
            self.held.append(storage)
            self.live += storage.nbytes
        storage.holders += 1

    def _drop(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            storage.end = self.moments
            self.live -= storage.nbytes

    def _start(self, node: fx.Node) -> None:
        """Keeps what the collective needs besides its results until it was waited for."""
        sources = node.all_input_nodes if keeps_input(node, self.backend) else []
        kept = [storage for source in sources for storage in self.values[source]]
        workspace = _Storage(self._rounded(on_wire(node, self.backend)), "wire", where(node), node.name)
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


@dataclass(frozen=True)
class _Operator:
    """The facts about a node's operator that are asked for each node. ``gives``: what its results are."""

    gives: Literal["a part", "its argument", "either", "what it writes", "new"]
    sends: bool
    waits: bool


def _read(node: fx.Node) -> _Operator:
    sends, waits = is_collective(node), is_wait(node)
    if node.target is operator.getitem:
        return _Operator("a part", sends, waits)
    if node.target is aten.reshape.default:
        return _Operator("either", sends, waits)
    if waits or node.target is aten._unsafe_view.default or is_view(node):
        return _Operator("its argument", sends, waits)
    return _Operator("what it writes" if writes(node) else "new", sends, waits)


def _is_view(node: fx.Node) -> bool:
    """Whether the result of a ``reshape`` is in its argument's storage; it copies where it cannot view."""
    source, result = as_traced((node.args[0].meta["val"], node.meta["val"]))  # type: ignore[union-attr]
    return source.is_contiguous() or _viewed(tuple(source.shape), source.stride(), tuple(result.shape))


@lru_cache(maxsize=1 << 12)
def _viewed(shape: tuple[int, ...], stride: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape and stride can be viewed in the other shape."""
    try:
        torch.empty_strided(shape, stride, device="meta").view(wanted)
    except (RuntimeError, ValueError):
        return False
    return True


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)


def _extent(value: Any) -> int:
    """Bytes from the first to the last element."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return 0
    if value.is_contiguous():
        return value.nbytes
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


def _marked(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that lay gradients end to end, and those that come from the host."""
    marked = [(node, mark.role) for node in graph.nodes if (mark := node.meta.get("mark")) is not None]
    return [node for node, role in marked if role == "flatten"], [node for node, role in marked if role == "restored"]


def _flattened(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The gradients by parameter that `reduce` lays end to end, down to the nodes that made them."""
    found: set[fx.Node] = set()
    stack = [node for node in nodes if node.target is aten.cat.default or is_view(node)]
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


class Headroom:
    """The bytes that are left under a program's predicted peak, by node; nodes are known by their names."""

    def __init__(self, program: Program, plan: Plan) -> None:
        memory = predict(program, plan, Persistent(), backend_of(plan.device))
        peak = max((moment.nbytes for moment in memory.timeline), default=0)
        self.left = {moment.node: peak - moment.nbytes for moment in memory.timeline}

    def earliest(self, nodes: Sequence[fx.Node], first: int, place: int, nbytes: int) -> int:
        """The first place, not before ``first``, from which on so many bytes may be alive until ``place``."""
        while place > first and self._holds(nodes[place - 1], nbytes):
            place -= 1
        return place

    def until(self, node: fx.Node, last: fx.Node, nbytes: int) -> list[fx.Node]:
        """The nodes from this one on, before ``last``, during which so many bytes may be alive."""
        found = []
        while node < last and self._holds(node, nbytes):
            found.append(node)
            node = node.next
        return found

    def take(self, nodes: Sequence[fx.Node], nbytes: int) -> None:
        """Notes that so many bytes more are alive while these nodes run."""
        for node in nodes:
            if node.name in self.left:
                self.left[node.name] -= nbytes

    def stand(self, nodes: Sequence[fx.Node], beside: fx.Node) -> None:
        """Notes that these nodes run beside that one from now on; what is left there is left while they run."""
        for node in nodes:
            self.left[node.name] = self.left.get(beside.name, 0)

    def _holds(self, node: fx.Node, nbytes: int) -> bool:
        return self.left.get(node.name, nbytes) >= nbytes
