"""Flattens, casts and divides a unit's gradients in one pass over memory; products write their gradients directly into
the buffer that is sent.

`flatten_gradients`:

    before                                     after

    d_up' = reshape(d_up, [4096])              flat = flatten([d_up, d_bias], [0, 4096], 4224, bfloat16)
    flat = cat([d_up', d_bias, zeros])
    flat' = _to_copy(flat, dtype=bfloat16)

`direct_gradients`:

    before                                     after

    d_up = mm(t(d_y), x)                       flat = empty([4224])
    d_bias = sum(d_y, 0)                       product_(flat, 0, t(d_y), x)
    flat = flatten([d_up, d_bias], [0, 4096])  d_bias = sum(d_y, 0)
                                               flatten_(flat, [d_bias], [4096], [0, 4096])

A weight's gradient is then neither read nor written a second time, and never in memory twice; `flatten_` copies the
other gradients to their places and clears the padding. This applies to a product that nothing else reads, in the dtype
of the reduction; with ``Policy.unrounded_gradients`` also to one in half precision that is reduced in float32:

    d_up: bfloat16 = mm(t(d_y), x)             flat: float32 = empty([4224])
    flat: float32 = flatten([d_up, ...], ...)  product_(flat, 0, t(d_y), x)

which writes 4 bytes an element instead of writing 2, reading 2 and writing 4. A product sums in float32 anyhow, so only
its rounding is left out: the gradient is nearer to the true one, but no longer equal to FSDP2's bit for bit.

Other gradients are small (biases, norms), or are sums of several gradients, or are cast on the way; a flatten handles
these. The fusion leaves a product alone where Inductor has something better: where it is told to choose among kernels,
and on a GPU where it pads a product whose sides are no multiple of 16 bytes (such a product takes longer than a copy).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, fake_mode, first, is_view, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.aten_operators import product_
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.units import innermost

aten = torch.ops.aten


def flatten_gradients(program: Program, plan: Plan) -> Program:
    """Replaces the nodes by which `reduce` flattens each buffer's gradients with one operator."""
    edit = Edit(program)
    for node in edit.graph.find_nodes(op="call_function", target=aten.cat.default):
        if role_of(node) == "flatten":
            _fuse(edit, node, plan)
    return edit.done("flatten_gradients")


def _fuse(edit: Edit, cat: fx.Node, plan: Plan) -> None:
    sources, places, filled = [], [], 0
    for part in cat.args[0]:  # type: ignore[union-attr]
        laid = role_of(part) == "flatten"
        if not (laid and part.target is aten.full.default):  # zeros that pad the buffer
            sources.append(part.args[0] if laid and part.target is aten.reshape.default else part)
            places.append(filled)
        filled += part.meta["val"].numel()
    if not sources:
        return
    *_, flat = (cat, *_after(cat))
    divisor = next((node.args[1] for node in _after(cat) if node.target is aten.div.Tensor), None)
    mark = cat.meta["mark"]
    with edit.at(flat, flat.meta["phase"]):
        scale = None
        if divisor is not None:
            options = {"dtype": torch.float32, "device": plan.device}
            scale = edit.call(aten.full.default, [], 1 / divisor, mark=mark, **options)  # type: ignore[operator]
        fused = edit.call(operators.flatten.default, sources, places, filled, flat.meta["val"].dtype, scale, mark=mark)
    flat.replace_all_uses_with(fused)


def _after(cat: fx.Node) -> Iterator[fx.Node]:
    """The cast and the division that follow, if nothing else reads what is cast and divided."""
    node = cat
    for role, target in (("flatten", aten._to_copy.default), ("scale", aten.div.Tensor)):
        (user, *others) = node.users
        if not others and role_of(user) == role and user.target is target:
            node = user
            yield node


PRODUCTS = (aten.mm.default, aten.bmm.default)
ALIGNED = 16  # bytes
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Direct:
    """A product that becomes part of a flat buffer, the views between the two, and its offset in the buffer."""

    node: fx.Node
    views: tuple[fx.Node, ...]
    start: int
    block: str | None

    @property
    def stop(self) -> int:
        return self.start + int(self.node.meta["val"].numel())


def direct_gradients(program: Program, plan: Plan) -> Program:
    """The fusion, on a program whose gradients are flattened by one operator (`flatten_gradients`)."""
    edit = Edit(program)
    write(edit.graph, plan.blocks, plan.policy.unrounded_gradients)
    return edit.done("direct_gradients")


