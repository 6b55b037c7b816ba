"""A step held against eager PyTorch: the user's own model runs on the same weights, batch, modes and random numbers.

    verify=True    the first two calls of each program that trains      verify=1000    and every 1000th after them

    eager run      forward and loss, by the model's own code; each unit is gathered while it is read, and then freed
    program        the step itself
    compare        loss and what else was returned; where they differ, state and random numbers are put back, and
                   every rank raises

The eager run reads parameters by what each rank says of its place, not through the program's process groups. What it
changes is put back: buffers, tensors and containers that modules, the loss's closure and its globals hold, the batch,
and random states. Objects that are reached in other ways, and what leaves the process (files, prints), are not.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.fake_inputs import casting
from fsdp_compiled.capture.mutations import PLAIN
from fsdp_compiled.capture.objective import find_loss
from fsdp_compiled.distributed.mesh import Mesh, RankError, exchange
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.plan import Buffer, Plan
from fsdp_compiled.runtime.host_memory import wait_for_host_memory
from fsdp_compiled.runtime.managed_model import ManagedModel
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.rng import RandomNumbers
from fsdp_compiled.runtime.shard_model import read_slot
from fsdp_compiled.runtime.state import State

FIRST = 2  # calls of each program that are verified, the one that compiled it among them
ALIVE = 4  # buffers that stay gathered at once
# How far two ways to compute one number may be apart, as a part of it, and at the least.
BOUNDS = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
HALF = (3e-2, 1e-3)
CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
CURE = (
    "The state was put back to what it was before the step. If the code changed since it was traced in a way that is "
    "not seen, build the Sharded again, or change a guarded value; Policy(verify=False) turns the comparison off."
)
log = logging.getLogger("fsdp_compiled")


class Verification:
    """Which calls of one `Sharded` are verified, and how."""

    def __init__(
        self, taken: ManagedModel, loss: Callable[..., Any] | None, plan: Plan, mesh: Mesh, numbers: RandomNumbers
    ) -> None:
        self._taken, self._loss, self._plan, self._mesh, self._numbers = taken, loss, plan, mesh, numbers
        self._counts: dict[int, int] = {}  # of good calls, by program's number
        self._traced: dict[int, dict[str, Any]] = {}  # plain attributes of modules at the first, by the same
        self._told = False

    def due(self, compiled: Compiled) -> bool:
        """Whether this call of the program is one. The same on every rank, which made the same good calls."""
        every = self._plan.policy.verify
        if compiled.kind not in ("step", "gradient"):
            return False
        count = self._counts.get(compiled.number, 0)
        if compiled.random and self._plan.device.type == "cuda":
            if not self._told and self._mesh.rank == 0:
                log.warning("Policy.verify: %s draws random numbers, which on a GPU come in other orders than eager "
                            "PyTorch, so it is not compared.", compiled.label)  # fmt: skip
            self._told = True
            return False
        return count < FIRST or (every is not True and count % every == 0)

    def returned(self, compiled: Compiled) -> None:
        """Counts a good call."""
        self._counts[compiled.number] = self._counts.get(compiled.number, 0) + 1

    def run(self, compiled: Compiled, request: Request, state: State, rows: float) -> Expected:
        """Runs the model eagerly on what the program is about to read. Collective; nothing is changed by it."""
        begun = time.perf_counter()
        plain = _attributes(self._taken.model)
        changed = _changes(self._traced.setdefault(compiled.number, plain), plain)
        wait_for_host_memory(self._plan)
        own, failure, result = 0.0, None, None
        weights = _Weights(self._plan, self._mesh, state.parameters)
        closed = compiled.capture.guards.closed.tensors.values()
        try:
            with (
                self._taken.open() as model,
                _put_back(model, self._loss, [*request.tensors, *closed, *request.closed.values()]),
                self._numbers.repeated(state.drawn_from),
                request.modes.entered(),
                torch.enable_grad(),
                casting(model, self._plan.policy.precision),
                torch.autograd.graph.saved_tensors_hooks(weights.pack, weights.unpack),
                weights,
            ):
                call = model if self._loss is None else self._loss
                given = request.batch if self._loss is None else (model, *request.batch)
                result = call(*given, **request.named)
                result = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), result)
            own = float(find_loss(result, self._loss is None))
        except Exception as error:
            failure = error
        weights.end()
        told = exchange((own, rows, None if failure is None else f"{type(failure).__name__}: {failure}"), self._mesh)
        for rank, (_, _, said) in enumerate(told):
            if said is not None:
                raise RankError(
                    f"Policy.verify: on rank {rank} the model does not run in eager PyTorch, where {compiled.label} "
                    f"would run as it was traced{changed}. It said:\n{said}\nNothing was updated."
                ) from failure
        weighed = self._plan.policy.weigh == "rows"
        total = sum(count if weighed else 1.0 for _, count, _ in told)
        mean = sum(value * (count if weighed else 1.0) for value, count, _ in told if count or not weighed) / total
        drawn = state.random.clone()
        before = {
            name: {key: one.clone() for key, one in getattr(state, name).items()}
            for name in ("parameters", "buffers", "optimizer", "constants", "sums", "scale")
        }
        return Expected(
            self, compiled, result, mean, changed, before, state.step.clone(), drawn, begun, time.perf_counter()
        )

    def compare(self, expected: Expected, found: Any, state: State) -> None:
        """Raises `RankError` on every rank where what the program returned is not what eager PyTorch gave.

        Before that, the state is put back to what it was. Collective.
        """
        waited = time.perf_counter()
        wait_for_host_memory(self._plan)
        difference = self._difference(expected, found)
        label, changed = expected.compiled.label, expected.changed
        told = exchange((difference, changed), self._mesh)
        if all(said is None for said, _ in told):
            if not self._told and self._mesh.rank == 0:
                took = expected.ended - expected.begun + time.perf_counter() - waited
                log.warning(
                    "Policy.verify: %s gave in eager PyTorch what its program gives, loss %.6g. That took %.2f s.",
                    label, expected.mean, took,
                )  # fmt: skip
            self._told = True
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
            _ = state.random  # which carries it over to the generator
        self._taken.layout.written()
        rank = next(rank for rank, (said, _) in enumerate(told) if said is not None)
        raise RankError(f"Policy.verify: in {label}, on rank {rank}, {told[rank][0]}{told[rank][1]}. {CURE}")

    def _difference(self, expected: Expected, found: Any) -> str | None:
        first = self._loss is None
        loss, theirs = find_loss(found, first), find_loss(expected.result, first)
        said = _apart(float(loss), expected.mean, self._bound(theirs))
        if said is not None:
            return f"the loss is {float(loss):.7g}, and {expected.mean:.7g} in eager PyTorch"
        mine, others = pytree.tree_leaves(found), pytree.tree_leaves(expected.result)
        if len(mine) != len(others):
            return f"{len(mine)} values were returned, and {len(others)} in eager PyTorch"
        for place, (one, other) in enumerate(zip(mine, others, strict=True)):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and other is not theirs:
                if one.shape != other.shape:
                    return f"value {place} that was returned has shape {list(one.shape)}, and {list(other.shape)} there"
                if (worst := _furthest(one, other, self._bound(other))) is not None:
                    return f"value {place} that was returned is off from that of eager PyTorch by {worst:.3g}"
        return None

    def _bound(self, value: torch.Tensor) -> tuple[float, float]:
        """By the coarsest dtype that the model computes in."""
        dtypes = {value.dtype, *(self._plan.compute_dtype(buffer) for buffer in self._plan.buffers)}
        real = [dtype for dtype in dtypes if dtype.is_floating_point]
        coarse = max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        return HALF if torch.is_autocast_enabled(value.device.type) else BOUNDS.get(coarse, HALF)


class Expected:
    """What eager PyTorch gave, and what the state was then."""

    def __init__(
        self, owner: Verification, compiled: Compiled, result: Any, mean: float, changed: str,
        before: Mapping[str, Mapping[str, torch.Tensor]], step: torch.Tensor, drawn: torch.Tensor,
        begun: float, ended: float,
    ) -> None:  # fmt: skip
        self.owner, self.compiled, self.result, self.mean, self.changed = owner, compiled, result, mean, changed
        self.before, self.step, self.drawn = before, step, drawn
        self.begun, self.ended = begun, ended


class _Weights(TorchFunctionMode):
    """Inside, an operator that is given a live parameter gets the whole one, gathered with its buffer for as long.

    Ranks may read units in other orders, or not all of them: before each gather they tell which one they want, and
    all take part in all of these, until nobody wants one. So a model that takes other ways on two ranks hangs nobody.
    """

    def __init__(self, plan: Plan, mesh: Mesh, shards: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._plan, self._mesh, self._shards = plan, mesh, shards
        self._buffers = {buffer.key: buffer for buffer in plan.buffers}
        self._alive: OrderedDict[str, torch.Tensor] = OrderedDict()  # whole buffers, the last read last
        self._leaves: dict[str, dict[str, torch.Tensor]] = {}  # the parameters in them
        self._cut = plan.placement.parameter and mesh.shard > 1
        self._owners = exchange(mesh.shard_rank, mesh) if self._cut else []

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda one: self._whole(one) if is_live(one) else one, (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def _whole(self, parameter: Any) -> torch.Tensor:
        place = parameter._sharded_place
        flat = self._flat(place.buffer.key)
        leaves = self._leaves[place.buffer.key]
        if place.name not in leaves:
            leaf = read_slot(flat, place.slot).detach()
            leaves[place.name] = leaf.requires_grad_(parameter.requires_grad)
        return leaves[place.name]

    def _flat(self, key: str) -> torch.Tensor:
        """The whole buffer, in the dtype that is computed in."""
        if key not in self._alive:
            found = self._round(key)[key] if self._cut else self._own(self._buffers[key])
            self._alive[key], self._leaves[key] = found, {}
            while len(self._alive) > ALIVE:
                oldest, _ = self._alive.popitem(last=False)
                del self._leaves[oldest]
        self._alive.move_to_end(key)
        return self._alive[key]

    def _own(self, buffer: Buffer) -> torch.Tensor:
        return self._shards[buffer.key].detach().to(self._plan.device, self._plan.compute_dtype(buffer))

    def _sent(self, own: torch.Tensor) -> torch.Tensor:
        """As the wire rounds it."""
        if (form := self._plan.policy.wire) is None or not own.is_floating_point():
            return own
        return operators.unpack(operators.pack(own, 1, form=form), 1, own.numel(), own.dtype, form=form)

    def _round(self, wanted: str | None) -> dict[str, torch.Tensor]:
        """What any rank wants now, gathered: ``[numel / shard]`` on each -> ``[numel]``. Collective."""
        found = {}
        for key in sorted({one for one in exchange(wanted, self._mesh) if one is not None}):
            own = self._sent(self._own(self._buffers[key]).contiguous())
            parts = own.new_empty(len(self._owners) * own.numel())
            dist.all_gather_into_tensor(parts, own)
            rows = parts.view(len(self._owners), -1)
            found[key] = torch.cat([rows[self._owners.index(place)] for place in range(self._mesh.shard)])
        return found

    def end(self) -> None:
        """Takes part in what other ranks still read. Collective."""
        self._alive.clear()
        self._leaves.clear()
        while self._cut and self._round(None):
            pass

    def pack(self, tensor: torch.Tensor) -> Any:
        """Of a whole parameter, autograd keeps where it lies; of all else, the tensor."""
        start = tensor.untyped_storage().data_ptr()
        for key, flat in self._alive.items():
            if self._cut and flat.untyped_storage().data_ptr() == start:
                return key, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        key, size, stride, offset = kept
        return self._flat(key).as_strided(size, stride, offset)


@contextlib.contextmanager
def _put_back(model: nn.Module, loss: Callable[..., Any] | None, others: Sequence[torch.Tensor]) -> Iterator[None]:
    """At its end, what the model's code may have written is what it was."""
    codes = [_forward(module) for module in model.modules()]
    codes += [
        hook for one in model.modules() for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values())
    ]
    functions = [one for one in (loss, getattr(loss, "__func__", None), *codes) if one is not None]
    cells = [cell for one in functions for cell in getattr(one, "__closure__", None) or () if _filled(cell)]
    contents = [cell.cell_contents for cell in cells]
    tables: list[dict[str, Any]] = [vars(module) for module in model.modules()]
    tables += [vars(loss)] if hasattr(loss, "__dict__") and not isinstance(loss, nn.Module) else []
    held = [value for table in tables for value in table.values()] + contents
    names = [(one.__globals__, name) for one in functions if hasattr(one, "__code__") for name in one.__code__.co_names]
    names = [(table, name) for table, name in names if name in table]
    held += [table[name] for table, name in names]
    held += [value for one in functions for value in getattr(one, "__defaults__", None) or ()]
    globals_before = [table[name] for table, name in names]
    boxes = list({id(one): one for one in [*tables, *held] if type(one) in CONTAINERS}.values())
    copies = [one.copy() for one in boxes]
    inside = [one for box in boxes for one in (box.values() if isinstance(box, dict) else box)]
    tensors = {id(one): one for one in [*held, *inside, *others] if isinstance(one, torch.Tensor) and not is_live(one)}
    kept = [(one, one.detach().clone()) for one in tensors.values() if not one.is_inference()]
    states = random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
        for box, copy in zip(boxes, copies, strict=True):
            if not _same(box, copy):
                box.clear()
                box.extend(copy) if isinstance(box, list | deque) else box.update(copy)
        for (table, name), value in zip(names, globals_before, strict=True):
            table[name] = value
        for cell, value in zip(cells, contents, strict=True):
            cell.cell_contents = value
        with torch.no_grad():
            for tensor, value in kept:  # not by version: BatchNorm's kernels write their statistics past it
                if not torch.equal(tensor, value):
                    tensor.detach().copy_(value)


