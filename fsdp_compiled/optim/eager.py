"""An optimizer that cannot be traced, but is element-wise, runs as it is: its class, on pieces of the shards.

    state["queue"].append(grad.clone())        a container that grows: no graph of it serves every step
    p.add_(grad, alpha=-float(group["lr"]))    a number that leaves the trace

A *piece* is this rank's part of one parameter, 1-d. The update may run on pieces if that comes to the same as running
it on whole parameters, which is tried here: the class makes some steps on small parameters of several shapes and on
pieces of them, with rates that change. On pieces every operator is looked at as it is called, in the trial and in
training (`PointwiseOnly`): one that mixes elements, as a norm does, would give each rank another number.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.optim.discovery import begin_of
from fsdp_compiled.optim.elementwise import keeps_places
from fsdp_compiled.optim.groups import hyper, options_of, scheduled, with_hyper
from fsdp_compiled.optim.trial import BOUNDS, FACTORS, LATE
from fsdp_compiled.optim.twin import (
    Refused,
    attributes_of,
    fresh_of,
    meaning,
    named_state,
    plain_options,
    step_of,
    twin_of,
)

aten = torch.ops.aten
Guard: TypeAlias = Callable[[Any], AbstractContextManager[Any]]  # around a step of this side
Calls: TypeAlias = Callable[[list[nn.Parameter]], list[list[nn.Parameter]]]
# What of all parameters it is given, by which they are seen, what is allowed; in which calls, where these are several.
Way: TypeAlias = (
    tuple[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], Guard]
    | tuple[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], Guard, Calls]
)
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (), (2, 1, 4))
STEPS, UNCHANGED, MOST = len(FACTORS), 4, 128  # at least; without a new entry in the state; before the trial gives up
# On 1-d tensors these move nothing, if all shapes are the same.
SAME = frozenset(
    getattr(aten, name).default
    for name in "view _unsafe_view reshape expand t permute squeeze _reshape_alias new_zeros new_ones new_full "
    "new_empty empty_strided new_empty_strided".split()
    if hasattr(getattr(aten, name, None), "default")
) | {aten.empty.memory_format}
MADE = frozenset(getattr(aten, name).default for name in ("new_zeros", "new_ones", "new_full", "new_empty"))
REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


class PointwiseOnly(TorchDispatchMode):
    """Inside, an operator that mixes the elements of a tensor, moves them, or draws numbers, raises `Refused`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(f"its step draws random numbers ({func})")
        name = func.overloadpacket.__name__
        lists = name.startswith("_foreach_") and name not in REDUCING
        known = lists or func in SAME or func.namespace == "prim" or keeps_places(func)
        if not known and _shapes((args, kwargs)):
            raise Refused(f"its step uses {func}, which does not keep every element where it is")
        result = func(*args, **kwargs)
        shapes = _shapes((args, kwargs, result))
        if not known and shapes:
            raise Refused(f"its step uses {func}, which does not keep every element where it is")
        if not lists and (len(shapes) > 1 or any(len(shape) > 1 for shape in shapes)):
            raise Refused(f"its step uses {func} on tensors of other shapes than its parameter")
        one = (
            tuple(result.shape) in ((), (1,)) if isinstance(result, torch.Tensor) else isinstance(result, bool | float)
        )
        if shapes and one and func not in MADE:
            raise Refused(f"its step makes one number of a parameter's elements ({func})")
        return result


