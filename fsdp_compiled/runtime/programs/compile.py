"""Makes one kind of program for one shape of batch: captures it and runs the passes on it.

Of the programs after each pass, the stages, only the last is kept: the others are made again when somebody looks at
them. A step of 96 layers has 15,000 nodes and some seven passes, each of which would leave a copy. Passes are pure:
running them again gives the same program, name for name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property, partial
from typing import Any, Literal, Protocol

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fsdp_compiled import passes
from fsdp_compiled.analysis import memory, peak_memory
from fsdp_compiled.analysis.best_effort import attempt, reason
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.capture.captured import Capture, batch_tensors
from fsdp_compiled.capture.dynamic_shapes import Sizes, shape_text
from fsdp_compiled.capture.fake_inputs import capture_on
from fsdp_compiled.capture.global_modes import GlobalModes, outside_modes
from fsdp_compiled.ir.node_copies import Kept
from fsdp_compiled.ir.nodes import calls, is_random, may_be_random
from fsdp_compiled.ir.program import CALL, SILENT, Port, Program
from fsdp_compiled.lower.fusions import Target, fusions_for
from fsdp_compiled.lower.lowering import Boxed, Runner
from fsdp_compiled.lower.pending_collectives import PendingCollectives
from fsdp_compiled.lower.split_forward_backward import SplitProgram, cut
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.passes import Pass
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.param_step_counts import Names, reached_by
from fsdp_compiled.runtime.programs import memory_budget
from fsdp_compiled.runtime.programs.input_binding import InputBinding, check_arguments
from fsdp_compiled.runtime.programs.result_aliases import Alias, aliases_of
from fsdp_compiled.runtime.programs.training import Backward, Training, training_of
from fsdp_compiled.runtime.shared_memory import check_written
from fsdp_compiled.runtime.state import Rooms

# "accumulate" is a microbatch that is not the last, "last" the one that ends a row and updates.
# "training" is a forward that a loop of the user's differentiates outside of the program.
Kind = Literal["step", "last", "accumulate", "gradient", "training", "forward"]


# Types whose values a program depends on; other leaves of a batch are objects that it cannot take.
PLAIN = bool | int | float | complex | str | Enum | torch.dtype | torch.device | None
Later = Callable[[Program], Callable[[], Memory]]


class Constants(Protocol):
    """The object that holds the tensors that programs close over and write to."""

    constants: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stages:
    """``first``: the kept stages but the last, from the captured program on; ``last``: makes the last kept stage again;
    ``rest``: the passes that follow it."""

    first: tuple[Program, ...]
    last: Callable[[], Program]
    rest: tuple[Pass, ...]
    plan: Plan

    def captured(self) -> Program:
        """The captured program, before any pass."""
        return self.first[0] if self.first else self.last()

    def until(self, program: Program) -> tuple[Program, ...]:
        """All stages from the captured program to this program, which is the last."""
        made: list[Program] = []
        with outside_modes():
            passes.run(self.last(), self.plan, self.rest, made.append)
        if made[-1].text() != program.text():
            raise RuntimeError("The passes made another program than they had: one of them is not pure.")
        return (*self.first, *made[:-1], program)


@dataclass(frozen=True)
class Transformed:
    """``captured``: makes the captured program again. ``stages``: the result of the last pass alone; under a memory
    budget, which may run some passes again, the captured program and the result of each pass."""

    captured: Callable[[], Program]
    stages: list[Program]


@dataclass
class Compiled:
    """A program, with all that running it on a state and a batch needs."""

    program: Program
    capture: Capture
    known: Stages
    predicted: Callable[[], Memory]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    random: bool
    shared: bool  # whether it draws random numbers that are the same on all ranks along the tp axis
    parts: bool  # whether it draws random numbers that differ between ranks along the tp axis, if there is one
    copied: bool  # whether it reads copies of shards
    compared: bool  # whether ranks compare inside it which program they run
    weighed: bool  # whether it reads the weight of this rank's batch
    idle: tuple[str, ...]  # parameters that the loss does not reach
    adds: Names  # parameters that have a gradient in it
    unreached: Names  # parameters that its loss does not reach
    added: Names  # of these, those it updates since earlier microbatches reached them
    counted: Mapping[str, Names]  # by rules' keys, the parameters whose steps are counted
    kind: Kind
    label: str
    number: int  # the same on every rank for the same program
    wire: str
    input_binding: InputBinding
    lowered: str = ""  # its pieces and what compiled them, once it is lowered
    runner: Runner = lambda *_: ()  # until it is lowered
    pending: PendingCollectives = field(init=False)  # once it is lowered
    split: SplitProgram | None = None  # of a "training" program, whose runner is the forward one
    reached: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by parameter or input: the results it affects
    backward: Boxed = lambda _: ()  # until it is lowered
    whole: Backward | None = None  # backward without communication; None until it is needed
    fitting: set[tuple[int, ...]] = field(default_factory=set)  # sizes of batches that it is known to fit

    @cached_property
    def training(self) -> Training:
        """What running the forward and backward of a "training" program needs; only once it is lowered."""
        assert self.split is not None
        return training_of(self.split, self.inputs, self.outputs, self.reached, self.backward)

    @cached_property
    def aliases(self) -> tuple[Alias, ...]:
        """The results that share memory with inputs, buffers or other results in eager PyTorch."""
        copies = 1 if self.kind == "training" else 2
        return aliases_of(self.program, self.inputs, copies, self.capture.replaced)

    @property
    def stages(self) -> tuple[Program, ...]:
        """The program after each pass; all but the last are made again."""
        return self.known.until(self.program)

    @cached_property
    def rooms(self) -> Rooms:
        """Host memory for values that forward keeps there."""
        return Rooms(self.program)

    @property
    def memory(self) -> Memory:
        return self.predicted()

    @property
    def updates(self) -> bool:
        return self.kind in ("step", "last")

    def zeros(self) -> dict[str, torch.Tensor]:
        """Zeros for the sums that the program adds to."""
        wanted = {port.key: node.meta["val"] for port, node in self.program.inputs.items() if port.kind == "sum"}
        return {
            name: torch.zeros(value.shape, dtype=value.dtype, device=value.device) for name, value in wanted.items()
        }

    def read_closed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes the program read these tensors instead of those that it closed over."""
        if tensors:
            self.capture.guards.closed.replace(tensors)
            self.capture.constants.update({name: tensor.detach() for name, tensor in tensors.items()})
            self.input_binding.forget()

    def constants(self, state: Constants) -> Mapping[str, torch.Tensor]:
        """The tensors that the program closes over. From now on, the state holds those that the program writes to."""
        written = self.capture.written_constants
        for name in written:
            state.constants.setdefault(name, self.capture.constants[name])
        return {**self.capture.constants, **{name: state.constants[name] for name in written}}


