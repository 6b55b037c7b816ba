"""The collectives that a rank still has to run after its run of a program failed.

    ran       gather  wait  mm  embedding: IndexError
    owed                                               gather   reduce-scatter   all-reduce of loss, norm and call
    sent                                               shard    NaN              NaN

The other ranks are in this call too, and will wait in each of its collectives. So the failed rank runs the remaining
collectives. Where parameters are gathered it sends its true shards, which need nothing that was computed; anywhere else
it sends NaN. The last collective of a program that trains or differentiates is the one in which ranks compare what they
run (`report`). NaN equals nothing, so every rank stops there, before anything is updated, and no rank is a collective
ahead of the others.

The traceback shows how far the run came: each node of a graph is a line of its code. Where a collective itself failed,
nobody knows whether it started, and nothing can be finished.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.nodes import is_collective, is_wait, mutated, origin, role_of
from fsdp_compiled.lower.lowering import Runner
from fsdp_compiled.lower.program_code import Code

Given = Callable[[int], torch.Tensor]  # a program's input by its place


@dataclass(frozen=True)
class Position:
    """Where a run failed. ``owed``: the collectives that it did not start."""

    owed: Sequence[fx.Node] = ()
    started: Sequence[torch.Tensor] = ()  # results of collectives that nobody has waited for
    communicating: bool = False  # whether it failed in a collective, or in waiting for one
    wrote: bool = False  # whether an input, such as a shard, may have been written


class PendingCollectives:
    """The remaining collectives of a lowered program, wherever a run of it fails."""

    def __init__(self, runner: Runner) -> None:
        self.code: Code = runner.__self__  # type: ignore[attr-defined]
        self._inputs = {node: place for place, node in enumerate(self.code.graph.find_nodes(op="placeholder"))}

    def before(self) -> Position:
        """The position of a run that did not begin."""
        return Position(owed=[node for node in self.code.nodes if is_collective(node)])

    def place(self, error: BaseException) -> Position | None:
        """Where the run that raised this error failed; None if the error does not show it."""
        found = self.code.reached(error.__traceback__)
        if found is None:
            return None
        count, values = found
        ran, broken = set(self.code.nodes[:count]), self.code.nodes[count : count + 1]
        return Position(
            owed=[node for node in self.code.nodes if is_collective(node) and node not in ran],
            started=self._started(ran, values),
            communicating=any(is_collective(node) or is_wait(node) for node in broken),
            wrote=any(self._writes(node) for node in (*ran, *broken)),
        )

    def _started(self, ran: Container[fx.Node], values: Mapping[str, Any]) -> list[torch.Tensor]:
        """The results of collectives that nobody has waited for."""
        found = []
        for wait in filter(is_wait, self.code.nodes):
            source = wait.all_input_nodes[0]  # the collective, or one of its results
            while source not in ran and not is_collective(source) and source.all_input_nodes:
                source = source.all_input_nodes[0]
            if wait not in ran and source in ran:
                found += pytree.tree_leaves(values.get(source.name))
        return [value for value in found if isinstance(value, torch.Tensor)]

    def exact(self, place: Position) -> bool:
        """Whether everything that is owed can be sent with its true values."""
        return all(self._chain(source) is not None for node in place.owed for source in node.all_input_nodes)

    def finish(self, place: Position, given: Given) -> None:
        """Waits for what has started, and runs the owed collectives with the other ranks."""
        with torch.no_grad():
            for value in place.started:
                torch.ops._c10d_functional.wait_tensor(value)
            for node in place.owed:
                target, args = self.code.call(node)
                args = fx.node.map_arg(tuple(args), lambda source: self._sent(source, given))
                result = target(*args, **node.kwargs)
                for value in pytree.tree_leaves(result):
                    torch.ops._c10d_functional.wait_tensor(value)

    def _writes(self, node: fx.Node) -> bool:
        """Whether the node writes an input other than a room, which each run fills anew. For a compiled piece: whether
        it writes anything."""
        written = role_of(node) != "store" and any(origin(one).op == "placeholder" for one in mutated(node))
        return written or node.meta.get("writes", False)

    def _sent(self, node: fx.Node, given: Given) -> torch.Tensor:
        chain = self._chain(node)
        if chain is None:
            value = node.meta["val"]
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                raise RuntimeError(f"{node.name} has a size that is known to no other rank: {list(value.shape)}.")
            fill = float("nan") if value.dtype.is_floating_point or value.dtype.is_complex else 0
            if role_of(node) == "pack":
                fill = 0xFF  # in each byte of its scales, which makes them NaN
            return torch.full(tuple(value.shape), fill, dtype=value.dtype, device=value.device)
        first, *rest = chain
        known: dict[fx.Node, Any] = {first: given(self._inputs[first])}
        for step in rest:
            args, kwargs = fx.node.map_arg((step.args, step.kwargs), known.__getitem__)  # type: ignore[misc]
            known[step] = step.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    def _chain(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes from a shard to this one, each made of the one before; None if another tensor takes part."""
        found = [node]
        while (node := found[0]) not in self._inputs:
            inputs = 2 if (role := role_of(node)) == "restored" else 1  # what is on its way, and the shard again
            if (
                role not in ("cast", "pack", "fetch", "restored")
                or len(node.all_input_nodes) != inputs
                or mutated(node)
            ):
                return None
            found.insert(0, node.all_input_nodes[0])
        return found
