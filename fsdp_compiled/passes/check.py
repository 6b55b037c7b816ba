"""What must hold of a Program after each pass; a broken invariant is a `ProgramError` that shows the nearby lines.

| after       | holds                                                                                               |
|-------------|-----------------------------------------------------------------------------------------------------|
| every pass  | ports and graph agree; every value has its fake tensor; forward, backward, update follow in order;  |
|             | inputs, but sums over microbatches and rooms, are written in the update alone; every collective is  |
|             | waited for                                                                                          |
| `gather`    | no full parameter is an input; a buffer is gathered at most once a phase                            |
| `reduce`    | every gradient that leaves is a waited reduction of this rank's shard size                          |
| `recompute` | no gathered value of a resharded unit crosses from forward to backward, aliases included            |
| `report`    | the loss that leaves is the mean over the ranks; no input is written before ranks compare what they |
|             | run, so that a call that one of them breaks off leaves the state as it was                          |
| `add_up`    | no gradient leaves                                                                                  |
| `update`    | every trainable shard with an optimizer is written, and its copy, and no gradient leaves            |
| `write_back`| no new value of a module buffer leaves: it is written back                                          |
| `offload`   | what lives in host memory is only copied from and to it, and what changed goes back                 |
| `store_saved` | what is in host memory is read from there alone; copies are waited for, and few are under way     |
| `limit`     | at most `Policy.limit` units are gathered at every node                                             |
| `schedule`  | the same, with gathers started early                                                                |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import fx

from fsdp_compiled.analysis.host_copies import odd_copy
from fsdp_compiled.ir.liveness import alive, live_ranges
from fsdp_compiled.ir.nodes import (
    AGAIN,
    call_text,
    describe,
    gathered,
    is_collective,
    is_wait,
    mutated,
    origin,
    positions,
    role_of,
)
from fsdp_compiled.ir.program import LOSS, Program
from fsdp_compiled.plan.plan import Buffer, Plan

PHASES = ("forward", "backward", "update")


class ProgramError(Exception):
    """A pass broke what must hold of its result: an error of this package, not of its user."""


def check(program: Program, plan: Plan, before: Program | None = None) -> None:
    """Raises `ProgramError` where the program breaks an invariant of a pass in its history.

    ``before``: one that was checked; a pass that had nothing to do has left it, and adds its own invariants alone.
    """
    if before is not None and before.graph is program.graph and before.ports == program.ports:
        _invariants(program, plan, program.history[len(before.history) :])
        return
    _form(program)
    _invariants(program, plan, program.history)
    _waited(program)


def _invariants(program: Program, plan: Plan, names: Sequence[str]) -> None:
    for name in names:
        for invariant in INVARIANTS.get(name, ()):
            invariant(program, plan)


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


def _form(program: Program) -> None:
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
    if repeated := [str(port) for port, count in Counter(program.ports).items() if count > 1]:
        fail(program, None, f"ports appear twice: {', '.join(repeated)}.")
    free = {node for port, node in program.inputs.items() if port.kind in ("sum", "room")}
    phase = 0
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if "val" not in node.meta:
            fail(program, node, f"{node.name} has no fake tensor.")
        if node.op != "call_function":
            continue
        now = PHASES.index(node.meta["phase"])
        if now < phase:
            fail(
                program,
                node,
                f"{node.name} is {PHASES[now]}, but stands after the {PHASES[phase]} has begun.",
            )
        phase = now
        for target in mutated(node):
            if target.op == "placeholder" and node.meta["phase"] != "update" and target not in free:
                fail(
                    program,
                    node,
                    f"{target.name} is written in {node.meta['phase']}: its readers may still come.",
                )


def _results(collective: fx.Node) -> list[fx.Node]:
    """The nodes that hold what a collective brings: itself, or its parts where it carries several buffers."""
    return [user for user in collective.users if role_of(user) == "part"] or [collective]


def _waited(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_collective(node):
            continue
        results = _results(node)
        missing = [result for result in results if not any(is_wait(user) for user in result.users)]
        if missing or len(results) != (len(node.args[0]) if isinstance(node.args[0], list | tuple) else 1):
            fail(program, node, f"a result of {node.name} is never waited for.")


def _no_full_parameters(program: Program, plan: Plan) -> None:
    for port, node in program.inputs.items():
        if port.kind == "parameter":
            fail(program, node, f"{port.name} is still a full parameter.")


def _gathered_once_a_phase(program: Program, plan: Plan) -> None:
    seen: set[tuple[str, str]] = set()
    for node in program.marked("gather"):
        for part in _results(node):
            if part.meta["mark"].purpose == AGAIN:
                continue  # a limit of units makes it, as often as there are uses
            key = (part.meta["mark"].buffer, node.meta["phase"])
            if key in seen:
                fail(program, node, f"buffer {key[0]} is gathered twice in {key[1]}.")
            seen.add(key)


def _gradients_are_reduced(program: Program, plan: Plan) -> None:
    for port, node in program.outputs.items():
        if port.kind == "parameter gradient":
            fail(program, node, f"the gradient of {port.name} is still that of one parameter on one rank.")
        if port.kind == "gradient":
            _reduced(program, plan, node, plan.buffer(port.name))


def _reduced(program: Program, plan: Plan, node: fx.Node, buffer: Buffer) -> None:
    source = node
    while role_of(source) in ("cast", "norm", "scale", "sum", "weigh", "combine") and source.all_input_nodes:
        source = source.all_input_nodes[0]
    zero = role_of(source) == "flatten" and not source.all_input_nodes  # no gradient reaches this buffer
    if plan.axes and not zero:
        start = source.all_input_nodes[0] if source.all_input_nodes else source
        if role_of(source) != "wait" or role_of(start) != "reduce" or not is_collective(start):
            fail(program, source, f"the gradient of {buffer.key} leaves without a waited reduction.")
    size = buffer.numel // plan.shard if plan.placement.gradient else buffer.numel
    if node.meta["val"].numel() != size:
        fail(
            program,
            node,
            f"the gradient of {buffer.key} has {node.meta['val'].numel()} elements, expected {size}.",
        )


def _resharded(program: Program, plan: Plan) -> None:
    if not plan.resharded:
        return
    order = positions(program.graph)
    chains = gathered(program.graph)
    crossing: dict[str, tuple[fx.Node, fx.Node]] = {}
    last_use: dict[str, int] = {}
    for unit, nodes in chains.items():
        for node in nodes:
            for user in node.users:
                if user.op == "output" or user.meta["phase"] == "forward":
                    last_use[unit] = max(last_use.get(unit, 0), order[user])
                elif user.meta["phase"] == "backward":
                    crossing.setdefault(unit, (node, user))
    turning = max(last_use, key=last_use.__getitem__, default=None)
    for unit, (node, user) in crossing.items():
        if unit != turning and unit in plan.resharded:
            names = [slot.name for buffer in plan.buffers if buffer.unit == unit for slot in buffer.slots]
            fail(
                program,
                user,
                f"{', '.join(names[:3])} stay gathered across the loss: "
                f"{node.name} (unit {unit}) is used by {user.name} in backward.",
            )


def _loss_is_the_mean(program: Program, plan: Plan) -> None:
    node: fx.Node | None = program.outputs.get(LOSS)
    if node is None or role_of(node) != "norm":
        fail(program, node, "the loss leaves without having been averaged over the ranks.")


def _shards_are_updated(program: Program, plan: Plan) -> None:
    targets = {origin(target) for node in program.graph.nodes for target in mutated(node)}
    later = {port.name for port in program.outputs if port.kind == "update"}
    for port, node in program.inputs.items():
        wanted = port.kind in ("shard", "copy") and plan.buffer(port.name).updated and port.name not in later
        if wanted and node not in targets:
            fail(program, node, f"the {port.kind} of {port.name} is never updated.")
    _no_gradient_leaves(program, plan)


def _no_gradient_leaves(program: Program, plan: Plan) -> None:
    for port, node in program.outputs.items():
        if port.kind == "gradient":
            fail(program, node, f"the gradient of {port.name} leaves the step.")


def _buffers_are_stored(program: Program, plan: Plan) -> None:
    for port, node in program.outputs.items():
        if port.kind in ("buffer", "constant"):
            fail(program, node, f"the new value of {port} leaves the step and would be lost.")


def _nothing_is_written_before_ranks_agree(program: Program, plan: Plan) -> None:
    if not program.marked("agree"):  # one rank
        return
    for node in program.graph.nodes:
        if role_of(node) == "agree":
            return
        if any(origin(target).op == "placeholder" for target in mutated(node)) and role_of(node) != "store":
            fail(program, node, f"{node.name} writes an input before the ranks agree that they all make this step.")


def _within_limit(program: Program, plan: Plan) -> None:
    if not isinstance(plan.policy.limit, int):
        return
    found = live_ranges(program.graph)
    for live_range in found:
        units = alive(found, live_range.start)
        if len(units) > plan.policy.limit:
            fail(
                program,
                live_range.gathers[0],
                f"{len(units)} units are gathered at once ({', '.join(sorted(units))}); the limit is "
                f"{plan.policy.limit}.",
            )


def _only_copied(program: Program, plan: Plan) -> None:
    for port, stored in program.inputs.items():
        if port.kind not in ("shard", "state") or stored.meta["val"].dim() == 0:
            continue
        if odd := next((user for user in stored.users if role_of(user) not in ("fetch", "return")), None):
            fail(program, odd, f"{odd.name} works on {port} where it lives, in host memory.")
        back = {source for user in stored.users if role_of(user) == "return" for source in user.all_input_nodes}
        for fetched in stored.users:
            lost = role_of(fetched) == "fetch" and fetched not in back
            if lost and (odd := next((user for user in fetched.users if fetched in mutated(user)), None)):
                fail(program, odd, f"what {odd.name} writes is of {port}, and never goes back to the host.")


def _copies_end(program: Program, plan: Plan) -> None:
    if (found := odd_copy(program)) is not None:
        fail(program, *found)


INVARIANTS: dict[str, tuple[Callable[[Program, Plan], None], ...]] = {
    "gather": (_no_full_parameters, _gathered_once_a_phase),
    "reduce": (_gradients_are_reduced,),
    "recompute": (_resharded, _gathered_once_a_phase),
    "report": (_loss_is_the_mean, _nothing_is_written_before_ranks_agree),
    "add_up": (_no_gradient_leaves,),
    "update": (_shards_are_updated,),
    "write_back": (_buffers_are_stored,),
    "offload": (_only_copied,),
    "store_saved": (_copies_end,),
    "limit": (_within_limit,),
    "schedule": (_within_limit,),
}