@dataclass(frozen=True)
class ProgramSpec:
    """A program before it is made: the call, the model and the plan. Equal on all ranks but for the batch."""

    kind: Kind
    loss: Callable[..., Any] | None
    plan: Plan
    rules: tuple[Rule, ...]
    buffers: Mapping[str, torch.Tensor]
    plain: Mapping[str, torch.Tensor]  # parameters that are not in the plan
    batch: tuple[Any, ...]
    named: dict[str, Any]
    label: str
    number: int
    sizes: Sizes
    hints: Sizes
    modes: GlobalModes
    gloo: tuple[str, ...]  # the axes whose collectives gloo carries out
    tuned: bool  # whether Inductor, on any rank, is told to choose among kernels for products
    called: Callable[..., Any] | None = None  # in a loop of the user's, calls the model; then there is no loss
    tp_mesh: DeviceMesh | None = None
    groups: dict[str, str] | None = None  # process groups, by their names in programs
    added: Names = frozenset()  # parameters that have gradients in the sums of microbatches

    @property
    def passes(self) -> tuple[Pass, ...]:
        if self.kind in ("step", "last"):
            return passes.step(self.rules, self.added if self.kind == "last" else None)
        others = {"accumulate": passes.MICROBATCH, "gradient": passes.GRADIENT, "training": passes.OUTPUTS}
        return others.get(self.kind, passes.FORWARD)

    @property
    def fusions(self) -> tuple[Pass, ...]:
        trains = self.kind in ("step", "last", "accumulate")
        return fusions_for(Target(self.plan, self.rules, trains, self.gloo, self.tuned))


