"""simulate: plan, peak memory and timeline of a training step on ranks that you do not have.

    estimate = simulate(lambda: GPT(config), loss_fn, (tokens, targets), {"shard": 16, "tp": 8}, GPU, Policy())
    print(estimate)                    seconds of a step, memory of a rank, and what is on the wire meanwhile

The program is the one that `compile_sharded` makes, up to fusions: the model is built on the meta device, traced, and
taken through the passes for a mesh that sends nothing. Times are those of `analysis.timeline`, from shapes and the
rough figures of `plan.hardware`: good for which of two ways is faster, and by about how much, not for milliseconds.

`simulated_ranks` is a process group of any number of ranks in one process, which sends nothing. This is the one file
that knows PyTorch's ``fake`` backend (torch 2.11 to 2.14: ``torch.testing._internal.distributed.fake_pg``, which
registers it).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.analysis.timeline import Timeline, estimate
from fsdp_compiled.capture import global_modes
from fsdp_compiled.capture.captured import Capture
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.edit import moved
from fsdp_compiled.ir.node_copies import Kept
from fsdp_compiled.ir.nodes import carried, is_collective
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.hardware import HARDWARE, Cluster, with_network
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import human
from fsdp_compiled.plan.units import Choice
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.checked_call import checked_call
from fsdp_compiled.runtime.programs.compile import (
    ProgramSpec,
    capture,
    finished,
    fit_to_memory,
    fuse,
    memory_later,
    transform,
)
from fsdp_compiled.runtime.programs.no_collection import no_collection
from fsdp_compiled.runtime.tensor_parallel.parts import check_tensor_parallel
from fsdp_compiled.runtime.tensor_parallel.plan import apply_cuts, find_cuts


@dataclass(frozen=True)
class Estimate:
    """The estimate of one training step of one rank.

    With ``microbatches`` > 1, ``program`` and ``timeline`` are those of the last microbatch, which updates; ``before``
    is the timeline of each one before it; ``memory`` is that of the one that needs more.
    """

    plan: Plan
    program: Program
    memory: Memory
    timeline: Timeline
    microbatches: int = 1
    before: Timeline = field(default_factory=lambda: Timeline(()))
    first: Program | None = None  # of the microbatches before

    @property
    def seconds(self) -> float:
        """Seconds of a step, with all of its microbatches."""
        return self.timeline.end + (self.microbatches - 1) * self.before.end

    @property
    def exposed(self) -> float:
        """Seconds in which a rank computes nothing: it waits for what is on the wire, the host or a launch."""
        return self.seconds - self.busy("compute")

    def busy(self, lane: str) -> float:
        """Seconds of a step in which something happens in this lane."""
        return self.timeline.busy(lane) + (self.microbatches - 1) * self.before.busy(lane)

    @property
    def sent(self) -> Mapping[str, tuple[int, int]]:
        """By axis: the number of collectives in a step, and the bytes of their whole results. An all-reduce counts
        twice, since it is a reduction and a gather."""
        found = _sent(self.program)
        for axis, (count, nbytes) in (_sent(self.first) if self.first is not None else {}).items():
            last, times = found.get(axis, (0, 0)), self.microbatches - 1
            found[axis] = last[0] + times * count, last[1] + times * nbytes
        return found

    def on(self, cluster: Cluster) -> Estimate:
        """The same programs on other machines of this kind. Choices that the plan made for the first machines stay."""
        plan = replace(self.plan, machine=cluster)
        before = self.before if self.first is None else estimate(self.first, plan)
        return replace(self, plan=plan, timeline=estimate(self.program, plan), before=before)

    def __str__(self) -> str:
        wires = ", ".join(f"{count} along {axis} of {human(size)}" for axis, (count, size) in self.sent.items())
        which = f"; {self.microbatches} microbatches, of which this is the last" if self.microbatches > 1 else ""
        waiting = f"{self.exposed * 1e3:.4g} ms are waiting (estimates{which})"
        return "\n".join(
            [
                f"a step: {self.seconds * 1e3:.4g} ms, of which {waiting}",
                f"collectives: {wires or 'none'}",
                *self.memory.lines(),
                self.timeline.text(),
                str(self.plan),
            ]
        )

    __repr__ = __str__


def _sent(program: Program) -> dict[str, tuple[int, int]]:
    """By axis: how many collectives, and their bytes, as `Estimate.sent` counts them."""
    found: dict[str, tuple[int, int]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and is_collective(node):
            count, nbytes = found.get(axis := str(node.args[-1]), (0, 0))
            found[axis] = count + 1, nbytes + max(carried(node)) * (2 if "all_reduce" in str(node.target) else 1)
    return found


def simulate(
    model_fn: Callable[[], nn.Module],
    loss: Callable[..., Any] | None,
    batch: tuple[Any, ...],
    mesh_shape: Mapping[str, int] | int,
    hardware: Cluster | str = "gpu",
    policy: Policy | None = None,
    *,
    optimizer: Callable[[Any], Optimizer] = AdamW,
    cut: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    units: Choice | None = None,
    microbatches: int = 1,
) -> Estimate:
    """Estimates the step that `compile_sharded` would make on such a mesh. Nothing of it is run.

    model_fn
        Makes the model; called under ``torch.device("meta")``, so that it takes no memory.
    loss, policy, units
        As for `compile_sharded`.
    batch
        One microbatch of one rank; values are not read.
    mesh_shape
        Ranks by axis, ``{"replicate": 2, "shard": 8, "tp": 4}``, or the number of ranks that shard.
    hardware
        A `Cluster`, or the name of a GPU in `plan.hardware.GPUS`, in its usual nodes; ``"gpu"`` is an H100, ``"cpu"``
        ranks on this host, which is measured (`this_cpu`).
    optimizer
        Makes the optimizer from parameters.
    cut
        ``cut(model, mesh["tp"])`` calls `parallelize_module`; without it, ``policy.tp`` cuts.
    microbatches
        How many make a step: all but the last are given to `Sharded.accumulate`.

    Raises ``ValueError`` for what `compile_sharded` would refuse, and where a process group runs already.
    """
    shape = {"shard": mesh_shape} if isinstance(mesh_shape, int) else dict(mesh_shape)
    if isinstance(hardware, str) and hardware not in HARDWARE:
        raise ValueError(f"hardware is {hardware!r}; expected a Cluster, or one of {', '.join(HARDWARE)}.")
    cluster, policy = HARDWARE[hardware] if isinstance(hardware, str) else hardware, policy or Policy()
    with traced(model_fn, loss, batch, shape, cluster, policy, optimizer, cut, units) as step:
        found = step.estimate(policy, step.place.shard, step.place.replicate, cluster, microbatches)
    return found.on(this_cpu(found.plan)) if hardware == "cpu" else found


def this_cpu(plan: Plan) -> Cluster:
    """The plan's machine with the rates of this host's CPU, which its ranks share. Its network stays as it is.

    Choices go by `plan.hardware.CPU`, since all ranks have to make the same; prices go by this.
    """
    share = min(1.0, (os.cpu_count() or 1) / (plan.world * plan.tp * torch.get_num_threads()))
    single, half, memory, kernel = _achieved(torch.get_num_threads())
    flops = {torch.float32: single * share, torch.bfloat16: half * share}
    return replace(plan.machine, flops=flops, memory=memory * share, kernel=kernel, name="cpu")


@cache
def _achieved(threads: int) -> tuple[float, float, float, float]:
    """Operations a second of products of ``[512, 512]`` in float32 and in bfloat16, bytes a second of a sum of tensors
    of 4 MiB, and seconds of the shortest operator: the best of a few each, some 50 ms in all."""

    def seconds(operator: Callable[..., Any], *given: torch.Tensor, times: int = 1) -> float:
        best = inf
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(times):
                operator(*given)
            best = min(best, (time.perf_counter() - begun) / times)
        return best

    matrix, vector, small = (
        torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((512, 512), (2**20,), (8,))
    )
    products = [2 * 512**3 / seconds(torch.mm, one, one) for one in (matrix, matrix.bfloat16())]
    return *products, 3 * vector.nbytes / seconds(torch.add, vector, vector), seconds(torch.add, small, small, times=99)


@dataclass
class Traced:
    """A captured step, from which programs for many placements are made."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[..., Any] | None
    units: Choice | None
    place: Mesh
    device: torch.device
    spec: ProgramSpec
    captured: Capture
    again: Callable[[], Program]  # the captured program, once more
    notes: tuple[str, ...]

    def estimate(self, policy: Policy, shard: int, replicate: int, cluster: Cluster, microbatches: int = 1) -> Estimate:
        """The estimate under this policy, with this many ranks per axis. Precision and tp are as captured."""
        if microbatches < 1:
            raise ValueError(f"microbatches is {microbatches}; expected 1 or more.")
        if policy.sync_every is not None:
            raise ValueError(
                f"Policy.sync_every is {policy.sync_every}: local steps are not simulated yet. Leave it out, and give "
                "the mesh_shape of one site."
            )
        tp = self.place.tp
        leaves, _, _ = checked_call(self.model, self.optimizer, self.loss, self.units, policy, lambda module: None)
        machine = with_network(cluster, policy.network, tp)
        plan = make_plan(leaves, policy, self.device, shard, replicate, tp, machine)
        plan = replace(plan, notes=(*plan.notes, *self.notes))
        gloo = tuple(axis for axis, _ in plan.all_axes) if self.device.type == "cpu" else ()
        spec = replace(self.spec, plan=plan, gloo=gloo)
        if microbatches == 1:
            program, memory = self._made(spec)
            return Estimate(plan, program, memory, estimate(program, plan))
        every = frozenset(slot.name for buffer in plan.buffers if buffer.updated for slot in buffer.slots)
        first, held = self._made(replace(spec, kind="accumulate"))
        program, memory = self._made(replace(spec, kind="last", added=every))
        memory = max(held, memory, key=lambda one: one.peak.nbytes if not one.unknown else inf)
        return Estimate(plan, program, memory, estimate(program, plan), microbatches, estimate(first, plan), first)

    def _made(self, spec: ProgramSpec) -> tuple[Program, Memory]:
        later = memory_later(self.captured, spec)
        made = transform(replace(self.captured, program=self.again()), spec)
        program, _ = fuse(fit_to_memory(made, later, spec), spec)
        memory = later(program)()
        return finished(program, lambda: memory), memory


