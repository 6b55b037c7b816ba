"""A graph as Python: a line for each node, each value freed after its last use, and equal stretches written once.

    def part_0(taken, weight):                   # of layers.0: what it reads last is handed over in a list
     [x] = taken; taken.clear()
     mm = f0(x, weight); del x
     add = f1(mm, 1, alpha=c0); del mm
     return [add]
    def run(self, x, weight, weight_1):
     taken = [x]; del x; [add] = part_0(taken, weight); del weight
     taken = [add]; del add; [add_1] = part_0(taken, weight_1); del weight_1
     return [add_1]

Equal `stretches` share one function, and the values that one hands to another are bundled into one (`bundled`), so that
Python's compile time hardly grows with depth. Collectives and their waits stand in ``run``, whose values include their
results.

`fx.GraphModule` writes a function too, but takes three times as long, and its function looks operators up by their
paths at each call.

Bundles: values that go together from one kind of stretch to another are a list that one makes and the other takes.

    def part_0(taken, weight):                 # of forward
     ...
     return [[mm, add, gelu], x]               # what backward of the same block takes for good, and what it does not
    def part_1(taken):                         # of backward
     [d_y, [mm, add, gelu]] = taken; taken.clear()

A block keeps some twenty values for backward. If each were named where it is passed on, Python would take longer for
that, in each layer, than for the rest of the layer's code.

An operator is called by PyTorch's Python function for it, if that takes the same arguments.
``torch.ops.aten.mm.default(x, y)`` looks at its schema in each call; ``torch.mm(x, y)`` was compiled for it. Both run
the same kernel through the same dispatch, but the function saves 0.3 to 5 us, up to half of a small operator. A
function has several operators, and chooses by its arguments. So each operator is listed with the one form of arguments
for which the function chooses that operator. Other operators are called as they are.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, fx

from fsdp_compiled.lower.stretches import LITERAL, Bundle, Call, Stretch, Value, last_uses, stretches
from fsdp_compiled.torch_private.names import RELEASE

aten = torch.ops.aten
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default

# For each operator, its function and the kinds of its positional arguments: a value, values, integers (or values that
# are), one of these, a number, a flag or nothing. Arguments after the bar may be left out; those after the semicolon
# are given by name, if at all.
FORMS: Mapping[Any, tuple[Callable[..., Any], str]] = {
    aten.add.Tensor: (torch.add, "value value"),
    aten.add_.Tensor: (torch.Tensor.add_, "value value"),
    aten.addcmul_.default: (torch.Tensor.addcmul_, "value value value ; value"),
    aten.addmm.default: (torch.addmm, "value value value"),
    aten.baddbmm.default: (torch.baddbmm, "value value value"),
    aten.bmm.default: (torch.bmm, "value value"),
    aten.cat.default: (torch.cat, "values | integer"),
    aten.clone.default: (torch.clone, "value ; memory_format"),
    aten.div.Tensor: (torch.div, "value value"),
    aten.exp.default: (torch.exp, "value"),
    aten.expand.default: (torch.Tensor.expand, "value integers"),
    aten.gelu.default: (torch.nn.functional.gelu, "value ; approximate"),
    aten.lerp_.Scalar: (torch.Tensor.lerp_, "value value number"),
    aten.linalg_vector_norm.default: (torch.linalg.vector_norm, "value integer nothing flag ; dtype"),
    aten.mean.dim: (torch.mean, "value integers | flag"),
    aten.mm.default: (torch.mm, "value value"),
    aten.mul.Tensor: (torch.mul, "value value"),
    aten.mul_.Tensor: (torch.Tensor.mul_, "value value"),
    aten.native_layer_norm.default: (torch.native_layer_norm, "value integers value value number"),
    aten.neg.default: (torch.neg, "value"),
    aten.permute.default: (torch.permute, "value integers"),
    aten.pow.Tensor_Scalar: (torch.pow, "value integer"),
    aten.relu.default: (torch.relu, "value"),
    aten.reshape.default: (torch.reshape, "value integers"),
    aten.rsqrt.default: (torch.rsqrt, "value"),
    aten.select.int: (torch.select, "value integer integer"),
    aten.split_with_sizes.default: (torch.split_with_sizes, "value integers | integer"),
    aten.sqrt.default: (torch.sqrt, "value"),
    aten.squeeze.dim: (torch.squeeze, "value integer"),
    aten.sub.Tensor: (torch.sub, "value value"),
    aten.sum.dim_IntList: (torch.sum, "value integers | flag"),
    aten.t.default: (torch.t, "value"),
    aten.tanh.default: (torch.tanh, "value"),
    aten.transpose.int: (torch.transpose, "value integer integer"),
    aten.unsqueeze.default: (torch.unsqueeze, "value integer"),
    aten.view.default: (torch.Tensor.view, "value integers"),
    aten.where.self: (torch.where, "value value value"),
}


def function_for(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function to be called with these arguments of a node; the target itself, where none is sure to be it."""
    if target is ALL_TO_ALL and RELEASE == "2.11":
        return _all_to_all_of_dense
    function, form = FORMS.get(target, (target, ""))
    form, _, named = form.partition(" ; ")
    least, _, more = form.partition(" | ")
    kinds = f"{least} {more}".split()
    if not (kwargs.keys() <= {*named.split()} and len(least.split()) <= len(args) <= len(kinds)):
        return target
    if any(isinstance(value, fx.Node) for value in kwargs.values()):
        return target
    return function if all(_is(kind, value) for kind, value in zip(kinds, args)) else target