# The steps of making a program, in order; `ProgramMaker.compile` runs them.


def capture(model: nn.Module, spec: ProgramSpec) -> Capture:
    """Captures the call as a program, before any pass."""
    loss = None if spec.kind == "forward" else spec.loss
    check_arguments(model, loss, spec.batch, spec.named, getattr(spec.called, "method", "forward"))
    captured = capture_on(
        model, spec.called or loss, spec.plan, spec.buffers, spec.batch, spec.named, gradient=spec.kind != "forward",
        results=spec.called is not None, plain=spec.plain, sizes=spec.sizes, hints=spec.hints, modes=spec.modes,
        tp_mesh=spec.tp_mesh, groups=spec.groups,
    )  # fmt: skip
    held = {**captured.constants, **spec.buffers}
    check_written(captured.written, held, [*batch_tensors(spec.batch, spec.named).values()])
    return captured


def transform(captured: Capture, spec: ProgramSpec) -> Transformed:
    """Runs the passes on the captured program. They consume its graph."""
    program, plan = captured.program, spec.plan
    if plan.policy.memory_gb is None:
        kept = Kept(program)
        made = passes.run(replace(program, donated=True), plan, spec.passes, again=kept.program)
        return Transformed(kept.program, [made])
    stages: list[Program] = []
    passes.run(program, plan, spec.passes, stages.append)
    return Transformed(lambda: program, stages)


def memory_later(captured: Capture, spec: ProgramSpec) -> Later:
    """A function that, of a program, returns one that predicts its memory on a rank.

    A prediction that fails says so, and stops nothing. It is made only when somebody asks, since running the program
    does not need it. It keeps no tensors alive.
    """
    plan, held = spec.plan, partial(memory.persistent, spec.plan, spec.rules, spec.buffers, captured.constants)

    def later(program: Program) -> Callable[[], Memory]:
        try:
            now = held(program)
        except Exception as error:
            failed = memory.unpredicted(reason(error))
            return lambda: failed
        return cache(lambda: attempt(lambda: peak_memory.predict(program, plan, now), memory.unpredicted))

    return later


def has_host_memory(spec: ProgramSpec) -> bool:
    """Whether values may wait in host memory: it is not the device's own, and the program contains backward."""
    return spec.plan.device.type != "cpu" and spec.kind != "training"


def fit_to_memory(made: Transformed, later: Later, spec: ProgramSpec) -> Transformed:
    """Replaces the last stages if the program that will run, after fusions, needs more than `Policy.memory_gb`."""
    fused = lambda one: later(passes.run(one, spec.plan, spec.fusions))()  # noqa: E731
    fitting = memory_budget.fit(made.stages, spec.plan, fused, spec.passes, has_host_memory(spec))
    return replace(made, stages=fitting)


def fuse(made: Transformed, spec: ProgramSpec) -> tuple[Program, Stages]:
    """Runs the fusions on the last of these stages. Also returns all stages."""
    last, plan, fusions = made.stages[-1], spec.plan, spec.fusions
    if plan.policy.memory_gb is not None:
        known = Stages(tuple(made.stages[:-1]), lambda: last, tuple(fusions), plan)
        return passes.run(last, plan, fusions), known
    if fusions:
        again = lambda: passes.run(made.captured(), plan, spec.passes)  # noqa: E731
        last = passes.run(replace(last, donated=True), plan, fusions, again=again)
    return last, Stages((), made.captured, (*spec.passes, *fusions), plan)


def finished(program: Program, needed: Callable[[], Memory]) -> Program:
    """The program after the last pass, which when printed says what it needs."""
    return replace(
        program,
        inferred=None,  # no pass follows
        needs=lambda: attempt(lambda: needed().lines(), lambda why: (f"memory: not predicted: {why}",)),
        peak=lambda: attempt(lambda: needed().peak.node, lambda _: ""),
    )


