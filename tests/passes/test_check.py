"""Every invariant of `check` rejects a program that was broken by hand, and shows where."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from torch import fx

from fsdp_compiled import Plan, Policy, Program, ProgramError
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, mutated, role_of
from fsdp_compiled.ir.program import LOSS, Port
from fsdp_compiled.passes.check import INVARIANTS, check
from fsdp_compiled.passes.host_memory import store_saved
from tests import recipes
from tests.models import Block, Recipe

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Break = Callable[[Program, Plan], Program]


@functools.cache
def built(
    shard: str = "zero3", kind: str = "step", limit: int | None = None, offload: bool = False
) -> tuple[dict[str, Program], Plan]:
    """A model with blocks and a module buffer: the program after each pass, by the pass's name."""
    policy = Policy(shard=shard, bucket_mb=0, limit=limit or "auto", offload=offload, lower="eager")
    recipe = Recipe((Block("linear"), Block("normed"), Block("linear")), policy=policy)
    found, plan = recipes.built(recipe, kind)
    programs = {program.history[-1]: program for program in found}
    names = {node.name for node in programs["reshape"].graph.nodes}
    programs["store_saved"] = store_saved(names)(programs["reshape"], plan)
    return programs, plan


def as_after(program: Program, *history: str) -> Program:
    """The program, which claims that these passes made it."""
    return replace(program, history=history)


def done(edit: Edit, program: Program) -> Program:
    """The edited program, with the history of the one it was made from: as if the last pass had done this."""
    return replace(edit.done("broken"), history=program.history)


def a_port_without_an_input(program: Program, plan: Plan) -> Program:
    return replace(program, ports=(Port("in", "batch", "more"), *program.ports))


def a_port_twice(program: Program, plan: Plan) -> Program:
    first = program.ports[0]
    return replace(program, ports=(first, first, *program.ports[2:]))


