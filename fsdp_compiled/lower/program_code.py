"""A graph as Python: a line a node, each value let go after its last use, and equal stretches written once.

    def part_0(taken, weight):                   # of layers.0: what it reads last is handed over in a list
     [x] = taken; taken.clear()
     mm = f0(x, weight); del x
     add = f1(mm, 1, alpha=c0); del mm
     return [add]
    def run(self, x, weight, weight_1):
     taken = [x]; del x; [add] = part_0(taken, weight); del weight
     taken = [add]; del add; [add_1] = part_0(taken, weight_1); del weight_1
     return [add_1]

A *stretch* is what one block or unit computes in one phase, between collectives. Those that call the same on values in
the same places, and let go of the same, are one function: what Python takes to compile does not grow with depth.
Collectives and waits for them stand in ``run``, which has what they brought among its values.

`fx.GraphModule` writes a function too, in three times the time, and has it look operators up by their paths at each
call.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from types import CodeType, MethodType, TracebackType
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.nodes import is_collective, is_wait, owner

LITERAL = (int, bool, str, type(None))
COUNT = itertools.count()
ROOM = 1 << 15  # slots of 8 bytes
SHORT = 4  # operators; no more than these are written where they stand
Call = Callable[[fx.Node], tuple[Callable[..., Any], Sequence[Any]]]


def as_it_says(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any]]:
    return node.target, node.args  # type: ignore[return-value]


class Code:
    """A graph of calls, and ``run``, its function, which takes the inputs in their order.

    ``nodes``: the calls; ``text``: the Python.
    ``call``: what a node calls, with which arguments. ``boxed``: the function takes one list of the inputs, which it
    empties, so that each is let go after its last use whoever made the list.
    """

    def __init__(self, graph: fx.Graph, call: Call = as_it_says, boxed: bool = False) -> None:
        self.graph, self.call = graph, call
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._over = self._last_uses()
        self._known: dict[Hashable, str] = {}  # what is no literal, by identity
        self._values: dict[str, Any] = {}  # the same, by name
        self._prefix = "_"
        while any(node.name.startswith(self._prefix) for node in graph.nodes):
            self._prefix += "_"
        self._lines: list[str] = []
        # By line: the place of the node, or of the first of the stretch; inside of one, from there.
        self._places: dict[int, int] = {}
        self._write(boxed)
        self.text = "\n".join([*self._lines, ""])
        file = f"<program {next(COUNT)}>.py"
        # Who formats a traceback asks `__loader__` for the text.
        values = self._values | {"__name__": "fsdp_compiled.program", "__loader__": _Text(self.text)}
        code = compile(self.text, file, "exec", dont_inherit=True)
        self._parts = {one for one in code.co_consts if isinstance(one, CodeType) and one.co_name != "run"}
        exec(code, values)
        self.function = values.pop("run")
        self.function.__code__ = with_room(self.function.__code__)

    @property
    def run(self) -> Callable[..., Sequence[Any]]:
        """A method, whose ``__self__`` is this."""
        return MethodType(self.function, self)

    def reached(self, traceback: TracebackType | None) -> tuple[int, Mapping[str, Any]] | None:
        """Where a run broke off: the place in ``nodes`` of the one that was computed, their number where it returned,
        and the values that ``run`` had, by name. None if the traceback does not come from a run."""
        found = None
        while traceback is not None:
            code, line = traceback.tb_frame.f_code, traceback.tb_lineno
            if code is self.function.__code__:
                found = self._places.get(line, 0), traceback.tb_frame.f_locals
            elif code in self._parts and found is not None:
                found = found[0] + self._places.get(line, 0), found[1]
            traceback = traceback.tb_next
        return found

    def _write(self, boxed: bool) -> None:
        stretches = _stretches(self.nodes)
        forms = [self._form(nodes) if len(nodes) > SHORT else None for nodes in stretches]
        counts = Counter(form.text for form in forms if form is not None)
        named: dict[str, str] = {}
        for one in forms:
            if one is not None and counts[one.text] > 1 and one.text not in named:
                named[one.text] = f"{self._prefix}part_{len(named)}"
                self._write_part(named[one.text], one)
        places = self.graph.find_nodes(op="placeholder")
        inputs = [node.name for node in places]
        given = f"{self._prefix}given"
        self._lines.append(f"def run({', '.join([self._prefix, *([given] if boxed else inputs)])}):")
        if boxed:
            unread = [node.name for node in places if not node.users]
            over = f"; del {', '.join(unread)}" if unread else ""
            self._lines.append(f" [{', '.join(inputs)}] = {given}; {given}.clear(){over}")
        place = 0
        for nodes, form in zip(stretches, forms, strict=True):
            if form is not None and form.text in named:
                self._write_call(named[form.text], form, place)
            else:
                for index, node in enumerate(nodes):
                    self._write_line(node, place + index)
            place += len(nodes)
        self._line(f" return {self._argument(self.graph.output_node().args[0], _name_of)}", place)

    def _form(self, nodes: list[fx.Node]) -> _Form:
        """What the stretch is but for its names: equal for those that can be one function."""
        names = {node: f"n{index}" for index, node in enumerate(nodes)}
        reads: list[fx.Node] = []
        over: set[fx.Node] = set()
        lines = []

        def name(node: fx.Node) -> str:
            if (known := names.get(node)) is None:
                known = names[node] = f"i{len(reads)}"
                reads.append(node)
            return known

        for node in nodes:
            lines.append(self._text(node, name))
            if last := self._over[node]:
                over.update(last)
                lines.append(" ".join([names[one] for one in last]))
        returned = [node for node in nodes if node not in over]
        lines.append(" ".join([names[node] for node in returned]))
        taken, lent = ([node for node in reads if (node in over) == here] for here in (True, False))
        return _Form("\n".join(lines), nodes, taken, lent, returned)

    def _write_part(self, name: str, form: _Form) -> None:
        """The function, in the names of the first of these stretches."""
        taken = f"{self._prefix}taken"
        self._lines.append(f"def {name}({', '.join([taken, *(node.name for node in form.lent)])}):")
        self._lines.append(f" [{', '.join(node.name for node in form.taken)}] = {taken}; {taken}.clear()")
        for index, node in enumerate(form.nodes):
            self._write_line(node, index)
        self._line(f" return [{', '.join(node.name for node in form.returned)}]", len(form.nodes))

    def _write_call(self, name: str, form: _Form, place: int) -> None:
        taken = f"{self._prefix}taken"
        own = ", ".join(node.name for node in form.taken)
        given = ", ".join([taken, *(node.name for node in form.lent)])
        call = f"[{', '.join(node.name for node in form.returned)}] = {name}({given})"
        self._line(f" {taken} = [{own}]; {f'del {own}; ' if own else ''}{call}", place)

    def _write_line(self, node: fx.Node, place: int) -> None:
        over = self._over[node]
        end = f"; del {', '.join(one.name for one in over)}" if over else ""
        self._line(f" {node.name} = {self._text(node, _name_of)}{end}", place)

    def _line(self, text: str, place: int) -> None:
        self._lines.append(text)
        self._places[len(self._lines)] = place

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that nothing reads after a node: its own, where nothing reads it at all."""
        seen = set(self.graph.output_node().all_input_nodes)
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.nodes):
            found[node] = [one for one in (*node.all_input_nodes, node) if one not in seen]
            seen.update(found[node])
        return found

    def _text(self, node: fx.Node, name: Callable[[fx.Node], str]) -> str:
        target, args = self.call(node)
        given = [name(value) if isinstance(value, fx.Node) else self._argument(value, name) for value in args]
        if node.kwargs:
            given += [f"{key}={self._argument(value, name)}" for key, value in node.kwargs.items()]
        return f"{self._name(target)}({', '.join(given)})"

    def _argument(self, value: Any, name: Callable[[fx.Node], str]) -> str:
        if isinstance(value, fx.Node):
            return name(value)
        kind = type(value)
        if kind in LITERAL or (kind is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join([self._argument(one, name) for one in value])}]"
        if isinstance(value, tuple):
            items = "".join([f"{self._argument(one, name)}, " for one in value])
            return f"{self._name(kind)}({items})" if hasattr(value, "_fields") else f"({items})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._argument(one, name)}' for key, one in value.items())}}}"
        if kind is slice:
            return f"slice({', '.join(self._argument(one, name) for one in (value.start, value.stop, value.step))})"
        return self._name(value)

    def _name(self, value: Any) -> str:
        key = (type(value), str(value)) if isinstance(value, float | torch.device) else id(value)
        if (name := self._known.get(key)) is None:
            name = self._known[key] = f"{self._prefix}{len(self._known)}"
            self._values[name] = value
        return name