def describe(
    captured: Capture,
    program: Program,
    known: Stages,
    later: Later,
    spec: ProgramSpec,
    moving: Mapping[str, frozenset[str]],
) -> Compiled:
    """The program that will run, and all that is asked of it later. ``moving``: the results each parameter affects."""
    needed = later(program)
    program = finished(program, needed)
    split = cut(program) if spec.kind == "training" else None
    first = split.forward if split is not None else program
    inputs = tuple(port for port in first.ports if port.side == "in")
    notes = [node.meta for node in program.inputs.values()]
    idle, added = (tuple(name for meta in notes for name in meta.get(key, ())) for key in ("idle", "added"))
    drawn = [node for node in calls(program.graph, may_be_random) if is_random(node)]
    return Compiled(
        program,
        replace(captured, program=replace(captured.program, graph=fx.Graph())),  # the passes keep the graph
        known,
        needed,
        inputs=inputs,
        outputs=tuple(port for port in first.ports if port.side == "out"),
        random=bool(drawn),
        shared=any(node.meta.get("shared") for node in drawn),
        parts=any(not node.meta.get("shared") for node in drawn),
        copied=any(port.kind == "copy" for port in inputs),
        compared=CALL in inputs,
        weighed=any(port.kind == "rows" for port in inputs),
        idle=idle,
        adds=frozenset(slot.name for buffer in spec.plan.buffers if buffer.updated for slot in buffer.slots) - {*idle},
        unreached=frozenset(idle + added),
        added=frozenset(added),
        counted=reached_by(idle, spec.plan, spec.rules) if spec.kind in ("step", "last") else {},
        kind=spec.kind,
        label=spec.label,
        number=spec.number,
        wire=_wire(program, split),
        input_binding=InputBinding(inputs, spec.batch, spec.named),
        split=split,
        reached=moving,
    )


def _wire(program: Program, split: SplitProgram | None) -> str:
    """A digest of all communication of the call and of the backward after it."""
    if split is None:
        return program.wire
    both = split.forward.wire, split.backward.wire
    return hashlib.sha256(repr(both).encode()).hexdigest()[:8] if set(both) != {SILENT} else SILENT


def plain(value: Any) -> tuple[type, str]:
    """The part of a batch entry that a program depends on, if it is no tensor; 1, 1.0 and True need three programs."""
    if isinstance(value, Enum):
        return type(value), value.name
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if type(value) in (set, frozenset):
        return type(value), repr(list(map(plain, value)))  # in iteration order, which forward may depend on
    raise ValueError(
        f"The batch holds a {type(value).__module__}.{type(value).__qualname__}. Pass tensors, numbers and strings, in "
        "tuples, lists and dictionaries (a batch that is a mapping: as **batch), or register the class with pytree."
    )


def rows_of(tensors: Iterable[torch.Tensor]) -> int:
    """The first dim's size of the batch's first tensor that has a dim."""
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)
    if rows is None:
        raise ValueError('Policy(weigh="rows") counts the rows of the batch, but it has no tensor with rows.')
    return rows


def check_devices(batch: tuple[Any, ...], named: Mapping[str, Any], device: torch.device) -> None:
    """Raises ``ValueError`` for a tensor of the batch that is not on the shards' device."""
    for place, tensor in batch_tensors(batch, named).items():
        if tensor.device != device:
            raise ValueError(
                f"batch{place} is on {tensor.device}, but the model's shards are on {device}. "
                f"Move the whole batch: tensor.to({str(device)!r})."
            )


def label_of(kind: Kind, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes) -> str:
    """``step (float32[4, 8], labels=int64[4])``: the call of a rank, as text for people and for the other ranks."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{shape_text(value, sizes)}"
        return repr(value)

    args = [str(pytree.tree_map(one, value)) for value in batch]
    args += [f"{name}={pytree.tree_map(one, value)}" for name, value in named.items()]
    return f"{kind} ({', '.join(args)})".replace("'", "")
