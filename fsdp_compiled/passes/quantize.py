"""Quantizes gathers and reductions to a byte an element, with a scale for every 128: `Policy.wire`.

    before                                  after, "int8"

    full = all_gather(shard)                bytes: uint8[n + n / 32] = pack(shard)
    full' = wait(full)                      all = all_gather(bytes)
                                            full' = unpack(wait(all))

    part = reduce_scatter(flat, "avg")      bytes = pack(flat, ranks, seed)           # a row for each rank
    part' = wait(part)                      rows = all_to_all(bytes)                  # what each rank has for this one
                                            part' = combine(wait(rows), "avg")        # in float32

    total = all_reduce(flat, "avg")         the same, and then
    total' = wait(total)                    all = all_gather(pack(part', seed))
                                            total' = unpack(wait(all))

As in ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209): its qwZ gathers blocks of int8, and its qgZ replaces
a reduction by an exchange, so that a sum is rounded once and not at each hop. Here values to be reduced are rounded at
random (stochastic rounding; Gupta et al., 2015, https://arxiv.org/abs/1502.02551): the mean of a rounded value is the
value itself, and no rank has to keep the errors of whole gradients, as error feedback would. Parameters are rounded to
the nearest, so that every gather of a step gives the same values.

The seed is made of the number of updates, the number of microbatches and the rank along the shard axis. A checkpoint
has all three; ranks along other axes have the same gradients and round them alike. Collectives of integers, and those
that neither gather parameters nor reduce gradients, stay as they are. The pass runs before the passes that decide what
runs when: those see what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, role_of, waits_for
from fsdp_compiled.ir.program import COUNT, RANK, STEP, Program
from fsdp_compiled.kernels.operators import PACKED, operators
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default)


def quantize(program: Program, plan: Plan) -> Program:
    """Replaces gathers of parameters and reductions of gradients. Raises ``ValueError`` for float64."""
    edit = Edit(program)
    sent = [node for node in edit.graph.nodes if role_of(node) in ("gather", "reduce")]
    gradients = [node for node in sent if role_of(node) == "reduce"]
    seed = _seed(edit, plan, gradients[0]) if gradients else None
    salts = count()
    for node in sent:
        _check(node, plan)
        if node.target in GATHERS:
            _gather(edit, node, plan)
        elif seed is not None and _is_real(node.all_input_nodes[0]):
            _reduce(edit, node, plan, seed, salts)
    return edit.done("quantize")


def _check(node: fx.Node, plan: Plan) -> None:
    for source in node.all_input_nodes:
        if _is_real(source) and (dtype := source.meta["val"].dtype) not in PACKED:
            raise ValueError(
                f"Policy.wire={plan.policy.wire!r} rounds what is sent to eight bits, but "
                f"{node.meta['mark'].buffer} is sent in {dtype}. Leave wire out, or have it in float32, "
                "bfloat16 or float16: by the model's dtype or by Policy.precision."
            )


def _is_real(node: fx.Node) -> bool:
    return node.meta["val"].dtype.is_floating_point


def _gather(edit: Edit, node: fx.Node, plan: Plan) -> None:
    """Quantizes a gather of one buffer, or of several that are all floating-point or all not."""
    given, world, axis = node.args
    several = isinstance(given, list | tuple)
    sources: list[fx.Node] = list(given) if several else [given]  # type: ignore[arg-type, list-item]
    if not _is_real(sources[0]):
        return
    waits = waits_for(node)
    before = [wait.meta["val"] for wait in waits]
    packed = [_kept(edit, one) if role_of(one) == "kept" else _pack(edit, one, 1, node, plan) for one in sources]
    node.args = (packed if several else packed[0], world, axis)
    for one in dict.fromkeys((node, *(wait.all_input_nodes[0] for wait in waits), *waits)):
        edit.infer(one)
    for wait, value in zip(waits, before, strict=True):

        def unpacked(wait: fx.Node, mark: Any, value: torch.Tensor = value) -> fx.Node:
            count, dtype = value.numel(), value.dtype
            rows, form = plan.shard, plan.policy.wire
            return edit.call(operators.unpack.default, wait, rows, count, dtype, form=form, mark=mark)

        _behind(edit, wait, "unpack", unpacked)


def _kept(edit: Edit, part: fx.Node) -> fx.Node:
    """Lets what a rank keeps between forward and backward (`passes.recompute`) be the bytes that it got. Returns it."""
    chain = [part]
    while role_of(chain[-1]) == "kept":
        chain.append(chain[-1].all_input_nodes[0])
    *kept, unpacked = chain
    (wait,) = unpacked.all_input_nodes
    kept[-1].replace_input_with(unpacked, wait)
    size = wait.meta["val"].numel() // kept[-1].args[1][0]  # type: ignore[index, operator]
    kept[-1].args = (wait, [kept[-1].args[1][0], size])  # type: ignore[index]
    kept[0].args = (kept[0].args[0], [size])
    for node in reversed(kept):
        edit.infer(node)
    return part


def _reduce(edit: Edit, node: fx.Node, plan: Plan, seed: fx.Node, salts: Iterator[int]) -> None:
    flat, how, axis = node.args[0], node.args[1], node.args[-1]
    assert isinstance(flat, fx.Node)
    world, whole, form = plan.size(str(axis)), node.meta["val"], plan.policy.wire
    scattered = node.target is c10d.reduce_scatter_tensor.default
    own = -(-flat.meta["val"].numel() // world)
    (wait,) = node.users
    packed = _pack(edit, flat, world, node, plan, seed, next(salts))
    parts = [packed.meta["val"].numel() // world] * world
    node.target, node.args = c10d.all_to_all_single.default, (packed, parts, parts, axis)
    edit.infer(node)
    edit.infer(wait)

    def total(wait: fx.Node, mark: Mark) -> fx.Node:
        dtype = whole.dtype if scattered else torch.float32
        options = {"form": form, "mean": how == "avg"}
        part = edit.call(operators.combine.default, wait, world, own, dtype, **options, mark=mark)
        if scattered:
            return part
        sent = edit.call(operators.pack.default, part, 1, seed, next(salts), form=form, mark=replace(mark, role="pack"))
        gather = c10d.all_gather_into_tensor.default
        rows = edit.call(gather, sent, world, axis, mark=replace(mark, role="reduce", purpose="gather"))
        rows = edit.call(c10d.wait_tensor.default, rows, mark=replace(mark, role="wait"))
        return edit.call(operators.unpack.default, rows, world, whole.numel(), whole.dtype, form=form, mark=mark)

    _behind(edit, wait, "combine", total)


def _pack(
    edit: Edit, value: fx.Node, rows: int, node: fx.Node, plan: Plan, seed: fx.Node | None = None, salt: int = 0
) -> fx.Node:
    mark = Mark("pack", node.meta["mark"].unit, node.meta["mark"].buffer)
    noise = () if seed is None else (seed, salt)
    with edit.at(node, node.meta["phase"]):
        return edit.call(operators.pack.default, value, rows, *noise, form=plan.policy.wire, mark=mark)


def _behind(edit: Edit, wait: fx.Node, role: str, make: Callable[[fx.Node, Mark], fx.Node]) -> None:
    """Replaces the result of this wait by what ``make`` makes of it."""
    users = list(wait.users)
    with edit.at(wait.next, wait.meta["phase"]):
        found = make(wait, replace(wait.meta["mark"], role=role))
    for user in users:
        user.replace_input_with(wait, found)


def _seed(edit: Edit, plan: Plan, first: fx.Node) -> fx.Node:
    """The seed, int64: different for every step, microbatch and rank along the shard axis."""
    mark = Mark("pack")

    step, rank = (edit.input(port, shape, torch.int64, plan.device) for port, shape in ((STEP, []), (RANK, [1])))
    with edit.at(first, first.meta["phase"]):
        seed = edit.call(aten.mul.Tensor, step, 2**20, mark=mark)
        if COUNT in edit.inputs:
            batches = edit.call(aten._to_copy.default, edit.inputs[COUNT], dtype=torch.int64, mark=mark)
            seed = edit.call(aten.add.Tensor, seed, batches, mark=mark)
        seed = edit.call(aten.mul.Tensor, seed, plan.shard, mark=mark)
        return edit.call(aten.add.Tensor, seed, rank, mark=mark)
