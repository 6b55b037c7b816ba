"""Compares training steps with eager PyTorch: the user's own model, loss and optimizer, on the same weights, batch,
modes and random numbers.

    verify=True    the first two calls of each program                  verify=1000    and every 1000th after them

    eager run      forward, loss and backward, by the model's own code; each unit is gathered while it is read
    program        the step itself
    compare        loss, what else was returned, gradients, norm, and each updated element; where they differ, state and
                   random numbers are put back, and every rank raises

Gradients of two programs differ by rounding, and an optimizer such as Adam magnifies this: a gradient that is zero
except for rounding moves a weight by the whole rate, up or down. So the optimizer runs three times on copies of the
shards: on the eager gradient, and on that gradient plus and minus what rounding explains. The program's updates must
lie between the results. Only elements are compared whose gradient is more than rounding, or that have none.

Of the microbatches that one step sums up, all are run eagerly, or none. The loss of each is compared, and for the step
the mean of all their gradients.

The eager run (`eager_run`) gathers parameters by the place that each rank reports, not through the program's process
groups.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.captured import find_loss
from fsdp_compiled.capture.fake_inputs import casting
from fsdp_compiled.capture.mutations import PLAIN
from fsdp_compiled.capture.tensor_parallel import own_part, whole
from fsdp_compiled.distributed.mesh import Mesh, RankError, exchange, said_by
from fsdp_compiled.ir.program import COUNT, NORM, OVERFLOW, Port
from fsdp_compiled.optim.given_optimizer import numbered
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.eager_run import EagerRun, Place
from fsdp_compiled.runtime.managed_model import ManagedModel
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.rng import RandomNumbers
from fsdp_compiled.runtime.shard_model import read_slot
from fsdp_compiled.runtime.shard_update import ShardUpdate
from fsdp_compiled.runtime.state import State, wait_for_host_memory
from fsdp_compiled.torch_private.names import there

FIRST = 2  # so many first calls of each program are verified, including the one that compiled it
# How far two computations of one number may differ: relative to it, and in absolute terms.
BOUNDS = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
HALF = (3e-2, 1e-3)
# The same for an element of a gradient: relative to the parameter's largest element, and to the model's.
GRADIENTS = {torch.float64: (1e-8, 1e-12), torch.float32: (1e-3, 1e-6)}
HALF_GRADIENTS = (0.1, 1e-3)
TINY = 1e-30
EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_, beside the norm
CURE = (
    "The state was put back to what it was before the step. If the code changed since it was traced in a way that is "
    "not seen, build the Sharded again, or change a guarded value; Policy(verify=False) turns the comparison off."
)
log = logging.getLogger("fsdp_compiled")


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
    """Eager PyTorch's results on this rank for the microbatches that the next step sums up, each times its weight."""

    loss: float = 0.0
    weight: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def with_one(self, loss: float, weight: float, gradients: Mapping[str, torch.Tensor]) -> Microbatches:
        """These and one more microbatch. One of weight zero may hold anything, and is left out."""
        if not weight:
            return self
        own = {name: one * weight if weight != 1 else one for name, one in gradients.items()}
        total = {name: self.gradients[name] + one if name in self.gradients else one for name, one in own.items()}
        return Microbatches(self.loss + loss * weight, self.weight + weight, {**self.gradients, **total})


@dataclass
class Expected:
    """What eager PyTorch gave, and what the state was then. ``reached``: the parameters that have gradients.
    ``summed``: this microbatch and those before it."""

    owner: Verification
    compiled: Compiled
    result: Any
    mean: float
    changed: str
    before: Mapping[str, dict[str, torch.Tensor]]
    step: torch.Tensor
    drawn: torch.Tensor
    rules: Sequence[Rule]
    values: Mapping[str, float]
    took: float
    summed: Microbatches
    norm: float = 0.0
    gradients: dict[str, Gradient] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)


