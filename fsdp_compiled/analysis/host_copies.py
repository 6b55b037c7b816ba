"""What must hold of a program's copies to host memory and back, which the pass `store_saved` inserts."""

from __future__ import annotations

from torch import fx

from fsdp_compiled.ir.nodes import is_alias, role_of
from fsdp_compiled.ir.program import Program

AHEAD = 2  # copies under way, in each direction
WAITS = {"store": "stored", "restore": "restored"}  # by what starts a copy: what waits for it


def odd_copy(program: Program) -> tuple[fx.Node, str] | None:
    """The first node that breaks an invariant of copies, and how."""
    rooms = {node for port, node in program.inputs.items() if port.kind == "room"}
    for room in rooms:
        if odd := next((user for user in room.users if role_of(user) != "store"), None):
            return odd, f"{odd.name} works on {room.name}, which a copy of forward's is to fill."
    under_way: dict[str, set[fx.Node]] = {"store": set(), "restore": set()}
    for node in program.graph.nodes:
        role = role_of(node)
        if role in WAITS:
            waits = [user for user in node.users if role_of(user) == WAITS[role]]
            if len(waits) != 1 or waits[0].meta["phase"] != node.meta["phase"]:
                return node, f"{node.name} is waited for {len(waits)} times in its phase, expected once."
            under_way[role].add(node)
            if len(under_way[role]) > AHEAD:
                return node, f"{len(under_way[role])} copies are under way, {AHEAD} at most may be."
        elif role in ("stored", "restored"):
            for started in under_way.values():
                started.difference_update(node.all_input_nodes)
        if role == "stored" and (late := _read_later(node)) is not None:
            return late, f"{late.name} reads {node.all_input_nodes[1].name}, which is in host memory by then."
    return None


def _read_later(stored: fx.Node) -> fx.Node | None:
    """What reads a value, or a view of it, after it was said to be in host memory."""
    stack, seen = [stored.all_input_nodes[1]], set()
    while stack:
        for user in stack.pop().users:
            if user is stored:
                continue
            if user.op != "call_function" or user > stored:
                return user
            if is_alias(user) and user not in seen:
                seen.add(user)
                stack.append(user)
    return None
