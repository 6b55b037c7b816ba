"""Finds results of forward that alias an input, a buffer or another result, as in eager PyTorch.

    return y, self.bank, x.view(4, 2), y.t()    1: buffer bank    2: view(batch 0)    3: t(result 0)

A program returns new tensors. In eager PyTorch a write to such a result is a write to the tensor that it aliases. So
that tensor itself is returned, or a view of it, made again by the operators that forward called. A buffer that forward
wrote in place is returned too: it holds what was written. Results are copies where forward replaced a buffer, wrote to
an input, where sizes of views move, and where a view's base is neither an input nor a result.

A result without a gradient (``y.detach()``) shares only the other's memory. A result whose gradient does not simply add
to the other's is a copy: an `autograd.Function` that reverses a gradient returns a view, which autograd must not take
for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fsdp_compiled.ir.nodes import is_view, mutated, origin
from fsdp_compiled.ir.program import Port, Program

aten = torch.ops.aten
GIVEN = ("batch", "buffer", "plain")
# Operators besides views that turn a view's gradient into that of its base: they put zeros around it.
WIDENING = (
    aten.clone.default, aten._unsafe_view.default, aten.slice_backward.default, aten.select_backward.default,
    aten.slice_scatter.default, aten.select_scatter.default,
)  # fmt: skip


class Alias(NamedTuple):
    """A result and what it aliases: the place of an input, or another result, and the views between them. ``detached``:
    whether the result has no gradient."""

    result: Port
    of: int | Port
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    detached: bool


def aliases_of(
    program: Program, inputs: Sequence[Port], copies: int, replaced: Collection[str] = ()
) -> tuple[Alias, ...]:
    """Finds the aliases. ``copies``: how many clones of each result the trace made (`capture.captured.Objective`).
    ``replaced``: buffers of which the program writes the tensor that eager PyTorch leaves to its other holders."""
    nodes = program.inputs
    written = {origin(target) for node in program.graph.nodes for target in mutated(node)}
    places = {nodes[port]: place for place, port in enumerate(inputs) if port in nodes and port.kind in GIVEN}
    left = {  # by what was written there last
        node.args[1]: places[node.args[0]]
        for node in program.graph.find_nodes(op="call_function", target=aten.copy_.default)
        if node.args[0] in places and inputs[places[node.args[0]]].name not in replaced
    }
    results = {port: node for port, node in program.outputs.items() if port.kind == "result" and node is not None}
    bases = {port: base for port, node in results.items() if (base := _without(node, copies)) is not None}
    tangents = {port: nodes.get(Port("in", "tangent", port.name, port.part)) for port in bases}
    joins = {port: _joins(tangent) for port, tangent in tangents.items() if tangent is not None and tangent.users}
    whole: dict[fx.Node, Port] = {}
    for port in sorted(bases, key=lambda port: port not in joins):  # those with gradients first
        if not is_view(bases[port]):
            whole.setdefault(bases[port], port)
    found: list[Alias] = []
    for port, base in bases.items():
        views: list[Callable[[torch.Tensor], torch.Tensor]] = []
        while is_view(base) and len(base.all_input_nodes) == 1 and not base.kwargs:
            views.append(_again(base))
            base = base.all_input_nodes[0]
        of = places.get(base, left.get(base, whole.get(base)))
        if of is None or of == port or base in written:
            continue
        if port in joins:
            sums = joins.get(of, [None]) if isinstance(of, Port) else [program.outputs.get(_gradient(inputs[of]))]
            if sums[-1] not in joins[port]:
                continue
        found.append(Alias(port, of, tuple(reversed(views)), bool(joins) and port not in joins))
    return tuple(sorted(found, key=lambda one: bool(one.views)))  # the bases of views first


def shared(values: dict[Port, Any], inputs: Sequence[Any], aliases: Sequence[Alias]) -> Mapping[Port, Any]:
    """The results, with each alias replaced by the tensor it aliases, or a view of that."""
    for alias in aliases:
        tensor = inputs[alias.of] if isinstance(alias.of, int) else values[alias.of]
        if alias.detached and tensor.requires_grad:
            tensor = tensor.detach()
        for view in alias.views:
            tensor = view(tensor)
        values[alias.result] = tensor
    return values


def _gradient(port: Port) -> Port:
    return Port("out", "input gradient", port.name)


def _joins(tangent: fx.Node) -> list[fx.Node | None]:
    """A result's gradient, and what it becomes while it is only viewed, widened or added to other gradients."""
    found: list[fx.Node | None] = [tangent]
    node = tangent
    while len(node.users) == 1:
        (user,) = node.users
        adds = user.target is aten.add.Tensor and not user.kwargs and user.args[0] is not user.args[1]
        if not (adds or is_view(user) or user.target in WIDENING):
            break
        found.append(node := user)
    return found


def _without(node: fx.Node, copies: int) -> fx.Node | None:
    """The node before so many clones; None if it was not cloned so often."""
    for _ in range(copies):
        if node.target is not aten.clone.default or node.kwargs:
            return None
        node = node.all_input_nodes[0]
    return node


def _again(node: fx.Node) -> Callable[[torch.Tensor], torch.Tensor]:
    target, source, args = node.target, node.all_input_nodes[0], node.args
    return lambda tensor: target(*(tensor if one is source else one for one in args))  # type: ignore[operator, no-any-return]