class Verification:
    """Which calls of one `Sharded` are verified, and how."""

    def __init__(
        self, taken: ManagedModel, loss: Callable[..., Any] | None, optimizer: Optimizer | None, plan: Plan,
        mesh: Mesh, numbers: RandomNumbers,
    ) -> None:  # fmt: skip
        self._taken, self._loss, self._optimizer = taken, loss, optimizer
        self._plan, self._mesh, self._numbers = plan, mesh, numbers
        self._counts: dict[int, int] = {}  # of good calls, by program's number
        self._traced: dict[int, dict[str, Any]] = {}  # by the same, modules' plain attributes at the first call
        self._told: set[str] = set()
        self._summed: Microbatches | None = None  # since the last step, where they are verified
        self._rows = 0  # steps that may sum up microbatches

    def due(self, compiled: Compiled, state: State) -> bool:
        """Whether this call of the program is verified. The same on every rank, since all made the same good calls."""
        if compiled.kind == "training" or (compiled.kind == "forward" and not self._meets()):
            return False
        if draws_otherwise(compiled, self._plan, self._mesh, self._told):
            return False
        if compiled.kind in ("accumulate", "last"):
            begins = is_due(self._plan.policy.verify, self._rows)
            if self._summed is None and not begins:
                return False
            count = float(state.sums[COUNT.key]) if state.sums else 0.0
            if not count:
                self._summed = Microbatches() if begins else None
            return self._summed is not None and self._summed.weight == count
        return is_due(self._plan.policy.verify, self._counts.get(compiled.number, 0))

    def _meets(self) -> bool:
        """Whether an evaluation is a call of all ranks: else each may make its own."""
        return self._mesh.world == 1 or (self._plan.placement.parameter and self._mesh.shard > 1)

    def returned(self, compiled: Compiled) -> None:
        """Counts a good call."""
        self._counts[compiled.number] = self._counts.get(compiled.number, 0) + 1
        self._rows += compiled.kind == "last"

    def run(
        self, compiled: Compiled, request: Request, state: State, rows: float, rules: Sequence[Rule],
        values: Mapping[str, float],
    ) -> Expected:  # fmt: skip
        """Runs the model eagerly on what the program is about to read. Collective; nothing is changed by it.

        ``rows``: how many this rank's batch has; ``values``: those of the optimizer's scheduled numbers.
        """
        begun = time.perf_counter()
        plain = attributes(self._taken.model)
        changed = changes(self._traced.setdefault(compiled.number, plain), plain)
        wait_for_host_memory(self._plan)
        own, failure, result = 0.0, None, None
        run = EagerRun(self._plan, self._mesh, state.parameters, _place_of)
        closed = compiled.capture.guards.closed.tensors.values()
        scale = float(state.scale["factor"]) if state.scale else 1.0
        evaluates = compiled.kind == "forward"
        compares = gradients_compared(self._plan.policy) and not evaluates
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
                    loss = whole(find_loss(result, self._loss is None))
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
        summed = (before or Microbatches()).with_one(own, weight, run.gradients)
        told = exchange((summed.loss, summed.weight), self._mesh)
        total = sum(one for _, one in told)
        mean = own if compiled.kind == "accumulate" else sum(value for value, _ in told) / total
        held = {
            name: {key: one.clone() for key, one in getattr(state, name).items()}
            for name in ("parameters", "buffers", "optimizer", "constants", "sums", "scale")
        }
        drawn = state.random.clone()
        expected = Expected(
            self, compiled, result, mean, changed, held, state.step.clone(), drawn, rules, dict(values), 0.0, summed
        )
        if compares and compiled.kind != "accumulate":
            run.gradients = summed.gradients
            self._average(run, self._mesh.tp / total / scale, expected)
        expected.took = time.perf_counter() - begun
        return expected

    @torch.no_grad()
    def _average(self, run: EagerRun, weight: float, expected: Expected) -> None:
        """The mean gradients of all ranks, as the program leaves or uses them. Collective."""
        plan, updates = self._plan, expected.compiled.updates
        cut = plan.placement.state if updates else plan.placement.gradient
        squares, largest = [0.0, 0.0], 0.0  # of tensors whole along tp, and of this rank's parts
        bound, least = gradient_bound(plan)
        for buffer, means in run.means(weight):
            flat = torch.zeros(buffer.numel, dtype=next(iter(means.values())).dtype if means else buffer.dtype,
                               device=plan.device)  # fmt: skip
            spread = torch.zeros_like(flat)
            for slot in buffer.slots:
                if (mean := means.get(slot.name)) is not None:
                    read_slot(flat, slot).copy_(mean)
                    most = largest_of(mean)
                    spread[slot.offset : slot.end] = bound * most + TINY
                    largest = max(largest, most)
            expected.reached |= means.keys()
            squares[buffer.split] += float(flat.double().square().sum()) if buffer.updated else 0.0
            own = [plan.own(one, self._mesh.shard_rank, cut).clone() for one in (flat, spread)]
            expected.gradients[buffer.key] = Gradient(*own)
        parts = sum(exchange(squares[1], self._mesh)) * self._mesh.tp / self._mesh.world
        expected.norm = (squares[0] + parts) ** 0.5
        for one in expected.gradients.values():
            one.spread += (one.spread > 0) * least * largest
            if updates and (clip := plan.policy.clip) is not None:
                factor = min(1.0, clip / (expected.norm + EPSILON))
                one.mean *= factor
                one.spread *= factor
            if updates and (value := plan.policy.clip_value) is not None:
                one.mean.clamp_(-value, value)

    def compare(self, expected: Expected, found: Any, outputs: Mapping[Port, torch.Tensor], state: State) -> None:
        """Raises `RankError` on every rank if the program's results, or its changes to the state, differ from eager
        PyTorch.

        Before that, the state is restored. Collective.
        """
        waited = time.perf_counter()
        wait_for_host_memory(self._plan)
        difference = self._difference(expected, found) or self._updates_differ(expected, outputs, state)
        label = expected.compiled.label
        told = differing(self._mesh, difference, expected.changed)
        if told is None:
            if expected.compiled.kind in ("accumulate", "last"):  # an evaluation between them leaves them
                self._summed = expected.summed if expected.compiled.kind == "accumulate" else None
            took = expected.took + time.perf_counter() - waited
            loss = "" if expected.compiled.kind == "forward" else f", loss {expected.mean:.6g}"
            said = f"{label} gave in eager PyTorch what its program gives{loss}. That took {took:.2f} s."
            self._tell(said, "compared")
            return
        with torch.no_grad():
            for name, values in expected.before.items():
                now = getattr(state, name)
                for key in now.keys() - values.keys():
                    del now[key]
                for key, value in values.items():
                    now[key].copy_(value)
            state.step.copy_(expected.step)
            state.random.copy_(expected.drawn)
            _ = state.random  # reading copies it to the generator
        self._taken.layout.written()
        raise RankError(f"Policy.verify: in {label}, {told}. {CURE}")

    def _difference(self, expected: Expected, found: Any) -> str | None:
        if expected.compiled.kind == "forward":
            return returned_otherwise(found, expected.result, self._plan)
        first = self._loss is None
        loss, theirs = find_loss(found, first), find_loss(expected.result, first)
        apart = furthest(torch.tensor(float(loss)), torch.tensor(expected.mean), bound_of(self._plan, theirs))
        if apart is not None:
            return f"the loss is {float(loss):.7g}, and {expected.mean:.7g} in eager PyTorch"
        return returned_otherwise(found, expected.result, self._plan, theirs)

    def _updates_differ(self, expected: Expected, outputs: Mapping[Port, torch.Tensor], state: State) -> str | None:
        """Says where gradients, their norm or the updates from them differ from eager PyTorch; None: nowhere."""
        if not expected.gradients or (OVERFLOW in outputs and bool(outputs[OVERFLOW])):
            return None
        plan, updates = self._plan, expected.compiled.updates
        if NORM in outputs and not self._near(norm := float(outputs[NORM]), expected.norm):
            return f"the gradient's norm is {norm:.7g}, and {expected.norm:.7g} in eager PyTorch"
        for buffer in (one for one in plan.buffers if one.key in expected.gradients):
            one = expected.gradients[buffer.key]
            for slot in buffer.slots:
                if slot.name in expected.reached and slot.name in expected.compiled.idle:
                    part, spread = (self._part(buffer, slot, v, updates) for v in (one.mean.abs(), one.spread))
                    if bool((part > spread).any()):
                        return f"{slot.name} has no gradient, and one of {float(part.max()):.3g} in eager PyTorch"
            mine = outputs.get(Port("out", "update" if updates else "gradient", buffer.key))
            low, high = one.mean - one.spread, one.mean + one.spread
            if mine is not None and (
                said := self._outside(buffer, mine, (low, high, high), updates, one.mean.isfinite())
            ):
                return f"the gradient of {said}"
        return self._updated_otherwise(expected, state) if updates else None

    def _updated_otherwise(self, expected: Expected, state: State) -> str | None:
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
            self._tell(f"the update of {type(self._optimizer).__name__} is not compared: {error}")
            return None
        for (key, name), bounds in between.items():
            before, after = (
                optimizer[f"{key}.{name}"] if name else parameters[key]
                for parameters, optimizer in (
                    (expected.before["parameters"], expected.before["optimizer"]),
                    (state.parameters, state.optimizer),
                )
            )
            tells = expected.gradients[key].tells
            if said := self._outside(self._plan.buffer(key), after, (*bounds, before), True, tells):
                what = f"the optimizer's {name} of " if name else ""
                return f"{what}{said}, after its update"
        return None

    def _update(
        self, expected: Expected, factor: float, idle: Collection[str]
    ) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        """Yields shards and per-element state after the optimizer's own step on gradients moved by ``factor``."""
        shards = {key: value.clone() for key, value in expected.before["parameters"].items()}
        state = {key: value.clone() for key, value in expected.before["optimizer"].items()}
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

    def _outside(
        self, buffer: Buffer, mine: torch.Tensor, bounds: Sequence[torch.Tensor], updates: bool, tells: torch.Tensor
    ) -> str | None:
        """Names the buffer's first parameter with an element outside of these bounds, and says how far off it is.
        ``bounds``: the least, the most, and the values that it was made of, whose rounding it has."""
        for slot in buffer.slots:
            own, least, most, source = (self._part(buffer, slot, one, updates).double() for one in (mine, *bounds))
            slack = 4 * torch.finfo(mine.dtype).eps * torch.stack([least, most, source]).abs().amax(0)
            slack += (most - least) / 2 + TINY
            wrong = ~((own >= least - slack) & (own <= most + slack)) & ~(own.isnan() & (least.isnan() | most.isnan()))
            wrong &= self._part(buffer, slot, tells, updates)
            if said := first_off(slot.name, own, (least + most) / 2, wrong):
                return said
        return None

    def _part(self, buffer: Buffer, slot: Slot, values: torch.Tensor, updates: bool) -> torch.Tensor:
        """This rank's elements of a parameter."""
        placement = self._plan.placement
        cut = placement.state if updates else placement.gradient
        return self._plan.part(buffer, slot, self._mesh.shard_rank, cut).of(values.detach())

    def _near(self, mine: float, other: float) -> bool:
        near = mine == other or abs(mine - other) <= 10 * gradient_bound(self._plan)[0] * abs(other) + TINY
        return near or (math.isnan(mine) and math.isnan(other))

    def _tell(self, said: str, once: str | None = None) -> None:
        tell_once(self._told, self._mesh, said, once)


