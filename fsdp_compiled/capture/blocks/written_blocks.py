"""Writes the nodes of a block into Dynamo's graph, as a walk through the block would: see `repeated_calls`.

    Dynamo's graph       x, p2 -> y = linear(x, p2)                       z = written_block(y)
    with own tensors     x, p2 -> y = linear(x, p2)      p3 = own_tensor()      z = linear(y, p3)
    what is made of it   x, p2, p3 -> y = linear(x, p2)                         z = linear(y, p3)

A walk takes a third of a millisecond for each parameter: Dynamo makes a fake tensor, a variable, a guard, and code that
finds the parameter. The graph needs only an input for it, which it gets when Dynamo is done. Dynamo's own passes over
its graph go node by node, so a block is one node until they are done (`inlined`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.blocks.block_calls import BlockCall
from fsdp_compiled.capture.blocks.templates import BLOCK, OWN, Line, own_tensor, result_of
from fsdp_compiled.capture.blocks.walked_blocks import WalkedBlock
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
    """A block that was not walked through. ``values``: its objects that the walked block's guards look at.

    ``tensors``: its own tensors, once it is written.
    """

    tensors: Sequence[torch.Tensor]

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

    def write(self, tensors: Sequence[torch.Tensor], out: bool) -> Any:
        """Writes the block, and returns Dynamo's variable for its result. ``tensors``: the block's own.

        ``out``: whether to write every node; else one node stands for all of them, until `inlined` writes them.
        """
        walked, call, template = self.walked, self.call, self.walked.template
        self.tensors = tensors
        graph, timestamp = call.output.graph, call.output.timestamp
        mine = dict(zip(walked.call.tensors, call.tensors, strict=True))
        given = [mine.get(one, one) for one in template.given]
        if out:
            made = self.write_out(graph, given, timestamp)
            results = [made[node] for node in walked.results]
        else:
            block = graph.create_node("call_function", template.call, tuple(given), {}, template.call.__name__)
            block.meta |= {"creation_timestamp": timestamp, "stack_trace": call.trace, BLOCK: self}
            results = [
                graph.create_node("call_function", result_of, (block, place), {}, result_of.__name__)
                for place in range(len(walked.results))
            ]
            for one in results:
                one.meta |= {"creation_timestamp": timestamp, "stack_trace": call.trace}
        for node, one in zip(walked.results, results, strict=True):
            one.meta["example_value"] = walked.another(node)
        call.output.guard_on_key_order.update(map(self._there, walked.ordered))
        for name, count in walked.visits.items():
            call.tx.num_calls[walked.path(name, call)] = count
        return self._returned(walked.result, dict(zip(walked.results, results, strict=True)))

    def write_out(self, graph: fx.Graph, given: Sequence[fx.Node], timestamp: Any = None) -> dict[fx.Node, fx.Node]:
        """Writes the block's nodes at the end of a graph, and returns them by the walked block's nodes. ``given``: the
        nodes that the block reads there."""
        walked, call, template = self.walked, self.call, self.walked.template
        modules = dict(zip(template.modules, (str(id(one)) for one in call.module.modules()), strict=True))
        stacks = [self._stack(stack, modules) for stack in template.stacks]
        mine = dict(zip(template.given, given, strict=True))

        def written(line: Line, made: fx.Node) -> fx.Node:
            """Gives a node the metadata of the walked block's, with this block's modules and the user's lines."""
            mine[line.node], meta = made, made.meta
            meta.update(line.kept)
            if timestamp is not None:
                meta["creation_timestamp"] = timestamp
            if line.stack is not None:
                meta["stack_trace"] = call.trace + line.user
                meta["nn_module_stack"] = stacks[line.stack]
            meta.update(line.value)  # which nothing can reach but what is returned, and is not changed
            return made

        for line, source, tensor in zip(template.inputs, walked.sources, self.tensors, strict=True):
            made = written(line, graph.create_node("call_function", own_tensor, (), {}, own_tensor.__name__))
            made.meta[OWN] = Own(self._there(source), tensor)
        for line in template.lines:
            args: Any = fx.node.map_arg(line.args, mine.__getitem__)
            kwargs: Any = fx.node.map_arg(line.kwargs, mine.__getitem__) if line.kwargs else {}
            made = written(line, graph.create_node(line.op, line.target, args, kwargs, line.name))
            if line.function is not None:
                made.meta["source_fn_stack"] = [(made.name, line.function)]
        return mine

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
