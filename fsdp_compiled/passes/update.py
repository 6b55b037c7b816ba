"""Adds the optimizer to the program: each shard is updated in place from its reduced gradient.

    before                      after

    return gradient             step += 1; ...                    # once a group, on 0-d tensors
                                exp_avg.lerp_(gradient, 0.1)      # once a buffer, on this rank's shard
                                ...
                                shard.addcdiv_(exp_avg, ...)

A parameter that the loss never reaches has no gradient, and its optimizer would leave it alone, weight decay included.
In a flat buffer it has a gradient of zeros, so it is put back afterwards, with its state. A group with no parameter
that the loss reaches makes no step.

Where an optimizer runs its own code (`Rule.eagerly`), the gradient leaves the program, for the optimizer to read.

The operators are those of the optimizer's own code, traced by `fsdp_compiled.optim.tracing`. Values that depend only on
the step count and the hyperparameters are computed once a group. A parameter that the loss does not reach keeps its
value and state, as a parameter whose ``grad`` is None does in eager PyTorch: its elements are put back after the
update.

`count_updates` counts updates as a part of the step's state: ``step += 1``, or under a loss scale ``step += not
overflow``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, mutated, origin
from fsdp_compiled.ir.program import OVERFLOW, RANK, STEP, Port, Program
from fsdp_compiled.optim.rule import Rule, RuleInput, rule_for
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten


def update(rules: Sequence[Rule]) -> Callable[[Program, Plan], Program]:
    """The pass for these rules, one a parameter group; buffers that no group updates are left alone."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        with edit.at(edit.end, "update"):
            shared = {rule.key: _Shared() for rule in rules}
            outputs = edit.outputs
            ports = {
                port: buffer for buffer in plan.buffers if (port := Port("out", "gradient", buffer.key)) in outputs
            }
            edit.remove_output(*ports)
            reached = {_rule_of(rules, one).key for one in ports.values() if one.updated and not _is_idle(edit, one)}
            for port, buffer in ports.items():
                gradient = outputs[port]
                if not buffer.updated or gradient is None:
                    continue
                rule = _rule_of(rules, buffer)
                if rule.key not in reached and rule.eagerly is None and not _shares(rule):
                    continue
                gradient = _own_part(edit, buffer, plan, gradient)
                if rule.eagerly is not None:
                    edit.set_output(Port("out", "update", buffer.key), gradient)
                    continue
                kept = _idle(edit, rule, buffer, plan)
                _inline(edit, rule, buffer, plan, gradient, shared[rule.key])
                _put_back(edit, buffer, plan, kept)
        return edit.done("update", keeps_readers=True)

    transform.__name__ = "update"
    return transform


def _rule_of(rules: Sequence[Rule], buffer: Buffer) -> Rule:
    assert buffer.group is not None
    return rule_for(rules, buffer.group)


def _is_idle(edit: Edit, buffer: Buffer) -> bool:
    """Whether none of its parameters has a gradient."""
    idle = edit.inputs[Port("in", "shard", buffer.key)].meta.get("idle", ())
    return len(idle) == len(buffer.slots)


def _shares(rule: Rule) -> bool:
    """Whether it counts in numbers of the group or optimizer, which its code advances even without a gradient.

    Raises ``ValueError`` if it counts in both these and numbers of each parameter.
    """
    shared = [entry.name for entry in rule.state if entry.scalar and entry not in rule.numbers]
    if shared and rule.counts:
        raise ValueError(
            f"{rule.name} counts in {shared[0]!r}, which group {rule.group} has once, and for each parameter, and this "
            "step reaches no parameter of the group: which of its numbers would move, nobody can tell. Give each step "
            "something to update in every group."
        )
    return bool(shared)


