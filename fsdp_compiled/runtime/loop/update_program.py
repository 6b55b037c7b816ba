"""The update of parameters of `fully_shard` as one program over their flat shards: norm, clip, the optimizer's rules.

in      shards, flat gradients, the optimizer's state, its rates; a GradScaler's scale and what it found
unscale gradient * (1 / scale)                                         where a GradScaler gives it
norm    squares of the gradients' shards, summed over the ranks        where there is a norm to clip at
clip    gradient * min(1, max_norm / (norm + 1e-6))
update  the optimizer's own code, traced over each flat shard (`passes.update`)
skip    what was written is put back where a gradient was not finite

Where a device captures graphs, the program is one launch from its third call on: gradients, which backward leaves at
other addresses each time, are copied into memory that the graph reads, as a batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.mesh import Mesh, exchange
from fsdp_compiled.distributed.process_group import backends
from fsdp_compiled.ir.program import FACTOR, FOUND, Port, Program
from fsdp_compiled.lower.cuda_graph import Replays
from fsdp_compiled.lower.inductor import compile_all
from fsdp_compiled.lower.lowering import Lowering, below_autograd
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.passes import run, update_alone
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.loop.module_run import run_program

FED = ("sum", "scale")  # kinds of inputs that are at other addresses each time
LABEL = "update"


class Update:
    """A program, lowered. ``made``: which of this optimizer's it is, for ranks to tell theirs apart."""

    def __init__(
        self, plan: Plan, rules: Sequence[Rule], scaled: bool, mesh: Mesh, calls: Calls, replays: Replays, made: int
    ) -> None:
        self.program = update_program(plan, rules, scaled)
        self.ports = [port for port in self.program.ports if port.side == "in"]
        self._fed = [place for place, port in enumerate(self.ports) if port.kind in FED]
        self._sends = plan.policy.clip is not None
        self._mesh, self._calls, self._replays, self._made, self._count = mesh, calls, replays, made, 0
        lowering = Lowering(self.program, mesh.groups, plan.policy.lower)
        self._runner: Callable[..., Sequence[torch.Tensor]] = lowering.runner(compile_all(lowering.pieces))
        self._inputs: list[Any] = []
        self._bound: Mapping[Port, torch.Tensor] | None = None

    def bind(self, tensors: Mapping[Port, torch.Tensor], find: Callable[[Port], torch.Tensor]) -> None:
        """What it reads besides what it is fed; found again where state is kept elsewhere now (``tensors``)."""
        if self._bound is not tensors:
            self._inputs = [None if port.kind in FED else find(port) for port in self.ports]
            self._bound = tensors

    def __call__(self, fed: Mapping[Port, torch.Tensor]) -> torch.Tensor | None:
        """Updates; the gradients' norm, where there is one to clip at."""
        inputs = list(self._inputs)
        for place in self._fed:
            inputs[place] = fed[self.ports[place]]
        self._count += 1
        if not self._sends:  # no other rank is waited for
            with below_autograd():
                self._run(inputs)
            return None
        # Which program, and how often it ran: ranks that capture must do so together.
        self._calls.post(f"{LABEL} {self._count} of program {self._made}", self.program.hash[:8])
        (norm,) = run_program(partial(self._run, inputs), self._calls)
        return norm

    def _run(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        if self._count == 1 and self._replays.device is not None:
            self._begin_to_capture()
        return self._runner(*inputs)

    def _begin_to_capture(self) -> None:
        found = self._replays.obstacles(self.program, self._mesh.device, backends(self._mesh))
        if not any(self._everywhere(found)):
            self._runner = self._replays.wrap(self._runner, self.ports, LABEL, self._everywhere, FED)

    def _everywhere(self, text: str) -> list[str]:
        """What each rank says; without collectives in the program, each goes by itself."""
        if not self._sends:
            return [text]
        if self._calls.board is not None:
            self._calls.meet(self._calls.board.read(self._mesh.rank, self._calls.count).label)
        return exchange(text, self._mesh)


def update_program(plan: Plan, rules: Sequence[Rule], scaled: bool = False) -> Program:
    """The program for this plan, whose ``policy.clip`` is the norm to clip at. Gradients are inputs of kind ``sum``;
    ``scaled``: scale and overflow too."""
    return run(_begin(plan, scaled), plan, update_alone(rules, scaled))


def _begin(plan: Plan, scaled: bool) -> Program:
    """Shards and gradients go in, gradients come out."""
    graph, mode = fx.Graph(), FakeTensorMode()
    ports: list[Port] = []
    gradients: list[fx.Node] = []

    def put(port: Port, size: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = graph.placeholder(f"{port.kind}_{len(ports)}")
        with mode:
            node.meta["val"] = torch.empty(size, dtype=dtype, device=plan.device)
        node.meta["phase"] = "update"
        ports.append(port)
        return node

    for port in (FACTOR, FOUND) if scaled else ():
        put(port, [], torch.float32)
    for buffer in plan.buffers:
        if buffer.updated:
            size = [buffer.numel // plan.shard]
            put(Port("in", "shard", buffer.key), size, buffer.dtype)
            gradients.append(put(Port("in", "sum", buffer.key), size, buffer.dtype))
    graph.output(gradients)
    out = [Port("out", "gradient", buffer.key) for buffer in plan.buffers if buffer.updated]
    return Program(graph, (*ports, *out), ())


def updated_by(plan: Plan, groups: Sequence[int | None]) -> Plan:
    """The plan, each of whose buffers is updated by the rule of that param group, or by none."""
    numbers = iter(groups)
    units = tuple(
        replace(unit, buffers=tuple(replace(buffer, group=next(numbers)) for buffer in unit.buffers))
        for unit in plan.units
    )
    return replace(plan, units=units)