def _forward(module: nn.Module) -> Any:
    return getattr(type(module).forward, "__wrapped__", type(module).forward)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False


def _same(box: Any, copy: Any) -> bool:
    """Whether a container holds the same objects, in the same order, as it did."""
    mine, others = [[*one.items()] if isinstance(one, dict) else [*one] for one in (box, copy)]
    flat = [[part for item in one for part in (item if isinstance(item, tuple) else (item,))] for one in (mine, others)]
    return len(mine) == len(others) and len(flat[0]) == len(flat[1]) and all(a is b for a, b in zip(*flat, strict=True))


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Plain values that modules hold, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PLAIN)
    }


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which of them are others than at the first call of the program, for a message."""
    found = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({**before, **now})
        if (before.get(name), type(before.get(name))) != (now.get(name), type(now.get(name)))
    ]
    return f" (since the first such call, {'; '.join(found[:3])})" if found else ""


def _apart(mine: float, other: float, bound: tuple[float, float]) -> str | None:
    return None if _furthest(torch.tensor(mine), torch.tensor(other), bound) is None else "apart"


def _furthest(mine: torch.Tensor, other: torch.Tensor, bound: tuple[float, float]) -> float | None:
    """The largest difference, where it is more than rounding explains."""
    one, two = mine.detach().double(), other.detach().double()
    difference = (one - two).abs()
    size = two.abs().nan_to_num(posinf=0.0).max() if two.numel() else 0.0
    same = (one == two) | (one.isnan() & two.isnan())
    wrong = ~same & ~(difference <= bound[0] * size + bound[1])
    return float(difference[wrong].nan_to_num(nan=float("inf")).max()) if bool(wrong.any()) else None
