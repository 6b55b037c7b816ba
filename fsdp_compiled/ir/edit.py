"""`Edit`: the only place where a graph is copied or changed; a pass makes one, changes it, and is `done`.

A program is a value: an edit changes a copy of it. A caller that no longer needs a program donates it, as `passes.run`
does with one pass's result for the next; the edit then takes the graph itself, and nothing may look at that program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.inference import Inference
from fsdp_compiled.ir.node_copies import copied, names_of, new_node, row_of
from fsdp_compiled.ir.nodes import (
    ASSERT,
    Mark,
    Phase,
    fake_mode,
    fake_tensor,
    is_random,
    mutated,
    name_device,
    upstream,
)
from fsdp_compiled.ir.program import Port, Program

c10d = torch.ops._c10d_functional


class Edit:
    """A copy of a program that may be changed, or a donated one; `done` turns it into the next program.

    Lives inside one pass. ``self.map`` leads from the nodes of the copied program to those of the copy.
    """

    def __init__(self, program: Program) -> None:
        self.map: dict[fx.Node, fx.Node] = {}
        self.graph = program.graph
        if not program.donated:
            self.graph = copied(map(row_of, program.graph.nodes), names_of(program.graph), self.map)
        self._end = self.graph.output_node()
        self.mode = fake_mode(self.graph)
        known = program.inferred
        self._result = known if known is not None and known.mode is self.mode else Inference(self.mode)
        self._before = program
        given = Program(self.graph, program.ports, ())
        self._inputs, self._outputs = given.inputs, given.outputs
        self.inputs: Mapping[Port, fx.Node] = MappingProxyType(self._inputs)  # as they are now
        self._phase: Phase = "forward"
        self._calls: list[fx.Node] = []
        self._left: list[fx.Node] = []  # nodes that were outputs

    @property
    def outputs(self) -> dict[Port, fx.Node | None]:
        """The current outputs, in a new dict: a caller may set and remove outputs while it iterates."""
        return dict(self._outputs)

    @property
    def end(self) -> fx.Node:
        """The output node: insert before it to append to the program."""
        return self._end

    @contextmanager
    def at(self, before: fx.Node, phase: Phase) -> Iterator[None]:
        """Calls inside go before this node, in this phase."""
        previous = self._phase
        self._phase = phase
        with self.graph.inserting_before(before):
            yield
        self._phase = previous

    def call(self, target: Callable[..., Any], *args: Any, mark: Mark | None = None, **kwargs: Any) -> fx.Node:
        """Inserts a call and works out its ``val`` by running it on fake tensors."""
        node = new_node(self.graph, "call_function", target, args, kwargs, None if mark is None else _name(mark))
        node.meta["phase"] = self._phase
        if mark is not None:
            node.meta["mark"] = mark
        self.infer(node)
        self._calls.append(node)
        return node

    def infer(self, node: fx.Node) -> None:
        node.meta["val"] = self._result(node.target, node.args, node.kwargs)  # type: ignore[arg-type]

    def clone(self, node: fx.Node, mapping: dict[fx.Node, fx.Node]) -> fx.Node:
        """Repeats a node on other inputs at the point and in the phase that `at` set."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: mapping.get(source, source))
        copy = new_node(self.graph, node.op, node.target, args, kwargs, node.name)
        copy.meta |= {**node.meta, "phase": self._phase}
        return copy

    def add_input(self, port: Port, value: torch.Tensor) -> fx.Node:
        """Adds a placeholder behind the existing ones; ``value`` is a fake tensor."""
        last = next(reversed(self._inputs.values()))
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(_identifier(str(port)))
        node.meta["val"] = value
        self._inputs[port] = node
        return node

    def input(self, port: Port, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> fx.Node:
        """The placeholder of this port, added if there is none yet."""
        return self._inputs.get(port) or self.add_input(port, self.fake(shape, dtype, device))

    def before(self, port: Port, value: fx.Node) -> fx.Node:
        """The old value of the tensor that ``value`` is written to: its placeholder, added if nothing reads it yet."""
        old = Port("in", port.kind, port.name)
        return self._inputs.get(old) or self.add_input(old, value.meta["val"])

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not all(type(size) is int for size in shape):
            with self.mode:
                return torch.empty(tuple(shape), dtype=dtype, device=device)
        strides = (math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))
        return fake_tensor(self.mode, tuple(shape), tuple(strides), dtype, device)

    def remove_inputs(self, ports: Iterable[Port]) -> None:
        """Removes inputs that nothing reads any more."""
        for port in ports:
            self.graph.erase_node(self._inputs.pop(port))

    def set_output(self, port: Port, node: fx.Node | None) -> None:
        self.set_outputs({port: node})

    def set_outputs(self, nodes: Mapping[Port, fx.Node | None]) -> None:
        """Sets several outputs in one call: each call gives the output node the list of all outputs again."""
        self._left += [known for port in nodes if (known := self._outputs.get(port)) is not None]
        self._outputs |= nodes
        self._sync()

    def remove_output(self, *ports: Port) -> None:
        self._left += [known for port in ports if (known := self._outputs.pop(port)) is not None]
        self._sync()

    def _sync(self) -> None:
        self._end.args = (list(self._outputs.values()),)

    def sweep(self, among: Iterable[fx.Node] | None = None) -> None:
        """Erases calls whose results nothing uses, collectives' waits among them.

        Writes in place, assertions and random operators stay: they do more than to return a result. ``among``: the
        nodes that may be unused; None: all nodes.
        """
        found = [node for node in (self.graph.nodes if among is None else among) if not node.users]
        while found:
            node = found.pop()
            if node.users or node.op != "call_function":
                continue
            if not (mutated(node) or node.target is ASSERT or node.meta.get("effect") or is_random(node)):
                sources = node.all_input_nodes
                self.graph.erase_node(node)
                found += sources

    def rebuild(self, nodes: Collection[fx.Node], readers: Iterable[fx.Node] | None = None) -> dict[fx.Node, fx.Node]:
        """Makes these readers, all of backward's if not given, read clones of these nodes, made just before the first
        reader that needs them. Returns the clones, by node."""
        clones: dict[fx.Node, fx.Node] = {}
        if readers is None:
            users = {user for node in nodes for user in node.users if user.op == "call_function"}
            readers = [user for user in users if user.meta["phase"] == "backward"]
        for node in sorted(readers):
            needed = [source for source in node.all_input_nodes if source in nodes]
            with self.at(node, node.meta.get("phase", "update")):  # the output node has none
                for source in sorted(upstream(needed, lambda one: one in nodes and one not in clones)):
                    clones[source] = self.clone(source, clones)
            for source in needed:
                node.replace_input_with(source, clones[source])
        return clones

    def drop_unused_parts(self) -> None:
        """Makes all-gathers of several buffers carry only those that are used: everything sent must be awaited."""
        self.sweep()
        gathers = self.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor_coalesced.default)
        for node in gathers:
            parts = {part.args[1]: part for part in node.users}
            buffers, world, axis = node.args
            if len(parts) == len(buffers):  # type: ignore[arg-type]
                continue
            used = [buffers[index] for index in sorted(parts)]  # type: ignore[index, type-var]
            with self.at(node, node.meta["phase"]):
                mark = node.meta["mark"]
                if len(used) == 1:
                    (part,) = parts.values()
                    single = replace(part.meta["mark"], role="gather")
                    full = self.call(c10d.all_gather_into_tensor.default, used[0], world, axis, mark=single)
                    part.replace_all_uses_with(full)
                else:
                    fewer = self.call(c10d.all_gather_into_tensor_coalesced.default, used, world, axis, mark=mark)
                    for place, index in enumerate(sorted(parts)):  # type: ignore[type-var]
                        parts[index].args = (fewer, place)
        if gathers:
            self.sweep()

    def hoist(self, node: fx.Node, before: fx.Node) -> None:
        """Moves a node and its sources up to before another; nothing in between may change their values."""
        self.move(sorted(upstream([node], lambda one: one.op == "call_function" and one > before)), before)

    def move(self, nodes: Iterable[fx.Node], before: fx.Node) -> None:
        """Moves nodes, in this order, to just before another."""
        for node in nodes:
            before.prepend(node)

    def done(self, name: str, *notes: str, keeps_readers: bool = False) -> Program:
        """The next program: swept, with this pass in its history and what it chose in its notes.

        ``keeps_readers``: only former outputs lost a reader; the sweep then looks at them and at inserted calls only.
        """
        self.sweep(dict.fromkeys([*self._calls, *self._left]) if keeps_readers else None)
        ports = (*self._inputs, *self._outputs)
        history, notes = (*self._before.history, name), (*self._before.notes, *notes)
        return Program(self.graph, ports, history, notes, inferred=self._result)


def _name(mark: Mark) -> str:
    return _identifier(f"{mark.buffer or mark.unit}_{mark.role}".lstrip("_"))


@lru_cache(maxsize=1 << 12)
def _identifier(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def weighed(edit: Edit, value: fx.Node, weight: fx.Node, mark: Mark) -> fx.Node:
    """``value * weight``, but zero where the weight is zero, even if the value is not finite."""
    counts = edit.call(torch.ops.aten.gt.Scalar, weight, 0, mark=mark)
    product = edit.call(torch.ops.aten.mul.Tensor, value, weight, mark=mark)
    return edit.call(torch.ops.aten.where.ScalarOther, counts, product, 0.0, mark=mark)


def moved(program: Program, device: torch.device) -> Program:
    """The program as if it had been captured on this device: fake tensors, and the devices that its nodes name."""
    edit = Edit(program)
    known: dict[int, torch.Tensor] = {}

    def there(one: torch.Tensor) -> torch.Tensor:
        if id(one) not in known:
            known[id(one)] = fake_tensor(edit.mode, tuple(one.shape), one.stride(), one.dtype, device)
        return known[id(one)]

    for node in edit.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, there, node.meta["val"])
    name_device(edit.graph, device)
    return replace(edit.done("moved"), history=program.history)
