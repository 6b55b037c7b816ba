"""Compares training steps with eager PyTorch: the user's own model, loss and optimizer, on the same weights, batch,
modes and random numbers.

    verify=True    the first two calls of each program                  verify=1000    and every 1000th after them

    eager run      forward, loss and backward, by the model's own code; each unit is gathered while it is read
    program        the step itself
    compare        loss, what else was returned, buffers, gradients, norm, and each updated element; where they differ,
                   state and random numbers are put back, the program is dropped, and every rank raises

Gradients of two programs differ by rounding (`eager_comparison`), and an optimizer such as Adam magnifies this: a
gradient that is zero except for rounding moves a weight by the whole rate, up or down. So the optimizer runs three
times on copies of the shards: on the eager gradient, and on that gradient plus and minus what rounding explains. The
program's updates must lie between the results. An element is compared if its gradient is more than rounding, or if it
has none.

Of the microbatches that one step sums up, all are run eagerly, or none. The loss of each is compared, and for the step
the mean of all their gradients.

The eager run (`eager_run`) gathers parameters by the place that each rank reports, not through the program's process
groups. Under `Policy.sync_every` all of this is among the ranks of a site. All sites verify the same steps, by their
number, since they may run different programs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.captured import Capture, find_loss
from fsdp_compiled.capture.fake_inputs import casting
from fsdp_compiled.capture.tensor_parallel import whole
from fsdp_compiled.distributed.mesh import exchange
from fsdp_compiled.ir.program import COUNT, NORM, OVERFLOW, Port
from fsdp_compiled.optim.given_optimizer import numbered
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Buffer, Slot
from fsdp_compiled.runtime.eager_comparison import (
    TINY,
    ProgramDiffers,
    VerifiedPrograms,
    buffers_off,
    gradient_bound,
    largest,
    moved_by_wire,
    off,
    result_off,
    returned_off,
)
from fsdp_compiled.runtime.eager_run import EagerRun, Place
from fsdp_compiled.runtime.managed_model import ManagedModel
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.rng import RandomNumbers
from fsdp_compiled.runtime.shard_update import ShardUpdate
from fsdp_compiled.runtime.state import State, wait_for_host_memory

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_, beside the norm
Sums = dict[str, torch.Tensor]


@dataclass
class Gradient:
    """This rank's shard of a buffer's mean gradient; ``spread``: how far rounding may move each element."""

    mean: torch.Tensor
    spread: torch.Tensor

    @property
    def tells(self) -> torch.Tensor:
        """Which elements' updates are known: those whose gradient is more than rounding, or that have none."""
        return (self.mean.abs() > 4 * self.spread) | (self.spread == 0)


@dataclass
class Microbatches:
    """Eager PyTorch's results on this rank for the microbatches that the next step sums up, each times its weight.
    ``rounded``: by buffer, how far the wire may move them (`sent_apart`)."""

    loss: float = 0.0
    weight: float = 0.0
    gradients: Sums = field(default_factory=dict)
    rounded: Sums = field(default_factory=dict)

    def with_one(self, loss: float, weight: float, run: EagerRun) -> Microbatches:
        """These and one more microbatch. One of weight zero may hold anything, and is left out."""
        if not weight:
            return self
        gradients = _added(self.gradients, run.gradients, weight)
        rounded = _added(self.rounded, run.rounded(), weight)
        return Microbatches(self.loss + loss * weight, self.weight + weight, gradients, rounded)


def _added(sums: Sums, more: Sums, weight: float) -> Sums:
    own = {name: one * weight if weight != 1 else one for name, one in more.items()}
    return {**sums, **{name: sums[name] + one if name in sums else one for name, one in own.items()}}


@dataclass
class Expected:
    """What eager PyTorch gave, and a copy of the state before. ``reached``: the parameters that have gradients.
    ``summed``: this microbatch and those before it; ``norm_bound``: how far rounding may move the norm."""

    compiled: Compiled
    result: Any
    mean: float
    changed: str
    before: State
    rules: Sequence[Rule]
    values: Mapping[str, float]
    summed: Microbatches
    took: float = 0.0
    norm: float = 0.0
    norm_bound: float = 0.0
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, Gradient] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)


