"""Never more than ``Policy.limit`` units gathered at once: the rate limiter, as a property of the program.

    before (limit=2)                       after

    root = all_gather; use(root)           root = all_gather; use(root)
    a = all_gather; use(a)                 a = all_gather; use(a)
    b = all_gather; use(b)                 b = all_gather; use(b)          # root was freed for it
    use(root, b)                           root' = all_gather; use(root', b)

Gathered units are like pages of memory: where one more is needed than may be held, the unit whose next use lies
furthest ahead is freed, and gathered again for that use. This choice frees least often (L. A. Belady, 1966). Under
``"zero2"`` a limit causes as much resharding as it needs, and no more.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.liveness import LiveRange, live_ranges
from fsdp_compiled.ir.nodes import AGAIN, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan


def limit(program: Program, plan: Plan) -> Program:
    """Frees units and gathers them again where needed. Raises ``ValueError`` where that cannot reach the limit."""
    most = plan.policy.limit
    if not isinstance(most, int):
        return program.after("limit")
    edit = Edit(program)
    order = positions(edit.graph)
    for live_range, uses in _stretches(live_ranges(edit.graph), order, most):
        for copy in edit.rebuild({*live_range.aliases, *live_range.issue}, uses).values():
            if role_of(copy) in ("gather", "part"):
                copy.meta["mark"] = replace(copy.meta["mark"], purpose=AGAIN)
    edit.drop_unused_parts()
    return edit.done("limit")


def _stretches(found: list[LiveRange], order: dict[fx.Node, int], most: int) -> list[tuple[LiveRange, list[fx.Node]]]:
    """The uses that need a further gather, with the live range they belong to: one list of uses for each gather."""
    users: dict[fx.Node, list[LiveRange]] = {}
    for live_range in found:
        for node in live_range.uses:
            users.setdefault(node, []).append(live_range)
    left = {id(live_range): list(live_range.uses) for live_range in found}
    resident: dict[str, LiveRange] = {}
    stretch: dict[int, list[fx.Node] | None] = {}  # None: the first stretch, which already has its gather
    more: list[tuple[LiveRange, list[fx.Node]]] = []
    for node in sorted(users, key=order.__getitem__):
        needed = users[node]
        names = {live_range.unit for live_range in needed}
        if len(names) > most:
            raise ValueError(
                f"Policy.limit={most} cannot hold: {node.name} (in {node.meta.get('path') or 'the loss'}) reads "
                f"parameters of {len(names)} units at once: {', '.join(sorted(names))}. Give limit={len(names)} or "
                "more, or units= that put them into one."
            )
        for unit, live_range in list(resident.items()):
            if not left[id(live_range)]:
                del resident[unit]
        for live_range in needed:
            if resident.get(live_range.unit) is not live_range:
                resident[live_range.unit] = live_range
                if id(live_range) in stretch:
                    stretch[id(live_range)] = []
                    more.append((live_range, stretch[id(live_range)]))  # type: ignore[arg-type]
                else:
                    stretch[id(live_range)] = None
        while len(resident) > most:
            idle = {unit: live_range for unit, live_range in resident.items() if unit not in names}
            del resident[max(idle, key=lambda unit: order[left[id(idle[unit])][0]])]
        for live_range in needed:
            left[id(live_range)].remove(node)
            row = stretch[id(live_range)]
            if row is not None:
                row.append(node)
    return more
