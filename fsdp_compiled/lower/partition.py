"""Cuts a program at its collectives and blocks, into pieces that are compiled and nodes that run as they stand.

    program                                        segments

    full = all_gather(shard); wait                 full = all_gather(shard); wait
    weight = view(slice(full))                     block = slice(full)
    y = gelu(mm(x, t(weight)))       # layers.0    y = piece_a(block, x)
    other = view(slice(full))                      block' = slice(full)
    z = gelu(mm(y, t(other)))        # layers.1    z = piece_a(block', y)

A *piece* is the compute between two cuts. The views that it reads are repeated inside, so that it takes and returns
whole tensors and no aliases. A cut is where the order must be kept (collectives, waits, random operators), and where
equal blocks and buffers begin and end, so that they make equal pieces; equal pieces have equal keys. Compute on no more
than a few numbers is not worth a compilation and runs as it stands. So does an update in half precision: as it stands
it rounds after each operator, as the optimizer does. Compiled, it would round only where memory is written, and the
optimizer's sums over steps would drift from those of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compiled.analysis.roofline import flops, nbytes
from fsdp_compiled.ir.nodes import ASSERT, HOST, is_collective, is_random, is_wait, mutated, origin, role_of
from fsdp_compiled.kernels.aten_operators import join_rows, split_rows
from fsdp_compiled.kernels.operators import KERNELS
from fsdp_compiled.lower.piece import FEW, Piece, is_borrowed, is_size, is_tensor, numel
from fsdp_compiled.plan.units import innermost

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
EXACT = (aten.copy_.default, aten._to_copy.default, aten.clone.default, aten.zero_.default)  # exact, or rounded once
SHORT = 2  # operators; a piece of this many or fewer is not compiled


def segments(graph: fx.Graph, blocks: Collection[str] = ()) -> list[fx.Node | Piece]:
    """The graph's calls in order: nodes that run as they stand, and pieces; views that pieces repeat are left out."""
    cutter = _Cutter(graph, blocks)
    for node in graph.nodes:
        if node.op == "call_function":
            cutter.add(node)
    found: list[fx.Node | Piece] = []
    for run in _whole(cutter):
        if isinstance(run, fx.Node) and _is_copied(run):
            if run.target is split_rows:
                found.append(Piece([run, *sorted(run.users, key=lambda part: part.args[1])]))
        elif isinstance(run, fx.Node):
            found.append(run)
        elif _is_slight(run) or _rounds(run):
            found += run
        else:
            piece = Piece(run)
            if piece.outputs or piece.writes:
                found.append(piece)
    return found


def _is_copied(node: fx.Node) -> bool:
    """Whether the node splits rows of several parameters on a CPU, or is one of these: compiled as one, in the place of
    a copy for each. On a GPU they are one kernel as they stand."""
    source = node.args[0] if node.target is getitem else node
    return (
        isinstance(source, fx.Node)
        and source.target is split_rows
        and source.all_input_nodes[0].meta["val"].device.type == "cpu"
        and len(source.users) > SHORT
    )


def _rounds(run: list[fx.Node]) -> bool:
    """Whether the run adds gradients up, or updates from them, in half precision."""
    return any(
        is_tensor(value.meta["val"]) and value.meta["val"].dtype in HALF and numel(value) > FEW
        for node in run
        if role_of(node) in ("update", "sum") and node.target not in EXACT
        for value in (node, *node.all_input_nodes)
    )


def _is_room(node: fx.Node) -> bool:
    """Whether the node makes a flat buffer that products write gradients into (`direct_gradients`)."""
    return node.target is aten.empty.memory_format and role_of(node) == "flatten"


def _is_slight(nodes: list[fx.Node]) -> bool:
    """Whether compiling would gain nothing: arithmetic on a few numbers, or a lone operator or two."""
    if all(numel(node) <= FEW for node in nodes):
        return all(numel(source) <= FEW for node in nodes for source in node.all_input_nodes)
    fused = any(getattr(node.target, "namespace", "") == "fsdp_compiled" for node in nodes)
    return len(nodes) <= SHORT and not fused


def _stands_alone(node: fx.Node) -> bool:
    role = role_of(node)
    return (
        is_collective(node)
        or is_wait(node)
        or is_random(node)
        or node.target in (ASSERT, aten.linalg_vector_norm.default, split_rows, join_rows, *KERNELS)
        or role in ("part", "kept", "cast", "pack", "unpack", "combine", *HOST)
        or (role == "update" and not node.meta["mark"].unit)  # module buffers, each written back by a copy
    )


def _whole(cutter: _Cutter) -> list[fx.Node | list[fx.Node]]:
    """The runs, with the first and last operators of a block, which a collective cut off, joined to the block again.

        mm            # layers.1: needs no weight               full = gather; wait
        full = gather; wait                                     mm, ..., mm, add
        ..., mm       # the last gradient              ->       part = reduce_scatter(cat(...))
        part = reduce_scatter(cat(...))
        add           # what is left of layers.1

    So that a block makes the same piece whether or not a unit begins or ends with it. A norm that hands on float32 is
    joined to the piece that multiplies by its weight: to write and read that takes longer than the norm, which can then
    no longer run while the block's weights arrive. One that hands on what the products read stays in front of the wait.
    """
    kept: list[fx.Node | list[fx.Node]] = []
    between: list[fx.Node] = []
    before: list[fx.Node] | None = None
    for run in cutter.runs:
        if isinstance(run, fx.Node):
            between.append(run)
            kept.append(run)
            continue
        if before is not None and cutter.places[before[0]] == cutter.places[run[0]]:
            changed = {origin(target) for node in between for target in mutated(node)}
            if _is_movable(run) and not any(_reads(node, changed.union(between)) for node in run):
                before += run
                continue
            if (_is_movable(before) or _hands_more(before)) and not (
                any(_reads(node, set(before)) for node in between) or any(_reads(node, changed) for node in before)
            ):
                kept.remove(before)
                run[:0] = before
        kept.append(run)
        before, between = run, []
    return kept


