"""A graph as one Python function: a line a node, and each value let go after its last use.

    def run(self, x, weight):
        mm = f0(x, weight); del x, weight
        add = f1(mm, 1, alpha=c0); del mm
        return [add]

`fx.GraphModule` writes such a function too, in three times the time, and has it look operators up by their paths at
each call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import fx

LITERAL = (int, bool, str, type(None))
COUNT = itertools.count()


class Code:
    """A graph of calls, and ``run``, its function, which takes the inputs in their order. ``nodes``: the calls."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._known: dict[int, str] = {}  # what is no literal, by identity
        self._values: dict[str, Any] = {}  # the same, by name
        self._prefix = "_"
        while any(node.name.startswith(self._prefix) for node in graph.nodes):
            self._prefix += "_"
        text = self._text()
        file = f"<program {next(COUNT)}>.py"
        # Who formats a traceback asks `__loader__` for the text.
        values = self._values | {"__name__": "fsdp_compiled.program", "__loader__": _Text(text)}
        exec(compile(text, file, "exec", dont_inherit=True), values)
        self.function = values.pop("run")

    @property
    def run(self) -> Callable[..., Sequence[Any]]:
        """A method, whose ``__self__`` is this."""
        return MethodType(self.function, self)

    def position(self, line: int) -> int:
        """Of the node in ``nodes`` that is computed in a line of the function; their number where it returns."""
        return line - 2

    def _text(self) -> str:
        inputs = self.graph.find_nodes(op="placeholder")
        lines = [f"def run({', '.join([self._prefix, *(node.name for node in inputs)])}):"]
        over = self._last_uses()
        for node in self.nodes:
            given = [self._argument(value) for value in node.args]
            given += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
            lines.append(f" {node.name} = {self._name(node.target)}({', '.join(given)}); del {', '.join(over[node])}")
            if not over[node]:
                lines[-1] = lines[-1].removesuffix("; del ")
        lines.append(f" return {self._argument(self.graph.output_node().args[0])}\n")
        return "\n".join(lines)

    def _last_uses(self) -> dict[fx.Node, list[str]]:
        """The values that nothing reads after a node: its own, where nothing reads it at all."""
        seen = set(self.graph.output_node().all_input_nodes)
        found: dict[fx.Node, list[str]] = {}
        for node in reversed(self.nodes):
            last = [one for one in (*node.all_input_nodes, node) if one not in seen]
            found[node] = [one.name for one in last]
            seen.update(last)
        return found

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        kind = type(value)
        if kind in LITERAL or (kind is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, tuple):
            items = "".join(f"{self._argument(one)}, " for one in value)
            return f"{self._name(kind)}({items})" if hasattr(value, "_fields") else f"({items})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._argument(one)}' for key, one in value.items())}}}"
        if kind is slice:
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        return self._name(value)

    def _name(self, value: Any) -> str:
        if (name := self._known.get(id(value))) is None:
            name = self._known[id(value)] = f"{self._prefix}{len(self._known)}"
            self._values[name] = value
        return name


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, _: str) -> str:
        return self._text
