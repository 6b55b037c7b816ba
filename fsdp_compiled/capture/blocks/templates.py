"""Templates: what is found once, of a block that Dynamo traced, for all blocks that are copied from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

OWN = "own"  # the metadata key for the tensor of an `own_tensor` node
# The metadata of a node that is written anew for each copy.
WRITTEN = (
    "example_value", "creation_timestamp", "source_fn_stack", "nn_module_stack", "stack_trace", "grapharg", OWN,
)  # fmt: skip


def own_tensor() -> torch.Tensor:
    """Stands in Dynamo's graph for an own tensor of a block that was not walked through (`with_own_tensors`)."""
    raise AssertionError


@dataclass(frozen=True)
class Line:
    """A node as it was right after the walk through its block: Dynamo removes some nodes later.

    name      its name without a number
    kept      the metadata that copies keep
    user      the user's lines inside of the block
    stack     the place of its module stack in the template's ``stacks``
    function  the function that the user called
    value     its ``example_value``, if it has one
    """

    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    kept: Mapping[str, Any]
    user: str
    stack: int | None
    function: Any
    value: Mapping[str, Any]


class Template:
    """The data that all blocks written like one block share.

    modules  the block's modules, as a module stack names them; ``stacks``: the module stacks of its nodes
    inputs   the lines of the block's own tensors; ``lines``: those of its calls
    """

    def __init__(self, module: nn.Module, trace: str, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
        """``trace``: the user's lines that call the block."""
        self._trace = trace
        self._places: dict[tuple[str, ...], int] = {}
        self.stacks: list[Mapping[str, Any]] = []
        self.modules = [str(id(one)) for one in module.modules()]
        self.inputs, self.lines = [list(map(self._line, group)) for group in (inputs, nodes)]

    def _line(self, node: fx.Node) -> Line:
        meta = node.meta
        place = None
        if (stack := meta.get("nn_module_stack")) is not None:  # nodes that change modes have none
            place = self._places.setdefault(tuple(stack), len(self.stacks))
            if place == len(self.stacks):
                self.stacks.append(stack)
        return Line(
            node=node,
            op=node.op,
            target=node.target,
            args=node.args,
            kwargs=node.kwargs,
            name=node.graph._target_to_str(node.target),
            kept={key: value for key, value in meta.items() if key not in WRITTEN},
            user=meta.get("stack_trace", "").removeprefix(self._trace),
            stack=place,
            function=meta["source_fn_stack"][-1][1] if node.op != "placeholder" and "source_fn_stack" in meta else None,
            value={name: meta[name] for name in ("example_value",) if name in meta},
        )
