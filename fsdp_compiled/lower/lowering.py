"""Program -> callable.

``"eager"`` runs the graph's own code: the ATen kernels of eager PyTorch, in the program's order.

``"inductor"`` compiles the compute between the collectives in pieces (`partition`), each distinct one once
(`inductor`). The blocks of a model share one forward and one backward piece, and equal buffers share one update. So
compile time does not grow with depth, and the program runs in the order that the passes chose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.nodes import call_text, is_collective, is_random, origin
from fsdp_compiled.ir.program import Program
from fsdp_compiled.lower.partition import segments
from fsdp_compiled.lower.piece import Call, Piece
from fsdp_compiled.lower.program_code import Code, as_it_says
from fsdp_compiled.torch_private.modes import C
from fsdp_compiled.torch_private.names import there

Runner = Callable[..., Sequence[torch.Tensor]]
Boxed = Callable[[list[Any]], Sequence[torch.Tensor]]  # empties the list of inputs, and frees each after its last use
Bind = Callable[[Callable[..., Any], bool], Callable[..., Any]]
set_grad_enabled, Guard = torch.set_grad_enabled, contextlib.nullcontext
if there("calls below autograd"):
    set_grad_enabled, Guard = C._set_grad_enabled, C._AutoDispatchBelowAutograd


class below_autograd:
    """Inside, no gradient is recorded, and operators skip autograd's layers of dispatch, which would only cost time: a
    tenth of a small operator's. It calls C directly, since it is entered in each call."""

    __slots__ = ("_before", "_guard")

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(False)
        self._guard = Guard()
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        set_grad_enabled(self._before)


class Lowering:
    """A program on its way to a callable: cut into pieces, and joined again when the pieces are compiled.

    ``groups`` gives the name of the process group along each axis; ``how`` is ``Policy.lower``; ``blocks`` names the
    submodules that may be alike; ``bind`` gives a random operator a generator to draw from. ``pieces``: the pieces to
    compile, each distinct one once, by key.
    """

    def __init__(
        self,
        program: Program,
        groups: Mapping[str, str],
        how: str,
        blocks: Collection[str] = (),
        bind: Bind | None = None,
    ) -> None:
        self.graph, self._groups = program.graph, groups
        self._bind = bind
        self.segments = segments(self.graph, blocks) if how == "inductor" else None
        self.keys = {part: part.key() for part in self.segments or () if isinstance(part, Piece)}
        self.pieces = {key: piece for piece, key in reversed(self.keys.items())}

    def runner(self, compiled: Mapping[str, Call], boxed: bool = False) -> Runner:
        """The program with a call of a compiled function in the place of each piece; ``boxed``: a function of one list,
        for inputs that only the caller holds."""
        if self.segments is None:
            return Code(self.graph, self._called, boxed).run
        return Code(self._calls(self.segments, compiled), boxed=boxed).run

    def _called(self, node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any]]:
        """What a node calls, with which arguments: a collective gets a process group's name in place of an axis, and a
        random operator draws from the generator that is given."""
        target, args = as_it_says(node)
        if is_collective(node):
            return target, (*args[:-1], self._groups[str(args[-1])])
        if self._bind is not None and is_random(node):
            return self._bind(target, bool(node.meta.get("shared"))), args
        return target, args

    def _calls(self, segments: Sequence[fx.Node | Piece], compiled: Mapping[str, Call]) -> fx.Graph:
        result = fx.Graph()
        mapping = {node: result.node_copy(node) for node in self.graph.find_nodes(op="placeholder")}

        def value(node: fx.Node) -> fx.Node:
            """The node with this value in the result; adds missing views, which so far only pieces repeated."""
            node = origin(node, mapping)
            if node not in mapping:
                mapping[node] = result.node_copy(node, value)
            return mapping[node]

        for segment in segments:
            if isinstance(segment, fx.Node):
                copy = mapping[segment] = result.node_copy(segment, value)
                copy.target, args = self._called(segment)
                copy.args = fx.node.map_arg(tuple(args), value)
                continue
            given = result.call_function(boxed, tuple(value(node) for node in segment.inputs))
            call = result.call_function(compiled[self.keys[segment]], (given,))
            call.meta |= {"writes": segment.writes, "piece": segment.nodes}
            for index, node in enumerate(segment.outputs):
                mapping[node] = result.call_function(getitem, (call, index))
                mapping[node].meta["val"] = node.meta["val"]
        result.output([value(node) for node in self.graph.output_node().args[0]])  # type: ignore[union-attr, misc]
        return result

    def text(self, compiled: Mapping[str, Call]) -> str:
        """The calls that run, one by one: as they stand, or as a piece, by its key and with what compiled it."""
        if self.segments is None:
            count = sum(node.op == "call_function" for node in self.graph.nodes)
            return f"eager: {count} calls of PyTorch's and the package's own operators, as the program has them"
        parts = [part for part in self.segments if isinstance(part, Piece)]
        lines = [
            f"inductor: {len(parts)} pieces, of which {len(self.pieces)} are distinct, and "
            f"{len(self.segments) - len(parts)} calls that run as they stand"
        ]
        for part in self.segments:
            if isinstance(part, fx.Node):
                lines.append(f"    {part.name} = {call_text(part)}")
            else:
                key = self.keys[part]
                source = getattr(compiled[key], "source", "")
                lines.append(
                    f"    piece {key[:16]} ({source}): {len(part.nodes)} operators, {len(part.inputs)} inputs -> "
                    f"{', '.join(node.name for node in part.outputs) or 'what it writes'}"
                )
        return "\n".join(lines)


def boxed(*values: torch.Tensor) -> list[torch.Tensor]:
    """The only reference to a piece's inputs, so that the piece can free each after its last use."""
    return list(values)
