"""Program: one training step as a value.

A program is an ATen graph with *ports*, which say what each placeholder and each output is. Passes find their work by
ports and by the marks below, never by shapes or node names:

- ``node.meta["val"]``: a fake tensor of the node's shape, stride, dtype and device; true after every edit.
- ``node.meta["phase"]``: ``"forward"``, ``"backward"`` or ``"update"``.
- ``node.meta["mark"]``: a `Mark` on nodes that passes inserted: the role they play, and for which unit and buffer.
- ``node.meta["idle"]``, on a shard's placeholder: the names of its parameters that the loss does not reach; those that
  earlier microbatches reached are in ``"added"`` instead.
- ``node.meta["seed"]``, set on one node: the derivative of the loss by itself, where backward starts.
- ``node.meta["effect"]``: the node is run for what it does, such as a check, even where nothing reads its result.
- ``node.meta["shared"]``: a draw of random numbers that is the same on all ranks along the tp axis.
- ``node.meta["path"]``: the submodule that the node came from, for people to read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from torch import fx

from fsdp_compiled.ir.inference import Inference
from fsdp_compiled.ir.nodes import (
    Mark,
    Role,
    call_text,
    calls,
    describe,
    is_collective,
    role_of,
)

Side = Literal["in", "out"]
PortKind = Literal[
    # inputs
    "parameter",  # by name, whole; before `gather`
    "shard",  # this rank's slice of a flat buffer, by the buffer's key
    "copy",  # the same in the compute dtype
    "buffer",  # the model's own, by name; as an output, its new value
    "constant",  # a tensor that the model or the loss closes over, by name; as an output, its new value
    "batch",  # a tensor of the batch, by its place in it
    "plain",  # a parameter of the model that is not sharded, by name
    "tangent",  # the derivative by the result at that place, where what follows forward is not in the program
    "saved",  # what forward keeps for backward, where they are two programs; an output of the first
    "size",  # of a tensor of the batch along ``dim``, where sizes move
    "state",  # of the optimizer: ``part``, of a flat buffer or of a whole group
    "hyper",  # a scheduled hyperparameter: ``part``, of a group
    "sum",  # of a flat buffer's gradients over microbatches; without a name, of their losses or of how many they are
    "scale",  # what `Policy.loss_scale` needs, by name
    "room",  # host memory for a value that forward keeps, by the value's name
    "step",  # how many updates were made
    "rank",  # this rank's place among the shards
    "rows",  # how much this rank's batch counts; as an output, inside the pipeline alone
    "call",  # which program this rank runs with which hyperparameters
    "drawn",  # the start of this call's random numbers, as numbers that ranks along the tp axis compare
    "mesh",  # of a graph that was just captured: the mesh of its collectives
    # outputs
    "loss",
    "aux",  # what the loss function returned beside the loss, by place
    "result",  # what forward returned, by place
    "parameter gradient",  # by the parameter's name, whole; before `reduce`
    "gradient",  # of a flat buffer, by its key; from `reduce` on
    "whole gradient",  # the same of this rank alone, before it is reduced
    "input gradient",  # of a tensor of the batch, by its place, or of a plain parameter, by its name
    "update",  # the same, where the optimizer's own code reads it after the program
    "norm",
    "same",  # numbers of the batch, which ranks along the tp axis compare; inside the pipeline alone
    "overflow",  # how many flat buffers' gradients are not finite; in the end, whether any
]


@dataclass(frozen=True, eq=False, init=False)
class Port:
    """What a placeholder or output is: its ``kind``, the ``name`` of the thing it belongs to, and the ``part`` of that.

    Equal ports are one object, since each is looked up hundreds of times.
    """

    side: Side
    kind: PortKind
    name: str = ""
    part: str = ""
    dim: int | None = None

    def __new__(cls, side: Side, kind: PortKind, name: str = "", part: str = "", dim: int | None = None) -> Port:
        known = _PORTS.get(key := (side, kind, name, part, dim))
        if known is None:
            made = object.__new__(cls)
            held = vars(made)
            held["side"], held["kind"], held["name"], held["part"], held["dim"] = key
            known = _PORTS.setdefault(key, made)
        return known

    def __reduce__(self) -> tuple[type[Port], tuple[Any, ...]]:
        return Port, astuple(self)

    @property
    def key(self) -> str:
        """Its key among the ports of its kind: in a `State`, for example."""
        part = f".{self.part}" if self.name else f"({self.part})"
        return self.name + (part if self.part else "")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.key, "" if self.dim is None else f"dim {self.dim}")))


_PORTS: dict[tuple[Side, PortKind, str, str, int | None], Port] = {}
LOSS = Port("out", "loss")
NORM = Port("out", "norm")
OVERFLOW = Port("out", "overflow")
FACTOR = Port("in", "scale", "factor")  # float32, the factor on the loss
STEP = Port("in", "step")  # int64
RANK = Port("in", "rank")  # int64[1]
COUNT = Port("in", "sum", part="count")  # of microbatches, float64
WEIGHT = Port("out", "rows")  # float64
SAME = Port("out", "same")  # float64
SAME_PARTS = 2
CALL = Port("in", "call")  # float64
DRAWN = Port("in", "drawn")  # float64
SILENT = "none"  # the wire of a program without collectives
ANCHOR, MOMENTUM = "outer.anchor", "outer.momentum"  # parts of what sites that step by themselves have in common
CALL_PARTS = 3  # of 20 bits each, in one element each


@dataclass(frozen=True)
class Program:
    """A step as a value: a graph, its ports, and the passes that made it."""

    graph: fx.Graph
    ports: tuple[Port, ...]  # inputs in the order of the placeholders, then outputs in the order of the output node
    history: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what passes chose, and why
    needs: Callable[[], tuple[str, ...]] = tuple  # the memory it takes on a rank, for people
    peak: Callable[[], str] = str  # the node at which memory peaks, for people; empty where it is not known
    donated: bool = False  # whether its holder gives it up: an `Edit` then takes the graph instead of copying it
    inferred: Inference | None = field(default=None, compare=False, repr=False)  # what its edits worked out

    @property
    def inputs(self) -> dict[Port, fx.Node]:
        ports = [port for port in self.ports if port.side == "in"]
        return dict(zip(ports, self.graph.find_nodes(op="placeholder"), strict=True))

    @property
    def outputs(self) -> dict[Port, fx.Node]:
        ports = [port for port in self.ports if port.side == "out"]
        return dict(zip(ports, self.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]

    def marked(self, role: Role) -> list[fx.Node]:
        """The nodes that passes inserted in this role, in the order they run."""
        return [node for node in self.graph.nodes if role_of(node) == role]

    def after(self, name: str) -> Program:
        """The same program after a pass that had nothing to do."""
        return replace(self, history=(*self.history, name), donated=False)

    @property
    def hash(self) -> str:
        """Equal exactly for programs that run the same operations, in the same order, on the same ports."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def wire(self) -> str:
        """Equal for programs whose collectives pair up, one by one; `SILENT` where there are none."""
        calls = self.collectives
        return hashlib.sha256(repr(calls).encode()).hexdigest()[:8] if calls else SILENT

    @property
    def collectives(self) -> list[str]:
        """What is communicated, call by call: the shape, the axis, and the unit."""
        found = calls(self.graph, is_collective)
        marks: list[Mark | None] = [node.meta.get("mark") for node in found]
        return [
            f"{node.target} {describe(node)} {fx.node.map_arg(node.args, lambda _: None)}"
            + (f" of {mark.unit}, {mark.buffer}" if mark else "")
            for node, mark in zip(found, marks, strict=True)
        ]

    def text(self) -> str:
        """Every node on a line: what ranks compare, and what `dump` writes."""
        return "\n".join(self.lines())

    def outline(self, uneven: bool = False) -> str:
        """The text without names and numeric arguments: what ranks along the tp axis have in common.

        ``uneven``: their parts differ in size, so that only what they send each other is in common.
        """
        places = {node: place for place, node in enumerate(self.graph.nodes)}
        lines = [f"{port.side} {port}" for port in self.ports]
        if uneven:
            sent = [", ".join(map(describe, node.all_input_nodes)) for node in self.graph.nodes if is_collective(node)]
            return "\n".join([*lines, *(f"{one} of {of}" for one, of in zip(self.collectives, sent, strict=True))])
        for node, place in places.items():
            operator = node.target if node.op == "call_function" else node.op
            lines.append(f"{place}: {describe(node)} = {operator}{[places[one] for one in node.all_input_nodes]}")
        return "\n".join(lines)

    def lines(self) -> Iterator[str]:
        ports = {node: port for port, node in self.inputs.items()}
        unit, phase = None, None
        for node in self.graph.nodes:
            mark: Mark | None = node.meta.get("mark")
            if node.op == "call_function" and node.meta["phase"] != phase:
                phase = node.meta["phase"]
                yield f"# {phase}"
            where = mark.unit if mark else node.meta.get("path", "")
            if node.op == "call_function" and where != unit:
                unit = where
                yield f"  # {unit or '(loss)'}"
            if node.op == "placeholder":
                yield f"{node.name}: {describe(node)}  # {ports[node]}"
            elif node.op == "output":
                for port, value in self.outputs.items():
                    yield f"return {port}: {value}"
            else:
                yield f"    {node.name}: {describe(node)} = {call_text(node)}" + (f"  # {mark}" if mark else "")

    def __str__(self) -> str:
        from fsdp_compiled.ir.text import summary  # that module reads programs; only this call shows one
        from fsdp_compiled.plan.text import folded

        try:
            return folded(summary(self))
        except Exception as error:  # a failing description never stops a program
            return f"program: {' -> '.join(self.history)}; no summary: {type(error).__name__}: {error}"

    __repr__ = __str__  # what a prompt shows
