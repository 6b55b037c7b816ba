"""The program by which sites exchange what they learned, once every `Policy.sync_every` local steps.

    before            after

    shard             change: float32[36] = sub(anchor, shard)      # how far this site came
                      mean = all_reduce(change, "avg", "replicate"); wait
                      momentum = 0.9 * momentum + mean
                      shard = anchor - 0.7 * (mean + 0.9 * momentum)

The anchor holds the weights after the last exchange. This is DiLoCo (Douillard et al., 2023, arXiv:2311.08105): an
inner optimizer in each site, and on the mean change `torch.optim.SGD` with Nesterov's momentum, with its operators in
its own order. One buffer is on the wire while the one before is updated.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, fake_tensor
from fsdp_compiled.ir.program import ANCHOR, MOMENTUM, Port, Program
from fsdp_compiled.plan.plan import Buffer, Plan
from fsdp_compiled.policy import OuterSGD

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def shards_of(plan: Plan) -> Program:
    """A program that reads the trainable shards, and does nothing."""
    graph, mode = fx.Graph(), FakeTensorMode()
    ports = [Port("in", "shard", buffer.key) for buffer in plan.buffers if buffer.updated]
    for port in ports:
        node = graph.placeholder(f"shard_{len(graph.nodes)}")
        buffer = plan.buffer(port.name)
        node.meta["val"] = fake_tensor(mode, (plan.shard_numel(buffer),), (1,), buffer.dtype, plan.device)
    graph.output([])
    return Program(graph, tuple(ports), ())


def outer_update(program: Program, plan: Plan) -> Program:
    """Moves each shard from its anchor by the mean over the replicate axis."""
    edit = Edit(program)
    outer = plan.policy.outer or OuterSGD()
    pending: tuple[Buffer, fx.Node, fx.Node] | None = None
    with edit.at(edit.end, "update"):
        for port, shard in list(edit.inputs.items()):
            buffer = plan.buffer(port.name)
            anchor = edit.add_input(Port("in", "state", buffer.key, ANCHOR), shard.meta["val"])
            change = edit.call(aten.sub.Tensor, anchor, shard, mark=Mark("update", buffer.unit, buffer.key))
            if plan.replicate > 1:
                mark = Mark("reduce", buffer.unit, buffer.key)
                change = edit.call(c10d.all_reduce.default, change, "avg", "replicate", mark=mark)
            if pending is not None:
                _move(edit, *pending, outer, plan)
            pending = buffer, anchor, change
        if pending is not None:
            _move(edit, *pending, outer, plan)
    return edit.done("outer_update")


def _move(edit: Edit, buffer: Buffer, anchor: fx.Node, change: fx.Node, outer: OuterSGD, plan: Plan) -> None:
    mark = Mark("update", buffer.unit, buffer.key)
    if plan.replicate > 1:
        change = edit.call(c10d.wait_tensor.default, change, mark=Mark("wait", buffer.unit, buffer.key))
    if outer.momentum:
        momentum = edit.add_input(Port("in", "state", buffer.key, MOMENTUM), anchor.meta["val"])
        grown = edit.call(aten.mul.Tensor, momentum, outer.momentum, mark=mark)
        grown = edit.call(aten.add.Tensor, grown, change, mark=mark)
        edit.call(aten.copy_.default, momentum, grown, mark=mark)
        change = edit.call(aten.add.Tensor, change, grown, alpha=outer.momentum, mark=mark) if outer.nesterov else grown
    moved = edit.call(aten.add.Tensor, anchor, change, alpha=-outer.lr, mark=mark)
    edit.call(aten.copy_.default, edit.inputs[Port("in", "shard", buffer.key)], moved, mark=mark)
