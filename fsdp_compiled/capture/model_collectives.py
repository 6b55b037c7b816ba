"""Collectives that the model or the loss calls by itself: counts of tokens, a contrastive loss over all ranks' rows.

    eager                                          program

    dist.all_reduce(count)                         count = all_reduce(count, "sum", "all 4 ranks"); wait
    dist.all_gather(parts, y)                      whole = all_gather(detach(y), 4, "all 4 ranks"); wait
    nn.functional.all_reduce(y, group=half)        z = all_reduce(y, "sum", "group 0 of 2 ranks"); wait

A program has its own names for axes and groups, since the names of process groups differ from rank to rank. Autograd
does not see the functions of ``torch.distributed``: no gradient flows back through them. But Dynamo traces them as
functional collectives, which have derivatives; `without_derivatives` removes these. The functions of
``torch.distributed.nn.functional`` have derivatives and refuse to be traced. This file has functions that Dynamo traces
in their place, with the same sums in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.layers_across_ranks import AllGather
from fsdp_compiled.capture.source_lines import user_line
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.ir.program import Program
from fsdp_compiled.torch_private.names import substitute

c10d = torch.ops._c10d_functional
DIFFERENTIABLE = "torch.distributed.nn.functional"
INPLACE = "_inplace\n"  # ends the names of Dynamo's substitutes for torch.distributed's functions in a stack trace
# The names of autograd nodes that stand for a write, or for a view of a written tensor, begin with these.
WRITTEN = (
    "CopyBackwards",
    "CopySlices",
    "AsStrided",
    "Select",
    "Slice",
    "View",
    "Unbind",
    "Split",
    "Squeeze",
    "Unsqueeze",
)
Op = dist.ReduceOp
SUMS = {Op.SUM: "sum", Op.AVG: "avg", Op.PRODUCT: "product", Op.MIN: "min", Op.MAX: "max"}  # as a program names them


def without_derivatives(module: fx.GraphModule) -> None:
    """Changes Dynamo's graph in place so that no gradient flows back through functions of ``torch.distributed``.

    Raises `CaptureError` if one of them writes a tensor that requires a gradient: autograd would use the derivative of
    the tensor's old value.
    """
    for graph, own in _graphs(module):
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or INPLACE not in (node.stack_trace or ""):
                continue
            if node.target == "copy_" and own and _had_gradient(node.args[0]):
                raise CaptureError(
                    "A collective of torch.distributed writes a tensor that requires a gradient, of which autograd "
                    f"knows nothing.\n{user_line(RuntimeError(node.stack_trace))}\n"
                    "  Cure: give it a tensor of its own, value.detach().clone(); or, for its derivative, call "
                    "torch.distributed.nn.functional.all_reduce."
                )
            if getattr(node.target, "namespace", str(node.target).partition(".")[0]) == "_c10d_functional":
                for source in [one for one in node.all_input_nodes if _has_gradient(one)]:
                    with graph.inserting_before(node):
                        detached = graph.call_method("detach", (source,))
                    detached.meta["example_value"] = source.meta["example_value"].detach()
                    node.replace_input_with(source, detached)


def _graphs(module: fx.GraphModule) -> Iterator[tuple[fx.Graph, bool]]:
    """The graph and the graphs inside it, each with whether it is outside of any ``autograd.Function``."""
    inside = {
        str(value.target)
        for one in module.modules()
        if isinstance(one, fx.GraphModule)
        for node in one.graph.nodes
        if "autograd_function" in str(node.target)
        for value in node.args
        if isinstance(value, fx.Node) and value.op == "get_attr"
    }
    for name, one in module.named_modules():
        if isinstance(one, fx.GraphModule):
            yield one.graph, name.rpartition(".")[2] not in inside


def _has_gradient(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


def _had_gradient(node: Any) -> bool:
    """Whether a tensor required a gradient before such functions wrote it, with copies that have derivatives."""
    made = node.meta["example_value"].grad_fn
    while made is not None and type(made).__name__.startswith(WRITTEN):
        made = made.next_functions[0][0]
    return made is not None


class _AllReduce(torch.autograd.Function):
    """The sum over ranks. In backward, the gradient of each rank's tensor is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        ctx.op, ctx.group = op, group
        return c10d.wait_tensor(c10d.all_reduce(tensor.contiguous(), op, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return c10d.wait_tensor(c10d.all_reduce(gradient.contiguous(), ctx.op, ctx.group)), None, None


def _all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = dist.group.WORLD) -> torch.Tensor:
    group = group or dist.group.WORLD
    return _AllReduce.apply(tensor, "sum" if op is None else SUMS[op], group.group_name)


def _all_gather(tensor: torch.Tensor, group: Any = dist.group.WORLD) -> tuple[torch.Tensor, ...]:
    group = group or dist.group.WORLD
    # NCCL sums with a reduce-scatter; with other backends the sum is computed here, as PyTorch does.
    scatters = dist.get_backend(group) in ("nccl", "xccl")
    return AllGather.apply(tensor.contiguous()[None], group.group_name, group.size(), scatters).unbind(0)


def trace_differentiable() -> None:
    """From now on Dynamo traces these functions in the place of PyTorch's, which refuse to be traced."""
    if (found := sys.modules.get(DIFFERENTIABLE)) is not None:
        substitute(found.all_reduce, _all_reduce)
        substitute(found.all_gather, _all_gather)


def name_axes(program: Program, mesh: DeviceMesh | None, groups: dict[str, str] | None) -> None:
    """In the collectives of a new program, replaces the name of the process group, which differs from rank to rank, by
    the tp axis or by the program's name for the model's own group.

    ``groups``: the groups by their names in programs; the model's own groups are added to it. None: the model may have
    none. All ranks add groups in the same order, since they trace the same collectives.
    """
    ranks = mesh.mesh.tolist() if mesh is not None else []
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_collective(node) or node.args[-1] in ("shard", "replicate"):
            continue
        name = str(node.args[-1])
        group = dist.distributed_c10d._resolve_process_group(name)
        _check_splits(node)
        if ranks and dist.get_process_group_ranks(group) == ranks:  # equal meshes may have groups of their own
            node.args = (*node.args[:-1], "tp")
        elif groups is not None and not ranks:
            node.args = (*node.args[:-1], _named(name, group, groups))
        else:
            raise CaptureError(
                f"The model or the loss calls a collective ({node.target}) over a process group of its own. A program "
                "knows the axes of the mesh alone where one of them is tp, or ranks are simulated: give it "
                'group=mesh["tp"], as experts do that tokens are sent to; or call it outside, in a loop of your own.'
            )


def _named(name: str, group: dist.ProcessGroup, groups: dict[str, str]) -> str:
    """The name that programs use for this group of the model's own."""
    size, own = group.size(), {"shard", "replicate", "tp"}
    said = f"all {size} ranks" if size == dist.get_world_size() else ""
    said = said or next((one for one, other in groups.items() if other == name and one not in own), "")
    said = said or f"group {len(groups.keys() - own)} of {size} ranks"
    groups[said] = name
    return said


def _check_splits(node: fx.Node) -> None:
    """Raises `CaptureError` if an all-to-all has pieces of different sizes: nothing checks that the ranks agree on
    them."""
    if node.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return
    splits = [*node.args[1], *node.args[2]]  # type: ignore[misc]
    if any(type(size) is not int or size != splits[0] for size in splits):
        shown = ", ".join(str(list(sizes)) for sizes in node.args[1:3])  # type: ignore[call-overload]
        raise CaptureError(
            f"The model sends pieces of different sizes along tp ({node.target}, {shown}). Give each rank as much: "
            "experts with room for a fixed number of tokens, and split sizes left out (None)."
        )