@dataclass(frozen=True)
class _Form:
    """A stretch: its text without names, and which values it takes, borrows and returns."""

    text: str
    nodes: list[fx.Node]
    taken: list[fx.Node]
    lent: list[fx.Node]
    returned: list[fx.Node]


def _name_of(node: fx.Node) -> str:
    return node.name


def _stretches(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes in order, cut where another block or phase begins, and around collectives."""
    found: list[list[fx.Node]] = []
    before: object = None
    apart: dict[int, bool] = {}  # by the operator's identity
    for node in nodes:
        target = node.target
        if (alone := apart.get(id(target))) is None:
            alone = apart[id(target)] = is_collective(node) or is_wait(node)
        if target is getitem:
            alone = is_collective(node.args[0])  # type: ignore[arg-type]
        place = None if alone else (node.meta.get("phase"), owner(node))
        if place is None or place != before:
            found.append([])
        found[-1].append(node)
        before = place
    return found


def with_room(code: CodeType) -> CodeType:
    """The same, in a frame after which there is room for the frames of all that it calls.

    CPython, from 3.11 on, takes frames from chunks of memory, each of a power of two, and gives a chunk back when its
    first frame ends. Where a frame ends near the end of its chunk, each call from it takes a chunk from the system and
    gives it back: 700 page faults a step of 24 layers, and a third of its processor time. A frame of a little more than
    half a chunk leaves nearly as much; what it has more is stack, which nothing touches.
    """
    own = code.co_nlocals + len(code.co_cellvars) + len(code.co_freevars)
    half = max(ROOM, 1 << (own + code.co_stacksize).bit_length())
    return code.replace(co_stacksize=half + 1000 - own)


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, _: str) -> str:
        return self._text