def _place_of(tensor: Any) -> Place | None:
    return (tensor._sharded_place.buffer.key, tensor._sharded_place.name) if is_live(tensor) else None


def gradients_compared(policy: Policy) -> bool:
    return policy.verify_gradients and policy.wire is None and there("backward under a mode")


def tell_once(told: set[str], mesh: Mesh, said: str, once: str | None = None) -> None:
    """Writes to the log of rank 0, unless something was ``told`` by this name before."""
    if (once or said) not in told and mesh.rank == 0:
        log.warning("Policy.verify: %s", said)
    told.add(once or said)


def draws_otherwise(compiled: Compiled, plan: Plan, mesh: Mesh, told: set[str]) -> bool:
    """Whether the program draws other random numbers than eager PyTorch; the log says so once."""
    if not (compiled.random and (plan.device.type == "cuda" or mesh.tp > 1)):
        return False
    why = "draws random numbers, which on a GPU, and along tp, are others than in eager PyTorch, so it is not compared."
    tell_once(told, mesh, f"{compiled.label} {why}")
    return True


def is_due(every: bool | int, count: int) -> bool:
    """Whether the call of a program that follows ``count`` good ones is compared."""
    return count < FIRST or (every is not True and count % every == 0)


def bound_of(plan: Plan, value: torch.Tensor) -> tuple[float, float]:
    """The bound for what forward returns, by the coarsest dtype that the model computes in."""
    dtypes = [value.dtype, *map(plan.compute_dtype, plan.buffers)]
    return _by_dtype(dtypes, value.device, BOUNDS, HALF)


