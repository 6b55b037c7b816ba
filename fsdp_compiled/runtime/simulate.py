"""simulate: plan, peak memory and timeline of a training step on ranks that you do not have.

    estimate = simulate(lambda: GPT(config), loss_fn, (tokens, targets), {"shard": 16, "tp": 8}, GPU, Policy())
    print(estimate)                    seconds of a step, memory of a rank, and what is on the wire meanwhile

The program is the one that `compile_sharded` makes, up to fusions: the model is built on the meta device, traced, and
taken through the passes for a mesh that sends nothing. Times are those of `analysis.timeline`, from shapes and the
rough figures of `plan.hardware`: good for which of two ways is faster, and by about how much, not for milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.analysis.timeline import Timeline, estimate
from fsdp_compiled.capture import ambient
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.simulated_ranks import simulated_ranks
from fsdp_compiled.ir.nodes import carried, is_collective
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.hardware import CPU, GPU, Machine
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import human
from fsdp_compiled.plan.units import Choice
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.checked_call import checked_call
from fsdp_compiled.runtime.programs.compile import Job, capture, fit_to_memory, memory_of, transform
from fsdp_compiled.runtime.tensor_parallel.parts import check_tensor_parallel
from fsdp_compiled.runtime.tensor_parallel.plan import apply_cuts, find_cuts

HARDWARE: Mapping[str, Machine] = {"cpu": CPU, "gpu": GPU}


@dataclass(frozen=True)
class Estimate:
    """What one training step of one rank is thought to be."""

    plan: Plan
    program: Program
    memory: Memory
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.end

    @property
    def exposed(self) -> float:
        """Seconds in which a rank computes nothing and waits for what is on the wire."""
        return self.timeline.end - self.timeline.busy("compute")

    @property
    def sent(self) -> Mapping[str, tuple[int, int]]:
        """By axis: how many collectives a step has, and the bytes of what they bring, whole."""
        found: dict[str, tuple[int, int]] = {}
        for node in self.program.graph.nodes:
            if node.op == "call_function" and is_collective(node):
                count, nbytes = found.get(axis := str(node.args[-1]), (0, 0))
                found[axis] = count + 1, nbytes + max(carried(node))
        return found

    def __str__(self) -> str:
        wires = ", ".join(f"{count} along {axis} of {human(size)}" for axis, (count, size) in self.sent.items())
        return "\n".join(
            [
                f"a step: {self.seconds * 1e3:.4g} ms, of which {self.exposed * 1e3:.4g} ms are waiting (estimates)",
                f"collectives: {wires or 'none'}",
                *self.memory.lines(),
                self.timeline.text(),
                str(self.plan),
            ]
        )

    __repr__ = __str__


def simulate(
    model_fn: Callable[[], nn.Module],
    loss: Callable[..., Any] | None,
    batch: tuple[Any, ...],
    mesh_shape: Mapping[str, int] | int,
    hardware: Machine | str = "gpu",
    policy: Policy | None = None,
    *,
    optimizer: Callable[[Any], Optimizer] = AdamW,
    cut: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    units: Choice | None = None,
) -> Estimate:
    """What `compile_sharded` would make of this on such a mesh; nothing of it is run.

    model_fn
        Makes the model; called under ``torch.device("meta")``, so that it takes no memory.
    loss, policy, units
        As for `compile_sharded`.
    batch
        That of one rank; values are not read.
    mesh_shape
        Ranks by axis, ``{"replicate": 2, "shard": 8, "tp": 4}``, or how many shard.
    hardware
        A `Machine`, or ``"gpu"`` or ``"cpu"``.
    optimizer
        Makes the optimizer from parameters.
    cut
        ``cut(model, mesh["tp"])`` calls `parallelize_module`; without it, ``policy.tp`` cuts.

    Raises ``ValueError`` for what `compile_sharded` would refuse, and where a process group runs already.
    """
    shape = {"shard": mesh_shape} if isinstance(mesh_shape, int) else dict(mesh_shape)
    if isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise ValueError(f"hardware is {hardware!r}; expected a Machine, or one of {', '.join(HARDWARE)}.")
        hardware = HARDWARE[hardware]
    policy = policy or Policy()
    if policy.bandwidth_gbps is not None:
        hardware = replace(hardware, network=policy.bandwidth_gbps * 1e9 / 8)
    with simulated_ranks(shape) as mesh:
        place = connect(mesh)
        with torch.device("meta"):
            model = model_fn()
        if cut is not None:
            if place.tp_mesh is None:
                raise ValueError('cut is given, but mesh_shape has no axis "tp".')
            cut(model, place.tp_mesh)
        made = optimizer(model.parameters())
        notes: tuple[str, ...] = ()
        if policy.tp is not None:
            cuts = find_cuts(model, made, policy.tp, place, loss)
            apply_cuts(model, made, cuts, place)
            notes = cuts.notes
        leaves, rules, _ = checked_call(model, made, loss, units, policy, lambda module: None)
        check_tensor_parallel(model, place, leaves, policy)
        plan = make_plan(leaves, policy, place.device, place.shard, place.replicate, place.tp, hardware)
        plan = replace(plan, notes=(*plan.notes, *notes))
        buffers = {name: torch.empty_like(one, device=place.device) for name, one in model.named_buffers()}
        example = pytree.tree_map_only(torch.Tensor, lambda one: torch.empty_like(one, device=place.device), batch)
        job = Job(
            "step", loss, plan, rules, buffers, {}, example, {}, "simulated step", 1, {}, {}, ambient.now(),
            gloo=tuple(place.groups) if place.device.type == "cpu" else (), tuned=False, tp_mesh=place.tp_mesh,
        )  # fmt: skip
        captured = capture(model, job)
        predict = memory_of(captured, job)
        program = fit_to_memory(transform(captured, job), predict, job).stages[-1]
        memory = predict(program)
    return Estimate(plan, program, memory, estimate(program, plan))
