"""Differentiates a graph with few equal stretches in the place of a graph with many, and copies what came of them.

Of equal stretches of a graph that follow one another, such as a model's blocks, a few are differentiated.

    traced by Dynamo      before  0  1  2  3  4  5  6  7  after
    differentiated        before  0  1  2              7  after    after'  7'              2'  1'  0'  before'
    program               before  0  1  2  3  4  5  6  7  after    after'  7'  6'  5'  4'  3'  2'  1'  0'  before'

A *stretch* is a row of nodes. Its operators, arguments and layouts equal those of the stretch before it, moved on by
one stretch: it reads its own inputs (a block's parameters), results of the stretch before, and values that all of them
read. AOTAutograd walks through nodes one by one, and autograd runs backward through the order in which forward was
recorded. So the result for a stretch depends only on the stretch, on its neighbours and on values that all read, and
the result for the second, moved on by one stretch, is that for the third. This is compared node by node
(`ExpandedProgram`). If it does not hold, the whole graph is differentiated as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture import aot
from fsdp_compiled.capture.aot import Traced, stem
from fsdp_compiled.capture.blocks.equal_blocks import LATER, SECOND, THIRD, Run, Token, runs_of, texts_of, with_body
from fsdp_compiled.capture.closure_values import layout_of
from fsdp_compiled.capture.model_tensors import is_wrapped
from fsdp_compiled.capture.source_lines import MARK
from fsdp_compiled.ir.node_copies import Like, new_calls
from fsdp_compiled.ir.nodes import fake_mode, fake_tensor
from fsdp_compiled.ir.program import Port, Program

log = logging.getLogger("fsdp_compiled")
Place = tuple[int, int, str, int]  # where a node is: its run, its kept stretch, its phase, and its place in these


def differentiate(
    module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], results: Sequence[Port]
) -> Traced:
    """Calls `aot.differentiate` on a graph with only a few of many equal stretches."""
    # A tensor subclass becomes several inputs of the program.
    runs = (
        []
        if any(isinstance(one, torch.Tensor) and is_wrapped(one) for one in inputs)
        else runs_of(module, inputs, given)
    )
    if runs:
        short = ReducedGraph(module, inputs, given, runs)
        try:
            with short.marked():
                found = aot.differentiate(short.module, short.inputs, short.given, results)
            return ExpandedProgram(module, found, runs, given).traced()
        except Unequal as why:
            log.info("equal blocks are differentiated one by one: %s", why)
    return aot.differentiate(module, inputs, given, results)


class ReducedGraph:
    """The graph without the stretches that are like the third, and its inputs."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], runs: Sequence[Run]
    ) -> None:
        self._marks: dict[fx.Node, str] = {}  # of nodes that are kept
        instead: dict[fx.Node, fx.Node] = {}
        gone: set[Port] = set()
        for number, run in enumerate(runs):
            for index, stretch in enumerate(run.stretches):
                if (kept := run.kept(index)) is None:
                    instead.update(zip(stretch, run.stretches[THIRD], strict=True))
                    gone.update(run.own[index])
                else:
                    self._marks.update(dict.fromkeys(stretch, f"{MARK} {number} {kept}"))
        left = [place for place, port in enumerate(given) if port not in gone]
        self.inputs, self.given = [inputs[place] for place in left], [given[place] for place in left]
        places = module.graph.find_nodes(op="placeholder")
        away = {place for place, port in zip(places, given, strict=True) if port in gone}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._marked: list[tuple[fx.Node, str]] = []
        for node in module.graph.nodes:
            if node in away or node in instead:
                continue
            copy = copies[node] = graph.node_copy(node, lambda source: copies[instead.get(source, source)])
            if hasattr(node, "_dynamo_source"):
                copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
            if (mark := self._marks.get(node)) is not None:
                self._marked += [(inner, mark) for inner in (copy, *list(with_body(module, node))[1:])]
        self.module = fx.GraphModule(module, graph)
        self.module.meta.update(module.meta)
        if hasattr(module, "_param_name_to_source"):
            self.module._param_name_to_source = module._param_name_to_source

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Inside, the metadata of nodes says which stretch they are in. AOTAutograd copies it to the nodes it makes."""
        before = [(node, node.meta.get("nn_module_stack")) for node, _ in self._marked]
        for node, mark in self._marked:
            node.meta["nn_module_stack"] = {**(node.meta.get("nn_module_stack") or {}), mark: (mark, nn.Module)}
        try:
            yield
        finally:
            for node, stack in before:
                node.meta.pop("nn_module_stack")
                if stack is not None:
                    node.meta["nn_module_stack"] = stack


class Unequal(Exception):
    """The stretches are not equal after all."""


class ExpandedProgram:
    """Makes the program of all stretches out of the program of the shortened graph."""

    def __init__(self, module: fx.GraphModule, found: Traced, runs: Sequence[Run], given: Sequence[Port]) -> None:
        self._module, self._found, self._program, self._runs, self._given = module, found, found.program, runs, given
        self._ports = [run.own for run in runs]
        if found.literals and any(port.kind == "constant" for run in self._ports for own in run for port in own):
            raise Unequal("literal tensors are numbered after the blocks' own")
        self._outputs = self._program.outputs
        self._inputs = {node: port for port, node in self._program.inputs.items()}
        self._owned = {
            port: (number, run.kept(index), place)
            for number, run in enumerate(runs)
            for index, ports in enumerate(self._ports[number])
            for place, port in enumerate(ports)
            if run.kept(index) is not None
        }
        self._groups: list[tuple[tuple[int, int, str] | None, list[fx.Node]]] = []
        self._places: dict[fx.Node, Place] = {}
        self._group()
        for number in range(len(runs)):
            self._check(number)

    def _group(self) -> None:
        """The program's nodes as rows of the same stretch and phase."""
        for node in self._program.graph.nodes:
            if node.op != "call_function":
                continue
            mark = node.meta.pop("stretch", None)
            key = (*mark, node.meta["phase"]) if mark is not None else None
            if not self._groups or self._groups[-1][0] != key:
                self._groups.append((key, []))
            group = self._groups[-1][1]
            if key is not None:
                self._places[node] = (*key, len(group))
            group.append(node)
        keys = [key for key, _ in self._groups if key is not None]
        wanted = [
            (number, kept, phase) for phase in ("forward", "backward")
            for number in range(len(self._runs))[:: 1 if phase == "forward" else -1]
            for kept in self._runs[number].kept_ones[:: 1 if phase == "forward" else -1]
        ]  # fmt: skip
        if keys not in (wanted, [key for key in wanted if key[2] == "forward"]):
            raise Unequal("they are not apart from one another in the program")
        inner = [place for place, (key, _) in enumerate(self._groups) if key is not None]
        for one, two in pairwise(inner):
            first, second = self._groups[one][0], self._groups[two][0]
            if first is not None and second is not None and first[0] == second[0] and first[2] == second[2]:
                if two != one + 1:
                    raise Unequal("something is computed between them")

    def _check(self, number: int) -> None:
        """Raises `Unequal` unless the second stretch, moved on by one, equals the third."""
        rows = dict(self._groups)
        for phase in ("forward", "backward"):
            second, third = rows.get((number, SECOND, phase), []), rows.get((number, THIRD, phase), [])
            if [self._key(node, number, SECOND) for node in second] != [
                self._key(node, number, THIRD) for node in third
            ]:
                raise Unequal(f"{phase} of one is not that of the next")
        for node in self._program.graph.nodes:
            if node.op == "call_function" and self._places.get(node, (None,))[0] != number:
                for source in node.all_input_nodes:
                    place = self._places.get(source)
                    if place is not None and place[0] == number and place[1] in (SECOND, THIRD):
                        raise Unequal(f"{source.name} is read elsewhere")
        gradients = [
            {
                (port.kind, place): self._token(node, number, kept)
                for port, node in self._outputs.items()
                for given, (run, of, place) in self._owned.items()
                if (run, of) == (number, kept) and port.name == given.name
            }
            for kept in (SECOND, THIRD)
        ]
        if gradients[0] != gradients[1] or any(kind != "parameter gradient" for kind, _ in gradients[0]):
            raise Unequal("what they return is not the same")
        names = {port.name for port in self._owned}
        for port, node in self._outputs.items():
            place = self._places.get(node)
            if place is not None and place[0] == number and place[1] in (SECOND, THIRD) and port.name not in names:
                raise Unequal(f"{port} is returned")

    def _key(self, node: fx.Node, number: int, kept: int) -> tuple[Any, ...]:
        """What a node does and reads, relative to its stretch: equal for the same node of the next stretch."""
        value = pytree.tree_map_only(torch.Tensor, layout_of, node.meta.get("val"))
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: self._token(source, number, kept))
        return (node.target, value, "region" in node.meta, node.meta.get("effect"), arguments)

    def _token(self, node: fx.Node, number: int, kept: int) -> Any:
        place = self._places.get(node)
        if place is not None and place[0] == number:
            return Token(("stretch", place[1] - kept, *place[2:]))
        if (port := self._inputs.get(node)) is not None and self._owned.get(port, ())[:2] == (number, kept):
            return Token(("own", self._owned[port][2]))
        return Token(("same", node))

    def traced(self) -> Traced:
        self._graph = graph = fx.Graph()
        inputs = self._make_inputs(graph)
        self._copies: dict[fx.Node, fx.Node] = {node: inputs[port] for node, port in self._inputs.items()}
        self._made: dict[tuple[int, int, str], list[fx.Node]] = {}
        self._regions: dict[tuple[int, int], int] = {}  # checkpointed ones; a copy has numbers of its own
        self._texts: dict[tuple[int, int, int], dict[str, str]] = {}
        self._rows = {key: _Rows(group) for key, group in self._groups if key is not None}
        self._read: dict[tuple[int, int, str], list[tuple[fx.Node, str, int, int]]] = {}
        for key, group in self._groups:
            if key is None:
                self._copy(_Rows(group), self._copies)
                continue
            number, kept, phase = key
            run = self._runs[number]
            if phase == "forward" and kept == LATER:
                for stretch in run.middle:
                    self._repeat(number, THIRD, stretch, phase, inputs)
            self._repeat(number, kept, run.place(kept), phase, inputs)
            if phase == "backward" and kept == LATER:
                for stretch in reversed(run.middle):
                    self._repeat(number, THIRD, stretch, phase, inputs)
        outputs = self._collect()
        graph.output(list(outputs.values()))
        ports = (*inputs, *outputs)
        return replace(self._found, program=Program(graph, ports, self._program.history))

    def _make_inputs(self, graph: fx.Graph) -> dict[Port, fx.Node]:
        """The placeholders: those of the given ports, in order and without unused ones; then the others."""
        mode = fake_mode(self._program.graph)
        before = self._program.inputs
        like = {
            port: self._ports[number][THIRD][place]
            for number, run in enumerate(self._runs)
            for index, ports in enumerate(self._ports[number])
            if run.kept(index) is None
            for place, port in enumerate(ports)
        }
        found: dict[Port, fx.Node] = {}
        described: dict[fx.Node, tuple[Any, ...]] = {}  # shape, strides, dtype and device of the tensors like one
        for place, port in enumerate(self._given):
            other = like.get(port)
            template = before.get(port if other is None else other)
            if template is None:
                continue
            name = f"primals_{place + 1}" if template.name.startswith("primals") else f"arg{place}_1"
            node = found[port] = graph.placeholder(name)
            node.meta.update(template.meta)
            if other is not None:
                if (made_of := described.get(template)) is None:
                    value = template.meta["val"]
                    made_of = tuple(value.shape), value.stride(), value.dtype, value.device
                    described[template] = made_of
                node.meta["val"] = fake_tensor(mode, *made_of)
        for port, template in before.items():
            if port not in found:
                found[port] = graph.node_copy(template)
        return found

    def _repeat(self, number: int, kept: int, stretch: int, phase: str, inputs: Mapping[Port, fx.Node]) -> None:
        """Writes a stretch as a copy of the kept stretch that is like it."""
        read: dict[fx.Node, fx.Node] = {}
        for source, of, later, place in self._sources(number, kept, phase):
            if of == "own":
                read[source] = inputs[self._ports[number][stretch][place]]
            elif of == "same":
                read[source] = self._copies[source]
            else:
                read[source] = self._made[number, stretch + later, of][place]
        rows = self._rows[number, kept, phase]
        made = self._copy(rows, read, self._paths(number, kept, stretch), stretch)
        self._made[number, stretch, phase] = made
        if self._runs[number].kept(stretch) is not None:
            self._copies.update(zip(rows.nodes, made, strict=True))

    def _sources(self, number: int, kept: int, phase: str) -> list[tuple[fx.Node, str, int, int]]:
        """The nodes that a stretch reads and does not compute: each with its kind or phase, how many stretches further
        on it is, and its place there."""
        if (found := self._read.get((number, kept, phase))) is not None:
            return found
        found = self._read[number, kept, phase] = []
        mine = self._rows[number, kept, phase].nodes
        for source in dict.fromkeys(source for node in mine for source in node.all_input_nodes):
            place, port = self._places.get(source), self._inputs.get(source)
            if place is not None and place[0] == number:
                later = place[1] - kept
                if abs(later) > 1:
                    raise Unequal(f"{source.name} is read by a later one")
                if later or place[2] != phase:
                    found.append((source, place[2], later, place[3]))
            elif port is not None and self._owned.get(port, ())[:2] == (number, kept):
                found.append((source, "own", 0, self._owned[port][2]))
            else:
                found.append((source, "same", 0, 0))
        return found

    def _copy(
        self, rows: _Rows, read: dict[fx.Node, fx.Node], texts: Mapping[str, str] | None = None, stretch: int = -1
    ) -> list[fx.Node]:
        """Copies nodes to the graph's end. ``read``: the node to read in the place of each; the copies are added."""
        made = new_calls(self._graph, rows.calls, read)
        for copy, (before, path, trace, region) in zip(made, rows.notes, strict=True):
            meta = copy.meta
            meta.update(before)
            if texts:
                if (new := texts.get(path)) is not None:
                    meta["path"] = new
                if (new := texts.get(trace)) is not None:
                    meta["stack_trace"] = new
            if region is not None:
                meta["region"] = self._regions.setdefault((region, stretch), len(self._regions))
        return made

    def _paths(self, number: int, kept: int, stretch: int) -> dict[str, str]:
        """The paths and stack traces of one stretch, by those of the kept stretch."""
        run = self._runs[number]
        if run.kept(stretch) is not None:
            return {}
        if (number, kept, stretch) in self._texts:  # in forward
            return self._texts[number, kept, stretch]
        found = self._texts[number, kept, stretch] = {}
        rows = [run.stretches[run.place(kept)], run.stretches[stretch]]
        texts = [[text for node in row for text in texts_of(self._module, node)] for row in rows]
        for old, new in zip(*texts, strict=True):
            if found.setdefault(old, new) != new:
                raise Unequal(f"{old} is {found[old]} and {new}")
        return found

    def _collect(self) -> dict[Port, fx.Node]:
        """The outputs: the gradients last, in the order of the inputs."""
        order = {port.name: place for place, port in enumerate(self._given)}
        gradients: dict[int, tuple[Port, fx.Node]] = {}
        found: dict[Port, fx.Node] = {}
        owned = {port.name: value for port, value in self._owned.items()}
        for port, node in self._outputs.items():
            if port.kind not in ("parameter gradient", "input gradient"):
                found[port] = self._copies[node]
                continue
            gradients[order[port.name]] = port, self._copies[node]
            number, kept, place = owned.get(port.name, (0, None, 0))
            if kept == THIRD:
                of = self._places[node]
                for stretch in self._runs[number].middle:
                    name = self._ports[number][stretch][place].name
                    copy = self._made[number, stretch + of[1] - kept, of[2]][of[3]]
                    gradients[order[name]] = Port(port.side, port.kind, name, port.part, port.dim), copy
        return found | {port: node for _, (port, node) in sorted(gradients.items(), key=lambda item: item[0])}


class _Rows:
    """Nodes to copy, most of them many times, with the call and the metadata of each copy."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.calls: list[Like] = [(node, node.target, node.args, node.kwargs, stem(node.name)) for node in nodes]
        notes = [node.meta for node in nodes]
        self.notes = [(one, one.get("path", ""), one.get("stack_trace", ""), one.get("region")) for one in notes]