def _all_to_all_of_dense(tensor: Tensor, *rest: Any) -> Tensor:
    """In torch 2.11 the operator refuses a tensor that is not contiguous; later releases copy it."""
    return ALL_TO_ALL(tensor.contiguous(), *rest)  # type: ignore[no-any-return]


def _is(kind: str, value: Any) -> bool:
    if kind == "value":
        return isinstance(value, fx.Node)
    if kind == "values":
        return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, fx.Node) for one in value)
    if kind == "integers":
        return isinstance(value, list | tuple) and all(isinstance(one, fx.Node) or type(one) is int for one in value)
    return type(value) is {"integer": int, "number": float, "flag": bool, "nothing": type(None)}[kind]


COUNT = itertools.count()
ROOM = 1 << 15  # slots of 8 bytes


def as_it_says(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any]]:
    return node.target, node.args  # type: ignore[return-value]


class Code:
    """A graph of calls, and its function ``run``, which takes the inputs in their order.

        ``nodes``: the calls; ``text``: the Python.
    ``call``: what a node calls, with which arguments. ``boxed``: the function takes one list of the inputs and empties
    it, so that each input is freed after its last use, whoever made the list.
    """

    def __init__(self, graph: fx.Graph, call: Call = as_it_says, boxed: bool = False) -> None:
        self.graph, self.call = graph, call
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._ends = last_uses(self.nodes, graph.output_node().all_input_nodes)
        self._known: dict[Hashable, str] = {}  # objects that are no literals, by identity
        self._values: dict[str, Any] = {}  # the same, by name
        self._prefix = "_"
        names = "\n".join(["", *(node.name for node in graph.nodes)])
        while f"\n{self._prefix}" in names:
            self._prefix += "_"
        self._lines: list[str] = []
        # By line: the place of the node, or of a stretch's first node; inside a stretch's function, counted from there.
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
        """Where a run failed: the place in ``nodes`` of the call that was running, or their number if the run returned;
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
        parts = bundled(stretches(self.nodes, self._ends, self.call), f"{self._prefix}kept_")
        named: dict[int | None, str] = {None: ""}
        for part in parts:
            if part.kind not in named:
                named[part.kind] = f"{self._prefix}part_{part.kind}"
                self._write_part(named[part.kind], part)
        places = self.graph.find_nodes(op="placeholder")
        inputs = [node.name for node in places]
        given = f"{self._prefix}given"
        self._lines.append(f"def run({', '.join([self._prefix, *([given] if boxed else inputs)])}):")
        if boxed:
            unread = [node.name for node in places if not node.users]
            over = f"; del {', '.join(unread)}" if unread else ""
            self._lines.append(f" [{', '.join(inputs)}] = {given}; {given}.clear(){over}")
        for part in parts:
            if part.kind is not None:
                self._write_call(named[part.kind], part)
            else:
                for place, node in enumerate(part.nodes, part.start):
                    self._write_line(node, place, place)
        self._line(f" return {self._argument(self.graph.output_node().args[0])}", len(self.nodes))

    def _write_part(self, name: str, part: Stretch) -> None:
        """Writes the function of a kind of stretches, with the names of the first one."""
        taken = f"{self._prefix}taken"
        self._lines.append(f"def {name}({', '.join([taken, *(node.name for node in part.lent)])}):")
        self._lines.append(f" {_named(part.taken)} = {taken}; {taken}.clear()")
        for index, node in enumerate(part.nodes):
            self._write_line(node, part.start + index, index)
        self._line(f" return {_named(part.returned)}", len(part.nodes))

    def _write_call(self, name: str, part: Stretch) -> None:
        taken = f"{self._prefix}taken"
        own = ", ".join([node.name for node in part.taken])
        given = ", ".join([taken, *[node.name for node in part.lent]])
        call = f"[{', '.join([node.name for node in part.returned])}] = {name}({given})"
        self._line(f" {taken} = [{own}]; {f'del {own}; ' if own else ''}{call}", part.start)

    def _write_line(self, node: fx.Node, at: int, place: int) -> None:
        """Writes a node's line. ``at``: its place among all nodes; ``place``: the place that is noted for the line."""
        over = [one.name for one in (*node.all_input_nodes, node) if self._ends[one] == at]
        end = f"; del {', '.join(over)}" if over else ""
        self._line(f" {node.name} = {self._text(node)}{end}", place)

    def _line(self, text: str, place: int) -> None:
        self._lines.append(text)
        self._places[len(self._lines)] = place

    def _text(self, node: fx.Node) -> str:
        target, args = self.call(node)
        target = function_for(target, args, node.kwargs)
        given = [self._argument(value) for value in args]
        given += [f"{key}={self._argument(value)}" for key, value in node.kwargs.items()]
        return f"{self._name(target)}({', '.join(given)})"

    def _argument(self, value: Any) -> str:
        kind = type(value)
        if kind is fx.Node:
            return value.name  # type: ignore[no-any-return]
        if kind in LITERAL or (kind is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join([self._argument(one) for one in value])}]"
        if isinstance(value, tuple):
            items = "".join([f"{self._argument(one)}, " for one in value])
            return f"{self._name(kind)}({items})" if hasattr(value, "_fields") else f"({items})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._argument(one)}' for key, one in value.items())}}}"
        if kind is slice:
            return f"slice({', '.join(self._argument(one) for one in (value.start, value.stop, value.step))})"
        return self._name(value)

    def _name(self, value: Any) -> str:
        key = (type(value), str(value)) if isinstance(value, float | torch.device) else id(value)
        if (name := self._known.get(key)) is None:
            name = self._known[key] = f"{self._prefix}{len(self._known)}"
            self._values[name] = value
        return name