def _is_movable(run: list[fx.Node]) -> bool:
    return len(run) <= SHORT and not any(mutated(node) for node in run)


def _hands_more(run: list[fx.Node]) -> bool:
    """Whether the run multiplies no matrices and makes more bytes than it reads, such as a norm before its weight: a
    piece by itself would write them to memory for the next piece to read."""
    piece = Piece(run)
    given, made = (sum(nbytes(node.meta["val"]) for node in nodes) for nodes in (piece.inputs, piece.outputs))
    return made > given and not any(mutated(node) or flops(node) for node in run)


def _reads(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether the node reads one of these nodes, itself or through views."""
    return any(source in others or (is_borrowed(source) and _reads(source, others)) for source in node.all_input_nodes)


class _Cutter:
    """Takes a program's nodes in order and lays them into runs, each to become a piece or to stand alone."""

    def __init__(self, graph: fx.Graph, blocks: Collection[str]) -> None:
        self.blocks = tuple(blocks)
        self.runs: list[fx.Node | list[fx.Node]] = []
        self.open: list[fx.Node] | None = None
        self.place: tuple[Any, ...] = ("",)  # of the open run
        self.block = self.previous = ""  # the current block, and the one before
        self.run_of: dict[fx.Node, list[fx.Node]] = {}  # the run of each node
        self.known: dict[str, str | None] = {}
        self.places: dict[fx.Node, tuple[Any, ...]] = {}
        self.mixed = self._mixed(graph)

    def add(self, node: fx.Node) -> None:
        if role_of(node) == "block" or is_borrowed(node):
            return
        if is_size(node) or _is_room(node):  # before the open run, which it does not need
            self.runs.insert(len(self.runs) - (self.open is not None), node)
        elif node.target is getitem:
            self._follow_source(node)
        elif _stands_alone(node) or (role_of(node) == "flatten" and node.meta["mark"].buffer in self.mixed):
            self.runs.append(node)
            self.open = None
        elif not self._extends_group(node):
            place = self._place(node)
            if self.open is None or place != self.place:
                self.open, self.place = [], place
                self.runs.append(self.open)
                self.places[node] = place
            self._lay(node, self.open)

    def _lay(self, node: fx.Node, run: list[fx.Node]) -> None:
        run.append(node)
        self.run_of[node] = run

    def _follow_source(self, node: fx.Node) -> None:
        """Keeps one of several results with the node that made them."""
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if source in self.run_of:
            self._lay(node, self.run_of[source])
        else:
            self.runs.insert(self.runs.index(source) + 1, node)

    def _place(self, node: fx.Node) -> tuple[Any, ...]:
        """Equal for nodes of one piece: the phase, and the buffer or block."""
        mark, phase = node.meta.get("mark"), node.meta["phase"]
        if mark and mark.role in ("update", "sum"):
            return phase, mark.role, mark.unit, mark.buffer
        if self.place[0] != phase:
            self.previous = self.block
        block = None if mark else self._block(node)
        # Not back to the block before: the operators of two neighbours alternate where they meet.
        if block is not None and block not in (self.block, self.previous):
            self.block, self.previous = block, self.block
        return phase, self.block

    def _block(self, node: fx.Node) -> str | None:
        """The node's block; empty for the rest of the model; None where the node may count as either."""
        path = node.meta.get("path", "")
        if path not in self.known:
            inside = innermost([path], self.blocks)
            around = path in ("", "(model)") or any(block.startswith(f"{path}.") for block in self.blocks)
            self.known[path] = inside if inside is not None or around else ""
        return self.known[path]

    def _mixed(self, graph: fx.Graph) -> set[str]:
        """Buffers with gradients of several blocks; flattened apart, so that the blocks' pieces stay equal."""
        found = set()
        cats = (aten.cat.default, join_rows)
        for node in (one for cat in cats for one in graph.find_nodes(op="call_function", target=cat)):
            if role_of(node) == "flatten":
                gradients = [near for source in node.all_input_nodes for near in _before_flatten(source)]
                if len({self._block(gradient) for gradient in gradients} - {None}) > 1:
                    found.add(node.meta["mark"].buffer)
        return found

    def _extends_group(self, node: fx.Node) -> bool:
        """Adds a pure operator on an optimizer group's numbers to the group's run before the updates of buffers."""
        mark = node.meta.get("mark")
        if not mark or mark.role != "update" or mark.buffer or mutated(node):
            return False
        sources = [origin(source) for source in node.all_input_nodes]
        for run in reversed(self.runs):
            if isinstance(run, fx.Node) and role_of(run) in HOST:  # copies elements, not these numbers
                continue
            other = run[0].meta.get("mark") if isinstance(run, list) else None
            if not isinstance(run, list) or not other or other.role != "update":
                return False
            if other.unit == mark.unit and not other.buffer:
                self._lay(node, run)
                return True
            if any(self.run_of.get(source) is run or source in mutated(place) for source in sources for place in run):
                return False
        return False


def _before_flatten(node: fx.Node) -> list[fx.Node]:
    """The gradient that a part of the flat buffer was made from; none for padding."""
    while role_of(node) == "flatten" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return [] if role_of(node) == "flatten" else [node]