def write(graph: fx.Graph, blocks: Collection[str] = (), unrounded: bool = False) -> None:
    """Makes products write into the flat buffer that holds them. ``blocks``: names of submodules that may be alike;
    their products are placed relative to the block's first one, so that their pieces stay equal. ``unrounded``:
    products in half precision write into a buffer of float32."""
    for flat in graph.find_nodes(op="call_function", target=operators.flatten.default):
        gradients, offsets, _, dtype, *scale = flat.args
        if not any(scale):
            found = [
                Direct(*one, offset, innermost([one[0].meta.get("path", "")], tuple(blocks)))
                for gradient, offset in zip(gradients, offsets, strict=True)
                if gradients.count(gradient) == 1 and (one := _made_by(gradient, dtype, unrounded))  # type: ignore[union-attr]
            ]
            if found:
                _rewrite(graph, flat, found)


def _made_by(gradient: fx.Node, dtype: Any, unrounded: bool) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The product that makes the gradient, as it lies in memory, and the views from the one to the other."""
    node, views = gradient, []
    while (is_view(node) or node.target is aten._unsafe_view.default) and len(node.users) == 1:
        views.append(node)
        node = node.all_input_nodes[0]
    if node.target not in PRODUCTS or len(node.users) != 1 or node.kwargs:
        return None
    made, seen, left = node.meta["val"], gradient.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    sides = (*made.shape[-2:], left.shape[-1])
    widens = unrounded and made.dtype in HALF and dtype == torch.float32
    if made.dtype != seen.dtype or not (made.dtype == dtype or widens):
        return None
    if not all(isinstance(size, int) for size in (*made.shape, *sides)):
        return None
    if made.device.type == "cuda" and any(side * made.dtype.itemsize % ALIGNED for side in sides):
        return None
    as_it_lies = made.is_contiguous() and seen.is_contiguous() and made.numel() == seen.numel() > 0
    return (node, tuple(views)) if as_it_lies else None


def _rewrite(graph: fx.Graph, flat: fx.Node, found: Sequence[Direct]) -> None:
    gradients, offsets, numel, dtype, *_ = flat.args
    meta = {key: value for key, value in flat.meta.items() if key != "val"}
    begin = first((one.node for one in found), positions(graph))
    early = {**meta, "phase": begin.meta["phase"]}
    with graph.inserting_before(begin), fake_mode(graph):
        device = flat.meta["val"].device
        whole = graph.call_function(aten.empty.memory_format, ([numel],), {"dtype": dtype, "device": device})
        whole.meta = {**early, "val": torch.empty(numel, dtype=dtype, device=device)}  # type: ignore[arg-type]
        bases = {}
        for block, start, stop in _stretches(found):
            part = graph.call_function(aten.slice.Tensor, (whole, 0, start, stop))
            mark = Mark("block", flat.meta["mark"].unit, flat.meta["mark"].buffer)
            part.meta = {**early, "mark": mark, "val": aten.slice.Tensor(whole.meta["val"], 0, start, stop)}
            bases[block] = part, start
    with graph.inserting_before(flat):
        direct = {view for one in found for view in (one.node, *one.views)}
        rest = [(node, offset) for node, offset in zip(gradients, offsets, strict=True) if node not in direct]  # type: ignore[arg-type]
        kept = [bound for one in found for bound in (one.start, one.stop)]
        arguments = (whole, [node for node, _ in rest], [offset for _, offset in rest], kept)
        graph.call_function(operators.flatten_.default, arguments).meta = {**meta, "val": None}
    flat.replace_all_uses_with(whole)
    graph.erase_node(flat)
    for one in found:
        base, start = bases[one.block]
        with graph.inserting_before(one.node):
            made = graph.call_function(product_, (base, one.start - start, *one.node.args))
            made.meta = {**one.node.meta, "val": None}
        for node in (*one.views, one.node):
            graph.erase_node(node)


def _stretches(found: Sequence[Direct]) -> Iterator[tuple[str | None, int, int]]:
    """For each block, the range from its first product's place to its last one's end."""
    for block in dict.fromkeys(one.block for one in found):
        mine = [one for one in found if one.block == block]
        yield block, mine[0].start, mine[-1].stop