@contextmanager
def traced(
    model_fn: Callable[[], nn.Module],
    loss: Callable[..., Any] | None,
    batch: tuple[Any, ...],
    shape: Mapping[str, int],
    cluster: Cluster,
    policy: Policy,
    optimizer: Callable[[Any], Optimizer] = AdamW,
    cut: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    units: Choice | None = None,
) -> Iterator[Traced]:
    """Captures the step on such a mesh; arguments as for `simulate`. Inside, a process group of this mesh runs.

    A program for GPUs is captured on fake CPU tensors, since PyTorch without CUDA cannot differentiate GPU tensors. It
    is moved to a GPU before any pass sees it: passes and fusions are those of a GPU.
    """
    with no_collection(), simulated_ranks(shape) as mesh:
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
        plan = make_plan(leaves, policy, place.device, place.shard, place.replicate, place.tp, cluster)
        buffers = {name: torch.empty_like(one, device=place.device) for name, one in model.named_buffers()}
        example = pytree.tree_map_only(torch.Tensor, lambda one: torch.empty_like(one, device=place.device), batch)
        spec = ProgramSpec(
            "step", loss, plan, rules, buffers, {}, example, {}, "simulated step", 1, {}, {}, global_modes.now(),
            gloo=(), tuned=False, tp_mesh=place.tp_mesh,
        )  # fmt: skip
        captured = capture(model, spec)
        device = torch.device("cuda", 0) if cluster.gpu else place.device
        if device != place.device:
            captured = replace(captured, program=moved(captured.program, device))
        again = Kept(captured.program).program
        yield Traced(model, made, loss, units, place, device, spec, captured, again, notes)


@contextmanager
def simulated_ranks(shape: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Inside, this process is rank 0 of a CPU mesh with these axes. Results of collectives are undefined.

    Raises ``ValueError`` if a process group runs already, since it would take that one's place.
    """
    if dist.is_initialized():
        raise ValueError(
            "A process group is running in this process, and simulated ranks need one of their own. Simulate in a "
            "process that was not started by torchrun, or before init_process_group."
        )
    store = None
    with suppress(ImportError):  # where it is gone, `torch.distributed` knows the backend by itself
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        store = dist.HashStore()
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape.values()), store=store)
    try:
        yield init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    finally:
        dist.destroy_process_group()
