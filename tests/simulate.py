"""A program of this package on several simulated ranks, in one process.

Each rank has a copy of the model of its own, taken over by `take_over` as that rank, and its own state and generator.
The one thing that differs from a real run is who calls the program: the ranks' inputs are put together as
`LocalTensor` values, and the program runs once, node by node on all ranks, its collectives exact. Collectives outside
the program (broadcast, agreement) are not simulated; each rank starts from the same model instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compiled.capture.captured import Capture, batch_tensors
from fsdp_compiled.capture.fake_inputs import capture_on
from fsdp_compiled.distributed.device_mesh import connect, connect_neighbours
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.program import CALL, CALL_PARTS, LOSS, NORM, STEP, Port, Program
from fsdp_compiled.lower.fusions import Target, fusions_for
from fsdp_compiled.lower.inductor import compile_all
from fsdp_compiled.lower.lowering import Lowering, Runner
from fsdp_compiled.lower.piece import Piece
from fsdp_compiled.optim.hyperparameters import hyper
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.passes import FORWARD, GRADIENT, MICROBATCH, Pass, run, step
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.units import Choice, find_units
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.rng import seed
from fsdp_compiled.runtime.shard_model import ManagedModel, parameters_of, read_leaves, take_over
from fsdp_compiled.runtime.state import optimizer_state

CPU = torch.device("cpu")
BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "embed", "head", "root")  # names of units, of all that is cut in pieces

Batch = tuple[torch.Tensor, ...]
Loss = Callable[..., Any]
Rewrite = Callable[[Program, Plan], Program]


@contextmanager
def ranks(shard: int, replicate: int = 1) -> Iterator[list[Mesh]]:
    """The place of each of ``shard * replicate`` simulated ranks, in a process group that sends nothing."""
    world = shard * replicate
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        if replicate == 1:
            mesh = init_device_mesh("cpu", (shard,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
        first = connect(mesh)
        yield [replace(first, shard_rank=rank % shard, rank=rank) for rank in range(world)]
    finally:
        dist.destroy_process_group()


@dataclass
class Rank:
    """One rank: its place, its copy of the model, and what the program reads and writes there."""

    mesh: Mesh
    plan: Plan
    taken: ManagedModel
    optimizer: Optimizer | None
    rules: tuple[Rule, ...]
    values: dict[Port, torch.Tensor]  # a program's inputs but for batches and hyperparameters
    random: torch.Tensor
    weight: float | None = None  # in the place of the batch's rows, for programs that weigh ranks

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        return {port.name: value for port, value in self.values.items() if port.kind == kind}

    def inputs(self, program: Program, batch: Batch) -> list[torch.Tensor]:
        """In the order of the program's ports."""
        given = dict(self.values)
        given |= {Port("in", "batch", name): value for name, value in batch_tensors(batch, {}).items()}
        rows = float(len(batch[0])) if self.weight is None else self.weight
        given[Port("in", "rows")] = torch.tensor(rows, dtype=torch.float64)
        for rule in self.rules:
            assert self.optimizer is not None
            for name in rule.hypers:
                value = hyper(self.optimizer.param_groups[rule.group], name)
                given[Port("in", "hyper", str(rule.group), name)] = torch.tensor(value, dtype=torch.float64)
        for port, node in program.inputs.items():
            if port.kind == "copy" and port not in given:
                shard = self.values[Port("in", "shard", port.name)]
                given[port] = self.values[port] = shard.to(node.meta["val"].dtype)
            if port.kind in ("sum", "room") and port not in given:
                value = node.meta["val"]
                given[port] = self.values[port] = torch.zeros(value.shape, dtype=value.dtype)
        return [given[port] for port in program.ports if port.side == "in"]


def at_once(stages: Generator[str, None, Any]) -> Any:
    """What `lockstep` would return, where nobody has to be waited for."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


def enlist(
    model: nn.Module, optimizer: Optimizer | None, policy: Policy, mesh: Mesh, units: Choice | None = None
) -> Rank:
    """The rank at this place, as `compile_sharded` sets it up; model and optimizer stay as they are."""
    model, optimizer = copy.deepcopy((model, optimizer))
    rules = make_rules(optimizer) if optimizer is not None else ()
    leaves = read_leaves(parameters_of(model), optimizer, find_units(model, units))
    plan = make_plan(leaves, policy, mesh.device, mesh.shard, mesh.replicate)
    taken, shards, buffers, existing_state = at_once(take_over(model, optimizer, rules, plan, mesh, None))
    values = {Port("in", "shard", name): value for name, value in shards.items()}
    values |= {Port("in", "buffer", name): value for name, value in buffers.items()}
    state = optimizer_state(plan, rules, existing_state)
    for rule in rules:
        mine = [buffer.key for buffer in plan.buffers if buffer.group == rule.group]
        for entry in rule.state:
            ports = [Port("in", "state", owner, entry.name) for owner in ([rule.key] if entry.scalar else mine)]
            values |= {port: state[port.key] for port in ports if port.key in state}
    values[STEP] = torch.zeros((), dtype=torch.int64)
    values |= {Port("in", "scale", name): value for name, value in plan.policy.initial_scale(plan.device).items()}
    values[Port("in", "rank")] = torch.tensor([mesh.shard_rank])
    values[CALL] = torch.ones(CALL_PARTS, dtype=torch.float64)
    return Rank(mesh, plan, taken, optimizer, rules, values, noise(mesh.rank))


def noise(rank: int) -> torch.Tensor:
    """The state of a generator of this rank's own, the same again under the same seed."""
    generator = torch.Generator()
    seed(generator, f"{torch.initial_seed()} {rank}")
    return generator.get_state()


