"""Texts of programs for people: by unit, in the order they run; and the difference between two programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import fx

from fsdp_compiled.ir.nodes import HOST_COPIES, carried, is_collective, is_wait, mutated, owner, role_of, waited_for
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.text import human


def summary(program: Program) -> str:
    """The program by unit: what is computed, gathered, reduced and updated, in the order it runs, with sizes.

    Consecutive nodes of one unit and phase share a line; collectives have lines of their own. The line where memory
    peaks is marked.
    """
    lines = [f"program: {' -> '.join(program.history)}, {len(program.graph.nodes)} nodes, {_collectives(program)}"]
    lines += program.needs()
    phase, highest = None, program.peak()
    run: list[fx.Node] = []

    def add(nodes: list[fx.Node], what: str) -> None:
        mark = f"  <- peak ({highest})" if any(node.name == highest for node in nodes) else ""
        lines.append(f"    {where(nodes[0]):<28}{what}{mark}")

    def close() -> None:
        if run:
            add(run, _what(run))
            run.clear()

    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.meta["phase"] != phase:
            close()
            phase = node.meta["phase"]
            lines.append(f"  {phase}")
        if role_of(node) == "part":
            continue
        if is_collective(node) or is_wait(node) or role_of(node) in WAITS:
            close()
            add([node], _communication(node))
            continue
        if run and (where(run[0]), _copies(run[0])) != (where(node), _copies(node)):
            close()
        run.append(node)
    close()
    lines += [f"chosen: {note}" for note in program.notes]
    return "\n".join(lines)


def where(node: fx.Node) -> str:
    """The unit or submodule that the node belongs to, for people."""
    return owner(node) or ("(all units)" if role_of(node) else "(loss)")


WAITS = ("wait", "stored", "restored")


def _copies(node: fx.Node) -> str | None:
    """The role of a copy from or to host memory."""
    role = role_of(node)
    return role if role in HOST_COPIES else None


def _what(nodes: Iterable[fx.Node]) -> str:
    nodes = list(nodes)
    if (role := _copies(nodes[0])) is not None:
        size = human(sum(node.meta["val"].nbytes for node in nodes))
        return f"{role}: {size} {HOST_COPIES[role]}"
    roles = {"view" if role_of(node) == "block" else role_of(node) for node in nodes}
    if roles == {"update"}:
        writes = sum(1 for node in nodes if mutated(node))
        return f"update: {_count(writes, 'write')} in place"
    names = {
        "cast": "cast",
        "pack": "pack",
        "unpack": "unpack",
        "kept": "kept part",
        "view": "views",
        "flatten": "flatten",
        "scale": "scaling",
        "norm": "norm and loss",
    }
    done = [name for role, name in names.items() if role in roles]
    compute = sum(1 for node in nodes if role_of(node) is None)
    return ", ".join(done + ["compute: " + _count(compute, "operator")] * bool(compute))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _communication(node: fx.Node) -> str:
    if (is_wait(node) or role_of(node) in WAITS) and not is_collective(node):
        return f"wait for {waited_for(node).name}"
    name = collective_name(node)
    sizes = " -> ".join(map(human, carried(node)))
    operator = next((argument for argument in node.args if argument in ("avg", "sum")), None)
    return f"{name}: {sizes}" + (f", {operator}" if operator else "") + f", along {node.args[-1]} ({node.name})"


def collective_name(node: fx.Node) -> str:
    """``_c10d_functional.all_gather_into_tensor.default`` -> ``all_gather``; the same for one that writes its input."""
    name = str(node.target).split(".")[1].removesuffix("_")
    return name.removesuffix("_coalesced").removesuffix("_into_tensor").removesuffix("_tensor")


def _collectives(program: Program) -> str:
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and is_collective(node):
            name = collective_name(node)
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no collectives"


def difference(before: str, after: str, was: str, made: str) -> str:
    """What a pass changed: a unified diff of the two texts, headed by the names of the passes that they come from."""
    return "\n".join(difflib.unified_diff(before.split("\n"), after.split("\n"), was, made, lineterm="", n=1))
