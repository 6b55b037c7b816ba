"""A graph as Python: a line for each node, and each value freed after its last use.

    def run(_, x, weight, weight_1):
     mm = _0(x, weight); del x, weight
     mm_1 = _0(mm, weight_1); del mm, weight_1
     return [mm_1]

`fx.GraphModule` writes a function too, but takes three times as long, and its function looks operators up by their
paths at each call.

An operator is called by PyTorch's Python function for it, if that takes the same arguments.
``torch.ops.aten.mm.default(x, y)`` looks at its schema in each call; ``torch.mm(x, y)`` was compiled for it. Both run
the same kernel through the same dispatch, but the function saves 0.3 to 5 us, up to half of a small operator. A
function has several operators, and chooses by its arguments. So each operator is listed with the one form of arguments
for which the function chooses that operator. Other operators are called as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import CodeType, MethodType, SimpleNamespace, TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fsdp_compiled.torch_private.names import RELEASE

aten = torch.ops.aten
Call: TypeAlias = Callable[[fx.Node], tuple[Callable[..., Any], Sequence[Any]]]
LITERAL = (int, bool, str, type(None))
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


def last_uses(nodes: Sequence[fx.Node], returned: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each value, the place of the last node that reads it: its own place where none does, and the end where it is
    returned."""
    found: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        found[node] = place
        for source in node.all_input_nodes:
            found[source] = place
    found.update(dict.fromkeys(returned, len(nodes)))
    return found


def as_it_says(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any]]:
    return node.target, node.args  # type: ignore[return-value]


class Code:
    """A graph of calls, and its function ``run``, which takes the inputs in their order.

    ``nodes``: the calls; ``text``: the Python. ``call``: what a node calls, with which arguments. ``boxed``: the
    function takes one list of the inputs and empties it, so that each input is freed after its last use, whoever made
    the list.
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
        self._write(boxed)
        text = self.text = "\n".join([*self._lines, ""])
        file = f"<program {next(COUNT)}>.py"
        # Who formats a traceback asks `__loader__` for the text.
        loader = SimpleNamespace(get_source=lambda _: text)  # holds the text alone, so that no cycle arises
        values = self._values | {"__name__": "fsdp_compiled.program", "__loader__": loader}
        exec(compile(self.text, file, "exec", dont_inherit=True), values)
        self.function = values.pop("run")
        self.function.__code__ = with_room(self.function.__code__)

    @property
    def run(self) -> Callable[..., Sequence[Any]]:
        """A method, whose ``__self__`` is this."""
        return MethodType(self.function, self)

    def reached(self, traceback: TracebackType | None) -> tuple[int, Mapping[str, Any]] | None:
        """Where a run failed: the place in ``nodes`` of the call that was running, or their number if the run returned;
        and the values that ``run`` had, by name. None if the traceback does not come from a run."""
        while traceback is not None:
            if traceback.tb_frame.f_code is self.function.__code__:
                return max(0, traceback.tb_lineno - self._first), traceback.tb_frame.f_locals
            traceback = traceback.tb_next
        return None

    def _write(self, boxed: bool) -> None:
        places = self.graph.find_nodes(op="placeholder")
        inputs = [node.name for node in places]
        given = f"{self._prefix}given"
        self._lines.append(f"def run({', '.join([self._prefix, *([given] if boxed else inputs)])}):")
        if boxed:
            unread = [node.name for node in places if not node.users]
            over = f"; del {', '.join(unread)}" if unread else ""
            self._lines.append(f" [{', '.join(inputs)}] = {given}; {given}.clear(){over}")
        self._first = len(self._lines) + 1  # the line of the first node; each node has one
        for place, node in enumerate(self.nodes):
            self._write_line(node, place)
        self._lines.append(f" return {self._argument(self.graph.output_node().args[0])}")

    def _write_line(self, node: fx.Node, place: int) -> None:
        over = [one.name for one in (*node.all_input_nodes, node) if self._ends[one] == place]
        end = f"; del {', '.join(over)}" if over else ""
        self._lines.append(f" {node.name} = {self._text(node)}{end}")

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