def _shapes(values: Any) -> set[tuple[int, ...]]:
    """Of tensors that are not one number."""
    found = {tuple(leaf.shape) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    return found - {(), (1,)}


def check_runs_on_pieces(optimizer: Optimizer, group: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> bool:
    """Raises `Refused` where the class does on pieces anything else than on parameters.

    Returns whether its code divides by the rate, and fails at a rate of zero.
    """
    divides = False
    for dtype in dict.fromkeys((torch.float64, *dtypes)):
        try:
            _try(optimizer, group, dtype, FACTORS)
        except ZeroDivisionError:
            divides = True
            _try(optimizer, group, dtype, tuple(filter(None, FACTORS)))
    return divides


class Side:
    """The class's own steps on these parameters. ``guard`` looks at every operator.

    ``calls``: which of them each call of a step is for.
    """

    def __init__(
        self, optimizer: Optimizer, options: Mapping[str, Any], begin: Sequence[torch.Tensor], guard: Guard,
        notes: Mapping[str, Any], calls: Calls = lambda parameters: [parameters],
    ) -> None:  # fmt: skip
        self.calls = calls
        self.parameters = [nn.Parameter(value) for value in begin]
        for parameter in self.parameters:
            parameter.__dict__.update(notes)
        state: Any = defaultdict(dict)
        state |= named_state(optimizer)
        probe = fresh_of(optimizer, options, nn.Parameter(torch.ones(2, 3)))
        for parameter in self.parameters if probe is not None and any(probe.state.values()) else ():
            if (mine := fresh_of(optimizer, options, parameter)) is not None and mine.state.get(parameter):
                state[parameter] = dict(mine.state[parameter])
        self.twin = twin_of(optimizer, [{**options, "params": self.parameters}], state)
        self.guard = guard

    def step(self, gradients: Sequence[torch.Tensor], hypers: Mapping[str, float]) -> None:
        group = self.twin.param_groups[0]
        for name, value in hypers.items():
            group.update(with_hyper(group, name, value))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        with torch.no_grad(), self.guard(self):
            for some in self.calls(self.parameters):
                group["params"] = some
                step_of(type(self.twin))(self.twin)
        group["params"] = self.parameters

    def numbers(self) -> dict[tuple[str, str], float]:
        """What it keeps as numbers, by where."""
        return {
            (place, name): float(value)
            for place, holders in self._holders().items()
            for name, value in (holders[0] if holders else {}).items()
            if type(value) in (int, float) or (isinstance(value, torch.Tensor) and not value.dim())
        }

    def move_on(self, counters: Sequence[tuple[str, str]]) -> None:
        """Sets counters far ahead."""
        for place, name in counters:
            for holder in self._holders()[place]:
                holder[name] = holder[name] + LATE

    def _holders(self) -> dict[str, list[Any]]:
        kept = [self.twin.state[parameter] for parameter in self.parameters if parameter in self.twin.state]
        return {"group": self.twin.param_groups, "attribute": [vars(self.twin)], "state": kept}

    def entries(self) -> int:
        """How much it keeps: what grows makes this grow."""
        kept = [self.twin.param_groups[0], attributes_of(self.twin)]
        return len(pytree.tree_leaves((kept, list(self.twin.state.values()))))


def _pieces(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each an empty one, and two; views."""
    found = []
    for value in values:
        flat = value.reshape(-1)
        cut = -(-len(flat) // 3)
        found += [flat[:0], flat[:cut], flat[cut:]]
    return found


def _try(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, factors: Sequence[float]) -> None:
    def compare(sides: Sequence[Side], begin: Sequence[torch.Tensor], index: int) -> None:
        theirs = _pieces([parameter.detach() for parameter in sides[0].parameters])
        mine = [parameter.detach() for parameter in sides[1].parameters]
        if (off := difference(mine, theirs, _pieces(begin), dtype)) is not None:
            raise Refused(
                f"on pieces of parameters it does not do what it does on parameters: at step {index + 1} {off}"
            )

    ways: list[Way] = [(list, nullcontext), (_pieces, lambda _: PointwiseOnly())]
    run_beside(optimizer, group, dtype, factors, SHAPES, ways, compare)


def run_beside(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, factors: Sequence[float],
    shapes: Sequence[tuple[int, ...]], ways: Sequence[Way],
    compare: Callable[[Sequence[Side], Sequence[torch.Tensor], int], None], steady: float = 0.0,
) -> None:  # fmt: skip
    """Makes the same steps on small parameters in several ways, side by side, and compares after each.

    ``steady``: which part of a gradient is the same at all steps. Raises `Refused` where a step fails, or where what it
    keeps does not stop growing.
    """
    draw = torch.Generator().manual_seed(0)
    options = plain_options(options_of(group))
    options = begin_of(optimizer, options, fresh_of(optimizer, options, nn.Parameter(torch.ones(2, 3, dtype=dtype))))
    begin = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    rate = abs(float(group.get("lr", 0.0))) or 0.01

    def each(call: Callable[[Side, Callable[[Any], Any]], Any]) -> None:
        for side, (select, *_) in zip(sides, ways, strict=True):
            try:
                call(side, select)
            except (Refused, ZeroDivisionError):
                raise
            except Exception as error:
                raise meaning(error, "its step fails on small parameters") from error

    notes: dict[str, Any] = next((copy.copy(vars(p)) for p in group["params"] if vars(p)), {})
    sides = [
        Side(optimizer, options, select([value.clone() for value in begin]), guard, notes, *calls)
        for select, guard, *calls in ways
    ]
    counted: list[dict[tuple[str, str], float]] = []
    sizes: list[int] = []
    last = None
    drawn = [partial(_gradient, shape, draw) for shape in shapes]
    always: list[torch.Tensor] = []
    for index in itertools.count():
        gradients = [gradient() for gradient in drawn]
        always = always or gradients
        gradients = [(one + steady * (first - one)).to(dtype) for one, first in zip(gradients, always, strict=True)]
        hypers = {name: hyper(group, name) * (1 - 0.05 * (index % 3)) for name in scheduled(group) if name != "lr"}
        hypers |= {"lr": rate * factors[index % len(factors)]} if "lr" in group else {}
        each(lambda side, select, given=gradients, now=hypers: side.step(select(given), now))  # type: ignore[misc]
        compare(sides, begin, index)
        counted = [*counted[-2:], sides[0].numbers()]
        sizes = [*sizes[1 - UNCHANGED :], sides[0].entries()]
        if last is not None:
            if index == last:
                return
        elif index + 1 >= STEPS and len(sizes) == UNCHANGED and len(set(sizes)) == 1:
            far = [name for name in counted[-1] if _counts(counted, name)]
            each(lambda side, _, far=far: side.move_on(far))  # type: ignore[misc]
            last = index + 3
        elif index == MOST:
            raise Refused(f"its state still grows after {MOST} steps")


def _gradient(shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Of elements of many sizes, float64."""
    sizes = 10 ** (3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 2)
    return torch.randn(shape, generator=draw, dtype=torch.float64) * sizes


def _counts(rows: Sequence[Mapping[Any, float]], name: Any) -> bool:
    values = [row.get(name, 0.0) for row in rows]
    return len(values) == 3 and all(b - a == 1 for a, b in itertools.pairwise(values))


def difference(
    mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], begin: Sequence[torch.Tensor], dtype: torch.dtype
) -> str | None:
    """How far these are off, where it is more than rounding explains."""
    if not theirs:
        return None
    ours, wanted, start = (torch.cat([value.reshape(-1) for value in row]) for row in (mine, theirs, begin))
    moved = float((wanted.double() - start.double()).nan_to_num().abs().max())
    bound = BOUNDS[dtype] * moved + 4 * torch.finfo(dtype).eps * wanted.double().abs()
    off = (ours.double() - wanted.double()).abs()
    wrong = ~((ours == wanted) | (ours.isnan() & wanted.isnan())) & ~(off <= bound)
    if not bool(wrong.any()):
        return None
    return f"an element is off by {float(off[wrong].max()):.2g}, where the one that moved most moved by {moved:.2g}"
