"""Finds which values of the captured program are the same on all ranks along the tp axis, and which differ.

    weight: float32[4, 16]         a shard                                                     differs
    x: float32[2, 16]              the batch, which is the same on all ranks                   same
    y = mm(x, weight.t())          computed from a shard                                       differs
    z = all_reduce(y, "tp")        the sum over all ranks                                      same
    m = tokens < 16                < 0 on another rank, whose vocabulary begins elsewhere      differs

If a plan for `parallelize_module` forgets something, eager PyTorch goes on training: each rank gets a different
gradient for a weight that all of them hold whole, and the copies drift apart. Here that is an error before the first
step:

- *Gradients of whole parameters*, *the loss*, and *new values of buffers* must be the same on every rank along tp.
- *Random numbers* are the same where they meet values that are the same, and differ where they meet values that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.side_effects import some
from fsdp_compiled.ir.nodes import Bare, is_collective, is_random
from fsdp_compiled.ir.program import LOSS, Port, Program
from fsdp_compiled.plan.plan import Plan

c10d = torch.ops._c10d_functional
# The results of these collectives are the same on all ranks of the axis.
UNITING = (
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.broadcast.default,
)
CURE = (
    "Where what a plan makes goes on as a plain tensor, each rank has its own part: see that it is summed or gathered "
    "before (output_layouts=Replicate()), or name the module that goes on with it in the plan (SequenceParallel())."
)


def digests(program: Program, constants: Mapping[str, torch.Tensor]) -> list[bytes]:
    """One hash for each node, of how it computes its value from the program's inputs. It is equal on two ranks if the
    node does the same on both.

    A collective along tp is identified by its number in the program; a draw of random numbers also by its own.
    """
    ports = {node: port for port, node in program.inputs.items()}
    found: dict[fx.Node, bytes] = {}
    sent, drawn = 0, 0

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return Bare(found[leaf].hex())
        return leaf.type if isinstance(leaf, torch.device) else leaf

    for node in program.graph.nodes:
        sends = node.op == "call_function" and is_collective(node) and node.args[-1] == "tp"
        if node in ports:
            said = str(ports[node])
        elif sends:
            said = str(sent := sent + 1)
        else:
            said = repr(fx.node.map_aggregate((node.args, node.kwargs), plain))
            if is_random(node):
                said += f" {(drawn := drawn + 1)}"
        port = ports.get(node)
        value = constants.get(port.name) if port is not None and port.kind == "constant" else None
        if value is not None:
            value = value.detach().cpu().contiguous().reshape(-1)
            numbers = value.view(torch.uint8) if value.numel() else value
            said += hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
        operator = node.target if node.op == "call_function" else node.op
        found[node] = hashlib.sha256(f"{operator}{said}".encode()).digest()[:8]
    return list(found.values())


def differing(program: Program, plan: Plan, own: Sequence[bytes], found: Sequence[Sequence[bytes]]) -> set[fx.Node]:
    """The nodes whose values differ between ranks along tp. ``own``: this rank's digests; ``found``: each rank's.

    The derivative by a result differs where the result differs.
    """
    parts = {slot.name for buffer in plan.buffers if buffer.split for slot in buffer.slots}
    common = set(own).intersection(*found)
    apart = {node for node, said in zip(program.graph.nodes, own, strict=True) if said not in common}
    apart |= {node for port, node in program.inputs.items() if port.kind == "parameter" and port.name in parts}
    different = _spread(program, apart)
    results = {port.key for port, node in program.outputs.items() if port.kind == "result" and node in different}
    tangents = {node for port, node in program.inputs.items() if port.kind == "tangent" and port.key in results}
    return _spread(program, apart | tangents) if tangents else different


def _spread(program: Program, apart: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose values differ if those of ``apart`` do."""
    different: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and is_collective(node) and node.args[-1] == "tp":
            if node.target not in UNITING:
                different.add(node)
        elif node in apart or any(source in different for source in node.all_input_nodes):
            different.add(node)
    return different


def check_same(
    program: Program, plan: Plan, different: Collection[fx.Node], parts: Collection[Port] = (), loop: bool = False
) -> None:
    """Raises `CaptureError` where ranks along tp would drift apart.

    ``parts``: the results that are shards of DTensors. ``loop``: the user's own training loop calls backward.
    """
    cut = {slot.name for buffer in plan.buffers if buffer.split for slot in buffer.slots}
    outputs = {port: node for port, node in program.outputs.items() if node is not None and node in different}
    if LOSS in outputs:
        raise CaptureError(
            f"The loss is computed of what ranks along the tp axis have parts of, and differs between them. {CURE}"
        )
    apart = [port for port in outputs if port.kind == "result" and port not in parts] if loop else []
    if apart and any(port.kind == "parameter gradient" for port in program.outputs):
        raise CaptureError(
            f"What the model returns ({apart[0].key}) is a plain tensor of what this rank along the tp axis has a part "
            "of: a loss of it would be another on each rank. Gather it, output_layouts=Replicate(), or return it as a "
            "DTensor, use_local_output=False, for loss_parallel."
        )
    if odd := [port.name for port in outputs if port.kind == "parameter gradient" and port.name not in cut]:
        raise CaptureError(
            f"{some(odd)} {'are' if len(odd) > 1 else 'is'} whole on every rank along the tp axis, but "
            f"{'their gradients are' if len(odd) > 1 else 'its gradient is'} of what that rank has a part of: it would "
            f"be another on each, and the copies would part. {CURE}"
        )
    if odd := [str(port) for port in outputs if port.kind in ("buffer", "constant")]:
        raise CaptureError(
            f"Forward writes to {some(odd)} what differs between ranks along the tp axis, which have it in common. "
            f"{CURE}"
        )


def mark_random(program: Program, plan: Plan, different: Collection[fx.Node]) -> None:
    """Marks each draw of random numbers for which ranks along tp draw the same numbers."""
    drawn = [node for node in program.graph.nodes if node.op == "call_function" and is_random(node)]
    for node in drawn:
        if node not in different:
            node.meta["shared"] = True
    if plan.device.type == "cuda" and 0 < sum("shared" in node.meta for node in drawn) < len(drawn):
        raise CaptureError(
            "Dropout, or another draw of random numbers, meets parts in one place and what all ranks along the tp axis "
            "have in another. On a GPU a program draws from one stream, and would draw the same numbers for both. Set "
            "dropout to 0 in one of them, inside or outside of attention and feed-forward."
        )
