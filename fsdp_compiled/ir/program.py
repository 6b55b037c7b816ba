"""Program: one training step as a value.

A program is an ATen graph with *ports*, which say what each placeholder and each output is. Passes find their work by
ports and by the marks below, never by shapes or node names:

- ``node.meta["val"]``: a fake tensor of the node's shape, stride, dtype and device; true after every edit.
- ``node.meta["phase"]``: ``"forward"``, ``"backward"`` or ``"update"``.
- ``node.meta["mark"]``: a `Mark` on nodes that passes inserted: the role they play, and for which unit and buffer.
- ``node.meta["idle"]``, on a shard's placeholder: the names of its parameters that the loss does not reach.
- ``node.meta["seed"]``, set on one node: the derivative of the loss by itself, from which backward starts.
- ``node.meta["effect"]``: the node is run for what it does, such as a check, even where nothing reads its result.
- ``node.meta["path"]``: the submodule that the node came from, for people to read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from fsdp_compiled.ir.nodes import Mark, Role, call_text, describe, is_collective, is_random, role_of


@dataclass(frozen=True)
class Port:
    """What one placeholder or output is.

    ``side`` is ``"in"`` or ``"out"``. ``kind``, for inputs: ``"parameter"`` (full; before `gather`), ``"shard"`` (a
    buffer's slice), ``"copy"`` (the same in the compute dtype), ``"buffer"`` (a module buffer), ``"batch"``,
    ``"constant"`` (a tensor the model or loss closes over), ``"state"`` (optimizer), ``"hyper"`` (a scheduled
    hyperparameter), ``"sum"`` (over microbatches), ``"scale"`` (of the loss), ``"rank"``, ``"call"``. For outputs:
    ``"loss"``, ``"aux"``, ``"result"`` (forward alone), ``"gradient"``, ``"norm"``, ``"overflow"``, ``"buffer"`` or
    ``"constant"`` (the updated value of the input of that name).
    """

    side: Literal["in", "out"]
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


LOSS = Port("out", "loss", "0")
NORM = Port("out", "norm", "gradient")
OVERFLOW = Port("out", "overflow", "gradient")  # how many buffers' gradients are not finite; in the end, whether any
WEIGHT = Port("out", "weight", "rows")  # how much this rank's batch counts, float64; inside the pipeline alone
CALL = Port("in", "call", "number")  # which program this rank runs with which rates, float64
CALL_PARTS = 3  # of 20 bits each, in one element each


@dataclass(frozen=True)
class Program:
    """A step as a value: a graph, what its ends are, and the passes that made it."""

    graph: fx.Graph
    ports: tuple[Port, ...]  # inputs in the order of the placeholders, then outputs in the order of the output node
    history: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what passes chose, and why
    needs: tuple[str, ...] = ()  # what it takes of a rank's memory, for people

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
        return replace(self, history=(*self.history, name))

    @property
    def random(self) -> bool:
        """Whether running the program draws random numbers."""
        return any(is_random(node) for node in self.graph.nodes)

    @property
    def hash(self) -> str:
        """Equal exactly for programs that run the same operations, in the same order, on the same ports."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def wire(self) -> str:
        """Equal for programs whose collectives pair up, one by one; empty where there are none."""
        found = [node for node in self.graph.nodes if is_collective(node)]
        calls = [(str(node.target), describe(node), fx.node.map_arg(node.args, lambda _: None)) for node in found]
        return hashlib.sha256(repr(calls).encode()).hexdigest()[:8] if calls else ""

    def text(self) -> str:
        """Every node on a line: what ranks compare, and what `dump` writes."""
        return "\n".join(self.lines())

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
        from fsdp_compiled.ir.text import summary  # which reads programs; this one call shows one

        try:
            return summary(self)
        except Exception as error:  # what describes a program never stops it
            return f"program: {' -> '.join(self.history)}; no summary: {type(error).__name__}: {error}"

    __repr__ = __str__  # what a prompt shows
