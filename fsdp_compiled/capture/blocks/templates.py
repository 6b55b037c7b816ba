"""Of a block that Dynamo walked through, what is found once for all blocks that are written like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

OWN = "own"  # under which `own_tensor`'s tensor is described
# What of a node is written anew.
WRITTEN = (
    "example_value", "creation_timestamp", "source_fn_stack", "nn_module_stack", "stack_trace", "grapharg", OWN,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Of a node. ``name``: without a number; ``kept``: of its notes; ``user``: the user's lines inside of the block;
    ``stack``: which of the template's ``stacks``; ``function``: that the user called; ``value``: if it has one."""

    node: fx.Node
    name: str
    kept: Mapping[str, Any]
    user: str
    stack: int | None
    function: Any
    value: Mapping[str, Any]


class Template:
    """``modules``: as a module stack names them; ``stacks``: those that there are."""

    def __init__(self, module: nn.Module, trace: str, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
        """``trace``: the user's lines that call the block."""
        self._trace = trace
        self._places: dict[tuple[str, ...], int] = {}
        self.stacks: list[Mapping[str, Any]] = []
        self.modules = [str(id(one)) for one in module.modules()]
        self.inputs, self.nodes = [list(map(self._line, group)) for group in (inputs, nodes)]

    def _line(self, node: fx.Node) -> Line:
        meta = node.meta
        place = None
        if (stack := meta.get("nn_module_stack")) is not None:  # which what changes modes has not
            place = self._places.setdefault(tuple(stack), len(self.stacks))
            if place == len(self.stacks):
                self.stacks.append(stack)
        return Line(
            node=node,
            name=node.graph._target_to_str(node.target),
            kept={key: value for key, value in meta.items() if key not in WRITTEN},
            user=meta.get("stack_trace", "").removeprefix(self._trace),
            stack=place,
            function=meta["source_fn_stack"][-1][1] if node.op != "placeholder" and "source_fn_stack" in meta else None,
            value={name: meta[name] for name in ("example_value",) if name in meta},
        )
