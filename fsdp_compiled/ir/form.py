"""The form that every program has. One walk checks it, and also collects what the invariants need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fsdp_compiled.ir.nodes import GATHERED, Role, call_text, describe, is_collective, mutated, writes
from fsdp_compiled.ir.program import Port, Program

PHASES = ("forward", "backward", "update")


class ProgramError(Exception):
    """A pass broke what must hold of its result: an error of this package, not of its user."""


@dataclass
class Checked:
    """A program, and what one walk over its nodes found, in order."""

    program: Program
    inputs: Mapping[Port, fx.Node]
    outputs: Mapping[Port, fx.Node]
    roles: dict[str, list[fx.Node]] = field(default_factory=dict)  # what passes inserted, by role
    writes: list[tuple[fx.Node, list[fx.Node]]] = field(default_factory=list)  # with what is written in place
    collectives: list[fx.Node] = field(default_factory=list)
    gathered: list[fx.Node] = field(default_factory=list)  # nodes that parameters pass through on the way to compute

    def marked(self, role: Role) -> Sequence[fx.Node]:
        return self.roles.get(role, ())


def ends(program: Program) -> Checked:
    """The program's inputs and outputs, found without a walk over the nodes in between."""
    places = program.graph.find_nodes(op="placeholder")
    given = [port for port in program.ports if port.side == "in"]
    values = program.graph.output_node().args[0]
    results = [port for port in program.ports if port.side == "out"]
    if len(places) != len(given) or len(values) != len(results):  # type: ignore[arg-type]
        fail(
            program,
            None,
            f"{len(given)} + {len(results)} ports for {len(places)} inputs, {len(values)} outputs.",
        )  # type: ignore[arg-type]
    if len(set(program.ports)) < len(program.ports):
        repeated = [str(port) for port, count in Counter(program.ports).items() if count > 1]
        fail(program, None, f"ports appear twice: {', '.join(repeated)}.")
    return Checked(program, dict(zip(given, places, strict=True)), dict(zip(results, values, strict=True)))  # type: ignore[arg-type]


def form(program: Program) -> Checked:
    found = ends(program)
    free = {node for port, node in found.inputs.items() if port.kind in ("sum", "room")}
    now = "forward"
    plain: set[int] = set()  # operators, by identity, that write nothing and are no collectives
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            source = next(source for source in node.all_input_nodes if source not in seen)
            fail(program, node, f"{node.name} reads {source.name}, which stands after it, or is not there.")
        seen.add(node)
        meta = node.meta
        if "val" not in meta and node.op != "output":
            fail(program, node, f"{node.name} has no fake tensor.")
        if node.op != "call_function":
            continue
        if (phase := meta["phase"]) != now:
            if PHASES.index(phase) < PHASES.index(now):
                fail(program, node, f"{node.name} is {phase}, but stands after the {now} has begun.")
            now = phase
        if (mark := meta.get("mark")) is not None:
            found.roles.setdefault(mark.role, []).append(node)
            if mark.role in GATHERED:
                found.gathered.append(node)
        if id(node.target) in plain:
            continue
        if is_collective(node):
            found.collectives.append(node)
        elif not writes(node):
            plain.add(id(node.target))
            continue
        if targets := mutated(node):
            found.writes.append((node, targets))
        for target in targets:
            if target.op == "placeholder" and now != "update" and target not in free:
                fail(program, node, f"{target.name} is written in {now}: its readers may still come.")
    return found


def fail(program: Program, node: fx.Node | None, message: str) -> None:
    lines = [f"after {program.history[-1]}: {message}"]
    if node is not None:
        nodes = list(program.graph.nodes)
        place = nodes.index(node)
        for near in nodes[max(place - 3, 0) : place + 3]:
            lines.append(("  > " if near is node else "    ") + _line(near))
    raise ProgramError("\n".join(lines))


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    text = f"{node.name}: {describe(node)}"
    return text if node.op == "placeholder" else f"{text} = {call_text(node)}"