def a_value_without_fake_tensor(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    del edit.map[program.marked("wait")[0]].meta["val"]
    return done(edit, program)


def a_value_read_early(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    node = next(node for node in edit.graph.nodes if node.op == "call_function" and len(node.users) > 1)
    next(iter(node.users)).append(node)
    return done(edit, program)


def forward_after_backward(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    with edit.at(edit.map[program.marked("reduce")[0]], "forward"):
        late = edit.call(aten.clone.default, edit.map[program.marked("flatten")[0]])
    edit.set_output(Port("out", "aux", "late"), late)
    return done(edit, program)


def an_input_written_early(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    gather = edit.map[program.marked("gather")[0]]
    with edit.at(gather, "forward"):
        edit.call(aten.zero_.default, gather.args[0])
    return done(edit, program)


def a_parameter_still_full(program: Program, plan: Plan) -> Program:
    return as_after(program, "capture", "gather")


def gathered_twice(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    old = program.marked("wait")[0]
    wait, gather = edit.map[old], edit.map[old.args[0]]  # type: ignore[index]
    with edit.at(wait.next, "forward"):
        again = edit.call(c10d.all_gather_into_tensor.default, *gather.args, mark=gather.meta["mark"])
        again = edit.call(c10d.wait_tensor.default, again, mark=wait.meta["mark"])
    edit.set_output(Port("out", "aux", "again"), again)
    return done(edit, program)


def gathered_for_nobody(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    gather = edit.map[program.marked("gather")[0]]
    with edit.at(gather, "forward"):
        unread = edit.call(c10d.all_gather_into_tensor.default, *gather.args, mark=Mark("gather", "root", "another"))
    edit.set_output(Port("out", "aux", "unread"), unread)
    return done(edit, program)


def _gradient(edit: Edit) -> tuple[Port, fx.Node]:
    port = next(port for port in edit.outputs if port.kind == "gradient")
    node = edit.outputs[port]
    assert node is not None
    return port, node


def a_gradient_never_reduced(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    port, wait = _gradient(edit)
    flat = wait.args[0].args[0]  # type: ignore[union-attr]
    mark = Mark("cast")
    with edit.at(edit.end, "backward"):
        edit.set_output(port, edit.call(aten.slice.Tensor, flat, 0, 0, wait.meta["val"].numel(), mark=mark))
    return done(edit, program)


def a_gradient_never_waited_for(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    port, wait = _gradient(edit)
    edit.set_output(port, wait.args[0])  # type: ignore[arg-type]
    return done(edit, program)


def a_gradient_of_another_size(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    port, wait = _gradient(edit)
    with edit.at(edit.end, "backward"):
        edit.set_output(port, edit.call(aten.slice.Tensor, wait, 0, 0, 1, mark=Mark("cast")))
    return done(edit, program)


def _kept(program: Program, *steps: Callable[[Edit, fx.Node], fx.Node]) -> Program:
    """Backward reads a weight that forward gathered, after these steps, which have no marks."""
    edit = Edit(program)
    views = [n for n in program.marked("view") if n.meta["mark"].unit == "blocks.0" and n.target is aten.view.default]
    late = next(node for node in views if node.meta["phase"] == "backward")
    early = next(node for node in views if node.args[1] == late.args[1])
    assert early.meta["phase"] == "forward"
    source = edit.map[early]
    for step in steps:
        with edit.at(source.next, "forward"):
            source = step(edit, source)
    for user in list(edit.map[late].users):
        user.replace_input_with(edit.map[late], source)
    return done(edit, program)


def a_gathered_value_kept(program: Program, plan: Plan) -> Program:
    return _kept(program)


def an_alias_of_a_gathered_value_kept(program: Program, plan: Plan) -> Program:
    def transpose(edit: Edit, node: fx.Node) -> fx.Node:
        return edit.call(aten.t.default, node)

    return _kept(program, transpose, transpose)


def a_copy_of_a_gathered_value_kept(program: Program, plan: Plan) -> Program:
    """As einsum makes it: no alias of the parameter, but of its size."""
    return _kept(
        program,
        lambda edit, node: edit.call(aten.clone.default, node),
        lambda edit, node: edit.call(aten._unsafe_view.default, node, list(node.meta["val"].shape)),
    )


def a_loss_of_one_rank(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    packet = next(node for node in program.marked("norm") if "all_reduce" in str(node.target)).args[0]
    stack = packet.args[0][0]  # type: ignore[union-attr, index]
    edit.set_output(LOSS, edit.map[stack.args[0][0].args[0]])  # type: ignore[union-attr, index]
    return done(edit, program)


def sums_cleared_early(program: Program, plan: Plan) -> Program:
    """Before ranks know that they all make this step."""
    edit = Edit(program)
    with edit.at(edit.map[program.marked("agree")[0]], "update"):
        edit.call(aten.zero_.default, edit.inputs[Port("in", "sum", part="count")], mark=Mark("sum"))
    return done(edit, program)


def a_shard_never_updated(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    shard = edit.inputs[Port("in", "shard", "blocks.0")]
    for node in reversed(program.marked("update")):
        copy = edit.map[node]
        if shard in mutated(copy):
            copy.replace_all_uses_with(shard)
            edit.graph.erase_node(copy)
    return done(edit, program)


def a_gradient_that_leaves(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    wait = next(node for node in program.marked("wait") if role_of(node.args[0]) == "reduce")  # type: ignore[arg-type]
    edit.set_output(Port("out", "gradient", wait.meta["mark"].buffer), edit.map[wait])
    return done(edit, program)


def a_buffer_that_leaves(program: Program, plan: Plan) -> Program:
    return as_after(program, *program.history, "write_back")


def a_gather_too_early(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    first, _, third, *_ = (edit.map[node] for node in program.marked("gather"))
    edit.move([third], before=first)
    return done(edit, program)


def a_gather_from_the_host(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    fetched = edit.map[program.marked("restored")[0]]
    fetched.replace_all_uses_with(fetched.args[1])
    return done(edit, program)


def an_update_that_stays(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    for role in ("stored", "return"):
        edit.graph.erase_node(edit.map[program.marked(role)[-1]])
    return done(edit, program)


def a_fetch_two_units_ahead(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    first, *later = (edit.map[node] for node in program.marked("fetch"))
    edit.move(later[:1], before=first)
    return done(edit, program)


def an_update_of_what_leaves(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    sent = edit.map[program.marked("return")[0]]
    with edit.at(sent.next, "update"):
        edit.call(torch.ops.aten.zero_.default, sent.args[1])
    return done(edit, program)


def a_return_that_is_not_waited_for(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    edit.graph.erase_node(edit.map[program.marked("stored")[-1]])
    return done(edit, program)


def a_copy_that_is_not_waited_for(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    wait = edit.map[program.marked("restored")[0]]
    wait.replace_all_uses_with(wait.args[0])
    return done(edit, program)


@dataclass(frozen=True)
class Case:
    after: str  # the pass whose result is broken
    broken: Break
    invariant: str  # the function of `check` that must find it
    message: str
    shard: str = "zero3"
    shows: bool = True  # the lines near the fault
    kind: str = "step"
    limit: int | None = None


CASES = [
    Case("gather", a_port_without_an_input, "form", r"ports for \d+ inputs", shows=False),
    Case("gather", a_port_twice, "form", "ports appear twice: ", shows=False),
    Case("gather", a_value_without_fake_tensor, "form", "has no fake tensor"),
    Case("reduce", a_value_read_early, "form", "reads .*, which stands after it, or is not there"),
    Case("reduce", forward_after_backward, "form", "is forward, but stands after the backward has begun"),
    Case("gather", an_input_written_early, "form", "shard_.* is written in forward"),
    Case("gather", gathered_for_nobody, "_waited", "is never waited for"),
    Case("capture", a_parameter_still_full, "_no_full_parameters", "embedding.weight is still a full parameter"),
    Case("gather", gathered_twice, "_gathered_once_a_phase", "is gathered twice in forward"),
    Case("recompute", gathered_twice, "_gathered_once_a_phase", "is gathered twice in forward"),
    *(
        Case("reduce", a_gradient_never_reduced, "_gradients_are_reduced", "without a waited reduction", shard)
        for shard in ("zero3", "ddp")
    ),
    Case("reduce", a_gradient_never_waited_for, "_gradients_are_reduced", "without a waited reduction"),
    Case("reduce", a_gradient_of_another_size, "_gradients_are_reduced", r"has 1 elements, expected \d+"),
    Case("recompute", a_gathered_value_kept, "_resharded", r"blocks\.0.* stay gathered across the loss"),
    Case("recompute", an_alias_of_a_gathered_value_kept, "_resharded", "stay gathered across the loss"),
    Case("recompute", a_copy_of_a_gathered_value_kept, "_resharded", "stay gathered across the loss"),
    Case("report", a_loss_of_one_rank, "_loss_is_the_mean", "without having been averaged"),
    Case(
        "report",
        sums_cleared_early,
        "_nothing_is_written_before_ranks_agree",
        r"writes an input before the ranks agree",
        kind="last microbatch",
    ),
    Case("add_up", a_gradient_that_leaves, "_no_gradient_leaves", "the gradient of .* leaves", kind="microbatch"),
    Case("update", a_shard_never_updated, "_shards_are_updated", r"the shard of blocks\.0 is never updated"),
    Case("update", a_gradient_that_leaves, "_no_gradient_leaves", "the gradient of .* leaves the step"),
    Case("update", a_buffer_that_leaves, "_buffers_are_stored", r"buffer blocks\.1\.norm\..* leaves the step"),
    Case("offload", a_gather_from_the_host, "_only_copied", "_gather works on shard .* in host memory"),
    Case("offload", an_update_that_stays, "_only_copied", "is of state .*, and never goes back to the host"),
    Case("offload", a_fetch_two_units_ahead, "_copies_end", "2 units' copies are under way, 1 at most may be"),
    Case("offload", an_update_of_what_leaves, "_copies_end", "writes .*, of which a copy is under way"),
    Case("offload", a_return_that_is_not_waited_for, "_copies_end", "is waited for 0 times in its phase"),
    Case("store_saved", a_copy_that_is_not_waited_for, "_copies_end", "is waited for 0 times in its phase"),
    Case("limit", a_gather_too_early, "_within_limit", r"3 units are gathered at once .*; the limit is 2", limit=2),
    Case("schedule", a_gather_too_early, "_within_limit", r"3 units are gathered at once .*; the limit is 2", limit=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.after}-{case.broken.__name__}-{case.shard}")
def test_a_broken_program_is_rejected_and_the_place_is_shown(case: Case) -> None:
    programs, plan = built(case.shard, case.kind, case.limit, case.after == "offload")
    check(programs[case.after], plan)
    broken = case.broken(programs[case.after], plan)
    with pytest.raises(ProgramError) as raised:
        check(broken, plan)
    text = str(raised.value)
    assert text.startswith(f"after {broken.history[-1]}: ")
    assert re.search(case.message, text), text
    lines = text.splitlines()[1:]
    if case.shows:
        assert sum(line.startswith("  > ") for line in lines) == 1, text
        assert len(lines) > 1, "the neighbours are not shown"
    assert case.invariant in [entry.name for entry in raised.traceback]


def test_every_invariant_has_a_program_that_it_rejects() -> None:
    known = {function.__name__ for functions in INVARIANTS.values() for function in functions}
    assert {case.invariant for case in CASES} == {"form", "_waited", *known}


def test_every_entry_of_the_table_is_enforced() -> None:
    """The table in the docstring names the passes that `INVARIANTS` knows, and no others."""
    named = re.findall(r"^\| `(\w+)`", import_module("fsdp_compiled.passes.check").__doc__ or "", re.MULTILINE)
    assert set(named) == set(INVARIANTS)


@pytest.mark.parametrize("kind", ["step", "microbatch", "last microbatch", "gradient", "forward"])
@pytest.mark.parametrize("shard", ["zero3", "zero2", "zero1", "ddp"])
def test_what_the_passes_make_is_accepted(shard: str, kind: str) -> None:
    programs, plan = built(shard, kind)
    for program in programs.values():
        check(program, plan)
