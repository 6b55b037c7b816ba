"""Writes the nodes of a block into Dynamo's graph, as a walk through the block would: see `repeated_calls`.

    Dynamo's graph       x, p2 -> y = linear(x, p2)      p3 = own_tensor()      z = linear(y, p3)
    what is made of it   x, p2, p3 -> y = linear(x, p2)                         z = linear(y, p3)

A walk takes a third of a millisecond for each parameter: Dynamo makes a fake tensor, a variable, a guard, and code that
finds the parameter. The graph needs only an input for it, which it gets when Dynamo is done (`with_own_tensors`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.blocks.block_calls import BlockCall
from fsdp_compiled.capture.blocks.walked_blocks import OWN, WRITTEN, WalkedBlock, another, own_tensor
from fsdp_compiled.capture.guards import OWN as OWN_TENSOR
from fsdp_compiled.capture.source_lines import plain_names
from fsdp_compiled.torch_private.dynamo import (
    ConstantVariable,
    Guard,
    Source,
    TensorVariable,
    TupleVariable,
    wrap_fx_proxy,
)


class RepeatError(Exception):
    """The repetition failed halfway: the caller must trace again, and walk through every block."""


@dataclass(frozen=True)
class Own:
    """An own tensor of a block: its source, and the tensor. Dynamo uses these names for its own inputs too."""

    source: Source
    example: torch.Tensor


class WrittenBlock:
    """A block that was not walked through. ``values``: its objects that the walked block's guards look at."""

    def __init__(self, walked: WalkedBlock, call: BlockCall, values: Sequence[Any]) -> None:
        self.walked, self.call, self.values = walked, call, values
        self._guards: dict[int, Guard] = {}

    def guard(self, place: int) -> Guard:
        """This block's version of the guard at ``place`` in the walked block's list."""
        if place not in self._guards:
            guard, _, others = self.walked.guards[place]
            create = guard.create_fn
            if others:
                assert isinstance(create, functools.partial)
                named = create.keywords.items()
                create = functools.partial(create.func, **{name: self._there(one) for name, one in named})
            self._guards[place] = Guard(self._there(guard.originating_source), create)
        return self._guards[place]

    def name(self, place: int) -> str:
        """The name of that guard."""
        walked = self.walked
        return walked.guards[place][0].name.replace(walked.call.source.name, self.call.source.name)

    def _there(self, value: Any) -> Any:
        return self.walked.there(value, self.call) if isinstance(value, Source) else value

    def write(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Writes the block, and returns Dynamo's variable for its result. ``tensors``: the block's own."""
        walked, call = self.walked, self.call
        graph = call.output.graph
        mine = dict(zip(walked.call.tensors, call.tensors, strict=True))  # this block's nodes by the walked block's
        for node, source, tensor in zip(walked.inputs, walked.sources, tensors, strict=True):
            mine[node] = graph.create_node("call_function", own_tensor)
            mine[node].meta[OWN] = Own(self._there(source), tensor)
        for node in walked.nodes:
            args: Any = fx.node.map_arg(node.args, lambda one: mine.get(one, one))
            kwargs: Any = fx.node.map_arg(node.kwargs, lambda one: mine.get(one, one))
            mine[node] = made = graph.create_node(node.op, node.target, args, kwargs)
            if "source_fn_stack" in node.meta:
                made.meta["source_fn_stack"] = [(made.name, node.meta["source_fn_stack"][-1][1])]
        self._describe([(node, mine[node]) for node in (*walked.inputs, *walked.nodes)])
        for node in walked.results:
            mine[node].meta["example_value"] = another(node.meta["example_value"])
        call.output.guard_on_key_order.update(map(self._there, walked.ordered))
        for name, count in walked.visits.items():
            call.tx.num_calls[walked.path(name, call)] = count
        return self._returned(walked.result, mine)

    def _describe(self, pairs: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        """Gives nodes the metadata of the walked block's, with this block's modules and the user's lines."""
        one, other = self.walked.call, self.call
        modules = {
            str(id(old)): str(id(new)) for old, new in zip(one.module.modules(), other.module.modules(), strict=True)
        }
        stacks: dict[tuple[str, ...], dict[str, Any]] = {}
        for node, made in pairs:
            made.meta |= {key: value for key, value in node.meta.items() if key not in WRITTEN}
            made.meta["creation_timestamp"] = other.output.timestamp
            if "example_value" in node.meta:  # which nothing can reach but what is returned, and is not changed
                made.meta["example_value"] = node.meta["example_value"]
            if (stack := node.meta.get("nn_module_stack")) is not None:  # nodes that change modes have none
                if tuple(stack) not in stacks:
                    stacks[tuple(stack)] = self._stack(stack, modules)
                made.meta["nn_module_stack"] = stacks[tuple(stack)]
                made.meta["stack_trace"] = other.trace + node.meta.get("stack_trace", "").removeprefix(one.trace)

    def _stack(self, stack: Mapping[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
        """The same module stack for this block. ``modules``: its modules by the walked block's, as a stack names
        them."""
        found: dict[str, Any] = {}
        for key, (path, kind) in stack.items():
            module, *visit = key.split("@")
            found["@".join([modules.get(module, module), *visit])] = self.walked.path(path, self.call), kind
        return found

    def _returned(self, result: Any, mine: Mapping[fx.Node, fx.Node]) -> Any:
        if (given := self.walked.place_given(result)) is not None:
            return self.call.given[given]
        if type(result) is TensorVariable:
            return self._variable(result.as_proxy().node, mine)
        if type(result) is TupleVariable:
            return TupleVariable([self._returned(one, mine) for one in result.items])
        return ConstantVariable.create(result.value)

    def _variable(self, result: fx.Node, mine: Mapping[fx.Node, fx.Node]) -> Any:
        """Dynamo's variable for a result, by the walked block's node. Dynamo makes the first; later ones are clones."""
        node, known = mine[result], self.walked.variables
        proxy = fx.Proxy(node, self.call.output.current_tracer)
        if (like := known.get(result)) is not None:
            return like.clone(proxy=proxy)
        made = wrap_fx_proxy(self.call.tx, proxy, example_value=node.meta.pop("example_value"))
        known[result] = made.clone()  # before anything is done to it
        return made


def with_own_tensors(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Makes the own tensors of written blocks inputs of Dynamo's graph, and returns all of its inputs.

    Raises `RepeatError` if Dynamo also read a block's own tensor by another name: no guard checks that both names stay
    one tensor. Parameters and buffers that are tied by the model's own names are excepted: other code checks them.
    """
    places = graph.find_nodes(op="placeholder")
    known = dict(zip(map(id, inputs), places, strict=True))
    found, written = list(inputs), set()
    before = next(node for node in graph.nodes if node.op != "placeholder")
    while before.target is own_tensor:
        before = before.next
    for node in graph.find_nodes(op="call_function", target=own_tensor):
        own = node.meta.pop(OWN)
        place = known.get(id(own.example)) if node.users else None
        if place is None and node.users:
            node.op, node.target = "placeholder", f"own_{len(found)}"
            node._dynamo_source = own.source  # type: ignore[attr-defined]
            before.prepend(node)
            known[id(own.example)] = node
            written.add(node)
            found.append(own.example)
            continue
        if place is not None:
            if place not in written:  # Dynamo read the tensor, too, but later
                for name in (own.source.name, place._dynamo_source.name):
                    if not OWN_TENSOR.match(name):
                        raise RepeatError(f"nothing asks whether {plain_names(name)} stays what it is twice")
                node.meta["example_value"] = place.meta["example_value"]
                written.add(place)
                place.meta = node.meta
                place._dynamo_source = own.source  # type: ignore[attr-defined]
            node.replace_all_uses_with(place)
        graph.erase_node(node)
    return found
