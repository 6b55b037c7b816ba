"""Templates: what is found once, of a block that Dynamo traced, for all blocks that are copied from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

OWN = "own"  # under which `own_tensor`'s tensor is described
BLOCK = "block"  # and `Template.call`'s block
# What of a node is written anew.
WRITTEN = (
    "example_value", "creation_timestamp", "source_fn_stack", "nn_module_stack", "stack_trace", "grapharg", OWN,
)  # fmt: skip


def own_tensor() -> torch.Tensor:
    """Stands in Dynamo's graph for an own tensor of a block that was not walked through (`inlined`)."""
    raise AssertionError


def result_of() -> torch.Tensor:
    """Stands there for what such a block computes: ``result_of(block, place)``."""
    raise AssertionError


@dataclass(frozen=True)
class Line:
    """Of a node, as it was when the block had been walked through: Dynamo takes out some of them later.

    name      without a number
    kept      of its notes
    user      the user's lines inside of the block
    stack     which of the template's ``stacks``
    function  that the user called
    value     if it has one
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
    """What blocks that are written like one have in common.

    modules  as a module stack names them; ``stacks``: those that there are
    inputs   lines of the block's own tensors, and ``lines`` of its calls
    given    the nodes that it reads and others made: tensors that it is called with, and what all blocks read
    call     stands in Dynamo's graph for all calls of a block
    """

    def __init__(
        self,
        module: nn.Module,
        trace: str,
        given: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node],
    ) -> None:
        """``trace``: the user's lines that call the block; ``given``: the tensors that it is called with."""
        self._trace = trace
        self._places: dict[tuple[str, ...], int] = {}
        self.stacks: list[Mapping[str, Any]] = []
        self.modules = [str(id(one)) for one in module.modules()]
        self.inputs, self.lines = [list(map(self._line, group)) for group in (inputs, nodes)]
        here = {*inputs, *nodes}
        others = [one for node in nodes for one in node.all_input_nodes if one not in here]
        self.given = list(dict.fromkeys([*given, *others]))

        def written_block(*_: Any) -> Any:
            raise AssertionError

        self.call: Callable[..., Any] = written_block

    def _line(self, node: fx.Node) -> Line:
        meta = node.meta
        place = None
        if (stack := meta.get("nn_module_stack")) is not None:  # which what changes modes has not
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