class Verification:
    """Which calls of one `Sharded` are verified, and how."""

    def __init__(
        self, taken: ManagedModel, programs: Programs, optimizer: Optimizer | None, numbers: RandomNumbers
    ) -> None:
        plan, mesh = programs.plan, programs.mesh
        self._taken, self._loss, self._optimizer = taken, programs.loss, optimizer
        self._local = plan.policy.sync_every is not None
        self._plan, self._mesh, self._numbers = plan, mesh.site if self._local else mesh, numbers
        self.programs = VerifiedPrograms(programs, self._mesh)
        self._counts: dict[int, int] = {}  # of good calls, by program's number
        self._summed: Microbatches | None = None  # since the last step, where they are verified
        self._steps = 0

    def due(self, compiled: Compiled, state: State) -> bool:
        """Whether this call of the program is verified. The same on every rank, since all made the same good calls."""
        kind, count = compiled.kind, self._counts.get(compiled.number, 0)
        if kind == "training" or (kind == "forward" and not self._meets()):
            return False
        if self._local and kind in ("forward", "gradient"):
            return False
        if self.programs.draws_otherwise(compiled):
            return False
        steps = self.programs.due(self._steps)
        if kind in ("accumulate", "last"):
            if self._summed is None and not steps:
                return False
            summed = float(state.sums[COUNT.key]) if state.sums else 0.0
            if not summed:
                self._summed = Microbatches() if steps else None
            return self._summed is not None and self._summed.weight == summed
        return steps or not count if self._local else self.programs.due(count)

    def _meets(self) -> bool:
        """Whether an evaluation is a call of all ranks: else each may make its own."""
        return self._mesh.world == 1 or (self._plan.placement.parameter and self._mesh.shard > 1)

    def label(self, compiled: Compiled) -> str:
        """What ranks call the eager run. Sites may run different programs."""
        return "verification of a local step" if self._local else f"verification of {compiled.label}"

    def returned(self, compiled: Compiled) -> None:
        """Counts a good call."""
        self._counts[compiled.number] = self._counts.get(compiled.number, 0) + 1
        self._steps += compiled.kind == "last" or (self._local and compiled.kind == "step")

    def run(
        self, compiled: Compiled, request: Request, state: State, rows: float, rules: Sequence[Rule],
        values: Mapping[str, float],
    ) -> Expected:  # fmt: skip
        """Runs the model eagerly on what the program is about to read. Collective; nothing is changed by it.

        ``rows``: how many this rank's batch has; ``values``: those of the optimizer's scheduled numbers.
        """
        begun = time.perf_counter()
        changed = self.programs.changed(compiled, self._taken.model)
        wait_for_host_memory(self._plan)
        own, failure, result = 0.0, None, None
        run = EagerRun(self._plan, self._mesh, state.parameters, _place_of)
        closed = compiled.capture.guards.closed.tensors.values()
        scale = float(state.scale["factor"]) if state.scale else 1.0
        evaluates = compiled.kind == "forward"
        compares = self.programs.gradients and not evaluates
        loss_of = None if evaluates else self._loss
        try:
            with (
                self._taken.open() as model,
                self._numbers.repeated(state.drawn_from),
                request.modes.entered(),
                torch.set_grad_enabled(not evaluates),
                casting(model, self._plan.policy.precision),
                run.reading(model, loss_of, [*request.tensors, *closed, *request.closed.values()]),
            ):
                call = model if loss_of is None else loss_of
                batch, named = pytree.tree_map(
                    lambda one: one, (request.batch, request.named)
                )  # copies containers, which the code may change
                result = call(*(() if loss_of is None else (model,)), *batch, **named)
                if not evaluates:
                    loss = whole(find_loss(result, self._loss))
                    own = float(loss.detach())
                    if compares and loss.requires_grad:
                        run.backward([loss], [torch.full_like(loss, scale)])
                result = pytree.tree_map_only(torch.Tensor, lambda one: whole(one.detach()).clone(), result)
        except Exception as error:
            failure = error
        run.end(
            failure,
            f"the model does not run in eager PyTorch, where {compiled.label} would run as it was traced{changed}",
            "Nothing was updated.",
        )
        weight = rows if self._plan.policy.weigh == "rows" else 1.0
        before = self._summed if compiled.kind in ("accumulate", "last") else None
        summed = (before or Microbatches()).with_one(own, weight, run)
        told = exchange((summed.loss, summed.weight), self._mesh)
        total = sum(one for _, one in told)
        mean = sum(value for value, _ in told) / total if total else math.nan  # no rank has rows
        mean = own if compiled.kind == "accumulate" else mean
        copy = pytree.tree_map(torch.clone, state)
        expected = Expected(compiled, result, mean, changed, copy, rules, dict(values), summed, buffers=run.buffers)
        if compares and total and compiled.kind != "accumulate":
            run.gradients = summed.gradients
            self._average(run, self._mesh.tp / total / scale, expected)
        expected.took = time.perf_counter() - begun
        return expected

    @torch.no_grad()
    def _average(self, run: EagerRun, weight: float, expected: Expected) -> None:
        """The mean gradients of all ranks, before they are clipped. Collective."""
        plan, updates = self._plan, expected.compiled.updates
        cut = plan.placement.state if updates else plan.placement.gradient
        squares, most, moved_squares = [0.0, 0.0], 0.0, 0.0  # of tensors whole along tp, and of this rank's parts
        share, least = gradient_bound(plan)
        for buffer, means, rounded in run.means(weight, expected.summed.rounded):
            flat = torch.zeros(buffer.numel, dtype=torch.promote_types(buffer.dtype, torch.float32), device=plan.device)
            spread = torch.zeros_like(flat)
            for slot in buffer.slots:
                if (mean := means.get(slot.name)) is not None:
                    slot.of(flat).copy_(mean)
                    size = largest(mean)
                    spread[slot.offset : slot.end] = share * size + TINY
                    most = max(most, size)
            if len(rounded):
                moved = moved_by_wire(rounded, plan) * (spread > 0)
                spread += moved
                moved_squares += float(moved.double().square().sum()) if buffer.updated else 0.0
            expected.reached |= means.keys()
            squares[buffer.split] += float(flat.double().square().sum()) if buffer.updated else 0.0
            own = [plan.own(one, self._mesh.shard_rank, cut).clone() for one in (flat, spread)]
            expected.gradients[buffer.key] = Gradient(*own)
        parts = sum(exchange(squares[1], self._mesh)) * self._mesh.tp / self._mesh.world
        expected.norm = (squares[0] + parts) ** 0.5
        expected.norm_bound = 10 * share * expected.norm + moved_squares**0.5 + TINY
        for one in expected.gradients.values():
            one.spread += (one.spread > 0) * least * most

    def compare(
        self, expected: Expected, found: Any, outputs: Mapping[Port, torch.Tensor], state: State,
        again: Callable[[], Capture],
    ) -> None:  # fmt: skip
        """Raises `ProgramDiffers` on every rank if the program's results, or its changes to the state, differ from
        eager PyTorch.

        Before that, the state is restored. ``again``: traces the same call. Collective.
        """
        waited = time.perf_counter()
        wait_for_host_memory(self._plan)
        compiled = expected.compiled
        said = (
            self._results_off(expected, found)
            or buffers_off(state.buffers, expected.buffers, self._plan)
            or self._gradients_off(expected, outputs, state)
        )
        try:
            put_back = "The state was put back to what it was before the step. "
            self.programs.agree(said, expected.changed, compiled, again, before=put_back)
        except ProgramDiffers:
            self._put_back(expected.before, state)
            raise
        if compiled.kind in ("accumulate", "last"):  # an evaluation between them leaves them
            self._summed = expected.summed if compiled.kind == "accumulate" else None
        loss = "" if compiled.kind == "forward" else f", loss {expected.mean:.6g}"
        self.programs.alike(compiled, expected.took + time.perf_counter() - waited, loss)

    @torch.no_grad()
    def _put_back(self, before: State, state: State) -> None:
        for name in ("parameters", "buffers", "optimizer", "constants", "sums", "scale"):
            now, values = getattr(state, name), getattr(before, name)
            for key in now.keys() - values.keys():
                del now[key]
            for key, value in values.items():
                now[key].copy_(value)
        state.step.copy_(before.step)
        state.random.copy_(before.random)
        _ = state.random  # reading copies it to the generator
        self._taken.layout.written()

    def _results_off(self, expected: Expected, found: Any) -> str | None:
        if expected.compiled.kind == "forward":
            return returned_off(found, expected.result, self._plan)
        loss, theirs = (find_loss(one, self._loss) for one in (found, expected.result))
        mean = theirs.new_tensor(expected.mean)
        said = result_off("the loss", whole(loss), mean, self._plan)
        return said or returned_off(found, expected.result, self._plan, theirs)

    def _gradients_off(self, expected: Expected, outputs: Mapping[Port, torch.Tensor], state: State) -> str | None:
        """Says where gradients, their norm or the updates from them differ from eager PyTorch; None: nowhere."""
        if not expected.gradients or (OVERFLOW in outputs and bool(outputs[OVERFLOW])):
            return None
        updates, theirs = expected.compiled.updates, torch.tensor(expected.norm)
        norm = outputs.get(NORM, theirs)
        if said := off("the gradient's norm", norm, theirs, expected.norm_bound):
            return said
        for buffer in (one for one in self._plan.buffers if one.key in expected.gradients):
            one = expected.gradients[buffer.key]
            if updates:
                self._clip(one, float(norm))
            mine = outputs.get(Port("out", "update" if updates else "gradient", buffer.key))
            idle = expected.reached.intersection(expected.compiled.idle)  # of which the program knows no gradient
            slots = buffer.slots if mine is not None else [slot for slot in buffer.slots if slot.name in idle]
            values = torch.zeros_like(one.mean) if mine is None else mine
            bound = one.spread + 4 * torch.finfo(values.dtype).eps * one.mean.abs()
            what = "the gradient of {}"
            if said := self._off(buffer, slots, what, values, one.mean, bound, one.mean.isfinite(), updates):
                return said
        return self._updates_off(expected, state) if updates else None

    def _clip(self, one: Gradient, norm: float) -> None:
        """As the program does, by its own norm, which was compared."""
        policy = self._plan.policy
        if policy.clip is not None:
            factor = min(1.0, policy.clip / (norm + EPSILON))
            one.mean, one.spread = one.mean * factor, one.spread * factor
        if policy.clip_value is not None:
            one.mean = one.mean.clamp(-policy.clip_value, policy.clip_value)

    def _updates_off(self, expected: Expected, state: State) -> str | None:
        """Says where the program's update differs from that of the optimizer's own code; None: nowhere."""
        between: dict[tuple[str, str], list[torch.Tensor]] = {}  # by buffer's key, and the name in the state or ""
        idle = {slot.name for buffer in self._plan.buffers for slot in buffer.slots} - expected.reached
        try:
            for factor in (0.0, 1.0, -1.0):
                for place, value in self._update(expected, factor, idle):
                    low, high = between.setdefault(place, [value.clone(), value.clone()])
                    torch.minimum(low, value, out=low)
                    torch.maximum(high, value, out=high)
        except Exception as error:
            self.programs.tell(f"the update of {type(self._optimizer).__name__} is not compared: {error}")
            return None
        for (key, name), (low, high) in between.items():
            before, after = (
                one.optimizer[f"{key}.{name}"] if name else one.parameters[key] for one in (expected.before, state)
            )
            size = torch.stack([low, high, before]).double().abs().amax(0)  # of what was added, whose rounding it has
            bound = (high.double() - low) + 4 * torch.finfo(after.dtype).eps * size + TINY
            middle, buffer = (high.double() + low) / 2, self._plan.buffer(key)
            what = f"the optimizer's {name} of " * bool(name) + "{}, after its update,"
            tells = expected.gradients[key].tells
            if said := self._off(buffer, buffer.slots, what, after, middle, bound, tells, True):
                return said
        return None

    def _update(
        self, expected: Expected, factor: float, idle: Collection[str]
    ) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        """Yields shards and per-element state after the optimizer's own step on gradients moved by ``factor``."""
        shards = {key: value.clone() for key, value in expected.before.parameters.items()}
        state = {key: value.clone() for key, value in expected.before.optimizer.items()}
        outputs = {
            Port("out", "update", key): (one.mean + factor * one.spread).to(shards[key])
            for key, one in expected.gradients.items()
        }
        for optimizer, first in numbered(self._optimizer) if self._optimizer is not None else ():
            groups = range(first, first + len(optimizer.param_groups))
            traced = {rule.group: rule for rule in expected.rules if rule.group in groups and rule.eagerly is None}
            if traced:
                ShardUpdate(optimizer, list(traced.values()), first, self._plan, self._mesh).run(
                    expected.rules, expected.values, state, shards, outputs, idle
                )
            for buffer in self._plan.buffers:
                if buffer.updated and buffer.group in traced and buffer.key in expected.gradients:
                    yield (buffer.key, ""), shards[buffer.key]
                    for entry in traced[buffer.group].state:
                        if not entry.scalar:
                            yield (buffer.key, entry.name), state[f"{buffer.key}.{entry.name}"]

    def _off(
        self, buffer: Buffer, slots: Sequence[Slot], what: str, mine: torch.Tensor, theirs: torch.Tensor,
        bound: torch.Tensor, known: torch.Tensor, updates: bool,
    ) -> str | None:  # fmt: skip
        """`off` by parameter, of values that lie as this rank's elements of the buffer do."""
        placement = self._plan.placement
        cut = placement.state if updates else placement.gradient
        for slot in slots:
            part = self._plan.part(buffer, slot, self._mesh.shard_rank, cut)
            if said := off(what.format(slot.name), *(part.of(one.detach()) for one in (mine, theirs, bound, known))):
                return said
        return None


def _place_of(tensor: Any) -> Place | None:
    return (tensor._sharded_place.buffer.key, tensor._sharded_place.name) if is_live(tensor) else None
