"""The program by which sites exchange what they learned, once every `Policy.sync_every` local steps.

    before            after

    shard             change: float32[36] = sub(anchor, shard)      # how far this site came
                      mean = all_reduce(change, "avg", "replicate"); wait
                      momentum = 0.9 * momentum + mean
                      anchor = anchor - 0.7 * (mean + 0.9 * momentum)
                      shard = anchor                                # late: shard + (anchor - what it was) + change

The anchor holds the weights after the last exchange. This is DiLoCo (Douillard et al., 2023, arXiv:2311.08105): an
inner optimizer in each site, and on the mean change `torch.optim.SGD` with Nesterov's momentum, with its operators in
its own order. One buffer is on the wire while the one before is updated.

Under `OuterSGD.overlap` the exchange is *late*: all buffers are sent *first*, the program is cut there
(`lower.split_forward_backward`), and its second half runs some steps later. What a site learned meanwhile stays. Under
``Policy.rendezvous`` it is cut there, too, and its second half runs once all sites have what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, fake_tensor
from fsdp_compiled.ir.program import ANCHOR, MOMENTUM, Port, Program
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def shards_of(plan: Plan, buffers: Iterable[Buffer]) -> Program:
    """A program that reads the shards of these buffers, and does nothing."""
    graph, mode = fx.Graph(), FakeTensorMode()
    ports = [Port("in", "shard", buffer.key) for buffer in buffers]
    for port in ports:
        node = graph.placeholder(f"shard_{len(graph.nodes)}")
        buffer = plan.buffer(port.name)
        node.meta["val"] = fake_tensor(mode, (plan.shard_numel(buffer),), (1,), buffer.dtype, plan.device)
    graph.output([])
    return Program(graph, tuple(ports), ())


def outer_update(program: Program, plan: Plan, late: bool = False, first: bool = False) -> Program:
    """Moves each shard from its anchor by the mean over the replicate axis."""
    edit = Edit(program)
    sent: list[tuple[Buffer, fx.Node, fx.Node]] = []
    for port, shard in list(edit.inputs.items()):
        buffer = plan.buffer(port.name)
        with edit.at(edit.end, "backward" if first else "update"):
            anchor = edit.add_input(Port("in", "state", buffer.key, ANCHOR), shard.meta["val"])
            change = edit.call(aten.sub.Tensor, anchor, shard, mark=Mark("update", buffer.unit, buffer.key))
            mean = change
            if plan.replicate > 1:
                mark = Mark("reduce", buffer.unit, buffer.key)
                mean = edit.call(c10d.all_reduce.default, change, "avg", "replicate", mark=mark)
        if sent and not first:
            _move(edit, *sent.pop(), plan, late)
        sent.append((buffer, change, mean))
    for one in sent:
        _move(edit, *one, plan, late)
    return edit.done("outer_update")


def _move(edit: Edit, buffer: Buffer, own: fx.Node, mean: fx.Node, plan: Plan, late: bool) -> None:
    """``own``: this site's change; ``mean``: that of all sites, on the wire."""
    outer, mark = plan.policy.exchange, Mark("update", buffer.unit, buffer.key)
    shard, anchor = (edit.inputs[Port("in", *one)] for one in (("shard", buffer.key), ("state", buffer.key, ANCHOR)))
    with edit.at(edit.end, "update"):
        if plan.replicate > 1:
            mean = edit.call(c10d.wait_tensor.default, mean, mark=Mark("wait", buffer.unit, buffer.key))
        if outer.momentum:
            momentum = edit.add_input(Port("in", "state", buffer.key, MOMENTUM), anchor.meta["val"])
            grown = edit.call(aten.mul.Tensor, momentum, outer.momentum, mark=mark)
            grown = edit.call(aten.add.Tensor, grown, mean, mark=mark)
            edit.call(aten.copy_.default, momentum, grown, mark=mark)
            mean = edit.call(aten.add.Tensor, mean, grown, alpha=outer.momentum, mark=mark) if outer.nesterov else grown
        moved = edit.call(aten.add.Tensor, anchor, mean, alpha=-outer.lr, mark=mark)
        weights = moved
        if late:
            weights = edit.call(aten.sub.Tensor, moved, anchor, mark=mark)
            weights = edit.call(aten.add.Tensor, weights, own, mark=mark)
            weights = edit.call(aten.add.Tensor, shard, weights, mark=mark)
        edit.call(aten.copy_.default, anchor, moved, mark=mark)
        edit.call(aten.copy_.default, shard, weights, mark=mark)