def captured(rank: Rank, loss: Loss | None, batch: Batch, kind: str = "step", traced_as: Hashable = None) -> Program:
    """The program before any pass; tensors that it closes over join the rank's values.

    ``traced_as`` names model, loss and sizes of the batch: where they, and what a capture reads of the plan, are those
    of an earlier call, its capture is taken. Tracing takes most of the time of a test that looks at a program.
    """
    key = (traced_as, kind != "forward", _traced_of(rank.plan)) if traced_as is not None else None
    found = _CAPTURES.pop(key, None) if key is not None else None
    if found is None:
        with rank.taken.open() as model:
            found = capture_on(model, loss, rank.plan, rank.named("buffer"), batch, {}, gradient=kind != "forward")
    if key is not None:
        _CAPTURES[key] = found  # the last that is thrown away
        if len(_CAPTURES) > 32:
            del _CAPTURES[next(iter(_CAPTURES))]
    for name, tensor in found.constants.items():
        rank.values.setdefault(Port("in", "constant", name), tensor.detach().clone())
    return found.program


_CAPTURES: dict[Hashable, Capture] = {}


def _traced_of(plan: Plan) -> Hashable:
    """What of a plan decides of the captured graph: parameters in their order, as they are computed with."""
    parameters = tuple(
        (slot.leaf.names, tuple(slot.leaf.shape), slot.leaf.stride, slot.leaf.trainable, plan.compute_dtype(buffer))
        for buffer in plan.buffers
        for slot in buffer.slots
    )
    return parameters, plan.policy.precision, plan.axes, plan.device


def passes(rank: Rank, kind: str = "step") -> tuple[Pass, ...]:
    """The passes and fusions that make this kind of program."""
    wanted = {
        "step": step(rank.rules),
        "last microbatch": step(rank.rules, added=()),
        "microbatch": MICROBATCH,
        "gradient": GRADIENT,
        "forward": FORWARD,
    }[kind]
    target = Target(rank.plan, rank.rules, kind in ("step", "last microbatch", "microbatch"))
    return (*wanted, *fusions_for(target))


def before(found: Sequence[Program], name: str) -> int:
    """How many of these stages are before the pass of this name."""
    return [stage.history[-1] for stage in found].index(name)


def stages(
    model: nn.Module,
    optimizer: Optimizer | None,
    loss: Loss | None,
    batch: Batch,
    policy: Policy,
    *,
    shard: int = 2,
    replicate: int = 1,
    units: Choice | None = None,
    kind: str = "step",
    place: int = 0,
    traced_as: Hashable = None,
) -> tuple[tuple[Program, ...], Plan]:
    """The program after each pass, from the captured one on, as the rank at this place builds it; nothing is run.

    ``traced_as``: see `captured`.
    """
    with ranks(shard, replicate) as places:
        rank = enlist(model, optimizer, policy, places[place], units)
        found: list[Program] = []
        run(captured(rank, loss, batch, kind, traced_as), rank.plan, passes(rank, kind), found.append)
    return tuple(found), rank.plan


@dataclass
class Simulation:
    """Ranks in lock-step, and what came of it."""

    ranks: list[Rank]
    stages: tuple[Program, ...]
    losses: list[torch.Tensor] = field(default_factory=list)  # by step, the same on every rank
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # by buffer, then rank, of the last run

    @property
    def plan(self) -> Plan:
        return self.ranks[0].plan

    @property
    def program(self) -> Program:
        return self.stages[-1]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The full parameters, by first name."""
        return {
            slot.name: slot.of(whole)
            for buffer, (whole, *_) in self._replicas().items()
            for slot in self.plan.buffer(buffer).slots
        }

    @property
    def replicas_agree(self) -> bool:
        """Whether every copy of every parameter holds the same, bit for bit."""
        return all(torch.equal(replica, replicas[0]) for replicas in self._replicas().values() for replica in replicas)

    @property
    def padding(self) -> list[torch.Tensor]:
        """The elements that belong to no parameter, by buffer."""
        found = []
        for buffer, (whole, *_) in self._replicas().items():
            free = torch.ones_like(whole, dtype=torch.bool)
            for slot in self.plan.buffer(buffer).slots:
                free[slot.offset : slot.end] = False
            found.append(whole[free])
        return found

    @property
    def buffers(self) -> list[dict[str, torch.Tensor]]:
        """The module buffers, by rank."""
        return [rank.named("buffer") for rank in self.ranks]

    def _replicas(self) -> dict[str, list[torch.Tensor]]:
        """Each buffer's shards end to end, as often as the ranks hold them."""
        found: dict[str, list[torch.Tensor]] = {}
        for buffer in self.plan.buffers:
            shards = [rank.values[Port("in", "shard", buffer.key)] for rank in self.ranks]
            size = self.plan.shard if self.plan.placement.parameter else 1
            found[buffer.key] = [torch.cat(shards[start : start + size]) for start in range(0, len(shards), size)]
        return found

    def step(self, batches: Sequence[Batch]) -> None:
        """Runs the program on one batch a rank."""
        outputs = lockstep(self.program, self.ranks, batches)
        self.losses.append(_same(outputs[LOSS]))
        if NORM in outputs:
            self.norms.append(_same(outputs[NORM]))
        self.gradients = {port.name: values for port, values in outputs.items() if port.kind == "gradient"}


