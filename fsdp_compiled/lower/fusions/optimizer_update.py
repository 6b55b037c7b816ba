"""Updates all shards of a parameter group by one operator, which also scales the gradients.

    before                                          after

    scaled = gradient * inverse_scale * clip        step += 1
    step += 1; ...                                  factor = inverse_scale * clip
    exp_avg.lerp_(scaled, 0.1)                      adam_([shard, ...], [gradient, ...], [exp_avg, ...], ..., lr, step,
    ...                                                   factor)
    shard.addcdiv_(exp_avg, ...)

Only Adam and AdamW have such an operator (`fsdp_compiled.optim.rule`); others stay as they were traced. All factors on
the gradients since their reduction (microbatches, loss scale, rows, clipping) become one number. Where a step that
overflowed was to be put back, ``where(overflow, before, after)``, the operator gets the flag, and then writes nothing.
For shards that also have a copy in the compute dtype, the same call writes the copy. Parameters that the loss does not
reach are put back afterwards as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, last, positions, purpose_of
from fsdp_compiled.ir.program import OVERFLOW, Port, Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.lower.gradient_factors import Factor, behind, product, unscaled
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten


@dataclass
class Member:
    """A buffer of the group: the nodes that update it, by purpose, what they read, and the factors on its gradient."""

    buffer: Buffer
    nodes: dict[str, list[fx.Node]]
    gradient: fx.Node
    factors: tuple[Factor, ...]

    @property
    def copy(self) -> fx.Node | None:
        """The shard's copy in the compute dtype, if it has one."""
        writes = self.nodes.get("copy")
        return writes[0].args[0] if writes else None  # type: ignore[return-value]


def optimizer_update(rules: Sequence[Rule]) -> Callable[[Program, Plan], Program]:
    """The fusion for these rules, one a parameter group."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        for rule in rules:
            if rule.formula is not None:
                _fuse(edit, rule, plan)
        return edit.done("optimizer_update")

    return transform


def _fuse(edit: Edit, rule: Rule, plan: Plan) -> None:
    shared, members = _members(edit, rule, plan)
    if not members or any(member.factors != members[0].factors for member in members):
        return
    traced = [*shared, *(node for member in members for node in member.nodes["rule"])]
    end = behind(last(traced, positions(edit.graph)), members[0].factors)
    skipped = edit.outputs.get(OVERFLOW)
    gradients = [_before_factors(member) for member in members]
    with edit.at(end, "update"):
        factor = product(edit, members[0].factors, end)
        _call(edit, rule, list(zip(members, gradients, strict=True)), factor, skipped)
    order = positions(edit.graph)
    for member in members:
        after = [*member.nodes.get("idle after", ()), *member.nodes.get("copy", ())]
        edit.move([node for node in after if order[node] < order[end]], before=end)
        if "idle after" not in member.nodes:
            traced += member.nodes.get("copy", ())
        traced += member.nodes.get("void", ())
    for node in sorted(traced, key=order.__getitem__, reverse=True):
        edit.graph.erase_node(node)


def _members(edit: Edit, rule: Rule, plan: Plan) -> tuple[list[fx.Node], list[Member]]:
    """The operators on the group's own numbers, and the buffers; none where their update is not as `update` made it."""
    group = f"optimizer {rule.key}"
    shared: list[fx.Node] = []
    by_buffer: dict[str, dict[str, list[fx.Node]]] = {}
    for node in edit.graph.nodes:
        mark: Mark | None = node.meta.get("mark")
        if mark is not None and mark.role == "update":
            if mark.buffer:
                by_buffer.setdefault(mark.buffer, {}).setdefault(mark.purpose, []).append(node)
            elif mark.unit == group and mark.purpose == "rule":
                shared.append(node)
    members = []
    for buffer in plan.buffers:
        nodes = by_buffer.get(buffer.key, {})
        if buffer.updated and buffer.group == rule.group and "rule" in nodes:
            inside = {*shared, *nodes["rule"]}
            read = {source for node in nodes["rule"] for source in node.all_input_nodes if source not in inside}
            computed = [source for source in read if source.op == "call_function"]
            if len(computed) != 1 or any(user not in inside for node in nodes["rule"] for user in node.users):
                return [], []
            source = computed[0]
            while purpose_of(source) == "own part":
                source = source.all_input_nodes[0]
            members.append(Member(buffer, nodes, computed[0], unscaled(source)[1]))
    return shared, members


def _before_factors(member: Member) -> fx.Node:
    """The gradient as its reduction returned it; this rank's part of it, where the reduction returns more."""
    if purpose_of(member.gradient) != "own part":
        return unscaled(member.gradient)[0]
    node = member.gradient
    while purpose_of(source := node.all_input_nodes[0]) == "own part":
        node = source
    node.replace_input_with(source, unscaled(source)[0])
    return member.gradient


def _call(
    edit: Edit,
    rule: Rule,
    members: Sequence[tuple[Member, fx.Node]],
    factor: fx.Node | None,
    skipped: fx.Node | None,
) -> None:
    """Calls the rule's operator for all its buffers at once; buffers with copies are in a list of their own."""
    formula, inputs = rule.formula, edit.inputs
    assert formula is not None
    mark = Mark("update", f"optimizer {rule.key}")

    def rate(name: str | None) -> fx.Node | None:
        return inputs[Port("in", "hyper", str(rule.group), name)] if name else None

    step = inputs[Port("in", "state", rule.key, "step")]
    edit.call(aten.add_.Tensor, step, 1, mark=mark)
    for copied in (False, True):
        alike = [member for member in members if (member[0].copy is not None) == copied]
        if alike:
            lists = [
                [inputs[Port("in", "state", member.buffer.key, name)] for member, _ in alike] if name else []
                for name in formula.lists
            ]
            edit.call(
                operators.adam_.default,
                [inputs[Port("in", "shard", member.buffer.key)] for member, _ in alike],
                [gradient for _, gradient in alike],
                *lists,
                [member.copy for member, _ in alike] if copied else [],
                rate("lr"),
                step,
                factor,
                rate(formula.scheduled),
                mark=mark,
                **dict(formula.numbers),
                **({"skipped": skipped.args[0]} if skipped is not None else {}),
            )