def _named(values: Sequence[Value]) -> str:
    """The list of values as Python, with each bundle written as the list of its values."""
    return f"[{', '.join([_named(one.nodes) if isinstance(one, Bundle) else one.name for one in values])}]"


def with_room(code: CodeType) -> CodeType:
    """The same code, with a frame that leaves room behind it for the frames of all that it calls.

    CPython, from 3.11 on, takes frames from chunks of memory, each a power of two in size, and frees a chunk when its
    first frame ends. If a frame ends near the end of its chunk, each call from it takes a chunk from the system and
    frees it again: 700 page faults a step of 24 layers, and a third of its processor time. A frame of a little more
    than half a chunk leaves nearly half of it free; the frame's additional part is stack, which nothing touches.
    """
    own = code.co_nlocals + len(code.co_cellvars) + len(code.co_freevars)
    half = max(ROOM, 1 << (own + code.co_stacksize).bit_length())
    return code.replace(co_stacksize=half + 1000 - own)


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, _: str) -> str:
        return self._text


Place = tuple[int, int]  # a stretch, or its kind, and the place among what it returns or takes


def bundled(parts: Sequence[Stretch], prefix: str) -> list[Stretch]:
    """The same stretches, with bundles among what they return and take. Bundles' names begin with ``prefix``."""
    apart: set[fx.Node] = set()  # values that are also read elsewhere
    for part in parts:
        if part.kind is not None:
            apart.update(part.lent)  # type: ignore[arg-type]
        else:
            for node in part.nodes:
                apart.update(node.all_input_nodes)
    makers = _where([part.returned for part in parts], apart)
    takers = _where([part.taken for part in parts], apart)
    made: list[dict[int, Bundle]] = [{} for _ in parts]  # by the kind that takes it
    taken: list[dict[int, Bundle]] = [{} for _ in parts]  # by the kind that made it
    for (kind, other), places in _pairs(parts, makers, takers).items():
        for number, part in enumerate(parts):
            if part.kind == kind:
                nodes = [part.returned[place] for place in places]
                bundle = Bundle(f"{prefix}{number}_{other}", nodes)  # type: ignore[arg-type]
                made[number][other] = taken[takers[nodes[0]][0]][kind] = bundle
    return [
        replace(part, returned=_with(part.returned, given), taken=_with(part.taken, got)) if given or got else part
        for part, given, got in zip(parts, made, taken, strict=True)
    ]


