"""Checks the invariants of a program after its passes; a broken one is a `ProgramError` that shows the nearby lines.

| after       | holds                                                                                               |
|-------------|-----------------------------------------------------------------------------------------------------|
| every pass  | ports and graph agree; every value stands before its readers and has its fake tensor; forward,      |
|             | backward, update follow in order; inputs, but sums over microbatches and rooms, are written in the  |
|             | update alone; every collective is waited for                                                        |
| `gather`    | no full parameter is an input; a buffer is gathered at most once a phase                            |
| `reduce`    | every gradient that leaves is a waited reduction of this rank's shard size                          |
| `recompute` | no gathered value of a resharded unit crosses from forward to backward, aliases included            |
| `report`    | the loss that leaves is the mean over the ranks; no input is written before ranks compare what they |
|             | run, so that a call that one of them breaks off leaves the state as it was                          |
| `add_up`    | no gradient leaves                                                                                  |
| `update`    | every trainable shard with an optimizer is written, and its copy, and no gradient leaves            |
| `write_back`| no new value of a module buffer leaves: it is written back                                          |
| `store_saved` | what is in host memory is read from there alone; copies are waited for, and few are under way     |
| `limit`     | at most `Policy.limit` units are gathered at every node                                             |
| `schedule`  | the same, with gathers started early                                                                |
| `offload`   | what lives in host memory is only copied from and to it, and what changed goes back; copies as      |
|             | after `store_saved`                                                                                 |

A walk over all nodes takes as long as a pass. So invariants of nodes are checked on the program that the last pass
made, for all passes before it: that program is the one that runs. The next pass may hide what leaves a program, as the
update hides gradients, so inputs and outputs are checked after each pass (`check_ends`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from fsdp_compiled.analysis.saved_values import AHEAD
from fsdp_compiled.ir.form import Checked, ends, fail, form
from fsdp_compiled.ir.liveness import alive, live_ranges
from fsdp_compiled.ir.nodes import (
    AGAIN,
    gathered_by,
    is_alias,
    is_collective,
    is_wait,
    mutated,
    origin,
    role_of,
    versions,
)
from fsdp_compiled.ir.program import LOSS, Program
from fsdp_compiled.plan.plan import Buffer, Plan

Invariant = Callable[[Checked, Plan], None]

# What starts a copy -> what waits for it, and how much may be under way: values, or units of which there are copies.
WAITS = {"store": ("stored", AHEAD), "restore": ("restored", AHEAD), "return": ("stored", 1), "fetch": ("restored", 1)}


def check(program: Program, plan: Plan, before: Checked | None = None) -> Checked:
    """Raises `ProgramError` where the program breaks an invariant of a pass in its history.

    ``before``: the check of the program before a pass. If the pass changed nothing, only its own invariants are
    checked.
    """
    if before is not None and program.graph is before.program.graph and program.ports == before.program.ports:
        return _invariants(replace(before, program=program), plan, program.history[len(before.program.history) :])
    checked = _invariants(form(program), plan, program.history)
    _waited(checked)
    return checked


def check_ends(program: Program, plan: Plan) -> None:
    """Makes the same check of inputs and outputs alone, and of the nodes that outputs are made of."""
    _invariants(ends(program), plan, program.history, of=ENDS)


def _invariants(checked: Checked, plan: Plan, names: Sequence[str], of: Collection[Invariant] | None = None) -> Checked:
    for name in names:
        for invariant in INVARIANTS.get(name, ()):
            if of is None or invariant in of:
                invariant(checked, plan)
    return checked


def _results(collective: fx.Node) -> list[fx.Node]:
    """The nodes that hold what a collective brings: itself, or its parts where it carries several buffers."""
    return [user for user in collective.users if role_of(user) == "part"] or [collective]


def _waited(checked: Checked) -> None:
    for node in checked.collectives:
        results = _results(node)
        missing = [result for result in results if not any(is_wait(user) for user in result.users)]
        if missing or len(results) != (len(node.args[0]) if isinstance(node.args[0], list | tuple) else 1):
            fail(checked.program, node, f"a result of {node.name} is never waited for.")


def _no_full_parameters(checked: Checked, plan: Plan) -> None:
    for port, node in checked.inputs.items():
        if port.kind == "parameter":
            fail(checked.program, node, f"{port.name} is still a full parameter.")


def _gathered_once_a_phase(checked: Checked, plan: Plan) -> None:
    seen: set[tuple[str, str]] = set()
    for node in checked.marked("gather"):
        for part in _results(node):
            if part.meta["mark"].purpose == AGAIN:
                continue  # `limit` makes it, as often as there are uses
            key = (part.meta["mark"].buffer, node.meta["phase"])
            if key in seen:
                fail(checked.program, node, f"buffer {key[0]} is gathered twice in {key[1]}.")
            seen.add(key)


def _gradients_are_reduced(checked: Checked, plan: Plan) -> None:
    for port, node in checked.outputs.items():
        if port.kind == "parameter gradient":
            fail(checked.program, node, f"the gradient of {port.name} is still that of one parameter on one rank.")
        if port.kind == "gradient":
            _reduced(checked, plan, node, plan.buffer(port.name))


def _reduced(checked: Checked, plan: Plan, node: fx.Node, buffer: Buffer) -> None:
    source = node
    while role_of(source) in ("cast", "norm", "scale", "sum", "weigh", "combine") and source.all_input_nodes:
        weighed = source.target is torch.ops.aten.where.ScalarOther  # a condition, the gradient, zero
        source = source.args[1] if weighed else source.all_input_nodes[0]  # type: ignore[assignment]
    zero = role_of(source) == "flatten" and not source.all_input_nodes  # no gradient reaches this buffer
    if plan.axes and not zero:
        start = source.all_input_nodes[0] if source.all_input_nodes else source
        if role_of(source) != "wait" or role_of(start) != "reduce" or not is_collective(start):
            fail(checked.program, source, f"the gradient of {buffer.key} leaves without a waited reduction.")
    size = buffer.numel // plan.shard if plan.placement.gradient else buffer.numel
    if node.meta["val"].numel() != size:
        fail(
            checked.program,
            node,
            f"the gradient of {buffer.key} has {node.meta['val'].numel()} elements, expected {size}.",
        )


def _resharded(checked: Checked, plan: Plan) -> None:
    if not plan.resharded:
        return
    crossing: dict[str, tuple[fx.Node, fx.Node]] = {}
    last_use: dict[str, fx.Node] = {}
    for unit, nodes in gathered_by(checked.gathered).items():
        for node in nodes:
            for user in node.users:
                if user.op == "output" or user.meta["phase"] == "forward":
                    if unit not in last_use or user > last_use[unit]:
                        last_use[unit] = user
                elif user.meta["phase"] == "backward":
                    crossing.setdefault(unit, (node, user))
    turning = max(last_use, key=last_use.__getitem__, default=None)  # type: ignore[arg-type]
    for unit, (node, user) in crossing.items():
        if unit != turning and unit in plan.resharded:
            names = [slot.name for buffer in plan.buffers if buffer.unit == unit for slot in buffer.slots]
            fail(
                checked.program,
                user,
                f"{', '.join(names[:3])} stay gathered across the loss: "
                f"{node.name} (unit {unit}) is used by {user.name} in backward.",
            )


def _loss_is_the_mean(checked: Checked, plan: Plan) -> None:
    node: fx.Node | None = checked.outputs.get(LOSS)
    if node is None or role_of(node) != "norm":
        fail(checked.program, node, "the loss leaves without having been averaged over the ranks.")


def _shards_are_updated(checked: Checked, plan: Plan) -> None:
    targets = {origin(target) for _, written in checked.writes for target in written}
    left = {port.name for port in checked.outputs if port.kind == "update"}  # to the optimizer's own code
    idle = {p.name: node.meta.get("idle", ()) for p, node in checked.inputs.items() if p.kind == "shard"}
    left |= {name for name, names in idle.items() if len(names) == len(plan.buffer(name).slots)}
    for port, node in checked.inputs.items():
        wanted = port.kind in ("shard", "copy") and plan.buffer(port.name).updated and port.name not in left
        if wanted and node not in targets:
            fail(checked.program, node, f"the {port.kind} of {port.name} is never updated.")
    _no_gradient_leaves(checked, plan)


def _no_gradient_leaves(checked: Checked, plan: Plan) -> None:
    for port, node in checked.outputs.items():
        if port.kind == "gradient":
            fail(checked.program, node, f"the gradient of {port.name} leaves the step.")


def _buffers_are_stored(checked: Checked, plan: Plan) -> None:
    for port, node in checked.outputs.items():
        if port.kind in ("buffer", "constant"):
            fail(checked.program, node, f"the new value of {port} leaves the step and would be lost.")


def _nothing_is_written_before_ranks_agree(checked: Checked, plan: Plan) -> None:
    agreed = next(iter(checked.marked("agree")), None)
    if agreed is None:  # one rank
        return
    for node, written in checked.writes:
        if node > agreed:
            return
        if any(origin(target).op == "placeholder" for target in written) and role_of(node) != "store":
            fail(
                checked.program,
                node,
                f"{node.name} writes an input before the ranks agree that they all make this step.",
            )


def _within_limit(checked: Checked, plan: Plan) -> None:
    if not isinstance(plan.policy.limit, int):
        return
    found = live_ranges(checked.program.graph)
    for live_range in found:
        units = alive(found, live_range.start)
        if len(units) > plan.policy.limit:
            fail(
                checked.program,
                live_range.gathers[0],
                f"{len(units)} units are gathered at once ({', '.join(sorted(units))}); the limit is "
                f"{plan.policy.limit}.",
            )


def _only_copied(checked: Checked, plan: Plan) -> None:
    for port, stored in checked.inputs.items():
        if port.kind not in ("shard", "state") or stored.meta["val"].dim() == 0:
            continue
        if odd := next((user for user in stored.users if role_of(user) not in ("fetch", "restored", "return")), None):
            fail(checked.program, odd, f"{odd.name} works on {port} where it lives, in host memory.")
        back = {source for user in stored.users if role_of(user) == "return" for source in user.all_input_nodes}
        for fetched in stored.users:
            lost = role_of(fetched) == "restored" and fetched not in back
            if lost and (odd := next((user for user in fetched.users if fetched in mutated(user)), None)):
                fail(checked.program, odd, f"what {odd.name} writes is of {port}, and never goes back to the host.")


def _copies_end(checked: Checked, plan: Plan) -> None:
    program = checked.program
    rooms = {node for port, node in checked.inputs.items() if port.kind == "room"}
    for room in rooms:
        if odd := next((user for user in room.users if role_of(user) != "store"), None):
            fail(program, odd, f"{odd.name} works on {room.name}, which a copy of forward's is to fill.")
    under_way: dict[str, dict[fx.Node, str]] = {role: {} for role in WAITS}
    for node in program.graph.nodes:
        role = role_of(node)
        if role in WAITS:
            wait, most = WAITS[role]
            waits = [user for user in node.users if role_of(user) == wait]
            if len(waits) != 1 or waits[0].meta["phase"] != node.meta["phase"]:
                fail(program, node, f"{node.name} is waited for {len(waits)} times in its phase, expected once.")
            under_way[role][node] = node.name if most == AHEAD else node.meta["mark"].unit
            if (many := len({*under_way[role].values()})) > most:
                what = "copies" if most == AHEAD else "units' copies"
                fail(program, node, f"{many} {what} are under way, {most} at most may be.")
            sent = versions(node.all_input_nodes[1]) if wait == "stored" else []
            if odd := next((user for one in sent for user in one.users if one in mutated(user) and user > node), None):
                fail(program, odd, f"{odd.name} writes {sent[0].name}, of which a copy is under way.")
        elif role in ("stored", "restored"):
            for started in under_way.values():
                started.pop(node.all_input_nodes[0], None)
        if role == "stored" and (late := _read_later(node)) is not None:
            read = node.all_input_nodes[1].name
            fail(program, late, f"{late.name} reads {read}, which is in host memory by then.")


ENDS: tuple[Invariant, ...] = (
    _no_full_parameters,
    _gradients_are_reduced,
    _loss_is_the_mean,
    _no_gradient_leaves,
    _buffers_are_stored,
)
INVARIANTS: dict[str, tuple[Invariant, ...]] = {
    "gather": (_no_full_parameters, _gathered_once_a_phase),
    "reduce": (_gradients_are_reduced,),
    "recompute": (_resharded, _gathered_once_a_phase),
    "report": (_loss_is_the_mean, _nothing_is_written_before_ranks_agree),
    "add_up": (_no_gradient_leaves,),
    "update": (_shards_are_updated,),
    "write_back": (_buffers_are_stored,),
    "offload": (_only_copied, _copies_end),
    "store_saved": (_copies_end,),
    "limit": (_within_limit,),
    "schedule": (_within_limit,),
}


def _read_later(stored: fx.Node) -> fx.Node | None:
    """A node that reads a value, or a view of it, although the value should by then be in host memory alone."""
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
