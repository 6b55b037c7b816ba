"""The optimizer joins the program: each shard is updated in place from its reduced gradient.

    before                      after

    return gradient             step += 1; ...                    # once a group, on 0-d tensors
                                exp_avg.lerp_(gradient, 0.1)      # once a buffer, on this rank's shard
                                ...
                                shard.addcdiv_(exp_avg, ...)

The operators are those of the optimizer's own code, traced by `fsdp_compiled.optim`. What depends on the step count
and the hyperparameters alone is computed once a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compiled.optim import Rule
from fsdp_compiled.plan import Buffer, Plan
from fsdp_compiled.program import Edit, Mark, Port, Program

aten = torch.ops.aten


def update(rules: Sequence[Rule]) -> Callable[[Program, Plan], Program]:
    """The pass for these rules, one a parameter group; buffers that no group updates are left alone."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        with edit.at(edit.end, "update"):
            shared: dict[int, dict[int, fx.Node]] = {rule.group: {} for rule in rules}
            for buffer in plan.buffers:
                port = Port("out", "gradient", buffer.key)
                if port not in edit.outputs:
                    continue
                gradient = edit.outputs[port]
                if buffer.updated and gradient is not None:
                    assert buffer.group is not None
                    _inline(edit, rules[buffer.group], buffer, plan, gradient, shared[buffer.group])
                edit.remove_output(port)
        return edit.done("update")

    transform.__name__ = "update"
    return transform


def _inline(edit: Edit, rule: Rule, buffer: Buffer, plan: Plan, gradient: fx.Node, shared: dict[int, fx.Node]) -> None:
    """Copies the rule's graph in, for this buffer; ``shared`` holds, by place in that graph, the group's scalars."""
    gradient = _own_part(edit, buffer, plan, gradient)
    size = gradient.meta["val"].numel()
    mark = Mark("update", buffer.unit, buffer.key)
    mapping: dict[fx.Node, fx.Node] = {}
    scalars: set[fx.Node] = set()
    for place, node in enumerate(rule.trace(size, buffer.dtype, plan.device).nodes):
        if node.op == "placeholder":
            mapping[node], scalar = _bind(edit, rule, buffer, plan, str(node.target), size, gradient)
            if scalar:
                scalars.add(node)
        elif node.op == "call_function":
            scalar = all(source in scalars for source in node.all_input_nodes) and _is_scalar(node)
            if scalar:
                scalars.add(node)
            if scalar and place in shared:
                mapping[node] = shared[place]
                continue
            args, kwargs = _mapped(node, mapping)
            used = Mark("update", f"optimizer group {rule.group}") if scalar else mark
            mapping[node] = edit.call(node.target, *args, mark=used, **kwargs)  # type: ignore[arg-type]
            if scalar:
                shared[place] = mapping[node]


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _mapped(node: fx.Node, mapping: dict[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mapped = fx.node.map_arg((node.args, node.kwargs), mapping.__getitem__)
    return mapped[0], mapped[1]


def _own_part(edit: Edit, buffer: Buffer, plan: Plan, gradient: fx.Node) -> fx.Node:
    """This rank's slice, where the gradient is whole on every rank and the state is not."""
    if plan.placement.gradient or not plan.placement.state or plan.shard == 1:
        return gradient
    mark = Mark("update", buffer.unit, buffer.key)
    rank = _input(edit, Port("in", "rank", "shard"), [1], torch.int64, plan)
    rows = edit.call(aten.view.default, gradient, [plan.shard, buffer.numel // plan.shard], mark=mark)
    row = edit.call(aten.index_select.default, rows, 0, rank, mark=mark)
    return edit.call(aten.view.default, row, [buffer.numel // plan.shard], mark=mark)


def _bind(
    edit: Edit, rule: Rule, buffer: Buffer, plan: Plan, name: str, size: int, gradient: fx.Node
) -> tuple[fx.Node, bool]:
    """The node that a placeholder of the rule stands for, and whether it is a scalar of the group."""
    if name == "parameter":
        return edit.inputs[Port("in", "shard", buffer.key)], False
    if name == "gradient":
        return gradient, False
    kind, _, rest = name.partition("_")
    if kind == "hyper":
        return _input(edit, Port("in", "hyper", f"{rule.group}.{rest}"), [], torch.float64, plan), True
    entry = next(entry for entry in rule.state if entry.name == rest)
    if entry.scalar:
        assert entry.dtype is not None
        return _input(edit, Port("in", "state", f"group {rule.group}.{rest}"), [], entry.dtype, plan), True
    return _input(edit, Port("in", "state", f"{buffer.key}.{rest}"), [size], buffer.dtype, plan), False


def _input(edit: Edit, port: Port, shape: list[int], dtype: torch.dtype, plan: Plan) -> fx.Node:
    known = edit.inputs
    return known[port] if port in known else edit.add_input(port, edit.fake(shape, dtype, plan.device))