def _where(values: Sequence[Sequence[Value]], apart: Container[Value]) -> dict[Value, Place]:
    """Of each value, the number of the stretch and its place there."""
    return {
        value: (number, place)
        for number, row in enumerate(values)
        for place, value in enumerate(row)
        if value not in apart
    }


def _pairs(
    parts: Sequence[Stretch], makers: Mapping[Value, Place], takers: Mapping[Value, Place]
) -> dict[tuple[int, int], list[int]]:
    """For two kinds, the places of the values that the first returns and the second takes, in all stretches of both."""

    def links(values: Sequence[Value], others: Mapping[Value, Place]) -> list[Place | None]:
        found = [others.get(value) for value in values]
        return [(parts[one[0]].kind, one[1]) if one is not None else None for one in found]  # type: ignore[misc]

    given: dict[int, list[Place | None]] = {}
    taken: dict[int, list[Place | None]] = {}
    for part in parts:
        if part.kind is not None:
            for known, own in ((given, links(part.returned, takers)), (taken, links(part.taken, makers))):
                before = known.setdefault(part.kind, own)
                if before != own:
                    known[part.kind] = [one if one == other else None for one, other in zip(before, own, strict=True)]
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for kind, row in given.items():
        for place, link in enumerate(row):
            if link is not None and taken[link[0]][link[1]] == (kind, place):
                found[kind, link[0]].append(place)
    whole = {
        kinds: all(
            len({takers[part.returned[place]][0] for place in places}) == 1 for part in parts if part.kind == kinds[0]
        )
        for kinds, places in found.items()
    }
    return {kinds: places for kinds, places in found.items() if whole[kinds] and len(places) > 1}


def _with(values: Sequence[Value], bundles: Mapping[int, Bundle]) -> list[Value]:
    """The bundles, in the order of the kinds that they go to or come from, then the values that are in no bundle."""
    inside = {node for bundle in bundles.values() for node in bundle.nodes}
    return [*(bundles[kind] for kind in sorted(bundles)), *(value for value in values if value not in inside)]
