"""Local steps: each site trains by itself, and sites exchange their progress every `Policy.sync_every` steps.

    step 1 ... step H     each site's own: its plan has no replicate axis, so neither has its program
    exchange              passes/outer_update, over the plan that has one; all ranks meet before
    step H + 1 ...

Or in parts (`OuterSGD.parts`), each in its own step of a round, and each travelling while steps go on (``overlap``):

    step 2                            departure of part 0    nobody waits: gloo and NCCL work beside the steps
    step 3 ... step 2 + overlap       arrival of part 0      all ranks meet before; the program's second half
    step 4                            departure of part 1

Or, under `Policy.rendezvous`, between sites that come and go (`distributed.sites`), of which each is a mesh of its own:

    before step 1         join        the weights that the others have
    after step H          exchange    the mean over those that are there, by a program for so many

The anchor holds the weights after the last exchange. It is copied when the next step begins, so it includes weights
that are loaded or written before then. The optimizer's state always differs between sites, and weights differ between
exchanges. So a checkpoint stores the anchor, which is the same on all sites, as the model's weights. It also stores
each rank's own tensors, in the value ``local``, from which training can continue on the same mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fsdp_compiled import passes
from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.distributed.sites import Sites
from fsdp_compiled.ir.program import ANCHOR, MOMENTUM, Port, Program
from fsdp_compiled.lower.lowering import Runner, below_autograd
from fsdp_compiled.lower.split_forward_backward import cut
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import Policy, Rendezvous, sites
from fsdp_compiled.runtime.programs.program_maker import ProgramMaker
from fsdp_compiled.runtime.state import State

Saved = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
Programs = tuple[Program, list[tuple[Program, ...]]]


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
    outer = policy.exchange
    if policy.rendezvous is not None:
        return (
            f"a site by itself for {policy.sync_every} steps, then an exchange with the sites that are at "
            f"{policy.rendezvous.endpoint}",
        )
    how = f" in {outer.parts} parts" * (outer.parts > 1) + f", {outer.overlap} steps on the way" * (outer.overlap > 0)
    return (
        f"{replicas} site{'s' * (replicas > 1)} by themselves for {policy.sync_every} steps, then an exchange{how}",
    )


class Due(NamedTuple):
    """What is to be run next: an exchange, or the ``"departure"`` or ``"arrival"`` of one; ``part`` None: of all."""

    what: str
    part: int | None = None

    def __str__(self) -> str:
        return self.what if self.part is None else f"{self.what} of part {self.part}"


class LocalSteps:
    """``steps``: how many steps this rank made since all weights were the same; ``due``: what of exchanges comes next.

    ``program``: exchanges everything at once; ``parts``: the programs of each part under `OuterSGD.parts` and
    ``overlap``, one, or two between which it travels.
    """

    def __init__(self, plan: Plan, mesh: Mesh, programs: Programs, maker: ProgramMaker, state: State) -> None:
        """``plan``: the plan of one site. ``programs``: `programs_of` it. ``state``: gets the tensors that an exchange
        reads and writes."""
        assert plan.policy.sync_every is not None
        self.every, self.steps, self._overlap = plan.policy.sync_every, 0, plan.policy.exchange.overlap
        self.due: list[Due] = []
        self.program, self.parts = programs
        self._sent_after = [step for step, _ in plan.exchanged]
        self._maker = maker
        self._runners: dict[int, Runner] = {}
        self._travelling: dict[int, Tensors] = {}  # what a part's first program left to its second
        self._where = {
            "sites": mesh.replicate,
            "ranks": mesh.shard,
            "parts": len(plan.exchanged),
            "overlap": self._overlap,
        }
        rank = mesh.shard_rank + mesh.shard * mesh.replicate_rank  # for the noise of `Policy.wire`
        self._rank = torch.tensor([rank], device=plan.device)
        self._shards = [port.name for port in self.program.inputs if port.kind == "shard"]
        self._plan, self._mesh = plan, mesh
        self._open: dict[int, tuple[Program, tuple[Program, ...]]] = {}  # by the number of sites that come and go
        self.sites = None if plan.policy.rendezvous is None else self._other_sites(plan.policy.rendezvous)
        self.restart()
        for port, node in self.program.inputs.items():
            if port.kind == "state":
                value = node.meta["val"]
                state.optimizer[port.key] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    def _other_sites(self, where: Rendezvous) -> Sites:
        policy = self._plan.policy
        same = f"{self._mesh.world} ranks\n{policy.exchange} {policy.wire}\n{self.program}"
        digest = hashlib.sha256(same.encode()).hexdigest()
        return Sites(where.endpoint, where.least, where.patience, self._mesh, digest)

    def step_begins(self, state: State) -> None:
        if not self.steps:
            with outside_modes():
                for key, anchor in self.anchors(state).items():
                    anchor.copy_(state.parameters[key])

    def step_ended(self) -> None:
        self.steps += 1
        if not self.parts:
            self.due += [Due("exchange")] * (self.steps == self.every)
            return
        for what, late in (("arrival", self._overlap), ("departure", 0)) if self._overlap else (("exchange", 0),):
            for part, step in enumerate(self._sent_after):
                since = self.steps - step - late
                if since >= 0 and since % self.every == 0:
                    self.due.append(Due(what, part))
        if self.steps == 2 * self.every:
            self.steps = self.every  # the same place in a round

    def finish(self) -> None:
        """Makes everything due: what travels arrives, and then all is exchanged."""
        if self.sites is not None and self.sites.new:
            return  # to join is due
        self.due = [*(Due("arrival", part) for part in self._travelling), *[Due("exchange")] * (self.steps > 0)]

    def restart(self) -> None:
        """Sites begin with the weights that they have now."""
        self._wait()
        self._travelling.clear()
        self.steps, self.due = 0, []
        if self.sites is not None:
            self.sites.new, self.due = True, [Due("join")]

    def meets(self) -> bool:
        """Whether all ranks meet before what is due first: not for a departure, which nobody waits for."""
        return self.due[0].what != "departure" or id(self._program(self.due[0])) not in self._runners

    def _program(self, due: Due) -> Program:
        return self.program if due.part is None else self.parts[due.part][due.what == "arrival"]

    def exchange(self, state: State) -> None:
        """Runs what is due first. All ranks make the same call."""
        due = self.due[0]
        if self.sites is not None:
            self._exchange_open(self.sites, state)
            del self.due[0]
            return
        found = self._run(self._program(due), state, self._travelling.get(due.part, {}) if due.part is not None else {})
        if due.part is None:
            self.steps = 0
        elif due.what == "departure":
            self._travelling[due.part] = found
        elif due.what == "arrival":
            del self._travelling[due.part]
        del self.due[0]

    def _exchange_open(self, sites: Sites, state: State) -> None:
        """With the sites that are there; nothing moves unless all of them have what was sent."""

        def shared() -> list[torch.Tensor]:
            if not self.steps:
                self.step_begins(state)  # the anchors
            own = [port for port in self.program.inputs if port.kind == "state"]
            return [state.optimizer[port.key] for port in own]

        def send(count: int) -> tuple[Program, Tensors]:
            self.program, parts = self._programs_for(count)
            found = self._run(parts[0], state, {}) if count > 1 else {}
            for tensor in found.values():
                torch.ops._c10d_functional.wait_tensor(tensor)
            return parts[-1], found

        def move(sent: tuple[Program, Tensors]) -> None:
            moves, found = sent
            self._run(moves, state, found)
            self.steps = 0

        def take(given: list[torch.Tensor]) -> None:
            for own, one in zip(shared(), given, strict=True):
                own.copy_(one)
            for key, anchor in self.anchors(state).items():
                state.parameters[key].copy_(anchor)
            self.steps = 0

        sites.exchange(send, move, shared, take)

    def _programs_for(self, count: int) -> tuple[Program, tuple[Program, ...]]:
        """The program of an exchange of so many sites, and its halves."""
        if count not in self._open:
            whole = whole_exchange(replace(self._plan, replicate=count), first=True)
            self._open[count] = whole, halves(whole) if count > 1 else (whole,)
        return self._open[count]

    def _run(self, program: Program, state: State, travelling: Tensors) -> Tensors:
        if id(program) not in self._runners:
            groups = self._mesh.groups | ({} if self.sites is None else {"replicate": self.sites.group})
            self._runners[id(program)], _ = self._maker.lower(program, groups=groups)
        held: Mapping[str, Mapping[str, torch.Tensor]] = {
            "shard": state.parameters, "state": state.optimizer, "saved": travelling, "step": {"": state.step},
            "rank": {"": self._rank},
        }  # fmt: skip
        with below_autograd():
            results = self._runners[id(program)](*(held[port.kind][port.key] for port in program.inputs))
        found = {port.key: result for port, result in zip(program.outputs, results, strict=True)}
        if not found:  # PyTorch counts no writes below autograd, but readers of the counter need it
            keys = [port.name for port in program.inputs if port.kind == "shard"]
            torch.autograd.graph.increment_version([state.parameters[key] for key in keys])
        return found

    def _wait(self) -> None:
        """Waits for what travels, so that it can be read."""
        for tensors in self._travelling.values():
            for tensor in tensors.values():
                torch.ops._c10d_functional.wait_tensor(tensor)

    def anchors(self, state: State) -> dict[str, torch.Tensor]:
        return {key: state.optimizer[Port("in", "state", key, ANCHOR).key] for key in self._shards}

    def weights(self, state: State) -> dict[str, torch.Tensor]:
        """The weights that all sites have in common: between exchanges, those of the last one."""
        return {**state.parameters, **(self.anchors(state) if self.steps else {})}

    # In checkpoints.

    def saved(self, state: State) -> dict[str, Any]:
        """What this rank needs to go on, besides what is the same on all sites."""
        weights = {key: state.parameters[key] for key in self._shards} if self.steps else {}
        self._wait()
        travelling = {str(part): dict(tensors) for part, tensors in self._travelling.items()}
        own = {"state": _apart(state), "weights": weights, "travelling": travelling}
        made = {} if self.sites is None else {"exchanges": self.sites.made}
        return {"steps": self.steps, **self._where, **own, **made}

    def fits(self, saved: Saved, sizes: Mapping[str, Sequence[int]], state: State) -> bool:
        """Whether this rank can go on from what was saved. ``sizes``: of the saved state, by name."""
        own = {name: tuple(tensor.shape) for name, tensor in _apart(state).items()}
        before = {"parts": 1, "overlap": 0, **saved}  # a checkpoint may be from before there were these
        return all(before[name] == size for name, size in self._where.items()) and own == dict(sizes)

    def load(self, saved: Saved | None, state: State) -> None:
        """Goes on from ``saved``; if it is None, from the present weights, as after an exchange."""
        self.restart()
        if saved is None:
            for name, tensor in state.optimizer.items():
                if name.endswith(f".{MOMENTUM}"):
                    tensor.zero_()
            return
        self.steps = saved["steps"]
        if self.sites is not None:
            self.sites.made = saved.get("exchanges", 0)
        for name, tensor in saved["state"].items():
            state.optimizer[name].copy_(tensor)
        for key, tensor in saved["weights"].items():
            state.parameters[key].copy_(tensor)
        for part, tensors in saved.get("travelling", {}).items():
            self._travelling[int(part)] = {key: tensor.to(self._rank.device) for key, tensor in tensors.items()}


def programs_of(plan: Plan, mesh: Mesh) -> Programs:
    """The program that exchanges everything at once, and those of each part. Raises ``ValueError`` for what
    `Policy.wire` cannot send."""
    outer, parts = plan.policy.exchange, plan.exchanged
    joined = replace(plan, replicate=mesh.replicate)
    whole = whole_exchange(joined)
    if len(parts) == 1 and not outer.overlap:
        return whole, []
    programs = (passes.outer(joined, buffers, late=outer.overlap > 0) for _, buffers in parts)
    return whole, [halves(one) if outer.overlap else (one,) for one in programs]


def whole_exchange(plan: Plan, first: bool = False) -> Program:
    """The program that exchanges everything at once between the sites of this plan. ``first``: it sends all first."""
    return passes.outer(plan, [buffer for _, buffers in plan.exchanged for buffer in buffers], first=first)


def halves(program: Program) -> tuple[Program, Program]:
    """The program up to where all is sent, and the rest. What the first returns, the second takes."""
    split = cut(program, "update")
    return split.forward, split.backward


def _apart(state: State) -> dict[str, torch.Tensor]:
    """The optimizer state that differs between sites: all of it except single numbers."""
    return {name: tensor for name, tensor in state.optimizer.items() if tensor.dim()}
