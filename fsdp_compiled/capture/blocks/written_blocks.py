"""Writes into Dynamo's graph, of a block, what a walk through it would: see `repeated_calls`.

    Dynamo's graph       x, p2 -> y = linear(x, p2)      p3 = own_tensor()      z = linear(y, p3)
    what is made of it   x, p2, p3 -> y = linear(x, p2)                         z = linear(y, p3)

A walk takes a third of a millisecond for each parameter: Dynamo makes a fake tensor, a variable, a guard, and code that
finds it. Of these the graph needs an input alone, which it gets when Dynamo is done (`with_own_tensors`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.blocks.block_calls import BlockCall, modes
from fsdp_compiled.capture.blocks.templates import OWN, Line
from fsdp_compiled.capture.blocks.walked_blocks import WalkedBlock, another, own_tensor
from fsdp_compiled.capture.guards import OWN as OWN_TENSOR
from fsdp_compiled.capture.guards import plain_names
from fsdp_compiled.torch_private.dynamo import (
    ConstantVariable,
    Guard,
    Source,
    TensorVariable,
    TupleVariable,
    wrap_fx_proxy,
)
from fsdp_compiled.torch_private.fx_graph import new_call


class RepeatError(Exception):
    """What was begun cannot be ended: trace again, walking through every block."""


@dataclass(frozen=True)
class Own:
    """An own tensor of a block: where it is, and what it is. Dynamo keeps it of its inputs under this name, too."""

    source: Source
    example: torch.Tensor


class WrittenBlock:
    """A block that was not walked through. ``values``: what is there that the guards of the walked one look at."""

    def __init__(self, walked: WalkedBlock, call: BlockCall, values: Sequence[Any]) -> None:
        self.walked, self.call, self.values = walked, call, values
        self._guards: dict[int, Guard] = {}

    def guard(self, place: int) -> Guard:
        """That of the walked block which is ``place`` in its list, of this one."""
        if place not in self._guards:
            guard, _, others = self.walked.guards[place]
            create = guard.create_fn
            if others:
                assert isinstance(create, functools.partial)
                named = create.keywords.items()
                create = functools.partial(create.func, **{name: self._there(one) for name, one in named})
            self._guards[place] = Guard(self._there(guard.originating_source), create)
        return self._guards[place]

    def made(self, places: Iterable[int]) -> list[Guard]:
        """Those of them that somebody asked for; a block around this one did."""
        return [self._guards[place] for place in places if place in self._guards]

    def _there(self, value: Any) -> Any:
        return self.walked.there(value, self.call) if isinstance(value, Source) else value

    def write(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What Dynamo has for what the block returns. ``tensors``: the block's own."""
        walked, call, template = self.walked, self.call, self.walked.template
        modules = dict(zip(template.modules, (str(id(one)) for one in call.module.modules()), strict=True))
        stacks = [self._stack(stack, modules) for stack in template.stacks]
        graph, timestamp = call.output.graph, call.output.timestamp
        mine = dict(zip(walked.call.tensors, call.tensors, strict=True))

        def written(line: Line, made: fx.Node) -> fx.Node:
            """Like the walked block's node, with the modules, and the user's lines, that it comes from."""
            mine[line.node], meta = made, made.meta
            meta.update(line.kept)
            meta["creation_timestamp"] = timestamp
            if line.stack is not None:
                meta["stack_trace"] = call.trace + line.user
                meta["nn_module_stack"] = stacks[line.stack]
            meta.update(line.value)  # which nothing can reach but what is returned, and is not changed
            return made

        def read(node: fx.Node) -> fx.Node:
            return mine.get(node, node)

        for line, source, tensor in zip(template.inputs, walked.sources, tensors, strict=True):
            made = written(line, new_call(graph, own_tensor, (), {}, own_tensor.__name__))
            made.meta[OWN] = Own(self._there(source), tensor)
        for line in template.nodes:
            node: Any = line.node
            args, kwargs = fx.node.map_arg(node.args, read), fx.node.map_arg(node.kwargs, read) if node.kwargs else {}
            if node.op == "call_function":
                made = written(line, new_call(graph, node.target, args, kwargs, line.name))
            else:
                made = written(line, graph.create_node(node.op, node.target, args, kwargs, line.name))
            if line.function is not None:
                made.meta["source_fn_stack"] = [(made.name, line.function)]
        for node in walked.results:
            made = mine[node]
            made.meta["example_value"] = another(made.meta["example_value"])
        call.output.guard_on_key_order.update(map(self._there, walked.ordered))
        for name, count in walked.visits.items():
            call.tx.num_calls[walked.path(name, call)] = count
        if modes(call.tx) != call.modes:
            raise RepeatError("modes are left changed")
        return self._returned(walked.result, mine)

    def _stack(self, stack: Mapping[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
        """The same of this block. ``modules``: its own, by those of the walked one, as a stack names them."""
        found: dict[str, Any] = {}
        for key, (path, kind) in stack.items():
            module, *visit = key.split("@")
            found["@".join([modules.get(module, module), *visit])] = self.walked.path(path, self.call), kind
        return found

    def _returned(self, result: Any, mine: Mapping[fx.Node, fx.Node]) -> Any:
        if (given := self.walked.place_given(result)) is not None:
            return self.call.given[given]
        if type(result) is TensorVariable:
            node = mine[result.as_proxy().node]
            proxy = fx.Proxy(node, self.call.output.current_tracer)
            return wrap_fx_proxy(self.call.tx, proxy, example_value=node.meta.pop("example_value"))
        if type(result) is TupleVariable:
            return TupleVariable([self._returned(one, mine) for one in result.items])
        return ConstantVariable.create(result.value)


def with_own_tensors(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of Dynamo's graph, and the own tensors of written blocks, which are inputs of it from now on.

    Raises `RepeatError` for a plain tensor that a block has which was walked through, too: Dynamo came to it by one of
    two names. That parameters and buffers stay tied is watched otherwise.
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
                if not OWN_TENSOR.match(own.source.name):
                    raise RepeatError(f"nothing asks whether {plain_names(own.source.name)} stays what it is twice")
                node.meta["example_value"] = place.meta["example_value"]
                written.add(place)
                place.meta = node.meta
                place._dynamo_source = own.source  # type: ignore[attr-defined]
            node.replace_all_uses_with(place)
        graph.erase_node(node)
    return found
