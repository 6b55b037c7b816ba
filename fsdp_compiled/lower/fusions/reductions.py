"""Three fusions of reductions: in place, as sums in the place of means, and as exchanges over gloo.

`in_place_all_reduce` makes an all-reduce write into its input, where nothing reads the input afterwards:

    before                                  after

    sum = all_reduce(flat, "avg", "shard")  sum = all_reduce_(flat, "avg", "shard")
    gradient = wait(sum)                    gradient = wait(sum)

PyTorch's functional ``all_reduce`` copies its input and reduces the copy: one read and one write of a whole gradient on
the compute stream (`Functional.cpp`), and twice its memory while both exist. The all-reduces of NCCL and gloo
themselves are in place.

The fusion leaves an all-reduce alone where the program was given the input's memory, or the input is not contiguous. It
does so too where anything in the input's memory is read later, or may still be being read by a collective or a copy to
the host; and along tp, where ranks' parts may differ in shape, with one contiguous and another not.

`sum_reductions` makes the kernel that flattens gradients divide them, too, so that the reduction takes a sum instead of
a mean:

    before                                       after

    flat = flatten([d_up, d_bias], ...)          flat = flatten([d_up, d_bias], ..., 0.125)
    part = reduce_scatter(flat, "avg", "shard")  part = reduce_scatter(flat, "sum", "shard")

For a mean, NCCL multiplies each rank's numbers by 1 / ranks before the sum (`hostToDevRedOp`: ``ncclAvg`` of floats is
``ncclDevPreMulSum``). So the results are the same if the number of ranks is a power of two, and at most a rounding
apart otherwise; but only plain sums are added up inside of switches (NVLS). Along a replicate axis, the all-reduce that
follows becomes a sum, too. A buffer that products write into (`direct_gradients`) has no kernel that could divide it in
passing, and keeps its mean.

`exchange` replaces a reduce-scatter over gloo by an exchange and a sum:

    before                                       after

    part = reduce_scatter(flat, "avg", 4)        rows = all_to_all(flat)      # what each rank has for this one
    part' = wait(part)                           part' = combine(wait(rows), 4, "avg")

gloo has no reduce-scatter: PyTorch all-reduces a copy of the buffer and keeps a slice (ProcessGroupGloo's
``reduce_scatter_tensor_coalesced``), so that each rank sends 2 (W - 1) / W of it where (W - 1) / W would do. The
exchange sums W slices in the order of the ranks, which is not gloo's order, and as close as any. Two numbers have only
one sum, so with two ranks the result is gloo's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor, fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_alias, is_collective, is_wait, mutated, origin, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.plan import Plan

c10d = torch.ops._c10d_functional

torch.library.define("fsdp_compiled_cpu::combine", "(Tensor rows, int world, str how) -> Tensor")


def _combine(rows: Tensor, world: int, how: str) -> Tensor:
    """The sum, or with ``"avg"`` the mean, of ``world`` slices that lie one after the other in the 1-d ``rows``."""
    total = rows.view(world, -1).sum(0)
    return total.div_(world) if how == "avg" else total


torch.library.impl("fsdp_compiled_cpu::combine", "CPU", _combine)
torch.library.register_fake(
    "fsdp_compiled_cpu::combine", lambda rows, world, how: rows.new_empty(rows.numel() // world)
)
combine = torch.ops.fsdp_compiled_cpu.combine.default


def exchange(axes: Collection[str]) -> Callable[[Program, Plan], Program]:
    """The fusion for reductions along these axes, which gloo carries out."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        for node in edit.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
            if role_of(node) == "reduce" and is_over(node, axes):  # others are the model's own
                _exchange(edit, node)
        return edit.done("exchange")

    return transform


def is_over(node: fx.Node, axes: Collection[str]) -> bool:
    """Whether the reduce-scatter is of a flat buffer on CPUs, along one of these axes."""
    (_flat, how, world, axis), part = node.args, node.meta["val"]
    return how in ("sum", "avg") and world > 1 and axis in axes and part.dim() == 1 and part.device.type == "cpu"


def _exchange(edit: Edit, node: fx.Node) -> None:
    flat, how, world, axis = node.args
    slices = [flat.meta["val"].numel() // world] * world  # type: ignore[operator, union-attr]
    waits = [user for user in node.users if is_wait(user)]
    node.target, node.args = c10d.all_to_all_single.default, (flat, slices, slices, axis)
    edit.infer(node)
    for wait in waits:
        edit.infer(wait)
        with edit.at(wait.next, wait.meta["phase"]):
            total = edit.call(combine, wait, world, how, mark=replace(wait.meta["mark"], role="combine"))
        wait.replace_all_uses_with(total, delete_user_cb=lambda user, own=total: user is not own)


aten = torch.ops.aten


def sum_reductions(program: Program, plan: Plan) -> Program:
    """The fusion, on a program whose gradients are flattened by one operator (`flatten_gradients`)."""
    edit, factors = Edit(program), dict[tuple[float, torch.dtype], fx.Node]()
    for flat in edit.graph.find_nodes(op="call_function", target=operators.flatten.default):
        means = _means(flat)
        if not means or any(flat.args[4:]):
            continue
        ranks = 1
        for node in means:
            node.args = tuple("sum" if argument == "avg" else argument for argument in node.args)
            ranks *= plan.size(node.args[-1])
        with edit.at(flat, flat.meta["phase"]):
            key = 1 / ranks, torch.float64 if flat.args[3] == torch.float64 else torch.float32
            if key not in factors:
                options = {"dtype": key[1], "device": plan.device}
                factors[key] = edit.call(aten.full.default, [], key[0], mark=flat.meta["mark"], **options)
        flat.args = (*flat.args[:4], factors[key])
    return edit.done("sum_reductions")


def _means(flat: fx.Node) -> list[fx.Node]:
    """The means over ranks that are taken of it, one after the other, if nothing else reads them."""
    found, node = [], flat
    while len(node.users) == 1:
        (node,) = node.users
        if is_collective(node) and "avg" in node.args:
            found.append(node)
        elif not is_wait(node):
            break
    return found


def in_place_all_reduce(program: Program, plan: Plan) -> Program:
    """Applies the fusion to gradients, and to what ranks report."""
    edit = Edit(program)
    order = positions(edit.graph)
    for node in edit.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if node.args[-1] != "tp" and _is_last(node, order):
            node.target = c10d.all_reduce_.default
            edit.infer(node)
    return edit.done("in_place_all_reduce")


def _is_last(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the all-reduce may write its input."""
    given: fx.Node = node.args[0]  # type: ignore[assignment]
    value = given.meta["val"]
    made_of = _in_memory_of(given)
    if made_of[-1].op != "call_function" or not value.is_contiguous() or value.is_complex():
        return False
    stack = [made_of[-1]]
    for one in stack:
        for user in one.users:
            if is_wait(user) or is_alias(user) or one in mutated(user):
                stack.append(user)
            if user is node or is_wait(user) or user in made_of:
                continue
            if user not in order or order[user] > order[node] or is_collective(user) or role_of(user) == "store":
                return False
    return True


def _in_memory_of(node: fx.Node) -> list[fx.Node]:
    """The value, and earlier nodes in its memory: views, waits, in-place operators, and what made the memory."""
    found = [node]
    while (node := found[-1]).op == "call_function":
        if is_alias(node) or is_wait(node):
            found.append(node.all_input_nodes[0])
        elif (written := origin(node)) is not node:
            found.append(written)
        else:
            break
    return found