def simulate(
    model: nn.Module,
    optimizer: Optimizer | None,
    loss: Loss | None,
    batches: Sequence[Sequence[Batch]],
    policy: Policy,
    *,
    shard: int = 2,
    replicate: int = 1,
    units: Choice | None = None,
    kind: str = "step",
    microbatches: int = 1,
    weights: Sequence[Sequence[float]] = (),
    damage: Rewrite | None = None,
    traced_as: Hashable = None,
) -> Simulation:
    """Runs ``kind``'s program on ``batches[step][rank]``; so many of them in a row are the microbatches of one step.

    ``weights[step][rank]`` take the place of the batches' rows in programs that weigh ranks.
    ``damage`` rewrites the last program, unchecked, before it runs: a control that a comparison must notice.
    ``traced_as``: see `captured`.
    """
    if microbatches > 1:
        kind = "last microbatch"
    with ranks(shard, replicate) as places:
        crew = [enlist(model, optimizer, policy, place, units) for place in places]
        connect_neighbours(crew[0].mesh, crew[0].plan.neighbours.values())
        found: list[Program] = []
        program = captured(crew[0], loss, batches[0][0], kind, traced_as)
        run(program, crew[0].plan, passes(crew[0], kind), found.append)
        for rank in crew[1:]:
            for port, tensor in crew[0].values.items():
                if port.kind == "constant":
                    rank.values[port] = tensor.clone()
        if damage is not None:
            found.append(damage(found[-1], crew[0].plan))
        simulation = Simulation(crew, tuple(found))
        adding = run(found[0], crew[0].plan, passes(crew[0], "microbatch")) if microbatches > 1 else None
        for index, batch in enumerate(batches):
            if weights:
                for rank, weight in zip(crew, weights[index], strict=True):
                    rank.weight = weight
            if adding is not None and (index + 1) % microbatches:
                lockstep(adding, crew, batch)
            else:
                simulation.step(batch)
    return simulation


def lockstep(program: Program, crew: Sequence[Rank], batches: Sequence[Batch]) -> dict[Port, list[torch.Tensor]]:
    """Runs the program once on all ranks, each drawing from its own generator; outputs by port, then rank."""
    runner = lower(program, crew[0].mesh.groups, "eager")
    # Built outside the mode: inside it, a rank's plain tensor would be taken for a value of all ranks.
    given = [rank.inputs(program, batch) for rank, batch in zip(crew, batches, strict=True)]
    tensors = [LocalTensor(dict(enumerate(values))) for values in zip(*given, strict=True)]
    mode = LocalTensorMode(len(crew))
    with torch.random.fork_rng(devices=()), mode, torch.no_grad():
        for place, rank in enumerate(crew):
            mode._per_rank_rng_states[place] = (rank.random, mode._per_rank_rng_states[place][1])
        results = runner(*tensors)
        drawn = [mode._per_rank_rng_states[place][0] for place in range(len(crew))]
    for rank, state in zip(crew, drawn, strict=True):
        rank.random = state
    ports = [port for port in program.ports if port.side == "out"]
    return {
        port: [result._local_tensors[place] for place in range(len(crew))]
        for port, result in zip(ports, results, strict=True)
    }


def lower(program: Program, groups: Mapping[str, str], how: str) -> Runner:
    """A function of the program's inputs, in the order of its ports, that returns its outputs in order."""
    lowering = Lowering(program, groups, how)
    return lowering.runner(compile_all(lowering.pieces))


def uncompiled(program: Program, groups: Mapping[str, str], how: str) -> Runner:
    """The program with each distinct piece run by PyTorch."""
    lowering = Lowering(program, groups, "inductor", BLOCKS)

    def call(piece: Piece) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        module = piece.graph_module()

        def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return module(*inputs)

        run.__name__ = f"piece_{piece.key()}"
        return run

    return lowering.runner({key: call(piece) for key, piece in lowering.pieces.items()})


def _same(values: Sequence[torch.Tensor]) -> torch.Tensor:
    seen = [value.nan_to_num(nan=1.5e30) for value in values]  # NaN is equal to NaN here
    assert all(torch.equal(value, seen[0]) for value in seen), f"the ranks see different numbers: {values}"
    return values[0]
