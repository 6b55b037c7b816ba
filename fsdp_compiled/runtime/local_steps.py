"""Local steps: each site trains by itself, and sites exchange their progress every `Policy.sync_every` steps.

    step 1 ... step H     each site's own: its plan has no replicate axis, so neither has its program
    exchange              passes/outer_update, over the plan that has one; all ranks meet before
    step H + 1 ...

The anchor holds the weights after the last exchange. It is copied when the next step begins, so it includes weights
that are loaded or written before then. The optimizer's state always differs between sites, and weights differ between
exchanges. So a checkpoint stores the anchor, which is the same on all sites, as the model's weights. It also stores
each rank's own tensors, in the value ``local``, from which training can continue on the same mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsdp_compiled import passes
from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.program import ANCHOR, MOMENTUM, Port, Program
from fsdp_compiled.lower.lowering import Runner, below_autograd
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import Policy, sites
from fsdp_compiled.runtime.programs.program_maker import ProgramMaker
from fsdp_compiled.runtime.state import State

Saved = Mapping[str, Any]


def own_sites(mesh: Mesh, shard: str) -> Mesh:
    """The mesh of local steps, in which each row is a site. Under ``"ddp"`` on one axis, each rank is a site."""
    ranks, replicas = sites(shard, mesh.shard, mesh.replicate)
    if (ranks, replicas) == (mesh.shard, mesh.replicate):
        return mesh
    groups = {"replicate" if axis == "shard" else axis: name for axis, name in mesh.groups.items()}
    return replace(mesh, shard=ranks, replicate=replicas, shard_rank=0, replicate_rank=mesh.shard_rank, groups=groups)


def exchanges(policy: Policy, replicas: int) -> tuple[str, ...]:
    """The note about exchanges that a plan prints; empty if there are none."""
    if policy.sync_every is None:
        return ()
    return (f"{replicas} site{'s' * (replicas > 1)} by themselves for {policy.sync_every} steps, then an exchange",)


class LocalSteps:
    """``steps``: how many steps this rank made since the last exchange. ``program``: the program of an exchange."""

    def __init__(self, plan: Plan, mesh: Mesh, maker: ProgramMaker, state: State) -> None:
        """``plan``: the plan of one site. ``state``: gets the tensors that an exchange reads and writes."""
        assert plan.policy.sync_every is not None
        self.every, self.steps = plan.policy.sync_every, 0
        self.program: Program = passes.outer(replace(plan, replicate=mesh.replicate))
        self._maker = maker
        self._runner: Runner | None = None
        self._where = {"sites": mesh.replicate, "ranks": mesh.shard}
        self._shards = [port.name for port in self.program.inputs if port.kind == "shard"]
        for port, node in self.program.inputs.items():
            if port.kind == "state":
                value = node.meta["val"]
                state.optimizer[port.key] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    def step_begins(self, state: State) -> None:
        if not self.steps:
            with outside_modes():
                for key, anchor in self.anchors(state).items():
                    anchor.copy_(state.parameters[key])

    def exchange(self, state: State) -> None:
        """Runs the exchange, which updates the weights. All ranks have met, and make the same call."""
        if self._runner is None:
            self._runner, _ = self._maker.lower(self.program)
        held = {"shard": state.parameters, "state": state.optimizer}
        with below_autograd():
            self._runner(*(held[port.kind][port.key] for port in self.program.inputs))
        for key in self._shards:  # PyTorch counts no writes below autograd, but readers of the counter need it
            torch.autograd.graph.increment_version(state.parameters[key])
        self.steps = 0

    def anchors(self, state: State) -> dict[str, torch.Tensor]:
        return {key: state.optimizer[Port("in", "state", key, ANCHOR).key] for key in self._shards}

    def weights(self, state: State) -> dict[str, torch.Tensor]:
        """The weights that all sites have in common: between exchanges, those of the last one."""
        return {**state.parameters, **(self.anchors(state) if self.steps else {})}

    # In checkpoints.

    def saved(self, state: State) -> dict[str, Any]:
        """What this rank needs to go on, besides what is the same on all sites."""
        weights = {key: state.parameters[key] for key in self._shards} if self.steps else {}
        return {"steps": self.steps, **self._where, "state": _apart(state), "weights": weights}

    def fits(self, saved: Saved, sizes: Mapping[str, Sequence[int]], state: State) -> bool:
        """Whether this rank can go on from what was saved. ``sizes``: of the saved state, by name."""
        own = {name: tuple(tensor.shape) for name, tensor in _apart(state).items()}
        return all(saved[name] == size for name, size in self._where.items()) and own == dict(sizes)

    def load(self, saved: Saved | None, state: State) -> None:
        """Goes on from ``saved``; if it is None, from the present weights, as after an exchange."""
        self.steps = saved["steps"] if saved is not None else 0
        if saved is None:
            for name, tensor in state.optimizer.items():
                if name.endswith(f".{MOMENTUM}"):
                    tensor.zero_()
            return
        for name, tensor in saved["state"].items():
            state.optimizer[name].copy_(tensor)
        for key, tensor in saved["weights"].items():
            state.parameters[key].copy_(tensor)


def _apart(state: State) -> dict[str, torch.Tensor]:
    """The optimizer state that differs between sites: all of it except single numbers."""
    return {name: tensor for name, tensor in state.optimizer.items() if tensor.dim()}