def gradient_bound(plan: Plan) -> tuple[float, float]:
    """The bound for an element of a gradient: relative to the parameter's largest element, and to the model's."""
    dtypes = [of(buffer) for buffer in plan.buffers for of in (plan.compute_dtype, plan.reduce_dtype)]
    return _by_dtype(dtypes, plan.device, GRADIENTS, HALF_GRADIENTS)


def _by_dtype(
    dtypes: Sequence[torch.dtype], device: torch.device, bounds: Mapping[torch.dtype, tuple[float, float]],
    half: tuple[float, float],
) -> tuple[float, float]:  # fmt: skip
    real = [dtype for dtype in dtypes if dtype.is_floating_point]
    coarse = max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    return half if torch.is_autocast_enabled(device.type) else bounds.get(coarse, half)


def differing(mesh: Mesh, said: str | None, changed: str) -> str | None:
    """The first rank's difference, with what changed there since the trace; None if no rank has one. Collective."""
    told = said_by(f"{said}{changed}" if said is not None else None, mesh)
    return next((f"on rank {rank}, {one}" for rank, one in enumerate(told) if one is not None), None)


def first_off(name: str, mine: torch.Tensor, theirs: torch.Tensor, wrong: torch.Tensor) -> str | None:
    """Describes the first element that is ``wrong``; None if none is."""
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{name} is {float(mine[place]):.7g} at an element that is {float(theirs[place]):.7g} in eager PyTorch "
        f"({int(wrong.sum())} of {wrong.numel()} are off)"
    )