class _Shared:
    """The 0-d tensors that a group has once, and the values that are computed from them alone.

    A call is identified by its operator, by what it reads (each value after a certain number of writes), and by the
    number of like calls before it. Not by its place in a rule's graph: the graphs of two dtypes differ.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, fx.Node] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # the nodes that wrote each value, in order
        self.kept: dict[tuple[fx.Node, int], fx.Node] = {}  # what a value was before a write

    def at(self, edit: Edit, node: fx.Node, written: int, mark: Mark) -> fx.Node:
        """The value after this number of writes."""
        value = origin(node)
        if written == len(self.writers[value]):
            return node
        if (value, written) not in self.kept:
            with edit.at(self.writers[value][written], "update"):
                self.kept[value, written] = edit.call(aten.clone.default, value, mark=mark)
        return self.kept[value, written]


def _inline(edit: Edit, rule: Rule, buffer: Buffer, plan: Plan, gradient: fx.Node, shared: _Shared) -> None:
    """Copies the rule's graph into the program for this buffer, except what the group already has. Raises
    ``ValueError`` where this graph writes the group's values in another way than an earlier graph did."""
    size = gradient.meta["val"].numel()
    graph = rule.trace(buffer.dtype, plan.device)
    bound = [_bind(edit, rule, buffer, plan, given, size, gradient) for given in rule.inputs]
    first = not shared.calls
    of_group = Mark("update", f"optimizer {rule.key}", purpose="rule")
    mark = Mark("update", buffer.unit, buffer.key, "rule")
    places = graph.find_nodes(op="placeholder")
    mapping = {place: node for place, (node, _) in zip(places, bound, strict=True)}
    scalars = {place for place, (_, scalar) in zip(places, bound, strict=True) if scalar}
    written: Counter[fx.Node] = Counter()  # by this graph, so far
    seen: Counter[Hashable] = Counter()

    def version(source: fx.Node) -> int:
        return written[origin(mapping[source])]

    def value(source: fx.Node) -> fx.Node:
        return shared.at(edit, mapping[source], version(source), of_group) if source in scalars else mapping[source]

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not (_is_scalar(node) and scalars.issuperset(node.all_input_nodes)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            mapping[node] = edit.call(node.target, *args, mark=mark, **kwargs)
            continue
        scalars.add(node)
        read = fx.node.map_arg((node.args, node.kwargs), lambda one: (mapping[one], version(one)))
        seen[node.target, repr(read)] += 1  # each is a value of its own, which may be written
        call = node.target, repr(read), seen[node.target, repr(read)]
        targets = [origin(mapping[one]) for one in mutated(node)]
        if call not in shared.calls:
            if not first and any(target.op == "placeholder" for target in targets):
                raise ValueError(
                    f"{rule.name} counts otherwise for {str(buffer.dtype)[6:]} than for the other dtype of group "
                    f"{rule.group} (its {node.target}), and a group has one count. Give the parameters of each "
                    "dtype a group of their own."
                )
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            shared.calls[call] = edit.call(node.target, *args, mark=of_group, **kwargs)
            for target in targets:
                shared.writers[target].append(shared.calls[call])
        mapping[node] = shared.calls[call]
        written.update(targets)


def _idle(edit: Edit, rule: Rule, buffer: Buffer, plan: Plan) -> dict[fx.Node, fx.Node]:
    """Copies of what the rule writes, where some of the buffer's parameters have no gradient (see `reduce`)."""
    shard = edit.inputs[Port("in", "shard", buffer.key)]
    if not shard.meta.get("idle"):
        return {}
    size = shard.meta["val"].numel()
    entries = [entry for entry in rule.state if not entry.scalar]
    ports = {Port("in", "state", buffer.key, entry.name): entry.dtype or buffer.dtype for entry in entries}
    targets = [shard, *(edit.input(port, [size], dtype, plan.device) for port, dtype in ports.items())]
    mark = Mark("update", buffer.unit, buffer.key, "idle before")
    return {target: edit.call(aten.clone.default, target, mark=mark) for target in targets}


def _put_back(edit: Edit, buffer: Buffer, plan: Plan, kept: dict[fx.Node, fx.Node]) -> None:
    """``target = where(idle, before, target)``; the places are this rank's, so the rank is an input."""
    if not kept:
        return
    mark = Mark("update", buffer.unit, buffer.key, "idle after")
    shard = edit.inputs[Port("in", "shard", buffer.key)]
    size = shard.meta["val"].numel()
    place = edit.call(aten.arange.default, size, dtype=torch.int64, device=plan.device, mark=mark)
    if plan.placement.state and plan.shard > 1:
        rank = edit.input(RANK, [1], torch.int64, plan.device)
        place = edit.call(aten.add.Tensor, place, edit.call(aten.mul.Tensor, rank, size, mark=mark), mark=mark)
    idle: fx.Node | None = None
    for slot in buffer.slots:
        if slot.name in shard.meta["idle"]:
            after = edit.call(aten.ge.Scalar, place, slot.offset, mark=mark)
            here = edit.call(
                aten.logical_and.default, after, edit.call(aten.lt.Scalar, place, slot.end, mark=mark), mark=mark
            )
            idle = here if idle is None else edit.call(aten.logical_or.default, idle, here, mark=mark)
    for target, before in kept.items():
        edit.call(aten.copy_.default, target, edit.call(aten.where.self, idle, before, target, mark=mark), mark=mark)


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _own_part(edit: Edit, buffer: Buffer, plan: Plan, gradient: fx.Node) -> fx.Node:
    """This rank's slice, where the gradient is whole on every rank and the state is not."""
    if plan.placement.gradient or not plan.placement.state or plan.shard == 1:
        return gradient
    mark = Mark("update", buffer.unit, buffer.key, "own part")
    rank = edit.input(RANK, [1], torch.int64, plan.device)
    rows = edit.call(aten.view.default, gradient, [plan.shard, buffer.numel // plan.shard], mark=mark)
    row = edit.call(aten.index_select.default, rows, 0, rank, mark=mark)
    return edit.call(aten.view.default, row, [buffer.numel // plan.shard], mark=mark)


def _bind(
    edit: Edit, rule: Rule, buffer: Buffer, plan: Plan, given: RuleInput, size: int, gradient: fx.Node
) -> tuple[fx.Node, bool]:
    """The node that a placeholder of the rule stands for, and whether it is a scalar of the group."""
    if given.kind == "parameter":
        return edit.inputs[Port("in", "shard", buffer.key)], False
    if given.kind == "gradient":
        return gradient, False
    if given.kind == "hyper":
        return edit.input(Port("in", "hyper", str(rule.group), given.name), [], torch.float64, plan.device), True
    entry = next(entry for entry in rule.state if entry.name == given.name)
    if entry.scalar:
        assert entry.dtype is not None
        return edit.input(Port("in", "state", rule.key, entry.name), [], entry.dtype, plan.device), True
    dtype = entry.dtype or buffer.dtype
    return edit.input(Port("in", "state", buffer.key, entry.name), [size], dtype, plan.device), False


def count_updates(program: Program, plan: Plan) -> Program:
    """Adds one to the number of updates, or nothing where the step was void."""
    edit = Edit(program)
    mark = Mark("update")
    overflow = edit.outputs.get(OVERFLOW)
    with edit.at(edit.end, "update"):
        step = edit.add_input(STEP, edit.fake([], torch.int64, plan.device))
        made = 1 if overflow is None else edit.call(aten.logical_not.default, overflow, mark=mark)
        edit.call(aten.add_.Tensor, step, made, mark=mark)
    return edit.done("count_updates", keeps_readers=True)