def returned_otherwise(mine: Any, theirs: Any, plan: Plan, apart: Any = None) -> str | None:
    """Says where a program's results differ from eager PyTorch's; ``apart``: which of the latter is not compared."""
    values, others = pytree.tree_leaves(mine), pytree.tree_leaves(theirs)
    if len(values) != len(others):
        return f"{len(values)} values were returned, and {len(others)} in eager PyTorch"
    for place, (one, other) in enumerate(zip(values, others, strict=True)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and other is not apart:
            one, other = own_part(one.detach()), own_part(other.detach())
            if one.shape != other.shape:
                return f"value {place} that was returned has shape {list(one.shape)}, and {list(other.shape)} there"
            if (worst := furthest(one, other, bound_of(plan, other))) is not None:
                return f"value {place} that was returned is off from that of eager PyTorch by {worst:.3g}"
    return None


def attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Plain values that modules hold, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PLAIN)
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which attributes differ from those at the program's first call, for a message."""
    found = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({**before, **now})
        if (before.get(name), type(before.get(name))) != (now.get(name), type(now.get(name)))
    ]
    return f" (since the first such call, {'; '.join(found[:3])})" if found else ""


def largest_of(values: torch.Tensor) -> float:
    """The largest magnitude that is finite."""
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def furthest(mine: torch.Tensor, other: torch.Tensor, bound: tuple[float, float]) -> float | None:
    """The largest difference among those that rounding does not explain; None if there are none."""
    one, two = mine.detach().double(), other.detach().double()
    difference = (one - two).abs()
    size = two.abs().nan_to_num(posinf=0.0).max() if two.numel() else 0.0
    same = (one == two) | (one.isnan() & two.isnan())
    wrong = ~same & ~(difference <= bound[0] * size + bound[1])
    return float(difference[wrong].nan_to_num(nan=float("inf")).max()) if bool(wrong.any()) else None
